//! Rounds: a micro-batch on some ranks of an expert group.

use crate::engine::model::Model;

/// One round of one rank.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// `T` of the own micro-batch; 0 without one.
    pub tokens: usize,
    /// Ranks of the group that have a micro-batch, in ep order.
    pub sources: Vec<Source>,
    pub aim: Aim,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// In the expert group.
    pub position: usize,
    pub tokens: usize,
}

/// What is kept of a round beside its activations. The numbers count the rank's own micro-batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aim {
    #[default]
    Activations,
    /// The statistics of the routers.
    Statistics(usize),
    /// Losses and counts.
    Record(usize),
}

impl Round {
    /// The tokens of one of so many chunks, of each source an even part; as if they were all.
    pub(crate) fn chunk(&self, at: usize, chunks: usize) -> Round {
        let part = |tokens: usize| {
            let [first, end] = [at, at + 1].map(|at| tokens * at / chunks);
            end - first
        };
        let sources = self.sources.iter().map(|of| Source { tokens: part(of.tokens), ..*of });
        Round { tokens: part(self.tokens), sources: sources.collect(), aim: self.aim }
    }

    /// The first micro-batch of a group of one rank.
    pub fn alone(tokens: usize) -> Round {
        let sources = vec![Source { position: 0, tokens }];
        Round { tokens, sources, aim: Aim::Record(0) }
    }
}

/// Who computes which micro-batch in a round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schedule {
    pub round: Round,
    /// The own micro-batch.
    pub own: Option<u32>,
    /// By source.
    pub leaves: Vec<u32>,
    /// No other follows, on any rank.
    pub last: bool,
}

impl Schedule {
    /// `tokens` of each micro-batch of `count`.
    pub fn new(
        model: &Model,
        round: u32,
        count: u32,
        aim: impl Fn(usize) -> Aim,
        tokens: impl Fn(u32) -> usize,
    ) -> Schedule {
        let mesh = &model.layout.mesh;
        let last = round + 1 == mesh.rounds(count);
        let mut schedule = Schedule { last, ..Schedule::default() };
        for (position, rank) in model.group.ranks.iter().enumerate() {
            let block = mesh.micro_batches(*rank, count);
            if round >= block.end - block.start {
                continue;
            }
            let leaf = block.start + round;
            schedule.round.sources.push(Source { position, tokens: tokens(leaf) });
            schedule.leaves.push(leaf);
            if *rank == model.rank {
                schedule.own = Some(leaf);
                schedule.round.tokens = tokens(leaf);
                schedule.round.aim = aim(round as usize);
            }
        }
        schedule
    }
}
