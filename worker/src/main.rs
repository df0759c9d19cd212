//! One worker; started by an operator, which hands it a bootstrap line on standard input.

fn main() -> std::process::ExitCode {
    moe_worker::life::process::main()
}
