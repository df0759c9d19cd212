use moejob_plan::lead::judge;
use moejob_plan::profile::Profiles;
use serde_json::{Value, json};

fn good() -> Value {
    json!({
        "nodes": {"min": 1, "max": 2},
        "model": {"preset": "tiny"},
        "data": {"train": {"text": {"paths": ["corpus/*"]}}, "sequenceLength": 8},
        "training": {"steps": 1, "globalBatchSize": 4},
        "checkpoint": {"location": "checkpoints/a"},
        "volumes": [{"mountPath": "checkpoints", "claim": "c"}],
    })
}

fn blocked(change: impl Fn(&mut Value)) -> (String, String) {
    let mut spec = good();
    change(&mut spec);
    let blocked = judge("job", &spec, Profiles::shipped()).expect_err("blocked");
    (format!("{} {}", blocked.reason, blocked.invalid), blocked.message)
}

#[test]
fn what_keeps_a_job_from_being_planned_has_a_reason() {
    assert!(judge("job", &good(), Profiles::shipped()).is_ok());
    let (reason, message) = blocked(|spec| spec["training"]["globalBatchSize"] = json!(0));
    assert_eq!(reason, "InvalidSpec true");
    assert!(message.contains("globalBatchSize"), "{message}");
    let (reason, message) = blocked(|spec| spec["newer"] = json!(1));
    assert_eq!(reason, "InvalidSpec true");
    assert!(message.contains("newer"), "{message}");
    let (reason, _) = blocked(|spec| spec["volumes"] = json!([]));
    assert_eq!(reason, "NoDurableCheckpoint false");
}
