//! Ends that are alike: the same words again and again, and no step in between.
//!
//! A loss is worth another try, because the next attempt may do better. A worker that says why it
//! cannot go on, and says the same at the next try, will say it at the twentieth, too.

/// So many ends in a row that are alike, and a local job is over. The first may be chance, the
/// second has seen it happen again, the third is sure.
pub const ALIKE_MAX: u32 = 3;

/// The newest end by words, and how often it came in a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repeat {
    words: String,
    times: u32,
}

impl Repeat {
    /// An attempt without a step, or a worker before its first attempt, ended with these words.
    pub fn note(&mut self, words: &str) {
        let again = self.times > 0 && are_alike(words, &self.words);
        self.times = if again { self.times.saturating_add(1) } else { 1 };
        self.words = words.to_string();
    }

    /// A step was done, or an end came that says nothing.
    pub fn clear(&mut self) {
        *self = Repeat::default();
    }

    /// The words that have come too often, and how often.
    pub fn too_often(&self) -> Option<(&str, u32)> {
        (self.times >= ALIKE_MAX).then_some((self.words.as_str(), self.times))
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
/// `killed by signal 6 (SIGABRT)`.
pub fn is_own_fault(how: &str) -> bool {
    let number = how.strip_prefix("killed by signal ").unwrap_or_default();
    let number = number.split(' ').next().and_then(|number| number.parse().ok());
    number.is_some_and(|number: u32| OWN_SIGNALS.contains(&number))
}
