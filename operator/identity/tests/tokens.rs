//! What public keys and the API server's answers decide about tokens.

#[path = "../../tests/server/mod.rs"]
mod server;
mod signer;

use moejob_identity::{ReviewError, Reviewer};
use moejob_plan::lead::PodIdentity;
use serde_json::{Value, json};
use server::{client, failure};
use signer::Signer;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The token is sent with its audience, and what the answer says decides. One that is too long to
/// be a kubelet's is not sent at all.
#[tokio::test]
async fn a_token_is_worth_what_the_api_server_says_of_it() {
    let asked: Arc<Mutex<Vec<Value>>> = Arc::default();
    let seen = Arc::clone(&asked);
    let client = client(move |request| {
        if request.method == "GET" {
            return failure(404, "NotFound", "it tells no keys");
        }
        let review = request.body;
        let good = review["spec"]["token"].as_str().is_some_and(|token| token.starts_with("good"));
        seen.lock().expect("no panic").push(review["spec"].clone());
        let bound = |name: &str| format!("authentication.kubernetes.io/{name}");
        (201, json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": review["spec"],
            "status": {
                "authenticated": good,
                "audiences": review["spec"]["audiences"],
                "user": {
                    "username": "system:serviceaccount:team:default",
                    "extra": { bound("pod-name"): ["job-0"], bound("pod-uid"): ["u0"] },
                },
            },
        }))
    })
    .await;
    let reviewer = Reviewer::new(client);
    let pod = |uid: &str| PodIdentity {
        namespace: "team".into(),
        name: "job-0".into(),
        uid: uid.into(),
        node: "n0".into(),
    };
    assert!(reviewer.review("good", &pod("u0")).await.is_ok());
    let spec = asked.lock().expect("no panic")[0].clone();
    assert_eq!(spec["token"], "good");
    assert_eq!(spec["audiences"], json!([moejob_protocol::pod::TOKEN_AUDIENCE]));
    let other = reviewer.review("good", &pod("u1")).await;
    assert!(matches!(other, Err(ReviewError::Other { .. })), "{other:?}");
    let bad = reviewer.review("bad", &pod("u0")).await;
    assert!(matches!(bad, Err(ReviewError::Refused { .. })), "{bad:?}");
    let longest = format!("good{}", "x".repeat((16 << 10) - 4));
    assert!(reviewer.review(&longest, &pod("u0")).await.is_ok());
    let before = asked.lock().expect("no panic").len();
    let long = reviewer.review(&(longest + "x"), &pod("u0")).await;
    assert!(matches!(long, Err(ReviewError::Size { found }) if found == (16 << 10) + 1));
    assert_eq!(asked.lock().expect("no panic").len(), before, "it was not sent");
}

/// Tokens that public keys prove are not reviewed. Keys are asked for once, and no more often than
/// each half minute for the sake of tokens that they do not know.
#[tokio::test]
async fn a_token_that_keys_prove_is_not_reviewed() {
    let signer = Signer::new("k");
    let body = |uid: &str| {
        json!({
            "aud": [moejob_protocol::pod::TOKEN_AUDIENCE], "exp": 99_999_999_999_u64, "nbf": 1,
            "iss": "https://api", "sub": "system:serviceaccount:team:default",
            "kubernetes.io": {
                "namespace": "team", "node": { "name": "n0", "uid": "n" },
                "pod": { "name": "job-0", "uid": uid },
                "serviceaccount": { "name": "default", "uid": "s" },
            },
        })
    };
    let public = json!({ "keys": [signer.public()] });
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&asked);
    let serves = Arc::new(AtomicUsize::new(1));
    let serving = Arc::clone(&serves);
    let answer = move |request: server::Request| {
        seen.lock().expect("no panic").push(request.path.clone());
        match request.path.as_str() {
            "/.well-known/openid-configuration" if serving.load(Ordering::SeqCst) == 1 => {
                (200, json!({ "issuer": "https://api" }))
            }
            "/openid/v1/jwks" => (200, public.clone()),
            path if path.contains("tokenreviews") => (201, json!({
                "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {},
                "status": { "authenticated": false, "error": "as asked" },
            })),
            _ => failure(403, "Forbidden", "as asked"),
        }
    };
    let client = client(answer).await;
    let pod = |uid: &str| PodIdentity {
        namespace: "team".into(),
        name: "job-0".into(),
        uid: uid.into(),
        node: "n0".into(),
    };
    let take = || std::mem::take(&mut *asked.lock().expect("no panic"));
    let reviews = |paths: &[String]| {
        paths.iter().filter(|path| path.contains("tokenreviews")).count()
    };
    let (u0, all) = (pod("u0"), (0..64));
    let good = signer.token(&body("u0"));
    let reviewer = Reviewer::new(client.clone());
    let found = futures::future::join_all(all.map(|_| reviewer.review(&good, &u0))).await;
    assert!(found.iter().all(Result::is_ok), "{found:?}");
    assert_eq!(take(), ["/.well-known/openid-configuration", "/openid/v1/jwks"]);
    let other = reviewer.review(&good, &pod("u1")).await;
    assert!(matches!(other, Err(ReviewError::Other { field: "pod's uid", .. })), "{other:?}");
    assert_eq!(take().len(), 0);
    // Of a key that nobody knows yet: the API server says whose it is. Keys are new enough.
    let unknown = signer.sign(&json!({ "alg": "ES256", "kid": "new" }), &body("u0"));
    for _ in 0..3 {
        let unknown = reviewer.review(&unknown, &u0).await;
        assert!(matches!(unknown, Err(ReviewError::Refused { .. })), "{unknown:?}");
    }
    let paths = take();
    assert_eq!((paths.len(), reviews(&paths)), (3, 3), "{paths:?}");
    // An API server that tells no keys is asked about each token, and once for keys.
    serves.store(0, Ordering::SeqCst);
    let reviewer = Reviewer::new(client);
    for _ in 0..3 {
        assert!(reviewer.review(&good, &u0).await.is_err());
    }
    let paths = take();
    assert_eq!((paths.len(), reviews(&paths)), (4, 3), "{paths:?}");
}
