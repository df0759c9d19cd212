//! A real operator as a process, before a real API server and scheduler with fake nodes, behind a
//! proxy that counts what it writes and may end it.

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Secret, ServiceAccount};
use k8s_openapi::api::events::v1::Event;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::GroupVersionKind;
use kube::{Client, Config, ResourceExt};
use moejob_tests::cluster::Own;
use moejob_tests::cutting::{Proxy, Write};
use moejob_tests::moejob;
use serde_json::{Value, json};
use std::fs::File;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::process::{Child, Command};
use tokio::time::sleep;

const SYSTEM: &str = "moejob-system";
pub const NAMESPACE: &str = "default";
/// For anything one waits for; most of it takes a second.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const POLL: Duration = Duration::from_millis(30);

/// Runs in the network of the control plane: everything is reached from there.
pub fn inside<T: Send + 'static>(
    cluster: &Own,
    test: impl Future<Output = T> + Send + 'static,
) -> T {
    within(File::open(cluster.network("control")).expect("a network"), test)
}

/// Runs in a network, with one thread.
pub fn within<T: Send + 'static>(
    network: File,
    test: impl Future<Output = T> + Send + 'static,
) -> T {
    let thread = std::thread::spawn(move || {
        use std::os::fd::AsFd;
        let kind = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(network.as_fd(), Some(kind)).expect("entered");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(test)
    });
    match thread.join() {
        Ok(done) => done,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

pub fn install(cluster: &Own) {
    let folder = moejob_tests::root().join("manifests");
    for file in ["namespace.yaml", "crd.yaml", "rbac.yaml", "secret.yaml"] {
        let path = folder.join(file).display().to_string();
        cluster.script("kubectl", &["apply", "-f", &path]).expect(file);
    }
    let path = folder.join("namespace").display().to_string();
    cluster.script("kubectl", &["apply", "-k", &path]).expect("the Role");
    let crd = "crd/moejobs.moejob.dev";
    let wait = ["wait", "--for=condition=Established", "--timeout=20s", crd];
    cluster.script("kubectl", &wait).expect("the definition is served");
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "checkpoints" },
        "spec": { "accessModes": ["ReadWriteMany"],
            "resources": { "requests": { "storage": "1Gi" } } },
    });
    cluster.manifest(claim.to_string().as_bytes()).expect("a claim");
}

pub struct Bench {
    pub client: Client,
    pub proxy: Proxy,
    pub orders: PathBuf,
    pub folder: tempfile::TempDir,
    /// How often the operator lists everything anew, in seconds.
    pub lists: u32,
}

impl Bench {
    pub async fn new(state: PathBuf) -> Bench {
        let kubeconfig = Kubeconfig::read_from(state.join("admin.kubeconfig")).expect("a config");
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options);
        let config = config.await.expect("a config");
        let host = config.cluster_url.host().expect("an address").to_string();
        let root = std::fs::read_to_string(state.join("pki/apiserver.crt")).expect("a root");
        Bench {
            client: Client::try_from(config).expect("a client"),
            proxy: Proxy::start((host, 443), &root).await.expect("a proxy"),
            orders: state.join("fake"),
            folder: tempfile::tempdir().expect("a folder"),
            lists: 600,
        }
    }

    pub fn all<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub fn jobs(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("moejob.dev", "v1alpha1", "MoeJob");
        Api::namespaced_with(self.client.clone(), NAMESPACE, &ApiResource::from_gvk(&kind))
    }

    pub fn order(&self, file: &str, text: &str) {
        std::fs::write(self.orders.join(file), text).expect("an order");
    }

    /// As the operator's pod would have it, but for the proxy.
    pub async fn kubeconfig(&self) {
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client.clone(), SYSTEM);
        let spec = TokenRequestSpec { expiration_seconds: Some(7200), ..Default::default() };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let how = PostParams::default();
        let made = accounts.create_token_request("moejob-operator", &how, &request).await;
        let token = made.expect("a token").status.expect("a status").token;
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{ "name": "c",
                "cluster": { "server": format!("http://127.0.0.1:{}", self.proxy.port) } }],
            "users": [{ "name": "u", "user": { "token": token } }],
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        });
        std::fs::write(self.folder.path().join("config"), config.to_string()).expect("written");
    }

    pub fn start(&self) -> Child {
        let log = self.folder.path().join("operator.log");
        let log = File::options().create(true).append(true).open(log).expect("a log");
        let child = Command::new(moejob())
            .args(["operator", "--image", "localhost/moejob:test"])
            .args(["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"])
            .args(["--list-every", &self.lists.to_string()])
            .env("KUBECONFIG", self.folder.path().join("config"))
            .env("MOEJOB_LOG", "info")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .expect("an operator");
        self.proxy.watch(child.id().map_or(0, |id| id as i32));
        child
    }

    /// An operator, and another one when it has ended; for as long as it is polled.
    pub async fn operate(&self) -> std::convert::Infallible {
        loop {
            let mut operator = self.start();
            let status = operator.wait().await.expect("its end");
            use std::os::unix::process::ExitStatusExt;
            assert_eq!(status.signal(), Some(9), "{status}\n{}", self.log());
            self.give_lease_back().await;
        }
    }

    /// A killed leader's lease holds for 10 s, which `life.rs` waits for and this test does not.
    async fn give_lease_back(&self) {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), SYSTEM);
        let patch = Patch::Merge(json!({ "spec": { "holderIdentity": "" } }));
        let how = PatchParams::default();
        match leases.patch("moejob-operator", &how, &patch).await {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => drop(other.expect("the lease is free")),
        }
    }

    pub fn whole_log(&self) -> String {
        let text = std::fs::read_to_string(self.folder.path().join("operator.log"));
        text.unwrap_or_default()
    }

    /// Its last lines.
    pub fn log(&self) -> String {
        let text = self.whole_log();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    pub async fn job(&self, name: &str) -> Value {
        let found = self.jobs().get_opt(name).await.expect("an answer");
        found.map_or(Value::Null, |job| serde_json::to_value(job).expect("JSON"))
    }

    pub async fn patch(&self, name: &str, spec: Value) {
        let patch = Patch::Merge(json!({ "spec": spec }));
        self.jobs().patch(name, &PatchParams::default(), &patch).await.expect("patched");
    }

    pub async fn until(&self, what: &str, name: &str, reached: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            let job = self.job(name).await;
            if reached(&job["status"]) {
                return job;
            }
            if start.elapsed() > PATIENCE {
                let (writes, log) = (shown(&self.proxy.writes()), self.log());
                panic!("{name}: {what}: not in {PATIENCE:?}\n{job:#}\n{writes}\n{log}");
            }
            sleep(POLL).await;
        }
    }

    /// Pods of a job, and whether each has ended.
    pub async fn pods(&self, name: &str) -> Vec<(String, bool)> {
        let label = ListParams::default().labels(&format!("moejob.dev/job={name}"));
        let pods = self.all::<Pod>().list(&label).await.expect("pods");
        let ended = |pod: &Pod| {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            matches!(phase, Some("Succeeded" | "Failed"))
        };
        pods.items.iter().map(|pod| (pod.name_any(), ended(pod))).collect()
    }

    pub async fn until_pods(
        &self,
        what: &str,
        name: &str,
        reached: impl Fn(&[(String, bool)]) -> bool,
    ) {
        let start = Instant::now();
        loop {
            let pods = self.pods(name).await;
            if reached(&pods) {
                return;
            }
            if start.elapsed() > PATIENCE {
                let writes = shown(&self.proxy.writes());
                panic!("{name}: {what}: {pods:?}\n{writes}\n{}", self.log());
            }
            sleep(POLL).await;
        }
    }

    /// A first operator on a cluster that has not seen one.
    pub async fn forget(&self) {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), SYSTEM);
        let patch = Patch::Merge(json!({ "data": null }));
        let how = PatchParams::default();
        secrets.patch("moejob-authority", &how, &patch).await.expect("an empty Secret");
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), SYSTEM);
        let _ = leases.delete("moejob-operator", &DeleteParams::default()).await;
        let events = self.all::<Event>();
        events.delete_collection(&DeleteParams::default(), &ListParams::default()).await
            .expect("no events");
        let _ = std::fs::remove_file(self.folder.path().join("operator.log"));
    }
}

pub fn shown(writes: &[Write]) -> String {
    let line = |(number, write): (usize, &Write)| {
        format!("{}: {} {} -> {:?}\n", number + 1, write.what, write.name, write.answer)
    };
    writes.iter().enumerate().map(line).collect()
}
