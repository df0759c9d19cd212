//! Processes that are on their way out. A process that was killed gives its memory back before its
//! parent can wait for it and before its files are closed: 31 GB take the kernel seconds. Its flags
//! say so at once.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// How the process ends, where it is on its way and not as it should. One that ends with code 0
/// does so in its own time: nothing of it is told here.
pub fn status(pid: u32) -> Option<ExitStatus> {
    status_by(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// The same by its `/proc/PID/stat` (proc(5): field 9 are its flags, 52 is its status).
fn status_by(stat: &str) -> Option<ExitStatus> {
    // PF_EXITING.
    const EXITING: u64 = 4;
    // The name may have any characters.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace();
    let flags: u64 = fields.nth(9 - 3)?.parse().ok()?;
    let status: i32 = fields.nth(52 - 9 - 1)?.parse().ok()?;
    (flags & EXITING != 0 && status != 0).then(|| ExitStatus::from_raw(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_being_ended_says_by_what() {
        let of = |flags: u64, status: i32| {
            let zeros = |count| vec!["0"; count].join(" ");
            format!("42 (a ) b) D {} {flags} {} {status}\n", zeros(5), zeros(42))
        };
        let signal = |text: &str| status_by(text).and_then(|status| status.signal());
        assert_eq!(signal(&of(0x40_0104, 9)), Some(9));
        assert_eq!(signal(&of(0x40_0104, 0x80 | 11)), Some(11), "with a core");
        assert_eq!(signal(&of(0x40_0100, 9)), None, "it runs");
        assert_eq!(status_by(&of(0x40_0104, 0)), None, "as it should");
        assert_eq!(status_by(&of(0x40_0104, 70 << 8)).and_then(|status| status.code()), Some(70));
        for broken in ["", "42 (a", "42 (a) D", "42 (a) D 1 2 3"] {
            assert_eq!(signal(broken), None, "{broken}");
        }
        // As the kernel writes it.
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("a process");
        let own = || std::fs::read_to_string(format!("/proc/{}/stat", child.id()));
        assert_eq!(signal(&own().expect("it runs")), None);
        child.kill().expect("killed");
        let own = || std::fs::read_to_string(format!("/proc/{}/stat", child.id()));
        let tries = std::iter::repeat_with(|| signal(&own().unwrap_or_default())).take(100_000);
        assert_eq!(tries.flatten().next(), Some(9));
        child.wait().expect("it has ended");
    }
}
