//! The data plane of a worker: a thread that connects the workers of an attempt to each other and
//! moves their ranks' bytes.
//!
//! Of two workers the one with the lower ranks dials. Both present the leaf of the attempt; the one
//! that accepts answers with eight bytes once it has checked job, attempt, member and that the
//! worker has no stream yet. From then on the stream carries the bytes of all pairs of their ranks
//! (`mover`), which only the engines interpret.

use super::links::{Links, Shape};
use super::mover::{self, Pairs};
use crate::failure::chain;
use crate::gang::memory::Bell;
use crate::gang::strangers::{HANDSHAKE_MS_MAX, HANDSHAKES_MAX, Strangers};
use crate::gang::tls::{AttemptTls, Identity, server_name};
use moejob_protocol::config::Member;
use rustls::server::Accepted;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
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
    /// The first of this worker's.
    pub rank: u32,
    /// How many it has.
    pub ranks: u32,
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
    #[error("no memory for the ranks of this worker")]
    Memory(#[source] io::Error),
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
    Join { join: Box<Join>, done: oneshot::Sender<Result<Links, JoinError>> },
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

    /// Leaves the attempt before, and gives what its ranks here share once all are connected. The
    /// answer is `Left` when another `join` or `leave` came first.
    pub async fn join(&self, join: Join) -> oneshot::Receiver<Result<Links, JoinError>> {
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
    /// The first of this worker's.
    rank: u32,
    tls: AttemptTls,
    seats: Vec<Seat>,
    links: Links,
    /// Until all are connected.
    done: Option<oneshot::Sender<Result<Links, JoinError>>>,
    deadline: Instant,
    writers: JoinSet<()>,
    /// Dials, readers and who listens to the bell; aborted when the group is dropped.
    tasks: JoinSet<()>,
}

/// Another worker's place in the group.
struct Seat {
    worker: String,
    pairs: Arc<Pairs>,
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
        let mut strangers = Strangers::default();
        loop {
            let deadline = self.group.as_ref().and_then(Group::join_deadline);
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Command::Join { join, done }) => {
                        // The old streams close before the new ones open.
                        self.group = None;
                        self.group = Group::new(*join, done, &connected);
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

/// The other workers and their ranks.
fn others(join: &Join) -> Vec<(Member, Range<u32>)> {
    let mut others: Vec<(Member, Range<u32>)> = Vec::new();
    let own = join.rank..join.rank + join.ranks;
    for member in join.members.iter().filter(|member| !own.contains(&member.rank)) {
        match others.last_mut() {
            Some((of, ranks)) if of.worker == member.worker => ranks.end = member.rank + 1,
            _ => others.push((member.clone(), member.rank..member.rank + 1)),
        }
    }
    others
}

impl Group {
    /// None where it cannot be made; whoever waits for it has then heard so.
    fn new(
        join: Join,
        done: oneshot::Sender<Result<Links, JoinError>>,
        connected: &mpsc::Sender<Arrival>,
    ) -> Option<Group> {
        let others = others(&join);
        let Join { rank, ranks, members, tls } = join;
        let world = members.len() as u32;
        let shape = Shape { attempt: tls.attempt, first: rank, count: ranks, world };
        let made = Links::create(shape).and_then(|links| {
            let bell = links.bell().expect("memory that was created has one");
            // SAFETY: the event is owned by what registers it, so it is open as long as that.
            let event = unsafe { AsyncFd::register(bell.event().try_clone_to_owned()?)? };
            let bell = bell.clone();
            Ok((links, bell, event))
        });
        let (links, bell, event) = match made {
            Ok(made) => made,
            Err(error) => {
                let _ = done.send(Err(JoinError::Memory(error)));
                return None;
            }
        };
        let deadline = Instant::now() + Duration::from_millis(JOIN_MS_MAX);
        let mut tasks = JoinSet::new();
        let mut seats = Vec::new();
        for (member, remotes) in others {
            let pairs = Pairs::new(links.pairs(remotes.clone()), shape.ranks(), remotes);
            seats.push(Seat { worker: member.worker.clone(), pairs, taken: false });
            if member.rank > rank {
                tasks.spawn(dial(member, tls.clone(), deadline, connected.clone()));
            }
        }
        let all = seats.iter().map(|seat| Arc::clone(&seat.pairs)).collect();
        tasks.spawn(listen(event, bell, all));
        let mut group = Group {
            attempt: tls.attempt,
            rank,
            tls,
            seats,
            links,
            done: Some(done),
            deadline,
            writers: JoinSet::new(),
            tasks,
        };
        group.check_complete();
        Some(group)
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
            Connected::Dialled { rank, stream } => {
                let seat = self.seats.iter().position(|seat| seat.pairs.first_remote() == rank);
                self.seat(seat.expect("a member was dialled"), stream, false);
            }
            Connected::Unreached { rank, why } => self.fail(JoinError::Unreached { rank, why }),
            Connected::Came { worker, stream } => match self.seat_of(&worker) {
                Ok(seat) => self.seat(seat, stream, true),
                Err(why) => tracing::debug!(worker, why, "data stream refused"),
            },
        }
        self.check_complete();
    }

    /// Whose stream this may be.
    fn seat_of(&self, worker: &str) -> Result<usize, &'static str> {
        let seat = self.seats.iter().position(|seat| seat.worker == worker);
        let Some(seat) = seat else { return Err("no member of the attempt") };
        if self.seats[seat].pairs.first_remote() >= self.rank {
            return Err("a higher rank does not dial");
        }
        Ok(seat)
    }

    fn seat(&mut self, seat: usize, stream: Box<Stream>, welcome: bool) {
        let seat = &mut self.seats[seat];
        if seat.taken {
            let worker = &seat.worker;
            tracing::debug!(worker, "data stream refused: the worker has one already");
            return;
        }
        seat.taken = true;
        let (reader, writer) = tokio::io::split(*stream);
        let welcome = welcome.then(|| encode_welcome(self.attempt));
        let bell = self.links.bell().expect("memory that was created has one").clone();
        self.tasks.spawn(mover::read(reader, Arc::clone(&seat.pairs)));
        let write = mover::write(writer, Arc::clone(&seat.pairs), welcome, move || bell.arm());
        self.writers.spawn(write);
    }

    fn check_complete(&mut self) {
        if self.seats.iter().all(|seat| seat.taken)
            && let Some(done) = self.done.take()
        {
            let _ = done.send(Ok(self.links.clone()));
        }
    }

    fn on_deadline(&mut self) {
        if let Some(seat) = self.seats.iter().find(|seat| !seat.taken) {
            self.fail(JoinError::Absent { rank: seat.pairs.first_remote() });
        }
    }

    fn fail(&mut self, error: JoinError) {
        if let Some(done) = self.done.take() {
            let _ = done.send(Err(error));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.fail(JoinError::Left);
        // The tasks end with their sets; the engines must not wait for them.
        self.seats.iter().for_each(|seat| seat.pairs.end("the attempt was left"));
    }
}

/// Wakes the writers whenever an engine has rung.
async fn listen(event: AsyncFd<OwnedFd>, bell: Bell, all: Vec<Arc<Pairs>>) {
    loop {
        let Ok(mut ready) = event.readable().await else { return };
        bell.take();
        ready.clear_ready();
        all.iter().for_each(|pairs| pairs.wake.notify_one());
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
