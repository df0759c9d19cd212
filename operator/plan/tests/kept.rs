//! What the leader's memory keeps of what it hears, one rule after the other, at their bounds.

mod said;
mod world;

use moejob_manifest::job::Venue;
use moejob_plan::decide::{Action, FREEZE_PATIENCE};
use moejob_plan::observed::{
    DeviceFailure, Millis, Outcome, Record, StopCause, Stored, WorkerState,
};
use moejob_plan::preflight::{Checked, Grade, Pair, Round, Rounds, Value};
use moejob_plan::track::{Happening, Tracker};
use moejob_protocol::links::Built;
use moejob_protocol::message::{Held, Hello, LeftReason, Request, Up};
use moejob_protocol::pair::{ID_DIGITS, Meeting, PAIR_CHECK, PairAnswer, PairSaid};
use moejob_protocol::report::{Detail, Event, EventKind, LOST, VICTIM};
use std::collections::{BTreeMap, BTreeSet};
use world::{Setup, World};

const NAMES: [&str; 4] = ["j-0", "j-1", "j-2", "j-3"];

/// Four workers that have ranks in attempt 1, and have not stepped.
fn configured(setup: Setup) -> World {
    let mut world = World::new(setup);
    world.settle();
    for name in world.sims.keys().cloned().collect::<Vec<_>>() {
        assert!(world.connect(&name));
    }
    world.settle();
    let gang = world.observed().gang().expect("a gang");
    let members = gang.members.iter().map(|member| member.worker.as_str());
    assert_eq!(members.collect::<Vec<_>>(), NAMES);
    assert_eq!(gang.attempt, 1);
    world
}

fn leaves(tracker: &mut Tracker, name: &str, reason: LeftReason) {
    tracker.heard(name, 1, &Up::Left { reason, held: Vec::new() }, 0);
}

fn lost(rank: u32) -> LeftReason {
    LeftReason::PeerLost { rank }
}

fn ends(tracker: &mut Tracker, now: Millis) {
    let cause = "it broke".to_string();
    tracker.done(&Action::EndAttempt { attempt: 1, unplanned: true, cause }, now);
}

fn fails(tracker: &mut Tracker, name: &str, exit_code: i32, message: &str) {
    tracker.heard(name, 1, &Up::Failed { exit_code, message: message.to_string(), step: None }, 0);
}

/// An engine of attempt 1 is lost for this reason.
fn engine_lost(reason: &str) -> Up {
    let details = BTreeMap::from([("device".to_string(), Detail::Number(7))]);
    let (time, message) = Default::default();
    let (event, reason) = (EventKind::EngineLost, reason.to_string());
    Up::Event(Event { time, attempt: 1, event, reason, message, details })
}

/// Whose nodes have lost each other, after all four have left, in this order.
fn partings(said: &[(&str, LeftReason)], then: impl Fn(&mut Tracker)) -> Vec<(String, String)> {
    let mut world = configured(Setup::default());
    let node = |name: &str| world.observed().worker(name).map(|worker| worker.node.clone());
    let nodes: BTreeMap<String, &str> =
        NAMES.into_iter().map(|name| (node(name).expect("a worker"), name)).collect();
    for (name, reason) in said {
        leaves(&mut world.tracker, name, reason.clone());
    }
    then(&mut world.tracker);
    ends(&mut world.tracker, 5);
    let found = &world.observed().record.partings;
    let named = |(a, b, at): &(String, String, Millis)| {
        assert_eq!(*at, 5);
        let mut pair = [nodes[a].to_string(), nodes[b].to_string()];
        pair.sort();
        let [a, b] = pair;
        (a, b)
    };
    found.iter().map(named).collect()
}

fn pair(a: &str, b: &str) -> Vec<(String, String)> {
    vec![(a.to_string(), b.to_string())]
}

/// The one that was lost may have left because it had lost a third.
#[test]
fn those_part_who_have_lost_each_other_and_live() {
    use LeftReason::Asked;
    let rest = [("j-2", Asked), ("j-3", Asked)];
    let with = |first: &[(&'static str, LeftReason)]| [first, &rest[..]].concat();
    let none = |_: &mut Tracker| {};
    let both = with(&[("j-0", lost(1)), ("j-1", Asked)]);
    assert_eq!(partings(&both, none), pair("j-0", "j-1"));
    // Both say the same of each other.
    let mutual = with(&[("j-0", lost(1)), ("j-1", lost(0))]);
    assert_eq!(partings(&mutual, none), pair("j-0", "j-1"));
    // The third is to blame, or its link.
    let chain = with(&[("j-0", lost(1)), ("j-1", lost(2))]);
    assert_eq!(partings(&chain, none), pair("j-1", "j-2"));
    // One that failed by itself is no parting.
    let failed = with(&[("j-0", lost(1)), ("j-1", LeftReason::Error { message: "no".into() })]);
    assert_eq!(partings(&failed, none), []);
    // Whoever is gone explains the loss: dead, silent or told to stop, each by itself.
    let dead = |tracker: &mut Tracker| drop(tracker.exited("j-3", None, "killed", 1));
    assert_eq!(partings(&both, dead), []);
    let silent = |tracker: &mut Tracker| drop(tracker.silent("j-3", "nothing heard"));
    assert_eq!(partings(&both, silent), []);
    let stopped = |tracker: &mut Tracker| {
        let name = "j-3".to_string();
        tracker.done(&Action::StopWorker { name, grace: 0 }, 1);
    };
    assert_eq!(partings(&both, stopped), []);
    // So does an engine that was killed: its worker may be asked to leave before it says so.
    let engine = |reason: &str| {
        let lost = engine_lost(reason);
        move |tracker: &mut Tracker| drop(tracker.heard("j-1", 1, &lost, 1))
    };
    assert_eq!(partings(&both, engine(LOST)), []);
    assert_eq!(partings(&both, engine(VICTIM)), pair("j-0", "j-1"));
}

/// Ranks of one worker are one place: what two of them say is said of one node.
#[test]
fn ranks_of_one_worker_part_as_one() {
    let mut world = World::new(Setup { devices: 2, ..Setup::default() });
    world.settle();
    for name in world.sims.keys().cloned().collect::<Vec<_>>() {
        assert!(world.connect(&name));
    }
    world.settle();
    // Rank 0 has lost rank 2, whose worker says that it has lost rank 1, the other rank of the
    // first worker.
    leaves(&mut world.tracker, "j-0", lost(2));
    leaves(&mut world.tracker, "j-1", lost(1));
    for name in ["j-2", "j-3"] {
        leaves(&mut world.tracker, name, LeftReason::Asked);
    }
    let node = |name: &str| world.observed().worker(name).map(|of| of.node.clone());
    let (a, b) = (node("j-0").expect("a worker"), node("j-1").expect("a worker"));
    ends(&mut world.tracker, 5);
    let (a, b) = if a < b { (a, b) } else { (b, a) };
    assert_eq!(world.observed().record.partings, [(a, b, 5)]);
}

#[test]
fn a_node_that_is_avoided_has_no_device_failures_any_more() {
    let mut world = configured(Setup::default());
    let failure = |node: &str| DeviceFailure {
        node: node.to_string(),
        device: 0,
        name: "GPU-0".to_string(),
        words: "lost".to_string(),
        at: 1,
    };
    world.tracker.observed.record.device_failures = vec![failure("n0"), failure("n1")];
    world.tracker.observed.record.partings = vec![
        ("n0".to_string(), "n1".to_string(), 1),
        ("n1".to_string(), "n2".to_string(), 1),
        ("n2".to_string(), "n3".to_string(), 1),
    ];
    world.tracker.done(&Action::AvoidNode { node: "n1".to_string(), until: 9 }, 2);
    let record = &world.observed().record;
    assert_eq!(record.device_failures, [failure("n0")]);
    assert_eq!(record.partings, [("n2".to_string(), "n3".to_string(), 1)]);
}

/// The devices that count as failed, after this was heard of attempt 1.
fn failed_devices(heard: &[(&str, Up)], then: impl Fn(&mut Tracker)) -> Vec<u64> {
    let mut world = configured(Setup::default());
    then(&mut world.tracker);
    for (name, up) in heard {
        world.tracker.heard(name, 1, up, 0);
    }
    world.observed().record.device_failures.iter().map(|failure| failure.device).collect()
}

#[test]
fn an_attempt_has_one_culprit_and_all_others_are_victims() {
    let device = |name, device| (name, said::device_failed(1, device));
    let engine = |name, reason: &str| (name, engine_lost(reason));
    let nothing = |_: &mut Tracker| {};
    assert_eq!(failed_devices(&[device("j-0", 2)], nothing), [2]);
    // What follows from it fails as well, on its own node or on others.
    let all = [device("j-1", 3), device("j-1", 0), device("j-0", 1), device("j-3", 2)];
    assert_eq!(failed_devices(&all, nothing), [3]);
    // An engine that was killed, or a worker, comes before; a victim of neither does not.
    let behind = |first| failed_devices(&[engine("j-0", first), device("j-1", 1)], nothing);
    assert_eq!(behind("Lost"), [0; 0]);
    assert_eq!(behind("Victim"), [1]);
    let silent = |tracker: &mut Tracker| drop(tracker.silent("j-2", "nothing is heard of it"));
    assert_eq!(failed_devices(&[device("j-1", 1)], silent), [0; 0]);
    let killed = |tracker: &mut Tracker| drop(tracker.exited("j-2", None, "killed", 0));
    assert_eq!(failed_devices(&[device("j-1", 1)], killed), [0; 0]);
    // The next attempt has its own.
    let mut world = configured(Setup::default());
    let Up::Event(first) = engine("j-0", "Lost").1 else { panic!("an event") };
    world.tracker.heard("j-0", 1, &Up::Event(first), 0);
    ends(&mut world.tracker, 1);
    let mut gang = world.observed().record.gang.clone().expect("a gang");
    (gang.attempt, gang.ended) = (2, None);
    world.tracker.done(&Action::RecordAttempt(Box::new(gang)), 2);
    let happened = world.tracker.heard("j-1", 2, &said::device_failed(2, 1), 3);
    assert_eq!(world.observed().record.device_failures.len(), 1);
    let [Happening::EngineLost(loss)] = &happened[..] else { panic!("{happened:?}") };
    assert!(loss.by_device && !loss.victim, "{loss:?}");
}

/// Victims are told, and push no loss out of the status that explains them.
#[test]
fn victims_stand_in_no_status() {
    let mut world = configured(Setup::default());
    for (at, name) in NAMES.into_iter().enumerate() {
        for device in 0..4 {
            let told = world.tracker.heard(name, 1, &said::device_failed(1, device), at as u64);
            assert!(matches!(&told[..], [Happening::EngineLost(_)]), "{told:?}");
        }
    }
    let kept: Vec<_> = world.tracker.engines.lost.iter().map(|of| (of.device, of.at)).collect();
    assert_eq!(kept, [(0, 0)]);
}

/// Whatever its name is: only a newer step makes another checkpoint the newest.
#[test]
fn what_is_stored_gives_way_to_newer_steps_alone() {
    let mut world = configured(Setup::default());
    let own = Stored { step: 7, name: "step-7-by-hand".to_string() };
    let stored = |step: u64| Some(Stored { step, name: format!("step-{step:08}") });
    world.tracker.observed.stored = Some(own.clone());
    for step in [5, 7] {
        world.tracker.heard("j-0", 1, &said::committed(step, 1), 0);
        assert_eq!(world.observed().stored.as_ref(), Some(&own), "{step}");
    }
    world.tracker.heard("j-0", 1, &said::committed(8, 1), 0);
    assert_eq!(world.observed().stored, stored(8));
    world.tracker.observed.stored = Some(own.clone());
    let done = |step: u64| Action::Finish(Outcome::Complete { step });
    world.tracker.done(&done(7), 1);
    assert_eq!(world.observed().stored.as_ref(), Some(&own));
    world.tracker.done(&done(9), 1);
    assert_eq!(world.observed().stored, stored(9));
}

#[test]
fn a_claim_that_nobody_could_have_made_counts_for_nothing() {
    let claimed = |claimed: u64| {
        let mut world = configured(Setup::default());
        let details = BTreeMap::from([("claimed".to_string(), Detail::Number(claimed))]);
        let (time, reason, message) = Default::default();
        let event = EventKind::AttemptsClaimed;
        let up = Up::Event(Event { time, attempt: 1, event, reason, message, details });
        world.tracker.heard("j-0", 1, &up, 0);
        ends(&mut world.tracker, 1);
        world.observed().record.attempt
    };
    assert_eq!(claimed(6), 6);
    assert_eq!(claimed(u64::from(u32::MAX / 2) - 1), u32::MAX / 2 - 1);
    assert_eq!(claimed(u64::from(u32::MAX / 2)), 1);
    assert_eq!(claimed(u64::from(u32::MAX) + 7), 1);
}

/// Each worker's own first words, whatever others have said before it.
#[test]
fn the_first_words_of_each_worker_count() {
    let mut world = configured(Setup::default());
    fails(&mut world.tracker, "j-1", 1, "out of memory");
    fails(&mut world.tracker, "j-2", 3, "the data has changed");
    fails(&mut world.tracker, "j-2", 1, "and so on");
    world.tracker.exited("j-2", None, "killed by signal 9", 0);
    let state = world.observed().worker("j-2").map(|worker| worker.state.clone());
    let message = "the data has changed".to_string();
    assert_eq!(state, Some(WorkerState::Dead { exit_code: Some(3), message }));
}

/// What ends an attempt without a step is remembered by its words, if they are a worker's own.
#[test]
fn ends_are_alike_by_what_workers_say_of_themselves() {
    let remembered = |of: &dyn Fn(&mut Tracker)| {
        let mut world = configured(Setup::default());
        of(&mut world.tracker);
        ends(&mut world.tracker, 1);
        world.observed().record.repeat != Record::default().repeat
    };
    assert!(remembered(&|of| fails(of, "j-1", 1, "no room")));
    // Fenced by another: it says nothing of the job. So does a stranger.
    assert!(!remembered(&|of| fails(of, "j-1", 75, "a later attempt")));
    assert!(!remembered(&|of| fails(of, "nobody", 1, "no room")));
    assert!(remembered(&|of| drop(of.exited("j-1", Some(101), "index out of bounds", 0))));
    assert!(!remembered(&|of| drop(of.exited("j-1", Some(1), "exit code 1", 0))));
    assert!(remembered(&|of| drop(of.exited("j-1", None, "killed by signal 6 (SIGABRT)", 0))));
    assert!(!remembered(&|of| drop(of.exited("j-1", None, "killed by signal 9 (SIGKILL)", 0))));
}

/// The newest eight, and older ones of which somebody holds a snapshot.
#[test]
fn so_many_layouts_are_remembered() {
    let mut world = configured(Setup::default());
    let layout = world.observed().gang().expect("a gang").layout.clone();
    let record = &mut world.tracker.observed.record;
    record.layouts = (10..22).map(|attempt| (attempt, layout.clone())).collect();
    for worker in &mut world.tracker.observed.workers {
        worker.held = vec![Held { attempt: 11, step: 1, shards: vec![0] }];
    }
    ends(&mut world.tracker, 1);
    let attempts: Vec<u32> =
        world.observed().record.layouts.iter().map(|(attempt, _)| *attempt).collect();
    // The one that has ended is the newest.
    assert_eq!(attempts, [11, 15, 16, 17, 18, 19, 20, 21, 1]);
}

/// The median of the last fifteen: seven of 100 ms and eight of 300 are half and half but for one.
#[test]
fn the_duration_of_a_step_is_the_median_of_fifteen() {
    let mut world = configured(Setup::default());
    let mut now = 1_000;
    let mut step = |after: Millis, number: u64| {
        now += after;
        world.tracker.heard("j-0", 1, &said::step_report(number, 1), now);
        world.observed().record.step_median
    };
    // What came before has no weight.
    for number in 1..=30 {
        step(10_000, number);
    }
    for number in 31..=38 {
        step(100, number);
    }
    let last = (39..=45).map(|number| step(300, number)).last();
    assert_eq!(last, Some(100), "eight of the last fifteen took 100 ms");
    assert_eq!(step(300, 46), 300, "eight of them took 300 ms");
}

/// Steps that the state has already are not steps of the attempt.
#[test]
fn an_attempt_has_stepped_beyond_where_it_began() {
    let mut world = World::new(Setup::default());
    world.done = 5;
    world.tracker.observed.stored = Some(Stored { step: 5, name: "step-00000005".to_string() });
    world.settle();
    for name in world.sims.keys().cloned().collect::<Vec<_>>() {
        assert!(world.connect(&name));
    }
    world.settle();
    let stepped = |world: &World| world.observed().gang().map(|gang| gang.stepped);
    assert_eq!(world.observed().gang().map(|gang| gang.resumed_at), Some(5));
    world.tracker.heard("j-0", 1, &said::step_report(5, 1), 10);
    assert_eq!(stepped(&world), Some(false));
    world.tracker.heard("j-0", 1, &said::step_report(6, 1), 20);
    assert_eq!(stepped(&world), Some(true));
}

fn says(attempt: u32, rank: Option<u32>, held: Vec<Held>) -> Hello {
    said::hello("j-1", (attempt, "digest", rank), &held)
}

/// What a worker without a rank says when its stream comes anew depends on what it was asked.
#[test]
fn one_that_was_asked_to_stop_has_stopped_when_it_comes_anew() {
    let held = || vec![Held { attempt: 1, step: 12, shards: vec![0] }];
    let state = |world: &World| world.observed().worker("j-1").map(|of| of.state.clone());
    let left = |reason: LeftReason| Some(WorkerState::Left { attempt: 1, reason });
    let asks = Action::Request {
        attempt: 1,
        request: Request { checkpoint_now: true, stop_after_this_step: true },
        cause: StopCause::Suspend,
    };
    let mut world = configured(Setup::default());
    world.tracker.connected("j-1", "j-1:1", &says(1, None, held()));
    assert_eq!(state(&world), left(LeftReason::Asked));
    let mut world = configured(Setup::default());
    world.tracker.done(&asks, 1);
    world.tracker.connected("j-1", "j-1:1", &says(1, None, held()));
    assert_eq!(state(&world), left(LeftReason::Stopped { step: 12 }));
    // Of another attempt than that which was asked.
    let mut world = configured(Setup::default());
    world.tracker.done(&asks, 1);
    world.tracker.connected("j-1", "j-1:1", &says(2, None, held()));
    assert_eq!(state(&world), Some(WorkerState::Left { attempt: 2, reason: LeftReason::Asked }));
    // One that is known to have left says so of that attempt alone.
    let mut world = configured(Setup::default());
    leaves(&mut world.tracker, "j-1", LeftReason::Asked);
    world.tracker.connected("j-1", "j-1:1", &says(0, None, Vec::new()));
    assert_eq!(state(&world), Some(WorkerState::Idle));
}

/// Nothing is heard of a worker whose node is to freeze: it is no loss before its time.
#[test]
fn a_freeze_is_waited_out_for_its_time_and_not_for_the_dead() {
    let freezing = || {
        let mut world = configured(Setup::default());
        world.tracker.observed.nodes.iter_mut().for_each(|node| node.freezes = true);
        world
    };
    let mut world = freezing();
    let node = world.observed().worker("j-1").expect("a worker").node.clone();
    let told = Happening::Freezes { name: "j-1".to_string(), node };
    assert_eq!(world.tracker.waits_out("j-1", 7_000), Some(vec![told]));
    let last = 7_000 + FREEZE_PATIENCE;
    assert_eq!(world.tracker.waits_out("j-1", last - 1), Some(Vec::new()));
    assert_eq!(world.tracker.waits_out("j-1", last), None);
    // One that is told to stop, and one that is silent already, each by itself.
    let mut world = freezing();
    world.tracker.done(&Action::StopWorker { name: "j-1".to_string(), grace: 0 }, 1);
    assert_eq!(world.tracker.waits_out("j-1", 7_000), None);
    let mut world = freezing();
    world.tracker.silent("j-1", "nothing heard");
    assert_eq!(world.tracker.waits_out("j-1", 7_000), None);
}

/// Two workers without ranks, whose nodes are to measure together. `paired`: that of the second
/// one has passed with another node before.
fn measuring(paired: bool) -> (World, Vec<String>) {
    let of = Setup { preflight: true, pairs: true, ..Setup::default() };
    let mut world = World::new(Setup { min: 2, max: 2, nodes: 2, ..of });
    world.settle();
    let names = ["j-0", "j-1"];
    for name in names {
        let hello = said::hello(name, (0, "", None), &[]);
        world.tracker.connected(name, "10.0.0.1:1", &hello);
    }
    let node = |name: &str| world.observed().worker(name).expect("a worker").node.clone();
    let nodes = names.map(node);
    let mut rounds = Rounds::new(nodes.iter().map(String::as_str), &BTreeSet::new());
    assert_eq!(rounds.next_round(), [(nodes[0].clone(), nodes[1].clone())]);
    let sides = [0, 1].map(|at| (names[at].to_string(), nodes[at].clone()));
    for worker in &mut world.tracker.observed.workers {
        assert_eq!(worker.state, WorkerState::Idle);
        worker.checked = Checked::Passed;
        worker.paired = paired && worker.name == "j-1";
    }
    let pairs = vec![Pair { number: 1, sides }];
    world.tracker.done(&Action::MeasurePairs(Box::new(Round { rounds, pairs })), 1);
    (world, nodes.to_vec())
}

fn answers(world: &mut World, name: &str, check: &str, value: Value) -> Vec<Happening> {
    let measured = |check: &str, value: Value| {
        let (check, of) = (check.to_string(), String::new());
        moejob_plan::preflight::Measured { check, of, value }
    };
    let mut all = vec![measured(check, value)];
    if check != PAIR_CHECK {
        all.push(measured(PAIR_CHECK, Value::Number(1.0)));
    }
    let answer = PairAnswer { number: 1, said: PairSaid::Measured(all) };
    world.tracker.heard(name, 0, &Up::Pair(answer), 2)
}

fn meets(world: &mut World) {
    let meeting = Meeting { id: "0".repeat(ID_DIGITS), bytes: 1 << 20 };
    let answer = PairAnswer { number: 1, said: PairSaid::Meets(meeting) };
    assert_eq!(world.tracker.heard("j-0", 0, &Up::Pair(answer), 2), []);
    world.tracker.done(&Action::RelayPair { number: 1, name: "j-1".to_string() }, 2);
}

fn checked(world: &World) -> Vec<(Checked, bool)> {
    world.observed().workers.iter().map(|of| (of.checked, of.paired)).collect()
}

/// Two that are slow with each other, and nobody else: nobody knows which it is. One that served
/// as a partner, since it had passed before, is as it was.
#[test]
fn a_partner_that_had_passed_is_as_it_was_unless_it_fails() {
    let (mut world, nodes) = measuring(true);
    meets(&mut world);
    assert_eq!(answers(&mut world, "j-0", PAIR_CHECK, Value::Number(1.0)), []);
    let news = answers(&mut world, "j-1", PAIR_CHECK, Value::Number(1.0));
    let [Happening::Measured { node, grade: Grade::Warn, .. }] = &news[..] else {
        panic!("{news:?}")
    };
    assert_eq!(*node, nodes[0]);
    assert_eq!(checked(&world), [(Checked::Passed, true), (Checked::Passed, true)]);
    // What speaks against it alone does count, and it is not asked again.
    let (mut world, nodes) = measuring(true);
    meets(&mut world);
    assert_eq!(answers(&mut world, "j-0", PAIR_CHECK, Value::Number(1.0)), []);
    let wrong = Value::Wrong { grade: Grade::Fail, what: "it went by sockets".to_string() };
    let news = answers(&mut world, "j-1", "transport", wrong);
    let told: Vec<(&String, Grade)> = news
        .iter()
        .map(|of| match of {
            Happening::Measured { node, grade, .. } => (node, *grade),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(told, [(&nodes[1], Grade::Fail)]);
    assert_eq!(checked(&world), [(Checked::Passed, true), (Checked::Failed, true)]);
}

/// One that says nothing in time is asked again later; the others are not.
#[test]
fn who_says_nothing_of_its_pair_is_silent_and_has_not_failed() {
    let (mut world, nodes) = measuring(false);
    world.tracker.done(&Action::EndPair { number: 1, late: true }, 3);
    let news = world.tracker.take_news();
    let [Happening::Measured { node, grade: Grade::Fail, .. }] = &news[..] else {
        panic!("{news:?}")
    };
    assert_eq!(*node, nodes[0]);
    assert_eq!(checked(&world), [(Checked::Silent, false), (Checked::Passed, true)]);
}

/// A worker that is told to stop measures with nobody any more, though it is still there.
#[test]
fn a_pair_of_which_one_is_told_to_stop_leaves_the_other_alone() {
    let (mut world, _) = measuring(false);
    world.tracker.done(&Action::StopWorker { name: "j-0".to_string(), grace: 0 }, 2);
    world.tracker.done(&Action::EndPair { number: 1, late: false }, 3);
    assert_eq!(checked(&world), [(Checked::Passed, false), (Checked::Passed, true)]);
}

/// Workers of one machine are one node to NCCL: between them its rings may go as they like.
#[test]
fn rings_within_one_machine_are_as_planned() {
    let found = |venue: Venue| {
        let mut world = World::new(Setup { venue, ..Setup::default() });
        world.settle();
        for name in world.sims.keys().cloned().collect::<Vec<_>>() {
            assert!(world.connect(&name));
        }
        world.settle();
        let gang = world.observed().gang().expect("a gang");
        let names = gang.members.iter().map(|member| member.worker.clone());
        let names: Vec<String> = names.collect();
        let mut told = Vec::new();
        // 0 - 2 - 1 - 3 - 0, where the plan has them in order.
        for (rank, before, behind) in [(0, 3, 2), (1, 2, 3), (2, 0, 1), (3, 1, 0)] {
            let rings = BTreeSet::from([(before, behind)]);
            let version = "2.28.9".to_string();
            let built = Built { rank, version, rings, ..Built::default() };
            told.extend(world.tracker.heard(&names[rank as usize], 1, &Up::Built(built), 2));
        }
        let [Happening::Rings(found)] = &told[..] else { panic!("{told:?}") };
        found.clone()
    };
    let (machine, cluster) = (found(Venue::Local), found(Venue::Kubernetes));
    assert_eq!(machine.differences(), Vec::<String>::new());
    assert_ne!(cluster.differences(), Vec::<String>::new());
}
