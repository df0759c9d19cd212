//! Copies of the state: when a snapshot or a checkpoint takes one, and those on their way.
//!
//! ```text
//! due -> slots on all ranks -> copied at once -> complete -> held -> to buddies, beside the steps
//!                `-> begun, beside the next step -> that step's end --^   `-> checkpoint begins
//! ```
//! A copy that is on its way is nobody's: it is resumed from, acknowledged and written to storage
//! once all of it is there. Whoever dies meanwhile leaves the snapshot before it.

use crate::attempt::api::TrainerEvent;
use crate::attempt::products;
use crate::attempt::steps::{Run, STORAGE_POLL};
use crate::attempt::stop::{Stop, fail};
use crate::state::rank::RankState;
use crate::state::slot::{Filling, Slot};
use crate::state::snapshot::{self, Cargo, Opened, SnapshotError};
use moejob_protocol::checkpoint::Part;
use moejob_protocol::report::EventKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What became of a snapshot.
pub(crate) enum Taken {
    /// There is none of this step.
    No,
    Now(Arc<Slot>),
    /// It leaves beside the next step.
    Later,
}

/// A copy of the state after `step` that leaves beside the step after it.
pub(crate) struct Leaving {
    step: u64,
    /// Slots for the shards of others; the own one is the model's.
    theirs: Vec<(u32, Filling)>,
    /// See [`Opened::large`].
    large: bool,
    /// Nobody resumes from it.
    for_checkpoint: bool,
    /// A checkpoint is written from it, with what was measured behind its step.
    checkpoint: Option<Option<f64>>,
    /// What it has cost so far.
    cost: Duration,
}

/// Whether the attempt is over, for threads that make memory ready for its next snapshot: it may
/// be many seconds' work, which the next attempt would wait for.
#[derive(Default)]
pub(crate) struct Over(Arc<AtomicBool>);

impl Over {
    pub fn tell(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What a snapshot is followed by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Goes {
    /// Steps, beside which copies may travel to buddies.
    pub on: bool,
    /// A step, beside which the copy itself may leave.
    pub beside: bool,
}

/// Bytes of a rank's state from which on its first snapshot waits until its slots are made.
const DEAR: u64 = 256 << 20;

/// Looks for a free slot, [`STORAGE_POLL`] apart, before an attempt ends without its last
/// checkpoint.
const SLOT_TRIES: u32 = 30_000;

/// Set to `on` slots are pinned, and a GPU's snapshots leave beside the next step. Without it they
/// are copied at once: a process that has pinned memory takes the driver longer to end, and its
/// successor longer to begin.
const ENV_LANE: &str = "MOEJOB_LANE";

fn not_taken(error: SnapshotError) -> Stop {
    match error {
        SnapshotError::Comm(error) => Stop::Comm(error),
        SnapshotError::Device(error) => Stop::from(error),
        SnapshotError::Memory(source) => {
            let advice = "give the worker more memory, or make the model smaller";
            fail(1, &format!("no memory for a snapshot: {source}"), advice)
        }
    }
}

impl Run<'_> {
    /// What the next snapshot needs is made ready beside the first steps, by a thread, if any.
    pub(super) fn prepare(&mut self) {
        if self.pace.is_some_and(|pace| !pace.fits()) {
            return;
        }
        let before = self.preparing.take();
        let (shards, memory) = (self.shards(), self.memory.clone());
        let gpu = self.engine.model.device.as_cuda().map(|cuda| cuda.gpu().clone());
        let gpu = gpu.filter(|_| std::env::var_os(ENV_LANE).is_some_and(|word| word == "on"));
        let (own, over) = (shards.last().copied(), Arc::clone(&self.over.0));
        let thread = std::thread::Builder::new().name("prepare".to_string());
        let work = move || {
            // One that is under way is not made twice. It does not panic.
            before.map(JoinHandle::join);
            memory.prepare(&shards, &over);
            if let Some((gpu, (shard, len))) = gpu.zip(own) {
                memory.prepare_pinned(&gpu, shard, len, &over);
            }
        };
        // Without the thread the next snapshot takes longer.
        self.preparing = thread.spawn(work).ok();
    }

    /// Those that a snapshot leaves here, with their bytes: of wards, and the own one last.
    fn shards(&self) -> Vec<(u32, usize)> {
        let table = self.engine.model.table();
        let wards = (0..).zip(&self.buddies).filter(|(_, buddy)| **buddy == Some(table.rank));
        let shards = wards.map(|(ward, _)| ward).chain([table.rank]);
        shards.map(|shard| (shard, snapshot::shard_bytes(&table, shard))).collect()
    }

    /// The first snapshot of an attempt that needs one is due once its slots are made.
    pub(super) fn is_anew(&self) -> bool {
        let are_made = self.preparing.as_ref().is_none_or(JoinHandle::is_finished);
        self.anew && self.pace.is_none_or(|pace| pace.fits()) && are_made
    }

    /// To make and fill the first slots of this rank, or of any other, would hold steps up. It is
    /// the same on all ranks, whose shards differ by a block or so.
    pub(super) fn is_dear(&self) -> bool {
        let model = &self.engine.model;
        let float = model.shape.float_bytes as u64;
        let state = model.table().model.numel() * Part::ALL.len() as u64 * float;
        state / u64::from(model.layout.mesh.world().max(1)) >= DEAR
    }

    /// What is still being made could not be filled, and to make another one takes as long.
    fn end_preparing(&mut self) {
        if let Some(preparing) = self.preparing.take() {
            // It does not panic.
            let _ = preparing.join();
        }
    }

    /// No: a rank has no memory for another copy of its state, and training goes on without.
    pub(super) fn snapshot(&mut self, goes: Goes) -> Result<Taken, Stop> {
        if self.travels.is_some() && !self.settle_copies(goes)? {
            return Ok(Taken::No);
        }
        let began = Instant::now();
        let taken = self.take(goes);
        if matches!(taken, Ok(Taken::Later)) {
            let cost = began.elapsed();
            self.clock.stalls.snapshot += cost.as_secs_f64();
            if let Some(leaving) = &mut self.leaving {
                leaving.cost = cost;
            }
            return taken;
        }
        self.is_held(began, began.elapsed());
        let taken = taken?;
        let none = matches!(taken, Taken::No);
        let told = std::mem::replace(&mut self.skips, none);
        if none && !told {
            let message = "no memory for another copy of the state while a checkpoint is written \
                           from the last one; training goes on, and an engine that is lost now \
                           costs more steps"
                .to_string();
            self.tell(EventKind::Warning, "SnapshotSkipped", message, self.step)?;
        }
        Ok(taken)
    }

    /// What is there now is told; of what it has cost this much has passed since `began`.
    fn is_held(&mut self, began: Instant, cost: Duration) {
        let ended = Instant::now();
        self.clock.stalls.snapshot += (ended - began).as_secs_f64();
        if let Some(pace) = &mut self.pace {
            pace.taken(ended.checked_sub(cost).unwrap_or(began), ended);
        }
        (self.out)(TrainerEvent::Held(self.memory.held()));
    }

    /// The copies of the last snapshot are still on their way: whether another one can be taken.
    /// Not while steps go on, and not behind the last one, whose state goes to storage. An attempt
    /// that is asked to stop waits, since the next one needs its state.
    fn settle_copies(&mut self, goes: Goes) -> Result<bool, Stop> {
        if goes.on {
            if !std::mem::replace(&mut self.slow_told, true) {
                let message = "the last snapshot is still on its way to other nodes: this one is \
                               left out, and a worker that is lost now costs more steps";
                self.tell(EventKind::Warning, "SnapshotSkipped", message.to_string(), self.step)?;
            }
            return Ok(false);
        }
        if self.step >= self.config.training.steps {
            return Ok(false);
        }
        let began = Instant::now();
        self.held = self.courier.wait()?.or(self.held);
        self.travels = None;
        self.clock.stalls.snapshot += began.elapsed().as_secs_f64();
        Ok(true)
    }

    /// Behind a step: whether the copies that travel beside the steps are there.
    pub(super) fn copies_arrive(&mut self) -> Result<(), Stop> {
        let Some(step) = self.courier.arrived()? else { return Ok(()) };
        self.held = Some(step);
        self.memory.trim();
        self.memory.rest();
        (self.out)(TrainerEvent::Held(self.memory.held()));
        Ok(())
    }

    /// The own shard of `step` is whole. Copies go to the buddies: at once where they are small or
    /// nothing follows, else beside the steps.
    fn give_copies(
        &mut self,
        step: u64,
        opened: Opened,
        goes_on: bool,
    ) -> Result<Arc<Slot>, Stop> {
        let Run { engine, memory, buddies, courier, .. } = self;
        let rank = engine.model.rank;
        if !(goes_on && opened.large && buddies.iter().any(Option::is_some)) {
            let slot = snapshot::complete(memory, engine.links.comm(), buddies, opened);
            self.held = Some(step);
            return slot.map_err(not_taken);
        }
        let (slot, cargo) = Cargo::of(rank, step, buddies, opened);
        courier.begin(cargo).map_err(|error| {
            let message = format!("no thread for copies of snapshots: {error}");
            fail(1, &message, "let the worker have more threads")
        })?;
        self.travels = Some(step);
        Ok(slot)
    }

    fn take(&mut self, Goes { on, beside }: Goes) -> Result<Taken, Stop> {
        self.end_preparing();
        self.anew = false;
        let of = (self.config.attempt, self.step);
        let (model, comm) = (&self.engine.model, self.engine.links.comm());
        let can_leave = |slot: &Filling| beside && model.can_leave(slot);
        let opened = snapshot::open(self.memory, model, comm, &self.buddies, of, can_leave);
        let Some(mut opened) = opened.map_err(not_taken)? else { return Ok(Taken::No) };
        if opened.beside {
            self.leave(opened, false);
            return Ok(Taken::Later);
        }
        snapshot::cut_into_slot(&mut self.engine.model, &mut opened.own)?;
        let slot = self.give_copies(self.step, opened, on)?;
        if on && self.is_dear() {
            // The next one finds its slots made, too.
            self.prepare();
        }
        Ok(Taken::Now(slot))
    }

    fn leave(&mut self, opened: Opened, for_checkpoint: bool) {
        let Opened { own, theirs, large, .. } = opened;
        self.engine.model.begin_cut(own);
        let (step, cost) = (self.step, Duration::ZERO);
        let checkpoint = None;
        self.leaving = Some(Leaving { step, theirs, large, for_checkpoint, checkpoint, cost });
    }

    /// Behind a step: what left beside it is there. `goes_on`: other steps follow.
    pub(super) fn arrive(&mut self, goes_on: bool) -> Result<(), Stop> {
        let Some(leaving) = self.leaving.take() else { return Ok(()) };
        let Leaving { step, theirs, large, for_checkpoint, checkpoint, cost } = leaving;
        let began = Instant::now();
        let Some((own, waited)) = self.engine.model.end_cut()? else { return Ok(()) };
        let waited = Duration::try_from_secs_f64(waited).unwrap_or_default();
        if for_checkpoint {
            // Lent to its writer.
            drop(own.complete_for_checkpoint());
            let ended = Instant::now();
            self.clock.stalls.checkpoint += (waited + (ended - began)).as_secs_f64();
            if let Some(saving) = &mut self.saving {
                saving.copied(began.checked_sub(cost + waited).unwrap_or(began), ended);
            }
        } else {
            let opened = Opened { own, theirs, beside: true, large };
            let slot = self.give_copies(step, opened, goes_on)?;
            self.skips = false;
            self.clock.stalls.snapshot += waited.as_secs_f64();
            self.is_held(began, cost + waited + began.elapsed());
            if checkpoint.is_some() {
                slot.lend();
            }
        }
        if let Some(held_out) = checkpoint {
            self.begin_checkpoint(step, held_out);
        }
        Ok(())
    }

    /// Begins a checkpoint of this step, from its snapshot where there is one. Where storage has
    /// not caught up it is put off, unless there is no step after this one.
    pub(super) fn checkpoint(&mut self, snapshot: Taken) -> Result<(), Stop> {
        let began = Instant::now();
        if !self.saves.has_room() {
            if self.waits_until.is_none() {
                let news = self.saves.put_off(self.step);
                return news.map_or(Ok(()), |news| self.tell_storage(news));
            }
            self.wait_for_storage()?;
        }
        if self.saves.has_committed(self.step) {
            return Ok(());
        }
        let snapshot = match snapshot {
            Taken::No => self.cut_for_checkpoint()?,
            Taken::Now(slot) => {
                slot.lend();
                Taken::Now(slot)
            }
            Taken::Later => Taken::Later,
        };
        match (snapshot, &mut self.leaving) {
            (Taken::No, _) => self.saves.leave_out(),
            (Taken::Later, Some(leaving)) => leaving.checkpoint = Some(self.held_out),
            _ => self.begin_checkpoint(self.step, self.held_out),
        }
        self.clock.stalls.checkpoint += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// The shard of `step` lies in a slot that was lent.
    fn begin_checkpoint(&mut self, step: u64, held_out: Option<f64>) {
        self.saving.iter_mut().for_each(|saving| saving.began(step));
        let model = &self.engine.model;
        let products = if model.rank == 0 { products::of(model) } else { None };
        self.saves.begin(step, held_out.filter(|_| self.keeps_best), products);
        if self.engine.model.device.as_cuda().is_some() {
            // The next snapshot finds another slot than the one that is written from.
            self.prepare();
        }
    }

    /// Cuts the state for a checkpoint alone, and lends it; no, on all ranks alike: a rank has no
    /// memory for that. Where there is no step after this one, memory is waited for: all who read
    /// are done.
    fn cut_for_checkpoint(&mut self) -> Result<Taken, Stop> {
        let of = (self.config.attempt, self.step);
        let beside = self.waits_until.is_none();
        self.end_preparing();
        for _ in 0..SLOT_TRIES {
            self.memory.free_older();
            let (model, comm) = (&self.engine.model, self.engine.links.comm());
            let can_leave = |slot: &Filling| beside && model.can_leave(slot);
            let opened = snapshot::open_for_checkpoint(self.memory, model, comm, of, can_leave);
            match opened.map_err(not_taken)? {
                Some(opened) if opened.beside => {
                    self.leave(opened, true);
                    return Ok(Taken::Later);
                }
                Some(Opened { mut own, .. }) => {
                    let began = Instant::now();
                    snapshot::cut_into_slot(&mut self.engine.model, &mut own)?;
                    self.saving.iter_mut().for_each(|saving| saving.copied(began, Instant::now()));
                    return Ok(Taken::Now(own.complete_for_checkpoint()));
                }
                None if beside => return Ok(Taken::No),
                None => std::thread::sleep(STORAGE_POLL),
            }
        }
        let advice = "give the worker more memory, or make the model smaller";
        Err(fail(1, "no memory for the last checkpoint", advice))
    }
}
