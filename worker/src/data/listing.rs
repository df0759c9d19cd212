//! The files that a run trains on, kept beside its checkpoints, and what has changed of them since.
//!
//! ```text
//! corpus -> Listing --keep--> data.json beside `step-*`
//!                             data.json --read--> Listing x corpus --changes--> added, removed, ..
//! ```
//! A fingerprint says that data are others; this says which files. What a file is called decides
//! its place in the order and whether it is held out: one that lies elsewhere than before keeps the
//! name that it had, as long as it holds the same.

use super::open::Origin;
use super::{Corpus, DataError};
use crate::disk::{Disk, gave_up};
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::Resume;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const FILE: &str = "data.json";
/// Of data in more files no list is kept: it would be megabytes.
const FILES_MAX: usize = 16_384;
/// More is not read: names are 4,096 bytes at most, and most are far shorter.
const BYTES_MAX: u64 = 32 << 20;
/// Files that are named of each kind of change.
const NAMED: usize = 5;

/// Every file of the data, by what it is for and its name; see [`Corpus::listing`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Listing {
    /// Of the data as a whole; as checkpoints have it.
    pub fingerprint: String,
    pub training_tokens: u64,
    pub held_out_tokens: u64,
    pub files: Vec<Listed>,
}

/// A file: `part` of the mixture (or 0), name relative to the job's folder, BLAKE3 of its content
/// in hex. A part behind the last of the mixture is the held-out data's own source.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Listed {
    pub part: usize,
    pub name: String,
    pub content: String,
}

impl Corpus {
    /// Its files. None of data with too many.
    pub fn listing(&self) -> Option<Listing> {
        if let Some((desk, _)) = &self.elsewhere {
            return desk.listing().ok().flatten();
        }
        let apart = if self.held_out_apart { self.training.len() } else { 0 };
        let training = self.training.iter().enumerate();
        let held_out = self.held_out.iter().enumerate().map(|(index, part)| (index + apart, part));
        let mut files = Vec::new();
        for (part, of) in training.chain(held_out) {
            for origin in &of.origins {
                files.push(Listed {
                    part,
                    name: String::from_utf8_lossy(&origin.name).into_owned(),
                    content: blake3::Hash::from_bytes(origin.content).to_hex().to_string(),
                });
            }
        }
        // A file that is divided is in both.
        files.sort();
        files.dedup();
        let listed = !files.is_empty() && files.len() <= FILES_MAX;
        let [(_, training_tokens), (_, held_out_tokens)] = self.sizes();
        let fingerprint = self.fingerprint.clone();
        listed.then_some(Listing { fingerprint, training_tokens, held_out_tokens, files })
    }
}

impl Listing {
    /// Writes it beside the checkpoints in `location`. Whoever trains can do without it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep(&self, location: &Path) -> std::io::Result<()> {
        if Listing::read(location).is_some_and(|found| found == *self) {
            return Ok(());
        }
        let text = serde_json::to_vec(self)?;
        super::replace(location, FILE, |to| std::fs::write(to, &text))
    }

    /// What was kept there, if it can be read.
    pub fn read(location: &Path) -> Option<Listing> {
        Listing::try_read(location).ok().flatten()
    }

    /// What was kept there, read with the patience of `disk`. None where nothing was, or where it
    /// cannot be read for good: a job whose data lie where they did needs none.
    ///
    /// # Errors
    /// The patience is over, or nobody waits any more.
    pub(crate) fn read_on(disk: &Disk, location: &Path) -> Result<Option<Listing>, DataError> {
        match disk.patiently(location, None, |_| Listing::try_read(location)) {
            Ok(kept) => Ok(kept),
            Err(error) if gave_up(&error).is_some() => Err(DataError::unread(location, error)),
            Err(error) => {
                tracing::warn!("the names of the data's files cannot be read: {error}");
                Ok(None)
            }
        }
    }

    fn try_read(location: &Path) -> std::io::Result<Option<Listing>> {
        let path = location.join(FILE);
        match std::fs::metadata(&path) {
            Ok(found) if found.is_file() && found.len() <= BYTES_MAX => {
                Ok(serde_json::from_slice(&std::fs::read(&path)?).ok())
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The folder that holds the listing of a job that goes on. None: a job that begins anew has
    /// no names to keep.
    pub(crate) fn of_job(config: &WorkerConfig) -> Option<PathBuf> {
        let goes_on = config.resume != Resume::Fresh;
        goes_on.then(|| PathBuf::from(&config.checkpoint.location))
    }

    /// A name for each of `files` of a part. A file that is not listed by its name takes that of a
    /// listed file with the same content, if that one is not among `files`. None: it keeps its own.
    pub(crate) fn names(&self, part: usize, files: &[Origin]) -> Vec<Option<Vec<u8>>> {
        let found: BTreeSet<&[u8]> = files.iter().map(|file| &file.name[..]).collect();
        let (mut listed, mut gone) = (BTreeSet::new(), BTreeMap::<&str, VecDeque<&[u8]>>::new());
        for file in self.files.iter().filter(|file| file.part == part) {
            let name = file.name.as_bytes();
            listed.insert(name);
            if !found.contains(name) {
                gone.entry(&file.content).or_default().push_back(name);
            }
        }
        let name = |file: &Origin| {
            if listed.contains(&file.name[..]) {
                return None;
            }
            let content = blake3::Hash::from_bytes(file.content).to_hex();
            gone.get_mut(content.as_str())?.pop_front().map(<[u8]>::to_vec)
        };
        files.iter().map(name).collect()
    }

    /// What of the files is otherwise in `now`: `added: a.txt; changed: b.txt`. None where all are
    /// the same, and the data differ in how they are read.
    pub fn changes(&self, now: &Listing) -> Option<String> {
        let by_name = |listing: &Listing| -> BTreeMap<(usize, String), String> {
            let entry = |file: &Listed| ((file.part, file.name.clone()), file.content.clone());
            listing.files.iter().map(entry).collect()
        };
        let (was, is) = (by_name(self), by_name(now));
        let only = |of: &BTreeMap<_, _>, other: &BTreeMap<_, _>| -> Vec<String> {
            let missing = of.keys().filter(|key| !other.contains_key(*key));
            missing.map(|(_, name): &(usize, String)| name.clone()).collect()
        };
        let other = is.iter().filter(|(key, content)| {
            was.get(*key).is_some_and(|before| before != *content)
        });
        let changed = other.map(|((_, name), _)| name.clone()).collect();
        let kinds = [
            ("added", only(&is, &was)),
            ("removed", only(&was, &is)),
            ("changed", changed),
        ];
        let texts: Vec<String> = (kinds.iter().filter(|(_, names)| !names.is_empty()))
            .map(|(kind, names)| format!("{kind}: {}", named(names)))
            .collect();
        (!texts.is_empty()).then(|| texts.join("; "))
    }
}

fn named(names: &[String]) -> String {
    let first = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(files: &[(usize, &str, &str)]) -> Listing {
        let listed = |(part, name, content): &(usize, &str, &str)| Listed {
            part: *part,
            name: name.to_string(),
            content: content.to_string(),
        };
        let files = files.iter().map(listed).collect();
        Listing { fingerprint: "print".to_string(), files, ..Listing::default() }
    }

    #[test]
    fn what_has_changed_is_named_by_file() {
        let was = listing(&[(0, "a", "1"), (0, "b", "1"), (1, "a", "1")]);
        assert_eq!(was.changes(&was), None);
        let is = listing(&[(0, "a", "2"), (0, "c", "1"), (1, "a", "1")]);
        let told = was.changes(&is);
        assert_eq!(told.as_deref(), Some("added: c; removed: b; changed: a"));
        let names: Vec<String> = (0..7).map(|index| format!("f{index}")).collect();
        let many: Vec<(usize, &str, &str)> = names.iter().map(|name| (0, &name[..], "1")).collect();
        let told = listing(&[]).changes(&listing(&many));
        assert_eq!(told.as_deref(), Some("added: f0, f1, f2, f3, f4 and 2 more"));
    }

    #[test]
    fn who_is_elsewhere_has_the_name_of_one_that_is_gone_and_holds_the_same() {
        let content = |byte: u8| blake3::Hash::from_bytes([byte; 32]).to_hex().to_string();
        let (one, two) = (content(1), content(2));
        let was = listing(&[(0, "a", &one), (0, "b", &one), (0, "c", &two), (1, "d", &two)]);
        let of = |files: &[(&str, u8)]| -> Vec<String> {
            let origin = |(name, byte): &(&str, u8)| Origin {
                name: name.as_bytes().to_vec(),
                content: [*byte; 32],
            };
            let files: Vec<Origin> = files.iter().map(origin).collect();
            let text = |name: Vec<u8>| String::from_utf8(name).expect("text");
            let names = was.names(0, &files).into_iter();
            names.map(|name| name.map_or("-".into(), text)).collect()
        };
        assert_eq!(of(&[("a", 1), ("b", 1), ("c", 2)]), ["-", "-", "-"], "where they were");
        assert_eq!(of(&[("x", 1), ("y", 2), ("z", 1)]), ["a", "c", "b"]);
        assert_eq!(of(&[("a", 2), ("z", 2)]), ["-", "c"], "what stands there has changed");
        assert_eq!(of(&[("x", 1), ("y", 1), ("z", 1)]), ["a", "b", "-"], "one more than there was");
        assert_eq!(of(&[("x", 3)]), ["-"], "not known");
    }

    #[test]
    fn it_is_kept_beside_checkpoints_and_what_is_no_list_is_none() {
        let home = tempfile::tempdir().expect("a folder");
        assert_eq!(Listing::read(home.path()), None);
        let kept = listing(&[(0, "a", "1")]);
        kept.keep(home.path()).expect("written");
        assert_eq!(Listing::read(home.path()), Some(kept));
        std::fs::write(home.path().join(FILE), "{").expect("a file");
        assert_eq!(Listing::read(home.path()), None);
        // A job whose data lie where they did goes on without it.
        std::fs::remove_file(home.path().join(FILE)).expect("a file");
        std::fs::create_dir(home.path().join(FILE)).expect("a folder");
        assert_eq!(Listing::read_on(&Disk::real(), home.path()).expect("none"), None);
    }
}
