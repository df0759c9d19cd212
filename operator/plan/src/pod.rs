//! What a pod template may not say: nothing that widens a pod's rights or breaks the training.

use crate::problem::{Code, Problem, quoted};
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
    ("restartPolicy", "the operator starts pods, never the kubelet"),
    ("nodeName", "the plan chooses nodes"),
    ("hostname", "the operator names pods"),
    ("subdomain", "the operator names pods"),
    ("initContainers", "only the worker's own container runs in a pod"),
    ("ephemeralContainers", "only the worker's own container runs in a pod"),
    ("command", "the operator starts the worker"),
    ("args", "the operator starts the worker"),
    ("lifecycle", "the operator ends the worker"),
    ("livenessProbe", "heartbeats tell whether a worker lives"),
    ("readinessProbe", "heartbeats tell whether a worker lives"),
    ("namespace", "nothing refers to another namespace"),
];

/// Variables that are ours, or that change what a process loads.
const ENV_REFUSED: &[&str] = &["NCCL_", "MOE_", "MOEJOB_", "LD_", "CUDA_VISIBLE_DEVICES"];

/// Every problem of the overlay, with paths below `spec.podTemplate`.
pub fn problems(template: &Value) -> Vec<Problem> {
    let mut problems = Vec::new();
    walk(template, "spec.podTemplate", &mut problems);
    problems
}

fn walk(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let at = format!("{path}.{name}");
                if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| refused == name) {
                    problems.push(
                        Problem::new(Code::Pod, at)
                            .found(format!("the field {}", quoted(name)))
                            .allowed(
                                "scheduling, env, pull secrets, resources, labels, annotations",
                            )
                            .advice(format!("delete it: {why}")),
                    );
                    continue;
                }
                match name.as_str() {
                    "env" => env(value, &at, problems),
                    "limits" | "requests" => quantities(value, &at, problems),
                    "runAsUser" | "runAsGroup" => not_root(value, &at, problems),
                    "runAsNonRoot" => non_root(value, &at, problems),
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
        let name = entry["name"].as_str().unwrap_or_default();
        if ENV_REFUSED.iter().any(|refused| name.starts_with(refused)) {
            problems.push(
                Problem::new(Code::Pod, format!("{path}[{index}].name"))
                    .found(quoted(name))
                    .allowed("variables that do not begin with NCCL_, MOE_, MOEJOB_ or LD_")
                    .advice("delete it: the node's profile sets what the network wants"),
            );
        }
    }
}

fn quantities(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    for (name, quantity) in value.as_object().into_iter().flatten() {
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
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, suffix) = text.split_at(end);
    let factor = match suffix {
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 2f64.powi(10),
        "Mi" => 2f64.powi(20),
        "Gi" => 2f64.powi(30),
        "Ti" => 2f64.powi(40),
        "Pi" => 2f64.powi(50),
        "Ei" => 2f64.powi(60),
        _ => return false,
    };
    digits.parse::<f64>().is_ok_and(|number| number * factor < 9.2e18)
}

fn not_root(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    if value.as_u64().is_none_or(|id| id == 0) {
        problems.push(
            Problem::new(Code::Pod, path)
                .found(quoted(&value.to_string()))
                .allowed("a number above 0")
                .advice("pods do not run as root"),
        );
    }
}

fn non_root(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    if value.as_bool() != Some(true) {
        problems.push(
            Problem::new(Code::Pod, path)
                .found(quoted(&value.to_string()))
                .allowed("true")
                .advice("pods do not run as root"),
        );
    }
}

fn labels(value: &Value, path: &str, problems: &mut Vec<Problem>) {
    for (name, label) in value.as_object().into_iter().flatten() {
        if name.starts_with("moejob.dev/") {
            problems.push(
                Problem::new(Code::Pod, format!("{path}.{name}"))
                    .found(quoted(name))
                    .allowed("labels of others")
                    .advice("delete it: the operator sets its own labels"),
            );
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
