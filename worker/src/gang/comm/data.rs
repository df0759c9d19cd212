//! The data plane of a worker: a thread that connects the workers of an attempt to each other and
//! moves their ranks' bytes.
//!
//! Of two workers the one with the lower ranks dials (`greet`). Both present the attempt's leaf.
//! The one that accepts answers with eight bytes once it has checked job, attempt, member and that
//! the worker has no stream yet. From then on the stream carries the bytes of all pairs of their
//! ranks (`mover`), which only the engines interpret. Then the dialler dials the strands (`pump`).
//! Nobody waits for those: a message goes over such as there are.

use super::greet::{
    Arrival, Connected, Offer, Stream, dial, dial_strand, encode_welcome, receive,
};
use super::links::{Links, Shape};
use super::mover::{self, Pairs};
use super::precedence::Traffic;
use super::pump::{Hello, Pump};
use super::strand::STRANDS_MAX;
use crate::failure::chain;
use crate::gang::memory::Bell;
use crate::gang::strangers::{HANDSHAKES_MAX, Strangers};
use crate::gang::tls::AttemptTls;
use moejob_protocol::config::Member;
use rustls::server::Accepted;
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::io::unix::AsyncFd;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// For all ranks to connect to each other.
pub const JOIN_MS_MAX: u64 = 30_000;
/// And so much more for each worker: a large gang has many handshakes to make.
const JOIN_EACH_MS: u64 = 20;
/// For bytes of the last collective to leave before the process ends.
const DRAIN_MS_MAX: u64 = 1_000;
/// Orders that wait for the data thread; the shell sends one at a time.
const COMMANDS_MAX: usize = 4;

/// Who connects to whom.
#[derive(Clone, Debug)]
pub struct Join {
    /// The first of this worker's.
    pub rank: u32,
    /// How many it has.
    pub ranks: u32,
    /// Of all workers.
    pub world: u32,
    /// One entry a worker, with its first rank; ascending.
    pub members: Vec<Member>,
    pub tls: AttemptTls,
    /// That it wants for each pair of ranks, in each direction ([`super::wanted`]).
    pub strands: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error("rank {rank} could not be reached in time: {why}")]
    Unreached { rank: u32, why: String },
    #[error("rank {rank} did not come in time")]
    Absent { rank: u32 },
    #[error("the attempt was left before all ranks were connected")]
    Left,
    #[error("no memory for the ranks of this worker")]
    Memory(#[source] io::Error),
    #[error("an engine cannot be started")]
    Engine(#[source] io::Error),
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
    /// Strands that are there or about to be.
    strands: HashSet<Hello>,
    pumps: Pumps,
    traffic: Arc<Traffic>,
    connected: mpsc::Sender<Arrival>,
    /// Until all are connected.
    done: Option<oneshot::Sender<Result<Links, JoinError>>>,
    deadline: Instant,
    writers: JoinSet<()>,
    /// Dials, readers and who listens to the bell; aborted when the group is dropped.
    tasks: JoinSet<()>,
}

/// The threads of strands, which end with their group.
type Pumps = Arc<Mutex<Vec<Pump>>>;

/// Another worker's place in the group.
struct Seat {
    member: Member,
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
    let ends = join.members.iter().skip(1).map(|next| next.rank).chain([join.world]);
    let all = join.members.iter().zip(ends).filter(|(member, _)| member.rank != join.rank);
    all.map(|(member, end)| (member.clone(), member.rank..end)).collect()
}

impl Group {
    /// None where it cannot be made; whoever waits for it has then heard so.
    fn new(
        join: Join,
        done: oneshot::Sender<Result<Links, JoinError>>,
        connected: &mpsc::Sender<Arrival>,
    ) -> Option<Group> {
        let others = others(&join);
        let Join { rank, ranks, world, tls, strands, .. } = join;
        let strands = strands.min(STRANDS_MAX);
        let shape = Shape { attempt: tls.attempt, first: rank, count: ranks, world, strands };
        let traffic: Arc<Traffic> = Arc::default();
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
        let each = JOIN_EACH_MS * others.len() as u64;
        let deadline = Instant::now() + Duration::from_millis(JOIN_MS_MAX + each);
        let mut tasks = JoinSet::new();
        let mut seats = Vec::new();
        for (member, remotes) in others {
            let pipes = links.pairs(remotes.clone());
            let pairs = Pairs::new(pipes, shape.ranks(), remotes, Arc::clone(&traffic));
            seats.push(Seat { member: member.clone(), pairs, taken: false });
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
            strands: HashSet::new(),
            pumps: Pumps::default(),
            traffic,
            connected: connected.clone(),
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
                let seat = seat.expect("a member was dialled");
                self.seat(seat, stream, false);
                self.dial_strands(seat);
            }
            Connected::Unreached { rank, why } => self.fail(JoinError::Unreached { rank, why }),
            Connected::Came { worker, stream } => match self.seat_of(&worker) {
                Ok(seat) => self.seat(seat, stream, true),
                Err(why) => tracing::debug!(worker, why, "data stream refused"),
            },
            Connected::Strand { came, hello, stream } => {
                if let Err(why) = self.strand(came, hello, stream) {
                    tracing::debug!(?hello, why, "strand refused");
                }
            }
        }
        self.check_complete();
    }

    /// Whose stream this may be.
    fn seat_of(&self, worker: &str) -> Result<usize, &'static str> {
        let seat = self.seats.iter().position(|seat| seat.member.worker == worker);
        let Some(seat) = seat else { return Err("no member of the attempt") };
        if self.seats[seat].pairs.first_remote() >= self.rank {
            return Err("a higher rank does not dial");
        }
        Ok(seat)
    }

    fn seat(&mut self, seat: usize, stream: Box<Stream>, welcome: bool) {
        let seat = &mut self.seats[seat];
        if seat.taken {
            let worker = &seat.member.worker;
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

    /// All that there may be with a peer, one after the other: the first that is refused is the
    /// last.
    fn dial_strands(&mut self, seat: usize) {
        let (member, remotes) = (self.seats[seat].member.clone(), self.seats[seat].pairs.remotes());
        let (shape, tls) = (self.links.shape(), self.tls.clone());
        let connected = self.connected.clone();
        self.tasks.spawn(async move {
            for index in 0..shape.strands {
                let pairs = shape.ranks().flat_map(|own| remotes.clone().map(move |of| (own, of)));
                for (from, to) in pairs.flat_map(|(own, of)| [(own, of), (of, own)]) {
                    let attempt = tls.attempt;
                    let hello = Hello { attempt, from, to, index };
                    let stream = match dial_strand(&member, &tls, hello).await {
                        Ok(stream) => Box::new(stream),
                        Err(error) => {
                            tracing::debug!(?hello, error = chain(&error), "no further strand");
                            return;
                        }
                    };
                    let peer = Connected::Strand { came: None, hello, stream };
                    if connected.send(Arrival { attempt, peer }).await.is_err() {
                        return;
                    }
                }
            }
        });
    }

    fn strand(
        &mut self,
        came: Option<String>,
        hello: Hello,
        mut stream: Box<Stream>,
    ) -> Result<(), &'static str> {
        let Hello { attempt, from, to, index } = hello;
        let shape = self.links.shape();
        let sends = shape.ranks().contains(&from);
        let (own, other) = if sends { (from, to) } else { (to, from) };
        let seat = self.seats.iter().find(|seat| seat.pairs.remotes().contains(&other));
        let Some(seat) = seat.filter(|seat| seat.taken) else { return Err("no such peer") };
        if attempt != self.attempt {
            return Err("it names another attempt");
        }
        if !shape.ranks().contains(&own) || index >= shape.strands {
            return Err("it is not wanted");
        }
        if let Some(worker) = &came {
            self.seat_of(worker)?;
            if *worker != seat.member.worker {
                return Err("the rank is another worker's");
            }
        }
        if !self.strands.insert(hello) {
            return Err("it is there already");
        }
        let strand = self.links.strand(from, to, index);
        let (pumps, traffic) = (Arc::clone(&self.pumps), Arc::clone(&self.traffic));
        self.tasks.spawn(async move {
            let welcomed = async {
                if came.is_some() {
                    stream.write_all(&hello.answer()).await?;
                    stream.flush().await?;
                }
                Pump::start(*stream, strand, sends, traffic)
            };
            match welcomed.await {
                Ok(pump) => pumps.lock().unwrap_or_else(PoisonError::into_inner).push(pump),
                Err(error) => tracing::debug!(?hello, error = chain(&error), "a strand is lost"),
            }
        });
        Ok(())
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
        self.tasks.abort_all();
        self.pumps.lock().unwrap_or_else(PoisonError::into_inner).clear();
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
