//! The members of an attempt, in one process: they join, count steps together, and fall apart as
//! real ranks do when one of them goes.

use super::Gauge;
use moe_worker::gang::comm::CommError;
use moe_worker::attempt::api::{AttemptEnd, TrainerEvent};
use moejob_protocol::WorkerConfig;
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::message::{Held, Request};
use moejob_protocol::report::{Detail, Event, EventKind, StepReport};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

/// Told and not yet heard; a worker hears at once, unless its node is silent.
pub const TOLD_MAX: usize = 64;
/// Orders of all members together.
const ORDERS_MAX: usize = 4096;

/// What a member hears of its gang.
#[derive(Debug)]
pub enum Told {
    Joined { attempt: u32 },
    Trainer(TrainerEvent),
    Ended { attempt: u32, end: AttemptEnd },
}

impl Told {
    /// Another event each time, as long as one may be.
    pub fn shout(attempt: u32, time: u64) -> Event {
        Event {
            time: super::nodes::now(),
            attempt,
            event: EventKind::Warning,
            reason: format!("Shout{time}"),
            message: format!("{time} {}", "x".repeat(1_000)),
            details: BTreeMap::new(),
        }
    }
}

#[derive(Debug)]
enum Order {
    Request(Request),
    /// A member's collectives were aborted; without a reason it is gone.
    Leave { rank: u32, reason: Option<String> },
}

/// A member's way to its gang. Dropping it is what the others notice as the loss of a peer.
#[derive(Debug)]
pub struct Seat {
    rank: u32,
    orders: mpsc::Sender<Order>,
    gangs: Gangs,
    key: Key,
}

impl Seat {
    pub fn request(&self, request: Request) {
        let _ = self.orders.try_send(Order::Request(request));
    }

    pub fn abort(&self, reason: &str) {
        let reason = Some(reason.to_string());
        let _ = self.orders.try_send(Order::Leave { rank: self.rank, reason });
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut gathering = self.gangs.gathering.lock().expect("no panic holds it");
        if let Some(gang) = gathering.get_mut(&self.key) {
            gang.members.remove(&self.rank);
            if gang.members.is_empty() {
                gathering.remove(&self.key);
            }
        }
        let _ = self.orders.try_send(Order::Leave { rank: self.rank, reason: None });
    }
}

#[derive(Debug)]
pub struct Member {
    pub told: mpsc::Sender<Told>,
    /// Whether its node is silent.
    pub silent: watch::Receiver<bool>,
}

type Key = (String, u32);

#[derive(Debug)]
struct Gathering {
    members: BTreeMap<u32, Member>,
    orders: mpsc::Sender<Order>,
    received: Option<mpsc::Receiver<Order>>,
}

/// All gangs of this process; a clone is the same one.
#[derive(Clone, Debug)]
pub struct Gangs {
    gathering: Arc<Mutex<HashMap<Key, Gathering>>>,
    pace: Duration,
    hold: watch::Receiver<u64>,
    resets: watch::Receiver<u64>,
    gauge: Arc<Gauge>,
}

impl Gangs {
    /// A step takes `pace`; after the step `hold` a gang waits, and takes only steps that it is
    /// asked for. With each change of `resets` all streams to leaders are reset.
    pub fn new(
        pace: Duration,
        hold: watch::Receiver<u64>,
        resets: watch::Receiver<u64>,
        gauge: Arc<Gauge>,
    ) -> Gangs {
        Gangs { gathering: Arc::default(), pace, hold, resets, gauge }
    }

    pub fn gauge(&self) -> Arc<Gauge> {
        Arc::clone(&self.gauge)
    }

    pub fn resets(&self) -> watch::Receiver<u64> {
        let mut resets = self.resets.clone();
        resets.mark_unchanged();
        resets
    }

    /// Whether workers of this name are to shout: those of jobs whose name says so.
    pub fn is_loud(&self, worker: &str) -> bool {
        worker.starts_with("loud")
    }

    /// Takes a seat; when the last is taken, the attempt begins.
    pub fn join(&self, config: &WorkerConfig, rank: u32, member: Member) -> Seat {
        let key = (config.job_uid.clone(), config.attempt);
        let mut gathering = self.gathering.lock().expect("no panic holds it");
        let gang = gathering.entry(key.clone()).or_insert_with(|| {
            let (orders, received) = mpsc::channel(ORDERS_MAX);
            Gathering { members: BTreeMap::new(), orders, received: Some(received) }
        });
        gang.members.insert(rank, member);
        let orders = gang.orders.clone();
        // A worker has one seat, whatever the number of its ranks.
        if gang.members.len() * config.ranks.max(1) as usize == config.members.len() {
            let gang = gathering.remove(&key).expect("it was there");
            let gang = Gang {
                step: config.resume.step(),
                committed: 0,
                pace: self.pace,
                hold: self.hold.clone(),
                config: config.clone(),
                members: gang.members,
                orders: gang.received.expect("taken once"),
                request: Request::default(),
            };
            tokio::spawn(gang.train());
        }
        Seat { rank, orders, gangs: self.clone(), key }
    }
}

struct Gang {
    config: WorkerConfig,
    members: BTreeMap<u32, Member>,
    orders: mpsc::Receiver<Order>,
    pace: Duration,
    hold: watch::Receiver<u64>,
    step: u64,
    committed: u64,
    request: Request,
}

impl Gang {
    async fn train(mut self) {
        let attempt = self.config.attempt;
        self.tell_all(|_| Told::Joined { attempt });
        self.snapshot();
        let mut tick = interval(self.pace);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tick.tick().await;
        loop {
            let order = tokio::select! {
                order = self.orders.recv() => order,
                _ = tick.tick() => {
                    // A silent rank answers nothing, and all wait for it.
                    if self.members.values().any(|member| *member.silent.borrow()) {
                        continue;
                    }
                    let asked = self.request.checkpoint_now || self.request.stop_after_this_step;
                    if self.step >= *self.hold.borrow() && !asked {
                        continue;
                    }
                    match self.take_step() {
                        Some(end) => return self.end(|_| end.clone()),
                        None => continue,
                    }
                }
            };
            match order {
                Some(Order::Request(request)) => {
                    self.request.checkpoint_now |= request.checkpoint_now;
                    self.request.stop_after_this_step |= request.stop_after_this_step;
                }
                Some(Order::Leave { rank: left, reason }) => {
                    let reason = reason.unwrap_or_else(|| "gone".to_string());
                    return self.end(|rank| AttemptEnd::Aborted(match rank == left {
                        true => CommError::Aborted { reason: reason.clone() },
                        false => CommError::PeerLost { rank: left, why: reason.clone() },
                    }));
                }
                None => return,
            }
        }
    }

    fn take_step(&mut self) -> Option<AttemptEnd> {
        let step = self.step + 1;
        self.step = step;
        let request = std::mem::take(&mut self.request);
        let last = step >= self.config.training.steps;
        let stop = request.stop_after_this_step;
        self.tell(0, Told::Trainer(TrainerEvent::Step(self.report())));
        if stop || step % self.config.recovery.memory_every_steps.max(1) == 0 {
            self.snapshot();
        }
        let due = step % self.config.checkpoint.every_steps.max(1) == 0;
        if last || due || request.checkpoint_now {
            self.committed = step;
            self.tell(0, Told::Trainer(TrainerEvent::Event(self.commit())));
        }
        match (last, stop) {
            (true, _) => Some(AttemptEnd::Completed { step }),
            (false, true) => Some(AttemptEnd::Stopped { step }),
            (false, false) => None,
        }
    }

    fn world(&self) -> u32 {
        self.config.members.len() as u32
    }

    /// Each worker holds the shards of its ranks and of those of the worker before it.
    fn snapshot(&self) {
        let (world, step, ranks) = (self.world(), self.step, self.config.ranks.max(1));
        let attempt = self.config.attempt;
        self.tell_all(|first| {
            let near = (first + world - ranks)..(first + world + ranks);
            let mut shards: Vec<u32> = near.map(|rank| rank % world).collect();
            shards.sort_unstable();
            shards.dedup();
            Told::Trainer(TrainerEvent::Held(vec![Held { attempt, step, shards }]))
        });
    }

    fn report(&self) -> StepReport {
        let tokens = u64::from(self.config.training.global_batch_size)
            * u64::from(self.config.training.sequence_length);
        StepReport {
            step: self.step,
            // A function of the step, as a loss should be.
            loss: 5.0 / (1.0 + self.step as f64 / 100.0),
            aux_loss: 1.0,
            z_loss: 0.0,
            grad_norm: 1.0,
            loss_scale: None,
            learning_rate: 1e-3,
            tokens: self.step * tokens,
            tokens_per_second: tokens as f64 / self.pace.as_secs_f64(),
            timing: Default::default(),
            world_size: self.world(),
            attempt: self.config.attempt,
            expert_imbalance: 1.0,
            routing: Default::default(),
            communication: None,
            device: None,
            validation_loss: None,
            time: super::nodes::now(),
        }
    }

    fn commit(&self) -> Event {
        Event {
            time: super::nodes::now(),
            attempt: self.config.attempt,
            event: EventKind::CheckpointCommitted,
            reason: "Committed".to_string(),
            message: directory_name(self.committed),
            details: BTreeMap::from([("step".to_string(), Detail::Number(self.committed))]),
        }
    }

    fn tell(&self, rank: u32, told: Told) {
        if let Some(member) = self.members.get(&rank) {
            let _ = member.told.try_send(told);
        }
    }

    fn tell_all(&self, told: impl Fn(u32) -> Told) {
        self.members.keys().for_each(|rank| self.tell(*rank, told(*rank)));
    }

    fn end(self, end: impl Fn(u32) -> AttemptEnd) {
        let attempt = self.config.attempt;
        self.tell_all(|rank| Told::Ended { attempt, end: end(rank) });
    }
}
