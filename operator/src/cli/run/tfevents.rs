//! Scalars of each step as TensorBoard reads them, beside `metrics.jsonl`.
//!
//! ```text
//! file    record..                       record  u64 length | u32 crc | data | u32 crc
//! data    Event { 1: f64 wall time, 2: int64 step, 3: string version | 5: Summary | 7: session }
//! Summary { 1: Value { 1: string tag, 2: f32 }.. }
//! ```
//! Numbers are little-endian; a crc is CRC-32C, masked as the TFRecord format says. Messages are
//! Protocol Buffers, of which three wire types are written: varint, 64 and 32 bits, and lengths.

use moejob_protocol::report::StepReport;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a reader knows the format by.
const VERSION: &str = "brain.Event:2";
/// The polynomial of CRC-32C (Castagnoli), its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;
const MASK: u32 = 0xa282_ead8;

/// An open file of events.
#[derive(Debug)]
pub struct TfEvents {
    file: File,
    /// Of whole records.
    bytes: u64,
    /// The newest step that it has.
    last: Option<u64>,
}

impl TfEvents {
    /// A new file in `folder`: each run of a job has its own, and readers take them in order.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn create(folder: &Path) -> io::Result<TfEvents> {
        let now = now();
        let name = format!("events.out.tfevents.{:010}.moejob.{}", now as u64, std::process::id());
        let path = folder.join(name);
        let mut file = File::options().append(true).create_new(true).open(path)?;
        let first = record(&version(now));
        file.write_all(&first)?;
        Ok(TfEvents { file, bytes: first.len() as u64, last: None })
    }

    /// A step is done. One that is done again replaces what follows it, as readers understand it.
    ///
    /// # Errors
    /// It cannot be written; nothing of it is left, and the next step may be.
    pub fn step(&mut self, report: &StepReport) -> io::Result<()> {
        let now = now();
        let mut bytes = Vec::new();
        if self.last.is_none_or(|last| report.step <= last) {
            bytes.extend(record(&session_start(now, report.step)));
        }
        self.last = Some(report.step);
        bytes.extend(record(&scalars(now, report.step, &values(report))));
        // A step at a time, and at once: a reader that follows sees whole records.
        if let Err(error) = self.file.write_all(&bytes) {
            self.file.set_len(self.bytes)?;
            return Err(error);
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }
}

/// What is drawn of a step; tags before a `/` are groups.
pub(super) fn values(report: &StepReport) -> Vec<(&'static str, f64)> {
    let routing = &report.routing;
    let mut values = vec![
        ("loss/train", report.loss),
        ("loss/aux", report.aux_loss),
        ("loss/z", report.z_loss),
        ("train/learningRate", report.learning_rate),
        ("train/gradNorm", report.grad_norm),
        ("speed/tokensPerSecond", report.tokens_per_second),
        ("speed/worldSize", f64::from(report.world_size)),
        ("router/expertImbalance", report.expert_imbalance),
    ];
    let maybe = [
        ("loss/validation", report.validation_loss),
        ("train/lossScale", report.loss_scale),
        ("router/entropy", routing.router_entropy),
        ("router/churn", routing.churn),
        ("speed/exposedShare", report.communication.as_ref().map(|of| of.exposed_share)),
    ];
    values.extend(maybe.into_iter().filter_map(|(tag, value)| Some((tag, value?))));
    values
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn version(at: f64) -> Vec<u8> {
    let mut event = wall_time(at);
    put_bytes(&mut event, 3, VERSION.as_bytes());
    event
}

/// Whatever a reader has of this step and later ones is no longer so.
fn session_start(at: f64, step: u64) -> Vec<u8> {
    const START: u64 = 1;
    let mut session = Vec::new();
    put_varint(&mut session, 1, START);
    let mut event = wall_time(at);
    put_varint(&mut event, 2, step);
    put_bytes(&mut event, 7, &session);
    event
}

fn scalars(at: f64, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Vec::new();
    for (tag, value) in values {
        let mut scalar = Vec::new();
        put_bytes(&mut scalar, 1, tag.as_bytes());
        key(&mut scalar, 2, 5);
        scalar.extend((*value as f32).to_le_bytes());
        put_bytes(&mut summary, 1, &scalar);
    }
    let mut event = wall_time(at);
    put_varint(&mut event, 2, step);
    put_bytes(&mut event, 5, &summary);
    event
}

fn wall_time(at: f64) -> Vec<u8> {
    let mut event = Vec::new();
    key(&mut event, 1, 1);
    event.extend(at.to_le_bytes());
    event
}

/// A field's number and wire type: 0 varint, 1 of 64 bits, 2 with a length, 5 of 32 bits.
fn key(to: &mut Vec<u8>, field: u64, wire: u64) {
    varint(to, field << 3 | wire);
}

fn put_varint(to: &mut Vec<u8>, field: u64, value: u64) {
    key(to, field, 0);
    varint(to, value);
}

fn put_bytes(to: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    key(to, field, 2);
    varint(to, bytes.len() as u64);
    to.extend(bytes);
}

/// Seven bits a byte, the lowest first; all but the last have their highest bit set.
fn varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut bytes = Vec::with_capacity(data.len() + 16);
    bytes.extend(length);
    bytes.extend(masked(&length).to_le_bytes());
    bytes.extend(data);
    bytes.extend(masked(data).to_le_bytes());
    bytes
}

/// A crc of bytes that hold crcs themselves would be weak: so it is turned and moved.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(MASK)
}

/// Bit by bit: a step's records are a few hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (POLYNOMIAL * (crc & 1)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, appendix B.4, and the check value of the polynomial.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn the_first_record_is_what_every_such_file_begins_with() {
        let bytes = record(&version(0.0));
        assert_eq!(bytes[..12], *b"\x18\0\0\0\0\0\0\0\xa3\x7fK\"");
        assert_eq!(bytes[12..36], *b"\x09\0\0\0\0\0\0\0\0\x1a\x0dbrain.Event:2");
        assert_eq!(bytes.len(), 40);
    }

    #[test]
    fn an_event_has_these_bytes() {
        let found = scalars(2.0, 300, &[("loss", 1.5)]);
        let (head, summary) = found.split_at(12);
        assert_eq!(head, b"\x09\0\0\0\0\0\0\0\x40\x10\xac\x02");
        assert_eq!(summary, b"\x2a\x0d\x0a\x0b\x0a\x04loss\x15\0\0\xc0\x3f");
        let found = session_start(2.0, 5);
        assert_eq!(found, b"\x09\0\0\0\0\0\0\0\x40\x10\x05\x3a\x02\x08\x01");
    }

    fn report(step: u64) -> StepReport {
        let line = serde_json::json!({
            "step": step, "loss": 0.5, "auxLoss": 1.0, "zLoss": 0.0, "gradNorm": 2.0,
            "learningRate": 1e-3, "tokens": 64, "tokensPerSecond": 100.0, "worldSize": 1,
            "attempt": 1, "expertImbalance": 1.0, "time": "2026-01-01T00:00:00Z",
        });
        serde_json::from_value(line).expect("a line")
    }

    #[test]
    fn a_step_that_is_done_again_begins_a_session() {
        let home = tempfile::tempdir().expect("a folder");
        let mut events = TfEvents::create(home.path()).expect("a file");
        let steps = [1, 2, 2, 3];
        for step in steps {
            events.step(&report(step)).expect("written");
        }
        let file = std::fs::read_dir(home.path()).expect("a folder").next().expect("a file");
        let bytes = std::fs::read(file.expect("a file").path()).expect("a file");
        let (mut at, mut sessions, mut records) = (0, 0, 0);
        while at < bytes.len() {
            let length: [u8; 8] = bytes[at..at + 8].try_into().expect("eight bytes");
            let data = &bytes[at + 12..at + 12 + u64::from_le_bytes(length) as usize];
            assert_eq!(masked(data).to_le_bytes(), bytes[at + 12 + data.len()..][..4]);
            sessions += usize::from(data.ends_with(b"\x3a\x02\x08\x01"));
            records += 1;
            at += 16 + data.len();
        }
        assert_eq!((sessions, records), (2, 1 + 2 + steps.len()));
    }
}
