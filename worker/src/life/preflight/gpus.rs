//! The GPUs of a node, a process each: who measures when, and which is slower than the others.
//!
//! Copies with the host take turns, because GPUs share the way to it. Reads of peers and the
//! collective are done by all at once.

use super::child::{Ask, Bus, ENV_PART, Reply};
use crate::life::part::Part;
use moejob_protocol::preflight::{Check, Grade, Measured, Value};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// For all of it; two good GPUs take some two seconds. The leader waits for a minute.
pub(super) const LIMIT: Duration = Duration::from_secs(30);
/// Of the fastest GPU's rate; below it another process computes there, or it is broken.
const EVEN_FAIL: f64 = 0.75;
const EVEN_WARN: f64 = 0.9;
/// What an all-reduce is of, as Azure's limits are; GPUs with less have a quarter of what is free.
const REDUCED_BYTES: usize = 16 << 30;

/// Everything that is measured of the GPUs with these numbers.
pub fn measured(ordinals: Range<usize>, stop: &AtomicBool) -> Vec<Measured> {
    let until = Instant::now() + LIMIT;
    let world = ordinals.len();
    let mut gpus: Vec<Gpu> = ordinals.map(|ordinal| Gpu::start(ordinal, &[])).collect();
    let mut turn = Turn { gpus: &mut gpus, until, stop };
    turn.hear_all();
    turn.one_by_one(&Ask::Copies);
    if world > 1 {
        turn.peers();
        turn.collective();
    }
    // Together: a driver takes its time to give memory back.
    gpus.iter_mut().for_each(Gpu::end);
    let mut all: Vec<Measured> = gpus.drain(..).flat_map(Gpu::into_all).collect();
    all.extend(uneven(&all));
    all
}

/// An all-reduce of at most so many bytes by processes of their own, which get more in their
/// environment: what each GPU tells of it, or why there is nothing.
pub fn reduced(
    ordinals: Range<usize>,
    environment: &[(&'static str, String)],
    bytes: usize,
    (until, stop): (Instant, &AtomicBool),
) -> (Vec<Bus>, Option<String>) {
    let mut gpus: Vec<Gpu> =
        ordinals.map(|ordinal| Gpu::start(ordinal, environment)).collect();
    let mut turn = Turn { gpus: &mut gpus, until, stop };
    turn.hear_all();
    let why = turn.meet(bytes).err().map(str::to_string);
    gpus.iter_mut().for_each(Gpu::end);
    let buses = gpus.iter_mut().filter_map(Gpu::take_bus).collect();
    let mut said = gpus.drain(..).flat_map(Gpu::into_all).filter_map(|one| match one.value {
        Value::Wrong { what: why, .. } | Value::Unmeasured(why) => Some(why),
        Value::Number(_) | Value::Fine(_) => None,
    });
    let first = said.next();
    (buses, first.or(why))
}

/// GPUs whose memory is slower than that of the fastest of them.
fn uneven(all: &[Measured]) -> Vec<Measured> {
    let rates = || {
        all.iter().filter_map(|one| match one.value {
            Value::Number(rate) if one.check == "deviceCopyGBps" => Some((one.of.clone(), rate)),
            _ => None,
        })
    };
    let best = rates().map(|(_, rate)| rate).fold(0.0, f64::max);
    if rates().count() < 2 {
        return Vec::new();
    }
    let slow = rates().filter(|(_, rate)| *rate < EVEN_WARN * best).map(|(of, rate)| {
        let grade = if rate < EVEN_FAIL * best { Grade::Fail } else { Grade::Warn };
        let what = format!(
            "copies within its memory run at {rate:.0} GB/s, on the fastest GPU of the node at \
             {best:.0}: another process uses it, or it is not well"
        );
        Measured::of_check(Check::Even, Value::Wrong { grade, what }).on(of)
    });
    let slow: Vec<Measured> = slow.collect();
    if slow.is_empty() {
        let text = "no GPU is slower than the others".to_string();
        return vec![Measured::of_check(Check::Even, Value::Fine(text))];
    }
    slow
}

struct Turn<'a> {
    gpus: &'a mut [Gpu],
    until: Instant,
    stop: &'a AtomicBool,
}

impl Turn<'_> {
    /// Each that was asked says something, or why it does not.
    fn hear_all(&mut self) {
        for gpu in self.gpus.iter_mut() {
            gpu.hear(self.until, self.stop);
        }
    }

    fn one_by_one(&mut self, ask: &Ask) {
        for gpu in self.gpus.iter_mut() {
            gpu.ask(ask);
            gpu.hear(self.until, self.stop);
        }
    }

    /// Each reads the memory of the next one.
    fn peers(&mut self) {
        let ordinals: Vec<usize> = self.gpus.iter().map(|gpu| gpu.ordinal).collect();
        for (at, gpu) in self.gpus.iter_mut().enumerate() {
            gpu.ask(&Ask::Peer { ordinal: ordinals[(at + 1) % ordinals.len()] });
        }
        self.hear_all();
    }

    fn collective(&mut self) {
        if let Err(why) = self.meet(REDUCED_BYTES) {
            return self.without(why);
        }
        // All see the same; the slowest is as slow as it was for any of them.
        let told = self.gpus.iter_mut().filter_map(|gpu| gpu.bus.take());
        let bus = told.min_by(|a, b| a.rate.total_cmp(&b.rate));
        if let Some(Bus { check, rate, .. }) = bus {
            self.gpus[0].all.push(Measured::number(&check, rate));
        }
    }

    /// Only where all are there: the others would wait for one that is not.
    fn meet(&mut self, most: usize) -> Result<(), &'static str> {
        if self.gpus.iter().any(|gpu| gpu.child.is_none()) {
            return Err("a GPU of the node does not answer");
        }
        self.gpus[0].ask(&Ask::Id);
        self.gpus[0].hear(self.until, self.stop);
        let Some(id) = self.gpus[0].id.take() else { return Err("NCCL has no place to meet") };
        let world = self.gpus.len() as u32;
        let free = self.gpus.iter().map(|gpu| gpu.free).min().unwrap_or(0);
        let bytes = most.min(free / 4);
        for (rank, gpu) in (0..).zip(self.gpus.iter_mut()) {
            gpu.ask(&Ask::Meet { id: id.clone(), rank, world, bytes, across: false });
        }
        self.hear_all();
        Ok(())
    }

    fn without(&mut self, why: &str) {
        let value = Value::Unmeasured(why.to_string());
        let check = "allReduceGBps".to_string();
        self.gpus[0].all.push(Measured { check, of: String::new(), value });
    }
}

/// One GPU as its process tells of it.
pub(super) struct Gpu {
    ordinal: usize,
    name: String,
    /// None: it could not be started, or it is over with it.
    child: Option<Part<Reply>>,
    all: Vec<Measured>,
    id: Option<String>,
    bus: Option<Bus>,
    /// Bytes of its memory.
    free: usize,
}

impl Gpu {
    /// Its process gets more in its environment.
    pub fn start(ordinal: usize, environment: &[(&'static str, String)]) -> Gpu {
        let (name, all) = (format!("GPU {ordinal}"), Vec::new());
        let mut gpu = Gpu { ordinal, name, child: None, all, id: None, bus: None, free: 0 };
        match Part::start((ENV_PART, &ordinal.to_string()), environment) {
            Ok(child) => gpu.child = Some(child),
            Err(error) => gpu.unmeasured(&format!("its process does not start: {error}")),
        }
        gpu
    }

    pub fn is_there(&self) -> bool {
        self.child.is_some()
    }

    /// Bytes of its memory.
    pub fn free(&self) -> usize {
        self.free
    }

    pub fn take_id(&mut self) -> Option<String> {
        self.id.take()
    }

    pub fn take_bus(&mut self) -> Option<Bus> {
        self.bus.take()
    }

    pub fn ask(&mut self, ask: &Ask) {
        if let Some(child) = &mut self.child {
            child.ask(ask);
        }
    }

    /// The answer to what was asked last.
    pub fn hear(&mut self, until: Instant, stop: &AtomicBool) {
        let Some(child) = &mut self.child else { return };
        let reply = child.hear(until, stop).map_err(|silence| silence.in_words(LIMIT));
        match reply {
            Ok(Reply::Ready { name, free }) => (self.name, self.free) = (name, free),
            Ok(Reply::Measured(more)) => {
                let name = self.name.clone();
                self.all.extend(more.into_iter().map(|one| one.on(name.clone())));
            }
            Ok(Reply::Id(id)) => self.id = Some(id),
            Ok(Reply::Bus(bus)) => self.bus = Some(bus),
            Ok(Reply::Absent { why }) => {
                self.kill();
                self.failed("hostToDeviceGBps", &why);
            }
            Ok(Reply::Failed { what, why }) => self.failed(&what, &why),
            Err(why) => {
                self.kill();
                self.unmeasured(&why);
            }
        }
    }

    /// What could not be measured because something else is missing is no fault of the GPU's.
    fn failed(&mut self, what: &str, why: &str) {
        let value = Value::Unmeasured(why.to_string());
        self.all.push(Measured { check: what.to_string(), of: self.name.clone(), value });
    }

    /// A GPU that cannot be opened, or on which a process hangs or dies, is not there.
    fn unmeasured(&mut self, why: &str) {
        let value = Value::Wrong { grade: Grade::Fail, what: why.to_string() };
        self.all.push(Measured::of_check(Check::Gpus, value).on(self.name.clone()));
    }

    fn kill(&mut self) {
        self.child = None;
    }

    /// It has left the collective, so nobody misses it.
    pub fn end(&mut self) {
        if let Some(child) = &mut self.child {
            child.end();
        }
    }

    /// Once its memory has come back.
    pub fn into_all(mut self) -> Vec<Measured> {
        self.kill();
        std::mem::take(&mut self.all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies(rates: &[f64]) -> Vec<Measured> {
        let one = |(at, rate): (usize, &f64)| {
            Measured::number("deviceCopyGBps", *rate).on(format!("GPU {at}"))
        };
        rates.iter().enumerate().map(one).collect()
    }

    #[test]
    fn a_slow_gpu_is_named_beside_the_others() {
        let grades = |rates: &[f64]| -> Vec<String> {
            let found = uneven(&copies(rates)).into_iter().map(|one| match one.value {
                Value::Wrong { grade, .. } => format!("{} {grade:?}", one.of),
                _ => "fine".to_string(),
            });
            found.collect()
        };
        assert_eq!(grades(&[2000.0]), [""; 0], "nothing to compare it with");
        assert_eq!(grades(&[2000.0, 1900.0]), ["fine"]);
        assert_eq!(grades(&[2000.0, 1000.0, 1700.0]), ["GPU 1 Fail", "GPU 2 Warn"]);
    }
}
