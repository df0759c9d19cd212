//! What a command prints. A reader that has gone away (`| head`) ends it in silence; a full disk is
//! told, and a failure. Neither is a panic, which `println!` of the standard library would be.

use std::io::{ErrorKind, Write};

/// A line on standard output.
macro_rules! println {
    () => { $crate::out::print(format_args!("\n")) };
    ($($words:tt)*) => { $crate::out::print(format_args!("{}\n", format_args!($($words)*))) };
}

/// Words on standard output.
macro_rules! print {
    ($($words:tt)*) => { $crate::out::print(format_args!($($words)*)) };
}

/// A line on standard error, which may be gone: there is nobody left to tell.
macro_rules! eprintln {
    () => { $crate::out::tell(format_args!("\n")) };
    ($($words:tt)*) => { $crate::out::tell(format_args!("{}\n", format_args!($($words)*))) };
}

/// Words on standard error.
macro_rules! eprint {
    ($($words:tt)*) => { $crate::out::tell(format_args!($($words)*)) };
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
    tell(format_args!("moejob: standard output cannot be written: {error}\n"));
    std::process::exit(1);
}

/// Writes to standard error, if anybody is there.
pub fn tell(words: std::fmt::Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(words);
}
