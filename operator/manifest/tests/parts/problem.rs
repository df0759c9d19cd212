use moejob_manifest::problem::{nearest, printable, printable_lines, quoted};

#[test]
fn the_nearest_name_is_suggested() {
    let names = ["experts", "hiddenSize", "steps", "expert"];
    let near = |typed| nearest(typed, names.into_iter());
    assert_eq!(near("hidden_size"), Some("hiddenSize"));
    assert_eq!(near("step"), Some("steps"));
    assert_eq!(near("expertz"), Some("expert"));
    assert_eq!(near("colour"), None);
}

#[test]
fn words_of_others_cannot_disturb_a_terminal() {
    assert_eq!(printable("a\u{1b}[2J\nb\u{9b}\u{202e}"), "a\\u{1b}[2J b\\u{9b}\\u{202e}");
    assert_eq!(printable_lines("a\tb\r\nc\u{7}"), "a\tb \nc\\u{7}");
    assert_eq!(printable("ümläut 漢字"), "ümläut 漢字");
}

#[test]
fn typed_text_cannot_disturb_a_terminal() {
    assert_eq!(quoted("a\u{1b}[2J\u{202e}b"), "`a\\u{1b}[2J\\u{202e}b`");
    assert_eq!(quoted(&"x".repeat(70)), format!("`{}...` (70 bytes)", "x".repeat(60)));
}
