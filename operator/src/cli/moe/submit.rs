//! `kubectl moe submit`: a manifest, judged here first and by the API server then.

use super::cluster::{Cluster, JOBS, MANAGER};
use super::error::MoeError;
use super::job::JobView;
use super::output::{self, Format, name_of};
use super::wait::{Goal, wait};
use crate::cli::profiles::OwnProfiles;
use crate::cli::validate;
use clap::{Args, ValueEnum};
use kube::api::{Patch, PatchParams};
use moejob_manifest::profile::Profiles;
use moejob_manifest::read::Manifest;
use moejob_plan::lead;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

/// What of the metadata is the user's.
const SENT: &[&str] = &["name", "namespace", "labels", "annotations", "finalizers"];

#[derive(Args)]
pub struct SubmitArgs {
    /// The MoeJob manifest; `-` is standard input.
    #[arg(required_unless_present = "filename", conflicts_with = "filename")]
    pub file: Option<PathBuf>,
    /// The same, as other commands of kubectl have it.
    #[arg(short, long)]
    pub filename: Option<PathBuf>,
    /// Submit it held: it starts with `kubectl moe release`.
    #[arg(long)]
    pub hold: bool,
    /// Change the job of this name that is there.
    #[arg(long)]
    pub update: bool,
    /// Also take over fields that somebody else has set.
    #[arg(long, requires = "update")]
    pub force_conflicts: bool,
    /// Only check it: here, or on the server as well.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "server")]
    pub dry_run: Option<DryRun>,
    /// Return when the job is running or complete.
    #[arg(long, value_enum, num_args = 0..=1, default_missing_value = "complete")]
    pub wait: Option<Goal>,
    /// How long to wait, as 90s, 10m or 2h.
    #[arg(long, default_value = "24h", value_parser = super::duration)]
    pub timeout: Duration,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// How the job is written.
    #[arg(short, long, value_enum)]
    pub output: Option<Format>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DryRun {
    Client,
    Server,
}

/// What is sent: the manifest as it was typed, and what the options say.
pub fn read(args: &SubmitArgs) -> Result<Value, MoeError> {
    let file = args.file.as_ref().or(args.filename.as_ref());
    let Some(file) = file else { return Err(MoeError::Input("name a manifest".to_string())) };
    let bytes = validate::read(file)
        .map_err(|error| MoeError::Input(format!("{}: {error}", file.display())))?;
    let profiles = args.profiles.read().map_err(MoeError::Input)?;
    if !validate::report(file, &bytes, &profiles) {
        let text = format!("{}: not submitted; nothing was sent", file.display());
        return Err(MoeError::Input(text));
    }
    let mut object = Manifest::read(&bytes).json;
    // Of a manifest that `kubectl get -o yaml` has written: these are the server's.
    if let Some(meta) = object["metadata"].as_object_mut() {
        meta.retain(|field, _| SENT.contains(&field.as_str()));
    }
    if args.hold {
        object["spec"]["suspend"] = json!(true);
    }
    let refused = |why: String| MoeError::Input(format!("{}: {why}", file.display()));
    never_run(&object, &profiles).map_err(refused)?;
    Ok(object)
}

/// Why a valid manifest would wait on a cluster for ever.
fn never_run(object: &Value, profiles: &Profiles) -> Result<(), String> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let judged = lead::judge(name, &object["spec"], profiles);
    judged.map(drop).map_err(|blocked| blocked.message)
}

pub async fn run(cluster: &Cluster, args: &SubmitArgs, object: Value) -> Result<(), MoeError> {
    let mut object = object;
    let namespace = namespace(cluster, &object)?;
    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_string();
    object["metadata"]["namespace"] = json!(namespace);
    let before = match cluster.get(JOBS, Some(&namespace), &name).await {
        Ok(object) => Some(JobView::read(&object)),
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error),
    };
    if let Some(job) = before.as_ref().filter(|_| !args.update) {
        return Err(MoeError::Failed(exists(job)));
    }
    stay_held(&mut object, before.as_ref());
    // Without force, another job that came in between is not touched: its fields are its maker's.
    let params = PatchParams {
        dry_run: args.dry_run == Some(DryRun::Server),
        force: args.force_conflicts,
        field_manager: Some(MANAGER.to_string()),
        ..PatchParams::default()
    };
    let doing = format!("submit {name}");
    let patch = Patch::Apply(&object);
    let mut answer = cluster.patch(doing, &namespace, &name, params, &patch).await?;
    output::tidy(&mut answer);
    let verb = match (&before, args.hold) {
        (None, true) => "submitted, held",
        (None, false) => "submitted",
        (Some(job), _) if answer["metadata"]["generation"] == job.generation => "unchanged",
        (Some(_), _) => "changed",
    };
    let dry = if args.dry_run.is_some() { " (server dry run)" } else { "" };
    match output::value(args.output, &answer) {
        Some(text) => output::print(&text)?,
        None => output::print(&format!("{} {verb}{dry}\n", name_of(&name)))?,
    }
    match args.wait.filter(|_| args.dry_run.is_none()) {
        Some(goal) => {
            let cluster = Cluster { namespace, ..cluster.clone() };
            wait(&cluster, &name, goal, args.timeout).await
        }
        None => Ok(()),
    }
}

/// A manifest that says nothing of `suspend` neither holds nor releases: a field that is left out
/// would be taken back.
fn stay_held(object: &mut Value, before: Option<&JobView>) {
    if before.is_some_and(|job| job.held) && object["spec"]["suspend"].is_null() {
        object["spec"]["suspend"] = json!(true);
    }
}

/// Without a cluster: what would be sent.
pub fn show(args: &SubmitArgs, object: &Value) -> Result<(), MoeError> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    match output::value(args.output, object) {
        Some(text) => output::print(&text),
        None => output::print(&format!("{} is valid (client dry run)\n", name_of(name))),
    }
}

/// The manifest's, which must not be another than the one that was asked for.
fn namespace(cluster: &Cluster, object: &Value) -> Result<String, MoeError> {
    match object["metadata"]["namespace"].as_str() {
        Some(typed) if cluster.chosen && typed != cluster.namespace => {
            let text = format!(
                "the manifest is for namespace {typed}, and --namespace says {}; leave one out",
                cluster.namespace
            );
            Err(MoeError::Input(text))
        }
        Some(typed) => Ok(typed.to_string()),
        None => Ok(cluster.namespace.clone()),
    }
}

fn exists(job: &JobView) -> String {
    let (name, phase) = (&job.name, job.phase());
    let steps = match job.status.steps {
        0 => String::new(),
        _ => format!(" at step {}", job.steps()),
    };
    format!(
        "a job {name} is there already ({phase}{steps}); give the manifest another name, change \
         that job with --update, or delete it with `kubectl moe cancel {name}`"
    )
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::object;
    use super::*;

    #[test]
    fn what_would_never_run_is_not_sent() {
        let mut job = object("a", json!({}));
        job["spec"]["model"] = json!({"preset": "tiny"});
        assert_eq!(never_run(&job, &Profiles::default()), Ok(()));
        job["spec"]["volumes"] = json!([]);
        let why = never_run(&job, &Profiles::default()).expect_err("no durable checkpoints");
        assert!(why.contains("spec.checkpoint.location"), "{why}");
    }

    #[test]
    fn a_held_job_is_released_by_its_manifest_only_if_that_says_so() {
        let suspend = |typed: Option<bool>, was: Option<bool>| {
            let mut object = object("a", json!({}));
            let mut before = object.clone();
            before["spec"]["suspend"] = json!(was == Some(true));
            let before = JobView::read(&before);
            if let Some(typed) = typed {
                object["spec"]["suspend"] = json!(typed);
            }
            stay_held(&mut object, was.map(|_| &before));
            object["spec"]["suspend"].as_bool()
        };
        assert_eq!(suspend(None, Some(true)), Some(true));
        assert_eq!(suspend(Some(false), Some(true)), Some(false));
        assert_eq!(suspend(None, Some(false)), None);
        assert_eq!(suspend(None, None), None);
    }

    #[test]
    fn a_job_that_is_there_is_named_with_the_ways_out() {
        let job = object("a", json!({"phase": "Running", "step": 3, "steps": 9}));
        let expected = "a job a is there already (Running at step 3/9); give the manifest another \
            name, change that job with --update, or delete it with `kubectl moe cancel a`";
        assert_eq!(exists(&JobView::read(&job)), expected);
    }
}
