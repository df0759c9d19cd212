//! Some steps are looked at: what they send, and how long the ops wait for it.
//!
//! ```text
//! begin -> verbs write down what they send, and are timed (`links/ledger.rs`) -> their ends
//! land: the phases are known; what travels beside the ops may still be on its way
//!   -> behind the last of it: CommunicationReport, with the line of this step or the next
//! ```
//! Events cost a GPU a microsecond each, two for each verb of each layer. So it is one step of
//! some.

use crate::engine::links::{Sent, WindowRows};
use moejob_kernels::{Device, PhaseEnds, StepPhase, StretchEnds, StretchTook};
use moejob_protocol::communication::{CommunicationReport, Verb, VerbReport};
use std::collections::BTreeMap;

/// Of so many steps one is looked at.
const EVERY: u64 = 16;
/// Which one, counted from 0: the steps before it load what later ones have.
const AT: u64 = 3;

/// What steps have shown.
#[derive(Debug)]
pub(super) struct Looks {
    every: u64,
    /// Of the newest step that is over, while something of it may be under way.
    open: Option<Over>,
    told: Option<CommunicationReport>,
}

/// A step that was looked at and is enqueued.
#[derive(Debug)]
pub(super) struct Look {
    step: u64,
    sent: Sent,
    ends: StretchEnds,
}

#[derive(Debug)]
struct Over {
    look: Look,
    /// Of each phase.
    seconds: [f64; StepPhase::COUNT],
}

impl Default for Looks {
    fn default() -> Looks {
        Looks { every: EVERY, open: None, told: None }
    }
}

impl Looks {
    /// One of so many steps, at least [`AT`] + 1, is looked at.
    pub fn each(&mut self, every: u64) {
        assert!(every > AT, "step {AT} of {every}");
        self.every = every;
    }

    /// Whether a step, counted from 0, is looked at.
    pub fn is_at(&self, step: u64) -> bool {
        step % self.every == AT
    }

    /// The device has come to the end of a step, whose phases took so long.
    pub fn over(&mut self, look: Option<Look>, seconds: [f64; StepPhase::COUNT]) {
        if let Some(look) = look {
            self.open = Some(Over { look, seconds });
        }
    }

    /// Whatever is known by now. `rows` are those that have passed windows.
    pub fn settle(&mut self, device: &mut Device, rows: impl FnOnce() -> WindowRows) {
        let is_past = |over: &mut Over| over.look.ends.is_past();
        let Some(Over { look, seconds }) = self.open.take_if(is_past) else { return };
        let Look { step, sent, ends } = look;
        let took = device.stretches_took(ends);
        self.told = Some(report(step, sent.with_rows(rows()), &took, &seconds));
    }

    pub fn take(&mut self) -> Option<CommunicationReport> {
        self.told.take()
    }
}

impl Look {
    /// Of the step that was enqueued last, whose phases are `of`.
    pub fn new(device: &mut Device, of: &PhaseEnds, step: u64, sent: Option<Sent>) -> Option<Look> {
        let ends = device.cut_stretches(of);
        sent.map(|sent| Look { step, sent, ends })
    }
}

/// The name of a phase in metrics that has verbs within, besides `communication` itself.
fn name(phase: StepPhase) -> &'static str {
    match phase {
        StepPhase::Data => "data",
        StepPhase::Forward => "forward",
        StepPhase::Backward => "backward",
        StepPhase::Communication => "communication",
        StepPhase::Numbers => "numbers",
        StepPhase::Update => "update",
        StepPhase::Other => "other",
    }
}

/// Of a step, counted from 0, by what was sent and what took how long. What the ops wait for is the
/// phase `communication`, and in other phases all verbs among the ops, and waits for verbs beside
/// them, which have no name of a verb.
fn report(
    step: u64,
    sent: Sent,
    took: &[StretchTook],
    phases: &[f64; StepPhase::COUNT],
) -> CommunicationReport {
    let mut within: BTreeMap<String, f64> = BTreeMap::new();
    for took in took {
        if let Some(phase) = took.phase.filter(|phase| *phase != StepPhase::Communication) {
            *within.entry(name(phase).to_string()).or_default() += took.seconds;
        }
    }
    let waited = phases[StepPhase::Communication as usize];
    let exposed_seconds = waited + within.values().sum::<f64>();
    let all: f64 = phases.iter().sum();
    let seconds = |verb: Verb| {
        let own = took.iter().filter(|took| took.name == verb as usize);
        own.map(|took| took.seconds).sum()
    };
    let verbs = sent.verbs.iter().map(|of| {
        let (link, beside) = (of.link.name().to_string(), of.beside);
        let told = VerbReport { link, bytes: of.bytes, seconds: seconds(of.verb), beside };
        (of.verb.name().to_string(), told)
    });
    CommunicationReport {
        step: step + 1,
        exposed_seconds,
        exposed_share: if all > 0.0 { exposed_seconds / all } else { 0.0 },
        within,
        verbs: verbs.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::links::{OfVerb, WAITED};
    use moejob_protocol::communication::Link;

    #[test]
    fn one_step_of_some_is_looked_at() {
        let mut looks = Looks::default();
        let at = |looks: &Looks| (0..40).filter(|step| looks.is_at(*step)).collect::<Vec<_>>();
        assert_eq!(at(&looks), [3, 19, 35]);
        looks.each(4);
        assert_eq!(at(&looks)[..3], [3, 7, 11]);
    }

    #[test]
    fn ops_wait_for_the_phase_and_for_what_lies_in_others() {
        let took = |verb: Verb, phase, seconds| StretchTook { name: verb as usize, phase, seconds };
        let (forward, backward) = (Some(StepPhase::Forward), Some(StepPhase::Backward));
        let all = [
            took(Verb::Dispatch, forward, 0.25),
            took(Verb::Combine, forward, 0.5),
            took(Verb::Dispatch, backward, 1.0),
            took(Verb::ReduceScatter, Some(StepPhase::Communication), 2.0),
            took(Verb::AllGather, None, 4.0),
            // A dispatch beside the ops, for which they have waited at its end.
            took(Verb::Dispatch, None, 0.5),
            StretchTook { name: WAITED, phase: backward, seconds: 0.125 },
        ];
        let of = |verb, link, bytes, beside| OfVerb { verb, link, bytes, beside };
        let verbs = vec![
            of(Verb::Dispatch, Link::Window, 100, true),
            of(Verb::Combine, Link::Window, 10, false),
            of(Verb::ReduceScatter, Link::Nccl, 7, false),
            of(Verb::AllGather, Link::Nccl, 8, true),
        ];
        let mut phases = [0.0; StepPhase::COUNT];
        phases[StepPhase::Communication as usize] = 2.25;
        phases[StepPhase::Forward as usize] = 3.0;
        phases[StepPhase::Backward as usize] = 2.75;
        let sent = Sent { verbs, before: [60, 0] };
        let told = report(19, sent.with_rows([65, 1]), &all, &phases);
        // 2.25 in the phase, of which 2 are a verb; 0.75 in forward, 1.125 in backward.
        assert_eq!((told.step, told.exposed_seconds, told.exposed_share), (20, 4.125, 0.515625));
        let within: Vec<_> = told.within.iter().map(|(phase, of)| (phase.as_str(), *of)).collect();
        assert_eq!(within, [("backward", 1.125), ("forward", 0.75)]);
        let verb = |name: &str| told.verbs[name].clone();
        let dispatch =
            VerbReport { link: "window".into(), bytes: 105, seconds: 1.75, beside: true };
        assert_eq!(verb("dispatch"), dispatch);
        assert_eq!((verb("combine").bytes, verb("combine").seconds), (11, 0.5));
        assert_eq!((verb("allGather").seconds, verb("allGather").beside), (4.0, true));
        assert_eq!((told.verbs.len(), verb("reduceScatter").link.as_str()), (4, "nccl"));
    }
}
