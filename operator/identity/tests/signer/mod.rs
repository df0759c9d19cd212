//! Signs tokens as an API server does.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use serde_json::{Value, json};

/// One key by which tokens are signed.
pub struct Signer {
    id: &'static str,
    pair: EcdsaKeyPair,
}

impl Signer {
    pub fn new(id: &'static str) -> Signer {
        let (algorithm, random) = (&ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
        let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random).expect("a key");
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random).expect("a pair");
        Signer { id, pair }
    }

    pub fn public(&self) -> Value {
        let point = self.pair.public_key().as_ref();
        let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        json!({
            "use": "sig", "kty": "EC", "crv": "P-256", "alg": "ES256", "kid": self.id,
            "x": text(&point[1..33]), "y": text(&point[33..]),
        })
    }

    pub fn sign(&self, header: &Value, body: &Value) -> String {
        let text = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", text(header), text(body));
        let signature = self.pair.sign(&SystemRandom::new(), signed.as_bytes()).expect("signed");
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref()))
    }

    pub fn token(&self, body: &Value) -> String {
        self.sign(&json!({ "alg": "ES256", "kid": self.id }), body)
    }
}
