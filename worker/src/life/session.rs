//! The life of a worker, as a pure function: `on_event(event, now) -> effects`.
//!
//! ```text
//! Idle --Configure--> Joining --Joined--> Running --AttemptEnded--> Idle ... --> Done
//!                        \ Leave            \ Leave, LeaderLost, ...
//!                         `-> Idle           `-> Leaving --AttemptEnded--> Idle or Done
//! ```
//!
//! Beside that state a session remembers its leader (or since when it has none: it is an orphan)
//! and whether it drains. It enters an attempt only as told, and leaves one as told, when a
//! collective failed, or when it must end. What is older than its term or attempt is refused.

mod ends;
mod measuring;
mod refusals;

use ends::{DRAIN, reason_of};
use crate::attempt::api::{AttemptEnd, TrainerEvent};
use crate::failure::Failure;
use moejob_protocol::message::{Frame, Held, Hello, LeftReason, Request};
use moejob_protocol::pair::{PairAnswer, PairOrder};
use moejob_protocol::preflight::{Answer, Order};
use moejob_protocol::report::EventKind;
use moejob_protocol::{Down, Up, WorkerConfig};
use std::time::Duration;

/// A worker that was never configured waits this long for a leader.
pub const ORPHAN_MS_DEFAULT: u64 = 600_000;
/// From SIGTERM or SIGINT to the end of the process, whatever happens meanwhile.
pub const DRAIN_MS_MAX: u64 = 570_000;
/// For an aborted step to notice it, when the process is to end.
pub const LEAVE_MS_MAX: u64 = 10_000;

/// Exit codes of `docs/ARCHITECTURE.md` that a session chooses by itself.
pub const EXIT_DONE: i32 = 0;
pub const EXIT_TRY_AGAIN: i32 = 75;
pub const EXIT_INTERRUPTED: i32 = 130;

/// All that can happen to a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The operator's certificate has verified and its first frame is here.
    LeaderConnected { term: u64, version: u32 },
    LeaderLost { why: String },
    /// The stream lives, but nothing came for the heartbeat timeout.
    LeaderSilent,
    Frame(Frame<Down>),
    /// All ranks of the attempt are connected.
    Joined { attempt: u32 },
    JoinFailed { attempt: u32, rank: Option<u32>, why: String },
    Trainer(TrainerEvent),
    AttemptEnded { attempt: u32, end: AttemptEnd },
    /// What was to be measured is.
    Measured(Answer),
    /// A place to meet another worker's GPUs is made, or what was to be measured with them is.
    Paired(PairAnswer),
    /// SIGTERM or SIGINT, or the first of all was SIGHUP.
    Signal,
    /// Whoever started this worker is gone.
    OwnerGone,
    /// Every `HEARTBEAT_MS`.
    Tick,
}

/// All that a worker can do about it. They are executed in order and cannot fail; what goes wrong
/// comes back as an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Make the new stream the leader's, in place of an older one, and send `Hello`.
    Adopt,
    /// Close the new stream.
    RefuseLeader { why: String },
    /// Close the leader's stream.
    DropLeader { why: String },
    Send { attempt: u32, up: Up },
    /// Send phase, step, collective and what is held.
    Heartbeat,
    /// With whom to trust from now on, where that is news.
    InstallLeaf { attempt: u32, certificate: String, authority: Option<String> },
    /// Connect to the other ranks.
    Join(Box<WorkerConfig>),
    /// Stop connecting.
    CancelJoin,
    /// Run the attempt that was joined on the device's thread.
    Train,
    /// Abort the collectives.
    Abort { reason: String },
    Request(Request),
    /// Steps of the attempt may take so many seconds longer.
    Patience(u32),
    /// Measure the node, in place of what is measured by now.
    Measure(Box<Order>),
    /// Likewise, with another worker.
    MeasurePair(Box<PairOrder>),
    /// What is measured is not asked for any more.
    StopMeasuring,
    Exit(i32),
    Log(String),
}

#[derive(Debug)]
pub struct Session {
    job_uid: String,
    term: u64,
    /// The newest attempt that this worker was told of, 0 before the first.
    attempt: u32,
    digest: String,
    rank: Option<u32>,
    orphan_timeout: Duration,
    held: Vec<Held>,
    /// How the newest attempt ended here; said again to each new leader.
    report: Option<Up>,
    /// The newest checkpoint that was committed in this attempt; said again likewise, as a leader
    /// on Kubernetes does not read the storage.
    committed: Option<Up>,
    /// What NCCL has built for the ranks of this attempt, and where they run; said again
    /// likewise.
    built: Vec<Up>,
    state: State,
    leader: Leader,
    /// The version of the control stream that the leader speaks.
    speaks: u32,
    drain_until: Option<Duration>,
    /// The order that is measured.
    measuring: Option<u64>,
}

#[derive(Debug, PartialEq)]
enum State {
    /// Without an attempt, since then.
    Idle { since: Duration },
    Joining,
    Running,
    /// Aborted; the device's thread has not yet noticed.
    Leaving { then: Then },
    Done,
}

#[derive(Debug, PartialEq)]
enum Then {
    Report,
    Start(Box<WorkerConfig>),
    Exit { code: i32, until: Duration },
}

#[derive(Debug, PartialEq)]
enum Leader {
    Connected,
    Gone { since: Duration },
}

impl Session {
    pub fn new(job_uid: String, now: Duration) -> Session {
        Session {
            job_uid,
            term: 0,
            attempt: 0,
            digest: String::new(),
            rank: None,
            orphan_timeout: Duration::from_millis(ORPHAN_MS_DEFAULT),
            held: Vec::new(),
            report: None,
            committed: None,
            built: Vec::new(),
            state: State::Idle { since: now },
            leader: Leader::Gone { since: now },
            speaks: 1,
            drain_until: None,
            measuring: None,
        }
    }

    pub fn term(&self) -> u64 {
        self.term
    }

    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    pub fn held(&self) -> &[Held] {
        &self.held
    }

    /// How a stream of the leader's is answered first, by the version that both speak.
    pub fn hello(
        &self,
        version: u32,
        (worker, token): (&str, String),
        signing_request: &str,
    ) -> Hello {
        Hello {
            version,
            worker: worker.to_string(),
            token,
            signing_request: signing_request.to_string(),
            attempt: self.attempt,
            digest: self.digest.clone(),
            rank: self.rank,
            held: self.held.clone(),
        }
    }

    /// `now` is monotonic, from any start.
    pub fn on_event(&mut self, event: Event, now: Duration) -> Vec<Effect> {
        let mut out = Vec::new();
        if self.state == State::Done {
            return out;
        }
        match event {
            Event::LeaderConnected { term, version } => self.on_leader(term, version, &mut out),
            Event::LeaderLost { why } => {
                out.push(Effect::Log(format!("leader lost: {why}")));
                self.on_leader_lost(now, &mut out);
            }
            // A local runner that is stopped (Ctrl-Z) goes on later; its end is seen at once.
            Event::LeaderSilent if self.orphan_timeout.is_zero() => {}
            Event::LeaderSilent => {
                out.push(Effect::DropLeader { why: "silent".to_string() });
                self.on_leader_lost(now, &mut out);
            }
            Event::Frame(frame) => self.on_frame(frame, now, &mut out),
            Event::Joined { attempt } => {
                if attempt == self.attempt && self.state == State::Joining {
                    self.state = State::Running;
                    out.push(Effect::Train);
                }
            }
            Event::JoinFailed { attempt, rank, why } => {
                if attempt == self.attempt && self.state == State::Joining {
                    let reason = match rank {
                        Some(rank) => LeftReason::PeerLost { rank },
                        None => LeftReason::Error { message: why.clone() },
                    };
                    out.push(Effect::Log(format!("attempt {attempt} not joined: {why}")));
                    out.push(Effect::CancelJoin);
                    self.left(reason, now, &mut out);
                }
            }
            Event::Trainer(event) => self.on_trainer(event, &mut out),
            Event::AttemptEnded { attempt, end } => self.on_end(attempt, end, now, &mut out),
            Event::Measured(answer) => self.on_measured(answer, &mut out),
            Event::Paired(answer) => self.on_paired(answer, &mut out),
            Event::Signal => self.on_signal(now, &mut out),
            Event::OwnerGone => {
                out.push(Effect::Log("the owner of this worker is gone".to_string()));
                self.exit(EXIT_TRY_AGAIN, now, &mut out);
            }
            Event::Tick => self.on_tick(now, &mut out),
        }
        out
    }

    fn on_leader(&mut self, term: u64, version: u32, out: &mut Vec<Effect>) {
        if term < self.term {
            let why = format!("term {term} is over, this worker obeys term {}", self.term);
            out.push(Effect::RefuseLeader { why });
            return;
        }
        (self.term, self.speaks) = (term, version);
        self.leader = Leader::Connected;
        out.push(Effect::Adopt);
        // The leader before may not have heard it.
        let said = self.built.iter().chain(&self.committed).chain(&self.report).cloned();
        for up in said.collect::<Vec<Up>>() {
            self.send(up, out);
        }
    }

    fn on_leader_lost(&mut self, now: Duration, out: &mut Vec<Effect>) {
        if self.is_orphan() {
            return;
        }
        self.leader = Leader::Gone { since: now };
        if self.orphan_timeout.is_zero() {
            self.exit(EXIT_TRY_AGAIN, now, out);
        } else {
            self.check_orphan(now, out);
        }
    }

    fn on_frame(&mut self, frame: Frame<Down>, now: Duration, out: &mut Vec<Effect>) {
        let Frame { term, attempt, body, .. } = frame;
        if term != self.term {
            let why = format!("a frame of term {term} on the stream of term {}", self.term);
            out.push(Effect::DropLeader { why });
            self.on_leader_lost(now, out);
            return;
        }
        let free = matches!(
            body,
            Down::Heartbeat | Down::Shutdown | Down::Preflight(_) | Down::Pair(_)
        );
        if !free && attempt < self.attempt {
            let found = format!("refused: a frame of attempt {attempt}, this is {}", self.attempt);
            out.push(Effect::Log(found));
            return;
        }
        match body {
            Down::Heartbeat => {}
            Down::Leaf { certificate, authority } => {
                out.push(Effect::InstallLeaf { attempt, certificate, authority });
            }
            Down::Configure(config) => self.on_configure(attempt, config, now, out),
            Down::Leave { reason } => self.on_leave(attempt, &reason, now, out),
            Down::Request(request) => match self.state {
                State::Joining | State::Running if attempt == self.attempt => {
                    out.push(Effect::Request(request));
                }
                _ => out.push(Effect::Log(format!("nothing to ask of attempt {attempt}"))),
            },
            Down::Patience { seconds } => match self.state {
                State::Joining | State::Running if attempt == self.attempt => {
                    out.push(Effect::Patience(seconds));
                }
                _ => out.push(Effect::Log(format!("no steps to wait for in attempt {attempt}"))),
            },
            Down::Preflight(order) => self.on_preflight(order, out),
            Down::Pair(order) => self.on_pair(order, out),
            Down::Shutdown => self.exit(EXIT_DONE, now, out),
        }
    }

    fn on_configure(
        &mut self,
        attempt: u32,
        config: Box<WorkerConfig>,
        now: Duration,
        out: &mut Vec<Effect>,
    ) {
        if let Some(problem) = self.problem(attempt, &config) {
            out.push(Effect::Log(format!("refused: {problem}")));
            // Of its own attempt it has said, or will say, how it ended.
            if attempt > self.attempt {
                let up = self.left_up(LeftReason::Error { message: problem });
                out.push(Effect::Send { attempt, up });
            }
            return;
        }
        if attempt == self.attempt {
            // A new leader repeats what the one before had said.
            out.push(Effect::Log(format!("attempt {attempt} goes on unchanged")));
            return;
        }
        match &mut self.state {
            State::Idle { .. } => self.start(config, now, out),
            State::Joining => {
                out.push(Effect::CancelJoin);
                self.start(config, now, out);
            }
            State::Running => {
                let reason = format!("attempt {attempt} begins");
                out.push(Effect::Abort { reason });
                self.state = State::Leaving { then: Then::Start(config) };
            }
            State::Leaving { then: Then::Exit { .. } } => {}
            State::Leaving { then } => *then = Then::Start(config),
            State::Done => {}
        }
    }

    fn start(&mut self, config: Box<WorkerConfig>, now: Duration, out: &mut Vec<Effect>) {
        self.attempt = config.attempt;
        self.digest = config.digest.clone();
        self.rank = config.rank;
        self.orphan_timeout = Duration::from_millis(config.recovery.orphan_timeout_ms);
        (self.report, self.committed) = (None, None);
        self.built.clear();
        if config.rank.is_none() {
            self.state = State::Idle { since: now };
            out.push(Effect::Log(format!("spare in attempt {}", config.attempt)));
            return;
        }
        if self.measuring.take().is_some() {
            out.push(Effect::StopMeasuring);
        }
        self.state = State::Joining;
        out.push(Effect::Join(config));
        if self.drain_until.is_some() {
            out.push(Effect::Request(DRAIN));
        }
    }

    fn on_leave(&mut self, attempt: u32, reason: &str, now: Duration, out: &mut Vec<Effect>) {
        // It may be overtaken by its attempt's configuration, which is then refused.
        if attempt > self.attempt && !matches!(self.state, State::Running | State::Leaving { .. }) {
            self.attempt = attempt;
            self.digest.clear();
        }
        match &self.state {
            State::Idle { .. } => self.left(LeftReason::Asked, now, out),
            State::Joining => {
                out.push(Effect::CancelJoin);
                self.left(LeftReason::Asked, now, out);
            }
            State::Running => {
                out.push(Effect::Abort { reason: reason.to_string() });
                self.state = State::Leaving { then: Then::Report };
            }
            State::Leaving { .. } | State::Done => {}
        }
    }

    fn on_trainer(&mut self, event: TrainerEvent, out: &mut Vec<Effect>) {
        match event {
            TrainerEvent::Step(report) => self.send(Up::Step(report), out),
            TrainerEvent::Event(event) => {
                let commits = event.event == EventKind::CheckpointCommitted;
                let up = Up::Event(event);
                if commits {
                    self.committed = Some(up.clone());
                }
                self.send(up, out);
            }
            TrainerEvent::Held(held) => self.held = held,
            TrainerEvent::Built(built) => {
                let up = Up::Built(built);
                self.built.push(up.clone());
                self.send(up, out);
            }
            TrainerEvent::Seated(seated) => {
                let same = |up: &Up| matches!(up, Up::Seated(of) if of.rank == seated.rank);
                self.built.retain(|up| !same(up));
                let up = Up::Seated(seated);
                self.built.push(up.clone());
                self.send(up, out);
            }
        }
    }

    fn on_end(&mut self, attempt: u32, end: AttemptEnd, now: Duration, out: &mut Vec<Effect>) {
        let then = match std::mem::replace(&mut self.state, State::Idle { since: now }) {
            State::Running => None,
            State::Leaving { then } => Some(then),
            other => {
                self.state = other;
                out.push(Effect::Log(format!("attempt {attempt} ended, and none was running")));
                return;
            }
        };
        let up = match end {
            AttemptEnd::Fenced { attempt: by } => {
                let message = format!("attempt {by} has claimed the checkpoints of this job");
                return self.fail(Failure::new(EXIT_TRY_AGAIN, message, ""), out);
            }
            AttemptEnd::Failed(failure) => return self.fail(failure, out),
            // Of an engine that is a thread of this process.
            AttemptEnd::DeviceFailed { message, .. } => {
                let advice = "look for Xid and ECC errors in the kernel's log; `moejob doctor` \
                              tells the rest";
                return self.fail(Failure::new(1, message, advice), out);
            }
            AttemptEnd::Completed { step } => Up::Completed { step },
            AttemptEnd::Stopped { step } => self.left_up(LeftReason::Stopped { step }),
            AttemptEnd::Aborted(error) => {
                out.push(Effect::Log(format!("attempt {attempt}: {error}")));
                self.left_up(reason_of(error, then.is_some()))
            }
        };
        self.report = Some(up.clone());
        self.send(up, out);
        match then {
            Some(Then::Start(config)) => self.start(config, now, out),
            Some(Then::Exit { code, .. }) => self.done(code, out),
            None | Some(Then::Report) => self.check_orphan(now, out),
        }
    }

    fn left_up(&self, reason: LeftReason) -> Up {
        Up::Left { reason, held: self.held.clone() }
    }

    fn left(&mut self, reason: LeftReason, now: Duration, out: &mut Vec<Effect>) {
        let up = self.left_up(reason);
        self.state = State::Idle { since: now };
        self.report = Some(up.clone());
        self.send(up, out);
    }

    fn send(&self, up: Up, out: &mut Vec<Effect>) {
        if !self.is_orphan() && up.since() <= self.speaks {
            out.push(Effect::Send { attempt: self.attempt, up });
        }
    }

    fn is_orphan(&self) -> bool {
        self.leader != Leader::Connected
    }
}
