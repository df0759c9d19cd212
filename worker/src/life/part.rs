//! Processes of this program that do one thing for it, such as measuring a GPU.
//!
//! ```text
//! Part::start(variable, ..) -> `moejob engine PID` -> is_bound_to(PID), then obey
//! ask(line) --standard input--> child --standard output--> hear(until) -> line
//! ```
//! A line is JSON. What hangs is killed, and what is left ends with its parent: so whoever asks
//! waits for a bounded time, and nothing of a part stays on a device.

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Between two looks at whether it is to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A line is a few hundred bytes.
const LINE_BYTES_MAX: u64 = 1 << 20;

/// One of them. Killed when it is dropped.
pub(crate) struct Part<Reply> {
    child: Child,
    input: ChildStdin,
    replies: Receiver<Reply>,
}

/// Why a part says nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Silence {
    /// And how.
    Ended(String),
    Stopped,
    Late,
}

impl Silence {
    /// Where an answer was awaited for so long.
    pub fn in_words(&self, limit: Duration) -> String {
        match self {
            Silence::Ended(how) => format!("its process ended: {how}"),
            Silence::Stopped => "it was to stop".to_string(),
            Silence::Late => format!("no answer within {} s", limit.as_secs()),
        }
    }
}

impl<Reply: DeserializeOwned + Send + 'static> Part<Reply> {
    /// The variable makes it this part, and its value says which one of them. It gets more in its
    /// environment.
    pub fn start(
        (variable, which): (&str, &str),
        environment: &[(&'static str, String)],
    ) -> io::Result<Part<Reply>> {
        // The link names the program that runs, whatever lies at its path by now.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0(std::env::args_os().next().unwrap_or_else(|| "moejob".into()))
            .arg("engine")
            .arg(std::process::id().to_string())
            .env(variable, which)
            .envs(environment.iter().map(|(name, value)| (name, value)));
        Part::of(command, which)
    }

    /// The process of a command.
    pub fn of(mut command: Command, which: &str) -> io::Result<Part<Reply>> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let lost = || io::Error::other("no pipe");
        let input = child.stdin.take().ok_or_else(lost)?;
        let output = child.stdout.take().ok_or_else(lost)?;
        let (told, replies) = channel();
        std::thread::Builder::new().name(format!("part-{which}")).spawn(move || {
            let mut lines = BufReader::new(output);
            loop {
                let mut line = Vec::new();
                match (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                // NCCL may write there, too.
                if let Ok(reply) = serde_json::from_slice(&line)
                    && told.send(reply).is_err()
                {
                    return;
                }
            }
        })?;
        Ok(Part { child, input, replies })
    }

    /// One that has ended says so where its answer is awaited.
    pub fn ask(&mut self, ask: &impl Serialize) {
        let line = serde_json::to_string(ask).unwrap_or_default();
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
    }

    /// The answer to what was asked last.
    ///
    /// # Errors
    /// There is none, and why.
    pub fn hear(&mut self, until: Instant, stop: &AtomicBool) -> Result<Reply, Silence> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.replies.recv_timeout(left.min(LOOK_EVERY)) {
                Ok(reply) => return Ok(reply),
                Err(RecvTimeoutError::Disconnected) => {
                    let how = self.child.wait().map_or_else(
                        |error| error.to_string(),
                        |status| status.to_string(),
                    );
                    return Err(Silence::Ended(how));
                }
                Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => {
                    return Err(Silence::Stopped);
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Err(Silence::Late),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl<Reply> Part<Reply> {
    /// Does not wait until it is gone.
    pub fn end(&mut self) {
        let _ = self.child.kill();
    }
}

impl<Reply> Drop for Part<Reply> {
    /// Once it is gone, its memory on the device has come back.
    fn drop(&mut self) {
        self.end();
        let _ = self.child.wait();
    }
}

/// Which part this process was started to be, by that variable.
pub(crate) fn number(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Makes this process end with its parent; false: the one with that process id is gone already.
pub(crate) fn is_bound_to(parent: &str) -> bool {
    let bound = set_parent_process_death_signal(Some(Signal::KILL));
    let found = getppid().map(|pid| pid.as_raw_nonzero().get().to_string());
    bound.is_ok() && found.as_deref() == Some(parent)
}

/// To the parent. Without one the process ends by itself.
pub(crate) fn say(reply: &impl Serialize) {
    let line = serde_json::to_string(reply).unwrap_or_default();
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Does what the parent asks, line by line, until it asks no more.
///
/// # Errors
/// A line is none of the parent's.
pub(crate) fn obey<Ask: DeserializeOwned>(mut each: impl FnMut(Ask)) -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        each(serde_json::from_str(&line?)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(script: &str) -> Part<u32> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Part::of(command, "test").expect("a shell")
    }

    fn hear(part: &mut Part<u32>, limit: Duration, stop: bool) -> Result<u32, Silence> {
        part.hear(Instant::now() + limit, &AtomicBool::new(stop))
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_part_answers_what_it_is_asked() {
        let mut echo = part("echo NCCL version 2; echo 7; while read line; do echo $line; done");
        assert_eq!(hear(&mut echo, LONG, false), Ok(7), "what is no line of ours is passed over");
        for asked in [1, 2, 3] {
            echo.ask(&asked);
            assert_eq!(hear(&mut echo, LONG, false), Ok(asked));
        }
    }

    #[test]
    fn nobody_waits_for_ever() {
        let began = Instant::now();
        let mut ended = part("exit 7");
        let how = hear(&mut ended, LONG, false);
        assert_eq!(how, Err(Silence::Ended("exit status: 7".to_string())));
        // It is not there to be asked.
        ended.ask(&1);
        let short = Duration::from_millis(120);
        let mut hangs = part("exec sleep 600");
        assert_eq!(hear(&mut hangs, short, false), Err(Silence::Late));
        assert_eq!(hear(&mut hangs, LONG, true), Err(Silence::Stopped));
        assert_eq!(Silence::Late.in_words(LONG), "no answer within 60 s");
        drop(hangs);
        assert!(began.elapsed() < LONG / 2, "{:?}: what hangs is killed", began.elapsed());
    }
}
