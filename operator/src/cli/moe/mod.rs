//! `kubectl moe`: jobs on a cluster, as a plugin of kubectl. It is this binary under the name
//! `kubectl-moe`, or `moejob kube`; under the name `kubectl_complete-moe` it completes words.
//!
//! ```text
//! arguments -> cluster (the thin shell: kubeconfig, requests, watches) -> JSON
//! JSON -> job, timeline, merge, nodes, checks (pure) -> tables, sentences | JSON | YAML
//! ```

pub mod cluster;
pub mod error;
pub mod output;
pub mod table;
pub mod job;
pub mod follow;
pub mod wait;
pub mod submit;
pub mod queue;
pub mod show;
pub mod timeline;
pub mod advice;
pub mod logs;
pub mod merge;
pub mod speaker;
pub mod top;
pub mod change;
pub mod plan;
pub mod nodes;
pub mod doctor;
pub mod checks;
pub mod complete;

use change::{Change, ChangeArgs};
use clap::{Args, CommandFactory, Parser, Subcommand};
use cluster::{Cluster, Connection, JOBS, Kind};
use complete::Wanted;
use crate::controller::now;
use error::MoeError;
use std::process::ExitCode;
use std::time::Duration;

/// What a shell waits for a completion.
const COMPLETION_MAX: Duration = Duration::from_secs(2);

/// Mixture-of-experts training jobs on this cluster.
#[derive(Parser)]
#[command(name = "kubectl-moe", bin_name = "kubectl moe", max_term_width = 100)]
#[command(version = super::VERSION)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 the manifest or the arguments, 75 try \
    again, 130 interrupted.\ndocs/kubectl-moe.md tells more.")]
pub struct Plugin {
    #[command(flatten)]
    pub moe: MoeArgs,
}

#[derive(Args)]
pub struct MoeArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Check a manifest, here and on the server, and make it a job.
    Submit(submit::SubmitArgs),
    /// List jobs in the order in which they are served.
    Queue(queue::QueueArgs),
    /// Tell the life of a job: its workers, what happened, what to do.
    Show(show::ShowArgs),
    /// Print the logs of all workers of a job as one.
    Logs(logs::LogsArgs),
    /// Show speed, loss, balance of experts and memory.
    Top(top::TopArgs),
    /// Delete jobs; their checkpoints stay.
    Cancel(ChangeArgs),
    /// Stop jobs after a checkpoint and give their nodes back.
    Hold(ChangeArgs),
    /// Let held jobs go on.
    Release(ChangeArgs),
    /// Show the plan of a manifest or of a job on the nodes that are free now.
    Plan(plan::PlanArgs),
    /// Say what the cluster lacks, and what you may not do.
    Doctor(doctor::DoctorArgs),
    /// Name every problem of manifests, offline.
    Validate(super::validate::ValidateArgs),
    /// Print a completion script for `kubectl-moe`; kubectl completes `kubectl moe` by itself.
    Completion {
        #[arg(value_parser = ["bash", "zsh", "fish"])]
        shell: String,
    },
}

/// Under which name this program was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CalledAs {
    Moejob,
    Plugin,
    Completer,
}

impl CalledAs {
    pub fn of(first: &str) -> CalledAs {
        match first.rsplit('/').next().unwrap_or(first) {
            "kubectl-moe" => CalledAs::Plugin,
            "kubectl_complete-moe" => CalledAs::Completer,
            _ => CalledAs::Moejob,
        }
    }
}

/// The plugin, from the arguments of this process.
pub fn main() -> ExitCode {
    // What the client logs by itself, this program says in its own words.
    super::start_plain_logs("off");
    run(Plugin::parse().moe)
}

/// One verb.
pub fn run(args: MoeArgs) -> ExitCode {
    let result = match args.verb {
        Verb::Validate(args) => return super::validate::run(&args),
        Verb::Completion { shell } => output::print(complete::script(&shell)),
        verb => block_on(act(&args.connection, verb)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(MoeError::Interrupted) => ExitCode::from(MoeError::Interrupted.exit_code()),
        Err(error) => {
            eprintln!("kubectl moe: {}", output::plain(&error));
            ExitCode::from(error.exit_code())
        }
    }
}

fn block_on<T>(future: impl Future<Output = Result<T, MoeError>>) -> Result<T, MoeError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime
        .map_err(|error| MoeError::Failed(format!("no asynchronous runtime: {error}")))?;
    let result = runtime.block_on(future);
    // Watches and logs that are under way are not waited for.
    runtime.shutdown_background();
    result
}

async fn act(connection: &Connection, verb: Verb) -> Result<(), MoeError> {
    let connect = || Cluster::connect(connection);
    match verb {
        Verb::Submit(args) => {
            let object = submit::read(&args)?;
            if args.dry_run == Some(submit::DryRun::Client) {
                return submit::show(&args, &object);
            }
            submit::run(&connect().await?, &args, object).await
        }
        Verb::Queue(args) => queue::run(&connect().await?, &args).await,
        Verb::Show(args) => show::run(&connect().await?, &args).await,
        Verb::Logs(args) => logs::run(&connect().await?, &args).await,
        Verb::Top(args) => top::run(&connect().await?, &args).await,
        Verb::Cancel(args) => change::run(&connect().await?, Change::Cancel, &args).await,
        Verb::Hold(args) => change::run(&connect().await?, Change::Hold, &args).await,
        Verb::Release(args) => change::run(&connect().await?, Change::Release, &args).await,
        Verb::Plan(args) => plan::run(&connect().await?, &args).await,
        Verb::Doctor(args) => doctor::run(&connect().await?, &args).await,
        Verb::Validate(_) | Verb::Completion { .. } => Ok(()),
    }
}

/// What kubectl asks when a person presses the tabulator. It never fails: nothing is offered then.
pub fn complete_words() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let typed = words.last().map_or("", String::as_str);
    let wanted = complete::wanted(&Plugin::command(), &words);
    let found = block_on(async { Ok(offered(&wanted, &words).await) }).unwrap_or_default();
    let _ = output::print(&complete::answer(&wanted, typed, &found));
    ExitCode::SUCCESS
}

/// Names that only the cluster or the kubeconfig knows.
async fn offered(wanted: &Wanted, words: &[String]) -> Vec<String> {
    let value = |names: &[&str]| {
        let at = words.iter().position(|word| names.contains(&word.as_str()))?;
        words.get(at + 1).cloned()
    };
    let connection = Connection {
        namespace: value(&["-n", "--namespace"]),
        context: value(&["--context"]),
        kubeconfig: value(&["--kubeconfig"]).map(Into::into),
        ..Connection::default()
    };
    let listing = async {
        let (kind, namespaced) = match wanted {
            Wanted::Jobs => (JOBS, true),
            Wanted::Namespaces => (Kind("api/v1", "namespaces"), false),
            Wanted::Contexts => return contexts(&connection),
            _ => return Vec::new(),
        };
        let Ok(cluster) = Cluster::connect(&connection).await else { return Vec::new() };
        let namespace = namespaced.then_some(cluster.namespace.as_str());
        let objects = cluster.list(kind, namespace, None).await.unwrap_or_default();
        let name = |object: &serde_json::Value| {
            Some(object["metadata"]["name"].as_str()?.to_string())
        };
        objects.iter().filter_map(name).collect()
    };
    tokio::time::timeout(COMPLETION_MAX, listing).await.unwrap_or_default()
}

fn contexts(connection: &Connection) -> Vec<String> {
    let file = match &connection.kubeconfig {
        Some(path) => kube::config::Kubeconfig::read_from(path),
        None => kube::config::Kubeconfig::read(),
    };
    file.map(|file| file.contexts.into_iter().map(|context| context.name).collect())
        .unwrap_or_default()
}

/// Until it is done, or somebody presses Ctrl-C.
async fn run_until_interrupted<T>(
    future: impl Future<Output = Result<T, MoeError>>,
) -> Result<T, MoeError> {
    tokio::select! {
        result = future => result,
        _ = tokio::signal::ctrl_c() => Err(MoeError::Interrupted),
    }
}

/// `90s`, `10m`, `2h`, `1h30m`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration; write it as 90s, 10m, 2h or 1h30m");
    let mut rest = text;
    let mut sum = 0u64;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let number: u64 = rest[..end].parse().map_err(|_| wrong())?;
        let unit = match rest[end..].chars().next() {
            Some('s') => 1,
            Some('m') => 60,
            Some('h') => 3600,
            Some('d') => 86_400,
            _ => return Err(wrong()),
        };
        sum = number.checked_mul(unit).and_then(|part| sum.checked_add(part)).ok_or_else(wrong)?;
        rest = &rest[end + 1..];
    }
    if sum == 0 { Err(wrong()) } else { Ok(Duration::from_secs(sum)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_decides_what_this_program_is() {
        assert_eq!(CalledAs::of("/usr/local/bin/kubectl-moe"), CalledAs::Plugin);
        assert_eq!(CalledAs::of("kubectl_complete-moe"), CalledAs::Completer);
        assert_eq!(CalledAs::of("./target/release/moejob"), CalledAs::Moejob);
    }

    #[test]
    fn durations_are_written_as_kubectl_takes_them() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("1h30m"), Ok(Duration::from_secs(5400)));
        for wrong in ["", "5", "m", "1y", "0s", "-1s", "99999999999999999999s"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_arguments_are_sound() {
        Plugin::command().debug_assert();
        let read = |line: &str| Plugin::try_parse_from(line.split(' ')).map(drop);
        for line in [
            "kubectl-moe queue -A -o wide -w",
            "kubectl-moe -n team show job -o json",
            "kubectl-moe submit -f job.yaml --hold --dry-run=server",
            "kubectl-moe submit job.yaml --wait --timeout 10m",
            "kubectl-moe logs job -f --rank 0 --rank 1 --since 10m --tail 5",
            "kubectl-moe top job --context c --kubeconfig k",
            "kubectl-moe cancel a b --wait",
            "kubectl-moe doctor --profile nd-h100-v5 --as alice",
            "kubectl-moe plan job.yaml --lose node-1",
        ] {
            if let Err(error) = read(line) {
                panic!("{line}: {error}");
            }
        }
        for line in [
            "kubectl-moe submit",
            "kubectl-moe submit a.yaml -f b.yaml",
            "kubectl-moe submit a.yaml --force-conflicts",
            "kubectl-moe show",
            "kubectl-moe logs job --since soon",
            "kubectl-moe queue -o table",
        ] {
            assert!(read(line).is_err(), "{line}");
        }
    }
}
