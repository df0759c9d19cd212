//! Commands: each parses its arguments, calls one function, and turns the result into an exit code:
//! 0 done, 1 failed, 2 the user's input, 3 data or checkpoint refused, 75 try again,
//! 130 interrupted.

#[macro_use]
pub(crate) mod out;
pub(crate) mod args;
pub mod bar;
pub mod bench;
pub mod checkpoint;
pub mod crd;
pub mod data;
pub mod disk;
pub mod doctor;
pub mod operator;
pub mod eval;
pub mod examples;
pub mod explain;
pub mod generate;
pub mod init;
pub mod kernels;
mod log_lines;
pub(crate) mod machine;
pub mod moe;
pub mod plan;
pub mod preflight;
pub(crate) mod profiles;
pub(crate) mod progress;
pub mod report;
mod room;
pub mod run;
pub mod runs;
mod spoken;
pub mod validate;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use moe::CalledAs;
use moe_worker::failure::chain;
use moe_worker::life::variables;
use moejob_protocol::pod::ENV_WORKER;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The version, and the commit that a release was built from.
pub const VERSION: &str = env!("MOEJOB_VERSION");

/// Trains mixture-of-experts models from a manifest, on one machine or on a cluster.
#[derive(Parser)]
#[command(name = "moejob", version = VERSION, max_term_width = 100)]
pub struct Cli {
    /// Logs as JSON lines on standard error.
    #[arg(long, global = true)]
    json_logs: bool,
    /// What is logged: error, warn, info, debug, or a filter such as `moejob=debug`.
    /// By default warn, and info of a worker in a pod.
    #[arg(long, global = true, env = "MOEJOB_LOG")]
    log: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a whole job on this machine.
    #[command(alias = "train")]
    Run(run::RunArgs),
    /// Name every problem of manifests, with line and column.
    Validate(validate::ValidateArgs),
    /// Show the plan of a manifest, its reasons and what-ifs, offline.
    Plan(plan::PlanArgs),
    /// List, show, verify, import and export checkpoints.
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Measure the loss of a checkpoint or of Hugging Face weights on data.
    Eval(eval::EvalArgs),
    /// Let a model go on with a text; at a terminal, with one after the other.
    Generate(generate::GenerateArgs),
    /// Say what a field of the manifest means: type, default, when it may change.
    Explain(explain::ExplainArgs),
    /// Make a manifest to begin with; with --data one that fits the data and this machine.
    Init(init::InitArgs),
    /// Write the lessons with their texts: all of them, or lesson N.
    Examples(examples::ExamplesArgs),
    /// List the runs of this machine, and how far each is.
    Ls(runs::LsArgs),
    /// Show one run: where it stands, and what has happened.
    Show(runs::ShowArgs),
    /// Print the newest steps or events of a run.
    Tail(runs::TailArgs),
    /// Draw what runs have recorded, as one page of HTML.
    Report(report::ReportArgs),
    /// Inspect data, and tokenize it ahead of training.
    #[command(subcommand)]
    Data(data::DataCommand),
    /// Measure how fast this machine trains a model, on tokens made up in memory.
    Bench(bench::BenchArgs),
    /// Compile the kernels of presets ahead of time, such as for an image; takes no GPU.
    Kernels(kernels::KernelsArgs),
    /// Say what this machine has, what it lacks, and how to get it.
    Doctor(doctor::DoctorArgs),
    /// Check whether this machine is as good as its profile says, before jobs train on it.
    Preflight(preflight::PreflightArgs),
    /// Print the CustomResourceDefinition.
    Crd,
    /// Print the JSON schema of a manifest, for editors and programs.
    Schema,
    /// Run MoeJobs on a Kubernetes cluster.
    Operator(operator::OperatorArgs),
    /// Work with jobs on a cluster; the same as `kubectl moe`.
    #[command(visible_alias = "moe")]
    Kube(moe::MoeArgs),
    /// Run as a worker; started by `moejob run` and by the operator.
    #[command(hide = true)]
    Worker,
    /// Run as an engine of the worker with this process id, which starts it.
    #[command(hide = true)]
    Engine { worker: String },
    /// Print a completion script for a shell.
    Completions {
        shell: clap_complete::Shell,
    },
    /// Write a manual page of each command into a folder, for `man`.
    Man {
        /// A folder, such as /usr/local/share/man/man1. It is made where it is missing.
        folder: PathBuf,
    },
}

/// The process: which program it is depends on the name that it was started by.
pub fn main() -> ExitCode {
    let name = std::env::args().next().unwrap_or_default();
    match CalledAs::of(&name) {
        CalledAs::Moejob => dispatch(typed()),
        CalledAs::Plugin => moe::main(),
        CalledAs::Completer => moe::complete_words(),
    }
}

/// What was typed; help and what is refused end the process.
fn typed() -> Cli {
    let width = out::columns(std::io::stdout()).unwrap_or(HELP_COLUMNS).min(HELP_COLUMNS);
    let command = with_daily_first(with_negative_numbers(Cli::command()), width);
    let matches = command.clone().get_matches();
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.with_cmd(&command).exit())
}

/// Columns of a text of help at most.
const HELP_COLUMNS: usize = 100;

/// A person uses these from day to day. They are in the order of the first day.
const DAILY: [&str; 13] = [
    "init", "validate", "plan", "run", "ls", "show", "tail", "report", "generate", "eval",
    "examples", "explain", "doctor",
];

/// The help of the program itself: commands of every day, and the others below a heading.
fn with_daily_first(command: clap::Command, columns: usize) -> clap::Command {
    let (mut daily, mut others) = (vec![String::new(); DAILY.len()], Vec::new());
    for of in command.get_subcommands().filter(|of| !of.is_hide_set()) {
        let about = of.get_about().map(ToString::to_string).unwrap_or_default();
        // The second line of a sentence stands below its first.
        let about = out::within(&about, columns.saturating_sub(15));
        let about = about.replace("\n  ", &format!("\n{:15}", ""));
        let line = format!("  {:<12} {about}", of.get_name());
        match DAILY.iter().position(|name| *name == of.get_name()) {
            Some(place) => daily[place] = line,
            None => others.push(line),
        }
    }
    let help = "  help         Say more of a command: moejob help COMMAND".to_string();
    others.push(out::within(&help, columns));
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\nCommands:\n{}\n\n\
         More commands:\n{}\n\n\
         Options:\n{{options}}",
        daily.join("\n"),
        others.join("\n")
    ))
}

/// A number below 0 is a value that is refused by its bounds, and no option that nobody knows.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let takes = |arg: &clap::Arg| arg.get_action().takes_values() && !arg.is_positional();
    command
        .mut_args(|arg| if takes(&arg) { arg.allow_negative_numbers(true) } else { arg })
        .mut_subcommands(with_negative_numbers)
}

/// Runs one command.
pub fn dispatch(cli: Cli) -> ExitCode {
    start_logs(&cli);
    let refused = variables::refused(|name| std::env::var(name).ok());
    if !refused.is_empty() {
        refused.iter().for_each(|line| eprintln!("moejob: the variable {line}"));
        return ExitCode::from(2);
    }
    match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Validate(args) => validate::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Checkpoint(command) => checkpoint::run(&command),
        Command::Eval(args) => eval::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Init(args) => init::init(&args),
        Command::Examples(args) => examples::run(&args),
        Command::Ls(args) => runs::ls(&args),
        Command::Show(args) => runs::show(&args),
        Command::Tail(args) => runs::tail(&args),
        Command::Report(args) => report::run(&args),
        Command::Data(command) => data::run(&command),
        Command::Bench(args) => bench::run(&args),
        Command::Kernels(args) => kernels::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Preflight(args) => preflight::run(&args),
        Command::Crd => crd::run(),
        Command::Schema => crd::schema(),
        Command::Operator(args) => operator::run(&args),
        Command::Kube(args) => moe::run(args),
        Command::Worker => moe_worker::life::process::main(),
        Command::Engine { worker } => moe_worker::life::process::engine(&worker),
        Command::Completions { shell } => {
            let mut command = Cli::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command, "moejob", &mut script);
            print!("{}", String::from_utf8_lossy(&script));
            ExitCode::SUCCESS
        }
        Command::Man { folder } => man(&folder),
    }
}

/// Pages of the program and of each command that is not hidden, `moejob-run.1` and the like.
fn man(folder: &Path) -> ExitCode {
    let made = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    match made {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("moejob: {} cannot be written: {error}", folder.display());
            eprintln!("  name a folder that you may write");
            ExitCode::from(2)
        }
    }
}

fn start_logs(cli: &Cli) {
    // What a worker says there is all that is known of it when it has gone.
    let works = matches!(cli.command, Command::Worker | Command::Engine { .. });
    let in_pod = works && std::env::var_os(ENV_WORKER).is_some();
    let filter = cli.log.as_deref().unwrap_or(if in_pod { "info" } else { "warn" });
    let filter = tracing_subscriber::EnvFilter::new(filter);
    let colours = crate::cli::out::colours();
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours);
    let logs = logs.with_writer(log_lines::LogLines);
    if cli.json_logs {
        logs.json().init();
    } else {
        logs.with_target(false).init();
    }
}

/// Of a program that speaks for itself: what `MOEJOB_LOG` asks for, and else this.
fn start_plain_logs(default: &str) {
    let filter = std::env::var("MOEJOB_LOG").unwrap_or_else(|_| default.to_string());
    let filter = tracing_subscriber::EnvFilter::new(filter);
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_target(false);
    logs.with_ansi(crate::cli::out::colours()).with_writer(std::io::stderr).init();
}

/// Prints an error with its causes.
pub(crate) fn complain(error: &dyn std::error::Error) {
    eprintln!("moejob: {}", moejob_manifest::problem::printable_lines(&chain(error)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_tells_what_is_used_every_day_first_and_all_of_the_rest() {
        for columns in [40, 80, 100] {
            let mut command = with_daily_first(Cli::command(), columns);
            let help = command.render_help().to_string();
            let (first, more) = help.split_once("\nMore commands:\n").expect("two headings");
            let names = |text: &str| -> Vec<String> {
                let lines = text.lines().filter(|line| {
                    line.starts_with("  ") && line.chars().nth(2).is_some_and(|c| c != ' ')
                });
                lines.filter_map(|line| Some(line.split_whitespace().next()?.to_string())).collect()
            };
            assert_eq!(names(first), DAILY);
            let mut all = [names(first), names(more)].concat();
            all.retain(|name| !name.starts_with('-') && name != "help");
            let shown = command.get_subcommands().filter(|of| !of.is_hide_set());
            let mut known: Vec<String> = shown.map(|of| of.get_name().to_string()).collect();
            known.retain(|name| name != "help");
            (all.sort(), known.sort());
            assert_eq!(all, known);
            let commands = help.split("Options:").next().unwrap_or_default();
            let (_, commands) = commands.split_once("Commands:").expect("commands");
            for line in commands.lines() {
                assert!(line.chars().count() <= columns, "{columns}: {line}");
            }
        }
    }
}
