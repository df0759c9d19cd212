//! `kubectl moe doctor`: whether jobs can run on this cluster, and whether you may run them.

use super::checks::{self, Check, RIGHTS, Right, State};
use super::cluster::{
    CLAIMS, CLASSES, Cluster, DEFINITIONS, DEPLOYMENTS, Kind, LEASES, NODES, PODS, REVIEWS,
    ROLE_BINDINGS,
};
use super::error::MoeError;
use super::nodes::{judge, summary};
use super::output::{self, Format};
use super::now;
use crate::cli::profiles::OwnProfiles;
use clap::Args;
use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_plan::allocate::Needs;
use moejob_plan::observed::Millis;
use serde_json::{Value, json};

#[derive(Args)]
pub struct DoctorArgs {
    /// The operator's own namespace.
    #[arg(long, default_value = "moejob-system")]
    pub operator_namespace: String,
    /// The kind of machine that nodes are looked for.
    #[arg(long, default_value = "cpu")]
    pub profile: String,
    #[command(flatten)]
    pub profiles: OwnProfiles,
    /// How it is written.
    #[arg(short, long, value_enum)]
    pub output: Option<Format>,
}

pub async fn run(cluster: &Cluster, args: &DoctorArgs) -> Result<(), MoeError> {
    let asked = now();
    let version = cluster.raw("", "version").await?;
    let mut checks = vec![checks::server(&version, &cluster.server, now() - asked)];
    let server_time = cluster.date().await.and_then(|date| date_of(&date));
    checks.push(definition(cluster).await?);
    checks.extend(operator(cluster, &args.operator_namespace, server_time).await?);
    let name = "moejob-jobs";
    checks.push(match found(cluster.get(ROLE_BINDINGS, ns(cluster), name).await)? {
        Seen::There(binding) => checks::namespace(Some(&binding), &cluster.namespace),
        Seen::Missing => checks::namespace(None, &cluster.namespace),
        Seen::Hidden => Check::unknown("namespace", "see role bindings here"),
    });
    checks.push(rights(cluster).await?);
    checks.push(nodes(cluster, args).await?);
    let classes = match listed(cluster, CLASSES, None).await? {
        Seen::There(classes) => Some(classes),
        _ => None,
    };
    let claims = match listed(cluster, CLAIMS, ns(cluster)).await? {
        Seen::There(claims) => claims,
        _ => Vec::new(),
    };
    checks.push(checks::storage(classes.as_deref(), &claims));
    let leases = match listed(cluster, LEASES, Some("kube-node-lease")).await? {
        Seen::There(leases) => leases,
        _ => Vec::new(),
    };
    checks.push(checks::clock(now(), server_time, &leases));
    match output::value(args.output, &checks::json(&checks)) {
        Some(text) => output::print(&text)?,
        None => output::say(&checks::text(&checks))?,
    }
    let missing = checks.iter().filter(|check| check.state == State::Missing).count();
    match missing {
        0 => Ok(()),
        1 => Err(MoeError::Failed("1 thing is missing, see above".to_string())),
        many => Err(MoeError::Failed(format!("{many} things are missing, see above"))),
    }
}

/// What a look at something gave.
enum Seen<T> {
    There(T),
    Missing,
    /// This user may not look.
    Hidden,
}

fn found<T>(result: Result<T, MoeError>) -> Result<Seen<T>, MoeError> {
    match result {
        Ok(found) => Ok(Seen::There(found)),
        Err(error) if error.is_not_found() => Ok(Seen::Missing),
        Err(error) if error.is_forbidden() => Ok(Seen::Hidden),
        Err(error) => Err(error),
    }
}

async fn listed(
    cluster: &Cluster,
    kind: Kind,
    namespace: Option<&str>,
) -> Result<Seen<Vec<Value>>, MoeError> {
    found(cluster.list(kind, namespace, None).await)
}

fn ns(cluster: &Cluster) -> Option<&str> {
    Some(&cluster.namespace)
}

/// Everybody may ask which groups there are; its fields only administrators may see.
async fn definition(cluster: &Cluster) -> Result<Check, MoeError> {
    let name = "moejobs.moejob.dev";
    Ok(match found(cluster.get(DEFINITIONS, None, name).await)? {
        Seen::There(definition) => checks::definition(Some(&definition)),
        Seen::Missing => checks::definition(None),
        Seen::Hidden => match found(cluster.raw("/apis/moejob.dev", "v1alpha1").await)? {
            Seen::There(_) => {
                let text = format!("{name} is there; you may not see of which version");
                Check::new("definition", State::Ok, text)
            }
            _ => checks::definition(None),
        },
    })
}

async fn operator(
    cluster: &Cluster,
    namespace: &str,
    server_time: Option<Millis>,
) -> Result<Vec<Check>, MoeError> {
    let name = "moejob-operator";
    let (deployment, lease) = futures::join!(
        cluster.get(DEPLOYMENTS, Some(namespace), name),
        cluster.get(LEASES, Some(namespace), name),
    );
    let time = server_time.unwrap_or_else(now);
    Ok(vec![
        match found(deployment)? {
            Seen::There(deployment) => checks::operator(Some(&deployment), namespace),
            Seen::Missing => checks::operator(None, namespace),
            Seen::Hidden => Check::unknown("operator", &format!("see deployments in {namespace}")),
        },
        match found(lease)? {
            Seen::There(lease) => checks::leader(Some(&lease), time),
            Seen::Missing => checks::leader(None, time),
            Seen::Hidden => Check::unknown("leader", &format!("see leases in {namespace}")),
        },
    ])
}

async fn rights(cluster: &Cluster) -> Result<Check, MoeError> {
    let ask = |right: &'static Right| async move {
        let whole = right.resource;
        let (resource, subresource) = whole.split_once('/').unwrap_or((whole, ""));
        let mut about = json!({
            "verb": right.verb, "group": right.group, "resource": resource,
            "subresource": subresource,
        });
        if !right.cluster {
            about["namespace"] = json!(cluster.namespace);
        }
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": about},
        });
        let answer = cluster.create(REVIEWS, None, &review, false).await?;
        Ok::<bool, MoeError>(answer["status"]["allowed"] == true)
    };
    let allowed = futures::future::try_join_all(RIGHTS.iter().map(ask)).await?;
    Ok(checks::rights(&allowed, &cluster.namespace))
}

async fn nodes(cluster: &Cluster, args: &DoctorArgs) -> Result<Check, MoeError> {
    let profile = &args.profile;
    const NAME: &str = "nodes";
    let Seen::There(nodes) = listed(cluster, NODES, None).await? else {
        return Ok(Check::unknown(NAME, "list nodes"));
    };
    let pods = match listed(cluster, PODS, None).await? {
        Seen::There(pods) => pods,
        _ => return Ok(Check::unknown(NAME, "list the pods of all namespaces")),
    };
    let needs = needs(profile, &args.profiles.read().map_err(MoeError::Input)?)?;
    let judged = judge(&nodes, &pods, &needs, None);
    let text = format!("for profile {profile}: {}", summary(&judged));
    let free = judged.iter().any(|node| node.against.is_none());
    Ok(match free {
        true => Check::new(NAME, State::Ok, text),
        false => Check::new(NAME, State::Warning, text).advice(
            "jobs wait until a node is free; `kubectl moe queue -A` shows who has them, \
             --profile asks for another kind",
        ),
    })
}

/// What a small job of this profile asks of a node.
fn needs(profile: &str, profiles: &Profiles) -> Result<Needs, MoeError> {
    let manifest = json!({
        "apiVersion": "moejob.dev/v1alpha1", "kind": "MoeJob", "metadata": {"name": "any"},
        "spec": {
            "nodes": {"profile": profile},
            "model": {"preset": "tiny"},
            "data": {"train": {"text": {"paths": ["*"]}}, "sequenceLength": 8},
            "training": {"steps": 1, "globalBatchSize": 64},
        },
    });
    match Job::read_with(manifest.to_string().as_bytes(), None, profiles) {
        Ok(job) => Ok(Needs::of(&job)),
        Err(problems) => {
            let text: Vec<String> = problems.iter().map(|problem| problem.sentence()).collect();
            Err(MoeError::Failed(format!("profile {profile}: {}", text.join("; "))))
        }
    }
}

/// `Sat, 21 Nov 2026 17:30:12 GMT`.
fn date_of(text: &str) -> Option<Millis> {
    let time = k8s_openapi::jiff::fmt::rfc2822::parse(text).ok()?;
    u64::try_from(time.timestamp().as_millisecond()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_can_be_asked_for() {
        for profile in Profiles::shipped().names() {
            let needs = needs(profile, Profiles::shipped()).expect(profile);
            assert_eq!(needs.selector.is_empty(), ["cpu", "gpu"].contains(&profile));
        }
    }

    #[test]
    fn the_servers_date_is_read() {
        assert_eq!(date_of("Sat, 21 Nov 2026 17:00:00 GMT"), Some(1_795_280_400_000));
        assert_eq!(date_of("now"), None);
    }
}
