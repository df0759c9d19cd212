//! What a job says of itself on the way: phase, conditions, nodes, recoveries.

mod said;
mod world;

use moejob_fabric::FabricFacts;
use moejob_manifest::Job;
use moejob_manifest::job::{Job as Whole, Venue};
use moejob_manifest::status::{Condition, MoeJobStatus};
use moejob_plan::observed::Outcome;
use moejob_plan::status::{self, stamp};
use moejob_plan::{decide, launch, pods};
use world::{Setup, World};

fn job() -> Whole {
    Job::read(include_bytes!("../../manifest/tests/manifests/base.yaml")).unwrap()
}

fn status(world: &World) -> MoeJobStatus {
    let why = decide::plan(world.observed(), world.now).why;
    status::status(&job(), world.observed(), &world.tracker.recoveries, &why, world.now)
}

/// `Running 3/4 +Planned +Running +Degraded` and the reason of each condition that holds.
fn line(status: &MoeJobStatus) -> String {
    let holds = status.conditions.iter().filter(|condition| condition.status == "True");
    let holds: Vec<String> =
        holds.map(|condition| format!("{}={}", condition.type_, condition.reason)).collect();
    format!("{} {} {}", status.phase, status.nodes.summary, holds.join(" "))
}

fn connect_all(world: &mut World) {
    let names: Vec<String> = world.sims.keys().cloned().collect();
    names.iter().for_each(|name| {
        world.connect(name);
    });
    world.settle();
}

fn steps(world: &mut World, count: u32) {
    for _ in 0..count {
        world.now += 100;
        assert!(world.step());
        world.settle();
    }
}

#[test]
fn a_job_tells_its_life() {
    let mut world = World::new(Setup::default());
    assert_eq!(line(&status(&world)), "Pending 0/4 ");
    let waiting = status(&world);
    assert_eq!(waiting.conditions[0].reason, "WaitingForNodes");
    assert!(waiting.conditions[0].message.contains("wait: 0 workers connected, 1 needed"));
    world.settle();
    connect_all(&mut world);
    assert_eq!(line(&status(&world)), "Starting 4/4 Planned=GangFormed");
    steps(&mut world, 13);
    let running = status(&world);
    assert_eq!(line(&running), "Running 4/4 Planned=GangFormed Running=Training");
    assert_eq!((running.attempt, running.step, running.restarts), (1, 12, 0));
    assert_eq!(running.placement.unwrap().summary, "8 over 4 ranks");
    world.kill("j-1", None);
    world.silence("j-1");
    world.decide();
    assert_eq!(line(&status(&world)), "Recovering 4/4 Planned=GangFormed");
    world.settle();
    steps(&mut world, 2);
    let degraded = status(&world);
    let expected = "Running 3/4 Planned=GangFormed Running=Training Degraded=FewerNodes";
    assert_eq!(line(&degraded), expected);
    assert_eq!((degraded.attempt, degraded.restarts), (2, 1));
    let recovery = &degraded.recoveries[0];
    assert_eq!((recovery.attempt, recovery.steps_lost), (1, 2));
    assert_eq!((recovery.replanned_millis, recovery.rejoined_millis), (Some(0), Some(100)));
    assert_eq!(recovery.first_step_millis, Some(200));
    let mesh = degraded.mesh.unwrap();
    assert_eq!((mesh.world, mesh.dp, mesh.ep), (3, 3, 3));
}

#[test]
fn the_end_is_said_with_its_reason() {
    let mut world = World::new(Setup { steps: 5, max: 2, ..Setup::default() });
    world.settle();
    connect_all(&mut world);
    steps(&mut world, 6);
    assert_eq!(line(&status(&world)), "Complete 0/2 Planned=Over Complete=AllStepsDone");
    let mut failed = World::new(Setup::default());
    let outcome = Outcome::Failed {
        exit_code: 3,
        reason: "DataOrCheckpointRefused",
        message: "a file is gone".to_string(),
    };
    failed.tracker.observed.record.outcome = Some(outcome);
    let failed = status(&failed);
    assert_eq!(line(&failed), "Failed 0/4 Planned=Over Failed=DataOrCheckpointRefused");
    let condition = failed.conditions.iter().find(|condition| condition.type_ == "Failed");
    assert_eq!(condition.unwrap().message, "a file is gone");
}

#[test]
fn a_suspended_job_says_when_it_has_stopped() {
    let mut world = World::new(Setup { max: 2, ..Setup::default() });
    world.settle();
    connect_all(&mut world);
    steps(&mut world, 4);
    world.tracker.observed.wanted.suspend = true;
    world.settle();
    assert_eq!(status(&world).phase, "Stopping");
    steps(&mut world, 1);
    assert_eq!(line(&status(&world)), "Suspended 0/2 Planned=Over Suspended=Asked");
}

#[test]
fn a_job_that_cannot_run_here_says_what_to_do() {
    let message = pods::not_durable(&job()).expect("the base manifest has no volume");
    let status = status::blocked("NoDurableCheckpoint", message);
    assert_eq!(status.phase, "Pending");
    let [planned] = &status.conditions[..] else { panic!("{status:?}") };
    assert_eq!(planned.status, "False");
    assert_eq!(planned.reason, "NoDurableCheckpoint");
    assert!(planned.message.contains("set it to a folder of a volume"), "{}", planned.message);
}

#[test]
fn a_condition_keeps_its_time_until_it_changes() {
    let condition = |status: &str, reason: &str| Condition {
        type_: "Running".to_string(),
        status: status.to_string(),
        reason: reason.to_string(),
        ..Condition::default()
    };
    let mut first = vec![condition("True", "Training")];
    stamp(&mut first, &[], "t1");
    let mut same = vec![condition("True", "Another")];
    stamp(&mut same, &first, "t2");
    assert_eq!(same[0].last_transition_time.as_deref(), Some("t1"));
    let mut changed = vec![condition("False", "Recovering")];
    stamp(&mut changed, &same, "t3");
    assert_eq!(changed[0].last_transition_time.as_deref(), Some("t3"));
}

/// What the planner wants of the base manifest.
#[test]
fn a_job_becomes_what_the_planner_wants() {
    let wanted = launch::wanted(&job(), Venue::Local);
    assert_eq!((wanted.nodes_min, wanted.nodes_max, wanted.sizes.len()), (1, 4, 4));
    assert_eq!((wanted.growth_interval, wanted.gang_timeout), (2_000, 30_000));
    assert_eq!(launch::wanted(&job(), Venue::Kubernetes).growth_interval, 60_000);
}

#[test]
fn names_of_nodes_are_written_as_runs() {
    let show = |names: &str| status::runs(names.split(' ')).join(" ");
    assert_eq!(show("n0 n1 n2 n3"), "n0..3");
    assert_eq!(show("n3 n4 m5 m6 m8 x"), "n3..4 m5..6 m8 x");
    assert_eq!(show("n08 n09 n10 n11 n"), "n08 n09 n10..11 n");
    assert_eq!(show("a b 7 8 18446744073709551615 18446744073709551616"), "a b 7..8 \
        18446744073709551615 18446744073709551616");
    let many: Vec<String> = (0..512).map(|node| format!("aks-gpu-{node}")).collect();
    assert_eq!(status::runs(many.iter().map(String::as_str)), ["aks-gpu-0..511"]);
}

/// Nodes 0 to 3 hang on leaves 0 and 1 by turns: the ring crosses each time. What the allocation
/// would give is known, or not.
#[test]
fn a_gang_under_way_tells_what_its_order_costs() {
    let mut world = World::new(Setup::default());
    world.settle();
    connect_all(&mut world);
    let fabric = |world: &World| status(world).placement.expect("a gang").fabric;
    assert_eq!(fabric(&world), None, "one leaf");
    let nodes = &mut world.tracker.observed.nodes;
    nodes.iter_mut().zip([0, 1, 0, 1]).for_each(|(node, leaf)| node.leaf = leaf);
    let alone = fabric(&world).expect("two leaves");
    assert_eq!((alone.leaves, alone.ring_crossings, alone.price), (2, 4, None));
    let present: u32 = alone.ring_crossings + alone.tree_crossings.iter().sum::<u32>();
    world.tracker.observed.fabric = FabricFacts::of(&[0, 0, 1, 1], 1);
    let told = fabric(&world).expect("two leaves");
    let least = told.least_crossings.expect("it is known");
    assert_eq!(told.price, Some(present - least));
    assert!(least < present, "{told:?}");
    let words = format!("; {} links more than in the best order", present - least);
    assert!(told.summary.ends_with(&words), "{}", told.summary);
    // The best order itself has no price, and that of another number of nodes says nothing.
    world.tracker.observed.fabric = FabricFacts::of(&[0, 1, 0, 1], 1);
    let told = fabric(&world).expect("two leaves");
    assert_eq!(told.price, Some(0));
    assert!(!told.summary.contains("more than"), "{}", told.summary);
    world.tracker.observed.fabric = FabricFacts::of(&[0, 0, 1], 1);
    assert_eq!(fabric(&world).expect("two leaves").price, None);
    // A node that is not the job's any more.
    world.tracker.observed.nodes.pop();
    assert_eq!(fabric(&world), None);
}
