//! Which kernels a GPU takes, by its compute capability.

use crate::buffer::DType;
use crate::cuda::driver::Gpu;
use crate::cuda::error::CudaError;
use crate::cuda::libraries::Cuda;

/// The instructions a kernel is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// TMA and wgmma: H100, H200.
    Hopper,
    /// cp.async and mma.sync: A100, H100, B200; compiled for the target named.
    Ampere(&'static str),
    /// Plain fp32 code, for layers in fp32; compiled for the target named.
    Plain(&'static str),
}

/// A GPU that there are no kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there are no kernels for compute capability {major}.{minor}{why}; GPUs of 8.0 (A100), 9.0 \
     (H100, H200) and 10.x (B200) train"
)]
pub struct Unfit {
    pub major: i32,
    pub minor: i32,
    /// In words, after a comma; empty where nothing is known of it.
    why: &'static str,
}

impl Arch {
    /// What `gpu` runs best; `MOEJOB_CUDA_ARCH=sm_80` asks for the path of the A100 anywhere.
    pub fn of(gpu: &Gpu) -> Result<Arch, CudaError> {
        let ampere = std::env::var_os("MOEJOB_CUDA_ARCH").is_some_and(|arch| arch == "sm_80");
        Arch::of_capability(gpu.capability(), ampere)
            .map_err(|source| CudaError::Unfit { device: gpu.name().to_owned(), source })
    }

    /// Of GPUs with this compute capability (major, minor); `ampere`: the path of the A100, also
    /// where there is a better one.
    ///
    /// # Errors
    /// None of the kernels runs there.
    pub fn of_capability((major, minor): (i32, i32), ampere: bool) -> Result<Arch, Unfit> {
        // Machine code runs within one major version only.
        let why = match (major, minor) {
            (9, 0) if !ampere => return Ok(Arch::Hopper),
            (8, 0) => return Ok(Arch::Ampere("sm_80")),
            (9, _) => return Ok(Arch::Ampere("sm_90")),
            (10, _) => return Ok(Arch::Ampere("sm_100")),
            (..8, _) => ", which has no products in bf16",
            // 99 KiB of a block, where the tiles take up to 163.
            (8, 6 | 9) | (12, _) => ", whose shared memory is too small for them",
            _ => "",
        };
        Err(Unfit { major, minor, why })
    }

    /// What a person should know of GPUs with this compute capability.
    pub fn remark((major, _): (i32, i32)) -> Option<&'static str> {
        (major > 9).then_some(
            "newer than sm_90: it takes the kernels of sm_80, slower than kernels of its own",
        )
    }

    /// The path of GPUs whose kernels are compiled for this target; none for a target without one.
    pub fn named(target: &str) -> Option<Arch> {
        match target {
            "sm_80" => Some(Arch::Ampere("sm_80")),
            "sm_90a" => Some(Arch::Hopper),
            "sm_100" => Some(Arch::Ampere("sm_100")),
            _ => None,
        }
    }

    /// [`Arch::of`] for a layer whose elements are of `element`.
    pub fn for_elements(gpu: &Gpu, element: DType) -> Result<Arch, CudaError> {
        let arch = Arch::of(gpu)?;
        Ok(if element == DType::F32 { Arch::Plain(arch.target()) } else { arch })
    }

    /// What kernels are compiled for.
    pub(crate) fn target(self) -> &'static str {
        match self {
            Arch::Hopper => "sm_90a",
            Arch::Ampere(target) | Arch::Plain(target) => target,
        }
    }

    /// The first CUDA whose NVRTC compiles for it.
    pub(crate) fn least_nvrtc(self) -> Cuda {
        match self.target() {
            "sm_100" => Cuda(12, 8),
            _ => Cuda(12, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_capability_has_its_path_or_is_refused_by_name() {
        let of = |capability| Arch::of_capability(capability, false);
        assert_eq!(of((8, 0)), Ok(Arch::Ampere("sm_80")));
        assert_eq!(of((9, 0)), Ok(Arch::Hopper));
        assert_eq!(Arch::of_capability((9, 0), true), Ok(Arch::Ampere("sm_90")));
        for newer in [(10, 0), (10, 3)] {
            assert_eq!(of(newer), Ok(Arch::Ampere("sm_100")));
            assert!(Arch::remark(newer).is_some_and(|words| words.contains("kernels of sm_80")));
        }
        assert_eq!((Arch::remark((8, 0)), Arch::remark((9, 0))), (None, None));
        let small = ", whose shared memory is too small for them";
        for (capability, why) in [
            ((7, 0), ", which has no products in bf16"),
            ((7, 5), ", which has no products in bf16"),
            ((8, 6), small),
            ((8, 9), small),
            ((12, 0), small),
            ((12, 1), small),
            ((8, 7), ""),
            ((11, 0), ""),
            ((13, 0), ""),
        ] {
            let (major, minor) = capability;
            let refused = of(capability).expect_err("no kernels").to_string();
            let expected = format!(
                "there are no kernels for compute capability {major}.{minor}{why}; GPUs of 8.0 \
                 (A100), 9.0 (H100, H200) and 10.x (B200) train"
            );
            assert_eq!(refused, expected);
        }
    }

    #[test]
    fn a_target_needs_a_compiler_that_knows_it() {
        assert_eq!(Arch::Ampere("sm_100").least_nvrtc(), Cuda(12, 8));
        assert!(Arch::Hopper.least_nvrtc() <= Cuda::TRIED);
        assert!(Arch::Plain("sm_80").least_nvrtc() <= Cuda::TRIED);
    }
}
