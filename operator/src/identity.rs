//! Who the operator is to its workers, and which of the pods that knock are its own.
//!
//! ```text
//! Secret moejob-authority -> Keyring -> Authority (signs leaves), seals on pods
//! token of a pod -> public keys, else TokenReview -> Claims: the pod's uid, name and node,
//!     compared with what was dialled
//! ```

use crate::authority::{self, AuthorityError};
use crate::keys::KeyRing;
use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::api::{Api, PostParams};
use moejob_plan::lead::PodIdentity;
use moejob_protocol::pod::TOKEN_AUDIENCE;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Reviews under way at once. A gang of 512 whose members have no leaf is proved in 4 s where a
/// review takes one: by 64 it took 8, too much of the 10 s of a takeover. An API server takes 200
/// changes at once if nobody says otherwise, so some room is left to others.
const REVIEWS_MAX: usize = 128;
const REVIEW_MS_MAX: u64 = 4_000;
/// A kubelet's token is about a tenth of this.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// What a seal begins with that covers the pod's namespace.
const SEAL_VERSION: &str = "v2:";

const DAY_S: i64 = 24 * 3600;
/// So long before its end an authority gets a successor, which new pods trust as well.
const SUCCESSOR_S: i64 = 60 * DAY_S;
/// So long before its end the successor takes over: every pod that is younger than the difference
/// of the two trusts it by then.
const TAKEOVER_S: i64 = 30 * DAY_S;

/// What lies in the Secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Keyring {
    certificate: String,
    key: String,
    /// Certificate and key of the next authority.
    successor: Option<(String, String)>,
    /// Key of the seals, in hex.
    seal: String,
}

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("its {field} is {what}; delete its data, and the operator makes them anew")]
    Damaged { field: &'static str, what: &'static str },
    #[error("the authority")]
    Authority(#[from] AuthorityError),
}

impl Keyring {
    /// # Errors
    /// When the system gives no randomness.
    pub fn new() -> Result<Keyring, IdentityError> {
        let (certificate, key) = authority::new_pem()?;
        // Nobody knows the private key, so nobody knows its hash.
        let seal = blake3::derive_key("moejob.dev seal of pods", key.as_bytes());
        let seal = blake3::Hash::from_bytes(seal).to_hex().to_string();
        Ok(Keyring { certificate, key, successor: None, seal })
    }

    /// None when the Secret is as `manifests/` ships it: empty.
    ///
    /// # Errors
    /// `Damaged`.
    pub fn read(
        data: &BTreeMap<String, ByteString>,
    ) -> Result<Option<Keyring>, IdentityError> {
        if data.is_empty() {
            return Ok(None);
        }
        let text = |field: &'static str| match data.get(field) {
            None => Err(IdentityError::Damaged { field, what: "missing" }),
            Some(bytes) => String::from_utf8(bytes.0.clone())
                .map_err(|_| IdentityError::Damaged { field, what: "no text" }),
        };
        let successor = match data.contains_key("successor.crt") {
            true => Some((text("successor.crt")?, text("successor.key")?)),
            false => None,
        };
        let seal = text("seal")?;
        if blake3::Hash::from_hex(&seal).is_err() {
            return Err(IdentityError::Damaged { field: "seal", what: "not 64 hex digits" });
        }
        let (certificate, key) = (text("authority.crt")?, text("authority.key")?);
        Ok(Some(Keyring { certificate, key, successor, seal }))
    }

    pub fn write(&self) -> BTreeMap<String, ByteString> {
        let mut fields = vec![
            ("authority.crt", &self.certificate),
            ("authority.key", &self.key),
            ("seal", &self.seal),
        ];
        if let Some((certificate, key)) = &self.successor {
            fields.extend([("successor.crt", certificate), ("successor.key", key)]);
        }
        let field = |(name, text): (&str, &String)| {
            (name.to_string(), ByteString(text.clone().into_bytes()))
        };
        fields.into_iter().map(field).collect()
    }

    /// What it is to be replaced by at `now` (seconds since 1970), if by anything.
    ///
    /// # Errors
    /// When a certificate is unreadable, or none can be made.
    pub fn due(&self, now: i64) -> Result<Option<Keyring>, IdentityError> {
        let left = authority::ends_at(&self.certificate)? - now;
        match &self.successor {
            Some((certificate, key)) if left < TAKEOVER_S => Ok(Some(Keyring {
                certificate: certificate.clone(),
                key: key.clone(),
                successor: None,
                seal: self.seal.clone(),
            })),
            None if left < SUCCESSOR_S => {
                Ok(Some(Keyring { successor: Some(authority::new_pem()?), ..self.clone() }))
            }
            _ => Ok(None),
        }
    }

    /// # Errors
    /// When certificate and key do not belong together.
    pub fn authority(&self) -> Result<Arc<authority::Authority>, IdentityError> {
        let authority = authority::Authority::from_pem(&self.certificate, &self.key)?;
        Ok(Arc::new(match &self.successor {
            Some((successor, _)) => authority.followed_by(successor),
            None => authority,
        }))
    }

    /// What new pods trust: the authority and its successor; PEM.
    pub fn trusted(&self) -> String {
        let successor = self.successor.as_ref().map_or("", |(certificate, _)| certificate);
        format!("{}{successor}", self.certificate)
    }

    /// What marks a pod as one that the operator has made for this job, in this namespace: who
    /// copies it to a pod of another namespace has a pod without a seal. None of the names holds
    /// a `/`.
    pub fn seal(&self, namespace: &str, job_uid: &str, pod: &str) -> String {
        format!("{SEAL_VERSION}{}", self.hash(&format!("v2/{namespace}/{job_uid}/{pod}")))
    }

    /// Names the key of the seals without telling it: a record says by which its pods were sealed.
    pub fn id(&self) -> String {
        self.hash("moejob.dev name of this key")[..16].to_string()
    }

    /// Whether the seal of a pod is one of ours. Those of version 1 do not cover the namespace;
    /// pods that bear one live until their job replaces them, and count only for a job of their
    /// own namespace (`observe::owner`).
    pub fn is_sealed(&self, seal: &str, namespace: &str, job_uid: &str, pod: &str) -> bool {
        let expected = match seal.starts_with(SEAL_VERSION) {
            true => self.seal(namespace, job_uid, pod),
            false => self.hash(&format!("{job_uid}/{pod}")),
        };
        is_same(&expected, seal)
    }

    /// As version 1 was.
    #[cfg(test)]
    pub fn seal_before(&self, job_uid: &str, pod: &str) -> String {
        self.hash(&format!("{job_uid}/{pod}"))
    }

    fn hash(&self, text: &str) -> String {
        let key = blake3::Hash::from_hex(&self.seal).expect("checked when it was read");
        blake3::keyed_hash(key.as_bytes(), text.as_bytes()).to_hex().to_string()
    }
}

/// Compares secrets by their hashes, which tells nobody how far a guess was right.
pub fn is_same(secret: &str, guess: &str) -> bool {
    blake3::hash(secret.as_bytes()) == blake3::hash(guess.as_bytes())
}

#[derive(Debug, thiserror::Error)]
pub enum ReviewError {
    #[error("{found} bytes long, at most {TOKEN_BYTES_MAX}")]
    Size { found: usize },
    #[error("no answer of the API server within {REVIEW_MS_MAX} ms")]
    Slow,
    #[error("the API server could not judge it")]
    Api(#[source] Box<kube::Error>),
    #[error("refused by the API server: {why}")]
    Refused { why: String },
    #[error("it is for another audience than {TOKEN_AUDIENCE}")]
    Audience,
    #[error("its {field} is {found:?}, that of the pod which was dialled {expected:?}")]
    Other { field: &'static str, found: String, expected: String },
}

/// Finds whose a token is: by the API server's public keys, else by asking it.
#[derive(Clone)]
pub struct Reviewer {
    client: kube::Client,
    keys: KeyRing,
    turns: Turns,
}

impl Reviewer {
    pub fn new(client: kube::Client) -> Reviewer {
        let turns = Turns(Arc::new(Semaphore::new(REVIEWS_MAX)));
        Reviewer { keys: KeyRing::new(client.clone()), client, turns }
    }

    /// # Errors
    /// Unless the token is the present one of this very pod.
    pub async fn review(&self, token: &str, pod: &PodIdentity) -> Result<(), ReviewError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(ReviewError::Size { found: token.len() });
        }
        // What a review says beyond this is that the pod is still there. The leader sees that by
        // itself: it dials no other pod than one it watches, and ends the stream of one that goes.
        if let Some(claims) = self.keys.prove(token, TOKEN_AUDIENCE).await {
            return claims.are_of(pod);
        }
        let review = TokenReview {
            spec: TokenReviewSpec {
                audiences: Some(vec![TOKEN_AUDIENCE.to_string()]),
                token: Some(token.to_string()),
            },
            ..TokenReview::default()
        };
        let api: Api<TokenReview> = Api::all(self.client.clone());
        let params = PostParams::default();
        let answer = self.turns.take(api.create(&params, &review)).await?;
        let answer = answer.map_err(|error| ReviewError::Api(Box::new(error)))?;
        judge(&answer, pod)
    }
}

/// As many requests at once as there are permits.
#[derive(Clone)]
struct Turns(Arc<Semaphore>);

impl Turns {
    /// # Errors
    /// `Slow`: the time of a request begins when its turn does.
    async fn take<T>(&self, request: impl Future<Output = T>) -> Result<T, ReviewError> {
        let _turn = self.0.acquire().await.expect("it is never closed");
        let limit = Duration::from_millis(REVIEW_MS_MAX);
        timeout(limit, request).await.map_err(|_| ReviewError::Slow)
    }
}

/// Whom a token names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims {
    pub namespace: String,
    pub pod: String,
    pub uid: String,
    /// Empty: Kubernetes before 1.32 does not say it.
    pub node: String,
}

impl Claims {
    /// # Errors
    /// `Other`: they speak of another pod.
    fn are_of(&self, pod: &PodIdentity) -> Result<(), ReviewError> {
        let mut claims = vec![
            ("namespace", &self.namespace, &pod.namespace),
            ("pod's name", &self.pod, &pod.name),
            ("pod's uid", &self.uid, &pod.uid),
        ];
        if !self.node.is_empty() {
            claims.push(("node", &self.node, &pod.node));
        }
        for (field, found, expected) in claims {
            if found != expected {
                let (found, expected) = (found.clone(), expected.clone());
                return Err(ReviewError::Other { field, found, expected });
            }
        }
        Ok(())
    }
}

/// Whether the answer speaks of this pod.
fn judge(review: &TokenReview, pod: &PodIdentity) -> Result<(), ReviewError> {
    let status = review.status.clone().unwrap_or_default();
    if status.authenticated != Some(true) {
        return Err(ReviewError::Refused { why: status.error.unwrap_or_default() });
    }
    if !status.audiences.iter().flatten().any(|audience| audience == TOKEN_AUDIENCE) {
        return Err(ReviewError::Audience);
    }
    let user = status.user.unwrap_or_default();
    let account = user.username.clone().unwrap_or_default();
    let parts: Vec<&str> = account.split(':').collect();
    let ["system", "serviceaccount", namespace, _] = parts[..] else {
        let expected = format!("system:serviceaccount:{}:..", pod.namespace);
        return Err(ReviewError::Other { field: "account", found: account, expected });
    };
    let bound = |name: &str| extra(&user, &format!("authentication.kubernetes.io/{name}"));
    let claims = Claims {
        namespace: namespace.to_string(),
        pod: bound("pod-name"),
        uid: bound("pod-uid"),
        node: bound("node-name"),
    };
    claims.are_of(pod)
}

fn extra(user: &UserInfo, name: &str) -> String {
    let values = user.extra.as_ref().and_then(|extra| extra.get(name));
    values.and_then(|values| values.first()).cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::authentication::v1::TokenReviewStatus;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// The clock is tokio's, which stands still while there is work.
    #[tokio::test(start_paused = true)]
    async fn a_gang_without_leaves_is_proved_by_bounded_reviews_in_little_time() {
        let turns = Turns(Arc::new(Semaphore::new(REVIEWS_MAX)));
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let review = |time: Duration| {
            let (turns, running, most) = (turns.clone(), &running, &most);
            async move {
                let request = async {
                    most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::time::sleep(time).await;
                    running.fetch_sub(1, Ordering::SeqCst);
                };
                turns.take(request).await
            }
        };
        let began = tokio::time::Instant::now();
        let reviews = (0..512).map(|_| review(Duration::from_secs(1)));
        let found = futures::future::join_all(reviews).await;
        assert!(found.iter().all(Result::is_ok), "one that waits for its turn is not slow");
        assert_eq!(most.into_inner(), REVIEWS_MAX);
        // Not by the machine's clock: half of what a takeover may take.
        assert!(began.elapsed() <= Duration::from_secs(5), "{:?}", began.elapsed());
        let slow = turns.take(tokio::time::sleep(Duration::from_secs(60))).await;
        assert!(matches!(slow, Err(ReviewError::Slow)), "{slow:?}");
        // It has given its turn back.
        assert_eq!(turns.0.available_permits(), REVIEWS_MAX);
    }

    /// Each on its own: none of the bounds of a token's proof stands for another.
    #[test]
    fn an_answer_that_says_nothing_is_no_proof() {
        let nothing = TokenReview::default();
        let pod = PodIdentity {
            namespace: String::new(),
            name: String::new(),
            uid: String::new(),
            node: String::new(),
        };
        assert!(matches!(judge(&nothing, &pod), Err(ReviewError::Refused { .. })));
        assert!(answer(|status| status.authenticated = None).is_err());
        let other = |status: &mut TokenReviewStatus| status.audiences = Some(vec!["other".into()]);
        assert!(answer(other).is_err_and(|error| error.contains("audience")));
        // A person whose name is that of the namespace, and shapes that no service account has.
        for name in ["team", "system:serviceaccount:team", "system:node:team:default", ""] {
            let found = answer(|status| {
                status.user.as_mut().expect("a user").username = Some(name.into());
            });
            assert!(found.is_err_and(|error| error.contains("its account is")), "{name}");
        }
        // Kubernetes before 1.32 does not say the node.
        assert_eq!(answer(|status| bind(status, "node-name", "")), Ok(()));
    }

    #[test]
    fn an_authority_is_followed_and_replaced_at_the_very_second() {
        let first = Keyring::new().expect("keys");
        let end = authority::ends_at(&first.certificate).expect("an end");
        let due = |keyring: &Keyring, left: i64| keyring.due(end - left).expect("readable");
        assert!(due(&first, SUCCESSOR_S).is_none());
        let second = due(&first, SUCCESSOR_S - 1).expect("a successor");
        // It is trusted before it signs.
        assert!(second.certificate == first.certificate && second.seal == first.seal);
        assert_eq!(second.trusted().matches("BEGIN CERTIFICATE").count(), 2);
        assert!(moe_worker::gang::tls::Trust::from_pem(&second.trusted()).is_ok());
        assert!(due(&second, TAKEOVER_S).is_none());
        let third = due(&second, TAKEOVER_S - 1).expect("the successor takes over");
        assert!(third.successor.is_none() && third.key != first.key);
        assert_eq!(Some(&third.certificate), second.successor.as_ref().map(|(it, _)| it));
        assert_eq!(third.seal("n", "j", "p"), first.seal("n", "j", "p"));
        // Without a successor nobody takes over, however late it is.
        let late = due(&first, -1).expect("a successor");
        assert!(late.certificate == first.certificate && late.successor.is_some());
        // A pod that was made before there was a successor has ended by then, or trusts it.
        assert_eq!((SUCCESSOR_S, TAKEOVER_S), (5_184_000, 2_592_000));
    }

    #[test]
    fn a_key_is_named_without_being_told() {
        let (one, other) = (Keyring::new().expect("keys"), Keyring::new().expect("keys"));
        assert_eq!(one.id(), one.clone().id());
        assert!(one.id() != other.id() && one.id().len() == 16);
        assert!(!one.seal.contains(&one.id()) && !one.seal("n", "j", "p").contains(&one.id()));
    }

    #[test]
    fn a_seal_is_worth_nothing_in_another_namespace() {
        let keyring = Keyring::new().expect("keys");
        let seal = keyring.seal("a", "job", "pod");
        assert!(keyring.is_sealed(&seal, "a", "job", "pod"));
        assert!(!keyring.is_sealed(&seal, "b", "job", "pod"));
        assert!(!keyring.is_sealed(&seal, "a", "other", "pod"));
        assert!(!keyring.is_sealed(&seal, "a", "job", "pod-1"));
        assert!(!Keyring::new().expect("keys").is_sealed(&seal, "a", "job", "pod"));
        for wrong in ["", "v2:", "v1:", &seal[3..], &seal[..seal.len() - 1]] {
            assert!(!keyring.is_sealed(wrong, "a", "job", "pod"), "{wrong}");
        }
        // As version 1 was made: of pods that a release before this one has started.
        let before = keyring.seal_before("job", "pod");
        assert!(keyring.is_sealed(&before, "a", "job", "pod"));
        assert!(!keyring.is_sealed(&before, "a", "job", "pod-1"));
    }

    fn answer(change: impl Fn(&mut TokenReviewStatus)) -> Result<(), String> {
        let pod = PodIdentity {
            namespace: "team".into(),
            name: "job-0".into(),
            uid: "u0".into(),
            node: "n0".into(),
        };
        let bound = [("pod-name", "job-0"), ("pod-uid", "u0"), ("node-name", "n0")];
        let extra = bound.map(|(name, value)| {
            (format!("authentication.kubernetes.io/{name}"), vec![value.to_string()])
        });
        let mut status = TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(vec![TOKEN_AUDIENCE.into()]),
            user: Some(UserInfo {
                username: Some("system:serviceaccount:team:default".into()),
                extra: Some(extra.into()),
                ..UserInfo::default()
            }),
            error: None,
        };
        change(&mut status);
        let review = TokenReview { status: Some(status), ..TokenReview::default() };
        judge(&review, &pod).map_err(|error| error.to_string())
    }

    fn bind(status: &mut TokenReviewStatus, name: &str, value: &str) {
        let extra = status.user.as_mut().and_then(|user| user.extra.as_mut()).expect("extra");
        extra.insert(format!("authentication.kubernetes.io/{name}"), vec![value.into()]);
    }

    #[test]
    fn only_the_token_of_the_dialled_pod_is_taken() {
        assert_eq!(answer(|_| {}), Ok(()));
        let refused = |found: Result<(), String>, word: &str| {
            let error = found.expect_err("refused");
            assert!(error.contains(word), "{error}");
        };
        refused(answer(|status| status.authenticated = Some(false)), "refused");
        refused(answer(|status| status.audiences = None), "audience");
        refused(answer(|status| bind(status, "pod-uid", "u1")), "pod's uid is \"u1\"");
        refused(answer(|status| bind(status, "pod-name", "job-1")), "pod's name");
        refused(answer(|status| bind(status, "node-name", "n1")), "node");
        refused(
            answer(|status| {
                let user = status.user.as_mut().expect("a user");
                user.username = Some("system:serviceaccount:other:default".into());
            }),
            "namespace",
        );
        refused(answer(|status| status.user.as_mut().expect("a user").extra = None), "pod's name");
    }
}
