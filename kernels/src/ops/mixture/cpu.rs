//! The mixture layer of one rank, from the ops that it consists of.

pub(crate) mod experts;
mod gradients;
pub(crate) mod place;
pub(crate) mod route;

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cpu::CpuDevice;
use crate::cpu::gemm::kernel::GemmFloat;
use crate::error::Refusal;
use crate::ops::elementwise::op::{GatherRows, ScatterSum};
use crate::ops::matmul::op::Matmul;
use crate::ops::mixture::cpu::experts::{
    ExpertsDgrad, ExpertsDown, ExpertsDownBackward, ExpertsDownWgrad, ExpertsUp, ExpertsUpWgrad,
};
use crate::ops::mixture::cpu::gradients::Into;
use crate::ops::mixture::cpu::place::{Combine, Place, ScatterRows};
use crate::ops::mixture::cpu::route::{Route, RouteBackward};
use crate::ops::mixture::desc::{Gradients, MoeDesc, MoeTensors, Saved, Stacked};
use crate::ops::mixture::op::{
    Each, MoeBackward, MoeCombine, MoeExperts, MoeExpertsBackward, MoeForward, MoeHidden, MoePlace,
    MoePlan, MoeRoute, MoeRouterBackward, MoeUpGradient, Sources,
};
use crate::types::{Layout, NO_EXPERT, Output, Scoring};

/// Ranges of the workspace: forward's, then backward's, which need not outlive each other.
struct Scratch {
    bytes: usize,
    y: Buffer,
    ds: Buffer,
    dweights: Buffer,
    dlogits: Buffer,
    dh: Buffer,
    scaled_a: Buffer,
    dx_rows: Buffer,
    /// The experts' gradients of up or down, before they are added
    dw: Buffer,
    /// Where the rows of some experts' sources begin
    bounds: Buffer,
}

impl Scratch {
    fn new(desc: &MoeDesc) -> Scratch {
        let (rows, element) = (desc.rows(), desc.element);
        let mut forward = ArenaPlan::new();
        let y = forward.alloc(element, rows * desc.dim);
        let mut backward = ArenaPlan::new();
        let mut alloc = |len| backward.alloc(element, len);
        let (ds, dweights) = (alloc(rows), alloc(desc.slots()));
        let dlogits = alloc(desc.tokens * desc.experts);
        let (dh, scaled_a) = (alloc(rows * desc.width()), alloc(rows * desc.hidden));
        let dx_rows = alloc(rows * desc.dim);
        let dw = alloc(desc.experts * desc.width() * desc.dim);
        let bounds = backward.alloc(DType::U32, desc.experts + 1);
        let bytes = forward.bytes().max(backward.bytes());
        Scratch { bytes, y, ds, dweights, dlogits, dh, scaled_a, dx_rows, dw, bounds }
    }

    /// The same ranges where `workspace` lies.
    fn within(desc: &MoeDesc, workspace: Buffer) -> Scratch {
        let whole = Scratch::new(desc);
        let at = |range: Buffer| {
            workspace.slice(range.offset(), range.bytes()).reinterpret(range.dtype())
        };
        let Scratch { bytes, y, ds, dweights, dlogits, dh, scaled_a, dx_rows, .. } = whole;
        Scratch {
            bytes,
            y: at(y),
            ds: at(ds),
            dweights: at(dweights),
            dlogits: at(dlogits),
            dh: at(dh),
            scaled_a: at(scaled_a),
            dx_rows: at(dx_rows),
            dw: at(whole.dw),
            bounds: at(whole.bounds),
        }
    }
}

pub(crate) fn plan(desc: &MoeDesc, plan: &mut ArenaPlan) -> Result<MoePlan, Refusal> {
    check(desc)?;
    let MoeDesc { tokens, experts, element, segments, .. } = *desc;
    let (rows, slots) = (desc.rows(), desc.slots());
    let saved = Saved {
        h: plan.alloc(element, rows * desc.width()),
        a: plan.alloc(element, rows * desc.hidden),
        logits: plan.alloc(element, tokens * experts),
        probs: plan.alloc(element, tokens * experts),
        lse: plan.alloc(element, tokens),
        ids: plan.alloc(DType::U32, slots),
        weights: plan.alloc(element, slots),
        counts: plan.alloc(DType::U32, experts),
        offsets: plan.alloc(DType::U32, experts + 1),
        order: plan.alloc(DType::U32, 0),
        rows: plan.alloc(DType::U32, rows),
        pos: plan.alloc(DType::U32, slots),
        row_weights: plan.alloc(element, rows),
        segment_counts: plan.alloc(DType::U32, segments * experts),
        prob_sums: plan.alloc(DType::F64, segments * experts),
        losses: plan.alloc(DType::F64, 2),
        router_halves: plan.alloc(element, 0),
    };
    Ok(MoePlan { saved, workspace_bytes: Scratch::new(desc).bytes })
}

fn check(desc: &MoeDesc) -> Result<(), Refusal> {
    if !matches!(desc.element, DType::F32 | DType::F64) {
        let devices = "a CPU computes in F32 or F64";
        return Err(Refusal::Element { found: desc.element, devices });
    }
    if desc.weight_gradients == Output::F32 {
        let (found, element) = (desc.weight_gradients, desc.element);
        let reason = "on a CPU they are elements, or sums";
        return Err(Refusal::Output { found, element, reason });
    }
    desc.check_counts()
}

fn scoring(desc: &MoeDesc) -> Scoring {
    if desc.sigmoid { Scoring::Sigmoid } else { Scoring::Softmax }
}

/// Each expert's [rows, cols] of what lies stacked: weights, or their gradients.
fn each(stacked: Stacked, desc: &MoeDesc, rows: usize, cols: usize) -> Vec<Buffer> {
    let Stacked { buffer, stride, gap } = stacked;
    let dtype = buffer.dtype();
    assert!(dtype == desc.element || dtype == desc.gradient_element(), "{stacked:?} of {desc:?}");
    stacked.check(dtype, desc.experts, rows * cols);
    (0..desc.experts).map(|e| buffer.slice(e * stride, rows * cols + gap)).collect()
}

/// Each expert's gate (none if not gated) and up of E of [W, D].
fn gate_and_up(stacked: Stacked, desc: &MoeDesc) -> (Vec<Buffer>, Vec<Buffer>) {
    let size = desc.hidden * desc.dim;
    let both = each(stacked, desc, desc.width(), desc.dim);
    if !desc.gated {
        return (Vec::new(), both);
    }
    let up = size + stacked.gap;
    both.iter().map(|both| (both.slice(0, size), both.slice(up, size))).unzip()
}

impl CpuDevice {
    pub(crate) fn moe_forward<T: GemmFloat>(&mut self, op: &MoeForward) {
        let MoeForward { desc, tensors, out } = *op;
        let MoeDesc { tokens, experts, top_k, .. } = desc;
        self.moe_route::<T>(&MoeRoute { desc, tensors });
        let Saved { ids, counts, offsets, rows, pos, weights, .. } = tensors.saved;
        self.place(&Place { tokens, top_k, experts, ids, counts, offsets, rows, pos });
        let (rows, y) = (desc.slots(), tensors.saved.row_weights);
        self.scatter_rows::<T>(&ScatterRows { rows, dim: 1, x: weights, index: pos, y });
        self.moe_experts::<T>(&MoeExperts { desc, tensors, out, each: None });
    }

    pub(crate) fn moe_route<T: GemmFloat>(&mut self, op: &MoeRoute) {
        let MoeRoute { ref desc, ref tensors } = *op;
        self.matmul::<T>(&Matmul {
            layout: Layout::Nt,
            m: desc.tokens,
            n: desc.experts,
            k: desc.dim,
            accumulate: false,
            a: tensors.x,
            b: tensors.weights.router,
            c: tensors.saved.logits,
        });
        route::<T>(self, desc, tensors);
    }

    pub(crate) fn moe_place<T: GemmFloat>(&mut self, op: &MoePlace) {
        let all = op.check();
        let saved = &op.saved;
        let ids: Vec<u32> = self.slice(saved.ids).to_vec();
        let tokens = match op.sources {
            Sources::Even { each, present, .. } => present * each,
            Sources::Listed(starts) => self.slice::<u32>(starts).last().map_or(0, |n| *n as usize),
        };
        let here = |slot: usize| {
            let place = (ids[slot] as usize).checked_sub(op.first)?;
            (slot < tokens * op.top_k && place < op.locals).then_some(place)
        };
        // Nobody reads what is of rows behind those that are listed.
        let rows_of_tokens = match op.sources {
            Sources::Even { .. } => all,
            Sources::Listed(_) => tokens,
        };
        let slots = 0..rows_of_tokens * op.top_k;
        let mut offsets = vec![0_u32; op.locals + 1];
        slots.clone().filter_map(here).for_each(|place| offsets[place + 1] += 1);
        (0..op.locals).for_each(|place| offsets[place + 1] += offsets[place]);
        let full = offsets[op.locals] as usize > op.room;
        if full {
            let overflows = self.slice::<f64>(op.overflows)[0] + 1.0;
            self.slice_mut(op.overflows).copy_from_slice(&[overflows]);
            offsets.fill(0);
        }
        let here = |slot: usize| here(slot).filter(|_| !full);
        let (mut next, mut rows) = (offsets.clone(), vec![0_u32; offsets[op.locals] as usize]);
        let mut pos = vec![NO_EXPERT; slots.len()];
        for (slot, place) in slots.clone().filter_map(|slot| Some((slot, here(slot)?))) {
            rows[next[place] as usize] = (slot / op.top_k) as u32;
            pos[slot] = next[place];
            next[place] += 1;
        }
        self.slice_mut(saved.offsets).copy_from_slice(&offsets);
        self.slice_mut(saved.rows.slice(0, rows.len())).copy_from_slice(&rows);
        let [index, x] = [saved.pos, saved.weights].map(|of| of.slice(0, slots.len()));
        self.slice_mut(index).copy_from_slice(&pos);
        if let Some(choices) = op.choices {
            let some: Vec<u32> = pos.into_iter().filter(|row| *row != NO_EXPERT).collect();
            self.slice_mut(choices.slice(0, some.len())).copy_from_slice(&some);
        }
        let y = saved.row_weights;
        self.scatter_rows::<T>(&ScatterRows { rows: slots.len(), dim: 1, x, index, y });
    }

    /// out = residual + the sum over each token's rows, from where rows lie; or these rows.
    pub(crate) fn moe_experts<T: GemmFloat>(&mut self, op: &MoeExperts) {
        let MoeExperts { ref desc, ref tensors, out, each: by_choice } = *op;
        let MoeDesc { dim, hidden, top_k, .. } = *desc;
        let saved = &tensors.saved;
        let Saved { offsets, pos, weights, .. } = *saved;
        let scratch = Scratch::within(desc, tensors.workspace);
        hidden_rows::<T>(self, desc, tensors);
        let w_down = each(tensors.weights.down, desc, dim, hidden);
        let (a, y) = (saved.a, scratch.y);
        self.experts_down::<T>(&ExpertsDown { dim, hidden, a, offsets, w_down: &w_down, y });
        if let Some(each) = by_choice {
            return rows_of_choices::<T>(self, (dim, saved, each), y, out);
        }
        let residual = tensors.residual;
        let tokens = tokens_here(self, desc, tensors);
        let [pos, weights] = [pos, weights].map(|of| of.slice(0, tokens * top_k));
        let out = out.slice(0, tokens * dim);
        self.combine::<T>(&Combine { tokens, top_k, dim, y, pos, weights, residual, out });
    }

    pub(crate) fn moe_combine<T: GemmFloat>(&mut self, op: &MoeCombine) {
        let MoeCombine { ref desc, rows, slots: pos, weights, base, out } = *op;
        let MoeDesc { tokens, top_k, dim, .. } = *desc;
        match weights {
            Some(weights) => {
                let (y, residual) = (rows, Some(base));
                self.combine::<T>(&Combine { tokens, top_k, dim, y, pos, weights, residual, out });
            }
            None => {
                assert_eq!(base, out, "rows without weights are added to what is there");
                let (accumulate, x) = (true, rows);
                self.scatter_sum::<T>(&ScatterSum { tokens, top_k, dim, accumulate, x, pos, out });
            }
        }
    }

    pub(crate) fn moe_hidden<T: GemmFloat>(&mut self, op: &MoeHidden) {
        hidden_rows::<T>(self, &op.desc, &op.tensors);
    }

    pub(crate) fn moe_backward<T: GemmFloat>(&mut self, op: &MoeBackward) {
        let MoeBackward { ref desc, ref tensors, dout, dx, ref gradients } = *op;
        let MoeDesc { tokens, dim, top_k, .. } = *desc;
        let pos = tensors.saved.pos;
        let scratch = Scratch::within(desc, tensors.workspace);
        hidden_gradient::<T>(self, desc, tensors, dout, &scratch);
        let (rows, x, y) = (desc.slots(), scratch.ds, scratch.dweights);
        self.gather_rows::<T>(&GatherRows { rows, dim: 1, x, index: pos, y });
        route_backward::<T>(self, desc, tensors, &scratch, dx);
        expert_gradients::<T>(self, desc, tensors, dout, gradients, &scratch);
        gradients_of_up::<T>(self, desc, tensors, gradients, &scratch);
        let (accumulate, x) = (true, scratch.dx_rows);
        self.scatter_sum::<T>(&ScatterSum { tokens, top_k, dim, accumulate, x, pos, out: dx });
        router_gradient::<T>(self, desc, tensors, gradients, &scratch);
    }

    pub(crate) fn moe_experts_backward<T: GemmFloat>(&mut self, op: &MoeExpertsBackward) {
        let MoeExpertsBackward { ref desc, ref tensors, dout, dx, each, choices, ds, .. } = *op;
        let MoeDesc { dim, top_k, .. } = *desc;
        let (pos, saved) = (tensors.saved.pos, &tensors.saved);
        let scratch = Scratch::within(desc, tensors.workspace);
        hidden_gradient::<T>(self, desc, tensors, dout, &scratch);
        rows_of_choices::<T>(self, (1, saved, choices), scratch.ds, ds);
        expert_gradients::<T>(self, desc, tensors, dout, &op.gradients, &scratch);
        if !op.up_later {
            gradients_of_up::<T>(self, desc, tensors, &op.gradients, &scratch);
        }
        if each {
            return rows_of_choices::<T>(self, (dim, saved, choices), scratch.dx_rows, dx);
        }
        let tokens = tokens_here(self, desc, tensors);
        let (pos, out) = (pos.slice(0, tokens * top_k), dx.slice(0, tokens * dim));
        let (accumulate, x) = (false, scratch.dx_rows);
        self.scatter_sum::<T>(&ScatterSum { tokens, top_k, dim, accumulate, x, pos, out });
    }

    pub(crate) fn moe_up_gradient<T: GemmFloat>(&mut self, op: &MoeUpGradient) {
        let MoeUpGradient { ref desc, ref tensors, ref gradients } = *op;
        let scratch = Scratch::within(desc, tensors.workspace);
        gradients_of_up::<T>(self, desc, tensors, gradients, &scratch);
    }

    pub(crate) fn moe_router_backward<T: GemmFloat>(&mut self, op: &MoeRouterBackward) {
        let MoeRouterBackward { ref desc, ref tensors, ds, dx, ref gradients, .. } = *op;
        let scratch = Scratch::within(desc, tensors.workspace);
        self.copy(ds, scratch.dweights);
        route_backward::<T>(self, desc, tensors, &scratch, dx);
        router_gradient::<T>(self, desc, tensors, gradients, &scratch);
    }
}

/// How many tokens there are, of those that there is memory for.
fn tokens_here(cpu: &CpuDevice, desc: &MoeDesc, tensors: &MoeTensors) -> usize {
    let listed = tensors.starts.and_then(|starts| cpu.slice::<u32>(starts).last().copied());
    listed.map_or(desc.tokens, |all| all as usize)
}

/// y = the row of each choice of x [R, dim].
fn rows_of_choices<T: GemmFloat>(
    cpu: &mut CpuDevice,
    (dim, saved, each): (usize, &Saved, Each),
    x: Buffer,
    y: Buffer,
) {
    let index = match each {
        Each::Slots => saved.pos,
        Each::Choices(choices) => {
            let rows = cpu.slice::<u32>(saved.offsets).last().map_or(0, |end| *end as usize);
            choices.slice(0, rows)
        }
    };
    let rows = index.len();
    cpu.gather_rows::<T>(&GatherRows { rows, dim, x, index, y: y.slice(0, rows * dim) });
}

/// H and A, from x and where the router sent it.
fn hidden_rows<T: GemmFloat>(cpu: &mut CpuDevice, desc: &MoeDesc, tensors: &MoeTensors) {
    let saved = &tensors.saved;
    let (w_gate, w_up) = gate_and_up(tensors.weights.up, desc);
    cpu.experts_up::<T>(&ExpertsUp {
        dim: desc.dim,
        hidden: desc.hidden,
        activation: desc.activation,
        gated: desc.gated,
        x: tensors.x,
        row_index: saved.rows,
        offsets: saved.offsets,
        w_gate: &w_gate,
        w_up: &w_up,
        h: saved.h,
        a: saved.a,
    });
}

/// dH, s * A and <da', a> of each row.
fn hidden_gradient<T: GemmFloat>(
    cpu: &mut CpuDevice,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    dout: Buffer,
    scratch: &Scratch,
) {
    let Saved { offsets, rows, h, a, .. } = tensors.saved;
    let MoeDesc { dim, hidden, gated, .. } = *desc;
    cpu.experts_down_backward::<T>(&ExpertsDownBackward {
        dim,
        hidden,
        activation: desc.activation,
        gated,
        dy: dout,
        row_index: rows,
        offsets,
        w_down: &each(tensors.weights.down, desc, dim, hidden),
        h,
        a,
        s: tensors.saved.row_weights,
        ds: scratch.ds,
        dh: scratch.dh,
        a_scaled: scratch.scaled_a,
    });
}

/// The gradient of down, and dX rows.
fn expert_gradients<T: GemmFloat>(
    cpu: &mut CpuDevice,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    dout: Buffer,
    gradients: &Gradients,
    scratch: &Scratch,
) {
    let MoeDesc { dim, hidden, gated, .. } = *desc;
    let into = Into::new(cpu, (desc, tensors), gradients, [scratch.dw, scratch.bounds]);
    let dw_down = ExpertsDownWgrad {
        dim,
        hidden,
        dy: dout,
        row_index: tensors.saved.rows,
        offsets: tensors.saved.offsets,
        a_scaled: scratch.scaled_a,
        dw_down: &each(gradients.down, desc, dim, hidden),
    };
    into.down::<T>(cpu, &dw_down);
    let (w_gate, w_up) = gate_and_up(tensors.weights.up, desc);
    cpu.experts_dgrad::<T>(&ExpertsDgrad {
        dim,
        hidden,
        gated,
        dh: scratch.dh,
        offsets: tensors.saved.offsets,
        w_gate: &w_gate,
        w_up: &w_up,
        dx: scratch.dx_rows,
    });
}

/// The gradient of up, behind [`expert_gradients`].
fn gradients_of_up<T: GemmFloat>(
    cpu: &mut CpuDevice,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    gradients: &Gradients,
    scratch: &Scratch,
) {
    let into = Into::new(cpu, (desc, tensors), gradients, [scratch.dw, scratch.bounds]);
    let (dw_gate, dw_up) = gate_and_up(gradients.up, desc);
    let dw_up = ExpertsUpWgrad {
        dim: desc.dim,
        hidden: desc.hidden,
        gated: desc.gated,
        x: tensors.x,
        row_index: tensors.saved.rows,
        offsets: tensors.saved.offsets,
        dh: scratch.dh,
        dw_gate: &dw_gate,
        dw_up: &dw_up,
    };
    into.up::<T>(cpu, &dw_up);
}

fn router_gradient<T: GemmFloat>(
    cpu: &mut CpuDevice,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    gradients: &Gradients,
    scratch: &Scratch,
) {
    cpu.matmul::<T>(&Matmul {
        layout: Layout::Tn,
        m: desc.experts,
        n: desc.dim,
        k: desc.tokens,
        accumulate: gradients.accumulate_router,
        a: scratch.dlogits,
        b: tensors.x,
        c: gradients.router,
    });
}

/// The router, a segment at a time, and what all of them come to.
fn route<T: GemmFloat>(cpu: &mut CpuDevice, desc: &MoeDesc, tensors: &MoeTensors) {
    let MoeDesc { experts, top_k, segments, .. } = *desc;
    let (saved, tokens) = (&tensors.saved, desc.tokens / segments);
    let (mut losses, mut counts) = ([0.0; 2], vec![0_u32; experts]);
    for segment in 0..segments {
        let of = |buffer: Buffer, a_token: usize| {
            buffer.slice(segment * tokens * a_token, tokens * a_token)
        };
        let own_counts = saved.segment_counts.slice(segment * experts, experts);
        cpu.route::<T>(&Route {
            tokens,
            experts,
            top_k,
            scoring: scoring(desc),
            norm_topk: desc.norm_topk,
            scale: f64::from(desc.scale),
            groups: desc.groups,
            logits: of(saved.logits, experts),
            bias: tensors.weights.bias,
            probs: of(saved.probs, experts),
            lse: of(saved.lse, 1),
            ids: of(saved.ids, top_k),
            weights: of(saved.weights, top_k),
            counts: own_counts,
            prob_sums: saved.prob_sums.slice(segment * experts, experts),
            losses: saved.losses,
        });
        let own: Vec<f64> = cpu.slice(saved.losses).to_vec();
        losses.iter_mut().zip(own).for_each(|(sum, own)| *sum += own / segments as f64);
        let own: Vec<u32> = cpu.slice(own_counts).to_vec();
        counts.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
    }
    cpu.slice_mut(saved.losses).copy_from_slice(&losses);
    cpu.slice_mut(saved.counts).copy_from_slice(&counts);
}

/// From the gradient of each slot's weight to that of the logits, and dx of that.
fn route_backward<T: GemmFloat>(
    cpu: &mut CpuDevice,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    scratch: &Scratch,
    dx: Buffer,
) {
    let MoeDesc { tokens, dim, experts, top_k, .. } = *desc;
    let saved = &tensors.saved;
    let Scratch { dweights, dlogits, .. } = *scratch;
    let loss_scale = tensors.loss_scale.map_or(1.0, |scale| {
        f64::from(cpu.slice::<f32>(scale)[0])
    });
    for segment in 0..desc.segments {
        let count = tokens / desc.segments;
        let of = |buffer: Buffer, a_token: usize| {
            buffer.slice(segment * count * a_token, count * a_token)
        };
        // The layer's losses are means over the segments.
        let share = desc.segments as f64;
        cpu.route_backward::<T>(&RouteBackward {
            tokens: count,
            experts,
            top_k,
            scoring: scoring(desc),
            norm_topk: desc.norm_topk,
            scale: f64::from(desc.scale),
            aux_coef: desc.aux_coef / share * loss_scale,
            z_coef: desc.z_coef / share * loss_scale,
            logits: of(saved.logits, experts),
            probs: of(saved.probs, experts),
            lse: of(saved.lse, 1),
            ids: of(saved.ids, top_k),
            counts: saved.segment_counts.slice(segment * experts, experts),
            dweights: of(dweights, top_k),
            dlogits: of(dlogits, experts),
        });
    }
    cpu.matmul::<T>(&Matmul {
        layout: Layout::Nn,
        m: tokens,
        n: dim,
        k: experts,
        accumulate: false,
        a: dlogits,
        b: tensors.weights.router,
        c: dx,
    });
}
