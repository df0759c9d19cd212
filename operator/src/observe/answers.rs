//! What is read of the objects that are watched: of each kind the fields that decisions ask for.

use super::sieve::{Keep, Sieve};
use http::{Request, Response, StatusCode};
use http_body::Frame;
use kube::Client;
use kube::client::Body;
use moejob_manifest::cost::TEXT_BYTES_MAX;
use moejob_manifest::yaml::DEPTH_MAX;
use moejob_plan::pods::{ANNOTATION_SEAL, LABEL_JOB_UID};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// A name, a number, a time, a word.
const WORD: Keep = Keep::Whole { bytes: 1 << 10, levels: 0 };
/// What the kubelet and the scheduler say.
const TEXT: Keep = Keep::Whole { bytes: 32 << 10, levels: 0 };
/// Labels of a node, amounts of resources.
const WORDS: Keep = Keep::Whole { bytes: 64 << 10, levels: 2 };
/// Whatever is the operator's own or an admin's, as large as the API server lets it be.
const OWN: Keep = Keep::Whole { bytes: 4 << 20, levels: DEPTH_MAX };
/// More than is kept of the largest pods and nodes there are.
const OTHERS_BYTES_MAX: usize = 128 << 10;

/// An object of the cluster, or the Status that stands in its place when a watch fails.
macro_rules! object {
    ($bytes:expr; $($field:tt)*) => {
        Keep::Object {
            bytes: $bytes,
            fields: &[
                ("kind", WORD),
                ("apiVersion", WORD),
                ("code", WORD),
                ("reason", TEXT),
                ("message", TEXT),
                $($field)*
            ],
        }
    };
}

/// A list of objects, and lines of a watch that have one each.
macro_rules! answers {
    ($object:expr) => {
        [
            Keep::Fields(&[
                ("kind", WORD),
                ("apiVersion", WORD),
                ("metadata", Keep::Whole { bytes: 16 << 10, levels: 1 }),
                ("items", Keep::Each(&$object)),
            ]),
            Keep::Fields(&[("type", WORD), ("object", $object)]),
        ]
    };
}

const METADATA: Keep = Keep::Fields(&[
    ("name", WORD),
    ("namespace", WORD),
    ("uid", WORD),
    ("resourceVersion", WORD),
    ("generation", WORD),
    ("creationTimestamp", WORD),
    ("deletionTimestamp", WORD),
    ("labels", Keep::Fields(&[(LABEL_JOB_UID, WORD)])),
    ("annotations", Keep::Fields(&[(ANNOTATION_SEAL, WORD)])),
]);

const JOB: Keep = object![8 << 20;
    ("metadata", METADATA),
    ("spec", Keep::Whole { bytes: TEXT_BYTES_MAX, levels: DEPTH_MAX }),
    ("status", OWN),
];

const CONTAINER: Keep = Keep::Fields(&[
    ("name", WORD),
    ("image", WORD),
    ("restartPolicy", WORD),
    ("resources", REQUESTS),
]);

const REQUESTS: Keep = Keep::Fields(&[("requests", WORDS)]);

const MATCHES: Keep = Keep::Fields(&[("nodeSelectorTerms", Keep::Each(&Keep::Fields(&[(
    "matchFields",
    Keep::Each(&Keep::Fields(&[("key", WORD), ("operator", WORD), ("values", WORDS)])),
)])))]);

const AFFINITY: Keep = Keep::Fields(&[(
    "nodeAffinity",
    Keep::Fields(&[("requiredDuringSchedulingIgnoredDuringExecution", MATCHES)]),
)]);

const STATE: Keep = Keep::Fields(&[
    ("waiting", Keep::Fields(&[("reason", WORD), ("message", TEXT)])),
    ("running", Keep::Fields(&[])),
    (
        "terminated",
        Keep::Fields(&[("exitCode", WORD), ("signal", WORD), ("reason", WORD)]),
    ),
]);

const CONDITION: Keep =
    Keep::Fields(&[("type", WORD), ("status", WORD), ("reason", WORD), ("message", TEXT)]);

const POD: Keep = object![OTHERS_BYTES_MAX;
    ("metadata", METADATA),
    (
        "spec",
        Keep::Fields(&[
            ("nodeName", WORD),
            ("containers", Keep::Each(&CONTAINER)),
            ("initContainers", Keep::Each(&CONTAINER)),
            ("resources", REQUESTS),
            ("overhead", WORDS),
            ("affinity", AFFINITY),
        ]),
    ),
    (
        "status",
        Keep::Fields(&[
            ("phase", WORD),
            ("podIP", WORD),
            ("reason", WORD),
            ("message", TEXT),
            ("conditions", Keep::Each(&CONDITION)),
            (
                "containerStatuses",
                Keep::Each(&Keep::Fields(&[("name", WORD), ("state", STATE)])),
            ),
        ]),
    ),
];

const NODE: Keep = object![OTHERS_BYTES_MAX;
    ("metadata", Keep::Fields(&[
        ("name", WORD),
        ("uid", WORD),
        ("resourceVersion", WORD),
        ("labels", WORDS),
    ])),
    ("spec", Keep::Fields(&[("unschedulable", WORD), ("taints", WORDS)])),
    ("status", Keep::Fields(&[
        ("conditions", Keep::Each(&CONDITION)),
        ("allocatable", WORDS),
    ])),
];

const CLASS: Keep = object![OTHERS_BYTES_MAX;
    ("metadata", METADATA),
    ("value", WORD),
    ("preemptionPolicy", WORD),
    ("globalDefault", WORD),
];

const MAP: Keep = object![8 << 20; ("metadata", METADATA), ("data", OWN),];

static JOBS: [Keep; 2] = answers!(JOB);
static PODS: [Keep; 2] = answers!(POD);
static NODES: [Keep; 2] = answers!(NODE);
static CLASSES: [Keep; 2] = answers!(CLASS);
static MAPS: [Keep; 2] = answers!(MAP);

/// What is kept of the answer to a request for all objects of a kind. None: all of it.
fn kept(path: &str, query: &str) -> Option<&'static Keep> {
    let [list, watch] = match path.rsplit('/').next()? {
        "moejobs" => &JOBS,
        "pods" => &PODS,
        "nodes" => &NODES,
        "priorityclasses" => &CLASSES,
        "configmaps" => &MAPS,
        _ => return None,
    };
    let watches = query.split('&').any(|part| part == "watch=true" || part == "watch=1");
    Some(if watches { watch } else { list })
}

/// A client whose lists and watches bring what is kept alone.
pub fn sieved(client: &Client) -> Client {
    let (inner, namespace) = (client.clone(), client.default_namespace().to_string());
    let service = tower::service_fn(move |request: Request<Body>| {
        let client = inner.clone();
        let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
        let keep = kept(path, query);
        async move {
            let response = client.send(request).await?;
            // An error is told as it is.
            let keep = keep.filter(|_| response.status() == StatusCode::OK);
            let sieve = keep.map(Sieve::new);
            Ok::<Response<Sieved>, kube::Error>(response.map(|body| Sieved { body, sieve }))
        }
    });
    Client::new(service, namespace)
}

/// The body of an answer.
struct Sieved {
    body: Body,
    sieve: Option<Sieve>,
}

impl http_body::Body for Sieved {
    type Data = bytes::Bytes;
    type Error = kube::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let this = &mut *self;
        let piece = ready!(Pin::new(&mut this.body).poll_frame(context));
        let Some(sieve) = &mut this.sieve else { return Poll::Ready(piece) };
        let Some(Ok(frame)) = piece else { return Poll::Ready(piece) };
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
        };
        let kept = sieve.feed(&data);
        if kept.is_empty() {
            // Others have their turn before the next piece.
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Some(Ok(Frame::data(kept.into()))))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{JobSeen, PodSeen, job_seen, light::LightPod, pod_seen, shared::Shared};
    use super::*;
    use futures::TryStreamExt;
    use kube::api::{Api, ApiResource, DynamicObject, ListParams, WatchParams};
    use kube::core::WatchEvent;
    use moejob_identity::Keyring;
    use moejob_manifest::spec::MoeJob;
    use serde_json::{Value, json};

    /// A client of an API server that answers everything with that.
    fn answered(status: u16, body: String) -> Client {
        let service = tower::service_fn(move |_: Request<Body>| {
            let body = Body::from(body.clone().into_bytes());
            let answer = Response::builder().status(status).body(body);
            async move { answer }
        });
        sieved(&Client::new(service, "team"))
    }

    fn list(items: &[String]) -> String {
        let items = items.join(",");
        format!(r#"{{"kind":"List","apiVersion":"v1","metadata":{{}},"items":[{items}]}}"#)
    }

    fn job(name: &str, template: &str) -> String {
        format!(
            r#"{{"apiVersion":"moejob.dev/v1alpha1","kind":"MoeJob","metadata":{{"name":"{name}",
            "managedFields":[{{"x":[1]}}]}},"spec":{{"podTemplate":{template}}},
            "status":{{"phase":"Running","record":"r"}}}}"#
        )
    }

    /// What a leader sees of these jobs, and what of a pod.
    async fn jobs(items: &[String]) -> Vec<JobSeen> {
        let resource = ApiResource::erase::<MoeJob>(&());
        let api: Api<DynamicObject> = Api::all_with(answered(200, list(items)), &resource);
        let all = api.list(&ListParams::default()).await.expect("a list");
        all.items.into_iter().map(job_seen).collect()
    }

    fn nested(levels: usize) -> String {
        format!("{}0{}", "[".repeat(levels), "]".repeat(levels))
    }

    /// The list is read whatever one of them has, and so are records of those that have too much.
    #[tokio::test]
    async fn one_job_that_cannot_be_read_hinders_no_other() {
        let zeros = format!("[{}0]", "0,".repeat(700_000));
        let items = [
            job("good", "{}"),
            job("deep", &nested(140)),
            job("deepest", &nested(10_000)),
            job("long", &zeros),
            job("as-deep-as-may-be", &nested(63)),
            job("last", "{}"),
        ];
        let all = jobs(&items).await;
        let shown = |of: &JobSeen| {
            let spec = if of.spec.is_null() { "no spec" } else { "a spec" };
            let (record, unread) = (&of.status["record"], of.unread.as_deref());
            assert_eq!(record, "r");
            format!("{} has {spec}: {}", of.name, unread.unwrap_or("all is read"))
        };
        let all: Vec<String> = all.iter().map(shown).collect();
        assert_eq!(
            all,
            [
                "good has a spec: all is read",
                "deep has no spec: spec: 141 levels of nesting, at most 64",
                "deepest has no spec: spec: 10001 levels of nesting, at most 64",
                "long has no spec: spec: 1400019 bytes as JSON, at most 65536",
                "as-deep-as-may-be has a spec: all is read",
                "last has a spec: all is read",
            ]
        );
    }

    fn seen(pod: LightPod) -> PodSeen {
        pod_seen(pod, &Keyring::new().expect("keys"), &mut Shared::default())
    }

    #[tokio::test]
    async fn of_a_foreign_pod_its_arguments_are_never_held() {
        let args = vec!["x".repeat(1 << 10); 1_300];
        let resources = json!({"requests": {"cpu": "2"}, "limits": {"cpu": "3"}});
        let container = json!({"name": "c", "args": args, "resources": resources});
        let pod = |containers: Value| {
            json!({"metadata": {"name": "p", "namespace": "n"},
                "spec": {"nodeName": "a", "containers": containers},
                "status": {"phase": "Running", "podIP": "10.0.0.1"}})
        };
        // Thousands of containers are known in part, and the pod itself is.
        let many = vec![json!({"name": "c", "image": "i", "resources": resources}); 10_000];
        let pods = [pod(json!([container])).to_string(), pod(Value::from(many)).to_string()];
        let api: Api<LightPod> = Api::all(answered(200, list(&pods)));
        let all = api.list(&ListParams::default()).await.expect("a list").items;
        let [one, many] = <[LightPod; 2]>::try_from(all).expect("both");
        let whole = seen(one);
        assert_eq!((whole.requests.0["cpu"], whole.node.as_deref()), (2_000, Some("a")));
        let (pod, unread) = many.clone().pod();
        let containers = pod.spec.expect("a spec").containers.len();
        assert_eq!(containers, 64);
        assert_eq!(unread.as_deref(), Some("spec.containers: more than 64 entries"));
        assert_eq!(seen(many).node.as_deref(), Some("a"));
    }

    /// What is left out of a pod is missed by no reader of what is kept.
    #[tokio::test]
    async fn of_a_worker_all_is_kept_that_is_asked_for() {
        let fields = json!([{"key": "metadata.name", "operator": "In", "values": ["n7"]}]);
        let terms = json!({"nodeSelectorTerms": [{"matchFields": fields}]});
        let required = "requiredDuringSchedulingIgnoredDuringExecution";
        let (keyring, ended) = (Keyring::new().expect("keys"), json!({"exitCode": 137, "signal": 9,
            "reason": "OOMKilled", "message": "m", "containerID": "containerd://1"}));
        let pod = json!({
            "metadata": {"name": "j-a1-0", "namespace": "n", "uid": "u7", "resourceVersion": "3",
                "deletionTimestamp": "2026-11-28T00:00:00Z",
                "labels": {"x": "y", LABEL_JOB_UID: "u"},
                "annotations": {"z": "z", ANNOTATION_SEAL: keyring.seal("n", "u", "j-a1-0")}},
            "spec": {"affinity": {"nodeAffinity": {required: terms}},
                "containers": [{"name": "worker", "image": "i:1", "command": ["moejob"]}]},
            "status": {"phase": "Pending", "podIP": "10.0.0.1", "hostIP": "10.0.0.2",
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "message": "no node"},
                    {"type": "PodReadyToStartContainers", "status": "False"},
                ],
                "containerStatuses": [{"name": "worker", "image": "i:1", "imageID": "x",
                    "ready": false, "restartCount": 0, "state": {"terminated": ended}}]},
        });
        let api: Api<LightPod> = Api::all(answered(200, list(&[pod.to_string()])));
        let mut all = api.list(&ListParams::default()).await.expect("a list").items;
        let pod = all.pop().expect("one");
        let worker = pod_seen(pod, &keyring, &mut Shared::default()).worker.expect("it is sealed");
        assert_eq!((&worker.uid[..], worker.meant_for.as_deref()), ("u7", Some("n7")));
        assert_eq!((worker.image.as_deref(), worker.address.as_deref()),
            (Some("i:1"), Some("10.0.0.1")));
        let words = "its container took more memory than its limit and was killed (OOMKilled)";
        assert_eq!(worker.ended, Some((None, words.to_string())));
        assert_eq!(worker.unschedulable.as_deref(), Some("no node"));
        assert!(worker.mounting && worker.started && worker.deletion.is_some());
    }

    #[tokio::test]
    async fn what_an_api_server_refuses_is_told_in_its_words() {
        let gone = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "code": 410,
            "status": "Failure", "message": "too old", "reason": "Expired"});
        let lines = format!(
            "{}\n{}\n",
            json!({"type": "ADDED", "object": {"metadata": {"name": "p", "resourceVersion": "7"}}}),
            json!({"type": "ERROR", "object": gone})
        );
        let api: Api<LightPod> = Api::all(answered(200, lines));
        let watch = api.watch(&WatchParams::default(), "0").await.expect("a watch");
        let events: Vec<_> = watch.try_collect().await.expect("two events");
        let [WatchEvent::Added(pod), WatchEvent::Error(error)] = &events[..] else {
            panic!("{events:?}")
        };
        let meta = kube::Resource::meta(pod);
        let (name, version) = (meta.name.as_deref(), meta.resource_version.as_deref());
        assert_eq!((name, version), (Some("p"), Some("7")));
        let (message, reason) = (&error.message[..], &error.reason[..]);
        assert_eq!((error.code, message, reason), (410, "too old", "Expired"));
        let api: Api<LightPod> = Api::all(answered(403, gone.to_string()));
        let error = api.list(&ListParams::default()).await.expect_err("it is refused");
        assert!(error.to_string().contains("too old"), "{error}");
    }
}
