//! Whether the loss of a run says that something is wrong: it climbs, or it has never fallen.
//!
//! ```text
//! step, loss, learning rate --LossWatch::push--> nothing, or what a person should know, once
//! ```

/// A reading leaves so much of the mean of before.
const KEPT: f64 = 0.95;
/// Readings before which the mean says nothing.
const READINGS_MIN: u64 = 50;
/// It climbs when the mean is so much above its least, in nats and as a part of it: noise and a
/// change of data are less.
const CLIMB: f64 = 0.5;
const CLIMB_SHARE: f64 = 0.15;
/// Steps behind the warm-up in which a model that learns has fallen by that part.
const FLAT_STEPS: u64 = 200;
const FLAT_SHARE: f64 = 0.01;
/// Readings whose mean is the loss at first.
const FIRST: u64 = 20;

/// Something that a person should know of the loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The event has it as its reason.
    pub reason: &'static str,
    pub words: String,
}

/// It watches one run from its start on.
#[derive(Clone, Debug, Default)]
pub struct LossWatch {
    /// It begins with new weights: only then must it fall.
    begins: bool,
    readings: u64,
    step: u64,
    mean: f64,
    first: f64,
    /// The least mean, and its step.
    least: Option<(f64, u64)>,
    climbs: bool,
    /// Steps since the learning rate stopped rising.
    settled: u64,
    rate: f64,
    flat_is_told: bool,
}

impl LossWatch {
    pub fn new(begins: bool) -> LossWatch {
        LossWatch { begins, ..LossWatch::default() }
    }

    /// A step is done. Steps that are done again say nothing new, nor does a loss that is no
    /// number.
    pub fn push(&mut self, step: u64, loss: f64, rate: f64) -> Option<Finding> {
        if step <= self.step || !loss.is_finite() {
            return None;
        }
        self.step = step;
        self.readings += 1;
        self.mean = match self.readings {
            readings @ ..=FIRST => self.mean + (loss - self.mean) / readings as f64,
            _ => KEPT * self.mean + (1.0 - KEPT) * loss,
        };
        if self.readings == FIRST {
            self.first = self.mean;
        }
        if rate <= self.rate {
            self.settled += 1;
        }
        self.rate = rate;
        if self.readings < READINGS_MIN {
            return None;
        }
        let (least, at) = *self.least.get_or_insert((self.mean, step));
        if self.mean < least {
            self.least = Some((self.mean, step));
            self.climbs = false;
        }
        if !self.climbs && self.mean > least + CLIMB.max(CLIMB_SHARE * least) {
            self.climbs = true;
            return Some(Finding {
                reason: "LossClimbs",
                words: format!(
                    "the loss climbs: it was {least:.2} at step {at}, and is {:.2} at step {step}. \
                     From a checkpoint before, a lower learning rate or a lower \
                     training.maxGradNorm may help",
                    self.mean
                ),
            });
        }
        let is_flat = self.begins
            && self.settled >= FLAT_STEPS
            && self.mean > self.first * (1.0 - FLAT_SHARE);
        if is_flat && !self.flat_is_told {
            self.flat_is_told = true;
            return Some(Finding {
                reason: "LossFlat",
                words: format!(
                    "the loss has not fallen: it was {:.2} at first, and is {:.2} at step {step}. \
                     The learning rate is {rate:.1e}; is it too low, or are the data without a \
                     pattern?",
                    self.first, self.mean
                ),
            });
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `REASON STEP` of all that is told of a run of so many steps.
    fn told(begins: bool, steps: u64, loss: impl Fn(u64) -> f64) -> Vec<String> {
        let mut watch = LossWatch::new(begins);
        let noise = |step: u64| 0.1 * (step as f64 * 1.7).sin();
        let rate = |step: u64| if step < 100 { step as f64 * 1e-5 } else { 1e-3 };
        let found = (1..=steps).filter_map(|step| {
            let found = watch.push(step, loss(step) + noise(step), rate(step))?;
            assert!(found.words.starts_with("the loss "), "{}", found.words);
            Some(format!("{} {step}", found.reason))
        });
        found.collect()
    }

    #[test]
    fn a_loss_that_climbs_or_never_falls_is_told_once() {
        let falls = |step: u64| 2.0 + 3.5 * (-(step as f64) / 200.0).exp();
        assert_eq!(told(true, 3000, falls), [""; 0]);
        // It is at its end, and changes no more; as a run that goes on from there.
        assert_eq!(told(false, 3000, |_| 2.0), [""; 0]);
        let found = told(true, 3000, |_| 5.54);
        assert_eq!(found, ["LossFlat 300"]);
        let diverges = |step: u64| if step < 1000 { falls(step) } else { 4.0 };
        let found = told(true, 3000, diverges);
        assert!(found.len() == 1 && found[0].starts_with("LossClimbs 10"), "{found:?}");
        // It comes back, falls further, and climbs once more.
        let twice = |step: u64| match step {
            0..1000 => falls(step),
            1000..1200 => 4.0,
            1200..2000 => 1.5,
            _ => 4.0,
        };
        let found = told(true, 3000, twice);
        assert!(found.len() == 2 && found[1].starts_with("LossClimbs 20"), "{found:?}");
        // A step that stands out is no climb.
        let peak = |step: u64| if step == 1000 { 9.0 } else { falls(step) };
        assert_eq!(told(true, 3000, peak), [""; 0]);
    }

    #[test]
    fn steps_that_are_done_again_and_numbers_that_are_none_say_nothing() {
        let mut watch = LossWatch::new(true);
        for step in 1..=60 {
            assert_eq!(watch.push(step, 2.0, 1e-3), None);
        }
        let before = watch.mean;
        for step in 1..=60 {
            assert_eq!(watch.push(step, 99.0, 1e-3), None);
        }
        assert_eq!(watch.push(61, f64::NAN, 1e-3), None);
        assert_eq!(watch.mean, before);
    }
}
