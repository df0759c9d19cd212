//! A library with NCCL's functions and no GPU. Its version is what it was told, and with
//! `--cfg revoke` it can revoke. It keeps a list of its calls, and does as it was told.

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};
use std::sync::Mutex;

type Handle = *mut c_void;

static CALLS: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// Polls that answer "in progress" after a call; below 0: for ever.
static POLLS: AtomicI64 = AtomicI64::new(0);
static LEFT: AtomicI64 = AtomicI64::new(0);
/// What polls answer when nothing is in progress.
static TROUBLE: AtomicI64 = AtomicI64::new(0);
/// What the next call answers at once, if not 0.
static REFUSAL: AtomicI64 = AtomicI64::new(0);
/// Milliseconds of an abort.
static ABORT: AtomicI64 = AtomicI64::new(0);
/// Where a split that is under way leaves its communicator.
static PLACE: AtomicPtr<Handle> = AtomicPtr::new(std::ptr::null_mut());
/// Ranks that a split has.
static HALF: AtomicI64 = AtomicI64::new(2);
/// Such as 22809.
static VERSION: AtomicI64 = AtomicI64::new(0);

fn note(call: String) {
    CALLS.lock().unwrap().push(call);
}

/// What a call that may go on behind the host's back answers.
fn begin(call: String) -> c_int {
    note(call);
    match REFUSAL.swap(0, Ordering::Relaxed) {
        0 => {}
        code => return code as c_int,
    }
    LEFT.store(POLLS.load(Ordering::Relaxed), Ordering::Relaxed);
    if LEFT.load(Ordering::Relaxed) == 0 { 0 } else { 7 }
}

#[unsafe(no_mangle)]
extern "C" fn stub_set(what: c_int, value: i64) {
    let all = [&POLLS, &TROUBLE, &REFUSAL, &ABORT, &HALF, &LEFT, &VERSION];
    all[what as usize].store(value, Ordering::Relaxed);
}

/// Copies the calls so far, a line each, and tells their bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn stub_calls(into: *mut u8, room: usize) -> usize {
    let text = CALLS.lock().unwrap().join("\n");
    let bytes = text.len().min(room);
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), into, bytes) };
    text.len()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = VERSION.load(Ordering::Relaxed) as c_int };
    0
}

#[cfg(not(old))]
mod rest {
    use super::*;

    #[repr(C)]
    struct Id([u8; 128]);

    #[repr(C)]
    struct Head {
        size: usize,
        magic: c_uint,
        version: c_uint,
        blocking: c_int,
        cga: c_int,
        ctas_min: c_int,
        ctas_max: c_int,
        net_name: *const c_char,
        split_share: c_int,
    }

    unsafe fn told(config: *const Head) -> String {
        let c = unsafe { &*config };
        let text = |x: c_int| if x == c_int::MIN { "-".to_string() } else { x.to_string() };
        let known = HashSet::from([48, 72, 80]);
        assert!(c.magic == 0xcafebeef && known.contains(&c.size) && c.net_name.is_null());
        // What this version has beyond the beginning is not set, to the last byte.
        let whole = unsafe { std::slice::from_raw_parts(config.cast::<u8>(), c.size) };
        let rest = whole.get(56..).unwrap_or_default().chunks(4);
        let unset = rest.filter(|four| **four == [0, 0, 0, 0x80]).count();
        let (blocking, most) = (text(c.blocking), text(c.ctas_max));
        let share = text(c.split_share);
        let least = text(c.ctas_min);
        let (size, version) = (c.size, c.version);
        format!("size {size} version {version} blocking {blocking} ctas {least} to {most} ")
            + &format!("share {share} unset {unset}")
    }

    #[unsafe(no_mangle)]
    extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
        let text = match code {
            2 => c"unhandled system error",
            6 => c"remote process exited",
            _ => c"some error",
        };
        text.as_ptr()
    }
    #[unsafe(no_mangle)]
    extern "C" fn ncclGetLastError(_: Handle) -> *const c_char {
        c"no cable in port 3\n".as_ptr()
    }
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> c_int {
        unsafe { (*id).0 = std::array::from_fn(|at| at as u8) };
        begin("id".to_string()) % 7
    }
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ncclCommInitRankConfig(
        comm: *mut Handle, world: c_int, id: Id, rank: c_int, config: *const Head,
    ) -> c_int {
        let config = unsafe { told(config) };
        let code = begin(format!("init {rank}/{world} id {} {config}", id.0[127]));
        if code == 0 || code == 7 {
            unsafe { *comm = Box::into_raw(Box::new(world)).cast() };
        }
        code
    }
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ncclCommSplit(
        _: Handle, color: c_int, key: c_int, comm: *mut Handle, config: *const Head,
    ) -> c_int {
        begin(format!("split {color} {key} {}", unsafe { told(config) }));
        unsafe { *comm = std::ptr::null_mut() };
        // As the real one: success at once, the new communicator when the polls say so.
        let place = if color < 0 { std::ptr::null_mut() } else { comm };
        PLACE.store(place, Ordering::Relaxed);
        0
    }
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ncclCommGetAsyncError(_: Handle, state: *mut c_int) -> c_int {
        let left = LEFT.load(Ordering::Relaxed);
        let place = PLACE.load(Ordering::Relaxed);
        if left == 0 && !place.is_null() {
            let made = Box::into_raw(Box::new(HALF.load(Ordering::Relaxed) as c_int));
            unsafe { *place = made.cast() };
            PLACE.store(std::ptr::null_mut(), Ordering::Relaxed);
        }
        LEFT.store(if left > 0 { left - 1 } else { left }, Ordering::Relaxed);
        let trouble = TROUBLE.load(Ordering::Relaxed) as c_int;
        unsafe { *state = if left == 0 { trouble } else { 7 } };
        0
    }
    #[unsafe(no_mangle)]
    extern "C" fn ncclCommFinalize(_: Handle) -> c_int {
        begin("finalize".to_string())
    }
    #[unsafe(no_mangle)]
    extern "C" fn ncclCommDestroy(_: Handle) -> c_int {
        note("destroy".to_string());
        0
    }
    #[unsafe(no_mangle)]
    extern "C" fn ncclCommAbort(_: Handle) -> c_int {
        note("abort".to_string());
        std::thread::sleep(std::time::Duration::from_millis(ABORT.load(Ordering::Relaxed) as u64));
        note("aborted".to_string());
        0
    }
    #[cfg(revoke)]
    #[unsafe(no_mangle)]
    extern "C" fn ncclCommRevoke(_: Handle, flags: c_int) -> c_int {
        note(format!("revoke {flags}"));
        7
    }
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ncclCommCount(comm: Handle, count: *mut c_int) -> c_int {
        unsafe { *count = *comm.cast() };
        0
    }
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ncclCommUserRank(_: Handle, rank: *mut c_int) -> c_int {
        unsafe { *rank = 0 };
        0
    }
    #[unsafe(no_mangle)]
    extern "C" fn ncclGroupStart() -> c_int {
        note("(".to_string());
        0
    }
    #[unsafe(no_mangle)]
    extern "C" fn ncclGroupEnd() -> c_int {
        begin(")".to_string())
    }
    macro_rules! verbs {
        ($($name:ident ($($argument:ident),*);)*) => {$(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: usize),*) -> c_int {
                let mut text = stringify!($name)[4..].to_string();
                $(text.push_str(&match stringify!($argument) {
                    "comm" => String::new(),
                    "kind" | "op" | "rank" => format!(" {}", $argument as c_int),
                    _ => format!(" {}", $argument),
                });)*
                note(text);
                match REFUSAL.swap(0, Ordering::Relaxed) {
                    0 => if POLLS.load(Ordering::Relaxed) == 0 { 0 } else { 7 },
                    code => code as c_int,
                }
            }
        )*};
    }
    verbs! {
        ncclSend(from, count, kind, rank, comm, stream);
        ncclRecv(to, count, kind, rank, comm, stream);
        ncclBroadcast(from, to, count, kind, rank, comm, stream);
        ncclAllReduce(from, to, count, kind, op, comm, stream);
        ncclReduceScatter(from, to, count, kind, op, comm, stream);
        ncclAllGather(from, to, count, kind, comm, stream);
    }
}
