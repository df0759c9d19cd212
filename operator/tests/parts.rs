//! What the operator is made of, by its public face: certificates, keys, figures and what asks for
//! them.

use k8s_openapi::ByteString;
use moe_worker::gang::tls::{TlsError, Trust, WorkerKey};
use moejob_identity::authority::{Authority, AuthorityError};
use moejob::http::{Request, read};
use moejob_identity::Keyring;
use moejob::metrics::{JobFigures, Metrics};
use moejob_plan::engines::{EngineLoss, RankPlace};
use moejob_plan::track::Recovery;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn a_leaf_is_for_the_requests_key_and_the_callers_names() {
    let authority = Authority::new().expect("an authority");
    let trust = Trust::from_pem(authority.certificate_pem()).expect("a certificate");
    let key = WorkerKey::generate().expect("a key");
    let leaf = authority.sign(&key.signing_request, "job", 7, "node-0.1").expect("a leaf");
    let attempt = key.attempt(&trust, &leaf).expect("ours");
    assert_eq!((attempt.job_uid.as_str(), attempt.attempt), ("job", 7));
    assert_eq!(attempt.worker, "node-0.1");
    let other = Authority::new().expect("an authority");
    let other = Trust::from_pem(other.certificate_pem()).expect("a certificate");
    assert!(trust.has_signed(&leaf) && !other.has_signed(&leaf) && !trust.has_signed("x"));
    let other = WorkerKey::generate().expect("a key");
    let error = other.attempt(&trust, &leaf).expect_err("another's key");
    assert!(matches!(error, TlsError::OtherKey), "{error}");
}

#[test]
fn names_that_could_be_read_differently_are_refused() {
    let authority = Authority::new().expect("an authority");
    let key = WorkerKey::generate().expect("a key");
    for (job, worker) in [("", "w"), ("j", ""), ("j/2", "w"), ("j", "w/x"), ("j\u{e9}", "w")] {
        let result = authority.sign(&key.signing_request, job, 1, worker);
        assert!(matches!(result, Err(AuthorityError::Name { .. })), "{job:?} {worker:?}");
    }
}

#[test]
fn what_is_no_request_is_refused() {
    let authority = Authority::new().expect("an authority");
    let mut request = WorkerKey::generate().expect("a key").signing_request;
    let long = request.clone() + &"\n".repeat(2048);
    // One changed letter of the body breaks the signature or the form.
    let middle = request.len() / 2;
    let changed = if &request[middle..=middle] == "A" { "B" } else { "A" };
    request.replace_range(middle..=middle, changed);
    for text in ["", "x", authority.certificate_pem(), &request, &long] {
        assert!(authority.sign(text, "j", 1, "w").is_err(), "{text:?}");
    }
}

#[test]
fn secrets_differ() {
    let authority = Authority::new().expect("an authority");
    let other = Authority::new().expect("an authority");
    let secrets = [authority.new_secret(), authority.new_secret(), other.new_secret()];
    assert!(secrets.iter().all(|secret| secret.len() == 64));
    assert!(secrets[0] != secrets[1] && secrets[0] != secrets[2]);
}

#[test]
fn a_keyring_survives_its_secret() {
    let keyring = Keyring::new().expect("keys");
    assert!(Keyring::read(&BTreeMap::new()).expect("an empty Secret").is_none());
    let again = Keyring::read(&keyring.write()).expect("readable").expect("not empty");
    assert!(again == keyring && again.authority().is_ok());
    assert_eq!(keyring.seal("n", "job", "pod"), again.seal("n", "job", "pod"));
    assert_ne!(keyring.seal("n", "job", "pod"), keyring.seal("n", "job", "pod-1"));
}

#[test]
fn a_secret_that_was_damaged_is_named_by_its_field() {
    let keyring = Keyring::new().expect("keys");
    // Long after the end of its authority.
    let two = keyring.due(i64::from(u32::MAX)).expect("readable").expect("a successor");
    let whole = two.write();
    assert!(Keyring::read(&whole).expect("readable").is_some_and(|again| again == two));
    for field in ["authority.crt", "authority.key", "seal", "successor.key"] {
        let mut data = whole.clone();
        data.remove(field);
        let error = Keyring::read(&data).err().expect(field).to_string();
        assert!(error.contains(&format!("{field} is missing")), "{error}");
        data.insert(field.to_string(), ByteString(vec![0xff, 0xfe]));
        let error = Keyring::read(&data).err().expect(field).to_string();
        assert!(error.contains(&format!("{field} is no text")), "{error}");
    }
    let mut data = whole.clone();
    data.insert("seal".to_string(), ByteString(b"abc".to_vec()));
    let error = Keyring::read(&data).err().expect("a seal").to_string();
    assert!(error.contains("seal is not 64 hex digits"), "{error}");
}

#[test]
fn figures_are_written_as_prometheus_reads_them() {
    let metrics = Metrics::default();
    metrics.reconciled(Duration::from_millis(2));
    metrics.result("ok");
    metrics.recovered(&Recovery {
        cause: "rank 1 (a-a1-0) went silent".into(),
        attempt: 1,
        detected_at: 1_000,
        replanned_at: Some(1_060),
        rejoined_at: None,
        first_step_at: Some(1_300),
        steps_lost: 0,
    });
    let lost = EngineLoss { rank: 3, node: "n0".into(), device: 3, ..EngineLoss::default() };
    let figures = JobFigures {
        namespace: "n".into(),
        name: "j".into(),
        phase: "Running".into(),
        step: 7,
        loss: Some(2.5),
        ranks: Arc::new(vec![RankPlace {
            rank: 9,
            worker: "j-a1-1".into(),
            node: "n1".into(),
            device: 1,
            uuid: "GPU-a".into(),
        }]),
        engines_lost: [1_500, 2_500].map(|at| EngineLoss { at, ..lost.clone() }).into(),
        ..JobFigures::default()
    };
    metrics.job("u", figures);
    let text = metrics.text();
    for line in [
        "moejob_reconcile_duration_seconds_bucket{le=\"0.001\"} 0",
        "moejob_reconcile_duration_seconds_bucket{le=\"0.005\"} 1",
        "moejob_reconcile_duration_seconds_count 1",
        "moejob_reconcile_total{result=\"ok\"} 1",
        "moejob_recoveries_total{cause=\"silent\"} 1",
        "moejob_recovery_seconds_bucket{phase=\"replanned\",le=\"0.1\"} 1",
        "moejob_recovery_seconds_bucket{phase=\"first_step\",le=\"0.25\"} 0",
        "moejob_recovery_seconds_count{phase=\"first_step\"} 1",
        "moejob_step{namespace=\"n\",job=\"j\"} 7",
        "moejob_loss{namespace=\"n\",job=\"j\"} 2.5",
        "moejob_job_phase{namespace=\"n\",job=\"j\",phase=\"Running\"} 1",
        "moejob_job_phase{namespace=\"n\",job=\"j\",phase=\"Failed\"} 0",
        "moejob_rank_info{namespace=\"n\",job=\"j\",rank=\"9\",node=\"n1\",device=\"1\",\
         uuid=\"GPU-a\",pod=\"j-a1-1\"} 1",
        "moejob_engine_lost_timestamp_seconds{namespace=\"n\",job=\"j\",rank=\"3\",\
         node=\"n0\",device=\"3\",uuid=\"\",by_device=\"false\"} 2.5",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    let losses = text.matches("moejob_engine_lost_timestamp_seconds{").count();
    assert_eq!(losses, 1, "of one device the newest\n{text}");
    assert!(!text.contains("moejob_tokens_per_second{"), "unknown figures are left out");
    metrics.forget_job("u");
    assert!(!metrics.text().contains("moejob_step{"));
}

#[tokio::test]
async fn a_head_is_a_method_a_path_and_a_token() {
    let read = async |text: &[u8]| {
        let mut stream = text;
        read(&mut stream).await.expect("no error")
    };
    let request = |path: &str, token: Option<&str>| {
        let (path, token) = (path.to_string(), token.map(str::to_string));
        Some(Request { method: "GET".to_string(), path, token })
    };
    assert_eq!(read(b"GET /a?b HTTP/1.1\r\n\r\n").await, request("/a", None));
    let with = b"GET /a HTTP/1.1\r\nHost: x\r\nauthorization:  bearer abc \r\n\r\n";
    assert_eq!(read(with).await, request("/a", Some("abc")));
    let basic = b"GET / HTTP/1.1\r\nAuthorization: Basic abc\r\n\r\n";
    assert_eq!(read(basic).await, request("/", None));
    let empty = b"GET / HTTP/1.1\r\nAuthorization: Bearer \r\n\r\n";
    assert_eq!(read(empty).await, request("/", None));
    assert_eq!(read(b"GET / HTTP/1.1\r\n").await, None, "it ends before its end");
    // A head of all that may be is read; one byte more is not waited for.
    let padded = |bytes: usize| {
        let (first, last) = ("GET / HTTP/1.1\r\nX: ", "\r\n\r\n");
        format!("{first}{}{last}", "x".repeat(bytes - first.len() - last.len()))
    };
    let most = 16 << 10;
    assert_eq!(read(padded(most).as_bytes()).await, request("/", None));
    assert_eq!(read(padded(most + 1).as_bytes()).await, None);
}
