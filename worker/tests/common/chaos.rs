//! Storage that fails, stumbles and is slow by a schedule, under a clock that it moves by itself.

use moe_worker::checkpoint::{Effect, Faults};
use moejob_kernels::philox::philox4x32_10;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
/// EIO, ENOSPC, ESTALE, ETIMEDOUT, ENOTCONN, EHOSTDOWN.
const STUMBLES: [i32; 6] = [5, 28, 116, 110, 107, 112];
/// In real time a stumble is no longer than this.
const REAL_MAX: Duration = Duration::from_secs(20);

/// Storage that fails by a schedule, and forgets at a crash what was not made durable.
#[derive(Debug)]
pub struct Chaos {
    seed: u64,
    state: Mutex<ChaosState>,
    /// None: time is moved by the schedule.
    real: Option<Instant>,
}

/// What an effect is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Data,
    /// Checkpoints, claims and what else is read before the first step.
    Restore,
    Records,
    /// Checkpoints that are written.
    Save,
}

/// Reads, or records, that fail or are late for a while.
#[derive(Debug)]
struct Stumble {
    of: Use,
    /// From so many effects of that use on.
    from: u32,
    /// An error; None: the answer comes, late.
    errno: Option<i32>,
    lasts: Duration,
    until: Option<Duration>,
}

#[derive(Debug, Default)]
struct ChaosState {
    effects: u32,
    /// By use: data, restore, records.
    used: [u32; 3],
    stumbles: Vec<Stumble>,
    clock: Duration,
    /// Effects from the first to before the second fail, by the third's rule.
    bad: Vec<(u32, u32, Mode)>,
    /// The process has ended: nothing reaches storage.
    dead_at: u32,
    unsynced: Vec<PathBuf>,
    /// Changes of directories that are not durable, in order.
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    Full,
    Failing,
    Away,
    Slow,
    /// Each effect fails or not.
    Flaky,
}

#[derive(Debug)]
enum Entry {
    Made(PathBuf),
    Renamed(PathBuf, PathBuf),
}

impl Entry {
    fn parent(&self) -> Option<&Path> {
        match self {
            Entry::Made(path) | Entry::Renamed(_, path) => path.parent(),
        }
    }
}

impl Chaos {
    fn draw(&self, number: u32) -> [u32; 4] {
        philox4x32_10(self.seed, [number, 7, 0, 0])
    }

    /// Fault windows and, sometimes, a crash. The first effects of a fresh job are spared: what a
    /// user has mistyped ends it at once.
    pub fn new(seed: u64, spared: u32) -> Arc<Chaos> {
        let real = std::env::var("MOEJOB_CLOCK").is_ok_and(|clock| clock == "real");
        let real = real.then(Instant::now);
        let chaos = Chaos { seed, state: Mutex::default(), real };
        let mut bad = Vec::new();
        let [count, crash, at, _] = chaos.draw(0);
        for window in 0..count % 4 {
            let [start, len, mode, _] = chaos.draw(1 + window);
            let start = spared + start % 150;
            let modes = [Mode::Full, Mode::Failing, Mode::Away, Mode::Slow, Mode::Flaky];
            bad.push((start, start + 1 + len % 12, modes[mode as usize % modes.len()]));
        }
        let dead_at = if crash % 3 == 0 { u32::MAX } else { spared + at % 160 };
        let stumbles = (0..3 + at % 3).map(|number| chaos.stumble(number)).collect();
        {
            let mut state = chaos.state.lock().expect("no panic");
            (state.bad, state.dead_at, state.stumbles) = (bad, dead_at, stumbles);
        }
        Arc::new(chaos)
    }

    /// One of 0.1 to 900 s, as often below 10 s as above.
    fn stumble(&self, number: u32) -> Stumble {
        let [of, from, errno, long] = self.draw(2000 + number);
        // Records are tried again half a second later, and commits wait for them.
        let (of, within) = match of % 8 {
            0 => (Use::Records, 30),
            even if even % 2 == 0 => (Use::Restore, 40),
            _ => (Use::Data, 110),
        };
        let lasts = 0.1 * 9000_f64.powf(f64::from(long) / f64::from(u32::MAX));
        let lasts = Duration::from_secs_f64(lasts);
        let lasts = if self.real.is_some() { lasts.min(REAL_MAX) } else { lasts };
        // As often late as any of the errors.
        let errno = STUMBLES.get(errno as usize % (STUMBLES.len() + 2)).copied();
        Stumble { of, from: from % within, errno, lasts, until: None }
    }

    fn passes(&self, state: &mut ChaosState, time: Duration) {
        if self.real.is_none() {
            state.clock += time;
        }
    }

    /// What storage answers to an effect of this use, and for how long it keeps that back.
    fn stumbles(&self, of: Use) -> (Result<()>, Duration) {
        let now = self.now();
        let mut state = self.state.lock().expect("no panic");
        let used = &mut state.used[of as usize];
        *used += 1;
        let count = *used;
        let due = |stumble: &&mut Stumble| {
            let over = stumble.until.is_some_and(|until| now >= until);
            stumble.of == of && count > stumble.from && !over
        };
        let Some(stumble) = state.stumbles.iter_mut().find(due) else {
            return (Ok(()), Duration::ZERO);
        };
        let (lasts, errno) = (stumble.lasts, stumble.errno);
        stumble.until.get_or_insert(now + lasts);
        match errno {
            // Records are tried again by their own clock, twice a second.
            Some(_) if of == Use::Records => stumble.until = Some(Duration::ZERO),
            Some(_) => {}
            None => stumble.until = Some(Duration::ZERO),
        }
        match errno {
            // Whoever tries again without a pause sees it end all the same.
            Some(errno) => {
                self.passes(&mut state, lasts / 16);
                (Err(Error::from_raw_os_error(errno)), Duration::ZERO)
            }
            None => {
                self.passes(&mut state, lasts);
                (Ok(()), lasts)
            }
        }
    }

    pub fn is_dead(&self) -> bool {
        let state = self.state.lock().expect("no panic");
        state.effects > state.dead_at
    }

    /// What a loss of power leaves: of what was not made durable, some of the beginning.
    pub fn crash(&self) {
        let mut state = self.state.lock().expect("no panic");
        let [entries, bytes, ..] = self.draw(1000);
        let kept = entries as usize % (state.entries.len() + 1);
        for entry in state.entries.drain(kept..).rev() {
            match entry {
                Entry::Made(path) if path.is_dir() => drop(std::fs::remove_dir_all(path)),
                Entry::Made(path) => drop(std::fs::remove_file(path)),
                Entry::Renamed(from, to) => drop(std::fs::rename(to, from)),
            }
        }
        for path in state.unsynced.drain(..) {
            if let Ok(file) = std::fs::File::options().write(true).open(&path) {
                let len = file.metadata().map_or(0, |metadata| metadata.len());
                file.set_len(u64::from(bytes) % (len + 1)).expect("a shorter file");
            }
        }
    }
}

fn use_of(effect: Effect) -> Use {
    let path = match effect {
        Effect::Create(path)
        | Effect::Write(path)
        | Effect::Sync(path)
        | Effect::SyncDirectory(path)
        | Effect::CreateDirectory(path)
        | Effect::Rename { to: path, .. }
        | Effect::RemoveFile(path)
        | Effect::RemoveDirectory(path)
        | Effect::Read(path)
        | Effect::Bytes(path) => path,
    };
    match effect {
        _ if path.extension().is_some_and(|ending| ending == "jsonl") => Use::Records,
        Effect::Read(_) | Effect::Bytes(_) => {
            let in_text = path.components().any(|part| part.as_os_str() == "text");
            if in_text { Use::Data } else { Use::Restore }
        }
        _ => Use::Save,
    }
}

impl Faults for Chaos {
    fn before(&self, effect: Effect) -> Result<()> {
        let of = use_of(effect);
        if of != Use::Save {
            if self.is_dead() {
                // Whoever has ended waits for no lines to be written.
                return match of {
                    Use::Records => Ok(()),
                    _ => Err(Error::from_raw_os_error(EIO)),
                };
            }
            let (answer, late) = self.stumbles(of);
            if self.real.is_some() {
                std::thread::sleep(late);
            }
            return answer;
        }
        let mut state = self.state.lock().expect("no panic");
        state.effects += 1;
        let at = state.effects;
        if at > state.dead_at {
            return Err(Error::from_raw_os_error(EIO));
        }
        let window = state.bad.iter().find(|(start, end, _)| (*start..*end).contains(&at));
        let Some((_, _, mode)) = window.copied() else { return Ok(()) };
        drop(state);
        let takes_room =
            matches!(effect, Effect::Create(_) | Effect::Write(_) | Effect::CreateDirectory(_));
        match mode {
            Mode::Full if takes_room => Err(Error::from_raw_os_error(ENOSPC)),
            Mode::Failing => Err(Error::from_raw_os_error(EIO)),
            Mode::Away => Err(Error::from_raw_os_error(ENOENT)),
            Mode::Flaky if self.draw(5000 + at)[0] % 2 == 0 => Err(Error::from_raw_os_error(EIO)),
            Mode::Slow => {
                std::thread::sleep(Duration::from_millis(10));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn now(&self) -> Duration {
        match self.real {
            Some(began) => began.elapsed(),
            None => self.state.lock().expect("no panic").clock,
        }
    }

    fn pause(&self, time: Duration) {
        match self.real {
            Some(_) => std::thread::sleep(time),
            None => {
                self.state.lock().expect("no panic").clock += time;
                // Whoever else is at work gets on.
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    fn after(&self, effect: Effect) {
        let mut state = self.state.lock().expect("no panic");
        let path = |path: &Path| path.to_path_buf();
        match effect {
            Effect::Create(made) | Effect::CreateDirectory(made) => {
                let known = state.entries.iter().any(|entry| {
                    matches!(entry, Entry::Made(other) if other == made)
                });
                if !known {
                    state.entries.push(Entry::Made(path(made)));
                }
            }
            Effect::Write(written) => state.unsynced.push(path(written)),
            Effect::Sync(synced) => state.unsynced.retain(|other| other != synced),
            Effect::SyncDirectory(synced) => {
                state.entries.retain(|entry| entry.parent() != Some(synced));
            }
            Effect::Rename { from, to } => {
                state.entries.push(Entry::Renamed(path(from), path(to)));
            }
            Effect::RemoveFile(gone) | Effect::RemoveDirectory(gone) => {
                // A removal that is lost only leaves what every attempt tidies.
                state.entries.retain(|entry| match entry {
                    Entry::Made(other) | Entry::Renamed(_, other) => !other.starts_with(gone),
                });
            }
            Effect::Read(_) | Effect::Bytes(_) => {}
        }
    }
}
