use moejob_manifest::cost;
use moejob_manifest::crd::NAME_LEN_MAX;
use moejob_plan::reasons;
use moejob_plan::engines::EngineLoss;
use moejob_plan::observed::{Gang, Outcome, Record, StopCause};
use moejob_plan::record::{
    GangPods, More, RECORD_BYTES_MAX, RESTS_MAX, RecordError, Refused, Saved, read,
    restore, write, write_more,
};
use moejob_plan::track::Recovery;
use moejob_protocol::Mesh;
use moejob_protocol::config::Member;
use moejob_protocol::layout::{Layout, Placement};
use serde_json::Value;
use std::collections::BTreeMap;

/// Attempts and workers of a job that are believed.
const COUNT_MAX: u32 = 1 << 31;

fn full() -> Saved {
    let layout = Layout::contiguous(Mesh::data_parallel(2, 2));
    let member = |rank: u32| Member {
        rank,
        worker: format!("job-{rank}"),
        node: format!("node-{rank}"),
        address: format!("10.0.0.{rank}:7777"),
    };
    let gang = Gang {
        attempt: 3,
        digest: "d".into(),
        layout: layout.clone(),
        members: vec![member(0), member(1)],
        resumed_at: 10,
        started_at: 1_700_000_000_000,
        stepped: true,
        stop_requested: Some((StopCause::Withdrawn, 5)),
        broken: Some((7, "rank 1 went silent".into())),
        ended: Some(9),
        inherited: false,
    };
    let record = Record {
        job_uid: "uid".into(),
        outcome: Some(Outcome::Failed {
            exit_code: 3,
            reason: "DataOrCheckpointRefused",
            message: "no".into(),
        }),
        attempt: 3,
        gang: Some(gang),
        layouts: vec![(2, layout)],
        restarts: vec![1, 2],
        stopping_since: Some(4),
        step: 12,
        progressed_at: 6,
        step_median: 70,
        births: 5,
        start_failures: vec![3],
        start_failure: "job-4 ended".into(),
        partings: vec![("node-0".into(), "node-1".into(), 2)],
        device_failures: Vec::new(),
        first_lost: None,
        repeat: Default::default(),
    };
    let recovery = Recovery {
        cause: "lost".into(),
        attempt: 2,
        detected_at: 1,
        replanned_at: Some(2),
        rejoined_at: Some(3),
        first_step_at: None,
        steps_lost: 3,
    };
    let (more, rest) = Default::default();
    Saved { term: 8, record, recoveries: vec![recovery], more, rest }
}

#[test]
fn all_of_it_survives() {
    for saved in [full(), Saved::default()] {
        assert_eq!(read(&write(&saved)), Ok(saved));
    }
}

#[test]
fn what_a_newer_operator_adds_is_written_back() {
    let text = write(&full()).replacen('{', "{\"newer\":[1,2],", 1);
    let saved = read(&text).expect("readable");
    assert!(write(&saved).contains("\"newer\":[1,2]"));
    let more = "{\"v\":1,\"newer\":{\"a\":1},\"keyring\":\"k\"}";
    let saved = restore(&text, more).expect("readable");
    assert_eq!(saved.more.keyring, "k");
    assert!(write_more(&saved.more).contains("\"newer\":{\"a\":1}"));
    assert_eq!(restore(&text, "{\"v\":7}"), Err(RecordError::Version(7)));
    assert!(matches!(restore(&text, "x"), Err(RecordError::Text(_))));
    assert_eq!(restore("", ""), Ok(Saved::default()));
}

/// What this release writes, a release before reads: it refuses any field that it does not
/// know.
#[test]
fn the_record_has_no_field_that_releases_before_refuse() {
    const KNOWN: [&str; 17] = [
        "v", "term", "jobUid", "attempt", "births", "step", "progressedAt", "stepMedian",
        "stoppingSince", "outcome", "gang", "layouts", "restarts", "startFailures",
        "startFailure", "partings", "recoveries",
    ];
    const GANG: [&str; 10] = [
        "attempt", "digest", "layout", "members", "resumedAt", "startedAt", "stepped",
        "stopRequested", "broken", "ended",
    ];
    let value: Value = serde_json::from_str(&write(&full())).expect("JSON");
    let unknown = |value: &Value, known: &[&str]| {
        let fields = value.as_object().expect("an object").keys();
        fields.filter(|name| !known.contains(&name.as_str())).count()
    };
    assert_eq!((unknown(&value, &KNOWN), unknown(&value["gang"], &GANG)), (0, 0));
}

#[test]
fn no_time_is_later_than_now() {
    let mut saved = full();
    let now = 3;
    saved.no_later_than(now);
    let text = format!("{:?}", saved.record.gang);
    let gang = saved.record.gang.expect("a gang");
    assert_eq!((gang.started_at, gang.ended), (now, Some(now)), "{text}");
    assert_eq!(gang.stop_requested.map(|(_, at)| at), Some(now));
    assert_eq!(gang.broken.map(|(at, _)| at), Some(now));
    assert_eq!((saved.record.progressed_at, saved.record.stopping_since), (now, Some(now)));
    assert_eq!(saved.record.restarts, [1, 2], "what is past stays");
    assert_eq!(saved.recoveries[0].rejoined_at, Some(now));
}

#[test]
fn no_time_of_a_recovery_or_of_a_loss_is_later_than_now() {
    let mut saved = full();
    let at = |recovery: &Recovery| {
        let Recovery { detected_at, replanned_at, rejoined_at, first_step_at, .. } = recovery;
        (*detected_at, *replanned_at, *rejoined_at, *first_step_at)
    };
    saved.recoveries[0].first_step_at = Some(4);
    saved.record.start_failures = vec![1, 900];
    saved.more.refused.since = Some((900, 901));
    saved.no_later_than(0);
    assert_eq!(at(&saved.recoveries[0]), (0, Some(0), Some(0), Some(0)));
    assert_eq!(saved.record.start_failures, [0, 0]);
    assert_eq!(saved.record.partings[0].2, 0);
    assert_eq!(saved.record.restarts, [0, 0]);
    assert_eq!(saved.more.refused.since, Some((0, 0)));
    let mut past = full();
    past.more.refused.until = Some(1_200_007);
    past.no_later_than(1_800_000_000_000);
    let more = More { refused: past.more.refused.clone(), ..More::default() };
    assert_eq!(past, Saved { more, ..full() }, "what is past stays");
    assert_eq!(past.more.refused.until, Some(1_200_007));
}

#[test]
fn what_is_as_at_first_takes_no_room() {
    assert_eq!(write_more(&More::default()), "{\"v\":1}");
    let more = More { keyring: "k".into(), ..More::default() };
    assert_eq!(write_more(&more), "{\"v\":1,\"keyring\":\"k\"}");
}

/// Each bound at its end, and one beyond it.
#[test]
fn a_record_at_a_bound_is_read_and_one_beyond_it_is_not() {
    let text = write(&full());
    let padded = |len: usize| format!("{text}{}", " ".repeat(len - text.len()));
    assert!(read(&padded(RECORD_BYTES_MAX)) == Ok(full()));
    let error = read(&padded(RECORD_BYTES_MAX + 1)).expect_err("too long").to_string();
    assert!(error.contains("1048577 bytes"), "{error}");

    let found = |change: &dyn Fn(&mut Record)| {
        let mut saved = full();
        change(&mut saved.record);
        read(&write(&saved)).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(found(&|record| record.attempt = COUNT_MAX), Ok(()));
    assert_eq!(found(&|record| record.births = COUNT_MAX), Ok(()));
    let beyond = |found: Result<(), String>| {
        assert!(found.is_err_and(|error| error.contains("beyond all counting")));
    };
    beyond(found(&|record| record.attempt = COUNT_MAX + 1));
    beyond(found(&|record| record.births = COUNT_MAX + 1));

    let most = cost::RANKS_MAX as u32;
    let wide = |dp: u32| Layout::contiguous(Mesh::data_parallel(dp, 1));
    assert_eq!(found(&|record| record.layouts = vec![(1, wide(most))]), Ok(()));
    let none = |found: Result<(), String>| {
        assert!(found.is_err_and(|error| error.contains("layout of a gang is none")));
    };
    none(found(&|record| record.layouts = vec![(1, wide(most + 1))]));
    none(found(&|record| record.layouts = vec![(2, wide(2)), (1, wide(0))]));
    let sizes = |found: Result<(), String>| {
        assert!(found.is_err_and(|error| error.contains("members of different sizes")));
    };
    let members = |record: &mut Record, count: usize| {
        let gang = record.gang.as_mut().expect("a gang");
        let one = gang.members[0].clone();
        gang.members = vec![one; count];
    };
    sizes(found(&|record| members(record, 0)));
    sizes(found(&|record| members(record, 4)));
    assert_eq!(found(&|record| members(record, 1)), Ok(()), "two ranks on one node");
}

#[test]
fn ranks_follow_from_the_layout_and_the_members() {
    let mut saved = full();
    let gang = saved.record.gang.as_mut().expect("a gang");
    gang.layout = Layout::contiguous(Mesh::data_parallel(8, 2));
    let read = read(&write(&saved)).expect("readable").record.gang.expect("a gang");
    let ranks: Vec<u32> = read.members.iter().map(|member| member.rank).collect();
    assert_eq!(ranks, [0, 4]);
}

#[test]
fn each_outcome_is_told_by_the_next_leader_as_by_the_first() {
    let failed = |reason| Outcome::Failed { exit_code: 1, reason, message: "m".into() };
    let mut outcomes: Vec<Outcome> = reasons::ALL.into_iter().map(failed).collect();
    outcomes.extend([Outcome::Complete { step: 7 }, Outcome::Suspended, Outcome::Interrupted]);
    for outcome in outcomes {
        let mut saved = full();
        saved.record.outcome = Some(outcome.clone());
        let text = write(&saved);
        assert_eq!(read(&text).expect("readable").record.outcome, Some(outcome));
    }
    let text = write(&full()).replace("DataOrCheckpointRefused", "OfALaterRelease");
    let outcome = read(&text).expect("readable").record.outcome;
    let Some(Outcome::Failed { reason, exit_code, .. }) = outcome else { panic!("{text}") };
    assert_eq!((reason, exit_code), ("Failed", 3));
}

/// With names as long as a pod's may be, and those of nodes as clouds make them.
#[test]
fn the_largest_gang_has_room_in_its_record() {
    let lengths = [512, 4096].map(|count: u32| {
        let mut saved = full();
        let gang = saved.record.gang.as_mut().expect("a gang");
        let member = |rank: u32| Member {
            rank,
            worker: format!("{}-a{}-{rank}", "j".repeat(NAME_LEN_MAX), u32::MAX),
            node: format!("ip-10-0-0-{rank}.{}", "n".repeat(50)),
            address: format!("255.255.255.255:{rank}"),
        };
        gang.members = (0..count).map(member).collect();
        gang.layout = Layout::contiguous(Mesh::data_parallel(count, 2));
        let uid = "0f3c1f9e-6a55-4a8c-9a52-1f0f6f1f7a11";
        let members = gang.members.iter().map(|_| (uid.to_string(), 1));
        let (attempt, image) = (gang.attempt, "i".repeat(255));
        saved.more.pods = GangPods { attempt, image, members: members.collect() };
        let rest = |at: usize| (format!("ip-10-0-0-{at}.{}", "n".repeat(50)), (9, 9, 9));
        saved.more.rests = (0..RESTS_MAX).map(rest).collect();
        let texts = (write(&saved), write_more(&saved.more));
        assert!(restore(&texts.0, &texts.1) == Ok(saved), "{count}");
        texts.0.len() + texts.1.len()
    });
    assert!(lengths[0] < 160 << 10 && lengths[1] < RECORD_BYTES_MAX, "{lengths:?}");
}

#[test]
fn a_member_is_known_by_its_pod_while_the_record_speaks_of_its_gang() {
    let gang = full().record.gang.expect("a gang");
    let members = vec![("uid-0".to_string(), 1), ("uid-1".to_string(), 2)];
    let pods = GangPods { attempt: 3, image: "a:1".into(), members };
    assert_eq!(pods.of(&gang)[1], ("uid-1".to_string(), 2));
    assert_eq!(pods.of(&Gang { attempt: 4, ..gang.clone() }), []);
    let other = GangPods { members: pods.members[..1].to_vec(), ..pods };
    assert_eq!(other.of(&gang), [], "it is not of this gang");
}

#[test]
fn what_lies_ahead_is_believed_for_twenty_minutes() {
    let (until, since) = (Some(u64::MAX), Some((1, 900)));
    let refused = Refused { until, since, ..Refused::default() };
    let engines_lost = vec![EngineLoss { at: 900, ..EngineLoss::default() }];
    let rests = BTreeMap::from([("n".to_string(), (2, 900, u64::MAX))]);
    let more = More { refused, rests, engines_lost, ..More::default() };
    let mut saved = Saved { more, ..full() };
    saved.no_later_than(100);
    assert_eq!(saved.more.refused.since, Some((1, 100)));
    assert_eq!(saved.more.engines_lost[0].at, 100);
    assert_eq!(saved.more.refused.until, Some(100 + 1_200_000));
    assert_eq!(saved.more.rests["n"], (2, 100, 100 + 1_200_000));
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let newer = write(&full()).replacen("\"v\":1", "\"v\":2", 1);
    assert_eq!(read(&newer), Err(RecordError::Version(2)));
    let older = write(&full()).replacen("\"v\":1", "\"v\":0", 1);
    assert_eq!(read(&older), Err(RecordError::Version(0)), "there was none");
    for text in ["", "{}", "[]", "{\"v\":1}"] {
        assert!(matches!(read(text), Err(RecordError::Text(_))), "{text}");
    }
    // A gang that no leader could have made.
    type Damage = fn(&mut Gang);
    let damages: [(Damage, &str); 4] = [
        (|gang| gang.layout.mesh.dp = 0, "layout"),
        (|gang| gang.layout.mesh.dp = 1 << 20, "layout"),
        (|gang| gang.layout.placement = Placement::Ordered(vec![vec![0, 2, 2]]), "layout"),
        (|gang| gang.members = vec![gang.members[0].clone(); 3], "members"),
    ];
    for (damage, word) in damages {
        let mut saved = full();
        damage(saved.record.gang.as_mut().expect("a gang"));
        let error = read(&write(&saved)).expect_err(word).to_string();
        assert!(error.contains(word), "{error}");
    }
}
