//! `moejob preflight`: checks of this machine that need nobody else, against its profile.

mod pair;

use super::args::whole;
use super::profiles::OwnProfiles;
use clap::{Args, ValueEnum};
use moe_worker::life::affinity::Share;
use moe_worker::life::machine::{Machine, sys};
use moe_worker::life::preflight::{answer_pair, measure};
use moejob_identity::authority::Authority;
use moejob_manifest::problem::{printable, printable_lines};
use moejob_manifest::profile::{Backend, Limit, Profile};
use moejob_plan::preflight::{Grade, Outcome, judge};
use moejob_protocol::pair::{PAIR_CHECK, PairOrder, PairSaid};
use moejob_protocol::preflight::{Expected, Measured};
use pair::Terms;
use serde_json::json;
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

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
    /// Wait at this address for a second machine, and measure with it: --listen 10.0.0.4:7778.
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["join", "sys"])]
    pub listen: Option<String>,
    /// Measure with the machine that waits at this address, as its --listen says.
    #[arg(long, value_name = "HOST:PORT", requires = "secret", conflicts_with = "sys")]
    pub join: Option<String>,
    /// With --join: what the machine that waits has printed.
    #[arg(long, value_name = "WORD", requires = "join")]
    pub secret: Option<String>,
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
    if args.listen.is_some() || args.join.is_some() {
        return together(args, profile);
    }
    let here = Machine::here().unwrap_or_default();
    let machine = match &args.sys {
        Some(root) => sys::read(root, None),
        None => here.clone(),
    };
    let expected = match args.gpus {
        Some(devices) => Expected { devices, ..profile.expected() },
        None => profile.expected(),
    };
    let measured =
        measure(&machine, &here, &expected, Share::default(), &AtomicBool::new(false));
    let outcomes = judge(&profile.expect, &measured);
    told(args, profile, &outcomes)
}

/// How long a machine waits for another one.
const WAITS: Duration = Duration::from_secs(600);

/// With a second machine: the pair's check alone, as this machine and the other one have found it.
fn together(args: &PreflightArgs, profile: &Profile) -> ExitCode {
    let expected = profile.expected();
    let devices = args.gpus.unwrap_or(expected.devices);
    if expected.backend != Backend::Cuda || devices == 0 {
        let name = &profile.name;
        return refused(&format!("--profile {name}: its nodes have no GPUs that could meet"));
    }
    let stop = AtomicBool::new(false);
    let measure = |order: &PairOrder, say: &mut dyn FnMut(PairSaid)| {
        answer_pair(order, Share::default(), &stop, |answer| say(answer.said));
    };
    let rdma = expected.rdma;
    let both = match (&args.listen, &args.join, &args.secret) {
        (Some(address), ..) => waited(address, (devices, rdma), profile, measure),
        (None, Some(address), Some(secret)) => {
            pair::come(address, Terms { secret, devices, rdma }, measure)
        }
        _ => Err("give --listen, or --join with --secret".to_string()),
    };
    let both = match both {
        Ok(both) => both,
        Err(error) => return refused(&error),
    };
    let of = |measured: Vec<Measured>, whose: &str| -> Vec<Measured> {
        measured.into_iter().map(|one| one.on(whose)).collect()
    };
    let all = [of(both.own, "this machine"), of(both.other, "the other one")].concat();
    // Checks of one machine are not made here.
    let limit = profile.expect.get(PAIR_CHECK).map(|limit| (PAIR_CHECK.to_string(), *limit));
    let limits: BTreeMap<String, Limit> = limit.into_iter().collect();
    told(args, profile, &judge(&limits, &all))
}

fn waited(
    address: &str,
    (devices, rdma): (u32, bool),
    profile: &Profile,
    measure: impl pair::Measure,
) -> Result<pair::Both, String> {
    let secret = Authority::new().map_err(|error| error.to_string())?.new_secret();
    let named = |error: std::io::Error| format!("--listen {address}: {error}");
    let listener = TcpListener::bind(address).map_err(named)?;
    let at = listener.local_addr().map_err(named)?;
    eprintln!(
        "waiting for the other machine, {} s at most; there:\n  moejob preflight --profile {} \
         --join {at} --secret {secret}",
        WAITS.as_secs(),
        profile.name
    );
    let terms = Terms { secret: &secret, devices, rdma };
    pair::wait(&listener, terms, Instant::now() + WAITS, measure)
}

/// Prints what was found, and says by the exit code whether it is good.
fn told(args: &PreflightArgs, profile: &Profile, outcomes: &[Outcome]) -> ExitCode {
    let worst = outcomes.iter().map(|outcome| outcome.grade).max().unwrap_or(Grade::Good);
    print!("{}", match args.output {
        Output::Text => text(outcomes),
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
