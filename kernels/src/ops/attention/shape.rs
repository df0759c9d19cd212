//! An attention's shape: which kernels it takes, their text, and how its tiles are spread.

use moejob_protocol::kernel_sizes::QUERY_PADDING;

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Source, element_macro};
use crate::ops::attention::op::AttentionDesc;

/// Ranges of a workspace, all for backward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workspace {
    pub bytes: usize,
    /// u32 [B, S]: one past the last query of a key, where documents or a window say
    pub past: Buffer,
    /// f32 [B, N, padded] each
    pub lse2: Buffer,
    pub delta: Buffer,
    /// f32 [B, N, queries in whole blocks, D]: dq, of Hopper's backward
    pub sums: Buffer,
    /// u32 [B, N, blocks of queries], where it is added up in order
    pub turns: Buffer,
}

/// Bytes that the heads whose tiles run together may read and add to: most of an H200's L2, of
/// 50 MB. Half and twice as much cost 1 to 10% of a forward, 1 to 8% of a backward.
const L2_BYTES: usize = 32 << 20;
/// Fewer tiles together than so many a multiprocessor leave some of them idle at the end. Those
/// among documents are short: with so few, tiles of a head would wait for each other.
const TILES_A_MULTIPROCESSOR: usize = 2;
const MASKED_TILES_A_MULTIPROCESSOR: usize = 4;
/// Up to so many positions the fastest backward of heads that share keys is the one in order.
const ORDERED_SEQ_MAX: usize = 4096;
/// Rows are padded to this in lse2 and delta: a multiple of all blocks of queries.
const PADDING: usize = QUERY_PADDING as usize;

impl AttentionDesc {
    /// The instructions that this shape takes on a device of `arch`.
    pub fn arch(&self, arch: Arch) -> Arch {
        match (arch, self.element) {
            (_, DType::F32) => Arch::Plain(arch.target()),
            (Arch::Hopper, _) if !matches!(self.head_dim, 64 | 96 | 128) => Arch::Ampere("sm_90"),
            _ => arch,
        }
    }

    /// Whether a query sees less than all keys up to its own.
    pub(crate) fn masked(&self) -> bool {
        self.documents || self.window.is_some_and(|window| window < self.seq)
    }

    /// Rows of a head in lse2 and delta.
    pub(crate) fn padded(&self) -> usize {
        self.seq.next_multiple_of(PADDING)
    }

    /// Whether Hopper's backward adds dq up in a fixed order. That needs neither zeros before nor a
    /// pass to round after it, which outweighs the waiting, so that it is also the fastest, among
    /// documents (on an H200 by 1 to 8%) and for short sequences whose heads share keys (by 2%).
    /// Elsewhere it loses some percent.
    pub(crate) fn orders_dq(&self, arch: Arch) -> bool {
        let shares = self.kv_heads < self.heads && self.seq <= ORDERED_SEQ_MAX;
        arch == Arch::Hopper && (self.deterministic || self.masked() || shares)
    }

    /// Consumer warpgroups of the forward, 64 queries each.
    pub(crate) fn forward_groups(&self) -> usize {
        if self.head_dim == 64 { 3 } else { 2 }
    }

    /// Queries of a stage of the backward: small heads take two blocks of 64 between barriers.
    pub(crate) fn query_block(&self) -> usize {
        if self.head_dim == 64 { 128 } else { 64 }
    }

    /// Query heads, of all sequences, whose tiles run together where queries stay: their K and V
    /// share L2. What shares K and V already needs fewer.
    pub(crate) fn query_group(&self) -> usize {
        let kv = (L2_BYTES / (4 * self.seq * self.head_dim)).max(1);
        even((kv * self.heads / self.kv_heads).min(kv.max(32)), self.batch * self.heads)
    }

    /// Key heads whose tiles run together where keys stay: q, dO and sums of dq share L2, of one
    /// query head, since those that share keys go in step.
    pub(crate) fn key_group(&self, multiprocessors: usize) -> usize {
        let shared = L2_BYTES / (8 * self.seq * self.head_dim);
        let tiles =
            if self.masked() { MASKED_TILES_A_MULTIPROCESSOR } else { TILES_A_MULTIPROCESSOR };
        let busy = tiles * multiprocessors / self.seq.div_ceil(128);
        even(shared.max(busy).max(1), self.batch * self.kv_heads)
    }

    /// Lanes that read a row of o and do: one for 16 bytes, at most a warp.
    pub(crate) fn delta_lanes(&self) -> usize {
        (self.head_dim * self.element.size() / 16).next_power_of_two().min(32)
    }

    pub(crate) fn workspace(&self, arch: Arch) -> Workspace {
        let mut plan = ArenaPlan::new();
        let positions = if self.masked() { self.tokens() } else { 0 };
        let rows = self.batch * self.heads * self.padded();
        let block = self.query_block();
        let sums = self.batch * self.heads * self.seq.next_multiple_of(block) * self.head_dim;
        let past = plan.alloc(DType::U32, positions);
        let [lse2, delta] = [(); 2].map(|()| plan.alloc(DType::F32, rows));
        let sums = plan.alloc(DType::F32, if arch == Arch::Hopper { sums } else { 0 });
        let blocks = self.batch * self.heads * self.seq.div_ceil(block);
        let turns = plan.alloc(DType::U32, if self.orders_dq(arch) { blocks } else { 0 });
        Workspace { bytes: plan.bytes(), past, lse2, delta, sums, turns }
    }

    /// The kernels' text: on Hopper forward and backward, else all in one; then rows.
    pub(crate) fn sources(&self, arch: Arch) -> Vec<Source> {
        let common = [
            ("ELEMENT", element_macro(self.element)),
            ("HEAD_DIM", self.head_dim),
            ("MASKED", usize::from(self.masked())),
        ];
        let label = |what: &str| format!("attention {what} {:?} {}", self.element, self.head_dim);
        let source = |what: &str, macros: &[(&str, usize)], parts: &[&str]| {
            let macros = [&common, macros].concat();
            let shared = [
                include_str!("attention.cu"),
                include_str!("attention_softmax.cu"),
                include_str!("../../cuda/hopper.cu"),
            ];
            Source::new(label(what), arch.target(), &macros, &[&shared, parts].concat())
        };
        let orders_dq = self.orders_dq(arch);
        let clears = match arch {
            Arch::Hopper if orders_dq => CLEARS_TURNS,
            Arch::Hopper => CLEARS_SUMS,
            _ => 0,
        };
        let lanes = self.delta_lanes();
        let rows = [("LANES", lanes), ("Q_BLOCK", self.query_block()), ("CLEARS", clears)];
        let rows = source("rows", &rows, &[include_str!("attention_rows.cu")]);
        if arch != Arch::Hopper {
            let products = match self.element {
                DType::F32 => include_str!("attention_plain.cu"),
                _ => include_str!("attention_fragments.cu"),
            };
            let tiles = self.tiles();
            let macros =
                [("PADDED", tiles.padded), ("MOVING", tiles.moving), ("SPLIT", tiles.split)];
            let ampere = include_str!("../../cuda/ampere.cu");
            let parts = [ampere, products, include_str!("attention_tiles.cu")];
            return vec![source("tiles", &macros, &parts), rows];
        }
        let wgmma = attention_wgmma(self.element);
        let hopper = |parts: &[&'static str]| {
            [&[wgmma.as_str(), include_str!("attention_hopper.cu")], parts].concat()
        };
        let forward = [("CONSUMERS", self.forward_groups())];
        let descending = orders_dq || self.heads > self.kv_heads;
        let backward = [
            ("ORDERED", usize::from(orders_dq)),
            ("BM", self.query_block()),
            ("HELD", usize::from(self.head_dim == 64)),
            ("DESCENDING", usize::from(descending)),
        ];
        let forward_parts =
            [include_str!("attention_blocks.cu"), include_str!("attention_forward.cu")];
        let backward_parts = [include_str!("attention_backward.cu")];
        vec![
            source("forward", &forward, &hopper(&forward_parts)),
            source("backward", &backward, &hopper(&backward_parts)),
            rows,
        ]
    }

    /// The tiles of `attention_tiles.cu`. Two blocks share a multiprocessor of an A100 up to heads
    /// of 128 in 16 bits; the largest ones just fit its shared memory.
    pub(crate) fn tiles(&self) -> Tiles {
        let split = if self.head_dim > 128 { 2 } else { 1 };
        let size = self.element.size();
        let step = if self.element == DType::F32 { 8 } else { 16 };
        let moving = match (self.element, self.head_dim) {
            (DType::F32, 0..=64) => 32,
            (DType::F32, _) => 16,
            _ => 64,
        };
        let padded = self.head_dim.next_multiple_of(step * split);
        Tiles { padded, moving, split, pitch: padded * size + 16 }
    }
}

/// What attention_rows.cu calls SUMS and TURNS.
const CLEARS_SUMS: usize = 1;
const CLEARS_TURNS: usize = 2;

/// The size of equal groups of `all`, at most `wanted`: a small group at the end would leave
/// multiprocessors idle.
fn even(wanted: usize, all: usize) -> usize {
    all.div_ceil(all.div_ceil(wanted))
}

/// Blocks of shapes or devices that Hopper's kernels do not take. See `attention_tiles.cu`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiles {
    /// Columns in shared memory
    pub padded: usize,
    /// Rows of a tile that passes by
    pub moving: usize,
    /// Blocks that share the columns of dk and dv
    pub split: usize,
    /// Bytes of a row
    pitch: usize,
}

impl Tiles {
    /// Rows of what stays with a block.
    pub const STAYING: usize = 64;
    pub const THREADS: u32 = 128;

    pub(crate) fn forward_shared(&self) -> usize {
        (Self::STAYING + 2 * self.moving) * self.pitch
    }

    pub(crate) fn backward_shared(&self) -> usize {
        2 * (Self::STAYING + self.moving) * self.pitch + 2 * self.moving * 4
    }
}

/// Bytes of shared memory, as each kernel for Hopper lays it out.
impl AttentionDesc {
    /// `rows` of a tile in whole slabs of 64 columns.
    fn tile_bytes(&self, rows: usize) -> usize {
        self.head_dim.div_ceil(64) * rows * 128
    }

    pub(crate) fn forward_shared(&self) -> usize {
        3 * self.tile_bytes(64 * self.forward_groups()) + 4 * self.tile_bytes(128) + BARRIERS
    }

    pub(crate) fn backward_shared(&self) -> usize {
        let (block, keys) = (self.query_block(), self.tile_bytes(128));
        let scores = 2 * 128 * block * 2;
        3 * keys + 4 * self.tile_bytes(block) + scores + 2 * block * 8 + BARRIERS
    }
}

/// Barriers, and what travels beside them.
const BARRIERS: usize = 256;

/// The wgmma functions of attention: both operands from shared memory, or the first from registers;
/// the sum goes on from `d` or, without ADD, from zero.
fn attention_wgmma(element: DType) -> String {
    let kind = if element == DType::F16 { "f16" } else { "bf16" };
    [64, 96, 128].into_iter().map(|n| wgmma_of(n, kind)).collect()
}

fn wgmma_of(n: usize, kind: &str) -> String {
    let count = n / 2;
    let list = |item: &dyn Fn(usize) -> String| (0..count).map(item).collect::<Vec<_>>().join(", ");
    let registers = list(&|i| format!("%{i}"));
    let outputs = list(&|i| format!("\"+f\"(d[{i}])"));
    let [a, b, c, d, e, f, g] = std::array::from_fn(|i| count + i);
    let op = format!("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}");
    format!(
        "template <int TA, int TB, int ADD> __device__ __forceinline__ void\n\
         wgmma_ss(float (&d)[{count}], u64 a, u64 b) {{\n\
         asm volatile(\"{op} {{{registers}}}, \"\n\
         \"%{a}, %{b}, %{c}, 1, 1, %{d}, %{e};\\n\" : {outputs}\n\
         : \"l\"(a), \"l\"(b), \"n\"(ADD), \"n\"(TA), \"n\"(TB));\n}}\n\
         template <int TA, int TB> __device__ __forceinline__ void\n\
         wgmma_ss_if(float (&d)[{count}], u64 a, u64 b, bool add) {{\n\
         asm volatile(\"{{.reg .pred p; setp.ne.b32 p, %{c}, 0;\\n\"\n\
         \"{op} {{{registers}}}, \"\n\
         \"%{a}, %{b}, p, 1, 1, %{d}, %{e};}}\\n\" : {outputs}\n\
         : \"l\"(a), \"l\"(b), \"r\"((int)add), \"n\"(TA), \"n\"(TB));\n}}\n\
         template <int TB, int ADD> __device__ __forceinline__ void\n\
         wgmma_rs(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {{\n\
         asm volatile(\"{op} {{{registers}}}, \"\n\
         \"{{%{a}, %{b}, %{c}, %{d}}}, %{e}, %{f}, 1, 1, %{g};\\n\" : {outputs}\n\
         : \"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3), \"l\"(b), \"n\"(ADD), \"n\"(TB));\n\
         }}\n"
    )
}
