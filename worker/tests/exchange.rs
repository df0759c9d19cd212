//! Experts' tokens travel between processors to those that have one of their experts: the bits of
//! one rank.

mod common;

use common::Job;
use moejob_protocol::config::Recompute;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{AuxLossScope, QkNorm, RouterKind};

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// A job of three steps.
fn job(layout: Layout, change: &impl Fn(&mut Job)) -> Job {
    let mut job = Job::new(layout);
    job.config.training.steps = 3;
    // Each token has choices of one rank and of several.
    job.config.model.experts.count = 9;
    job.config.model.experts.per_token = 4;
    change(&mut job);
    job
}

fn check(name: &str, meshes: &[(u32, u32)], change: impl Fn(&mut Job)) {
    let one = job(layout(1, 1), &change).whole();
    for (dp, ep) in meshes {
        let found = job(layout(*dp, *ep), &change).whole();
        assert_eq!(found, one, "{name}, dp {dp}, ep {ep}");
    }
}

#[test]
fn two_to_twelve_ranks() {
    // 13 micro-batches: in the last round some ranks have none. 9 experts: one rank has more.
    check("plain", &[(2, 2), (3, 3), (4, 4), (6, 3), (8, 8), (8, 4), (9, 9), (12, 6)], |job| {
        job.config.training.global_batch_size = 13;
    });
}

#[test]
fn groups_of_many_ranks() {
    check("many", &[(32, 32), (70, 70)], |job| {
        job.config.training.steps = 2;
        job.config.training.global_batch_size = 71;
        job.config.model.experts.count = 75;
    });
}

#[test]
fn ranks_without_tokens() {
    check("idle", &[(8, 8), (4, 4), (6, 2)], |job| {
        job.config.training.global_batch_size = 3;
    });
    for tokens in [1, 3, 7] {
        check("few tokens", &[(3, 3)], |job| job.config.training.sequence_length = tokens);
    }
}

#[test]
fn other_routers_and_models_and_what_is_computed_again() {
    check("capacity", &[(4, 4), (6, 6)], |job| {
        let router = &mut job.config.model.router;
        (router.kind, router.capacity_factor) = (RouterKind::Tutel, 1.1);
        job.config.training.global_batch_size = 7;
    });
    check("one choice", &[(4, 4), (6, 6)], |job| {
        job.config.model.experts.per_token = 1;
        job.config.model.qk_norm = QkNorm::PerHead;
        job.config.training.global_batch_size = 6;
    });
    check("one balance of all layers", &[(3, 3)], |job| {
        job.config.model.router.aux_loss_scope = AuxLossScope::Hf;
        job.config.model.experts.per_token = 1;
    });
    for recompute in [Recompute::Experts, Recompute::Full] {
        check("again", &[(3, 3)], |job| job.config.training.recompute = recompute);
    }
}

/// More rows than a product sums in one chain of 256.
#[test]
fn many_rows_of_an_expert() {
    check("many rows", &[(2, 2)], |job| {
        let model = &mut job.config.model;
        (model.experts.count, model.experts.per_token) = (2, 2);
        job.config.training.sequence_length = 530;
        (job.config.training.steps, job.config.training.global_batch_size) = (1, 2);
    });
}

/// A rank is lost in the middle of a step: nobody hangs, and the others go on from memory with the
/// bits of an undisturbed run.
#[test]
fn a_lost_rank_leaves_nobody_waiting() {
    let change = |job: &mut Job| {
        job.config.training.steps = 8;
        job.config.training.global_batch_size = 7;
        job.config.recovery.memory_every_steps = 1;
    };
    let one = job(layout(1, 1), &change).whole().0;
    // On a machine that is busy elsewhere the whole job may be done before the cut.
    let was_lost = |ranks| {
        let job = job(layout(ranks, ranks), &change);
        let rows = job.losing_the_last(layout(ranks - 1, ranks - 1), |_| {});
        rows.map(|rows| assert_eq!(rows, one)).is_some()
    };
    for ranks in [4, 6] {
        assert!((0..5).any(|_| was_lost(ranks)), "never cut off in time");
    }
}
