//! The rules of Chrome's trace event format that viewers need, on a file of `--trace`.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Rows by process and thread: begin, end in microseconds, and name of each span, in order.
pub type Rows = BTreeMap<(u64, u64), Vec<(f64, f64, String)>>;

/// Panics where a viewer would show it wrongly, or not at all.
pub fn rows(file: &Path) -> Rows {
    let text = std::fs::read(file).unwrap();
    let read: Value = serde_json::from_slice(&text).unwrap();
    assert!(["ms", "ns"].contains(&read["displayTimeUnit"].as_str().unwrap()));
    let events = read["traceEvents"].as_array().unwrap();
    let (mut processes, mut threads) = (BTreeSet::new(), BTreeSet::new());
    let mut rows = Rows::new();
    for event in events {
        let fields = event.as_object().unwrap();
        let known = ["name", "cat", "ph", "ts", "dur", "pid", "tid", "args"];
        assert!(fields.keys().all(|name| known.contains(&name.as_str())), "{event}");
        let name = event["name"].as_str().unwrap().to_string();
        assert!(!name.is_empty(), "{event}");
        assert!(event["args"].is_object() || event["args"].is_null(), "{event}");
        let place = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        match event["ph"].as_str().unwrap() {
            "M" => {
                assert!(!event["args"]["name"].as_str().unwrap().is_empty(), "{event}");
                let is_first = match name.as_str() {
                    "process_name" => processes.insert(place.0),
                    "thread_name" => threads.insert(place),
                    _ => panic!("no metadata that viewers know: {event}"),
                };
                assert!(is_first, "named twice: {event}");
            }
            "X" => {
                let (ts, dur) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                assert!(ts >= 0.0 && dur >= 0.0 && (ts + dur).is_finite(), "{event}");
                rows.entry(place).or_default().push((ts, ts + dur, name));
            }
            other => panic!("a phase {other:?} that this format is not written with: {event}"),
        }
    }
    assert!(!rows.is_empty(), "no spans");
    for (place, spans) in &mut rows {
        assert!(processes.contains(&place.0) && threads.contains(place), "{place:?} has no name");
        check_nesting(spans);
    }
    rows
}

/// Spans of a thread lie one behind the other or one within the other. Perfetto counts whole
/// nanoseconds, and rounds down.
fn check_nesting(spans: &mut [(f64, f64, String)]) {
    spans.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
    let whole = |span: &(f64, f64, String)| {
        let begin = (span.0 * 1e3) as u64;
        (begin, begin + ((span.1 - span.0) * 1e3) as u64)
    };
    let mut open: Vec<(u64, u64)> = Vec::new();
    for span in spans.iter() {
        let (begin, end) = whole(span);
        open.retain(|(_, until)| *until > begin);
        assert!(open.iter().all(|(_, until)| end <= *until), "{span:?} leaves what it lies in");
        open.push((begin, end));
    }
}
