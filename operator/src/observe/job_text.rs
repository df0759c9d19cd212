//! A MoeJob as it waits to be looked at: spec and status as the text that they came as. Their
//! values take up to thirty times as much memory, and most jobs are looked at once.

use super::{JobSeen, Owner};
use serde_json::Value;

#[derive(Debug)]
pub struct JobText {
    /// Without spec and status.
    facts: JobSeen,
    spec: Box<str>,
    status: Box<str>,
}

impl JobText {
    pub fn of(seen: JobSeen) -> JobText {
        let (spec, status) = (seen.spec.to_string(), seen.status.to_string());
        let facts = JobSeen { spec: Value::Null, status: Value::Null, ..seen };
        JobText { facts, spec: spec.into(), status: status.into() }
    }

    /// Name, uid, versions; spec and status are not there.
    pub fn facts(&self) -> &JobSeen {
        &self.facts
    }

    pub fn owner(&self) -> Owner {
        self.facts.owner()
    }

    /// All of it.
    pub fn seen(&self) -> JobSeen {
        // It was a value when it came.
        let value = |text: &str| serde_json::from_str(text).unwrap_or_default();
        JobSeen { spec: value(&self.spec), status: value(&self.status), ..self.facts.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_job_comes_out_as_it_went_in_and_takes_the_bytes_of_its_text() {
        let zeros: Value = vec![0; 30_000].into();
        let seen = JobSeen {
            name: "a".into(),
            uid: "u".into(),
            generation: 3,
            spec: json!({ "podTemplate": zeros, "x": [1.5, null, "\u{e9}"] }),
            status: json!({ "record": "{\"v\":1}" }),
            ..JobSeen::default()
        };
        let text = JobText::of(seen.clone());
        assert_eq!(text.seen(), seen);
        assert!(text.facts().spec.is_null() && text.facts().status.is_null());
        assert!(text.spec.len() < 61_000, "{} bytes", text.spec.len());
        assert_eq!(&*text.owner(), "u@");
    }
}
