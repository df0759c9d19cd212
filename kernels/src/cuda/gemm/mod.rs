//! One grouped product: its configuration as a function of the shape, its source, its launch.

mod tiles;

use cudarc::driver::sys;

use crate::buffer::DType;
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Module, Source, element_macro};
use crate::cuda::driver::{Function, Gpu, Launch, Stream, parameters};
use crate::cuda::error::CudaError;
use crate::cuda::tensor_map::Matrix;
use crate::types::Output;

/// Which product, see `grouped_gemm.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProductOp {
    Up = 0,
    Rows = 1,
    InputGradient = 2,
    HiddenGradient = 3,
    WeightGradient = 4,
    Logits = 5,
}

/// Everything that shapes the code of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmConfig {
    pub arch: Arch,
    pub op: ProductOp,
    /// What both operands are of
    pub element: DType,
    pub block_n: usize,
    pub stages: usize,
    pub cluster: usize,
    pub pingpong: bool,
    /// Buffers that each consumer warp has in shared memory: of H for the hidden gradient, of the
    /// output for weight gradients. Hopper only, else 0
    pub staged: usize,
    pub gated: bool,
    /// ACT_* of common.cu
    pub activation: usize,
    /// A weight gradient as [N, M]
    pub transposed: bool,
    /// The gathered operand's rows are picked by an index, else they are the groups' own
    pub indexed: bool,
    pub output: Output,
}

const BLOCK_M: usize = 128;
const BLOCK_K: usize = 64;
const CONSUMER_WARPS: usize = 8;
/// Rows of an m64 block that one warp of the warpgroup has.
const BOX_ROWS: usize = 16;
/// THREADS and SIDE of grouped_gemm_ampere.cu
const AMPERE_THREADS: u32 = 256;
const AMPERE_SIDE: usize = 4;
/// SIDE * SIDE of grouped_gemm_plain.cu, and blocks of a multiprocessor
const PLAIN_THREADS: u32 = 256;
const PLAIN_BLOCKS: usize = 4;
/// Most dynamic shared memory of a block on sm_90 and on sm_80.
const fn shared_bytes_max(arch: Arch) -> usize {
    match arch {
        Arch::Hopper => 232_448,
        Arch::Ampere(_) => 166_912,
        Arch::Plain(_) => 0,
    }
}

impl GemmConfig {
    /// With as many buffers as shared memory holds beside the tables of `groups` groups.
    pub fn fitting(mut self, groups: usize) -> GemmConfig {
        let buffered = match self.op {
            ProductOp::HiddenGradient => true,
            // In fp32 rows of 16 columns are added faster from registers, and ping-pong has none
            // left for boxes: they spill, and the product takes twice its time.
            ProductOp::WeightGradient => {
                self.output == Output::Element || !(self.transposed || self.pingpong)
            }
            _ => false,
        };
        self.staged = if buffered { self.staged } else { 0 };
        while self.staged > 1 && self.shared_bytes(groups) > shared_bytes_max(self.arch) {
            self.staged -= 1;
        }
        self
    }

    pub(crate) fn label(&self) -> String {
        let (GemmConfig { op, stages, cluster, .. }, block_n) = (self, self.width());
        let kind = if self.pingpong { " ping-pong" } else { "" };
        let tile = format!("{BLOCK_M}x{block_n}x{BLOCK_K} {stages} stages cluster {cluster}{kind}");
        format!("{op:?} {:?} {tile}", self.element)
    }

    pub(crate) fn source(&self) -> Source {
        let macros = [
            ("ELEMENT", element_macro(self.element)),
            ("OP", self.op as usize),
            ("BM", BLOCK_M),
            ("BN", self.block_n),
            ("STAGES", self.stages),
            ("CLUSTER", self.cluster),
            ("PINGPONG", usize::from(self.pingpong)),
            ("STAGED", self.staged),
            ("GATED", usize::from(self.gated)),
            ("ACT", self.activation),
            ("TRANSPOSED", usize::from(self.transposed)),
            ("INDEXED", usize::from(self.indexed)),
            ("OUT", self.output as usize),
        ];
        if let Arch::Plain(target) = self.arch {
            let text = include_str!("grouped_gemm_plain.cu");
            return Source::new(format!("{:?} in fp32", self.op), target, &macros, &[text]);
        }
        let (wgmma, main) = match self.arch {
            Arch::Hopper => {
                let wgmma = wgmma_source(self.block_n, self.element);
                (wgmma, include_str!("grouped_gemm_main.cu"))
            }
            Arch::Ampere(_) | Arch::Plain(_) => {
                let declared = format!("{}{NO_WGMMA}", include_str!("../ampere.cu"));
                (declared, include_str!("grouped_gemm_ampere.cu"))
            }
        };
        let parts = [
            include_str!("../hopper.cu"),
            &wgmma,
            include_str!("grouped_gemm.cu"),
            include_str!("grouped_gemm_epilogue.cu"),
            include_str!("grouped_gemm_hidden.cu"),
            include_str!("grouped_gemm_gradient.cu"),
            main,
        ];
        Source::new(self.label(), self.arch.target(), &macros, &parts)
    }

    /// Columns of B that a block has in shared memory.
    fn width(&self) -> usize {
        if let Arch::Ampere(_) = self.arch { AMPERE_SIDE * self.block_n } else { self.block_n }
    }

    /// Stages, buffers of H, their barriers, and the tables of `groups` groups.
    fn shared_bytes(&self, groups: usize) -> usize {
        let stage = (BLOCK_M + self.width()) * BLOCK_K * 2 + 16;
        let boxes = if self.op == ProductOp::HiddenGradient && self.gated { 2 } else { 1 };
        let buffers = self.staged * CONSUMER_WARPS * (boxes * BOX_ROWS * BLOCK_K * 2 + 8);
        let tables = if self.op == ProductOp::WeightGradient { 2 } else { 1 };
        self.stages * stage + buffers + (tables * groups + 1) * 4
    }
}

/// Declared for the text that names it, never called.
const NO_WGMMA: &str = "template <bool TA, bool TB> __device__ void \
                        wgmma_none(float (&d)[BN / 2], u64 a, u64 b, int accumulate);\n\
                        #define WGMMA wgmma_none\n";

/// The wgmma of one width, both operands from shared memory: mechanical, one register a number.
fn wgmma_source(n: usize, element: DType) -> String {
    let kind = if element == DType::F16 { "f16" } else { "bf16" };
    let count = n / 2;
    let list = |item: &dyn Fn(usize) -> String| (0..count).map(item).collect::<Vec<_>>().join(", ");
    let registers = list(&|i| format!("%{i}"));
    let outputs = list(&|i| format!("\"+f\"(d[{i}])"));
    let (a, b, p, ta, tb) = (count, count + 1, count + 2, count + 3, count + 4);
    format!(
        "template <bool TA, bool TB> __device__ __forceinline__ void\n\
         wgmma_n{n}(float (&d)[{count}], u64 a, u64 b, int accumulate) {{\n\
         asm volatile(\"{{.reg .pred p; setp.ne.b32 p, %{p}, 0;\\n\"\n\
         \"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{registers}}}, \"\n\
         \"%{a}, %{b}, p, 1, 1, %{ta}, %{tb};}}\\n\" : {outputs}\n\
         : \"l\"(a), \"l\"(b), \"r\"(accumulate), \"n\"((int)TA), \"n\"((int)TB));\n}}\n\
         #define WGMMA wgmma_n{n}\n"
    )
}

/// The kernel's `Args`, field by field. Zero addresses are operands the op has not.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GemmArgs {
    pub gathered: u64,
    pub index: u64,
    pub offsets: u64,
    pub order: u64,
    pub out: u64,
    pub out_activation: u64,
    pub out_f32: u64,
    pub row_scale: u64,
    pub starts: u64,
    pub groups: i32,
    pub depth: i32,
    pub cols: i32,
    pub gathered_pitch: i32,
    pub weight_rows: i32,
    pub first_col: i32,
    pub out_pitch: i32,
    pub out_rows: i32,
    pub accumulate: i32,
}

/// A product ready to be launched.
#[derive(Clone, Debug)]
pub(crate) struct Gemm {
    pub config: GemmConfig,
    function: Function,
    multiprocessors: u32,
    /// Of them, those that are left to kernels of other streams
    free: u32,
}

impl Gemm {
    pub(crate) fn new(gpu: &Gpu, config: GemmConfig, module: &Module) -> Result<Gemm, CudaError> {
        let function = module.function("grouped_gemm")?;
        if !matches!(config.arch, Arch::Plain(_)) {
            function.allow_shared(shared_bytes_max(config.arch) as u32)?;
        }
        Ok(Gemm { config, function, multiprocessors: gpu.multiprocessors(), free: 0 })
    }

    /// From now on `free` multiprocessors are left to others, but a cluster is taken. A tile is one
    /// block's whoever takes it, so no bit depends on it.
    pub(crate) fn leave_free(&mut self, free: usize) {
        let least = self.config.cluster as u32;
        self.free = (free as u32).min(self.multiprocessors.saturating_sub(least));
    }

    /// Enqueues the product. `a` is A of ops that gather nothing; H of the hidden gradient; the
    /// output of weight gradients.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        a: Matrix,
        b: Matrix,
        args: GemmArgs,
    ) -> Result<(), CudaError> {
        if let Arch::Plain(_) = self.config.arch {
            let launch = Launch::new(self.multiprocessors as usize * PLAIN_BLOCKS, PLAIN_THREADS);
            let (a, b) = (a.address, b.address);
            // SAFETY: as below.
            return unsafe { self.function.launch(stream, launch, parameters![a, b, args]) };
        }
        let shared = self.config.shared_bytes(args.groups as usize);
        let clusters = (self.multiprocessors - self.free) as usize / self.config.cluster;
        let mut launch = Launch::new(clusters * self.config.cluster, 384);
        launch.shared_bytes = shared as u32;
        let fits = shared <= shared_bytes_max(self.config.arch);
        assert!(fits, "{:?} with {} groups", self.config, args.groups);
        if let Arch::Ampere(_) = self.config.arch {
            launch.block[0] = AMPERE_THREADS;
            let (a, b) = (a.address, b.address);
            // SAFETY: the kernel takes two addresses and `Args`, whose layout `GemmArgs` repeats;
            // the layer plans every buffer for its shape.
            return unsafe { self.function.launch(stream, launch, parameters![a, b, args]) };
        }
        let (a, b) = (self.map_a(a)?, self.map_b(b)?);
        // SAFETY: the kernel takes two tensor maps and `Args`, whose layout `GemmArgs` repeats; the
        // layer plans every buffer for its shape.
        unsafe { self.function.launch(stream, launch, parameters![a, b, args]) }
    }

    fn map_a(&self, a: Matrix) -> Result<sys::CUtensorMap, CudaError> {
        match self.config {
            GemmConfig { staged: 0, .. } => a.map(BLOCK_M),
            GemmConfig { op: ProductOp::WeightGradient, output: Output::F32, .. } => {
                a.fp32_map(BOX_ROWS)
            }
            GemmConfig { transposed: true, element, .. } => a.narrow_map(BLOCK_K, element),
            GemmConfig { op: ProductOp::WeightGradient, element, .. } => {
                a.map_of(BOX_ROWS, element)
            }
            _ => a.map(BOX_ROWS),
        }
    }

    fn map_b(&self, b: Matrix) -> Result<sys::CUtensorMap, CudaError> {
        use ProductOp::{HiddenGradient, InputGradient, Logits, Rows, Up, WeightGradient};
        match self.config.op {
            Up | Rows => b.permuted_map(self.config.block_n / 2),
            Logits => b.map(self.config.block_n / 2),
            InputGradient | HiddenGradient | WeightGradient => b.map(BLOCK_K),
        }
    }
}
