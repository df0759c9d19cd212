//! `metrics.jsonl` and `events.jsonl`: appended a line at a time, never rewritten.

use crate::disk::{Disk, Effect};
use moejob_protocol::report::{Detail, Event, EventKind, StepReport};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A record could not be kept.
#[derive(Debug, thiserror::Error)]
#[error("{path} cannot be written")]
pub struct RecordsError {
    pub path: PathBuf,
    pub source: std::io::Error,
}

/// Both files of a run, as rank 0 appends to them.
#[derive(Debug)]
pub struct Records {
    metrics: Lines,
    events: Lines,
}

#[derive(Debug)]
struct Lines {
    disk: Disk,
    path: PathBuf,
    file: File,
}

impl Records {
    /// Opens or creates the files in `directory`, and cuts a last line that a dying writer left
    /// torn.
    ///
    /// # Errors
    /// Names the file.
    pub fn open(directory: &Path) -> Result<Records, RecordsError> {
        Records::open_on(&Disk::real(), directory)
    }

    /// By way of `disk`; nothing is tried twice.
    ///
    /// # Errors
    /// Names the file.
    pub fn open_on(disk: &Disk, directory: &Path) -> Result<Records, RecordsError> {
        let failed = |source| RecordsError { path: directory.to_path_buf(), source };
        disk.create_directories(directory).map_err(failed)?;
        let (metrics, events) = (directory.join("metrics.jsonl"), directory.join("events.jsonl"));
        let is_new = !metrics.exists() || !events.exists();
        let records =
            Records { metrics: Lines::open(disk, metrics)?, events: Lines::open(disk, events)? };
        if is_new {
            // Lines that are synced last no longer than the name of their file.
            disk.sync_directory(directory).map_err(failed)?;
        }
        Ok(records)
    }

    /// # Errors
    /// Names the file.
    pub fn step(&mut self, report: &StepReport) -> Result<(), RecordsError> {
        self.metrics.append(report)
    }

    /// # Errors
    /// Names the file.
    pub fn event(&mut self, event: &Event) -> Result<(), RecordsError> {
        self.events.append(event)
    }

    /// Makes the metrics so far durable.
    ///
    /// # Errors
    /// Names the file.
    pub fn sync(&self) -> Result<(), RecordsError> {
        let Lines { disk, path, file } = &self.metrics;
        let synced = disk.before(Effect::Sync(path)).and_then(|()| file.sync_data());
        synced.map_err(|source| RecordsError { path: path.clone(), source })
    }
}

impl Lines {
    fn open(disk: &Disk, path: PathBuf) -> Result<Lines, RecordsError> {
        let opened = (|| {
            disk.before(Effect::Create(&path))?;
            let mut file = OpenOptions::new().read(true).append(true).create(true).open(&path)?;
            cut_torn_line(&mut file)?;
            Ok(file)
        })();
        match opened {
            Ok(file) => Ok(Lines { disk: disk.clone(), path, file }),
            Err(source) => Err(RecordsError { path, source }),
        }
    }

    /// One write a line, so that two writers of a file never mix within one.
    fn append(&mut self, line: &impl serde::Serialize) -> Result<(), RecordsError> {
        let Lines { disk, path, file } = self;
        let written = text_of(line).and_then(|text| {
            disk.before(Effect::Write(path))?;
            file.write_all(&text)
        });
        written.map_err(|source| RecordsError { path: path.clone(), source })
    }
}

fn text_of(line: &impl serde::Serialize) -> std::io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    Ok(text)
}

/// Prints a line as the files have it: in a pod `kubectl logs` finds it.
pub fn print(line: &impl serde::Serialize) {
    if let Ok(text) = text_of(line) {
        // Whoever reads along may have gone away; the file is what counts.
        let _ = std::io::stdout().write_all(&text);
    }
}

/// Bytes that are looked at from the end of a file at a time.
const TAIL: u64 = 1 << 16;

fn cut_torn_line(file: &mut File) -> std::io::Result<()> {
    let len = file.metadata()?.len();
    let mut end = len;
    while end > 0 {
        let start = end.saturating_sub(TAIL);
        let mut tail = vec![0; (end - start) as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut tail)?;
        if let Some(newline) = tail.iter().rposition(|byte| *byte == b'\n') {
            end = start + newline as u64 + 1;
            break;
        }
        end = start;
    }
    if end < len {
        file.set_len(end)?;
    }
    Ok(())
}

/// An event that happens now.
pub fn event(
    attempt: u32,
    kind: EventKind,
    reason: &str,
    message: String,
    details: impl IntoIterator<Item = (&'static str, Detail)>,
) -> Event {
    let details = details.into_iter().map(|(name, detail)| {
        debug_assert!(!Event::FIELDS.contains(&name), "{name} is a field of every event");
        (name.to_string(), detail)
    });
    Event {
        time: now(),
        attempt,
        event: kind,
        reason: reason.to_string(),
        message,
        details: details.collect::<BTreeMap<_, _>>(),
    }
}

/// RFC 3339, UTC, with milliseconds.
pub fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    timestamp(since.as_secs(), since.subsec_millis())
}

/// Days to a date in the proleptic Gregorian calendar, by eras of 400 years.
fn timestamp(seconds: u64, millis: u32) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Years begin in March, so that the leap day is the last.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        assert_eq!(timestamp(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(timestamp(951_782_400, 7), "2000-02-29T00:00:00.007Z");
        assert_eq!(timestamp(4_107_542_399, 999), "2100-02-28T23:59:59.999Z");
        assert_eq!(timestamp(1_794_000_000, 0), "2026-11-06T21:20:00.000Z");
    }

    #[test]
    fn a_torn_line_is_cut_and_the_next_one_appended() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events.jsonl");
        let long = "x".repeat(100_000);
        for (before, after) in [
            ("", ""),
            ("{\"a\":1}\n", "{\"a\":1}\n"),
            ("{\"a\":1}\n{\"b\":", "{\"a\":1}\n"),
            ("{\"a\":", ""),
            (&format!("{{}}\n{long}"), "{}\n"),
        ] {
            std::fs::write(&path, before).expect("a file");
            let mut records = Records::open(folder.path()).expect("records");
            assert_eq!(std::fs::read_to_string(&path).expect("a file"), after);
            let line = event(3, EventKind::Resumed, "Fresh", String::new(), []);
            records.event(&line).expect("a line");
            let text = std::fs::read_to_string(&path).expect("a file");
            let last: Event = serde_json::from_str(&text[after.len()..]).expect("a whole line");
            assert_eq!(last, line);
        }
    }
}
