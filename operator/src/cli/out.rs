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
    ($($words:tt)*) => { $crate::cli::out::tell_line(format_args!($($words)*)) };
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

/// Words of one kind have one colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    Loss,
    Warning,
    Recovery,
}

/// The words in a colour that light and dark terminals show.
pub fn painted(colour: Colour, words: &str) -> String {
    let code = match colour {
        Colour::Loss => "36",
        Colour::Warning => "33",
        Colour::Recovery => "32",
    };
    format!("\x1b[{code}m{words}\x1b[0m")
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

/// A line, or several, on standard error: on a terminal no wider than it is.
pub fn tell_line(words: std::fmt::Arguments<'_>) {
    match columns(std::io::stderr()) {
        Some(columns) => tell(format_args!("{}\n", within(&words.to_string(), columns))),
        None => tell(format_args!("{words}\n")),
    }
}

/// Fewer columns are no place for words.
const COLUMNS_MIN: usize = 20;

/// Text whose lines are broken between words, so that none is wider than a terminal of so many
/// columns. What is continued is indented by two more. A word that is wider stays whole: it may be
/// a path to copy.
pub fn within(text: &str, columns: usize) -> String {
    let columns = columns.saturating_sub(1).max(COLUMNS_MIN);
    text.split('\n').map(|line| line_within(line, columns)).collect::<Vec<_>>().join("\n")
}

fn line_within(line: &str, columns: usize) -> String {
    if line.chars().count() <= columns {
        return line.to_string();
    }
    let indent = line.chars().take_while(|c| *c == ' ').count().min(COLUMNS_MIN / 2);
    let more = " ".repeat(indent + 2);
    let (mut text, mut at) = (" ".repeat(indent), indent);
    for word in line.split(' ').filter(|word| !word.is_empty()) {
        let width = word.chars().count();
        let is_first = text.ends_with(' ') || text.is_empty();
        if !is_first && at + 1 + width > columns {
            text.push('\n');
            text.push_str(&more);
            at = more.len();
        } else if !is_first {
            text.push(' ');
            at += 1;
        }
        text.push_str(word);
        at += width;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_between_words() {
        let text = "  a line of several words that is wider than it should be\nshort";
        let found = within(text, 31);
        assert_eq!(found, "  a line of several words that\n    is wider than it should be\nshort");
        assert_eq!(within("short  and  spaced", 80), "short  and  spaced");
        let path = "moejob: /a/path/that/is/much/too/wide/for/it is not there";
        assert_eq!(
            within(path, 25),
            "moejob:\n  /a/path/that/is/much/too/wide/for/it\n  is not there"
        );
        assert_eq!(within("one two three four five six", 0), "one two three four\n  five six");
        assert_eq!(within("", 40), "");
    }

    #[test]
    fn failures_are_told_in_words() {
        let missing = std::fs::File::open("/nowhere/at/all").expect_err("is not there");
        assert_eq!(io(&missing), "No such file or directory");
        assert_eq!(io(&std::io::Error::other("own words")), "own words");
    }
}
