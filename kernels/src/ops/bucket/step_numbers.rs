//! What the host tells a step and what a step tells the host: vectors of F64 in device memory.
//!
//! ```text
//! StepParams   host -> device, before a step: rates, corrections, clip, loss scale
//! StepNumbers  device -> host, summed over ranks: losses, squared norm, counts, loads
//! StepControl  what follows from both, on the device: whether weights change, and by how much
//! ```
//! All are vectors of f64, so that one copy carries them and a sum over ranks is one collective.
//! Nothing in a step waits for the host: clipping, skipping and unscaling are decided from the
//! reduced numbers by [`StepControl::decide`], which every update asks, on every device.

use std::ops::Range;

/// How many kinds of coefficients a step may have. Tensors differ in them where some do not decay,
/// or where their first update comes later, such as that of experts behind a router's warm-up.
pub const CLASSES_MAX: usize = 4;

/// Places in the vector of a step's parameters, F64 [`StepParams::LEN`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepParams {
    /// What the loss was multiplied by; a power of two, 1 unless in fp16.
    pub loss_scale: f64,
    /// The largest norm of gradients; 0: any.
    pub norm_max: f64,
    /// Updates before this one, for random rounding; below 2^53.
    pub step: u64,
    pub classes: [StepClass; CLASSES_MAX],
}

/// The coefficients of one class of tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepClass {
    /// lr / (1 - beta1^n), n updates of this class with this one
    pub rate: f64,
    /// 1 / (1 - beta2^n)
    pub correction: f64,
    /// 1 - lr * weight_decay
    pub keep: f64,
    /// Inactive tensors are neither updated nor counted in the norm.
    pub active: bool,
}

impl StepParams {
    pub const LOSS_SCALE: usize = 0;
    pub const NORM_MAX: usize = 1;
    pub const STEP: usize = 2;
    /// Class c starts at `CLASSES + EACH * c`.
    pub const CLASSES: usize = 4;
    pub const EACH: usize = 4;
    pub const RATE: usize = 0;
    pub const CORRECTION: usize = 1;
    pub const KEEP: usize = 2;
    pub const ACTIVE: usize = 3;
    pub const LEN: usize = Self::CLASSES + Self::EACH * CLASSES_MAX;

    pub fn encode(&self) -> [f64; StepParams::LEN] {
        let mut out = [0.0; StepParams::LEN];
        out[Self::LOSS_SCALE] = self.loss_scale;
        out[Self::NORM_MAX] = self.norm_max;
        out[Self::STEP] = self.step as f64;
        for (class, at) in self.classes.iter().zip((Self::CLASSES..).step_by(Self::EACH)) {
            out[at + Self::RATE] = class.rate;
            out[at + Self::CORRECTION] = class.correction;
            out[at + Self::KEEP] = class.keep;
            out[at + Self::ACTIVE] = f64::from(u8::from(class.active));
        }
        out
    }

    /// The coefficients of `class` in an encoded vector.
    pub fn class(params: &[f64], class: usize) -> StepClass {
        let own = &params[Self::CLASSES + class * Self::EACH..][..Self::EACH];
        StepClass {
            rate: own[Self::RATE],
            correction: own[Self::CORRECTION],
            keep: own[Self::KEEP],
            active: own[Self::ACTIVE] != 0.0,
        }
    }
}

impl StepClass {
    /// Of the `updates`-th update, counted from 1; 0: these tensors are not trained yet.
    /// Coefficients are computed in f64, powers by repeated products.
    pub fn new(updates: u64, lr: f64, betas: (f64, f64), weight_decay: f64) -> StepClass {
        if updates == 0 {
            return StepClass::default();
        }
        StepClass {
            rate: lr / (1.0 - power(betas.0, updates)),
            correction: 1.0 / (1.0 - power(betas.1, updates)),
            keep: 1.0 - lr * weight_decay,
            active: true,
        }
    }
}

/// x^n by squaring, the same products on every machine.
fn power(x: f64, n: u64) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, x, n);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

/// Places in the vector of a step's numbers, F64 [`StepNumbers::len`]: single numbers, then tables.
/// All are sums, over a step's micro-batches and then over ranks, so that they are zeroed once a
/// step and added to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepNumbers {
    /// Mixture layers.
    pub layers: usize,
    /// `E`
    pub experts: usize,
    /// Parameters in the model's table.
    pub tensors: usize,
}

impl StepNumbers {
    /// Sum of the cross-entropies of valid targets, unscaled.
    pub const LOSS: usize = 0;
    /// Valid targets, where they are counted on the device; else 0.
    pub const VALID_TARGETS: usize = 1;
    /// Auxiliary and z losses, unscaled, summed over layers and micro-batches.
    pub const AUX_LOSS: usize = 2;
    pub const Z_LOSS: usize = 3;
    /// Of the unscaled gradients that are trained; each owned element once.
    pub const SQUARED_NORM: usize = 4;
    /// What of the gradients is infinite or not a number: elements in buckets, else sums of squares
    /// of blocks. A count, since the largest of several can lose one that is not a number.
    pub const NON_FINITE: usize = 5;
    /// Layers and micro-batches whose routed rows had no room.
    pub const ROUTED_OVERFLOWS: usize = 6;
    /// Mean entropy of a router's scores, summed over layers and micro-batches.
    pub const ENTROPY: usize = 7;
    /// Tokens without any expert, over all layers.
    pub const UNROUTED: usize = 8;
    /// Choices of tokens behind another in their text, and those of them that the token before did
    /// not make.
    pub const FOLLOWED: usize = 9;
    pub const SWITCHED: usize = 10;
    /// Layers and micro-batches whose entropy was measured: 0 where a device does not.
    pub const ENTROPIES: usize = 11;
    /// Not summed: what `DecideUpdate` leaves here of [`StepControl`] for the host's one read. Not
    /// 0: a step before this one was skipped, and this one is, too.
    pub const HALTED: usize = 12;
    /// Not summed: [`StepControl::UPDATES`] behind this step.
    pub const UPDATES: usize = 13;
    /// Where the tables start. What lies before and has no name is reserved, and 0.
    pub const LOADS: usize = 16;

    pub const fn len(&self) -> usize {
        Self::LOADS + 2 * self.layers * self.experts + self.tensors
    }

    /// Never: the single numbers are always there.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// [layers, E]: slots that chose each expert.
    pub const fn loads(&self) -> Range<usize> {
        Self::LOADS..Self::LOADS + self.layers * self.experts
    }

    /// [E]: those of one mixture layer.
    pub const fn loads_of(&self, layer: usize) -> Range<usize> {
        let start = Self::LOADS + layer * self.experts;
        start..start + self.experts
    }

    /// [layers, E]: those of the slots that were dropped, since the expert was full.
    pub const fn dropped(&self) -> Range<usize> {
        let start = self.loads().end;
        start..start + self.layers * self.experts
    }

    /// [tensors]: what is counted in NON_FINITE, by parameter.
    pub const fn non_finite(&self) -> Range<usize> {
        let start = self.dropped().end;
        start..start + self.tensors
    }

    /// Whether loss and gradients are numbers.
    pub fn are_finite(numbers: &[f64]) -> bool {
        numbers[Self::NON_FINITE] == 0.0
            && numbers[Self::SQUARED_NORM].is_finite()
            && numbers[Self::LOSS].is_finite()
    }

    /// Whether the step changes nothing: something is no number, rows found no room, or a step
    /// before it was skipped.
    pub fn is_skipped(numbers: &[f64]) -> bool {
        !Self::are_finite(numbers)
            || numbers[Self::ROUTED_OVERFLOWS] != 0.0
            || numbers[Self::HALTED] != 0.0
    }
}

/// Places in the vector of what was decided, F64 [`StepControl::LEN`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepControl {
    /// Weights change.
    pub apply: bool,
    /// What gradients are multiplied by: clipping and unscaling.
    pub gradient_scale: f64,
    /// Of the unscaled gradients, before clipping.
    pub norm: f64,
}

impl StepControl {
    pub const APPLY: usize = 0;
    pub const GRADIENT_SCALE: usize = 1;
    pub const NORM: usize = 2;
    /// Updates that were applied since it was last written: the host holds it against its own.
    pub const UPDATES: usize = 3;
    /// A step was skipped. Then those behind it are, since they were computed on weights that it
    /// should have changed, until the host writes 0 here and does them again.
    pub const HALTED: usize = 4;
    pub const LEN: usize = 5;

    /// What a step's numbers and parameters say.
    pub fn decide(params: &[f64], numbers: &[f64]) -> StepControl {
        let norm = numbers[StepNumbers::SQUARED_NORM].sqrt();
        let clip = clip_factor(norm, params[StepParams::NORM_MAX]);
        StepControl {
            apply: !StepNumbers::is_skipped(numbers),
            gradient_scale: clip / params[StepParams::LOSS_SCALE],
            norm,
        }
    }
}

/// What clipping multiplies unscaled gradients of this norm by; a `most` of 0 clips nothing.
fn clip_factor(norm: f64, most: f64) -> f64 {
    if most > 0.0 && norm > most { most / norm } else { 1.0 }
}

/// The scale of an fp16 loss as training goes (Micikevicius et al. 2018, section 3.2): halved by an
/// overflow, doubled after `growth_interval` steps without one. It is state: a checkpoint has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// A power of two.
    pub scale: f64,
    /// Steps since it last changed.
    pub good_steps: u32,
}

/// How a [`LossScale`] moves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    pub growth_interval: u32,
    /// Powers of two.
    pub scale_min: f64,
    pub scale_max: f64,
}

impl Default for LossScaling {
    /// As PyTorch's `GradScaler`, within what fp32 holds.
    fn default() -> LossScaling {
        LossScaling { growth_interval: 2000, scale_min: 1.0, scale_max: 2_f64.powi(24) }
    }
}

impl LossScaling {
    /// Whether a scale that moves so can be `scale`.
    pub fn allows(&self, scale: f64) -> bool {
        let within = self.scale_min <= scale && scale <= self.scale_max;
        within && scale.log2().fract() == 0.0
    }
}

impl LossScale {
    /// 2^16, PyTorch's first.
    pub const FIRST: LossScale = LossScale { scale: 65536.0, good_steps: 0 };

    /// The scale after one more step, or another try of one.
    #[must_use]
    pub fn after(self, rules: &LossScaling, overflow: bool) -> LossScale {
        if overflow {
            return LossScale { scale: (self.scale / 2.0).max(rules.scale_min), good_steps: 0 };
        }
        let good_steps = self.good_steps + 1;
        if good_steps < rules.growth_interval {
            return LossScale { good_steps, ..self };
        }
        LossScale { scale: (self.scale * 2.0).min(rules.scale_max), good_steps: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> LossScaling {
        LossScaling { growth_interval: 3, scale_min: 1.0, scale_max: 32.0 }
    }

    #[test]
    fn the_scale_falls_at_once_and_grows_slowly() {
        let mut scale = LossScale { scale: 8.0, good_steps: 0 };
        let mut seen = Vec::new();
        for overflow in [false, false, true, false, false, false, false, true, true, true, true] {
            scale = scale.after(&rules(), overflow);
            seen.push((scale.scale, scale.good_steps));
        }
        let falls = [(4.0, 0), (2.0, 0), (1.0, 0), (1.0, 0)];
        let rises = [(8.0, 1), (8.0, 2), (4.0, 0), (4.0, 1), (4.0, 2), (8.0, 0), (8.0, 1)];
        assert_eq!(seen, [rises.as_slice(), &falls].concat());
    }

    #[test]
    fn the_scale_stays_between_its_bounds_and_a_power_of_two() {
        let mut scale = LossScale::FIRST;
        for step in 0..10_000_u32 {
            scale = scale.after(&LossScaling::default(), step.is_multiple_of(4500));
            assert_eq!(scale.scale.log2().fract(), 0.0);
        }
        let grown = (0..100).fold(LossScale::FIRST, |scale, _| scale.after(&rules(), false));
        assert_eq!(grown.scale, 32.0);
        let fallen = (0..100).fold(LossScale::FIRST, |scale, _| scale.after(&rules(), true));
        assert_eq!(fallen, LossScale { scale: 1.0, good_steps: 0 });
    }

    fn params(norm_max: f64, loss_scale: f64) -> Vec<f64> {
        let classes = [StepClass::default(); CLASSES_MAX];
        StepParams { loss_scale, norm_max, step: 5, classes }.encode().to_vec()
    }

    #[test]
    fn the_parts_of_the_vector_lie_side_by_side() {
        let numbers = StepNumbers { layers: 3, experts: 5, tensors: 7 };
        assert_eq!((numbers.loads(), numbers.loads_of(1)), (16..31, 21..26));
        assert_eq!((numbers.dropped(), numbers.non_finite()), (31..46, 46..53));
        assert_eq!(numbers.len(), 53);
    }

    #[test]
    fn what_is_no_number_is_not_applied() {
        let all = StepNumbers { layers: 2, experts: 3, tensors: 5 };
        let mut numbers = vec![0.0; all.len()];
        numbers[StepNumbers::SQUARED_NORM] = 16.0;
        let decided = |numbers: &[f64]| StepControl::decide(&params(2.0, 8.0), numbers);
        let expected = StepControl { apply: true, gradient_scale: 0.5 / 8.0, norm: 4.0 };
        assert_eq!(decided(&numbers), expected);
        for (at, bad) in [
            (StepNumbers::SQUARED_NORM, f64::INFINITY),
            (StepNumbers::SQUARED_NORM, f64::NAN),
            (StepNumbers::NON_FINITE, 1.0),
            (StepNumbers::NON_FINITE, f64::NAN),
            (StepNumbers::ROUTED_OVERFLOWS, 1.0),
            (StepNumbers::ROUTED_OVERFLOWS, f64::NAN),
            (StepNumbers::LOSS, f64::NAN),
            (StepNumbers::LOSS, f64::NEG_INFINITY),
            (StepNumbers::HALTED, 1.0),
        ] {
            let mut numbers = numbers.clone();
            numbers[at] = bad;
            assert!(!decided(&numbers).apply, "{at}: {bad}");
        }
    }

    #[test]
    fn norms_are_clipped_only_above_the_largest() {
        let mut numbers = vec![0.0; StepNumbers::default().len()];
        for (squares, most, expected) in [(9.0, 3.0, 1.0), (9.0, 0.0, 1.0), (9.0, 1.5, 0.5)] {
            numbers[StepNumbers::SQUARED_NORM] = squares;
            let control = StepControl::decide(&params(most, 1.0), &numbers);
            assert_eq!(control.gradient_scale, expected, "{squares} {most}");
        }
    }

    #[test]
    fn a_class_has_the_coefficients_of_its_own_updates() {
        let class = StepClass::new(2, 0.5, (0.5, 0.75), 0.25);
        let expected =
            StepClass { rate: 0.5 / 0.75, correction: 1.0 / 0.4375, keep: 0.875, active: true };
        assert_eq!(class, expected);
        assert!(!StepClass::new(0, 0.5, (0.5, 0.75), 0.25).active);
        let at = StepParams::CLASSES + StepParams::EACH;
        let mut params = StepParams {
            loss_scale: 1.0,
            norm_max: 0.0,
            step: 1,
            classes: [StepClass::default(); CLASSES_MAX],
        };
        params.classes[1] = class;
        let encoded = params.encode();
        assert_eq!(encoded[at..at + 4], [0.5 / 0.75, 1.0 / 0.4375, 0.875, 1.0]);
        assert_eq!(StepParams::class(&encoded, 1), class);
        assert_eq!(StepParams::class(&encoded, 0), StepClass::default());
    }
}
