//! Tokens of an expert group through windows: each to the ranks that have one of its experts, and
//! what these make of it back, summed.
//!
//! ```text
//! gather_rows:  rows [P T, D], own ones there -> those whose tokens chose an expert here; they may
//!               travel in a narrower format, of which all read what it stands for
//! scatter_rows: rows [P T, D], what is added here to each token -> own ones: sums over all ranks
//! ```
//! `P` positions have `T` tokens each, `K` choices a token. Who needs what follows from the ids of
//! all tokens, which `gather_rows` brings along in forward. No size depends on them, so the rooms
//! hold the worst case ([`rooms_of_group`]).
//!
//! Where all that others read lies in what ranks share, it is read there (peer_in_place.rs).
//! Otherwise, where rows are packed or the group lies on several nodes, it is laid into windows.
//!
//! A group may lie on `N` nodes with `P` ranks each, of which the links join one. Rows are then
//! [N P T, D] by (node, position, token), and a position's own ones those of its place on every
//! node, `N T`: others bring them there, and carry the node's sums of them on.

use crate::buffer::{Buffer, DType};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Launch, Stream, parameters};
use crate::cuda::error::CudaError;
use crate::error::LayerError;
use crate::ops::peer::cuda::{BLOCKS_MAX, PEERS_MAX, PeerDesc, PeerLinks, lanes};
use crate::ops::peer::op::{GatherRows, Need, ScatterRows};
use crate::ops::wire::op::WireFormat;

/// Threads of a block; with twice as many a thread would have too few registers for its row.
pub(crate) const GROUP_THREADS: u32 = 512;
/// Bytes of rows that a block lays before it says so: the links are busy from there on.
const CHUNK_BYTES: usize = 64 << 10;

/// Tokens of a chunk, the same on every rank.
fn chunk(row_bytes: usize) -> u32 {
    (CHUNK_BYTES / row_bytes).clamp(8, 1 << 10) as u32
}

/// `Need` of peer_group.cu
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NeedData {
    ids: u64,
    present: u32,
    first: [u32; PEERS_MAX],
    count: [u32; PEERS_MAX],
    tokens: u32,
    top_k: u32,
    nodes: u32,
}

/// `Gather` of peer_group.cu
#[repr(C)]
#[derive(Clone, Copy)]
struct GatherData {
    need: NeedData,
    rows: u64,
    words: [u64; 2],
    room: u64,
    bytes: u32,
    wire: u32,
    dim: u32,
    lanes: u32,
    chunk: u32,
    step: u32,
}

/// `Scatter` of peer_group.cu
#[repr(C)]
#[derive(Clone, Copy)]
struct ScatterData {
    need: NeedData,
    rows: u64,
    slots: u64,
    onto: [u64; 2],
    room: u64,
    bytes: u32,
    lanes: u32,
    chunk: u32,
    step: u32,
}

/// Bytes of rooms for the tokens of a group: `tokens` of each of `positions`, on all nodes
/// together, with rows of so many bytes out and back and `top_k` choices.
pub fn rooms_of_group(
    positions: usize,
    tokens: usize,
    [out, back]: [usize; 2],
    top_k: usize,
) -> usize {
    let gathered = tokens * (out + 2 * 4 * top_k);
    let scattered = (positions - 1) * tokens * (back + 4 * top_k);
    gathered.max(scattered)
}

impl Need {
    /// The same of rows of which each is a choice of its own: [N P T K, D].
    #[must_use]
    pub fn of_choices(&self) -> Need {
        Need { tokens: self.tokens * self.top_k, top_k: 1, ..self.clone() }
    }

    pub(crate) fn data(&self, desc: &PeerDesc, arena: &Arena) -> NeedData {
        let (positions, ranks) = (desc.positions, self.nodes * desc.positions);
        let slots = ranks * self.tokens * self.top_k;
        assert_eq!((self.ids.dtype(), self.ids.len()), (DType::U32, slots), "{self:?}");
        assert!(self.experts.len() == ranks && self.present <= ranks, "{self:?}");
        assert!(self.node < self.nodes, "{self:?}");
        let (mut first, mut count) = ([0; PEERS_MAX], [0; PEERS_MAX]);
        let here = &self.experts[self.node * positions..][..positions];
        for (at, (begin, len)) in here.iter().enumerate() {
            (first[at], count[at]) = (*begin, *len);
        }
        let number = |n: usize| u32::try_from(n).expect("tokens and choices fit in 32 bits");
        assert!(u32::try_from(ranks * self.tokens).is_ok(), "{self:?}");
        let (tokens, top_k, nodes) =
            (number(self.tokens), number(self.top_k), number(self.nodes));
        NeedData {
            ids: arena.address(self.ids),
            present: number(self.present),
            first,
            count,
            tokens,
            top_k,
            nodes,
        }
    }

    /// Bytes of a row of `rows`, with all lengths checked but that of the rooms.
    fn row_bytes(&self, desc: &PeerDesc, rows: Buffer, slots: Option<Buffer>) -> usize {
        let all = desc.positions * self.nodes * self.tokens;
        assert!(all > 0 && rows.len().is_multiple_of(all), "{rows:?} of {self:?}");
        let bytes = rows.bytes() / all;
        let aligned = [bytes, rows.offset()].iter().all(|at| at.is_multiple_of(16));
        assert!(bytes > 0 && aligned, "{rows:?} of {self:?}");
        if let Some(slots) = slots {
            let expected = (DType::F32, all * self.top_k);
            assert_eq!((slots.dtype(), slots.len()), expected, "{slots:?}");
        }
        bytes
    }

    /// That rows of so many bytes, out and back, find room.
    fn check_rooms(&self, desc: &PeerDesc, rows: [usize; 2]) {
        let own = self.nodes * self.tokens;
        let rooms = rooms_of_group(desc.positions, own, rows, self.top_k);
        assert!(rooms <= desc.rooms, "rows of {rows:?} bytes in {desc:?}");
    }
}

/// Which kernel gathers rows of a kind in a format.
///
/// # Panics
/// None does.
fn gather_of(format: Option<WireFormat>, rows: DType) -> usize {
    match (format, rows) {
        (None, _) => 0,
        (Some(WireFormat::Bf16), DType::F32) => 1,
        (Some(WireFormat::Fp8), DType::F32) => 2,
        (Some(WireFormat::Fp8), DType::Bf16) => 3,
        (Some(format), rows) => panic!("rows of {rows:?} do not travel as {format:?}"),
    }
}

impl PeerLinks {
    /// See [`GatherRows`].
    ///
    /// # Errors
    /// It cannot be enqueued.
    ///
    /// # Panics
    /// Lengths do not fit.
    pub fn gather_rows(
        &self,
        (stream, arena): (&Stream, &Arena),
        op: &GatherRows,
    ) -> Result<(), CudaError> {
        let desc = self.desc();
        let bytes = op.need.row_bytes(desc, op.rows, op.weights);
        let need = op.need.data(desc, arena);
        let words = op.weights.map_or([0; 2], |weights| [need.ids, arena.address(weights)]);
        let dim = bytes / op.rows.dtype().size();
        let wire = op.format.map_or(bytes, |format| format.row_bytes(dim));
        let whole = op.format.is_none() || dim.is_multiple_of(16);
        assert!(whole && wire.is_multiple_of(16), "{op:?}");
        assert!((1..=BLOCKS_MAX).contains(&op.blocks), "{op:?}");
        let ids = op.weights.map(|_| op.need.ids);
        let places = self.places([Some(op.rows), ids, op.weights]);
        let whole = op.need.nodes == 1 && op.format.is_none();
        if let Some(reads) = places.filter(|_| whole) {
            let sizes = (bytes as u32, lanes(bytes));
            return self.gather_in_place((stream, arena), op, (need, words, reads), sizes);
        }
        op.need.check_rooms(desc, [wire, 0]);
        let kernel = &self.group.gather[gather_of(op.format, op.rows.dtype())];
        let data = GatherData {
            need,
            rows: arena.address(op.rows),
            words,
            room: 0,
            bytes: bytes as u32,
            wire: wire as u32,
            dim: dim as u32,
            lanes: lanes(wire),
            chunk: chunk(wire),
            step: op.step,
        };
        let (links, launch) = (self.data(), Launch::new(op.blocks, GROUP_THREADS));
        // SAFETY: the parameters are those of `gather_..`; buffers and rooms were checked.
        unsafe { kernel.launch(stream, launch, parameters![links, data]) }
    }

    /// See [`ScatterRows`].
    ///
    /// # Errors
    /// It cannot be enqueued.
    ///
    /// # Panics
    /// Lengths do not fit, or rows are of a kind that has no sum here.
    pub fn scatter_rows(
        &self,
        (stream, arena): (&Stream, &Arena),
        op: &ScatterRows,
    ) -> Result<(), CudaError> {
        let desc = self.desc();
        let bytes = op.need.row_bytes(desc, op.rows, op.slots);
        assert!((1..=BLOCKS_MAX).contains(&op.blocks), "{op:?}");
        let kind = match op.rows.dtype() {
            DType::F32 => 0,
            DType::Bf16 => 1,
            DType::F16 => 2,
            other => panic!("rows of {other:?} are not summed"),
        };
        let onto = op.onto.map_or([0; 2], |onto| {
            onto.map(|of| {
                let own = op.rows.len() / desc.positions;
                let right = of.dtype() == op.rows.dtype() && of.len() == own && op.need.nodes == 1;
                assert!(right && of.offset().is_multiple_of(16), "{op:?}");
                arena.address(of)
            })
        });
        let need = op.need.data(desc, arena);
        let slots = op.slots.map_or(0, |slots| arena.address(slots));
        let places = self.places([Some(op.rows), op.slots, None]);
        if let Some(reads) = places.filter(|_| op.need.nodes == 1) {
            let (sizes, to) = ((bytes as u32, lanes(bytes)), (slots, onto));
            return self.scatter_in_place((stream, arena), op, (need, to, reads, kind), sizes);
        }
        op.need.check_rooms(desc, [0, bytes]);
        let data = ScatterData {
            onto,
            need,
            rows: arena.address(op.rows),
            slots,
            room: 0,
            bytes: bytes as u32,
            lanes: lanes(bytes),
            chunk: chunk(bytes),
            step: op.step,
        };
        let (links, launch) = (self.data(), Launch::new(op.blocks, GROUP_THREADS));
        // SAFETY: the parameters are those of `scatter_..`; buffers and rooms were checked.
        unsafe { self.group.scatter[kind].launch(stream, launch, parameters![links, data]) }
    }

    /// Launches each once, as the other kernels' `warm_up` does: of nobody's tokens.
    pub(crate) fn warm_up_group(&self, stream: &Stream) -> Result<(), CudaError> {
        let links = self.alone();
        let (first, count) = ([0; PEERS_MAX], [0; PEERS_MAX]);
        let need = NeedData { ids: 0, present: 0, first, count, tokens: 0, top_k: 0, nodes: 1 };
        let [rows, slots, room] = [0; 3];
        let (bytes, lanes, chunk, step) = (16, 4, 8, 0);
        let (words, wire, dim, onto) = ([0; 2], bytes, 16, [0; 2]);
        let gather = GatherData { need, rows, words, room, bytes, wire, dim, lanes, chunk, step };
        let scatter = ScatterData { need, rows, slots, onto, room, bytes, lanes, chunk, step };
        let once = Launch::new(1, 32);
        // SAFETY: the parameters are those of the kernels; without tokens they touch mail alone.
        unsafe {
            self.warm_up_count((stream, once), links, need)?;
            self.in_place.warm_up(stream, links, need)?;
            self.group.gather.iter().try_for_each(|kernel| {
                kernel.launch(stream, once, parameters![links, gather])
            })?;
            self.group.scatter.iter().try_for_each(|kernel| {
                kernel.launch(stream, once, parameters![links, scatter])
            })
        }
    }
}

impl CudaDevice {
    /// Links of this GPU to others of the node, connected to nobody yet. Others may read what of
    /// the arena is planned for that.
    ///
    /// # Errors
    /// It has no memory for them, or none that other processes can map.
    pub fn peer_links(&self, desc: PeerDesc) -> Result<PeerLinks, CudaError> {
        self.gpu().make_current()?;
        let mut links = PeerLinks::new(&self.compiler, desc)?;
        links.share(&self.arena);
        if let Some(lane) = &self.token_lane {
            links.warm_up(lane.stream())?;
        }
        Ok(links)
    }

    /// Enqueues [`PeerLinks::gather_rows`] among the ops.
    pub fn gather_peer_rows(&self, links: &PeerLinks, op: &GatherRows) {
        self.attempt(|| Ok::<(), LayerError>(links.gather_rows((&self.stream, &self.arena), op)?));
    }

    /// Enqueues [`PeerLinks::scatter_rows`] among the ops.
    pub fn scatter_rows(&self, links: &PeerLinks, op: &ScatterRows) {
        self.attempt(|| Ok::<(), LayerError>(links.scatter_rows((&self.stream, &self.arena), op)?));
    }
}
