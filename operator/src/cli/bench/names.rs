//! What a bench calls the kinds of its numbers.

use moejob_protocol::config::{GradientDtype, MomentDtype, Recompute};

pub fn moments(dtype: MomentDtype) -> &'static str {
    match dtype {
        MomentDtype::Fp32 => "fp32",
        MomentDtype::Bf16 => "bf16",
    }
}

pub fn gradients(dtype: GradientDtype) -> &'static str {
    match dtype {
        GradientDtype::Auto => "auto",
        GradientDtype::Bf16 => "bf16",
        GradientDtype::Fp32 => "fp32",
    }
}

pub fn recompute(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::None => "none",
        Recompute::Selective => "selective",
        Recompute::Experts => "experts",
        Recompute::Full | Recompute::Every(_) => "full",
    }
}
