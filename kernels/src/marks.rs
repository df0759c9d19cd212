//! Where the time of a step goes: marks between ops, on the device's own clock.
//!
//! A mark says what was enqueued since the last one. While nobody asks for them they cost nothing;
//! while somebody does, a GPU records an event at each, which takes it about a microsecond.

use crate::cuda::{CudaError, Event};
use crate::device::Device;
use std::time::Instant;

/// What lies between two marks.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub name: &'static str,
    pub layer: Option<u32>,
    /// Since marks were asked for, in milliseconds.
    pub start: f64,
    pub milliseconds: f64,
}

#[derive(Debug)]
enum At {
    Host(Instant),
    Gpu(Event),
}

/// Marks in order; the first begins the first span.
#[derive(Debug, Default)]
pub(crate) struct Marks(Vec<(&'static str, Option<u32>, At)>);

impl Marks {
    fn spans(self) -> Result<Vec<Span>, CudaError> {
        let Some((_, _, first)) = self.0.first() else { return Ok(Vec::new()) };
        let mut spans = Vec::new();
        for pair in self.0.windows(2) {
            let [(_, _, before), (name, layer, after)] = pair else { continue };
            let (start, milliseconds) = (between(first, before)?, between(before, after)?);
            spans.push(Span { name, layer: *layer, start, milliseconds });
        }
        Ok(spans)
    }
}

fn between(before: &At, after: &At) -> Result<f64, CudaError> {
    match (before, after) {
        (At::Host(before), At::Host(after)) => Ok((*after - *before).as_secs_f64() * 1e3),
        (At::Gpu(before), At::Gpu(after)) => Ok(f64::from(before.milliseconds_to(after)?)),
        _ => Ok(0.0),
    }
}

impl Device {
    /// From now on marks are kept, until [`Device::spans`].
    pub fn keep_marks(&mut self) {
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
            marks.0.push((name, layer.map(|layer| layer as u32), at));
        }
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

    fn marks(&mut self) -> &mut Option<Marks> {
        match self {
            Device::Cpu(cpu) => &mut cpu.marks,
            Device::Cuda(cuda) => &mut cuda.marks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_follow_each_other() {
        let mut device = Device::cpu(1, 0).expect("a thread");
        device.mark("nobody asks", None);
        assert_eq!(device.spans().expect("a CPU"), []);
        device.keep_marks();
        device.mark("first", Some(3));
        std::thread::sleep(std::time::Duration::from_millis(2));
        device.mark("second", None);
        let spans = device.spans().expect("a CPU");
        let [first, second] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((first.name, first.layer, second.name), ("first", Some(3), "second"));
        assert!(second.milliseconds >= 2.0 && second.start >= first.milliseconds, "{spans:?}");
        device.mark("nobody asks any more", None);
        assert_eq!(device.spans().expect("a CPU"), []);
    }
}
