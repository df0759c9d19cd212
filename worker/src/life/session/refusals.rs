//! Which configurations a worker refuses.

use super::Session;
use moejob_protocol::WorkerConfig;

impl Session {
    /// Why a configuration cannot be meant for this worker.
    pub(super) fn problem(&self, attempt: u32, config: &WorkerConfig) -> Option<String> {
        let world = config.members.len();
        if config.job_uid != self.job_uid {
            return Some(format!("job {}, this worker is of job {}", config.job_uid, self.job_uid));
        }
        if config.attempt != attempt {
            return Some(format!("attempt {} in a frame of attempt {attempt}", config.attempt));
        }
        if attempt == self.attempt && config.digest != self.digest {
            return Some(format!("another configuration of attempt {attempt}"));
        }
        if !config.layout.mesh.is_valid() || config.layout.mesh.world() as usize != world {
            return Some(format!("{world} members for the mesh {:?}", config.layout.mesh));
        }
        if config.rank.is_some_and(|rank| rank as usize >= world) {
            return Some(format!("rank {:?} of {world}", config.rank));
        }
        let ranks = config.ranks.max(1);
        let one_workers = |rank: u32| {
            let first = rank as usize;
            let own = config.members.get(first..first.saturating_add(ranks as usize));
            own.is_some_and(|own| own.iter().all(|member| member.worker == own[0].worker))
        };
        if let Some(rank) = config.rank.filter(|rank| !one_workers(*rank)) {
            return Some(format!("{ranks} ranks from {rank} on that are not one worker's"));
        }
        let mut members = config.members.iter().zip(0..);
        if members.any(|(member, rank)| member.rank != rank) {
            return Some("members that are not in rank order".to_string());
        }
        None
    }
}
