//! `moejob doctor`: what this machine has, what it lacks, and how to get it.

pub mod profile;

use super::profiles::OwnProfiles;
use super::validate::Output;
use clap::Args;
use moe_worker::life::affinity::Share;
use moe_worker::life::machine::pci::Address;
use moe_worker::life::machine::topology::xml;
use moe_worker::life::machine::{Machine, Processor, sys};
use moe_worker::life::preflight::{self, places};
use moejob_kernels::memory_bounds::{Bound, BoundSource, MemoryBounds};
use moejob_kernels::{Isa, cuda};
use moejob_manifest::problem::printable_lines;
use moejob_manifest::profile::{Profile, Profiles};
use moejob_manifest::words::several;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
pub struct DoctorArgs {
    /// The folder that runs are to lie in.
    #[arg(long, default_value = "runs")]
    pub dir: PathBuf,
    /// As JSON lines.
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
    /// How it is written; json is one list.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
    /// Compare this node with a profile, and name which of the two is odd.
    #[arg(long, value_name = "NAME")]
    pub profile: Option<String>,
    /// Print NCCL's file of this node's topology for the profile (NCCL_TOPO_FILE), alone.
    #[arg(long, requires = "profile", conflicts_with_all = ["json", "output"])]
    pub topology: bool,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// Read the machine from a folder like /sys.
    #[arg(long, hide = true, value_name = "ROOT")]
    pub sys: Option<PathBuf>,
}

struct Line {
    name: String,
    found: Option<String>,
    advice: Option<String>,
    /// A job on processors cannot run without it.
    needed: bool,
    /// Found, and not as it should be.
    bad: bool,
}

impl Line {
    fn of((name, found): (String, String)) -> Line {
        Line { name, found: Some(found), advice: None, needed: false, bad: false }
    }

    fn json(&self) -> Value {
        json!({ "name": self.name, "found": self.found, "advice": self.advice })
    }
}

pub fn run(args: &DoctorArgs) -> ExitCode {
    if args.topology {
        return topology(args);
    }
    let mut lines = vec![processor(), memory(), storage(&args.dir)];
    lines.extend(large_pages(args.sys.as_deref().unwrap_or(Path::new("/sys"))));
    match machine(args) {
        Ok(of_machine) => lines.extend(of_machine),
        Err(error) => {
            eprintln!("moejob: {}", printable_lines(&error));
            return ExitCode::from(2);
        }
    }
    lines.extend(cuda::inspect().into_iter().map(|inspection| Line {
        name: inspection.name,
        found: inspection.found,
        advice: inspection.advice,
        needed: false,
        bad: false,
    }));
    lines.push(nccl());
    let sound = |line: &Line| (line.found.is_some() || !line.needed) && !line.bad;
    let code = if lines.iter().all(sound) { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    if args.output == Output::Json {
        println!("{}", Value::from(lines.iter().map(Line::json).collect::<Vec<_>>()));
        return code;
    }
    let longest = lines.iter().map(|line| line.name.chars().count()).max().unwrap_or(0);
    let width = longest + 2;
    for line in &lines {
        if args.json {
            println!("{}", line.json());
            continue;
        }
        let state = match (&line.found, line.needed) {
            (Some(found), _) => found.clone(),
            (None, true) => "missing".to_string(),
            (None, false) => "absent (GPU jobs need it)".to_string(),
        };
        println!("{:<width$}{state}", line.name);
        if let Some(advice) = &line.advice {
            println!("{:<width$}-> {advice}", "");
        }
    }
    if !args.json {
        println!("\n{}", verdict(&lines));
    }
    code
}

/// The sentence that all of it comes to.
fn verdict(lines: &[Line]) -> String {
    let named = |of: &dyn Fn(&&Line) -> bool| -> Vec<&str> {
        lines.iter().filter(of).map(|line| line.name.as_str()).collect()
    };
    let missing = named(&|line| line.needed && line.found.is_none());
    let absent = named(&|line| !line.needed && line.found.is_none() && line.name != NCCL);
    let has_nccl = lines.iter().any(|line| line.name == NCCL && line.found.is_some());
    let bad = named(&|line| line.bad);
    if !missing.is_empty() {
        return format!("This machine cannot train yet; it lacks {}.", missing.join(", "));
    }
    if !bad.is_empty() {
        let places = several(bad.len(), "place");
        return format!("This machine is not as its profile says, in {places}; see above.");
    }
    match (absent.is_empty(), has_nccl) {
        (true, true) => "This machine trains on its processors, and on its GPUs.".to_string(),
        (true, false) => {
            "This machine trains on its processors, and on one GPU; several need nccl.".to_string()
        }
        (false, _) => format!(
            "This machine trains on its processors. GPUs cannot be used; it lacks {}.",
            absent.join(", ")
        ),
    }
}

/// Several GPUs need it.
const NCCL: &str = "nccl";

fn nccl() -> Line {
    let (found, advice) = match preflight::nccl() {
        Ok((version, file)) => (Some(format!("{version}, {file}")), None),
        Err(why) => (None, Some(why)),
    };
    Line { name: NCCL.to_string(), found, advice, needed: false, bad: false }
}

fn processor() -> Line {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let isa = Isa::detect();
    let slow = isa == Isa::Scalar;
    Line {
        name: "processor".to_string(),
        found: Some(format!("{cores} cores, products in {}", instructions(isa))),
        advice: slow.then(|| {
            "neither AVX2 nor AVX-512: training gives the same bits, many times slower".to_string()
        }),
        needed: true,
        bad: false,
    }
}

/// As processors are described by.
fn instructions(isa: Isa) -> &'static str {
    match isa {
        Isa::Avx512 => "AVX-512",
        Isa::Avx2 => "AVX2",
        Isa::Scalar => "plain instructions",
    }
}

/// What is left for a job by each bound, the least first.
fn memory() -> Line {
    let MemoryBounds { mut bounds, unread, .. } = MemoryBounds::of_this_process();
    bounds.sort_by_key(|bound| bound.left);
    let told = |bound: &Bound| match bound.by {
        BoundSource::Machine => {
            format!("{} of {} MiB available", bound.left >> 20, bound.limit >> 20)
        }
        _ => {
            let limit = format!("{} MiB", bound.limit >> 20);
            format!("{} MiB are {}", bound.left >> 20, bound.left_of(&limit))
        }
    };
    let told: Vec<String> = bounds.iter().map(told).collect();
    Line {
        name: "memory".to_string(),
        found: (!told.is_empty()).then(|| told.join("; ")),
        advice: (!unread.is_empty()).then(|| unread.join("; ")),
        needed: true,
        bad: false,
    }
}

/// Where a kernel says whether it gives pages of 2 MiB to shared memory, below /sys.
const SHARED_PAGES: &str = "kernel/mm/transparent_hugepage/shmem_enabled";

/// Snapshots lie in shared memory, and ask for large pages.
fn large_pages(sys: &Path) -> Option<Line> {
    let said = std::fs::read_to_string(sys.join(SHARED_PAGES)).ok()?;
    let chosen = said.split_once('[')?.1.split_once(']')?.0;
    let small = matches!(chosen, "never" | "deny");
    Some(Line {
        advice: small.then(|| {
            format!(
                "memory for snapshots of large models comes several times faster in pages of \
                 2 MiB: as root, echo advise > /sys/{SHARED_PAGES}"
            )
        }),
        ..Line::of(("large pages".to_string(), format!("of shared memory: {chosen}")))
    })
}

fn seen(args: &DoctorArgs) -> Machine {
    match &args.sys {
        Some(root) => sys::read(root, None),
        None => Machine::here().unwrap_or_default(),
    }
}

fn chosen<'p>(profiles: &'p Profiles, name: &str) -> Result<&'p Profile, String> {
    profiles.get(name).ok_or_else(|| {
        let known: Vec<&str> = profiles.names().collect();
        format!("--profile: there is no {name:?}; known: {}", known.join(", "))
    })
}

/// What a worker of the profile would tell NCCL of this machine.
fn topology(args: &DoctorArgs) -> ExitCode {
    let profiles = args.profiles.read();
    let name = args.profile.as_deref().unwrap_or_default();
    let text = profiles.and_then(|profiles| {
        let profile = chosen(&profiles, name)?;
        let listed = profile.numa.iter().flat_map(|node| &node.hcas);
        let listed: Vec<Address> = listed.filter_map(|hca| Address::parse(hca)).collect();
        // Files of another machine do not tell of its processors.
        let processor = if args.sys.is_none() { Processor::here() } else { None };
        Ok(xml(&seen(args), processor.as_ref(), &profile.topology(), &listed))
    });
    match text {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("moejob: {}", printable_lines(&error));
            ExitCode::from(2)
        }
    }
}

/// Where processors, GPUs and cards lie, what of it is odd, and how it compares with a profile.
///
/// # Errors
/// There is no such profile.
fn machine(args: &DoctorArgs) -> Result<Vec<Line>, String> {
    let machine = seen(args);
    let profiles = args.profiles.read()?;
    let mut lines: Vec<Line> = machine.lines().into_iter().map(Line::of).collect();
    let Some(name) = &args.profile else {
        let odd = machine.odd.iter().map(|odd| Line {
            advice: Some("the kernel's files contradict each other".to_string()),
            ..Line::of(("odd".to_string(), format!("{}: {}", odd.at, odd.what)))
        });
        lines.extend(odd);
        let fitting = profile::fitting(&machine, &profiles);
        if !fitting.is_empty() {
            let found = format!("its GPUs have the addresses of {}", fitting.join(" and of "));
            let advice = Some(format!("compare with --profile {}", fitting[0]));
            lines.push(Line { advice, ..Line::of(("profile".to_string(), found)) });
        }
        return Ok(lines);
    };
    let chosen = chosen(&profiles, name)?;
    let differences = places::compare(&machine, &chosen.expected(), Share::default());
    let found = match differences.len() {
        0 => format!("{name}: this machine is as it says"),
        1 => format!("{name}: 1 difference"),
        many => format!("{name}: {many} differences"),
    };
    lines.push(Line::of(("profile".to_string(), found)));
    lines.extend(differences.into_iter().map(|difference| Line {
        advice: Some(difference.next.to_string()),
        bad: true,
        ..Line::of((difference.odd.in_words().to_string(), difference.what))
    }));
    Ok(lines)
}

/// Whether runs can be written where they are to lie, and how much room there is.
fn storage(dir: &Path) -> Line {
    let name = "storage".to_string();
    let line = |found, advice| Line { name, found, advice, needed: true, bad: false };
    let existing = dir.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    let folder = if existing.as_os_str().is_empty() { Path::new(".") } else { existing };
    let writable = rustix::fs::access(folder, rustix::fs::Access::WRITE_OK);
    match (writable, rustix::fs::statvfs(folder)) {
        (Ok(()), Ok(room)) => {
            let free = (room.f_bavail * room.f_frsize) >> 20;
            line(Some(format!("{}: {free} MiB free", folder.display())), None)
        }
        (Err(error), _) | (_, Err(error)) => {
            let advice = format!("{}: {error}; choose another --dir", folder.display());
            line(None, Some(advice))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_tells_what_all_of_it_comes_to() {
        let line = |name: &str, found: bool, needed: bool| Line {
            name: name.to_string(),
            found: found.then(|| "there".to_string()),
            advice: None,
            needed,
            bad: false,
        };
        let check = |storage: bool, driver: bool, nccl: bool, bad: bool, expected: &str| {
            let all = [
                line("storage", storage, true), line("cuda driver", driver, false),
                line(NCCL, nccl, false), Line { bad, ..line("GPUs", true, false) },
            ];
            assert_eq!(verdict(&all), expected);
        };
        let trains = "This machine trains on its processors";
        check(false, true, true, false, "This machine cannot train yet; it lacks storage.");
        check(true, true, true, false, &format!("{trains}, and on its GPUs."));
        check(true, true, false, false, &format!("{trains}, and on one GPU; several need nccl."));
        let lacks = "GPUs cannot be used; it lacks cuda driver.";
        check(true, false, false, false, &format!("{trains}. {lacks}"));
        let differs = "This machine is not as its profile says, in 1 place; see above.";
        check(true, true, true, true, differs);
    }
}
