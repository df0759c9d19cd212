//! What travelled between the ranks of a bench, beside what is expected of their links.

use super::links::fitting;
use crate::cli::progress::gigabytes;
use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_plan::traffic::{self, Expected};
use moejob_protocol::communication::{CommunicationReport, Verb};
use moejob_protocol::layout::Layout;
use serde_json::{Value, json};

/// One of so many steps of a bench is looked at.
pub const LOOK_EACH: u64 = 4;

/// Of rank 0.
#[derive(Debug, Default)]
pub struct Travels {
    /// The look of them whose exposed time is the median.
    median: Option<CommunicationReport>,
    /// By a profile that is named after the GPUs; nothing where there is none.
    expected: Vec<Expected>,
}

impl Travels {
    /// What was looked at, on devices of this name.
    pub fn new(
        mut looks: Vec<CommunicationReport>,
        (job, layout): (&Job, &Layout),
        device: &str,
    ) -> Travels {
        looks.sort_by(|a, b| a.exposed_seconds.total_cmp(&b.exposed_seconds));
        let middle = looks.len() / 2;
        let median = looks.into_iter().nth(middle);
        let expected = fitting(Profiles::shipped(), &[device.to_string()]).map(|profile| {
            let mut job = job.clone();
            job.profile.links.clone_from(&profile.links);
            traffic::expected(&job, layout)
        });
        Travels { median, expected: expected.unwrap_or_default() }
    }

    /// Lines of a name and what stands beside it; none of one rank.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let Some(median) = &self.median else { return Vec::new() };
        let exposed = format!(
            "{:.2} ms a step wait for what travels, {:.1}% of it (a step of those looked at)",
            median.exposed_seconds * 1e3,
            median.exposed_share * 100.0
        );
        let mut lines = vec![("exposed", exposed)];
        for (verb, of) in Verb::ALL.iter().filter_map(|verb| {
            Some((verb, median.verbs.get(verb.name())?))
        }) {
            let rate = of.bytes_per_second().map_or(String::new(), |rate| {
                format!(": {}", gigabytes(rate))
            });
            let expected = self.expected_of(*verb).and_then(Expected::bytes_per_second);
            let expected = expected.map_or(String::new(), |rate| {
                format!(" of {} expected", gigabytes(rate))
            });
            let beside = if of.beside { ", beside the ops" } else { "" };
            let (ms, mib) = (of.seconds * 1e3, of.bytes as f64 / f64::from(1 << 20));
            let (verb, link) = (verb.name(), &of.link);
            let sent = format!("{verb:<14}{ms:.2} ms, {mib:.1} MiB by {link}");
            lines.push(("", sent + &rate + &expected + beside));
        }
        lines
    }

    fn expected_of(&self, verb: Verb) -> Option<&Expected> {
        self.expected.iter().find(|of| of.verb == verb)
    }

    pub fn json(&self) -> Value {
        json!({ "measured": self.median, "expected": self.expected })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::communication::{Link, VerbReport};

    #[test]
    fn verbs_stand_beside_what_is_expected() {
        let verb = |seconds, beside| {
            VerbReport { link: "nccl".into(), bytes: 1 << 30, seconds, beside }
        };
        let verbs = [
            ("allGather".to_string(), verb(0.01, true)),
            ("dispatch".to_string(), verb(0.005, false)),
        ];
        let median = CommunicationReport {
            exposed_seconds: 0.006,
            exposed_share: 0.03,
            verbs: verbs.into(),
            ..CommunicationReport::default()
        };
        let (verb, link, bytes) = (Verb::Dispatch, Link::Nccl, 1 << 30);
        let (seconds, exposed_seconds) = (Some(0.0044), None);
        let beside = false;
        let expected = vec![Expected { verb, link, bytes, seconds, exposed_seconds, beside }];
        let told = Travels { median: Some(median), expected }.lines();
        let expected = [
            ("exposed", "6.00 ms a step wait for what travels, 3.0% of it (a step of those looked \
                         at)"),
            ("", "dispatch      5.00 ms, 1024.0 MiB by nccl: 215 GB/s of 244 GB/s expected"),
            ("", "allGather     10.00 ms, 1024.0 MiB by nccl: 107 GB/s, beside the ops"),
        ];
        assert_eq!(told, expected.map(|(name, text)| (name, text.to_string())));
        assert!(Travels::default().lines().is_empty());
    }

    #[test]
    fn the_middle_look_is_told() {
        let look = |exposed_seconds| {
            CommunicationReport { exposed_seconds, ..CommunicationReport::default() }
        };
        let job = moejob_manifest::identity::least();
        let layout = moejob_plan::placement::layout(1, 1);
        let told = |looks: &[f64]| {
            let looks = looks.iter().copied().map(look).collect();
            Travels::new(looks, (&job, &layout), "none").median.map(|of| of.exposed_seconds)
        };
        assert_eq!(told(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(told(&[]), None);
    }
}
