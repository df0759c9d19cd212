//! The only writer of the cluster: one arm per kind of write, and no choice left.
//!
//! Everything carries a precondition: pods are created by POST and deleted by uid, status is
//! applied on a resource version, and all of it only while this process leads. What has changed
//! meanwhile is refused, and decided on again.

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions,
};
use kube::core::{Request, TypeMeta};
use kube::{Client, Resource};
use crate::lease::Deadline;
use crate::turnstile::Turnstile;
use moe_worker::failure::chain;
use moejob_manifest::spec::MoeJob;
use moejob_manifest::status::MoeJobStatus;
use moejob_plan::lead::{
    JobName, Origin, Owner, Template, Write, WriteError, WriteErrorKind, Written,
};
use moejob_plan::pods;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::timeout;

/// Field manager of all that the operator applies.
const MANAGER: &str = "moejob";
/// Writes of all jobs under way at once; the others wait in the order of their decision. More of
/// them would not be done sooner, and each would open a connection of its own.
const WRITES_MAX: usize = 32;
/// So many of them for events, which never take the place of what a gang waits for.
const MINOR_MAX: usize = 4;
/// A write that takes longer has an unknown end, and is decided on again.
const WRITE_MS_MAX: u64 = 10_000;
/// Why a write was not done.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error("no answer of the API server within {WRITE_MS_MAX} ms")]
    Slow,
    #[error("it has changed meanwhile")]
    Conflict,
    #[error("there is one of this name already")]
    Exists,
    #[error("it is gone")]
    Gone,
    #[error("the operator may not: {0} (does the namespace hold the Role moejob-jobs?)")]
    Forbidden(String),
    #[error("the API server refuses it: {0}")]
    Refused(String),
    #[error("there is an object of this name that is not the job's: {0}; rename it")]
    NotOurs(String),
    #[error("this operator may no longer lead")]
    Deposed,
    #[error("the API server")]
    Api(#[source] Box<kube::Error>),
}

impl ApplyError {
    fn kind(&self) -> WriteErrorKind {
        match self {
            ApplyError::Slow => WriteErrorKind::Slow,
            ApplyError::Conflict => WriteErrorKind::Conflict,
            ApplyError::Exists => WriteErrorKind::Exists,
            ApplyError::Gone => WriteErrorKind::Gone,
            ApplyError::Forbidden(_) => WriteErrorKind::Forbidden,
            ApplyError::Refused(_) => WriteErrorKind::Refused,
            ApplyError::Deposed => WriteErrorKind::Deposed,
            ApplyError::NotOurs(_) => WriteErrorKind::NotOurs,
            ApplyError::Api(_) => WriteErrorKind::Other,
        }
    }
}

impl From<ApplyError> for WriteError {
    fn from(error: ApplyError) -> WriteError {
        WriteError { kind: error.kind(), message: chain(&error) }
    }
}

impl From<kube::Error> for ApplyError {
    fn from(error: kube::Error) -> ApplyError {
        let kube::Error::Api(status) = &error else { return ApplyError::Api(Box::new(error)) };
        let message = || status.message.to_string();
        match (status.code, status.reason.as_str()) {
            (409, "AlreadyExists") => ApplyError::Exists,
            (409, _) => ApplyError::Conflict,
            (404, _) => ApplyError::Gone,
            (403, _) if lacks_right(&status.message) => ApplyError::Forbidden(message()),
            (403, _) => ApplyError::Refused(message()),
            (400 | 405 | 413 | 415 | 422, _) => ApplyError::Refused(message()),
            _ => ApplyError::Api(Box::new(error)),
        }
    }
}

/// Admission (a quota, a policy, a webhook) says "forbidden" as well, in any words. Who lacks a
/// right is named first: `pods is forbidden: User "x" cannot create resource "pods" ...`.
fn lacks_right(message: &str) -> bool {
    let user = message.split_once(" is forbidden: User \"").map(|(_, rest)| rest);
    let may_not = user.and_then(|rest| rest.split_once('"')).map(|(_, rest)| rest);
    let of_webhook = message.starts_with("admission webhook ");
    !of_webhook && may_not.is_some_and(|rest| rest.starts_with(" cannot "))
}

type Applied = Result<Option<String>, ApplyError>;

#[derive(Clone)]
pub struct Writer {
    client: Client,
    /// Places of records, orders, pods; and of what may wait for them: events, deletions.
    running: Turnstile,
    running_minor: Turnstile,
    /// Until when this process leads.
    deadline: Deadline,
    /// The operator's pod, as events name it.
    instance: String,
}

impl Writer {
    pub fn new(client: Client, instance: String, deadline: Deadline) -> Writer {
        let running = Turnstile::new(WRITES_MAX - MINOR_MAX);
        let running_minor = Turnstile::new(MINOR_MAX);
        Writer { client, running, running_minor, deadline, instance }
    }

    /// Does all of them, some at a time; the results are in the order of the writes.
    pub async fn write_all(
        &self,
        owner: &Owner,
        writes: Vec<(Origin, Write)>,
    ) -> Vec<(Origin, Written)> {
        let each = writes.into_iter().enumerate();
        let each = each.map(|(index, (origin, write))| async move {
            let written = self.write(owner, write).await.map_err(WriteError::from);
            (index, (origin, written))
        });
        // A slow one holds up no other.
        let done = futures::stream::iter(each).buffer_unordered(WRITES_MAX);
        let mut done: Vec<(usize, (Origin, Written))> = done.collect().await;
        done.sort_unstable_by_key(|(index, _)| *index);
        done.into_iter().map(|(_, result)| result).collect()
    }

    async fn write(&self, owner: &Owner, write: Write) -> Applied {
        let minor = matches!(write, Write::Event { .. } | Write::DeleteJob(_));
        let turnstile = if minor { &self.running_minor } else { &self.running };
        let _place = turnstile.pass(owner).await;
        // It may have waited for longer than the lease lasts.
        if !self.deadline.holds() {
            return Err(ApplyError::Deposed);
        }
        let limit = Duration::from_millis(WRITE_MS_MAX);
        timeout(limit, self.write_now(write)).await.unwrap_or(Err(ApplyError::Slow))
    }

    async fn write_now(&self, write: Write) -> Applied {
        match write {
            Write::CreatePod { template, birth } => {
                let Template { job, around } = &*template;
                let pod = pods::pod(job, around, &birth);
                self.create(&Pod::url_path(&(), Some(&around.namespace)), &pod).await
            }
            Write::DeletePod { namespace, name, uid, grace_s } => {
                let api = self.dynamic(&namespace, &ApiResource::erase::<Pod>(&()));
                delete(&api, &name, &deletion(uid).grace_period(grace_s)).await
            }
            Write::Status { job, resource_version, status } => {
                self.write_status(&job, &resource_version, &status).await
            }
            Write::Ensure { job, object, fresh } => {
                if fresh {
                    match self.make(&object).await {
                        Err(ApplyError::Exists) => {}
                        made => return made,
                    }
                }
                self.ensure(&job, object).await
            }
            Write::DeleteJob(job) => {
                let api = self.dynamic(&job.namespace, &ApiResource::erase::<MoeJob>(&()));
                delete(&api, &job.name, &deletion(job.uid)).await
            }
            Write::Event { job, namespace, warning, reason, note } => {
                self.write_event(&job, &namespace, warning, (&reason, &note)).await
            }
        }
    }

    async fn write_status(
        &self,
        job: &JobName,
        resource_version: &str,
        status: &MoeJobStatus,
    ) -> Applied {
        /// Of the whole object, which comes back.
        #[derive(Deserialize)]
        struct Answer {
            metadata: Metadata,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Metadata {
            resource_version: Option<String>,
        }
        let patch = json!({
            "apiVersion": MoeJob::api_version(&()),
            "kind": MoeJob::kind(&()),
            "metadata": {
                "name": job.name,
                "uid": job.uid,
                "resourceVersion": resource_version,
            },
            "status": status,
        });
        let params = PatchParams::apply(MANAGER).force();
        let request = Request::new(MoeJob::url_path(&(), Some(&job.namespace)));
        let request =
            request.patch_subresource("status", &job.name, &params, &Patch::Apply(&patch));
        let request = request.map_err(kube::Error::BuildRequest)?;
        let answer: Answer = self.client.request(request).await?;
        Ok(answer.metadata.resource_version)
    }

    /// Makes the object, or brings the job's own up to date. Somebody else's stays as it is.
    async fn ensure(&self, job: &JobName, object: Value) -> Applied {
        let (api, name) = self.object(&object);
        let Some(present) = api.get_opt(&name).await? else { return self.make(&object).await };
        if !is_of(&present, job) {
            return Err(ApplyError::NotOurs(name));
        }
        // The API server fills in defaults: what was asked for must stand there, others may.
        if contains(&present.data["spec"], &object["spec"]) {
            return Ok(None);
        }
        let mut new: DynamicObject =
            serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
        new.metadata.resource_version = present.metadata.resource_version;
        api.replace(&name, &PostParams::default(), &new).await?;
        Ok(None)
    }

    async fn make(&self, object: &Value) -> Applied {
        let (api, _) = self.object(object);
        self.create(api.resource_url(), object).await
    }

    fn object(&self, value: &Value) -> (Api<DynamicObject>, String) {
        let part = |path: &str| {
            value.pointer(path).and_then(Value::as_str).unwrap_or_default().to_string()
        };
        let types = TypeMeta { api_version: part("/apiVersion"), kind: part("/kind") };
        let api = self.dynamic(&part("/metadata/namespace"), &resource_of(&types));
        (api, part("/metadata/name"))
    }

    /// An event stands in the namespace of what it regards: elsewhere that is the operator's pod.
    async fn write_event(
        &self,
        job: &JobName,
        namespace: &str,
        warning: bool,
        (reason, note): (&str, &str),
    ) -> Applied {
        let now = k8s_openapi::jiff::Timestamp::now();
        let regarding = match namespace == job.namespace {
            true => json!({
                "apiVersion": MoeJob::api_version(&()),
                "kind": MoeJob::kind(&()),
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            }),
            false => json!({
                "apiVersion": "v1",
                "kind": "Pod",
                "name": self.instance.split('_').next().unwrap_or_default(),
                "namespace": namespace,
            }),
        };
        let event = json!({
            "metadata": {
                "name": format!("{}.{:x}", job.name, now.as_nanosecond()),
                "namespace": namespace,
            },
            "eventTime": format!("{now:.6}"),
            "action": reason,
            "reason": reason,
            "note": note,
            "type": if warning { "Warning" } else { "Normal" },
            "regarding": regarding,
            "reportingController": "moejob.dev/operator",
            "reportingInstance": self.instance,
        });
        self.create(&Event::url_path(&(), Some(namespace)), &event).await
    }

    /// Nothing of the answer is of interest: it is not even parsed.
    async fn create(&self, path: &str, value: &Value) -> Applied {
        let text = serde_json::to_vec(value).map_err(kube::Error::SerdeError)?;
        let request = Request::new(path).create(&PostParams::default(), text);
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.client.request::<IgnoredAny>(request).await?;
        Ok(None)
    }

    /// The operator's Secret, on the version that was read.
    pub async fn replace_secret(&self, secret: &Secret) -> Result<(), ApplyError> {
        let meta = &secret.metadata;
        let namespace = meta.namespace.clone().unwrap_or_default();
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &namespace);
        let name = meta.name.clone().unwrap_or_default();
        api.replace(&name, &PostParams::default(), secret).await?;
        Ok(())
    }

    /// The lease of leadership: created when it has no version, else replaced on it.
    pub async fn put_lease(&self, lease: &Lease) -> Result<Lease, ApplyError> {
        let meta = &lease.metadata;
        let namespace = meta.namespace.clone().unwrap_or_default();
        let api: Api<Lease> = Api::namespaced(self.client.clone(), &namespace);
        let params = PostParams::default();
        match &meta.resource_version {
            None => Ok(api.create(&params, lease).await?),
            Some(_) => {
                let name = meta.name.clone().unwrap_or_default();
                Ok(api.replace(&name, &params, lease).await?)
            }
        }
    }

    fn dynamic(&self, namespace: &str, resource: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, resource)
    }
}

/// The job is the controller that the object names as its owner.
fn is_of(object: &DynamicObject, job: &JobName) -> bool {
    let owners = object.metadata.owner_references.iter().flatten();
    owners.into_iter().any(|owner| owner.uid == job.uid && owner.controller == Some(true))
}

/// All of `asked` stands in `present`, which may say more.
fn contains(present: &Value, asked: &Value) -> bool {
    match (present, asked) {
        (Value::Object(present), Value::Object(asked)) => asked.iter().all(|(name, asked)| {
            present.get(name).is_some_and(|present| contains(present, asked))
        }),
        (Value::Array(present), Value::Array(asked)) => {
            let alike = |(present, asked): (&Value, &Value)| contains(present, asked);
            present.len() == asked.len() && present.iter().zip(asked).all(alike)
        }
        _ => present == asked,
    }
}

fn resource_of(types: &TypeMeta) -> ApiResource {
    let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
    let plural = match types.kind.as_str() {
        "NetworkPolicy" => "networkpolicies".to_string(),
        kind => format!("{}s", kind.to_lowercase()),
    };
    ApiResource {
        group: group.to_string(),
        version: version.to_string(),
        api_version: types.api_version.clone(),
        kind: types.kind.clone(),
        plural,
    }
}

fn deletion(uid: String) -> DeleteParams {
    DeleteParams::background().preconditions(Preconditions { uid: Some(uid), ..Default::default() })
}

/// Another one of the same name is as good as gone.
async fn delete(api: &Api<DynamicObject>, name: &str, params: &DeleteParams) -> Applied {
    match api.delete(name, params).await.map_err(ApplyError::from) {
        Ok(_) | Err(ApplyError::Gone | ApplyError::Conflict) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_up_to_date_whatever_the_api_server_adds() {
        let asked = json!({"a": {"b": [{"c": 1}]}, "d": "x"});
        let present = json!({"a": {"b": [{"c": 1, "protocol": "TCP"}], "more": 1}, "d": "x"});
        assert!(contains(&present, &asked));
        for changed in [
            json!({"a": {"b": [{"c": 2}]}, "d": "x"}),
            json!({"a": {"b": []}, "d": "x"}),
            json!({"a": {"b": [{"c": 1}, {"c": 1}]}, "d": "x"}),
            json!({"a": {"b": [{"c": 1}]}}),
        ] {
            assert!(!contains(&changed, &asked), "{changed}");
        }
    }

    #[test]
    fn a_right_that_is_missing_is_told_from_what_admission_says() {
        let user = "User \"system:serviceaccount:moejob-system:moejob\"";
        for (message, lacks) in [
            (&*format!("pods is forbidden: {user} cannot create resource \"pods\" in API group \
                \"\" in the namespace \"a\""), true),
            (&*format!("pods \"a\" is forbidden: {user} cannot delete resource \"pods\""), true),
            ("admission webhook \"x.y\" denied the request: pods cannot run as root", false),
            ("admission webhook \"x.y\" denied the request: it is forbidden: User \"a\" cannot do",
                false),
            ("pods \"a-a1-0\" is forbidden: exceeded quota: q, which cannot grow", false),
            ("pods \"a\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied \
                request: GPUs cannot be shared", false),
        ] {
            assert_eq!(lacks_right(message), lacks, "{message}");
        }
    }

    #[test]
    fn an_object_is_the_jobs_by_the_uid_of_its_controller() {
        let job = JobName { namespace: "n".into(), name: "default-deny".into(), uid: "u".into() };
        let object = |owners: Value| -> DynamicObject {
            let value = json!({"apiVersion": "v1", "kind": "A",
                "metadata": {"name": "default-deny", "ownerReferences": owners}});
            serde_json::from_value(value).expect("an object")
        };
        let owner = |uid: &str, controller: bool| {
            json!([{"apiVersion": "v", "kind": "K", "name": "default-deny", "uid": uid,
                "controller": controller}])
        };
        assert!(is_of(&object(owner("u", true)), &job));
        for foreign in [json!([]), owner("other", true), owner("u", false)] {
            assert!(!is_of(&object(foreign.clone()), &job), "{foreign}");
        }
    }
}
