//! Which configurations a worker refuses.

use super::Session;
use moejob_protocol::WorkerConfig;

impl Session {
    /// Why a configuration cannot be meant for this worker.
    pub(super) fn problem(&self, attempt: u32, config: &WorkerConfig) -> Option<String> {
        let mesh = config.layout.mesh;
        let ranks = config.ranks.max(1);
        let world = u64::from(ranks) * config.members.len() as u64;
        if config.job_uid != self.job_uid {
            return Some(format!("job {}, this worker is of job {}", config.job_uid, self.job_uid));
        }
        if config.attempt != attempt {
            return Some(format!("attempt {} in a frame of attempt {attempt}", config.attempt));
        }
        if attempt == self.attempt && config.digest != self.digest {
            return Some(format!("another configuration of attempt {attempt}"));
        }
        if !mesh.is_valid() || u64::from(mesh.world()) != world {
            return Some(format!("{world} ranks for the mesh {mesh:?}"));
        }
        if let Some(rank) = config.rank.filter(|rank| u64::from(*rank) >= world) {
            return Some(format!("rank {rank} of {world}"));
        }
        if let Some(rank) = config.rank.filter(|rank| !rank.is_multiple_of(ranks)) {
            return Some(format!("rank {rank} is the first of no worker with {ranks} ranks"));
        }
        let firsts = (0..).step_by(ranks as usize);
        if config.members.iter().zip(firsts).any(|(member, rank)| member.rank != rank) {
            return Some("members that are not in rank order".to_string());
        }
        None
    }
}
