//! One rank, in a process of its own as an engine is. It obeys its parent's lines until they end.
//!
//! ```text
//! Fill -> memory and numbers    Id, Meet -> NCCL    Window, Connect -> windows of the others
//! Time(call) -> [two calls] event [n calls] event [a call] -> microseconds
//! Check(call) -> what lies where the result will be is spoiled -> one call -> every word is read
//! ```
//! The calls before the first event meet on the device: from there on no rank waits for the host of
//! another one. The call behind the last event keeps the links loaded until all have their reading.

use super::bed::{Bed, rooms};
use super::truth::{self, result_len};
use super::verb::{Call, Verb, Way, row_bytes, rows_of};
use crate::engine::links::{Desk, PeerUse, Seat as Place, blocks_for, entry};
use crate::failure::chain;
use crate::life::part::{is_bound_to, number, obey, say};
use crate::life::preflight::child::{id, of_hex};
use half::bf16;
use moejob_kernels::cuda::{Compiler, CudaError, Gpu, Graph, default_cache_dir, peer_read_rate};
use moejob_kernels::peer::{GatherRows, MoveRows, PeerDesc, PeerLinks, ScatterRows};
use moejob_kernels::{Buffer, DType};
use moejob_nccl::{Comm, Config, Library, Reduce, Seat, Span};
use serde::{Deserialize, Serialize};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Makes an engine's process a rank that measures links; says which GPU.
pub(super) const ENV_PART: &str = "MOEJOB_LINKS_GPU";

/// All ranks are asked to meet at once.
const MEET_LIMIT: Duration = Duration::from_secs(30);
/// A kernel's wait for a peer. The driver of a GPU that several ranks share lets each run for some
/// milliseconds in turn.
const PATIENCE: Duration = Duration::from_secs(15);
/// For the calls of one reading: longer, so that a kernel says itself whom it waits for.
pub(super) const CALLS_LIMIT: Duration = Duration::from_secs(20);
/// A call that takes longer than this is not waited for by spinning.
const SPIN: Duration = Duration::from_millis(2);
const PAUSE: Duration = Duration::from_micros(50);
/// Calls before those that are timed.
const CALLS_BEFORE: usize = 2;

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Reads of another GPU's memory.
    Read { ordinal: usize },
    /// Memory for results of these sizes, and the numbers that travel.
    Fill { rank: u32, world: u32, sizes: Vec<usize> },
    /// A place where NCCL's communicators meet.
    Id,
    Meet { id: String },
    /// Memory that the others map.
    Window,
    Connect { places: Vec<Place> },
    /// So many calls, one by one or captured into a graph that is launched once.
    Time { call: Call, times: usize, captured: bool },
    Check { call: Call },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The GPU is open.
    Ready { name: String, free: usize },
    /// Bytes a second.
    Rate(f64),
    Done,
    Id(String),
    /// By which NCCL.
    Met { version: String },
    At(Place),
    /// Seconds of a call.
    Took(f64),
    /// `waited`: for another rank, which may have more to say of it.
    Failed { why: String, waited: bool },
}

/// The GPU on which this process is to be a rank, if it is one.
pub(crate) fn part() -> Option<usize> {
    number(ENV_PART)
}

/// Ends with its parent, whose process id this is.
pub(crate) fn main(parent: &str, ordinal: usize) -> ExitCode {
    if !is_bound_to(parent) {
        return ExitCode::from(75);
    }
    let open = || {
        let gpu = Gpu::open(ordinal).map_err(|error| chain(&error))?;
        let (free, _) = gpu.memory().map_err(|error| chain(&error))?;
        Ok::<_, String>((gpu, free))
    };
    let gpu = match open() {
        Ok((gpu, free)) => {
            say(&Reply::Ready { name: gpu.name().to_string(), free });
            gpu
        }
        Err(why) => {
            say(&Reply::Failed { why, waited: false });
            return ExitCode::FAILURE;
        }
    };
    let blocks = PeerUse::said().blocks_measured();
    let mut rank = Rank { bed: None, comm: None, own: None, links: None, blocks, gpu };
    match obey(|ask| say(&rank.answer(ask))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Why there is no answer.
enum Trouble {
    /// Here.
    Own(String),
    /// A rank did not come, or not in time.
    Waited(String),
}

fn own<E: std::error::Error>(error: E) -> Trouble {
    Trouble::Own(chain(&error))
}

fn by_nccl(error: moejob_nccl::Error) -> Trouble {
    match error {
        moejob_nccl::Error::Late { .. } => Trouble::Waited(chain(&error)),
        error => own(error),
    }
}

/// What is dropped first uses what is dropped last.
struct Rank {
    comm: Option<Comm>,
    links: Option<PeerLinks>,
    /// That move what goes through them, at most.
    blocks: usize,
    /// The own window, while others open theirs.
    own: Option<(PeerLinks, Desk)>,
    bed: Option<Bed>,
    gpu: Gpu,
}

impl Rank {
    fn answer(&mut self, ask: Ask) -> Reply {
        let answer = match ask {
            Ask::Read { ordinal } => {
                let rate = peer_read_rate(&self.gpu, ordinal);
                // One that failed may have left this process at the other GPU.
                let back = self.gpu.make_current();
                rate.and_then(|rate| back.map(|()| Reply::Rate(rate * 1e9))).map_err(own)
            }
            Ask::Fill { rank, world, sizes } => self.fill((rank, world), sizes),
            Ask::Id => id().map(Reply::Id).map_err(Trouble::Own),
            Ask::Meet { id } => self.meet(&id),
            Ask::Window => self.window(),
            Ask::Connect { places } => self.connect(&places),
            Ask::Time { call, times, captured } => self.time(call, times, captured),
            Ask::Check { call } => self.check(call),
        };
        match answer {
            Ok(reply) => reply,
            Err(Trouble::Own(why)) => Reply::Failed { why, waited: false },
            Err(Trouble::Waited(why)) => Reply::Failed { why, waited: true },
        }
    }

    fn bed(&self) -> Result<&Bed, Trouble> {
        self.bed.as_ref().ok_or_else(|| Trouble::Own("there is no memory yet".to_string()))
    }

    fn fill(&mut self, seat: (u32, u32), sizes: Vec<usize>) -> Result<Reply, Trouble> {
        self.bed = Some(Bed::new(&self.gpu, seat, sizes).map_err(own)?);
        Ok(Reply::Done)
    }

    fn meet(&mut self, id: &str) -> Result<Reply, Trouble> {
        let bed = self.bed()?;
        let seat = Seat { rank: bed.rank, world: bed.world };
        let library = Library::load().map_err(by_nccl)?;
        let id = of_hex(id).ok_or_else(|| Trouble::Own("no place to meet".to_string()))?;
        // As engines make theirs.
        let enter = Some(entry(&self.gpu));
        let config = Config { meet_limit: MEET_LIMIT, enter, ..Config::default() };
        self.comm = Some(Comm::init(&library, seat, &id, &config).map_err(by_nccl)?);
        Ok(Reply::Met { version: library.version().to_string() })
    }

    fn window(&mut self) -> Result<Reply, Trouble> {
        let bed = self.bed()?;
        let (positions, me) = (bed.world as usize, bed.rank as usize);
        let rooms = rooms(&bed.sizes);
        let compiler = Compiler::new(&self.gpu, default_cache_dir()).map_err(own)?;
        let desc = PeerDesc { positions, me, rooms, patience: PATIENCE };
        let mut links = PeerLinks::new(&compiler, desc).map_err(own)?;
        links.share(&bed.arena);
        let desk = Desk::open()
            .map_err(|error| Trouble::Own(format!("no socket for windows: {error}")))?;
        let place = desk.seat().clone();
        self.own = Some((links, desk));
        Ok(Reply::At(place))
    }

    fn connect(&mut self, places: &[Place]) -> Result<Reply, Trouble> {
        let me = self.bed()?.rank as usize;
        let Some((mut links, desk)) = self.own.take() else {
            return Err(Trouble::Own("it has no window".to_string()));
        };
        let files = links.export().map_err(own)?;
        let all = desk.exchange(me, places, &files, &|| false);
        let all = all.map_err(|error| {
            Trouble::Waited(format!("windows were not handed over: {error}"))
        })?;
        for (from, files) in all {
            links.connect(from, files).map_err(own)?;
        }
        self.links = Some(links);
        Ok(Reply::Done)
    }

    fn time(&self, call: Call, times: usize, captured: bool) -> Result<Reply, Trouble> {
        let bed = self.bed()?;
        let stream = &bed.stream;
        // Before the calls that meet: ranks take their time for it.
        let graph = match captured {
            true => Some(self.captured(bed, call, times)?),
            false => None,
        };
        self.prepare(bed, call)?;
        (0..CALLS_BEFORE).try_for_each(|_| self.enqueue(bed, call))?;
        stream.record(&bed.first).map_err(own)?;
        match &graph {
            Some(graph) => stream.launch_graph(graph).map_err(own)?,
            None => (0..times).try_for_each(|_| self.enqueue(bed, call))?,
        }
        stream.record(&bed.last).map_err(own)?;
        self.enqueue(bed, call)?;
        self.settle(bed)?;
        let milliseconds = bed.first.milliseconds_to(&bed.last).map_err(own)?;
        Ok(Reply::Took(f64::from(milliseconds) / 1e3 / times.max(1) as f64))
    }

    fn captured(
        &self,
        bed: &Bed,
        call: Call,
        times: usize,
    ) -> Result<Graph, Trouble> {
        let mut said = None;
        let graph = bed.stream.capture(|| {
            let enqueued = (0..times).try_for_each(|_| self.enqueue(bed, call));
            enqueued.map_err(|trouble| {
                said = Some(trouble);
                CudaError::NotCaptured { why: "a call of it".to_string() }
            })
        });
        graph.map_err(|error| said.unwrap_or_else(|| own(error)))
    }

    /// What a call finds where it begins.
    fn prepare(&self, bed: &Bed, call: Call) -> Result<(), Trouble> {
        let (whole, part) = bed.lens(call);
        let copied = |from: Buffer, to: Buffer| {
            bed.arena.copy(&bed.stream, from, to).map_err(own)
        };
        match (call.way, call.verb) {
            (Way::Windows, Verb::AllGather) => {
                let own = bed.to.slice(bed.rank as usize * part, part);
                copied(bed.from.slice(0, part), own)
            }
            (Way::Windows, Verb::ReduceScatter) => {
                copied(bed.from.slice(0, whole), bed.to.slice(0, whole))
            }
            (Way::Windows, Verb::AllToAll) => {
                let rows = rows_of(call.bytes / bed.world as usize) as u32;
                let starts: Vec<u32> = (0..=bed.world).map(|to| to * rows).collect();
                bed.arena.write(bed.starts, &starts).map_err(own)?;
                bed.arena.write(bed.places, &starts[..bed.places.len()]).map_err(own)
            }
            _ => Ok(()),
        }
    }

    fn enqueue(&self, bed: &Bed, call: Call) -> Result<(), Trouble> {
        match call.way {
            Way::Nccl => self.by_nccl(bed, call),
            Way::Windows => self.by_windows(bed, call),
        }
    }

    fn by_nccl(&self, bed: &Bed, call: Call) -> Result<(), Trouble> {
        let no_comm = || Trouble::Own("NCCL has not met".to_string());
        let comm = self.comm.as_ref().ok_or_else(no_comm)?;
        let (whole, part) = bed.lens(call);
        let span = |buffer: Buffer, len: usize| {
            let address = bed.arena.address(buffer.slice(0, len));
            // SAFETY: the arena is this GPU's and stays until the process ends.
            unsafe { Span::new(address, moejob_nccl::DType::Bf16, len) }
        };
        // SAFETY: a stream of this GPU, which stays as long.
        let on = unsafe { moejob_nccl::Stream::new(bed.stream.raw()) };
        let (from, to) = (bed.from, bed.to);
        match call.verb {
            Verb::AllToAll | Verb::Counts => {
                comm.all_to_all(span(from, whole), span(to, whole), on)
            }
            Verb::AllReduce => {
                comm.all_reduce(span(from, whole), span(to, whole), Reduce::Sum, on)
            }
            Verb::ReduceScatter => {
                comm.reduce_scatter(span(from, whole), span(to, part), Reduce::Sum, on)
            }
            Verb::AllGather => comm.all_gather(span(from, part), span(to, whole), on),
        }
        .map_err(by_nccl)
    }

    fn by_windows(&self, bed: &Bed, call: Call) -> Result<(), Trouble> {
        let none = || Trouble::Own("there are no windows".to_string());
        let links = self.links.as_ref().ok_or_else(none)?;
        let on = (&bed.stream, &bed.arena);
        let (whole, part) = bed.lens(call);
        let bytes = part * size_of::<bf16>();
        let row_bytes = row_bytes(bytes);
        let most = self.blocks;
        let rows = bed.to.slice(0, whole);
        let step = 0;
        match call.verb {
            Verb::AllToAll => {
                let room_rows = call.bytes / row_bytes;
                let blocks = blocks_for(call.bytes, most);
                let Bed { from, starts, places, .. } = *bed;
                let take = None;
                links.move_rows(on, &MoveRows {
                    from, row_bytes, take, starts, places, room: 0, room_rows, blocks, step,
                })
            }
            Verb::Counts => {
                let words = |buffer: Buffer| buffer.slice(0, whole).reinterpret(DType::U32);
                links.exchange_counts(on, words(bed.from), words(bed.to), step)
            }
            Verb::AllGather => {
                let (need, blocks) = (&bed.need(bytes), blocks_for(bytes, most));
                let (format, weights) = (None, None);
                links.gather_rows(on, &GatherRows { need, rows, format, weights, blocks, step })
            }
            Verb::ReduceScatter => {
                let (need, blocks) = (&bed.need(bytes), blocks_for(bytes, most));
                let (slots, onto) = (None, None);
                links.scatter_rows(on, &ScatterRows { need, rows, slots, onto, blocks, step })
            }
            Verb::AllReduce => {
                return Err(Trouble::Own("windows have no kernel for it".to_string()));
            }
        }
        .map_err(own)
    }

    /// Waits until all that is enqueued is done.
    fn settle(&self, bed: &Bed) -> Result<(), Trouble> {
        let began = Instant::now();
        while !bed.stream.is_idle().map_err(own)? {
            match began.elapsed() {
                spent if spent > CALLS_LIMIT => {
                    let limit = CALLS_LIMIT.as_secs();
                    return Err(Trouble::Waited(format!("it is not done in {limit} s")));
                }
                spent if spent > SPIN => std::thread::sleep(PAUSE),
                _ => std::hint::spin_loop(),
            }
        }
        if let Some(comm) = &self.comm {
            comm.poll().map_err(by_nccl)?;
        }
        let checked = self.links.as_ref().map_or(Ok(()), PeerLinks::check);
        checked.map_err(|failure| Trouble::Waited(failure.to_string()))
    }

    fn check(&self, call: Call) -> Result<Reply, Trouble> {
        /// Of no number that travels.
        const SPOILED: u8 = 0xff;
        let bed = self.bed()?;
        let (whole, part) = bed.lens(call);
        bed.arena.fill_bytes(&bed.stream, bed.to.slice(0, whole), SPOILED).map_err(own)?;
        let in_room = self.links.as_ref().filter(|_| {
            call.way == Way::Windows && call.verb == Verb::AllToAll
        });
        if let Some(links) = in_room {
            links.fill_room(&bed.stream, (0, call.bytes), SPOILED).map_err(own)?;
        }
        self.prepare(bed, call)?;
        self.enqueue(bed, call)?;
        if let Some(links) = in_room {
            let to = bed.to.slice(0, whole);
            links.copy_room((&bed.stream, &bed.arena), 0, to).map_err(own)?;
        }
        self.settle(bed)?;
        // Sums through windows lie where the rank's own rows lay.
        let in_place = call.way == Way::Windows && call.verb == Verb::ReduceScatter;
        let start = if in_place { bed.rank as usize * part } else { 0 };
        let result = bed.to.slice(start, result_len(call.verb, bed.world, part));
        let read = |at: usize, len: usize| {
            let mut found = vec![bf16::ZERO; len];
            bed.arena.read_into(result.slice(at, len), &mut found).map(|()| found)
        };
        match truth::check(call.verb, (bed.rank, bed.world), part, read).map_err(own)? {
            None => Ok(Reply::Done),
            Some(wrong) => {
                let truth::Wrong { at, found, expected } = wrong;
                let what = format!("word {at} of its result is {found}, and not {expected}");
                Err(Trouble::Own(what))
            }
        }
    }
}
