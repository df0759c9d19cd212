//! How results are written: `-o json|yaml|wide|name`.

use super::error::MoeError;
use clap::ValueEnum;
use moejob_manifest::problem::printable_lines;
use serde_json::{Value, json};
use std::io::Write;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Json,
    Yaml,
    /// More columns, and reasons in full.
    Wide,
    /// `moejob.moejob.dev/NAME`.
    Name,
}

/// An object in the format that was asked for; none where a person reads.
pub fn value(format: Option<Format>, value: &Value) -> Option<String> {
    match format? {
        Format::Json => Some(serde_json::to_string_pretty(value).unwrap_or_default() + "\n"),
        Format::Yaml => {
            let text = moejob_manifest::yaml::write(value);
            Some(if text.ends_with('\n') { text } else { text + "\n" })
        }
        Format::Name => {
            let items = value["items"].as_array().map(Vec::as_slice);
            let items = items.unwrap_or(std::slice::from_ref(value));
            let name = |item: &Value| {
                let name = item["metadata"]["name"].as_str().or(item["name"].as_str());
                format!("{}\n", name_of(name.unwrap_or_default()))
            };
            Some(items.iter().map(name).collect())
        }
        Format::Wide => None,
    }
}

/// As kubectl names an object.
pub fn name_of(job: &str) -> String {
    format!("moejob.moejob.dev/{job}")
}

/// Objects of the API as `kubectl get -o json` writes more than one.
pub fn list(items: Vec<Value>) -> Value {
    json!({ "apiVersion": "v1", "kind": "List", "metadata": { "resourceVersion": "" },
        "items": items })
}

/// Leaves out what only the next operator and the server read.
pub fn tidy(object: &mut Value) {
    if let Some(meta) = object["metadata"].as_object_mut() {
        meta.remove("managedFields");
    }
}

/// Words for standard error.
pub fn plain(words: &impl std::fmt::Display) -> String {
    printable_lines(&words.to_string())
}

/// Prints for a person: words of jobs, events, pods and logs stand in it, and none of them may move
/// a terminal's cursor.
///
/// # Errors
/// As `print`.
pub fn say(text: &str) -> Result<(), MoeError> {
    print(&printable_lines(text))
}

/// Prints. A reader that has gone away (`| head`) ends the command without a word.
///
/// # Errors
/// `Interrupted` when nobody reads any more.
pub fn print(text: &str) -> Result<(), MoeError> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|_| MoeError::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_those_of_kubectl() {
        let object = json!({"metadata": {"name": "a"}, "spec": {"x": 1}});
        let expected = "metadata:\n  name: a\nspec:\n  x: 1\n";
        assert_eq!(value(Some(Format::Yaml), &object).as_deref(), Some(expected));
        let names = value(Some(Format::Name), &list(vec![object.clone(), object.clone()]));
        assert_eq!(names.as_deref(), Some("moejob.moejob.dev/a\nmoejob.moejob.dev/a\n"));
        assert_eq!(value(Some(Format::Name), &object).as_deref(), Some("moejob.moejob.dev/a\n"));
        let text = value(Some(Format::Json), &object).expect("JSON");
        assert_eq!(serde_json::from_str::<Value>(&text).ok(), Some(object));
        assert_eq!((value(None, &json!(1)), value(Some(Format::Wide), &json!(1))), (None, None));
    }
}
