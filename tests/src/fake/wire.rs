//! What comes over the wire: requests, what they are for, and objects as JSON.

use serde_json::{Value, json};
use std::collections::HashMap;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::TcpStream;

/// More than any request of an operator.
const REQUEST_BYTES_MAX: usize = 4 << 20;

/// What is asked for, as its path says.
#[derive(Clone, Debug, Default)]
pub struct Target {
    pub resource: String,
    pub namespace: String,
    pub name: String,
    pub subresource: String,
}

pub struct Request {
    pub method: String,
    pub path: String,
    pub query: HashMap<String, String>,
    pub who: String,
    pub body: Value,
}

pub type Answer = (u16, Value);

impl Target {
    /// `/api/v1/...` or `/apis/GROUP/VERSION/...`.
    pub fn of(path: &str) -> Option<Target> {
        let words: Vec<&str> = path.split('/').filter(|word| !word.is_empty()).collect();
        let rest = match words.first()? {
            &"api" => words.get(2..)?,
            &"apis" => words.get(3..)?,
            _ => return None,
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (*namespace, rest),
            rest => ("", rest),
        };
        let word = |at: usize| rest.get(at).copied().unwrap_or_default().to_string();
        let (resource, name, subresource) = (word(0), word(1), word(2));
        Some(Target { resource, namespace: namespace.to_string(), name, subresource })
    }
}

pub fn key_of(object: &Value) -> (String, String) {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_string();
    (text("namespace"), text("name"))
}

pub fn version_of(object: &Value) -> u64 {
    let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
    version.parse().unwrap_or(0)
}

pub fn with(mut object: Value, field: &str, value: Value) -> Value {
    object[field] = value;
    object
}

/// As `application/merge-patch+json`.
pub fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else { return *target = patch.clone() };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in fields {
        match value {
            Value::Null => drop(target.as_object_mut().map(|of| of.remove(name))),
            value => merge(&mut target[name], value),
        }
    }
}

pub fn failure(code: u16, reason: &str, message: &str) -> Answer {
    (code, json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message, "reason": reason, "code": code }))
}

pub async fn read(stream: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut first = String::new();
    if stream.read_line(&mut first).await.ok()? == 0 {
        return None;
    }
    let (mut length, mut who) = (0, String::new());
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.ok()?;
        let line = line.trim_end();
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':')?;
        match name.to_lowercase().as_str() {
            "content-length" => length = value.trim().parse().ok()?,
            "authorization" => who = value.trim().trim_start_matches("Bearer ").to_string(),
            _ => {}
        }
    }
    let mut body = vec![0; Some(length).filter(|of| *of <= REQUEST_BYTES_MAX)?];
    stream.read_exact(&mut body).await.ok()?;
    let mut words = first.split_whitespace();
    let (method, target) = (words.next()?.to_string(), words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    Some(Request {
        method,
        path: path.to_string(),
        query: pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect(),
        who,
        body: serde_json::from_slice(&body).unwrap_or_default(),
    })
}
