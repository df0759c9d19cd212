//! Which way an attempt exchanges, where the plan leaves that to measurement: its first steps take
//! one way after the other, and the fastest stays.
//!
//! ```text
//! way_of(n) -> step n -> its time, in the words of step n + 1 -> heard(n, times of all ranks)
//! warm-up | a b | a b | .. -> of each step the slowest rank, of each way the median -> chosen()
//! ```
//! A way follows from the number of steps that were begun and from what all ranks have heard until
//! then. Both are the same on every rank, so nothing is exchanged but times, and all take the same
//! way. Between processors no bit depends on it.

use crate::attempt::api::TrainerEvent;
use crate::attempt::records::event;
use crate::attempt::steps::{Rounds, Run};
use crate::attempt::stop::{Stop, fail};
use crate::attempt::trainer::Trainer;
use crate::gang::comm::Comm;
use moejob_protocol::config::{Backend, Way, WorkerConfig};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::report::{Detail, EventKind};
use moejob_protocol::ways::WAYS_MAX;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Steps of an attempt before the first that is measured: they touch memory that later ones have.
const WARM_UP: usize = 2;
/// Measured steps of each way.
const ROUNDS: usize = 5;
/// Steps that a way is given at most, where some do not count.
const TRIES_MAX: usize = 10;
/// A way is compared if it has so many: the median of fewer is whatever happened.
const COUNTED_MIN: usize = 3;
/// Of the planned way's time another one takes at most so much, or the planned one stays.
const WORTH: f64 = 0.95;
/// Gangs whose ways are kept.
const KEPT_MAX: usize = 16;

/// The trials of an attempt, in numbers of ways: 0 is the planned one.
#[derive(Debug)]
pub(crate) struct Trials {
    /// Steps that were begun.
    begun: usize,
    /// Measured steps that were begun and whose times nobody has heard, with their ways.
    open: VecDeque<(u64, usize)>,
    /// By way: how many steps it was given, and the times of those that count.
    given: Vec<usize>,
    times: Vec<Vec<u32>>,
    chosen: Option<Chosen>,
}

/// What was chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chosen {
    pub way: usize,
    /// Microseconds of a step, by way; none: too few counted.
    pub medians: Vec<Option<u32>>,
}

impl Trials {
    /// Between so many ways, at least one. What is `kept` of an earlier attempt is taken.
    pub fn new(ways: usize, kept: Option<Chosen>) -> Trials {
        let chosen = kept.or((ways < 2).then(|| Chosen { way: 0, medians: vec![None; ways] }));
        let (given, times) = (vec![0; ways], vec![Vec::new(); ways]);
        Trials { begun: 0, open: VecDeque::new(), given, times, chosen }
    }

    /// The way of a step that is begun next, counted from 0 in the job.
    pub fn way_of(&mut self, step: u64) -> usize {
        if let Some(chosen) = &self.chosen {
            return chosen.way;
        }
        let (at, ways) = (self.begun, self.given.len());
        self.begun += 1;
        // Each way is warm before one is measured.
        if at < WARM_UP.max(ways) {
            return at % ways;
        }
        // The one with the fewest steps that count or may do so: they take turns, and one whose
        // step did not count gets another.
        let wanted = (0..ways).filter(|way| self.wants(*way));
        let Some(way) = wanted.min_by_key(|way| self.promised(*way)) else { return 0 };
        self.given[way] += 1;
        self.open.push_back((step, way));
        way
    }

    /// Whether the times of a step are waited for.
    pub fn awaits(&self, step: u64) -> bool {
        self.chosen.is_none() && self.open.iter().any(|(open, _)| *open == step)
    }

    /// How long a step took each rank, in microseconds; it does not count unless all say so.
    /// Returns what was chosen by it.
    pub fn heard(
        &mut self,
        step: u64,
        times: impl IntoIterator<Item = Option<u32>>,
    ) -> Option<&Chosen> {
        let at = self.open.iter().position(|(open, _)| *open == step)?;
        let (_, way) = self.open.remove(at)?;
        let all: Option<Vec<u32>> = times.into_iter().collect();
        self.times[way].extend(all.and_then(|all| all.into_iter().max()));
        if self.open.is_empty() && !(0..self.given.len()).any(|way| self.wants(way)) {
            self.chosen = Some(fastest(&self.times));
        }
        self.chosen.as_ref()
    }

    pub fn chosen(&self) -> Option<&Chosen> {
        self.chosen.as_ref()
    }

    /// Measured steps of a way that count, or of which nobody knows yet.
    fn promised(&self, way: usize) -> usize {
        self.times[way].len() + self.open.iter().filter(|(_, open)| *open == way).count()
    }

    fn wants(&self, way: usize) -> bool {
        self.promised(way) < ROUNDS && self.given[way] < TRIES_MAX
    }
}

/// The planned way, unless another one is faster by more than a twentieth and than the noise.
fn fastest(times: &[Vec<u32>]) -> Chosen {
    let compared = |times: &Vec<u32>| (times.len() >= COUNTED_MIN).then(|| median(times.clone()));
    let medians: Vec<Option<u32>> = times.iter().map(compared).collect();
    let others = medians.iter().enumerate().skip(1);
    let best = others.filter_map(|(way, median)| Some((median.as_ref()?, way))).min();
    let pays = |(other, way): &(&u32, usize)| {
        let Some(planned) = medians[0] else { return false };
        let noise = deviation(&times[0]).max(deviation(&times[*way]));
        f64::from(**other) <= WORTH * f64::from(planned) && noise <= planned - **other
    };
    let way = best.filter(pays).map_or(0, |(_, way)| way);
    Chosen { way, medians }
}

/// Of an even number the mean of the two in the middle.
fn median(mut times: Vec<u32>) -> u32 {
    times.sort_unstable();
    let (low, high) = (times[(times.len() - 1) / 2], times[times.len() / 2]);
    low + (high - low) / 2
}

/// Median of the absolute deviations from the median.
fn deviation(times: &[u32]) -> u32 {
    let middle = median(times.to_vec());
    median(times.iter().map(|time| time.abs_diff(middle)).collect())
}

impl Chosen {
    /// The way, then a time for each; 0: none.
    fn encode(&self) -> Vec<u8> {
        let medians = self.medians.iter().map(|median| median.unwrap_or(0));
        let words = [self.way as u32].into_iter().chain(medians);
        words.flat_map(u32::to_le_bytes).collect()
    }

    /// None: nothing, or it is not of so many ways.
    fn decode(bytes: &[u8], ways: usize) -> Option<Chosen> {
        let (words, []) = bytes.as_chunks::<4>() else { return None };
        let mut words = words.iter().map(|word| u32::from_le_bytes(*word));
        let way = words.next()? as usize;
        let medians: Vec<Option<u32>> = words.map(|time| (time > 0).then_some(time)).collect();
        (medians.len() == ways && way < ways).then_some(Chosen { way, medians })
    }

    /// `a step took 1.20 ms at once, 0.90 ms in two stages`.
    fn words(&self, ways: &[Way]) -> String {
        let of = |(way, median): (&Way, &Option<u32>)| match median {
            Some(median) => format!("{:.2} ms {}", f64::from(*median) / 1e3, way.words()),
            None => format!("too few steps counted {}", way.words()),
        };
        let all: Vec<String> = ways.iter().zip(&self.medians).map(of).collect();
        format!("a step took {}", all.join(", "))
    }
}

/// How long a step is said to take in a way on one rank, whatever it takes: for tests.
pub type SaidToTake = fn(u64, Way) -> Duration;

/// What attempts have measured, by gang. The trainers of a gang have the same, but for one that
/// came later.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// The newest one last.
    known: VecDeque<(Of, Chosen)>,
    /// None: steps take what they take.
    said: Option<SaidToTake>,
}

/// What a measurement is of: which ranks of each expert group lie on one node, and what they send.
#[derive(Clone, Debug, PartialEq)]
struct Of {
    mesh: Mesh,
    /// Of a node.
    ranks: u32,
    /// Of a micro-batch.
    tokens: u64,
    ways: Vec<Way>,
}

impl Of {
    fn attempt(config: &WorkerConfig) -> Of {
        let training = &config.training;
        Of {
            mesh: config.layout.mesh,
            ranks: config.ranks.max(1),
            tokens: u64::from(training.micro_batch_size) * u64::from(training.sequence_length),
            ways: config.ways.clone(),
        }
    }
}

impl Table {
    fn get(&self, of: &Of) -> Option<&Chosen> {
        self.known.iter().find(|(known, _)| known == of).map(|(_, chosen)| chosen)
    }

    /// What an attempt has chosen, if it has.
    pub fn keep(&mut self, config: &WorkerConfig, trying: Option<&Trying>) {
        let Some(chosen) = trying.and_then(|trying| trying.trials.chosen()) else { return };
        let of = Of::attempt(config);
        self.known.retain(|(known, _)| *known != of);
        self.known.push_back((of, chosen.clone()));
        if self.known.len() > KEPT_MAX {
            self.known.pop_front();
        }
    }

    /// What there is to try in an attempt, the same on all of its ranks: what the first of them
    /// knows that knows something is not measured again.
    ///
    /// # Errors
    /// A peer is lost; or a rank was told other ways than the others, so that they would take
    /// different ones in a step.
    pub fn agree(&self, config: &WorkerConfig, comm: &mut Comm) -> Result<Option<Trying>, Stop> {
        let ways = &config.ways;
        if ways.len() < 2 || config.training.compute.backend == Backend::Cuda {
            return Ok(None);
        }
        if let Some(wrong) = wrong_ways(config) {
            return Err(fail(1, &format!("ways to exchange: {wrong}"), SAY_THEM));
        }
        let chosen = self.get(&Of::attempt(config)).map(Chosen::encode).unwrap_or_default();
        let own = [encoded(ways), chosen].concat();
        let all = comm.gather_all(&own, WAY_BYTES * ways.len() + 4 * (ways.len() + 1))?;
        let mut kept = None;
        for (rank, told) in all.iter().enumerate() {
            let Some(told) = told.strip_prefix(&own[..WAY_BYTES * ways.len()]) else {
                let message = format!("rank {rank} tries other ways than rank {}", comm.rank());
                return Err(fail(1, &message, SAY_THEM));
            };
            kept = kept.or_else(|| Chosen::decode(told, ways.len()));
        }
        let said = self.said;
        Ok(Some(Trying { said, ..Trying::new(ways.clone(), kept) }))
    }
}

/// What to do about ways that are not as they should be.
const SAY_THEM: &str = "say parallelism.exchange and parallelism.overlapDegree in the manifest: \
                        then nothing is tried";

/// Of a way that is told to the other ranks.
const WAY_BYTES: usize = 8;

fn encoded(ways: &[Way]) -> Vec<u8> {
    let words = ways.iter().flat_map(|way| [way.exchange as u32, way.chunks]);
    words.flat_map(u32::to_le_bytes).collect()
}

/// Why an attempt cannot try its ways: memory is planned for the first one.
fn wrong_ways(config: &WorkerConfig) -> Option<String> {
    let (ways, chunks) = (&config.ways, config.overlap_degree);
    let planned = Way { exchange: config.exchange, chunks };
    if ways.len() > WAYS_MAX {
        return Some(format!("{} of them, at most {WAYS_MAX}", ways.len()));
    }
    if ways[0] != planned {
        return Some(format!("the first one is not {}, as planned", planned.words()));
    }
    let few = |way: &&Way| way.chunks == 0 || way.chunks > chunks;
    let way = ways.iter().find(few)?;
    Some(format!("{} chunks, and there is memory for 1 to {chunks}", way.chunks))
}

impl Trainer {
    /// A trainer whose steps are said to take so long while ways are tried.
    pub fn with_steps_that_take(mut self, said: SaidToTake) -> Trainer {
        self.ways.said = Some(said);
        self
    }

    /// The way that attempts like this one have chosen; none: they have not.
    pub fn chosen_way(&self, config: &WorkerConfig) -> Option<Way> {
        config.ways.get(self.ways.get(&Of::attempt(config))?.way).copied()
    }
}

/// The trials of an attempt, with what its own rank measures.
#[derive(Debug)]
pub(crate) struct Trying {
    ways: Vec<Way>,
    trials: Trials,
    /// Steps that were begun and are not over.
    begun: VecDeque<Begun>,
    /// The newest one that is over.
    over: Begun,
    /// Of which step the own time was told last, until all are heard.
    told: Option<u64>,
    /// Something was done behind the newest step, some of which goes on beside the next one.
    disturbed: bool,
    said: Option<SaidToTake>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Begun {
    step: u64,
    way: usize,
    /// Microseconds; none: it does not count.
    took: Option<u32>,
}

impl Trying {
    fn new(ways: Vec<Way>, kept: Option<Chosen>) -> Trying {
        let (trials, begun) = (Trials::new(ways.len(), kept), VecDeque::new());
        let (over, told, disturbed, said) = (Begun::default(), None, false, None);
        Trying { ways, trials, begun, over, told, disturbed, said }
    }

    /// How a step goes that is begun next.
    fn begin(&mut self, step: u64) -> Way {
        let way = self.trials.way_of(step);
        self.begun.push_back(Begun { step, way, took: None });
        self.ways[way]
    }

    /// It took so long, as processors do all of it when it is begun.
    fn took(&mut self, time: Duration) {
        let counts = !std::mem::take(&mut self.disturbed);
        let Some(newest) = self.begun.back_mut() else { return };
        let time = self.said.map_or(time, |said| said(newest.step, self.ways[newest.way]));
        let time = u32::try_from(time.as_micros()).unwrap_or(u32::MAX).max(1);
        newest.took = Some(time).filter(|_| counts);
    }

    /// The oldest step is over. If it was done again, so was what was begun behind it.
    pub fn over(&mut self, again: bool) {
        if again {
            self.begun.iter_mut().for_each(|begun| begun.took = None);
        }
        self.over = self.begun.pop_front().unwrap_or_default();
    }

    /// A snapshot, a checkpoint or a validation: some of it goes on beside the step that is begun
    /// next, or has taken its place in caches.
    pub fn disturb(&mut self) {
        self.disturbed = true;
    }

    /// What this rank says of the newest step that is over.
    pub fn say(&mut self) -> Option<u32> {
        let waited_for = self.trials.awaits(self.over.step);
        self.told = waited_for.then_some(self.over.step);
        self.over.took.filter(|_| waited_for)
    }

    /// What all ranks have said of it. Returns what was chosen, the first time.
    pub fn hear(&mut self, times: impl IntoIterator<Item = Option<u32>>) -> Option<Chosen> {
        self.trials.heard(self.told.take()?, times).cloned()
    }

    /// That of the newest step that is over: with which it was begun.
    pub fn way(&self) -> Way {
        self.ways[self.over.way]
    }
}

impl Run<'_> {
    /// Begins a step, in its way.
    pub(super) fn begin(&mut self, step: u64, feeder: &mut Rounds) -> Result<(), Stop> {
        let Some(trying) = &mut self.trying else { return Ok(self.engine.begin(step, feeder)?) };
        self.engine.take_way(trying.begin(step), self.config.ranks);
        let began = Instant::now();
        self.engine.begin(step, feeder)?;
        trying.took(began.elapsed());
        Ok(())
    }

    /// On rank 0, once an attempt has chosen.
    pub(super) fn tell_chosen(&mut self, chosen: &Chosen) {
        let (Some(records), Some(trying)) = (&self.records, &self.trying) else { return };
        let (ways, way) = (&trying.ways, trying.ways[chosen.way]);
        let kept = if chosen.way == 0 { ", as planned" } else { "" };
        let message = format!("tokens travel {}{kept}: {}", way.words(), chosen.words(ways));
        let seconds = ways.iter().zip(&chosen.medians).filter_map(|(way, median)| {
            let seconds = f64::from((*median)?) * 1e-6;
            Some((format!("{}Seconds", way.name()), Detail::Real(seconds)))
        });
        let (way, step) = (Detail::Text(way.name()), Detail::Number(self.step));
        let kind = EventKind::ExchangeChosen;
        let mut told = event(self.config.attempt, kind, "Measured", message, [
            ("step", step),
            ("way", way),
        ]);
        told.details.extend(seconds);
        records.event(&told);
        (self.out)(TrainerEvent::Event(told));
    }
}

#[cfg(test)]
mod tests;
