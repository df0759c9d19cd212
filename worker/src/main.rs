//! One worker; started by an operator, which hands it a bootstrap line on standard input. With
//! `engine PID` one of its engines.

fn main() -> std::process::ExitCode {
    let mut words = std::env::args().skip(1);
    match (words.next().as_deref(), words.next()) {
        (Some("engine"), Some(worker)) => moe_worker::life::process::engine(&worker),
        _ => moe_worker::life::process::main(),
    }
}
