//! Where the time of a step goes, on the device's own clock.
//!
//! ```text
//! phases      between the parts of a step, always: how long each part took
//! stretches   within them, in some steps: how long what is named took (`stretch.rs`)
//! marks       between ops, while somebody asks: what was enqueued since the last one, and when
//! ```
//! A GPU records an event at each, which takes it about a microsecond: a dozen a step for phases,
//! some hundreds for stretches and marks.

use std::time::Instant;

use crate::cuda::error::CudaError;
use crate::cuda::event::Event;
use crate::device::Device;
use crate::stretch::Stretches;

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepPhase {
    /// Waiting for batches, and their way to the device.
    Data,
    Forward,
    /// With the head, whose loss and gradients are one op.
    Backward,
    Communication,
    /// Of gradients: squared norm, what is not finite.
    Numbers,
    Update,
    /// What is none of these.
    Other,
}

impl StepPhase {
    pub const COUNT: usize = StepPhase::Other as usize + 1;
}

/// What lies between two marks. Times are in milliseconds since marks were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub name: &'static str,
    pub layer: Option<u32>,
    /// When the device began it, and how long it took.
    pub start: f64,
    pub milliseconds: f64,
    /// The same of the host, which enqueued it.
    pub host_start: f64,
    pub host_milliseconds: f64,
}

#[derive(Debug)]
pub(crate) enum At {
    Host(Instant),
    Gpu(Event),
}

impl At {
    pub(crate) fn event(self) -> Option<Event> {
        match self {
            At::Gpu(event) => Some(event),
            At::Host(_) => None,
        }
    }
}

#[derive(Debug)]
struct Mark {
    name: &'static str,
    layer: Option<u32>,
    host: Instant,
    at: At,
}

/// Marks in order; the first begins the first span.
#[derive(Debug, Default)]
pub(crate) struct Marks(Vec<Mark>);

impl Marks {
    fn spans(self) -> Result<Vec<Span>, CudaError> {
        let Some(first) = self.0.first() else { return Ok(Vec::new()) };
        let host = |of: &Mark, since: &Mark| (of.host - since.host).as_secs_f64() * 1e3;
        let mut spans = Vec::new();
        for pair in self.0.windows(2) {
            let [before, after] = pair else { continue };
            spans.push(Span {
                name: after.name,
                layer: after.layer,
                start: between(&first.at, &before.at)?,
                milliseconds: between(&before.at, &after.at)?,
                host_start: host(before, first),
                host_milliseconds: host(after, before),
            });
        }
        Ok(spans)
    }
}

/// Milliseconds.
pub(crate) fn between(before: &At, after: &At) -> Result<f64, CudaError> {
    match (before, after) {
        (At::Host(before), At::Host(after)) => Ok((*after - *before).as_secs_f64() * 1e3),
        (At::Gpu(before), At::Gpu(after)) => Ok(f64::from(before.milliseconds_to(after)?)),
        _ => Ok(0.0),
    }
}

/// The phases of one step, see [`Device::cut_phases`].
#[derive(Debug, Default)]
pub struct PhaseEnds(Vec<PhaseEnd>);

#[derive(Debug)]
struct PhaseEnd {
    phase: StepPhase,
    at: At,
    /// When the host had enqueued it.
    host: Instant,
}

/// Ends of phases in order; the first begins the first phase.
#[derive(Debug, Default)]
pub(crate) struct Phases {
    ends: Vec<PhaseEnd>,
    /// Events that can be recorded again.
    pub(crate) spare: Vec<Event>,
    pub(crate) stretches: Stretches,
}

/// How long the host took to enqueue something, and the device to do it. In seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    pub host: f64,
    pub device: f64,
}

impl PhaseEnds {
    /// By number: what ended there.
    pub(crate) fn ended(&self, number: usize) -> Option<StepPhase> {
        self.0.get(number).map(|end| end.phase)
    }

    /// Of the first micro-batch, from the end of its data to that of its backward. None: there was
    /// none, or the device failed.
    ///
    /// The device has then come to the end of it.
    pub fn first_round(&self) -> Option<Pace> {
        let first = self.0.iter().position(|end| end.phase == StepPhase::Data)?;
        let first = &self.0[first..];
        let last = &first[first.iter().position(|end| end.phase == StepPhase::Backward)?];
        let device = between(&first[0].at, &last.at).ok()? / 1e3;
        Some(Pace { host: last.host.duration_since(first[0].host).as_secs_f64(), device })
    }
}

impl Device {
    /// From now on marks are kept, until [`Device::spans`]. Waits, so that the host's clock and the
    /// device's begin together.
    pub fn keep_marks(&mut self) {
        if let Device::Cuda(cuda) = &*self {
            cuda.wait();
        }
        *self.marks() = Some(Marks::default());
        self.mark("start", None);
    }

    /// What was enqueued since the last mark is `name`.
    pub fn mark(&mut self, name: &'static str, layer: Option<usize>) {
        if self.marks().is_none() {
            return;
        }
        let at = match self {
            Device::Cpu(_) => Some(At::Host(Instant::now())),
            Device::Cuda(cuda) => cuda.event().map(At::Gpu),
        };
        if let (Some(marks), Some(at)) = (self.marks(), at) {
            let layer = layer.map(|layer| layer as u32);
            marks.0.push(Mark { name, layer, host: Instant::now(), at });
        }
    }

    /// Whether marks are kept.
    pub fn keeps_marks(&self) -> bool {
        let kept = match self {
            Device::Cpu(cpu) => &cpu.kept,
            Device::Cuda(cuda) => &cuda.cache.kept,
        };
        kept.get::<Option<Marks>>().is_some_and(Option::is_some)
    }

    /// Waits, and tells what lies between the marks; none are kept any more.
    ///
    /// # Errors
    /// The device failed.
    pub fn spans(&mut self) -> Result<Vec<Span>, CudaError> {
        let marks = self.marks().take();
        if let (Device::Cuda(cuda), true) = (&*self, marks.is_some()) {
            cuda.stream().synchronize()?;
        }
        marks.map_or(Ok(Vec::new()), Marks::spans)
    }

    /// What was enqueued since the last call belongs to `phase`; of the first one nothing does.
    pub fn phase(&mut self, phase: StepPhase) {
        let spare = self.phases().spare.pop();
        let at = match self {
            Device::Cpu(_) => Some(At::Host(Instant::now())),
            Device::Cuda(cuda) => cuda.event_again(spare).map(At::Gpu),
        };
        if let Some(at) = at {
            self.phases().ends.push(PhaseEnd { phase, at, host: Instant::now() });
        }
    }

    /// The phases since the last call, whose times are known once the device has come so far.
    pub fn cut_phases(&mut self) -> PhaseEnds {
        PhaseEnds(std::mem::take(&mut self.phases().ends))
    }

    /// How many phases have ended since they were cut.
    pub(crate) fn phases_ended(&mut self) -> usize {
        self.phases().ends.len()
    }

    /// How long each phase took, by its number. What was enqueued before they were cut is over;
    /// after a failure the device's seconds are zero.
    pub fn phase_paces(&mut self, of: PhaseEnds) -> [Pace; StepPhase::COUNT] {
        let mut paces = [Pace::default(); StepPhase::COUNT];
        for pair in of.0.windows(2) {
            let [before, after] = pair else { continue };
            let sum = &mut paces[after.phase as usize];
            sum.device += between(&before.at, &after.at).unwrap_or(0.0) / 1e3;
            sum.host += after.host.duration_since(before.host).as_secs_f64();
        }
        let events = of.0.into_iter().filter_map(|end| end.at.event());
        self.phases().spare.extend(events);
        paces
    }

    fn marks(&mut self) -> &mut Option<Marks> {
        self.kept().of()
    }

    pub(crate) fn phases(&mut self) -> &mut Phases {
        self.kept().of()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::sleep;
    use std::time::Duration;

    #[test]
    fn spans_follow_each_other() {
        let mut device = Device::cpu(1, 0).expect("a thread");
        device.mark("nobody asks", None);
        assert_eq!(device.spans().expect("a CPU"), []);
        device.keep_marks();
        device.mark("first", Some(3));
        sleep(Duration::from_millis(2));
        device.mark("second", None);
        let spans = device.spans().expect("a CPU");
        let [first, second] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((first.name, first.layer, second.name), ("first", Some(3), "second"));
        assert!(second.milliseconds >= 2.0 && second.start >= first.milliseconds, "{spans:?}");
        assert!(second.host_milliseconds >= 2.0, "{spans:?}");
        device.mark("nobody asks any more", None);
        assert_eq!(device.spans().expect("a CPU"), []);
    }

    #[test]
    fn phases_add_up() {
        let mut device = Device::cpu(1, 0).expect("a thread");
        device.phase(StepPhase::Other);
        for phase in [StepPhase::Forward, StepPhase::Backward, StepPhase::Forward] {
            sleep(Duration::from_millis(2));
            device.phase(phase);
        }
        let cut = device.cut_phases();
        device.phase(StepPhase::Update);
        let paces = device.phase_paces(cut);
        let of = |phase| paces[phase as usize].device;
        assert!(of(StepPhase::Forward) >= 0.004 && of(StepPhase::Backward) >= 0.002, "{paces:?}");
        let all: f64 = paces.iter().map(|pace| pace.device).sum();
        assert_eq!(of(StepPhase::Forward) + of(StepPhase::Backward), all);
        let cut = device.cut_phases();
        let none = [Pace::default(); StepPhase::COUNT];
        assert_eq!(device.phase_paces(cut), none, "one end is no phase");
    }

    #[test]
    fn host_and_device_are_timed_apart() {
        let at = Instant::now();
        let ends = |of: &[(StepPhase, u64, u64)]| {
            let end = |(phase, host, device): &(StepPhase, u64, u64)| PhaseEnd {
                phase: *phase,
                at: At::Host(at + Duration::from_secs(*device)),
                host: at + Duration::from_secs(*host),
            };
            PhaseEnds(of.iter().map(end).collect())
        };
        use StepPhase::{Backward, Data, Forward, Other, Update};
        let of = ends(&[
            (Other, 0, 5),
            (Data, 10, 11),
            (Forward, 12, 14),
            (Backward, 16, 21),
            (Data, 40, 41),
            (Forward, 42, 43),
            (Backward, 43, 49),
            (Update, 44, 60),
        ]);
        assert_eq!(of.first_round(), Some(Pace { host: 6.0, device: 10.0 }));
        let paces = Device::cpu(1, 0).expect("a thread").phase_paces(of);
        let of = |phase| paces[phase as usize];
        assert_eq!(of(Data), Pace { host: 34.0, device: 26.0 });
        assert_eq!(of(Forward), Pace { host: 4.0, device: 5.0 });
        assert_eq!(of(Backward), Pace { host: 5.0, device: 13.0 });
        assert_eq!(of(Update), Pace { host: 1.0, device: 11.0 });
        for none in [&[][..], &[(Data, 0, 0)], &[(Backward, 0, 0), (Data, 1, 1)]] {
            assert_eq!(ends(none).first_round(), None, "{none:?}");
        }
    }
}
