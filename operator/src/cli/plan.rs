//! `moejob plan FILE`: the plan, its reasons and what-ifs, offline.

use super::validate::{Output, read_job};
use clap::Args;
use moejob_plan::Job;
use moejob_plan::offline::{self, Outlook, outlook};
use moejob_plan::problem::nearest;
use moejob_plan::topology::{NodeInfo, nodes_from};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What `kubectl` prints of 5,000 nodes is about a fifth of this.
const NODES_BYTES_MAX: u64 = 256 << 20;

#[derive(Args)]
pub struct PlanArgs {
    /// The MoeJob manifest; `-` is standard input.
    pub file: PathBuf,
    /// The nodes there are: a list of names, or what `kubectl get nodes -o json` prints. Without
    /// it, as many as the job wants.
    #[arg(long)]
    pub nodes: Option<PathBuf>,
    /// What if this node is lost? Several are lost together. Without it, each one by itself.
    #[arg(long)]
    pub lose: Vec<String>,
    /// How the plan is written.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

pub fn run(args: &PlanArgs) -> ExitCode {
    let job = match read_job(&args.file) {
        Ok(job) => job,
        Err(code) => return code,
    };
    let nodes = match args.nodes.as_deref().map(read_nodes).transpose() {
        Ok(nodes) => nodes,
        Err(message) => return refuse(&message),
    };
    if let Some(refusal) = refused_node(&job, nodes.as_deref(), &args.lose) {
        return refuse(&refusal);
    }
    let outlook = outlook(&job, nodes.as_deref(), &args.lose);
    let text = match written(&outlook, args.output) {
        Ok(text) => text,
        Err(message) => return refuse(&message),
    };
    // A reader that has gone away (`| head`) is no failure of ours.
    let _ = writeln!(std::io::stdout(), "{text}");
    // The job cannot run as it stands, though the file is valid.
    if outlook.sizes.is_empty() { ExitCode::from(2) } else { ExitCode::SUCCESS }
}

/// Why a node of `--lose` cannot be lost: there is none of that name.
pub fn refused_node(job: &Job, nodes: Option<&[NodeInfo]>, lose: &[String]) -> Option<String> {
    let made = (0..job.nodes.max + job.nodes.spares).map(|index| format!("node-{index}"));
    let known: Vec<String> = match nodes {
        Some(nodes) => nodes.iter().map(|node| node.name.clone()).collect(),
        None => made.collect(),
    };
    let unknown = lose.iter().find(|name| !known.contains(name))?;
    let near = nearest(unknown, known.iter().map(String::as_str));
    let near = near.map_or(String::new(), |name| format!("; did you mean `{name}`?"));
    Some(format!("--lose {unknown}: there is no such node{near}"))
}

pub fn written(outlook: &Outlook, output: Output) -> Result<String, String> {
    match output {
        Output::Text => Ok(offline::text(outlook)),
        Output::Json => serde_json::to_string_pretty(outlook)
            .map_err(|error| format!("the plan cannot be written as JSON: {error}")),
    }
}

fn refuse(message: &str) -> ExitCode {
    eprintln!("moejob: {message}");
    ExitCode::from(2)
}

pub fn read_nodes(file: &Path) -> Result<Vec<NodeInfo>, String> {
    let named = |error: String| format!("{}: {error}", file.display());
    let mut text = String::new();
    let read = std::fs::File::open(file)
        .and_then(|file| file.take(NODES_BYTES_MAX).read_to_string(&mut text));
    read.map_err(|error| named(error.to_string()))?;
    nodes_from(&text).map_err(named)
}
