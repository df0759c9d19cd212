//! Whether the loop answers. A leader whose loop hangs renews its lease and decides nothing, and no
//! standby takes over: so a thread of the system asks the loop each second, and ends the process
//! when it has not answered for ten.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How often the thread asks.
pub const ASK_EVERY: Duration = Duration::from_secs(1);
/// So many questions without an answer are the end.
const UNANSWERED_MAX: u32 = 10;

/// Questions that wait for an answer. They are counted and not timed: a process that was stopped
/// for a minute and goes on was not asked meanwhile.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Arc<AtomicU32>);

impl Pulse {
    /// The loop's answer.
    pub fn beat(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Too many questions wait.
    pub fn is_lost(&self) -> bool {
        self.0.load(Ordering::Relaxed) > UNANSWERED_MAX
    }

    fn ask(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed);
        self.is_lost()
    }

    /// Asks from a thread of its own, and ends the process when the loop does not answer. A standby
    /// then leads within the time of the lease.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn guard(&self) -> std::io::Result<()> {
        let pulse = self.clone();
        let ask = move || {
            loop {
                std::thread::sleep(ASK_EVERY);
                if pulse.ask() {
                    eprintln!("the loop has not answered for {UNANSWERED_MAX} s: ending");
                    std::process::abort();
                }
            }
        };
        std::thread::Builder::new().name("pulse".to_string()).spawn(ask).map(drop)
    }
}

/// A panic anywhere ends the process: what the thread or task kept would be half done, and the rest
/// would go on as if nothing were. (By a hook and not by the profile, as workers of a local run
/// catch what a step panics with.)
pub fn abort_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        before(info);
        std::process::abort();
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_questions_without_an_answer_are_the_end() {
        let pulse = Pulse::default();
        for _ in 0..3 {
            assert!((0..UNANSWERED_MAX).all(|_| !pulse.ask()));
            pulse.beat();
        }
        assert!((0..UNANSWERED_MAX).all(|_| !pulse.ask()));
        assert!(pulse.ask() && pulse.is_lost());
    }
}
