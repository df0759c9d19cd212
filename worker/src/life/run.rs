//! The shell of a worker: it turns the world into events, asks the session, and executes the
//! effects. It decides nothing.
//!
//! ```text
//! control thread (this one): listener, leader's stream, signals, ticks -> Session -> effects
//! data thread:   connects the workers and moves their ranks' bytes     (comm::DataPlane)
//! engines:       a trainer each, one attempt at a time; threads or processes
//! owner thread:  blocks on stdin, whose end means that the owner is gone
//! ```

mod bootstrap;
pub(crate) mod engines;
mod link;
mod measuring;
mod signals;

pub use bootstrap::{Announcement, Bootstrap, read_bootstrap};
pub use engines::Attempt;

use crate::life::affinity::Allowed;
use crate::gang::comm::{DataPlane, Join, JoinError, Links, wanted_by};
use crate::failure::chain;
use crate::life::listener::{self, LeaderStream};
use crate::life::session::{Effect, Event, Session};
use crate::gang::tls::{AttemptTls, TlsError, Trust, WorkerKey};
use crate::state::slots::Memory;
use bootstrap::take_share;
use engines::{Engines, Make};
use link::{Link, wait_for};
use measuring::Measuring;
use signals::{Signals, watch_owner};
use moejob_protocol::message::{HEARTBEAT_MS, Heartbeat, Phase, Request};
use moejob_protocol::pair::PairAnswer;
use moejob_protocol::preflight::Answer;
use moejob_protocol::{Up, WorkerConfig};
use rustix::process::set_parent_process_death_signal;
use rustls::ServerConfig;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

/// Things that have happened and wait for the session; whoever brings more waits.
const HAPPENED_MAX: usize = 64;
/// For engines to end at the end of the process. A checkpoint that is half written does no harm.
const ENGINES_END_MS_MAX: u64 = 10_000;
/// For the last report to reach the leader.
const REPORT_MS_MAX: u64 = 500;
/// Before the leader hears that there is no engine: it tries again at once.
const NO_ENGINE_MS: u64 = 1_000;
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot read the bootstrap line")]
    Bootstrap(#[source] io::Error),
    #[error("the bootstrap line is not understood")]
    Parse(#[from] serde_json::Error),
    #[error("identity")]
    Tls(#[from] TlsError),
    #[error("the system refused a thread, a socket or a signal")]
    Io(#[from] io::Error),
}

/// Runs a worker to its end and gives its exit code. `owner` ends when whoever started the worker
/// does, a pod has none; `make` builds the trainer of an engine that is a thread, from the memory
/// that snapshots lie in.
///
/// # Errors
/// When the worker could not even listen.
pub fn run_with<A: Attempt + 'static>(
    bootstrap: Bootstrap,
    owner: Option<impl Read + Send + 'static>,
    mut announce: impl Write,
    make: impl Fn(Memory) -> A + Send + Sync + 'static,
) -> Result<i32, RunError> {
    let make: Make = Arc::new(move |memory| Box::new(make(memory)));
    let allowed = take_share(bootstrap.share);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let (happened, mut arrivals) = mpsc::channel(HAPPENED_MAX);
        let loopback = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let tcp = TcpListener::bind(bootstrap.listen.unwrap_or(loopback)).await?;
        let mut shell = Shell::new(bootstrap, happened.clone(), make, allowed)?;
        let announcement = Announcement { port: tcp.local_addr()?.port() };
        serde_json::to_writer(&mut announce, &announcement)?;
        announce.write_all(b"\n")?;
        announce.flush()?;
        let (leaders, mut dialled) = mpsc::channel(1);
        let shown = shell.shown.subscribe();
        tokio::spawn(listener::serve(tcp, shown, leaders, shell.data.offers()));
        if let Some(owner) = owner {
            watch_owner(owner, happened)?;
        }
        let mut signals = Signals::new()?;
        let mut tick = interval(Duration::from_millis(HEARTBEAT_MS));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let code = loop {
            let event = tokio::select! {
                Some(leader) = dialled.recv() => Happened::Leader(Box::new(leader)),
                Some(happened) = arrivals.recv() => happened,
                joined = wait_for(&mut shell.joining) => Happened::Joined(joined),
                () = signals.next() => Happened::Signal,
                _ = tick.tick() => Happened::Tick,
            };
            if let Some(code) = shell.on(event).await {
                break code;
            }
        };
        shell.end(&mut arrivals).await;
        Ok(code)
    })
}

/// The life of a worker's process, from its bootstrap line on; both binaries end here. The
/// process dies with the thread that started it, also when it is stopped then.
pub fn from_stdin<A: Attempt + 'static>(
    make: impl Fn(Memory) -> A + Send + Sync + 'static,
) -> ExitCode {
    let result = set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .map_err(|error| RunError::Io(error.into()))
        .and_then(|()| read_bootstrap(&mut io::stdin().lock()))
        .and_then(|bootstrap| run_with(bootstrap, Some(io::stdin()), io::stdout(), make));
    conclude(result)
}

/// The life of a worker in a pod, which the kubelet starts and ends.
pub fn in_pod<A: Attempt + 'static>(
    bootstrap: Bootstrap,
    make: impl Fn(Memory) -> A + Send + Sync + 'static,
) -> ExitCode {
    conclude(run_with(bootstrap, None::<io::Empty>, io::stdout(), make))
}

fn conclude(result: Result<i32, RunError>) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("moe-worker: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// All that can happen to the shell.
enum Happened {
    Leader(Box<LeaderStream>),
    /// On the control stream of that number; older streams say nothing any more.
    Link { number: u64, event: Event },
    Joined(Result<Links, JoinError>),
    Engine(engines::Name, engines::Said),
    Measured(Answer),
    Paired(PairAnswer),
    Signal,
    OwnerGone,
    Tick,
}

struct Shell {
    bootstrap: Bootstrap,
    started: Instant,
    session: Session,
    key: WorkerKey,
    trust: Trust,
    happened: mpsc::Sender<Happened>,
    data: DataPlane,
    engines: Engines,
    /// Connected, not yet adopted.
    leader: Option<Box<LeaderStream>>,
    link: Option<Link>,
    links: u64,
    leaf: Option<AttemptTls>,
    /// What the listener shows to leaders: before the first leaf, a certificate of its own.
    shown: watch::Sender<Arc<ServerConfig>>,
    joining: Option<oneshot::Receiver<Result<Links, JoinError>>>,
    /// Of the attempt that joins.
    config: Option<Box<WorkerConfig>>,
    joined: Option<Links>,
    /// Asked for before the attempt runs.
    asked: Option<Request>,
    /// The same of how much longer its steps may take.
    patience: Option<u32>,
    measuring: Measuring,
    /// Its share of the machine's.
    processors: usize,
}

impl Shell {
    fn new(
        bootstrap: Bootstrap,
        happened: mpsc::Sender<Happened>,
        make: Make,
        allowed: Allowed,
    ) -> Result<Shell, RunError> {
        let (key, trust) = (WorkerKey::generate()?, Trust::from_pem(&bootstrap.authority)?);
        let processors = allowed.count(bootstrap.share);
        Ok(Shell {
            shown: watch::Sender::new(key.control_server(&trust)?),
            started: Instant::now(),
            session: Session::new(bootstrap.job_uid.clone(), Duration::ZERO),
            key,
            trust,
            data: DataPlane::start()?,
            engines: Engines::new(make, bootstrap.share, happened.clone(), allowed),
            bootstrap,
            happened,
            leader: None,
            link: None,
            links: 0,
            leaf: None,
            joining: None,
            config: None,
            joined: None,
            asked: None,
            patience: None,
            measuring: Measuring::default(),
            processors,
        })
    }

    /// Says how the process ends, when it does.
    async fn on(&mut self, happened: Happened) -> Option<i32> {
        let mut events = VecDeque::new();
        match happened {
            Happened::Leader(leader) => {
                let (term, version) = (leader.first.term, leader.version);
                events.push_back(Event::LeaderConnected { term, version });
                events.push_back(Event::Frame(leader.first.clone()));
                events.extend(self.engines.started().map(Event::Trainer));
                self.leader = Some(leader);
            }
            Happened::Link { number, event } if self.is_current(number) => {
                if matches!(event, Event::LeaderLost { .. }) {
                    self.link = None;
                }
                events.push_back(event);
            }
            Happened::Link { .. } => {}
            Happened::Joined(result) => events.push_back(self.on_joined(result)),
            Happened::Engine(name, said) => {
                let outcome = self.engines.on(name, said);
                if outcome.exit {
                    return Some(1);
                }
                events.extend(outcome.events());
            }
            Happened::Measured(answer) => events.push_back(Event::Measured(answer)),
            Happened::Paired(answer) => events.push_back(Event::Paired(answer)),
            Happened::Signal => events.push_back(Event::Signal),
            Happened::OwnerGone => events.push_back(Event::OwnerGone),
            Happened::Tick => {
                let outcome = self.engines.tick();
                if outcome.exit {
                    return Some(1);
                }
                events.extend(outcome.events());
                events.push_back(Event::Tick);
            }
        }
        while let Some(event) = events.pop_front() {
            let refused = self.leader.is_none() && matches!(event, Event::LeaderConnected { .. });
            assert!(!refused, "a leader without a stream");
            for effect in self.session.on_event(event, self.started.elapsed()) {
                match self.execute(effect).await {
                    Outcome::Done => {}
                    Outcome::Events(more) => events.extend(more),
                    Outcome::RefusedLeader => events.clear(),
                    Outcome::Exit(code) => return Some(code),
                }
            }
        }
        None
    }

    fn is_current(&self, number: u64) -> bool {
        self.link.as_ref().is_some_and(|link| link.number == number)
    }

    async fn execute(&mut self, effect: Effect) -> Outcome {
        match effect {
            Effect::Adopt => self.adopt(),
            Effect::RefuseLeader { why } => {
                tracing::warn!(why, "leader refused");
                self.leader = None;
                return Outcome::RefusedLeader;
            }
            Effect::DropLeader { why } => {
                tracing::warn!(why, "leader dropped");
                self.link = None;
            }
            Effect::Send { attempt, up } => return self.send(attempt, up),
            Effect::Heartbeat => {
                let heartbeat = self.heartbeat();
                return self.send(self.session.attempt(), Up::Heartbeat(heartbeat));
            }
            Effect::InstallLeaf { attempt, certificate, authority } => {
                self.trust_more(authority.as_deref(), &certificate);
                self.install(attempt, &certificate);
            }
            Effect::Join(config) => {
                let (rank, world) = (config.rank.unwrap_or_default(), config.layout.mesh.world());
                // `kubectl moe logs` reads from this line which rank speaks.
                tracing::info!(attempt = config.attempt, "joining as rank {rank} of {world}");
                return self.join(config).await;
            }
            Effect::CancelJoin => {
                self.joining = None;
                self.joined = None;
                self.data.leave().await;
            }
            Effect::Train => {
                let config = self.config.take().expect("a joined attempt has its config");
                let links = self.joined.take().expect("a joined attempt has its links");
                let outcome = self.engines.train(config, links);
                if let Some(asked) = self.asked.take() {
                    self.engines.request(asked);
                }
                if let Some(seconds) = self.patience.take() {
                    self.engines.be_patient(seconds);
                }
                return Outcome::Events(outcome.events().collect());
            }
            Effect::Abort { reason } => self.engines.abort(&reason),
            Effect::Request(request) if self.joining.is_some() || self.joined.is_some() => {
                let asked = self.asked.get_or_insert_default();
                asked.checkpoint_now |= request.checkpoint_now;
                asked.stop_after_this_step |= request.stop_after_this_step;
            }
            Effect::Request(request) => self.engines.request(request),
            Effect::Patience(seconds) if self.joining.is_some() || self.joined.is_some() => {
                self.patience = Some(seconds);
            }
            Effect::Patience(seconds) => self.engines.be_patient(seconds),
            Effect::Measure(order) => {
                self.measuring.start(order, self.bootstrap.share, self.happened.clone());
            }
            Effect::MeasurePair(order) => {
                self.measuring.start_pair(order, self.bootstrap.share, self.happened.clone());
            }
            Effect::StopMeasuring => self.measuring.stop(),
            Effect::Log(text) => tracing::info!(attempt = self.session.attempt(), "{text}"),
            Effect::Exit(code) => return Outcome::Exit(code),
        }
        Outcome::Done
    }

    fn adopt(&mut self) {
        let Some(leader) = self.leader.take() else { return };
        let token = self.bootstrap.token().unwrap_or_else(|error| {
            // The leader refuses an empty one, and dials again.
            tracing::error!(%error, file = ?self.bootstrap.token_file, "no token");
            String::new()
        });
        self.links += 1;
        let LeaderStream { stream, version, .. } = *leader;
        let link = Link::start(self.links, stream, self.happened.clone());
        // The stream before, if any, closes here.
        self.link = Some(link);
        let worker = &self.bootstrap.worker;
        let request = &self.key.signing_request;
        let hello = self.session.hello(version, (worker, token), request);
        // The queue of a new stream is empty.
        let _ = self.send(self.session.attempt(), Up::Hello(hello));
    }

    fn send(&mut self, attempt: u32, up: Up) -> Outcome {
        let Some(link) = &self.link else { return Outcome::Done };
        match link.send(self.session.term(), attempt, up) {
            Ok(()) => Outcome::Done,
            Err(why) => {
                self.link = None;
                Outcome::Events(vec![Event::LeaderLost { why }])
            }
        }
    }

    /// The authority gets a successor in good time, of which a pod that was made before does not
    /// know. Its leader is believed, but no authority that has not signed the leaf beside it.
    fn trust_more(&mut self, authority: Option<&str>, leaf: &str) {
        let Some(authority) = authority else { return };
        match Trust::from_pem(authority) {
            Ok(trust) if trust.has_signed(leaf) => self.trust = trust,
            Ok(_) => tracing::error!("authority refused: it has not signed the leaf beside it"),
            Err(error) => tracing::error!(error = chain(&error), "authority refused"),
        }
    }

    fn install(&mut self, attempt: u32, certificate: &str) {
        let ours = |leaf: &AttemptTls| {
            leaf.attempt == attempt
                && leaf.job_uid == self.bootstrap.job_uid
                && leaf.worker == self.bootstrap.worker
        };
        match self.key.attempt(&self.trust, certificate) {
            Ok(leaf) if ours(&leaf) => {
                self.shown.send_replace(Arc::clone(&leaf.control));
                self.leaf = Some(leaf);
            }
            Ok(leaf) => {
                let AttemptTls { job_uid, attempt, worker, .. } = leaf;
                tracing::error!(job_uid, attempt, worker, "leaf refused: it names another");
            }
            Err(error) => tracing::error!(error = chain(&error), "leaf refused"),
        }
    }

    async fn join(&mut self, config: Box<WorkerConfig>) -> Outcome {
        let attempt = config.attempt;
        let failed = |why: &str| {
            Outcome::Events(vec![Event::JoinFailed { attempt, rank: None, why: why.to_string() }])
        };
        let Some(rank) = config.rank else { return failed("no rank") };
        let Some(tls) = self.leaf.clone().filter(|leaf| leaf.attempt == attempt) else {
            return failed("no certificate for the attempt");
        };
        if config.member_of(rank).is_none_or(|own| own.worker != self.bootstrap.worker) {
            return failed("the rank is another worker's");
        }
        if let Err(error) = self.engines.prepare(&config) {
            let (say, joining) = oneshot::channel();
            tokio::spawn(async move {
                sleep(Duration::from_millis(NO_ENGINE_MS)).await;
                let _ = say.send(Err(JoinError::Engine(error)));
            });
            (self.joining, self.config) = (Some(joining), Some(config));
            return Outcome::Done;
        }
        let (ranks, world) = (config.ranks.max(1), config.layout.mesh.world());
        let (members, strands) = (config.members.clone(), wanted_by(&config, self.processors));
        self.joined = None;
        (self.asked, self.patience) = (None, None);
        let join = Join { rank, ranks, world, members, tls, strands };
        self.joining = Some(self.data.join(join).await);
        self.config = Some(config);
        Outcome::Done
    }

    fn heartbeat(&self) -> Heartbeat {
        let held = self.session.held().to_vec();
        let (phase, step, collective, loading) = match self.engines.progress() {
            Some((control, collective, loading)) => {
                (control.phase(), control.step(), collective, loading)
            }
            None if self.joining.is_some() => (Phase::Joining, 0, 0, None),
            None => (Phase::Idle, 0, 0, None),
        };
        Heartbeat { phase, step, collective, held, loading }
    }

    fn on_joined(&mut self, result: Result<Links, JoinError>) -> Event {
        let attempt = self.session.attempt();
        match result {
            Ok(links) => {
                self.joined = Some(links);
                Event::Joined { attempt }
            }
            Err(error) => {
                let rank = match error {
                    JoinError::Unreached { rank, .. } | JoinError::Absent { rank } => Some(rank),
                    JoinError::Left | JoinError::Memory(_) | JoinError::Engine(_) => None,
                };
                Event::JoinFailed { attempt, rank, why: chain(&error) }
            }
        }
    }

    /// Ends in order: the engines, what they had sent to peers, the last report.
    async fn end(mut self, arrivals: &mut mpsc::Receiver<Happened>) {
        self.engines.abort("this worker ends");
        self.engines.end();
        let ended = async {
            // An engine must not wait for a queue that nobody reads.
            while !self.engines.have_ended() {
                match arrivals.recv().await {
                    Some(Happened::Engine(name, said)) => drop(self.engines.on(name, said)),
                    Some(_) => {}
                    None => return,
                }
            }
        };
        if timeout(Duration::from_millis(ENGINES_END_MS_MAX), ended).await.is_err() {
            tracing::warn!("an engine does not end; left behind or killed");
            self.engines.kill();
        }
        self.data.stop().await;
        if let Some(link) = self.link.take() {
            let _ = timeout(Duration::from_millis(REPORT_MS_MAX), link.finish()).await;
        }
    }
}

enum Outcome {
    Done,
    Events(Vec<Event>),
    RefusedLeader,
    Exit(i32),
}
