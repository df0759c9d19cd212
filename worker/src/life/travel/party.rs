//! The ranks together, as whoever has started them sees them: who is asked what, and when.

use super::bed::bytes_needed;
use super::rank::{Ask, CALLS_LIMIT, Reply};
use super::verb::{Call, Verb, Way, in_units};
use super::{Link, Reading, Wanted};
use crate::engine::links::PeerUse;
use crate::life::part::{Part, Silence};
use std::io;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A driver takes its time for the contexts of eight GPUs.
const START_LIMIT: Duration = Duration::from_secs(60);
/// For memory, communicators, and kernels that are compiled for the first time.
const SET_UP_LIMIT: Duration = Duration::from_secs(120);
/// For readings and looks at results: more than a rank itself waits.
const ANSWER_LIMIT: Duration = Duration::from_secs(40);
const _: () = assert!(ANSWER_LIMIT.as_secs() > CALLS_LIMIT.as_secs());

/// Clocks are up by then, and links awake.
const WARM_UP: Duration = Duration::from_secs(1);
const ROUNDS: usize = 7;
/// Calls of the first round, which finds out how many the others take.
const CALLS_PROBED: usize = 3;
/// What a round lasts about.
const ROUND_SECONDS: f64 = 0.003;
/// Fewer than a stream takes before it holds its host.
const CALLS_MAX: usize = 100;
/// What NCCL takes on a GPU beside our buffers, with some room.
const NCCL_BYTES: usize = 1 << 30;

/// None of them is waited for without a limit.
pub(super) struct Party {
    parts: Vec<Part<Reply>>,
    /// `rank 1 (GPU 1)`
    names: Vec<String>,
    stop: AtomicBool,
}

impl Party {
    pub fn start(
        wanted: &Wanted,
        mut start: impl FnMut(&str) -> io::Result<Part<Reply>>,
    ) -> Result<(Party, Vec<String>), String> {
        let name = |(rank, ordinal)| format!("rank {rank} (GPU {ordinal})");
        let names: Vec<String> = wanted.ordinals.iter().enumerate().map(name).collect();
        let mut parts = Vec::new();
        for (ordinal, name) in wanted.ordinals.iter().zip(&names) {
            let part = start(&ordinal.to_string());
            parts.push(part.map_err(|error| format!("{name}: no process starts: {error}"))?);
        }
        let mut party = Party { parts, names, stop: AtomicBool::new(false) };
        let replies = party.hear_all(START_LIMIT, "opening its GPU")?;
        let needed = bytes_needed(&wanted.sizes(), wanted.ordinals.len());
        let mut gpus = Vec::new();
        for (reply, whose) in replies.into_iter().zip(&party.names) {
            let Reply::Ready { name, free } = reply else { return Err(unasked(whose)) };
            enough(wanted, needed, free).map_err(|why| format!("{whose}, {name}: {why}"))?;
            gpus.push(name);
        }
        Ok((party, gpus))
    }

    /// Memory for all results, and the numbers that travel.
    pub fn fill(&mut self, wanted: &Wanted) -> Result<(), String> {
        let (sizes, world) = (wanted.sizes(), wanted.world());
        let fill = |rank| Ask::Fill { rank: rank as u32, world, sizes: sizes.clone() };
        self.all(SET_UP_LIMIT, "memory for the numbers that travel", fill).map(drop)
    }

    /// The answer of each to what all are asked at once.
    fn all(
        &mut self,
        limit: Duration,
        doing: &str,
        ask: impl Fn(usize) -> Ask,
    ) -> Result<Vec<Reply>, String> {
        for (rank, part) in self.parts.iter_mut().enumerate() {
            part.ask(&ask(rank));
        }
        self.hear_all(limit, doing)
    }

    /// Where several fail, the one that did not wait for another says most.
    fn hear_all(&mut self, limit: Duration, doing: &str) -> Result<Vec<Reply>, String> {
        let until = Instant::now() + limit;
        let mut replies = Vec::new();
        let mut failed: Option<(bool, String)> = None;
        for (part, name) in self.parts.iter_mut().zip(&self.names) {
            let (waited, why) = match part.hear(until, &self.stop) {
                Ok(Reply::Failed { why, waited }) => (waited, why),
                Ok(reply) => {
                    replies.push(reply);
                    continue;
                }
                Err(silence) => {
                    (!matches!(silence, Silence::Ended(_)), silence.in_words(limit))
                }
            };
            if failed.as_ref().is_none_or(|(before, _)| *before && !waited) {
                failed = Some((waited, format!("{name}, {doing}: {why}")));
            }
        }
        failed.map_or(Ok(replies), |(_, why)| Err(why))
    }

    /// Each reads the memory of each other one, one after the other: nothing else is on its way.
    pub fn links(&mut self, ordinals: &[usize]) -> Result<Vec<Link>, String> {
        let mut links = Vec::new();
        for to in 0..ordinals.len() {
            for from in (0..ordinals.len()).filter(|from| *from != to) {
                self.parts[to].ask(&Ask::Read { ordinal: ordinals[from] });
                let until = Instant::now() + ANSWER_LIMIT;
                let name = &self.names[to];
                let rate = match self.parts[to].hear(until, &self.stop) {
                    Ok(Reply::Rate(rate)) => Ok(rate),
                    Ok(Reply::Failed { why, .. }) => Err(why),
                    Ok(_) => return Err(unasked(name)),
                    Err(silence) => {
                        let (from, why) = (&self.names[from], silence.in_words(ANSWER_LIMIT));
                        return Err(format!("{name}, reading the memory of {from}: {why}"));
                    }
                };
                links.push(Link { from: from as u32, to: to as u32, rate });
            }
        }
        Ok(links)
    }

    /// The version by which all have met; or why they have not, as far as their processes live.
    pub fn nccl(&mut self) -> Result<Result<String, String>, String> {
        self.parts[0].ask(&Ask::Id);
        let id = match self.parts[0].hear(Instant::now() + SET_UP_LIMIT, &self.stop) {
            Ok(Reply::Id(id)) => id,
            Ok(Reply::Failed { why, .. }) => return Ok(Err(why)),
            Ok(_) => return Err(unasked(&self.names[0])),
            Err(silence) => {
                let (name, why) = (&self.names[0], silence.in_words(SET_UP_LIMIT));
                return Err(format!("{name}, looking for NCCL: {why}"));
            }
        };
        let met = self.all(SET_UP_LIMIT, "meeting", |_| Ask::Meet { id: id.clone() });
        Ok(met.and_then(|replies| match replies.into_iter().next() {
            Some(Reply::Met { version }) => Ok(version),
            _ => Err(unasked(&self.names[0])),
        }))
    }

    /// How many blocks move what goes through windows; or why all go without.
    pub fn windows(&mut self) -> Result<Result<usize, String>, String> {
        let replies = match self.all(SET_UP_LIMIT, "making a window", |_| Ask::Window) {
            Ok(replies) => replies,
            Err(why) => return Ok(Err(why)),
        };
        let mut places = Vec::new();
        for (reply, name) in replies.into_iter().zip(&self.names) {
            let Reply::At(place) = reply else { return Err(unasked(name)) };
            places.push(place);
        }
        let connect = |_| Ask::Connect { places: places.clone() };
        let connected = self.all(SET_UP_LIMIT, "mapping the windows of the others", connect);
        Ok(connected.map(|_| PeerUse::said().blocks_measured()))
    }

    pub fn readings(
        &mut self,
        wanted: &Wanted,
        has: impl Fn(Way) -> bool,
    ) -> Result<Vec<Reading>, String> {
        let ways = |verb: Verb| -> Vec<Way> {
            let can = |way: &Way| has(*way) && (*way == Way::Nccl || verb.has_windows());
            [Way::Nccl, Way::Windows].into_iter().filter(can).collect()
        };
        self.warm_up(wanted, &ways(Verb::AllToAll))?;
        let mut readings = Vec::new();
        for verb in Verb::ALL {
            for bytes in verb.sizes(&wanted.bytes, wanted.world()) {
                let calls = ways(verb).into_iter().map(|way| Call { verb, way, bytes });
                readings.extend(self.in_turn(&calls.collect::<Vec<_>>(), wanted.captured)?);
            }
        }
        Ok(readings)
    }

    fn warm_up(&mut self, wanted: &Wanted, ways: &[Way]) -> Result<(), String> {
        let (verb, began) = (Verb::AllToAll, Instant::now());
        let most = verb.sizes(&wanted.bytes, wanted.world()).pop();
        let (Some(bytes), Some(way)) = (most, ways.first()) else { return Ok(()) };
        while began.elapsed() < WARM_UP {
            self.took(Call { verb, way: *way, bytes }, CALLS_PROBED, false)?;
        }
        Ok(())
    }

    /// Rounds of all of these, one after the other; then a look at each result.
    fn in_turn(&mut self, calls: &[Call], captured: bool) -> Result<Vec<Reading>, String> {
        let mut times = Vec::new();
        for call in calls {
            times.push(calls_of_a_round(self.took(*call, CALLS_PROBED, false)?));
        }
        let mut rounds = vec![Vec::new(); calls.len()];
        for _ in 0..ROUNDS {
            for ((call, times), took) in calls.iter().zip(&times).zip(&mut rounds) {
                took.push(self.took(*call, *times, captured)?);
            }
        }
        for call in calls {
            self.all(ANSWER_LIMIT, &call.to_string(), |_| Ask::Check { call: *call })?;
        }
        Ok(calls.iter().zip(rounds).map(|(call, took)| reading(*call, took)).collect())
    }

    /// Seconds of a call on the slowest rank.
    fn took(&mut self, call: Call, times: usize, captured: bool) -> Result<f64, String> {
        let ask = |_| Ask::Time { call, times, captured };
        let replies = self.all(ANSWER_LIMIT, &call.to_string(), ask)?;
        let mut slowest = 0.0;
        for (reply, name) in replies.into_iter().zip(&self.names) {
            let Reply::Took(seconds) = reply else { return Err(unasked(name)) };
            slowest = f64::max(slowest, seconds);
        }
        Ok(slowest)
    }
}

fn unasked(name: &str) -> String {
    format!("{name} answers what nobody has asked: a bug")
}

/// Whether a rank finds the memory that it needs.
fn enough(wanted: &Wanted, needed: usize, free: usize) -> Result<(), String> {
    let nccl = if wanted.is_shared() { 0 } else { NCCL_BYTES };
    let ranks = if wanted.is_shared() { wanted.ordinals.len() } else { 1 };
    let needed = ranks * (needed + nccl);
    if needed <= free {
        return Ok(());
    }
    let most = wanted.bytes.iter().copied().max().unwrap_or(0);
    let mib = |bytes: usize| bytes.div_ceil(1 << 20);
    Err(format!(
        "{} MiB are free and results of {} need {}: end what uses the GPU (nvidia-smi lists it), \
         or give smaller --bytes",
        free >> 20,
        in_units(most),
        mib(needed)
    ))
}

/// As many as last for [`ROUND_SECONDS`].
fn calls_of_a_round(seconds: f64) -> usize {
    let fitting = ROUND_SECONDS / seconds.max(1e-9);
    (fitting as usize).clamp(CALLS_PROBED, CALLS_MAX)
}

fn reading(call: Call, mut rounds: Vec<f64>) -> Reading {
    rounds.sort_by(f64::total_cmp);
    let at = |at: usize| rounds.get(at).copied().unwrap_or(0.0);
    let (fastest, slowest) = (at(0), at(rounds.len().saturating_sub(1)));
    Reading { call, seconds: at(rounds.len() / 2), fastest, slowest }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: Call = Call { verb: Verb::AllGather, way: Way::Windows, bytes: 1 << 20 };

    #[test]
    fn the_median_of_the_rounds_counts() {
        let read = reading(CALL, vec![5.0, 1.0, 9.0, 2.0, 3.0]);
        assert_eq!((read.seconds, read.fastest, read.slowest), (3.0, 1.0, 9.0));
    }

    #[test]
    fn short_calls_are_made_more_often() {
        let all = [1e-6, 60e-6, 0.5e-3, 0.01, 0.0].map(calls_of_a_round);
        assert_eq!(all, [CALLS_MAX, 50, 6, CALLS_PROBED, CALLS_MAX]);
    }

    #[test]
    fn who_has_too_little_memory_is_told_what_to_do() {
        let wanted = Wanted { ordinals: vec![0, 1], bytes: vec![256 << 20], captured: false };
        let needed = bytes_needed(&wanted.sizes(), 2);
        assert_eq!(enough(&wanted, needed, needed + NCCL_BYTES), Ok(()));
        let why = enough(&wanted, needed, 100 << 20).expect_err("too little");
        let expected = "100 MiB are free and results of 256 MiB need 1793: end what uses the GPU \
                        (nvidia-smi lists it), or give smaller --bytes";
        assert_eq!(why, expected);
        let shared = Wanted { ordinals: vec![0; 3], ..wanted };
        assert!(shared.is_shared() && enough(&shared, needed, 2 * needed).is_err());
        assert_eq!(enough(&shared, needed, 3 * needed), Ok(()), "NCCL takes nothing there");
    }
}
