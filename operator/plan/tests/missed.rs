//! Every scenario of the loop, where a single event is never seen, and where another leader takes
//! over at any moment with a view that lags. Once a list has told how things are, the job trains.

#[path = "lead_world/mod.rs"]
#[allow(dead_code, reason = "what other tests of the loop ask of it")]
mod lead_world;
mod said;
#[allow(dead_code, reason = "what other tests ask of it")]
mod texts;

use lead_world::World;

/// The longest patience is that for images and rests, ten minutes.
const SECONDS: u64 = 1_500;
/// What a watch or a stream tells, and may lose.
const TOLD: [&str; 15] = [
    "edit", "delete", "pod", "gone", "open", "heartbeat", "step", "left", "completed", "warns",
    "silent", "broken", "refused", "unjudged", "unspoken",
];

type Command = Vec<String>;

/// The stories of all scenarios: each begins with a job of the cluster.
fn stories() -> Vec<(String, Vec<Command>)> {
    let mut all: Vec<(String, Vec<Command>)> = Vec::new();
    for (path, text) in texts::scenarios("lead") {
        let file = path.file_name().unwrap_or_default().to_string_lossy().to_string();
        for (number, line) in (1..).zip(text.lines()) {
            let Some(command) = line.strip_prefix("> ") else { continue };
            let words: Command = command.split_whitespace().map(str::to_string).collect();
            if matches!(words[0].as_str(), "job" | "machine") {
                all.push((format!("{file}:{number}"), Vec::new()));
            }
            all.last_mut().expect("it begins with a job").1.push(words);
        }
    }
    all.retain(|(_, story)| story[0][0] == "job");
    assert!(all.len() > 15, "{}", all.len());
    all
}

fn words(command: &Command) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

#[test]
fn a_single_event_that_is_never_seen_costs_no_job() {
    let mut tried = 0;
    for (at, story) in stories() {
        for unseen in 0..story.len() {
            if !TOLD.contains(&story[unseen][0].as_str()) {
                continue;
            }
            let mut world = World::default();
            for (number, command) in story.iter().enumerate() {
                match number == unseen {
                    true => world.run_unseen(&words(command)),
                    false => drop(world.run(&words(command))),
                }
            }
            let outcome = world.live(SECONDS);
            outcome.unwrap_or_else(|why| panic!("{at}, without {:?}: {why}", story[unseen]));
            tried += 1;
        }
    }
    assert!(tried > 100, "{tried}");
}

#[test]
fn a_leader_whose_view_lags_costs_no_job() {
    let mut tried = 0;
    for (at, story) in stories() {
        for after in 1..story.len() {
            for lag in [1, 3] {
                let (mut world, mut views) = (World::default(), Vec::new());
                for command in &story[..after] {
                    world.run(&words(command));
                    views.push(world.view());
                }
                let view = &views[views.len().saturating_sub(lag + 1)];
                world.hand_over(100, view, after % 2 == 0);
                // It decides before the next list comes.
                for _ in 0..4 {
                    world.run(&["advance", "500"]);
                }
                let outcome = world.live(SECONDS);
                outcome.unwrap_or_else(|why| {
                    panic!("{at}, a view {lag} behind after {:?}: {why}", story[after - 1])
                });
                tried += 1;
            }
        }
    }
    assert!(tried > 300, "{tried}");
}
