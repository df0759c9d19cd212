//! One job's loop, step by step: `> what happens`, then the effects in their order.

#[path = "lead_world/mod.rs"]
#[allow(dead_code, reason = "what other tests of the loop ask of it")]
mod lead_world;
mod said;
mod texts;

use lead_world::World;

#[test]
fn every_arm_of_the_loop_does_what_its_scenario_says() {
    texts::replay("lead", World::run);
}

/// A loop that is asked again at once has nothing more to say, and never wants to be asked at a
/// time that has passed: each would be a turn a millisecond.
#[test]
fn a_turn_is_complete_and_what_is_due_lies_ahead() {
    let mut world = World::default();
    let script = "job min=2 max=2|grant n0 n1|written|written|pod a-a1-0 n0 running|\
        pod a-a1-1 n1 running|open a-a1-0|open a-a1-1|written|step a-a1-0 1|silent a-a1-1|\
        advance 500|pod a-a1-1 n1 deleting|written|advance 25000|fail other|advance 1000|\
        fail other|advance 100000|fail slow|gone a-a1-1|advance 1000|written|edit suspend=true|\
        advance 70000|written";
    for command in script.split('|') {
        world.run(&command.split_whitespace().collect::<Vec<_>>());
        for _ in 0..200 {
            let now = world.now;
            let turn = world.job().turn(now);
            assert!(turn.effects.is_empty(), "{command}: {:?}", turn.effects);
            assert!(turn.due.is_none_or(|at| at > world.now), "{command}: {:?}", turn.due);
        }
    }
}
