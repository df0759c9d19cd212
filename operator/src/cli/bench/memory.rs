//! Whether processors have the memory that a bench takes, asked before any of it is taken.

use super::super::room::{Need, check_alone, largest};
use super::{BenchArgs, DeviceName, job};
use moejob_manifest::Job;
use moejob_manifest::spec::Preset;
use moejob_plan::placement;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::RankMemory;

/// What of a rank's memory a bench does without: it keeps no state beside the device's.
pub fn kept(memory: &RankMemory) -> u64 {
    let kept = memory.parts.iter().filter(|part| ["snapshots", "checkpoint"].contains(&part.name));
    kept.map(|part| part.bytes).sum()
}

/// # Errors
/// The bench does not fit: what it wants, what there is, and with which options it would.
pub fn check(
    args: &BenchArgs,
    preset: Preset,
    planned: &Job,
    layout: &Layout,
) -> Result<(), String> {
    let less = |fits: &dyn Fn(Need) -> bool| {
        let fits = |layers: u32, micro_batch: u32, sequence: u32| {
            let args = BenchArgs { layers: Some(layers), micro_batch, sequence, ..args.clone() };
            let job = job(&args, preset, DeviceName::Cpu);
            job.is_ok_and(|job| fits(wanted(&job, layout)))
        };
        let (layers, micro) = (planned.model.num_hidden_layers, args.micro_batch);
        let sequence = args.sequence;
        let options = [
            ("--micro-batch", largest(1, micro, |of| fits(layers, of, sequence))),
            ("--sequence", largest(SEQUENCE_MIN, sequence, |of| fits(layers, micro, of))),
            ("--layers", largest(1, layers, |of| fits(of, micro, sequence))),
        ];
        let options = options.into_iter().filter_map(|(name, of)| Some(format!("{name} {}", of?)));
        let options: Vec<String> = options.collect();
        if !options.is_empty() {
            return Some(format!("{} would fit", options.join(" or ")));
        }
        // Of all three together: halves of what is asked for, and halves of them.
        let mut halves = (1..u32::BITS).map(|by| {
            ((layers >> by).max(1), (micro >> by).max(1), (sequence >> by).max(SEQUENCE_MIN))
        });
        let fitting = halves.find(|(layers, micro, sequence)| {
            fits(*layers, *micro, *sequence)
        });
        Some(match fitting {
            Some((layers, micro, sequence)) => {
                let all = format!("--layers {layers} --micro-batch {micro} --sequence {sequence}");
                format!("{all} would fit")
            }
            None => "a smaller --preset would fit, such as tiny".to_string(),
        })
    };
    check_alone("the bench", wanted(planned, layout), less)
}

/// Tokens of a sequence at least, as manifests have it.
const SEQUENCE_MIN: u32 = 2;

/// What all ranks take of this machine together.
fn wanted(job: &Job, layout: &Layout) -> Need {
    let ranks = (0..layout.mesh.world()).map(|rank| placement::memory(job, layout, rank));
    ranks.fold(Need::default(), |all, memory| {
        let less = kept(&memory);
        Need {
            used: all.used.saturating_add(memory.balanced - less),
            reserved: all.reserved.saturating_add(memory.worst - less),
        }
    })
}
