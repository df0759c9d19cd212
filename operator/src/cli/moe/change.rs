//! `kubectl moe hold|release|cancel`: what a person does to a job that is there.

use super::cluster::{Cluster, JOBS, MANAGER};
use super::error::MoeError;
use super::job::JobView;
use super::output::{self, name_of};
use super::wait::{Goal, wait};
use clap::Args;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use serde_json::json;
use std::time::Duration;

#[derive(Args)]
pub struct ChangeArgs {
    /// Names of jobs.
    #[arg(required = true)]
    pub jobs: Vec<String>,
    /// Return when it has happened, and not before.
    #[arg(long)]
    pub wait: bool,
    /// How long to wait, as 90s or 10m.
    #[arg(long, default_value = "5m", value_parser = super::duration)]
    pub timeout: Duration,
    /// Let the server check it and change nothing.
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Hold,
    Release,
    Cancel,
}

/// Does it to each job, and names those that could not be changed; the first error is the result.
pub async fn run(cluster: &Cluster, change: Change, args: &ChangeArgs) -> Result<(), MoeError> {
    let mut result = Ok(());
    let mut changed = Vec::new();
    for name in &args.jobs {
        match one(cluster, change, name, args.dry_run).await {
            Ok(said) => {
                let dry = if args.dry_run { " (server dry run)" } else { "" };
                output::print(&format!("{} {said}{dry}\n", name_of(name)))?;
                changed.push(name);
            }
            Err(error) if result.is_ok() && args.jobs.len() == 1 => result = Err(error),
            Err(error) => {
                eprintln!("kubectl moe: {}", output::plain(&error));
                result = result.and(Err(MoeError::Failed("not all jobs were changed".into())));
            }
        }
    }
    if args.wait && !args.dry_run {
        for name in changed {
            let goal = match change {
                Change::Hold => Goal::Held,
                Change::Release => Goal::Running,
                Change::Cancel => Goal::Gone,
            };
            wait(cluster, name, goal, args.timeout).await?;
        }
    }
    result
}

async fn one(
    cluster: &Cluster,
    change: Change,
    name: &str,
    dry_run: bool,
) -> Result<&'static str, MoeError> {
    let job = JobView::read(&cluster.get(JOBS, Some(&cluster.namespace), name).await?);
    if let Some(already) = already(change, &job)? {
        return Ok(already);
    }
    if change == Change::Cancel {
        let uid = Some(job.uid.clone());
        let mut params = DeleteParams::background()
            .preconditions(Preconditions { uid, ..Preconditions::default() });
        params.dry_run = dry_run;
        cluster.delete(&cluster.namespace, name, &params).await?;
        return Ok("cancelled; its checkpoints stay");
    }
    let patch = json!({ "spec": { "suspend": change == Change::Hold } });
    let manager = Some(MANAGER.to_string());
    let params = PatchParams { dry_run, field_manager: manager, ..PatchParams::default() };
    let doing = format!("change {name}");
    cluster.patch(doing, &cluster.namespace, name, params, &Patch::Merge(&patch)).await?;
    Ok(match change {
        Change::Hold if job.status.nodes.ready > 0 => "held after a checkpoint",
        Change::Hold => "held",
        _ => "released",
    })
}

/// What there is nothing to do for, and what cannot be done.
fn already(change: Change, job: &JobView) -> Result<Option<&'static str>, MoeError> {
    let over = |verb: &str| {
        let (name, phase) = (&job.name, job.phase());
        let text = format!("{name} is {phase}: there is nothing to {verb}; cancel deletes it");
        Err(MoeError::Failed(text))
    };
    match change {
        Change::Cancel if job.deleted => Ok(Some("is being deleted already")),
        Change::Cancel => Ok(None),
        Change::Hold if job.held => Ok(Some("is held already")),
        Change::Release if !job.held => Ok(Some("is not held")),
        Change::Hold if job.is_over() => over("hold"),
        Change::Release if job.is_over() => over("release"),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::object;
    use super::*;
    use serde_json::Value;

    fn found(change: Change, edit: impl Fn(&mut Value)) -> String {
        let mut object = object("a", json!({"phase": "Running"}));
        edit(&mut object);
        match already(change, &JobView::read(&object)) {
            Ok(said) => said.unwrap_or("to do").to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn what_is_done_is_not_done_again() {
        let held = |object: &mut Value| object["spec"]["suspend"] = json!(true);
        let over = |object: &mut Value| object["status"]["phase"] = json!("Complete");
        assert_eq!(found(Change::Hold, |_| ()), "to do");
        assert_eq!(found(Change::Hold, held), "is held already");
        assert_eq!(found(Change::Release, held), "to do");
        assert_eq!(found(Change::Release, |_| ()), "is not held");
        assert_eq!(
            found(Change::Hold, over),
            "a is Complete: there is nothing to hold; cancel deletes it"
        );
        assert_eq!(found(Change::Cancel, over), "to do");
    }
}
