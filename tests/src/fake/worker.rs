//! A fake worker: the session and the control stream of a real one.

use super::Gauge;
use super::gang::{Gangs, Member, Seat, TOLD_MAX, Told};
use moe_worker::life::control::{FrameError, read_frame, write_frame};
use moe_worker::failure::chain;
use moe_worker::life::session::{Effect, Event, Session};
use moe_worker::gang::tls::{Identity, Trust, WorkerKey};
use moejob_protocol::message::{Frame, HEARTBEAT_MS, Heartbeat, Phase};
use moejob_protocol::pod::PORT;
use moejob_protocol::{Down, PROTOCOL_VERSION, Up, WorkerConfig};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

const HANDSHAKE: Duration = Duration::from_secs(5);
const LEADER_SILENCE: Duration = Duration::from_secs(10);
const QUEUE_MAX: usize = 256;
/// Events that a loud worker says with each heartbeat.
const SHOUTS: u64 = 100;

/// What a pod tells its worker.
#[derive(Clone, Debug)]
pub struct Birth {
    pub worker: String,
    pub job_uid: String,
    pub authority: String,
    pub token: String,
    pub address: IpAddr,
}

/// How a pod ends its worker.
#[derive(Clone, Copy, Debug)]
pub enum Ending {
    /// SIGTERM.
    Asked,
    /// SIGKILL: nothing is said to anybody.
    Killed,
}

/// Exit code of a process that SIGKILL ended.
pub const EXIT_KILLED: i32 = 137;

type Leading = (TlsStream<TcpStream>, Frame<Down>);

struct Worker {
    birth: Birth,
    session: Session,
    started: Instant,
    key: WorkerKey,
    trust: Trust,
    /// What a leader is shown: once there is a leaf, that.
    shown: TlsAcceptor,
    gangs: Gangs,
    gauge: Arc<Gauge>,
    silent: watch::Receiver<bool>,
    leader: Option<Leading>,
    link: Option<Link>,
    links: u64,
    happened: mpsc::Sender<(u64, Event)>,
    told: mpsc::Sender<Told>,
    seat: Option<Seat>,
    phase: Phase,
    step: u64,
    exit: Option<i32>,
}

/// Runs until the session or the pod ends it, and gives the exit code.
///
/// # Errors
/// When its address cannot be listened at, or its authority is none.
pub async fn run(
    birth: Birth,
    gangs: Gangs,
    mut silent: watch::Receiver<bool>,
    mut endings: mpsc::Receiver<Ending>,
) -> Result<i32, Box<dyn std::error::Error + Send + Sync>> {
    let listener = TcpListener::bind((birth.address, PORT)).await?;
    let (key, trust) = (WorkerKey::generate()?, Trust::from_pem(&birth.authority)?);
    let shown = TlsAcceptor::from(key.control_server(&trust)?);
    let (gauge, mut resets) = (gangs.gauge(), gangs.resets());
    let (happened, mut arrivals) = mpsc::channel(QUEUE_MAX);
    let (told, mut hears) = mpsc::channel(TOLD_MAX);
    let (leaders, mut dialled) = mpsc::channel::<Leading>(1);
    let mut worker = Worker {
        session: Session::new(birth.job_uid.clone(), Duration::ZERO),
        started: Instant::now(),
        silent: silent.clone(),
        leader: None,
        link: None,
        links: 0,
        seat: None,
        phase: Phase::Idle,
        step: 0,
        exit: None,
        birth,
        key,
        trust,
        shown,
        gangs,
        gauge,
        happened,
        told,
    };
    let mut tick = interval(Duration::from_millis(HEARTBEAT_MS));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while worker.exit.is_none() {
        // A cut link: nothing comes in, nothing goes out, nothing is closed.
        let _ = silent.wait_for(|silent| !silent).await;
        tokio::select! {
            changed = silent.changed() => changed?,
            accepted = listener.accept() => {
                let (tcp, _) = accepted?;
                let (acceptor, leaders) = (worker.shown.clone(), leaders.clone());
                tokio::spawn(timeout(HANDSHAKE, async move {
                    if let Some(leading) = open(acceptor, tcp).await {
                        let _ = leaders.send(leading).await;
                    }
                }));
            }
            Some((stream, first)) = dialled.recv() => {
                let connected = Event::LeaderConnected { term: first.term, version: 1 };
                let events = [connected, Event::Frame(first.clone())];
                worker.leader = Some((stream, first));
                worker.on(events);
            }
            Some((number, event)) = arrivals.recv() => {
                if worker.link.as_ref().is_some_and(|link| link.number == number) {
                    if matches!(event, Event::LeaderLost { .. }) {
                        worker.link = None;
                    }
                    worker.on([event]);
                }
            }
            Some(told) = hears.recv() => worker.hear(told),
            Some(ending) = endings.recv() => match ending {
                Ending::Asked => worker.on([Event::Signal]),
                Ending::Killed => return Ok(EXIT_KILLED),
            },
            changed = resets.changed() => {
                changed?;
                worker.link = None;
                let why = "its stream was reset".to_string();
                worker.on([Event::LeaderLost { why }]);
            }
            _ = tick.tick() => {
                worker.on([Event::Tick]);
                worker.shout();
            }
        }
    }
    if let Some(link) = worker.link.take() {
        link.finish().await;
    }
    Ok(worker.exit.unwrap_or_default())
}

async fn open(acceptor: TlsAcceptor, tcp: TcpStream) -> Option<Leading> {
    tcp.set_nodelay(true).ok()?;
    let mut stream = acceptor.accept(tcp).await.ok()?;
    let peer = Identity::of_peer(stream.get_ref().1.peer_certificates()).ok()?;
    let first = read_frame::<Down>(&mut stream, HANDSHAKE).await.ok()?;
    (peer == Identity::Operator).then_some((stream, first))
}

impl Worker {
    fn hear(&mut self, told: Told) {
        match told {
            Told::Joined { attempt } => self.on([Event::Joined { attempt }]),
            Told::Trainer(event) => self.on([Event::Trainer(event)]),
            Told::Ended { attempt, end } => {
                self.phase = Phase::Idle;
                self.on([Event::AttemptEnded { attempt, end }]);
            }
        }
    }

    fn on(&mut self, events: impl IntoIterator<Item = Event>) {
        let mut events: VecDeque<Event> = events.into_iter().collect();
        while let Some(event) = events.pop_front() {
            for effect in self.session.on_event(event, self.started.elapsed()) {
                if matches!(effect, Effect::RefuseLeader { .. }) {
                    self.leader = None;
                    return;
                }
                events.extend(self.execute(effect));
            }
        }
    }

    /// What follows from it at once.
    fn execute(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::Adopt => self.adopt(),
            Effect::RefuseLeader { .. } => self.leader = None,
            Effect::DropLeader { .. } => self.link = None,
            Effect::Send { attempt, up } => return self.send(attempt, up),
            Effect::Heartbeat => {
                let held = self.session.held().to_vec();
                self.step = held.iter().map(|held| held.step).max().unwrap_or(self.step);
                let collective = self.step;
                let (phase, step, loading) = (self.phase, self.step, None);
                let beat = Heartbeat { phase, step, collective, held, loading };
                return self.send(self.session.attempt(), Up::Heartbeat(beat));
            }
            // A leaf that is not for this key would be refused by a real worker.
            Effect::InstallLeaf { certificate, .. } => {
                match self.key.attempt(&self.trust, &certificate) {
                    // As a release before did, which nobody knew by its leaf.
                    Ok(_) if std::env::var_os("MOEJOB_FAKE_NO_LEAF").is_some() => {}
                    Ok(leaf) => self.shown = TlsAcceptor::from(leaf.control),
                    Err(error) => {
                        eprintln!("{}: leaf refused: {}", self.birth.worker, chain(&error));
                        self.exit = Some(1);
                    }
                }
            }
            Effect::Join(config) => self.join(&config),
            Effect::CancelJoin => self.seat = None,
            Effect::Train => self.phase = Phase::Training,
            Effect::Abort { reason } => {
                if let Some(seat) = &self.seat {
                    seat.abort(&reason);
                }
            }
            // A fake gang gives no step up, however long it takes.
            Effect::Patience(_) => {}
            Effect::Request(request) => {
                if let Some(seat) = &self.seat {
                    seat.request(request);
                }
            }
            Effect::Log(text) => {
                if std::env::var_os("MOEJOB_FAKE_VERBOSE").is_some() {
                    eprintln!("{}: {text}", self.birth.worker);
                }
            }
            // Of one that speaks the first version nobody asks it.
            Effect::Measure(_) | Effect::MeasurePair(_) | Effect::StopMeasuring => {}
            Effect::Exit(code) => self.exit = Some(code),
        }
        None
    }

    /// A worker of a hostile job says what nobody asked for, as much as it can.
    fn shout(&mut self) {
        if !self.gangs.is_loud(&self.birth.worker) {
            return;
        }
        for time in 0..SHOUTS {
            let event = Told::shout(self.session.attempt(), time);
            if self.send(self.session.attempt(), Up::Event(event)).is_some() {
                return;
            }
        }
    }

    fn join(&mut self, config: &WorkerConfig) {
        let Some(rank) = config.rank else { return };
        self.phase = Phase::Joining;
        let member = Member { told: self.told.clone(), silent: self.silent.clone() };
        // The seat of the attempt before is given up first.
        self.seat = None;
        self.seat = Some(self.gangs.join(config, rank, member));
    }

    fn adopt(&mut self) {
        let Some((stream, _)) = self.leader.take() else { return };
        self.links += 1;
        let gauge = Arc::clone(&self.gauge);
        self.link = Some(Link::start(self.links, stream, gauge, self.happened.clone()));
        // By the first version: it cannot measure anything.
        let worker = (&*self.birth.worker, self.birth.token.clone());
        let hello = self.session.hello(1, worker, &self.key.signing_request);
        // The queue of a new stream is empty.
        let _ = self.send(self.session.attempt(), Up::Hello(hello));
    }

    fn send(&mut self, attempt: u32, body: Up) -> Option<Event> {
        let link = self.link.as_ref()?;
        if matches!(body, Up::Step(_)) {
            self.gauge.steps.fetch_add(1, Ordering::Relaxed);
        }
        let frame = Frame { v: PROTOCOL_VERSION, term: self.session.term(), attempt, body };
        if link.queue.try_send(frame).is_ok() {
            return None;
        }
        self.link = None;
        Some(Event::LeaderLost { why: "its stream broke".to_string() })
    }
}

/// The adopted stream: a task that reads, one that writes.
struct Link {
    number: u64,
    queue: mpsc::Sender<Frame<Up>>,
    reader: JoinHandle<()>,
    writer: Option<JoinHandle<()>>,
    gauge: Arc<Gauge>,
}

impl Link {
    fn start(
        number: u64,
        stream: TlsStream<TcpStream>,
        gauge: Arc<Gauge>,
        happened: mpsc::Sender<(u64, Event)>,
    ) -> Link {
        gauge.linked.fetch_add(1, Ordering::Relaxed);
        let (from, to) = split(stream);
        let (queue, frames) = mpsc::channel(QUEUE_MAX);
        let reader = tokio::spawn(read(number, from, happened));
        Link { number, queue, reader, writer: Some(tokio::spawn(write(to, frames))), gauge }
    }

    /// Writes what waits, and closes.
    async fn finish(mut self) {
        let (none, _) = mpsc::channel(1);
        self.queue = none;
        if let Some(writer) = self.writer.take() {
            let _ = timeout(HANDSHAKE, writer).await;
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.gauge.linked.fetch_sub(1, Ordering::Relaxed);
        self.reader.abort();
        if let Some(writer) = &self.writer {
            writer.abort();
        }
    }
}

async fn read(
    number: u64,
    mut from: impl AsyncRead + Unpin,
    happened: mpsc::Sender<(u64, Event)>,
) {
    loop {
        let event = match read_frame(&mut from, LEADER_SILENCE).await {
            Ok(frame) => Event::Frame(frame),
            Err(FrameError::Silent { .. }) => Event::LeaderSilent,
            Err(error) => Event::LeaderLost { why: chain(&error) },
        };
        let lost = matches!(event, Event::LeaderLost { .. });
        if happened.send((number, event)).await.is_err() || lost {
            return;
        }
    }
}

/// What breaks here, the reader says.
async fn write(mut to: impl AsyncWrite + Unpin, mut frames: mpsc::Receiver<Frame<Up>>) {
    while let Some(frame) = frames.recv().await {
        if write_frame(&mut to, &frame).await.is_err() {
            return;
        }
    }
    let _ = tokio::io::AsyncWriteExt::shutdown(&mut to).await;
}
