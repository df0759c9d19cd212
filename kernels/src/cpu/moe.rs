//! The mixture layer of one rank, from the ops that it consists of.

use super::moe_gradients::Into;
use crate::buffer::{ArenaPlan, Buffer, DType, Element};
use crate::cuda::{
    Gradients, MoeActivation, MoeDesc, MoeTensors, Output, Refusal, Saved, Stacked,
};
use crate::device::Device;
use crate::experts::{
    Activation, ExpertsDgrad, ExpertsDown, ExpertsDownBackward, ExpertsDownWgrad, ExpertsUp,
    ExpertsUpWgrad,
};
use crate::matmul::{Layout, Matmul};
use crate::moe::{MoeBackward, MoeForward, MoeHidden, MoePlan};
use crate::moe_here::{
    Each, MoeCombine, MoeExperts, MoeExpertsBackward, MoePlace, MoeRoute, MoeRouterBackward,
    MoeUpGradient, Sources,
};
use crate::place::{Combine, GatherRows, NO_EXPERT, Place, ScatterRows, ScatterSum};
use crate::route::{Route, RouteBackward, Scoring};

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
    if desc.activation == MoeActivation::Gelu {
        return Err(Refusal::Activation { found: desc.activation });
    }
    if desc.weight_gradients == Output::F32 {
        let (found, element) = (desc.weight_gradients, desc.element);
        let reason = "on a CPU they are elements, or sums";
        return Err(Refusal::Output { found, element, reason });
    }
    desc.check_counts()
}

fn activation(desc: &MoeDesc) -> Activation {
    match desc.activation {
        MoeActivation::Silu => Activation::Silu,
        MoeActivation::Relu => Activation::Relu,
        MoeActivation::GeluTanh => Activation::Gelu,
        MoeActivation::Gelu => panic!("`plan` refuses {:?} on a CPU", desc.activation),
    }
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

pub(crate) fn forward(device: &mut Device, op: &MoeForward) {
    let MoeForward { desc, tensors, out } = *op;
    let MoeDesc { tokens, experts, top_k, .. } = desc;
    route_alone(device, &MoeRoute { desc, tensors });
    let Saved { ids, counts, offsets, rows, pos, weights, .. } = tensors.saved;
    device.place(&Place { tokens, top_k, experts, ids, counts, offsets, rows, pos });
    let (rows, y) = (desc.slots(), tensors.saved.row_weights);
    device.scatter_rows(&ScatterRows { rows, dim: 1, x: weights, index: pos, y });
    self::experts(device, &MoeExperts { desc, tensors, out, each: None });
}

pub(crate) fn route_alone(device: &mut Device, op: &MoeRoute) {
    let MoeRoute { ref desc, ref tensors } = *op;
    device.matmul(&Matmul {
        layout: Layout::Nt,
        m: desc.tokens,
        n: desc.experts,
        k: desc.dim,
        accumulate: false,
        a: tensors.x,
        b: tensors.weights.router,
        c: tensors.saved.logits,
    });
    route(device, desc, tensors);
}

/// Elements of the memory that an op of processors works in.
pub(super) fn held<E: Element>(device: &Device, buffer: Buffer) -> Vec<E> {
    device.as_cpu().expect("an op of processors").slice(buffer).to_vec()
}

pub(super) fn set<E: Element>(device: &mut Device, buffer: Buffer, values: &[E]) {
    device.as_cpu_mut().expect("an op of processors").slice_mut(buffer).copy_from_slice(values);
}

pub(crate) fn place_here(device: &mut Device, op: &MoePlace) {
    let all = op.check();
    let saved = &op.saved;
    let ids: Vec<u32> = held(device, saved.ids);
    let tokens = match op.sources {
        Sources::Even { each, present, .. } => present * each,
        Sources::Listed(starts) => held::<u32>(device, starts).last().map_or(0, |n| *n as usize),
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
        let overflows = held::<f64>(device, op.overflows)[0] + 1.0;
        set(device, op.overflows, &[overflows]);
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
    set(device, saved.offsets, &offsets);
    set(device, saved.rows.slice(0, rows.len()), &rows);
    let [index, x] = [saved.pos, saved.weights].map(|of| of.slice(0, slots.len()));
    set(device, index, &pos);
    if let Some(choices) = op.choices {
        let some: Vec<u32> = pos.into_iter().filter(|row| *row != NO_EXPERT).collect();
        set(device, choices.slice(0, some.len()), &some);
    }
    let y = saved.row_weights;
    device.scatter_rows(&ScatterRows { rows: slots.len(), dim: 1, x, index, y });
}

/// out = residual + the sum over each token's rows, from where rows lie; or these rows.
pub(crate) fn experts(device: &mut Device, op: &MoeExperts) {
    let MoeExperts { ref desc, ref tensors, out, each: by_choice } = *op;
    let MoeDesc { dim, hidden, top_k, .. } = *desc;
    let saved = &tensors.saved;
    let Saved { offsets, pos, weights, .. } = *saved;
    let scratch = Scratch::within(desc, tensors.workspace);
    hidden_rows(device, desc, tensors);
    let w_down = each(tensors.weights.down, desc, dim, hidden);
    let (a, y) = (saved.a, scratch.y);
    device.experts_down(&ExpertsDown { dim, hidden, a, offsets, w_down: &w_down, y });
    if let Some(each) = by_choice {
        return rows_of_choices(device, (desc.dim, saved, each), y, out);
    }
    let residual = tensors.residual;
    let tokens = tokens_here(device, desc, tensors);
    let [pos, weights] = [pos, weights].map(|of| of.slice(0, tokens * top_k));
    let out = out.slice(0, tokens * dim);
    device.combine(&Combine { tokens, top_k, dim, y, pos, weights, residual, out });
}

/// How many tokens there are, of those that there is memory for.
fn tokens_here(device: &Device, desc: &MoeDesc, tensors: &MoeTensors) -> usize {
    let listed = tensors.starts.map(|starts| held::<u32>(device, starts));
    listed.and_then(|starts| starts.last().copied()).map_or(desc.tokens, |all| all as usize)
}

/// y = the row of each choice of x [R, dim].
fn rows_of_choices(
    device: &mut Device,
    (dim, saved, each): (usize, &Saved, Each),
    x: Buffer,
    y: Buffer,
) {
    let index = match each {
        Each::Slots => saved.pos,
        Each::Choices(choices) => {
            let rows = held::<u32>(device, saved.offsets).last().map_or(0, |end| *end as usize);
            choices.slice(0, rows)
        }
    };
    let rows = index.len();
    device.gather_rows(&GatherRows { rows, dim, x, index, y: y.slice(0, rows * dim) });
}

pub(crate) fn combine(device: &mut Device, op: &MoeCombine) {
    let MoeCombine { ref desc, rows, slots: pos, weights, base, out } = *op;
    let MoeDesc { tokens, top_k, dim, .. } = *desc;
    match weights {
        Some(weights) => {
            let (y, residual) = (rows, Some(base));
            device.combine(&Combine { tokens, top_k, dim, y, pos, weights, residual, out });
        }
        None => {
            assert_eq!(base, out, "rows without weights are added to what is there");
            let (accumulate, x) = (true, rows);
            device.scatter_sum(&ScatterSum { tokens, top_k, dim, accumulate, x, pos, out });
        }
    }
}

pub(crate) fn hidden(device: &mut Device, op: &MoeHidden) {
    hidden_rows(device, &op.desc, &op.tensors);
}

/// H and A, from x and where the router sent it.
fn hidden_rows(device: &mut Device, desc: &MoeDesc, tensors: &MoeTensors) {
    let saved = &tensors.saved;
    let (w_gate, w_up) = gate_and_up(tensors.weights.up, desc);
    device.experts_up(&ExpertsUp {
        dim: desc.dim,
        hidden: desc.hidden,
        activation: activation(desc),
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

pub(crate) fn backward(device: &mut Device, op: &MoeBackward) {
    let MoeBackward { ref desc, ref tensors, dout, dx, ref gradients } = *op;
    let MoeDesc { tokens, dim, top_k, .. } = *desc;
    let pos = tensors.saved.pos;
    let scratch = Scratch::within(desc, tensors.workspace);
    hidden_gradient(device, desc, tensors, dout, &scratch);
    let (rows, x, y) = (desc.slots(), scratch.ds, scratch.dweights);
    device.gather_rows(&GatherRows { rows, dim: 1, x, index: pos, y });
    route_backward(device, desc, tensors, &scratch, dx);
    expert_gradients(device, desc, tensors, dout, gradients, &scratch);
    gradients_of_up(device, desc, tensors, gradients, &scratch);
    let (accumulate, x) = (true, scratch.dx_rows);
    device.scatter_sum(&ScatterSum { tokens, top_k, dim, accumulate, x, pos, out: dx });
    router_gradient(device, desc, tensors, gradients, &scratch);
}

pub(crate) fn experts_backward(device: &mut Device, op: &MoeExpertsBackward) {
    let MoeExpertsBackward { ref desc, ref tensors, dout, dx, each, choices, ds, .. } = *op;
    let MoeDesc { dim, top_k, .. } = *desc;
    let (pos, saved) = (tensors.saved.pos, &tensors.saved);
    let scratch = Scratch::within(desc, tensors.workspace);
    hidden_gradient(device, desc, tensors, dout, &scratch);
    rows_of_choices(device, (1, saved, choices), scratch.ds, ds);
    expert_gradients(device, desc, tensors, dout, &op.gradients, &scratch);
    if !op.up_later {
        gradients_of_up(device, desc, tensors, &op.gradients, &scratch);
    }
    if each {
        return rows_of_choices(device, (dim, saved, choices), scratch.dx_rows, dx);
    }
    let tokens = tokens_here(device, desc, tensors);
    let (pos, out) = (pos.slice(0, tokens * top_k), dx.slice(0, tokens * dim));
    let (accumulate, x) = (false, scratch.dx_rows);
    device.scatter_sum(&ScatterSum { tokens, top_k, dim, accumulate, x, pos, out });
}

pub(crate) fn up_gradient(device: &mut Device, op: &MoeUpGradient) {
    let MoeUpGradient { ref desc, ref tensors, ref gradients } = *op;
    let scratch = Scratch::within(desc, tensors.workspace);
    gradients_of_up(device, desc, tensors, gradients, &scratch);
}

pub(crate) fn router_backward(device: &mut Device, op: &MoeRouterBackward) {
    let MoeRouterBackward { ref desc, ref tensors, ds, dx, ref gradients, .. } = *op;
    let scratch = Scratch::within(desc, tensors.workspace);
    device.copy(ds, scratch.dweights);
    route_backward(device, desc, tensors, &scratch, dx);
    router_gradient(device, desc, tensors, gradients, &scratch);
}

/// dH, s * A and <da', a> of each row.
fn hidden_gradient(
    device: &mut Device,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    dout: Buffer,
    scratch: &Scratch,
) {
    let Saved { offsets, rows, h, a, .. } = tensors.saved;
    let MoeDesc { dim, hidden, gated, .. } = *desc;
    device.experts_down_backward(&ExpertsDownBackward {
        dim,
        hidden,
        activation: activation(desc),
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
fn expert_gradients(
    device: &mut Device,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    dout: Buffer,
    gradients: &Gradients,
    scratch: &Scratch,
) {
    let MoeDesc { dim, hidden, gated, .. } = *desc;
    let into = Into::new(device, (desc, tensors), gradients, [scratch.dw, scratch.bounds]);
    let dw_down = ExpertsDownWgrad {
        dim,
        hidden,
        dy: dout,
        row_index: tensors.saved.rows,
        offsets: tensors.saved.offsets,
        a_scaled: scratch.scaled_a,
        dw_down: &each(gradients.down, desc, dim, hidden),
    };
    into.down(device, &dw_down);
    let (w_gate, w_up) = gate_and_up(tensors.weights.up, desc);
    device.experts_dgrad(&ExpertsDgrad {
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
fn gradients_of_up(
    device: &mut Device,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    gradients: &Gradients,
    scratch: &Scratch,
) {
    let into = Into::new(device, (desc, tensors), gradients, [scratch.dw, scratch.bounds]);
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
    into.up(device, &dw_up);
}

fn router_gradient(
    device: &mut Device,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    gradients: &Gradients,
    scratch: &Scratch,
) {
    device.matmul(&Matmul {
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
fn route(device: &mut Device, desc: &MoeDesc, tensors: &MoeTensors) {
    let MoeDesc { experts, top_k, segments, .. } = *desc;
    let (saved, tokens) = (&tensors.saved, desc.tokens / segments);
    let (mut losses, mut counts) = ([0.0; 2], vec![0_u32; experts]);
    for segment in 0..segments {
        let of = |buffer: Buffer, a_token: usize| {
            buffer.slice(segment * tokens * a_token, tokens * a_token)
        };
        let own_counts = saved.segment_counts.slice(segment * experts, experts);
        device.route(&Route {
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
        let own: Vec<f64> = held(device, saved.losses);
        losses.iter_mut().zip(own).for_each(|(sum, own)| *sum += own / segments as f64);
        let own: Vec<u32> = held(device, own_counts);
        counts.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
    }
    set(device, saved.losses, &losses);
    set(device, saved.counts, &counts);
}

/// From the gradient of each slot's weight to that of the logits, and dx of that.
fn route_backward(
    device: &mut Device,
    desc: &MoeDesc,
    tensors: &MoeTensors,
    scratch: &Scratch,
    dx: Buffer,
) {
    let MoeDesc { tokens, dim, experts, top_k, .. } = *desc;
    let saved = &tensors.saved;
    let Scratch { dweights, dlogits, .. } = *scratch;
    let loss_scale = tensors.loss_scale.map_or(1.0, |scale| {
        f64::from(held::<f32>(device, scale)[0])
    });
    for segment in 0..desc.segments {
        let count = tokens / desc.segments;
        let of = |buffer: Buffer, a_token: usize| {
            buffer.slice(segment * count * a_token, count * a_token)
        };
        // The layer's losses are means over the segments.
        let share = desc.segments as f64;
        device.route_backward(&RouteBackward {
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
    device.matmul(&Matmul {
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
