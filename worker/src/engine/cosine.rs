//! The cosine gate: logits are e^temperature times cosines in a projected space.
//!
//! Letters: `T` tokens, `E` experts, `P` the projected width.

use crate::engine::forward::Pass;
use crate::engine::gate::product;
use crate::engine::handles::DenseLayer;
use moejob_kernels::{
    AddBias, BiasBackward, Buffer, Layout as Order, NormalizeRows, NormalizeRowsBackward, Temper,
    TemperBackward,
};

impl Pass<'_> {
    /// logits = e^temperature * cos(projector x + bias, similarity)
    pub(crate) fn cosine_logits(
        &mut self,
        layer: usize,
        t: usize,
        x: Buffer,
        weights: &DenseLayer,
    ) {
        let (e, d) = (self.model.expert_count(), self.model.dim());
        let router = self.model.router(layer);
        let kept = router.gate.and_then(|gate| gate.cosine);
        let (Some(gate), Some(kept)) = (weights.cosine, kept) else { return };
        let width = gate.similarity.len() / e;
        let rows = |buffer: Buffer| buffer.slice(0, t * width);
        let (projected, normed) = (rows(kept.projected), rows(kept.normed));
        let weight = gate.projector.weight;
        self.model.device.exact_matmul(&product(Order::Nt, [t, width, d], x, weight, projected));
        if let Some(bias) = gate.projector.bias {
            self.model.device.add_bias(&AddBias { rows: t, columns: width, x: projected, bias });
        }
        let norm = kept.norm.slice(0, t);
        let op = NormalizeRows { rows: t, dim: width, x: projected, y: normed, norm };
        self.model.device.normalize_rows(&op);
        let (y, norm) = (kept.similarity, kept.similarity_norm);
        let op = NormalizeRows { rows: e, dim: width, x: gate.similarity, y, norm };
        self.model.device.normalize_rows(&op);
        let logits = router.logits.slice(0, t * e);
        self.model.device.exact_matmul(&product(Order::Nt, [t, e, width], normed, y, logits));
        self.model.device.temper(&Temper { temperature: gate.temperature, x: logits });
    }

    /// Gradients of all but the projector's matrix; that of its output, and the matrix with where
    /// its gradient goes. None: the gate is another one.
    pub(crate) fn cosine_backward(
        &mut self,
        layer: usize,
        t: usize,
        (gradients, accumulate): (&DenseLayer, bool),
    ) -> Option<(Buffer, [Buffer; 2])> {
        let e = self.model.expert_count();
        let router = self.model.router(layer);
        let weights = self.model.dense.layers[layer].cosine;
        let kept = router.gate.and_then(|gate| gate.cosine);
        let scratch = self.model.gate_scratch().cosine;
        let (Some(gate), Some(kept), Some(scratch), Some(gradient)) =
            (weights, kept, scratch, gradients.cosine)
        else {
            return None;
        };
        let width = gate.similarity.len() / e;
        let rows = |buffer: Buffer| buffer.slice(0, t * width);
        let [d_normed, d_projected, d_similarity] =
            [rows(scratch[0]), rows(scratch[1]), scratch[2]];
        let dlogits = self.model.router_scratch().dlogits.slice(0, t * e);
        self.model.device.temper_backward(&TemperBackward {
            accumulate,
            temperature: gate.temperature,
            x: router.logits.slice(0, t * e),
            dx: dlogits,
            d_temperature: gradient.temperature,
        });
        let normed = rows(kept.normed);
        let op = product(Order::Nn, [t, width, e], dlogits, kept.similarity, d_normed);
        self.model.device.exact_matmul(&op);
        let op = product(Order::Tn, [e, width, t], dlogits, normed, d_similarity);
        self.model.device.exact_matmul(&op);
        self.model.device.normalize_rows_backward(&NormalizeRowsBackward {
            rows: e,
            dim: width,
            accumulate,
            y: kept.similarity,
            norm: kept.similarity_norm,
            dy: d_similarity,
            dx: gradient.similarity,
        });
        let norm = kept.norm.slice(0, t);
        let (y, dy, dx) = (normed, d_normed, d_projected);
        let (rows, dim) = (t, width);
        let op = NormalizeRowsBackward { rows, dim, accumulate: false, y, norm, dy, dx };
        self.model.device.normalize_rows_backward(&op);
        if let Some(dbias) = gradient.projector.bias {
            let (columns, dy) = (width, dx);
            let op = BiasBackward { rows, columns, accumulate, dy, dbias };
            self.model.device.bias_backward(&op);
        }
        if self.model.config.router.frozen {
            self.model.device.fill_zero(gradient.similarity);
            self.model.device.fill_zero(gradient.temperature);
            gradient.projector.bias.into_iter().for_each(|bias| self.model.device.fill_zero(bias));
        }
        Some((dx, [gate.projector.weight, gradient.projector.weight]))
    }
}
