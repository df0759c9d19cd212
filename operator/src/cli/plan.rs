//! `moejob plan FILE`: the plan, its reasons and what-ifs, offline.

use super::args::not_negative;
use super::profiles::OwnProfiles;
use super::validate::{Changed, read_changed_job};
use clap::{Args, ValueEnum};
use moejob_fabric::topology::NodeInfo;
use moejob_manifest::Job;
use moejob_manifest::problem::nearest;
use moejob_offline::outlook;
use moejob_offline::nodes::{nodes_from, select};
use moejob_offline::picture::{html, picture, svg};
use moejob_plan::allocate::Needs;
use std::io::Read;
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
    /// Another value of a field, such as nodes.max=8. May be given several times.
    #[arg(long, value_name = "FIELD=VALUE")]
    pub set: Vec<String>,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    #[command(flatten)]
    pub how: How,
}

/// What is asked of a plan, wherever job and nodes come from.
#[derive(Args)]
pub struct How {
    /// What if this node is lost? Several are lost together. Without it, each one by itself.
    #[arg(long)]
    pub lose: Vec<String>,
    /// The price of a node and hour, in place of its profile's.
    #[arg(long, value_name = "PRICE", value_parser = not_negative)]
    pub price: Option<f64>,
    /// How the plan is written.
    #[arg(short, long, value_enum, default_value_t = Form::Text)]
    pub output: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Form {
    Text,
    Json,
    /// A picture of nodes, devices, ranks, expert groups, ring and trees.
    Svg,
    /// The picture and all of the text, as a page.
    Html,
}

pub fn run(args: &PlanArgs) -> ExitCode {
    // What cannot run yet stands in the plan, too.
    let changed = Changed { sets: &args.set, name: None };
    let job = match read_changed_job(&args.file, &args.profiles, &changed) {
        Ok(read) => read.job,
        Err(code) => return code,
    };
    let read = |file: &Path| {
        let mut nodes = read_nodes(file)?;
        select(&mut nodes, &Needs::of(&job).selector);
        Ok::<_, String>(nodes)
    };
    let nodes = args.nodes.as_deref().map(read).transpose();
    let planned = nodes.and_then(|nodes| args.how.planned(&job, nodes.as_deref(), &args.profiles));
    let Planned { text, works } = match planned {
        Ok(planned) => planned,
        Err(message) => {
            eprintln!("moejob: {message}");
            return ExitCode::from(2);
        }
    };
    println!("{text}");
    // The job cannot run as it stands, though the file is valid.
    if works { ExitCode::SUCCESS } else { ExitCode::from(2) }
}

/// A plan as it is printed.
pub struct Planned {
    pub text: String,
    /// There is a number of nodes that works, and the workers can do what is asked for.
    pub works: bool,
}

impl How {
    /// # Errors
    /// A node is to be lost that is not there.
    pub fn planned(
        &self,
        job: &Job,
        nodes: Option<&[NodeInfo]>,
        own: &OwnProfiles,
    ) -> Result<Planned, String> {
        if let Some(refusal) = refused_node(job, nodes, &self.lose) {
            return Err(refusal);
        }
        let profiles = own.read()?;
        let keys = profiles.fabric();
        let mut job = job.clone();
        job.profile.price = self.price.or(job.profile.price);
        let drawn = || picture(&job, nodes, keys, &self.lose);
        if self.output == Form::Svg {
            return Ok(Planned { text: svg(&drawn()?), works: job.unsupported().is_empty() });
        }
        let outlook = outlook(&job, nodes, keys, &self.lose);
        let text = match self.output {
            // A job that cannot start has words and no picture.
            Form::Html => html(&outlook, drawn().ok().as_ref()),
            Form::Json => serde_json::to_string_pretty(&outlook)
                .map_err(|error| format!("the plan cannot be written as JSON: {error}"))?,
            _ => moejob_offline::text(&outlook),
        };
        Ok(Planned { text, works: !outlook.sizes.is_empty() && outlook.unsupported.is_empty() })
    }
}

/// Why a node of `--lose` cannot be lost: there is none of that name.
fn refused_node(job: &Job, nodes: Option<&[NodeInfo]>, lose: &[String]) -> Option<String> {
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

pub fn read_nodes(file: &Path) -> Result<Vec<NodeInfo>, String> {
    let named = |error: String| format!("{}: {error}", file.display());
    let mut text = String::new();
    let read = std::fs::File::open(file)
        .and_then(|file| file.take(NODES_BYTES_MAX).read_to_string(&mut text));
    read.map_err(|error| named(crate::cli::out::io(&error)))?;
    nodes_from(&text).map_err(named)
}
