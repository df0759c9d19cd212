//! Attention on the device: a fixed list of launches forward, and one backward.
//!
//! ```text
//! forward    forward
//! backward   [ranges] -> delta -> dk dv -> dq
//! on Hopper  [ranges] -> delta -> dk dv dq [-> round]
//! ```
//! `ranges` only where documents or a window say which queries see a key. On Hopper dq is added up
//! in fp32 beside dk and dv: by tiles of keys in their order, of which the last rounds, or in no
//! fixed one and rounded by `round`.
//! Kept from forward to backward: q, k, v, o and lse.

use cudarc::driver::sys;

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, element_macro};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Function, Launch, Stream, parameters};
use crate::cuda::enqueue::{ELEMENTS, Kernels, SCRATCH_BYTES, Text, Unit};
use crate::cuda::error::CudaError;
use crate::cuda::tensor_map::HeadMatrix;
use crate::error::LayerError;
use crate::ops::attention::op::{Attention, AttentionBackward, AttentionDesc, CachedAttention};
use crate::ops::attention::shape::{Tiles, Workspace};
use crate::ops::mixture::layer::Observer;

static CACHE: Text = Text {
    name: "cache",
    macros: &["ELEMENT", "HEAD_DIM"],
    constants: &[],
    parts: &[ELEMENTS, include_str!("cached_attention.cu")],
};

pub(crate) fn cache_unit(element: DType, head_dim: usize) -> Unit {
    CACHE.unit([element_macro(element), head_dim])
}

/// Keys of a part, as cached_attention.cu has it.
const PART: usize = 256;
const THREADS: u32 = 128;
/// Blocks of a launch in its second and third dimension.
const GRID_MAX: usize = 65_535;

impl CudaDevice {
    pub(crate) fn cached_attention(&mut self, op: &CachedAttention) {
        self.enqueue(|to| {
            let CachedAttention { queries, past, capacity, heads, kv_heads, head_dim, .. } = *op;
            let element = op.o.dtype();
            let (wide, width) = (heads * head_dim, kv_heads * head_dim);
            let [q, o] = [op.q, op.o].map(|of| to.of(of, element, queries * wide));
            let [k, v] = [op.k, op.v].map(|of| to.of(of, element, queries * width));
            let [keys, values] =
                [op.keys, op.values].map(|of| to.of(of, element, capacity * width));
            assert!(past + queries <= capacity && capacity <= PART * GRID_MAX, "{op:?}");
            let unit = cache_unit(element, head_dim);
            let parts = (past + queries).div_ceil(PART);
            // Queries whose parts the scratch has room for.
            let words = heads * parts * (head_dim + 2);
            let at_once = (SCRATCH_BYTES / 4 / words).clamp(1, queries.min(GRID_MAX));
            let mut plan = ArenaPlan::new();
            let scratch = plan.alloc(DType::F32, at_once * words);
            let scratch = to.scratch(&plan)?.at(scratch);
            let word = |number: usize| number as i32;
            let (scale, group) = (op.scale as f32, word(heads / kv_heads));
            let [rows, columns, past, capacity, all] =
                [queries, width, past, capacity, parts].map(word);
            let append = Launch::new((queries * width).div_ceil(256), 256);
            let parameters = parameters![k, v, keys, values, rows, columns, past, capacity];
            // SAFETY: the parameters are those of `cache_append`, the lengths were checked.
            unsafe { to.launch((unit, "cache_append"), append, parameters)? };
            for first in (0..queries).step_by(at_once) {
                let count = (queries - first).min(at_once) as u32;
                let mut attend = Launch::new(heads, THREADS);
                (attend.grid[1], attend.grid[2]) = (parts as u32, count);
                let mut join = Launch::new(heads, THREADS);
                join.grid[1] = count;
                let first = word(first);
                let of_parts =
                    parameters![q, keys, values, scratch, scale, group, past, capacity, first];
                let of_all = parameters![scratch, o, all, past, first];
                // SAFETY: the parameters are those of each kernel, the lengths were checked, and
                // the scratch has room for the parts of `at_once` queries.
                unsafe {
                    to.launch((unit, "cached_attention"), attend, of_parts)?;
                    to.launch((unit, "cached_join"), join, of_all)?;
                }
            }
            Ok(())
        });
    }
}

impl CudaDevice {
    pub(crate) fn attention_plan(&mut self, desc: &AttentionDesc) -> Result<usize, LayerError> {
        Ok(self.kernels::<AttentionKernels>(desc)?.workspace_bytes())
    }

    fn on_attention(
        &mut self,
        desc: &AttentionDesc,
        op: impl FnOnce(&AttentionKernels, &Stream, &Arena) -> Result<(), CudaError>,
    ) {
        let free = self.kept_free().attention;
        self.on::<AttentionKernels>(desc, |kernels, stream, arena| {
            kernels.leave_free(free);
            op(kernels, stream, arena)
        });
    }

    pub(crate) fn attention(&mut self, op: &Attention) {
        self.on_attention(&AttentionDesc::of(op), |kernels, stream, arena| {
            kernels.forward(stream, arena, op, &mut |_| Ok(()))
        });
    }

    pub(crate) fn attention_backward(&mut self, op: &AttentionBackward) {
        self.on_attention(&AttentionDesc::of(&op.forward), |kernels, stream, arena| {
            kernels.backward(stream, arena, op, &mut |_| Ok(()))
        });
    }
}

impl Kernels for AttentionKernels {
    type Desc = AttentionDesc;

    fn make(compiler: &Compiler, desc: &AttentionDesc) -> Result<AttentionKernels, LayerError> {
        AttentionKernels::new(compiler, *desc)
    }

    fn desc(&self) -> &AttentionDesc {
        &self.desc
    }
}

/// The kernels of one shape.
#[derive(Debug)]
pub struct AttentionKernels {
    desc: AttentionDesc,
    arch: Arch,
    plan: Workspace,
    forward: Function,
    backward: Function,
    /// dq, where it has a kernel of its own
    query: Option<Function>,
    ranges: Function,
    delta: Function,
    round: Option<Function>,
    /// Two words for each of two kernels, zero between launches
    counters: Arena,
    counter_words: Buffer,
    multiprocessors: usize,
    /// Of them, those that are left to kernels of other streams
    free: usize,
}

/// A launch of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Ranges,
    Forward,
    Delta,
    Backward,
    Query,
    Round,
}

impl Step {
    const fn name(self) -> &'static str {
        match self {
            Step::Ranges => "ranges",
            Step::Forward => "forward",
            Step::Delta => "delta",
            Step::Backward => "dk dv",
            Step::Query => "dq",
            Step::Round => "round",
        }
    }
}

/// The kernels' `Args`, field by field. Zero addresses are operands a launch has not.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Args {
    q: u64,
    k: u64,
    v: u64,
    o: u64,
    d_o: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    lse: u64,
    starts: u64,
    lse2: u64,
    delta: u64,
    sums: u64,
    turns: u64,
    counter: u64,
    past: u64,
    batch: i32,
    seq: i32,
    padded: i32,
    heads: i32,
    kv_heads: i32,
    group: i32,
    window: i32,
    scale_log2: f32,
    scale: f32,
}

/// The kernels' `Maps`: q, k, v, o, do, dk, dv.
#[repr(C)]
#[derive(Clone, Copy)]
struct Maps([sys::CUtensorMap; 7]);

impl AttentionKernels {
    /// Compiles and loads what `desc` takes on the compiler's device.
    pub fn new(compiler: &Compiler, desc: AttentionDesc) -> Result<AttentionKernels, LayerError> {
        desc.check()?;
        let gpu = compiler.gpu();
        let arch = desc.arch(Arch::of(gpu)?);
        let modules = compiler.load(&desc.sources(arch), &|_, _| ())?;
        let (forward, backward, query, rows) = match &modules[..] {
            [forward, backward, rows] => (forward, backward, None, rows),
            [tiles, rows] => (tiles, tiles, Some(tiles), rows),
            _ => unreachable!("a module for each of two or three sources"),
        };
        let forward = forward.function("attention_forward")?;
        let backward = backward.function("attention_backward")?;
        let query = query.map(|tiles| tiles.function("attention_query")).transpose()?;
        let tiled = [(Step::Forward, &forward), (Step::Backward, &backward)];
        for (step, function) in tiled.into_iter().chain(query.iter().map(|dq| (Step::Query, dq))) {
            function.allow_shared(shared_bytes(&desc, arch, step) as u32)?;
        }
        let mut plan = ArenaPlan::new();
        let counter_words = plan.alloc(DType::U32, 4);
        let counters = Arena::new(gpu, plan.bytes())?;
        counters.write(counter_words, &[0_u32; 4])?;
        let rounds = arch == Arch::Hopper && !desc.orders_dq(arch);
        let round = rounds.then(|| rows.function("attention_round")).transpose()?;
        Ok(AttentionKernels {
            desc,
            arch,
            plan: desc.workspace(arch),
            forward,
            backward,
            query,
            ranges: rows.function("attention_ranges")?,
            delta: rows.function("attention_delta")?,
            round,
            counters,
            counter_words,
            multiprocessors: gpu.multiprocessors() as usize,
            free: 0,
        })
    }

    /// From now on `free` multiprocessors are left to others, but one is taken. No bit depends on
    /// it: tiles are taken off a counter, and added in one order.
    pub(crate) fn leave_free(&mut self, free: usize) {
        self.free = free.min(self.multiprocessors - 1);
    }

    pub fn desc(&self) -> &AttentionDesc {
        &self.desc
    }

    /// Bytes of the workspace, which all attentions of a device can share.
    pub fn workspace_bytes(&self) -> usize {
        self.plan.bytes
    }

    /// `op.o` and `op.lse`. Two launches of the same kernels never run beside each other.
    pub fn forward(
        &self,
        stream: &Stream,
        arena: &Arena,
        op: &Attention,
        after: &mut Observer<'_>,
    ) -> Result<(), CudaError> {
        self.run(stream, &self.args(arena, op), std::iter::once(Step::Forward), after)
    }

    /// `op.dq`, `op.dk` and `op.dv`.
    pub fn backward(
        &self,
        stream: &Stream,
        arena: &Arena,
        op: &AttentionBackward,
        after: &mut Observer<'_>,
    ) -> Result<(), CudaError> {
        let (elements, keys) = (self.query_elements(), self.key_elements());
        let args = Args {
            d_o: self.elements(arena, op.d_o, elements),
            dq: self.elements(arena, op.dq, elements),
            dk: self.elements(arena, op.dk, keys),
            dv: self.elements(arena, op.dv, keys),
            ..self.args(arena, &op.forward)
        };
        let ranges = self.desc.masked().then_some(Step::Ranges);
        let query = self.query.as_ref().map(|_| Step::Query);
        let round = self.round.as_ref().map(|_| Step::Round);
        let steps = [ranges, Some(Step::Delta), Some(Step::Backward), query, round];
        self.run(stream, &args, steps.into_iter().flatten(), after)
    }

    fn query_elements(&self) -> usize {
        self.desc.tokens() * self.desc.heads * self.desc.head_dim
    }

    fn key_elements(&self) -> usize {
        self.desc.tokens() * self.desc.kv_heads * self.desc.head_dim
    }

    fn elements(&self, arena: &Arena, buffer: Buffer, len: usize) -> u64 {
        assert_eq!((buffer.dtype(), buffer.len()), (self.desc.element, len), "{buffer:?}");
        arena.address(buffer)
    }

    fn args(&self, arena: &Arena, op: &Attention) -> Args {
        let AttentionDesc { batch, seq, heads, kv_heads, scale, window, .. } = self.desc;
        assert_eq!(AttentionDesc::of(op), self.desc, "an attention of another shape");
        let tokens = self.desc.tokens();
        assert_eq!((op.lse.dtype(), op.lse.len()), (DType::F32, tokens * heads), "{:?}", op.lse);
        let starts = op.starts.map_or(0, |starts| {
            assert_eq!((starts.dtype(), starts.len()), (DType::U32, tokens), "{starts:?}");
            arena.address(starts)
        });
        let workspace = op.workspace.expect("attention on a GPU has a workspace");
        let bytes = workspace.bytes();
        assert!(bytes >= self.plan.bytes, "a workspace of {bytes}, needed {}", self.plan.bytes);
        let at = |range: Buffer| arena.address(workspace) + range.offset() as u64;
        Args {
            q: self.elements(arena, op.q, self.query_elements()),
            k: self.elements(arena, op.k, self.key_elements()),
            v: self.elements(arena, op.v, self.key_elements()),
            o: self.elements(arena, op.o, self.query_elements()),
            lse: arena.address(op.lse),
            starts,
            lse2: at(self.plan.lse2),
            delta: at(self.plan.delta),
            sums: at(self.plan.sums),
            turns: at(self.plan.turns),
            past: at(self.plan.past),
            batch: batch as i32,
            seq: seq as i32,
            padded: self.desc.padded() as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            window: window.unwrap_or(seq).min(seq) as i32,
            scale_log2: (f64::from(scale) * std::f64::consts::LOG2_E) as f32,
            scale,
            ..Args::default()
        }
    }

    fn run(
        &self,
        stream: &Stream,
        args: &Args,
        steps: impl Iterator<Item = Step>,
        after: &mut Observer<'_>,
    ) -> Result<(), CudaError> {
        for step in steps {
            self.step(stream, args, step)?;
            after(step.name())?;
        }
        Ok(())
    }

    fn step(&self, stream: &Stream, args: &Args, step: Step) -> Result<(), CudaError> {
        let AttentionDesc { batch, heads, .. } = self.desc;
        let (desc, block) = (&self.desc, self.desc.query_block());
        match step {
            Step::Ranges => {
                let mut launch = Launch::new(desc.seq.div_ceil(256), 256);
                launch.grid[1] = batch as u32;
                // SAFETY: the kernel takes `Args`; every buffer was checked or planned.
                unsafe { self.ranges.launch(stream, launch, parameters![*args]) }
            }
            Step::Delta => {
                let rows = 4 * 256 / desc.delta_lanes();
                let mut launch = Launch::new((desc.padded() * heads).div_ceil(rows), 256);
                launch.grid[1] = batch as u32;
                // SAFETY: as above.
                unsafe { self.delta.launch(stream, launch, parameters![*args]) }
            }
            Step::Round => {
                let blocks = batch * heads * (desc.seq.next_multiple_of(block) / 64);
                let launch = Launch::new(blocks, 4 * desc.head_dim as u32);
                let round = self.round.as_ref().expect("a step of those with sums to round");
                // SAFETY: as above.
                unsafe { round.launch(stream, launch, parameters![*args]) }
            }
            Step::Forward | Step::Backward | Step::Query => self.tiles(stream, args, step),
        }
    }

    /// A kernel that takes tiles off a counter.
    fn tiles(&self, stream: &Stream, args: &Args, step: Step) -> Result<(), CudaError> {
        let desc = &self.desc;
        let function = match step {
            Step::Forward => &self.forward,
            Step::Query => self.query.as_ref().expect("a step of those with a kernel for dq"),
            _ => &self.backward,
        };
        let shared_bytes = shared_bytes(desc, self.arch, step) as u32;
        if self.arch != Arch::Hopper {
            let (tiles, blocks) = (desc.tiles(), desc.seq.div_ceil(Tiles::STAYING));
            let heads = match step {
                Step::Backward => desc.kv_heads * tiles.split,
                _ => desc.heads,
            };
            let launch = Launch::new(desc.batch * heads * blocks, Tiles::THREADS);
            let launch = Launch { shared_bytes, ..launch };
            // SAFETY: the kernel takes `Args`; every buffer was checked or planned.
            return unsafe { function.launch(stream, launch, parameters![*args]) };
        }
        let (index, group, groups) = match step {
            Step::Forward => (0, desc.query_group(), desc.forward_groups()),
            _ => (2, desc.key_group(self.multiprocessors), 2),
        };
        let counter = self.counters.address(self.counter_words.slice(index, 2));
        let args = Args { counter, group: group as i32, ..*args };
        let launch = Launch::new(self.multiprocessors - self.free, 128 * (groups as u32 + 1));
        let launch = Launch { shared_bytes, ..launch };
        let maps = self.maps(&args, step)?;
        // SAFETY: the kernel takes `Maps` and `Args`, whose layouts are repeated here; every buffer
        // was checked or planned.
        unsafe { function.launch(stream, launch, parameters![maps, args]) }
    }

    /// The boxes in which a kernel reads and writes: of as many rows as it asks for at once.
    fn maps(&self, args: &Args, step: Step) -> Result<Maps, CudaError> {
        let AttentionDesc { batch, seq, heads, kv_heads, head_dim, .. } = self.desc;
        let map = |address, heads, rows| {
            HeadMatrix { address, batch, seq, heads, head_dim }.map(rows)
        };
        let none = || Ok(sys::CUtensorMap { opaque: [0; 16] });
        let block = match step {
            Step::Forward => 64 * self.desc.forward_groups(),
            _ => self.desc.query_block(),
        };
        let out = |address, heads, wanted| match wanted {
            true => map(address, heads, 64),
            false => none(),
        };
        let backward = step != Step::Forward;
        Ok(Maps([
            map(args.q, heads, block)?,
            map(args.k, kv_heads, 128)?,
            map(args.v, kv_heads, 128)?,
            out(args.o, heads, step == Step::Forward)?,
            if backward { map(args.d_o, heads, block)? } else { none()? },
            out(args.dk, kv_heads, step == Step::Backward)?,
            out(args.dv, kv_heads, step == Step::Backward)?,
        ]))
    }
}

/// What a kernel lays out in shared memory.
fn shared_bytes(desc: &AttentionDesc, arch: Arch, step: Step) -> usize {
    match (arch, step) {
        (Arch::Hopper, Step::Forward) => desc.forward_shared(),
        (Arch::Hopper, _) => desc.backward_shared(),
        (_, Step::Forward) => desc.tiles().forward_shared(),
        _ => desc.tiles().backward_shared(),
    }
}
