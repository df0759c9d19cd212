//! The instruction sets of processors.

/// The instruction sets that the code is compiled for. Their results are equal bit for bit,
/// because each does the same IEEE operations in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    Avx512,
    Avx2,
    Scalar,
}

impl Isa {
    pub const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Scalar];

    /// The widest one that this processor has.
    pub fn detect() -> Isa {
        *Isa::ALL.iter().find(|isa| isa.is_available()).expect("every processor runs scalar code")
    }

    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let has = |wide: bool| {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw");
            avx2 && (avx512 || !wide)
        };
        #[cfg(not(target_arch = "x86_64"))]
        let has = |_wide: bool| false;
        match self {
            Isa::Avx512 => has(true),
            Isa::Avx2 => has(false),
            Isa::Scalar => true,
        }
    }
}
