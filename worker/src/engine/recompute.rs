//! What forward did not keep, computed once more before a layer's backward: the same ops on the
//! same numbers, so the same bits.

use crate::engine::forward::Pass;
use moejob_kernels::Clamp;

impl Pass<'_> {
    /// Whatever the backward pass of `layer` reads and forward's memory no longer holds.
    pub(crate) fn recompute(&mut self, layer: usize) {
        let layers = self.model.config.num_hidden_layers as usize;
        let recompute = self.model.shape.recompute;
        self.again = true;
        let again = recompute.again(layer as u32, layers as u32);
        again.for_each(|layer| self.layer(layer as usize));
        self.again = false;
        // Those of the last layer were written last.
        if recompute.drops_norms() && self.round.tokens > 0 && layer + 1 < layers {
            self.restore_norms(layer);
        }
    }

    fn restore_norms(&mut self, layer: usize) {
        let (t, d) = (self.round.tokens, self.model.dim());
        let weights = self.model.dense.layers[layer].clone();
        let b = self.model.buffers.layers[layer].clone();
        let rows = |buffer: moejob_kernels::Buffer| buffer.slice(0, t * d);
        self.norm(t, rows(b.input), weights.norm1, rows(b.norm1), b.rstd1.slice(0, t));
        self.norm(t, rows(b.mid), weights.norm2, rows(b.norm2), b.rstd2.slice(0, t));
        if b.qk_norm.is_none() {
            return;
        }
        if let Some(ops) = self.norm_ropes(layer, t) {
            ops.iter().for_each(|op| self.model.device.norm_rope(op));
            return;
        }
        // What was clamped is kept as it was, so it needs no norm.
        let (q_size, kv_size) = self.attention_sizes();
        let (q, k) = (b.q.slice(0, t * q_size), b.k.slice(0, t * kv_size));
        let kept = self.unclipped(layer, [q.len(), k.len(), t * kv_size]);
        let [q_kept, k_kept, _] = kept.expect("a norm without a turn has a clamp behind it");
        for (x, kept) in [(q, q_kept), (k, k_kept)] {
            self.model.device.copy(kept, x);
            let limit = self.model.config.clip_qkv;
            self.model.device.clamp(&Clamp { limit, x });
            self.rope(t, x, false);
        }
    }
}
