//! The only writer of the cluster: one arm per kind of write, and no choice left.
//!
//! Everything carries a precondition: pods are created by POST and deleted by uid, status is
//! applied on a resource version. What has changed meanwhile is refused, and decided on again.

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions,
};
use kube::core::{Request, TypeMeta};
use kube::{Client, Resource};
use moejob_plan::Job;
use moejob_plan::pods::{self, Birth, Surroundings};
use moejob_plan::spec::MoeJob;
use moejob_plan::status::MoeJobStatus;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Field manager of all that the operator applies.
const MANAGER: &str = "moejob";
/// Writes of all jobs under way at once; the others wait in the order of their decision. More of
/// them would not be done sooner, and each would open a connection of its own.
const WRITES_MAX: usize = 32;
/// A write that takes longer has an unknown end, and is decided on again.
const WRITE_MS_MAX: u64 = 10_000;
/// The API server cuts what is longer.
const NOTE_BYTES_MAX: usize = 1000;

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// The pod is put together when it is written: hundreds at once would take megabytes.
    CreatePod { template: Arc<Template>, birth: Birth },
    DeletePod { namespace: String, name: String, uid: String, grace_s: u32 },
    /// On the version of the job that was seen last.
    Status { job: JobName, resource_version: String, status: Box<MoeJobStatus> },
    /// A NetworkPolicy or a PodDisruptionBudget.
    Object(Value),
    DeleteJob(JobName),
    Event { job: JobName, warning: bool, reason: String, note: String },
}

/// What all pods of a job have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    pub job: Job,
    pub around: Surroundings,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobName {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

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
    #[error("the API server")]
    Api(#[source] Box<kube::Error>),
}

impl ApplyError {
    /// As `result` of the metrics.
    pub fn label(&self) -> &'static str {
        match self {
            ApplyError::Slow => "slow",
            ApplyError::Conflict => "conflict",
            ApplyError::Exists => "exists",
            ApplyError::Gone => "gone",
            ApplyError::Forbidden(_) => "forbidden",
            ApplyError::Refused(_) => "refused",
            ApplyError::Api(_) => "error",
        }
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
            // Admission (a quota, a policy) says "forbidden" as well, but not that a user cannot.
            (403, _) if status.message.contains(" cannot ") => ApplyError::Forbidden(message()),
            (403, _) => ApplyError::Refused(message()),
            (400 | 405 | 413 | 415 | 422, _) => ApplyError::Refused(message()),
            _ => ApplyError::Api(Box::new(error)),
        }
    }
}

/// Of a status: the job's new resource version. Of others: nothing.
pub type Written = Result<Option<String>, ApplyError>;

#[derive(Clone)]
pub struct Writer {
    client: Client,
    running: Arc<Semaphore>,
    /// The operator's pod, as events name it.
    instance: String,
}

impl Writer {
    pub fn new(client: Client, instance: String) -> Writer {
        Writer { client, running: Arc::new(Semaphore::new(WRITES_MAX)), instance }
    }

    /// Does all of them, some at a time; the results are in the order of the writes.
    pub async fn write_all(&self, writes: Vec<Write>) -> Vec<Written> {
        let each = writes.into_iter().enumerate();
        let each = each.map(|(index, write)| async move { (index, self.write(write).await) });
        // A slow one holds up no other.
        let done = futures::stream::iter(each).buffer_unordered(WRITES_MAX);
        let mut done: Vec<(usize, Written)> = done.collect().await;
        done.sort_unstable_by_key(|(index, _)| *index);
        done.into_iter().map(|(_, written)| written).collect()
    }

    pub async fn write(&self, write: Write) -> Written {
        let _running = self.running.acquire().await.expect("it is never closed");
        let limit = Duration::from_millis(WRITE_MS_MAX);
        timeout(limit, self.write_now(write)).await.unwrap_or(Err(ApplyError::Slow))
    }

    async fn write_now(&self, write: Write) -> Written {
        match write {
            Write::CreatePod { template, birth } => {
                let Template { job, around } = &*template;
                let pod = pods::pod(job, around, &birth);
                self.create(&Pod::url_path(&(), Some(&around.namespace)), &pod).await
            }
            Write::DeletePod { namespace, name, uid, grace_s } => {
                let api = self.dynamic(&namespace, &ApiResource::erase::<Pod>(&()));
                let params = deletion(uid).grace_period(grace_s);
                gone_is_done(api.delete(&name, &params).await.map(|_| ()))
            }
            Write::Status { job, resource_version, status } => {
                self.write_status(&job, &resource_version, &status).await
            }
            Write::Object(value) => self.write_object(value).await,
            Write::DeleteJob(job) => {
                let api = self.dynamic(&job.namespace, &ApiResource::erase::<MoeJob>(&()));
                gone_is_done(api.delete(&job.name, &deletion(job.uid)).await.map(|_| ()))
            }
            Write::Event { job, warning, reason, note } => {
                self.write_event(&job, warning, &reason, &note).await
            }
        }
    }

    async fn write_status(
        &self,
        job: &JobName,
        resource_version: &str,
        status: &MoeJobStatus,
    ) -> Written {
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

    async fn write_object(&self, value: Value) -> Written {
        let part = |path: &str| {
            value.pointer(path).and_then(Value::as_str).unwrap_or_default().to_string()
        };
        let (name, namespace) = (part("/metadata/name"), part("/metadata/namespace"));
        let types = TypeMeta { api_version: part("/apiVersion"), kind: part("/kind") };
        let resource = resource_of(&types);
        let api = self.dynamic(&namespace, &resource);
        let params = PatchParams::apply(MANAGER).force();
        api.patch(&name, &params, &Patch::Apply(&value)).await?;
        Ok(None)
    }

    async fn write_event(
        &self,
        job: &JobName,
        warning: bool,
        reason: &str,
        note: &str,
    ) -> Written {
        let now = k8s_openapi::jiff::Timestamp::now();
        let mut note = note.to_string();
        if note.len() > NOTE_BYTES_MAX {
            let end = (0..=NOTE_BYTES_MAX).rev().find(|at| note.is_char_boundary(*at));
            note.truncate(end.unwrap_or(0));
        }
        let event = json!({
            "metadata": {
                "name": format!("{}.{:x}", job.name, now.as_nanosecond()),
                "namespace": job.namespace,
            },
            "eventTime": format!("{now:.6}"),
            "action": reason,
            "reason": reason,
            "note": note,
            "type": if warning { "Warning" } else { "Normal" },
            "regarding": {
                "apiVersion": MoeJob::api_version(&()),
                "kind": MoeJob::kind(&()),
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
            },
            "reportingController": "moejob.dev/operator",
            "reportingInstance": self.instance,
        });
        self.create(&Event::url_path(&(), Some(&job.namespace)), &event).await
    }

    /// Nothing of the answer is of interest: it is not even parsed.
    async fn create(&self, path: &str, value: &Value) -> Written {
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
fn gone_is_done(result: kube::Result<()>) -> Written {
    match result.map_err(ApplyError::from) {
        Ok(()) | Err(ApplyError::Gone | ApplyError::Conflict) => Ok(None),
        Err(error) => Err(error),
    }
}
