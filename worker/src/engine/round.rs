//! Rounds: a micro-batch on some ranks of an expert group.

use crate::engine::model::Model;

/// One round of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Round {
    /// `T` of the own micro-batch; 0 without one.
    pub tokens: usize,
    /// Ranks of the group that have a micro-batch: the first ones, in ep order.
    pub present: usize,
    pub aim: Aim,
}

/// What is kept of a round beside its activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aim {
    #[default]
    Activations,
    /// The statistics of the routers, of the rank's own micro-batch of this number.
    Statistics(usize),
    /// Losses and counts.
    Record,
}

impl Round {
    /// The first micro-batch of a group of one rank.
    pub fn alone(tokens: usize) -> Round {
        Round { tokens, present: 1, aim: Aim::Record }
    }
}

/// Who computes which micro-batch in a round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schedule {
    pub round: Round,
    /// The own micro-batch.
    pub own: Option<u32>,
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
            // Blocks get no longer from rank to rank, so that those without one are the last.
            assert_eq!(position, schedule.round.present, "{mesh:?}");
            schedule.round.present += 1;
            if *rank == model.rank {
                let micro_batch = block.start + round;
                schedule.own = Some(micro_batch);
                schedule.round.tokens = tokens(micro_batch);
                schedule.round.aim = aim(round as usize);
            }
        }
        schedule
    }
}
