//! What a worker measures of its node before it gets a rank.
//!
//! ```text
//! Order -> places (/sys against the profile), host (memory), gpus (a process each) -> Answer
//! PairOrder -> pair (a process for each GPU, too) -> PairSaid
//! gpus: Ask --standard input--> child --standard output--> Reply
//! ```
//! The worker itself never calls CUDA: for each GPU it starts a process of the same program, which
//! ends when all is measured. Nothing of it stays on the device, and one that hangs is killed. What
//! follows from the numbers is decided elsewhere (`moejob_plan::preflight`).

pub(crate) mod child;
mod gpus;
pub mod host;
mod loopback;
mod pair;
pub mod places;
mod settings;

use crate::life::affinity::Share;
use crate::life::machine::Machine;
use moejob_nccl::Library;
use moejob_protocol::config::Backend;
use moejob_protocol::pair::{PairAnswer, PairOrder};
use moejob_protocol::preflight::{Answer, Expected, MEASURED_MAX, Measured, Order};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// What the kernel calls this boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What the order asks for; `stop` ends it early.
pub fn answer(order: &Order, share: Share, stop: &AtomicBool) -> Answer {
    let boot_id = std::fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_string();
    let number = order.number;
    let passed = order.passed_at_boot.as_ref();
    if passed.is_some_and(|passed| !passed.is_empty() && *passed == boot_id) {
        return Answer { number, boot_id, measured: None };
    }
    let machine = Machine::here().unwrap_or_default();
    let mut measured = measure(&machine, &machine, &order.expected, share, stop);
    measured.truncate(MEASURED_MAX);
    Answer { number, boot_id, measured: Some(measured) }
}

/// What the order of a pair asks for: `say` is given a place to meet, on side 0, and at last what
/// was measured. `stop` ends it early.
pub fn answer_pair(
    order: &PairOrder,
    share: Share,
    stop: &AtomicBool,
    mut say: impl FnMut(PairAnswer),
) {
    let number = order.number;
    let first = (share.index * order.devices) as usize;
    pair::measured(order, first, stop, |said| say(PairAnswer { number, said }));
}

/// The NCCL that is here: its version and the name of its file.
///
/// # Errors
/// There is none that several GPUs could use: why, and what to install.
pub fn nccl() -> Result<(String, String), String> {
    match Library::look() {
        Ok((version, file)) => Ok((version.to_string(), file)),
        Err(error) => Err(error.to_string()),
    }
}

/// Compares `seen` with the profile, and measures this machine, `here`: of its GPUs those of the
/// worker's `share`.
pub fn measure(
    seen: &Machine,
    here: &Machine,
    expected: &Expected,
    share: Share,
    stop: &AtomicBool,
) -> Vec<Measured> {
    let first = (share.index * expected.devices) as usize;
    let mut measured = places::measured(seen, expected, share);
    measured.push(host::locked_memory(expected.rdma));
    if expected.backend == Backend::Cuda {
        let ordinals = first..first + expected.devices.max(1) as usize;
        // The leader waits for all of it.
        let until = Instant::now() + gpus::LIMIT;
        measured.extend(gpus::measured(ordinals.clone(), stop));
        if expected.loopback {
            measured.extend(loopback::measured(here, expected, ordinals, (until, stop)));
        }
    }
    // After the copies of the GPUs, which it would slow.
    measured.extend(host::measured(here));
    measured
}
