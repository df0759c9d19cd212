//! Whether NCCL has built what the order of ranks was chosen for.

use super::{Condition, condition, unknown};
use crate::observed::{Gang, Observed};
use moejob_fabric::Verdict;
use moejob_manifest::job::Job;
use moejob_manifest::words::several;
use moejob_protocol::config::Backend;
use moejob_protocol::message::CONTROL_PREFLIGHT;

const TYPE: &str = "RingsVerified";
/// Ranks that are named.
const NAMED_MAX: usize = 8;

/// Of a gang of several GPUs.
pub(super) fn rings(job: &Job, observed: &Observed, gang: Option<&Gang>) -> Option<Condition> {
    let gang = gang?;
    let world = gang.layout.mesh.world();
    if observed.template.training.compute.backend != Backend::Cuda || world < 2 {
        return None;
    }
    let Some(found) = observed.rings.found(gang.attempt) else {
        let old = |name: &str| {
            let speaks = observed.worker(name).map_or(0, |worker| worker.speaks);
            (1..CONTROL_PREFLIGHT).contains(&speaks)
        };
        let old = gang.members.iter().filter(|member| old(&member.worker)).count();
        let told = observed.rings.count(gang.attempt);
        return Some(match old {
            0 => unknown(TYPE, "NotYet", format!("{told} of {world} ranks have told")),
            count => {
                let text = format!("workers of a release that does not tell: {count}");
                unknown(TYPE, "NotTold", text)
            }
        });
    };
    let sockets = &found.sockets;
    if job.profile.expected().rdma && !sockets.is_empty() {
        let named = sockets.iter().take(NAMED_MAX).map(u32::to_string);
        let named = named.collect::<Vec<_>>().join(", ");
        let text = format!(
            "the profile has RDMA, and NCCL goes by TCP (NET/Socket) between nodes; {}, such as \
             {named}",
            several(sockets.len(), "rank")
        );
        return Some(condition(TYPE, false, "Sockets", text));
    }
    let words = found.in_words();
    Some(match found.verdict {
        Verdict::AsPlanned => condition(TYPE, true, "AsPlanned", words),
        Verdict::Differs(_) => condition(TYPE, false, "Differs", words),
        Verdict::Unknown { .. } => unknown(TYPE, "NotRead", words),
    })
}
