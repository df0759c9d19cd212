//! Ends that are alike: the same words again, behind the same step.
//!
//! A loss is worth another try, because the next attempt may do better. A worker that says why it
//! cannot go on, and says the same at the next try, will say it at the twentieth, too. A step of a
//! job is the same numbers in every attempt, wherever that has resumed. So what ends it in a step
//! and ends it there again is no machine's fault.

/// So many ends in a row that are alike outside of steps, and a local job is over. The first may be
/// chance, the second has seen it happen again, the third is sure.
pub const ALIKE_MAX: u32 = 3;
/// So many ends in a row that are alike in the same step, and any job is over.
pub const IN_STEP_MAX: u32 = 2;

/// How an attempt ended, as the worker said that ended it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct End {
    pub words: String,
    /// Steps done before it.
    pub step: u64,
    /// It came of a step: the worker was in one, or steps were done before it in its attempt.
    pub in_step: bool,
}

/// The newest end by words, and how often it came in a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repeat {
    end: End,
    times: u32,
}

impl Repeat {
    /// An attempt, or a worker before its first attempt, ended so.
    pub fn note(&mut self, end: End) {
        let is_alike = end.step == self.end.step && are_alike(&end.words, &self.end.words);
        let again = self.times > 0 && is_alike;
        let in_step = end.in_step || again && self.end.in_step;
        self.times = if again { self.times.saturating_add(1) } else { 1 };
        self.end = End { in_step, ..end };
    }

    /// An end came that says nothing.
    pub fn clear(&mut self) {
        *self = Repeat::default();
    }

    /// What has come too often, and how often. What no step brought about may be another machine's
    /// luck: `is_local` says that there is none.
    pub fn too_often(&self, is_local: bool) -> Option<(&End, u32)> {
        let over = match self.end.in_step {
            true => self.times >= IN_STEP_MAX,
            false => is_local && self.times >= ALIKE_MAX,
        };
        over.then_some((&self.end, self.times))
    }
}

/// Whether two messages say the same. Ports, process ids and attempts differ from try to try, so
/// digits do not count.
pub fn are_alike(a: &str, b: &str) -> bool {
    let letters = |text: &'_ str| text.chars().filter(|c| !c.is_ascii_digit()).collect::<String>();
    letters(a) == letters(b)
}

/// Signals by which a process gives itself up: SIGILL, SIGABRT, SIGBUS, SIGFPE. All others come
/// from outside, and the next try need not meet them. SIGSEGV is left out: bad memory of one node
/// or a race brings it about, too, and then the job has to train on.
const OWN_SIGNALS: [u32; 4] = [4, 6, 7, 8];

/// Whether a process ended by its own fault, as its runner describes the end of it:
/// `killed by signal 6 (SIGABRT)`, or `exit code 137 (OOMKilled)`, which is a container that grew
/// beyond its own limit.
pub fn is_own_fault(how: &str) -> bool {
    let number = how.strip_prefix("killed by signal ").unwrap_or_default();
    let number = number.split(' ').next().and_then(|number| number.parse().ok());
    number.is_some_and(|number: u32| OWN_SIGNALS.contains(&number)) || how.contains("(OOMKilled)")
}

/// Whether an engine ended by what it computed, as its worker describes the end of it: it panicked,
/// or there was no more memory.
pub fn gives_up_itself(cause: &str) -> bool {
    let cause = cause.to_lowercase().replace('_', " ");
    cause.contains("exit code 101") || cause.contains("out of memory")
}
