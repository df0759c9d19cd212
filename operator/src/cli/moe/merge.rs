//! Lines of many logs as one, in the order of their times. Pure: time comes as an argument.
//!
//! The earliest line is given out once every log has either said something later, or has ended, or
//! has been quiet for a while; so what is followed live is in order as well.

use moejob_plan::observed::Millis;
use std::collections::VecDeque;

/// A log that has been quiet for this long is not waited for.
pub const PATIENCE: Millis = 400;
/// Lines that are held at most; beyond that the earliest goes out, whoever is awaited.
const HELD_MAX: usize = 100_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub log: usize,
    /// Nanoseconds since 1970.
    pub time: i128,
    pub text: String,
}

#[derive(Default)]
pub struct Merge {
    logs: Vec<Log>,
    held: usize,
}

struct Log {
    lines: VecDeque<Line>,
    open: bool,
    heard: Millis,
    newest: i128,
}

impl Merge {
    /// A log that may say something; its number.
    pub fn open(&mut self, now: Millis) -> usize {
        let lines = VecDeque::new();
        self.logs.push(Log { lines, open: true, heard: now, newest: i128::MIN });
        self.logs.len() - 1
    }

    /// Within a log lines keep their order, whatever their times say.
    pub fn push(&mut self, log: usize, time: i128, text: String, now: Millis) {
        let Some(of) = self.logs.get_mut(log) else { return };
        of.newest = of.newest.max(time);
        of.heard = now;
        of.lines.push_back(Line { log, time: of.newest, text });
        self.held += 1;
    }

    pub fn close(&mut self, log: usize) {
        if let Some(log) = self.logs.get_mut(log) {
            log.open = false;
        }
    }

    /// The next line, if it is known to be the next. With `patience` quiet logs are not awaited.
    pub fn take(&mut self, now: Millis, patience: Option<Millis>) -> Option<Line> {
        let awaited = |log: &Log| {
            let quiet = patience.is_some_and(|patience| now >= log.heard + patience);
            log.open && log.lines.is_empty() && !quiet
        };
        if self.held <= HELD_MAX && self.logs.iter().any(awaited) {
            return None;
        }
        let heads = self.logs.iter().filter_map(|log| log.lines.front());
        let first = heads.min_by_key(|line| (line.time, line.log))?.log;
        self.held -= 1;
        self.logs[first].lines.pop_front()
    }

    pub fn is_empty(&self) -> bool {
        self.held == 0
    }
}

/// Nanoseconds and words of a line that the kubelet has put its time before.
pub fn split(line: &str) -> Option<(i128, &str)> {
    let (time, text) = line.split_once(' ').unwrap_or((line, ""));
    let time: k8s_openapi::jiff::Timestamp = time.parse().ok()?;
    Some((time.as_nanosecond(), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(merge: &mut Merge, now: Millis, patience: Option<Millis>) -> String {
        let lines = std::iter::from_fn(|| merge.take(now, patience));
        lines.map(|line| line.text).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn lines_come_in_the_order_of_their_times() {
        let mut merge = Merge::default();
        let (a, b) = (merge.open(0), merge.open(0));
        merge.push(a, 1, "a1".into(), 0);
        merge.push(a, 5, "a5".into(), 0);
        assert_eq!(drain(&mut merge, 0, None), "", "b may still say something earlier");
        merge.push(b, 3, "b3".into(), 0);
        assert_eq!(drain(&mut merge, 0, None), "a1 b3");
        merge.close(b);
        assert_eq!(drain(&mut merge, 0, None), "a5");
        merge.close(a);
        assert!(merge.is_empty());
    }

    #[test]
    fn a_quiet_log_is_not_awaited_for_ever() {
        let mut merge = Merge::default();
        let (a, b) = (merge.open(0), merge.open(0));
        merge.push(a, 1, "a1".into(), 0);
        assert_eq!(drain(&mut merge, PATIENCE - 1, Some(PATIENCE)), "");
        assert_eq!(drain(&mut merge, PATIENCE, Some(PATIENCE)), "a1");
        merge.push(b, 7, "b7".into(), 500);
        merge.push(a, 6, "a6".into(), 501);
        assert_eq!(drain(&mut merge, 901, Some(PATIENCE)), "a6 b7");
        let late = merge.open(1_000);
        merge.push(a, 9, "a9".into(), 1_000);
        assert_eq!(drain(&mut merge, 1_399, Some(PATIENCE)), "", "it may have begun earlier");
        merge.push(late, 8, "late8".into(), 1_399);
        assert_eq!(drain(&mut merge, 1_900, Some(PATIENCE)), "late8 a9");
    }

    #[test]
    fn a_log_keeps_its_own_order_and_too_many_lines_go_out() {
        let mut merge = Merge::default();
        let (a, _b) = (merge.open(0), merge.open(0));
        merge.push(a, 5, "first".into(), 0);
        merge.push(a, 4, "second".into(), 0);
        for index in 0..HELD_MAX {
            merge.push(a, 6 + index as i128, String::new(), 0);
        }
        assert_eq!(merge.take(0, None).map(|line| line.text).as_deref(), Some("first"));
        assert_eq!(merge.take(0, None).map(|line| line.text).as_deref(), Some("second"));
        assert_eq!(merge.take(0, None), None);
    }

    #[test]
    fn the_kubelets_time_is_taken_off() {
        let line = "2026-11-21T17:00:00.000000007Z  two words ";
        assert_eq!(split(line), Some((1_795_280_400_000_000_007, " two words ")));
        assert_eq!(split("2026-11-21T17:00:00Z"), Some((1_795_280_400_000_000_000, "")));
        assert_eq!(split("no time"), None);
    }
}
