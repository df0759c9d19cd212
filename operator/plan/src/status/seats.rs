//! Whether engines run, and their memory lies, where that was planned.

use super::{Condition, condition, unknown};
use crate::observed::{Gang, Observed};
use moejob_protocol::config::Backend;
use moejob_protocol::message::CONTROL_PREFLIGHT;

const TYPE: &str = "BindingVerified";
/// Lines of the message.
const LINES_MAX: usize = 8;

/// Of a gang on GPUs, and of any other whose workers tell.
pub(super) fn seats(observed: &Observed, gang: Option<&Gang>) -> Option<Condition> {
    let gang = gang?;
    let told = observed.seats.count(gang.attempt);
    let gpus = observed.template.training.compute.backend == Backend::Cuda;
    if told == 0 && !gpus {
        return None;
    }
    let differences = if told == 0 { Vec::new() } else { observed.seats.differences() };
    if !differences.is_empty() {
        return Some(condition(TYPE, false, "Differs", few(differences)));
    }
    let world = gang.layout.mesh.world() as usize;
    if told < world {
        let old = |name: &str| {
            let speaks = observed.worker(name).map_or(0, |worker| worker.speaks);
            (1..CONTROL_PREFLIGHT).contains(&speaks)
        };
        let old = gang.members.iter().filter(|member| old(&member.worker)).count();
        return Some(match old {
            0 => unknown(TYPE, "NotYet", format!("ranks that have told: {told} of {world}")),
            count => {
                let text = format!("workers of a release that does not tell: {count}");
                unknown(TYPE, "NotTold", text)
            }
        });
    }
    let why = observed.seats.unknown();
    Some(match why.is_empty() {
        true => condition(TYPE, true, "AsPlanned", String::new()),
        false => unknown(TYPE, "NotKnown", few(why)),
    })
}

fn few(mut lines: Vec<String>) -> String {
    let more = lines.len().saturating_sub(LINES_MAX);
    lines.truncate(LINES_MAX);
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines.join("\n")
}
