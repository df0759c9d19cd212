//! Whether this machine has the memory that a job wants: asked before a worker is started.
//!
//! ```text
//! MemoryBounds (the machine, control groups, ulimit) --judge--> why it cannot run, or advice
//! ```

use moejob_kernels::memory_bounds::{Bound, BoundSource, Scope, MemoryBounds};
use moejob_manifest::Job;
use moejob_manifest::profile::Backend;
use moejob_plan::observed::Size;
use moejob_plan::placement::{self, gib};
use moejob_protocol::memory::{OFFLOADED_MASTERS, OFFLOADED_MOMENTS, Part, RankMemory};

/// Who wants what a manifest asks for.
const JOB: &str = "the job";
/// Of larger gangs each rank is taken for the first, which needs most.
const RANKS_COUNTED_MAX: u32 = 64;

/// What a worker's process writes to beside its state: the allocator's own, stacks, certificates. A
/// worker of the smallest preset ended under `ulimit -d 30000`, and ran under 32000; its state is
/// 25.5 MiB.
const PROCESS_DATA: u64 = 4 << 20;
/// Addresses that it reserves beside its state: the program, libraries, stacks. The same worker,
/// whose state reserves 28.3 MiB, ended under `ulimit -v 72000` and ran under 80000.
const PROCESS_ADDRESSES: u64 = 45 << 20;

/// Bytes that a job wants, or a command that makes a model in its own process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// As it begins a sentence.
    pub who: &'static str,
    pub workers: u32,
    /// Of all workers: with even routing, and what more there may be.
    pub even: u64,
    pub kept: u64,
    /// When more is wanted, and what follows where it is not there.
    pub more: (&'static str, &'static str),
    /// Of the largest worker: with even routing, and the addresses that it reserves.
    pub even_each: u64,
    pub reserved_each: u64,
    /// What takes most, and its bytes.
    pub most: Option<(&'static str, u64)>,
}

/// A job that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    pub wish: Wish,
    /// Bytes that all processes together may have, where anything tells.
    pub available: Option<u64>,
    /// What is said of one that fits as long as all goes evenly.
    pub tight: Option<String>,
}

/// Holds the memory of a local job against this machine's.
///
/// # Errors
/// It cannot fit: how much it wants, what there is, and what to change.
pub fn check(job: &Job, size: &Size) -> Result<Fit, String> {
    let (wish, bounds) = (wish(job, size), bounds());
    let tight = judge(&wish, &bounds)?;
    let all = bounds.iter().filter(|bound| bound.scope() == Scope::All);
    Ok(Fit { wish, available: all.map(|bound| bound.left).min(), tight })
}

/// What the workers of a gang of `size` want of the memory of their machine.
pub fn wish(job: &Job, size: &Size) -> Wish {
    let world = size.layout.mesh.world();
    if job.profile.backend == Backend::Cuda {
        let parts = placement::host_memory(job, &size.layout);
        let each =
            |parts: &mut dyn Iterator<Item = &Part>| parts.map(|part| part.bytes).sum::<u64>();
        // A worker on a machine without room for snapshots takes none, and goes on.
        let least = || parts.iter().filter(|part| !part.name.starts_with("snapshots"));
        let most = least().max_by_key(|part| part.bytes);
        let (needed, all) = (each(&mut least()), each(&mut parts.iter()));
        return Wish {
            who: JOB,
            workers: size.nodes,
            even: needed * u64::from(size.nodes),
            kept: all * u64::from(size.nodes),
            more: (
                "with copies of its state in memory",
                "it keeps none, and a loss goes back to the last checkpoint",
            ),
            even_each: needed,
            reserved_each: 0,
            most: most.map(|part| (part.name, part.bytes)),
        };
    }
    let first = placement::memory(job, &size.layout, 0);
    let counted = world.min(RANKS_COUNTED_MAX);
    let rest = u64::from(world - counted);
    let [mut even, mut kept] =
        [first.balanced, first.committed].map(|bytes| bytes.saturating_mul(rest));
    for rank in 0..counted {
        let memory = placement::memory(job, &size.layout, rank);
        even = even.saturating_add(memory.balanced);
        kept = kept.saturating_add(memory.committed);
    }
    let most = first.parts.iter().max_by_key(|part| part.bytes);
    Wish {
        who: JOB,
        workers: size.nodes,
        even,
        kept,
        more: ("where its router spreads tokens unevenly", "the system may end it"),
        even_each: first.balanced,
        reserved_each: first.worst,
        most: most.map(|part| (part.name, part.bytes)),
    }
}

/// What bounds this process, where a machine may move to disk what it has no memory for.
fn bounds() -> Vec<Bound> {
    let MemoryBounds { mut bounds, swap, .. } = MemoryBounds::of_this_process();
    let machine = bounds.iter_mut().filter(|bound| bound.by == BoundSource::Machine);
    machine.for_each(|bound| bound.left = bound.left.saturating_add(swap));
    bounds
}

/// Holds what a command makes in its own process against this machine's memory: `who`, as it
/// begins a sentence, and what of it is used and reserved. `less` says what would fit, of what it
/// is told to try.
///
/// # Errors
/// It cannot fit: how much it wants, what there is, and what would fit.
pub fn check_alone(
    who: &'static str,
    wanted: Need,
    less: impl FnOnce(&dyn Fn(Need) -> bool) -> Option<String>,
) -> Result<(), String> {
    judge_alone(who, wanted, &bounds(), less)
}

/// The largest number from `least` on and below `above` that fits, where each number below one
/// that fits does, too.
pub fn largest(least: u32, above: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    if above <= least || !fits(least) {
        return None;
    }
    let (mut most, mut above) = (least, above);
    while above - most > 1 {
        let middle = most + (above - most) / 2;
        if fits(middle) { most = middle } else { above = middle }
    }
    Some(most)
}

/// Bytes that a process writes to, and those that it reserves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    pub used: u64,
    pub reserved: u64,
}

impl From<&RankMemory> for Need {
    fn from(memory: &RankMemory) -> Need {
        Need { used: memory.balanced, reserved: memory.worst }
    }
}

fn judge_alone(
    who: &'static str,
    wanted: Need,
    bounds: &[Bound],
    less: impl FnOnce(&dyn Fn(Need) -> bool) -> Option<String>,
) -> Result<(), String> {
    let wish = |Need { used, reserved }: Need| Wish {
        who,
        workers: 1,
        even: used,
        even_each: used,
        reserved_each: reserved,
        ..Wish::default()
    };
    let Some((bound, sentence)) = short(&wish(wanted), bounds) else { return Ok(()) };
    let less = less(&|wanted| short(&wish(wanted), bounds).is_none());
    let less = less.map_or(String::new(), |less| format!("{less}; or "));
    Err(format!("{sentence}\n  {less}{}", bound.raise()))
}

/// Of the bounds that there is too little below, the one that leaves least, in words.
fn short<'a>(wish: &Wish, bounds: &'a [Bound]) -> Option<(&'a Bound, String)> {
    let Wish { who, .. } = wish;
    let needed = |bound: &Bound| match bound.scope() {
        Scope::All => wish.even,
        Scope::EachData => wish.even_each.saturating_add(PROCESS_DATA),
        Scope::EachAddresses => wish.reserved_each.saturating_add(PROCESS_ADDRESSES),
    };
    let short = bounds.iter().filter(|bound| needed(bound) > bound.left);
    let bound = short.min_by_key(|bound| bound.left)?;
    let whose = match bound.scope() {
        Scope::All => wants(wish, wish.even),
        Scope::EachData | Scope::EachAddresses => {
            let who = if *who == JOB { "a worker" } else { who };
            format!("{who} wants {} of memory", gib(needed(bound)))
        }
    };
    let what = bound.left_of(&gib(bound.limit));
    Some((bound, format!("{whose}, and {} are {what}", gib(bound.left))))
}

fn wants(wish: &Wish, bytes: u64) -> String {
    let (who, bytes) = (wish.who, gib(bytes));
    match wish.workers {
        1 => format!("{who} wants {bytes} of memory"),
        workers => format!("{who} wants {bytes} of memory for {workers} workers"),
    }
}

fn judge(wish: &Wish, bounds: &[Bound]) -> Result<Option<String>, String> {
    if let Some((bound, sentence)) = short(wish, bounds) {
        return Err(format!("{sentence}\n  {}", advice(wish, &bound.raise())));
    }
    let all = bounds.iter().filter(|bound| bound.scope() == Scope::All);
    let tight = all.filter(|bound| wish.kept > bound.left).min_by_key(|bound| bound.left);
    Ok(tight.map(|bound| {
        let (bytes, what) = (gib(bound.left), bound.left_of(&gib(bound.limit)));
        format!(
            "{} {}, and {bytes} are {what}: {}. {}",
            wants(wish, wish.kept),
            wish.more.0,
            wish.more.1,
            advice(wish, &bound.raise())
        )
    }))
}

/// What to change, after what takes most.
fn advice(wish: &Wish, raise: &str) -> String {
    let Some((name, bytes)) = wish.most else { return raise.to_string() };
    // Of the smallest models: no other model needs less.
    if name == "process" {
        return raise.to_string();
    }
    let lower = match name {
        "activations" | "scratch" | "logits" | "routed rows" | "exchange" => {
            "a smaller training.microBatchSize or data.sequenceLength needs less"
        }
        OFFLOADED_MASTERS | OFFLOADED_MOMENTS => {
            "training.momentDtype: bf16 needs less, training.offload: none nothing of it"
        }
        _ => "a smaller model needs less: fewer layers, experts, or a smaller hiddenSize",
    };
    let largest = gib(bytes);
    format!("most of it are {name}, {largest} of the first rank; {lower}; or {raise}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn wish() -> Wish {
        Wish {
            who: JOB,
            workers: 4,
            even: 8 * GIB,
            kept: 12 * GIB,
            more: ("where its router spreads tokens unevenly", "the system may end it"),
            even_each: 2 * GIB,
            reserved_each: 5 * GIB,
            most: Some(("activations", GIB)),
        }
    }

    fn bound(by: BoundSource, left: u64) -> Bound {
        Bound { by, limit: 16 * GIB, left }
    }

    #[test]
    fn what_cannot_fit_is_refused_with_what_to_change() {
        assert_eq!(judge(&wish(), &[]), Ok(None));
        assert_eq!(judge(&wish(), &[bound(BoundSource::Machine, 12 * GIB)]), Ok(None));
        let refused = judge(&wish(), &[bound(BoundSource::Machine, 7 * GIB)]).expect_err("refused");
        assert_eq!(
            refused,
            "the job wants 8.0 GiB of memory for 4 workers, and 7.0 GiB are available on this \
             machine\n  most of it are activations, 1.0 GiB of the first rank; a smaller \
             training.microBatchSize or data.sequenceLength needs less; or end what else uses the \
             memory"
        );
        let tight = judge(&wish(), &[bound(BoundSource::Machine, 9 * GIB)]);
        let tight = tight.expect("fits").expect("a word");
        assert!(tight.starts_with("the job wants 12.0 GiB of memory for 4 workers where"));
        let (data, addresses) = (2 * GIB + PROCESS_DATA, 5 * GIB + PROCESS_ADDRESSES);
        let bounds = [('d', 2 * GIB, data), ('v', 5 * GIB, addresses)];
        for (letter, room, enough) in bounds {
            let limit = |left| bound(BoundSource::Ulimit(letter), left);
            let refused = judge(&wish(), &[limit(room)]).expect_err("refused");
            assert!(refused.starts_with("a worker wants "), "{refused}");
            assert_eq!(judge(&wish(), &[limit(enough)]), Ok(None));
        }
    }
    #[test]
    fn a_command_is_refused_with_what_would_fit() {
        let wanted = |used| Need { used: used * GIB, reserved: 2 * used * GIB };
        let judged = |used, bounds: &[Bound]| {
            // The largest of what fits.
            judge_alone("the bench", wanted(used), bounds, |fits| {
                let most = (1..used).rev().find(|used| fits(wanted(*used)))?;
                Some(format!("--layers {most} would fit"))
            })
        };
        let group = BoundSource::Group { folder: "/g".into(), file: "memory.max", own: true };
        let bounds = [bound(BoundSource::Machine, 9 * GIB), bound(group, 3 * GIB)];
        assert_eq!(judged(3, &bounds), Ok(()));
        assert_eq!(
            judged(8, &bounds).expect_err("refused"),
            "the bench wants 8.0 GiB of memory, and 3.0 GiB are left of the 16.0 GiB that its \
             control group allows (/g/memory.max)\n  --layers 3 would fit; or give the container, \
             slice or job of this machine more memory"
        );
        let addresses = [bound(BoundSource::Ulimit('v'), 9 * GIB)];
        let refused = judged(8, &addresses).expect_err("refused");
        assert!(refused.starts_with("the bench wants 16.0 GiB of memory, and 9.0"), "{refused}");
        assert!(refused.contains("--layers 4 would fit; or raise it"), "{refused}");
        let none = judged(1, &[bound(BoundSource::Machine, 5)]).expect_err("refused");
        assert!(none.ends_with("\n  end what else uses the memory"), "{none}");
    }
}
