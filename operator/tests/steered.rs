//! A run is steered where it goes on: what may change, what is told of it, and that the bits are
//! those of a run whose schedule said so from there.

mod place;

use place::Place;
use serde_json::Value;

fn steps(place: &Place, run: &str) -> Vec<Value> {
    let path = place.path(&format!("runs/{run}/metrics.jsonl"));
    let text = std::fs::read_to_string(path).expect("a run's steps");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Each step of one run has another rate, as its schedule says; the other run goes on after each
/// step with the next rate as a constant. Losses, norms and weights are the same bits.
#[test]
fn a_rate_that_is_lowered_where_a_run_goes_on_gives_the_bits_of_a_schedule() {
    const STEPS: usize = 5;
    let place = Place::new();
    let run = |name: &str, sets: &[String]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let asked: Vec<&str> =
            ["run", "job.yaml", "--name", name].into_iter().chain(sets).collect();
        place.said(&asked);
    };
    let falling = "training.schedule={linear: {minLearningRate: 1.0e-4}}".to_string();
    run("falling", &[falling, format!("training.steps={STEPS}")]);
    let whole = steps(&place, "falling");
    let rate = |step: &Value| step["learningRate"].clone();
    assert!(rate(&whole[0]).as_f64() > rate(&whole[STEPS - 1]).as_f64(), "{whole:?}");
    for (done, step) in whole.iter().enumerate() {
        let rate = rate(step).as_f64().expect("a rate");
        let rate = format!("training.optimizer.adamw.learningRate={rate}");
        run("steered", &[rate, format!("training.steps={}", done + 1)]);
    }
    let steered = steps(&place, "steered");
    assert_eq!(steered.len(), STEPS);
    for (whole, steered) in whole.iter().zip(&steered) {
        for field in ["step", "learningRate", "loss", "gradNorm"] {
            assert_eq!(whole[field], steered[field], "{field}: {whole} {steered}");
        }
    }
    let weights = |run: &str| {
        let out = format!("{run}-hf");
        place.said(&["checkpoint", "export", run, &out]);
        std::fs::read(place.path(&out).join("model.safetensors")).expect("a file")
    };
    assert!(weights("falling") == weights("steered"), "the same weights, to the last bit");
    // Each change is told, an event from its first step on, and on the page.
    let events = place.said(&["tail", "steered", "--events", "-n", "1000"]);
    let field = "training.optimizer.adamw.learningRate: was ";
    assert_eq!(events.matches(field).count(), STEPS - 1, "{events}");
    assert!(events.contains("SpecChanged"), "{events}");
    place.said(&["report", "steered"]);
    let page = std::fs::read_to_string(place.path("report.html")).expect("a page");
    assert!(page.contains("from here on training.optimizer.adamw.learningRate: was "));
}

/// Clipping, decay, validation and checkpoints may change, and so may the number of steps, up to
/// what is done. What is another job says how it begins with these weights.
#[test]
fn what_may_change_where_a_run_goes_on_is_told_and_the_rest_is_refused() {
    let place = Place::new();
    let run = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let output = place.moejob(&["run", "job.yaml"].into_iter().chain(sets).collect::<Vec<_>>());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), told)
    };
    assert_eq!(run(&["training.steps=20", "training.maxGradNorm=1.0"]).0, Some(0));
    let changes = [
        "training.steps=24",
        "training.maxGradNorm=0.5",
        "training.optimizer.adamw.weightDecay=0.2",
        "training.schedule={constant: {warmupSteps: 2}}",
        "data.validation.everySteps=2",
        "checkpoint.everySteps=4",
    ];
    let (code, told) = run(&changes);
    assert_eq!(code, Some(0), "{told}");
    for expected in [
        "from step 21 on training.steps: was 20, is 24",
        "from step 21 on training.maxGradNorm: was 1.0, is 0.5",
        "from step 21 on training.optimizer.adamw.weightDecay: was ",
        "from step 21 on training.schedule: was ",
        "from step 21 on data.validation.everySteps: was 5, is 2",
        "from step 21 on checkpoint.everySteps: was 5, is 4",
    ] {
        assert!(told.contains(expected), "{expected}: {told}");
    }
    let all = steps(&place, "small");
    let measured: Vec<&Value> =
        all.iter().filter(|step| step["validationLoss"].is_number()).collect();
    assert!(measured.iter().any(|step| step["step"] == 22), "{measured:?}");
    // Nothing has changed since, and nothing is told.
    let (code, told) = run(&[&changes[1..], &["training.steps=25"]].concat());
    assert!(code == Some(0) && !told.contains("maxGradNorm"), "{told}");
    // Fewer steps than are done are none.
    let (code, told) = run(&[&changes[1..], &["training.steps=10"]].concat());
    assert!(code == Some(2) && told.contains("has done 25 steps"), "{told}");
    assert!(told.contains("--set model.from.path=CHECKPOINT"), "{told}");
    // Another seed is another job, which may begin with these weights.
    let (code, told) = run(&[&changes[1..], &["training.seed=7", "training.steps=30"]].concat());
    assert!(code == Some(2) && told.contains("training.seed: was "), "{told}");
    let command = told.lines().find_map(|line| line.split_once("weights: moejob ")).expect("one").1;
    let command = format!("{} {}", place::PROGRAM, command.replace("OTHER", "other"));
    let output = place.command("sh", &["-c", &command]);
    assert!(output.status.success(), "{command}: {output:?}");
    let first = &steps(&place, "other")[0];
    assert!(first["loss"].as_f64() < Some(4.0), "it knows something already: {first}");
    let wider = ["model.hiddenSize=32", "training.steps=30"];
    let (code, told) = run(&[&changes[1..], &wider].concat());
    assert!(code == Some(2) && told.contains("its weights fit no other model"), "{told}");
}

/// `--budget` measures a few steps, plans as many as fit, and goes on with as many.
#[test]
fn a_budget_of_time_plans_the_steps() {
    let place = Place::new();
    let run = |name: &str, budget: &str| {
        let asked = ["run", "job.yaml", "--name", name, "--budget", budget, "--set"];
        let output = place.moejob(&[&asked[..], &["checkpoint.everySteps=1000"]].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{told}");
        let planned = told.split("training.steps is ").nth(1);
        let number = |text: &str| text.lines().next().and_then(|line| line.parse::<u64>().ok());
        (planned.and_then(number), told)
    };
    let (planned, told) = run("timed", "2s");
    let planned = planned.unwrap_or_else(|| panic!("no plan: {told}"));
    assert_eq!(steps(&place, "timed").len() as u64, planned, "{told}");
    let (more, told) = run("longer", "8s");
    assert!(more > Some(planned), "more time, more steps: {told}");
    let (_, told) = run("timed", "2s");
    assert!(told.contains(&format!("goes on with the {planned} steps")), "{told}");
    let (code, told) = place.refused(&["run", "job.yaml", "--budget", "soon"]);
    assert!(code == 2 && told.contains("a time such as 90s, 5m or 2h"), "{told}");
}
