//! Who computes: the instruction set and the threads. Neither changes a bit of any result.

use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use crate::error::KernelError;

/// Below about this many operations of a vectorised loop, some 3 us, telling a thread costs more
/// than it saves.
const WORK_INLINE_MAX: usize = 40_000;

/// The most threads a device may be asked for; above it a number is a typing error.
pub(crate) const THREADS_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) isa: Isa,
    pub(crate) threads: usize,
    /// None with one thread: the caller computes.
    pool: Option<Pool>,
}

impl Exec {
    pub(crate) fn new(threads: usize, isa: Isa) -> Result<Exec, KernelError> {
        if !(1..=THREADS_MAX).contains(&threads) {
            return Err(KernelError::Threads { found: threads, max: THREADS_MAX });
        }
        if !isa.is_available() {
            return Err(KernelError::Isa { isa });
        }
        let pool = (threads > 1).then(|| Pool::new(threads));
        Ok(Exec { isa, threads, pool })
    }

    /// Does every job. Each job owns its outputs, so order and threads cannot be seen in them;
    /// `work` (about as many floating-point operations) decides whether threads are worth it.
    pub(crate) fn run<J: Send>(&self, jobs: Vec<J>, work: usize, f: impl Fn(J) + Sync) {
        match &self.pool {
            Some(pool) if jobs.len() > 1 && work > WORK_INLINE_MAX => {
                pool.run(jobs, f);
            }
            _ => jobs.into_iter().for_each(f),
        }
    }
}

/// Compiles a function once per instruction set and picks one by the `isa` it gets as its first
/// argument. All it calls must be `#[inline(always)]`, or it would run without the wide registers.
macro_rules! lanes_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<T: Float>(
        $($arg:ident: $type:ty),* $(,)?
    ) $(-> $out:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<T: Float>(isa: Isa, $($arg: $type),*) $(-> $out)? {
            #[inline(always)]
            fn body<T: Float>($($arg: $type),*) $(-> $out)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma")]
            fn avx512<T: Float>($($arg: $type),*) $(-> $out)? {
                body::<T>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<T: Float>($($arg: $type),*) $(-> $out)? {
                body::<T>($($arg),*)
            }
            match isa {
                // SAFETY: a device is made only with an instruction set that its machine has.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => unsafe { avx512::<T>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { avx2::<T>($($arg),*) },
                _ => body::<T>($($arg),*),
            }
        }
    };
}
pub(crate) use lanes_fn;
