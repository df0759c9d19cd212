//! Who is in a gang, by its workers, and who sends which shard.

use crate::config::WorkerConfig;
use serde::{Deserialize, Serialize};

/// A ranked worker as its peers reach it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Member {
    pub rank: u32,
    /// Identity in its certificate: the pod's uid, locally the worker's.
    pub worker: String,
    pub node: String,
    /// `address:port` of its listener.
    pub address: String,
}

impl WorkerConfig {
    /// Whose rank this is.
    pub fn member_of(&self, rank: u32) -> Option<&Member> {
        self.members.get((rank / self.ranks.max(1)) as usize)
    }

    /// Whether two ranks are of one worker, and so have one memory.
    pub fn are_near(&self, rank: u32, other: u32) -> bool {
        let ranks = self.ranks.max(1);
        rank / ranks == other / ranks
    }

    /// The configuration for workers that speak a version before
    /// [`CONTROL_RUNS`](crate::message::CONTROL_RUNS): an entry a rank.
    pub fn by_rank(&self) -> WorkerConfig {
        let of = |member: &Member| {
            let first = member.rank;
            let member = member.clone();
            (first..first + self.ranks.max(1)).map(move |rank| Member { rank, ..member.clone() })
        };
        WorkerConfig { members: self.members.iter().flat_map(of).collect(), ..self.clone() }
    }
}

/// `shard` (a rank of the earlier layout) is sent by `from` (a rank of the new one).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardSource {
    pub shard: u32,
    pub from: u32,
}

/// Sources on the wire: `count` shards from `shard` on are sent by as many ranks from `from` on.
pub mod runs {
    use super::ShardSource;
    use crate::config::{is_one, one};
    use crate::message::GANG_RANKS_MAX;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Run {
        shard: u32,
        from: u32,
        #[serde(default = "one", skip_serializing_if = "is_one")]
        count: u32,
    }

    /// # Errors
    /// As of the serializer.
    pub fn serialize<S: Serializer>(sources: &[ShardSource], to: S) -> Result<S::Ok, S::Error> {
        let mut runs: Vec<Run> = Vec::new();
        for ShardSource { shard, from } in sources.iter().copied() {
            match runs.last_mut() {
                Some(run) if (run.shard + run.count, run.from + run.count) == (shard, from) => {
                    run.count += 1;
                }
                _ => runs.push(Run { shard, from, count: 1 }),
            }
        }
        to.collect_seq(runs)
    }

    /// # Errors
    /// They are not runs, or more shards than a gang has ranks.
    pub fn deserialize<'de, D: Deserializer<'de>>(of: D) -> Result<Vec<ShardSource>, D::Error> {
        let runs = Vec::<Run>::deserialize(of)?;
        let fits = |of: u32, count: u32| {
            of.checked_add(count).is_some_and(|end| end <= GANG_RANKS_MAX)
        };
        let count: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
        if count > GANG_RANKS_MAX.into()
            || !runs.iter().all(|run| fits(run.shard, run.count) && fits(run.from, run.count))
        {
            return Err(D::Error::custom("sources of more shards than a gang has ranks"));
        }
        let each = |Run { shard, from, count }: Run| {
            (0..count).map(move |at| ShardSource { shard: shard + at, from: from + at })
        };
        Ok(runs.into_iter().flat_map(each).collect())
    }
}
