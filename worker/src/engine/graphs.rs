//! Captured graphs of the parts of a step, where the host's time shows.
//!
//! ```text
//! a part   the first time: op by op | the second: recorded, then launched | from then on: launched
//! parts    forward, and loss with backward, of a micro-batch; numbers of gradients; update
//! ```
//! A small model's ops take a GPU less time than the host needs to enqueue them. A graph is one
//! call for some hundred of them. Between two parts lie the ends of phases, which are times and no
//! part of a graph. So does all that is another number in each step, or comes from the host:
//! batches, parameters, a copy of numbers.
//!
//! The bits are those of single ops: a graph has the same kernels with the same arguments, in the
//! same order.

use crate::engine::round::Schedule;
use crate::engine::step::Engine;
use crate::failure::chain;
use moejob_kernels::cuda::{Captured, CudaDevice};
use moejob_kernels::{LayerError, Pace, StepPhase};
use std::collections::HashMap;

/// For tests and measurements: `on`, `off`, or where the host's time shows (`auto`).
pub const ENV_GRAPHS: &str = "MOEJOB_GRAPHS";

/// Each takes memory of the device. A step of one rank has at most this many parts that differ:
/// with and without documents, two of forward, and of backward those of a first, a middle, a last
/// and an only micro-batch.
const GRAPHS_MAX: usize = 16;
/// Of all graphs together. Whose step has more has no host time that shows.
const LAUNCHES_MAX: usize = 16_384;

/// Steps that load kernels and choose algorithms.
const STEPS_SKIPPED: usize = 2;
/// Steps that are looked at then.
const STEPS_SEEN: usize = 5;
/// A device that waits for the host takes longer than the host does, by its last kernel and by what
/// lies between one kernel and the next. On an H200 a small model had 1.13 to 1.25 times the host's
/// time, and a fifth of it was gone with graphs. Larger ones have 50 times and more.
const ALIKE: f64 = 1.5;

/// Which jobs take graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Use {
    /// Where the host's time shows.
    #[default]
    Auto,
    On,
    Off,
}

impl Use {
    /// What [`ENV_GRAPHS`] says.
    pub fn parse(said: Option<&str>) -> Use {
        match said.map(str::trim) {
            None | Some("" | "auto") => Use::Auto,
            Some("on") => Use::On,
            Some("off") => Use::Off,
            Some(said) => {
                tracing::warn!("{ENV_GRAPHS}={said} is not `on`, `off` or `auto`: ignored");
                Use::Auto
            }
        }
    }
}

/// A part of a step, by all that changes what it enqueues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Part {
    Forward(Tokens),
    Backward { tokens: Tokens, sums: Sums },
    Numbers,
    Update,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tokens {
    count: usize,
    /// Attention keeps them apart.
    documents: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sums {
    /// Gradients are added to what is there: of own tokens, of experts.
    begun: [bool; 2],
    /// Those that are complete begin to travel.
    leave: bool,
}

/// How a part is enqueued.
#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    OneByOne,
    /// It is recorded, and then launched.
    Capture,
    Repeat(Captured),
}

/// What there is of graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Captures {
    pub graphs: usize,
    /// Kernels and copies in them.
    pub launches: usize,
    /// How often one was launched.
    pub repeats: u64,
}

/// The graphs of an attempt.
#[derive(Debug)]
pub(super) struct Graphs {
    state: State,
    /// Parts of this step may be graphs.
    open: bool,
    /// Those that were enqueued before, so that nothing has to be made for them.
    parts: HashMap<Part, Option<Captured>>,
    repeats: u64,
}

#[derive(Debug, PartialEq)]
enum State {
    /// Whether the host's time shows is not known yet.
    Looking(Vec<Pace>),
    On,
    Off,
}

impl Graphs {
    pub fn new(wanted: Use) -> Graphs {
        let state = match wanted {
            Use::Auto => State::Looking(Vec::new()),
            Use::On => State::On,
            Use::Off => State::Off,
        };
        Graphs { state, open: false, parts: HashMap::new(), repeats: 0 }
    }

    pub fn captures(&self) -> Captures {
        let all = || self.parts.values().flatten();
        let launches = all().map(Captured::launches).sum();
        Captures { graphs: all().count(), launches, repeats: self.repeats }
    }

    /// A step begins whose parts may be graphs, or not.
    fn begin(&mut self, may: bool) {
        self.open = may && self.state != State::Off;
    }

    /// How `part` is enqueued now.
    fn how(&mut self, part: Part) -> How {
        if !self.open {
            return How::OneByOne;
        }
        let Captures { graphs, launches, .. } = self.captures();
        let room = graphs < GRAPHS_MAX && launches < LAUNCHES_MAX;
        match self.parts.get(&part) {
            Some(Some(captured)) => How::Repeat(*captured),
            Some(None) if room && self.state == State::On => How::Capture,
            Some(None) => How::OneByOne,
            None => {
                self.parts.insert(part, None);
                How::OneByOne
            }
        }
    }

    /// The device has given its graphs up: they are recorded anew.
    fn forget(&mut self) {
        self.parts.values_mut().for_each(|captured| *captured = None);
    }

    /// There are no graphs any more in this attempt.
    fn give_up(&mut self) {
        (self.state, self.open) = (State::Off, false);
        self.parts.clear();
    }

    /// The pace of a step's first micro-batch, whose ops were enqueued one by one. What was decided
    /// and why, once it is.
    pub fn saw(&mut self, pace: Pace) -> Option<String> {
        let State::Looking(paces) = &mut self.state else { return None };
        paces.push(pace);
        if paces.len() < STEPS_SKIPPED + STEPS_SEEN {
            return None;
        }
        let (shows, why) = host_shows(&paces[STEPS_SKIPPED..]);
        self.state = if shows { State::On } else { State::Off };
        Some(why)
    }

    pub fn is_looking(&self) -> bool {
        matches!(self.state, State::Looking(_))
    }
}

/// Paces of steps without their data, for which the host may wait.
#[derive(Debug, Default)]
pub(super) struct Paces {
    sum: Pace,
    steps: u32,
}

impl Paces {
    pub fn add(&mut self, step: &[Pace; StepPhase::COUNT]) {
        let data = StepPhase::Data as usize;
        for (_, pace) in step.iter().enumerate().filter(|(phase, _)| *phase != data) {
            self.sum.host += pace.host;
            self.sum.device += pace.device;
        }
        self.steps += 1;
    }

    pub fn mean(&self) -> Option<Pace> {
        let of = |seconds: f64| seconds / f64::from(self.steps);
        let Pace { host, device } = self.sum;
        (self.steps > 0).then(|| Pace { host: of(host), device: of(device) })
    }
}

/// Whether the device waits for the host, by paces of single ops, and why it is thought so.
///
/// Of a device that keeps up with the host the two times are alike, since it can compute nothing
/// before it is enqueued. It may be the faster one by its clock, where ops have piled up before.
/// Behind a host that is faster it takes longer, and then the host's time is hidden. Only the first
/// micro-batch of a step says so: a device takes about a thousand launches and lets the host wait
/// in the next, which makes the two alike as well.
fn host_shows(paces: &[Pace]) -> (bool, String) {
    let median = |of: fn(&Pace) -> f64| {
        let mut all: Vec<f64> = paces.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or_default()
    };
    let [host, device] = [median(|pace| pace.host), median(|pace| pace.device)];
    let shows = median(|pace| pace.device / pace.host) <= ALIKE;
    let graphs = if shows { "captured graphs" } else { "no captured graphs" };
    let [host, device] = [host, device].map(|seconds| seconds * 1e3);
    let why = format!(
        "{graphs}: the host enqueues a micro-batch in {host:.2} ms, the device computes it in \
         {device:.2}"
    );
    (shows, why)
}

impl Engine {
    /// Which steps from now on have captured graphs, whatever [`ENV_GRAPHS`] says.
    pub fn use_graphs(&mut self, wanted: Use) {
        self.forget_graphs();
        self.graphs = Graphs::new(wanted);
    }

    /// What there is of captured graphs.
    pub fn captures(&self) -> Captures {
        self.graphs.captures()
    }

    /// A step begins; whether its parts could be graphs.
    ///
    /// Marks lie between ops and are times. Between ranks links have epochs of their own, and a
    /// lane beside the ops has marks that are waited for once. What a router draws is another in
    /// each step. No other op is told which micro-batch it computes.
    pub(super) fn begin_graphs(&mut self) -> bool {
        let (model, links) = (&self.model, &self.links);
        let alone = |device: &CudaDevice| device.comm_stream().is_none();
        let may = links.world() == 1
            && model.device.as_cuda().is_some_and(alone)
            && !model.device.keeps_marks()
            && !model.has_one_balance()
            && !model.draws()
            && model.past.is_none();
        self.graphs.begin(may);
        may
    }

    /// Enqueues a part of a step, by its graph where it has one. `enqueue` changes nothing of the
    /// host that the part leaves behind: it is not called where a graph is launched, and called
    /// twice where none could be made.
    pub(super) fn part(&mut self, part: Part, enqueue: impl Fn(&mut Engine)) {
        let done = match self.graphs.how(part) {
            How::OneByOne => false,
            How::Capture => self.capture(part, &enqueue),
            How::Repeat(captured) => self.repeat(&captured),
        };
        if !done {
            enqueue(self);
        }
    }

    /// Records a part and launches it; false: nothing of it was enqueued.
    fn capture(&mut self, part: Part, enqueue: &impl Fn(&mut Engine)) -> bool {
        match self.record(enqueue) {
            Ok(captured) => {
                self.graphs.parts.insert(part, Some(captured));
                self.repeat(&captured)
            }
            Err(why) => {
                tracing::warn!("no captured graphs in this attempt: {part:?}: {}", chain(&why));
                self.forget_graphs();
                self.graphs.give_up();
                false
            }
        }
    }

    fn record(&mut self, enqueue: &impl Fn(&mut Engine)) -> Result<Captured, LayerError> {
        let none = "graphs are a GPU's";
        self.model.device.as_cuda_mut().expect(none).begin_capture()?;
        enqueue(self);
        self.model.device.as_cuda_mut().expect(none).end_capture()
    }

    fn repeat(&mut self, captured: &Captured) -> bool {
        let cuda = self.model.device.as_cuda_mut();
        let done = cuda.is_some_and(|cuda| cuda.repeat(captured));
        if done {
            self.graphs.repeats += 1;
        } else {
            self.graphs.forget();
        }
        done
    }

    /// Before anything that graphs name is given back.
    pub(super) fn forget_graphs(&mut self) {
        if let Some(cuda) = self.model.device.as_cuda_mut() {
            cuda.forget_captured();
        }
        self.graphs.forget();
    }

    pub(super) fn forward_part(&self, schedule: &Schedule) -> Part {
        let count = schedule.round.tokens;
        Part::Forward(Tokens { count, documents: self.model.starts(count).is_some() })
    }

    /// `leave`: sums that are complete begin to travel.
    pub(super) fn backward_part(&self, schedule: &Schedule, leave: bool) -> Part {
        let Part::Forward(tokens) = self.forward_part(schedule) else { unreachable!("as above") };
        let leaf = self.gradients.leaf(&schedule.round);
        let begun = [leaf.accumulate, leaf.accumulate_experts];
        Part::Backward { tokens, sums: Sums { begun, leave } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(count: usize) -> Part {
        Part::Forward(Tokens { count, documents: false })
    }

    /// How parts of a step are enqueued; no graph is made.
    fn how(graphs: &mut Graphs, parts: &[Part]) -> Vec<How> {
        graphs.begin(true);
        parts.iter().map(|part| graphs.how(*part)).collect()
    }

    #[test]
    fn a_part_is_recorded_when_it_comes_the_second_time() {
        let mut graphs = Graphs::new(Use::On);
        let (a, b) = (part(1), part(2));
        assert_eq!(how(&mut graphs, &[a, b, a]), [How::OneByOne, How::OneByOne, How::Capture]);
        // A step that is none for graphs changes nothing.
        graphs.begin(false);
        assert_eq!([a, part(3)].map(|part| graphs.how(part)), [How::OneByOne; 2]);
        assert_eq!(how(&mut graphs, &[b, part(3)]), [How::Capture, How::OneByOne]);
        graphs.give_up();
        assert_eq!([a, b].map(|part| graphs.how(part)), [How::OneByOne; 2], "at once");
        assert_eq!(how(&mut graphs, &[a, b, a, b]), [How::OneByOne; 4], "for good");
        assert_eq!(how(&mut Graphs::new(Use::Off), &[a, a, a]), [How::OneByOne; 3]);
    }

    #[test]
    fn only_so_many_graphs_are_made() {
        let mut graphs = Graphs::new(Use::On);
        let parts: Vec<Part> = (0..GRAPHS_MAX + 3).map(part).collect();
        how(&mut graphs, &parts);
        graphs.begin(true);
        let mut made = 0;
        for part in &parts {
            let expected = if made < GRAPHS_MAX { How::Capture } else { How::OneByOne };
            assert_eq!(graphs.how(*part), expected, "behind {made}");
            made += 1;
            graphs.parts.insert(*part, Some(Captured::default()));
        }
        assert_eq!(graphs.captures().graphs, made);
        let there = How::Repeat(Captured::default());
        assert_eq!(graphs.how(parts[0]), there, "what there is, is used");
        graphs.forget();
        assert_eq!(how(&mut graphs, &parts[..2]), [How::Capture; 2], "nothing has to be made");
    }

    /// The decision for one and the same pace, in milliseconds.
    fn decided(host: f64, device: f64) -> bool {
        let pace = Pace { host: host / 1e3, device: device / 1e3 };
        host_shows(&[pace; STEPS_SEEN]).0
    }

    #[test]
    fn the_hosts_time_shows_where_the_device_is_no_slower() {
        // A device that waits for each launch, and one that had some waiting.
        assert!(decided(3.0, 3.0) && decided(3.0, 4.4) && decided(3.0, 1.2));
        // One that is behind; OLMoE, whose micro-batch takes 550 ms.
        assert!(!decided(3.0, 4.6) && !decided(3.0, 6.0) && !decided(5.0, 550.0));
        // A launch of the host that took long now and then.
        let steady = Pace { host: 1e-3, device: 5e-3 };
        let held = Pace { host: 9e-3, device: 5e-3 };
        assert!(!host_shows(&[steady, held, steady, held, steady]).0);
        assert!(host_shows(&[held, steady, held, steady, held]).0);
    }

    #[test]
    fn it_is_decided_once_and_not_by_the_first_steps() {
        let [shows, hidden] = [1e-3, 9e-3].map(|device| Pace { host: 1e-3, device });
        for (first, then, expected) in [(hidden, shows, State::On), (shows, hidden, State::Off)] {
            let mut graphs = Graphs::new(Use::Auto);
            for step in 1..STEPS_SKIPPED + STEPS_SEEN {
                let pace = if step <= STEPS_SKIPPED { first } else { then };
                assert_eq!(graphs.saw(pace), None);
                assert!(graphs.is_looking());
                assert_eq!(how(&mut graphs, &[part(1), part(1)]), [How::OneByOne; 2]);
            }
            let why = graphs.saw(then).expect("it is decided");
            assert_eq!(graphs.state, expected, "{why}");
            let words = match expected {
                State::On => "captured graphs: the host enqueues a micro-batch in 1.00 ms, the \
                              device computes it in 1.00",
                _ => "no captured graphs: the host enqueues a micro-batch in 1.00 ms, the device \
                      computes it in 9.00",
            };
            assert_eq!(why, words);
            // What was seen before is recorded at once.
            let next = if expected == State::On { How::Capture } else { How::OneByOne };
            assert_eq!(how(&mut graphs, &[part(1)]), [next]);
            assert!((0..20).all(|_| graphs.saw(first).is_none()) && graphs.state == expected);
        }
    }

    #[test]
    fn the_pace_of_steps_is_their_mean_without_data() {
        assert_eq!(Paces::default().mean(), None);
        let mut paces = Paces::default();
        for (host, device) in [(1.0, 4.0), (2.0, 6.0)] {
            let mut step = [Pace { host, device }; StepPhase::COUNT];
            step[StepPhase::Data as usize] = Pace { host: 100.0, device: 100.0 };
            paces.add(&step);
        }
        let others = (StepPhase::COUNT - 1) as f64;
        assert_eq!(paces.mean(), Some(Pace { host: 1.5 * others, device: 5.0 * others }));
    }

    #[test]
    fn what_is_said_is_read() {
        for (said, expected) in [
            (None, Use::Auto),
            (Some(""), Use::Auto),
            (Some("auto"), Use::Auto),
            (Some(" on "), Use::On),
            (Some("off"), Use::Off),
            (Some("1"), Use::Auto),
        ] {
            assert_eq!(Use::parse(said), expected, "{said:?}");
        }
    }
}
