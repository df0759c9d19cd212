//! Between the choice of experts and what is computed: each expert of hidden width `F` may be cut
//! into `r` slices of width `F / r`, which are experts by themselves from here on.
//!
//! The output of an expert is the sum of what its slices make of a token, each with the expert's
//! weight. So a token that chose an expert has chosen all of its slices.

use crate::buffer::{Buffer, DType};

/// Slice j of expert e has the id `e r + j`: slice_ids[c, j] = ids[c] r + j, of a `NO_EXPERT` the
/// same, and slice_weights[c, j] = weights[c]. Ids that ascend in a token do so behind it. With
/// `places` it is places[ids[c] r + j] in place of the id.
#[derive(Clone, Copy, Debug)]
pub struct SliceChoices {
    /// `C`: choices of all tokens, T K
    pub choices: usize,
    /// `r`
    pub slices: usize,
    /// u32 [C], [C]
    pub ids: Buffer,
    pub weights: Buffer,
    /// u32 [E r], by id of a slice
    pub places: Option<Buffer>,
    /// Output u32 [C, r], [C, r]
    pub slice_ids: Buffer,
    pub slice_weights: Buffer,
}

/// The way back of gradients of weights: sums[c] = x[c, 0] + x[c, 1] + .., in this order and
/// rounded after each.
#[derive(Clone, Copy, Debug)]
pub struct SumSlices {
    /// `C`
    pub choices: usize,
    /// `r`
    pub slices: usize,
    /// [C, r]
    pub x: Buffer,
    /// Output [C]
    pub sums: Buffer,
}

impl SliceChoices {
    /// Kinds and lengths.
    pub(crate) fn check(&self) {
        let SliceChoices { choices, slices, ids, weights, places, .. } = *self;
        let (slice_ids, slice_weights) = (self.slice_ids, self.slice_weights);
        let all = choices * slices;
        assert!(slices > 0 && u32::try_from(all).is_ok(), "{self:?}");
        let kinds = (ids.dtype(), slice_ids.dtype(), slice_weights.dtype());
        assert_eq!(kinds, (DType::U32, DType::U32, weights.dtype()), "{self:?}");
        assert!(places.is_none_or(|places| places.dtype() == DType::U32), "{self:?}");
        assert_eq!((ids.len(), weights.len()), (choices, choices), "{self:?}");
        assert_eq!((slice_ids.len(), slice_weights.len()), (all, all), "{self:?}");
    }
}

impl SumSlices {
    pub(crate) fn check(&self) {
        let SumSlices { choices, slices, x, sums } = *self;
        assert!(slices > 0 && u32::try_from(choices * slices).is_ok(), "{self:?}");
        assert_eq!(x.dtype(), sums.dtype(), "{self:?}");
        assert_eq!((x.len(), sums.len()), (choices * slices, choices), "{self:?}");
    }
}
