//! Documents that are both trained on and held out, told by the hashes of their tokens.

use super::cache::{Entry, Tokenized};
use super::divide::is_held_out;
use super::files::DataFile;
use super::open::Part;
use super::DataError;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// Hashes of held-out documents in memory at most: 48 MB. Of more documents a half, a quarter and
/// so on is compared: those whose hashes end with zeros, on both sides alike.
const HASHES_MAX: usize = 1 << 20;
/// Shorter ones are equal by chance: lines that are empty, or a word.
const TOKENS_MIN: u64 = 8;
/// Doubled documents that are named.
const NAMED: usize = 3;

/// What was found. Documents of fewer than 8 tokens do not count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentOverlap {
    /// Held-out documents that were compared, and those of them that are trained on, too.
    pub compared: u64,
    pub doubled: u64,
    /// The first of them.
    pub first: Vec<Doubled>,
}

/// A held-out document and where it is trained on: names of files, numbers of lines or rows from 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doubled {
    pub held_out: (String, u64),
    pub trained: (String, u64),
}

/// The documents of a source, tokenised, and which of them are held out.
#[derive(Clone, Debug)]
pub(crate) struct Documents {
    pub made: Tokenized,
    pub files: Arc<Vec<DataFile>>,
    /// By file, where files are divided whole; otherwise by document.
    pub held_files: Option<Vec<bool>>,
    pub fraction: f64,
    /// Whether those that are held out are meant, or the others.
    pub held_out: bool,
}

/// A held-out document whose hash is remembered.
struct Held {
    place: (String, u64),
    /// How many are equal to it, it included.
    count: u64,
    found: bool,
}

impl Documents {
    fn each(&self, see: &mut dyn FnMut(Entry)) -> Result<(), DataError> {
        self.made.each(&mut |entry| {
            let index = entry.file as usize;
            let held = match &self.held_files {
                Some(held) => held[index],
                None => is_held_out(&self.files[index].name, entry.number, self.fraction),
            };
            if held == self.held_out && entry.tokens >= TOKENS_MIN {
                see(entry);
            }
            Ok(())
        })
    }

    fn place(&self, entry: Entry) -> (String, u64) {
        let name = &self.files[entry.file as usize].name;
        (String::from_utf8_lossy(name).into_owned(), entry.number)
    }
}

/// Compares the documents of all parts.
pub(crate) fn overlap(training: &[Part], held: &[Part]) -> Result<DocumentOverlap, DataError> {
    overlap_of_at_most(HASHES_MAX, training, held)
}

fn overlap_of_at_most(
    most: usize,
    training: &[Part],
    held: &[Part],
) -> Result<DocumentOverlap, DataError> {
    let mut hashes: HashMap<u64, Held> = HashMap::new();
    let mut mask = 0_u64;
    for documents in held.iter().filter_map(|part| part.documents.as_ref()) {
        documents.each(&mut |entry| {
            if entry.hash & mask != 0 {
                return;
            }
            let new = || Held { place: documents.place(entry), count: 0, found: false };
            hashes.entry(entry.hash).or_insert_with(new).count += 1;
            while hashes.len() > most {
                mask = mask << 1 | 1;
                hashes.retain(|hash, _| hash & mask == 0);
            }
        })?;
    }
    let mut found = DocumentOverlap::default();
    if hashes.is_empty() {
        return Ok(found);
    }
    found.compared = hashes.values().map(|held| held.count).sum();
    for documents in training.iter().filter_map(|part| part.documents.as_ref()) {
        documents.each(&mut |entry| {
            let twin = hashes.get_mut(&entry.hash).filter(|held| !held.found);
            let Some(twin) = twin else { return };
            twin.found = true;
            found.doubled += twin.count;
            if found.first.len() < NAMED {
                let (held_out, trained) = (twin.place.clone(), documents.place(entry));
                found.first.push(Doubled { held_out, trained });
            }
        })?;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::cache::{Making, tokenized};
    use crate::disk::Disk;
    use super::super::store::Width;
    use super::*;

    const COUNT: u32 = 5000;

    /// Two files of the same documents, each of its own ten tokens; one short one in both.
    fn documents(held_out: bool) -> Part {
        let folder = tempfile::tempdir().expect("a folder");
        let named = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, "text").expect("a file");
            DataFile::named(&path).expect("a file")
        };
        let files = Arc::new(vec![named("a"), named("b")]);
        let mut fill = |making: &mut Making| {
            for file in 0..2 {
                for number in 0..COUNT {
                    making.ids(&[number; 10])?;
                    making.document(file, number.into())?;
                }
                making.ids(&[1])?;
                making.document(file, COUNT.into())?;
            }
            Ok(())
        };
        let (key, disk) = (blake3::hash(b"key"), Disk::real());
        let made = tokenized(None, &key, Width::U16, &disk, &mut fill).expect("tokens");
        let held_files = Some(vec![false, true]);
        let documents = Documents { made, files, held_files, fraction: 0.0, held_out };
        Part { documents: Some(documents), ..Part::default() }
    }

    #[test]
    fn memory_is_bounded_and_what_is_compared_is_compared_on_both_sides() {
        let (training, held) = ([documents(false)], [documents(true)]);
        let all = overlap(&training, &held).expect("tables");
        assert_eq!((all.compared, all.doubled), (COUNT.into(), COUNT.into()));
        let place = |file: &Doubled| {
            assert!(file.held_out.0.ends_with("/b") && file.trained.0.ends_with("/a"));
            (file.held_out.1, file.trained.1)
        };
        assert_eq!(all.first.iter().map(place).collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 2)]);
        for most in [1, 100, 3000] {
            let some = overlap_of_at_most(most, &training, &held).expect("tables");
            assert!(some.compared <= most as u64 && some.compared * 4 > most as u64, "{some:?}");
            assert_eq!(some.compared, some.doubled);
        }
        let none = overlap(&[Part::default()], &held).expect("tables");
        assert_eq!((none.compared, none.doubled), (COUNT.into(), 0));
        assert_eq!(overlap(&training, &[]).expect("tables"), DocumentOverlap::default());
    }
}
