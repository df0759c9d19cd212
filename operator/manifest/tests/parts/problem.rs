use moejob_manifest::pod;
use moejob_manifest::problem::{
    Code, Problem, bounded, bounded_lines, nearest, printable, printable_lines, quoted,
};
use serde_json::{Map, Value, json};

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

/// Three thousand problems below a name of 45,000 bytes made 657 MB of paths.
#[test]
fn problems_take_little_memory_whatever_names_they_repeat() {
    let long = "x".repeat(27_000);
    let fields: Map<String, Value> = (0..500).map(|at| (format!("$f{at}"), json!(1))).collect();
    let problems = pod::problems(&json!({ "spec": { long: fields } }));
    let texts = problems.iter().flat_map(|of| [&of.path, &of.found, &of.allowed, &of.advice]);
    let all: usize = texts.map(String::capacity).sum();
    assert!(all < 101 * 4_096, "{all} bytes");
    assert_eq!(problems.len(), 101);
    let last = problems.last().map(Problem::sentence).unwrap_or_default();
    let more = "E0211 spec.podTemplate: found 401 more problems;";
    assert!(last.starts_with(more), "{last}");
    let sentences = bounded_lines(problems.iter().map(Problem::sentence), 8 << 10);
    assert!(sentences.len() < 9 << 10, "{}", sentences.len());
    let (_, last) = sentences.rsplit_once('\n').expect("lines");
    assert!(last.starts_with("and ") && last.ends_with(" more"), "{last}");
}

#[test]
fn a_template_is_bounded_and_says_by_how_much() {
    let template = |length: usize| {
        let text = "x".repeat(length);
        json!({ "metadata": { "annotations": { "a": text } } })
    };
    let around = template(0).to_string().len();
    assert_eq!(pod::problems(&template(pod::TEMPLATE_BYTES_MAX - around)), []);
    let problems = pod::problems(&template(pod::TEMPLATE_BYTES_MAX - around + 1));
    let [problem] = &problems[..] else { panic!("{problems:?}") };
    assert_eq!((problem.code, &problem.path[..]), (Code::Length, "spec.podTemplate"));
    assert_eq!(problem.found, "32769 bytes as JSON");
}

#[test]
fn what_is_cut_says_so_and_characters_stay_whole() {
    assert_eq!(bounded("short", 5), "short");
    assert_eq!(bounded("longer", 5), "lo...");
    assert_eq!(bounded("\u{e9}\u{e9}\u{e9}", 5), "\u{e9}...");
    let lines = || ["one", "two", "three"].map(str::to_string);
    assert_eq!(bounded_lines(lines(), 100), "one\ntwo\nthree");
    assert_eq!(bounded_lines(lines(), 6), "one\ntwo\nand 1 more");
    assert_eq!(bounded_lines(lines(), 2), "...\nand 2 more");
}
