//! What holds without a GPU: against a library of ours that keeps a list of its calls.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use moejob_nccl::{
    Comm, Config, DType, ENVIRONMENT, Enter, Error, Library, Part, Reduce, Seat, Span, State,
    Stream, UniqueId, Version, abandon,
};

/// The stub as a library. Each kind is compiled once.
fn compiled(options: &[&str]) -> Vec<u8> {
    static MADE: Mutex<BTreeMap<String, Vec<u8>>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let kind = format!("{options:?}");
    let make = || {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("stub.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stub/nccl.rs");
        let done = Command::new("rustc")
            .args(["--edition=2024", "--crate-type=cdylib", "-Cpanic=abort", "--crate-name=stub"])
            .args(options.iter().flat_map(|option| ["--cfg", option]))
            .arg("-o")
            .arg(&file)
            .arg(&source)
            .output()
            .expect("rustc, which built this test");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        std::fs::read(&file).expect("just made")
    };
    made.entry(kind).or_insert_with(make).clone()
}

/// The stub, loaded from a file of its own, so that a test has calls and orders of its own.
struct Stub {
    file: PathBuf,
    loaded: libloading::Library,
    _folder: tempfile::TempDir,
}

const POLLS: c_int = 0;
const TROUBLE: c_int = 1;
const REFUSAL: c_int = 2;
const ABORT_MS: c_int = 3;
const VERSION: c_int = 6;
const FOR_EVER: i64 = -1;

impl Stub {
    fn new(version: u32, options: &[&str]) -> Stub {
        Stub::lacking(version, options, None)
    }

    /// Without a function: who looks for it finds another name.
    fn lacking(version: u32, options: &[&str], function: Option<&str>) -> Stub {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("libnccl.so.2");
        let mut library = compiled(options);
        if let Some(function) = function {
            let name = [b"\0", function.as_bytes(), b"\0"].concat();
            let at: Vec<usize> = library.windows(name.len()).enumerate()
                .filter_map(|(at, bytes)| (bytes == name).then_some(at + 1))
                .collect();
            assert!(!at.is_empty(), "the stub has no {function}");
            at.into_iter().for_each(|at| library[at] = b'_');
        }
        std::fs::write(&file, library).expect("writable");
        // SAFETY: made above; it has no constructors.
        let loaded = unsafe { libloading::Library::new(&file) }.expect("just made");
        let stub = Stub { file, loaded, _folder: folder };
        stub.set(VERSION, version.into());
        stub
    }

    fn library(&self) -> Library {
        Library::open(&self.file).expect("as NCCL")
    }

    fn set(&self, what: c_int, value: i64) {
        // SAFETY: the type is that of the stub.
        unsafe {
            let set = self.loaded.get::<extern "C" fn(c_int, i64)>("stub_set").expect("stub");
            set(what, value);
        }
    }

    /// All calls so far, in one line.
    fn calls(&self) -> String {
        let mut text = vec![0_u8; 1 << 16];
        // SAFETY: the type is that of the stub, the target as long as told.
        let bytes = unsafe {
            type Calls = unsafe extern "C" fn(*mut u8, usize) -> usize;
            self.loaded.get::<Calls>("stub_calls").expect("stub")(text.as_mut_ptr(), text.len())
        };
        text.truncate(bytes);
        String::from_utf8(text).expect("text").replace('\n', "; ")
    }

    /// The calls since `before`.
    fn since(&self, before: &str) -> String {
        self.calls()[before.len()..].trim_start_matches("; ").to_owned()
    }

    fn comm(&self, config: &Config) -> Result<Comm, Error> {
        let library = self.library();
        let id = UniqueId::new(&library)?;
        Comm::init(&library, Seat { rank: 1, world: 2 }, &id, config)
    }
}

fn revoking() -> Stub {
    Stub::new(22809, &["revoke"])
}

fn span(address: u64, dtype: DType, len: usize) -> Span {
    // SAFETY: the stub follows no address.
    unsafe { Span::new(address, dtype, len) }
}

fn stream(number: usize) -> Stream {
    // SAFETY: the stub uses no stream.
    unsafe { Stream::new(std::ptr::without_provenance_mut(number)) }
}

#[test]
fn a_library_that_is_missing_is_told_with_what_to_install() {
    let error = Library::open("/nowhere/libnccl.so.2").expect_err("not there").to_string();
    for part in ["/nowhere/libnccl.so.2", "libnccl2", "nvidia-nccl-cu13", "LD_LIBRARY_PATH"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_library_that_is_no_nccl_or_of_another_age_is_refused() {
    let error = Library::open("libc.so.6").expect_err("no NCCL").to_string();
    assert!(error.contains("libc.so.6 has no ncclGetVersion"), "{error}");
    for (version, told) in [(21704, "2.17.4"), (2708, "2.7.8"), (30000, "3.0.0")] {
        let stub = Stub::new(version, &["old"]);
        let error = Library::open(&stub.file).expect_err("too old or new").to_string();
        assert!(error.contains(&format!("is NCCL {told}; 2.18.0 or newer")), "{error}");
    }
    let stub = Stub::new(22809, &["old"]);
    let error = Library::open(&stub.file).expect_err("no functions").to_string();
    assert!(error.contains("has no ncclGetErrorString"), "{error}");
}

/// Each function that is looked for, by the list in the source.
#[test]
fn a_function_that_is_absent_is_told_with_what_to_install() {
    let source = include_str!("../src/library.rs");
    let (_, lists) = source.split_once("\nfunctions! {\n").expect("the lists");
    let (always, optional) = lists.split_once("optional {").expect("two lists");
    let (optional, _) = optional.split_once("}\n}").expect("an end");
    let names = |list: &'static str| {
        list.split('"').filter(|part| part.starts_with("nccl")).collect::<Vec<&str>>()
    };
    let (always, optional) = (names(always), names(optional));
    assert!(always.len() > 15 && optional == ["ncclCommRevoke"], "{always:?} {optional:?}");
    for function in ["ncclGetVersion"].into_iter().chain(always) {
        let stub = Stub::lacking(22005, &["revoke"], Some(function));
        let error = Library::open(&stub.file).expect_err("lacks a function").to_string();
        let expected = format!("has no {function}, which NCCL has from 2.18.0 on; install ");
        assert!(error.contains("libnccl.so.2 has no") && error.contains(&expected), "{error}");
        assert!(error.contains("nvidia-nccl-cu12"), "{error}");
    }
    let stub = Stub::lacking(22705, &["revoke"], Some("ncclCommRevoke"));
    assert!(!stub.library().can_revoke());
    // A file that is there is no missing one.
    let copy = stub.file.with_file_name("broken.so");
    std::fs::write(&copy, [b'x'; 4096]).expect("writable");
    let error = Library::open(&copy).expect_err("no library").to_string();
    assert!(error.contains("broken.so (") && error.contains("invalid ELF header"), "{error}");
}

/// The beginning of the configuration that each version knows, and nothing set in the rest.
#[test]
fn the_configuration_is_of_the_version_that_is_loaded() {
    for (code, version, expected) in [
        (21805, "2.18.5", "size 48 version 21805"),
        (22005, "2.20.5", "size 48 version 22005"),
        (22203, "2.22.3", "size 48 version 22203"),
        (22403, "2.24.3", "size 48 version 22403"),
        (22602, "2.26.2", "size 48 version 22602"),
        (22705, "2.27.5", "size 72 version 22705"),
        (22809, "2.28.9", "size 80 version 22809"),
        (23001, "2.30.1", "size 80 version 22809"),
    ] {
        let stub = Stub::new(code, &[]);
        assert_eq!(stub.library().version().to_string(), version);
        let config = Config { ctas_max: Some(8), ..Config::default() };
        drop(stub.comm(&config).expect("a communicator"));
        let calls = stub.calls();
        assert!(calls.contains(&format!("init 1/2 id 127 {expected} blocking 0")), "{calls}");
        assert!(calls.contains("ctas - to 8 share 0"), "{calls}");
        // Numbers behind the beginning, but for padding and the communicator's name, which is null.
        let rest = match expected.split(' ').nth(1) {
            Some("48") => 0,
            Some("72") => 4,
            _ => 6,
        };
        assert!(calls.contains(&format!("unset {rest}")), "{calls}");
    }
}

#[test]
fn versions_that_differ_are_told_by_rank() {
    let (ours, theirs) = (Version::new(2, 28, 9), Version::new(2, 27, 5));
    assert!(ours.agree(&[ours, ours]).is_ok());
    let error = ours.agree(&[ours, ours, theirs]).expect_err("differ").to_string();
    assert_eq!(error, "rank 2 has NCCL 2.27.5, this rank has 2.28.9; give both the same");
    assert_eq!(Version::of_code(ours.code()), ours);
}

#[test]
fn what_is_off_is_so_before_the_library_is_there() {
    let _stub = revoking().library();
    for (variable, value) in ENVIRONMENT {
        assert_eq!(std::env::var(variable).as_deref(), Ok(value), "{variable}");
    }
}

#[test]
fn progress_is_waited_for_and_verbs_go_out_as_they_were_asked_for() {
    let stub = revoking();
    stub.set(POLLS, 5);
    let comm = stub.comm(&Config::default()).expect("a communicator");
    assert_eq!(comm.poll().expect("well"), State::Ready);
    let (a, b) = (span(0x1000, DType::Bf16, 8), span(0x2000, DType::Bf16, 8));
    let before = stub.calls();
    comm.all_reduce(a, a, Reduce::Sum, stream(7)).expect("enqueued");
    comm.reduce_scatter(a, b.slice(4, 4), Reduce::Max, stream(7)).expect("enqueued");
    comm.all_gather(b.slice(0, 4), a, stream(7)).expect("enqueued");
    comm.broadcast(a, b, 1, stream(7)).expect("enqueued");
    let expected = "(; AllReduce 4096 4096 8 9 0 7; ); (; ReduceScatter 4096 8200 4 9 2 7; ); \
                    (; AllGather 8192 4096 4 9 7; ); (; Broadcast 4096 8192 8 9 1 7; )";
    assert_eq!(stub.since(&before), expected);
    let before = stub.calls();
    comm.all_to_all(a, b, stream(0)).expect("enqueued");
    let parts = |x: [(usize, usize); 2]| x.map(|(start, len)| Part { start, len });
    let (sends, receives) = (parts([(0, 3), (3, 0)]), parts([(0, 1), (1, 5)]));
    comm.all_to_all_v((a, &sends), (b, &receives), stream(0)).expect("enqueued");
    let expected = "(; Send 4096 4 9 0 0; Recv 8192 4 9 0 0; Send 4104 4 9 1 0; Recv 8200 4 9 1 0; \
                    ); (; Send 4096 3 9 0 0; Recv 8192 1 9 0 0; Recv 8194 5 9 1 0; )";
    assert_eq!(stub.since(&before), expected);
    let before = stub.calls();
    comm.finalize().expect("ended");
    assert_eq!(stub.since(&before), "finalize; destroy");
}

#[test]
fn kinds_are_those_of_nccl() {
    let stub = revoking();
    let comm = stub.comm(&Config::default()).expect("a communicator");
    use DType::*;
    for (dtype, code) in [(U8, 1), (U32, 3), (U64, 5), (F16, 6), (F32, 7), (F64, 8), (Bf16, 9)] {
        let before = stub.calls();
        let whole = span(64, dtype, 3);
        comm.all_reduce(whole, whole, Reduce::Min, stream(1)).expect("enqueued");
        assert_eq!(stub.since(&before), format!("(; AllReduce 64 64 3 {code} 3 1; )"));
        assert_eq!(whole.slice(1, 2).address(), 64 + dtype.size() as u64);
    }
}

#[test]
fn what_takes_too_long_or_is_to_stop_is_left() {
    let stub = revoking();
    let stop = Arc::new(AtomicBool::new(false));
    let limit = Duration::from_millis(30);
    let config = Config { call_limit: limit, stop: stop.clone(), ..Config::default() };
    let comm = stub.comm(&config).expect("a communicator");
    stub.set(POLLS, FOR_EVER);
    let whole = span(64, DType::F32, 3);
    let began = Instant::now();
    let error = comm.all_reduce(whole, whole, Reduce::Sum, stream(1)).expect_err("never done");
    assert!(matches!(error, Error::Late { call: "ncclGroupEnd", .. }), "{error}");
    assert!(began.elapsed() >= limit && began.elapsed() < Duration::from_secs(60));
    assert_eq!(comm.poll().expect("under way"), State::InProgress);
    stop.store(true, Ordering::Relaxed);
    let error = comm.all_reduce(whole, whole, Reduce::Sum, stream(1)).expect_err("stopped");
    assert!(matches!(error, Error::Stopped { .. }), "{error}");
    let error = stub.comm(&config).expect_err("stopped while ranks meet");
    assert!(matches!(error, Error::Stopped { call: "ncclCommInitRankConfig" }), "{error}");
}

#[test]
fn refusals_name_the_call_and_what_the_library_said() {
    let stub = revoking();
    let comm = stub.comm(&Config::default()).expect("a communicator");
    let whole = span(64, DType::F32, 3);
    stub.set(REFUSAL, 2);
    let before = stub.calls();
    let error = comm.all_reduce(whole, whole, Reduce::Sum, stream(1)).expect_err("refused");
    let expected = "ncclAllReduce: unhandled system error (2): no cable in port 3";
    assert_eq!(error.to_string(), expected);
    // A group that was begun is ended, whatever happened inside.
    assert_eq!(stub.since(&before), "(; AllReduce 64 64 3 7 0 1; )");
    stub.set(TROUBLE, 6);
    let error = comm.poll().expect_err("a link failed").to_string();
    assert!(error.contains("remote process exited (6)"), "{error}");
    stub.set(TROUBLE, 0);
    stub.set(REFUSAL, 2);
    let error = stub.comm(&Config::default()).expect_err("refused");
    assert!(matches!(error, Error::Refused { call: "ncclGetUniqueId", .. }), "{error}");
    let id = UniqueId::from_bytes([7; UniqueId::BYTES]);
    stub.set(REFUSAL, 2);
    let error = Comm::init(&stub.library(), comm.seat(), &id, &Config::default());
    let error = error.expect_err("refused");
    assert!(matches!(error, Error::Refused { call: "ncclCommInitRankConfig", .. }), "{error}");
}

#[test]
fn a_panic_inside_a_group_ends_it() {
    let stub = revoking();
    let comm = stub.comm(&Config::default()).expect("a communicator");
    let before = stub.calls();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        comm.group(|group| group.send(span(0, DType::U8, 1), 2, stream(0)))
    }));
    assert!(caught.is_err(), "rank 2 of 2");
    assert_eq!(stub.since(&before), "(; )");
}

#[test]
fn a_part_is_a_communicator_with_its_own_ranks() {
    let stub = revoking();
    stub.set(POLLS, 3);
    let comm = stub.comm(&Config::default()).expect("a communicator");
    let part = comm.split(Some(4), 1).expect("split").expect("a color");
    assert_eq!(part.seat(), Seat { rank: 0, world: 2 });
    assert!(comm.split(None, 0).expect("split").is_none());
    let calls = stub.calls();
    assert!(calls.contains("split 4 1 size 80") && calls.contains("split -1 0"), "{calls}");
}

/// The order that neither hangs nor costs the context.
#[test]
fn ends_come_in_their_order() {
    struct Graphs<'a>(&'a Stub);
    impl Drop for Graphs<'_> {
        fn drop(&mut self) {
            assert!(!self.0.calls().contains("aborted"), "graphs go first: {}", self.0.calls());
        }
    }
    for (stub, expected) in [
        (revoking(), "revoke 0; revoke 0; abort"),
        (Stub::new(22705, &[]), "abort"),
    ] {
        stub.set(ABORT_MS, 150);
        let comms = [0; 2].map(|_| stub.comm(&Config::default()).expect("a communicator"));
        let before = stub.calls();
        let mut looks = 0;
        let drained = || {
            looks += 1;
            looks > 20
        };
        let limit = Duration::from_secs(20);
        abandon(Vec::from(comms), drained, Graphs(&stub), limit).expect("ended");
        let calls = stub.since(&before);
        assert!(calls.starts_with(expected), "{calls}");
        assert_eq!(calls.matches("aborted").count(), 2, "{calls}");
    }
}

#[test]
fn what_does_not_end_is_told_in_time() {
    let stub = revoking();
    let comm = || vec![stub.comm(&Config::default()).expect("a communicator")];
    let limit = Duration::from_millis(80);
    let error = abandon(comm(), || false, (), limit).expect_err("a stream that never ends");
    assert!(error.to_string().starts_with("a stream did not end within 80ms"), "{error}");
    stub.set(ABORT_MS, 60_000);
    let began = Instant::now();
    let error = abandon(comm(), || true, (), limit).expect_err("an abort that takes longer");
    assert!(error.to_string().starts_with("the abort of 1 communicators"), "{error}");
    let long = Duration::from_secs(60);
    let error = abandon(comm(), || true, (), long).expect_err("behind empty streams");
    assert!(error.to_string().starts_with("the abort of 1 communicators"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_communicator_that_is_dropped_is_aborted_and_nothing_hangs() {
    let stub = revoking();
    let comm = stub.comm(&Config::default()).expect("a communicator");
    let before = stub.calls();
    drop(comm);
    assert_eq!(stub.since(&before), "revoke 0; abort; aborted");
    stub.set(ABORT_MS, 60_000);
    let comm = stub.comm(&Config::default()).expect("a communicator");
    let began = Instant::now();
    drop(comm);
    assert!(began.elapsed() < Duration::from_secs(50));
}

/// NCCL would go back to the first GPU on a thread that has entered none.
#[test]
fn whoever_ends_a_communicator_enters_its_gpu_first() {
    let stub = revoking();
    let entered = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&entered);
    let enter = Enter::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let config = Config { enter: Some(enter), ..Config::default() };
    let comm = stub.comm(&config).expect("a communicator");
    assert_eq!(entered.load(Ordering::Relaxed), 0, "who makes one drives its GPU");
    comm.revoke().expect("revoked");
    assert_eq!(entered.load(Ordering::Relaxed), 1);
    let limit = Duration::from_secs(2);
    abandon(vec![comm], || true, (), limit).expect("ended");
    assert_eq!(entered.load(Ordering::Relaxed), 3, "revoked again, and aborted on a new thread");
}

/// Verbs take the communicator of the thread that drives the device, and of no other.
#[test]
fn a_communicator_goes_to_another_thread() {
    fn goes<T: Send>() {}
    goes::<Comm>();
}
