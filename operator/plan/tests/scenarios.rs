//! Scenarios as text: `> what happens`, then what the leader does about it and why.

mod said;
mod texts;
mod world;

use moejob_manifest::job::Venue;
use moejob_plan::decide::{Action, Plan};
use moejob_plan::observed::WorkerState;
use moejob_plan::status::status;
use moejob_plan::track::Happening;
use moejob_plan::preflight::Pair;
use moejob_protocol::config::{Backend, Resume};
use moejob_protocol::links::Built;
use moejob_protocol::message::{LeftReason, Up};
use moejob_protocol::preflight::Measured;
use moejob_protocol::seat::Seated;
use std::collections::BTreeSet;
use std::fmt::Write;
use world::quality::Quality;
use world::{Setup, World};

#[test]
fn scenarios() {
    texts::replay("scenarios", run);
}

fn run(world: &mut World, words: &[&str]) -> String {
    let mut out = String::new();
    let plans = happen(world, words, &mut out);
    let last = plans.len().saturating_sub(1);
    let mut said: Vec<&String> = Vec::new();
    for (index, plan) in plans.iter().enumerate() {
        if !plan.actions.is_empty() || index == last {
            for why in plan.why.iter().filter(|why| !said.contains(why)) {
                writeln!(out, "  # {why}").expect("a string");
            }
            said.extend(&plan.why);
        }
        out.push_str(&actions(plan));
    }
    for happening in world.happenings.drain(..) {
        let line = match happening {
            Happening::WorkerLost { name, cause } => format!("lost {name}: {cause}"),
            Happening::EngineLost(loss) => {
                format!("lost the engine of rank {} on {}: {}", loss.rank, loss.place(), loss.cause)
            }
            Happening::Freezes { name, node } => format!("{name} is silent, and {node} freezes"),
            Happening::Measured { node, grade, text } => format!("{grade:?} {node}: {text}"),
            Happening::Rings(found) => format!("rings: {}", found.in_words().replace('\n', "; ")),
            Happening::Recovered(recovery) => format!(
                "recovered, {} ms after it was noticed that {}; {} steps to do again",
                recovery.first_step_at.unwrap_or_default() - recovery.detected_at,
                recovery.cause,
                recovery.steps_lost
            ),
        };
        writeln!(out, "  ! {line}").expect("a string");
    }
    if let Some(at) = plans.last().and_then(|plan| plan.requeue) {
        writeln!(out, "  look again in {} ms", at - world.now).expect("a string");
    }
    out
}

fn happen(world: &mut World, words: &[&str], out: &mut String) -> Vec<Plan> {
    let number = |index: usize| -> u64 {
        words.get(index).map_or(1, |word| word.parse().expect("a number"))
    };
    match words {
        ["job", settings @ ..] => *world = World::new(setup(settings)),
        ["connect"] => {
            let names: Vec<String> = world.sims.keys().cloned().collect();
            names.iter().for_each(|name| {
                world.connect(name);
            });
        }
        ["connect", names @ ..] => names.iter().for_each(|name| {
            assert!(world.connect(name), "{name} cannot connect");
        }),
        // What the workers say of it does not reach the leader yet.
        ["step", "unheard"] => {
            world.now += 100;
            assert!(world.step(), "no gang can do a step");
            return world.decide();
        }
        ["step" | "steps", ..] => {
            let mut plans = Vec::new();
            for _ in 0..number(1) {
                world.now += 100;
                if !world.step() {
                    out.push_str("  (no gang can do a step)\n");
                    break;
                }
                plans.extend(world.settle());
            }
            return plans;
        }
        ["advance", _] => world.now += number(1),
        ["kill", names @ ..] => names.iter().for_each(|name| world.kill(name, None)),
        ["crash", name] => {
            sim(world, name).how = "killed by signal 6 (SIGABRT)";
            world.kill(name, None);
        }
        ["exit", name, code] => world.kill(name, Some(code.parse().expect("a code"))),
        // It says why, and ends.
        ["fail", name, code, said @ ..] => {
            let code: i32 = code.parse().expect("a code");
            let told = Up::Failed { exit_code: code, message: said.join(" "), step: None };
            let attempt = sim(world, name).attempt;
            world.tracker.heard(name, attempt, &told, world.now);
            world.kill(name, Some(code));
        }
        // In the step behind so many.
        ["diverge", name, steps, said @ ..] => {
            let step = Some(steps.parse().expect("a number"));
            let told = Up::Failed { exit_code: 1, message: said.join(" "), step };
            let attempt = sim(world, name).attempt;
            world.tracker.heard(name, attempt, &told, world.now);
            world.kill(name, Some(1));
        }
        ["freeze", name] => sim(world, name).frozen = true,
        ["deaf", name] => sim(world, name).deaf = true,
        ["heal", name] => world.heal(name),
        ["cut", name] => sim(world, name).cut = true,
        ["silence", names @ ..] => names.iter().for_each(|name| world.silence(name)),
        ["notice", names @ ..] => names.iter().for_each(|name| {
            assert!(world.notice(name), "{name} has lost nobody");
        }),
        ["lost", name, _] => {
            let rank = number(2) as u32;
            sim(world, name).leave(LeftReason::PeerLost { rank });
        }
        ["device", name, _] => {
            let device = number(2);
            let sim = sim(world, name);
            let told = said::device_failed(sim.attempt, device);
            sim.up.push_back((sim.attempt, told));
            sim.leave(LeftReason::Error { message: format!("device {device} failed") });
        }
        ["stuck", name, _] => {
            sim(world, name).collective = number(2);
            world.beat();
        }
        // The last step is done: empty ones follow until the last checkpoint is committed.
        ["waits", names @ ..] => {
            for name in names {
                let sim = sim(world, name);
                sim.waits = true;
                sim.collective += 5;
            }
            world.beat();
        }
        ["beat"] => world.beat(),
        ["forget", name] => {
            sim(world, name).held.clear();
            world.beat();
        }
        ["show"] => show(world, out),
        ["nodes"] => nodes(world, out),
        _ => observe(world, words),
    }
    world.settle()
}

/// How often each was measured, and the condition.
fn nodes(world: &World, out: &mut String) {
    for (node, quality) in &world.qualities {
        let Quality { boot, times, .. } = quality;
        writeln!(out, "  {node}: boot {boot}, measured {times} times").expect("a string");
    }
    let job = moejob_manifest::identity::least();
    let status = status(&job, world.observed(), &[], &[], world.now);
    let told = ["PreflightPassed", "RingsVerified", "BindingVerified"];
    for of in status.conditions.iter().filter(|of| told.contains(&of.type_.as_str())) {
        writeln!(out, "  {} {} {}", of.type_, of.status, of.reason).expect("a string");
        for line in of.message.lines() {
            writeln!(out, "    {line}").expect("a string");
        }
    }
}

fn show(world: &World, out: &mut String) {
    writeln!(out, "  outcome: {:?}", world.outcome()).expect("a string");
    for worker in &world.observed().workers {
        let held: Vec<String> = (worker.held.iter())
            .map(|held| format!("{}@{}:{:?}", held.step, held.attempt, held.shards))
            .collect();
        let (name, node, state) = (&worker.name, &worker.node, describe(&worker.state));
        let stopping = if worker.stopping { ", stopping" } else { "" };
        writeln!(out, "  {name} {node}: {state}{stopping} {}", held.join(" ")).expect("a string");
    }
}

/// What the leader sees by itself, not through a worker.
fn observe(world: &mut World, words: &[&str]) {
    let number = |index: usize| -> u64 { words[index].parse().expect("a number") };
    match words {
        ["set", settings @ ..] => set(world, settings),
        ["stored", _] => world.store(number(1)),
        ["interrupt"] => world.tracker.observed.interrupt = true,
        ["suspend"] => world.tracker.observed.wanted.suspend = true,
        ["resume"] => world.tracker.observed.wanted.suspend = false,
        ["cordon", node] => world.node(node).usable = false,
        ["freezes", node] => world.node(node).freezes = true,
        ["thaws", node] => world.node(node).freezes = false,
        ["uncordon", node] => world.node(node).usable = true,
        ["call", "back", nodes @ ..] => {
            for node in nodes {
                let node = world.node(node);
                (node.usable, node.called_back) = (false, true);
            }
        }
        ["uncall"] => {
            for node in &mut world.tracker.observed.nodes {
                (node.usable, node.called_back) = (true, false);
            }
        }
        ["avoid", node, _] => world.node(node).avoid_until = world.now + number(2),
        ["drain", name] => {
            let workers = &mut world.tracker.observed.workers;
            workers.iter_mut().find(|of| of.name == *name).expect("a worker").stopping = true;
        }
        ["takeover"] => world.take_over(),
        ["measure", "never"] => world.tracker.observed.wanted.preflight = None,
        ["quality", node, checks @ ..] => {
            let measured = checks.iter().map(|check| {
                let (check, value) = check.split_once('=').expect("check=value");
                Measured::number(check, value.parse().expect("a number"))
            });
            let measured = measured.collect();
            world.qualities.entry(node.to_string()).or_default().measured = measured;
        }
        ["mute", node] => world.qualities.entry(node.to_string()).or_default().mute = true,
        ["link", node, _, times @ ..] => {
            let quality = world.qualities.entry(node.to_string()).or_default();
            quality.link = Some(number(2) as f64);
            quality.slow_times = times.first().map(|times| times.parse().expect("a number"));
        }
        ["tcp", node] => world.qualities.entry(node.to_string()).or_default().tcp = true,
        ["holds", node] => world.qualities.entry(node.to_string()).or_default().holds = true,
        ["tells", node] => world.qualities.entry(node.to_string()).or_default().holds = false,
        ["gpus"] => {
            world.tracker.observed.template.training.compute.backend = Backend::Cuda;
        }
        ["built", name, rank, before, behind, parents @ ..] => {
            let of = |word: &str| word.parse().expect("a rank");
            let built = Built {
                rank: of(rank),
                version: "2.28.9".to_string(),
                rings: BTreeSet::from([(of(before), of(behind))]),
                parents: parents.iter().map(|word| of(word)).collect(),
                ..Built::default()
            };
            tell_built(world, name, built);
        }
        ["seated", name, rank, found @ ..] => {
            let (rank, words) = (rank.parse().expect("a rank"), found.join(" "));
            let differs = !words.is_empty() && !words.contains("not ");
            let differences = Some(words.clone()).filter(|_| differs);
            let unknown = Some(words).filter(|of| of.contains("not ")).unwrap_or_default();
            let differences = differences.into_iter().collect();
            let sim = sim(world, name);
            let attempt = sim.attempt;
            sim.up.push_back((attempt, Up::Seated(Seated { rank, differences, unknown })));
        }
        ["unread", name, rank, why @ ..] => {
            let rank = rank.parse().expect("a rank");
            tell_built(world, name, Built { rank, unknown: why.join(" "), ..Built::default() });
        }
        ["reboot", node] => world.qualities.entry(node.to_string()).or_default().boot += 1,
        _ => panic!("no such command: {words:?}"),
    }
}

fn tell_built(world: &mut World, name: &str, built: Built) {
    let sim = sim(world, name);
    let attempt = sim.attempt;
    sim.up.push_back((attempt, Up::Built(built)));
}

fn sim<'w>(world: &'w mut World, name: &str) -> &'w mut world::sim::Sim {
    world.sims.get_mut(name).unwrap_or_else(|| panic!("{name} is no worker here"))
}

fn pairs<'a>(settings: &'a [&str]) -> impl Iterator<Item = (&'a str, u64)> {
    settings.iter().map(|setting| {
        let (key, value) = setting.split_once('=').expect("key=value");
        (key, value.parse().expect("a number"))
    })
}

fn setup(settings: &[&str]) -> Setup {
    let mut setup = Setup::default();
    for (key, value) in pairs(settings) {
        match key {
            "min" => setup.min = value as u32,
            "max" => setup.max = value as u32,
            "spares" => setup.spares = value as u32,
            "nodes" => setup.nodes = value as u32,
            "devices" => setup.devices = value as u32,
            "experts" => setup.experts = value as u32,
            "width" => setup.width = value as u32,
            "steps" => setup.steps = value,
            "memory" => setup.memory_every = value,
            "checkpoint" => setup.checkpoint_every = value,
            "restarts" => setup.restarts_max = value as u32,
            "preflight" => setup.preflight = value > 0,
            "pairs" => setup.pairs = value > 0,
            "speaks" => setup.speaks = value as u32,
            "pods" => setup.venue = Venue::Kubernetes,
            _ => panic!("no such setting: {key}"),
        }
    }
    setup
}

fn set(world: &mut World, settings: &[&str]) {
    let wanted = &mut world.tracker.observed.wanted;
    for (key, value) in pairs(settings) {
        match key {
            "min" => wanted.nodes_min = value as u32,
            "max" => wanted.nodes_max = value as u32,
            "spares" => wanted.spares = value as u32,
            "timeout" => wanted.step_timeout = value,
            _ => panic!("no such setting: {key}"),
        }
    }
}

fn actions(plan: &Plan) -> String {
    let mut out = String::new();
    let mut configured = Vec::new();
    for action in &plan.actions {
        let line = match action {
            Action::StartWorker { name, node } => format!("start {name} on {node}"),
            Action::StopWorker { name, grace } => format!("stop {name}, grace {grace} ms"),
            Action::EndAttempt { attempt, unplanned, cause } => {
                let counts = if *unplanned { "counts" } else { "does not count" };
                format!("end attempt {attempt}, which {counts}: {cause}")
            }
            Action::RecordAttempt(gang) => {
                let names: Vec<&str> = gang.members.iter().map(|of| of.worker.as_str()).collect();
                let mesh = gang.layout.mesh;
                let mesh = format!("dp {} ep {}", mesh.dp, mesh.ep);
                format!("record attempt {}: {} as {mesh}", gang.attempt, names.join(" "))
            }
            Action::Preflight { name } => format!("measure the node of {name}"),
            Action::GiveUp { name } => format!("give up {name}"),
            Action::NoteUnmeasured { name } => format!("{name} counts as failed"),
            Action::MeasurePairs(round) => {
                let pair = |pair: &Pair| {
                    let [(left, _), (right, _)] = &pair.sides;
                    format!("{}: {left} with {right}", pair.number)
                };
                let pairs: Vec<String> = round.pairs.iter().map(pair).collect();
                let none = if pairs.is_empty() { "none" } else { "" };
                format!("measure pairs: {}{none}", pairs.join(", "))
            }
            Action::RelayPair { number, name } => format!("pair {number}: {name} is to come"),
            Action::EndPair { number, late } => {
                format!("pair {number} is over{}", if *late { ", too late" } else { "" })
            }
            Action::Configure { name, config, .. } => {
                configured.push(name.as_str());
                if configured.len() < config.members.len() {
                    continue;
                }
                format!("configure {}: {}", configured.join(" "), resume(&config.resume))
            }
            Action::LeaveAttempt { name, attempt, reason } => {
                format!("tell {name} to leave attempt {attempt}: {reason}")
            }
            Action::BePatient { name, attempt } => {
                format!("tell {name} that steps of attempt {attempt} may take longer")
            }
            Action::Request { attempt, request, cause } => {
                let save = if request.checkpoint_now { ", with a checkpoint" } else { "" };
                format!("ask attempt {attempt} to stop for {cause:?}{save}")
            }
            Action::AvoidNode { node, until } => format!("avoid {node} until {until} ms"),
            Action::NoteStop => "the wish to stop is noted".to_string(),
            Action::WithdrawStop => "the wish to stop is withdrawn".to_string(),
            Action::Finish(outcome) => format!("finish: {outcome:?}"),
        };
        writeln!(out, "  - {line}").expect("a string");
    }
    out
}

fn resume(resume: &Resume) -> String {
    match resume {
        Resume::Fresh => "fresh".to_string(),
        Resume::Checkpoint { step, name } => format!("step {step} of {name}"),
        Resume::Memory { step, attempt, sources, .. } => {
            let from: Vec<String> = (sources.iter())
                .map(|source| format!("{}<-rank {}", source.shard, source.from))
                .collect();
            format!("step {step} of attempt {attempt}, shards {}", from.join(" "))
        }
    }
}

fn describe(state: &WorkerState) -> String {
    match state {
        WorkerState::Starting { .. } => "starting".to_string(),
        WorkerState::Idle => "idle".to_string(),
        WorkerState::Member { attempt, rank, leaving, .. } => {
            let leaving = if leaving.is_some() { ", leaving" } else { "" };
            format!("rank {rank} of attempt {attempt}{leaving}")
        }
        WorkerState::Left { attempt, reason } => format!("left attempt {attempt}: {reason:?}"),
        WorkerState::Completed { step, .. } => format!("completed at {step}"),
        WorkerState::Silent => "silent".to_string(),
        WorkerState::Dead { exit_code, .. } => format!("dead {exit_code:?}"),
    }
}
