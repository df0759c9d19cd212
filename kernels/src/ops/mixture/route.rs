//! The launches of the router and of the passes over rows.

use crate::buffer::DType;
use crate::cuda::compile::{Module, Source, element_macro};
use crate::cuda::driver::{Function, Launch, Stream, parameters};
use crate::cuda::error::CudaError;
use crate::ops::mixture::desc::MoeDesc;
use crate::types::RouteGroups;

/// Blocks of the choosing kernel at most: four a multiprocessor of an H200. Fixed, because the
/// statistics are summed by block.
const CHOOSE_BLOCKS_MAX: usize = 528;
/// Warps of a block of the choosing kernel (WARPS), threads of the scan (32 * SCAN_WARPS): one for
/// each of those blocks.
const CHOOSE_WARPS: usize = 8;
const SCAN_THREADS: u32 = 544;

/// What is compiled in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouteShape {
    pub tokens: usize,
    pub experts: usize,
    pub top_k: usize,
    pub sigmoid: bool,
    pub norm_topk: bool,
    pub scale: f32,
    pub groups: Option<RouteGroups>,
    /// Equal runs of tokens whose statistics are kept apart
    pub segments: usize,
    /// Of rows and of gradients of logits
    pub element: DType,
}

impl MoeDesc {
    pub(crate) fn route(&self) -> RouteShape {
        RouteShape {
            tokens: self.tokens,
            experts: self.experts,
            top_k: self.top_k,
            sigmoid: self.sigmoid,
            norm_topk: self.norm_topk,
            scale: self.scale,
            groups: self.groups,
            segments: self.segments,
            element: self.element,
        }
    }
}

impl RouteShape {
    pub(crate) fn source(&self, arch: &'static str) -> Source {
        let (top_k, parts) =
            (self.top_k, [include_str!("../gate/scores.cu"), include_str!("moe_route.cu")]);
        let macros = [
            ("EXPERTS", self.experts),
            ("TOP_K", top_k),
            ("SIGMOID", usize::from(self.sigmoid)),
            ("NORM_TOP_K", usize::from(self.norm_topk)),
            ("GROUPS", self.groups.map_or(0, |groups| groups.count)),
            ("GROUPS_KEPT", self.groups.map_or(0, |groups| groups.kept)),
            ("ELEMENT", element_macro(self.element)),
        ];
        let label = format!("route {top_k} of {}", self.experts);
        Source::new(label, arch, &macros, &parts)
    }

    pub(crate) fn rows_source(&self, arch: &'static str) -> Source {
        let label = format!("rows of {}", self.top_k);
        let macros = [("TOP_K", self.top_k), ("ELEMENT", element_macro(self.element))];
        let parts = [include_str!("../../cuda/chunks.cu"), include_str!("moe_rows.cu")];
        Source::new(label, arch, &macros, &parts)
    }

    /// Neighbouring tokens that one warp chooses for.
    fn tokens_a_warp(&self) -> usize {
        let blocks = CHOOSE_BLOCKS_MAX / self.segments;
        (self.tokens / self.segments).div_ceil(CHOOSE_WARPS * blocks)
    }

    fn cut(&self) -> Segments {
        let tokens = self.tokens / self.segments;
        let blocks = tokens.div_ceil(CHOOSE_WARPS * self.tokens_a_warp());
        let word = |x: usize| x as i32;
        Segments { count: word(self.segments), tokens: word(tokens), blocks: word(blocks) }
    }

    pub(crate) fn choose_blocks(&self) -> usize {
        self.segments * self.cut().blocks as usize
    }

    /// Elements in 16 bytes.
    fn chunk(&self) -> usize {
        16 / self.element.size()
    }

    /// Columns of the gradient of the logits: whole 16-byte chunks.
    pub(crate) fn dlogits_pitch(&self) -> usize {
        self.experts.next_multiple_of(8)
    }
}

/// The kernels' `Segments`: how many, tokens and blocks of each.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Segments {
    count: i32,
    tokens: i32,
    blocks: i32,
}

/// Device addresses of what the router keeps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouteBuffers {
    pub logits: u64,
    /// 0: none
    pub bias: u64,
    pub lse: u64,
    pub ids: u64,
    pub weights: u64,
    pub partials: u64,
    pub histogram: u64,
    pub counts: u64,
    pub offsets: u64,
    pub order: u64,
    pub rows: u64,
    pub pos: u64,
    pub row_weights: u64,
    pub segment_counts: u64,
    pub prob_sums: u64,
    pub losses: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Router {
    shape: RouteShape,
    /// A part of a layer chooses nothing.
    choice: Option<ChoiceKernels>,
    combine: Function,
    each_row: Function,
    sum_parts: Function,
}

#[derive(Clone, Debug)]
struct ChoiceKernels {
    split: Function,
    choose: Function,
    scan: Function,
    place: Function,
    backward: Function,
}

/// `out[t] = base[t] + sum_k weights[t, k] y[pos[t, k]]` over some columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CombineCall {
    pub y: u64,
    pub pos: u64,
    /// 0: all 1
    pub weights: u64,
    /// 0: none
    pub base: u64,
    pub out: u64,
    /// `out` is of fp32 and not of elements.
    pub wide: bool,
    /// Columns of y
    pub cols: usize,
    pub out_pitch: usize,
    pub out_first: usize,
}

impl ChoiceKernels {
    fn new(route: &Module) -> Result<ChoiceKernels, CudaError> {
        Ok(ChoiceKernels {
            split: route.function("route_split")?,
            choose: route.function("route_choose")?,
            scan: route.function("route_scan")?,
            place: route.function("route_place")?,
            backward: route.function("route_backward")?,
        })
    }
}

impl Router {
    pub(crate) fn new(
        shape: RouteShape,
        route: Option<&Module>,
        rows: &Module,
    ) -> Result<Router, CudaError> {
        Ok(Router {
            shape,
            choice: route.map(ChoiceKernels::new).transpose()?,
            combine: rows.function("combine")?,
            each_row: rows.function("each_row")?,
            sum_parts: rows.function("sum_parts")?,
        })
    }

    fn choice(&self) -> &ChoiceKernels {
        self.choice.as_ref().expect("a layer that is no part has a router")
    }

    /// The `len` fp32 weights at `weights` as two elements each.
    pub(crate) fn split(
        &self,
        stream: &Stream,
        (weights, halves): (u64, u64),
        len: usize,
    ) -> Result<(), CudaError> {
        let (launch, len) = (Launch::new(len.div_ceil(256), 256), len as i32);
        // SAFETY: the parameters are those of `route_split`, the buffers as long as planned.
        unsafe { self.choice().split.launch(stream, launch, parameters![weights, halves, len]) }
    }

    /// ids, weights, partial statistics and each block's share of the row order from logits.
    pub(crate) fn choose(&self, stream: &Stream, at: &RouteBuffers) -> Result<(), CudaError> {
        let launch = Launch::new(self.shape.choose_blocks(), 32 * CHOOSE_WARPS as u32);
        let (cut, scale) = (self.shape.cut(), self.shape.scale);
        let a_warp = self.shape.tokens_a_warp() as i32;
        let RouteBuffers { logits, bias, ids, weights, lse, partials, histogram, pos, .. } = *at;
        // SAFETY: the parameters are those of `route_choose`, the buffers as long as planned.
        unsafe {
            self.choice().choose.launch(
                stream,
                launch,
                parameters![
                    logits, bias, cut, a_warp, scale, ids, weights, lse, partials, histogram,
                    pos
                ],
            )
        }
    }

    /// Row order and statistics from what `choose` left.
    pub(crate) fn place(&self, stream: &Stream, at: &RouteBuffers) -> Result<(), CudaError> {
        let RouteShape { experts, top_k, .. } = self.shape;
        let (choice, cut, blocks) =
            (self.choice(), self.shape.cut(), self.shape.choose_blocks());
        let a_block = (CHOOSE_WARPS * self.shape.tokens_a_warp() * top_k) as i32;
        let RouteBuffers { segment_counts, .. } = *at;
        let RouteBuffers { ids, weights, histogram, counts, offsets, order, .. } = *at;
        let RouteBuffers { rows, pos, row_weights, partials, prob_sums, losses, .. } = *at;
        // SAFETY: the parameters are those of each kernel, the buffers as long as planned.
        unsafe {
            choice.scan.launch(
                stream,
                Launch::new(experts + 1, SCAN_THREADS),
                parameters![
                    histogram, partials, cut, counts, segment_counts, prob_sums, losses
                ],
            )?;
            choice.place.launch(
                stream,
                Launch::new(blocks + 1, 256),
                parameters![
                    ids,
                    weights,
                    cut,
                    a_block,
                    histogram,
                    counts,
                    segment_counts,
                    prob_sums,
                    offsets,
                    order,
                    rows,
                    pos,
                    row_weights,
                    losses
                ],
            )
        }
    }

    /// The gradient of the logits [T, pitch] from `parts` partial <da', a> a row. The coefficients
    /// are multiplied by the fp32 at `loss_scale`, unless that is 0.
    pub(crate) fn backward(
        &self,
        stream: &Stream,
        at: &RouteBuffers,
        (partial_ds, parts): (u64, usize),
        ((aux_coef, z_coef), loss_scale): ((f64, f64), u64),
        dlogits: u64,
    ) -> Result<(), CudaError> {
        let (tokens, segments) = (self.shape.tokens as f64, self.shape.segments as f64);
        let aux = (aux_coef * segments * self.shape.experts as f64 / (tokens * tokens)) as f32;
        let segment_tokens = self.shape.cut().tokens;
        let z = (2.0 * z_coef / tokens) as f32;
        let launch = Launch::new(self.shape.tokens.div_ceil(8), 256);
        let (parts, tokens, scale) = (parts as i32, self.shape.tokens as i32, self.shape.scale);
        let pitch = self.shape.dlogits_pitch() as i32;
        let RouteBuffers { logits, lse, ids, pos, segment_counts, .. } = *at;
        // SAFETY: the parameters are those of `route_backward`, the buffers as long as planned.
        unsafe {
            self.choice().backward.launch(
                stream,
                launch,
                parameters![
                    logits,
                    lse,
                    ids,
                    pos,
                    partial_ds,
                    parts,
                    segment_counts,
                    segment_tokens,
                    tokens,
                    scale,
                    aux,
                    z,
                    loss_scale,
                    dlogits,
                    pitch
                ],
            )
        }
    }

    pub(crate) fn combine(&self, stream: &Stream, call: CombineCall) -> Result<(), CudaError> {
        let CombineCall { y, pos, weights, base, out, wide, .. } = call;
        let [chunks, out_pitch, out_first] = self.in_chunks(&call);
        let launch = self.of_rows(self.shape.tokens, chunks);
        let (tokens, wide) = (self.shape.tokens as i32, i32::from(wide));
        // SAFETY: the parameters are those of `combine`, the buffers as long as planned.
        unsafe {
            self.combine.launch(
                stream,
                launch,
                parameters![
                    y, pos, weights, base, out, wide, tokens, chunks, out_pitch, out_first
                ],
            )
        }
    }

    /// `out[i]` = the row `pos[i]` of y for each of `slots` choices, 0 where it is not here:
    /// `weights` and `base` are nothing.
    pub(crate) fn each_row(
        &self,
        stream: &Stream,
        call: CombineCall,
        slots: usize,
    ) -> Result<(), CudaError> {
        let CombineCall { y, pos, out, .. } = call;
        let [chunks, out_pitch, out_first] = self.in_chunks(&call);
        let (launch, slots) = (self.of_rows(slots, chunks), slots as i32);
        // SAFETY: the parameters are those of `each_row`, the buffers as long as planned.
        unsafe {
            let parameters = parameters![y, pos, out, slots, chunks, out_pitch, out_first];
            self.each_row.launch(stream, launch, parameters)
        }
    }

    /// Columns of y, and where they begin in rows of which length, in chunks.
    fn in_chunks(&self, call: &CombineCall) -> [i32; 3] {
        let chunk = self.shape.chunk();
        [call.cols, call.out_pitch, call.out_first].map(|elements| (elements / chunk) as i32)
    }

    /// A block is 256 threads: short rows share it.
    fn of_rows(&self, rows: usize, chunks: i32) -> Launch {
        let across = (chunks as u32).next_power_of_two().clamp(32, 256);
        let down = 256 / across;
        Launch { block: [across, down, 1], ..Launch::new(rows.div_ceil(down as usize), 0) }
    }

    pub(crate) fn sum_parts(
        &self,
        stream: &Stream,
        (partials, parts): (u64, usize),
        len: usize,
        accumulate: bool,
        out: u64,
    ) -> Result<(), CudaError> {
        let launch = Launch::new(len.div_ceil(256), 256);
        let (parts, len, accumulate) = (parts as i32, len as u64, i32::from(accumulate));
        // SAFETY: the parameters are those of `sum_parts`, the buffers as long as planned.
        unsafe {
            let parameters = parameters![partials, parts, len, accumulate, out];
            self.sum_parts.launch(stream, launch, parameters)
        }
    }
}
