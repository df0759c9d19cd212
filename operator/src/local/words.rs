//! What workers say of their end: told once each, and whose logs hold more.

use moejob_manifest::words::several;
use moejob_plan::observed::Millis;
use moejob_plan::repeat::are_alike;
use moejob_protocol::report::{Detail, Event};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Exit codes that end the job at once, with the worker's words: its end tells them.
const ENDS_THE_JOB: [i32; 2] = [2, 3];

/// Warnings that are told again at most; all of them are events.
const WARNINGS_MAX: usize = 20;

#[derive(Debug, Default)]
pub struct Words {
    /// By worker: how it said that it would end, and why.
    said: HashMap<String, (i32, String)>,
    /// What was told since the newest step, and whether there was one.
    told: Vec<String>,
    stepped: bool,
    /// Losses that are told with the recovery, and when the first of them was seen.
    held: Vec<String>,
    held_at: Millis,
    /// Warnings of the whole run, in their order, to be told again at its end.
    warnings: Vec<String>,
    /// Sizes of the logs when the run began: they are appended to by one run after the other.
    logs: BTreeMap<PathBuf, u64>,
}

impl Words {
    /// Of a run whose workers write to `logs`.
    pub fn new(logs: &Path) -> Words {
        Words { logs: sizes(logs), ..Words::default() }
    }

    /// A worker says why it ends. What it says first is why.
    pub fn failed(&mut self, worker: &str, exit_code: i32, message: &str) {
        self.said.entry(worker.to_string()).or_insert((exit_code, message.to_string()));
    }

    /// What a person reads of a loss, if anything: the worker's own words before what was seen of
    /// it from outside, and the same words once.
    pub fn lost(&mut self, worker: &str, cause: &str) -> Option<String> {
        let cause = match self.said.get(worker) {
            Some((code, _)) if ENDS_THE_JOB.contains(code) => return None,
            Some((_, message)) => message,
            None => cause,
        };
        let (cause, worker) = (cause.to_string(), worker.to_string());
        match self.is_news(&cause) {
            true => Some(format!("lost {worker}: {cause}")),
            false => Some(format!("lost {worker} in the same way")),
        }
    }

    /// True once a worker has said why it ends.
    pub fn has_said(&self, worker: &str) -> bool {
        self.said.contains_key(worker)
    }

    /// A loss whose recovery will tell of it.
    pub fn hold(&mut self, loss: String, now: Millis) {
        if self.held.is_empty() {
            self.held_at = now;
        }
        self.held.push(loss);
    }

    pub fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    /// Losses that were held since that moment or before, to be told by themselves.
    pub fn held(&mut self, until: Millis) -> Vec<String> {
        if self.held_at > until { Vec::new() } else { std::mem::take(&mut self.held) }
    }

    /// The recovery is told.
    pub fn release(&mut self) {
        self.held.clear();
    }

    /// Whether it was not told since the newest step, in these or like words. It counts as told.
    pub fn is_news(&mut self, words: &str) -> bool {
        let is_news = !self.told.iter().any(|told| are_alike(told, words));
        if is_news {
            self.told.push(words.to_string());
        }
        is_news
    }

    /// A step is done: what comes now is news.
    pub fn stepped(&mut self) {
        self.told.clear();
        self.stepped = true;
    }

    /// A warning, which is told again at the end.
    pub fn warned(&mut self, words: &str) {
        let is_new = !self.warnings.iter().any(|told| are_alike(told, words));
        if is_new && self.warnings.len() < WARNINGS_MAX {
            self.warnings.push(words.to_string());
        }
    }

    /// What is told at the end of a run that was warned.
    pub fn warnings(&self) -> Option<String> {
        let lines = self.warnings.iter().map(|warning| format!("\n  {warning}"));
        let count = several(self.warnings.len(), "warning");
        (!self.warnings.is_empty()).then(|| format!("{count}:{}", lines.collect::<String>()))
    }

    /// A step was done in this run.
    pub fn has_stepped(&self) -> bool {
        self.stepped
    }

    /// Logs that were written to in this run.
    pub fn logs(&self, logs: &Path) -> Vec<PathBuf> {
        let grown = |(path, bytes): &(PathBuf, u64)| {
            *bytes > self.logs.get(path).copied().unwrap_or_default()
        };
        sizes(logs).into_iter().filter(grown).map(|(path, _)| path).collect()
    }
}

/// What a person reads of an attempt that begins; nothing of the first one.
pub fn goes_on_from(what: &str) -> String {
    if what.is_empty() { String::new() } else { format!("goes on from {what}") }
}

/// The line of an attempt that begins without a loss, as when a worker comes back.
pub fn goes_on_with(ranks: u32) -> String {
    format!("goes on with {}", several(ranks, "rank"))
}

/// What a person reads of a lost engine: which, how it ended, and the last line that it wrote.
pub fn of_lost_engine(event: &Event) -> String {
    let wrote = match event.details.get("lastWords") {
        Some(Detail::Text(wrote)) => wrote.lines().rev().find(|line| !line.trim().is_empty()),
        _ => None,
    };
    let words = wrote.map(|line| format!(": {}", line.trim())).unwrap_or_default();
    format!("{}{words}", event.message)
}

/// The words for checkpoints that fail: why, and the newest good one.
pub fn of_failing(why: &str, newest: Option<&str>) -> String {
    match newest {
        Some(newest) => format!("{why}; the newest good checkpoint is {newest}"),
        None => format!("{why}; there is no good checkpoint yet"),
    }
}

/// The line of a loss and its recovery, by the ranks of the attempt before and of this one:
/// `rank 3 (a-3) was killed: 7 of 8 go on after 2.2 s, 0 steps again`.
pub fn of_recovery(cause: &str, ranks: [u32; 2], first_step_ms: u64, steps_lost: u64) -> String {
    let [before, now] = ranks;
    let seconds = first_step_ms as f64 / 1000.0;
    let (of, go) = match now < before {
        true => (format!("{now} of {before}"), if now == 1 { "goes" } else { "go" }),
        false => (several(now, "rank"), if now == 1 { "goes" } else { "go" }),
    };
    format!("{cause}: {of} {go} on after {seconds:.1} s, {} again", several(steps_lost, "step"))
}

fn sizes(logs: &Path) -> BTreeMap<PathBuf, u64> {
    let files = std::fs::read_dir(logs).into_iter().flatten().flatten();
    files.filter_map(|file| Some((file.path(), file.metadata().ok()?.len()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::report::EventKind;

    #[test]
    fn a_lost_engine_is_told_with_its_last_line() {
        let lost = |wrote: Option<&str>| {
            let wrote = wrote.map(|text| Detail::Text(text.to_string()));
            let event = Event {
                time: String::new(),
                attempt: 1,
                event: EventKind::EngineLost,
                reason: "Lost".to_string(),
                message: "the engine of rank 1 is lost: exit code 70".to_string(),
                details: wrote.map(|wrote| ("lastWords".to_string(), wrote)).into_iter().collect(),
            };
            of_lost_engine(&event)
        };
        let without = "the engine of rank 1 is lost: exit code 70";
        assert_eq!([None, Some(""), Some(" \n")].map(lost), [without; 3]);
        let found = lost(Some("opened\nthe device failed: it hangs \n\n"));
        assert_eq!(found, format!("{without}: the device failed: it hangs"));
    }

    #[test]
    fn the_same_words_are_told_once_and_the_users_own_at_the_end() {
        let mut words = Words::default();
        words.failed("job-0", 1, "no room for 40 bytes");
        words.failed("job-1", 1, "no room for 41 bytes");
        words.failed("job-2", 3, "the data changed");
        let told = |words: &mut Words, of: &str| words.lost(of, "its stream was closed");
        let first = told(&mut words, "job-0");
        assert_eq!(first.as_deref(), Some("lost job-0: no room for 40 bytes"));
        let second = told(&mut words, "job-1");
        assert_eq!(second.as_deref(), Some("lost job-1 in the same way"));
        assert_eq!(told(&mut words, "job-2"), None);
        let killed = words.lost("job-3", "killed by signal 9");
        assert_eq!(killed.as_deref(), Some("lost job-3: killed by signal 9"));
        words.stepped();
        let again = words.lost("job-4", "killed by signal 9");
        assert_eq!(again.as_deref(), Some("lost job-4: killed by signal 9"));
    }

    #[test]
    fn what_each_attempt_says_is_told_once_until_a_step_is_done() {
        let mut words = Words::default();
        assert!(words.is_news("held-out data are trained on: a.txt"));
        assert!(!words.is_news("held-out data are trained on: a.txt"));
        assert!(words.is_news("no memory for a snapshot"));
        words.stepped();
        assert!(words.is_news("no memory for a snapshot"));
        assert_eq!(goes_on_from("step-00000010"), "goes on from step-00000010");
        assert_eq!(goes_on_from(""), "");
        assert_eq!(goes_on_with(4), "goes on with 4 ranks");
    }

    #[test]
    fn a_recovery_and_the_warnings_of_a_run_are_a_line_each() {
        let of = |ranks, ms, steps| of_recovery("rank 3 (a-3) was killed", ranks, ms, steps);
        let killed = "rank 3 (a-3) was killed: ";
        let expected = [
            (of([8, 7], 2240, 0), "7 of 8 go on after 2.2 s, 0 steps again"),
            (of([2, 1], 60, 1), "1 of 2 goes on after 0.1 s, 1 step again"),
            (of([8, 8], 700, 2), "8 ranks go on after 0.7 s, 2 steps again"),
        ];
        for (found, told) in expected {
            assert_eq!(found, format!("{killed}{told}"));
        }
        let failing = of_failing("no room", Some("step-00000020"));
        assert_eq!(failing, "no room; the newest good checkpoint is step-00000020");
        assert!(of_failing("no room", None).ends_with("no good checkpoint yet"));
        let mut words = Words::default();
        assert_eq!(words.warnings(), None);
        for told in ["a.txt looks odd", "a.txt looks odd", "memory is short"] {
            words.warned(told);
        }
        let told = words.warnings().expect("warnings");
        assert_eq!(told, "2 warnings:\n  a.txt looks odd\n  memory is short");
    }

    #[test]
    fn a_loss_waits_for_its_recovery_and_is_told_where_none_comes() {
        let mut words = Words::default();
        words.hold("lost a-1".to_string(), 1000);
        words.hold("lost a-2".to_string(), 3500);
        assert!(words.holds() && words.held(999).is_empty());
        assert_eq!(words.held(1000), ["lost a-1", "lost a-2"]);
        assert!(!words.holds() && words.held(9000).is_empty());
        words.hold("lost a-3".to_string(), 5000);
        words.release();
        assert!(words.held(9000).is_empty());
    }

    #[test]
    fn only_logs_that_this_run_wrote_to_are_named() {
        let home = tempfile::tempdir().expect("a folder");
        let path = |name: &str| home.path().join(name);
        std::fs::write(path("node-0.log"), "of the run before").expect("a file");
        std::fs::write(path("node-1.log"), "").expect("a file");
        let words = Words::new(home.path());
        assert!(words.logs(home.path()).is_empty());
        std::fs::write(path("node-1.log"), "a stack").expect("a file");
        assert_eq!(words.logs(home.path()), [path("node-1.log")]);
        assert!(Words::new(&path("nowhere")).logs(&path("nowhere")).is_empty());
    }
}
