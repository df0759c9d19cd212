//! What a worker does with its engines between the beginnings and ends of attempts.

use super::{Body, Engine, Engines, Outcome, Running, Watch};
use crate::attempt::api::{Control, TrainerEvent};
use moejob_protocol::config::Backend;
use crate::attempt::saves::Patience;
use moejob_protocol::message::{HEARTBEAT_MS, Loading, Request};
use moejob_protocol::report::{Detail, EventKind};

/// An engine that has not yet said that it runs is given longer: the machine may be busy with
/// starting many.
const FIRST_BEAT_MS: u64 = 10_000;
/// What an engine on a GPU has to leave an attempt that is over: it takes 0.3 to 1.3 s.
const LEAVE_MS: u64 = 2_000;

impl Engines {
    /// Every heartbeat: an engine whose beats have stood still for `heartbeatTimeout` is stopped or
    /// hangs in the kernel, and is ended. Ticks are counted rather than time, so that a machine
    /// that was asleep ends nobody.
    ///
    /// Now and then it is also looked at where the engines' threads run; what differs from the plan
    /// is given back.
    pub fn tick(&mut self) -> Outcome {
        let mut outcome = Outcome::default();
        self.start_missing(&mut outcome);
        outcome.tell.extend(self.look());
        outcome
    }

    fn look(&mut self) -> Vec<TrainerEvent> {
        let Some(running) = &mut self.running else { return Vec::new() };
        let timeout = running.config.recovery.heartbeat_timeout_ms;
        for (index, engine) in self.engines.iter().enumerate() {
            let Some(Engine { body: Body::Process(process), .. }) = engine else { continue };
            let beats = running.control(index).beats();
            let over = running.links.abort_handle(running.rank(index)).is_aborted();
            // A processor is left at once; its storage may hang, which no kill ends.
            let gpu = running.config.training.compute.backend == Backend::Cuda;
            let watch = &mut running.watches[index];
            let limit = if beats == 0 { timeout.max(FIRST_BEAT_MS) } else { timeout };
            if running.ends[index].is_some() {
                *watch = Watch { beats, ..Watch::default() };
                continue;
            }
            watch.stays += u64::from(over && gpu);
            if watch.stays * HEARTBEAT_MS >= LEAVE_MS {
                tracing::warn!(pid = process.pid(), "an engine does not leave its GPU; ending it");
                process.kill();
            }
            if beats != watch.beats {
                *watch = Watch { beats, ticks: 0, ..*watch };
                continue;
            }
            watch.ticks += 1;
            if watch.ticks * HEARTBEAT_MS >= limit {
                tracing::warn!(pid = process.pid(), "an engine does not run; ending it");
                process.kill();
            }
        }
        let mut told = waiting(running, &self.engines, &self.uuids);
        if !self.bound.is_due() {
            return told;
        }
        for (index, engine) in self.engines.iter().enumerate() {
            let Some(engine) = engine else { continue };
            let rank = running.rank(index);
            let look = self.bound.look(index, (engine.life, engine.pid()), rank);
            told.extend(look.warning.and_then(|warning| engine.warn(&self.uuids[index], warning)));
            told.extend(look.seated.map(TrainerEvent::Seated));
        }
        told
    }

    /// Ends the attempt's collectives.
    pub fn abort(&mut self, reason: &str) {
        if let Some(running) = &mut self.running {
            running.first.get_or_insert_with(|| reason.to_string());
            running.abort(reason);
        }
    }

    /// A new leader hears of the engines that the one before was told of.
    pub fn started(&self) -> impl Iterator<Item = TrainerEvent> {
        let told = self.engines.iter().zip(&self.uuids).filter_map(|(engine, uuid)| {
            let engine = engine.as_ref().filter(|engine| engine.told)?;
            let (place, kind) = (engine.place.as_ref()?, EventKind::EngineStarted);
            Some(place.told((uuid, engine.pid()), kind, "Running", "", []))
        });
        told.map(TrainerEvent::Event)
    }

    /// Said by one rank, it holds for all.
    pub fn request(&self, request: Request) {
        if let Some(running) = &self.running {
            running.control(0).request(request);
        }
    }

    /// Steps of the attempt that runs may take so many seconds longer.
    pub fn be_patient(&self, seconds: u32) {
        if let Some(running) = &self.running {
            (0..running.ends.len()).for_each(|index| running.control(index).be_patient(seconds));
        }
    }

    /// Phase and step of the first rank, the collective of the one that is least far, and how far
    /// all of them are with what they read.
    pub fn progress(&self) -> Option<(Control, u64, Option<Loading>)> {
        let running = self.running.as_ref()?;
        let links = &running.links;
        let number = |rank: u32| {
            let at = links.memory().long(links.collective(rank));
            at.load(std::sync::atomic::Ordering::Relaxed)
        };
        let least = links.shape().ranks().map(number).min().unwrap_or(0);
        let ranks = (0..running.ends.len()).filter_map(|index| running.control(index).loading());
        let loading = ranks.reduce(|all, one| Loading {
            bytes_done: all.bytes_done + one.bytes_done,
            bytes: all.bytes + one.bytes,
            life: all.life + one.life,
        });
        // What all have exchanged is done as well.
        let life = running.life + least;
        let loading = loading.map(|all| Loading { life: all.life + life, ..all });
        Some((running.control(0), least, loading))
    }

    /// No more attempts: each engine ends after the one that runs.
    pub fn end(&mut self) {
        self.ending = true;
        for engine in self.engines.iter_mut().flatten() {
            match &mut engine.body {
                Body::Thread(thread) => thread.end(),
                Body::Process(process) => process.end(),
            }
        }
    }

    pub fn have_ended(&self) -> bool {
        self.engines.iter().all(Option::is_none)
    }

    /// Those that have not ended.
    pub fn kill(&mut self) {
        for engine in self.engines.iter().flatten() {
            if let Body::Process(process) = &engine.body {
                process.kill();
            }
        }
    }
}

/// What there is to tell of ranks that wait. One that waits is alive, as long as its own patience
/// lasts: then it gives up by itself, or hangs.
fn waiting(
    running: &mut Running,
    engines: &[Option<Engine>],
    uuids: &[String],
) -> Vec<TrainerEvent> {
    let (now, longest) = (running.since.elapsed(), Patience::default().data);
    let mut told = Vec::new();
    for (index, engine) in engines.iter().enumerate().take(running.waits.len()) {
        let control = running.control(index);
        let waits = control.waits().filter(|_| running.ends[index].is_none());
        let says = running.waits[index].look(waits, control.stumbles(), now);
        if waits.is_some() && running.waits[index].waited(now) < longest {
            running.life += 1;
        }
        let Some(engine) = engine else { continue };
        let Some(place) = &engine.place else { continue };
        let who = (&uuids[index][..], engine.pid());
        told.extend(says.into_iter().map(|(kind, reason, text, seconds)| {
            let message = format!("{}: {text}", place.in_words(who.0, who.1));
            let details = [("seconds", Detail::Real(seconds.as_secs_f64()))];
            TrainerEvent::Event(place.told(who, kind, reason, &message, details))
        }));
    }
    told
}
