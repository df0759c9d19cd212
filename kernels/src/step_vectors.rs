//! What a step leaves behind, and what it is told, as two vectors in device memory.
//!
//! ```text
//! host -> StepParams -> ops that update
//! ops -> numbers of each rank -> reduced over ranks -> StepNumbers -> ops that update, host (once)
//! ```
//! Both are F64. An update is a function of the two alone: whether it happens (`NON_FINITE` and
//! `OVERFLOWS` are zero), how much gradients are clipped (`SQUARES`), and how far it goes.

use std::ops::Range;

/// Where the single numbers of StepNumbers stand.
pub mod number {
    /// Sum over the valid targets of the step of their cross-entropies.
    pub const LOSS: usize = 0;
    /// Valid targets, where they are counted on the device; else 0.
    pub const TARGETS: usize = 1;
    /// Sums over micro-batches and mixture layers: auxiliary loss, z loss, mean entropy.
    pub const AUX: usize = 2;
    pub const Z: usize = 3;
    pub const ENTROPY: usize = 4;
    /// The squared norm of the gradients that are trained, each owned element once, without the
    /// loss scale.
    pub const SQUARES: usize = 5;
    /// How many of the loss and the sums of squares of gradients are no finite numbers. A count,
    /// since a maximum can lose NaN.
    pub const NON_FINITE: usize = 6;
    /// Layers of rounds whose routed rows found no room.
    pub const OVERFLOWS: usize = 7;
    /// Tokens without any expert, over all layers.
    pub const UNROUTED: usize = 8;
    /// Choices of tokens behind another in their text, and those of them that the token before did
    /// not make.
    pub const FOLLOWED: usize = 9;
    pub const SWITCHED: usize = 10;
    /// Single numbers; what follows is reserved up to here.
    pub const COUNT: usize = 16;
}

/// Where the numbers of StepParams stand.
pub mod param {
    /// Learning rate of the step.
    pub const RATE: usize = 0;
    /// Updates including this one, from 1: of AdamW's bias corrections.
    pub const STEP: usize = 1;
    /// The same of the experts, whose moments begin with their first update; 0: they hold still,
    /// and their gradients do not count in the norm.
    pub const EXPERT_STEP: usize = 2;
    /// Largest norm of the gradients; above it they are scaled down. 0: no clipping.
    pub const NORM_MAX: usize = 3;
    /// What the loss, and so every gradient, is multiplied by (fp16); else 1.
    pub const LOSS_SCALE: usize = 4;
    pub const COUNT: usize = 16;
}

/// The vector of a step's numbers (StepNumbers), reduced over ranks: single numbers, then tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NumbersLayout {
    /// Mixture layers.
    pub layers: usize,
    /// `E`
    pub experts: usize,
    /// Parameters in the model's table.
    pub tensors: usize,
}

impl NumbersLayout {
    /// Elements in all.
    pub fn len(&self) -> usize {
        number::COUNT + 2 * self.layers * self.experts + self.tensors
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// [layers, E]: choices of each expert.
    pub fn loads(&self) -> Range<usize> {
        number::COUNT..number::COUNT + self.layers * self.experts
    }

    /// [layers, E]: those that were dropped, since the expert was full.
    pub fn dropped(&self) -> Range<usize> {
        let loads = self.loads();
        loads.end..loads.end + loads.len()
    }

    /// [tensors]: sums of squares of blocks of the parameter's gradient that are not finite.
    pub fn non_finite(&self) -> Range<usize> {
        let dropped = self.dropped();
        dropped.end..dropped.end + self.tensors
    }
}

/// Whether an update is left out.
pub fn is_skipped(numbers: &[f64]) -> bool {
    numbers[number::NON_FINITE] != 0.0 || numbers[number::OVERFLOWS] != 0.0
}

/// What clipping multiplies the gradients (without their loss scale) by.
pub fn clip_factor(params: &[f64], numbers: &[f64]) -> f64 {
    let (most, norm) = (params[param::NORM_MAX], numbers[number::SQUARES].sqrt());
    if most > 0.0 && norm > most { most / norm } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_the_vector_lie_side_by_side() {
        let numbers = NumbersLayout { layers: 3, experts: 5, tensors: 7 };
        assert_eq!(numbers.loads(), 16..31);
        assert_eq!(numbers.dropped(), 31..46);
        assert_eq!(numbers.non_finite(), 46..53);
        assert_eq!(numbers.len(), 53);
    }

    #[test]
    fn gradients_are_clipped_to_the_largest_norm() {
        let (mut params, mut numbers) = ([0.0; param::COUNT], [0.0; number::COUNT]);
        numbers[number::SQUARES] = 16.0;
        assert_eq!(clip_factor(&params, &numbers), 1.0);
        params[param::NORM_MAX] = 1.0;
        assert_eq!(clip_factor(&params, &numbers), 0.25);
        params[param::NORM_MAX] = 4.0;
        assert_eq!(clip_factor(&params, &numbers), 1.0);
        assert!(!is_skipped(&numbers));
        numbers[number::OVERFLOWS] = 2.0;
        assert!(is_skipped(&numbers));
    }
}
