use moejob_plan::lead::{Owner, WorkerPod, Write, owner};
use moejob_plan::orphans::Orphans;

fn pod(name: &str, job: &str) -> WorkerPod {
    WorkerPod {
        namespace: "n".into(),
        name: name.into(),
        uid: format!("uid-{name}"),
        owner: owner("n", job),
        started: true,
        ..WorkerPod::default()
    }
}

#[test]
fn a_pod_without_a_job_is_ended_after_a_minute() {
    let mut orphans = Orphans::default();
    let pods = [pod("a", "here"), pod("b", "gone"), pod("c", "gone")];
    let look = |orphans: &mut Orphans, here: bool, now| -> usize {
        let known = |of: &Owner| here || **of == *owner("n", "here");
        orphans.look(pods.iter(), known, now).len()
    };
    assert_eq!(look(&mut orphans, false, 1_000), 0);
    assert_eq!(look(&mut orphans, false, 60_999), 0);
    assert_eq!(look(&mut orphans, false, 76_000), 2);
    assert_eq!(look(&mut orphans, false, 76_001), 0, "not at once again");
    assert_eq!(look(&mut orphans, false, 91_000), 2, "the API server did not take it");
    // Its job was only late: the minute begins anew.
    assert_eq!(look(&mut orphans, true, 106_000), 0);
    assert_eq!(look(&mut orphans, false, 121_000), 0);
}

/// What is on its way out is not asked again: a second request would cut its grace period short.
#[test]
fn a_pod_that_is_being_deleted_is_left_to_its_grace_period() {
    let mut orphans = Orphans::default();
    let pods = [pod("a", "gone"), WorkerPod { deletion: Some(90_000), ..pod("b", "gone") }];
    let mut look = |now| orphans.look(pods.iter(), |_| false, now);
    assert!(look(1_000).is_empty());
    let asked: Vec<Write> = look(76_000).into_iter().map(|(_, write)| write).collect();
    let [Write::DeletePod { name, .. }] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!(name, "a");
}
