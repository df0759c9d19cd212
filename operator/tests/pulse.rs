//! The operator's own end: what a panic and a loop that hangs do to the process.

use moejob::pulse::{self, Pulse};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// Set in the process that is to end.
const VICTIM: &str = "MOEJOB_TEST_VICTIM";
const ABORTED: i32 = 6;

fn is_victim() -> bool {
    std::env::var_os(VICTIM).is_some()
}

/// This test again, in a process of its own.
fn victim(test: &str) -> ExitStatus {
    let me = std::env::current_exe().expect("this test");
    let mut command = Command::new(me);
    command.args(["--exact", test, "--nocapture"]).env(VICTIM, "1");
    command.status().expect("it runs")
}

#[test]
fn a_panic_in_a_task_ends_the_process() {
    if is_victim() {
        pulse::abort_on_panic();
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let task = runtime.spawn(async { panic!("as asked") });
        let _ = runtime.block_on(task);
        std::process::exit(0);
    }
    assert_eq!(victim("a_panic_in_a_task_ends_the_process").signal(), Some(ABORTED));
}

#[test]
fn a_loop_that_does_not_answer_ends_the_process_and_one_that_does_goes_on() {
    if is_victim() {
        let pulse = Pulse::default();
        pulse.guard().expect("a thread");
        // It answers for longer than it may be silent.
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(14) {
            pulse.beat();
            std::thread::sleep(Duration::from_millis(100));
        }
        std::thread::sleep(Duration::from_secs(60));
        std::process::exit(0);
    }
    let begin = Instant::now();
    let status = victim("a_loop_that_does_not_answer_ends_the_process_and_one_that_does_goes_on");
    assert_eq!(status.signal(), Some(ABORTED));
    let took = begin.elapsed();
    assert!(took > Duration::from_secs(22) && took < Duration::from_secs(300), "{took:?}");
}
