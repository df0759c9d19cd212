//! Between a router, which chooses experts, and what is computed: their slices.
//!
//! ```text
//! ids, weights [T, K] -> [T, K r] -> places, rows, products, sums      as of E r experts
//! dweights [T, K] <- [T, K r] <- ..
//! ```
//! With whole experts (r = 1) there is nothing between the two.

use crate::engine::model::Model;
use moejob_kernels::{Buffer, SliceChoices, SumSlices};

/// [`Slices`](moejob_protocol::slices::Slices) as sizes of buffers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Computed {
    /// `r`
    pub each: usize,
    /// `F / r`
    pub width: usize,
}

impl Model {
    /// What is computed behind the router.
    pub(crate) fn slices(&self) -> Computed {
        let slices = self.config.slices();
        Computed {
            each: slices.each as usize,
            width: slices.width as usize,
        }
    }

    /// Ids and weights `from` choices of experts `to` those of their slices, which have their
    /// `places` for ids, if there are some.
    pub(crate) fn slice_choices(
        &mut self,
        [ids, weights]: [Buffer; 2],
        [slice_ids, slice_weights]: [Buffer; 2],
        places: Option<Buffer>,
    ) {
        let (choices, slices) = (ids.len(), self.slices().each);
        let op = SliceChoices { choices, slices, ids, weights, places, slice_ids, slice_weights };
        self.device.slice_choices(&op);
    }

    /// The gradients of the weights of experts, `sums`, from those of their slices.
    pub(crate) fn sum_slices(&mut self, x: Buffer, sums: Buffer) {
        let (choices, slices) = (sums.len(), self.slices().each);
        self.device.sum_slices(&SumSlices { choices, slices, x, sums });
    }
}
