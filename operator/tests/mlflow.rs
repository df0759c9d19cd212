//! A run that is logged at an MLflow server, which here is a few lines that answer as it does.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

const MANIFEST: &str = "apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: logged }
spec:
  nodes: { profile: cpu, min: 1, max: 1 }
  model:
    hiddenSize: 16
    numHiddenLayers: 1
    numAttentionHeads: 2
    experts: { count: 4, perToken: 2, intermediateSize: 16 }
  data:
    train: { text: { paths: ['words/*.txt'] } }
    validation: { fraction: 0.2, everySteps: 3 }
    sequenceLength: 32
  training: { steps: 6, globalBatchSize: 4 }
";

/// A request as the server has read it.
#[derive(Clone, Debug)]
struct Asked {
    line: String,
    authorization: Option<String>,
    body: Value,
}

type Answer = fn(&Asked, &[Asked]) -> (u16, Value);

/// A server on the loopback that gives `answer` to each request, and keeps what was asked.
struct Server {
    uri: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    fn start(answer: Answer, tls: Option<Arc<ServerConfig>>) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let asked = Arc::new(Mutex::new(Vec::new()));
        let scheme = if tls.is_some() { "https" } else { "http" };
        let server = Server { uri: format!("{scheme}://{address}/a/"), asked: asked.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                match &tls {
                    None => converse(stream, answer, &asked),
                    Some(config) => {
                        let connection = ServerConnection::new(config.clone()).expect("TLS");
                        converse(StreamOwned::new(connection, stream), answer, &asked);
                    }
                }
            }
        });
        server
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().expect("no panic").clone()
    }
}

fn converse(stream: impl Read + Write, answer: Answer, asked: &Mutex<Vec<Asked>>) {
    let mut stream = BufReader::new(stream);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let line = line.trim_end().to_string();
        if line.is_empty() {
            break;
        }
        head.push(line);
    }
    let field = |name: &str| {
        let found = head.iter().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        found.map(str::to_string)
    };
    let length = field("Content-Length").map_or(0, |length| length.parse().expect("a number"));
    let mut body = vec![0; length];
    stream.read_exact(&mut body).expect("a whole request");
    let body = match length {
        0 => Value::Null,
        _ => serde_json::from_slice(&body).expect("JSON"),
    };
    let authorization = field("Authorization");
    let request = Asked { line: head[0].clone(), authorization, body };
    let mut asked = asked.lock().expect("no panic");
    let (status, value) = answer(&request, &asked);
    asked.push(request);
    let text = value.to_string();
    // In two chunks, as a proxy may send it.
    let (one, two) = text.split_at(1);
    let answer = format!(
        "HTTP/1.1 {status} x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{one}\r\n{:x}\r\n{two}\r\n\
         0\r\n\r\n",
        two.len()
    );
    let _ = stream.get_mut().write_all(answer.as_bytes());
    let _ = stream.get_mut().flush();
}

/// As a server whose experiment is made by the first run.
fn willing(asked: &Asked, before: &[Asked]) -> (u16, Value) {
    let path = asked.line.split(' ').nth(1).unwrap_or_default();
    let what = path.strip_prefix("/a/api/2.0/mlflow/").unwrap_or("elsewhere");
    let is_made = || before.iter().any(|asked| asked.line.contains("experiments/create"));
    match what.split('?').next().unwrap_or_default() {
        "experiments/get-by-name" if is_made() => {
            (200, json!({ "experiment": { "experiment_id": "7" } }))
        }
        "experiments/get-by-name" => (404, json!({ "error_code": "RESOURCE_DOES_NOT_EXIST" })),
        "experiments/create" => (200, json!({ "experiment_id": "7" })),
        "runs/create" => (200, json!({ "run": { "info": { "run_id": "r1" } } })),
        "runs/log-batch" | "runs/update" => (200, json!({})),
        _ => (400, json!({ "error_code": "BAD_REQUEST", "message": what })),
    }
}

fn broken(_: &Asked, _: &[Asked]) -> (u16, Value) {
    (500, json!({ "error_code": "INTERNAL_ERROR" }))
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("words")).expect("a folder");
    for file in 0..10 {
        let text: String = (0..300).map(|i| format!("{} ", (i * i + file) % 13)).collect();
        let path = folder.path().join(format!("words/{file}.txt"));
        std::fs::write(path, text).expect("a file");
    }
    std::fs::write(folder.path().join("job.yaml"), MANIFEST).expect("a file");
    folder
}

fn run(folder: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moejob"));
    let others = std::env::vars_os().map(|(name, _)| name);
    let others = others.filter(|name| name.to_string_lossy().starts_with("MLFLOW_"));
    others.for_each(|name| {
        command.env_remove(name);
    });
    command.args(["run", "job.yaml"]).args(arguments).envs(environment.iter().copied());
    command.current_dir(folder).stdin(Stdio::null()).output().expect("moejob")
}

fn told(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Steps and losses that were logged, in their order.
fn logged(asked: &[Asked]) -> Vec<(u64, f64)> {
    let metrics = asked.iter().filter_map(|asked| asked.body["metrics"].as_array()).flatten();
    let losses = metrics.filter(|metric| metric["key"] == "loss/train");
    let pair = |of: &Value| Some((of["step"].as_u64()?, of["value"].as_f64()?));
    losses.map(|metric| pair(metric).expect("a step and a value")).collect()
}

fn recorded(folder: &Path) -> Vec<(u64, f64)> {
    let path = folder.join("runs/logged/metrics.jsonl");
    let text = std::fs::read_to_string(path).expect("a run's steps");
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).expect("JSON");
        (line["step"].as_u64().expect("a step"), line["loss"].as_f64().expect("a loss"))
    };
    text.lines().map(line).collect()
}

fn count(asked: &[Asked], what: &str) -> usize {
    asked.iter().filter(|asked| asked.line.contains(what)).count()
}

#[test]
fn a_run_that_goes_on_is_one_run_at_the_server() {
    let folder = folder();
    let server = Server::start(willing, None);
    let variables = [
        ("MLFLOW_TRACKING_URI", server.uri.as_str()),
        ("MLFLOW_TRACKING_TOKEN", "t0ken"),
        ("MLFLOW_EXPERIMENT_NAME", "two words"),
    ];
    let first = told(&run(folder.path(), &[], &variables));
    assert!(!first.contains("MLflow"), "{first}");
    let asked = server.asked();
    assert!(asked[0].line.contains("get-by-name?experiment_name=two%20words "), "{asked:?}");
    assert_eq!(asked[1].body["name"], "two words");
    assert!(asked.iter().all(|asked| asked.authorization.as_deref() == Some("Bearer t0ken")));
    let made = asked.iter().find(|asked| asked.line.contains("runs/create")).expect("a run");
    let named = (&made.body["experiment_id"], &made.body["run_name"]);
    assert_eq!(named, (&json!("7"), &json!("logged")));
    let params = asked.iter().filter_map(|asked| asked.body["params"].as_array()).flatten();
    let steps: Vec<&Value> =
        params.filter(|param| param["key"] == "training.steps").map(|of| &of["value"]).collect();
    assert_eq!(steps, ["6"]);
    assert_eq!(logged(&asked), recorded(folder.path()));
    assert_eq!(logged(&asked).len(), 6);
    let last = asked.last().expect("an end");
    assert!(last.line.contains("runs/update"), "{last:?}");
    assert_eq!((&last.body["run_id"], &last.body["status"]), (&json!("r1"), &json!("FINISHED")));

    // Nothing is left to do: nothing is said.
    told(&run(folder.path(), &[], &variables));
    assert_eq!(server.asked().len(), asked.len());
    // More steps are the same run, and no parameter is logged twice.
    told(&run(folder.path(), &["--set", "training.steps=8"], &variables));
    let asked = server.asked();
    assert_eq!((count(&asked, "runs/create"), count(&asked, "experiments/create")), (1, 1));
    let ended = asked.iter().position(|asked| asked.body["status"] == "FINISHED");
    let later = &asked[ended.expect("the first end")..];
    assert!(later.iter().all(|asked| asked.body["params"].is_null()));
    assert!(asked.iter().any(|asked| asked.body["status"] == "RUNNING"));
    assert_eq!(logged(&asked), recorded(folder.path()));
    assert_eq!(logged(&asked).len(), 8);
}

/// The option counts before the variable; the certificate is one that this machine trusts.
#[test]
fn a_server_behind_tls_is_known_by_its_certificate() {
    let folder = folder();
    let own = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_string()]).expect("a pair");
    let (cert, key) = (own.cert.pem(), own.signing_key.serialize_pem());
    let pem = folder.path().join("authority.pem");
    std::fs::write(&pem, &cert).expect("a file");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let chain = vec![CertificateDer::from_pem_slice(cert.as_bytes()).expect("a certificate")];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("a key");
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("a configuration");
    let server = Server::start(willing, Some(Arc::new(config)));
    let pem = pem.display().to_string();
    let variables = [("MLFLOW_TRACKING_URI", "http://127.0.0.1:1"), ("SSL_CERT_FILE", &pem)];
    let options = ["--mlflow", &server.uri];
    let words = told(&run(folder.path(), &options, &variables));
    assert!(!words.contains("MLflow"), "{words}");
    assert_eq!(logged(&server.asked()), recorded(folder.path()));
    // Without the authority nothing is said to it.
    let before = server.asked().len();
    let more = ["--mlflow", &server.uri, "--name", "logged", "--set", "training.steps=7"];
    let words = told(&run(folder.path(), &more, &[("SSL_CERT_FILE", "/dev/null")]));
    assert_eq!(words.matches("MLflow at https://").count(), 1, "{words}");
    assert_eq!(server.asked().len(), before);
}

#[test]
fn a_server_that_fails_is_told_once_and_training_goes_on() {
    let nobody = TcpListener::bind("127.0.0.1:0").expect("a port");
    let nobody_s = format!("http://{}", nobody.local_addr().expect("an address"));
    drop(nobody);
    let server = Server::start(broken, None);
    for (uri, why) in [(&server.uri, "it answers 500"), (&nobody_s, "refused")] {
        let folder = folder();
        let words = told(&run(folder.path(), &["--mlflow", uri], &[]));
        assert_eq!(words.matches("MLflow at ").count(), 1, "{words}");
        assert!(words.contains(why) && words.contains("training goes on"), "{words}");
        assert!(words.contains("values were not logged"), "{words}");
        assert_eq!(recorded(folder.path()).len(), 6);
    }
}

#[test]
fn what_is_no_server_is_refused_where_it_was_typed() {
    let folder = folder();
    let output = run(folder.path(), &["--mlflow", "sqlite:///mlruns.db"], &[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("http:// or https://"), "{output:?}");
    // A variable that is meant for other programs stops nobody.
    let folder_of_others = [("MLFLOW_TRACKING_URI", "file:///mlruns")];
    let words = told(&run(folder.path(), &[], &folder_of_others));
    assert!(words.contains("nothing is logged at MLFLOW_TRACKING_URI"), "{words}");
}
