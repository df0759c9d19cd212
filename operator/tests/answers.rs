//! What the API server's answers decide about leases.

mod server;

use kube::Client;
use moejob::apply::Writer;
use moejob::lease::{Deadline, Election};
use serde_json::{Value, json};
use server::{client, failure};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

fn lease(holder: &str, renewed: usize, seconds: u32) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": { "name": "moejob", "namespace": "ns", "resourceVersion": "1" },
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "leaseTransitions": 3,
            "renewTime": format!("2026-01-01T00:00:{renewed:02}.000000Z"),
        },
    })
}

fn election(client: Client) -> Election {
    let deadline = Deadline::default();
    Election {
        writer: Writer::new(client.clone(), "me".to_string(), deadline.clone()),
        client,
        namespace: "ns".to_string(),
        name: "moejob".to_string(),
        identity: "me".to_string(),
        deadline,
    }
}

/// A lease that is renewed again and again is not taken, however short its time is.
#[tokio::test]
async fn a_standby_counts_from_the_last_renewal_that_it_saw() {
    let looks = Arc::new(AtomicUsize::new(0));
    let (of, puts) = (Arc::clone(&looks), Arc::new(AtomicUsize::new(0)));
    let written = Arc::clone(&puts);
    let client = client(move |request| match request.method.as_str() {
        "GET" => (200, lease("other", of.fetch_add(1, Ordering::SeqCst), 3)),
        _ => {
            written.fetch_add(1, Ordering::SeqCst);
            (200, request.body)
        }
    })
    .await;
    let election = election(client);
    assert!(timeout(Duration::from_secs(9), election.acquire()).await.is_err());
    assert!(looks.load(Ordering::SeqCst) >= 3 && puts.load(Ordering::SeqCst) == 0);
}

/// One renewal that fails is tried again, as there is time: the leader goes on.
#[tokio::test]
async fn a_renewal_that_fails_once_ends_no_leadership() {
    let fails = Arc::new(AtomicUsize::new(0));
    let failing = Arc::clone(&fails);
    let client = client(move |request| match request.method.as_str() {
        "GET" => {
            let fail = failing.load(Ordering::SeqCst) > 0;
            failing.store(0, Ordering::SeqCst);
            match fail {
                true => failure(500, "InternalError", "a bad day"),
                false => (200, lease("me", 0, 10)),
            }
        }
        _ => (200, request.body),
    })
    .await;
    let election = election(client);
    assert_eq!(election.acquire().await, 3);
    fails.store(1, Ordering::SeqCst);
    let heard = AtomicUsize::new(0);
    let hold = election.hold(|| {
        heard.fetch_add(1, Ordering::SeqCst);
    });
    let over = timeout(Duration::from_millis(6_500), hold).await;
    assert!(over.is_err(), "it leads as before");
    assert_eq!(fails.load(Ordering::SeqCst), 0);
    assert!(heard.load(Ordering::SeqCst) >= 1 && election.deadline.holds());
}
