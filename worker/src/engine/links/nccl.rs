//! Verbs between GPUs, by NCCL: enqueued on the device's stream, and nobody waits.
//!
//! ```text
//! begin:   versions, then an id of rank 0, through the gang
//! meet:    on a thread of its own, while the state comes back:
//!          one communicator of all ranks
//!          -> splits for the other sets of ranks that share buffers, one for all that are apart
//!          -> where buckets travel beside the ops: others for their sets
//!          -> a word by each way that steps take, because NCCL opens a way with its first use
//!          -> its log is read: what it says it has built
//! verb:    all buffers of a communicator as one group
//! watch:   while the host waits for the device: abort flag, peers that left, asynchronous errors
//! leave:   revoke, drain, abort
//! ```
//! A lane has communicators of its own, since NCCL does what is enqueued on one communicator in one
//! order. Every rank enqueues all verbs, of both lanes, in the same order.
//!
//! Neither a kernel nor NCCL notices that a peer is dead. Its worker does, ends its pipes and
//! aborts the others; the watch sees that, the wait is given up, and the attempt ends.

use super::meet::{Met, Party, Room, agree, name_of_all};
use super::{Aside, Groups, NotLeft, Parcel, Shared};
use crate::failure::chain;
use crate::gang::comm::{Comm, CommError, Lookout};
use moejob_kernels::cuda::{Beside, CudaDevice, CudaError, Gpu, Watch};
use moejob_kernels::{Buffer, DType, Device};
use moejob_nccl::{
    Config, Enter, Error, Group, Library, Reduce, Seat, Span, Stream, abandon,
};
use moejob_protocol::links::Built;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What an attempt's end may take before the process is given up: it takes 0.3 to 1.3 s, and an
/// abort behind a link that failed may never return.
const LEAVE_MAX: Duration = Duration::from_secs(2);
/// After the end of an attempt whoever drives the device leaves within.
const LEAVE_BY_ITSELF: Duration = Duration::from_millis(300);
/// Between two looks at the group while NCCL works on the host.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Why GPUs were not connected.
#[derive(Debug, thiserror::Error)]
pub enum NoLinks {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("the GPUs of {world} ranks cannot be connected")]
    Nccl { world: u32, source: Error },
    #[error("there is no thread to meet the other ranks on")]
    Thread { source: std::io::Error },
    #[error("the GPU has no {what}")]
    Device { what: &'static str, source: CudaError },
    #[error("rank {rank} cannot be connected: {why}")]
    Elsewhere { rank: u32, why: String },
}

impl NoLinks {
    /// Nothing is missing: something refused in the midst of work, or a GPU's memory is full. A
    /// process that begins anew may not meet it.
    pub fn is_of_process(&self) -> bool {
        match self {
            NoLinks::Device { source, .. } => source.is_of_process(),
            NoLinks::Nccl { source, .. } => source.is_of_process(),
            NoLinks::Thread { .. } => true,
            NoLinks::Comm(_) | NoLinks::Elsewhere { .. } => false,
        }
    }

    /// It was this GPU, or NCCL on it, that refused. Memory may be others', and so are threads.
    pub fn is_own(&self) -> bool {
        match self {
            NoLinks::Device { source, .. } => !source.is_room(),
            NoLinks::Nccl { source, .. } => source.is_own(),
            NoLinks::Thread { .. } | NoLinks::Comm(_) | NoLinks::Elsewhere { .. } => false,
        }
    }
}

/// Where a verb is enqueued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Among the ops.
    Ops,
    /// Beside them.
    Aside,
}

#[derive(Debug)]
pub(super) struct Joined {
    pub lane: Lane,
    pub ranks: Vec<u32>,
    pub comm: moejob_nccl::Comm,
}

#[derive(Debug)]
pub(super) struct Nccl {
    shared: Arc<Connections>,
    me: u32,
    world: u32,
    /// Until [`Nccl::meet`].
    meeting: Option<JoinHandle<Result<Met, Error>>>,
    /// From then on, until somebody takes it.
    built: Option<Built>,
}

/// What the verbs use and the watch looks at.
#[derive(Debug)]
struct Connections {
    lookout: Lookout,
    /// Raised to end waits inside of NCCL.
    stop: Arc<AtomicBool>,
    /// That of all ranks among the ops first.
    comms: Mutex<Vec<Joined>>,
}

/// How threads that end a communicator enter its GPU.
pub(crate) fn entry(gpu: &Gpu) -> Enter {
    let gpu = gpu.clone();
    // A context that is broken says so elsewhere.
    Enter::new(move || drop(gpu.make_current()))
}

impl Nccl {
    /// Agrees with the other ranks on how they meet, and lets them meet on another thread.
    pub fn begin(
        comm: &mut Comm,
        device: &mut Device,
        groups: &Groups,
        aside: Option<&Aside>,
    ) -> Result<Nccl, NoLinks> {
        let (me, world) = (comm.rank(), comm.world());
        let library = agree(comm, Library::load())?;
        let stop = Arc::<AtomicBool>::default();
        let id = name_of_all(comm, &library)?;
        let cuda = device.as_cuda_mut().expect("NCCL is between GPUs");
        if let Some(Aside { marks, overlap, .. }) = aside {
            let how = Beside { marks: *marks, free: overlap.free };
            let what = "lane for what passes between GPUs";
            cuda.open_comm_lane(&how).map_err(|source| NoLinks::Device { what, source })?;
        }
        let what = "memory for the first words between GPUs";
        let room = Room::new(cuda.gpu(), world);
        let room = room.map_err(|source| NoLinks::Device { what, source })?;
        let party = Party {
            gpu: cuda.gpu().clone(),
            room,
            seat: Seat { rank: me, world },
            config: Config {
                stop: Arc::clone(&stop),
                enter: Some(entry(cuda.gpu())),
                ..Config::for_ranks(world)
            },
            groups: groups.clone(),
            aside: aside.cloned(),
            library,
            id,
        };
        let thread = std::thread::Builder::new().name("meet".to_string());
        let meeting = thread.spawn(move || party.meet());
        let meeting = meeting.map_err(|source| NoLinks::Thread { source })?;
        let (lookout, comms) = (comm.lookout(), Mutex::default());
        let shared = Arc::new(Connections { lookout, stop, comms });
        let watched = Arc::downgrade(&shared);
        // Without it a dead peer is noticed at the limits of NCCL's calls.
        let thread = std::thread::Builder::new().name("lookout".to_string());
        let _ = thread.spawn(move || watch_over(&watched));
        cuda.watch(Arc::<Connections>::clone(&shared));
        Ok(Nccl { shared, me, world, meeting: Some(meeting), built: None })
    }

    /// Waits until all ranks are connected. Before that there are no verbs.
    pub fn meet(&mut self) -> Result<(), NoLinks> {
        let Some(meeting) = self.meeting.take() else { return Ok(()) };
        let met = meeting.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let Met { joined, built } = met.map_err(|source| {
            // A peer that is late or gone, or a network that failed: the next attempt may do
            // better.
            let aborted = CommError::Aborted { reason: chain(&source) };
            NoLinks::Comm(self.shared.lookout.look().err().unwrap_or(aborted))
        })?;
        tracing::info!(world = self.world, "GPUs are connected");
        *self.shared.comms() = joined;
        self.built = Some(built);
        Ok(())
    }

    /// What NCCL says it has built, once.
    pub fn take_built(&mut self) -> Option<Built> {
        self.built.take()
    }

    pub fn check(&self) -> Result<(), CommError> {
        self.shared.lookout.look()
    }

    pub fn reduce_scatter(
        &self,
        device: &Device,
        all: &[Shared],
        lane: Lane,
    ) -> Result<(), CommError> {
        let (cuda, stream) = target(device, lane);
        self.by_group(all, lane, |group, chunks| {
            let (from, to) = (span(cuda, chunks.all()), span(cuda, chunks.own()));
            group.reduce_scatter(from, to, Reduce::Sum, stream)
        })
    }

    pub fn all_gather(
        &self,
        device: &Device,
        all: &[Shared],
        lane: Lane,
    ) -> Result<(), CommError> {
        let (cuda, stream) = target(device, lane);
        self.by_group(all, lane, |group, chunks| {
            let (from, to) = (span(cuda, chunks.own()), span(cuda, chunks.all()));
            group.all_gather(from, to, stream)
        })
    }

    pub fn all_reduce(&self, device: &Device, all: &[Buffer]) -> Result<(), CommError> {
        let (cuda, stream) = target(device, Lane::Ops);
        let comms = self.shared.comms();
        let Some(of_all) = comms.first() else { return Ok(()) };
        all.iter().try_for_each(|buffer| {
            let whole = span(cuda, *buffer);
            self.told(of_all.comm.all_reduce(whole, whole, Reduce::Sum, stream))
        })
    }

    /// Pieces of a parcel travel one by one: both ends cut it alike. What stays here is copied.
    pub fn exchange(
        &self,
        device: &mut Device,
        sends: &[Parcel],
        receives: &[Parcel],
    ) -> Result<(), CommError> {
        let own = |parcels: &[Parcel]| -> Vec<Buffer> {
            let own = parcels.iter().filter(|(rank, _)| *rank == self.me);
            own.flat_map(|(_, parts)| parts).filter(|part| !part.is_empty()).copied().collect()
        };
        for (from, to) in own(sends).into_iter().zip(own(receives)) {
            device.copy(from, to);
        }
        let (cuda, stream) = target(device, Lane::Ops);
        let others = |parcels: &[Parcel]| -> Vec<(u32, Span)> {
            let others = parcels.iter().filter(|(rank, _)| *rank != self.me);
            let parts = others.flat_map(|(rank, parts)| parts.iter().map(|part| (*rank, *part)));
            parts.map(|(rank, part)| (rank, span(cuda, part))).collect()
        };
        let (sends, receives) = (others(sends), others(receives));
        let comms = self.shared.comms();
        let Some(Joined { comm, .. }) = comms.first() else { return Ok(()) };
        self.told(comm.group(|group| {
            sends.iter().try_for_each(|(to, part)| group.send(*part, *to, stream))?;
            receives.iter().try_for_each(|(from, part)| group.recv(*part, *from, stream))
        }))
    }

    /// Calls `verb` with the chunks of what this rank holds, communicator by communicator.
    fn by_group(
        &self,
        all: &[Shared],
        lane: Lane,
        mut verb: impl FnMut(&Group, &super::Chunks) -> Result<(), Error>,
    ) -> Result<(), CommError> {
        let comms = self.shared.comms();
        for Joined { ranks, comm, .. } in comms.iter().filter(|joined| joined.lane == lane) {
            let theirs = all.iter().filter(|shared| shared.holders == ranks);
            let chunks: Vec<_> = theirs.filter_map(|shared| shared.chunks(self.me)).collect();
            if !chunks.is_empty() {
                let enqueued =
                    comm.group(|group| chunks.iter().try_for_each(|of| verb(group, of)));
                self.told(enqueued)?;
            }
        }
        Ok(())
    }

    /// What the gang says of a failure says more than NCCL does.
    fn told(&self, result: Result<(), Error>) -> Result<(), CommError> {
        let Err(error) = result else { return Ok(()) };
        self.shared.lookout.look()?;
        Err(CommError::Aborted { reason: chain(&error) })
    }

    pub fn leave(&mut self, device: &Device) -> Result<(), NotLeft> {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = self.meet();
        // Of a context that is broken nothing ends any more but with the process.
        let idle = || device.as_cuda().map_or(Ok(true), CudaDevice::is_idle);
        idle().map_err(|error| NotLeft::broken(&error))?;
        let comms = std::mem::take(&mut *self.shared.comms());
        // Those of fewer ranks first: an idle one does not end while its parent is busy.
        let comms = comms.into_iter().rev().map(|joined| joined.comm).collect();
        let drained = || device.as_cuda().is_none_or(|cuda| cuda.is_idle().unwrap_or(true));
        abandon(comms, drained, (), LEAVE_MAX).map_err(|error| NotLeft::waits(&error))?;
        // NCCL may have been the first to see that the context is broken.
        idle().map(|_| ()).map_err(|error| NotLeft::broken(&error))
    }
}

/// Looks after the attempt on a thread of its own, as long as there are connections. When it is
/// over, waits inside of NCCL end. Where whoever drives the device does not leave then, a full
/// queue of launches may hold it: what fills the queue waits for a peer, and ends when its
/// communicator is revoked.
fn watch_over(connections: &Weak<Connections>) {
    let mut over = None;
    let mut revoked = false;
    while let Some(here) = connections.upgrade() {
        if here.lookout.look().is_err() {
            here.stop.store(true, Ordering::Relaxed);
            let since = *over.get_or_insert_with(Instant::now);
            if since.elapsed() > LEAVE_BY_ITSELF && !revoked {
                // Those that are being left are not here any more.
                here.comms().iter().for_each(|joined| drop(joined.comm.revoke()));
                revoked = true;
            }
        }
        drop(here);
        std::thread::sleep(LOOK_EVERY);
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // It uses the device, which ends after its links.
        if let Some(meeting) = self.meeting.take() {
            drop(meeting.join());
        }
    }
}

impl Connections {
    fn comms(&self) -> MutexGuard<'_, Vec<Joined>> {
        self.comms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Connections {
    fn given_up(&self) -> Option<String> {
        if let Err(error) = self.lookout.look() {
            return Some(error.to_string());
        }
        let failed = self.comms().iter().find_map(|joined| joined.comm.poll().err());
        failed.map(|error| chain(&error))
    }
}

fn target(device: &Device, lane: Lane) -> (&CudaDevice, Stream) {
    let cuda = device.as_cuda().expect("NCCL is between GPUs");
    let stream = match lane {
        Lane::Ops => cuda.stream(),
        Lane::Aside => cuda.comm_stream().expect("opened with its communicators"),
    };
    // SAFETY: a stream of the device on which the communicators were made. It is destroyed with the
    // device, before which the links are left.
    (cuda, unsafe { Stream::new(stream.raw()) })
}

fn span(cuda: &CudaDevice, buffer: Buffer) -> Span {
    let dtype = match buffer.dtype() {
        DType::F32 => moejob_nccl::DType::F32,
        DType::F64 => moejob_nccl::DType::F64,
        DType::Bf16 => moejob_nccl::DType::Bf16,
        DType::F16 => moejob_nccl::DType::F16,
        DType::U32 => moejob_nccl::DType::U32,
        DType::U8 => moejob_nccl::DType::U8,
        DType::I16 => panic!("halves of masters do not travel"),
        DType::Pair => panic!("sums of fp64 are of processors"),
    };
    // SAFETY: a buffer of the device's arena. Ops use it in the order of their stream, in which a
    // verb among them stands; a verb beside them follows those that were enqueued before it
    // (`hand_over`), and those behind it wait for its mark. The arena stays until the links are
    // left.
    unsafe { Span::new(cuda.address(buffer), dtype, buffer.len()) }
}
