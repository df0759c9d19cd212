//! A bar on standard error for work on bytes; silent where that is no terminal.

use crate::cli::out::columns;
use std::io::Write;
use std::time::{Duration, Instant};

/// Between two drawings.
const EVERY: Duration = Duration::from_millis(100);
const WIDTH: usize = 30;

pub struct Bar {
    what: &'static str,
    unit: Unit,
    started: Instant,
    drawn: Option<Instant>,
    shown: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Bytes,
    Tokens,
}

impl Bar {
    pub fn new(what: &'static str, unit: Unit) -> Bar {
        let shown = columns(std::io::stderr()).is_some();
        Bar { what, unit, started: Instant::now(), drawn: None, shown }
    }

    /// Draws, if it is time to.
    pub fn set(&mut self, done: u64, total: u64) {
        let now = Instant::now();
        let due = self.drawn.is_none_or(|drawn| now - drawn >= EVERY) || done >= total;
        if self.shown && due {
            self.drawn = Some(now);
            let seconds = (now - self.started).as_secs_f64();
            let columns = columns(std::io::stderr()).unwrap_or(usize::MAX).saturating_sub(1);
            eprint!("\r{}", line(self.what, self.unit, done, total, seconds, columns));
            // A terminal that is gone takes no bar.
            let _ = std::io::stderr().flush();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if self.drawn.is_some() {
            eprintln!();
        }
    }
}

/// The bar is as long as `columns` leave room for, and goes first.
fn line(
    what: &str,
    unit: Unit,
    done: u64,
    total: u64,
    seconds: f64,
    columns: usize,
) -> String {
    let share = if total == 0 { 1.0 } else { done as f64 / total as f64 };
    let amount = |count: f64| match unit {
        Unit::Bytes => format!("{:.1} MB", count / 1e6),
        Unit::Tokens => format!("{count:.0} tokens"),
    };
    let rate = amount(done as f64 / seconds.max(1e-3));
    let facts = format!("{:>3.0}%  {}  {rate}/s ", share * 100.0, amount(total as f64));
    let width = columns.saturating_sub(format!("{what} [] {facts}").len()).min(WIDTH);
    let filled = ((share * width as f64) as usize).min(width);
    let bar = "=".repeat(filled) + &" ".repeat(width - filled);
    let text = match width {
        0 => format!("{what} {facts}"),
        _ => format!("{what} [{bar}] {facts}"),
    };
    text.chars().take(columns).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_share_size_and_rate() {
        let found = line("export", Unit::Bytes, 5_000_000, 10_000_000, 2.0, 100);
        let bar = "=".repeat(15) + &" ".repeat(15);
        assert_eq!(found, format!("export [{bar}]  50%  10.0 MB  2.5 MB/s "));
        let narrow = |columns| line("export", Unit::Bytes, 5_000_000, 10_000_000, 2.0, columns);
        assert_eq!(narrow(45), "export [=====      ]  50%  10.0 MB  2.5 MB/s ");
        assert_eq!((narrow(30).as_str(), narrow(0).len()), ("export  50%  10.0 MB  2.5 MB/s", 0));
        assert!(line("x", Unit::Tokens, 0, 0, 0.0, 100).contains("100%"));
    }
}
