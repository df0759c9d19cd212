//! What is said against a node, and what a job tolerates.

use moejob_plan::allocate::{
    ClusterNode, Needs, Taint, Toleration, is_pause, unhealthy, unhealthy_label,
};
use serde_json::json;
use std::collections::BTreeMap;

/// Conditions as AKS writes them.
#[test]
fn a_machine_that_will_stand_still_for_seconds_is_not_left() {
    let event = "VMEventScheduled";
    assert!(is_pause(event, "FreezeScheduled", "EventType: Freeze, DurationInSeconds: 9"));
    assert!(is_pause(event, "VMEventScheduled", "freeze is scheduled"));
    for word in ["Reboot", "Redeploy", "Terminate", "Preempt", "Something", ""] {
        assert!(!is_pause(event, word, ""), "{word}");
    }
    assert!(!is_pause(event, "RebootScheduled", "Freeze, then Reboot"));
    assert!(!is_pause("XIDErrors", "Freeze", ""));
    for bad in [
        "GPUMissing",
        "NVLinkStatusInactive",
        "XIDErrors",
        "IBLinkFlapping",
        "GPUClockThrottling",
        "UnhealthyNvidiaDevicePlugin",
        event,
    ] {
        assert_eq!(unhealthy([("Ready", "True"), (bad, "True")]), Some(format!("{bad}=True")));
        assert_eq!(unhealthy([("Ready", "True"), (bad, "False")]), None);
    }
}

#[test]
fn labels_and_tolerations_are_read_as_kubernetes_means_them() {
    let label = |key: &str, value: &str| {
        unhealthy_label(&BTreeMap::from([(key.to_string(), value.to_string())]))
    };
    let hyperpod = "sagemaker.amazonaws.com/node-health-status";
    assert_eq!(label(hyperpod, "Schedulable"), None);
    let bad = "UnschedulablePendingReplacement";
    assert_eq!(label(hyperpod, bad), Some(format!("{hyperpod}={bad}")));
    assert_eq!(label("autopilot.ibm.com/gpuhealth", "PASS"), None);
    let read = |value| Toleration::read(&value);
    let key = || Some("k".to_string());
    let any = read(json!({ "key": "k", "operator": "Exists" }));
    assert_eq!(any, Toleration { key: key(), value: None, effect: None });
    let equal = read(json!({ "key": "k", "value": "v", "effect": "NoSchedule" }));
    let (value, effect) = (Some("v".to_string()), Some("NoSchedule".to_string()));
    assert_eq!(equal, Toleration { key: key(), value, effect });
    let empty = read(json!({ "key": "k", "operator": "Equal", "effect": "" }));
    assert_eq!(empty, Toleration { key: key(), value: Some(String::new()), effect: None });
}

/// Each of its three parts must fit, if it is said.
#[test]
fn a_taint_is_tolerated_by_key_value_and_effect_together() {
    let taint = |effect: &str| Taint { key: "k".into(), value: "v".into(), effect: effect.into() };
    let node = |effect: &str| ClusterNode {
        ready: true,
        taints: vec![taint(effect)],
        ..ClusterNode::default()
    };
    let of = |key: &str, value: &str, effect: &str| {
        let said = |word: &str| (!word.is_empty()).then(|| word.to_string());
        let one = Toleration { key: said(key), value: said(value), effect: said(effect) };
        let needs = Needs { tolerations: vec![one], ..Needs::default() };
        (needs.refuses(&node("NoSchedule")).is_none(), needs.keeps(&node("NoExecute")))
    };
    assert_eq!(of("", "", ""), (true, true));
    assert_eq!(of("k", "v", ""), (true, true));
    assert_eq!(of("k", "v", "NoSchedule"), (true, false));
    assert_eq!(of("k", "other", ""), (false, false));
    assert_eq!(of("other", "v", ""), (false, false));
    let nobody = Needs::default();
    assert!(nobody.keeps(&node("NoSchedule")), "it drains nobody");
    assert!(nobody.refuses(&node("PreferNoSchedule")).is_none());
    let cordoned = ClusterNode { cordoned: true, ..node("PreferNoSchedule") };
    assert!(!nobody.keeps(&cordoned));
}
