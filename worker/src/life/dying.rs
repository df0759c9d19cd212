//! Processes that are on their way out. A process that was killed gives its memory back before its
//! parent can wait for it and before its files are closed: 31 GB take the kernel seconds. Its flags
//! say so at once.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// What a look at a process shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Runs,
    /// By a signal: SIGSTOP, or one of a terminal's.
    Stopped,
    /// It is on its way out, and not as it should. One that ends with code 0 does so in its own
    /// time: nothing of it is told here.
    Ends(ExitStatus),
}

/// How the process ends, where it is on its way.
pub fn status(pid: u32) -> Option<ExitStatus> {
    match look(pid) {
        Look::Ends(status) => Some(status),
        Look::Runs | Look::Stopped => None,
    }
}

/// What the process does. One that is gone runs, until its parent has waited for it.
pub fn look(pid: u32) -> Look {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.ok().and_then(|stat| look_by(&stat)).unwrap_or(Look::Runs)
}

/// The same by its `/proc/PID/stat` (proc(5): field 3 is its state, 9 are its flags, 52 is its
/// status). A debugger's stop has the state `t`.
fn look_by(stat: &str) -> Option<Look> {
    // PF_EXITING.
    const EXITING: u64 = 4;
    // The name may have any characters.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    let flags: u64 = fields.nth(9 - 4)?.parse().ok()?;
    let status: i32 = fields.nth(52 - 9 - 1)?.parse().ok()?;
    Some(match flags & EXITING != 0 && status != 0 {
        true => Look::Ends(ExitStatus::from_raw(status)),
        false if state == "T" => Look::Stopped,
        false => Look::Runs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_being_ended_says_by_what() {
        let in_state = |state: &str, flags: u64, status: i32| {
            let zeros = |count| vec!["0"; count].join(" ");
            format!("42 (a ) b) {state} {} {flags} {} {status}\n", zeros(5), zeros(42))
        };
        let of = |flags, status| in_state("D", flags, status);
        let status_by = |text: &str| match look_by(text) {
            Some(Look::Ends(status)) => Some(status),
            _ => None,
        };
        let signal = |text: &str| status_by(text).and_then(|status| status.signal());
        assert_eq!(look_by(&in_state("T", 0x40_0100, 0)), Some(Look::Stopped));
        assert_eq!(look_by(&in_state("t", 0x40_0100, 0)), Some(Look::Runs), "by a debugger");
        assert_eq!(signal(&in_state("T", 0x40_0104, 9)), Some(9));
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
