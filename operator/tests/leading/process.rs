//! The operator as a process of the test, and what it finds.

use crate::api::Api;
use moe_worker::gang::tls::server_name;
use moejob_identity::authority::Authority;
use moejob_manifest::crd;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::TlsConnector;

pub const NAMESPACE: &str = "moejob-system";

/// An API server of a cluster of one node, where moejob is installed.
pub async fn world() -> Api {
    let api = Api::start().await.expect("a port");
    api.put("customresourcedefinitions", crd::definition());
    api.put("secrets", json!({
        "metadata": { "name": "moejob-authority", "namespace": NAMESPACE },
    }));
    add_node(&api, "n0");
    api
}

pub fn add_node(api: &Api, name: &str) {
    api.put("nodes", json!({
        "metadata": { "name": name },
        "status": {
            "conditions": [{ "type": "Ready", "status": "True" }],
            "allocatable": { "cpu": "8", "memory": "32Gi", "pods": "110" },
        },
    }));
}

/// A small job.
pub fn job(name: &str) -> Value {
    json!({
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoeJob",
        "metadata": { "name": name, "namespace": "team" },
        "spec": {
            "nodes": { "min": 1, "max": 1 },
            "model": { "preset": "tiny" },
            "data": { "train": { "text": { "paths": ["corpus/*"] } }, "sequenceLength": 8 },
            "training": { "steps": 100, "globalBatchSize": 8 },
            "checkpoint": { "location": format!("checkpoints/{name}") },
            "volumes": [{ "mountPath": "checkpoints", "claim": "c" }],
        },
    })
}

/// Who holds the lease.
pub fn holder(api: &Api) -> String {
    let lease = api.get("leases", (NAMESPACE, "moejob-operator")).unwrap_or_default();
    lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_string()
}

pub async fn until(what: &str, seconds: u64, mut reached: impl FnMut() -> bool) {
    let start = Instant::now();
    while !reached() {
        assert!(start.elapsed() < Duration::from_secs(seconds), "{what}: not within {seconds} s");
        sleep(Duration::from_millis(50)).await;
    }
}

pub struct Operator {
    child: Child,
    folder: tempfile::TempDir,
    pub health: u16,
    pub metrics: u16,
}

impl Drop for Operator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Operator {
    /// In a pod of this name, which is its token, too.
    pub fn start(api: &Api, name: &str) -> Operator {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("config");
        std::fs::write(&config, api.kubeconfig(name)).expect("written");
        let log = std::fs::File::create(folder.path().join("log")).expect("a file");
        let (health, metrics) = (port(), port());
        let at = |port: u16| format!("127.0.0.1:{port}");
        let child = Command::new(env!("CARGO_BIN_EXE_moejob"))
            .args(["operator", "--image", "moejob:test", "--namespace", NAMESPACE, "--pod", name])
            .args(["--listen", &at(health), "--metrics", &at(metrics)])
            .env("KUBECONFIG", config)
            .env("MOEJOB_LOG", "info")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .spawn()
            .expect("moejob is built");
        Operator { child, folder, health, metrics }
    }

    /// All that it said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it is there");
    }

    /// Its exit code; none if it was killed.
    pub async fn until_end(&mut self, seconds: u64) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            let late = start.elapsed() > Duration::from_secs(seconds);
            assert!(!late, "it has not ended: {}", self.log());
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Status code and text of /metrics; 0 while nobody answers.
    pub async fn scrape(&self, token: Option<&str>) -> (u16, String) {
        let authorization = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
        let request =
            format!("GET /metrics HTTP/1.1\r\n{}\r\n", authorization.unwrap_or_default());
        let asked = async {
            let tcp = TcpStream::connect(("127.0.0.1", self.metrics)).await?;
            // It takes any certificate, as a scraper must.
            let client = Authority::new().expect("an authority").client();
            let mut stream = TlsConnector::from(client).connect(server_name(), tcp).await?;
            stream.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = asked.await.unwrap_or_default();
        let status = answer.split(' ').nth(1).and_then(|word| word.parse().ok());
        (status.unwrap_or(0), answer)
    }
}

/// What is answered without TLS.
pub async fn plain(port: u16, path: &str) -> String {
    let mut answer = Vec::new();
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)).await else {
        return String::new();
    };
    let _ = stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).await;
    let _ = stream.read_to_end(&mut answer).await;
    // An alert of TLS is no text.
    String::from_utf8(answer).ok().filter(|text| text.starts_with("HTTP")).unwrap_or_default()
}

fn port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}
