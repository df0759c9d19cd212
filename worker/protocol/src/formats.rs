//! As what rows of tokens travel between the ranks of an expert group, where mixture layers are one
//! op: between GPUs, and between processors that compute as they do.
//!
//! | wire | tokens (forward) | gradients of outputs | sums, and gradients of inputs |
//! |---|---|---|---|
//! | auto | as activations | as activations | as activations |
//! | fp32 | as activations | as activations | fp32 |
//! | bf16 | bf16 | bf16 | bf16 |
//! | fp8 | e4m3 with block scales | as activations | as activations |
//!
//! With `combine_each` no sums come back but the rows of each expert, which are not wider than they
//! were computed.
//!
//! A row of activations that are bf16 is not sent as fp32: that would be the same numbers in twice
//! the bytes. Gradients are never sent as e4m3. Their blocks hold numbers of very different sizes,
//! and what is lost of them is lost in every step. Sums are added to others, so an error of each
//! would be added, too.

use crate::config::{Backend, Compute, Precision, Wire};
use crate::memory::Kind;

/// Elements of a row that share a scale.
pub const FP8_BLOCK: u64 = 128;

/// What rows that travel consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowFormat {
    Of(Kind),
    /// Codes of e4m3, then a byte for each block's scale.
    Fp8,
}

/// The formats of what travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Formats {
    /// What tokens are of while they are computed with.
    pub element: Kind,
    /// Tokens on their way to experts, in forward.
    pub tokens: RowFormat,
    /// Gradients of the layer's outputs on theirs, in backward.
    pub gradients: RowFormat,
    /// Sums over the experts of a rank on their way back, in forward and in backward.
    pub sums: Kind,
    /// What these sums are written as, before they travel.
    pub written: Kind,
    /// Rows of a token that come back: one, or one for each expert that it may choose.
    pub rows_back: u64,
}

impl RowFormat {
    /// Bytes of a row of `dim` elements.
    pub const fn bytes(self, dim: u64) -> u64 {
        match self {
            RowFormat::Of(kind) => dim * kind.bytes(),
            RowFormat::Fp8 => dim + dim.div_ceil(FP8_BLOCK).next_multiple_of(16),
        }
    }
}

impl Compute {
    pub fn combines_each(&self) -> bool {
        self.combine_each.unwrap_or(self.backend == Backend::Cpu)
    }

    /// Of tokens that are computed with as `element` and choose `top_k` experts.
    pub fn formats(&self, element: Kind, top_k: u32) -> Formats {
        if !self.combines_each() {
            return self.wire.formats(element);
        }
        let wire = if self.wire == Wire::Fp32 { Wire::Auto } else { self.wire };
        Formats { rows_back: top_k.into(), ..wire.formats(element) }
    }
}

impl Wire {
    /// Where one row of a token comes back from a rank.
    fn formats(self, element: Kind) -> Formats {
        let plain = RowFormat::Of(element);
        let as_computed = Formats {
            element,
            tokens: plain,
            gradients: plain,
            sums: element,
            written: element,
            rows_back: 1,
        };
        match self {
            Wire::Auto => as_computed,
            Wire::Fp32 if element.bytes() < Kind::F32.bytes() => {
                Formats { sums: Kind::F32, written: Kind::F32, ..as_computed }
            }
            Wire::Fp32 => as_computed,
            Wire::Bf16 => {
                let halves = RowFormat::Of(Kind::Bf16);
                Formats { tokens: halves, gradients: halves, sums: Kind::Bf16, ..as_computed }
            }
            Wire::Fp8 => Formats { tokens: RowFormat::Fp8, ..as_computed },
        }
    }

    /// Whether a job of this precision may have it. Fp16 has too few exponents for what e4m3 and
    /// bf16 stand for.
    pub fn goes_with(self, precision: Precision) -> bool {
        match precision {
            Precision::Fp32 | Precision::Tf32 | Precision::Bf16 => true,
            Precision::Fp16 => matches!(self, Wire::Auto | Wire::Fp32),
            Precision::Fp64 => self == Wire::Auto,
        }
    }
}

impl Formats {
    /// Rows become something else on their way, and the own ones, too.
    pub fn packs(&self) -> bool {
        let plain = RowFormat::Of(self.element);
        [self.tokens, self.gradients] != [plain; 2] || self.sums != self.written
    }

    /// All that travels is of what tokens are computed with.
    pub fn are_as_computed(&self) -> bool {
        !self.packs() && self.written == self.element
    }

    /// Bytes of a token with `dim` elements: at most on its way out, and on its way back from a
    /// rank.
    pub fn token_bytes(&self, dim: u64) -> [u64; 2] {
        let out = self.tokens.bytes(dim).max(self.gradients.bytes(dim));
        [out, self.rows_back * dim * self.sums.bytes()]
    }

    /// Each expert's row comes back by itself.
    pub fn returns_each(&self) -> bool {
        self.rows_back > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_long_as_their_format() {
        let bytes = |wire: Wire, element| wire.formats(element).token_bytes(2048);
        for (wire, element, expected) in [
            (Wire::Auto, Kind::Bf16, [4096, 4096]),
            (Wire::Bf16, Kind::Bf16, [4096, 4096]),
            (Wire::Fp32, Kind::Bf16, [4096, 8192]),
            // Gradients go out as they are.
            (Wire::Fp8, Kind::Bf16, [4096, 4096]),
            (Wire::Auto, Kind::F32, [8192, 8192]),
            (Wire::Fp32, Kind::F32, [8192, 8192]),
            (Wire::Bf16, Kind::F32, [4096, 4096]),
            (Wire::Fp8, Kind::F32, [8192, 8192]),
        ] {
            assert_eq!(bytes(wire, element), expected, "{wire:?} of {element:?}");
        }
        assert_eq!(Wire::Fp8.formats(Kind::Bf16).tokens.bytes(2048), 2048 + 16);
    }

    #[test]
    fn rows_of_each_expert_come_back_as_they_were_computed() {
        let compute = |wire| Compute { wire, combine_each: Some(true), ..Compute::default() };
        for wire in [Wire::Auto, Wire::Fp32, Wire::Fp8] {
            let formats = compute(wire).formats(Kind::Bf16, 8);
            assert_eq!(formats.token_bytes(2048), [4096, 8 * 4096]);
            assert_eq!((formats.sums, formats.written), (Kind::Bf16, Kind::Bf16));
            assert!(formats.returns_each());
        }
        let plain = Compute { combine_each: Some(false), ..compute(Wire::Fp32) };
        assert_eq!(plain.formats(Kind::Bf16, 8), Wire::Fp32.formats(Kind::Bf16));
    }

    #[test]
    fn what_is_computed_in_bf16_or_fp32_travels_as_it_is() {
        for element in [Kind::Bf16, Kind::F32] {
            let auto = Wire::Auto.formats(element);
            assert_eq!(auto.written, element);
            let same = if element == Kind::Bf16 { Wire::Bf16 } else { Wire::Fp32 };
            assert_eq!(same.formats(element), auto);
        }
    }
}
