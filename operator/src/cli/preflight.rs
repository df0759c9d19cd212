//! `moejob preflight`: checks of this machine that need nobody else, against its profile.

use super::doctor::profile::{self, Difference};
use super::profiles::OwnProfiles;
use clap::{Args, ValueEnum};
use moe_worker::life::binding::apply::{locked_bytes_max, too_little_lockable};
use moe_worker::life::machine::{Machine, sys};
use moe_worker::life::preflight::{gpu_states, host_copies};
use moejob_plan::preflight::{Check, Grade, Measured, Outcome, Value, judge};
use moejob_plan::problem::{printable, printable_lines};
use moejob_plan::profile::{Backend, Profile};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Args)]
pub struct PreflightArgs {
    /// The profile whose limits count, as spec.nodes.profile names it.
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    pub profile: String,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
    /// Read the machine from a folder like /sys.
    #[arg(long, hide = true, value_name = "ROOT")]
    pub sys: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    Text,
    Json,
}

/// Exits with 1 where a check fails, and with 2 where there is no such profile.
pub fn run(args: &PreflightArgs) -> ExitCode {
    let profiles = match args.profiles.read() {
        Ok(profiles) => profiles,
        Err(error) => return refused(&error),
    };
    let Some(profile) = profiles.get(&args.profile) else {
        let known: Vec<&str> = profiles.names().collect();
        let (name, known) = (&args.profile, known.join(", "));
        return refused(&format!("--profile: there is no {name:?}; known: {known}"));
    };
    let here = Machine::here().unwrap_or_default();
    let machine = match &args.sys {
        Some(root) => sys::read(root, None),
        None => here.clone(),
    };
    let mut measured = places(&machine, profile);
    measured.push(locked_memory(profile));
    measured.extend(gpus(profile));
    measured.extend(copies(&here));
    let outcomes = judge(&profile.expect, &measured);
    let worst = outcomes.iter().map(|outcome| outcome.grade).max().unwrap_or(Grade::Good);
    print!("{}", match args.output {
        Output::Text => text(&outcomes),
        Output::Json => {
            let all = json!({ "profile": profile.name, "grade": worst, "outcomes": outcomes });
            format!("{}\n", serde_json::to_string_pretty(&all).unwrap_or_default())
        }
    });
    if worst == Grade::Fail { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn refused(error: &str) -> ExitCode {
    eprintln!("moejob: {}", printable_lines(error));
    ExitCode::from(2)
}

/// What /sys says against the profile: a line a difference, or one that all is as it should be.
fn places(machine: &Machine, profile: &Profile) -> Vec<Measured> {
    let differences = profile::compare(machine, profile);
    let mut checks = vec![Check::Numa];
    if profile.backend == Backend::Cuda {
        checks.push(Check::Gpus);
    }
    if profile.rdma.is_some() {
        checks.extend([Check::Cards, Check::Links, Check::Rates]);
    }
    let mut measured: Vec<Measured> = differences.iter().map(wrong).collect();
    for check in checks {
        if differences.iter().all(|difference| difference.check != check) {
            measured.push(Measured::of_check(check, Value::Fine(found(check, machine))));
        }
    }
    measured
}

/// Only what the machine lacks keeps a node from being used; a wrong map makes it slower.
fn wrong(difference: &Difference) -> Measured {
    let lacks = difference.check != Check::Numa && difference.odd == profile::Odd::Machine;
    let grade = if lacks { Grade::Fail } else { Grade::Warn };
    let what = format!("{}: {}", difference.odd.in_words(), difference.what);
    Measured::of_check(difference.check, Value::Wrong { grade, what })
}

fn found(check: Check, machine: &Machine) -> String {
    let ports = || machine.hcas.iter().filter_map(|hca| hca.usable_port());
    match check {
        Check::Numa => format!("{} NUMA nodes", machine.nodes.len()),
        Check::Gpus => format!("{} GPUs", machine.gpus.len()),
        Check::Cards => format!("{} cards", machine.hcas.len()),
        Check::Links => format!("{} ports are InfiniBand and ACTIVE", ports().count()),
        Check::Rates => {
            let rates = ports().filter_map(|port| port.rate).fold(0.0, f64::max);
            format!("{rates} Gb/s")
        }
        _ => String::new(),
    }
}

fn locked_memory(profile: &Profile) -> Measured {
    let limit = locked_bytes_max();
    let value = match (too_little_lockable(limit), &profile.rdma) {
        (Some(what), Some(_)) => Value::Wrong { grade: Grade::Fail, what },
        _ => Value::Fine(match limit {
            Some(bytes) => format!("{} KiB", bytes >> 10),
            None => "without a limit".to_string(),
        }),
    };
    Measured::of_check(Check::LockedMemory, value)
}

/// Clocks and errors, by the driver's NVML.
fn gpus(profile: &Profile) -> Vec<Measured> {
    if profile.backend != Backend::Cuda {
        return Vec::new();
    }
    let states = match gpu_states() {
        Ok(states) => states,
        Err(why) => {
            let unmeasured = |check| Measured::of_check(check, Value::Unmeasured(why.clone()));
            return vec![unmeasured(Check::Clocks), unmeasured(Check::Ecc)];
        }
    };
    let mut measured = Vec::new();
    for state in states {
        let clocks = match state.slowed_by.is_empty() {
            true => Value::Fine("nothing slows it".to_string()),
            false => {
                let what = format!("slowed by {}", state.slowed_by.join(", "));
                Value::Wrong { grade: Grade::Warn, what }
            }
        };
        let errors = match state.ecc_uncorrected {
            None => Value::Unmeasured("the driver does not tell".to_string()),
            Some(0) => Value::Fine("no errors".to_string()),
            Some(count) => {
                let what = format!("{count} errors since the driver was loaded");
                Value::Wrong { grade: Grade::Fail, what }
            }
        };
        for (check, value) in [(Check::Clocks, clocks), (Check::Ecc, errors)] {
            let of = state.name.clone();
            measured.push(Measured { of, ..Measured::of_check(check, value) });
        }
    }
    measured
}

/// Copies within each NUMA node of this machine, and whether threads stay where they are bound.
fn copies(machine: &Machine) -> Vec<Measured> {
    let mut measured = Vec::new();
    for copy in host_copies(machine) {
        let of = format!("NUMA node {}", copy.node);
        let bound = match copy.bound {
            Ok(()) => Value::Fine("threads run where they are bound".to_string()),
            Err(what) => Value::Wrong { grade: Grade::Warn, what },
        };
        measured.push(Measured { of: of.clone(), ..Measured::of_check(Check::Binding, bound) });
        let value = Value::Number(copy.gigabytes_per_second);
        measured.push(Measured { check: "hostCopyGBps".to_string(), of, value });
    }
    measured
}

/// A table: check, device, grade, what was found, Azure's code.
fn text(outcomes: &[Outcome]) -> String {
    let row = |outcome: &Outcome| {
        let grade = match outcome.grade {
            Grade::Good => "ok",
            Grade::Unknown => "unknown",
            Grade::Warn => "warning",
            Grade::Fail => "FAILS",
        };
        let code = outcome.code.map(|code| format!(" ({code})")).unwrap_or_default();
        let found = format!("{}{code}", printable(&outcome.text));
        [outcome.check.clone(), outcome.of.clone(), grade.to_string(), found]
    };
    let head = ["CHECK", "OF", "STATE", "FOUND"].map(str::to_string);
    let rows: Vec<[String; 4]> = std::iter::once(head).chain(outcomes.iter().map(row)).collect();
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
    };
    let (check, of, state) = (width(0), width(1), width(2));
    let line = |[a, b, c, d]: &[String; 4]| format!("{a:check$}  {b:of$}  {c:state$}  {d}\n");
    rows.iter().map(line).collect()
}
