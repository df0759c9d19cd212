use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_plan::locations::{Tenant, waiting};
use serde_json::json;

fn job(name: &str, location: &str, claim: &str) -> Job {
    let spec = json!({
        "nodes": {"min": 1, "max": 1},
        "model": {"preset": "tiny"},
        "data": {"train": {"text": {"paths": ["a"]}}, "sequenceLength": 8},
        "training": {"steps": 1, "globalBatchSize": 8},
        "checkpoint": {"location": location},
        "volumes": [{"mountPath": "checkpoints", "claim": claim}],
    });
    let spec = serde_json::from_value(spec).expect("a spec");
    let job = Job::from_spec(name, &spec, Profiles::shipped());
    job.unwrap_or_else(|problems| panic!("{problems:?}"))
}

#[test]
fn the_later_of_two_jobs_with_one_location_waits() {
    let jobs = [
        job("a", "checkpoints/x", "c"),
        job("b", "checkpoints//x/", "c"),
        job("other-folder", "checkpoints/y", "c"),
        job("other-claim", "checkpoints/x", "d"),
    ];
    let of = |index: usize, namespace, created, runs| Tenant {
        owner: ["o0", "o1", "o2", "o3"][index],
        namespace,
        job: &jobs[index],
        created,
        runs,
    };
    let all = |a_runs, b_runs, b_in| {
        let all = [
            of(0, "n", 2, a_runs),
            of(1, b_in, 1, b_runs),
            of(2, "n", 3, false),
            of(3, "n", 4, false),
        ];
        Vec::from_iter(waiting(&all))
    };
    let waits = |owner: &str, name: &str| vec![(owner.to_string(), name.to_string())];
    assert_eq!(all(false, false, "n"), waits("o0", "b"), "b is older");
    assert_eq!(all(true, false, "n"), waits("o1", "a"), "a runs");
    assert_eq!(all(true, true, "n"), [], "neither is stopped");
    assert_eq!(all(false, false, "m"), [], "another namespace's claim");
}
