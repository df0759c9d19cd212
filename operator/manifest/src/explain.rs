//! What each field of a manifest means: `moejob explain` and `docs/manifest.md`, from the comments
//! that `kubectl explain` shows, too.

use crate::changes::CHANGEABLE;
use crate::problem::{CODES, nearest};
use crate::spec::Preset;
use crate::synonyms::meant;
use crate::identity::steered_fields;
use crate::{crd, identity, preset, read};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

/// One field of `spec`, by what the definition says of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Without `spec.`; what lies in a list has the list's own path before it.
    pub path: String,
    /// As the definition has it, its lines joined.
    pub text: String,
    /// In words, with its bounds.
    pub kind: String,
    /// What it is when it is not typed; none where the text says it, or nothing.
    pub default: Option<String>,
    /// It must be typed.
    pub required: bool,
    /// `(preset, value)`, where a preset has one.
    pub presets: Vec<(String, String)>,
    pub change: Change,
    /// It has fields of its own.
    pub has_fields: bool,
}

/// When a field may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// While the job is there.
    Always,
    /// The same, upwards.
    Grows,
    /// Between two runs of one folder; on a cluster never.
    BetweenRuns,
    Never,
    /// Its fields differ in it.
    ByField,
}

impl Change {
    pub fn words(self) -> &'static str {
        match self {
            Change::Always => "may change while the job is there",
            Change::Grows => {
                "may grow while the job is there; between runs on one machine it may shrink, too"
            }
            Change::BetweenRuns => {
                "may change between two runs on one machine; on a cluster it is fixed"
            }
            Change::Never => "is fixed once the job has begun",
            Change::ByField => "differs by field",
        }
    }
}

/// All fields, in the order of the definition: what holds others before them.
pub fn fields() -> Vec<Field> {
    let (schema, identity) = (crd::spec_schema(), identity::shared(&identity::defaults()));
    let presets = presets(&schema);
    let mut found = Vec::new();
    walk("", &schema, &identity, &presets, &mut found);
    found
}

/// Every preset's fields of `model`.
fn presets(schema: &Value) -> Vec<(String, Value)> {
    let names = schema["properties"]["model"]["properties"]["preset"]["enum"].as_array();
    let of = |name: &Value| {
        let preset: Preset = serde_json::from_value(name.clone()).ok()?;
        let fields = serde_json::to_value(preset::fields(preset)).ok()?;
        Some((name.as_str()?.to_string(), fields))
    };
    names.into_iter().flatten().filter_map(of).collect()
}

fn walk(
    path: &str,
    schema: &Value,
    identity: &Value,
    presets: &[(String, Value)],
    found: &mut Vec<Field>,
) {
    let is_null = |value: &Value| value.is_null();
    let nothing = Value::Null;
    // The manifest whose defaults are looked at takes these from it.
    let tiny = presets.iter().find(|(name, _)| name == "tiny").map_or(&nothing, |of| &of.1);
    let required: Vec<&str> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let at = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let inner = if field["items"].is_object() { &field["items"] } else { field };
        let has_fields = inner["properties"].is_object();
        let typed = field["default"].clone();
        let of_model = at.strip_prefix("model.");
        let default = match (typed, of_model) {
            // Of a preset's own dimensions nothing is the default.
            (Value::Null, Some(of)) if !has_fields && is_null(&value_at(tiny, of)) => {
                value_at(identity, &at)
            }
            (typed, _) => typed,
        };
        found.push(Field {
            text: field["description"].as_str().unwrap_or_default().to_string(),
            kind: kind(field),
            default: (!default.is_null())
                .then(|| shown(&default))
                .or_else(|| {
                    let told = told_default(field["description"].as_str().unwrap_or_default());
                    told.map(|(default, _)| default)
                }),
            required: required.contains(&name.as_str()),
            presets: of_model.map_or_else(Vec::new, |of_model| {
                let of = |(name, fields): &(String, Value)| {
                    let value = value_at(fields, of_model);
                    (!value.is_null() && !value.is_object()).then(|| (name.clone(), shown(&value)))
                };
                presets.iter().filter_map(of).collect()
            }),
            change: change(&at, has_fields),
            has_fields,
            path: at.clone(),
        });
        walk(&at, inner, identity, presets, found);
    }
}

/// The default that a text tells, and the sentence that tells it.
fn told_default(text: &str) -> Option<(String, String)> {
    let text = joined(text);
    let (begin, before) = ["Default: ", "Default on one machine: "].into_iter().find_map(|of| {
        let told = if of == "Default: " { of.len() } else { "Default ".len() };
        text.find(of).map(|at| (at, at + told))
    })?;
    // A point ends it where a sentence ends: not the one of 0.5.
    let ends = [". ", ".\n"].into_iter().filter_map(|of| text[before..].find(of));
    let end = ends.min().map_or(text.len(), |at| before + at);
    let told = text[before..end].trim_end_matches('.').to_string();
    let sentence = text[begin..(end + 1).min(text.len())].to_string();
    Some((told, sentence))
}

/// Each paragraph in one line.
fn joined(text: &str) -> String {
    let line = |part: &str| part.split_whitespace().collect::<Vec<_>>().join(" ");
    text.split("\n\n").map(line).collect::<Vec<_>>().join("\n\n")
}

fn value_at(value: &Value, path: &str) -> Value {
    path.split('.').fold(value, |value, name| &value[name]).clone()
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// In words: `whole number, 1 to 64`.
fn kind(field: &Value) -> String {
    let list = |all: &[Value]| all.iter().map(shown).collect::<Vec<_>>().join(", ");
    if let Some(words) = field["enum"].as_array() {
        return format!("one of {}", list(words));
    }
    let base = match field["type"].as_str() {
        _ if field["x-kubernetes-int-or-string"] == true => "number or text",
        Some("integer") => "whole number",
        Some("number") => "number",
        Some("boolean") => "true or false",
        Some("string") => "text",
        Some("array") => {
            return match field["items"]["properties"].is_object() {
                true => "list of fields".to_string(),
                false => format!("list: {}", kind(&field["items"])),
            };
        }
        Some("object") if field["additionalProperties"].is_object() => {
            return format!("{} by name", kind(&field["additionalProperties"]));
        }
        _ => "fields",
    };
    let bound = |name: &str| field[name].as_f64().map(|_| shown(&field[name]));
    match (bound("minimum"), bound("maximum")) {
        (Some(least), Some(most)) => format!("{base}, {least} to {most}"),
        (Some(least), None) => format!("{base}, at least {least}"),
        (None, Some(most)) => format!("{base}, at most {most}"),
        (None, None) => base.to_string(),
    }
}

fn change(path: &str, has_fields: bool) -> Change {
    let within = |of: &str| path == of || path.starts_with(&format!("{of}."));
    let holds = |of: &str| of.starts_with(&format!("{path}."));
    if path == "training.steps" {
        return Change::Grows;
    }
    if CHANGEABLE.iter().any(|of| within(of)) {
        return Change::Always;
    }
    let between: Vec<&str> =
        ["training.precision", "training.compute"].into_iter().chain(steered_fields()).collect();
    // A schedule changes as a whole.
    let is_steered = between.iter().any(|of| within(of));
    let differs = CHANGEABLE.iter().any(|of| holds(of)) || between.iter().any(|of| holds(of));
    if has_fields && differs && !is_steered {
        return Change::ByField;
    }
    // What two runs of a folder must share is model, data and training.
    let shared = ["model", "data", "training"].iter().any(|of| within(of));
    match shared && !is_steered {
        true => Change::Never,
        false => Change::BetweenRuns,
    }
}

/// The field of this path, `spec.` before it or not, and those in it.
///
/// # Errors
/// There is none; what was probably meant.
pub fn find<'a>(fields: &'a [Field], typed: &str) -> Result<Vec<&'a Field>, String> {
    let plain = plain(typed);
    if let Some(told) = beside_spec(&plain) {
        return Err(told);
    }
    let level = plain.split('.').count() + usize::from(!plain.is_empty());
    let inside = |path: &str| {
        plain.is_empty() && !path.contains('.')
            || path == plain
            || path.starts_with(&format!("{plain}.")) && path.split('.').count() == level
    };
    let found: Vec<&Field> = fields.iter().filter(|field| inside(&field.path)).collect();
    if !found.is_empty() {
        return Ok(found);
    }
    let last = plain.rsplit('.').next().unwrap_or(&plain);
    let same = fields.iter().filter(|field| field.path.rsplit('.').next() == Some(last));
    let same: Vec<String> = same.map(|field| format!("spec.{}", field.path)).collect();
    if !same.is_empty() {
        return Err(format!("no field spec.{plain}; there is {}", same.join(", ")));
    }
    let near = nearest(&plain, fields.iter().map(|field| field.path.as_str()));
    Err(match (meant(last), near) {
        (Some((_, advice)), _) => format!("no field spec.{plain}; {advice}"),
        (None, Some(near)) => format!("no field spec.{plain}; did you mean spec.{near}?"),
        (None, None) => format!("no field spec.{plain}; `moejob explain` lists the first ones"),
    })
}

/// Explains the code of a refusal, such as E0204. None: `typed` is no code.
fn of_code(typed: &str) -> Option<Result<String, String>> {
    let digits = typed.strip_prefix(['E', 'e']).filter(|digits| digits.len() == 4)?;
    let number: u16 = digits.parse().ok()?;
    let all = CODES.iter().map(|(code, _)| code.to_string());
    let found = CODES.iter().find(|(code, _)| *code as u16 == number);
    Some(match found {
        Some((code, about)) => Ok(format!("{code}: {}\n", wrapped(about, 78, "  ").trim_start())),
        None => Err(format!("no code E{digits}; there is {}", all.collect::<Vec<_>>().join(", "))),
    })
}

/// The answer to `moejob explain FIELD`, or to `moejob explain CODE`.
///
/// # Errors
/// See [`find`].
pub fn explain(typed: &str) -> Result<String, String> {
    if let Some(told) = of_code(typed) {
        return told;
    }
    let fields = fields();
    let found = find(&fields, typed)?;
    let plain = plain(typed);
    let (own, inner): (Vec<&Field>, Vec<&Field>) =
        found.into_iter().partition(|field| field.path == plain);
    let mut text = String::new();
    for field in own {
        let _ = writeln!(text, "spec.{}: {}", field.path, field.facts());
        let _ = writeln!(text, "\n{}", wrapped(&field.text, 78, "  "));
        for (preset, value) in &field.presets {
            let _ = writeln!(text, "  preset {preset}: {value}");
        }
    }
    if !inner.is_empty() {
        let width = inner.iter().map(|field| name(field).len()).max().unwrap_or(0);
        let _ = writeln!(text, "{}fields:", if text.is_empty() { "" } else { "\n" });
        for field in inner {
            let _ = writeln!(text, "  {:<width$}  {}", name(field), field.facts());
        }
    }
    Ok(text)
}

/// The same for tools: the field itself, then those in it.
///
/// # Errors
/// See [`find`].
pub fn json(typed: &str) -> Result<Value, String> {
    let fields = fields();
    let of = |field: &&Field| {
        let presets: BTreeMap<&String, &String> =
            field.presets.iter().map(|(preset, value)| (preset, value)).collect();
        json!({
            "path": format!("spec.{}", field.path),
            "type": field.kind,
            "text": field.text,
            "required": field.required,
            "default": field.default,
            "presets": presets,
            "change": field.change.words(),
        })
    };
    Ok(find(&fields, typed)?.iter().map(of).collect())
}

/// The path that is meant: without `spec.`, the marks of lists, and dots around it.
fn plain(typed: &str) -> String {
    let plain = typed.trim().replace("[]", "");
    let plain = plain.trim_matches('.');
    let inner = plain.strip_prefix("spec.").or((plain == "spec").then_some(""));
    inner.unwrap_or(plain).to_string()
}

/// What stands beside `spec` in a manifest.
fn beside_spec(plain: &str) -> Option<String> {
    let told = match plain.split('.').next().unwrap_or_default() {
        "apiVersion" => format!("it is always {}", read::API_VERSION),
        "kind" => format!("it is always {}", read::KIND),
        "metadata" => "metadata.name is the name of the job, and of its folder: up to 45 of a-z, \
                       0-9 and '-', beginning with a letter. On a cluster metadata.namespace, \
                       labels and annotations are those of any object"
            .to_string(),
        _ => return None,
    };
    Some(format!("{plain} stands beside spec: {told}"))
}

fn name(field: &Field) -> &str {
    field.path.rsplit('.').next().unwrap_or(&field.path)
}

impl Field {
    /// Kind, default and when it may change, in a line.
    fn facts(&self) -> String {
        let facts = self.kind_and_default(self.default.as_deref());
        match self.change {
            Change::ByField => facts,
            change => format!("{facts}; {}", change.words()),
        }
    }

    fn kind_and_default(&self, default: Option<&str>) -> String {
        let mut facts = self.kind.clone();
        if self.required {
            facts.push_str("; must be given");
        }
        match default {
            Some(default) => {
                let _ = write!(facts, "; default {default}");
            }
            None if self.required || self.has_fields => {}
            // What a preset brings along has no other default.
            None if !self.presets.is_empty() => facts.push_str("; must be given without a preset"),
            None => facts.push_str("; default none"),
        }
        facts
    }

    /// Kind and default as the page has them, by the text where that tells a default, and the text
    /// without it.
    fn told_once(&self) -> (String, String) {
        let Some((told, words)) = told_default(&self.text) else {
            return (self.kind_and_default(self.default.as_deref()), self.text.clone());
        };
        let rest = joined(&self.text).replace(&words, "");
        (self.kind_and_default(Some(&told)), rest.trim().to_string())
    }
}

/// Words in lines of at most `width` characters, `indent` before each; empty lines stay.
fn wrapped(text: &str, width: usize, indent: &str) -> String {
    let mut lines = Vec::new();
    for paragraph in text.split("\n\n") {
        let mut line = String::new();
        for word in paragraph.split_whitespace() {
            let long = indent.len() + line.chars().count() + 1 + word.chars().count();
            if !line.is_empty() && long > width {
                lines.push(format!("{indent}{line}"));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        lines.push(format!("{indent}{line}"));
        lines.push(String::new());
    }
    lines.pop();
    lines.join("\n")
}

/// What the page says of a field and of all that is in it, without its own path.
fn signature(fields: &[Field], path: &str) -> Vec<String> {
    let inside = |field: &&Field| field.path == path || within(&field.path, path);
    let of = |field: &Field| {
        let (facts, text) = field.told_once();
        format!("{}|{facts}|{text}|{:?}", &field.path[path.len()..], field.change)
    };
    fields.iter().filter(inside).map(of).collect()
}

fn within(path: &str, holder: &str) -> bool {
    path.strip_prefix(holder).is_some_and(|rest| rest.starts_with('.'))
}

/// Fields that say what one of the same name says: each with the field that holds that one, which
/// is the outermost, or the first of these. What lies in such a field is not among them.
fn repeated(fields: &[Field]) -> Vec<(&Field, &str)> {
    let depth = |path: &str| path.matches('.').count();
    let told: Vec<(&str, Vec<String>)> =
        fields.iter().map(|field| (name(field), signature(fields, &field.path))).collect();
    let mut outermost: BTreeMap<&(&str, Vec<String>), &str> = BTreeMap::new();
    for (field, told) in fields.iter().zip(&told) {
        let of = outermost.entry(told).or_insert(&field.path);
        if depth(&field.path) < depth(of) {
            *of = &field.path;
        }
    }
    let mut found: Vec<(&Field, &str)> = Vec::new();
    for (field, told) in fields.iter().zip(&told) {
        let inside = found.iter().any(|(of, _)| within(&field.path, &of.path));
        let first = outermost[told];
        if !inside && first != field.path {
            found.push((field, first.rsplit_once('.').map_or("", |(holder, _)| holder)));
        }
    }
    found
}

/// When a field may change if it does not say so: as the field that holds it.
fn inherited(fields: &[Field], path: &str) -> Change {
    let mut at = path;
    while let Some((holder, _)) = at.rsplit_once('.') {
        let of = fields.iter().find(|field| field.path == holder);
        match of.map(|field| field.change) {
            Some(Change::ByField) | None => at = holder,
            Some(change) => return change,
        }
    }
    Change::Never
}

/// `docs/manifest.md`: what `explain` says, with nothing twice.
pub fn markdown() -> String {
    let fields = fields();
    let repeated = repeated(&fields);
    let mut text = String::from(
        "# The fields of a manifest\n\n\
         Generated by `moejob explain --markdown`; a test compares the two. `moejob explain \
         training.steps`\nshows one of them.\n\n\
         A manifest has `apiVersion: moejob.dev/v1alpha1`, `kind: MoeJob`, `metadata.name` and \
         `spec`. The\nfields below are those of `spec`, so `training.steps` is\n\n\
         ```yaml\nspec:\n  training:\n    steps: 600\n```\n\n\
         Each begins with its type, its default, and when it may change. Where that is not said, \
         it is so for\nthe field that holds it. Where none says it, a field is fixed once the job \
         has begun: it cannot be\nchanged after the first step; give the job another name. \
         `Presets` lists what a known model, named\nby `model.preset`, brings along.\n\n",
    );
    for top in fields.iter().filter(|field| !field.path.contains('.')) {
        let _ = writeln!(text, "- [`{}`](#{})", top.path, top.path.to_lowercase());
    }
    let is_repeated = |path: &str| {
        repeated.iter().any(|(of, _)| of.path == path || within(path, &of.path))
    };
    for field in fields.iter().filter(|field| !is_repeated(&field.path)) {
        let top = !field.path.contains('.');
        let heading = if top { "##" } else { "###" };
        let title = if top { field.path.clone() } else { format!("`{}`", field.path) };
        let (mut facts, told) = field.told_once();
        if ![Change::ByField, inherited(&fields, &field.path)].contains(&field.change) {
            let _ = write!(facts, "; {}", field.change.words());
        }
        let _ = write!(text, "\n{heading} {title}\n");
        // That it has fields is seen below it.
        if facts != "fields" {
            facts[..1].make_ascii_uppercase();
            let _ = write!(text, "\n{}\n", wrapped(&format!("{facts}."), 100, ""));
        }
        if !told.is_empty() {
            let _ = write!(text, "\n{}\n", wrapped(&told, 100, ""));
        }
        if !field.presets.is_empty() {
            let each = field.presets.iter().map(|(name, value)| format!("{name} {value}"));
            let all = format!("Presets: {}.", each.collect::<Vec<_>>().join(", "));
            let _ = write!(text, "\n{}\n", wrapped(&all, 100, ""));
        }
        let mut elsewhere: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (of, holder) in &repeated {
            if of.path.rsplit_once('.').is_some_and(|(own, _)| own == field.path) {
                elsewhere.entry(holder).or_default().push(format!("`{}`", name(of)));
            }
        }
        for (holder, names) in elsewhere {
            let all = format!("As in `{holder}`: {}.", names.join(", "));
            let _ = write!(text, "\n{}\n", wrapped(&all, 100, ""));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_says_what_it_is() {
        let fields = fields();
        assert!(fields.len() > 80, "{}", fields.len());
        let mut lacking = Vec::new();
        for field in &fields {
            let told = !field.text.is_empty() && !field.kind.is_empty();
            // What a job has that does not type it.
            let facts = field.facts();
            let known = ["; default ", "; must be given"].iter().any(|of| facts.contains(of));
            let untold = field.text.contains("Default") && !facts.contains("default ");
            if !told || !(known || field.has_fields) || untold {
                lacking.push(format!("{}: {}; {:?}", field.path, field.kind, field.text));
            }
        }
        assert!(lacking.is_empty(), "no text, or no default:\n{}", lacking.join("\n"));
    }

    #[test]
    fn a_code_says_what_it_stands_for_and_a_word_of_others_which_field_it_is() {
        let batch = explain("E0204").expect("a code");
        assert!(batch.starts_with("E0204: Steps, batches"), "{batch}");
        let none = explain("e0999").expect_err("no code");
        assert!(none.starts_with("no code E0999; there is E0001, E0002"), "{none}");
        // The enum beside the list has as many.
        let source = include_str!("problem.rs");
        let variants = source.lines().filter(|line| {
            line.trim_end_matches(',').split_once(" = ").is_some_and(|(name, number)| {
                name.starts_with("    ") && number.parse::<u16>().is_ok()
            })
        });
        assert_eq!(variants.count(), CODES.len());
        assert!(CODES.is_sorted_by_key(|(code, _)| *code as u16));
        let rate = explain("lr").expect_err("no field");
        let expected = "no field spec.lr; here it is spec.training.optimizer.adamw.learningRate";
        assert_eq!(rate, expected);
    }

    #[test]
    fn a_field_says_type_default_and_when_it_may_change() {
        let steps = explain("spec.training.steps").expect("a field");
        assert!(steps.starts_with("spec.training.steps: whole number, 1 to "), "{steps}");
        assert!(steps.contains("must be given; may grow while the job is there"), "{steps}");
        let hidden = explain("model.hiddenSize").expect("a field");
        assert!(!hidden.contains("default"), "{hidden}");
        assert!(hidden.contains("preset mixtral-8x7b: 4096"), "{hidden}");
        assert!(hidden.contains("is fixed once the job has begun"), "{hidden}");
        let keep = explain("checkpoint.keep").expect("a field");
        assert!(keep.contains("default 3; may change while the job is there"), "{keep}");
        let precision = explain("training.precision").expect("a field");
        assert!(precision.contains("between two runs on one machine"), "{precision}");
        for (path, facts) in [
            ("data.train.jsonl.field", "text; default text; is fixed"),
            ("data.train.mixture[].jsonl.field", "text; default text; is fixed"),
            ("model.router.topP", "; default 0.4; "),
            ("training.schedule.cosine.minLearningRate", "; default a tenth of the peak; "),
            ("recovery.growthInterval", "; default 60s, on one machine 2s; "),
            ("checkpoint.location", "; default on one machine: DIR/NAME/checkpoints; "),
            ("image", "; default none; "),
            ("model.hiddenSize", "; must be given without a preset; "),
        ] {
            let told = explain(path).expect("a field");
            assert!(told.contains(facts), "{path}: {told}");
        }
        let whole = explain("training").expect("fields");
        assert!(whole.contains("\nfields:\n") && whole.contains("  maxGradNorm "), "{whole}");
        assert!(explain("").expect("fields").contains("\n  training"), "the first ones");
    }

    #[test]
    fn what_is_no_field_is_answered_by_what_was_meant() {
        let refused = |typed| explain(typed).expect_err("is no field");
        assert!(refused("steps").contains("spec.training.steps"), "{}", refused("steps"));
        assert!(refused("traning.steps").contains("spec.training.steps"));
        assert!(refused("checkpoint.everyStep").contains("checkpoint.everySteps"));
        assert!(refused("banana").contains("`moejob explain`"));
        assert!(refused("spectrum").starts_with("no field spec.spectrum"), "no letter is lost");
        assert!(refused("metadata.name").contains("the name of the job"));
        assert!(refused("kind").contains("it is always MoeJob"));
        for typed in ["training.steps.", ".training.steps", " spec.training.steps "] {
            assert!(explain(typed).is_ok(), "{typed}");
        }
        let found = json("data.train.mixture").expect("fields");
        let list = found.as_array().expect("a list");
        assert_eq!(list[0]["path"], "spec.data.train.mixture");
        assert!(list.iter().any(|of| of["path"] == "spec.data.train.mixture.weight"), "{found}");
    }

    #[test]
    fn the_page_has_every_field_within_its_columns_and_none_twice() {
        let page = markdown();
        let fields = fields();
        let again = repeated(&fields);
        for field in &fields {
            let told = page.contains(&format!("{}`\n", field.path))
                || page.contains(&format!("\n## {}\n", field.path));
            let elsewhere = again.iter().any(|(of, _)| {
                of.path == field.path || within(&field.path, &of.path)
            });
            assert!(told != elsewhere, "{}: {told}, {elsewhere}", field.path);
        }
        let sources = "As in `data.train`: `jsonl`, `megatron`, `parquet`, `text`, `tokens`.\n";
        assert_eq!(page.matches(sources).count(), 2);
        let rate = "`model.router.capacityFactor`\n\nNumber, -64 to 64; default 0; 1.25 with \
                    switch, 1 with gshard and tutel.\n";
        assert!(page.contains(rate), "{page}");
        let long = page.lines().find(|line| line.chars().count() > 100);
        assert_eq!(long, None);
    }
}
