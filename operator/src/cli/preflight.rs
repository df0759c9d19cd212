//! `moejob preflight`: checks of this machine that need nobody else, against its profile.

use super::args::whole;
use super::profiles::OwnProfiles;
use clap::{Args, ValueEnum};
use moe_worker::life::machine::{Machine, sys};
use moe_worker::life::preflight::measure;
use moejob_plan::preflight::{Grade, Outcome, judge};
use moejob_plan::problem::{printable, printable_lines};
use moejob_protocol::preflight::Expected;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

#[derive(Args)]
pub struct PreflightArgs {
    /// The profile whose limits count, as spec.nodes.profile names it.
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    pub profile: String,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// So many GPUs, in place of the profile's; profile gpu has 1.
    #[arg(long, value_name = "N", value_parser = whole(1, 64))]
    pub gpus: Option<u32>,
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
    let expected = match args.gpus {
        Some(devices) => Expected { devices, ..profile.expected() },
        None => profile.expected(),
    };
    let measured = measure(&machine, &here, &expected, 0, &AtomicBool::new(false));
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
