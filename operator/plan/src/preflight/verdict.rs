//! What was measured against what the profile expects.

use moejob_manifest::profile::Limit;
use moejob_protocol::preflight::{Grade, Measured, Value};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    pub check: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub of: String,
    pub grade: Grade,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<Limit>,
    /// For a person.
    pub text: String,
    /// What Azure's own checks call it, for who files it there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<&'static str>,
}

impl Outcome {
    /// The grade, and within it how far the value is below its limit.
    pub(super) fn badness(&self) -> f64 {
        let grade = match self.grade {
            Grade::Good => 0.0,
            Grade::Unknown => 2.0,
            Grade::Warn => 4.0,
            Grade::Fail => 6.0,
        };
        let below = match (self.value, self.limit) {
            (Some(value), Some(limit)) if limit.fail > 0.0 => 1.0 - value / limit.fail,
            // What has no number is as bad as nothing at all.
            _ => 1.0,
        };
        grade + below.clamp(-1.0, 1.0)
    }
}

/// Each measurement against the profile's limits. A check of the profile that nobody measured is
/// told as unknown: a missing check is never silent.
pub fn judge(expect: &BTreeMap<String, Limit>, measured: &[Measured]) -> Vec<Outcome> {
    let mut outcomes: Vec<Outcome> = measured.iter().map(|one| outcome(expect, one)).collect();
    for (check, limit) in expect {
        if !measured.iter().any(|one| one.check == *check) {
            let value = Value::Unmeasured("nobody measured it".to_string());
            let one = Measured { check: check.clone(), of: String::new(), value };
            outcomes.push(Outcome { limit: Some(*limit), ..outcome(expect, &one) });
        }
    }
    outcomes
}

fn outcome(expect: &BTreeMap<String, Limit>, one: &Measured) -> Outcome {
    let limit = expect.get(&one.check).copied();
    let unit = unit(&one.check);
    let (grade, value, text) = match (&one.value, limit) {
        (Value::Number(value), _) if !value.is_finite() || *value < 0.0 => {
            (Grade::Fail, None, format!("{value} is no measurement"))
        }
        (Value::Number(value), None) => {
            (Grade::Good, Some(*value), format!("{value:.1} {unit}; the profile has no limit"))
        }
        (Value::Number(value), Some(Limit { fail, warn })) => {
            let (grade, than) = match *value {
                value if value < fail => (Grade::Fail, format!("below {fail}")),
                value if value < warn => (Grade::Warn, format!("below {warn:.1}")),
                _ => (Grade::Good, format!("at least {fail}")),
            };
            (grade, Some(*value), format!("{value:.1} {unit}, {than}"))
        }
        (Value::Fine(text), _) => (Grade::Good, None, text.clone()),
        (Value::Wrong { grade, what }, _) => (*grade, None, what.clone()),
        (Value::Unmeasured(why), _) => (Grade::Unknown, None, format!("not measured: {why}")),
    };
    let is_trouble = grade > Grade::Unknown;
    Outcome {
        check: one.check.clone(),
        of: one.of.clone(),
        grade,
        value,
        limit: limit.filter(|_| value.is_some()),
        text,
        code: is_trouble.then(|| nhc(&one.check)).flatten(),
    }
}

/// GB/s or Gb/s, by the end of the name.
fn unit(check: &str) -> &'static str {
    if check.ends_with("Gbps") { "Gb/s" } else { "GB/s" }
}

/// The fault code of Azure's node health checks (its script that maps codes to the impact
/// categories of Guest Health Reporting, read in November 2026); none where the fault is not the
/// hardware's.
pub fn nhc(check: &str) -> Option<&'static str> {
    Some(match check {
        // A generic failure: Azure has no code of its own for copies over PCI.
        "hostToDeviceGBps" | "deviceToHostGBps" => "NHC2001",
        // Cards are missing; they are slow; a port is down.
        "cards" => "NHC2002",
        "ibLoopbackGBps" | "gpuDirectWriteGbps" | "pairAllReduceGBps" | "rates"
        | "transport" => "NHC2003",
        "links" => "NHC2004",
        "gpus" => "NHC2009",
        // Double bit errors, NVLink, heat.
        "ecc" => "NHC2014",
        "peerReadGBps" | "allReduceGBps" | "plainAllReduceGBps" => "NHC2016",
        "clocks" | "even" | "deviceCopyGBps" => "NHC2017",
        "hostCopyGBps" => "NHC2022",
        _ => return None,
    })
}
