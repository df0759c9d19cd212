use moejob_plan::repeat::{End, Repeat, gives_up_itself, is_own_fault};

fn end(words: &str, step: u64, in_step: bool) -> End {
    End { words: words.to_string(), step, in_step }
}

#[test]
fn the_third_end_alike_is_one_too_often() {
    let mut repeat = Repeat::default();
    repeat.note(end("job-0 cannot open port 4001", 0, false));
    repeat.note(end("job-1 cannot open port 4002", 0, false));
    assert_eq!(repeat.too_often(true), None);
    let last = end("job-2 cannot open port 4003", 0, false);
    repeat.note(last.clone());
    assert_eq!(repeat.too_often(true), Some((&last, 3)));
    assert_eq!(repeat.too_often(false), None, "another node may do better");
}

#[test]
fn the_second_end_alike_in_a_step_is_one_too_often_anywhere() {
    let nan = |step, in_step| end("the loss is not finite", step, in_step);
    for is_local in [true, false] {
        let mut repeat = Repeat::default();
        repeat.note(nan(7, true));
        assert_eq!(repeat.too_often(is_local), None);
        repeat.note(nan(9, true));
        assert_eq!(repeat.too_often(is_local), None, "another step");
        // The next attempt resumes there, and does none.
        repeat.note(nan(9, false));
        assert_eq!(repeat.too_often(is_local), Some((&nan(9, true), 2)));
        repeat.note(end("out of memory", 9, true));
        assert_eq!(repeat.too_often(is_local), None, "another cause");
        repeat.clear();
        repeat.note(end("out of memory", 9, true));
        assert_eq!(repeat.too_often(is_local), None, "one was killed in between");
    }
}

#[test]
fn who_gives_up_itself_is_told_from_who_is_killed() {
    for how in ["killed by signal 6", "killed by signal 4 (SIGILL)", "exit code 137 (OOMKilled)"] {
        assert!(is_own_fault(how), "{how}");
    }
    let others =
        ["killed by signal 9", "killed by signal 11 (SIGSEGV)", "exit code 6", "exit code 137", ""];
    for how in others {
        assert!(!is_own_fault(how), "{how}");
    }
    for cause in ["exit code 101: index out of bounds", "CUDA_ERROR_OUT_OF_MEMORY"] {
        assert!(gives_up_itself(cause), "{cause}");
    }
    for cause in ["killed by signal 9", "exit code 70: waiting for the device was given up", ""] {
        assert!(!gives_up_itself(cause), "{cause}");
    }
}

#[test]
fn another_end_begins_the_count_anew() {
    let mut repeat = Repeat::default();
    for words in ["a", "a", "b", "a", "a"] {
        repeat.note(end(words, 0, false));
        assert_eq!(repeat.too_often(true), None, "{words}");
    }
    repeat.clear();
    repeat.note(end("a", 0, false));
    assert_eq!(repeat.too_often(true), None);
}
