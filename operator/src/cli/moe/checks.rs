//! What `kubectl moe doctor` concludes from what it has found. Pure.

use super::table::{millis, span};
use moejob_manifest::crd;
use moejob_manifest::words::several;
use moejob_plan::observed::Millis;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// `docs/install.md` promises this and newer ones.
const MINOR_MIN: u32 = 31;
/// A leader renews its lease every 2 s; a standby takes over after 10 s.
const LEASE_OLD: Millis = 15_000;
/// Ages and timelines are wrong by as much, and certificates by what is left of a minute.
const SKEW_MAX: Millis = 5_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Ok,
    /// Jobs run, but somebody will miss it.
    Warning,
    /// Jobs cannot run, or this user cannot run them.
    Missing,
    /// This user may not look.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    pub name: &'static str,
    pub state: State,
    pub found: String,
    pub advice: Option<String>,
}

impl Check {
    pub fn new(name: &'static str, state: State, found: impl Into<String>) -> Check {
        Check { name, state, found: found.into(), advice: None }
    }

    pub fn advice(mut self, advice: impl Into<String>) -> Check {
        self.advice = Some(advice.into());
        self
    }

    /// Somebody else has to look.
    pub fn unknown(name: &'static str, what: &str) -> Check {
        Check::new(name, State::Unknown, format!("you may not {what}"))
    }
}

pub fn text(checks: &[Check]) -> String {
    let mut text = String::new();
    for check in checks {
        let state = match check.state {
            State::Ok => "ok",
            State::Warning => "warning",
            State::Missing => "missing",
            State::Unknown => "unknown",
        };
        let found = check.found.replace('\n', &format!("\n{:22}", ""));
        text += &format!("{state:<9}{:<13}{found}\n", check.name);
        if let Some(advice) = &check.advice {
            text += &format!("{:22}-> {advice}\n", "");
        }
    }
    text
}

pub fn json(checks: &[Check]) -> Value {
    let one = |check: &Check| {
        json!({
            "name": check.name, "state": format!("{:?}", check.state), "found": check.found,
            "advice": check.advice,
        })
    };
    checks.iter().map(one).collect()
}

/// `version` is what `/version` says.
pub fn server(version: &Value, at: &str, took: Millis) -> Check {
    let name = version["gitVersion"].as_str().unwrap_or("of no known version");
    let found = format!("{name} at {at}, answers in {}", span(took));
    let digits = |text: &str| -> String { text.chars().take_while(char::is_ascii_digit).collect() };
    let minor = version["minor"].as_str().map(digits).and_then(|text| text.parse::<u32>().ok());
    let old = version["major"] == "1" && minor.is_some_and(|minor| minor < MINOR_MIN);
    match old {
        true => Check::new("API server", State::Warning, found)
            .advice(format!("Kubernetes 1.{MINOR_MIN} or newer is what moejob is tested with")),
        false => Check::new("API server", State::Ok, found),
    }
}

/// The definition as it is on the server against that of this program.
pub fn definition(found: Option<&Value>) -> Check {
    const NAME: &str = "definition";
    let install = "kubectl apply -k manifests, of the version that is to run";
    let Some(found) = found else {
        let text = "the cluster knows no MoeJobs";
        return Check::new(NAME, State::Missing, text).advice(install);
    };
    let versions = found["spec"]["versions"].as_array();
    let version = versions.and_then(|all| all.iter().find(|one| one["name"] == "v1alpha1"));
    let schema = version.map(|one| &one["schema"]["openAPIV3Schema"]);
    let mine = crd::definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"].take();
    let (theirs, ours) = (rules(schema.unwrap_or(&Value::Null)), rules(&mine));
    let only = |a: &BTreeSet<String>, b: &BTreeSet<String>| {
        let found: Vec<&str> = a.difference(b).map(String::as_str).collect();
        match found.len() {
            0..4 => found.join(", "),
            more => format!("{}, and {} more", found[..3].join(", "), more - 3),
        }
    };
    let (missing, extra) = (only(&ours, &theirs), only(&theirs, &ours));
    if missing.is_empty() && extra.is_empty() {
        return Check::new(NAME, State::Ok, "moejobs.moejob.dev, of this version");
    }
    let mut parts = Vec::new();
    if !missing.is_empty() {
        parts.push(format!("the cluster's lacks {missing}"));
    }
    if !extra.is_empty() {
        parts.push(format!("this program does not know {extra}"));
    }
    let text = format!("moejobs.moejob.dev of another version: {}", parts.join("; "));
    Check::new(NAME, State::Warning, text)
        .advice(format!("install the version that you want ({install}) and use its kubectl-moe"))
}

/// Paths of all fields, and the rules that stand at them.
fn rules(schema: &Value) -> BTreeSet<String> {
    fn walk(schema: &Value, path: &str, out: &mut BTreeSet<String>) {
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            // What every object has is the server's.
            if path.is_empty() && !matches!(name.as_str(), "spec" | "status") {
                continue;
            }
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            out.insert(path.clone());
            walk(field, &path, out);
        }
        for inner in ["items", "additionalProperties"].map(|inner| &schema[inner]) {
            if inner.is_object() {
                walk(inner, &format!("{path}[]"), out);
            }
        }
        for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            let rule = rule["rule"].as_str().unwrap_or_default();
            out.insert(format!("the rule `{}`", rule.split_whitespace().collect::<String>()));
        }
    }
    let mut out = BTreeSet::new();
    walk(schema, "", &mut out);
    out
}

/// The Deployment of the operator.
pub fn operator(deployment: Option<&Value>, namespace: &str) -> Check {
    const NAME: &str = "operator";
    let Some(deployment) = deployment else {
        let text = format!("there is no Deployment moejob-operator in namespace {namespace}");
        return Check::new(NAME, State::Missing, text)
            .advice("kubectl apply -k manifests; --operator-namespace if it lives elsewhere");
    };
    let number = |part: &str, field: &str| deployment[part][field].as_u64().unwrap_or(0);
    let (ready, wanted) = (number("status", "readyReplicas"), number("spec", "replicas"));
    let image = &deployment["spec"]["template"]["spec"]["containers"][0]["image"];
    let image = image.as_str().unwrap_or_default();
    let found = format!("{ready} of {} ready, {image}", several(wanted, "replica"));
    let tag = image.rsplit('/').next().and_then(|name| name.split_once(':'));
    let tag = tag.map(|(_, tag)| tag.split('@').next().unwrap_or(tag));
    let scale = format!("kubectl scale -n {namespace} deployment/moejob-operator --replicas 2");
    let looks = format!("kubectl describe pods -n {namespace} -l app.kubernetes.io/name=moejob");
    match (ready, wanted) {
        (0, 0) => Check::new(NAME, State::Missing, found).advice(scale),
        (0, _) => Check::new(NAME, State::Missing, found).advice(looks),
        (ready, wanted) if ready < wanted => Check::new(NAME, State::Warning, found).advice(looks),
        _ if tag.is_some_and(|tag| is_other_version(tag)) => {
            let mine = env!("CARGO_PKG_VERSION");
            let advice = format!("this program is {mine}; use the kubectl-moe of the operator");
            Check::new(NAME, State::Warning, found).advice(advice)
        }
        _ => Check::new(NAME, State::Ok, found),
    }
}

/// A tag that is a version, and not this one.
fn is_other_version(tag: &str) -> bool {
    let plain = tag.trim_start_matches('v');
    plain.starts_with(|c: char| c.is_ascii_digit())
        && plain.contains('.')
        && plain != env!("CARGO_PKG_VERSION")
}

/// The lease of leadership. `now` is the server's.
pub fn leader(lease: Option<&Value>, now: Millis) -> Check {
    const NAME: &str = "leader";
    let spec = lease.map_or(&Value::Null, |lease| &lease["spec"]);
    let holder = spec["holderIdentity"].as_str().unwrap_or_default();
    let holder = holder.split('_').next().unwrap_or_default();
    let renewed = spec["renewTime"].as_str().and_then(millis);
    let advice = "see the operator's log: kubectl logs -n moejob-system deployment/moejob-operator";
    match renewed {
        Some(at) if !holder.is_empty() && now < at + LEASE_OLD => {
            let ago = span(now.saturating_sub(at));
            Check::new(NAME, State::Ok, format!("{holder}, heard of {ago} ago"))
        }
        Some(at) if !holder.is_empty() => {
            let ago = span(now.saturating_sub(at));
            let text = format!("{holder} was heard of {ago} ago; training goes on without it");
            Check::new(NAME, State::Missing, text).advice(advice)
        }
        _ => Check::new(NAME, State::Missing, "no operator leads").advice(advice),
    }
}

/// This machine's clock and, where they may be read, those of nodes by their leases.
pub fn clock(here: Millis, server: Option<Millis>, leases: &[Value]) -> Check {
    const NAME: &str = "clock";
    let Some(server) = server else {
        return Check::new(NAME, State::Unknown, "the API server does not tell its time");
    };
    // The server tells whole seconds.
    let skew = here.abs_diff(server + 500);
    let ahead = leases.iter().filter_map(|lease| {
        let renewed = lease["spec"]["renewTime"].as_str().and_then(millis)?;
        let by = renewed.saturating_sub(server + 1_000);
        let node = lease["metadata"]["name"].as_str()?;
        (by > SKEW_MAX).then(|| format!("{node} is {} ahead", span(by)))
    });
    let mut wrong: Vec<String> = ahead.collect();
    if skew > SKEW_MAX {
        wrong.insert(0, format!("this machine is {} off", span(skew)));
    }
    match wrong.as_slice() {
        [] => {
            let nodes = if leases.is_empty() { "" } else { ", and those of the nodes" };
            let text = format!("this machine's agrees with the API server's{nodes}");
            Check::new(NAME, State::Ok, text)
        }
        wrong => Check::new(NAME, State::Warning, wrong.join(", "))
            .advice("set it by NTP or chrony: certificates and timelines depend on it"),
    }
}

/// Classes, none where they may not be read, and the claims of the namespace.
pub fn storage(classes: Option<&[Value]>, claims: &[Value]) -> Check {
    const NAME: &str = "storage";
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap_or("?").to_string();
    let shared = claims.iter().filter(|claim| {
        let modes = claim["spec"]["accessModes"].as_array();
        let many = modes.is_some_and(|modes| modes.iter().any(|mode| mode == "ReadWriteMany"));
        many && claim["status"]["phase"] == "Bound"
    });
    let shared: Vec<String> = shared.map(name).collect();
    let is_default = |class: &&Value| {
        let key = "storageclass.kubernetes.io/is-default-class";
        class["metadata"]["annotations"][key] == "true"
    };
    let class = classes.map(|all| match all.iter().find(is_default) {
        Some(class) => format!("default class {}", name(class)),
        None if all.is_empty() => "no storage class".to_string(),
        None => format!("no default among {} storage classes", all.len()),
    });
    let class = class.unwrap_or_else(|| "you may not list storage classes".to_string());
    let advice = "checkpoints need a claim with accessModes [ReadWriteMany], of a class that can: \
                  NFS, CephFS, Lustre, a cloud's file storage";
    match shared.as_slice() {
        [] => {
            let text = format!("{class}; no bound ReadWriteMany claim here");
            Check::new(NAME, State::Warning, text).advice(advice)
        }
        claims => {
            let text = format!("{class}; ReadWriteMany claims here: {}", claims.join(", "));
            Check::new(NAME, State::Ok, text)
        }
    }
}

/// What a command needs.
pub struct Right {
    pub verb: &'static str,
    pub group: &'static str,
    pub resource: &'static str,
    /// In all namespaces, or of a kind that lies in none.
    pub cluster: bool,
    pub of: &'static str,
}

const fn right(
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    of: &'static str,
) -> Right {
    Right { verb, group, resource, cluster: false, of }
}

/// Without one of these a command does not work.
pub const RIGHTS: &[Right] = &[
    right("get", "moejob.dev", "moejobs", "show"),
    right("list", "moejob.dev", "moejobs", "queue"),
    right("watch", "moejob.dev", "moejobs", "-w, --wait"),
    right("patch", "moejob.dev", "moejobs", "submit, hold, release"),
    right("create", "moejob.dev", "moejobs", "submit"),
    right("delete", "moejob.dev", "moejobs", "cancel"),
    right("list", "", "pods", "show, logs, top"),
    right("watch", "", "pods", "logs -f"),
    right("get", "", "pods/log", "logs, top"),
    right("list", "events.k8s.io", "events", "show"),
];

/// Rights of the namespace, each with whether the user has it.
pub fn rights(allowed: &[bool], namespace: &str) -> Check {
    const NAME: &str = "your rights";
    let lacking: Vec<String> = RIGHTS
        .iter()
        .zip(allowed)
        .filter(|(_, allowed)| !**allowed)
        .map(|(right, _)| format!("{} {} ({})", right.verb, right.resource, right.of))
        .collect();
    if lacking.is_empty() {
        return Check::new(NAME, State::Ok, format!("all that is needed in namespace {namespace}"));
    }
    let text = format!("you may not, in namespace {namespace}: {}", lacking.join(", "));
    Check::new(NAME, State::Missing, text).advice(format!(
        "kubectl create rolebinding you-edit -n {namespace} --clusterrole edit --user YOU (by an \
         administrator)"
    ))
}

/// Whether the operator may work in the namespace.
pub fn namespace(binding: Option<&Value>, namespace: &str) -> Check {
    const NAME: &str = "namespace";
    match binding {
        Some(_) => Check::new(NAME, State::Ok, format!("{namespace}: the operator runs its jobs")),
        None => {
            let text = format!("{namespace} has no RoleBinding moejob-jobs: jobs there do not run");
            Check::new(NAME, State::Missing, text)
                .advice("add it by a kustomization of two lines: docs/install.md, Namespaces")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = 1_795_280_400_000;

    fn shown(check: Check) -> String {
        text(&[check])
    }

    #[test]
    fn the_definition_is_compared_field_by_field() {
        let mine = crd::definition();
        assert_eq!(definition(Some(&mine)).state, State::Ok);
        let mut other = mine.clone();
        let schema = &mut other["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let spec = schema["properties"]["spec"]["properties"].as_object_mut().expect("fields");
        spec.remove("suspend");
        spec.insert("colour".into(), json!({"type": "string"}));
        let found = shown(definition(Some(&other)));
        assert!(found.contains("the cluster's lacks spec.suspend"), "{found}");
        assert!(found.contains("does not know spec.colour"), "{found}");
        let mut other = mine;
        let schema = &mut other["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let rules = schema["x-kubernetes-validations"].as_array_mut().expect("rules");
        rules.clear();
        let found = shown(definition(Some(&other)));
        assert!(found.contains("the rule `size(self.metadata.name)<=45`"), "{found}");
        assert_eq!(definition(None).state, State::Missing);
    }

    #[test]
    fn the_operator_is_ready_or_it_is_said_what_to_look_at() {
        let deployment = |ready: u64, wanted: u64, image: &str| {
            json!({
                "spec": {"replicas": wanted, "template": {"spec": {"containers": [
                    {"image": image}]}}},
                "status": {"readyReplicas": ready},
            })
        };
        let mine = concat!("ghcr.io/moejob/moejob:", env!("CARGO_PKG_VERSION"));
        let state = |ready, wanted, image| operator(Some(&deployment(ready, wanted, image)), "n");
        assert_eq!(state(2, 2, mine).state, State::Ok);
        assert_eq!(state(1, 2, mine).state, State::Warning);
        assert_eq!(state(0, 2, mine).state, State::Missing);
        assert!(state(0, 0, mine).advice.is_some_and(|advice| advice.contains("scale")));
        assert_eq!(state(1, 1, "localhost:5000/moejob:v9.9.9@sha256:ab").state, State::Warning);
        assert_eq!(state(1, 1, "localhost/moejob:test").state, State::Ok);
        assert_eq!(operator(None, "n").state, State::Missing);
    }

    #[test]
    fn leases_and_clocks() {
        let lease = |holder: &str, ago: Millis| {
            json!({"metadata": {"name": "worker-1"}, "spec": {
                "holderIdentity": holder, "renewTime": super::super::table::stamp(NOW - ago)}})
        };
        let found = shown(leader(Some(&lease("operator-x_1-2", 3_000)), NOW));
        assert_eq!(found, "ok       leader       operator-x, heard of 3.0 s ago\n");
        assert_eq!(leader(Some(&lease("operator-x_1-2", 60_000)), NOW).state, State::Missing);
        assert_eq!(leader(Some(&lease("", 1_000)), NOW).state, State::Missing);
        assert_eq!(leader(None, NOW).state, State::Missing);
        assert_eq!(clock(NOW, Some(NOW), &[lease("", 9_000)]).state, State::Ok);
        let found = shown(clock(NOW + 90_500, Some(NOW), &[]));
        assert!(found.contains("this machine is 90s off"), "{found}");
        let mut ahead = lease("", 0);
        ahead["spec"]["renewTime"] = json!(super::super::table::stamp(NOW + 31_000));
        let found = shown(clock(NOW, Some(NOW), &[ahead]));
        assert!(found.contains("worker-1 is 30.0 s ahead"), "{found}");
        assert_eq!(clock(NOW, None, &[]).state, State::Unknown);
    }

    #[test]
    fn storage_rights_and_versions() {
        let class = json!({"metadata": {"name": "shared", "annotations": {
            "storageclass.kubernetes.io/is-default-class": "true"}}});
        let claim = json!({"metadata": {"name": "c"}, "status": {"phase": "Bound"},
            "spec": {"accessModes": ["ReadWriteMany"]}});
        let found = storage(Some(std::slice::from_ref(&class)), &[claim]);
        assert_eq!((found.state, found.found.as_str()),
            (State::Ok, "default class shared; ReadWriteMany claims here: c"));
        assert_eq!(storage(Some(&[class]), &[]).state, State::Warning);
        assert_eq!(storage(None, &[]).state, State::Warning);
        assert_eq!(rights(&[true; RIGHTS.len()], "n").state, State::Ok);
        let mut some = [true; RIGHTS.len()];
        some[5] = false;
        let found = shown(rights(&some, "n"));
        assert!(found.contains("delete moejobs (cancel)"), "{found}");
        let version = |minor: &str| {
            let version = json!({"major": "1", "minor": minor, "gitVersion": "v1"});
            server(&version, "https://a", 3).state
        };
        assert_eq!([version("35"), version("30+")], [State::Ok, State::Warning]);
    }
}
