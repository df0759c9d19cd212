//! Who speaks in a merged log: a worker, and which rank of which attempt it is by now.

use super::job::JobView;
use super::table::short;
use moejob_plan::pods::attempt_and_slot;
use moejob_protocol::report::{Event, StepReport};
use serde_json::json;

#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    /// Metrics and events as JSON.
    pub raw: bool,
    pub prefix: bool,
    pub timestamps: bool,
    /// Whole lines as JSON.
    pub json: bool,
}

#[derive(Clone, Debug)]
pub struct Speaker {
    pod: String,
    node: String,
    /// None before its first attempt, and of a spare.
    rank: Option<u32>,
    attempt: u32,
}

impl Speaker {
    /// A log that is read from its beginning tells who speaks. Of one whose end alone is read the
    /// newest gang tells.
    pub fn new(job: &JobView, pod: &str, node: &str, whole: bool) -> Speaker {
        let members = job.members();
        let place = members.iter().position(|(worker, _)| worker == pod).filter(|_| !whole);
        let first = |place: usize| u32::try_from(place).ok()?.checked_mul(job.ranks_a_worker());
        let rank = place.and_then(first);
        let born = attempt_and_slot(pod).map_or(0, |(attempt, _)| attempt);
        let attempt = if rank.is_some() { job.status.attempt } else { born };
        Speaker { pod: pod.to_string(), node: node.to_string(), rank, attempt }
    }

    /// A worker logs which rank it joins as; survivors do so again for each attempt.
    pub fn hear(&mut self, line: &str) {
        let number = |text: &str| -> Option<u32> {
            text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        };
        if let Some((_, rest)) = line.split_once(" joining as rank ") {
            self.rank = number(rest);
            let attempt = rest.split_once("attempt=").and_then(|(_, rest)| number(rest));
            self.attempt = attempt.unwrap_or(self.attempt);
        } else if let Some((_, rest)) = line.split_once(" spare in attempt ") {
            self.rank = None;
            self.attempt = number(rest).unwrap_or(self.attempt);
        } else if ["{\"step\":", "{\"time\":"].iter().any(|start| line.starts_with(start)) {
            // Metrics and events are rank 0's alone.
            self.rank = Some(0);
        }
    }

    pub fn is_wanted(&self, ranks: &[u32], attempt: Option<u32>) -> bool {
        let of_rank = ranks.is_empty() || self.rank.is_some_and(|rank| ranks.contains(&rank));
        of_rank && attempt.is_none_or(|attempt| attempt == self.attempt)
    }

    /// `[0 lesson-3-a1-0] step 12 ...`, with its newline.
    pub fn say(&self, time: i128, line: &str, style: Style) -> String {
        let stamp = || {
            let time = k8s_openapi::jiff::Timestamp::from_nanosecond(time).unwrap_or_default();
            format!("{time:.6}")
        };
        if style.json {
            let line = json!({
                "time": stamp(), "rank": self.rank, "attempt": self.attempt, "pod": self.pod,
                "node": self.node, "line": line,
            });
            return format!("{line}\n");
        }
        let mut text = String::new();
        if style.timestamps {
            text += &stamp();
            text.push(' ');
        }
        if style.prefix {
            let rank = self.rank.map_or("-".to_string(), |rank| rank.to_string());
            text += &format!("[{rank} {}] ", self.pod);
        }
        let told = if style.raw { None } else { told(line) };
        text += told.as_deref().unwrap_or(line);
        text.push('\n');
        text
    }
}

/// A line of metrics.jsonl or events.jsonl as a person reads it.
fn told(line: &str) -> Option<String> {
    if !line.starts_with('{') {
        return None;
    }
    if let Some(step) = step_of(line) {
        let mut text = format!(
            "step {}  loss {:.4}  {} tokens/s  imbalance {:.2}  ranks {}",
            step.step,
            step.loss,
            short(step.tokens_per_second),
            step.expert_imbalance,
            step.world_size
        );
        if let Some(loss) = step.validation_loss {
            text += &format!("  held-out {loss:.4}");
        }
        return Some(text);
    }
    if let Some(port) = line.strip_prefix("{\"port\":") {
        return Some(format!("listens on port {}", port.trim_end_matches('}')));
    }
    let event: Event = serde_json::from_str(line).ok()?;
    let mut text = format!("{:?} {}", event.event, event.reason);
    if !event.message.is_empty() {
        text += &format!(": {}", event.message);
    }
    Some(text)
}

/// A line of metrics.jsonl.
pub fn step_of(line: &str) -> Option<StepReport> {
    if line.starts_with('{') { serde_json::from_str(line).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::object;
    use super::*;

    fn speaker() -> Speaker {
        let job = JobView::read(&object("a", json!({"phase": "Running"})));
        Speaker::new(&job, "a-a1-3", "worker-1", true)
    }

    const STEP: &str = r#"{"step":12,"loss":2.31456,"auxLoss":1.0,"zLoss":0.0,"gradNorm":1.0,
        "learningRate":0.001,"tokens":6144,"tokensPerSecond":12345.6,"worldSize":2,"attempt":1,
        "expertImbalance":1.234,"validationLoss":2.5,"time":"2026-11-21T17:00:00.000Z"}"#;

    #[test]
    fn a_line_says_which_rank_speaks_by_now() {
        let mut speaker = speaker();
        let style = Style { prefix: true, ..Style::default() };
        assert_eq!(speaker.say(0, "hello", style), "[- a-a1-3] hello\n");
        speaker.hear("2026-11-21T17:00:00.1Z  INFO joining as rank 1 of 2 attempt=1");
        assert_eq!(speaker.say(0, "hello", style), "[1 a-a1-3] hello\n");
        assert!(speaker.is_wanted(&[1, 5], Some(1)) && !speaker.is_wanted(&[0], None));
        speaker.hear("2026-11-21T17:00:09.1Z  INFO joining as rank 0 of 1 attempt=2");
        assert!(speaker.is_wanted(&[0], Some(2)) && !speaker.is_wanted(&[], Some(1)));
        speaker.hear("2026-11-21T17:00:19.1Z  INFO spare in attempt 3 attempt=3");
        assert_eq!((speaker.rank, speaker.attempt), (None, 3));
        speaker.hear(STEP);
        assert_eq!(speaker.rank, Some(0));
    }

    #[test]
    fn metrics_are_told_and_kept_on_demand() {
        let speaker = speaker();
        let line = STEP.replace("\n        ", "");
        let expected =
            "step 12  loss 2.3146  12.3k tokens/s  imbalance 1.23  ranks 2  held-out 2.5000\n";
        assert_eq!(speaker.say(0, &line, Style::default()), expected);
        let raw = Style { raw: true, timestamps: true, ..Style::default() };
        let expected = format!("1970-01-01T00:00:00.000001Z {line}\n");
        assert_eq!(speaker.say(1_000, &line, raw), expected);
        let event = r#"{"time":"2026-11-21T17:00:00.000Z","attempt":1,
            "event":"CheckpointCommitted","reason":"Committed","message":"step-00000050",
            "step":50}"#
            .replace("\n            ", "");
        let expected = "CheckpointCommitted Committed: step-00000050\n";
        assert_eq!(speaker.say(0, &event, Style::default()), expected);
        let json = Style { json: true, ..Style::default() };
        let said = speaker.say(0, "x", json);
        let read: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!((&read["pod"], &read["line"]), (&json!("a-a1-3"), &json!("x")));
        assert_eq!(told("{\"port\":7777}").as_deref(), Some("listens on port 7777"));
        assert_eq!(told("{not json"), None);
    }
}
