//! The public keys by which the API server signs the tokens of pods.
//!
//! ```text
//! GET /.well-known/openid-configuration, /openid/v1/jwks -> Keys, asked for anew every few minutes
//! token -> signature, issuer, audience, times -> Claims, or a doubt that the API server resolves
//! ```
//! A gang of 512 pods shows 512 tokens at once. Each review of one costs the API server more than
//! a check of a signature costs us. What keys cannot prove is no refusal: the API server is asked,
//! and its word holds.
//!
//! The formats are RFC 7515 (signature), 7517 and 7518 (keys), 7519 (claims); the claim
//! `kubernetes.io` is that of bound service account tokens.

use crate::review::Claims;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::signature::{self, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// A key that the API server gives up is taken for so long at most.
const KEPT_S: u64 = 300;
/// After a failure, or a token of an unknown key, nothing is asked for so long.
const PAUSE_S: u64 = 30;
/// Longer than this no token waits for keys.
const ANSWER_S_MAX: u64 = 2;
/// An API server has one or two, and one more while it changes them.
const KEYS_MAX: usize = 32;

/// The API server's keys, as far as it tells them.
pub struct Keys {
    issuer: String,
    keys: Vec<Key>,
}

struct Key {
    id: String,
    algorithm: String,
    public: Public,
}

enum Public {
    /// Modulus and exponent, big-endian.
    Rsa(&'static RsaParameters, Vec<u8>, Vec<u8>),
    /// A point, uncompressed.
    Ec(&'static signature::EcdsaVerificationAlgorithm, Vec<u8>),
}

/// Why keys do not prove a token. None of it is a refusal.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Doubt {
    #[error("it is no token of three parts")]
    Shape,
    #[error("no key {id:?} for {algorithm:?} is known")]
    Key { id: String, algorithm: String },
    #[error("the key does not match its signature")]
    Signature,
    #[error("its {field} is not what a pod's token has")]
    Claim { field: &'static str },
}

#[derive(Deserialize)]
struct Discovery {
    issuer: String,
}

#[derive(Deserialize)]
struct KeySet {
    keys: Vec<KeyText>,
}

/// As RFC 7517 has it. Numbers are base64url, big-endian.
#[derive(Deserialize)]
struct KeyText {
    #[serde(default)]
    kid: String,
    #[serde(default)]
    alg: String,
    kty: String,
    #[serde(default)]
    n: String,
    #[serde(default)]
    e: String,
    #[serde(default)]
    crv: String,
    #[serde(default)]
    x: String,
    #[serde(default)]
    y: String,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    #[serde(default)]
    kid: String,
}

#[derive(Deserialize)]
struct Body {
    iss: String,
    sub: String,
    aud: Vec<String>,
    exp: u64,
    nbf: u64,
    #[serde(rename = "kubernetes.io")]
    bound: Bound,
}

#[derive(Deserialize)]
struct Bound {
    namespace: String,
    pod: Named,
    node: Option<Named>,
    serviceaccount: Named,
}

#[derive(Deserialize)]
struct Named {
    name: String,
    #[serde(default)]
    uid: String,
}

impl Keys {
    /// Of the two documents that the API server serves (OpenID Connect Discovery). Keys of other
    /// kinds than RS256, RS384, RS512, ES256 and ES384 are left out.
    ///
    /// # Errors
    /// When one of them is not what it should be.
    pub fn read(discovery: &str, keys: &str) -> Result<Keys, serde_json::Error> {
        let Discovery { issuer } = serde_json::from_str(discovery)?;
        let set: KeySet = serde_json::from_str(keys)?;
        let keys = set.keys.iter().take(KEYS_MAX).filter_map(Key::read).collect();
        Ok(Keys { issuer, keys })
    }

    /// Whom a token names, where one of the keys has signed it for `audience` and it holds at `now`
    /// (seconds since 1970).
    ///
    /// # Errors
    /// What cannot be proved.
    pub fn prove(&self, token: &str, audience: &str, now: u64) -> Result<Claims, Doubt> {
        let (signed, signature) = token.rsplit_once('.').ok_or(Doubt::Shape)?;
        let (header, body) = signed.split_once('.').ok_or(Doubt::Shape)?;
        let header: Header = part(header)?;
        let fits = |key: &&Key| key.id == header.kid && key.algorithm == header.alg;
        let Some(key) = self.keys.iter().find(fits) else {
            return Err(Doubt::Key { id: header.kid, algorithm: header.alg });
        };
        let signature = URL_SAFE_NO_PAD.decode(signature).map_err(|_| Doubt::Shape)?;
        if !key.has_signed(signed.as_bytes(), &signature) {
            return Err(Doubt::Signature);
        }
        // Nothing of the body is read before its signature holds.
        let body: Body = part(body)?;
        let bound = body.bound;
        let account =
            format!("system:serviceaccount:{}:{}", bound.namespace, bound.serviceaccount.name);
        let claims = [
            ("iss", body.iss == self.issuer),
            ("sub", body.sub == account),
            ("aud", body.aud.iter().any(|one| one == audience)),
            ("exp", now < body.exp),
            ("nbf", body.nbf <= now),
        ];
        if let Some((field, _)) = claims.into_iter().find(|(_, holds)| !holds) {
            return Err(Doubt::Claim { field });
        }
        Ok(Claims {
            namespace: bound.namespace,
            pod: bound.pod.name,
            uid: bound.pod.uid,
            node: bound.node.map(|node| node.name).unwrap_or_default(),
        })
    }
}

impl Key {
    /// None: of a kind that is not known, or damaged.
    fn read(text: &KeyText) -> Option<Key> {
        let number = |text: &str| URL_SAFE_NO_PAD.decode(text).ok().filter(|it| !it.is_empty());
        let rsa = |parameters| Some(Public::Rsa(parameters, number(&text.n)?, number(&text.e)?));
        let ec = |algorithm, bytes: usize| {
            let (x, y) = (number(&text.x)?, number(&text.y)?);
            let whole = x.len() == bytes && y.len() == bytes;
            whole.then(|| Public::Ec(algorithm, [&[4][..], &x, &y].concat()))
        };
        let public = match (&*text.kty, &*text.alg, &*text.crv) {
            ("RSA", "RS256", _) => rsa(&signature::RSA_PKCS1_2048_8192_SHA256),
            ("RSA", "RS384", _) => rsa(&signature::RSA_PKCS1_2048_8192_SHA384),
            ("RSA", "RS512", _) => rsa(&signature::RSA_PKCS1_2048_8192_SHA512),
            ("EC", "ES256", "P-256") => ec(&signature::ECDSA_P256_SHA256_FIXED, 32),
            ("EC", "ES384", "P-384") => ec(&signature::ECDSA_P384_SHA384_FIXED, 48),
            _ => None,
        };
        Some(Key { id: text.kid.clone(), algorithm: text.alg.clone(), public: public? })
    }

    fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        match &self.public {
            Public::Rsa(parameters, n, e) => {
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signature).is_ok()
            }
            Public::Ec(algorithm, point) => {
                UnparsedPublicKey::new(*algorithm, point).verify(message, signature).is_ok()
            }
        }
    }
}

fn part<T: DeserializeOwned>(text: &str) -> Result<T, Doubt> {
    let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| Doubt::Shape)?;
    serde_json::from_slice(&bytes).map_err(|_| Doubt::Shape)
}

/// Asks for keys when a token needs them, for all that wait together.
#[derive(Clone)]
pub struct KeyRing {
    client: kube::Client,
    held: Arc<Mutex<Held>>,
}

#[derive(Default)]
struct Held {
    keys: Option<Arc<Keys>>,
    /// When they were asked for last.
    asked: Option<Instant>,
    /// What stood in the log last.
    told: Option<bool>,
}

impl KeyRing {
    pub fn new(client: kube::Client) -> KeyRing {
        KeyRing { client, held: Arc::default() }
    }

    /// Whom a token names; none: the API server has to say it.
    pub async fn prove(&self, token: &str, audience: &str) -> Option<Claims> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
        let keys = self.keys(KEPT_S).await?;
        match keys.prove(token, audience, now) {
            // The API server may have got a key since.
            Err(Doubt::Key { .. }) => {
                self.keys(PAUSE_S).await?.prove(token, audience, now).ok()
            }
            found => found.ok(),
        }
    }

    /// Keys that are so old at most; none: the API server does not tell them.
    async fn keys(&self, age_s: u64) -> Option<Arc<Keys>> {
        let mut held = self.held.lock().await;
        let age = held.asked.map(|asked| asked.elapsed());
        if is_due(age, held.keys.is_some(), age_s) {
            let answer = timeout(Duration::from_secs(ANSWER_S_MAX), self.ask()).await;
            let found = answer.map_or_else(|_| Err("no answer".to_string()), |found| found);
            held.asked = Some(Instant::now());
            let told = held.told.replace(found.is_ok());
            match &found {
                Ok(keys) if told != Some(true) => {
                    let (issuer, keys) = (&keys.issuer, keys.keys.len());
                    tracing::info!(issuer, keys, "tokens of pods are proved by public keys");
                }
                Err(why) if told != Some(false) => {
                    tracing::info!(%why, "the API server tells no public keys: it reviews tokens");
                }
                _ => {}
            }
            // Keys that cannot be had anew have ended.
            held.keys = found.ok().map(Arc::new);
        }
        held.keys.clone()
    }

    async fn ask(&self) -> Result<Keys, String> {
        let document = async |path: &str| {
            let request = http::Request::get(path).body(Vec::new());
            let request = request.map_err(|error| error.to_string())?;
            let text = self.client.request_text(request).await;
            text.map_err(|error| format!("GET {path}: {error}"))
        };
        let discovery = document("/.well-known/openid-configuration").await?;
        let keys = document("/openid/v1/jwks").await?;
        Keys::read(&discovery, &keys).map_err(|error| error.to_string())
    }
}

/// Whether keys are asked for, `age` after they were last: those that are there when they are older
/// than `age_s`, and those that nobody told after a pause.
fn is_due(age: Option<Duration>, are_there: bool, age_s: u64) -> bool {
    let least = if are_there { age_s } else { PAUSE_S };
    age.is_none_or(|age| age >= Duration::from_secs(least))
}

#[cfg(test)]
mod tests;
