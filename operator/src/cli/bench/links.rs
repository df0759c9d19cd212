//! `moejob bench --links --simulate`: how long tokens travel between many GPUs, by what profiles
//! say of their links.

use super::super::args::{Written, whole};
use super::super::profiles::OwnProfiles;
use clap::Args;
use moejob_plan::problem::printable_lines;
use moejob_plan::profile::{Profile, Profiles};
use moejob_plan::travel::{rows, text};
use std::process::ExitCode;

#[derive(Args)]
pub struct LinksArgs {
    /// In place of a model, the time of exchanges between GPUs: flat, and first within nodes.
    #[arg(long, requires = "simulate", conflicts_with = "preset")]
    pub links: bool,
    /// With --links: by a model of latencies and rates, not measured. Needs no GPU.
    #[arg(long, requires = "links")]
    pub simulate: bool,
    /// With --links: the machines, as spec.nodes.profile names them. Default: all that say how fast
    /// their links are.
    #[arg(long, value_name = "NAME", requires = "links")]
    pub profile: Vec<String>,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// With --links: how many GPUs exchange.
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "16,64,512,2048",
        value_parser = whole(1, 32768)
    )]
    pub gpus: Vec<u32>,
    /// With --links: MiB that each GPU sends, to all others together.
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "1,16,64,256",
        value_parser = whole(1, 1 << 20)
    )]
    pub mib: Vec<u32>,
}

pub fn run(args: &LinksArgs, written: Written) -> ExitCode {
    let profiles = match args.profiles.read() {
        Ok(profiles) => profiles,
        Err(error) => return refused(&error),
    };
    let rows = named(&args.profile, &profiles).and_then(|of| rows(&of, &args.gpus, &args.mib));
    match rows {
        Err(error) => refused(&error),
        Ok(rows) if written.is_json() => {
            println!("{}", serde_json::to_string_pretty(&rows).unwrap_or_default());
            ExitCode::SUCCESS
        }
        Ok(rows) => {
            println!("ms of an exchange, flat / first within nodes (how much faster), by the MiB");
            println!("that each GPU sends; expected, not measured\n");
            print!("{}", text(&rows));
            ExitCode::SUCCESS
        }
    }
}

/// The profiles of these names; without names those that have figures.
fn named<'a>(names: &[String], profiles: &'a Profiles) -> Result<Vec<&'a Profile>, String> {
    let all = profiles.names().filter_map(|name| profiles.get(name));
    if names.is_empty() {
        return Ok(all.filter(|profile| profile.links.is_some()).collect());
    }
    let found = |name: &String| {
        profiles.get(name).ok_or_else(|| {
            let known: Vec<&str> = profiles.names().collect();
            format!("--profile: there is no {name:?}; known: {}", known.join(", "))
        })
    };
    names.iter().map(found).collect()
}

fn refused(error: &str) -> ExitCode {
    eprintln!("moejob: {}", printable_lines(error));
    ExitCode::from(2)
}
