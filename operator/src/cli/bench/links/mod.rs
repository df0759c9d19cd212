//! `moejob bench --links`: how fast bytes travel between the GPUs of this machine, measured; with
//! `--simulate` how long tokens travel between many GPUs, by what profiles say of their links.
//!
//! ```text
//! arguments -> wanted (GPUs, sizes) -> moe_worker::life::travel -> told, beside a profile (table)
//!          `-> simulated: moejob_fabric::travel
//! ```

mod table;

use super::super::args::{Written, whole};
pub use table::fitting;
use super::super::profiles::OwnProfiles;
use clap::Args;
use moe_worker::failure::chain;
use moe_worker::life::travel::{Verb, WORLD_MAX, Wanted, measure};
use moejob_fabric::travel::{rows, text};
use moejob_kernels::cuda::Gpu;
use moejob_manifest::problem::printable_lines;
use moejob_manifest::profile::{Profile, Profiles};
use moejob_manifest::resources::unit;
use std::process::ExitCode;
use table::Told;

#[derive(Args, Clone)]
pub struct LinksArgs {
    /// In place of a model, the links between this machine's GPUs: bytes a second by link, by verb
    /// and by size, beside what a profile expects.
    #[arg(long, conflicts_with = "preset")]
    pub links: bool,
    /// With --links: exchanges between many GPUs, flat and first within nodes, by a model of
    /// latencies and rates. Nothing is measured, and no GPU is needed.
    #[arg(long, requires = "links")]
    pub simulate: bool,
    /// With --links: the machines, as spec.nodes.profile names them. Default: the one that has this
    /// machine's GPUs; with --simulate all that say how fast their links are.
    #[arg(long, value_name = "NAME", requires = "links")]
    pub profile: Vec<String>,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// With --links: bytes of the larger buffer of a rank.
    #[arg(
        long,
        value_name = "SIZE,..",
        value_delimiter = ',',
        default_value = "64Ki,1Mi,16Mi,64Mi,256Mi",
        requires = "links",
        conflicts_with = "simulate",
        value_parser = size
    )]
    pub bytes: Vec<usize>,
    /// With --links: calls are launched as one graph, without what the host takes for each.
    #[arg(long, requires = "links", conflicts_with = "simulate")]
    pub captured: bool,
    /// With --simulate: how many GPUs exchange.
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "16,64,512,2048",
        requires = "simulate",
        value_parser = whole(1, 32768)
    )]
    pub gpus: Vec<u32>,
    /// With --simulate: MiB that each GPU sends, to all others together.
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        default_value = "1,16,64,256",
        requires = "simulate",
        value_parser = whole(1, 1 << 20)
    )]
    pub mib: Vec<u32>,
    /// With --links: two ranks, or --devices, on GPU 0, to try windows. The times say nothing.
    #[arg(long, requires = "links", conflicts_with = "simulate")]
    pub on_one_gpu: bool,
}

/// Bytes with a suffix as people write them.
fn size(text: &str) -> Result<usize, String> {
    const LEAST: f64 = 256.0;
    const MOST: f64 = (8_u64 << 30) as f64;
    let digits = text.chars().take_while(char::is_ascii_digit).count();
    let (number, suffix) = text.split_at(digits);
    let bytes = number.parse::<f64>().ok().zip(unit(suffix)).map(|(number, unit)| number * unit);
    let fits = |bytes: &f64| (LEAST..=MOST).contains(bytes);
    let bytes = bytes.filter(fits).map(|bytes| bytes as usize);
    bytes.ok_or_else(|| "a size from 256 to 8Gi, such as 64Ki or 16Mi".to_string())
}

/// Exits with 2 where nothing can be measured here, and with 1 where measuring fails.
pub fn run(args: &LinksArgs, devices: Option<u32>, written: Written) -> ExitCode {
    let profiles = match args.profiles.read() {
        Ok(profiles) => profiles,
        Err(error) => return refused(&error),
    };
    let named = match named(&args.profile, &profiles) {
        Ok(named) => named,
        Err(error) => return refused(&error),
    };
    match args.simulate {
        true => simulated(args, &named, &profiles, written),
        false => measured(args, devices, &named, &profiles, written),
    }
}

fn measured(
    args: &LinksArgs,
    devices: Option<u32>,
    named: &[&Profile],
    profiles: &Profiles,
    written: Written,
) -> ExitCode {
    if let [_, _, ..] = named {
        return refused("--profile: one is compared with what is measured; more with --simulate");
    }
    if let Some(profile) = named.iter().find(|profile| profile.links.is_none()) {
        let name = &profile.name;
        return refused(&format!("profile {name} says nothing of its links: add `links` to it"));
    }
    let shown = Gpu::count().map_err(|error| chain(&error));
    let wanted = match wanted(args, devices, shown) {
        Ok(wanted) => wanted,
        Err(why) => return refused(&why),
    };
    let found = match measure(&wanted) {
        Ok(found) => found,
        Err(why) => {
            eprintln!("moejob: bench --links: {}", printable_lines(&why));
            eprintln!("  look at each GPU and link with `moejob doctor` and `moejob preflight`,");
            eprintln!("  and for errors of the driver (Xid) in the kernel's log");
            return ExitCode::FAILURE;
        }
    };
    let profile = named.first().copied().or_else(|| table::fitting(profiles, &found.gpus));
    let told = Told { found: &found, profile, captured: args.captured };
    match written.is_json() {
        true => {
            println!("{}", serde_json::to_string_pretty(&told.json()).unwrap_or_default());
        }
        false => print!("{}", told.text()),
    }
    ExitCode::SUCCESS
}

/// What is to be measured, where so many GPUs are shown.
///
/// # Errors
/// There are no two of them, or not as many as are asked for.
fn wanted(
    args: &LinksArgs,
    devices: Option<u32>,
    shown: Result<usize, String>,
) -> Result<Wanted, String> {
    let verbs: Vec<&str> = Verb::ALL.iter().map(|verb| verb.name()).collect();
    let nothing = format!("not measured: {}, and the links themselves", verbs.join(", "));
    let next = "show more with CUDA_VISIBLE_DEVICES, or see what profiles expect with --simulate";
    let shown = shown.map_err(|why| format!("bench --links: {why}\n  {nothing}\n  {next}"))?;
    let of = |count: usize| if count == 1 { "1 GPU".to_string() } else { format!("{count} GPUs") };
    let asked = devices.map(|devices| devices as usize);
    let fitting = if args.on_one_gpu { shown.min(1) * WORLD_MAX as usize } else { shown };
    let devices = match asked {
        Some(asked) => asked,
        None if args.on_one_gpu => 2,
        None => shown,
    };
    if shown == 0 || devices < 2 {
        let here = match asked {
            Some(asked) if shown > 0 => format!("--devices {asked} leaves {}", of(asked)),
            _ => format!("this machine shows {}", of(shown)),
        };
        return Err(format!("bench --links: a link is between two GPUs, and {here}\n  {nothing}\n  \
                            {next}"));
    }
    if devices > WORLD_MAX as usize {
        return Err(format!("bench --links: {} are more than the {WORLD_MAX} that can be measured \
                            at once: give fewer --devices", of(devices)));
    }
    if devices > fitting {
        return Err(format!("--devices {devices}: this machine shows {}\n  {next}", of(shown)));
    }
    let ordinals = match args.on_one_gpu {
        true => vec![0; devices],
        false => (0..devices).collect(),
    };
    Ok(Wanted { ordinals, bytes: args.bytes.clone(), captured: args.captured })
}

fn simulated(
    args: &LinksArgs,
    named: &[&Profile],
    profiles: &Profiles,
    written: Written,
) -> ExitCode {
    let all = profiles.names().filter_map(|name| profiles.get(name));
    let of: Vec<&Profile> = match named.is_empty() {
        true => all.filter(|profile| profile.links.is_some()).collect(),
        false => named.to_vec(),
    };
    match rows(&of, &args.gpus, &args.mib) {
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

/// The profiles of these names.
fn named<'a>(names: &[String], profiles: &'a Profiles) -> Result<Vec<&'a Profile>, String> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        links: LinksArgs,
        #[arg(long)]
        preset: Option<String>,
    }

    fn typed(words: &str) -> LinksArgs {
        let words = ["bench", "--links"].into_iter().chain(words.split_whitespace());
        Typed::try_parse_from(words).unwrap_or_else(|error| panic!("{error}")).links
    }

    fn said(words: &str, devices: Option<u32>, shown: usize) -> Result<Wanted, String> {
        wanted(&typed(words), devices, Ok(shown))
    }

    #[test]
    fn all_gpus_are_measured_unless_fewer_are_asked_for() {
        let ordinals = |words, devices, shown| {
            said(words, devices, shown).map(|wanted| wanted.ordinals)
        };
        assert_eq!(ordinals("", None, 8), Ok((0..8).collect()));
        assert_eq!(ordinals("", Some(2), 8), Ok(vec![0, 1]));
        assert_eq!(ordinals("--on-one-gpu", None, 1), Ok(vec![0, 0]));
        assert_eq!(ordinals("--on-one-gpu", Some(3), 1), Ok(vec![0, 0, 0]));
        let all = said("", None, 2).expect("two");
        assert_eq!(all.bytes, [64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]);
        assert!(!all.captured && said("--captured", None, 2).expect("two").captured);
    }

    #[test]
    fn who_has_no_two_gpus_is_told_what_is_not_measured() {
        let nothing = "not measured: all-to-all, all-reduce, reduce-scatter, all-gather, counts, \
                       and the links themselves\n  show more with CUDA_VISIBLE_DEVICES, or see \
                       what profiles expect with --simulate";
        let two = "bench --links: a link is between two GPUs, and";
        for (words, devices, shown, why) in [
            ("", None, 1, "this machine shows 1 GPU"),
            ("", None, 0, "this machine shows 0 GPUs"),
            ("", Some(1), 0, "this machine shows 0 GPUs"),
            ("", Some(1), 2, "--devices 1 leaves 1 GPU"),
            ("--on-one-gpu", None, 0, "this machine shows 0 GPUs"),
            ("--on-one-gpu", Some(1), 1, "--devices 1 leaves 1 GPU"),
        ] {
            let told = said(words, devices, shown).expect_err("refused");
            assert_eq!(told, format!("{two} {why}\n  {nothing}"), "{words} {devices:?} {shown}");
        }
        let few = said("", Some(4), 2).expect_err("refused");
        assert!(few.starts_with("--devices 4: this machine shows 2 GPUs\n  show more"), "{few}");
        let many = said("", Some(17), 64).expect_err("refused");
        assert!(many.contains("17 GPUs are more than the 16"), "{many}");
        assert!(said("--on-one-gpu", Some(17), 1).is_err());
        let none = wanted(&typed(""), None, Err("there is no driver".to_string()));
        let none = none.expect_err("refused");
        assert_eq!(none, format!("bench --links: there is no driver\n  {nothing}"));
    }

    #[test]
    fn sizes_are_written_as_everywhere() {
        let all = ["256", "64Ki", "1M", "8Gi"].map(size);
        assert_eq!(all, [Ok(256), Ok(64 << 10), Ok(1_000_000), Ok(8 << 30)]);
        for wrong in ["", "Ki", "255", "9Gi", "1.5Mi", "-1", "1 Mi", "1X", "1e9"] {
            let told = size(wrong).expect_err(wrong);
            assert_eq!(told, "a size from 256 to 8Gi, such as 64Ki or 16Mi");
        }
    }
}
