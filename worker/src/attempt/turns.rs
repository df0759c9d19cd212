//! Which step is begun when, and after which step something is due.
//!
//! ```text
//! say(n) -> begin n [begin n + 1] -> numbers of n, hear(n) -> what is due after n -> say(n + 1)
//! ```
//! Where a step is begun ahead, hear(n) comes before begin n, and waits while n computes already.
//! Only behind something that was due does no step compute then.
//!
//! One step may be begun before the numbers of the one before it are known. Behind a step after
//! which something is due none is begun: the state is that of one step then, on every rank. What
//! the ranks ask of each other takes effect after the newest step that was begun when they heard
//! it. All of this follows from the schedule and from what all heard, so every rank does alike.

/// When something is due whatever is asked: after every so many steps, 0: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// After the last step a checkpoint is due, and a validation where there are any.
    pub steps: u64,
    pub validation: u64,
    pub snapshot: u64,
    pub checkpoint: u64,
}

/// What all ranks have agreed on beside the schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub snapshot: bool,
    pub checkpoint: bool,
    pub stop: bool,
}

impl Wanted {
    fn add(&mut self, more: Wanted) {
        self.snapshot |= more.snapshot;
        self.checkpoint |= more.checkpoint;
        self.stop |= more.stop;
    }
}

/// What is due after a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Due {
    pub validation: bool,
    pub snapshot: bool,
    pub checkpoint: bool,
    /// The ranks were asked to stop.
    pub stop: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Turns {
    schedule: Schedule,
    /// One step may be begun ahead.
    ahead: bool,
    /// Steps whose numbers are known, and steps that were begun.
    done: u64,
    begun: u64,
    /// Heard, and due after the newest step that was begun.
    wanted: Wanted,
    stopped: bool,
}

impl Turns {
    /// After `done` steps.
    pub fn new(schedule: Schedule, done: u64, ahead: bool) -> Turns {
        let (begun, wanted, stopped) = (done, Wanted::default(), false);
        Turns { schedule, ahead, done, begun, wanted, stopped }
    }

    /// Steps whose numbers are known.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// No step is left.
    pub fn are_over(&self) -> bool {
        self.stopped || self.done >= self.schedule.steps
    }

    /// The step to begin before the next numbers are waited for, counted from 0; None: no more.
    pub fn begin(&mut self) -> Option<u64> {
        let alone = self.begun == self.done;
        let beside = self.ahead
            && self.begun == self.done + 1
            && self.wanted == Wanted::default()
            && self.due_by_schedule(self.begun) == Due::default();
        if self.are_over() || !(alone || beside) {
            return None;
        }
        self.begun += 1;
        Some(self.begun - 1)
    }

    /// The oldest step that was begun is done: what is due now. `heard` is what all ranks heard
    /// with its numbers.
    pub fn end(&mut self, heard: Wanted) -> Due {
        assert!(self.begun > self.done, "a step was begun");
        self.done += 1;
        self.wanted.add(heard);
        let mut due = self.due_by_schedule(self.done);
        if self.begun > self.done {
            assert_eq!(due, Due::default(), "nothing is begun behind a step with something due");
            return due;
        }
        let wanted = std::mem::take(&mut self.wanted);
        due.snapshot |= wanted.snapshot;
        due.checkpoint |= wanted.checkpoint;
        due.stop |= wanted.stop;
        self.stopped = due.stop;
        due
    }

    fn due_by_schedule(&self, done: u64) -> Due {
        let Schedule { steps, validation, snapshot, checkpoint } = self.schedule;
        let every = |steps: u64| steps > 0 && done.is_multiple_of(steps);
        let last = done >= steps;
        Due {
            validation: validation > 0 && (last || every(validation)),
            snapshot: every(snapshot),
            checkpoint: last || every(checkpoint),
            stop: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays `input` to its end: `steps N`, `validation N`, `snapshot N`, `checkpoint N`,
    /// `done N`, `ahead`, and `stop N`, `checkpoint-now N`, `snapshot-now N`: heard with the
    /// numbers of the N-th step, counted from 1. Gives a line a call: `+n` a step is begun, `n`
    /// its numbers are known, with what is due behind it.
    fn played(input: &str) -> String {
        let (mut schedule, mut done, mut ahead) = (Schedule::default(), 0, false);
        let mut heard: Vec<(u64, Wanted)> = Vec::new();
        for line in input.split(',') {
            let (word, number) = line.trim().split_once(' ').unwrap_or((line.trim(), "0"));
            let number: u64 = number.parse().expect("a number");
            let mut hear = |wanted| heard.push((number, wanted));
            match word {
                "steps" => schedule.steps = number,
                "validation" => schedule.validation = number,
                "snapshot" => schedule.snapshot = number,
                "checkpoint" => schedule.checkpoint = number,
                "done" => done = number,
                "ahead" => ahead = true,
                "stop" => hear(Wanted { stop: true, ..Wanted::default() }),
                "checkpoint-now" => hear(Wanted { checkpoint: true, ..Wanted::default() }),
                "snapshot-now" => hear(Wanted { snapshot: true, ..Wanted::default() }),
                other => panic!("{other}"),
            }
        }
        let mut turns = Turns::new(schedule, done, ahead);
        let mut out = String::new();
        while !turns.are_over() {
            while let Some(step) = turns.begin() {
                out += &format!(" +{}", step + 1);
            }
            let now = turns.done() + 1;
            let mut all = Wanted::default();
            let with = heard.iter().filter(|(with, _)| *with == now);
            with.for_each(|(_, wanted)| all.add(*wanted));
            let due = turns.end(all);
            out += &format!(" {}", turns.done());
            let words = [
                (due.validation, "validation"),
                (due.snapshot, "snapshot"),
                (due.checkpoint, "checkpoint"),
                (due.stop, "stop"),
            ];
            let words: Vec<&str> =
                words.into_iter().filter(|(is, _)| *is).map(|(_, word)| word).collect();
            if !words.is_empty() {
                out += &format!("({})", words.join(" "));
            }
        }
        assert_eq!(turns.begin(), None, "nothing is begun behind the end");
        assert_eq!(turns.begun, turns.done, "nothing is left under way");
        out.trim().to_string()
    }

    #[track_caller]
    fn check(input: &str, expected: &str) {
        assert_eq!(played(input), expected, "{input}");
    }

    #[test]
    fn steps_follow_each_other() {
        check("steps 3", "+1 1 +2 2 +3 3(checkpoint)");
        check("steps 4, ahead", "+1 +2 1 +3 2 +4 3 4(checkpoint)");
        check("steps 1, ahead", "+1 1(checkpoint)");
        check("steps 5, done 3, ahead", "+4 +5 4 5(checkpoint)");
        check("steps 3, done 3, ahead", "");
    }

    #[test]
    fn no_step_is_begun_behind_one_with_something_due() {
        check(
            "steps 6, ahead, snapshot 3",
            "+1 +2 1 +3 2 3(snapshot) +4 +5 4 +6 5 6(snapshot checkpoint)",
        );
        check(
            "steps 5, ahead, validation 2, checkpoint 4",
            "+1 +2 1 2(validation) +3 +4 3 4(validation checkpoint) +5 5(validation checkpoint)",
        );
        check("steps 3, ahead, snapshot 1", "+1 1(snapshot) +2 2(snapshot) +3 3(snapshot \
             checkpoint)");
    }

    #[test]
    fn what_is_heard_takes_effect_behind_the_newest_step_that_was_begun() {
        check("steps 9, stop 2", "+1 1 +2 2(stop)");
        check("steps 9, ahead, stop 2", "+1 +2 1 +3 2 3(stop)");
        check("steps 9, ahead, stop 1, checkpoint-now 1", "+1 +2 1 2(checkpoint stop)");
        check(
            "steps 5, ahead, checkpoint-now 1, snapshot-now 2",
            "+1 +2 1 2(snapshot checkpoint) +3 +4 3 +5 4 5(checkpoint)",
        );
        check(
            "steps 5, ahead, checkpoint-now 2",
            "+1 +2 1 +3 2 3(checkpoint) +4 +5 4 5(checkpoint)",
        );
    }

    #[test]
    fn what_is_heard_with_a_step_that_settles_takes_effect_there() {
        check("steps 9, ahead, snapshot 2, stop 2", "+1 +2 1 2(snapshot stop)");
        check("steps 9, ahead, snapshot 3, stop 2", "+1 +2 1 +3 2 3(snapshot stop)");
        check("steps 3, ahead, stop 3", "+1 +2 1 +3 2 3(checkpoint stop)");
        check("steps 3, ahead, stop 2", "+1 +2 1 +3 2 3(checkpoint stop)");
    }
}
