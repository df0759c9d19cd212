//! Worker processes: started, listened to, and ended; none outlives the runner.

use super::folder::Folder;
use crate::authority::Authority;
use moe_worker::life::affinity::Share;
use moe_worker::life::run::Bootstrap;
use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;

/// A worker says its port within this time, or is killed.
const PORT_TIMEOUT: Duration = Duration::from_secs(10);
/// After the job's end a worker is given this long before it is killed.
const LAST_GRACE: Duration = Duration::from_secs(6);
/// More of a port's line is not read.
const PORT_LINE_BYTES_MAX: u64 = 256;

#[derive(Debug)]
pub enum ProcessEvent {
    Listening { port: u16 },
    Exited { exit_code: Option<i32>, how: String },
}

struct Process {
    pid: u32,
    address: Option<String>,
    /// Kills it after the time that is sent.
    stop: Option<oneshot::Sender<Duration>>,
    done: tokio::task::JoinHandle<()>,
}

/// All worker processes of a run.
pub struct Processes {
    running: HashMap<String, Process>,
    logs: PathBuf,
    authority: String,
    job_uid: String,
    secret: String,
}

impl Processes {
    pub fn new(folder: &Folder, authority: &Authority, job_uid: &str) -> Processes {
        Processes {
            running: HashMap::new(),
            logs: folder.path().join("logs"),
            authority: authority.certificate_pem().to_string(),
            job_uid: job_uid.to_string(),
            secret: authority.new_secret(),
        }
    }

    /// What a worker of this run proves itself by.
    pub fn secret(&self) -> &str {
        &self.secret
    }

    pub fn pid(&self, name: &str) -> Option<u32> {
        self.running.get(name).map(|process| process.pid)
    }

    pub fn address(&self, name: &str) -> Option<String> {
        self.running.get(name)?.address.clone()
    }

    pub fn listening(&mut self, name: &str, address: &str) {
        if let Some(process) = self.running.get_mut(name) {
            process.address = Some(address.to_string());
        }
    }

    pub fn forget(&mut self, name: &str) {
        self.running.remove(name);
    }

    /// Starts `moejob worker` and reports its port and its end through `tell`.
    pub fn start<Tell, Told>(
        &mut self,
        name: &str,
        node: &str,
        share: Share,
        tell: Tell,
    ) -> std::io::Result<()>
    where
        Tell: Fn(ProcessEvent) -> Told + Send + Sync + 'static,
        Told: Future<Output = ()> + Send,
    {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(self.logs.join(format!("{node}.log")))?;
        let mut child = Command::new(std::env::current_exe()?)
            .arg("worker")
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
        let done = tokio::spawn(async move {
            let status = attend(&mut child, first_line, stopped, &tell).await;
            let (exit_code, how) = describe(status);
            tell(ProcessEvent::Exited { exit_code, how }).await;
        });
        let process = Process { pid, address: None, stop: Some(stop), done };
        self.running.insert(name.to_string(), process);
        Ok(())
    }

    /// Kills it after `grace`, should it still run then.
    pub fn stop(&mut self, name: &str, grace: Duration) {
        let stop = self.running.get_mut(name).and_then(|process| process.stop.take());
        if let Some(stop) = stop {
            let _ = stop.send(grace);
        }
    }

    /// Waits for the end of all of them; they have been told to stop.
    pub async fn end_all(&mut self) {
        for (_, mut process) in self.running.drain() {
            if let Some(stop) = process.stop.take() {
                let _ = stop.send(LAST_GRACE);
            }
            let _ = process.done.await;
        }
    }
}

/// Hands over the bootstrap, reads the port, and waits for the end. Its standard input stays open
/// meanwhile: when that ends, a worker knows that its runner is gone.
async fn attend<Tell, Told>(
    child: &mut Child,
    first_line: Vec<u8>,
    mut stopped: oneshot::Receiver<Duration>,
    tell: &Tell,
) -> std::io::Result<ExitStatus>
where
    Tell: Fn(ProcessEvent) -> Told,
    Told: Future<Output = ()>,
{
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
        Ok(Some(port)) => tell(ProcessEvent::Listening { port }).await,
        _ => child.start_kill()?,
    }
    tokio::select! {
        status = child.wait() => status,
        grace = &mut stopped => {
            let grace = grace.unwrap_or_default();
            match tokio::time::timeout(grace, child.wait()).await {
                Ok(status) => status,
                Err(_) => {
                    child.start_kill()?;
                    child.wait().await
                }
            }
        }
    }
}

fn describe(status: std::io::Result<ExitStatus>) -> (Option<i32>, String) {
    use std::os::unix::process::ExitStatusExt;
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => (Some(code), format!("exit code {code}")),
            (None, signal) => (None, format!("killed by signal {}", signal.unwrap_or_default())),
        },
        Err(error) => (None, format!("cannot be waited for: {error}")),
    }
}
