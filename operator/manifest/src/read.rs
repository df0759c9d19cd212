//! A manifest's text -> the spec as typed, and every problem of its shape at once.
//!
//! The tree of `yaml.rs` is walked beside the schema that the API server uses (`crd.rs`). A field
//! with a problem is left out of the typed spec and its path remembered, so that the rules of
//! `job.rs` still see all the rest and say nothing twice.

use crate::crd::{self, FP32_MIN};
use crate::problem::{Code, Problem, nearest, quoted};
use crate::rules::DURATIONS;
use crate::spec::MoeJobSpec;
use crate::synonyms::meant;
use crate::yaml::{self, Entry, Node, Value};
use serde_json::{Map, Value as Json, json};
use std::sync::LazyLock;

pub const API_VERSION: &str = "moejob.dev/v1alpha1";
pub const KIND: &str = "MoeJob";

/// What a file says, as far as it can be read.
#[derive(Clone, Debug, Default)]
pub struct Manifest {
    pub name: Option<String>,
    pub namespace: Option<String>,
    pub spec: MoeJobSpec,
    /// Of the shape alone.
    pub problems: Vec<Problem>,
    /// Paths that a problem stands for; the empty one where the text is no document.
    pub broken: Vec<String>,
    /// All of it but what a problem stands for, as the API server takes it.
    pub json: Json,
    tree: Option<Node>,
}

/// One document beside its schema, whatever it describes.
pub(crate) struct Shaped {
    /// All of it but what a problem stands for.
    pub json: Option<Json>,
    pub problems: Vec<Problem>,
    /// Paths that a problem stands for; the empty one where the text is no document.
    broken: Vec<String>,
    tree: Option<Node>,
}

impl Shaped {
    /// Never fails: what is wrong is in `problems`.
    pub fn read(bytes: &[u8], schema: &Json) -> Shaped {
        let tree = match yaml::parse(bytes) {
            Ok(tree) => tree,
            Err(problems) => {
                return Shaped { json: None, problems, broken: vec![String::new()], tree: None };
            }
        };
        let mut walk = Walk::default();
        let json = walk.value(&tree, schema, "");
        let Walk { problems, broken } = walk;
        Shaped { json, problems, broken, tree: Some(tree) }
    }

    /// Gives each problem its position in the file.
    pub fn locate(&self, problems: Vec<Problem>) -> Vec<Problem> {
        located(self.tree.as_ref(), problems)
    }
}

fn located(tree: Option<&Node>, mut problems: Vec<Problem>) -> Vec<Problem> {
    let Some(tree) = tree else { return problems };
    for problem in &mut problems {
        problem.place = problem.place.or_else(|| Some(tree.place_of(&problem.path)));
    }
    problems
}

impl Manifest {
    /// Reads one document. Never fails: what is wrong is in `problems`.
    pub fn read(bytes: &[u8]) -> Manifest {
        // Made once: it is the same for every file.
        static SCHEMA: LazyLock<Json> = LazyLock::new(root_schema);
        let Shaped { json, problems, broken, tree } = Shaped::read(bytes, &SCHEMA);
        let place = tree.as_ref().map(|tree| tree.place);
        let mut manifest = Manifest { problems, broken, tree, ..Manifest::default() };
        if let Some(mut json) = json {
            manifest.json = json.clone();
            let text = |json: &Json| json.as_str().map(str::to_string);
            manifest.name = text(&json["metadata"]["name"]);
            manifest.namespace = text(&json["metadata"]["namespace"]);
            let spec = match json["spec"].take() {
                Json::Null => json!({}),
                spec => spec,
            };
            match serde_json::from_value(spec) {
                Ok(spec) => manifest.spec = spec,
                // The walk lets nothing pass that the types refuse; a test tries.
                Err(error) => manifest.problems.push(Problem {
                    place,
                    ..Problem::new(Code::WrongKind, "spec")
                        .found(quoted(&error.to_string()))
                        .allowed("the fields of a MoeJob")
                }),
            }
        }
        manifest
    }

    /// Gives each problem its position in the file.
    pub fn locate(&self, problems: Vec<Problem>) -> Vec<Problem> {
        located(self.tree.as_ref(), problems)
    }
}

fn root_schema() -> Json {
    json!({
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": { "type": "string", "enum": [API_VERSION] },
            "kind": { "type": "string", "enum": [KIND] },
            "metadata": {
                "description": "The job's name, and its labels",
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {
                        "description": "The job's name",
                        "type": "string",
                        "maxLength": 253,
                        "minLength": 1,
                    },
                    "namespace": { "type": "string", "maxLength": 63, "minLength": 1 },
                    "labels": labels_schema(63),
                    "annotations": labels_schema(262_144),
                    "uid": { "type": "string" },
                    "resourceVersion": { "type": "string" },
                    "generation": { "type": "integer", "minimum": 0 },
                    "creationTimestamp": { "type": "string" },
                    "finalizers": { "type": "array", "items": { "type": "string" } },
                    "ownerReferences": { "type": "array", "items": free() },
                    "managedFields": { "type": "array", "items": free() },
                },
            },
            "spec": crd::spec_schema(),
            "status": { "x-refused": true },
        },
    })
}

fn labels_schema(length: u32) -> Json {
    let value = json!({ "type": "string", "maxLength": length });
    json!({ "type": "object", "maxProperties": 64, "additionalProperties": value })
}

fn free() -> Json {
    json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// What to do about a number that is out of its range.
const IN_RANGE: &str = "choose a value in that range";
const ONE_OF_THEM: &str = "choose one of them";

#[derive(Default)]
struct Walk {
    problems: Vec<Problem>,
    broken: Vec<String>,
}

impl Walk {
    /// Nothing can be made of what the problem stands for.
    fn refuse<T>(&mut self, problem: Problem) -> Option<T> {
        self.broken.push(problem.path.clone());
        self.problems.push(problem);
        None
    }

    /// The node as JSON; none when it (not a part of it) has a problem.
    fn value(&mut self, node: &Node, schema: &Json, path: &str) -> Option<Json> {
        if schema["x-kubernetes-int-or-string"] == json!(true) {
            return self.number_or_word(node, schema, path);
        }
        match schema["type"].as_str() {
            Some("object") => self.object(node, schema, path),
            Some("array") => self.array(node, schema, path),
            Some("integer") => self.integer(node, schema, path),
            Some("number") => self.number(node, schema, path),
            Some("boolean") => self.boolean(node, path),
            Some("string") => self.string(node, schema, path),
            _ => self.anything(node, path),
        }
    }

    fn wrong_kind<T>(&mut self, node: &Node, allowed: &str, path: &str) -> Option<T> {
        let (found, advice) = match &node.value {
            Value::Scalar { text, plain: true } if is_null(text) => {
                ("nothing".to_string(), "give it a value or delete the line")
            }
            Value::Scalar { text, plain: false } if !allowed.contains("text") => {
                (format!("the text {}", quoted(text)), "write it without quotes")
            }
            Value::Scalar { text, .. } => (quoted(text), "write what is allowed there"),
            Value::List(_) => ("a list".to_string(), "write what is allowed there"),
            Value::Map(_) => ("fields".to_string(), "write what is allowed there"),
        };
        let problem = Problem::new(Code::WrongKind, path).at(node.place).found(found);
        self.refuse(problem.allowed(allowed).advice(advice))
    }

    fn object(&mut self, node: &Node, schema: &Json, path: &str) -> Option<Json> {
        let Value::Map(entries) = &node.value else {
            let known = field_names(schema);
            let allowed = match known.is_empty() {
                true => "fields (`name: value`)".to_string(),
                false => format!("the fields {}", known.join(", ")),
            };
            return self.wrong_kind(node, &allowed, path);
        };
        let mut fields = Map::new();
        for (index, entry) in entries.iter().enumerate() {
            let at = join(path, &entry.key);
            if let Some(first) = entries[..index].iter().find(|other| other.key == entry.key) {
                let found = format!("{} again", quoted(&entry.key));
                let advice = format!("it stands in line {} already", first.place.line);
                let problem =
                    Problem::of(Code::Duplicate, at, found, "each field once", advice);
                self.refuse::<()>(problem.at(entry.place));
                continue;
            }
            if let Some(value) = self.field(entry, schema, path, &at) {
                fields.insert(entry.key.clone(), value);
            }
        }
        self.missing(node, entries, schema, path);
        let most = schema["maxProperties"].as_u64().unwrap_or(u64::MAX);
        if entries.len() as u64 > most {
            let (found, most) = (format!("{} fields", entries.len()), format!("at most {most}"));
            let problem = Problem::of(Code::Length, path, found, most, "delete some");
            self.refuse::<()>(problem.at(node.place));
        }
        Some(Json::Object(fields))
    }

    fn field(&mut self, entry: &Entry, schema: &Json, parent: &str, at: &str) -> Option<Json> {
        let known = &schema["properties"][&entry.key];
        if known["x-refused"] == json!(true) {
            return self.refuse(
                Problem::new(Code::Status, at)
                    .at(entry.place)
                    .found(quoted(&entry.key))
                    .allowed("apiVersion, kind, metadata, spec")
                    .advice("delete it: the operator alone writes the status"),
            );
        }
        if !known.is_null() {
            return self.value(&entry.value, known, at);
        }
        if schema["x-kubernetes-preserve-unknown-fields"] == json!(true) {
            return self.anything(&entry.value, at);
        }
        if !schema["additionalProperties"].is_null() {
            return self.value(&entry.value, &schema["additionalProperties"], at);
        }
        let names = field_names(schema);
        let near = nearest(&entry.key, names.iter().map(String::as_str));
        let advice = match (meant(&entry.key), near) {
            (Some((path, advice)), _) => {
                self.broken.push(format!("spec.{path}"));
                advice
            }
            // The parent may miss what this was meant to be; the one message says it all.
            (None, Some(name)) => {
                self.broken.push(join(parent, name));
                format!("did you mean `{name}`?")
            }
            (None, None) if names.len() == 1 => "use that one".to_string(),
            (None, None) => "delete it".to_string(),
        };
        self.refuse(
            Problem::new(Code::UnknownField, at)
                .at(entry.place)
                .found(format!("the unknown field {}", quoted(&entry.key)))
                .allowed(names.join(", "))
                .advice(advice),
        )
    }

    fn missing(&mut self, node: &Node, entries: &[Entry], schema: &Json, path: &str) {
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Json::as_str) {
            let at = join(path, name);
            if entries.iter().any(|entry| entry.key == name) || self.broken.contains(&at) {
                continue;
            }
            let field = &schema["properties"][name];
            let about = field["description"].as_str().unwrap_or_default();
            let about = about.split(". ").next().unwrap_or_default().replace('\n', " ");
            let about = about.trim_end_matches('.').to_string();
            let (about, advice) = match (field["enum"][0].as_str(), about.is_empty()) {
                (Some(word), _) => (word.to_string(), format!("add `{name}: {word}`")),
                (None, false) => (about, format!("add `{name}`")),
                (None, true) => ("a value".to_string(), format!("add `{name}`")),
            };
            let problem = Problem::new(Code::Missing, at).at(node.place).found("nothing");
            self.refuse::<()>(problem.allowed(about).advice(advice));
        }
    }

    fn array(&mut self, node: &Node, schema: &Json, path: &str) -> Option<Json> {
        let Value::List(items) = &node.value else {
            return self.wrong_kind(node, "a list", path);
        };
        let least = schema["minItems"].as_u64().unwrap_or(0);
        let most = schema["maxItems"].as_u64().unwrap_or(u64::MAX);
        if !(least..=most).contains(&(items.len() as u64)) {
            return self.refuse(
                Problem::new(Code::Length, path)
                    .at(node.place)
                    .found(format!("{} items", items.len()))
                    .allowed(format!("{least} to {most} items"))
                    .advice("add or delete some"),
            );
        }
        let values = items.iter().enumerate();
        let read = values
            .filter_map(|(i, item)| self.value(item, &schema["items"], &format!("{path}[{i}]")));
        Some(Json::Array(read.collect()))
    }

    fn number_or_word(&mut self, node: &Node, schema: &Json, path: &str) -> Option<Json> {
        let listed = schema["enum"].as_array();
        let words = |listed: &Vec<Json>| {
            let words = listed.iter().map(|of| of.as_str().map_or(of.to_string(), str::to_string));
            words.collect::<Vec<_>>().join(", ")
        };
        let allowed = schema["x-kubernetes-validations"][0]["message"].as_str();
        let allowed = allowed.map(str::to_string).or(listed.map(words));
        let allowed = allowed.unwrap_or("a number or a word".to_string());
        let Value::Scalar { text, plain } = &node.value else {
            return self.wrong_kind(node, &allowed, path);
        };
        let number = (*plain && decimal(text)).then(|| text.parse::<i64>().ok()).flatten();
        let known = |number: &i64| match listed {
            Some(listed) => listed.contains(&json!(number)),
            None => (1..=99_999).contains(number),
        };
        match number {
            Some(number) if known(&number) => Some(json!(number)),
            None if text == "auto" => Some(json!(text)),
            _ => self.typed(Code::OutOfRange, node, text, &allowed, "auto is a good choice", path),
        }
    }

    /// The text of something that may be a number, or the problem that it is not.
    fn digits<'n>(&mut self, node: &'n Node, allowed: &str, path: &str) -> Option<&'n str> {
        let text = match &node.value {
            Value::Scalar { text, plain: true } if !is_null(text) => text,
            _ => return self.wrong_kind(node, allowed, path),
        };
        match odd_number(text) {
            None => Some(text),
            Some(advice) => self.typed(Code::Ambiguous, node, text, allowed, &advice, path),
        }
    }

    fn integer(&mut self, node: &Node, schema: &Json, path: &str) -> Option<Json> {
        let listed = schema["enum"].as_array();
        let words = |listed: &Vec<Json>| {
            listed.iter().map(Json::to_string).collect::<Vec<_>>().join(", ")
        };
        let allowed = listed.map_or_else(|| range(schema, "a whole number"), words);
        let text = self.digits(node, &allowed, path)?;
        if !decimal(text) {
            return self.wrong_kind(node, &allowed, path);
        }
        // Beyond 128 bits a number is out of every range.
        let number = text.parse::<i128>().unwrap_or(i128::MAX);
        let least = schema["minimum"].as_f64().unwrap_or(0.0) as i128;
        let most = schema["maximum"].as_f64().unwrap_or(i64::MAX as f64) as i128;
        if !(least..=most).contains(&number) {
            return self.typed(Code::OutOfRange, node, text, &allowed, IN_RANGE, path);
        }
        if listed.is_some_and(|listed| !listed.contains(&json!(number as i64))) {
            return self.typed(Code::OutOfRange, node, text, &allowed, ONE_OF_THEM, path);
        }
        Some(json!(number as i64))
    }

    fn number(&mut self, node: &Node, schema: &Json, path: &str) -> Option<Json> {
        let allowed = range(schema, "a number");
        let text = self.digits(node, &allowed, path)?;
        let digits = text.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '.');
        let letters = text.chars().all(|c| c.is_ascii_digit() || "+-.eE".contains(c));
        let Some(number) = text.parse::<f64>().ok().filter(|_| digits && letters) else {
            return self.wrong_kind(node, &allowed, path);
        };
        let least = schema["minimum"].as_f64().unwrap_or(f64::MIN);
        let most = schema["maximum"].as_f64().unwrap_or(f64::MAX);
        let above = if exclusive(schema, "Minimum") { number > least } else { number >= least };
        let below = if exclusive(schema, "Maximum") { number < most } else { number <= most };
        if !(number.is_finite() && above && below) {
            return self.typed(Code::OutOfRange, node, text, &allowed, IN_RANGE, path);
        }
        if number != 0.0 && number.abs() < FP32_MIN {
            let allowed = format!("{allowed}; above 0 at least {FP32_MIN:e}");
            let advice = "fp32 holds nothing smaller: choose a larger number";
            return self.typed(Code::OutOfRange, node, text, &allowed, advice, path);
        }
        Some(json!(number))
    }

    /// A scalar that is not allowed as it was typed.
    fn typed<T>(
        &mut self,
        code: Code,
        node: &Node,
        text: &str,
        allowed: &str,
        advice: &str,
        path: &str,
    ) -> Option<T> {
        let problem = Problem::of(code, path, quoted(text), allowed, advice);
        self.refuse(problem.at(node.place))
    }

    fn boolean(&mut self, node: &Node, path: &str) -> Option<Json> {
        let allowed = "true or false";
        match &node.value {
            Value::Scalar { text, plain: true } if text == "true" => Some(json!(true)),
            Value::Scalar { text, plain: true } if text == "false" => Some(json!(false)),
            Value::Scalar { text, plain: true } if old_boolean(text) => {
                let advice = "write true or false: other words differ between YAML readers";
                self.typed(Code::Ambiguous, node, text, allowed, advice, path)
            }
            _ => self.wrong_kind(node, allowed, path),
        }
    }

    fn string(&mut self, node: &Node, schema: &Json, path: &str) -> Option<Json> {
        let words: Vec<&str> =
            schema["enum"].as_array().into_iter().flatten().filter_map(Json::as_str).collect();
        let allowed = match words.is_empty() {
            true => "text".to_string(),
            false => words.join(", "),
        };
        let Value::Scalar { text, plain } = &node.value else {
            return self.wrong_kind(node, &allowed, path);
        };
        if *plain && is_null(text) {
            return self.wrong_kind(node, &allowed, path);
        }
        if !words.is_empty() {
            return self.word(node, text, &words, path);
        }
        if *plain && !is_text(text) {
            let of_recovery = path.strip_prefix("spec.recovery.");
            let duration = DURATIONS.iter().any(|(name, _)| of_recovery == Some(name));
            let (allowed, advice) = if duration && decimal(text) {
                ("a duration with its unit", format!("write {text}s, if seconds are meant"))
            } else {
                ("text", format!("YAML readers differ over it: quote it, \"{text}\""))
            };
            return self.typed(Code::Ambiguous, node, text, allowed, &advice, path);
        }
        let least = schema["minLength"].as_u64().unwrap_or(0);
        let most = schema["maxLength"].as_u64().unwrap_or(u64::MAX);
        let length = text.chars().count() as u64;
        if !(least..=most).contains(&length) {
            let allowed = format!("{least} to {most} characters");
            let advice = "choose a text of that length";
            return self.typed(Code::Length, node, text, &allowed, advice, path);
        }
        Some(json!(text))
    }

    fn word(&mut self, node: &Node, text: &str, words: &[&str], path: &str) -> Option<Json> {
        if words.contains(&text) {
            return Some(json!(text));
        }
        let code = match path {
            "apiVersion" | "kind" => Code::Kind,
            _ => Code::NotOneOf,
        };
        let advice = match nearest(text, words.iter().copied()) {
            Some(word) => format!("did you mean `{word}`?"),
            None => "choose one of them".to_string(),
        };
        self.typed(code, node, text, &words.join(", "), &advice, path)
    }

    /// A part without a schema: kept as it is, but for what readers of YAML differ over.
    fn anything(&mut self, node: &Node, path: &str) -> Option<Json> {
        match &node.value {
            Value::Map(_) => self.object(node, &free(), path),
            Value::List(_) => self.array(node, &json!({ "type": "array" }), path),
            Value::Scalar { text, plain: false } => Some(json!(text)),
            Value::Scalar { text, .. } if is_null(text) => Some(Json::Null),
            Value::Scalar { text, .. } if text == "true" => Some(json!(true)),
            Value::Scalar { text, .. } if text == "false" => Some(json!(false)),
            Value::Scalar { text, .. } if decimal(text) => {
                Some(text.parse::<i64>().map_or_else(|_| json!(text), |number| json!(number)))
            }
            Value::Scalar { text, .. } if is_text(text) => Some(json!(text)),
            Value::Scalar { text, .. } => match (odd_number(text), text.parse::<f64>()) {
                (None, Ok(number)) => Some(json!(number)),
                _ => {
                    let advice = format!("YAML readers differ over it: quote it, \"{text}\"");
                    let allowed = "an unambiguous value";
                    self.typed(Code::Ambiguous, node, text, allowed, &advice, path)
                }
            },
        }
    }
}

fn join(path: &str, name: &str) -> String {
    // A name may be anything; the path stays short and printable.
    let name: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    if path.is_empty() { name } else { format!("{path}.{name}") }
}

fn field_names(schema: &Json) -> Vec<String> {
    let fields = schema["properties"].as_object();
    let open = |field: &Json| field["x-refused"] != json!(true);
    fields
        .into_iter()
        .flatten()
        .filter(|(_, field)| open(field))
        .map(|(name, _)| name.clone())
        .collect()
}

fn exclusive(schema: &Json, end: &str) -> bool {
    schema[format!("exclusive{end}")] == json!(true)
}

/// `a whole number, 1 to 4096`.
fn range(schema: &Json, what: &str) -> String {
    let bound = |name: &str| schema[name].as_f64();
    match (bound("minimum"), bound("maximum")) {
        (Some(least), Some(most)) => {
            let above = if exclusive(schema, "Minimum") { "above " } else { "" };
            let below = if exclusive(schema, "Maximum") { "below " } else { "" };
            format!("{what}, {above}{least} to {below}{most}")
        }
        (Some(least), None) => format!("{what}, {least} or more"),
        (None, Some(most)) => format!("{what}, at most {most}"),
        (None, None) => what.to_string(),
    }
}

fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

fn old_boolean(text: &str) -> bool {
    let word = text.to_lowercase();
    matches!(word.as_str(), "true" | "false" | "yes" | "no" | "on" | "off" | "y" | "n")
}

/// A whole number in decimal, without a leading zero or plus.
fn decimal(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let zero = digits.len() > 1 && digits.starts_with('0');
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) && !zero
}

/// Numbers that YAML 1.1 and 1.2 read differently, or that are none: what to write in their place.
fn odd_number(text: &str) -> Option<String> {
    let plain = text.trim_start_matches(['-', '+']);
    let lower = plain.to_lowercase();
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if matches!(lower.as_str(), ".nan" | ".inf") {
        return Some("write a finite number".to_string());
    }
    if lower.len() > 2 && ["0x", "0o", "0b"].iter().any(|prefix| lower.starts_with(prefix)) {
        return Some("write it in decimal".to_string());
    }
    let leading_zero = plain.len() > 1 && plain.starts_with('0') && digits(plain);
    if leading_zero {
        let decimal = plain.trim_start_matches('0');
        let decimal = if decimal.is_empty() { "0" } else { decimal };
        return Some(format!("some readers take it for octal: write {decimal}"));
    }
    if text.starts_with('+') && plain.starts_with(|c: char| c.is_ascii_digit()) {
        return Some(format!("write {plain}"));
    }
    let grouped = plain.contains(['_', ':'])
        && plain.starts_with(|c: char| c.is_ascii_digit())
        && plain.chars().all(|c| c.is_ascii_digit() || "_:.".contains(c));
    grouped.then(|| "write it with digits alone".to_string())
}

/// A plain scalar that every reader takes for text.
fn is_text(text: &str) -> bool {
    // `y` and `n` are truth values to nobody that reads manifests.
    let truth = old_boolean(text) && text.len() > 1;
    let digits = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    let number = odd_number(text).is_some() || (digits && text.parse::<f64>().is_ok());
    !(is_null(text) || truth || number)
}
