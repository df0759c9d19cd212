//! Nodes as a person or a cluster writes them.

use moejob_offline::nodes::nodes_from;

#[test]
fn nodes_are_read_from_what_a_person_or_kubectl_writes() {
    let names = |text| {
        let nodes = nodes_from(text)?;
        let shown = nodes.iter().map(|node| format!("{} {}", node.name, node.usable));
        Ok::<_, String>(shown.collect::<Vec<_>>().join(", "))
    };
    assert_eq!(names("- a\n- b\n").unwrap(), "a true, b true");
    assert_eq!(names("[{ name: a, usable: false, labels: { zone: b } }]").unwrap(), "a false");
    let kubectl = r#"{ "kind": "List", "items": [
        { "metadata": { "name": "a", "labels": { "zone": "1" } }, "spec": {},
          "status": { "conditions": [{ "type": "Ready", "status": "True" }] } },
        { "metadata": { "name": "b" }, "spec": { "unschedulable": true } },
        { "metadata": { "name": "c" },
          "status": { "conditions": [{ "type": "Ready", "status": "Unknown" }] } }] }"#;
    assert_eq!(names(kubectl).unwrap(), "a true, b false, c false");
    assert!(names("- a\n- a\n").unwrap_err().contains("twice"));
    assert!(names("a: 1").unwrap_err().contains("no list"));
    assert!(names("[{ nam: a }]").unwrap_err().contains("nam"));
}
