//! Pods as they are sent to the API server, and what no overlay can do to them.
//!
//! Run with `UPDATE_GOLDEN=1` to write what is made now, and read the difference.

// The golden files are read; the plan itself reads none.
#![allow(clippy::disallowed_methods)]

use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_plan::allocate::Needs;
use moejob_plan::placement;
use moejob_plan::pods::{self, Birth, Surroundings};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Value, json};
use std::path::Path;

const REST: &str = r"
  model: { preset: olmoe-1b-7b }
  data: { train: { text: { paths: [corpus/**/*.txt] } }, sequenceLength: 4096 }
  training: { steps: 100, globalBatchSize: 64 }
  checkpoint: { location: checkpoints }
  volumes:
  - { mountPath: corpus, configMap: texts }
  - { mountPath: checkpoints, claim: olmoe-checkpoints }
";

const OVERLAY: &str = r#"
  priorityClassName: high
  schedulerName: packer
  podTemplate:
    metadata: { labels: { team: research }, annotations: { note: "1" } }
    spec:
      nodeSelector: { pool: train }
      tolerations: [{ key: reserved, operator: Exists }]
      imagePullSecrets: [{ name: registry }]
      volumes: [{ name: cache, emptyDir: { sizeLimit: 1Gi } }]
      containers:
      - env: [{ name: RUST_LOG, value: debug }]
        resources: { requests: { cpu: 3, ephemeral-storage: 2Gi }, limits: { memory: 64Gi } }
        volumeMounts: [{ name: cache, mountPath: /cache }]
"#;

fn read(nodes: &str, rest: &str) -> Job {
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: olmoe }}\nspec:\n  \
         image: example.org/moejob:0.1.0\n  nodes: {{ {nodes} }}{rest}"
    );
    Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:#?}"))
}

fn around() -> Surroundings {
    Surroundings {
        namespace: "default".to_string(),
        job_uid: "0f3c1f9e-6a55-4a8c-9a52-1f0f6f1f7a11".to_string(),
        image: "example.org/moejob:0.1.0".to_string(),
        image_pull_policy: Some("IfNotPresent".to_string()),
        authority: "-----BEGIN CERTIFICATE-----\n".to_string(),
        operator_namespace: "moejob-system".to_string(),
        ..Surroundings::default()
    }
}

fn birth() -> Birth {
    Birth {
        name: "olmoe-a2-5".to_string(),
        node: "node-7".to_string(),
        seal: "5ea1".to_string(),
        ..Birth::default()
    }
}

fn golden(name: &str, found: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    let found = serde_json::to_string_pretty(found).unwrap() + "\n";
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &found).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    let first = expected.lines().zip(found.lines()).position(|(expected, found)| expected != found);
    assert_eq!(expected, found, "{name}, first difference in line {first:?}");
}

#[test]
fn a_pod_that_trains_on_processors() {
    let job = read("min: 1, max: 4", REST);
    golden("pod-cpu.json", &pods::pod(&job, &around(), &birth()));
    golden("network-policy-cpu.json", &pods::network_policy(&job, &around()));
    golden("budget.json", &pods::disruption_budget(&job, &around()));
}

#[test]
fn a_pod_that_has_a_machine_with_eight_gpus() {
    let job = read("profile: ndm-a100-v4, min: 1, max: 4", REST);
    golden("pod-ndm-a100-v4.json", &pods::pod(&job, &around(), &birth()));
    golden("network-policy-gpu.json", &pods::network_policy(&job, &around()));
}

#[test]
fn an_overlay_adds_and_takes_nothing_away() {
    let job = read("min: 1, max: 4", &format!("{REST}{OVERLAY}"));
    golden("pod-overlay.json", &pods::pod(&job, &around(), &birth()));
}

/// It asks of its node what a worker asks, does nothing there, and ends nobody else's pod.
#[test]
fn a_placeholder_asks_for_a_node_and_does_nothing_there() {
    let job = read("profile: ndm-a100-v4, min: 1, max: 4", &format!("{REST}{OVERLAY}"));
    let name = pods::placeholder_name("olmoe", 3);
    assert_eq!(pods::placeholder_number(&name), Some(3));
    for of_workers in ["olmoe-a2-5", "olmoe-placeholder-a2-5", "olmoe-placeholder-3-a2-5"] {
        assert_eq!(pods::placeholder_number(of_workers), None, "{of_workers}");
    }
    let there = vec!["gpu-1".to_string(), "gpu-7".to_string()];
    let birth = Birth { name, there, seal: "5ea1".to_string(), ..Birth::default() };
    golden("placeholder.json", &pods::pod(&job, &around(), &birth));
}

/// What the API server makes of it: nothing is lost, so nothing is misspelt.
#[test]
fn our_objects_have_no_unknown_fields() {
    use k8s_openapi::api::{core::v1::Pod, networking::v1::NetworkPolicy};
    use k8s_openapi::api::policy::v1::PodDisruptionBudget;
    fn same<T: serde::de::DeserializeOwned + serde::Serialize>(value: Value) {
        let read: T = serde_json::from_value(value.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), value);
    }
    for nodes in ["min: 1, max: 4", "profile: nd-h200-v5, min: 2, max: 2"] {
        let job = read(nodes, &format!("{REST}{OVERLAY}"));
        let mut pod = pods::pod(&job, &around(), &birth());
        // A quantity may be typed as a number.
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("3");
        same::<Pod>(pod);
        same::<NetworkPolicy>(pods::network_policy(&job, &around()));
        same::<PodDisruptionBudget>(pods::disruption_budget(&job, &around()));
    }
}

/// What the widest gang of such a job needs is counted like that of any other.
#[test]
fn a_job_of_thousands_of_ranks_and_experts_gets_a_limit() {
    let text = "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: { name: a }\nspec:\n  \
                nodes: { min: 1, max: 4096 }\n  model: { hiddenSize: 32, numHiddenLayers: 256, \
                numAttentionHeads: 2, experts: { count: 256, perToken: 2, intermediateSize: 32 } \
                }\n  data: { train: { text: { paths: [a] } }, sequenceLength: 32 }\n  training: { \
                steps: 1, globalBatchSize: 4096 }\n";
    let job = Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}"));
    let pod = pods::pod(&job, &around(), &birth());
    let resources = &pod["spec"]["containers"][0]["resources"];
    let layout = placement::layout(4096, 256);
    let worst = placement::memory(&job, &layout, 0).worst >> 20;
    let limit = resources["limits"]["memory"].as_str().and_then(|text| text.strip_suffix("Mi"));
    let limit = limit.and_then(|text| text.parse::<u64>().ok());
    assert!(limit.is_some_and(|limit| limit > worst), "{resources}: {worst}");
    assert!(resources["requests"]["memory"].is_string(), "{resources}");
}

/// What a worker may take covers every gang that the job may have, and never less than it asks for.
#[test]
fn the_limit_of_a_worker_covers_the_worst_routing_of_every_size() {
    let mib = |value: &Value| {
        let text = value.as_str().unwrap_or_default();
        text.strip_suffix("Mi").and_then(|of| of.parse::<u64>().ok()).expect("MiB")
    };
    for (nodes, preset) in [("min: 1, max: 9", "tiny"), ("min: 1, max: 16", "olmoe-1b-7b"),
        ("min: 2, max: 8", "mixtral-8x7b"), ("min: 1, max: 6, devicesPerNode: 2", "tiny")] {
        let job = read(nodes, &REST.replace("olmoe-1b-7b", preset));
        let mut pod = pods::pod(&job, &around(), &birth());
        let resources = pod["spec"]["containers"][0]["resources"].take();
        let of = |kind: &str| mib(&resources[kind]["memory"]);
        let (request, limit) = (of("requests"), of("limits"));
        let ranks = u64::from(job.profile.ranks);
        let (sizes, _) = placement::sizes(&job);
        for size in sizes {
            let memory = placement::memory(&job, &size.layout, 0);
            let worst = ranks * memory.worst >> 20;
            assert!(worst <= limit, "{preset} on {}: {worst} MiB of {limit}", size.nodes);
        }
        assert!(request <= limit, "{preset}: {request} {limit}");
    }
    let template = "\n  podTemplate: { spec: { containers: [{ resources: { requests: { memory: \
        900Gi } } }] } }";
    let job = read("min: 1, max: 4", &format!("{REST}{template}"));
    let pod = pods::pod(&job, &around(), &birth());
    let resources = &pod["spec"]["containers"][0]["resources"];
    assert_eq!(resources["requests"]["memory"], "900Gi");
    assert_eq!(resources["limits"]["memory"], Value::Null, "it would be less than the request");
}

/// What must hold of a pod whatever the overlay says; the `restricted` Pod Security Standard first.
fn weaknesses(job: &Job, pod: &Value) -> Vec<&'static str> {
    let (spec, ours) = (&pod["spec"], birth());
    let containers = spec["containers"].as_array().map_or(0, Vec::len);
    let worker = &spec["containers"][0];
    let security = &worker["securityContext"];
    let env = |name: &str| {
        let all = worker["env"].as_array().into_iter().flatten();
        all.filter(|one| one["name"] == name).map(|one| one["value"].clone()).collect::<Vec<_>>()
    };
    let volume = |name: &str| {
        let all = spec["volumes"].as_array().into_iter().flatten();
        all.filter(|one| one["name"] == name).count()
    };
    let mounted = |path: &str, name: &str| {
        let all = worker["volumeMounts"].as_array().into_iter().flatten();
        let at: Vec<&Value> = all.filter(|one| one["mountPath"] == path).collect();
        at.len() == 1 && at[0]["name"] == name
    };
    let terms = &spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let bound = json!([{ "matchFields": [
        { "key": "metadata.name", "operator": "In", "values": [ours.node] }] }]);
    let absent = ["hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers",
        "serviceAccountName", "nodeName"];
    let gpus = match job.profile.devices {
        0 => Value::Null,
        count => json!(count.to_string()),
    };
    let checks = [
        (containers == 1 && worker["name"] == "worker", "another container"),
        (worker["command"] == json!(["/moejob"]), "another program"),
        (worker["args"] == json!(["worker"]), "other arguments"),
        (security["allowPrivilegeEscalation"] == false, "escalation"),
        (security["readOnlyRootFilesystem"] == true, "a writable root"),
        (security["capabilities"] == json!({ "drop": ["ALL"] }), "capabilities"),
        (security["privileged"].is_null(), "privileged"),
        (security["runAsNonRoot"] == true && security["runAsUser"].is_null(), "root"),
        (spec["securityContext"]["runAsNonRoot"] == true, "root pod"),
        (spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", "seccomp"),
        (security["seccompProfile"]["type"] == "RuntimeDefault", "seccomp of the container"),
        (absent.iter().all(|field| spec[*field].is_null()), "the host's namespaces"),
        (spec["automountServiceAccountToken"] == false, "credentials"),
        (spec["restartPolicy"] == "Never", "restarts"),
        (terms["nodeSelectorTerms"] == bound, "another node"),
        (env("MOEJOB_WORKER") == [json!(ours.name)], "another name"),
        (volume("token") == 1 && volume("shm") == 1, "volumes"),
        (mounted("/var/run/secrets/moejob.dev", "token"), "the token's mount"),
        (mounted("/workspace/checkpoints", "v1"), "the checkpoints' mount"),
        (worker["resources"]["limits"]["nvidia.com/gpu"] == gpus, "part of the GPUs"),
        (pod["metadata"]["annotations"]["moejob.dev/seal"] == json!(ours.seal), "the seal"),
        (pod["metadata"]["labels"]["moejob.dev/attempt"] == "2", "the labels"),
        (pod["metadata"]["name"] == json!(ours.name), "the pod's name"),
        (pod["metadata"]["ownerReferences"][0]["kind"] == "MoeJob", "the owner"),
    ];
    checks.iter().filter(|(holds, _)| !holds).map(|(_, what)| *what).collect()
}

/// Text that tries to weaken a pod: each is refused, and would be without effect if it were not.
#[test]
fn what_is_smuggled_in_is_refused_and_would_not_help() {
    let attempts = [
        "spec: { hostNetwork: true }",
        "spec: { volumes: [{ name: root, hostPath: { path: / } }] }",
        "spec: { volumes: [{ name: x, nfs: { server: a, path: / } }] }",
        "spec: { volumes: [{ name: token, emptyDir: {} }] }",
        "spec: { volumes: [{ name: v1, emptyDir: {} }] }",
        "spec: { volumes: [{ name: x, projected: { sources: [{ serviceAccountToken: { path: t } \
         }] } }] }",
        "spec: { containers: [{ name: side, image: a }] }",
        "spec: { containers: [{ name: worker, image: other }] }",
        "spec: { containers: [{ name: worker, command: [sh] }] }",
        "spec: { containers: [{ name: worker, envFrom: [{ configMapRef: { name: a } }] }] }",
        "spec: { containers: [{ env: [{ name: MOEJOB_WORKER, value: other }] }] }",
        "spec: { containers: [{ env: [{ $patch: replace }] }] }",
        "spec: { containers: [{ $patch: delete, name: worker }] }",
        "spec: { $patch: replace }",
        "spec: { containers: [{ securityContext: { seccompProfile: { type: Unconfined } } }] }",
        "spec: { containers: [{ securityContext: { runAsUser: 0 } }] }",
        "spec: { securityContext: { sysctls: [{ name: a, value: b }] } }",
        "spec: { containers: [{ ports: [{ containerPort: 80, hostPort: 80 }] }] }",
        "spec: { containers: [{ volumeMounts: [{ name: a, mountPath: \
         /var/run/secrets/moejob.dev }] }] }",
        "spec: { containers: [{ volumeMounts: [{ name: a, mountPath: /workspace }] }] }",
        "spec: { containers: [{ volumeMounts: [{ name: a, mountPath: /dev/shm/ }] }] }",
        "spec: { affinity: { nodeAffinity: { requiredDuringSchedulingIgnoredDuringExecution: { \
         nodeSelectorTerms: [] } } } }",
        "metadata: { ownerReferences: [] }",
        "metadata: { name: other }",
        "metadata: { labels: { moejob.dev/job-uid: other } }",
        "metadata: { annotations: 3 }",
        "spec: 3",
        "spec: { containers: {} }",
        "spec: { containrs: [] }",
        "spec: { toleration: [{ key: a }] }",
    ];
    for text in attempts {
        let overlay = format!("{REST}  podTemplate: {{ {text} }}\n");
        let manifest = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: olmoe }}\nspec:\n  \
             nodes: {{ min: 1 }}{overlay}"
        );
        let refused = Job::read(manifest.as_bytes()).err();
        let paths = refused.iter().flatten().map(|problem| problem.path.as_str());
        assert!(paths.clone().any(|path| path.starts_with("spec.podTemplate")), "{text}: taken");
        let mut job = read("min: 1", REST);
        let overlay = moejob_manifest::read::Manifest::read(manifest.as_bytes()).spec.pod_template;
        job.kubernetes.pod_template = overlay.expect("an overlay");
        let weak = weaknesses(&job, &pods::pod(&job, &around(), &birth()));
        assert!(weak.is_empty(), "{text}: {weak:?}");
    }
}

/// Any JSON with the names of a pod's fields in it.
fn hostile() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u8>().prop_map(Value::from),
        prop::sample::select(vec!["worker", "token", "MOEJOB_WORKER", "0", "v1", "/workspace"])
            .prop_map(Value::from),
    ];
    let names = vec![
        "metadata", "spec", "containers", "name", "env", "value", "volumes", "volumeMounts",
        "mountPath", "securityContext", "runAsNonRoot", "affinity", "nodeAffinity", "resources",
        "limits", "nvidia.com/gpu", "labels", "annotations", "tolerations", "hostNetwork",
        "initContainers", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms",
        "$patch", "restartPolicy", "ownerReferences", "command", "privileged",
    ];
    leaf.prop_recursive(6, 64, 6, move |inner| {
        let fields = prop::collection::vec(
            (prop::sample::select(names.clone()), inner.clone()),
            0..6,
        );
        prop_oneof![
            prop::collection::vec(inner, 0..3).prop_map(Value::from),
            fields.prop_map(|fields| {
                fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect()
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::with_cases(2_000)
    })]

    #[test]
    fn no_overlay_takes_a_guarantee_away(
        metadata in hostile(),
        spec in hostile(),
        container in hostile(),
        deep in 0..3u32,
    ) {
        let template = match deep {
            0 => json!({ "metadata": metadata, "spec": spec }),
            1 => json!({ "metadata": metadata, "spec": { "containers": [container] } }),
            _ => spec,
        };
        // Whatever it is, it can be judged.
        let _ = moejob_manifest::pod::problems(&template);
        let mut job = read("profile: ndm-a100-v4, min: 1", REST);
        job.kubernetes.pod_template = template;
        let weak = weaknesses(&job, &pods::pod(&job, &around(), &birth()));
        prop_assert!(weak.is_empty(), "{weak:?}");
    }
}

#[test]
fn a_pod_asks_for_what_its_profile_says() {
    let shared = "version: 1\nbackend: cuda\ndevices: 1\nmemory: 40Gi\nrdma: { resource: \
                  rdma/shared_ib, count: 1 }\nresources: { cpu: \"12\", memory: 96Gi, \
                  example.org/fast: \"2\" }\nenv:\n- { name: NCCL_IB_HCA, value: \"=mlx5_0\", \
                  why: the others are Ethernet }\nselector: { kind: fast }\ntopologyFile: \
                  /opt/topology.xml\n";
    let file = ("fast.yaml".to_string(), shared.as_bytes().to_vec());
    let (profiles, broken) = Profiles::shipped().with([file]);
    assert_eq!(broken, []);
    let text = format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
         nodes: {{ profile: fast }}{REST}"
    );
    let job = Job::read_with(text.as_bytes(), None, &profiles).unwrap();
    let made = pods::pod(&job, &Surroundings::default(), &Birth::default());
    let container = &made["spec"]["containers"][0];
    let requests = &container["resources"]["requests"];
    let asked = ["cpu", "memory", "rdma/shared_ib", "nvidia.com/gpu", "example.org/fast"];
    let asked = asked.map(|name| requests[name].as_str().unwrap_or("nothing"));
    assert_eq!(asked, ["12", "96Gi", "1", "1", "2"]);
    assert_eq!(container["resources"]["limits"]["rdma/shared_ib"], "1");
    assert_eq!(container["resources"]["limits"]["example.org/fast"], "2");
    let env = container["env"].as_array().unwrap().iter();
    let env = env.filter_map(|of| Some(format!("{}={}", of["name"].as_str()?, of["value"])));
    let env: Vec<String> = env.collect();
    for expected in ["NCCL_IB_HCA=\"=mlx5_0\"", "NCCL_TOPO_FILE=\"/opt/topology.xml\""] {
        assert!(env.iter().any(|of| of == expected), "{expected} in {env:?}");
    }
    assert_eq!(Needs::of(&job).selector["kind"], "fast");
}

#[test]
fn checkpoints_must_outlive_the_pods() {
    let with = |location: &str, volumes: &str| {
        let rest = REST.split("  checkpoint:").next().unwrap().to_string();
        let job = read("min: 1", &format!("{rest}  checkpoint: {location}\n{volumes}"));
        let why = pods::not_durable(&job).unwrap_or("good".to_string());
        why.split("; ").next().unwrap().replace("spec.checkpoint.location is ", "")
    };
    let claim = "  volumes: [{ mountPath: out, claim: c }]\n";
    assert_eq!(with("{}", claim), "not set");
    assert_eq!(with("{ location: out }", claim), "good");
    assert_eq!(with("{ location: ./out//a }", claim), "good");
    assert_eq!(with("{ location: /workspace/out }", claim), "good");
    let none = "/workspace/output, which lies on no volume of spec.volumes";
    assert_eq!(with("{ location: output }", claim), none);
    assert_eq!(with("{ location: out }", ""), none.replace("output", "out"));
    let reading = "  volumes: [{ mountPath: out, claim: c, readOnly: true }]\n";
    let expected = "/workspace/out/a, which lies on a volume that is readOnly";
    assert_eq!(with("{ location: out/a }", reading), expected);
    let texts = "  volumes: [{ mountPath: /o, claim: c }, { mountPath: /o/t, configMap: c }]\n";
    assert_eq!(with("{ location: /o/t/x }", texts), "/o/t/x, which lies on a configMap");
    assert_eq!(with("{ location: /o/u }", texts), "good");
}

#[test]
fn paths_of_a_pod_lie_in_its_workspace() {
    let job = read("min: 1", REST);
    let places = pods::places(&job);
    assert_eq!((places.root.as_str(), places.checkpoints.as_str()), (
        "/workspace",
        "/workspace/checkpoints",
    ));
    assert_eq!(pods::attempt_and_slot("a-a1-2-a31-47"), Some((31, 47)));
    assert_eq!(pods::attempt_and_slot("sample-3"), None);
}
