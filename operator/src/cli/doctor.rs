//! `moejob doctor`: what this machine has, what it lacks, and how to get it.

use super::validate::Output;
use clap::Args;
use moe_worker::attempt::pace::kernel_bytes;
use moe_worker::life::affinity::{self, Gpu, NumaNode};
use moejob_kernels::{Isa, cuda};
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
}

struct Line {
    name: String,
    found: Option<String>,
    advice: Option<String>,
    /// A job on processors cannot run without it.
    needed: bool,
}

pub fn run(args: &DoctorArgs) -> ExitCode {
    let mut lines = vec![processor(), memory(), storage(&args.dir)];
    lines.extend(numa());
    lines.extend(cuda::inspect().into_iter().map(|inspection| Line {
        name: inspection.name,
        found: inspection.found,
        advice: inspection.advice,
        needed: false,
    }));
    let sound = lines.iter().all(|line| line.found.is_some() || !line.needed);
    let code = if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    if args.output == Output::Json {
        println!("{}", Value::from(lines.iter().map(Line::json).collect::<Vec<_>>()));
        return code;
    }
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
        println!("{:<14}{state}", line.name);
        if let Some(advice) = &line.advice {
            println!("{:<14}-> {advice}", "");
        }
    }
    code
}

impl Line {
    fn json(&self) -> Value {
        json!({ "name": self.name, "found": self.found, "advice": self.advice })
    }
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

fn memory() -> Line {
    let mib = |field| Some(kernel_bytes("/proc/meminfo", field)? >> 20);
    let found = match (mib("MemAvailable:"), mib("MemTotal:")) {
        (Some(free), Some(total)) => Some(format!("{free} of {total} MiB available")),
        _ => None,
    };
    let advice = found.is_none().then(|| "/proc/meminfo cannot be read".to_string());
    Line { name: "memory".to_string(), found, advice, needed: true }
}

/// Where processors and GPUs lie: workers of one machine are kept apart by this.
fn numa() -> Vec<Line> {
    let line = |name: String, found| Line { name, found: Some(found), advice: None, needed: false };
    let nodes = affinity::machine().unwrap_or_default().nodes;
    let node = |node: &NumaNode| {
        line(format!("NUMA node {}", node.id), format!("{} processors", node.cpus.len()))
    };
    let gpu = |gpu: Gpu| {
        let node = gpu.numa_node.map_or("unknown".to_string(), |node| node.to_string());
        let nic = gpu.nearest_nic.unwrap_or("none".to_string());
        line(gpu.pci, format!("GPU on NUMA node {node}, nearest network adapter {nic}"))
    };
    let gpus = affinity::gpus(Path::new("/sys")).into_iter().map(gpu);
    nodes.iter().map(node).chain(gpus).collect()
}

/// Whether runs can be written where they are to lie, and how much room there is.
fn storage(dir: &Path) -> Line {
    let line = |found, advice| Line { name: "storage".to_string(), found, advice, needed: true };
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
