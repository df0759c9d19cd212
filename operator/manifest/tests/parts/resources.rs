use moejob_manifest::resources::{Resources, thousandths};
use serde_json::json;

#[test]
fn quantities_are_thousandths() {
    let of = |text| thousandths(text);
    assert_eq!((of("500m"), of("2"), of("0.5")), (Some(500), Some(2_000), Some(500)));
    assert_eq!((of("1Ki"), of("1k"), of("1e3")), (Some(1_024_000), of("1000"), of("1000")));
    assert_eq!((of("1u"), of("100n"), of("1E")), (Some(1), Some(1), None));
    for wrong in ["", "x", "1Gb", "-1", "1e99"] {
        assert_eq!(of(wrong), None, "{wrong}");
    }
}

#[test]
fn what_a_pod_asks_for_fits_or_names_what_lacks() {
    let pod = json!({ "spec": { "containers": [{ "resources": {
        "requests": { "cpu": 1 }, "limits": { "cpu": "3", "nvidia.com/gpu": "8" } } }] } });
    let asked = Resources::of_pod(&pod);
    let node = Resources::read(&json!({ "cpu": "2", "nvidia.com/gpu": "8", "pods": "110" }));
    assert_eq!(asked.lacking(&node, &Resources::default()), None);
    let taken = Resources::read(&json!({ "cpu": "1100m" }));
    assert_eq!(asked.lacking(&node, &taken), Some("cpu"));
    assert_eq!(asked.lacking(&Resources::default(), &taken), Some("cpu"));
    let taken = Resources::read(&json!({ "pods": 110 }));
    assert_eq!(asked.lacking(&node, &taken), Some("pods"));
}

/// As KEP-753 and KEP-2837 count it.
#[test]
fn sidecars_run_beside_the_others_and_a_whole_pods_word_counts() {
    let with = |mut one: serde_json::Value, more: serde_json::Value| {
        let more = more.as_object().cloned().unwrap_or_default();
        one.as_object_mut().expect("an object").extend(more);
        one
    };
    let one = |cpu: &str, more: serde_json::Value| {
        with(json!({ "resources": { "requests": { "cpu": cpu } } }), more)
    };
    let sidecar = |cpu: &str| one(cpu, json!({ "restartPolicy": "Always" }));
    let plain = |cpu: &str| one(cpu, json!({}));
    let cpu = |init: serde_json::Value, more: serde_json::Value| {
        let spec = with(json!({ "containers": [plain("2")], "initContainers": init }), more);
        Resources::of_pod(&json!({ "spec": spec })).0["cpu"]
    };
    let none = || json!({});
    assert_eq!(cpu(json!([plain("1")]), none()), 2_000);
    assert_eq!(cpu(json!([plain("3")]), none()), 3_000);
    assert_eq!(cpu(json!([sidecar("1")]), none()), 3_000);
    assert_eq!(cpu(json!([sidecar("1"), plain("3")]), none()), 4_000, "it begins beside one");
    assert_eq!(cpu(json!([plain("3"), sidecar("1")]), none()), 3_000, "it was over before");
    let whole = json!({ "resources": { "requests": { "cpu": "9" } } });
    assert_eq!(cpu(json!([sidecar("1")]), whole), 9_000);
    assert_eq!(cpu(json!([]), json!({ "overhead": { "cpu": "1" } })), 3_000);
}
