//! What commands take alike: whole numbers, told in words where they are none; how results are
//! written; and the name of a run in place of its folder.

use super::validate::Output;
use clap::{Args, ValueEnum};
use moejob_protocol::config::TokenType;
use std::path::{Path, PathBuf};

/// Where runs lie unless something else is said.
pub const RUNS: &str = "runs";
/// Threads that one process may compute with.
pub const THREADS_MAX: u32 = 1024;

/// How many threads compute where so many are typed: 0 is all processors.
pub fn threads(typed: u32) -> usize {
    match typed {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads as usize,
    }
}

/// A whole number of an argument.
pub fn whole(least: u32, most: u32) -> impl Fn(&str) -> Result<u32, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("a whole number from {least} to {most}"))
    }
}

/// A seed: any number that a computer word holds.
pub fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("a whole number from 0 to {}", u64::MAX))
}

/// The type of tokens in files without a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TokenName {
    Uint16,
    Uint32,
}

impl TokenName {
    pub fn dtype(self) -> TokenType {
        match self {
            TokenName::Uint16 => TokenType::Uint16,
            TokenName::Uint32 => TokenType::Uint32,
        }
    }
}

/// How a result is written.
#[derive(Args, Clone, Copy, Debug)]
pub struct Written {
    /// How it is written.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
    /// The same as `-o json`.
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
}

impl Written {
    pub fn is_json(self) -> bool {
        self.json || self.output == Output::Json
    }
}

/// The folder that is meant: `small` is `runs/small` where there is such a run, and nothing of that
/// name here.
pub fn place(typed: &Path) -> PathBuf {
    let named = Path::new(RUNS).join(typed);
    let is_name = typed.components().count() == 1 && typed.symlink_metadata().is_err();
    if is_name && is_run(&named) { named } else { typed.to_path_buf() }
}

/// A path as it is typed in a shell.
pub fn word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-".contains(c);
    match text.chars().all(plain) {
        true if !text.is_empty() => text,
        _ => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Whether it is the folder of a run.
pub fn is_run(path: &Path) -> bool {
    path.join("job.json").is_file() || path.join("metrics.jsonl").is_file()
}

/// The runs in a folder, ascending, as far as it can be read: of what is none itself they may be
/// what is meant.
pub fn runs_in(folder: &Path) -> Vec<PathBuf> {
    const LOOKED_AT_MAX: usize = 1000;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().take(LOOKED_AT_MAX);
    let mut runs: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|path| is_run(path)).collect();
    runs.sort();
    runs
}

/// `; it is a folder of 3 runs: name one of them, such as runs/small`, where it is one.
pub fn or_its_runs(folder: &Path) -> Option<String> {
    let runs = runs_in(folder);
    let count = match runs.len() {
        1 => "1 run".to_string(),
        count => format!("{count} runs"),
    };
    let first = runs.first()?.display().to_string();
    Some(format!("it is a folder of {count}: name one of them, such as {first}"))
}

/// # Errors
/// It is no such number.
pub fn not_negative(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "a number of at least 0".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_refused_in_words() {
        let threads = whole(0, 1024);
        assert_eq!((threads("0"), threads("1024")), (Ok(0), Ok(1024)));
        for wrong in ["x", "-1", "1025", "1.5", "", "1e3", "99999999999999999999"] {
            assert_eq!(threads(wrong), Err("a whole number from 0 to 1024".to_string()), "{wrong}");
        }
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        assert!(seed("-1").is_err());
    }

    #[test]
    fn only_a_name_of_a_run_stands_for_its_folder() {
        for path in ["nowhere", "a/b", ".", "/", ""] {
            assert_eq!(place(Path::new(path)), Path::new(path));
        }
    }
}
