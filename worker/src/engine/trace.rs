//! A few steps as Chrome's trace events, which Perfetto and chrome://tracing show.
//!
//! ```text
//! skipped steps -> marks are kept for some -> spans -> FILE: a row of the host, one of the device
//! ```

use moejob_kernels::{Device, Span};
use serde_json::{Value, json};
use std::io;
use std::path::PathBuf;

/// Steps before the traced ones: the first ones load what the later ones have.
pub const STEPS_SKIPPED: u64 = 3;
/// Steps that are traced.
pub const STEPS_TRACED: u64 = 3;

/// What is traced, and how far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    file: PathBuf,
    rank: u32,
    /// The traced ones, counted from the next step on.
    steps: std::ops::Range<u64>,
    begun: u64,
}

impl Trace {
    pub fn new(file: PathBuf, rank: u32, skipped: u64) -> Trace {
        Trace { file, rank, steps: skipped..skipped + STEPS_TRACED, begun: 0 }
    }

    /// A step begins.
    pub(crate) fn begin(&mut self, device: &mut Device) {
        if self.begun == self.steps.start {
            device.keep_marks();
        }
        self.begun += 1;
    }

    /// Whether a step was the last one.
    pub(crate) fn is_over(&self) -> bool {
        self.begun == self.steps.end
    }

    /// Writes the file.
    ///
    /// # Errors
    /// It cannot be written, or the device failed.
    pub(crate) fn write(&self, device: &mut Device) -> io::Result<()> {
        let spans = device.spans().map_err(io::Error::other)?;
        std::fs::write(&self.file, events(&spans, self.rank).to_string())
    }
}

const HOST: u32 = 0;
const DEVICE: u32 = 1;

/// Times of events are in microseconds.
fn events(spans: &[Span], rank: u32) -> Value {
    let named = |name: &str, thread: u32, value: &str| {
        json!({
            "name": name, "ph": "M", "pid": rank, "tid": thread, "args": { "name": value },
        })
    };
    let mut all = vec![
        named("process_name", HOST, &format!("rank {rank}")),
        named("thread_name", HOST, "host (enqueues)"),
        named("thread_name", DEVICE, "device"),
    ];
    let host = row(spans, |span| (span.host_start, span.host_milliseconds));
    let device = row(spans, |span| (span.start, span.milliseconds));
    for (at, span) in spans.iter().enumerate() {
        for (thread, (start, length)) in [(HOST, host[at]), (DEVICE, device[at])] {
            let mut event = json!({
                "name": span.name,
                "ph": "X",
                "pid": rank,
                "tid": thread,
                "ts": start as f64 / 1e3,
                "dur": length as f64 / 1e3,
            });
            if let Some(layer) = span.layer {
                event["args"] = json!({ "layer": layer });
            }
            all.push(event);
        }
    }
    json!({ "traceEvents": all, "displayTimeUnit": "ms" })
}

/// Begin and length of each span in nanoseconds. A GPU tells times in single precision, by which a
/// span may end behind the next one's begin; viewers would show the two as one within the other.
/// They round down begins and lengths, each by itself, so a nanosecond is left between spans.
fn row(spans: &[Span], of: impl Fn(&Span) -> (f64, f64)) -> Vec<(u64, u64)> {
    let nanoseconds = |milliseconds: f64| (milliseconds * 1e6).round() as u64;
    let mut begin = 0;
    let begins: Vec<u64> = (spans.iter())
        .map(|span| {
            begin = nanoseconds(of(span).0).max(begin);
            begin
        })
        .collect();
    let length = |(at, span): (usize, &Span)| {
        let (start, milliseconds) = of(span);
        let next = begins.get(at + 1).copied().unwrap_or(u64::MAX);
        let end = nanoseconds(start + milliseconds).min(next);
        (begins[at], end.saturating_sub(begins[at] + 1))
    };
    spans.iter().enumerate().map(length).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a GPU tells them: the second begins before the first ended, the third before the second.
    #[test]
    fn spans_of_a_row_do_not_overlap() {
        let span = |start: f64, milliseconds: f64| Span {
            name: "norm",
            layer: None,
            start,
            milliseconds,
            host_start: 0.0,
            host_milliseconds: 0.0,
        };
        let spans = [span(0.0, 1.0004), span(1.0, 0.5), span(0.9, 1.0), span(2.0, 0.0)];
        let of = |span: &Span| (span.start, span.milliseconds);
        let expected = [(0, 999_999), (1_000_000, 0), (1_000_000, 899_999), (2_000_000, 0)];
        assert_eq!(row(&spans, of), expected);
        assert_eq!(row(&spans, |_| (0.0, 0.0)), [(0, 0); 4]);
    }

    #[test]
    fn a_trace_has_the_steps_that_were_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("trace.json");
        let mut device = Device::cpu(1, 0).expect("a thread");
        let mut trace = Trace::new(file.clone(), 2, 1);
        let mut over = Vec::new();
        for _ in 0..1 + STEPS_TRACED {
            trace.begin(&mut device);
            device.mark("norm", Some(7));
            device.mark("update", None);
            over.push(trace.is_over());
        }
        assert_eq!(over, [false, false, false, true]);
        trace.write(&mut device).expect("storage");
        let text = std::fs::read(&file).expect("a file");
        let read: Value = serde_json::from_slice(&text).expect("JSON");
        let all = read["traceEvents"].as_array().expect("events");
        let spans: Vec<&Value> = all.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(spans.len(), 2 * 2 * STEPS_TRACED as usize);
        assert!(spans.iter().all(|span| span["pid"] == 2 && span["dur"].as_f64() >= Some(0.0)));
        let of_device: Vec<&&Value> = spans.iter().filter(|span| span["tid"] == DEVICE).collect();
        let first = of_device[0];
        assert_eq!((&first["name"], &first["args"]["layer"]), (&json!("norm"), &json!(7)));
        let ends = |span: &Value| span["ts"].as_f64().unwrap() + span["dur"].as_f64().unwrap();
        for pair in of_device.windows(2) {
            let gap = pair[1]["ts"].as_f64().unwrap() - ends(pair[0]);
            assert!((0.0..3e-3).contains(&gap), "{gap} {pair:?}");
        }
    }
}
