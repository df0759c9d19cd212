//! The thin shell: one kubeconfig, and requests for plain JSON.

use super::error::MoeError;
use clap::Args;
use futures::{Stream, StreamExt};
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GetParams, ListParams, LogParams, Patch,
    PatchParams, PostParams,
};
use kube::client::Body;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use kube::core::Request;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Client, Error};
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

/// One request; watches and logs take as long as they take.
const REQUEST_S_MAX: u64 = 20;
/// Objects of one page of a list.
const PAGE: u32 = 500;
/// Whoever changes a job by these commands, as `managedFields` names it.
pub const MANAGER: &str = "kubectl-moe";

/// Which cluster, and as whom.
#[derive(Args, Clone, Debug, Default)]
pub struct Connection {
    /// The namespace; by default the context's.
    #[arg(short, long, global = true)]
    pub namespace: Option<String>,
    /// The context of the kubeconfig.
    #[arg(long, global = true)]
    pub context: Option<String>,
    /// The kubeconfig; by default what $KUBECONFIG names, or ~/.kube/config.
    #[arg(long, global = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Act as this user, if you may.
    #[arg(long = "as", global = true, value_name = "USER")]
    pub user: Option<String>,
    /// And as a member of this group.
    #[arg(long = "as-group", global = true, value_name = "GROUP")]
    pub group: Vec<String>,
}

/// A kind of object: its group and version, and its plural.
#[derive(Clone, Copy, Debug)]
pub struct Kind(pub &'static str, pub &'static str);

pub const JOBS: Kind = Kind("apis/moejob.dev/v1alpha1", "moejobs");
pub const PODS: Kind = Kind("api/v1", "pods");
pub const NODES: Kind = Kind("api/v1", "nodes");
pub const EVENTS: Kind = Kind("apis/events.k8s.io/v1", "events");
pub const CLAIMS: Kind = Kind("api/v1", "persistentvolumeclaims");
pub const CLASSES: Kind = Kind("apis/storage.k8s.io/v1", "storageclasses");
pub const PRIORITIES: Kind = Kind("apis/scheduling.k8s.io/v1", "priorityclasses");
pub const DEFINITIONS: Kind = Kind("apis/apiextensions.k8s.io/v1", "customresourcedefinitions");
pub const DEPLOYMENTS: Kind = Kind("apis/apps/v1", "deployments");
pub const LEASES: Kind = Kind("apis/coordination.k8s.io/v1", "leases");
pub const ROLE_BINDINGS: Kind = Kind("apis/rbac.authorization.k8s.io/v1", "rolebindings");
pub const POD_METRICS: Kind = Kind("apis/metrics.k8s.io/v1beta1", "pods");
pub const REVIEWS: Kind = Kind("apis/authorization.k8s.io/v1", "selfsubjectaccessreviews");

impl Kind {
    /// None is all namespaces, or a kind that lies in none.
    fn requests(self, namespace: Option<&str>) -> Request {
        let Kind(group, plural) = self;
        Request::new(match namespace {
            Some(namespace) => format!("/{group}/namespaces/{namespace}/{plural}"),
            None => format!("/{group}/{plural}"),
        })
    }

    fn resource(self) -> ApiResource {
        let version = self.0.trim_start_matches("apis/").trim_start_matches("api/");
        let (group, short) = version.split_once('/').unwrap_or(("", version));
        ApiResource {
            group: group.to_string(),
            version: short.to_string(),
            api_version: version.to_string(),
            kind: if self.1 == JOBS.1 { "MoeJob" } else { "Pod" }.to_string(),
            plural: self.1.to_string(),
        }
    }
}

#[derive(Clone)]
pub struct Cluster {
    pub client: Client,
    /// The one that was asked for, or the context's.
    pub namespace: String,
    /// It was asked for.
    pub chosen: bool,
    pub server: String,
}

impl Cluster {
    /// Reads the kubeconfig; in a pod without one, its service account. Sends nothing yet.
    pub async fn connect(connection: &Connection) -> Result<Cluster, MoeError> {
        let refused = |error| MoeError::Kubeconfig(Box::new(error));
        let context = connection.context.clone();
        let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
        let chosen = connection.context.is_some() || connection.kubeconfig.is_some();
        let mut config = match &connection.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(refused)?;
                Config::from_custom_kubeconfig(file, &options).await.map_err(refused)?
            }
            None => match (Config::from_kubeconfig(&options).await, chosen) {
                (Ok(config), _) => config,
                (Err(error), true) => return Err(refused(error)),
                (Err(error), false) => Config::incluster().map_err(|_| refused(error))?,
            },
        };
        config.connect_timeout = Some(Duration::from_secs(10));
        if connection.user.is_some() {
            config.auth_info.impersonate.clone_from(&connection.user);
            config.auth_info.impersonate_groups = Some(connection.group.clone());
        }
        let namespace = connection.namespace.as_ref().unwrap_or(&config.default_namespace).clone();
        let server = config.cluster_url.to_string();
        let client =
            Client::try_from(config).map_err(|error| MoeError::api("the kubeconfig", error))?;
        Ok(Cluster { client, namespace, chosen: connection.namespace.is_some(), server })
    }

    pub async fn get(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        name: &str,
    ) -> Result<Value, MoeError> {
        let request = kind.requests(namespace).get(name, &GetParams::default());
        self.send(format!("get {} {name}", kind.1), request).await
    }

    /// An answer of a path that is no object, such as `/version`.
    pub async fn raw(&self, folder: &str, name: &str) -> Result<Value, MoeError> {
        let request = Request::new(folder).get(name, &GetParams::default());
        self.send(format!("get {folder}/{name}"), request).await
    }

    /// All objects, page by page, in one list.
    pub async fn list(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        selector: Option<&str>,
    ) -> Result<Vec<Value>, MoeError> {
        let mut items = Vec::new();
        let mut params = ListParams::default().limit(PAGE);
        if let Some(selector) = selector {
            params = params.labels(selector);
        }
        loop {
            let request = kind.requests(namespace).list(&params);
            let mut page = self.send(format!("list {}", kind.1), request).await?;
            if let Value::Array(found) = page["items"].take() {
                items.extend(found);
            }
            match page["metadata"]["continue"].as_str() {
                Some(token) if !token.is_empty() => params = params.continue_token(token),
                _ => return Ok(items),
            }
        }
    }

    /// Those that a field selector names; one page is enough for what it is used for.
    pub async fn list_fields(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        fields: &str,
    ) -> Result<Vec<Value>, MoeError> {
        let params = ListParams::default().fields(fields).limit(PAGE);
        let request = kind.requests(namespace).list(&params);
        let mut page = self.send(format!("list {}", kind.1), request).await?;
        Ok(page["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    pub async fn create(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        object: &Value,
        dry_run: bool,
    ) -> Result<Value, MoeError> {
        let params = PostParams { dry_run, field_manager: Some(MANAGER.to_string()) };
        let request = kind.requests(namespace).create(&params, object.to_string().into_bytes());
        self.send(format!("create {}", kind.1), request).await
    }

    /// Server-side apply, or a merge patch.
    pub async fn patch(
        &self,
        doing: String,
        namespace: &str,
        name: &str,
        params: PatchParams,
        patch: &Patch<&Value>,
    ) -> Result<Value, MoeError> {
        self.send(doing, JOBS.requests(Some(namespace)).patch(name, &params, patch)).await
    }

    pub async fn delete(
        &self,
        namespace: &str,
        name: &str,
        params: &DeleteParams,
    ) -> Result<Value, MoeError> {
        let request = JOBS.requests(Some(namespace)).delete(name, params);
        self.send(format!("cancel {name}"), request).await
    }

    /// Objects as they are now and whenever they change. Errors come and go; the watch goes on.
    pub fn watch(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> impl Stream<Item = watcher::Result<watcher::Event<DynamicObject>>> + Send + use<> {
        let (client, resource) = (self.client.clone(), kind.resource());
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(client, namespace, &resource),
            None => Api::all_with(client, &resource),
        };
        let mut config = watcher::Config::default().page_size(PAGE);
        if let Some(labels) = labels {
            config = config.labels(labels);
        }
        if let Some(fields) = fields {
            config = config.fields(fields);
        }
        watcher(api, config).default_backoff().boxed()
    }

    /// The lines of a pod's log, each with its time.
    pub async fn logs(
        &self,
        namespace: &str,
        pod: &str,
        params: &LogParams,
    ) -> Result<impl Stream<Item = std::io::Result<String>> + Send + use<>, MoeError> {
        use futures::io::AsyncBufReadExt;
        let request = PODS.requests(Some(namespace)).logs(pod, params).map_err(Error::BuildRequest);
        let doing = format!("logs of {pod}");
        let stream = match request {
            Ok(request) => limited(&doing, self.client.request_stream(request)).await?,
            Err(error) => return Err(MoeError::api(doing, error)),
        };
        Ok(stream.lines())
    }

    /// The time by the server's clock, from the head of an answer.
    pub async fn date(&self) -> Option<String> {
        let request = Request::new("").get("version", &GetParams::default()).ok()?;
        let answer = self.client.send(request.map(Body::from)).await.ok()?;
        Some(answer.headers().get("date")?.to_str().ok()?.to_string())
    }

    async fn send(
        &self,
        doing: String,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<Value, MoeError> {
        let request = match request {
            Ok(request) => request,
            Err(error) => return Err(MoeError::api(doing, Error::BuildRequest(error))),
        };
        let answer = limited(&doing, self.client.request_text(request)).await?;
        serde_json::from_str(&answer)
            .map_err(|error| MoeError::api(doing, Error::SerdeError(error)))
    }
}

/// An answer within the time that an answer may take.
async fn limited<T>(
    doing: &str,
    answer: impl Future<Output = kube::Result<T>>,
) -> Result<T, MoeError> {
    match tokio::time::timeout(Duration::from_secs(REQUEST_S_MAX), answer).await {
        Ok(answer) => answer.map_err(|error| MoeError::api(doing, error)),
        Err(_) => Err(MoeError::Slow { doing: doing.to_string(), seconds: REQUEST_S_MAX }),
    }
}
