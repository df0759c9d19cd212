//! One job's loop, step by step: `> what happens`, then the effects in their order.

#[path = "lead_world/mod.rs"]
#[allow(dead_code, reason = "what other tests of the loop ask of it")]
mod lead_world;
mod said;
mod texts;

use lead_world::World;
use moejob_plan::allocate::Granted;
use moejob_plan::lead::{
    Digest, Event, FRAMES_WAITING_MAX, JobSeen, Write, WriteErrorKind, is_crowd,
};
use moejob_plan::observed::Node;
use moejob_plan::record::RECORD_BYTES_MAX;
use moejob_protocol::message::{Heartbeat, Held, LeftReason, Phase, Up};
use moejob_protocol::report::{Detail, Event as Line, StepReport};
use serde_json::{Value, json};

#[test]
fn every_arm_of_the_loop_does_what_its_scenario_says() {
    texts::replay("lead", World::run);
}

/// A loop that is asked again at once has nothing more to say, and never wants to be asked at a
/// time that has passed: each would be a turn a millisecond.
#[test]
fn a_turn_is_complete_and_what_is_due_lies_ahead() {
    let mut world = World::default();
    let script = "job min=2 max=2|grant n0 n1|written|written|pod a-a1-0 n0 running|\
        pod a-a1-1 n1 running|open a-a1-0|open a-a1-1|written|step a-a1-0 1|silent a-a1-1|\
        advance 500|pod a-a1-1 n1 deleting|written|advance 25000|fail other|advance 1000|\
        fail other|advance 100000|fail slow|gone a-a1-1|advance 1000|written|edit suspend=true|\
        advance 70000|written";
    for command in script.split('|') {
        world.run(&command.split_whitespace().collect::<Vec<_>>());
        for _ in 0..200 {
            let now = world.now;
            let turn = world.job().turn(now);
            assert!(turn.effects.is_empty(), "{command}: {:?}", turn.effects);
            assert!(turn.due.is_none_or(|at| at > world.now), "{command}: {:?}", turn.due);
        }
    }
}

/// What happens there, a command a line.
fn world(script: &str) -> World {
    let mut world = World::default();
    run(&mut world, script);
    world
}

fn run(world: &mut World, script: &str) {
    for command in script.split('|') {
        world.run(&command.split_whitespace().collect::<Vec<_>>());
    }
}

/// Two workers train; the second one speaks a newer protocol.
const TWO_TRAIN: &str = "job min=2 max=2|grant n0 n1|written|written|pod a-a1-0 n0 running|\
    pod a-a1-1 n1 running|open a-a1-0|open a-a1-1 3|written all|step a-a1-0 1|written all";

/// A shell asks for a turn where something has come, else a thousand jobs would be planned with
/// each heartbeat, and a loss would be noticed when something else is due.
#[test]
fn a_turn_is_wanted_where_something_has_come_and_not_for_what_changes_nothing() {
    let mut world = world(TWO_TRAIN);
    let now = world.now;
    let granted = |names: &[&str], why: &str| {
        let nodes = names.iter().map(|name| Node::good(name)).collect();
        Event::Granted(Granted { nodes, why: why.to_string(), ..Granted::default() })
    };
    let heartbeat = || {
        Up::Heartbeat(Heartbeat {
            phase: Phase::Training,
            step: 1,
            collective: 1,
            held: Vec::new(),
            loading: None,
        })
    };
    assert!(!world.job().is_dirty(), "all is said");
    world.hear("a-a1-0", 1, heartbeat());
    world.job().on(granted(&["n0", "n1"], ""), now);
    world.job().on(Event::Api { heard: now }, now);
    assert!(!world.job().is_dirty());
    world.hear("a-a1-0", 1, said::step_report(2, 1));
    assert!(world.job().is_dirty(), "a step");
    world.job().turn(now);
    for (names, why) in [(&["n0"][..], ""), (&["n0"][..], "another reason")] {
        world.job().on(granted(names, why), now);
        assert!(world.job().is_dirty(), "{names:?} {why}");
        world.job().turn(now);
        assert!(!world.job().is_dirty());
    }
    // What a leader has to say at first, it says in its first turn.
    world.run(&["leader", "2"]);
    world.job().on(Event::Stop, now);
    assert!(world.job().is_dirty());
}

#[test]
fn the_end_of_a_crowd_asks_for_a_turn_where_something_has_waited_for_it() {
    let ends = |world: &mut World| {
        let now = world.now;
        [true, false].map(|crowd| {
            world.job().on(Event::Crowd(crowd), now);
            world.job().is_dirty()
        })
    };
    assert_eq!(ends(&mut world(TWO_TRAIN)), [false, false], "nothing waits");
    let mut world = world("job min=2 max=2|grant n0 n1|crowd|written Policy|written pod");
    run(&mut world, "pod a-a1-0 n0 running|open a-a1-0|pod a-a1-1 n1 running|open a-a1-1");
    assert!(!world.job().is_dirty());
    run(&mut world, "written status");
    assert_eq!(ends(&mut world), [false, true], "the budget waits");
    let steps = TWO_TRAIN.strip_suffix("|step a-a1-0 1|written all").expect("a step");
    let mut world = self::world(steps);
    run(&mut world, "crowd|step a-a1-0 1");
    assert_eq!(ends(&mut world), [false, true], "the status waits");
}

/// Eight pods that are being made or start are one, for ten seconds.
#[test]
fn a_crowd_are_pods_that_come_up_and_not_such_as_wait_for_an_image() {
    let crowd = |world: &mut World| {
        let now = world.now;
        is_crowd([&*world.job()].into_iter(), now)
    };
    let grant = "grant n0 n1 n2 n3 n4 n5 n6 n7";
    let mut few = world("job min=7 max=7|grant n0 n1 n2 n3 n4 n5 n6|written Policy");
    assert!(!crowd(&mut few), "seven");
    let mut world = world("job min=8 max=8");
    assert!(!crowd(&mut world), "none yet");
    run(&mut world, grant);
    assert!(crowd(&mut world), "the policy is written");
    run(&mut world, "written Policy");
    assert!(crowd(&mut world), "they are made");
    run(&mut world, "written pod");
    assert!(crowd(&mut world), "none is seen yet");
    for at in 0..8 {
        run(&mut world, &format!("pod a-a1-{at} n{at}"));
    }
    assert!(crowd(&mut world), "none runs yet");
    run(&mut world, "advance 10000");
    assert!(!crowd(&mut world), "they wait for an image");
    run(&mut world, &format!("job min=8 max=8|{grant}|written Policy|written pod"));
    assert!(crowd(&mut world));
    run(&mut world, "pod a-a1-0 n0 running");
    assert!(!crowd(&mut world), "seven are left");
}

#[test]
fn members_are_told_where_the_others_are() {
    let mut world = world(TWO_TRAIN);
    let gang = world.job().tracker().observed.gang().expect("a gang");
    let addresses: Vec<&str> = gang.members.iter().map(|of| of.address.as_str()).collect();
    assert_eq!(addresses, ["10.0.0.0:7777", "10.0.0.1:7777"]);
}

/// So the next leader knows them, also while it has heard none of them, and its record the one
/// after it.
#[test]
fn a_record_tells_of_each_member_which_pod_it_is_and_what_it_speaks() {
    let known = |world: &World| {
        let text = world.status()["recordMore"].as_str().expect("a record");
        let more: Value = serde_json::from_str(text).expect("JSON");
        more["pods"]["members"].clone()
    };
    let mut world = world(TWO_TRAIN);
    let pods = json!([["uid-a-a1-0", 1], ["uid-a-a1-1", 3]]);
    assert_eq!(known(&world), pods);
    run(&mut world, "leader 2|grant n0 n1|open a-a1-0|edit max=3|written all|advance 10000");
    run(&mut world, "written all");
    let record = world.status()["record"].as_str().expect("a record");
    assert!(record.contains("\"term\":2"), "{record}");
    assert_eq!(known(&world), pods);
}

/// While the exit code of a process is about to be told nobody takes its place: that may be the
/// end of the whole job. A worker that is on its way out otherwise leaves its node.
#[test]
fn a_node_is_left_once_it_is_not_waited_for_an_exit_code() {
    let leaving = |world: &mut World| {
        world.job().claim().leaving.into_iter().collect::<Vec<_>>().join(" ")
    };
    let mut lost = world(TWO_TRAIN);
    run(&mut lost, "refused a-a1-1");
    assert_eq!(leaving(&mut lost), "", "it is about to be told");
    run(&mut lost, "advance 5000|written all|pod a-a1-1 n1 deleting");
    assert_eq!(leaving(&mut lost), "n1", "its pod is being deleted");
    // Nobody waits for the exit code of one whose stream is there.
    let mut over = world(TWO_TRAIN);
    run(&mut over, "completed a-a1-0 100|written all");
    assert_eq!(leaving(&mut over), "n0 n1");
}

#[test]
fn workers_of_a_machine_get_the_threads_that_it_has_for_each() {
    let mut world = world("machine min=1 max=2");
    assert_eq!(world.job().tracker().observed.template.threads, 1);
}

/// The record, conditions and causes have it.
#[test]
fn what_a_worker_says_of_an_engine_is_plain_before_it_is_kept() {
    let mut world = world(TWO_TRAIN);
    let Up::Event(event) = said::device_failed(1, 0) else { panic!("no event") };
    let mut details = event.details;
    details.insert("lastWords".to_string(), Detail::Text("\u{1b}[2Jit burns".to_string()));
    world.hear("a-a1-1", 1, Up::Event(Line { details, ..event }));
    let lost = &world.job().tracker().engines.lost;
    assert!(lost[0].cause.contains("it burns"), "{lost:?}");
    assert!(!lost[0].cause.contains('\u{1b}'), "{lost:?}");
}

/// `kubectl get mj` shows them.
#[test]
fn rates_are_rounded_as_people_read_them() {
    let mut world = world(TWO_TRAIN);
    for (step, rate, shown) in [(2, 99.94, "99.9"), (3, 100.4, "100"), (4, 105_062.2, "105062")] {
        let Up::Step(report) = said::step_report(step, 1) else { panic!("no report") };
        world.hear("a-a1-0", 1, Up::Step(StepReport { tokens_per_second: rate, ..report }));
        world.run(&["advance", "100"]);
        let told = world.run(&["show"]);
        assert!(told.contains(&format!("tokens/s {shown},")), "{told}");
    }
}

/// What a gang reports while a write is under way is as much as its newest step.
#[test]
fn steps_that_wait_make_no_worker_too_loud() {
    let mut world = world(&TWO_TRAIN.replace("max=2|", "max=2 steps=20000|"));
    world.run(&["gone", "a-a1-1"]);
    for step in 2..FRAMES_WAITING_MAX as u64 + 4 {
        world.hear("a-a1-0", 1, said::step_report(step, 1));
    }
    assert_eq!(world.run(&["advance", "1"]), "  look again in 59999 ms\n");
}

/// They may be as long as a frame may be, and fill the memory before they are many.
#[test]
fn frames_that_wait_are_counted_by_their_bytes() {
    let told = |snapshots: usize| {
        let mut world = world(TWO_TRAIN);
        world.run(&["gone", "a-a1-1"]);
        for _ in 0..1_000 {
            let held = vec![Held { attempt: 1, step: 1, shards: vec![0] }; snapshots];
            world.hear("a-a1-0", 1, Up::Left { reason: LeftReason::Asked, held });
        }
        world.run(&["advance", "1"])
    };
    assert!(!told(1).contains("WorkerTooLoud"));
    assert!(told(200).contains("WorkerTooLoud"));
}

/// No leader would read it. What a newer operator has left in it is kept, and may be much.
#[test]
fn a_record_that_is_too_long_is_not_written() {
    let record = |length: usize| {
        let fields = r#""v":1,"term":1,"attempt":3,"step":7,"progressedAt":0,"stepMedian":0"#;
        let later = "x".repeat(length);
        format!(r#"record={{{fields},"births":0,"later":"{later}"}}"#)
    };
    let begin = |length: usize| {
        let mut world = World::default();
        world.run(&["job", "min=1", "max=1", &record(length)]);
        run(&mut world, "written all|grant n0|written|written|pod a-a4-0 n0 running");
        world.run(&["open", "a-a4-0"])
    };
    let long = begin(RECORD_BYTES_MAX - 200);
    assert!(long.contains("RecordTooLong") && !long.contains("attempt 4"), "{long}");
    let good = begin(RECORD_BYTES_MAX - 20_000);
    assert!(good.contains("record of attempt 4, and wait"), "{good}");
}

/// A metric counts each kind by itself.
#[test]
fn each_kind_of_failure_to_write_has_a_label_of_its_own() {
    use WriteErrorKind::{
        Conflict, Deposed, Exists, Forbidden, Gone, NotOurs, Other, Refused, Slow,
    };
    let kinds = [Slow, Conflict, Exists, Gone, Forbidden, Refused, Deposed, NotOurs, Other];
    let mut labels = kinds.map(WriteErrorKind::label);
    let plain = |label: &&str| label.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    assert!(labels.iter().all(|label| !label.is_empty() && plain(label)), "{labels:?}");
    labels.sort_unstable();
    assert!(labels.windows(2).all(|two| two[0] != two[1]), "{labels:?}");
}

/// Of a job that is over a leader keeps when it is to be deleted, and figures. One that may go on
/// is judged.
#[test]
fn a_job_that_is_over_is_known_by_its_digest() {
    let done = "job min=1 max=1 ttl=60|grant n0|written|written|pod a-a1-0 n0 running|open a-a1-0|\
        written all|step a-a1-0 1|written all";
    let mut world = world(done);
    assert_eq!(Digest::of(world.seen()), None, "it trains");
    run(&mut world, "completed a-a1-0 100|written all|pod a-a1-0 n0 exit 0|written all");
    let over = world.now;
    let mut digest = Digest::of(world.seen()).expect("it is over");
    assert!(world.job().is_at_rest());
    assert_eq!((&digest.figures.phase[..], digest.figures.step), ("Complete", 100));
    let at = digest.due().expect("it goes");
    // Conditions tell whole seconds.
    assert!(at > over + 58_000 && at <= over + 60_000, "{at} after {over}");
    assert_eq!(digest.expire(at - 1), None);
    let gone = |write: Option<Write>| match write {
        Some(Write::DeleteJob(job)) => job.name,
        other => panic!("{other:?}"),
    };
    assert_eq!(gone(digest.expire(at)), "a");
    assert_eq!(digest.expire(at + 1_000), None, "it is on its way");
    assert_eq!(gone(digest.expire(at + 60_000)), "a", "it did not succeed");
    let not = |change: fn(&mut JobSeen), why: &str, world: &mut World| {
        let mut seen = world.seen().clone();
        change(&mut seen);
        assert_eq!(Digest::of(&seen), None, "{why}");
    };
    not(|seen| seen.generation += 1, "it was edited", &mut world);
    not(|seen| seen.deleted = true, "it is being deleted", &mut world);
    not(|seen| seen.uid = "other".into(), "its record is another job's", &mut world);
    not(|seen| seen.status["record"] = json!("{}"), "its record is none", &mut world);
    not(|seen| seen.status["recordMore"] = json!(""), "nobody knows what it had", &mut world);
    not(|seen| seen.status["conditions"] = json!([]), "nobody knows since when", &mut world);
    not(|seen| seen.status = Value::Null, "nothing is known", &mut world);
}

/// A worker of another release refuses a checkpoint whose hash it has not made itself, and that
/// ends the job: a gang that runs another image than this operator's is told no hash.
#[test]
fn who_may_be_of_another_release_is_not_held_to_this_ones_hash() {
    for (own, told) in [("own:2", false), ("own:1", true)] {
        let mut world = world("job min=2 max=2|grant n0 n1 n2|written Policy|written pod");
        run(&mut world, "pod a-a1-0 n0 running|pod a-a1-1 n1 running|open a-a1-0|open a-a1-1");
        run(&mut world, "written status|step a-a1-0 1|written all");
        run(&mut world, &format!("leader 2 own={own}|pod a-a1-0 n0 runs own:1|open a-a1-0"));
        run(&mut world, "open a-a1-1|grant n0 n1 n2|written all|gone a-a1-1|left a-a1-0");
        run(&mut world, "written all|pod a-a1-2 n1 running|open a-a1-2|written all|written all");
        assert_eq!(world.hashes, [true, true, told, told], "{own}");
    }
}

/// Its text may be large, and a tenant may have thousands of them.
#[test]
fn an_invalid_job_is_known_by_its_digest_once_that_is_said() {
    let mut world = world("job min=1 max=1 batch=0");
    assert_eq!(world.job().digest_of_invalid(), None, "its status is not written yet");
    run(&mut world, "advance 1000|written all");
    let digest = world.job().digest_of_invalid().expect("all is said");
    assert!(digest.is_invalid() && digest.due().is_none());
    assert_eq!(digest.figures.phase, "Invalid");
    // A good job that was edited into a bad one goes on as it was.
    let mut edited = self::world(TWO_TRAIN);
    run(&mut edited, "edit batch=0|written all|advance 20000|written all");
    assert_eq!(edited.job().digest_of_invalid(), None);
    // One whose pods a leader before has made is looked after.
    let mut led = self::world(TWO_TRAIN);
    run(&mut led, "leader 2 batch=0 more=|advance 20000|written all");
    assert_eq!(led.job().digest_of_invalid(), None);
}

/// A leader that had not seen a member's pod yet wrote no uid of it: whatever pod has its name then
/// is the member's.
#[test]
fn a_member_whose_pod_the_record_does_not_name_keeps_its_pod() {
    let mut world = world(TWO_TRAIN);
    let mut more: Value = {
        let text = world.seen().status["recordMore"].as_str().expect("a text");
        serde_json::from_str(text).expect("JSON")
    };
    assert_eq!(more["pods"]["members"][1][0], "uid-a-a1-1");
    more["pods"]["members"][1][0] = json!("");
    world.seen().status["recordMore"] = json!(more.to_string());
    let told = world.run(&["leader", "2"]);
    for name in ["a-a1-0", "a-a1-1"] {
        assert!(told.contains(&format!("dial {name}")), "{told}");
    }
    assert!(!told.contains("no pod"), "{told}");
    // One that is named and is another goes.
    more["pods"]["members"][1][0] = json!("before");
    world.seen().status["recordMore"] = json!(more.to_string());
    let told = world.run(&["leader", "3"]);
    assert!(told.contains("no pod a-a1-1"), "{told}");
}
