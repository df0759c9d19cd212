//! Who gets nothing, tried on a real API server: whatever a pod shows that is not its own token is
//! refused, and its worker is given no certificate, no rank and no configuration.
//!
//! The pods are the operator's own, on fake nodes; what their workers show is the test's to choose.
//! What may knock at a worker's listener is tried in `operator/tests/strangers.rs`.

use crate::bench::{Bench, PATIENCE, POLL, inside, install};
use k8s_openapi::api::authentication::v1::{
    BoundObjectReference, TokenRequest, TokenRequestSpec,
};
use k8s_openapi::api::core::v1::{Pod, Secret, ServiceAccount};
use kube::Api;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use moejob_protocol::pod::TOKEN_AUDIENCE;
use moejob_tests::cluster::{Own, small_job};
use moejob_tests::moejob;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use tokio::time::sleep;

fn cluster(name: &str) -> Own {
    let program = moejob().display().to_string();
    let up = ["--nodes", "0", "--fake", "6", "--program", &program];
    let cluster = Own::up(name, &up, &[("MOEJOB_FAKE_STEP_MS", "20")]);
    install(&cluster);
    cluster
}

fn manifest(name: &str, max: u32) -> Value {
    let training = json!({ "steps": 1_000_000, "globalBatchSize": 12, "precision": "fp32" });
    let mut job = small_job(name, (1, max), training);
    job["spec"]["recovery"] = json!({ "growthInterval": "1s", "gangTimeout": "3s" });
    job
}

/// What a pod may show in place of its own token, and what the operator then says of it.
const SHOWN: &[(&str, &str)] = &[
    ("nothing-like-a-token", "refused by the API server"),
    ("another-audience", "refused by the API server"),
    ("the-api-servers-audience", "refused by the API server"),
    ("bound-to-no-pod", "its pod's name is"),
    ("another-pods", "its pod's name is"),
    ("another-jobs-pods", "its pod's name is"),
    ("a-deleted-pods", "its pod's name is \"gone\""),
    ("an-expired-one", "refused by the API server"),
    ("one-of-another-key", "refused by the API server"),
];

struct Forge<'a> {
    bench: &'a Bench,
    /// The API server's key for tokens.
    key: PathBuf,
}

impl Forge<'_> {
    async fn token(&self, audience: &str, pod: Option<&Pod>) -> String {
        let accounts: Api<ServiceAccount> = self.bench.all();
        let bound_object_ref = pod.map(|pod| BoundObjectReference {
            api_version: Some("v1".to_string()),
            kind: Some("Pod".to_string()),
            name: Some(pod.name_any()),
            uid: pod.uid(),
        });
        let spec = TokenRequestSpec {
            audiences: vec![audience.to_string()],
            expiration_seconds: Some(3600),
            bound_object_ref,
        };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let how = PostParams::default();
        let made = accounts.create_token_request("default", &how, &request).await;
        made.expect("a token").status.expect("a status").token
    }

    async fn stranger(&self, name: &str) -> Pod {
        let pod = json!({
            "metadata": { "name": name },
            "spec": {
                "nodeName": "fake-6",
                "containers": [{ "name": "x", "image": "localhost/pause:test" }],
            },
        });
        let pod = serde_json::from_value(pod).expect("a pod");
        self.bench.all().create(&PostParams::default(), &pod).await.expect("a stranger's pod")
    }

    /// What the worker in `pod` shows.
    async fn shown(&self, what: &str, pod: &Pod) -> String {
        match what {
            "nothing-like-a-token" => "x".to_string(),
            "another-audience" => self.token("another.example", Some(pod)).await,
            "the-api-servers-audience" => {
                self.token("https://kubernetes.default.svc", Some(pod)).await
            }
            "bound-to-no-pod" => self.token(TOKEN_AUDIENCE, None).await,
            "another-pods" => {
                let stranger = self.stranger("stranger").await;
                self.token(TOKEN_AUDIENCE, Some(&stranger)).await
            }
            "another-jobs-pods" => {
                let other = self.pod("honest-a1-0").await;
                self.token(TOKEN_AUDIENCE, Some(&other)).await
            }
            "a-deleted-pods" => {
                let gone = self.stranger("gone").await;
                let token = self.token(TOKEN_AUDIENCE, Some(&gone)).await;
                let now = DeleteParams { grace_period_seconds: Some(0), ..Default::default() };
                self.bench.all::<Pod>().delete("gone", &now).await.expect("deleted");
                token
            }
            "an-expired-one" => {
                let token = self.token(TOKEN_AUDIENCE, Some(pod)).await;
                signed_again(&token, -7200, &self.key)
            }
            "one-of-another-key" => {
                let token = self.token(TOKEN_AUDIENCE, Some(pod)).await;
                let key = self.bench.folder.path().join("another.key");
                let path = key.display().to_string();
                let mut make = Command::new("openssl");
                make.args(["genrsa", "-out", &path, "2048"]).stderr(Stdio::null());
                assert!(make.status().expect("openssl").success());
                signed_again(&token, 0, &key)
            }
            other => panic!("no such thing to show: {other}"),
        }
    }

    async fn pod(&self, name: &str) -> Pod {
        let start = Instant::now();
        loop {
            if let Some(pod) = self.bench.all::<Pod>().get_opt(name).await.expect("an answer") {
                return pod;
            }
            assert!(start.elapsed() < PATIENCE, "no pod {name}\n{}", self.bench.log());
            sleep(POLL).await;
        }
    }
}

/// The token with its times moved by some seconds, and a signature that is right for the key.
fn signed_again(token: &str, seconds: i64, key: &Path) -> String {
    let parts: Vec<&str> = token.split('.').collect();
    let mut claims: Value = serde_json::from_slice(&decoded(parts[1])).expect("claims");
    for field in ["exp", "iat", "nbf"] {
        let at = claims[field].as_i64().expect("a time");
        claims[field] = json!(at + seconds);
    }
    let text = format!("{}.{}", parts[0], encoded(claims.to_string().as_bytes()));
    let mut child = Command::new("openssl")
        .args(["dgst", "-sha256", "-sign", &key.display().to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("openssl");
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("written");
    let output = child.wait_with_output().expect("a signature");
    assert!(output.status.success());
    format!("{text}.{}", encoded(&output.stdout))
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Base64 for URLs, without padding.
fn encoded(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let at = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for index in 0..=chunk.len() {
            let digit = bits >> (18 - 6 * index) & 63;
            text.push(char::from(DIGITS[digit as usize]));
        }
    }
    text
}

fn decoded(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text
        .bytes()
        .map(|byte| DIGITS.iter().position(|digit| *digit == byte).expect("a digit") as u32)
        .collect();
    let mut bytes = Vec::new();
    for chunk in digits.chunks(4) {
        let bits = (0..4).fold(0, |bits, at| bits << 6 | chunk.get(at).copied().unwrap_or(0));
        let all = [(bits >> 16) as u8, (bits >> 8) as u8, bits as u8];
        bytes.extend(&all[..chunk.len() - 1]);
    }
    bytes
}

#[test]
fn base64_there_and_back() {
    for length in 0..9u8 {
        let bytes: Vec<u8> = (0..length).map(|at| at.wrapping_mul(77)).collect();
        assert_eq!(decoded(&encoded(&bytes)), bytes);
    }
    assert_eq!(encoded(b"{\"a\""), "eyJhIg");
}

#[test]
fn a_pod_that_does_not_show_its_own_token_gets_nothing() {
    let cluster = cluster("tokens");
    let state = cluster.state.clone();
    inside(&cluster, async move {
        let bench = Bench::new(state.clone()).await;
        bench.kubeconfig().await;
        let forge = Forge { bench: &bench, key: state.join("pki/accounts.key") };
        tokio::select! {
            () = refusals(&forge) => {}
            never = bench.operate() => match never {},
        }
    });
}

async fn apply(bench: &Bench, name: &str, max: u32) {
    let object = serde_json::from_value(manifest(name, max)).expect("an object");
    bench.jobs().create(&PostParams::default(), &object).await.expect("applied");
}

async fn refusals(forge: &Forge<'_>) {
    let bench = forge.bench;
    apply(bench, "honest", 1).await;
    bench.until("it trains", "honest", |status| status["phase"] == "Running").await;
    for (what, said) in SHOWN {
        let pod = format!("{what}-a1-0");
        // The worker waits for what it is to show.
        bench.order(&format!("token-{pod}"), "");
        apply(bench, what, 1).await;
        let token = forge.shown(what, &forge.pod(&pod).await).await;
        bench.order(&format!("token-{pod}"), &token);
        // A second pod of the same job shows its own, and that one trains.
        let job = bench.until("another pod trains", what, |status| status["phase"] == "Running");
        let job = job.await;
        let record = job["status"]["record"].as_str().expect("a record");
        assert!(record.contains(&format!("{what}-a1-1")), "{record}");
        assert!(!record.contains(&pod), "{what}: {pod} was given a rank: {record}");
        assert_eq!(job["status"]["attempt"], 1, "{what}");
        let log = bench.whole_log();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(&pod)).collect();
        assert!(lines.iter().any(|line| line.contains(said)), "{what}: {lines:#?}");
        println!("{what}: {}", lines.iter().find(|line| line.contains(said)).expect("a line"));
        bench.jobs().delete(what, &DeleteParams::default()).await.expect("deleted");
        bench.until_pods("its pods are gone", what, |pods| pods.is_empty()).await;
    }
}

#[test]
fn the_authority_survives_the_operators_restart() {
    let cluster = cluster("authority");
    let state = cluster.state.clone();
    inside(&cluster, async move {
        let bench = Bench::new(state).await;
        bench.kubeconfig().await;
        tokio::select! {
            () = restarts(&bench) => {}
            never = bench.operate() => match never {},
        }
    });
}

async fn restarts(bench: &Bench) {
    apply(bench, "kept", 1).await;
    bench.until("it trains", "kept", |status| status["phase"] == "Running").await;
    let secrets: Api<Secret> = Api::namespaced(bench.client.clone(), "moejob-system");
    let before = secrets.get("moejob-authority").await.expect("the Secret");
    let pods = bench.pods("kept").await;
    for max in [2, 3] {
        bench.proxy.strike();
        // What a successor orders is obeyed by workers that trust the authority, and by no others.
        bench.patch("kept", json!({ "nodes": { "max": max } })).await;
        bench
            .until("it has grown", "kept", |status| {
                status["phase"] == "Running" && status["nodes"]["ready"] == max
            })
            .await;
    }
    assert_eq!(bench.proxy.cuts(), 2);
    let after = secrets.get("moejob-authority").await.expect("the Secret");
    assert!(before.data.is_some() && before.data == after.data, "the authority is another");
    let status = bench.job("kept").await["status"].take();
    assert_eq!((&status["attempt"], &status["restarts"]), (&json!(3), &json!(0)), "{status:#}");
    let later = bench.pods("kept").await;
    assert!(pods.iter().all(|pod| later.contains(pod)), "{pods:?} {later:?}");
}
