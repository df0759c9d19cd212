//! What of a GPU's readings and troubles a person should hear.

use moejob_kernels::cuda::{Reading, Trouble};
use std::collections::BTreeMap;
use std::time::Duration;

/// The driver reports an error, or memory fails.
pub const TROUBLE: &str = "DeviceTrouble";
/// The clock is lowered for another reason than the power that a busy GPU draws.
pub const SLOWED: &str = "DeviceSlowed";

/// Reasons for a lower clock that are somebody's to look at. A power cap is how a busy GPU works.
const BAD_REASONS: [&str; 4] = ["power brake", "hardware thermal", "hardware", "software thermal"];
/// A clock that is lowered for less long is no news.
const SLOW_MIN: Duration = Duration::from_secs(5);
/// After so long without it, it is news again; so is a trouble that was told.
const AGAIN: Duration = Duration::from_secs(60);
/// Of one attempt: a broken GPU reports without end, and the first words tell most.
const TOLD_MAX: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// CamelCase
    pub reason: &'static str,
    pub message: String,
}

/// What was told so far. Times are since the GPU is watched.
#[derive(Debug, Default)]
pub struct Story {
    told: usize,
    /// When each was last told.
    troubles: BTreeMap<String, Duration>,
    uncorrected: Option<u64>,
    /// When the clock was first, and last, seen to be lowered.
    slow: Option<(Duration, Duration)>,
    slow_told: bool,
}

impl Story {
    /// What the driver reported.
    pub fn trouble(&mut self, trouble: Trouble, now: Duration) -> Option<Told> {
        self.once(words(trouble), now)
    }

    /// What was read.
    pub fn reading(&mut self, reading: &Reading, now: Duration) -> Vec<Told> {
        let mut all = Vec::new();
        if let Some(count) = reading.ecc_uncorrected {
            let before = self.uncorrected.replace(count).unwrap_or(count);
            if count > before {
                all.extend(self.tell(TROUBLE, format!(
                    "{} of its memory could not be corrected, {count} since the driver was loaded",
                    errors(count - before)
                )));
            }
        }
        if let Some(rows) = reading.remapped {
            if rows.failed {
                let text = "rows of its memory fail and cannot be remapped; the GPU must be \
                            replaced";
                all.extend(self.once(text.to_string(), now));
            } else if rows.pending {
                let text = "rows of its memory fail and wait to be remapped; the GPU must be reset \
                            when nobody uses it";
                all.extend(self.once(text.to_string(), now));
            }
        }
        all.extend(self.slowness(reading, now));
        all
    }

    fn slowness(&mut self, reading: &Reading, now: Duration) -> Option<Told> {
        let bad: Vec<&str> = (reading.slowed_by.iter().copied())
            .filter(|reason| BAD_REASONS.contains(reason))
            .collect();
        if bad.is_empty() {
            if self.slow.is_some_and(|(_, last)| !self.slow_told || now >= last + AGAIN) {
                (self.slow, self.slow_told) = (None, false);
            }
            return None;
        }
        let (first, _) = self.slow.unwrap_or((now, now));
        self.slow = Some((first, now));
        if self.slow_told || now < first + SLOW_MIN {
            return None;
        }
        self.slow_told = true;
        let clock = reading.megahertz.map(|clock| format!("{clock} MHz"));
        let heat = reading.celsius.map(|heat| format!("{heat} C"));
        let power = reading.watts.map(|watts| format!("{watts:.0} W"));
        let numbers: Vec<String> = [clock, heat, power].into_iter().flatten().collect();
        let at = match numbers.is_empty() {
            true => String::new(),
            false => format!(" ({})", numbers.join(", ")),
        };
        let reasons = bad.join(", ");
        self.tell(SLOWED, format!("its clock is lowered: {reasons}{at}; steps take longer"))
    }

    /// Unless it was told a short while ago.
    fn once(&mut self, message: String, now: Duration) -> Option<Told> {
        if self.troubles.get(&message).is_some_and(|told| now < *told + AGAIN) {
            return None;
        }
        let told = self.tell(TROUBLE, message.clone());
        if told.is_some() {
            self.troubles.insert(message, now);
        }
        told
    }

    fn tell(&mut self, reason: &'static str, message: String) -> Option<Told> {
        if self.told == TOLD_MAX {
            return None;
        }
        self.told += 1;
        Some(Told { reason, message })
    }
}

fn errors(count: u64) -> String {
    if count == 1 { "1 error".to_string() } else { format!("{count} errors") }
}

fn words(trouble: Trouble) -> String {
    match trouble {
        Trouble::Xid(number) => match xid(number) {
            Some((what, next)) => {
                format!("the driver reports the error Xid {number}: {what}; {next}")
            }
            None => format!("the driver reports the error Xid {number}"),
        },
        Trouble::DoubleBitEcc => "its memory has an error that cannot be corrected".to_string(),
        Trouble::Lost => "it has fallen off the bus; the machine must be restarted".to_string(),
    }
}

const OURS: &str = "most often a fault of the program";
const KILLED: &str = "also where a process on the GPU was killed";
const LOOK: &str = "have the machine looked at";
const RESET: &str = "the GPU must be reset";

/// The driver's numbers that tell of computing, by its table of Xid errors.
fn xid(number: u64) -> Option<(&'static str, &'static str)> {
    Some(match number {
        13 => ("an exception of a kernel", OURS),
        31 => ("a kernel touched memory that is not mapped", OURS),
        32 => ("a damaged list of commands", LOOK),
        43 => ("the GPU has stopped the work of a process", OURS),
        45 => ("work was taken off the GPU", KILLED),
        48 => ("memory has an error that cannot be corrected", RESET),
        61 | 62 => ("its internal controller has stopped", RESET),
        63 => ("a row of its memory is to be remapped", "the GPU must be reset when it is free"),
        64 => ("a row of its memory could not be remapped", LOOK),
        74 => ("an error of NVLink", LOOK),
        79 => ("it has fallen off the bus", "the machine must be restarted"),
        92 => ("many errors of its memory are corrected", LOOK),
        94 => ("an error of its memory has ended a process", "the process alone starts again"),
        95 => ("an error of its memory may have reached other processes", RESET),
        119 | 120 => ("its own processor (GSP) does not answer", RESET),
        140 => ("memory has an error that cannot be corrected", RESET),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_kernels::cuda::Remapped;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn messages(told: impl IntoIterator<Item = Told>) -> Vec<String> {
        told.into_iter().map(|told| format!("{}: {}", told.reason, told.message)).collect()
    }

    #[test]
    fn a_trouble_is_told_once_a_minute_and_not_without_end() {
        let mut story = Story::default();
        let xid = |number| Trouble::Xid(number);
        let first = story.trouble(xid(79), s(0)).expect("news");
        assert_eq!(
            (first.reason, first.message.as_str()),
            (TROUBLE, "the driver reports the error Xid 79: it has fallen off the bus; the machine \
                       must be restarted")
        );
        assert_eq!(story.trouble(xid(79), s(59)), None);
        assert!(story.trouble(xid(150), s(59)).is_some_and(|told| told.message.ends_with("150")));
        assert!(story.trouble(xid(79), s(60)).is_some());
        let later = (1000..1100).filter_map(|number| story.trouble(xid(number), s(61)));
        assert_eq!(later.count(), TOLD_MAX - 3);
    }

    #[test]
    fn errors_of_memory_that_come_are_told_and_those_that_were_there_are_not() {
        let mut story = Story::default();
        let mut read = |count, at| {
            let reading = Reading { ecc_uncorrected: count, ..Reading::default() };
            messages(story.reading(&reading, s(at)))
        };
        assert_eq!(read(Some(3), 0), [""; 0]);
        assert_eq!(read(None, 1), [""; 0]);
        let told = "DeviceTrouble: 1 error of its memory could not be corrected, 4 since the \
                    driver was loaded";
        assert_eq!(read(Some(4), 2), [told]);
        // The driver was loaded again.
        assert_eq!(read(Some(0), 3), [""; 0]);
        assert!(read(Some(2), 4)[0].contains("2 errors of its memory"));
    }

    #[test]
    fn rows_that_wait_or_cannot_be_remapped_are_told() {
        let mut story = Story::default();
        let mut read = |pending, failed, at| {
            let remapped = Some(Remapped { pending, failed });
            messages(story.reading(&Reading { remapped, ..Reading::default() }, s(at)))
        };
        assert_eq!(read(false, false, 0), [""; 0]);
        assert!(read(true, false, 1)[0].contains("must be reset when nobody uses it"));
        assert_eq!(read(true, false, 2), [""; 0]);
        assert!(read(true, true, 3)[0].contains("must be replaced"));
    }

    #[test]
    fn a_clock_that_stays_low_is_told_with_its_numbers() {
        let mut story = Story::default();
        let mut read = |reasons: &[&'static str], at| {
            let reading = Reading {
                megahertz: Some(1155),
                celsius: Some(87),
                slowed_by: reasons.to_vec(),
                ..Reading::default()
            };
            messages(story.reading(&reading, s(at)))
        };
        // How a busy GPU works.
        assert!((0..60).all(|at| read(&["power cap"], at).is_empty()));
        let hot = ["hardware thermal", "power cap"];
        assert!((60..65).all(|at| read(&hot, at).is_empty()), "it may pass");
        let told = "DeviceSlowed: its clock is lowered: hardware thermal (1155 MHz, 87 C); steps \
                    take longer";
        assert_eq!(read(&hot, 65), [told]);
        assert!((66..80).all(|at| read(&hot, at).is_empty()), "it was told");
        // Off and on again is the same story; after a quiet minute it is another.
        assert!(read(&[], 80).is_empty());
        assert!(read(&hot, 85).is_empty() && read(&hot, 95).is_empty());
        assert!(read(&[], 160).is_empty() && read(&hot, 161).is_empty());
        assert_eq!(read(&hot, 166), [told]);
        // What passes within seconds is none.
        let mut story = Story::default();
        let brake = Reading { slowed_by: vec!["power brake"], ..Reading::default() };
        for at in [0, 4, 10, 14] {
            assert!(story.reading(&brake, s(at)).is_empty());
            assert!(story.reading(&Reading::default(), s(at + 4)).is_empty());
        }
    }
}
