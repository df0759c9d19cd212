//! Where the time between two lines of metrics went.

mod common;

use common::{Job, run_and_see, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use std::time::{Duration, Instant};

/// Neither validation nor snapshots nor checkpoints nor what else keeps the loop is left out: the
/// rate of the step says what a step takes, that of the wall what it took all in all.
#[test]
fn a_line_tells_the_step_the_wall_and_what_held_the_next_one_up() {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
    // Snapshots behind steps 3, 6 and 9, validation and checkpoints behind 4, 8 and 10.
    assert_eq!((job.config.recovery.memory_every_steps, job.config.checkpoint.every_steps), (3, 4));
    job.config.data.validation.max_sequences = 100;
    let mut group = [trainers(1).remove(0)];
    const HELD_UP: Duration = Duration::from_millis(200);
    let mut seen = Vec::new();
    let (ends, reports) = run_and_see(&job, &mut group, &mut |report| {
        seen.push(Instant::now());
        if report.step == 6 {
            // As a terminal that takes no line.
            std::thread::sleep(HELD_UP);
        }
    });
    assert_eq!(ends, [AttemptEnd::Completed { step: 10 }]);
    let tokens = job.config.training.tokens_per_step() as f64;
    let mut walls = 0.0;
    for report in &reports {
        let (number, timing) = (report.step, &report.timing);
        let (step, wall) =
            (tokens / report.tokens_per_second, tokens / timing.wall_tokens_per_second);
        let stalls = &timing.stalls;
        let told = stalls.validation + stalls.snapshot + stalls.checkpoint;
        assert!(step + told <= wall * 1.001 + 1e-6, "step {number}: {step} s, {report:?}");
        // A snapshot and a checkpoint count on the line behind them.
        assert_eq!(stalls.validation > 0.0, [4, 8, 10].contains(&number), "{report:?}");
        assert_eq!(stalls.snapshot > 0.0, [1, 4, 7, 10].contains(&number), "{report:?}");
        assert_eq!(stalls.checkpoint > 0.0, [5, 9].contains(&number), "{report:?}");
        let held_up = if number == 7 { HELD_UP.as_secs_f64() } else { 0.0 };
        assert!(wall - step >= held_up, "step {number}: {step} s of {wall} s");
        walls += if number > 1 { wall } else { 0.0 };
    }
    // All lines together are all the time from the first to the last.
    let passed = seen[9].duration_since(seen[0]).as_secs_f64();
    assert!((walls - passed).abs() < 0.05 * passed + 0.02, "{walls} s told, {passed} s passed");
}
