//! What can go wrong between the user and the cluster, in words that say what to do next.

use kube::config::KubeconfigError;
use kube::core::Status;

/// The user's input, or the server's verdict on it.
const EXIT_INPUT: u8 = 2;
/// Try again: the server is away or busy, or a wait took too long.
const EXIT_AGAIN: u8 = 75;
const EXIT_INTERRUPTED: u8 = 130;

#[derive(Debug, thiserror::Error)]
pub enum MoeError {
    #[error("{0}")]
    Input(String),
    #[error("{0}")]
    Failed(String),
    #[error("{0}")]
    TooLate(String),
    #[error("interrupted")]
    Interrupted,
    #[error("the kubeconfig: {}; see `kubectl config view`, or give --kubeconfig and --context",
        once(.0.as_ref()))]
    Kubeconfig(Box<KubeconfigError>),
    #[error("{doing}: no answer of the API server within {seconds} s; try again")]
    Slow { doing: String, seconds: u64 },
    #[error("{doing}: {}", words(.source).0)]
    Api { doing: String, source: Box<kube::Error> },
}

impl MoeError {
    pub fn api(doing: impl Into<String>, source: kube::Error) -> MoeError {
        MoeError::Api { doing: doing.into(), source: Box::new(source) }
    }

    pub fn exit_code(&self) -> u8 {
        match self {
            MoeError::Input(_) | MoeError::Kubeconfig(_) => EXIT_INPUT,
            MoeError::Failed(_) => 1,
            MoeError::TooLate(_) | MoeError::Slow { .. } => EXIT_AGAIN,
            MoeError::Interrupted => EXIT_INTERRUPTED,
            MoeError::Api { source, .. } => words(source).1,
        }
    }

    /// The server knows no such object, or no such kind.
    pub fn is_not_found(&self) -> bool {
        matches!(self, MoeError::Api { source, .. }
            if matches!(&**source, kube::Error::Api(status) if status.code == 404))
    }

    pub fn is_forbidden(&self) -> bool {
        matches!(self, MoeError::Api { source, .. }
            if matches!(&**source, kube::Error::Api(status) if status.code == 403))
    }

    /// A server that is away says nothing about anything else.
    pub fn is_unreachable(&self) -> bool {
        match self {
            MoeError::Slow { .. } => true,
            MoeError::Api { source, .. } => !matches!(&**source, kube::Error::Api(_)),
            _ => false,
        }
    }
}

/// Words and exit code of an error of the client.
fn words(error: &kube::Error) -> (String, u8) {
    match error {
        kube::Error::Api(status) => verdict(status),
        kube::Error::Auth(source) => {
            let why = once(source);
            (format!("the credentials of the kubeconfig cannot be had: {why}"), EXIT_INPUT)
        }
        other => {
            let text = format!(
                "the API server cannot be reached: {}; see `kubectl cluster-info`",
                causes(other)
            );
            (text, EXIT_AGAIN)
        }
    }
}

/// An error and its causes, each once: some of the client's repeat theirs.
fn once(error: &dyn std::error::Error) -> String {
    // A path stands in it within quotes of Rust's, and quotes around those.
    below(error, vec![error.to_string()]).replace("'\"", "'").replace("\"'", "'")
}

/// The causes below the client's own words, each once.
fn causes(error: &dyn std::error::Error) -> String {
    below(error, Vec::new())
}

fn below(error: &dyn std::error::Error, said: Vec<String>) -> String {
    let mut said = said;
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if !said.iter().any(|before| before.contains(&text)) {
            said.push(text);
        }
        next = cause.source();
    }
    if said.is_empty() { error.to_string() } else { said.join(": ") }
}

/// What the server said, field by field where it named fields.
fn verdict(status: &Status) -> (String, u8) {
    let message = status.message.trim();
    let details = status.details.as_ref();
    let name = details.map_or("", |details| details.name.as_str());
    let fields = || {
        let causes = details.map(|details| details.causes.as_slice()).unwrap_or_default();
        let lines = causes.iter().map(|cause| match cause.field.as_str() {
            "" | "<nil>" => format!("\n  {}", cause.message),
            field => format!("\n  {field}: {}", cause.message),
        });
        lines.collect::<String>()
    };
    match (status.code, status.reason.as_str()) {
        (401, _) => {
            let text = "the API server does not know you; log in again, and see `kubectl auth \
                        whoami`";
            (text.to_string(), EXIT_INPUT)
        }
        (403, _) => {
            let text = format!(
                "you may not: {message}; the role edit in the namespace is enough, and `kubectl \
                 moe doctor` says what is missing"
            );
            (text, 1)
        }
        (404, _) if name.is_empty() => {
            let text = "this cluster knows no MoeJobs; install the operator (kubectl apply -k \
                        manifests)";
            (text.to_string(), 1)
        }
        (404, _) => (format!("{message}; `kubectl moe queue --all -A` lists jobs"), 1),
        (409, "AlreadyExists") => (format!("{message}; --update changes it"), 1),
        (409, _) => {
            let text = format!(
                "somebody else set these fields:{}\n  --force-conflicts takes them over",
                fields()
            );
            (text, 1)
        }
        (422, _) if !fields().is_empty() => {
            (format!("the API server refuses the manifest:{}", fields()), EXIT_INPUT)
        }
        (400 | 413 | 415 | 422, _) => {
            (format!("the API server refuses it: {message}"), EXIT_INPUT)
        }
        (429 | 500..=599, _) => {
            (format!("the API server is in trouble: {message}; try again"), EXIT_AGAIN)
        }
        _ => (message.to_string(), 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn said(status: Value) -> String {
        let status: Status = serde_json::from_value(status).expect("a status");
        let error = MoeError::api("submit", kube::Error::Api(Box::new(status)));
        format!("{} {error}", error.exit_code())
    }

    #[test]
    fn refusals_name_each_field() {
        let status = json!({
            "code": 422, "reason": "Invalid", "message": "MoeJob \"a\" is invalid: [...]",
            "details": {"name": "a", "causes": [
                {"field": "spec.nodes", "message": "nodes.min must be at most nodes.max"},
                {"field": "<nil>", "message": "some rules were not checked"},
            ]},
        });
        let expected = "2 submit: the API server refuses the manifest:\n  \
            spec.nodes: nodes.min must be at most nodes.max\n  some rules were not checked";
        assert_eq!(said(status), expected);
        let status = json!({
            "code": 409, "reason": "Conflict", "message": "Apply failed with 1 conflict",
            "details": {"name": "a", "causes": [
                {"field": ".spec.nodes.max", "message": "conflict with \"kubectl\""},
            ]},
        });
        let expected = "1 submit: somebody else set these fields:\n  \
            .spec.nodes.max: conflict with \"kubectl\"\n  --force-conflicts takes them over";
        assert_eq!(said(status), expected);
    }

    #[test]
    fn each_error_says_what_to_do() {
        let status = |code: u16, reason: &str, name: &str| {
            said(json!({"code": code, "reason": reason, "message": "MESSAGE",
                "details": {"name": name}}))
        };
        for (found, code, part) in [
            (status(401, "Unauthorized", ""), "2 ", "log in again"),
            (status(403, "Forbidden", "a"), "1 ", "MESSAGE; the role edit"),
            (status(404, "NotFound", ""), "1 ", "kubectl apply -k manifests"),
            (status(404, "NotFound", "a"), "1 ", "MESSAGE; `kubectl moe queue"),
            (status(409, "AlreadyExists", "a"), "1 ", "MESSAGE; --update"),
            (status(422, "Invalid", "a"), "2 ", "refuses it: MESSAGE"),
            (status(503, "Unavailable", ""), "75 ", "MESSAGE; try again"),
        ] {
            assert!(found.starts_with(code) && found.contains(part), "{found}");
        }
        let away = kube::Error::ReadEvents(std::io::Error::other("no route"));
        let away = MoeError::api("list jobs", away);
        let expected = "list jobs: the API server cannot be reached: no route; \
            see `kubectl cluster-info`";
        assert_eq!((away.to_string().as_str(), away.exit_code()), (expected, 75));
        assert!(away.is_unreachable());
    }
}
