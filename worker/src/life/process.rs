//! The process of a worker: `moe-worker`, and the same code as `moejob worker`.

use crate::life::affinity::Share;
use crate::life::preflight;
use crate::life::travel;
use crate::gang::comm::Comm;
use crate::life::run::engines::child;
use crate::life::run::{Attempt, Bootstrap, from_stdin, in_pod};
use crate::attempt::trainer::Trainer;
use crate::attempt::api::{AttemptEnd, Control, TrainerEvent};
use moejob_protocol::WorkerConfig;
use moejob_protocol::pod;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

impl Attempt for Trainer {
    fn run_attempt(
        &mut self,
        config: &WorkerConfig,
        comm: Comm,
        control: &Control,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> AttemptEnd {
        Trainer::run_attempt(self, config, comm, control, out)
    }
}

/// Runs an engine of the worker with this process id, which has started it; or what measures a GPU,
/// or the links between several, for it.
pub fn engine(worker: &str) -> ExitCode {
    if let Some(gpu) = preflight::child::part() {
        return preflight::child::main(worker, gpu);
    }
    if let Some(gpu) = travel::rank::part() {
        return travel::rank::main(worker, gpu);
    }
    child::main(worker)
}

/// Runs the worker: in a pod with the bootstrap of its environment, else with the one that comes
/// on standard input.
pub fn main() -> ExitCode {
    match from_environment(|name| std::env::var(name).ok()) {
        None => from_stdin(Trainer::with_memory),
        Some(Ok(bootstrap)) => in_pod(bootstrap, Trainer::with_memory),
        Some(Err(message)) => {
            eprintln!("moe-worker: {message}");
            ExitCode::FAILURE
        }
    }
}

/// What the operator wrote into the pod; none outside of one.
fn from_environment(
    get: impl Fn(&str) -> Option<String>,
) -> Option<Result<Bootstrap, String>> {
    let worker = get(pod::ENV_WORKER)?;
    let must = |name: &str| get(name).ok_or_else(|| format!("{name} is not set in this pod"));
    let read = || {
        let address = must(pod::ENV_ADDRESS)?;
        let address: IpAddr = address
            .parse()
            .map_err(|error| format!("{}: {address:?}: {error}", pod::ENV_ADDRESS))?;
        Ok(Bootstrap {
            worker,
            job_uid: must(pod::ENV_JOB_UID)?,
            authority: must(pod::ENV_AUTHORITY)?,
            token: String::new(),
            token_file: Some(PathBuf::from(pod::TOKEN_FILE)),
            listen: Some(SocketAddr::new(address, pod::PORT)),
            share: Share::default(),
        })
    };
    Some(read())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Option<Result<String, String>> {
        let get = |name: &str| {
            let found = variables.iter().find(|(of, _)| *of == name);
            found.map(|(_, value)| value.to_string())
        };
        let show = |bootstrap: Bootstrap| {
            format!("{} of {} at {:?}", bootstrap.worker, bootstrap.job_uid, bootstrap.listen)
        };
        from_environment(get).map(|read| read.map(show))
    }

    #[test]
    fn a_pods_environment_is_its_bootstrap() {
        assert_eq!(read(&[("HOME", "/")]), None);
        let mut all = [
            (pod::ENV_WORKER, "olmoe-3"),
            (pod::ENV_JOB_UID, "uid"),
            (pod::ENV_AUTHORITY, "PEM"),
            (pod::ENV_ADDRESS, "10.0.0.7"),
        ];
        let expected = "olmoe-3 of uid at Some(10.0.0.7:7777)".to_string();
        assert_eq!(read(&all), Some(Ok(expected)));
        let missing = format!("{} is not set in this pod", pod::ENV_AUTHORITY);
        assert_eq!(read(&[all[0], all[1], all[3]]), Some(Err(missing)));
        all[3].1 = "localhost";
        let wrong = read(&all).and_then(Result::err).expect("refused");
        assert!(wrong.starts_with("MOEJOB_POD_IP: \"localhost\": "), "{wrong}");
        all[3].1 = "fd00::7";
        let expected = "olmoe-3 of uid at Some([fd00::7]:7777)".to_string();
        assert_eq!(read(&all), Some(Ok(expected)));
    }
}
