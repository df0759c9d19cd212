//! Jobs whose specs are to be judged. One takes milliseconds, a thousand of them take longer than a
//! lease lasts: so it is done a few at a time, and all else of the process goes on in between.

use crate::observe::Key;
use std::collections::BTreeSet;
use std::time::Duration;

/// In one go; the last one may take longer.
const GO: Duration = Duration::from_millis(5);

/// Jobs with workers come first: a gang that trains waits for its leader.
#[derive(Debug, Default)]
pub struct Judging {
    waiting: BTreeSet<(bool, Key)>,
}

impl Judging {
    pub fn add(&mut self, key: &Key, has_workers: bool) {
        let (first, later) = ((false, Key::clone(key)), (true, Key::clone(key)));
        if has_workers {
            self.waiting.remove(&later);
            self.waiting.insert(first);
        } else if !self.waiting.contains(&first) {
            self.waiting.insert(later);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A job that has workers waits.
    pub fn holds_up(&self) -> bool {
        self.waiting.first().is_some_and(|(later, _)| !later)
    }

    /// The next ones, as many as fit into one go by that clock, and one at the least.
    pub fn go(&mut self, clock: impl Fn() -> Duration, mut judge: impl FnMut(Key)) {
        let began = clock();
        while let Some((_, key)) = self.waiting.pop_first() {
            judge(key);
            if clock().saturating_sub(began) >= GO {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::Arc;

    #[test]
    fn a_few_jobs_are_judged_in_one_go_and_those_that_train_first() {
        let mut judging = Judging::default();
        for job in 0..1_500 {
            judging.add(&Arc::from(format!("n/{job:04}")), job % 100 == 99);
        }
        let (now, mut order, mut goes) = (Cell::new(Duration::ZERO), Vec::new(), 0);
        while !judging.is_empty() {
            let (began, before) = (now.get(), order.len());
            let held = judging.holds_up();
            judging.go(|| now.get(), |key| {
                // One in a hundred is a large one.
                let took = if key.ends_with("50") { 40 } else { 2 };
                now.set(now.get() + Duration::from_millis(took));
                order.push(key);
            });
            let took = now.get() - began;
            assert!(took < Duration::from_millis(50), "{took:?}");
            assert!(order.len() - before <= 3, "{} at once", order.len() - before);
            assert_eq!(held, before < 15);
            goes += 1;
        }
        assert!(goes >= 500, "{goes}");
        assert_eq!(order.len(), 1_500);
        assert!(order[..15].iter().all(|key| key.ends_with("99")), "{:?}", &order[..15]);
    }

    #[test]
    fn a_job_waits_once() {
        let mut judging = Judging::default();
        let key: Key = Arc::from("n/a");
        for has_workers in [false, true, false, false] {
            judging.add(&key, has_workers);
        }
        assert!(judging.holds_up(), "its workers were seen");
        let mut judged = Vec::new();
        judging.go(|| Duration::ZERO, |key| judged.push(key));
        assert_eq!((judged, judging.is_empty()), (vec![key], true));
    }
}
