//! A bar on standard error for work on bytes; silent where that is no terminal.

use std::io::{IsTerminal, Write};
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
        let shown = std::io::stderr().is_terminal();
        Bar { what, unit, started: Instant::now(), drawn: None, shown }
    }

    /// Draws, if it is time to.
    pub fn set(&mut self, done: u64, total: u64) {
        let now = Instant::now();
        let due = self.drawn.is_none_or(|drawn| now - drawn >= EVERY) || done >= total;
        if self.shown && due {
            self.drawn = Some(now);
            let seconds = (now - self.started).as_secs_f64();
            eprint!("\r{}", line(self.what, self.unit, done, total, seconds));
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

fn line(what: &str, unit: Unit, done: u64, total: u64, seconds: f64) -> String {
    let share = if total == 0 { 1.0 } else { done as f64 / total as f64 };
    let filled = (share * WIDTH as f64) as usize;
    let bar = "=".repeat(filled) + &" ".repeat(WIDTH - filled.min(WIDTH));
    let amount = |count: f64| match unit {
        Unit::Bytes => format!("{:.1} MB", count / 1e6),
        Unit::Tokens => format!("{count:.0} tokens"),
    };
    let rate = amount(done as f64 / seconds.max(1e-3));
    format!("{what} [{bar}] {:>3.0}%  {}  {rate}/s ", share * 100.0, amount(total as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_share_size_and_rate() {
        let found = line("export", Unit::Bytes, 5_000_000, 10_000_000, 2.0);
        let bar = "=".repeat(15) + &" ".repeat(15);
        assert_eq!(found, format!("export [{bar}]  50%  10.0 MB  2.5 MB/s "));
        assert!(line("x", Unit::Tokens, 0, 0, 0.0).contains("100%"));
    }
}
