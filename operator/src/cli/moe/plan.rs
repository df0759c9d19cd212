//! `kubectl moe plan FILE|JOB`: what `moejob plan` says, on the nodes that are free now.

use super::cluster::{Cluster, JOBS, NODES, PODS};
use super::error::MoeError;
use super::job::JobView;
use super::nodes::{infos, judge, summary};
use super::output;
use crate::cli::plan::{How, Planned};
use crate::cli::profiles::OwnProfiles;
use crate::cli::validate;
use clap::Args;
use moejob_fabric::topology::NodeInfo;
use moejob_manifest::Job;
use moejob_manifest::problem::printable_lines;
use moejob_plan::allocate::Needs;
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct PlanArgs {
    /// A MoeJob manifest (`-` is standard input), or the name of a job that is there.
    pub job: String,
    /// Nodes in place of the cluster's, as `moejob plan --nodes` takes them.
    #[arg(long)]
    pub nodes: Option<PathBuf>,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    #[command(flatten)]
    pub how: How,
}

pub async fn run(cluster: &Cluster, args: &PlanArgs) -> Result<(), MoeError> {
    let (job, uid) = job(cluster, &args.job, &args.profiles).await?;
    let nodes = match &args.nodes {
        Some(file) => Some(crate::cli::plan::read_nodes(file).map_err(MoeError::Input)?),
        None => free(cluster, &job, uid.as_deref()).await?,
    };
    let Planned { text, works } =
        args.how.planned(&job, nodes.as_deref(), &args.profiles).map_err(MoeError::Input)?;
    output::say(&format!("{text}\n"))?;
    match works {
        true => Ok(()),
        false => Err(MoeError::Input("the job cannot run as it stands, see above".to_string())),
    }
}

/// A file where there is one, else a job of the cluster and its uid.
async fn job(
    cluster: &Cluster,
    name: &str,
    profiles: &OwnProfiles,
) -> Result<(Job, Option<String>), MoeError> {
    let path = Path::new(name);
    if name == "-" || path.exists() {
        let refused = |_| MoeError::Input(format!("{name}: not planned"));
        return Ok((validate::read_job(path, profiles).map_err(refused)?.job, None));
    }
    let looks_like_a_file = name.contains('/') || name.ends_with(".yaml") || name.ends_with(".yml");
    if looks_like_a_file {
        return Err(MoeError::Input(format!("{name}: there is no such file")));
    }
    let object = cluster.get(JOBS, Some(&cluster.namespace), name).await?;
    let own = profiles.read().map_err(MoeError::Input)?;
    let view = JobView::read_with(&object, &own);
    match view.job {
        Some(job) => Ok((*job, Some(view.uid))),
        None => Err(MoeError::Input(format!("{name} is not valid: {}", view.reason()))),
    }
}

/// The cluster's nodes, or none where they may not be read.
async fn free(
    cluster: &Cluster,
    job: &Job,
    uid: Option<&str>,
) -> Result<Option<Vec<NodeInfo>>, MoeError> {
    let (nodes, pods) =
        futures::join!(cluster.list(NODES, None, None), cluster.list(PODS, None, None));
    let nodes = match nodes {
        Ok(nodes) => nodes,
        Err(error) if error.is_forbidden() => {
            eprintln!("you may not list nodes: planned as if all nodes that it wants were free");
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let pods = match pods {
        Ok(pods) => pods,
        Err(error) if error.is_forbidden() => {
            eprintln!("you may not list all pods: planned as if nodes were empty");
            Vec::new()
        }
        Err(error) => return Err(error),
    };
    let judged = judge(&nodes, &pods, &Needs::of(job), uid);
    eprintln!("{}", printable_lines(&summary(&judged)));
    Ok(Some(infos(&judged)))
}
