//! Lines of the log, each of which is bounded: what a library says when it cannot read something
//! may repeat all of it, and that may be a tenant's.

use std::io::{self, Write};
use tracing_subscriber::fmt::MakeWriter;

/// The longest line of our own, with a chain of errors, has some kilobytes.
const LINE_BYTES_MAX: usize = 8 << 10;

/// Writes lines to standard error.
#[derive(Clone, Copy)]
pub struct LogLines;

impl<'a> MakeWriter<'a> for LogLines {
    type Writer = BoundedLine<io::Stderr>;

    fn make_writer(&'a self) -> Self::Writer {
        BoundedLine(io::stderr())
    }
}

/// A line comes in one piece.
pub struct BoundedLine<W>(W);

impl<W: Write> Write for BoundedLine<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if line.len() <= LINE_BYTES_MAX {
            self.0.write_all(line)?;
        } else {
            let end = format!(" ... (a line of {} bytes)\n", line.len());
            let begin = String::from_utf8_lossy(&line[..LINE_BYTES_MAX]);
            self.0.write_all(&[begin.as_bytes(), end.as_bytes()].concat())?;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("nobody panics").extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_of_the_log_is_bounded() {
        let written = Written::default();
        let to = written.clone();
        let logs = tracing_subscriber::fmt().with_writer(move || BoundedLine(to.clone()));
        tracing::subscriber::with_default(logs.with_ansi(false).finish(), || {
            tracing::warn!("{}", "x".repeat(1_400_000));
            tracing::warn!("short");
        });
        let text = String::from_utf8(written.0.lock().expect("nobody panics").clone());
        let text = text.expect("text");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].len() < LINE_BYTES_MAX + 100, "{}", lines[0].len());
        assert!(lines[0].contains("... (a line of 14000"), "{}", lines[0]);
        assert!(lines[1].ends_with("short"), "{}", lines[1]);
    }
}
