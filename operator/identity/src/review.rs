//! Whose a token is: by the API server's public keys, else by its word.

use crate::keys::KeyRing;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::api::{Api, PostParams};
use moejob_plan::lead::PodIdentity;
use moejob_protocol::pod::TOKEN_AUDIENCE;
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
