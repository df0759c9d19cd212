//! Parts of a step that are timed by themselves, in the steps in which somebody asks for it.
//!
//! ```text
//! phases      | forward                            | backward      ..
//! stretches   |   [ dispatch ]     [ combine ]     |  [ dispatch ] ..
//! beside      |                                    |      [ reduceScatter ] ..
//! ```
//! Stretches among the ops lie in a phase each. Those beside them have a clock of their own, the
//! lane's of what passes between devices, and may end in a later step.

use std::time::Instant;

use crate::cuda::event::Event;
use crate::device::Device;
use crate::marks::{At, PhaseEnds, StepPhase, between};

/// The ones of a step.
#[derive(Debug, Default)]
pub(crate) struct Stretches {
    asked: bool,
    all: Vec<Stretch>,
}

#[derive(Debug)]
struct Stretch {
    name: usize,
    /// None: beside the ops.
    lies: Option<Lies>,
    begin: At,
    end: At,
}

/// Where a stretch among the ops lies.
#[derive(Clone, Copy, Debug)]
enum Lies {
    /// In the phase of this number.
    Within(usize),
    In(StepPhase),
}

/// A stretch that has no end yet; none: nobody asks.
#[derive(Debug)]
#[must_use]
pub struct StretchBegun(Option<(At, Option<Lies>)>);

/// The stretches of one step, see [`Device::cut_stretches`].
#[derive(Debug, Default)]
pub struct StretchEnds(Vec<Stretch>);

/// What a stretch took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StretchTook {
    /// As it was named.
    pub name: usize,
    /// Among the ops: the phase in which it lies. None: it was beside them.
    pub phase: Option<StepPhase>,
    pub seconds: f64,
}

impl Device {
    /// From now on stretches are timed, or they are not.
    pub fn time_stretches(&mut self, asked: bool) {
        self.phases().stretches.asked = asked;
    }

    /// What is enqueued until its end is timed: among the ops, or in the lane `beside` them. What
    /// is enqueued in a flight of tokens is beside them in any case, and its end is in that flight.
    pub fn begin_stretch(&mut self, beside: bool) -> StretchBegun {
        if !self.phases().stretches.asked {
            return StretchBegun(None);
        }
        let at = self.time(beside);
        let aside = beside || self.is_in_flight();
        let lies = (!aside).then(|| Lies::Within(self.phases_ended()));
        StretchBegun(at.map(|at| (at, lies)))
    }

    /// The end of what is called `name`.
    pub fn end_stretch(&mut self, begun: StretchBegun, name: usize) {
        let StretchBegun(Some((begin, lies))) = begun else { return };
        if let Some(end) = self.time(lies.is_none()) {
            self.phases().stretches.all.push(Stretch { name, lies, begin, end });
        }
    }

    fn time(&mut self, beside: bool) -> Option<At> {
        let spare = self.phases().spare.pop();
        match self {
            Device::Cpu(_) => Some(At::Host(Instant::now())),
            // In a flight its lane is where all is enqueued.
            Device::Cuda(cuda) if beside && !cuda.is_in_flight() => {
                cuda.event_beside(spare).map(At::Gpu)
            }
            Device::Cuda(cuda) => cuda.event_again(spare).map(At::Gpu),
        }
    }

    /// The stretches since the last call, of the step whose phases are `of`. Their times are known
    /// once [`StretchEnds::is_past`].
    pub fn cut_stretches(&mut self, of: &PhaseEnds) -> StretchEnds {
        let mut all = std::mem::take(&mut self.phases().stretches.all);
        for stretch in &mut all {
            if let Some(Lies::Within(number)) = stretch.lies {
                // Behind the last phase lies what is none.
                let phase = of.ended(number).unwrap_or(StepPhase::Other);
                stretch.lies = Some(Lies::In(phase));
            }
        }
        StretchEnds(all)
    }

    /// What each took; after a failure no time.
    pub fn stretches_took(&mut self, cut: StretchEnds) -> Vec<StretchTook> {
        let took = |stretch: &Stretch| StretchTook {
            name: stretch.name,
            phase: match stretch.lies {
                Some(Lies::In(phase)) => Some(phase),
                _ => None,
            },
            seconds: between(&stretch.begin, &stretch.end).unwrap_or(0.0) / 1e3,
        };
        let all = cut.0.iter().map(took).collect();
        let events = cut.0.into_iter().flat_map(|stretch| [stretch.begin, stretch.end]);
        let events: Vec<Event> = events.filter_map(At::event).collect();
        self.phases().spare.extend(events);
        all
    }
}

impl StretchEnds {
    /// Whether the device has come to the end of all of them. Does not wait; after a failure it
    /// will not.
    pub fn is_past(&self) -> bool {
        self.0.iter().all(|stretch| match &stretch.end {
            At::Host(_) => true,
            At::Gpu(event) => event.is_past().unwrap_or(false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;
    use std::time::Duration;

    #[test]
    fn stretches_lie_in_phases_and_are_timed_when_asked_for() {
        let mut device = Device::cpu(1, 0).expect("a thread");
        let pause = || sleep(Duration::from_millis(2));
        device.phase(StepPhase::Other);
        let begun = device.begin_stretch(false);
        device.end_stretch(begun, 1);
        assert!(device.cut_stretches(&PhaseEnds::default()).0.is_empty(), "nobody asks");
        device.time_stretches(true);
        for (phase, name) in [(StepPhase::Forward, 3), (StepPhase::Backward, 4)] {
            pause();
            let begun = device.begin_stretch(false);
            pause();
            device.end_stretch(begun, name);
            device.phase(phase);
        }
        let begun = device.begin_stretch(true);
        device.end_stretch(begun, 5);
        let begun = device.begin_stretch(false);
        device.end_stretch(begun, 6);
        let ends = device.cut_phases();
        let cut = device.cut_stretches(&ends);
        assert!(cut.is_past());
        let took = device.stretches_took(cut);
        let of: Vec<_> = took.iter().map(|took| (took.name, took.phase)).collect();
        let [forward, backward] = [StepPhase::Forward, StepPhase::Backward].map(Some);
        assert_eq!(of, [(3, forward), (4, backward), (5, None), (6, Some(StepPhase::Other))]);
        let paces = device.phase_paces(ends);
        for (took, phase) in took.iter().zip([StepPhase::Forward, StepPhase::Backward]) {
            let whole = paces[phase as usize].device;
            assert!(took.seconds >= 0.002 && took.seconds <= whole - 0.002, "{took:?} of {whole}");
        }
        assert!(device.cut_stretches(&PhaseEnds::default()).0.is_empty(), "they were cut");
    }
}
