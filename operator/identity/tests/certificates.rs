//! Certificates that the authority signs, and the Secret that it lies in.

use k8s_openapi::ByteString;
use moe_worker::gang::tls::{TlsError, Trust, WorkerKey};
use moejob_identity::Keyring;
use moejob_identity::authority::{Authority, AuthorityError, new_pem, random};
use moejob_protocol::Down;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::collections::BTreeMap;

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

/// By its leaf a worker shows a later leader who it is, in whichever attempt it was signed.
#[test]
fn a_leaf_names_one_worker_of_one_job() {
    let authority = Authority::new().expect("an authority");
    let request = WorkerKey::generate().expect("a key").signing_request;
    let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate");
    for attempt in [1, 7] {
        let leaf = der(&authority.sign(&request, "job", attempt, "w").expect("a leaf"));
        assert!(authority.names(&leaf, "job", "w"));
        assert!(!authority.names(&leaf, "other", "w") && !authority.names(&leaf, "job", "x"));
        assert!(!Authority::new().expect("an authority").names(&leaf, "job", "w"));
    }
    assert!(!authority.names(&der(authority.certificate_pem()), "job", "w"));
}

/// A worker that is told whom to trust next believes leaves of both.
#[test]
fn a_leaf_brings_word_of_the_successor() {
    let request = WorkerKey::generate().expect("a key").signing_request;
    let leaf = |authority: &Authority| match authority.leaf(&request, "job", 1, "w") {
        Ok(Down::Leaf { certificate, authority }) => (certificate, authority),
        other => panic!("{other:?}"),
    };
    let (certificate, key) = new_pem().expect("an authority");
    let first = Authority::from_pem(&certificate, &key).expect("an authority");
    assert_eq!(leaf(&first).1, None);
    let (next, next_key) = new_pem().expect("an authority");
    let (signed, trusted) = leaf(&first.followed_by(&next));
    let trusted = trusted.expect("the successor is told");
    assert_eq!(trusted, format!("{certificate}{next}"));
    let trust = Trust::from_pem(&trusted).expect("certificates");
    let successor = Authority::from_pem(&next, &next_key).expect("an authority");
    assert!(trust.has_signed(&signed) && trust.has_signed(&leaf(&successor).0));
}

#[test]
fn random_bytes_differ() {
    let [one, other] = [(); 2].map(|()| random::<32>().expect("randomness"));
    assert!(one != other && one.iter().any(|byte| *byte != one[0]));
}
