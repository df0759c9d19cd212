//! See [`crate::Activation`]: each as a type, so that the loops around it are compiled for it.

use crate::cpu::float::Float;

pub(crate) trait Gate {
    fn value<T: Float>(x: T) -> T;

    /// The value and its derivative.
    fn with_slope<T: Float>(x: T) -> (T, T);
}

pub(crate) struct Silu;
pub(crate) struct Relu;
pub(crate) struct Gelu;

impl Gate for Silu {
    #[inline(always)]
    fn value<T: Float>(x: T) -> T {
        x * x.sigmoid()
    }

    #[inline(always)]
    fn with_slope<T: Float>(x: T) -> (T, T) {
        let s = x.sigmoid();
        (x * s, s * (T::ONE + x * (T::ONE - s)))
    }
}

impl Gate for Relu {
    #[inline(always)]
    fn value<T: Float>(x: T) -> T {
        T::ZERO.larger(x)
    }

    #[inline(always)]
    fn with_slope<T: Float>(x: T) -> (T, T) {
        (T::ZERO.larger(x), if x > T::ZERO { T::ONE } else { T::ZERO })
    }
}

/// 2 sqrt(2 / pi)
const STEEP: f64 = 1.595_769_121_605_730_7;
const CUBIC: f64 = 0.044_715;
/// From here on the sigmoid is 0 or 1, and the cube must not overflow.
const SQUARE_MAX: f64 = 1e4;

impl Gelu {
    /// x^2, sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))
    #[inline(always)]
    fn parts<T: Float>(x: T) -> (T, T) {
        let square = x * x;
        let square = if square > T::of(SQUARE_MAX) { T::of(SQUARE_MAX) } else { square };
        let u = x * (T::of(STEEP) + T::of(STEEP * CUBIC) * square);
        (square, u.sigmoid())
    }
}

impl Gate for Gelu {
    #[inline(always)]
    fn value<T: Float>(x: T) -> T {
        x * Gelu::parts(x).1
    }

    #[inline(always)]
    fn with_slope<T: Float>(x: T) -> (T, T) {
        let (square, s) = Gelu::parts(x);
        let du = T::of(STEEP) + T::of(3.0 * STEEP * CUBIC) * square;
        (x * s, s + x * s * (T::ONE - s) * du)
    }
}
