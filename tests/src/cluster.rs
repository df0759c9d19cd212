//! The test cluster as a person uses it: the scripts of `tests/cluster`, and kubectl.

use crate::root;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// What a command said, and whether it was content.
#[derive(Debug)]
pub struct Said {
    pub good: bool,
    pub out: String,
    pub err: String,
}

impl Said {
    /// Its output; panics with what it said where it failed.
    pub fn expect(self, what: &str) -> String {
        assert!(self.good, "{what}: {}{}", self.out, self.err);
        self.out
    }
}

/// A small model's job in the namespace `default`, for fake workers on `min` to `max` nodes. What
/// else a test is about it sets in `spec`.
pub fn small_job(name: &str, (min, max): (u32, u32), training: Value) -> Value {
    json!({
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoeJob",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "nodes": { "profile": "cpu", "min": min, "max": max },
            "model": {
                "hiddenSize": 32, "numHiddenLayers": 1, "numAttentionHeads": 2,
                "experts": { "count": 8, "perToken": 2, "intermediateSize": 32 },
            },
            "data": {
                "train": { "text": { "paths": ["corpus/*.txt"] } }, "sequenceLength": 32,
            },
            "training": training,
            // Of two jobs with one location the later would wait.
            "checkpoint": { "everySteps": 1_000_000, "location": format!("checkpoints/{name}") },
            "volumes": [{ "mountPath": "checkpoints", "claim": "checkpoints" }],
        },
    })
}

/// One of the scripts in `tests/cluster`, such as `node`, with `input` to read.
pub fn script(name: &str, arguments: &[&str], input: &[u8]) -> Said {
    let mut command = Command::new(root().join("tests/cluster").join(name));
    command.args(arguments);
    told(command, input)
}

fn told(mut command: Command, input: &[u8]) -> Said {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a script of tests/cluster");
    let mut pipe = child.stdin.take().expect("a pipe");
    let input = input.to_vec();
    // A script may leave before it has read everything: that is no failure of the test.
    let writer = std::thread::spawn(move || drop(pipe.write_all(&input)));
    let Output { status, stdout, stderr } = child.wait_with_output().expect("its output");
    writer.join().expect("the writer");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Said { good: status.success(), out: text(stdout), err: text(stderr) }
}

pub fn kubectl(arguments: &[&str]) -> Said {
    script("kubectl", arguments, b"")
}

/// `kubectl VERB -f -` with this manifest.
pub fn manifest(arguments: &[&str], text: &[u8]) -> Said {
    script("kubectl", &[arguments, &["-f", "-"]].concat(), text)
}

/// An object or a list as JSON; null where there is none.
pub fn get(arguments: &[&str]) -> Value {
    let said = kubectl(&[&["get", "-o", "json"], arguments].concat());
    if said.good { serde_json::from_str(&said.out).expect("JSON") } else { Value::Null }
}

/// Polls until `reached` gives a value; panics with `state` when `limit` has passed.
pub fn until<T>(
    what: &str,
    limit: Duration,
    state: impl Fn() -> String,
    mut reached: impl FnMut() -> Option<T>,
) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = reached() {
            return value;
        }
        assert!(start.elapsed() < limit, "{what}: not in {limit:?}\n{}", state());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Where everything of the cluster is.
pub fn state() -> PathBuf {
    let own = std::env::var_os("MOEJOB_CLUSTER_STATE");
    own.map_or_else(|| "/var/lib/moejob-cluster".into(), PathBuf::from)
}

/// The network of a pod, by the node that it is on and its address.
pub fn network_of(node: &str, address: IpAddr) -> File {
    let containers = script("node", &[node, "containers"], b"").expect("a node's containers");
    let has = |pid: &&str| {
        let routes = std::fs::read_to_string(format!("/proc/{pid}/net/fib_trie"));
        let own = format!("|-- {address}\n");
        routes.unwrap_or_default().split(&own).skip(1).any(|after| {
            after.lines().next().is_some_and(|line| line.trim() == "/32 host LOCAL")
        })
    };
    let mut pids = containers.lines().filter_map(|line| line.split(' ').next());
    let pid = pids.find(has).unwrap_or_else(|| panic!("{address} on {node}: {containers}"));
    File::open(format!("/proc/{pid}/ns/net")).expect("its network")
}

/// A cluster beside the others of this machine, taken down when dropped.
pub struct Own {
    pub state: PathBuf,
    prefix: String,
}

impl Own {
    /// `tests/cluster/up` with a folder and networks of its own, under a name of a few letters.
    pub fn up(name: &str, arguments: &[&str], environment: &[(&str, &str)]) -> Own {
        let prefix = std::env::var("MOEJOB_CLUSTER_PREFIX");
        let own = Own {
            state: format!("{}-{name}", state().display()).into(),
            prefix: format!("{}{name}-", prefix.as_deref().unwrap_or("moejob-")),
        };
        own.script("down", &[]).expect("what was left of one is gone");
        let mut command = own.command("up", arguments);
        command.envs(environment.iter().copied());
        told(command, b"").expect("a cluster");
        own
    }

    fn command(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(root().join("tests/cluster").join(name));
        command.args(arguments);
        command.env("MOEJOB_CLUSTER_STATE", &self.state);
        command.env("MOEJOB_CLUSTER_PREFIX", &self.prefix);
        command
    }

    pub fn script(&self, name: &str, arguments: &[&str]) -> Said {
        told(self.command(name, arguments), b"")
    }

    pub fn manifest(&self, text: &[u8]) -> Said {
        told(self.command("kubectl", &["apply", "-f", "-"]), text)
    }

    /// The network of a node, or of `control`.
    pub fn network(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/run/netns/{}{name}", self.prefix))
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let said = self.script("down", &[]);
        if !said.good {
            eprintln!("a cluster stays in {}: {}", self.state.display(), said.err);
        }
    }
}
