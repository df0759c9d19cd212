use super::super::content::Ids;
use super::super::files::DataFile;
use super::super::store::Width;
use super::*;
use std::fs;

const FILES: usize = 40;
const BYTES: usize = 400_000;

/// Files of ids from 3 to 250, old enough to be trusted, and a folder for the index.
struct Node {
    folder: tempfile::TempDir,
    files: Vec<DataFile>,
}

impl Node {
    fn new() -> Node {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("index")).expect("a folder");
        let mut node = Node { folder, files: Vec::new() };
        for number in 0..FILES {
            node.write(number, &vec![3 + (number % 248) as u8; BYTES]);
        }
        node.look_at();
        node
    }

    fn path(&self, number: usize) -> PathBuf {
        self.folder.path().join(format!("{number:03}.bin"))
    }

    fn write(&self, number: usize, bytes: &[u8]) {
        fs::write(self.path(number), bytes).expect("a file");
    }

    /// Finds the files anew, as a start does.
    fn look_at(&mut self) {
        std::thread::sleep(Duration::from_millis(60));
        let named = |number| DataFile::named(&self.path(number)).expect("a file");
        self.files = (0..FILES).map(named).collect();
    }

    fn index(&self) -> PathBuf {
        self.folder.path().join("index")
    }

    /// Contents and the bytes that were read for them.
    fn ask(&self, vocabulary: u32) -> (Result<Vec<(Content, bool)>, DataError>, u64) {
        let ids = Some(Ids { width: Width::U8, offset: 0, vocabulary });
        let wish = |file| Wish { file, bytes: BYTES as u64, ids };
        let wishes: Vec<Wish> = self.files.iter().map(wish).collect();
        let progress = Progress::default();
        let found = contents(&wishes, Some(&self.index()), &progress);
        if found.is_ok() {
            let all = (FILES * BYTES) as u64;
            assert_eq!(progress.counts(), (all, all));
        }
        (found, progress.bytes_read())
    }

    fn reads(&self, files: usize) {
        let (found, read) = self.ask(256);
        for ((content, anew), file) in found.expect("contents").iter().zip(&self.files) {
            let bytes = fs::read(&file.path).expect("a file");
            assert_eq!(content.hash, *blake3::hash(&bytes).as_bytes(), "{:?}", file.path);
            assert_eq!(content.low, i64::from(*bytes.iter().min().expect("bytes")));
            assert!(*anew || files < FILES);
        }
        assert_eq!(read, (files * BYTES) as u64);
    }
}

#[test]
fn a_second_start_reads_what_changed_alone() {
    let mut node = Node::new();
    node.reads(FILES);
    node.reads(0);
    let (path, times) = (node.path(7), fs::metadata(node.path(7)).expect("a file"));
    // Same size, same time of the content, same inode.
    node.write(7, &vec![9; BYTES]);
    let file = OpenOptions::new().write(true).open(&path).expect("a file");
    file.set_modified(times.modified().expect("a time")).expect("a time");
    node.look_at();
    node.reads(1);
    // Another inode of the same size and times.
    fs::copy(node.path(8), node.path(900)).expect("a copy");
    fs::rename(node.path(900), node.path(8)).expect("a rename");
    // Only the time.
    let file = OpenOptions::new().write(true).open(node.path(9)).expect("a file");
    file.set_modified(SystemTime::now()).expect("a time");
    node.look_at();
    node.reads(2);
    node.reads(0);
}

#[test]
fn a_file_that_was_written_just_now_is_read_again() {
    let mut node = Node::new();
    // As one that is written while the clock's tick lasts.
    let file = OpenOptions::new().write(true).open(node.path(1)).expect("a file");
    file.set_modified(SystemTime::now() + Duration::from_secs(60)).expect("a time");
    node.look_at();
    node.ask(256).0.expect("contents");
    // Whether it was changed after it was read cannot be told.
    node.reads(1);
    node.reads(1);
    file.set_modified(SystemTime::now() - Duration::from_secs(60)).expect("a time");
    node.look_at();
    node.reads(1);
    node.reads(0);
}

#[test]
fn ids_outside_of_another_vocabulary_are_named_from_the_index() {
    let mut node = Node::new();
    for number in [5, 6] {
        let mut bytes = vec![3; BYTES];
        bytes[1000 + number] = 251;
        node.write(number, &bytes);
    }
    node.look_at();
    node.reads(FILES);
    let error = node.ask(251).0.expect_err("an id").to_string();
    let expected = format!("005.bin, token 1005: the id 251 is outside of the vocabulary of 251");
    assert!(error.ends_with(&expected), "{error}");
    node.reads(0);
}

#[test]
fn an_index_that_is_torn_or_foreign_is_made_anew() {
    let node = Node::new();
    node.reads(FILES);
    let mut paths: Vec<PathBuf> = fs::read_dir(node.index())
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "index"))
        .collect();
    paths.sort();
    assert!(paths.len() > 10, "{paths:?}");
    for (at, path) in paths.iter().enumerate() {
        let mut bytes = fs::read(path).expect("an index");
        let last = bytes.len() - 1;
        match at % 6 {
            0 => bytes.truncate(last),
            1 => bytes[0] ^= 1,
            2 => bytes[20] ^= 1,
            3 => bytes.clear(),
            4 => bytes[last] ^= 1,
            _ => bytes.extend([0; ENTRY_BYTES]),
        }
        fs::write(path, bytes).expect("a file");
    }
    node.reads(FILES);
    node.reads(0);
}

#[test]
fn the_oldest_entries_go_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let entry = |used| Entry {
        stamp: [used; 6],
        content: Content { hash: [1; 32], low: -1, high: i64::MAX },
        used,
    };
    let key = |number: u64| *blake3::hash(&number.to_le_bytes()).as_bytes();
    let count = ENTRIES_MAX as u64 + 100;
    let by_key = (0..count).map(|number| (key(number), entry(number))).collect();
    Entries { by_key, unread: false }.save(folder.path(), 3);
    let kept = load(folder.path(), 3).by_key;
    assert_eq!(kept.len(), ENTRIES_MAX);
    for number in 0..count {
        let expected = (number >= 100).then(|| entry(number));
        assert_eq!(kept.get(&key(number)), expected.as_ref());
    }
}

/// What cannot be read may be good: what took its place would have less.
#[test]
fn an_index_that_cannot_be_read_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    // A folder in its place gives an error that is not its absence.
    let path = path(folder.path(), 5, "index");
    fs::create_dir(&path).expect("a folder");
    let mut entries = load(folder.path(), 5);
    assert!(entries.unread);
    fs::remove_dir(&path).expect("a folder");
    entries.save(folder.path(), 5);
    assert!(!path.exists(), "written over what could not be read");
    assert!(!load(folder.path(), 5).unread, "one that is missing is made");
}

#[test]
fn several_at_once_read_every_file_once() {
    let node = Node::new();
    let read: u64 = std::thread::scope(|scope| {
        let asks: Vec<_> = (0..4).map(|_| scope.spawn(|| node.ask(256))).collect();
        let asks = asks.into_iter().map(|ask| ask.join().expect("no panic"));
        asks.map(|(found, read)| found.map(|_| read).expect("contents")).sum()
    });
    assert_eq!(read, (FILES * BYTES) as u64);
    node.reads(0);
}

/// A holder that is stopped keeps its lock: it is not waited for, and nothing is waited for
/// behind a dead one.
#[test]
fn a_holder_that_does_nothing_is_not_waited_for() {
    let node = Node::new();
    let locks: Vec<File> =
        (0..GROUPS).map(|group| try_lock(&node.index(), group).expect("a lock")).collect();
    let began = Instant::now();
    let wanted: Vec<Wish> = node.files[..1].iter().map(Wish::whole).collect();
    let big = node.folder.path().join("big");
    fs::write(&big, vec![1; SHARED_BYTES_MIN as usize]).expect("a file");
    let big = DataFile::named(&big).expect("a file");
    let wishes = [wanted[0], Wish::whole(&big)];
    let progress = Progress::default();
    let found = contents(&wishes, Some(&node.index()), &progress).expect("contents");
    assert!(began.elapsed() >= SILENT_MAX && began.elapsed() < 3 * SILENT_MAX);
    assert!(found.iter().all(|(_, anew)| *anew));
    drop(locks);
}

#[test]
fn who_gives_up_keeps_what_was_read() {
    let node = Node::new();
    let progress = Progress::default();
    let counted = progress.clone();
    let until = progress.until(move || counted.bytes_read() > (FILES * BYTES / 2) as u64);
    let wishes: Vec<Wish> = node.files.iter().map(Wish::whole).collect();
    let error = contents(&wishes, Some(&node.index()), &until).expect_err("given up");
    assert!(matches!(error, DataError::GivenUp), "{error}");
    let first = progress.bytes_read();
    let again = Progress::default();
    contents(&wishes, Some(&node.index()), &again).expect("contents");
    let block = 2 * tokenize::threads() as u64 * BYTES as u64;
    let all = (FILES * BYTES) as u64;
    assert!(first + again.bytes_read() <= all + block, "{first} and {}", again.bytes_read());
}
