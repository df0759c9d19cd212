//! What a pod template may not say: nothing that widens a pod's rights or breaks the training.

use crate::workspace::{CONTAINER, is_reserved};
use crate::problem::{Code, Problem, quoted};
use crate::resources;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::Value;

/// Fields of a pod and of a container that are refused wherever they stand.
const REFUSED: &[(&str, &str)] = &[
    ("hostNetwork", "pods keep to their own network"),
    ("hostPID", "pods keep to their own processes"),
    ("hostIPC", "shared memory is an emptyDir of ours"),
    ("hostPath", "use a claim or a configMap in spec.volumes"),
    ("privileged", "pods pass the `restricted` Pod Security Standard"),
    ("allowPrivilegeEscalation", "pods pass the `restricted` Pod Security Standard"),
    ("capabilities", "pods pass the `restricted` Pod Security Standard"),
    ("procMount", "pods pass the `restricted` Pod Security Standard"),
    ("serviceAccountName", "a worker carries no credentials of the API"),
    ("serviceAccount", "a worker carries no credentials of the API"),
    ("automountServiceAccountToken", "a worker carries no credentials of the API"),
    ("serviceAccountToken", "a worker carries no credentials of the API"),
    ("restartPolicy", "the operator starts pods, never the kubelet"),
    ("activeDeadlineSeconds", "the operator ends the worker"),
    ("nodeName", "the plan chooses nodes"),
    ("priorityClassName", "it is a field of the job: spec.priorityClassName"),
    ("schedulerName", "it is a field of the job: spec.schedulerName"),
    ("hostname", "the operator names pods"),
    ("subdomain", "the operator names pods"),
    ("initContainers", "only the worker's own container runs in a pod"),
    ("ephemeralContainers", "only the worker's own container runs in a pod"),
    ("command", "the operator starts the worker"),
    ("args", "the operator starts the worker"),
    ("lifecycle", "the operator ends the worker"),
    ("livenessProbe", "heartbeats tell whether a worker lives"),
    ("readinessProbe", "heartbeats tell whether a worker lives"),
    ("startupProbe", "heartbeats tell whether a worker lives"),
    ("image", "it is a field of the job: spec.image"),
    ("envFrom", "variables are named one by one, so that none of ours is hidden by another"),
    ("volumeDevices", "use a claim or a configMap in spec.volumes"),
    ("hostPort", "pods keep to their own network"),
    ("seccompProfile", "pods pass the `restricted` Pod Security Standard"),
    ("appArmorProfile", "pods pass the `restricted` Pod Security Standard"),
    ("seLinuxOptions", "pods pass the `restricted` Pod Security Standard"),
    ("windowsOptions", "pods pass the `restricted` Pod Security Standard"),
    ("sysctls", "pods pass the `restricted` Pod Security Standard"),
    ("namespace", "nothing refers to another namespace"),
];

/// Variables that are ours, or that change what a process loads.
const ENV_REFUSED: &[&str] =
    &["NCCL_", "MOE_", "MOEJOB_", "LD_", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"];

/// Sources of volumes that the `restricted` Pod Security Standard admits, and the name.
const VOLUME_FIELDS: &[&str] = &[
    "name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
];

/// An overlay is in every pod of its job, and in the memory of whoever leads it. The longest that
/// is known has some kilobytes.
pub const TEMPLATE_BYTES_MAX: usize = 32 << 10;
/// Problems of one overlay that are told.
const TOLD_MAX: usize = 100;

/// Every problem of the overlay, with paths below `spec.podTemplate`; of a great many the first.
pub fn problems(template: &Value) -> Vec<Problem> {
    let at = "spec.podTemplate";
    let mut problems = Vec::new();
    if template.is_null() {
        return problems;
    }
    let bytes = template.to_string().len();
    if bytes > TEMPLATE_BYTES_MAX {
        let (found, allowed) =
            (format!("{bytes} bytes as JSON"), format!("at most {TEMPLATE_BYTES_MAX}"));
        let advice = "keep data out of it: a pod reads them from a ConfigMap or a volume";
        return vec![Problem::of(Code::Length, at, found, allowed, advice)];
    }
    walk(template, at, &mut problems);
    shape(template, at, &mut problems);
    match serde_json::from_value::<PodTemplateSpec>(template.clone()) {
        Ok(read) => {
            let read = serde_json::to_value(read).unwrap_or_default();
            unknown(template, &read, at, &mut problems);
        }
        Err(error) => problems.push(
            Problem::new(Code::WrongKind, at)
                .found(error.to_string())
                .allowed("the fields metadata and spec of a pod")
                .advice("write it as in a Pod"),
        ),
    }
    let left_out = problems.len().saturating_sub(TOLD_MAX);
    if left_out > 0 {
        problems.truncate(TOLD_MAX);
        let (found, allowed) = (format!("{left_out} more problems"), "the fields of a pod");
        problems.push(Problem::of(Code::Pod, at, found, allowed, "solve those above first"));
    }
    problems
}

fn refused(at: String, found: String, allowed: &str, advice: &str) -> Problem {
    Problem::of(Code::Pod, at, found, allowed, advice)
}

/// What no list of refused names can say: which containers, volumes and mounts there may be.
fn shape(template: &Value, at: &str, problems: &mut Vec<Problem>) {
    for name in template["metadata"].as_object().into_iter().flat_map(|fields| fields.keys()) {
        if !["labels", "annotations"].contains(&name.as_str()) {
            let (at, found) = (format!("{at}.metadata.{name}"), format!("`{name}`"));
            problems.push(refused(at, found, "labels, annotations", "the operator names pods"));
        }
    }
    let spec = &template["spec"];
    for (index, container) in spec["containers"].as_array().into_iter().flatten().enumerate() {
        let at = format!("{at}.spec.containers[{index}]");
        if container["name"].as_str().is_some_and(|name| name != CONTAINER) {
            let found = quoted(container["name"].as_str().unwrap_or_default());
            let advice = "only the worker's own container runs in a pod";
            problems.push(refused(format!("{at}.name"), found, "worker", advice));
        }
        for (index, mount) in container["volumeMounts"].as_array().into_iter().flatten().enumerate()
        {
            let path = mount["mountPath"].as_str().unwrap_or_default();
            if is_reserved(path) || !path.starts_with('/') {
                let at = format!("{at}.volumeMounts[{index}].mountPath");
                let advice = "a place that is neither the system's nor the worker's own";
                problems.push(refused(at, quoted(path), "an absolute path", advice));
            }
        }
    }
    for (index, volume) in spec["volumes"].as_array().into_iter().flatten().enumerate() {
        volume_source(volume, &format!("{at}.spec.volumes[{index}]"), problems);
    }
    let required = "requiredDuringSchedulingIgnoredDuringExecution";
    if !spec["affinity"]["nodeAffinity"][required].is_null() {
        problems.push(refused(
            format!("{at}.spec.affinity.nodeAffinity.{required}"),
            "a required affinity to nodes".to_string(),
            "spec.nodeSelector",
            "the plan chooses nodes; say by a nodeSelector of the overlay which of them it may",
        ));
    }
}

fn volume_source(volume: &Value, at: &str, problems: &mut Vec<Problem>) {
    let name = volume["name"].as_str().unwrap_or_default();
    let counted = name.strip_prefix('v').is_some_and(|rest| rest.parse::<u32>().is_ok());
    if counted || ["workspace", "tmp", "shm", "token"].contains(&name) {
        let advice = "the operator's own volumes have it";
        problems.push(refused(format!("{at}.name"), quoted(name), "another name", advice));
    }
    for source in volume.as_object().into_iter().flat_map(|fields| fields.keys()) {
        // The walk has named these.
        let named = REFUSED.iter().any(|(refused, _)| refused == source);
        if !named && !source.starts_with('$') && !VOLUME_FIELDS.contains(&source.as_str()) {
            problems.push(refused(
                format!("{at}.{source}"),
                format!("a volume of the kind `{source}`"),
                &VOLUME_FIELDS[1..].join(", "),
                "pods pass the `restricted` Pod Security Standard",
            ));
        }
    }
}

/// Fields that a pod does not have: `read` is what was understood of `typed`.
fn unknown(typed: &Value, read: &Value, path: &str, problems: &mut Vec<Problem>) {
    match (typed, read) {
        (Value::Object(fields), _) => {
            for (name, value) in fields {
                let at = format!("{path}.{name}");
                let named = REFUSED.iter().any(|(refused, _)| refused == name);
                let empty = value.as_object().is_some_and(|of| of.is_empty()) || value.is_null();
                match read.get(name) {
                    Some(read) => unknown(value, read, &at, problems),
                    None if named || empty || name.starts_with('$') => {}
                    None => problems.push(
                        Problem::new(Code::UnknownField, at)
                            .found(format!("the unknown field `{name}`"))
                            .allowed("the fields of a pod")
                            .advice("delete it, or write it as in a Pod"),
                    ),
                }
            }
        }
        (Value::Array(items), Value::Array(read)) => {
            for (index, (item, read)) in items.iter().zip(read).enumerate() {
                unknown(item, read, &format!("{path}[{index}]"), problems);
            }
        }
        _ => {}
    }
}

fn walk(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let at = format!("{path}.{name}");
                if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| refused == name) {
                    let found = format!("the field {}", quoted(name));
                    let allowed = "scheduling, env, pull secrets, resources, labels, annotations";
                    problems.push(refused(at, found, allowed, &format!("delete it: {why}")));
                    continue;
                }
                // `$patch: delete` and its like would take away what is ours.
                if name.starts_with('$') {
                    let advice = "delete it: the operator merges the overlay by names";
                    problems.push(refused(at, quoted(name), "fields of a pod", advice));
                    continue;
                }
                match name.as_str() {
                    "env" => env(value, &at, problems),
                    "limits" | "requests" => quantities(value, &at, problems),
                    "runAsUser" | "runAsGroup" if value.as_u64().is_none_or(|id| id == 0) => {
                        problems.push(root(value, at, "a number above 0"));
                    }
                    "runAsNonRoot" if *value != true => problems.push(root(value, at, "true")),
                    "labels" => labels(value, &at, problems),
                    _ => walk(value, &at, problems),
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                walk(item, &format!("{path}[{index}]"), problems);
            }
        }
        _ => {}
    }
}

fn env(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    for (index, entry) in value.as_array().into_iter().flatten().enumerate() {
        walk(entry, &format!("{path}[{index}]"), problems);
        let name = entry["name"].as_str().unwrap_or_default();
        if ENV_REFUSED.iter().any(|refused| name.starts_with(refused)) {
            let at = format!("{path}[{index}].name");
            let (allowed, advice) = match name.ends_with("_VISIBLE_DEVICES") {
                true => (
                    "variables that choose no GPUs",
                    "delete it: the device plugin gives a pod all GPUs of its node",
                ),
                false => (
                    "variables that do not begin with NCCL_, MOE_, MOEJOB_ or LD_",
                    "delete it: the node's profile sets what the network wants",
                ),
            };
            problems.push(refused(at, quoted(name), allowed, advice));
        }
    }
}

fn quantities(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    for (name, quantity) in value.as_object().into_iter().flatten() {
        // A null takes away what the profile asks for.
        if quantity.is_null() {
            continue;
        }
        let text = match quantity {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        if !is_quantity(&text) {
            problems.push(
                Problem::new(Code::Quantity, format!("{path}.{name}"))
                    .found(quoted(&text))
                    .allowed("a quantity such as 500m, 2, 64Gi or 1T")
                    .advice("use one of the suffixes m k M G T P E Ki Mi Gi Ti Pi Ei"),
            );
        }
    }
}

/// A positive quantity as Kubernetes writes it, below 2^63.
pub fn is_quantity(text: &str) -> bool {
    let (digits, suffix) = resources::split(text);
    let bounded = |factor: f64| digits.parse::<f64>().is_ok_and(|number| number * factor < 9.2e18);
    resources::unit(suffix).is_some_and(bounded)
}

fn root(value: &Value, at: String, allowed: &str) -> Problem {
    refused(at, quoted(&value.to_string()), allowed, "pods do not run as root")
}

fn labels(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    for (name, label) in value.as_object().into_iter().flatten() {
        if name.starts_with("moejob.dev/") {
            let advice = "delete it: the operator sets its own labels";
            let at = format!("{path}.{name}");
            problems.push(refused(at, quoted(name), "labels of others", advice));
        }
        if label.as_str().is_none_or(|label| label.len() > 63) {
            problems.push(
                Problem::new(Code::Length, format!("{path}.{name}"))
                    .found(quoted(label.as_str().unwrap_or("no text")))
                    .allowed("text of at most 63 characters")
                    .advice("shorten it, or use an annotation"),
            );
        }
    }
}
