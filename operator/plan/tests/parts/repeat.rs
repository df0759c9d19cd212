use moejob_plan::repeat::{Repeat, is_own_fault};

#[test]
fn the_third_end_alike_is_one_too_often() {
    let mut repeat = Repeat::default();
    repeat.note("job-0 cannot open port 4001");
    repeat.note("job-1 cannot open port 4002");
    assert_eq!(repeat.too_often(), None);
    repeat.note("job-2 cannot open port 4003");
    assert_eq!(repeat.too_often(), Some(("job-2 cannot open port 4003", 3)));
}

#[test]
fn who_gives_up_itself_is_told_from_who_is_killed() {
    for how in ["killed by signal 6", "killed by signal 4 (SIGILL)"] {
        assert!(is_own_fault(how), "{how}");
    }
    for how in ["killed by signal 9", "killed by signal 11 (SIGSEGV)", "exit code 6", ""] {
        assert!(!is_own_fault(how), "{how}");
    }
}

#[test]
fn another_end_or_a_step_begins_the_count_anew() {
    let mut repeat = Repeat::default();
    for words in ["a", "a", "b", "a", "a"] {
        repeat.note(words);
        assert_eq!(repeat.too_often(), None, "{words}");
    }
    repeat.clear();
    repeat.note("a");
    assert_eq!(repeat.too_often(), None);
}
