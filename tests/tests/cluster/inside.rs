//! Part D of the bad input, from inside a real cluster: what knocks at the listeners of workers
//! that train gets nothing, and their losses are those of an undisturbed run.
//!
//! ```text
//! guarded   the job that trains
//! thief     another job, whose pod shows its own token and gets its own certificate
//! guarded's first attempt   was a thief's too: it has a certificate of an attempt that is over
//! stranger  a pod without any rights in the same namespace
//! forged    a copy of a member's pod, with its labels and its seal
//! ```
//!
//! Each of these pods runs a program that only waits, and the test does in its network what it
//! might do. What they have they have as thieves would: a token from their own volume, a
//! certificate from the operator. No network policy helps: nothing enforces them in this cluster.

use crate::bench::within;
use crate::jobs::{
    FOR_EVER, GROW_SOON, Job, PATIENCE, install, lead_from_its_own_node, operators,
};
use crate::knock::{
    HELLO, REFUSED_WITHIN, drained, dribble, framed, plain_strangers, refused, with_alpn,
    without_certificate,
};
use moe_worker::life::control::{read_frame, write_frame};
use moe_worker::life::session::Session;
use moe_worker::gang::tls::{ALPN_CONTROL, ALPN_DATA, leader_client};
use moejob_plan::pods::ANNOTATION_SEAL;
use moejob_protocol::message::{Frame, HEARTBEAT_MS, Heartbeat, Phase};
use moejob_protocol::pod::PORT;
use moejob_protocol::{Down, PROTOCOL_VERSION, Up};
use moejob_tests::cluster::{get, kubectl, manifest, network_of, state, until};
use rcgen::{Certificate, CertificateParams, KeyPair};
use serde_json::{Value, json};
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::io::split;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::interval;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::PrivatePkcs8KeyDer;
use tokio_rustls::rustls::{ClientConfig, ServerConfig};

/// Its `/moejob` waits and does nothing.
const IDLE: (&str, &str) = ("spec:\n  nodes", "spec:\n  image: localhost/idle:test\n  nodes");
const ONE_NODE: (&str, &str) = ("min: 1, max: 2", "min: 1, max: 1");
/// As a later member of `guarded` might be called.
const FORGED: &str = "guarded-a2-77";
const SILENCE: Duration = Duration::from_secs(30);

/// A pod that runs, as the API server knows it.
struct Pod(Value);

impl Pod {
    fn running(name: &str) -> Pod {
        Pod(until(name, PATIENCE, operators, || {
            let pod = get(&["pod", name]);
            let runs = pod["status"]["phase"] == "Running" && pod["status"]["podIP"].is_string();
            runs.then_some(pod)
        }))
    }

    fn text(&self, pointer: &str) -> &str {
        self.0.pointer(pointer).and_then(Value::as_str).expect(pointer)
    }

    fn address(&self) -> IpAddr {
        self.text("/status/podIP").parse().expect("an address")
    }

    fn listener(&self) -> SocketAddr {
        (self.address(), PORT).into()
    }

    fn network(&self) -> File {
        network_of(self.text("/spec/nodeName"), self.address())
    }

    /// What the kubelet has put into its volume.
    fn token(&self) -> String {
        let volume = format!(
            "nodes/{}/kubelet/pods/{}/volumes/kubernetes.io~projected/token/token",
            self.text("/spec/nodeName"),
            self.text("/metadata/uid"),
        );
        std::fs::read_to_string(state().join(volume)).expect("a token").trim().to_string()
    }
}

/// A key, and a certificate that names nobody and that nobody else has signed.
struct Papers {
    key: KeyPair,
    certificate: Certificate,
    request: String,
}

impl Papers {
    fn new() -> Papers {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::default();
        let request = params.serialize_request(&key).and_then(|request| request.pem());
        let certificate = params.self_signed(&key).expect("a certificate");
        Papers { request: request.expect("a request"), certificate, key }
    }

    fn server(&self) -> Arc<ServerConfig> {
        let private = PrivatePkcs8KeyDer::from(self.key.serialize_der()).into();
        let mut server = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate.der().clone()], private)
            .expect("a server");
        server.alpn_protocols = vec![ALPN_CONTROL.to_vec()];
        Arc::new(server)
    }
}

/// What the operator gave to a thief: PEM of a certificate, and of the key that it is for.
struct Stolen {
    leaf: String,
    key: String,
}

impl Stolen {
    /// Asks for this protocol with it.
    fn client(&self, alpn: &[u8]) -> Arc<ClientConfig> {
        with_alpn(leader_client(&self.leaf, &self.key).expect("a certificate and its key"), alpn)
    }
}

/// A worker of the thief's own make in the network of its pod. It shows the pod's token and answers
/// the operator for as long as this lives.
struct Impostor {
    stolen: Stolen,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Impostor {
    fn in_pod(pod: &Pod) -> Impostor {
        let papers = Papers::new();
        let (key, server) = (papers.key.serialize_pem(), papers.server());
        let uid = pod.text("/metadata/labels/moejob.dev~1job-uid").to_string();
        let session = Session::new(uid, Duration::ZERO);
        let hello = session.hello(1, (pod.text("/metadata/name"), pod.token()), &papers.request);
        let (network, address) = (pod.network(), pod.listener());
        let (leaves, leaf) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            within(network, async move {
                let listener = TcpListener::bind(address).await.expect("nobody else listens");
                tokio::select! {
                    _ = stopped => {}
                    () = serve(listener, server, Up::Hello(hello), leaves) => {}
                }
            });
        });
        let leaf = leaf.recv_timeout(PATIENCE).expect("a certificate of its own");
        Impostor { stolen: Stolen { leaf, key }, stop, thread }
    }

    /// With what it has got.
    fn leave(self) -> Stolen {
        drop(self.stop);
        self.thread.join().expect("no panic");
        self.stolen
    }
}

/// Each leader that dials is told `hello` and hears heartbeats; what certificates come are sent on.
async fn serve(
    listener: TcpListener,
    server: Arc<ServerConfig>,
    hello: Up,
    leaves: mpsc::Sender<String>,
) {
    loop {
        let (tcp, _) = listener.accept().await.expect("it listens");
        let accepted = TlsAcceptor::from(Arc::clone(&server)).accept(tcp).await;
        let Ok(mut stream) = accepted else { continue };
        let Ok(first) = read_frame::<Down>(&mut stream, SILENCE).await else { continue };
        let frame = |attempt, body| Frame { v: PROTOCOL_VERSION, term: first.term, attempt, body };
        if write_frame(&mut stream, &frame(0, hello.clone())).await.is_err() {
            continue;
        }
        let (mut from, mut to) = split(stream);
        let leaves = leaves.clone();
        let attempt = Arc::new(AtomicU32::new(0));
        let configured = Arc::clone(&attempt);
        let reader = tokio::spawn(async move {
            while let Ok(frame) = read_frame::<Down>(&mut from, SILENCE).await {
                match frame.body {
                    Down::Leaf { certificate, .. } => drop(leaves.send(certificate)),
                    Down::Configure(_) => configured.store(frame.attempt, Ordering::Relaxed),
                    _ => {}
                }
            }
        });
        let mut beat = interval(Duration::from_millis(HEARTBEAT_MS));
        while !reader.is_finished() {
            beat.tick().await;
            let now = attempt.load(Ordering::Relaxed);
            let phase = if now == 0 { Phase::Idle } else { Phase::Joining };
            let (held, loading) = (vec![], None);
            let heart = Heartbeat { phase, step: 0, collective: 0, held, loading };
            if write_frame(&mut to, &frame(now, Up::Heartbeat(heart))).await.is_err() {
                break;
            }
        }
        reader.abort();
    }
}

/// A pod that waits on this node, as `change` says; it ends with the test.
struct Waiting(String);

impl Waiting {
    fn pod(name: &str, node: &str, metadata: &Value) -> Waiting {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata,
            "spec": {
                "nodeName": node,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": false,
                "securityContext": {
                    "runAsNonRoot": true, "seccompProfile": { "type": "RuntimeDefault" },
                },
                "containers": [{
                    "name": "worker", "image": "localhost/idle:test",
                    "imagePullPolicy": "IfNotPresent",
                    "securityContext": {
                        "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] },
                    },
                }],
            },
        });
        pod["metadata"]["name"] = json!(name);
        manifest(&["create"], pod.to_string().as_bytes()).expect(name);
        Waiting(name.to_string())
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        drop(kubectl(&["delete", "pod", &self.0, "--ignore-not-found", "--wait=false"]));
    }
}

#[test]
fn pods_that_are_no_members_get_nothing_and_the_job_trains_on() {
    install();
    lead_from_its_own_node();
    let thief = Job::new("thief", &[FOR_EVER, ONE_NODE, IDLE]);
    thief.apply();
    let thieves_pod = Pod::running("thief-a1-0");
    let there = thieves_pod.text("/spec/nodeName");
    let impostor = Impostor::in_pod(&thieves_pod);
    let job = Job::new("guarded", &[FOR_EVER, GROW_SOON, IDLE]);
    job.apply();
    let old = first_attempt(&job);
    job.until_world(1);
    let member = Pod::running(&job.running().into_values().next().expect("a member"));
    let stranger = Waiting::pod("stranger", there, &json!({}));
    let strangers_pod = Pod::running("stranger");
    let forged = Waiting::pod(FORGED, there, &copied(&member));
    let watch = Watch::of(&Pod::running(FORGED));
    the_policy_admits_members_and_the_operator(&job, &[&thieves_pod, &strangers_pod]);

    println!("one rank: another job's pod, and a stranger's with a certificate of an old attempt");
    let calm = Calm::of(&job);
    knock(&thieves_pod, &[&member], &[("another job's", &impostor.stolen)]);
    knock(&strangers_pod, &[&member], &[("an old attempt's", &old)]);
    calm.holds(&job);
    thief.delete(false);
    let other = impostor.leave();

    println!("two ranks: a stranger with both");
    job.until_world(2);
    let members: Vec<Pod> = members(&job).iter().map(|name| Pod::running(name)).collect();
    assert_eq!(members.len(), 2);
    let calm = Calm::of(&job);
    let both = [("another job's", &other), ("an old attempt's", &old)];
    knock(&strangers_pod, &members.iter().collect::<Vec<_>>(), &both);
    calm.holds(&job);
    assert_eq!(watch.leave(), 0, "a leader has dialled a copy of a member's pod");
    job.assert_losses_of_one_machine();
    drop((stranger, forged));
    job.delete(true);
}

/// The job's first pod is a thief's, and leaves with a certificate of attempt 1. Then the job has
/// the right image and trains.
fn first_attempt(job: &Job) -> Stolen {
    let impostor = Impostor::in_pod(&Pod::running(&format!("{}-a1-0", job.name)));
    job.patch(&json!({ "suspend": true }));
    let stolen = impostor.leave();
    job.until_phase("Suspended");
    job.until("its pods are gone", || job.pods().is_empty().then_some(()));
    job.patch(&json!({ "image": "localhost/moejob:test" }));
    job.patch(&json!({ "suspend": false }));
    stolen
}

/// What whoever may create pods can copy: labels, seal and owner.
fn copied(member: &Pod) -> Value {
    let of = &member.0["metadata"];
    json!({
        "labels": of["labels"],
        "annotations": { ANNOTATION_SEAL: of["annotations"][ANNOTATION_SEAL] },
        "ownerReferences": of["ownerReferences"],
    })
}

/// Names of its pods that run, without the copy of one.
fn members(job: &Job) -> Vec<String> {
    let pods = job.pods();
    let runs = pods.iter().filter(|pod| pod["status"]["phase"] == "Running");
    let names = runs.filter_map(|pod| pod["metadata"]["name"].as_str());
    names.filter(|name| *name != FORGED).map(str::to_string).collect()
}

/// What must be the same before and after strangers came, but for the steps.
struct Calm {
    step: u64,
    attempt: u32,
    restarts: u64,
    members: Vec<String>,
}

impl Calm {
    fn of(job: &Job) -> Calm {
        job.go_on(10);
        let (step, attempt, restarts) = (job.step(), job.attempt(), job.restarts());
        Calm { step, attempt, restarts, members: members(job) }
    }

    fn holds(&self, job: &Job) {
        job.go_on(10);
        println!("{} steps meanwhile", job.step() - self.step);
        assert_eq!(job.attempt(), self.attempt, "{}", job.state());
        assert_eq!(job.restarts(), self.restarts, "{}", job.state());
        assert_eq!(members(job), self.members);
    }
}

/// From one pod at the listeners of some workers, with these certificates and without any.
fn knock(from: &Pod, at: &[&Pod], with: &[(&str, &Stolen)]) {
    let listeners: Vec<SocketAddr> = at.iter().map(|pod| pod.listener()).collect();
    let own = Papers::new();
    let own = Stolen { leaf: own.certificate.pem(), key: own.key.serialize_pem() };
    let mut clients = Vec::new();
    for alpn in [ALPN_CONTROL, ALPN_DATA, b"", b"h2"] {
        let protocol = String::from_utf8_lossy(alpn);
        clients.push((format!("none for {protocol}"), without_certificate(own.client(alpn))));
        clients.push((format!("its own for {protocol}"), own.client(alpn)));
        for (whose, stolen) in with {
            clients.push((format!("{whose} for {protocol}"), stolen.client(alpn)));
        }
    }
    within(from.network(), async move {
        for address in listeners {
            plain_strangers(address).await;
            for (what, client) in &clients {
                refused(what, address, Arc::clone(client), &framed(HELLO)).await;
                refused(what, address, Arc::clone(client), &[0; 64]).await;
            }
            slow(address).await;
        }
    });
}

/// Those that take their time, and hundreds that take a place, all at once.
async fn slow(address: SocketAddr) {
    let connected = || async { TcpStream::connect(address).await.expect("it listens") };
    let handshake = async {
        let took = dribble(&mut connected().await, &[22, 3, 1, 1, 0, 1, 0, 0, 252, 3, 3]).await;
        assert!(took < REFUSED_WITHIN, "{took:?}");
    };
    let header = async {
        let took = dribble(&mut connected().await, b"GET / HTTP/1.1\r\n").await;
        assert!(took < REFUSED_WITHIN, "{took:?}");
    };
    let crowd = async {
        let mut streams = Vec::new();
        for _ in 0..200 {
            streams.push(connected().await);
        }
        for stream in &mut streams {
            assert!(drained(stream).await.is_empty());
        }
    };
    tokio::join!(handshake, header, crowd);
}

/// Counts who comes to a pod's door.
struct Watch {
    came: Arc<AtomicU32>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Watch {
    fn of(pod: &Pod) -> Watch {
        let (network, address) = (pod.network(), pod.listener());
        let came = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&came);
        let (stop, mut stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            within(network, async move {
                let listener = TcpListener::bind(address).await.expect("nobody else listens");
                loop {
                    tokio::select! {
                        _ = &mut stopped => return,
                        accepted = listener.accept() => drop(accepted.expect("it listens")),
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        });
        Watch { came, stop, thread }
    }

    fn leave(self) -> u32 {
        drop(self.stop);
        self.thread.join().expect("no panic");
        self.came.load(Ordering::Relaxed)
    }
}

/// Nothing enforces it in this cluster; what it says is looked at as a network would.
fn the_policy_admits_members_and_the_operator(job: &Job, others: &[&Pod]) {
    let label = format!("moejob.dev/job={}", job.name);
    let policies = get(&["networkpolicies", "-l", &label]);
    let [policy] = &policies["items"].as_array().expect("a list")[..] else {
        panic!("one policy a job: {policies:#}")
    };
    let members = get(&["pods", "-l", &label]);
    let label = "app.kubernetes.io/component=operator";
    let operators = get(&["pods", "-n", "moejob-system", "-l", label]);
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress"]));
    for member in members["items"].as_array().expect("members") {
        assert!(selects(&policy["spec"]["podSelector"], &member["metadata"]), "{policy:#}");
        assert!(admits(policy, member), "{policy:#}");
        assert!(!admits_port(policy, member, 7778), "{policy:#}");
    }
    let operators = operators["items"].as_array().expect("operators");
    assert!(!operators.is_empty() && operators.iter().all(|pod| admits(policy, pod)), "{policy:#}");
    for pod in others {
        assert!(!selects(&policy["spec"]["podSelector"], &pod.0["metadata"]), "{policy:#}");
        assert!(!admits(policy, &pod.0), "{policy:#}");
    }
}

fn admits(policy: &Value, pod: &Value) -> bool {
    admits_port(policy, pod, PORT)
}

/// Whether the policy lets a pod come in at a port of TCP.
fn admits_port(policy: &Value, pod: &Value, port: u16) -> bool {
    let name = pod["metadata"]["namespace"].as_str().expect("a namespace");
    let namespace = get(&["namespace", name]);
    let own = pod["metadata"]["namespace"] == policy["metadata"]["namespace"];
    let from = |from: &Value| {
        assert!(from["ipBlock"].is_null(), "{policy:#}");
        let space = match &from["namespaceSelector"] {
            Value::Null => own,
            selector => selects(selector, &namespace["metadata"]),
        };
        space && selects(&from["podSelector"], &pod["metadata"])
    };
    let at = |to: &Value| to["port"] == port && to["protocol"] == "TCP";
    let any = |list: &Value, of: &dyn Fn(&Value) -> bool| {
        list.as_array().is_none_or(|list| list.is_empty() || list.iter().any(of))
    };
    let rules = policy["spec"]["ingress"].as_array().expect("rules");
    rules.iter().any(|rule| any(&rule["from"], &from) && any(&rule["ports"], &at))
}

/// A selector of labels; one that is not there selects all.
fn selects(selector: &Value, metadata: &Value) -> bool {
    assert!(selector["matchExpressions"].is_null(), "{selector}");
    let wanted = selector["matchLabels"].as_object().into_iter().flatten();
    wanted.into_iter().all(|(name, value)| metadata["labels"][name] == *value)
}
