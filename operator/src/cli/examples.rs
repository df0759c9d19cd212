//! `moejob examples [N] [DIR]`: the lessons with their texts, as they lie in the tree of this
//! program, for whoever has no clone of it; and `moejob run tiny`.

use super::args::word;
use crate::cli::out::io;
use clap::Args;
use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../examples/", $name)))),*]
    };
}

/// All files of `examples/`, lessons in their order.
const FILES: &[(&str, &[u8])] = files![
    "01-first-run.yaml",
    "02-elastic.yaml",
    "03-on-kubernetes/job.yaml",
    "03-on-kubernetes/corpus.yaml",
    "03-on-kubernetes/storage.yaml",
    "04-routers.yaml",
    "05-one-gpu.yaml",
    "06-two-gpus.yaml",
    "07-own-data/job.yaml",
    "07-own-data/make.sh",
    "08-fine-tune/job.yaml",
    "08-fine-tune/base.yaml",
    "08-fine-tune/load.py",
    "09-use-it.yaml",
    "corpus/README.md",
    "corpus/rust.txt",
    "corpus/shakespeare.txt",
    "slurm/one-node.sh",
];

/// The run that needs no file: lesson 1.
pub const TINY: &str = "tiny";

#[derive(Args)]
pub struct ExamplesArgs {
    /// A lesson, 1 to 9. Without it all are written, with the script for Slurm.
    #[arg(value_name = "N")]
    pub lesson: Option<String>,
    /// Where the folder `examples` is made.
    #[arg(default_value = ".")]
    pub dir: PathBuf,
}

pub fn run(args: &ExamplesArgs) -> ExitCode {
    // One argument that is no number is the folder.
    let (number, dir) = match args.lesson.as_deref().map(|typed| (typed, typed.parse::<u32>())) {
        None => (None, args.dir.as_path()),
        Some((_, Ok(number))) => (Some(number), args.dir.as_path()),
        Some((typed, Err(_))) => (None, Path::new(typed)),
    };
    let dir = dir.strip_prefix(".").unwrap_or(dir);
    let wanted: Vec<_> = FILES.iter().filter(|file| is_of(file, number)).collect();
    if number.is_some() && !wanted.iter().any(|(name, _)| lesson_of(name).is_some()) {
        let last = FILES.iter().filter_map(|(name, _)| lesson_of(name)).max().unwrap_or(0);
        eprintln!("moejob: lessons are 1 to {last}; `moejob examples` writes all of them");
        return ExitCode::from(2);
    }
    for file in wanted {
        if let Err(why) = write(dir, file) {
            eprintln!("moejob: {why}");
            return ExitCode::from(2);
        }
    }
    let is_main = |name: &str| name.ends_with("job.yaml") || is_one(name);
    for (name, bytes) in FILES.iter().filter(|(name, _)| is_main(name)) {
        if number.is_none() || lesson_of(name) == number {
            println!("{}", about(&dir.join("examples").join(name), bytes));
        }
    }
    ExitCode::SUCCESS
}

/// Writes lesson 1 where it is not yet, and gives its manifest.
///
/// # Errors
/// Which file cannot be written, and what to do.
pub fn tiny() -> Result<PathBuf, String> {
    let mut files = FILES.iter().filter(|file| is_of(file, Some(1)));
    files.try_for_each(|file| write(Path::new(""), file))?;
    Ok(Path::new("examples").join(FILES[0].0))
}

fn lesson_of(name: &str) -> Option<u32> {
    name.split('-').next()?.parse().ok()
}

/// A lesson of one file.
fn is_one(name: &str) -> bool {
    lesson_of(name).is_some() && !name.contains('/')
}

/// A file of the lesson, or a text that a file of it names. Without a number all are.
fn is_of((name, _): &(&str, &[u8]), number: Option<u32>) -> bool {
    let Some(number) = number else { return true };
    let is_named = |(of, bytes): &(&str, &[u8])| {
        let path = format!("examples/{name}");
        lesson_of(of) == Some(number)
            && bytes.windows(path.len()).any(|window| window == path.as_bytes())
    };
    lesson_of(name) == Some(number) || name.starts_with("corpus/") && FILES.iter().any(is_named)
}

/// A file that is there already stays as it is.
fn write(dir: &Path, (name, bytes): &(&str, &[u8])) -> Result<(), String> {
    let path = dir.join("examples").join(name);
    let told = |error: std::io::Error| {
        let advice = "name a folder that you may write: moejob examples N DIR";
        format!("{} cannot be written: {}; {advice}", path.display(), io(&error))
    };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(told)?;
    }
    match OpenOptions::new().write(true).create_new(true).open(&path) {
        Ok(mut file) => file.write_all(bytes).map_err(told),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            if std::fs::read(&path).map_err(told)? != **bytes {
                let path = path.display();
                eprintln!("moejob: {path} is another one than this program's, and stays");
            }
            Ok(())
        }
        Err(error) => Err(told(error)),
    }
}

/// `examples/01-first-run.yaml`, and in the next lines what it teaches, on what and how long.
fn about(path: &Path, manifest: &[u8]) -> String {
    let text = String::from_utf8_lossy(manifest);
    let line = |start: &str| text.lines().find(|line| line.starts_with(start));
    let told = ["# Lesson ", "# Machine: "].into_iter().filter_map(line);
    let told = told.map(|line| format!("\n  {}", line.trim_start_matches("# ")));
    format!("{}{}", word(path), told.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_folder_is_one_of_the_programs() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
        let (mut found, mut folders) = (Vec::new(), vec![root.clone()]);
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
                match entry.path() {
                    path if path.is_dir() => folders.push(path),
                    path => {
                        let name = path.strip_prefix(&root).expect("within").to_path_buf();
                        found.push(name.to_string_lossy().into_owned());
                    }
                }
            }
        }
        found.sort();
        let mut known: Vec<&str> = FILES.iter().map(|(name, _)| *name).collect();
        known.sort_unstable();
        assert_eq!(found, known);
    }

    #[test]
    fn a_lesson_comes_with_the_texts_that_it_names() {
        let of = |number| {
            let files = FILES.iter().filter(|file| is_of(file, Some(number)));
            files.map(|(name, _)| *name).collect::<Vec<_>>()
        };
        assert_eq!(of(1), ["01-first-run.yaml", "corpus/shakespeare.txt"]);
        assert_eq!(of(8)[3..], ["corpus/rust.txt", "corpus/shakespeare.txt"]);
        assert!(of(3).iter().all(|name| name.starts_with("03-on-kubernetes/")));
        assert!(of(10).is_empty());
    }

    #[test]
    fn a_lesson_says_machine_time_and_end() {
        for (name, bytes) in FILES.iter().filter(|(name, _)| lesson_of(name).is_some()) {
            let text = String::from_utf8_lossy(bytes);
            if text.starts_with("# Lesson ") {
                assert!(text.contains("\n# Machine: ") && text.contains(" Time: "), "{name}");
                assert!(text.contains("\n# Ends with: "), "{name}");
            }
        }
    }
}
