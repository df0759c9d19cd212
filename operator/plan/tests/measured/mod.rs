//! What many inputs cost: the slowest one, and the most memory that the process has had.

use std::fmt;
use std::sync::Mutex;

/// Of a processor and an optimized build, held where somebody asks for a number of inputs.
const SECONDS_MAX: f64 = 1.0;
/// Of this process, and so of the dearest input and the test around it.
const MEMORY_KIB_MAX: u64 = 64 << 10;
/// Inputs between two words about them.
const TOLD_EVERY: u64 = 100_000;

/// A count or a seed that the caller names.
pub fn asked(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

pub struct Most {
    inputs: u64,
    seconds: f64,
    slowest: String,
}

impl Most {
    pub const NOTHING: Most = Most { inputs: 0, seconds: 0.0, slowest: String::new() };

    /// Tells of the inputs so far.
    pub fn tell(&self) {
        eprintln!("{self}");
    }
}

/// Runs one input. `variable` names the number of inputs that was asked for, if any.
pub fn within<T>(most: &Mutex<Most>, variable: &str, input: &[u8], run: impl FnOnce() -> T) -> T {
    let began = thread_seconds();
    let done = run();
    let seconds = thread_seconds() - began;
    let mut most = most.lock().expect("no test failed while it told");
    most.inputs += 1;
    if seconds > most.seconds {
        most.seconds = seconds;
        most.slowest = String::from_utf8_lossy(input).into_owned();
    }
    if most.inputs.is_multiple_of(TOLD_EVERY) {
        most.tell();
    }
    let timed = std::env::var_os(variable).is_some();
    assert!(!timed || seconds <= SECONDS_MAX, "{seconds:.3} s: {most}");
    if most.inputs.is_multiple_of(TOLD_EVERY) || seconds > SECONDS_MAX / 100.0 {
        let memory = memory_kib();
        assert!(memory.is_none_or(|kib| kib <= MEMORY_KIB_MAX), "{memory:?} KiB: {most}");
    }
    done
}

impl fmt::Display for Most {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = memory_kib().map_or("unknown".to_string(), |kib| format!("{kib} KiB"));
        let start: String = self.slowest.chars().take(1_000).collect();
        let Most { inputs, seconds, .. } = self;
        write!(f, "{inputs} inputs, memory {memory}, the slowest {seconds:.4} s: {start:?}")
    }
}

/// What this thread has had of a processor: others may have it meanwhile. Zero where the system
/// does not tell it.
fn thread_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|word| word.parse::<f64>().ok());
    nanoseconds.unwrap_or(0.0) / 1e9
}

/// The most resident memory that this process has had, if the system tells it.
fn memory_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}
