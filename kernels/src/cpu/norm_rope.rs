//! See [`crate::NormRope`]: the two ops one after the other, whose bits these are.

use super::{CpuDevice, Float};
use crate::norm::{RmsNorm, RmsNormBackward};
use crate::norm_rope::{NormRope, NormRopeBackward};
use crate::rope::Rope;

impl CpuDevice {
    pub(crate) fn norm_rope<T: Float>(&mut self, op: &NormRope) {
        let (rows, dim) = op.spans();
        let NormRope { eps, x, w, y, rstd, .. } = *op;
        self.rms_norm::<T>(&RmsNorm { rows, dim, eps, x, w, y, rstd });
        self.rope::<T>(&op.rope(y, false));
    }

    pub(crate) fn norm_rope_backward<T: Float>(&mut self, op: &NormRopeBackward) {
        let (rows, dim) = op.forward.spans();
        let NormRopeBackward { dy, dx, dw, accumulate_dw, .. } = *op;
        let NormRope { x, w, rstd, .. } = op.forward;
        self.rope::<T>(&op.forward.rope(dy, true));
        let accumulate_dx = false;
        let op =
            RmsNormBackward { rows, dim, x, w, rstd, dy, dx, dw, accumulate_dx, accumulate_dw };
        self.rms_norm_backward::<T>(&op);
    }
}

impl NormRope {
    fn rope(&self, x: crate::Buffer, inverse: bool) -> Rope {
        let NormRope { tokens, heads, head_dim, theta, positions, .. } = *self;
        Rope { tokens, heads, head_dim, theta, inverse, positions, x }
    }
}
