//! The data plane of a worker: a thread that connects the ranks of an attempt to each other and
//! moves their bytes.
//!
//! Of two ranks the lower dials. Both present the leaf of the attempt; the one that accepts
//! answers with eight bytes once it has checked job, attempt, member and that the rank has no
//! stream yet. From then on a stream is bytes in both directions, which only the device's thread
//! interprets.

use super::pipe::{CHUNK_BYTES_MAX, Pipe, Pop, Wake};
use super::{Comm, PeerPipes};
use crate::life::listener::{HANDSHAKE_MS_MAX, HANDSHAKES_MAX, Pending, chain};
use crate::gang::tls::{AttemptTls, Identity, server_name};
use moejob_protocol::config::Member;
use rustls::server::Accepted;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::{StartHandshake, TlsConnector, TlsStream};

/// For all ranks to connect to each other.
pub const JOIN_MS_MAX: u64 = 30_000;
/// One try to reach a peer's listener.
const DIAL_MS_MAX: u64 = 1_000;
/// Between two tries, doubling; the peer may not know of the attempt yet.
const DIAL_PAUSE_MS: u64 = 4;
const DIAL_PAUSE_MS_MAX: u64 = 128;
/// For bytes of the last collective to leave before the process ends.
const DRAIN_MS_MAX: u64 = 1_000;
/// Orders that wait for the data thread; the shell sends one at a time.
const COMMANDS_MAX: usize = 4;
/// First half of what the accepting side answers; the attempt follows.
const WELCOME: [u8; 4] = *b"MOEW";

/// Who connects to whom.
#[derive(Clone, Debug)]
pub struct Join {
    pub rank: u32,
    /// One entry a rank, ascending.
    pub members: Vec<Member>,
    pub tls: AttemptTls,
}

#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error("rank {rank} could not be reached within {JOIN_MS_MAX} ms: {why}")]
    Unreached { rank: u32, why: String },
    #[error("rank {rank} did not come within {JOIN_MS_MAX} ms")]
    Absent { rank: u32 },
    #[error("the attempt was left before all ranks were connected")]
    Left,
}

/// Handle of the data thread. Dropping it without `stop` ends the thread at once.
#[derive(Debug)]
pub struct DataPlane {
    commands: mpsc::Sender<Command>,
    offers: DataOffers,
    thread: JoinHandle<()>,
}

/// Where the listener hands over connections that asked for the data protocol.
#[derive(Clone, Debug)]
pub struct DataOffers(mpsc::Sender<Offer>);

struct Offer {
    accepted: Accepted,
    tcp: std::net::TcpStream,
    deadline: std::time::Instant,
}

impl DataOffers {
    /// Says whether there was room.
    pub fn offer(
        &self,
        accepted: Accepted,
        tcp: std::net::TcpStream,
        deadline: std::time::Instant,
    ) -> bool {
        self.0.try_send(Offer { accepted, tcp, deadline }).is_ok()
    }
}

enum Command {
    Join { join: Box<Join>, done: oneshot::Sender<Result<Comm, JoinError>> },
    Leave,
    Stop,
}

impl DataPlane {
    /// # Errors
    /// When the system gives no thread or no event queue.
    pub fn start() -> io::Result<DataPlane> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (commands, orders) = mpsc::channel(COMMANDS_MAX);
        let (offers, offered) = mpsc::channel(HANDSHAKES_MAX);
        let thread = std::thread::Builder::new()
            .name("data".to_string())
            .spawn(move || runtime.block_on(Plane::default().run(orders, offered)))?;
        Ok(DataPlane { commands, offers: DataOffers(offers), thread })
    }

    pub fn offers(&self) -> DataOffers {
        self.offers.clone()
    }

    /// Leaves the attempt before, and gives the new group once all ranks are connected. The
    /// answer is `Left` when another `join` or `leave` came first.
    pub async fn join(&self, join: Join) -> oneshot::Receiver<Result<Comm, JoinError>> {
        let (done, joined) = oneshot::channel();
        let command = Command::Join { join: Box::new(join), done };
        if let Err(refused) = self.commands.send(command).await
            && let Command::Join { done, .. } = refused.0
        {
            let _ = done.send(Err(JoinError::Left));
        }
        joined
    }

    /// Ends all streams of the attempt, also half-open ones.
    pub async fn leave(&self) {
        let _ = self.commands.send(Command::Leave).await;
    }

    /// Ends the thread, after what was sent has left (bounded).
    pub async fn stop(self) {
        let _ = self.commands.send(Command::Stop).await;
        let _ = tokio::task::spawn_blocking(move || self.thread.join()).await;
    }
}

type Stream = TlsStream<TcpStream>;

/// A stream whose other end has proven who it is, or that it cannot be reached, with its attempt:
/// it may arrive after that attempt was left.
struct Arrival {
    attempt: u32,
    peer: Connected,
}

enum Connected {
    Dialled { rank: u32, stream: Box<Stream> },
    Unreached { rank: u32, why: String },
    Came { worker: String, stream: Box<Stream> },
}

#[derive(Default)]
struct Plane {
    group: Option<Group>,
}

/// The streams of one attempt.
struct Group {
    attempt: u32,
    rank: u32,
    members: Vec<Member>,
    tls: AttemptTls,
    /// By rank; none at the own one.
    seats: Vec<Option<Seat>>,
    /// Until all are connected.
    done: Option<(Comm, oneshot::Sender<Result<Comm, JoinError>>)>,
    deadline: Instant,
    writers: JoinSet<()>,
    /// Dials and readers; aborted when the group is dropped.
    tasks: JoinSet<()>,
}

/// A peer's place in the group.
struct Seat {
    pipes: PeerPipes,
    /// It has its stream.
    taken: bool,
}

impl Plane {
    async fn run(
        mut self,
        mut orders: mpsc::Receiver<Command>,
        mut offered: mpsc::Receiver<Offer>,
    ) {
        let (connected, mut arrivals) = mpsc::channel(HANDSHAKES_MAX);
        let mut strangers = Pending::default();
        loop {
            let deadline = self.group.as_ref().and_then(Group::join_deadline);
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Command::Join { join, done }) => {
                        // The old streams close before the new ones open.
                        self.group = None;
                        self.group = Some(Group::new(*join, done, &connected));
                    }
                    Some(Command::Leave) => self.group = None,
                    Some(Command::Stop) => return self.drain().await,
                    None => return,
                },
                Some(offer) = offered.recv() => {
                    if let Some(group) = &self.group {
                        strangers.admit(receive(offer, group.tls.clone(), connected.clone()));
                    }
                }
                Some(arrival) = arrivals.recv() => {
                    if let Some(group) = &mut self.group {
                        group.on_arrival(arrival);
                    }
                }
                () = at(deadline), if deadline.is_some() => {
                    if let Some(group) = &mut self.group {
                        group.on_deadline();
                    }
                }
            }
        }
    }

    async fn drain(self) {
        let Some(mut group) = self.group else { return };
        let all = async { while group.writers.join_next().await.is_some() {} };
        let _ = timeout(Duration::from_millis(DRAIN_MS_MAX), all).await;
    }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

impl Group {
    fn new(
        join: Join,
        done: oneshot::Sender<Result<Comm, JoinError>>,
        connected: &mpsc::Sender<Arrival>,
    ) -> Group {
        let Join { rank, members, tls } = join;
        let mut seats: Vec<Option<Seat>> = members.iter().map(|_| None).collect();
        let comm = Comm::new(rank, members.len() as u32, tls.attempt, |peer, device| {
            let task = || Wake::Task(Arc::new(Notify::new()));
            let pipes = PeerPipes {
                rank: peer,
                outgoing: Pipe::new(device.clone(), task()),
                incoming: Pipe::new(task(), device),
            };
            seats[peer as usize] = Some(Seat { pipes: pipes.clone(), taken: false });
            pipes
        });
        let deadline = Instant::now() + Duration::from_millis(JOIN_MS_MAX);
        let mut tasks = JoinSet::new();
        for member in members.iter().filter(|member| member.rank > rank) {
            let dial = dial(member.clone(), tls.clone(), deadline, connected.clone());
            tasks.spawn(dial);
        }
        let mut group = Group {
            attempt: tls.attempt,
            rank,
            members,
            tls,
            seats,
            done: Some((comm, done)),
            deadline,
            writers: JoinSet::new(),
            tasks,
        };
        group.check_complete();
        group
    }

    fn join_deadline(&self) -> Option<Instant> {
        self.done.as_ref().map(|_| self.deadline)
    }

    fn on_arrival(&mut self, arrival: Arrival) {
        if arrival.attempt != self.attempt {
            tracing::debug!(attempt = arrival.attempt, "data stream refused: another attempt");
            return;
        }
        match arrival.peer {
            Connected::Dialled { rank, stream } => self.seat(rank, stream, false),
            Connected::Unreached { rank, why } => self.fail(JoinError::Unreached { rank, why }),
            Connected::Came { worker, stream } => match self.rank_of(&worker) {
                Ok(rank) => self.seat(rank, stream, true),
                Err(why) => tracing::debug!(worker, why, "data stream refused"),
            },
        }
        self.check_complete();
    }

    /// The rank whose stream this may be.
    fn rank_of(&self, worker: &str) -> Result<u32, &'static str> {
        let member = self.members.iter().find(|member| member.worker == worker);
        let Some(member) = member else { return Err("no member of the attempt") };
        if member.rank >= self.rank {
            return Err("a higher rank does not dial");
        }
        Ok(member.rank)
    }

    fn seat(&mut self, rank: u32, stream: Box<Stream>, welcome: bool) {
        let seat = self.seats[rank as usize].as_mut().expect("not the own rank");
        if seat.taken {
            tracing::debug!(rank, "data stream refused: the rank has one already");
            return;
        }
        seat.taken = true;
        let pipes = seat.pipes.clone();
        let (reader, writer) = tokio::io::split(*stream);
        let welcome = welcome.then(|| encode_welcome(self.attempt));
        self.tasks.spawn(read(reader, pipes.clone()));
        self.writers.spawn(write(writer, pipes, welcome));
    }

    fn check_complete(&mut self) {
        if self.seats.iter().flatten().all(|seat| seat.taken)
            && let Some((comm, done)) = self.done.take()
        {
            let _ = done.send(Ok(comm));
        }
    }

    fn on_deadline(&mut self) {
        if let Some(seat) = self.seats.iter().flatten().find(|seat| !seat.taken) {
            self.fail(JoinError::Absent { rank: seat.pipes.rank });
        }
    }

    fn fail(&mut self, error: JoinError) {
        if let Some((_, done)) = self.done.take() {
            let _ = done.send(Err(error));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.fail(JoinError::Left);
        // The tasks end with their sets; the device must not wait for them.
        for Seat { pipes, .. } in self.seats.iter().flatten() {
            pipes.incoming.end("the attempt was left");
            pipes.outgoing.refuse("the attempt was left");
        }
    }
}

fn encode_welcome(attempt: u32) -> Vec<u8> {
    [WELCOME, attempt.to_le_bytes()].concat()
}

/// The listener's side of a handshake; the connection is a stranger's until it ends.
async fn receive(offer: Offer, tls: AttemptTls, connected: mpsc::Sender<Arrival>) {
    let Offer { accepted, tcp, deadline } = offer;
    let opened = async {
        let tcp = TcpStream::from_std(tcp)?;
        let stream = StartHandshake::from_parts(accepted, tcp).into_stream(tls.server).await?;
        let peer = Identity::of_peer(stream.get_ref().1.peer_certificates());
        let peer = peer.map_err(io::Error::other)?;
        match peer {
            // This side has shown its leaf of the same attempt, so both agree on which it is.
            Identity::Worker { job_uid, attempt, worker }
                if job_uid == tls.job_uid && attempt == tls.attempt =>
            {
                let stream = Box::new(TlsStream::from(stream));
                Ok(Arrival { attempt, peer: Connected::Came { worker, stream } })
            }
            other => Err(io::Error::other(format!("{other} is not of this attempt"))),
        }
    };
    match timeout_at(deadline.into(), opened).await {
        Ok(Ok(arrival)) => drop(connected.send(arrival).await),
        Ok(Err(error)) => tracing::debug!(error = chain(&error), "data handshake refused"),
        Err(_) => tracing::debug!("data handshake refused: too slow"),
    }
}

/// Dials until the peer welcomes this rank, or the deadline.
async fn dial(
    member: Member,
    tls: AttemptTls,
    deadline: Instant,
    connected: mpsc::Sender<Arrival>,
) {
    let mut pause = Duration::from_millis(DIAL_PAUSE_MS);
    let rank = member.rank;
    let peer = loop {
        let why = match dial_once(&member, &tls).await {
            Ok(stream) => break Connected::Dialled { rank, stream: Box::new(stream) },
            Err(error) => chain(&error),
        };
        tracing::debug!(rank, why, "peer not reached");
        if Instant::now() + pause >= deadline {
            break Connected::Unreached { rank, why };
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(DIAL_PAUSE_MS_MAX));
    };
    let _ = connected.send(Arrival { attempt: tls.attempt, peer }).await;
}

async fn dial_once(member: &Member, tls: &AttemptTls) -> io::Result<Stream> {
    let late =
        |what: &str| io::Error::new(io::ErrorKind::TimedOut, format!("{what} took too long"));
    let connect = TcpStream::connect(&member.address);
    let tcp = timeout(Duration::from_millis(DIAL_MS_MAX), connect).await;
    let tcp = tcp.map_err(|_| late("connecting"))??;
    tcp.set_nodelay(true)?;
    let handshake = async {
        let connector = TlsConnector::from(Arc::clone(&tls.client));
        let mut stream = connector.connect(server_name(), tcp).await?;
        let found = Identity::of_peer(stream.get_ref().1.peer_certificates());
        let expected = Identity::Worker {
            job_uid: tls.job_uid.clone(),
            attempt: tls.attempt,
            worker: member.worker.clone(),
        };
        match found {
            Ok(found) if found == expected => {}
            Ok(found) => return Err(io::Error::other(format!("{found} answers"))),
            Err(error) => return Err(io::Error::other(error)),
        }
        let mut welcome = [0; 8];
        stream.read_exact(&mut welcome).await?;
        if welcome[..] != encode_welcome(tls.attempt) {
            return Err(io::Error::other("the peer's welcome is not for this attempt"));
        }
        Ok(TlsStream::from(stream))
    };
    let opened = timeout(Duration::from_millis(HANDSHAKE_MS_MAX), handshake).await;
    opened.map_err(|_| late("the handshake"))?
}

/// Moves bytes from the peer to the device until either ends.
async fn read(mut stream: ReadHalf<Stream>, pipes: PeerPipes) {
    let PeerPipes { incoming, outgoing, .. } = pipes;
    let space_wake = incoming.producer_task();
    let why = loop {
        let space = match incoming.space() {
            Ok(0) => {
                space_wake.notified().await;
                continue;
            }
            Ok(space) => space.min(CHUNK_BYTES_MAX),
            // The device left; what it had sent is still to go out.
            Err(_) => return,
        };
        let mut chunk = Vec::with_capacity(space);
        tokio::select! {
            count = read_some(&mut stream, &mut chunk, space) => match count {
                Ok(0) => break "its stream ended".to_string(),
                Ok(_) => incoming.push(chunk),
                Err(error) => break chain(&error),
            },
            // The device may leave while nothing comes.
            () = space_wake.notified() => {}
        }
    };
    incoming.end(&why);
    outgoing.refuse(&why);
}

/// Appends at most `limit` bytes; cancel-safe, as `read_buf` is.
async fn read_some(
    stream: &mut ReadHalf<Stream>,
    chunk: &mut Vec<u8>,
    limit: usize,
) -> io::Result<usize> {
    stream.take(limit as u64).read_buf(chunk).await
}

/// Moves bytes from the device to the peer until either ends.
async fn write(mut stream: WriteHalf<Stream>, pipes: PeerPipes, welcome: Option<Vec<u8>>) {
    let PeerPipes { incoming, outgoing, .. } = pipes;
    let wake = outgoing.consumer_task();
    let moved = async {
        if let Some(welcome) = welcome {
            stream.write_all(&welcome).await?;
            stream.flush().await?;
        }
        loop {
            match outgoing.pop() {
                Pop::Chunk(chunk) => stream.write_all(&chunk).await?,
                Pop::Empty if outgoing.is_refused() => return Ok(()),
                Pop::Empty => {
                    stream.flush().await?;
                    wake.notified().await;
                }
                Pop::Ended { .. } => return stream.shutdown().await,
            }
        }
    };
    let result: io::Result<()> = moved.await;
    if let Err(error) = result {
        let why = chain(&error);
        incoming.end(&why);
        outgoing.refuse(&why);
    }
}
