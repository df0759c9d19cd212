//! Rows and counts between the GPUs of a node, without NCCL and without the host.
//!
//! ```text
//! PeerLinks::new(compiler, desc)      own window: mail, then rooms for rows that arrive
//! share(memory)                       what the others may read where it lies, if anything
//! export() -> files to the others;    connect(position, files) for each of theirs
//! exchange_counts(..), move_rows(..)  one launch each, in one order on all ranks
//! gather_rows(..), scatter_rows(..)   likewise: tokens of an expert group (peer_group.rs)
//! check() -> PeerFailure              what a kernel waited for in vain, and whom for
//! ```
//! A kernel that waits has a deadline and looks at a flag of the host's (`stop`), so none hangs
//! because a peer is dead. Epochs are counted in device memory: a captured graph may hold these
//! launches. Links serve one stream. They are dropped when it is drained, never before.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, Source};
use crate::cuda::driver::{Arena, Function, Launch, PinnedBuffer, Stream, parameters};
use crate::cuda::error::CudaError;
use crate::cuda::window::Window;
use crate::ops::peer::group::GROUP_THREADS;
use crate::ops::peer::in_place::{InPlaceKernels, PAIR_THREADS};

/// GPUs of a node at most; `P` below is how many there are.
pub const PEERS_MAX: usize = 16;
/// Blocks of a launch at most.
pub(crate) const BLOCKS_MAX: usize = 256;
/// Words that a rank tells each other one at most.
pub const COUNTS_MAX: usize = 1024;
/// Where the rooms begin in a window: its mail takes less.
const ROOMS: usize = 1 << 19;
const THREADS: u32 = 1024;
/// Places in a peer's memory that a kernel may read.
pub(crate) const READS: usize = 3;
/// Words of the links' state in device memory, and of the host's control.
const STATE: usize = 4;
const CONTROL: usize = PASSED + 2 * COUNTERS;
/// Where words of 64 bits begin among them: what `count_rows` counts.
const PASSED: usize = 6;
pub(crate) const COUNTERS: usize = 2;

/// What all ranks of the node agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerDesc {
    /// `P`, and which of them this rank is.
    pub positions: usize,
    pub me: usize,
    /// Bytes of the rooms in each window.
    pub rooms: usize,
    /// How long a kernel waits for a peer.
    pub patience: Duration,
}

/// Rows to where the others want them.
///
/// Position p gets the rows `starts[p] .. starts[p + 1]` of the list; they begin at the row of its
/// room that it has put into `places[me]`. What it sends here begins at row `places[p]` of the room
/// here. A rank that still reads its room has not enqueued this yet: so nothing is overwritten.
#[derive(Clone, Copy, Debug)]
pub struct MoveRows {
    /// [any, `row_bytes`]
    pub from: Buffer,
    pub row_bytes: usize,
    /// u32 [rows]: which row of `from` is the i-th of the list; none: the i-th
    pub take: Option<Buffer>,
    /// u32 [P + 1]
    pub starts: Buffer,
    /// u32 [P]
    pub places: Buffer,
    /// Bytes from the begin of the rooms, and rows that are there, the same on every rank.
    pub room: usize,
    pub room_rows: usize,
    /// The same on every rank.
    pub blocks: usize,
    /// For the record of a failure.
    pub step: u32,
}

/// Whom a kernel waited for in vain. The contents of rooms and counts then say nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerFailure {
    pub what: Awaited,
    pub position: u32,
    /// Of the links: how many moves, or exchanges of counts, there were.
    pub epoch: u32,
    pub step: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// To be told where rows go.
    Place,
    Rows,
    Counts,
    /// Not awaited: the place it told lies outside its room.
    Room,
}

impl std::fmt::Display for PeerFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let PeerFailure { position, epoch, step, .. } = self;
        let what = match self.what {
            Awaited::Place => "did not say in time where its rows go",
            Awaited::Rows => "did not send its rows in time",
            Awaited::Counts => "did not tell its counts in time",
            Awaited::Room => "asked for rows outside its room",
        };
        write!(f, "the GPU at position {position} of this node {what}, step {step}, epoch {epoch}")
    }
}

impl std::error::Error for PeerFailure {}

/// `Links` of peer.cu
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LinksData {
    windows: [u64; PEERS_MAX],
    shared: [u64; PEERS_MAX],
    state: u64,
    control: u64,
    patience: u64,
    positions: u32,
    me: u32,
}

/// `Move` of peer.cu
#[repr(C)]
#[derive(Clone, Copy)]
struct MoveData {
    from: u64,
    take: u64,
    starts: u64,
    places: u64,
    room: u64,
    room_rows: u32,
    bytes: u32,
    lanes: u32,
    step: u32,
}

/// `Sources` of peer.cu
#[repr(C)]
#[derive(Clone, Copy)]
struct SourcesData {
    at: [u32; PEERS_MAX],
    count: u32,
}

/// The links of one rank to the others of its node.
#[derive(Debug)]
pub struct PeerLinks {
    desc: PeerDesc,
    move_rows: Function,
    exchange_counts: Function,
    return_order: Function,
    pub(crate) group: GroupKernels,
    pub(crate) in_place: InPlaceKernels,
    own: Window,
    theirs: Vec<Option<Window>>,
    /// What others may read of this rank's arena, and this one of theirs.
    shared: Option<Arc<Window>>,
    their_shared: Vec<Option<Window>>,
    state: Arena,
    state_at: Buffer,
    control: PinnedBuffer<u32>,
}

/// Those of peer_group.cu
#[derive(Debug)]
pub(crate) struct GroupKernels {
    /// As rows lie; F32 as bf16 and as fp8, Bf16 as fp8.
    pub gather: [Function; 4],
    /// By kind of rows: f32, bf16, f16.
    pub scatter: [Function; 3],
    pub count: Function,
}

impl PeerLinks {
    /// A window with nothing in it. All ranks make theirs before anyone opens another's.
    ///
    /// # Panics
    /// `desc` is none of a node.
    pub fn new(compiler: &Compiler, desc: PeerDesc) -> Result<PeerLinks, CudaError> {
        let PeerDesc { positions, me, rooms, .. } = desc;
        assert!(me < positions && positions <= PEERS_MAX, "{desc:?}");
        let gpu = compiler.gpu();
        let source = source(Arch::of(gpu)?.target());
        let modules = compiler.load(&[source], &|_, _| ())?;
        let function = |name: &str| modules[0].function(name);
        let own = Window::new(gpu, ROOMS + rooms)?;
        let mut plan = ArenaPlan::new();
        let state_at = plan.alloc(DType::U32, STATE);
        let state = Arena::new(gpu, plan.bytes())?;
        let links = PeerLinks {
            desc,
            move_rows: function("move_rows")?,
            exchange_counts: function("exchange_counts")?,
            return_order: function("return_order")?,
            group: GroupKernels {
                gather: [
                    function("gather_rows")?,
                    function("gather_f32_as_bf16")?,
                    function("gather_f32_as_fp8")?,
                    function("gather_bf16_as_fp8")?,
                ],
                scatter: [
                    function("scatter_f32")?,
                    function("scatter_bf16")?,
                    function("scatter_f16")?,
                ],
                count: function("count_rows")?,
            },
            in_place: InPlaceKernels::load(function)?,
            own,
            theirs: (0..positions).map(|_| None).collect(),
            shared: None,
            their_shared: (0..positions).map(|_| None).collect(),
            state,
            state_at,
            control: PinnedBuffer::new(gpu, CONTROL)?,
        };
        links.warm_up(&links.own.gpu().stream()?)?;
        Ok(links)
    }

    /// Launches every kernel once, alone: a kernel that the driver loads when it is first launched
    /// would wait for one that waits for it. So would a stream's first kernel. Leaves mail and
    /// state empty; nobody is connected yet.
    pub(crate) fn warm_up(&self, stream: &Stream) -> Result<(), CudaError> {
        let mail = self.own.address();
        let clear = || {
            self.state.fill_bytes(stream, self.state_at, 0)?;
            // SAFETY: the window is at least as long as its mail, and nobody else has it yet.
            unsafe { stream.fill_at(mail, 0, ROOMS) }
        };
        clear()?;
        let links = self.alone();
        // Words of the mail that are 0 are as good as any.
        let zeros = mail + (ROOMS / 2) as u64;
        let [room, none] = [0_u64; 2];
        let data = MoveData {
            from: mail,
            take: none,
            starts: zeros,
            places: zeros,
            room,
            room_rows: 0,
            bytes: 16,
            lanes: 4,
            step: 0,
        };
        let (len, step, once) = (0_u32, 0_u32, Launch::new(1, 32));
        let (sources, spare) = (SourcesData { at: [0; PEERS_MAX], count: 0 }, zeros + 64);
        // SAFETY: the parameters are those of the kernels; with no rows, counts and segments they
        // read and write a few words of the mail and the state.
        unsafe {
            self.move_rows.launch(stream, once, parameters![links, data])?;
            let parameters = parameters![links, zeros, spare, len, step];
            self.exchange_counts.launch(stream, once, parameters)?;
            let parameters = parameters![zeros, len, sources, len, spare, spare];
            self.return_order.launch(stream, once, parameters)?;
        }
        self.warm_up_group(stream)?;
        clear()?;
        stream.synchronize()
    }

    pub fn desc(&self) -> &PeerDesc {
        &self.desc
    }

    /// Lets the others read what of `arena` is planned for that. All ranks share as much, or none
    /// shares anything; before anybody exports.
    pub fn share(&mut self, arena: &Arena) {
        self.shared = arena.shared().cloned();
    }

    /// The window, and what is shared, for each of the others.
    ///
    /// # Errors
    /// The driver exports none.
    pub fn export(&self) -> Result<Vec<OwnedFd>, CudaError> {
        let shared = self.shared.iter().map(|shared| shared.export());
        std::iter::once(self.own.export()).chain(shared).collect()
    }

    /// Opens what `position` exported. Its rank has the same `rooms`.
    ///
    /// # Errors
    /// It cannot be mapped, or it is not as much as what is shared here.
    pub fn connect(&mut self, position: usize, files: Vec<OwnedFd>) -> Result<(), CudaError> {
        assert!(position < self.desc.positions && position != self.desc.me, "{position}");
        let mut files = files.into_iter();
        let mut open = |own: &Window| {
            let file = files.next().ok_or_else(|| CudaError::NotShared { position })?;
            Window::open(own.gpu(), file, own.bytes())
        };
        self.theirs[position] = Some(open(&self.own)?);
        self.their_shared[position] = self.shared.as_deref().map(open).transpose()?;
        Ok(())
    }

    /// An arena of `bytes`, and the buffer of its bytes that are the rooms here: what arrives needs
    /// no copy. It outlives no stream that uses it, see [`Arena::joined`].
    pub fn joined(&self, bytes: usize) -> Result<(Arena, Buffer), CudaError> {
        let arena = Arena::joined(self.own.gpu(), bytes, &self.own)?;
        let mut plan = ArenaPlan::new();
        plan.alloc(DType::U8, arena.bytes() - self.own.bytes() + ROOMS);
        let rooms = plan.alloc(DType::U8, self.desc.rooms);
        Ok((arena, rooms))
    }

    /// The device address of the rooms here.
    pub fn rooms(&self) -> u64 {
        self.own.address() + ROOMS as u64
    }

    /// What the kernels of these links failed at first; none so far. Waits for nothing, calls no
    /// driver.
    pub fn check(&self) -> Result<(), PeerFailure> {
        // SAFETY: pinned memory of ours; the device writes whole words, the first one last.
        let word = |at: usize| unsafe { self.control.start().add(at).read_volatile() };
        let what = match word(1) {
            0 => return Ok(()),
            1 => Awaited::Place,
            2 => Awaited::Rows,
            3 => Awaited::Counts,
            _ => Awaited::Room,
        };
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        Err(PeerFailure { what, position: word(2), epoch: word(3), step: word(4) })
    }

    /// What `count_rows` has counted so far, by counter. Waits for nothing.
    pub(crate) fn passed(&self) -> [u64; COUNTERS] {
        // SAFETY: pinned memory of ours, with a whole word there; the device writes it at once.
        let word = |at| unsafe {
            self.control.start().add(PASSED).cast::<u64>().add(at).read_volatile()
        };
        std::array::from_fn(word)
    }

    /// Ends every wait of the kernels of these links, now and from here on.
    pub fn stop(&self) {
        // SAFETY: pinned memory of ours, of which the host writes this word alone.
        unsafe { self.control.start().write_volatile(1) };
    }

    /// Links of one position, which knows nobody.
    pub(crate) fn alone(&self) -> LinksData {
        let (mut windows, mut shared) = ([0; PEERS_MAX], [0; PEERS_MAX]);
        windows[0] = self.own.address();
        // Of nobody's tokens nothing is read there.
        shared[0] = windows[0];
        LinksData { positions: 1, me: 0, ..self.data_of(windows, shared) }
    }

    pub(crate) fn data(&self) -> LinksData {
        let mut windows = [0; PEERS_MAX];
        for (position, (to, theirs)) in windows.iter_mut().zip(&self.theirs).enumerate() {
            *to = match theirs {
                _ if position == self.desc.me => self.own.address(),
                Some(window) => window.address(),
                None => panic!("position {position} is not connected"),
            };
        }
        let mut shared = [0; PEERS_MAX];
        if let Some(own) = &self.shared {
            for (position, (to, theirs)) in shared.iter_mut().zip(&self.their_shared).enumerate() {
                let own = (position == self.desc.me).then_some(&**own);
                *to = own.or(theirs.as_ref()).map_or(0, Window::address);
            }
        }
        self.data_of(windows, shared)
    }

    /// Where these begin in what the others may read, 0 for what there is not; none: they may not
    /// read all of them.
    pub(crate) fn places(&self, read: [Option<Buffer>; READS]) -> Option<[u64; READS]> {
        self.shared.as_ref()?;
        let mut places = [0; READS];
        for (place, buffer) in places.iter_mut().zip(read) {
            *place = buffer.map_or(Some(0), |buffer| buffer.offset_shared())? as u64;
        }
        Some(places)
    }

    fn data_of(&self, windows: [u64; PEERS_MAX], shared: [u64; PEERS_MAX]) -> LinksData {
        LinksData {
            windows,
            shared,
            state: self.state.address(self.state_at),
            control: self.control.start().expose_provenance() as u64,
            patience: u64::try_from(self.desc.patience.as_nanos()).unwrap_or(u64::MAX),
            positions: self.desc.positions as u32,
            me: self.desc.me as u32,
        }
    }

    /// `out` [P, n] = what each position has for this rank; `values` [P, n] is what it is told.
    pub fn exchange_counts(
        &self,
        (stream, arena): (&Stream, &Arena),
        values: Buffer,
        out: Buffer,
        step: u32,
    ) -> Result<(), CudaError> {
        assert_eq!((values.dtype(), values.len()), (DType::U32, out.len()), "{values:?}");
        let len = values.len() / self.desc.positions;
        let whole = values.len().is_multiple_of(self.desc.positions);
        assert!(out.dtype() == DType::U32 && whole && len <= COUNTS_MAX, "{out:?}");
        let (links, values, out) = (self.data(), arena.address(values), arena.address(out));
        let threads = (len * self.desc.positions).next_multiple_of(32).clamp(32, THREADS as usize);
        let launch = Launch::new(1, threads as u32);
        let len = len as u32;
        // SAFETY: the parameters are those of `exchange_counts`; ranges were checked.
        unsafe {
            let parameters = parameters![links, values, out, len, step];
            self.exchange_counts.launch(stream, launch, parameters)
        }
    }

    /// See [`MoveRows`].
    pub fn move_rows(
        &self,
        (stream, arena): (&Stream, &Arena),
        op: &MoveRows,
    ) -> Result<(), CudaError> {
        let positions = self.desc.positions;
        let words = |buffer: Buffer, len: usize| {
            assert_eq!((buffer.dtype(), buffer.len()), (DType::U32, len), "{buffer:?}");
            arena.address(buffer)
        };
        let sizes = [op.row_bytes, op.room, op.from.offset()];
        let rows = op.row_bytes > 0 && sizes.iter().all(|bytes| bytes.is_multiple_of(16));
        let room = op.room + op.room_rows * op.row_bytes;
        assert!(rows && room <= self.desc.rooms, "{op:?}");
        assert!((1..=BLOCKS_MAX).contains(&op.blocks), "{op:?}");
        if let Some(take) = op.take {
            assert_eq!(take.dtype(), DType::U32, "{take:?}");
        }
        let data = MoveData {
            from: arena.address(op.from),
            take: op.take.map_or(0, |take| arena.address(take)),
            starts: words(op.starts, positions + 1),
            places: words(op.places, positions),
            room: op.room as u64,
            room_rows: u32::try_from(op.room_rows).expect("rows of a room fit in 32 bits"),
            bytes: u32::try_from(op.row_bytes).expect("bytes of a row fit in 32 bits"),
            lanes: lanes(op.row_bytes),
            step: op.step,
        };
        let links = self.data();
        // SAFETY: the parameters are those of `move_rows`; rooms are checked on the device, and
        // what the lists of rows name is the caller's, as with every op.
        unsafe {
            let parameters = parameters![links, data];
            self.move_rows.launch(stream, Launch::new(op.blocks, THREADS), parameters)
        }
    }

    /// Rows by (expert here, source, token) become a list by (source, expert, token), for
    /// [`MoveRows`]: `take` [rows] and `starts` [P + 1]. `segments` [G * S + 1] are those of
    /// the rows here; `sources` are the positions of its sources, rising.
    pub fn return_order(
        &self,
        (stream, arena): (&Stream, &Arena),
        (segments, sources): (Buffer, &[usize]),
        (take, starts): (Buffer, Buffer),
    ) -> Result<(), CudaError> {
        let (count, positions) = (sources.len(), self.desc.positions);
        let rising = sources.is_sorted_by(|a, b| a < b) && sources.iter().all(|s| *s < positions);
        assert!(count > 0 && rising, "{sources:?}");
        let locals = (segments.len() - 1) / count;
        assert_eq!(segments.len(), locals * count + 1, "{segments:?}");
        assert_eq!((starts.dtype(), starts.len()), (DType::U32, positions + 1), "{starts:?}");
        assert!(segments.dtype() == DType::U32 && take.dtype() == DType::U32, "{take:?}");
        let mut data = SourcesData { at: [0; PEERS_MAX], count: count as u32 };
        for (to, from) in data.at.iter_mut().zip(sources) {
            *to = *from as u32;
        }
        let [segments, take, starts] = [segments, take, starts].map(|b| arena.address(b));
        let (locals, positions) = (locals as u32, positions as u32);
        // SAFETY: the parameters are those of `return_order`; segments end within `take`, as in
        // every op that reads them.
        unsafe {
            let parameters = parameters![segments, locals, data, positions, take, starts];
            self.return_order.launch(stream, Launch::new(1, THREADS), parameters)
        }
    }

    /// Sets `bytes` bytes that lie `room` bytes into the rooms here, in the order of `stream`.
    pub fn fill_room(
        &self,
        stream: &Stream,
        (room, bytes): (usize, usize),
        byte: u8,
    ) -> Result<(), CudaError> {
        assert!(room + bytes <= self.desc.rooms, "{bytes} bytes from {room}");
        // SAFETY: the range was checked.
        unsafe { stream.fill_at(self.rooms() + room as u64, byte, bytes) }
    }

    /// Copies what lies `room` bytes into the rooms here to `to`, in the order of `stream`.
    pub fn copy_room(
        &self,
        (stream, arena): (&Stream, &Arena),
        room: usize,
        to: Buffer,
    ) -> Result<(), CudaError> {
        assert!(room + to.bytes() <= self.desc.rooms, "{to:?} from {room}");
        let from = self.rooms() + room as u64;
        // SAFETY: both ranges were checked, and a window shares no byte with an arena.
        unsafe { stream.copy_at(from, arena.address(to), to.bytes()) }
    }
}

impl Drop for PeerLinks {
    /// Whichever thread drops them: their memory is given back in its context.
    fn drop(&mut self) {
        let _ = self.own.gpu().make_current();
    }
}

/// Threads that share a row: eight chunks of 16 bytes a thread keep a link busy.
pub(crate) fn lanes(row_bytes: usize) -> u32 {
    (row_bytes / 128).next_power_of_two().clamp(4, 32) as u32
}

/// The kernels for `target`.
pub(crate) fn source(target: &'static str) -> Source {
    let macros = [
        ("ELEMENT", 0),
        ("PEERS_MAX", PEERS_MAX),
        ("BLOCKS_MAX", BLOCKS_MAX),
        ("COUNTS_MAX", COUNTS_MAX),
        ("ROOMS", ROOMS),
        ("READS", READS),
        ("GROUP_THREADS", GROUP_THREADS as usize),
        ("PAIR_THREADS", PAIR_THREADS as usize),
        ("PASSED", PASSED),
    ];
    let parts =
        [
            include_str!("../wire/wire.cu"),
            include_str!("peer.cu"),
            include_str!("peer_group.cu"),
            include_str!("peer_in_place.cu"),
            include_str!("peer_count.cu"),
        ];
    Source::new("peer links".to_owned(), target, &macros, &parts)
}
