//! The leader's end of the control streams: one task a worker.
//!
//! ```text
//! dial -> TLS (the operator's certificate) -> Heartbeat -> Hello, token checked -> Connected
//!      -> Up* | Silent (heartbeats stopped) -> Closed
//! ```
//!
//! A task only reports; what to do about a silent or closed worker is the plan's to say. Times
//! are of the monotonic clock.

mod pace;
mod text;

use moe_worker::gang::tls::{public_key, server_name};
use moe_worker::life::control::{FrameError, decode, read_bytes, read_frame, write_frame};
use moe_worker::failure::chain;
use moejob_identity::authority::{Authority, AuthorityError, requested_key};
use moejob_identity::{ReviewError, Reviewer, is_same};
use moejob_plan::lead::{Ending, Link, PodIdentity};
pub use moejob_plan::lead::Said as LeaderEvent;
use moejob_protocol::message::{
    CONTROL_RUNS, CONTROL_VERSIONS, FRAME_BYTES_MAX, FRAME_BYTES_MAX_BEFORE, Frame,
    GANG_RANKS_MAX, HEARTBEAT_MS, Hello,
};
use moejob_protocol::{Down, PROTOCOL_VERSION, Up, WorkerConfig};
use pace::Pace;
use text::{text_after_rank, text_by_rank, write_configure};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Until the job's loop says another one.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);
/// Orders that wait for one worker to read. There are at most four an attempt.
const ORDERS_MAX: usize = 64;
/// For the handshake and `Hello`.
const HELLO_MS_MAX: u64 = 5_000;
/// Between two tries to reach a listener.
const DIAL_PAUSE_MS: u64 = 50;

/// A leaf is valid for a day. One that its worker was not given on this stream is renewed soon.
const LEAF_RENEWED: Duration = Duration::from_secs(8 * 3600);
const RENEWED_SOON: Duration = Duration::from_secs(5);

/// How a worker proves who it is.
#[derive(Clone)]
pub enum Verifier {
    /// The secret that was handed to its process at spawn.
    Local { secret: String },
    /// The token that the kubelet gave to its pod, judged by the API server.
    TokenReview { reviewer: Reviewer, pod: PodIdentity },
}

/// What happened on a stream, and whose it is.
#[derive(Debug)]
pub struct Told {
    pub owner: Arc<str>,
    name: String,
    stream: u64,
    event: LeaderEvent,
}

#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error("cannot be reached")]
    Dial(#[source] io::Error),
    #[error("its listener is gone")]
    Refused(#[source] io::Error),
    #[error("no proof within {HELLO_MS_MAX} ms")]
    Slow,
    #[error("the TLS handshake failed")]
    Handshake(#[source] io::Error),
    #[error(
        "it speaks none of the control protocols of this operator ({}): its image is of a release \
         too far from the operator's",
        CONTROL_VERSIONS.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    )]
    Protocol,
    #[error("it speaks version {found} of the control protocol, which this operator does not")]
    Version { found: u32 },
    #[error("it is {found:?}, not who was dialled")]
    Name { found: String },
    #[error("its token is not the one it was given")]
    Token,
    #[error("its token")]
    Review(#[from] ReviewError),
    #[error("its signing request was refused")]
    Request(#[from] AuthorityError),
    #[error("its signing request is for another key than its connection's")]
    OtherKey,
    #[error("it did not begin with Hello")]
    Order,
    /// What is too much, as `Up::excess` names it.
    #[error("its frame has more than it can have: {0}")]
    Excess(String),
    #[error(
        "its orders for an attempt have {length} bytes and it reads {most} at most; lower \
         nodes.max, or suspend the job and resume it, so that all its workers are of this \
         operator's release"
    )]
    LongOrder { length: usize, most: usize },
    #[error("its stream")]
    Frame(#[from] FrameError),
}

impl StreamError {
    fn ending(&self) -> Ending {
        match self {
            // On another stream it would say the same.
            StreamError::Excess(_)
            | StreamError::LongOrder { .. }
            | StreamError::Frame(FrameError::Length { .. }) => Ending::Refused,
            StreamError::Refused(_) => Ending::Refused,
            StreamError::Protocol => Ending::Unspoken,
            StreamError::Review(ReviewError::Slow | ReviewError::Api(_)) => Ending::Unjudged,
            _ => Ending::Broken,
        }
    }
}

/// All control streams of one job.
pub struct Leader {
    authority: Arc<Authority>,
    /// Under which the reader of a common channel keeps the job.
    owner: Arc<str>,
    job_uid: String,
    term: u64,
    heartbeat_timeout: Duration,
    links: HashMap<String, Stream>,
    /// Of the configuration that was sent last, and of its form for releases before.
    texts: [Option<Text>; 2],
    sender: mpsc::Sender<Told>,
    /// Of all its streams.
    pace: Pace,
    /// Ranks that the job can have: what its workers tell of is held against it.
    ranks: Arc<AtomicU32>,
}

/// What is to be written on a stream.
enum Order {
    Frame(Frame<Down>),
    /// `Down::Configure`. All members are told the same but for their rank, so its text is there
    /// once for all of them.
    Configure { attempt: u32, rank: u32, text: Arc<[u8]>, bytes_max: usize },
}

/// The JSON of a configuration after its rank, which comes first.
struct Text {
    of: Arc<WorkerConfig>,
    text: Arc<[u8]>,
}

struct Stream {
    stream: u64,
    orders: mpsc::Sender<Order>,
    task: JoinHandle<()>,
    hello: Option<Greeting>,
}

/// What a stream's `Hello` said.
struct Greeting {
    version: u32,
    signing_request: String,
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Leader {
    /// What happens on its streams goes through `sender`; the reader hands it to `accept`.
    pub fn new(
        authority: Arc<Authority>,
        (owner, job_uid): (Arc<str>, &str),
        term: u64,
        sender: mpsc::Sender<Told>,
    ) -> Leader {
        Leader {
            authority,
            owner,
            job_uid: job_uid.to_string(),
            term,
            heartbeat_timeout: HEARTBEAT_TIMEOUT,
            links: HashMap::new(),
            texts: [None, None],
            sender,
            pace: Pace::default(),
            ranks: Arc::new(AtomicU32::new(GANG_RANKS_MAX)),
        }
    }

    /// Does what a job's loop says. `verifier` says how the worker of a pod proves itself.
    pub fn execute(&mut self, link: Link, verifier: impl FnOnce(PodIdentity) -> Verifier) {
        match link {
            Link::Dial { name, address, pod, again } => {
                self.dial(&name, &address, verifier(pod), again);
            }
            Link::Close { name } => drop(self.links.remove(&name)),
            Link::Send { name, attempt, body } => self.send(&name, attempt, body),
            Link::Configure { name, rank, config } => self.configure(&name, rank, &config),
            Link::HeartbeatTimeout(timeout) => self.heartbeat_timeout = timeout,
            Link::Ranks(ranks) => self.ranks.store(ranks, Ordering::Relaxed),
        }
    }

    /// Opens a stream to a worker's listener, in place of an older one. `again`: it was reached
    /// there before, so that a listener which refuses is gone.
    pub fn dial(&mut self, name: &str, address: &str, verifier: Verifier, again: bool) {
        // Events of an older stream of a worker are dropped, also of another leader's of the job.
        static STREAMS: AtomicU64 = AtomicU64::new(0);
        let stream = STREAMS.fetch_add(1, Ordering::Relaxed);
        let (orders, queue) = mpsc::channel(ORDERS_MAX);
        let attendant = Attendant {
            owner: Arc::clone(&self.owner),
            name: name.to_string(),
            stream,
            term: self.term,
            address: address.to_string(),
            verifier,
            again,
            pace: self.pace.clone(),
            ranks: Arc::clone(&self.ranks),
            authority: Arc::clone(&self.authority),
            job_uid: self.job_uid.clone(),
            heartbeat_timeout: self.heartbeat_timeout,
            events: self.sender.clone(),
        };
        let task = tokio::spawn(attendant.run(queue));
        let link = Stream { stream, orders, task, hello: None };
        self.links.insert(name.to_string(), link);
    }

    /// None when a newer stream has taken the place of the one that told it.
    pub fn accept(&mut self, told: Told) -> Option<(String, LeaderEvent)> {
        let Told { name, stream, event, .. } = told;
        let link = self.links.get_mut(&name).filter(|link| link.stream == stream)?;
        match &event {
            LeaderEvent::Opened(hello) => {
                let (version, signing_request) = (hello.version, hello.signing_request.clone());
                link.hello = Some(Greeting { version, signing_request });
            }
            LeaderEvent::Ended { .. } => drop(self.links.remove(&name)),
            LeaderEvent::Up { .. } | LeaderEvent::Silent => {}
        }
        Some((name, event))
    }

    /// Sends a worker its certificate for the attempt, and then its configuration.
    pub fn configure(&mut self, name: &str, rank: u32, config: &Arc<WorkerConfig>) {
        let Some(hello) = self.links.get(name).and_then(|link| link.hello.as_ref()) else {
            tracing::debug!(name, "not configured: no stream");
            return;
        };
        let by_rank = hello.version < CONTROL_RUNS;
        match self.authority.leaf(&hello.signing_request, &self.job_uid, config.attempt, name) {
            Ok(leaf) => {
                let attempt = config.attempt;
                self.send(name, attempt, leaf);
                let text = self.text_of(config, by_rank);
                let bytes_max = if by_rank { FRAME_BYTES_MAX_BEFORE } else { FRAME_BYTES_MAX };
                self.order(name, Order::Configure { attempt, rank, text, bytes_max });
            }
            Err(error) => self.give_up(name, chain(&error)),
        }
    }

    fn text_of(&mut self, config: &Arc<WorkerConfig>, by_rank: bool) -> Arc<[u8]> {
        let known = &mut self.texts[usize::from(by_rank)];
        if let Some(known) = known.as_ref().filter(|known| Arc::ptr_eq(&known.of, config)) {
            return Arc::clone(&known.text);
        }
        let text = if by_rank { text_by_rank(config) } else { text_after_rank(config) };
        *known = Some(Text { of: Arc::clone(config), text: Arc::clone(&text) });
        text
    }

    /// Sends an order. One to a worker without a stream is dropped: its end was or will be told.
    pub fn send(&mut self, name: &str, attempt: u32, body: Down) {
        let frame = Frame { v: PROTOCOL_VERSION, term: self.term, attempt, body };
        self.order(name, Order::Frame(frame));
    }

    fn order(&mut self, name: &str, order: Order) {
        let Some(link) = self.links.get(name) else {
            tracing::debug!(name, "not sent: no stream");
            return;
        };
        if let Err(mpsc::error::TrySendError::Full(_)) = link.orders.try_send(order) {
            self.give_up(name, format!("{ORDERS_MAX} orders wait for it"));
        }
    }

    /// Ends the stream's task, and tells the plan from outside of it.
    fn give_up(&mut self, name: &str, reason: String) {
        let Some(link) = self.links.get(name) else { return };
        link.task.abort();
        let (sender, stream) = (self.sender.clone(), link.stream);
        let event = LeaderEvent::Ended { why: Ending::Refused, reason };
        let owner = Arc::clone(&self.owner);
        let told = Told { owner, name: name.into(), stream, event };
        // The queue may be full; this loop is the one that empties it.
        tokio::spawn(async move { sender.send(told).await });
    }
}

/// The task of one stream.
struct Attendant {
    owner: Arc<str>,
    name: String,
    stream: u64,
    term: u64,
    address: String,
    verifier: Verifier,
    again: bool,
    pace: Pace,
    ranks: Arc<AtomicU32>,
    authority: Arc<Authority>,
    job_uid: String,
    heartbeat_timeout: Duration,
    events: mpsc::Sender<Told>,
}

impl Attendant {
    async fn run(self, orders: mpsc::Receiver<Order>) {
        let (why, reason) = match self.attend(orders).await {
            Ok(()) => (Ending::Broken, "its stream was closed".to_string()),
            Err(error) => (error.ending(), chain(&error)),
        };
        self.tell(LeaderEvent::Ended { why, reason }).await;
    }

    async fn tell(&self, event: LeaderEvent) {
        let (owner, name) = (Arc::clone(&self.owner), self.name.clone());
        let told = Told { owner, name, stream: self.stream, event };
        // Without a receiver the leader is gone, and this task with it.
        let _ = self.events.send(told).await;
    }

    async fn attend(&self, orders: mpsc::Receiver<Order>) -> Result<(), StreamError> {
        let tcp = self.connect().await?;
        let hello = timeout(Duration::from_millis(HELLO_MS_MAX), self.hello(tcp)).await;
        let (mut stream, mut hello) = hello.map_err(|_| StreamError::Slow)??;
        self.prove(&mut stream, &hello).await?;
        hello.token = String::new();
        // A member of an attempt has had its leaf for a time that nobody here knows.
        let renewed = Instant::now() + if hello.attempt > 0 { RENEWED_SOON } else { LEAF_RENEWED };
        let leaf = (hello.attempt, renewed, hello.signing_request.clone());
        self.tell(LeaderEvent::Opened(hello)).await;
        let (from, to) = tokio::io::split(stream);
        let write = async {
            if let Err(error) = self.write(to, orders, leaf).await {
                // The next stream will not take it either.
                if let StreamError::LongOrder { .. } = error {
                    return Err(error);
                }
                let name = &self.name;
                tracing::debug!(name, error = chain(&error), "orders do not arrive");
            }
            // What the worker said last is still to be read, and the stream's end with it.
            std::future::pending().await
        };
        tokio::select! {
            result = self.read(from) => result,
            result = write => result,
        }
    }

    /// A worker's listener is there before its address is told, but its network may lag. One that
    /// was there before and refuses twice is gone.
    async fn connect(&self) -> Result<TcpStream, StreamError> {
        let deadline = Instant::now() + self.heartbeat_timeout;
        let mut refusals = 0;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let error = match timeout(left, TcpStream::connect(&self.address)).await {
                Ok(Ok(tcp)) => {
                    tcp.set_nodelay(true).map_err(StreamError::Dial)?;
                    return Ok(tcp);
                }
                Ok(Err(error)) => error,
                Err(_) => io::ErrorKind::TimedOut.into(),
            };
            refusals += u32::from(error.kind() == io::ErrorKind::ConnectionRefused);
            if self.again && refusals > 1 {
                return Err(StreamError::Refused(error));
            }
            let pause = Duration::from_millis(DIAL_PAUSE_MS);
            if Instant::now() + pause >= deadline {
                return Err(StreamError::Dial(error));
            }
            sleep(pause).await;
        }
    }

    async fn hello(&self, tcp: TcpStream) -> Result<(TlsStream<TcpStream>, Hello), StreamError> {
        let connector = TlsConnector::from(self.authority.client());
        let handshake = connector.connect(server_name(), tcp).await;
        let mut stream = handshake.map_err(unspoken)?;
        // The leader speaks first: the worker learns its term before it answers.
        write_frame(&mut stream, &self.frame(Down::Heartbeat)).await?;
        let silence = Duration::from_millis(HELLO_MS_MAX);
        let frame: Frame<Up> = read_frame(&mut stream, silence).await?;
        let Up::Hello(hello) = self.taken(frame.body)? else { return Err(StreamError::Order) };
        let certificates = stream.get_ref().1.peer_certificates();
        let key = certificates.and_then(<[_]>::first).and_then(public_key);
        self.check(&hello, key)?;
        Ok((stream, hello))
    }

    /// The worker waits for its proof to be judged, and is told meanwhile that its leader lives.
    async fn prove(
        &self,
        stream: &mut TlsStream<TcpStream>,
        hello: &Hello,
    ) -> Result<(), StreamError> {
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        // The leaf of an attempt says as much as a token, and asks nobody: after a takeover
        // hundreds of tokens wait for the API server.
        if shown.is_some_and(|leaf| self.authority.names(leaf, &self.job_uid, &self.name)) {
            return Ok(());
        }
        let verdict = self.verify(hello);
        tokio::pin!(verdict);
        let mut tick = interval(Duration::from_millis(HEARTBEAT_MS));
        loop {
            tokio::select! {
                verdict = &mut verdict => return verdict,
                _ = tick.tick() => write_frame(stream, &self.frame(Down::Heartbeat)).await?,
            }
        }
    }

    async fn verify(&self, hello: &Hello) -> Result<(), StreamError> {
        match &self.verifier {
            Verifier::Local { secret } if is_same(secret, &hello.token) => Ok(()),
            Verifier::Local { .. } => Err(StreamError::Token),
            Verifier::TokenReview { reviewer, pod } => {
                Ok(reviewer.review(&hello.token, pod).await?)
            }
        }
    }

    fn check(&self, hello: &Hello, key: Option<Vec<u8>>) -> Result<(), StreamError> {
        if !CONTROL_VERSIONS.contains(&hello.version) {
            return Err(StreamError::Version { found: hello.version });
        }
        if hello.worker != self.name {
            return Err(StreamError::Name { found: hello.worker.clone() });
        }
        if key.as_ref() != Some(&requested_key(&hello.signing_request)?) {
            return Err(StreamError::OtherKey);
        }
        Ok(())
    }

    /// What a worker says, without what no leader uses.
    fn taken(&self, mut up: Up) -> Result<Up, StreamError> {
        up.cut();
        match up.excess(self.ranks.load(Ordering::Relaxed)) {
            Some(excess) => Err(StreamError::Excess(excess)),
            None => Ok(up),
        }
    }

    async fn read(&self, mut from: ReadHalf<TlsStream<TcpStream>>) -> Result<(), StreamError> {
        let (mut silent, mut own) = (false, pace::Allowance::of_stream());
        loop {
            match read_bytes::<Up>(&mut from, self.heartbeat_timeout).await {
                Ok(bytes) => {
                    silent = false;
                    self.pace.admit(&mut own, bytes.len()).await;
                    let Frame { attempt, body, .. } = decode(&bytes)?;
                    let up = self.taken(body)?;
                    self.tell(LeaderEvent::Up { attempt, up }).await;
                }
                Err(FrameError::Silent { .. }) if silent => {}
                Err(FrameError::Silent { .. }) => {
                    silent = true;
                    self.tell(LeaderEvent::Silent).await;
                }
                Err(FrameError::Ended) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn write(
        &self,
        mut to: WriteHalf<TlsStream<TcpStream>>,
        mut orders: mpsc::Receiver<Order>,
        (mut attempt, mut renewed, request): (u32, Instant, String),
    ) -> Result<(), StreamError> {
        let mut tick = interval(Duration::from_millis(HEARTBEAT_MS));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let order = tokio::select! {
                order = orders.recv() => match order {
                    Some(order) => order,
                    None => return Ok(()),
                },
                _ = tick.tick() => Order::Frame(self.frame(Down::Heartbeat)),
                () = sleep_until(renewed), if attempt > 0 => {
                    let leaf =
                        self.authority.leaf(&request, &self.job_uid, attempt, &self.name)?;
                    renewed = Instant::now() + LEAF_RENEWED;
                    Order::Frame(Frame { attempt, ..self.frame(leaf) })
                }
            };
            match order {
                Order::Frame(frame) => write_frame(&mut to, &frame).await?,
                Order::Configure { attempt: of, rank, text, bytes_max } => {
                    (attempt, renewed) = (of, Instant::now() + LEAF_RENEWED);
                    write_configure(&mut to, (self.term, of, rank), &text, bytes_max).await?;
                }
            }
        }
    }

    /// A frame of no attempt.
    fn frame(&self, body: Down) -> Frame<Down> {
        Frame { v: PROTOCOL_VERSION, term: self.term, attempt: 0, body }
    }
}

/// TLS tells apart a side that speaks other protocols from one that is not to be believed.
fn unspoken(error: io::Error) -> StreamError {
    let of_tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    match of_tls {
        Some(rustls::Error::AlertReceived(rustls::AlertDescription::NoApplicationProtocol)) => {
            StreamError::Protocol
        }
        _ => StreamError::Handshake(error),
    }
}
