use super::*;
use moejob_protocol::config::Exchange;

const LETTERS: [char; 4] = ['a', 'b', 'c', 'd'];

/// Plays two ranks that begin `steps N` steps (20) and try `ways N` (2), of which the first is `a`.
/// `b 80 90`: times of a step of the way b on the slower rank, by turns; 100 where nothing is said.
/// `late N`: the times of a step are heard once so many behind it were begun (1). `skip 4 6`: they
/// do not count on one rank, `skip-all` on none. `kept b`: an earlier attempt chose it. Gives the
/// ways of all steps, and what was chosen, with the medians.
fn played(input: &str) -> String {
    let (mut steps, mut ways, mut late) = (20, 2, 1);
    let mut times = vec![vec![100]; LETTERS.len()];
    let (mut skipped, mut skips_all, mut kept) = (Vec::new(), false, None);
    for line in input.split(',') {
        let mut words = line.split_whitespace();
        let word = words.next().unwrap_or_default();
        let rest: Vec<&str> = words.collect();
        let numbers: Vec<u64> = rest.iter().filter_map(|word| word.parse().ok()).collect();
        let way = |word: &str| LETTERS.iter().position(|letter| word == letter.to_string());
        match word {
            "" => {}
            "steps" => steps = numbers[0],
            "ways" => ways = numbers[0] as usize,
            "late" => late = numbers[0],
            "skip" => skipped = numbers,
            "skip-all" => skips_all = true,
            "kept" => kept = way(rest[0]),
            letter => {
                let way = way(letter).unwrap_or_else(|| panic!("{letter}"));
                times[way] = numbers.iter().map(|number| *number as u32).collect();
            }
        }
    }
    let kept = kept.map(|way| Chosen { way, medians: vec![None; ways] });
    let mut trials = Trials::new(ways, kept);
    let mut turns = vec![0; ways];
    let (mut out, mut waiting) = (String::new(), VecDeque::new());
    // An attempt may begin at any step of the job.
    for step in 0..steps {
        let way = trials.way_of(1000 + step);
        out.push(LETTERS[way]);
        if trials.awaits(1000 + step) {
            let time = times[way][turns[way] % times[way].len()];
            turns[way] += 1;
            let counts = !skips_all && !skipped.contains(&step);
            waiting.push_back((step, [Some(time).filter(|_| counts), Some(time - 1)]));
        }
        while let Some((told, all)) = waiting.pop_front_if(|(told, _)| *told + late <= step) {
            let before = trials.chosen().is_some();
            let chosen = trials.heard(1000 + told, all).is_some();
            assert_eq!(chosen, trials.chosen().is_some() && !before, "told once");
            assert!(trials.heard(1000 + told, all).is_none(), "a step is heard once");
        }
    }
    let Some(Chosen { way, medians }) = trials.chosen() else { return out };
    let told = |median: &Option<u32>| median.map_or("-".to_string(), |time| time.to_string());
    let medians: Vec<String> = medians.iter().map(told).collect();
    format!("{out} {}: {}", LETTERS[*way], medians.join(" "))
}

#[track_caller]
fn check(input: &str, expected: &str) {
    assert_eq!(played(input), expected, "{input}");
}

#[test]
fn ways_take_turns_and_the_fastest_stays() {
    // Two steps to get warm, five of each, one until the last time is heard.
    check("b 80", "abababababababbbbbbb b: 100 80");
    check("b 120", "ababababababaaaaaaaa a: 100 120");
    check("ways 3, b 90, c 80, steps 22", "abcabcabcabcabcabcaccc c: 100 90 80");
    check("ways 4, d 50, steps 28", "abcdabcdabcdabcdabcdabcdaddd d: 100 100 100 50");
}

#[test]
fn a_job_may_end_before_anything_is_chosen() {
    check("steps 1", "a");
    check("steps 12, b 50", "abababababab");
}

#[test]
fn the_planned_way_stays_unless_another_is_faster_by_a_twentieth() {
    check("steps 14", "ababababababaa a: 100 100");
    check("steps 14, b 96", "ababababababaa a: 100 96");
    check("steps 14, b 95", "ababababababab b: 100 95");
    // Of others that are alike the first.
    check("steps 20, ways 3, b 80, c 80", "abcabcabcabcabcabcab b: 100 80 80");
}

#[test]
fn noise_that_is_larger_than_the_difference_keeps_the_planned_way() {
    // Medians of 80; half of the steps are 30 and more away from it, or 15 and less.
    check("steps 14, b 50 120 80 120 50", "ababababababaa a: 100 80");
    check("steps 14, b 65 95 80 95 65", "ababababababab b: 100 80");
    check("steps 14, a 50 150 100 150 50, b 80", "ababababababaa a: 100 80");
    // One step that was held up says nothing.
    check("steps 14, b 80 80 9000 80 80", "ababababababab b: 100 80");
    check("steps 14, a 100 1 100 100 100, b 80", "ababababababab b: 100 80");
}

#[test]
fn a_step_that_does_not_count_is_made_up_for() {
    // The second one of a: as soon as that is known, a has another turn.
    check("steps 16, b 80, skip 4", "abababaababababb b: 100 80");
    // The last one of b: the planned way is taken until its time is known, and then b once more.
    check("steps 16, b 80, skip 11", "abababababababab b: 100 80");
}

#[test]
fn a_way_of_which_too_few_steps_count_is_not_taken() {
    // Ten of each, and no more.
    let all = "ab".repeat(11);
    check("steps 26, b 80, skip-all", &format!("{all}aaaa a: - -"));
}

#[test]
fn times_that_come_late_are_waited_for() {
    // Two steps may be begun before the times of the one before them are there.
    check("steps 16, late 2, b 80", "ababababababaabb b: 100 80");
    check("steps 18, late 5, b 80", "ababababababaaaaab b: 100 80");
}

#[test]
fn what_is_known_is_not_tried() {
    check("steps 5, kept b", "bbbbb b: - -");
    check("steps 5, ways 1", "aaaaa a: -");
}

/// What no rank waits for changes nothing.
#[test]
fn words_about_other_steps_are_left_alone() {
    let mut trials = Trials::new(2, None);
    assert_eq!(trials.heard(0, [Some(1)]), None);
    assert_eq!([0, 1, 2].map(|step| trials.way_of(step)), [0, 1, 0]);
    // The second one is a step to get warm.
    assert!([0, 1, 3].iter().all(|step| !trials.awaits(*step)) && trials.awaits(2));
    assert_eq!(trials.heard(1, [Some(1)]), None);
    assert!(trials.times.iter().all(Vec::is_empty));
}

#[test]
fn medians_are_those_of_the_middle() {
    let found = [&[3][..], &[9, 1], &[5, 1, 9], &[4, 8, 1, 6], &[u32::MAX, u32::MAX]];
    assert_eq!(found.map(|times| median(times.to_vec())), [3, 5, 5, 5, u32::MAX]);
    assert_eq!(deviation(&[100, 100, 4000, 101, 90]), 1);
    assert_eq!(deviation(&[1, u32::MAX]), u32::MAX / 2);
}

#[test]
fn what_was_chosen_is_told_as_bytes() {
    let chosen = Chosen { way: 2, medians: vec![Some(1), None, Some(u32::MAX)] };
    let bytes = chosen.encode();
    assert_eq!(Chosen::decode(&bytes, 3), Some(chosen));
    // Nothing, of other ways, torn, and a way that there is not.
    for (bytes, ways) in [(&[][..], 3), (&bytes, 2), (&bytes, 4), (&bytes[..15], 3)] {
        assert_eq!(Chosen::decode(bytes, ways), None, "{bytes:?}");
    }
    assert_eq!(Chosen::decode(&Chosen { way: 3, medians: vec![None; 3] }.encode(), 3), None);
}

fn two() -> Trying {
    let way = |exchange| Way { exchange, chunks: 1 };
    Trying::new(vec![way(Exchange::Flat), way(Exchange::Hierarchical)], None)
}

/// A step's time is told with the words of the next one.
#[test]
fn the_own_time_is_told_once_a_measured_step_is_over() {
    let mut trying = two();
    let mut said = Vec::new();
    for step in 7..11 {
        trying.begin(step);
        trying.took(Duration::from_micros(step));
        trying.over(false);
        said.push(trying.say());
        assert_eq!(trying.hear([None, None]), None);
    }
    assert_eq!(said, [None, None, Some(9), Some(10)]);
    // Empty steps behind the last one tell nothing again.
    assert_eq!(trying.say(), None);
    assert_eq!(trying.hear([None]), None);
}

#[test]
fn a_step_that_is_done_again_and_one_that_is_disturbed_do_not_count() {
    let step = |trying: &mut Trying, step| {
        trying.begin(step);
        trying.took(Duration::from_millis(1));
    };
    let mut trying = two();
    for warm in 0..2 {
        step(&mut trying, warm);
        trying.over(false);
    }
    // Behind a snapshot; the step after that counts.
    trying.disturb();
    step(&mut trying, 2);
    trying.over(false);
    assert_eq!(trying.say(), None);
    step(&mut trying, 3);
    assert_eq!(trying.hear([None, Some(5)]), None);
    trying.over(false);
    assert_eq!((trying.say(), trying.way().exchange), (Some(1000), Exchange::Hierarchical));
    // Two were begun when the first of them is done again.
    step(&mut trying, 4);
    step(&mut trying, 5);
    for _ in 4..6 {
        trying.over(trying.over.step == 3);
        assert_eq!(trying.say(), None);
    }
    step(&mut trying, 6);
    trying.over(false);
    assert_eq!(trying.say(), Some(1000));
}
