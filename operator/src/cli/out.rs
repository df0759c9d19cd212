//! What a command prints. A reader that has gone away (`| head`) ends it in silence; a full disk is
//! told, and a failure. Neither is a panic, which `println!` of the standard library would be.

use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;

/// A line on standard output.
macro_rules! println {
    () => { $crate::cli::out::print(format_args!("\n")) };
    ($($words:tt)*) => { $crate::cli::out::print(format_args!("{}\n", format_args!($($words)*))) };
}

/// Words on standard output.
macro_rules! print {
    ($($words:tt)*) => { $crate::cli::out::print(format_args!($($words)*)) };
}

/// A line on standard error, which may be gone: there is nobody left to tell.
macro_rules! eprintln {
    () => { $crate::cli::out::tell(format_args!("\n")) };
    ($($words:tt)*) => { $crate::cli::out::tell(format_args!("{}\n", format_args!($($words)*))) };
}

/// Words on standard error.
macro_rules! eprint {
    ($($words:tt)*) => { $crate::cli::out::tell(format_args!($($words)*)) };
}

/// Columns of a terminal that does not say how many it has.
const COLUMNS: usize = 80;

/// Columns of a terminal whose last line can be drawn anew. None of a pipe or a file, and of a
/// terminal that knows no such thing (`TERM=dumb`).
pub fn columns(of: impl AsFd + IsTerminal) -> Option<usize> {
    if !of.is_terminal() || is_dumb() {
        return None;
    }
    let size = rustix::termios::tcgetwinsize(of).ok().filter(|size| size.ws_col > 0);
    Some(size.map_or(COLUMNS, |size| size.ws_col.into()))
}

/// Whether words on standard error may be coloured: <https://no-color.org>.
pub fn colours() -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    std::io::stderr().is_terminal() && !is_dumb() && !refused
}

fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|term| term == "dumb")
}

/// What the system says of a failure, without the number that only programs read.
pub fn io(error: &std::io::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once(" (os error ") {
        Some((words, rest)) if rest.ends_with(')') => words.to_string(),
        _ => text,
    }
}

/// Writes to standard output, or ends the process.
pub fn print(words: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    // Line by line, as the standard library does, and nothing is left behind at the end.
    let written = out.write_fmt(words).and_then(|()| out.flush());
    let Err(error) = written else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    tell(format_args!("moejob: standard output cannot be written: {}\n", io(&error)));
    std::process::exit(1);
}

/// Writes to standard error, if anybody is there.
pub fn tell(words: std::fmt::Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(words);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_in_words() {
        let missing = std::fs::File::open("/nowhere/at/all").expect_err("is not there");
        assert_eq!(io(&missing), "No such file or directory");
        assert_eq!(io(&std::io::Error::other("own words")), "own words");
    }
}
