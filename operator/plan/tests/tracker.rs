//! What the leader's memory makes of messages that come late, twice or out of turn.

mod said;
mod world;

use moejob_plan::decide::Action;
use moejob_plan::observed::{Outcome, Record, StopCause, Stored, WorkerState};
use moejob_plan::plan;
use moejob_plan::track::Tracker;
use moejob_protocol::message::{Heartbeat, Held, Hello, LeftReason, Loading, Phase, Up};
use moejob_protocol::report::{Detail, Event, EventKind};
use std::collections::BTreeMap;
use world::{Setup, World};

fn running(setup: Setup) -> World {
    let mut world = World::new(setup);
    world.settle();
    let names: Vec<String> = world.sims.keys().cloned().collect();
    for name in &names {
        assert!(world.connect(name));
    }
    world.settle();
    // The first brings them together.
    for _ in 0..13 {
        world.now += 100;
        assert!(world.step());
        world.settle();
    }
    world
}

fn hello(world: &World, name: &str) -> Hello {
    let sim = &world.sims[name];
    Hello {
        version: world.setup.speaks,
        worker: name.to_string(),
        token: String::new(),
        signing_request: String::new(),
        attempt: sim.attempt,
        digest: sim.digest.clone(),
        rank: sim.rank,
        held: sim.held.clone(),
    }
}

#[test]
fn a_member_that_reconnects_is_adopted_unchanged() {
    let mut world = running(Setup::default());
    let before = world.observed().worker("j-1").cloned();
    let hello = hello(&world, "j-1");
    world.tracker.connected("j-1", "j-1:1", &hello);
    assert_eq!(world.observed().worker("j-1").cloned(), before);
    assert!(world.decide().iter().all(|plan| plan.actions.is_empty()));
}

#[test]
fn a_member_with_another_configuration_ends_the_attempt() {
    let mut world = running(Setup::default());
    let hello = Hello { digest: "another".to_string(), ..hello(&world, "j-1") };
    world.tracker.connected("j-1", "j-1:1", &hello);
    world.settle();
    assert_eq!(world.observed().gang().map(|gang| gang.attempt), Some(2));
}

/// It leaves the old attempt before it is given a rank in a new one.
#[test]
fn one_that_is_still_in_an_older_attempt_is_told_to_leave_it() {
    let mut world = running(Setup { spares: 1, nodes: 5, ..Setup::default() });
    let digest = world.sims["j-0"].digest.clone();
    let hello = Hello { attempt: 1, digest, rank: Some(3), ..hello(&world, "j-4") };
    world.kill("j-0", None);
    world.settle();
    world.tracker.connected("j-4", "j-4:1", &hello);
    let plans = world.decide();
    let actions: Vec<&Action> = plans.iter().flat_map(|plan| &plan.actions).collect();
    let leaves = |action: &&&Action| {
        matches!(action, Action::LeaveAttempt { name, attempt: 1, .. } if name == "j-4")
    };
    assert_eq!(actions.iter().filter(leaves).count(), 1, "{actions:?}");
}

#[test]
fn one_that_has_left_stays_so_when_its_stream_comes_anew() {
    let mut world = running(Setup::default());
    let reason = LeftReason::Stopped { step: 12 };
    let left = Up::Left { reason: reason.clone(), held: Vec::new() };
    world.tracker.heard("j-1", 1, &left, 0);
    let hello = hello(&world, "j-1");
    world.tracker.connected("j-1", "j-1:1", &hello);
    let state = world.observed().worker("j-1").map(|worker| worker.state.clone());
    assert_eq!(state, Some(WorkerState::Left { attempt: 1, reason }));
}

/// The storage's word counts, and trying again with it costs nothing of the budget.
#[test]
fn the_next_attempt_resumes_from_what_the_storage_has() {
    let event = |kind: EventKind, attempt: u32, step: u64| {
        let details = BTreeMap::from([("step".to_string(), Detail::Number(step))]);
        let (time, reason, message) = Default::default();
        Up::Event(Event { time, attempt, event: kind, reason, message, details })
    };
    // (what the storage has, the step that is told as damaged)
    for (found, damaged) in [(7, None), (3, Some(5))] {
        let mut world = World::new(Setup::default());
        world.done = 9;
        let stored = |step: u64| Stored { step, name: format!("step-{step:08}") };
        world.tracker.observed.stored = Some(stored(5));
        world.settle();
        for name in world.sims.keys().cloned().collect::<Vec<_>>() {
            assert!(world.connect(&name));
        }
        world.settle();
        let resumed_at = |world: &World| {
            let gang = world.observed().gang().map(|gang| (gang.attempt, gang.resumed_at));
            gang.expect("a gang")
        };
        assert_eq!(resumed_at(&world), (1, 5));
        let (now, names) = (world.now, world.sims.keys().cloned().collect::<Vec<_>>());
        if let Some(step) = damaged {
            let refused = event(EventKind::CheckpointRefused, 1, step);
            world.tracker.heard(&names[0], 1, &refused, now);
        }
        let mut claimed = event(EventKind::AttemptsClaimed, 1, 0);
        if let Up::Event(claimed) = &mut claimed {
            claimed.details = BTreeMap::from([("claimed".to_string(), Detail::Number(6))]);
        }
        world.tracker.heard(&names[0], 1, &claimed, now);
        let committed = event(EventKind::CheckpointCommitted, 1, found);
        world.tracker.heard(&names[0], 1, &committed, now);
        for name in &names {
            let reason = LeftReason::Stopped { step: 5 };
            let left = Up::Left { reason: reason.clone(), held: Vec::new() };
            world.tracker.heard(name, 1, &left, now);
            world.sims.get_mut(name).expect("a worker").leave(reason);
        }
        world.settle();
        assert_eq!(resumed_at(&world), (7, found));
        assert_eq!(world.observed().stored, Some(stored(found)));
        assert_eq!(world.observed().record.restarts, Vec::<u64>::new());
    }
}

#[test]
fn nothing_brings_back_the_dead() {
    let mut world = running(Setup::default());
    let hello = hello(&world, "j-1");
    world.tracker.exited("j-1", None, "killed by signal 9", 0);
    world.tracker.connected("j-1", "j-1:1", &hello);
    let held = vec![Held { attempt: 1, step: 10, shards: vec![0] }];
    world.tracker.heard("j-1", 1, &Up::Left { reason: LeftReason::Asked, held }, 0);
    world.tracker.heard("j-1", 1, &Up::Completed { step: 100 }, 0);
    world.tracker.silent("j-1", "closed");
    let worker = world.observed().worker("j-1").expect("a member is remembered");
    assert!(worker.is_dead() && worker.held.is_empty());
}

#[test]
fn the_end_of_an_attempt_that_was_given_up_is_not_the_jobs() {
    let mut world = running(Setup::default());
    world.kill("j-0", None);
    world.settle();
    assert_eq!(world.observed().record.attempt, 2);
    world.tracker.heard("j-1", 1, &Up::Completed { step: 100 }, 0);
    world.settle();
    assert_eq!(world.outcome(), None);
    world.tracker.heard("j-1", 2, &Up::Completed { step: 100 }, 0);
    world.settle();
    assert_eq!(world.outcome(), Some(&Outcome::Complete { step: 100 }));
}

/// Its stream closes before its process ends, and the leader kills it in between.
#[test]
fn a_worker_that_said_why_it_ends_is_believed() {
    let mut world = running(Setup::default());
    let message = "the data has changed".to_string();
    let failed = Up::Failed { exit_code: 3, message: message.clone(), step: None };
    world.tracker.heard("j-2", 1, &failed, 0);
    world.tracker.silent("j-2", "closed");
    world.decide();
    world.tracker.exited("j-2", None, "killed by signal 9", 0);
    world.decide();
    let reason = "DataOrCheckpointRefused";
    assert_eq!(world.outcome(), Some(&Outcome::Failed { exit_code: 3, reason, message }));
}

/// Attempts that end before their first snapshot do not make older ones unreadable.
#[test]
fn a_layout_is_remembered_as_long_as_a_snapshot_of_it_is_held() {
    let mut world = running(Setup { restarts_max: 100, ..Setup::default() });
    world.kill("j-3", None);
    world.settle();
    for _ in 0..20 {
        let attempt = world.observed().record.attempt;
        let error = LeftReason::Error { message: "no".to_string() };
        world.sims.get_mut("j-0").expect("a survivor").leave(error);
        world.settle();
        assert_eq!(world.observed().record.attempt, attempt + 1);
    }
    let gang = world.observed().gang().expect("it goes on trying");
    assert_eq!(gang.resumed_at, 10);
    assert!(world.observed().record.layouts.len() < 12);
}

/// Data that take hours to open do not end an attempt that goes on with it; data that stand still
/// do. A member that waits for its data says so later, too, and no attempt is broken for it.
#[test]
fn opening_the_data_is_progress_while_it_goes_on() {
    let mut world = World::new(Setup::default());
    world.settle();
    let names: Vec<String> = world.sims.keys().cloned().collect();
    for name in &names {
        assert!(world.connect(name));
    }
    world.settle();
    let attempt = |world: &World| world.observed().gang().map(|gang| gang.attempt);
    let beat = |life: u64| {
        let loading = Some(Loading { bytes_done: life, bytes: 1 << 40, life });
        let (phase, held) = (Phase::Loading, vec![]);
        Up::Heartbeat(Heartbeat { phase, step: 0, collective: 0, held, loading })
    };
    for minute in 1..=60 {
        world.now += 60_000;
        // One member reads, the other waits in its first collective.
        world.tracker.heard(&names[0], 1, &beat(minute), world.now);
        world.tracker.heard("a stranger", 1, &beat(minute), world.now);
        world.settle();
        assert_eq!(attempt(&world), Some(1), "after {minute} minutes");
    }
    for _ in 0..11 {
        world.now += 60_000;
        world.tracker.heard(&names[0], 1, &beat(60), world.now);
        world.tracker.heard("a stranger", 1, &beat(61), world.now);
        world.tracker.heard(&names[0], 0, &beat(61), world.now);
        world.settle();
    }
    assert_ne!(attempt(&world), Some(1), "without life");
    let mut stepping = running(Setup::default());
    let before = stepping.observed().record.progressed_at;
    let name = stepping.sims.keys().next().expect("a worker").clone();
    stepping.now += 30_000;
    stepping.tracker.heard(&name, 0, &beat(9), stepping.now);
    assert_eq!(stepping.observed().record.progressed_at, before, "of another attempt");
    // 900 s of one read, in steps of half a second: the step timeout is one minute.
    let attempt_before = attempt(&stepping);
    for half_second in 1..=1800 {
        stepping.now += 500;
        stepping.tracker.heard(&name, 1, &beat(9 + half_second), stepping.now);
        stepping.settle();
    }
    assert_eq!(attempt(&stepping), attempt_before);
    assert!(stepping.observed().record.restarts.is_empty());
    // It says nothing any more: that is a hang again.
    for _ in 0..130 {
        stepping.now += 500;
        stepping.tracker.heard(&name, 1, &beat(1809), stepping.now);
        stepping.settle();
    }
    assert_ne!(attempt(&stepping), attempt_before);
}

#[test]
fn data_that_are_late_are_a_condition_until_they_come() {
    let mut world = running(Setup::default());
    let names: Vec<String> = world.sims.keys().cloned().collect();
    let says = |kind, reason: &str, rank: u64| {
        let message = format!("rank {rank}: it has waited for its data for 20 s");
        said::of_kind(kind, 1, reason, &message)
    };
    let late = |world: &World| world.observed().late_data.len();
    let degraded = says(EventKind::DataDegraded, "StorageSlow", 1);
    world.tracker.heard(&names[1], 1, &degraded, world.now);
    world.tracker.heard("a stranger", 1, &degraded, world.now);
    world.tracker.heard(&names[0], 0, &degraded, world.now);
    assert_eq!(late(&world), 1);
    let (reason, message) = &world.observed().late_data[&names[1]];
    assert_eq!(reason, "StorageSlow");
    assert!(message.contains("for 20 s"), "{message}");
    world.tracker.heard(&names[0], 1, &degraded, world.now);
    assert_eq!(late(&world), 2);
    for name in &names[..2] {
        let recovered = says(EventKind::DataRecovered, "Read", 0);
        world.tracker.heard(name, 1, &recovered, world.now);
    }
    assert_eq!(late(&world), 0);
}

#[test]
fn a_step_counts_once_whoever_reports_it() {
    let mut world = running(Setup::default());
    let median = world.observed().record.step_median;
    assert_eq!(median, 100);
    for name in ["j-1", "j-2"] {
        let up = said::step_report(12, 1);
        assert!(world.tracker.heard(name, 1, &up, world.now + 50_000).is_empty());
    }
    assert_eq!(world.observed().record.step_median, median);
    assert!(world.observed().record.progressed_at <= world.now);
}

/// A status that was restored into a new object of the same name.
#[test]
fn the_record_of_another_job_counts_no_further_than_its_attempt() {
    let world = running(Setup::default());
    let mut observed = world.observed().clone();
    observed.record.gang.iter_mut().for_each(|gang| gang.inherited = true);
    assert_eq!(Tracker::new(observed.clone()).observed.record, observed.record);
    observed.template.job_uid = "another".to_string();
    let record = Tracker::new(observed).observed.record;
    assert_eq!(record, Record { attempt: 1, ..Record::default() });
}

/// The time that a gang has for a checkpoint begins with the wish to stop, not with a growth that
/// it was asked for long before.
#[test]
fn a_growth_that_was_asked_for_long_ago_leaves_a_stop_its_time() {
    let mut world = running(Setup::default());
    let now = world.now + 600_000;
    let observed = &mut world.tracker.observed;
    observed.record.progressed_at = now;
    observed.wanted.suspend = true;
    let gang = observed.record.gang.as_mut().expect("a gang");
    gang.stop_requested = Some((StopCause::Growth, now - 500_000));
    let actions = plan(observed, now).actions;
    assert!(!actions.iter().any(|of| matches!(of, Action::Finish(_))), "{actions:?}");
    let asks = |of: &Action| matches!(of, Action::Request { cause: StopCause::Suspend, .. });
    assert!(actions.iter().any(asks), "{actions:?}");
    // One that was asked to stop, and is as late, is not waited for.
    let gang = observed.record.gang.as_mut().expect("a gang");
    gang.stop_requested = Some((StopCause::Suspend, now - 500_000));
    observed.record.progressed_at = now - 500_000;
    let actions = plan(observed, now).actions;
    let over = |of: &Action| matches!(of, Action::Finish(Outcome::Suspended));
    assert!(actions.iter().any(over), "{actions:?}");
}

#[test]
fn members_that_are_ended_because_the_job_is_over_break_no_gang() {
    let stop = Action::StopWorker { name: "j-0".to_string(), grace: 5_000 };
    let mut world = running(Setup::default());
    let now = world.now;
    world.tracker.done(&Action::Finish(Outcome::Interrupted), now);
    world.tracker.done(&stop, now);
    assert_eq!(world.observed().gang().expect("a gang").broken, None);
    let mut world = running(Setup::default());
    world.tracker.done(&stop, now);
    assert!(world.observed().gang().expect("a gang").broken.is_some(), "nobody ended the job");
}

/// It was lost while its attempt was recorded: to configure it makes it no member.
#[test]
fn a_worker_that_was_lost_meanwhile_becomes_no_member() {
    let mut world = World::new(Setup::default());
    world.settle();
    let names: Vec<String> = world.sims.keys().cloned().collect();
    names.iter().for_each(|name| assert!(world.connect(name)));
    let plans = world.settle();
    let mut actions = plans.into_iter().flat_map(|plan| plan.actions);
    let is_its = |of: &Action| matches!(of, Action::Configure { name, .. } if name == "j-1");
    let configure = actions.find(is_its).expect("it gets a rank");
    let dead = WorkerState::Dead { exit_code: None, message: "gone".to_string() };
    for lost in [WorkerState::Silent, dead, WorkerState::Completed { attempt: 1, step: 3 }] {
        world.tracker.observed.worker_mut("j-1").expect("it is known").state = lost.clone();
        world.tracker.done(&configure, world.now);
        assert_eq!(world.observed().worker("j-1").expect("it is known").state, lost);
    }
    world.tracker.observed.worker_mut("j-1").expect("it is known").state = WorkerState::Idle;
    world.tracker.done(&configure, world.now);
    let state = &world.observed().worker("j-1").expect("it is known").state;
    assert!(matches!(state, WorkerState::Member { attempt: 1, .. }), "{state:?}");
}

/// A provider that announces a freeze may also cordon the node for its time.
#[test]
fn a_frozen_member_is_waited_for_on_a_node_that_nobody_may_come_to() {
    let mut world = running(Setup::default());
    let now = world.now;
    let node = world.observed().worker("j-1").expect("it is known").node.clone();
    let observed = &mut world.tracker.observed;
    let at = observed.nodes.iter().position(|of| of.name == node).expect("it is granted");
    (observed.nodes[at].usable, observed.nodes[at].freezes) = (false, true);
    assert!(world.tracker.waits_out("j-1", now).is_some(), "it is waited for");
    let observed = &mut world.tracker.observed;
    let given_up = |actions: Vec<Action>| {
        actions.iter().any(|of| matches!(of, Action::GiveUp { name } if name == "j-1"))
    };
    assert!(!given_up(plan(observed, now).actions));
    // The freeze is over, and it is still to be left: what was announced was its end.
    observed.nodes[at].freezes = false;
    assert!(given_up(plan(observed, now).actions));
}
