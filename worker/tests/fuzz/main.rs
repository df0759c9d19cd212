//! Readers of what strangers write never panic and never take more than 64 MiB for less than 1 MiB.
//!
//! ```text
//! corpus/TARGET/* -> mutate -> reader -> was it something new? -> kept for further mutation
//! ```
//! A short count runs with the other tests. Longer, from other seeds, one a thread:
//! `MOEJOB_FUZZ_RUNS=10000000 MOEJOB_FUZZ_THREADS=12 MOEJOB_FUZZ_SEED=7 \
//! cargo test --release -p moe-worker --test fuzz`. An input that fails is written to the folder
//! for temporary files; MOEJOB_FUZZ_INPUT=PATH runs it alone.

mod mutate;
mod seeds;
mod targets;

use mutate::Mutator;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Runs of a target in an ordinary test.
const RUNS: u64 = 4_000;
/// What one input may take beside its own bytes.
const MEMORY_MAX: i64 = 64 << 20;
/// Inputs of this and more may take more.
const INPUT_MAX: usize = (1 << 20) - 1;
/// Inputs kept for further mutation.
const KEPT_MAX: usize = 2_000;

thread_local! {
    static NOW: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

struct Counting;

fn count(bytes: i64) {
    // A thread that ends has no counters any more.
    let _ = NOW.try_with(|now| {
        now.set(now.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(now.get())));
    });
}

// SAFETY: every call goes to the system's allocator unchanged; only numbers are kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise is ours.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise is ours.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // The old block may live until the new one is filled.
        count(size as i64);
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise is ours.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A reader: gives the kind of answer, so that new kinds are kept.
type Reader = fn(&[u8]) -> String;

fn number(name: &str, otherwise: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")),
        Err(_) => otherwise,
    }
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    // Cargo says where the crate lies; a binary that was taken elsewhere is told.
    let crate_folder = std::env::var_os("CARGO_MANIFEST_DIR")
        .unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let folder = PathBuf::from(crate_folder).join("tests/fuzz/corpus").join(target);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", folder.display());
    paths.iter().map(|path| std::fs::read(path).expect("a file of the corpus")).collect()
}

/// The answer without its numbers and names: what kind of answer it is.
fn kind(answer: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    let plain = answer.chars().filter(|c| c.is_ascii_alphabetic()).take(160);
    plain.for_each(|c| c.hash(&mut hasher));
    hasher.finish()
}

/// Runs one input; the kind of its answer, or what is wrong.
fn run(reader: Reader, input: &[u8]) -> Result<u64, String> {
    let before = NOW.get();
    PEAK.set(before);
    let answer = catch_unwind(AssertUnwindSafe(|| kind(&reader(input))));
    let taken = PEAK.get() - before;
    match answer {
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("it panics: {}", text.unwrap_or("without a word")))
        }
        Ok(_) if taken > MEMORY_MAX && input.len() <= INPUT_MAX => {
            Err(format!("{} bytes take {taken} bytes of memory", input.len()))
        }
        Ok(kind) => Ok(kind),
    }
}

/// What is fuzzed, and from where it starts.
#[derive(Clone, Copy)]
struct Target<'a> {
    name: &'static str,
    words: &'a [&'a [u8]],
    seeds: &'a [Vec<u8>],
    reader: Reader,
}

/// What the runs of one seed, or of several, have seen.
#[derive(Default)]
struct Seen {
    kinds: HashSet<u64>,
    memory: i64,
}

fn fuzz(name: &'static str, words: &[&[u8]], seeds: Vec<Vec<u8>>, reader: Reader) {
    if let Ok(path) = std::env::var("MOEJOB_FUZZ_INPUT") {
        let input = std::fs::read(&path).expect("the input");
        return assert_eq!(run(reader, &input).err(), None, "{path}");
    }
    let (runs, seed) = (number("MOEJOB_FUZZ_RUNS", RUNS), number("MOEJOB_FUZZ_SEED", 1));
    let threads = number("MOEJOB_FUZZ_THREADS", 1).clamp(1, 512);
    let mut all = corpus(name);
    all.extend(seeds);
    let target = Target { name, words, seeds: &all, reader };
    let (began, stop) = (Instant::now(), AtomicBool::new(false));
    let mut seen = Seen::default();
    std::thread::scope(|scope| {
        let stop = &stop;
        let of = |thread| runs / threads + u64::from(thread < runs % threads);
        let workers: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || search(target, of(thread), seed + thread, stop)))
            .collect();
        for worker in workers {
            let found = worker.join().unwrap_or_else(|panic| resume_unwind(panic));
            seen.kinds.extend(found.kinds);
            seen.memory = seen.memory.max(found.memory);
        }
    });
    println!(
        "{name}: {runs} runs on {threads} threads in {:.0} s, {} kinds of answers, \
         at most {} KiB of memory",
        began.elapsed().as_secs_f64(),
        seen.kinds.len(),
        seen.memory >> 10
    );
}

/// `runs` inputs from one seed; what finds something new is mutated further.
///
/// # Panics
/// At the first input that fails, which it writes to a file. The other threads stop then.
fn search(target: Target, runs: u64, seed: u64, stop: &AtomicBool) -> Seen {
    let fail = |input: &[u8], why: String, at: u64| -> ! {
        stop.store(true, Ordering::Relaxed);
        let name = format!("moejob-fuzz-{}-{:016x}", target.name, kind_of(input));
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, input).expect("a place for the input");
        panic!("run {at} of seed {seed}, input {}: {why}", path.display());
    };
    let mut seen = Seen::default();
    for (at, input) in target.seeds.iter().enumerate() {
        match run(target.reader, input) {
            Ok(kind) => drop(seen.kinds.insert(kind)),
            Err(why) => fail(input, why, at as u64),
        }
    }
    let mut kept = target.seeds.to_vec();
    let mut mutator = Mutator::new(seed, target.words);
    for at in 0..runs {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let input = mutator.next(&kept);
        match run(target.reader, &input) {
            Err(why) => fail(&input, why, at),
            Ok(kind) => {
                if seen.kinds.insert(kind) && kept.len() < KEPT_MAX {
                    kept.push(input);
                }
            }
        }
        seen.memory = seen.memory.max(PEAK.get() - NOW.get());
    }
    seen
}

fn kind_of(input: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    input.hash(&mut hasher);
    hasher.finish()
}

#[test]
fn manifests() {
    fuzz("manifest", targets::MANIFEST_WORDS, Vec::new(), targets::manifest);
}

#[test]
fn checkpoints() {
    fuzz("checkpoint", targets::CHECKPOINT_WORDS, seeds::checkpoints(), targets::checkpoint);
}

#[test]
fn data() {
    fuzz("data", targets::DATA_WORDS, Vec::new(), targets::data);
}

#[test]
fn records() {
    fuzz("record", targets::RECORD_WORDS, seeds::records(), targets::record);
}

#[test]
fn frames() {
    fuzz("frames", targets::FRAME_WORDS, seeds::frames(), targets::frames);
}

/// What unpacks to a thousand times its size.
#[test]
fn bombs() {
    use std::io::Write;
    let lines = [
        format!("{{\"text\":\"{}\"}}\n", "a".repeat((8 << 20) - 100)),
        format!("{{\"text\":\"{}\"}}\n", "\\n".repeat((4 << 20) - 100)),
        format!("{{\"text\":\"{}\"}}\n", "a".repeat(600 << 10)).repeat(40),
        "{\"text\":\"a\"}\n".repeat(2 << 20),
        "[".repeat(8 << 20),
        "a".repeat(64 << 20),
    ];
    for line in &lines {
        let mut packed = flate2::write::GzEncoder::new(vec![2, 0], flate2::Compression::fast());
        packed.write_all(line.as_bytes()).expect("memory");
        let gzip = packed.finish().expect("memory");
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let zstd = ruzstd::encoding::compress_to_vec(line.as_bytes(), level);
        let zstd = [&[2, 0], &zstd[..]].concat();
        for packed in [gzip, zstd] {
            assert!(packed.len() <= INPUT_MAX, "{} bytes", packed.len());
            run(targets::data, &packed).expect("a refusal, or the text");
        }
    }
}

/// The counters count, and the loop notices.
#[test]
fn what_is_wrong_is_seen() {
    let greedy: Reader = |_| {
        let bytes = vec![1_u8; 65 << 20];
        format!("{}", bytes.len())
    };
    assert!(run(greedy, b"x").expect_err("too much").contains("bytes of memory"));
    let modest: Reader = |_| format!("{}", vec![1_u8; 60 << 20].len());
    assert!(run(modest, b"x").is_ok());
    let silent = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let found = run(|input| format!("{}", input[7]), b"short");
    std::panic::set_hook(silent);
    assert!(found.expect_err("a panic").contains("it panics: index out of bounds"));
    assert_eq!(run(|_| "token 7".to_string(), b"x"), run(|_| "token 81".to_string(), b"x"));
}
