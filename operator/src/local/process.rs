//! Worker processes: started, listened to, and ended; none outlives the runner.

use super::folder::Folder;
use moe_worker::life::affinity::Share;
use moe_worker::life::dying;
use moe_worker::life::run::Bootstrap;
use moejob_identity::authority::Authority;
use moejob_kernels::memory_bounds::Ulimits;
use moejob_plan::lead::WorkerPod;
use moejob_protocol::pod::ENV_TRACE;
use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};

/// A worker says its port within this time, or is killed.
const PORT_TIMEOUT: Duration = Duration::from_secs(10);
/// After the job's end a worker is given this long before it is killed.
const LAST_GRACE: Duration = Duration::from_secs(6);
/// Between two looks whether a worker is on its way out. It is reaped once the system has its
/// memory back, which of 31 GB came 3 s later.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// More of a port's line is not read.
const PORT_LINE_BYTES_MAX: u64 = 256;

#[derive(Debug)]
pub enum ProcessEvent {
    Listening { port: u16 },
    Exited { exit_code: Option<i32>, how: String },
}

struct Process {
    pid: u32,
    /// As the job's loop knows it.
    pod: WorkerPod,
    /// It was given a rank.
    introduced: bool,
    /// Kills it after the time that is sent.
    stop: Option<oneshot::Sender<Duration>>,
    done: tokio::task::JoinHandle<()>,
}

/// All worker processes of a run. Those that have ended are known until the loop forgets them.
pub struct Processes {
    known: HashMap<String, Process>,
    logs: PathBuf,
    authority: String,
    job_uid: String,
    secret: String,
    /// Where rank 0 writes a trace, as its environment says.
    trace: Option<PathBuf>,
    tell: mpsc::Sender<(String, ProcessEvent)>,
}

impl Processes {
    pub fn new(
        folder: &Folder,
        authority: &Authority,
        trace: Option<PathBuf>,
        tell: mpsc::Sender<(String, ProcessEvent)>,
    ) -> Processes {
        Processes {
            known: HashMap::new(),
            logs: folder.logs(),
            authority: authority.certificate_pem().to_string(),
            job_uid: folder.file().uid.clone(),
            secret: authority.new_secret(),
            trace,
            tell,
        }
    }

    /// What a worker of this run proves itself by.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    pub fn pid(&self, name: &str) -> u32 {
        self.known.get(name).map_or(0, |process| process.pid)
    }

    /// Its pid and node, the first time that it is given a rank.
    pub fn introduce(&mut self, name: &str) -> Option<(u32, String)> {
        let process = self.known.get_mut(name).filter(|process| !process.introduced)?;
        process.introduced = true;
        Some((process.pid, process.pod.node.as_deref().unwrap_or_default().to_string()))
    }

    /// Starts `moejob worker`; its port and its end are told.
    pub fn start(&mut self, name: &str, node: &str, share: Share) -> std::io::Result<WorkerPod> {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.logs.join(format!("{node}.log")))?;
        // The link names the program that runs, whatever lies at its path by now.
        let mut child = Command::new("/proc/self/exe")
            .arg0(std::env::args_os().next().unwrap_or_else(|| "moejob".into()))
            .arg("worker")
            .envs(self.trace.iter().map(|file| (ENV_TRACE, file)))
            .envs(arenas(Ulimits::of_this_process().addresses))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            // A Ctrl-C at the terminal is for the runner, which then asks the gang to stop.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let bootstrap = Bootstrap {
            worker: name.to_string(),
            job_uid: self.job_uid.clone(),
            authority: self.authority.clone(),
            token: self.secret.clone(),
            token_file: None,
            listen: None,
            share,
        };
        let mut first_line = serde_json::to_string(&bootstrap)?.into_bytes();
        first_line.push(b'\n');
        let (stop, stopped) = oneshot::channel();
        let pid = child.id().unwrap_or_default();
        let (tell, of) = (self.tell.clone(), name.to_string());
        let done = tokio::spawn(async move {
            let listening = |port| tell.send((of.clone(), ProcessEvent::Listening { port }));
            let status = attend(&mut child, first_line, stopped, listening).await;
            let (exit_code, how) = describe(status);
            // Without a receiver the run is over.
            let _ = tell.send((of, ProcessEvent::Exited { exit_code, how })).await;
            // One that is on its way out is reaped all the same.
            let _ = child.wait().await;
        });
        let pod = WorkerPod {
            name: name.to_string(),
            uid: name.to_string(),
            node: Some(Arc::from(node)),
            ..WorkerPod::default()
        };
        let (introduced, stop) = (false, Some(stop));
        let process = Process { pid, pod: pod.clone(), introduced, stop, done };
        self.known.insert(name.to_string(), process);
        Ok(pod)
    }

    /// What the loop knows of it from now on.
    pub fn changed(&mut self, name: &str, change: ProcessEvent) -> Option<WorkerPod> {
        let pod = &mut self.known.get_mut(name)?.pod;
        match change {
            ProcessEvent::Listening { port } => {
                (pod.started, pod.address) = (true, Some(format!("127.0.0.1:{port}")));
            }
            ProcessEvent::Exited { exit_code, how } => pod.ended = Some((exit_code, how)),
        }
        Some(pod.clone())
    }

    /// Kills it after `grace`, should it still run then. Whether it is known to have ended: then
    /// it is forgotten.
    pub fn stop(&mut self, name: &str, grace: Duration) -> bool {
        let Some(process) = self.known.get_mut(name) else { return true };
        if process.pod.ended.is_some() {
            self.known.remove(name);
            return true;
        }
        if let Some(stop) = process.stop.take() {
            let _ = stop.send(grace);
        }
        false
    }

    /// Waits for the end of all of them; they have been told to stop.
    pub async fn end_all(&mut self) {
        for (_, mut process) in self.known.drain() {
            if let Some(stop) = process.stop.take() {
                let _ = stop.send(LAST_GRACE);
            }
            let _ = process.done.await;
        }
    }
}

/// The allocator reserves 64 MiB of addresses for each thread. Where `ulimit -v` counts them, a
/// worker would fail long before its memory is used up: one pool serves all of its threads then.
fn arenas(addresses_max: Option<u64>) -> Option<(&'static str, &'static str)> {
    addresses_max.map(|_| ("MALLOC_ARENA_MAX", "1"))
}

/// Hands over the bootstrap, reads the port, and waits until it ends or is about to. Its standard
/// input stays open meanwhile: when that ends, a worker knows that its runner is gone.
async fn attend<Told: Future>(
    child: &mut Child,
    first_line: Vec<u8>,
    mut stopped: oneshot::Receiver<Duration>,
    listening: impl FnOnce(u16) -> Told,
) -> std::io::Result<ExitStatus> {
    let mut input = child.stdin.take();
    let output = child.stdout.take();
    let hello = async {
        input.as_mut()?.write_all(&first_line).await.ok()?;
        let limited = tokio::io::AsyncReadExt::take(output?, PORT_LINE_BYTES_MAX);
        let mut line = String::new();
        BufReader::new(limited).read_line(&mut line).await.ok()?;
        let answer: serde_json::Value = serde_json::from_str(&line).ok()?;
        u16::try_from(answer["port"].as_u64()?).ok()
    };
    match tokio::time::timeout(PORT_TIMEOUT, hello).await {
        Ok(Some(port)) => drop(listening(port).await),
        _ => child.start_kill()?,
    }
    tokio::select! {
        status = ends(child) => status,
        grace = &mut stopped => {
            let grace = grace.unwrap_or_default();
            match tokio::time::timeout(grace, ends(child)).await {
                Ok(status) => status,
                Err(_) => {
                    child.start_kill()?;
                    ends(child).await
                }
            }
        }
    }
}

/// How it ended, or how it ends, as soon as the system knows. With code 0 it is waited for.
async fn ends(child: &mut Child) -> std::io::Result<ExitStatus> {
    let pid = child.id();
    let dies = async {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            if let Some(status) = pid.and_then(dying::status) {
                return status;
            }
        }
    };
    tokio::select! {
        biased;
        status = child.wait() => status,
        status = dies => Ok(status),
    }
}

/// `killed by signal 9 (SIGKILL)`
fn killed_by(signal: i32) -> String {
    // As Linux numbers them.
    let name = match signal {
        4 => " (SIGILL)",
        6 => " (SIGABRT: it gave up; often for want of memory)",
        7 => " (SIGBUS: a file or memory that it used is gone)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL: from outside, or the system had no memory left)",
        11 => " (SIGSEGV: a mistake of the program)",
        15 => " (SIGTERM)",
        24 => " (SIGXCPU: `ulimit -t`)",
        25 => " (SIGXFSZ: `ulimit -f`)",
        _ => "",
    };
    format!("killed by signal {signal}{name}")
}

fn describe(status: std::io::Result<ExitStatus>) -> (Option<i32>, String) {
    use std::os::unix::process::ExitStatusExt;
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => (Some(code), format!("exit code {code}")),
            (None, signal) => (None, killed_by(signal.unwrap_or_default())),
        },
        Err(error) => (None, format!("cannot be waited for: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_counted_are_not_reserved_by_thread() {
        assert_eq!(arenas(None), None);
        assert_eq!(arenas(Some(400 << 20)), Some(("MALLOC_ARENA_MAX", "1")));
    }

    /// A process whose first thread has ended with this code, and that cannot be reaped before the
    /// second one has: as one of which the system takes much memory back.
    fn dies_slowly(code: i32) -> Child {
        let mut command = Command::new("true");
        // SAFETY: it runs in the new process alone, which never goes on from there.
        unsafe {
            command.pre_exec(move || {
                std::thread::spawn(|| std::thread::sleep(Duration::from_secs(3)));
                // Whoever starts it waits for the end of a pipe.
                for file in 3..1024 {
                    libc::close(file);
                }
                libc::syscall(libc::SYS_exit, code);
                Ok(())
            });
        }
        command.kill_on_drop(true).spawn().expect("a process")
    }

    #[tokio::test]
    async fn a_worker_that_dies_slowly_is_seen_at_once() {
        let began = std::time::Instant::now();
        let mut child = dies_slowly(75);
        let (code, _) = describe(ends(&mut child).await);
        assert_eq!(code, Some(75));
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        assert!(child.try_wait().expect("a child").is_none(), "it could be reaped");
        // What ends as it should is waited for.
        let mut child = dies_slowly(0);
        let (code, _) = describe(ends(&mut child).await);
        assert_eq!(code, Some(0));
        let mut killed = Command::new("sleep").arg("60").spawn().expect("a process");
        killed.start_kill().expect("killed");
        assert_eq!(describe(ends(&mut killed).await), (None, killed_by(9)));
    }

    #[test]
    fn a_signal_has_a_name() {
        assert_eq!(killed_by(15), "killed by signal 15 (SIGTERM)");
        assert_eq!(killed_by(40), "killed by signal 40");
        assert!(moejob_plan::repeat::is_own_fault(&killed_by(6)));
        assert!(!moejob_plan::repeat::is_own_fault(&killed_by(9)));
    }
}
