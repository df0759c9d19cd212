//! What a worker measures together with another one: an all-reduce of the GPUs of both nodes.
//!
//! ```text
//! side 0: GPUs open -> GPU 0 makes a place to meet --say--> leader --> side 1: GPUs open
//! both:   all GPUs meet there -> the all-reduce, and by which way NCCL's log says its bytes go
//! ```
//! A side whose partner does not come gives up by itself. What it then tells speaks of the pair and
//! of neither node: the leader finds out which of them is bad.

use super::child::{Ask, PAIR_BYTES};
use super::gpus::{Gpu, LIMIT};
use super::settings;
use crate::life::machine::Machine;
use moejob_protocol::pair::{Meeting, PAIR_CHECK, PairOrder, PairSaid};
use moejob_protocol::preflight::{Check, Grade, Measured, Value};
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Measures as one side, with this machine's GPUs from `first` on, and tells what it says on the
/// way: a place to meet, and always at last what was measured.
pub fn measured(
    order: &PairOrder,
    first: usize,
    stop: &AtomicBool,
    mut say: impl FnMut(PairSaid),
) {
    let until = Instant::now() + LIMIT;
    let settings = settings::here(&Machine::here().unwrap_or_default());
    let ordinals = first..first + order.devices.max(1) as usize;
    let mut gpus: Vec<Gpu> = ordinals.map(|ordinal| Gpu::start(ordinal, &settings)).collect();
    for gpu in &mut gpus {
        gpu.hear(until, stop);
    }
    let meeting = match (order.side, &order.meeting) {
        (0, _) => place(&mut gpus, until, stop),
        (_, Some(meeting)) if meeting.is_valid() => Some(meeting.clone()),
        _ => None,
    };
    if let Some(meeting) = &meeting {
        if order.side == 0 {
            say(PairSaid::Meets(meeting.clone()));
        }
        let devices = gpus.len() as u32;
        let Meeting { id, bytes } = meeting;
        for (rank, gpu) in (order.side * devices..).zip(&mut gpus) {
            let (world, bytes) = (2 * devices, usize::try_from(*bytes).unwrap_or(usize::MAX));
            gpu.ask(&Ask::Meet { id: id.clone(), rank, world, bytes, across: true });
        }
        for gpu in &mut gpus {
            gpu.hear(until, stop);
        }
    }
    gpus.iter_mut().for_each(Gpu::end);
    let told: Vec<_> = gpus.iter_mut().map(Gpu::take_bus).collect();
    let rates: Vec<f64> = told.iter().flatten().map(|bus| bus.rate).collect();
    let ways: Vec<Option<bool>> = told.iter().flatten().map(|bus| bus.sockets).collect();
    let whole = rates.len() == gpus.len();
    let found: Vec<Measured> = gpus.into_iter().flat_map(Gpu::into_all).collect();
    say(PairSaid::Measured(answer(order.rdma, whole.then_some(&rates), &ways, &found)));
}

/// None where no GPU gives one: `found` then says why.
fn place(gpus: &mut [Gpu], until: Instant, stop: &AtomicBool) -> Option<Meeting> {
    // The others would wait for one that is not there.
    if gpus.iter().any(|gpu| !gpu.is_there()) {
        return None;
    }
    let free = gpus.iter().map(Gpu::free).min().unwrap_or(0);
    let first = gpus.first_mut()?;
    first.ask(&Ask::Id);
    first.hear(until, stop);
    Some(Meeting { id: first.take_id()?, bytes: PAIR_BYTES.min(free / 4) as u64 })
}

/// What is told: the slowest of `rates`, which all GPUs have where there are any, and the way.
fn answer(
    rdma: bool,
    rates: Option<&Vec<f64>>,
    ways: &[Option<bool>],
    found: &[Measured],
) -> Vec<Measured> {
    let Some(rates) = rates else {
        let why = found.iter().find_map(|one| match &one.value {
            Value::Wrong { what: text, .. } | Value::Unmeasured(text) => {
                Some(format!("{}: {text}", one.of))
            }
            Value::Number(_) | Value::Fine(_) => None,
        });
        let value = Value::Unmeasured(why.unwrap_or_else(|| "no place to meet".to_string()));
        return vec![Measured { check: PAIR_CHECK.to_string(), of: String::new(), value }];
    };
    let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
    vec![Measured::number(PAIR_CHECK, slowest), transport(rdma, ways)]
}

/// By which way bytes leave this node: of each GPU, whether by TCP, where its log tells.
pub(super) fn transport(rdma: bool, ways: &[Option<bool>]) -> Measured {
    let by_tcp = ways.contains(&Some(true));
    let value = if by_tcp && rdma {
        let what = "NCCL goes by TCP (NET/Socket) to other nodes, and the profile has RDMA: look \
                    at the cards and at memory that may be locked with `moejob doctor`";
        Value::Wrong { grade: Grade::Fail, what: what.to_string() }
    } else if by_tcp {
        Value::Fine("by TCP".to_string())
    } else if ways.iter().any(Option::is_some) {
        Value::Fine("not by TCP".to_string())
    } else {
        Value::Unmeasured("NCCL's log does not tell".to_string())
    };
    Measured::of_check(Check::Transport, value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(all: &[Measured]) -> Vec<String> {
        let value = |one: &Measured| match &one.value {
            Value::Number(rate) => format!("{rate}"),
            Value::Fine(text) => text.clone(),
            Value::Wrong { grade, what } => format!("{grade:?} {}", &what[..29]),
            Value::Unmeasured(why) => format!("? {why}"),
        };
        all.iter().map(|one| format!("{} {}", one.check, value(one))).collect()
    }

    #[test]
    fn a_pair_is_as_fast_as_its_slowest_gpu_and_tcp_fails_where_there_is_rdma() {
        let of = |rdma, rates: &[f64], ways: &[Option<bool>]| {
            shown(&answer(rdma, Some(&rates.to_vec()), ways, &[]))
        };
        let (yes, no) = (Some(true), Some(false));
        let fine = of(true, &[190.0, 188.0], &[no, None]);
        assert_eq!(fine, ["pairAllReduceGBps 188", "transport not by TCP"]);
        let tcp = of(true, &[3.1, 3.1], &[no, yes]);
        assert_eq!(
            tcp,
            ["pairAllReduceGBps 3.1", "transport Fail NCCL goes by TCP (NET/Socket)"]
        );
        assert_eq!(of(false, &[3.1], &[yes])[1], "transport by TCP");
        assert_eq!(of(true, &[3.1], &[None])[1], "transport ? NCCL's log does not tell");
    }

    #[test]
    fn who_could_not_measure_says_why_and_blames_no_gpu() {
        assert_eq!(shown(&answer(true, None, &[], &[])), ["pairAllReduceGBps ? no place to meet"]);
        let late = Value::Wrong { grade: Grade::Fail, what: "no answer within 30 s".to_string() };
        let late = Measured::of_check(Check::Gpus, late).on("GPU 3");
        let told = answer(true, None, &[], &[late]);
        assert_eq!(shown(&told), ["pairAllReduceGBps ? GPU 3: no answer within 30 s"]);
    }
}
