#[path = "../../tests/signer/mod.rs"]
mod signer;

use super::*;
use crate::review::Claims;
use serde_json::{Value, json};
use signer::Signer;

const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

fn body() -> Value {
    json!({
        "aud": ["other", "moejob.dev"], "exp": 2000, "iat": 1000, "nbf": 1000, "iss": ISSUER,
        "sub": "system:serviceaccount:team:default",
        "kubernetes.io": {
            "namespace": "team",
            "node": { "name": "n0", "uid": "nu" },
            "pod": { "name": "job-0", "uid": "u0" },
            "serviceaccount": { "name": "default", "uid": "su" },
        },
    })
}

fn claims() -> Claims {
    Claims {
        namespace: "team".into(),
        pod: "job-0".into(),
        uid: "u0".into(),
        node: "n0".into(),
    }
}

fn keys(of: &[Value]) -> Keys {
    let discovery = json!({ "issuer": ISSUER, "jwks_uri": "https://10.0.0.1/openid/v1/jwks" });
    Keys::read(&discovery.to_string(), &json!({ "keys": of }).to_string()).expect("keys")
}

#[test]
fn a_token_that_a_key_has_signed_names_its_pod() {
    let (old, new) = (Signer::new("old"), Signer::new("new"));
    let keys = keys(&[old.public(), new.public()]);
    for signer in [&old, &new] {
        assert_eq!(keys.prove(&signer.token(&body()), "moejob.dev", 1500), Ok(claims()));
    }
    // Kubernetes before 1.32 does not say the node.
    let mut nowhere = body();
    nowhere["kubernetes.io"]["node"] = Value::Null;
    let found = keys.prove(&new.token(&nowhere), "moejob.dev", 1500);
    assert_eq!(found, Ok(Claims { node: String::new(), ..claims() }));
}

/// Made by openssl: ring makes no keys of RSA.
#[test]
fn tokens_of_rsa_keys_are_proved_too() {
    let made: Value = serde_json::from_str(include_str!("rs256.json")).expect("JSON");
    let keys = keys(&[made["key"].clone()]);
    let token = made["token"].as_str().expect("a token");
    assert_eq!(keys.prove(token, "moejob.dev", 1500), Ok(claims()));
    let mut torn = token.to_string();
    torn.replace_range(torn.len() - 9..torn.len() - 8, "-");
    assert_eq!(keys.prove(&torn, "moejob.dev", 1500), Err(Doubt::Signature));
}

#[test]
fn each_claim_has_to_hold() {
    let signer = Signer::new("k");
    let keys = keys(&[signer.public()]);
    let with = |field: &str, value: Value| {
        let mut body = body();
        body[field] = value;
        keys.prove(&signer.token(&body), "moejob.dev", 1500)
    };
    let doubt = |field| Err(Doubt::Claim { field });
    assert_eq!(with("iss", json!("https://elsewhere")), doubt("iss"));
    for sub in ["system:serviceaccount:team:other", "system:serviceaccount:a:default", "root"] {
        assert_eq!(with("sub", json!(sub)), doubt("sub"), "{sub}");
    }
    assert_eq!(with("aud", json!([])), doubt("aud"));
    assert_eq!(with("aud", json!(["moejob.dev.other", "https://api"])), doubt("aud"));
    assert_eq!(with("exp", json!(1500)), doubt("exp"));
    assert!(with("exp", json!(1501)).is_ok());
    assert_eq!(with("nbf", json!(1501)), doubt("nbf"));
    assert!(with("nbf", json!(1500)).is_ok());
    // Of no pod, of other types, and missing.
    assert_eq!(with("exp", json!("9999")), Err(Doubt::Shape));
    assert_eq!(with("aud", json!("moejob.dev")), Err(Doubt::Shape));
    assert_eq!(with("kubernetes.io", json!({ "namespace": "team" })), Err(Doubt::Shape));
    for field in ["iss", "sub", "aud", "exp", "nbf", "kubernetes.io"] {
        let mut body = body();
        body.as_object_mut().expect("an object").remove(field);
        let found = keys.prove(&signer.token(&body), "moejob.dev", 1500);
        assert_eq!(found, Err(Doubt::Shape), "{field}");
    }
}

#[test]
fn what_no_key_has_signed_proves_nothing() {
    let (signer, stranger) = (Signer::new("k"), Signer::new("k"));
    let keys = keys(&[signer.public()]);
    let prove = |token: &str| keys.prove(token, "moejob.dev", 1500);
    assert_eq!(prove(&stranger.token(&body())), Err(Doubt::Signature));
    // The words of one token under the signature of another.
    let (token, mut other) = (signer.token(&body()), body());
    other["kubernetes.io"]["pod"]["uid"] = json!("u1");
    let other = stranger.token(&other);
    let mixed = format!(
        "{}.{}",
        other.rsplit_once('.').expect("parts").0,
        token.rsplit_once('.').expect("parts").1
    );
    assert_eq!(prove(&mixed), Err(Doubt::Signature));
    // A header chooses among keys by name and algorithm, and nothing else.
    for (alg, kid) in [("none", "k"), ("HS256", "k"), ("RS256", "k"), ("ES256", "other")] {
        let found = prove(&signer.sign(&json!({ "alg": alg, "kid": kid }), &body()));
        let (id, algorithm) = (kid.to_string(), alg.to_string());
        assert_eq!(found, Err(Doubt::Key { id, algorithm }));
    }
    for shape in ["", ".", "..", "a.b.c", "secret", &token[..token.len() - 1], &token[1..]] {
        assert!(prove(shape).is_err(), "{shape}");
    }
    let unsigned = token.rsplit_once('.').expect("parts").0;
    assert_eq!(prove(&format!("{unsigned}.")), Err(Doubt::Signature));
    assert_eq!(prove(&format!("{unsigned}.!")), Err(Doubt::Shape));
}

#[test]
fn damaged_keys_are_left_out_and_damaged_documents_told() {
    let signer = Signer::new("k");
    let of = |field: &str, value: &str| {
        let mut key = signer.public();
        key[field] = json!(value);
        keys(&[key]).keys.len()
    };
    assert_eq!(of("use", "sig"), 1);
    for (field, value) in [
        ("kty", "oct"), ("crv", "P-521"), ("alg", "ES384"), ("alg", ""), ("x", ""), ("x", "AAAA"),
        ("y", "!"),
    ] {
        assert_eq!(of(field, value), 0, "{field} {value}");
    }
    let many: Vec<Value> = (0..40).map(|_| signer.public()).collect();
    assert_eq!(keys(&many).keys.len(), KEYS_MAX);
    let good = (json!({ "issuer": ISSUER }).to_string(), json!({ "keys": [] }).to_string());
    assert!(Keys::read(&good.0, &good.1).is_ok());
    for text in ["", "{}", "[]", "<html>"] {
        assert!(Keys::read(text, &good.1).is_err() && Keys::read(&good.0, text).is_err());
    }
}

#[test]
fn keys_are_asked_for_when_they_are_old_or_do_not_know_a_token() {
    let due = |age: u64, are_there, age_s| is_due(Some(Duration::from_secs(age)), are_there, age_s);
    assert!(is_due(None, true, KEPT_S) && is_due(None, false, KEPT_S));
    assert_eq!([299, 300].map(|age| due(age, true, KEPT_S)), [false, true]);
    assert_eq!([29, 30].map(|age| due(age, true, PAUSE_S)), [false, true], "an unknown key");
    assert_eq!([29, 30].map(|age| due(age, false, KEPT_S)), [false, true], "none were told");
    // What the documents say of a key that is given up.
    assert_eq!((KEPT_S, PAUSE_S, ANSWER_S_MAX), (300, 30, 2));
}
