//! One worker of the world, as `worker/src/life/session.rs` behaves.

use moejob_protocol::config::WorkerConfig;
use moejob_protocol::message::{Held, LeftReason, Request, Up};
use moejob_protocol::pair::PairOrder;
use moejob_protocol::preflight::Order;
use std::collections::VecDeque;

#[derive(Clone, Debug)]
pub enum Message {
    Preflight(Order),
    Pair(PairOrder),
    Configure(Box<WorkerConfig>),
    Leave { attempt: u32 },
    Request { attempt: u32, request: Request },
}

/// The attempt that a worker takes part in, and the names of all its members by rank.
#[derive(Clone, Debug)]
pub struct Run {
    pub attempt: u32,
    pub peers: Vec<String>,
}

#[derive(Clone, Debug)]
pub struct Sim {
    pub node: String,
    pub alive: bool,
    /// SIGSTOP: it does nothing, and its end can still be brought about.
    pub frozen: bool,
    /// Its node is cut off: nothing reaches it, not even its end.
    pub cut: bool,
    /// Its device hangs: what it is told has no effect.
    pub deaf: bool,
    pub connected: bool,
    pub up: VecDeque<(u32, Up)>,
    pub down: VecDeque<Message>,
    pub attempt: u32,
    pub digest: String,
    pub rank: Option<u32>,
    pub run: Option<Run>,
    pub held: Vec<Held>,
    /// Said again to each new leader.
    pub report: Option<(u32, Up)>,
    pub collective: u64,
    /// The last step is done, and storage is away.
    pub waits: bool,
    pub exit_code: Option<i32>,
    /// How its runner describes the end.
    pub how: &'static str,
    /// The leader knows that it has ended.
    pub reaped: bool,
}

impl Sim {
    pub fn new(node: &str) -> Sim {
        Sim {
            node: node.to_string(),
            alive: true,
            frozen: false,
            cut: false,
            deaf: false,
            connected: false,
            up: VecDeque::new(),
            down: VecDeque::new(),
            attempt: 0,
            digest: String::new(),
            rank: None,
            run: None,
            held: Vec::new(),
            report: None,
            collective: 0,
            waits: false,
            exit_code: None,
            how: "ended",
            reaped: false,
        }
    }

    /// Its process exists.
    pub fn runs(&self) -> bool {
        self.alive
    }

    pub fn answers(&self) -> bool {
        self.alive && !self.frozen && !self.cut
    }

    pub fn is_in(&self, attempt: u32) -> bool {
        self.run.as_ref().is_some_and(|run| run.attempt == attempt)
    }

    pub fn end(&mut self, exit_code: Option<i32>) {
        if self.alive {
            self.alive = false;
            self.exit_code = exit_code;
            self.run = None;
            self.held.clear();
        }
    }

    /// Returns a request that reaches the attempt it takes part in.
    pub fn obey(&mut self, message: Message) -> Option<(u32, Request)> {
        match message {
            Message::Configure(config) if config.attempt > self.attempt => {
                if self.run.is_some() {
                    self.leave(LeftReason::Asked);
                }
                self.attempt = config.attempt;
                self.digest = config.digest.clone();
                self.rank = config.rank;
                self.collective = 0;
                self.waits = false;
                self.report = None;
                let mut peers: Vec<String> =
                    config.members.iter().map(|member| member.worker.clone()).collect();
                peers.dedup();
                self.run = Some(Run { attempt: config.attempt, peers });
                None
            }
            Message::Leave { attempt } if attempt >= self.attempt => {
                if self.run.is_none() {
                    self.attempt = attempt;
                }
                self.leave(LeftReason::Asked);
                None
            }
            Message::Request { attempt, request } if self.is_in(attempt) => {
                Some((attempt, request))
            }
            // Of an attempt that is over for this worker.
            Message::Configure(_)
            | Message::Leave { .. }
            | Message::Request { .. }
            | Message::Preflight(_)
            | Message::Pair(_) => None,
        }
    }

    pub fn leave(&mut self, reason: LeftReason) {
        let held = self.held.clone();
        self.say(Up::Left { reason, held });
    }

    pub fn complete(&mut self, step: u64) {
        self.say(Up::Completed { step });
    }

    fn say(&mut self, up: Up) {
        self.run = None;
        self.report = Some((self.attempt, up.clone()));
        if self.connected {
            self.up.push_back((self.attempt, up));
        }
    }

    /// Two generations are kept.
    pub fn snapshot(&mut self, attempt: u32, step: u64, shards: Vec<u32>) {
        self.held.push(Held { attempt, step, shards });
        let surplus = self.held.len().saturating_sub(2);
        self.held.drain(..surplus);
    }
}
