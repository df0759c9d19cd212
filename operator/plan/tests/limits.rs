//! What must not happen: each outcome just beyond the edge of its condition. Mutants of `decide`
//! and `track` have shown that no other test holds these (docs/testing.md).

mod said;
mod world;

use moejob_manifest::job::Venue;
use moejob_plan::allocate::{Claim, Standing};
use moejob_plan::decide::{Action, STOP_MAX, STOP_TIMEOUT, plan};
use moejob_plan::observed::{DeviceFailure, Millis, Outcome, StopCause, Stored, WorkerState};
use moejob_plan::track::Tracker;
use moejob_protocol::message::{Heartbeat, Held, LeftReason, Phase, Up};
use moejob_protocol::report::{Detail, Event, EventKind};
use std::collections::BTreeMap;
use world::{Setup, World};

/// A gang of four that has done some steps.
fn running() -> World {
    let mut world = World::new(Setup::default());
    world.settle();
    for name in world.sims.keys().cloned().collect::<Vec<_>>() {
        assert!(world.connect(&name));
    }
    world.settle();
    for _ in 0..13 {
        world.now += 100;
        assert!(world.step());
        world.settle();
    }
    assert!(world.observed().gang().is_some_and(|gang| gang.stepped));
    world
}

fn finished(world: &World) -> Option<Outcome> {
    let actions = plan(world.observed(), world.now).actions;
    actions.into_iter().find_map(|action| match action {
        Action::Finish(outcome) => Some(outcome),
        _ => None,
    })
}

fn event(kind: EventKind, field: &str, number: u64) -> Up {
    let details = BTreeMap::from([(field.to_string(), Detail::Number(number))]);
    let (time, attempt, reason, message) = Default::default();
    Up::Event(Event { time, attempt, event: kind, reason, message, details })
}

#[test]
fn a_gang_that_trains_outlives_what_would_end_a_job_without_one() {
    // A budget that was used up on the way here.
    let mut world = running();
    world.tracker.observed.record.restarts = vec![world.now; 21];
    assert_eq!(finished(&world), None);
    // Starts that failed.
    world.tracker.observed.record.start_failures = vec![world.now; 21];
    assert_eq!(finished(&world), None);
    // The last step's checkpoint is there, and its members have yet to say that they are done.
    let name = "step-00000100".to_string();
    world.tracker.observed.stored = Some(Stored { step: 100, name });
    assert_eq!(finished(&world), None);
    // Each of them ends the job once there is no gang.
    world.tracker.observed.record.gang = None;
    assert_eq!(finished(&world), Some(Outcome::Complete { step: 100 }));
    world.tracker.observed.stored = None;
    let reason = |world: &World| match finished(world) {
        Some(Outcome::Failed { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(&world), "RestartBudgetUsedUp");
    world.tracker.observed.record.restarts.clear();
    assert_eq!(reason(&world), "WorkersDoNotStart");
}

#[test]
fn an_attempt_that_was_given_up_completes_nothing() {
    let mut world = running();
    let mut complete = |attempt: u32| {
        let worker = &mut world.tracker.observed.workers[0];
        worker.state = WorkerState::Completed { attempt, step: 100 };
        finished(&world)
    };
    assert_eq!(complete(0), None);
    assert_eq!(complete(2), None);
    assert_eq!(complete(1), Some(Outcome::Complete { step: 100 }));
    // Neither is it taken in, nor does a checkpoint of it count.
    let mut world = running();
    let committed = event(EventKind::CheckpointCommitted, "step", 60);
    world.tracker.heard("j-0", 7, &committed, 0);
    world.tracker.heard("j-0", 7, &Up::Completed { step: 100 }, 0);
    assert_eq!(world.observed().stored, None);
    let state = world.observed().worker("j-0").map(|worker| &worker.state);
    assert!(matches!(state, Some(WorkerState::Member { .. })), "{state:?}");
    world.tracker.heard("j-0", 1, &committed, 0);
    assert_eq!(world.observed().stored.as_ref().map(|stored| stored.step), Some(60));
}

#[test]
fn a_device_that_fails_ends_no_job_of_a_cluster() {
    let mut world = World::new(Setup { min: 4, ..Setup::default() });
    let failure = || DeviceFailure {
        node: "n0".to_string(),
        device: 3,
        name: "device 3 of n0".to_string(),
        words: "it gave up".to_string(),
        at: 0,
    };
    world.tracker.observed.record.device_failures = (0..3).map(|_| failure()).collect();
    let reason = finished(&world).map(|outcome| match outcome {
        Outcome::Failed { reason, .. } => reason,
        other => panic!("{other:?}"),
    });
    assert_eq!(reason, Some("DeviceFails"));
    world.tracker.observed.wanted.venue = Venue::Kubernetes;
    assert_eq!(finished(&world), None);
}

#[test]
fn a_request_holds_until_its_last_millisecond() {
    let mut world = running();
    world.tracker.observed.wanted.nodes_max = 2;
    let asked = world.now + 10_000;
    if let Some(gang) = &mut world.tracker.observed.record.gang {
        gang.stop_requested = Some((StopCause::Growth, asked));
    }
    // A gang whose steps go on, so that nothing else is to be decided.
    let requests = |world: &mut World, at: Millis| {
        world.now = at;
        world.tracker.observed.record.progressed_at = at;
        let found = plan(world.observed(), at);
        let is_request = |action: &Action| matches!(action, Action::Request { .. });
        (found.actions.iter().any(is_request), found.requeue)
    };
    let end = asked + STOP_TIMEOUT;
    assert_eq!(requests(&mut world, end - 1).0, false);
    assert!(requests(&mut world, end - 1).1.is_some_and(|at| at <= end), "it is looked at then");
    assert_eq!(requests(&mut world, end).0, true);
}

#[test]
fn a_stray_is_told_of_once() {
    let mut world = running();
    let member = |leaving| WorkerState::Member {
        attempt: 9,
        digest: String::new(),
        rank: 3,
        leaving,
    };
    let why = |world: &World| {
        let why = plan(world.observed(), world.now).why;
        why.iter().filter(|why| why.contains("is still in attempt 9")).count()
    };
    world.tracker.observed.workers.push({
        let mut stray = world.observed().workers[0].clone();
        stray.name = "stray".to_string();
        stray.state = member(None);
        stray
    });
    assert_eq!(why(&world), 1);
    let asked = Some(world.now);
    world.tracker.observed.workers.last_mut().expect("the stray").state = member(asked);
    assert_eq!(why(&world), 0);
}

#[test]
fn a_record_that_names_no_job_is_this_jobs() {
    let mut world = running();
    let observed = &mut world.tracker.observed;
    for (uid, kept) in [("", true), ("job-1", true), ("another", false)] {
        let mut observed = observed.clone();
        observed.template.job_uid = "job-1".to_string();
        observed.record.job_uid = uid.to_string();
        let record = Tracker::new(observed).observed.record;
        assert_eq!(record.gang.is_some(), kept, "{uid}");
        assert_eq!(record.attempt, 1, "{uid}: what the other still writes is fenced");
    }
}

#[test]
fn only_a_worker_that_is_ended_at_once_has_failed_to_start() {
    // One that no node took has not begun: the job is pending.
    for (grace, unplaced, failures) in [(0, false, 1), (5_000, false, 0), (0, true, 0)] {
        let mut world = World::new(Setup::default());
        let (name, node) = ("j-0".to_string(), "n0".to_string());
        world.tracker.done(&Action::StartWorker { name: name.clone(), node }, 0);
        world.tracker.observed.workers.iter_mut().for_each(|worker| worker.unplaced = unplaced);
        world.tracker.done(&Action::StopWorker { name, grace }, 1_000);
        assert_eq!(world.observed().record.start_failures.len(), failures, "{grace}");
    }
}

#[test]
fn a_stop_is_waited_for_while_something_goes_on_and_an_hour_at_most() {
    let mut world = running();
    let asked = world.now;
    world.tracker.observed.wanted.suspend = true;
    world.tracker.observed.record.stopping_since = Some(asked);
    let over = |world: &mut World, progressed: Millis, at: Millis| {
        let record = &mut world.tracker.observed.record;
        let gang = record.gang.as_mut().expect("a gang");
        gang.stop_requested = Some((StopCause::Suspend, asked));
        record.progressed_at = progressed;
        world.now = at;
        finished(world) == Some(Outcome::Suspended)
    };
    let end = asked + STOP_TIMEOUT;
    assert!(!over(&mut world, asked, end - 1) && over(&mut world, asked, end));
    let later = asked + 1_000_000;
    assert!(!over(&mut world, later, later + STOP_TIMEOUT - 1));
    assert!(over(&mut world, later, later + STOP_TIMEOUT));
    let most = asked + STOP_MAX;
    assert!(!over(&mut world, most - 1, most - 1) && over(&mut world, most - 1, most));
}

/// Of hundreds of workers a few always end early.
#[test]
fn failures_to_start_are_counted_by_the_size_of_the_gang() {
    for (nodes, most) in [(1, 20), (8, 20), (9, 40), (512, 1_280)] {
        let mut world = World::new(Setup { min: nodes, max: nodes, nodes: 1, ..Setup::default() });
        world.tracker.observed.record.start_failures = vec![world.now; most];
        assert_eq!(finished(&world), None, "{nodes} nodes");
        world.tracker.observed.record.start_failures.push(world.now);
        let outcome = finished(&world);
        let Some(Outcome::Failed { message, .. }) = outcome else { panic!("{outcome:?}") };
        assert!(message.contains(&format!("more often than {most}, which is")), "{message}");
    }
}

#[test]
fn an_attempt_begins_with_nothing_of_the_one_before() {
    let mut world = running();
    let gang = world.observed().record.gang.clone().expect("a gang");
    let record = &mut world.tracker.observed.record;
    record.start_failures = vec![1, 2];
    record.start_failure = "j-9 did not connect".to_string();
    for worker in &mut world.tracker.observed.workers {
        worker.collective = 77;
        worker.state = WorkerState::Idle;
    }
    world.tracker.done(&Action::RecordAttempt(Box::new(gang)), world.now);
    let record = &world.observed().record;
    assert!(record.start_failures.is_empty() && record.start_failure.is_empty());
    let name = "j-1".to_string();
    let config = std::sync::Arc::new(world.observed().template.clone());
    world.tracker.done(&Action::Configure { name, rank: 1, config }, world.now);
    let of = |name: &str| world.observed().worker(name).map(|worker| worker.collective);
    assert_eq!((of("j-1"), of("j-2")), (Some(0), Some(77)));
}

/// A recovery has rejoined when all members of the attempt that came of it have: not those of the
/// attempt before.
#[test]
fn members_of_the_attempt_before_have_not_rejoined() {
    let mut world = running();
    let phase = Phase::Training;
    let beat = |attempt: u32, names: &[&str], world: &mut World| {
        let beat = Heartbeat { phase, step: 1, collective: 1, held: Vec::new(), loading: None };
        for name in names {
            world.tracker.heard(name, attempt, &Up::Heartbeat(beat.clone()), world.now);
        }
        let newest = world.tracker.recoveries.last();
        newest.is_some_and(|recovery| recovery.rejoined_at.is_some())
    };
    assert!(!beat(1, &["j-0", "j-1", "j-2", "j-3"], &mut world), "nothing was lost");
    let end = Action::EndAttempt { attempt: 1, unplanned: true, cause: "lost".to_string() };
    let mut gang = world.observed().record.gang.clone().expect("a gang");
    (gang.attempt, gang.stepped) = (2, false);
    world.tracker.done(&end, world.now);
    world.tracker.done(&Action::RecordAttempt(Box::new(gang)), world.now);
    assert!(!beat(2, &["j-0", "j-1", "j-2"], &mut world));
    assert!(!beat(1, &["j-3"], &mut world));
    assert!(beat(2, &["j-3"], &mut world));
}

#[test]
fn the_end_of_a_job_has_its_last_step_and_checkpoint() {
    let mut world = running();
    let name = "step-00000050".to_string();
    world.tracker.observed.stored = Some(Stored { step: 50, name });
    world.tracker.done(&Action::Finish(Outcome::Complete { step: 100 }), world.now);
    let stored = world.observed().stored.clone().expect("a checkpoint");
    assert_eq!((stored.step, stored.name.as_str()), (100, "step-00000100"));
    assert_eq!(world.observed().record.step, 100);
    // One that is told late takes nothing back.
    world.tracker.done(&Action::Finish(Outcome::Complete { step: 90 }), world.now);
    let stored = world.observed().stored.clone().expect("a checkpoint");
    assert_eq!((stored.step, world.observed().record.step), (100, 100));
}

#[test]
fn the_highest_claim_counts_whoever_is_heard_last() {
    let mut world = running();
    for taken in [7, 5, u64::from(u32::MAX)] {
        let claimed = event(EventKind::AttemptsClaimed, "claimed", taken);
        world.tracker.heard("j-0", 1, &claimed, 0);
    }
    let end = Action::EndAttempt { attempt: 1, unplanned: false, cause: String::new() };
    world.tracker.done(&end, world.now);
    assert_eq!(world.observed().record.attempt, 7);
}

#[test]
fn one_that_went_silent_is_lost_once() {
    let mut world = running();
    assert_eq!(world.tracker.silent("j-2", "nothing heard").len(), 1);
    assert!(world.tracker.silent("j-2", "nothing heard").is_empty());
    assert!(world.tracker.exited("j-2", None, "killed", world.now).is_empty());
    assert!(world.tracker.exited("j-2", None, "killed", world.now).is_empty());
    // Another one's end, of which nothing was known, is told.
    assert_eq!(world.tracker.exited("j-3", None, "killed", world.now).len(), 1);
}

#[test]
fn a_users_error_is_kept_when_its_worker_is_forgotten() {
    let mut world = running();
    world.tracker.observed.record.gang = None;
    world.tracker.exited("j-1", Some(1), "failed", world.now);
    world.tracker.exited("j-2", Some(3), "no such file", world.now);
    world.tracker.prune();
    assert!(world.observed().worker("j-1").is_none());
    assert!(world.observed().worker("j-2").is_some());
    let outcome = finished(&world);
    let Some(Outcome::Failed { exit_code: 3, reason, .. }) = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason, "DataOrCheckpointRefused");
}

/// A job holds its nodes between two attempts only for state that the storage does not have.
#[test]
fn nodes_are_held_for_newer_state_in_memory_alone() {
    let mut world = running();
    let standing = |world: &mut World, step: u64, stored: Option<u64>, ended: Option<Millis>| {
        let observed = &mut world.tracker.observed;
        let held = |step| vec![Held { attempt: 1, step, shards: vec![0] }];
        observed.workers.iter_mut().for_each(|worker| worker.held = held(step));
        observed.stored = stored.map(|step| Stored { step, name: String::new() });
        observed.record.gang.as_mut().expect("a gang").ended = ended;
        Standing::of(observed)
    };
    assert_eq!(standing(&mut world, 5, None, None), Standing::Running);
    assert_eq!(standing(&mut world, 5, Some(4), Some(9)), Standing::Holding { since: 9 });
    assert_eq!(standing(&mut world, 5, Some(5), Some(9)), Standing::Waiting, "it is stored");
    assert_eq!(standing(&mut world, 0, None, Some(9)), Standing::Waiting, "there is nothing yet");
}

/// Nobody waits for a node whose worker is on its way out, unless how it ends is about to be known.
#[test]
fn a_node_is_leaving_while_its_worker_is() {
    let mut world = running();
    let leaving = |world: &World, soon: bool| Claim::of(world.observed(), |_| soon).leaving;
    assert!(leaving(&world, false).is_empty());
    let node = world.observed().workers[0].node.clone();
    world.tracker.observed.workers[0].stopping = true;
    assert_eq!(leaving(&world, false), [node].into());
    assert!(leaving(&world, true).is_empty());
    let dead = WorkerState::Dead { exit_code: None, message: String::new() };
    world.tracker.observed.workers[0].state = dead;
    assert!(leaving(&world, false).is_empty());
}

/// Members that have stopped wait for the others within a bound, counted from the last step or
/// from the request, whichever came later.
#[test]
fn one_that_does_not_stop_is_waited_for_within_a_bound() {
    let mut world = running();
    let asked = world.now + 7_000;
    let gang = world.tracker.observed.record.gang.as_mut().expect("a gang");
    gang.stop_requested = Some((StopCause::Growth, asked));
    world.tracker.observed.record.progressed_at = asked - 1_000;
    let reason = LeftReason::Stopped { step: 20 };
    world.tracker.observed.workers[0].state = WorkerState::Left { attempt: 1, reason };
    let ends = |world: &World, at: Millis| {
        let found = plan(world.observed(), at);
        (found.why.iter().any(|why| why.contains("not all members stopped")), found.requeue)
    };
    let end = asked + STOP_TIMEOUT;
    assert_eq!(ends(&world, asked), (false, Some(end)));
    assert_eq!(ends(&world, end - 1), (false, Some(end)));
    assert!(ends(&world, end).0);
    world.tracker.observed.record.progressed_at = asked + 2_000;
    assert_eq!(ends(&world, end), (false, Some(end + 2_000)), "it goes on");
}

/// What a member says of an attempt that is not under way puts it outside of the one that is.
#[test]
fn a_member_of_another_attempt_takes_no_part_in_this_one() {
    let broken = |change: &dyn Fn(&mut World)| {
        let mut world = running();
        change(&mut world);
        plan(world.observed(), world.now).why.join("; ")
    };
    assert_eq!(broken(&|_| {}), "");
    let digest = |world: &World| world.observed().gang().expect("a gang").digest.clone();
    let outside = "rank 1 (j-1) was never told of this attempt";
    let found = broken(&|world| {
        let (attempt, digest, rank, leaving) = (7, digest(world), 1, None);
        let state = WorkerState::Member { attempt, digest, rank, leaving };
        world.tracker.observed.workers[1].state = state;
    });
    assert!(found.contains(outside), "{found}");
    let found = broken(&|world| {
        let reason = LeftReason::Stopped { step: 20 };
        world.tracker.observed.workers[1].state = WorkerState::Left { attempt: 7, reason };
    });
    assert!(found.contains(outside), "{found}");
}
