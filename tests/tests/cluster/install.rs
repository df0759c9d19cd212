//! The install: what `kubectl apply -k manifests` puts there, what it may do, and that the chart
//! installs the same.

use moejob_tests::cluster::{get, kubectl, manifest, script};
use moejob_tests::root;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

const ACCOUNT: &str = "--as=system:serviceaccount:moejob-system:moejob-operator";
const RIGHTS: &str = "tests/tests/cluster/rights.txt";

fn path(name: &str) -> String {
    root().join(name).display().to_string()
}

fn kustomized() -> String {
    kubectl(&["kustomize", &path("manifests")]).expect("kustomize")
}

/// Documents of YAML as objects by kind, namespace and name; kubectl is the reader.
fn objects(text: &str) -> BTreeMap<String, Value> {
    let said = manifest(&["create", "--dry-run=client", "-o", "json"], text.as_bytes());
    let json = said.expect("objects");
    let read = serde_json::Deserializer::from_str(&json).into_iter::<Value>();
    let objects: Vec<Value> = read.collect::<Result<_, _>>().expect("JSON");
    let named = objects.into_iter().map(|object| {
        let about = &object["metadata"];
        let namespace = about["namespace"].as_str().unwrap_or_default();
        (format!("{} {namespace}/{}", object["kind"], about["name"]), object)
    });
    named.collect()
}

/// Helm as far as the tests have it: `helm lint` and `helm template`.
fn helm(arguments: &[&str], values: Option<&str>) -> Result<String, String> {
    let program = script("build", &["helm"], b"").expect("helm is built");
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut command = Command::new(program.trim());
    command.args(arguments);
    if let Some(values) = values {
        std::fs::write(file.path(), values).expect("values");
        command.arg(file.path());
    }
    let output = command.output().expect("helm runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

#[test]
fn the_chart_installs_what_kustomize_installs() {
    let chart = path("manifests/chart");
    let made = helm(&["template", &chart, "moejob-system"], None).expect("rendered");
    let mut expected = objects(&kustomized());
    // A chart does not make the namespace that it is installed into.
    expected.retain(|name, _| !name.starts_with("\"Namespace\""));
    let made = objects(&made);
    let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&made), names(&expected));
    for (name, object) in &expected {
        assert_eq!(&made[name], object, "{name}");
    }
}

#[test]
fn the_chart_is_sound_and_refuses_values_that_are_not() {
    let chart = path("manifests/chart");
    let all = "monitoring: { podMonitor: true, rules: true, dashboard: true }\n\
        namespaces: [a, b]\nreplicas: 1\nnetworkPolicy: false\nnodeSelector: { a: b }\n\
        image: { repository: example.org/m, tag: 1.0.0, pullSecrets: [{ name: key }] }\n\
        priorityClassName: high\ntolerations: []\n";
    for values in [None, Some(all)] {
        helm(&["lint", &chart], values).expect("a sound chart");
        helm(&["template", &chart, "elsewhere"], values).expect("rendered");
    }
    let made = helm(&["template", &chart, "elsewhere"], Some(all)).expect("rendered");
    for (part, count) in [
        ("image: \"example.org/m:1.0.0\"", 1),
        ("\n  namespace: moejob-system\n", 0),
        ("\n  name: moejob-jobs\n  namespace: b\n", 2),
        ("\nkind: PodMonitor\n", 1),
        ("\nkind: PrometheusRule\n", 1),
        ("\nkind: PodDisruptionBudget\n", 0),
        ("\nkind: NetworkPolicy\n", 0),
    ] {
        assert_eq!(made.matches(part).count(), count, "{part:?}\n{made}");
    }
    for (values, word) in [
        ("replica: 2", "replica"),
        ("replicas: two", "replicas"),
        ("replicas: 0", "replicas"),
        ("namespaces: []", "namespaces"),
        ("namespaces: [Team_A]", "namespaces"),
        ("image: { tag: 'a b' }", "tag"),
        ("image: { pullPolicy: Sometimes }", "pullPolicy"),
        ("monitoring: { rules: 1 }", "rules"),
    ] {
        let refused = helm(&["template", &chart, "moejob-system"], Some(values)).err();
        assert!(refused.as_ref().is_some_and(|text| text.contains(word)), "{values}: {refused:?}");
    }
}

#[test]
fn the_image_is_the_one_of_this_version() {
    let version = env!("CARGO_PKG_VERSION");
    let chart = std::fs::read_to_string(path("manifests/chart/Chart.yaml")).expect("chart");
    assert_eq!(chart.matches(&format!("ersion: {version}\n")).count(), 2, "{chart}");
    let image = format!("image: ghcr.io/moejob/moejob:{version}\n");
    assert!(kustomized().contains(&image));
}

/// No wildcard, no exec, no secret but ours, and what an account of ours may do is on record.
#[test]
fn the_operator_may_do_what_the_golden_file_says() {
    kubectl(&["apply", "-k", &path("manifests")]).expect("installed");
    for (name, object) in objects(&kustomized()) {
        for rule in object["rules"].as_array().into_iter().flatten() {
            let words = rule.to_string();
            assert!(!words.contains('*') && !words.contains("exec"), "{name}: {words}");
            let names = rule["resourceNames"].as_array().map(Vec::len);
            let secrets = rule["resources"].to_string().contains("secrets");
            assert!(!secrets || names == Some(1), "{name}: {words}");
        }
    }
    let mut found = String::new();
    for namespace in ["moejob-system", "default", "kube-system"] {
        let list = ["auth", "can-i", "--list", "--no-headers", ACCOUNT, "-n", namespace];
        let rights = kubectl(&list).expect("can-i");
        // What every account may: ask about itself, and read what the server is.
        let ours: BTreeSet<String> = rights
            .lines()
            .filter(|line| !line.contains("selfsubject") && !line.contains("[/"))
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        found += &format!("# in {namespace}\n");
        found.extend(ours.iter().map(|line| format!("{line}\n")));
    }
    if std::env::var_os("UPDATE").is_some() {
        return std::fs::write(root().join(RIGHTS), found).expect("the golden file is written");
    }
    let expected = std::fs::read_to_string(root().join(RIGHTS)).expect("the golden file");
    assert_eq!(found, expected, "{RIGHTS}");
}

/// The Secret is shipped empty, and a second install does not empty it again.
#[test]
fn installing_again_keeps_the_authority() {
    let install = || kubectl(&["apply", "-k", &path("manifests")]).expect("installed");
    install();
    let secret = ["secret", "moejob-authority", "-n", "moejob-system"];
    // Whoever comes first fills it: an operator, or this test where none runs.
    let patch = ["patch", "--type=merge", "-p", r#"{"data":{"test":"a2VwdA=="}}"#];
    let ours = get(&secret)["data"].is_null();
    if ours {
        kubectl(&[&patch[..], &secret].concat()).expect("filled");
    }
    let before = get(&secret)["data"].take();
    assert!(before.is_object(), "{before}");
    let said = install();
    assert!(said.contains("secret/moejob-authority unchanged"), "{said}");
    assert_eq!(get(&secret)["data"], before);
    if ours {
        let clear = ["patch", "--type=json", "-p", r#"[{"op":"remove","path":"/data"}]"#];
        kubectl(&[&clear[..], &secret].concat()).expect("cleared");
    }
}
