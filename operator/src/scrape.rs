//! `/metrics`, for whoever may read it.
//!
//! ```text
//! connection -> TLS -> GET /metrics, Authorization: Bearer TOKEN
//!     -> TokenReview: whose is it?  -> SubjectAccessReview: may they get /metrics?  -> the figures
//! ```
//!
//! The names of jobs and namespaces and the course of their losses are nobody's business but of
//! those to whom the cluster gives them (`moejob-metrics` in manifests/users.yaml).

use crate::http::{self, Page, Place, Request};
use crate::metrics::Metrics;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::{Api, PostParams};
use moe_worker::failure::chain;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::PrivatePkcs8KeyDer;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

const PATH: &str = "/metrics";
/// Questions to the API server at once: anybody may knock. Workers' tokens have their own places.
const REVIEWS_MAX: usize = 2;

#[derive(Clone)]
pub struct Scrape {
    metrics: Metrics,
    client: Client,
    acceptor: TlsAcceptor,
    reviews: Arc<Semaphore>,
}

impl Scrape {
    /// With a certificate of its own, which nobody can verify: it hides tokens and figures from who
    /// only listens. `names` are the operator's in the cluster.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn new(metrics: Metrics, client: Client, names: Vec<String>) -> io::Result<Scrape> {
        let key = KeyPair::generate().map_err(io::Error::other)?;
        let mut params = CertificateParams::new(names).map_err(io::Error::other)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "moejob operator");
        let certificate = params.self_signed(&key).map_err(io::Error::other)?.der().clone();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map(|config| config.with_no_client_auth().with_single_cert(vec![certificate], key));
        let config = config.flatten().map_err(io::Error::other)?;
        let reviews = Arc::new(Semaphore::new(REVIEWS_MAX));
        Ok(Scrape { metrics, client, acceptor: TlsAcceptor::from(Arc::new(config)), reviews })
    }

    /// Answers until the process ends.
    ///
    /// # Errors
    /// When nothing can listen there.
    pub async fn serve(self, at: SocketAddr) -> io::Result<()> {
        http::serve(at, |stream, place| self.clone().answer(stream, place)).await
    }

    async fn answer(self, stream: TcpStream, mut place: Place) -> io::Result<()> {
        let mut stream = self.acceptor.accept(stream).await?;
        let Some(request) = place.read(&mut stream).await? else { return Ok(()) };
        let page = self.page(&request).await;
        http::write(&mut stream, page).await
    }

    async fn page(&self, request: &Request) -> Page {
        match (request.method.as_str(), request.path.as_str(), &request.token) {
            ("GET", PATH, Some(token)) => match self.refusal(token).await {
                Ok(None) => ("200 OK", self.metrics.text()),
                Ok(Some(refusal)) => refusal,
                Err(error) => {
                    tracing::debug!(error = chain(&error), "a scraper cannot be judged");
                    plain("503 Service Unavailable", "the API server does not say who this is")
                }
            },
            ("GET", PATH, None) => plain("401 Unauthorized", "Authorization: Bearer is needed"),
            ("GET", ..) => plain("404 Not Found", PATH),
            _ => plain("405 Method Not Allowed", "GET alone"),
        }
    }

    /// Why whoever has this token is told nothing, if that is so.
    async fn refusal(&self, token: &str) -> kube::Result<Option<Page>> {
        let _place = self.reviews.acquire().await;
        let params = PostParams::default();
        let review = TokenReview {
            spec: TokenReviewSpec { token: Some(token.to_string()), audiences: None },
            ..TokenReview::default()
        };
        let judged = Api::all(self.client.clone()).create(&params, &review).await?;
        let status = judged.status.unwrap_or_default();
        let Some(user) = status.user.filter(|_| status.authenticated == Some(true)) else {
            return Ok(Some(plain("401 Unauthorized", "the token is refused")));
        };
        let review = SubjectAccessReview { spec: question(&user), ..Default::default() };
        let judged = Api::all(self.client.clone()).create(&params, &review).await?;
        let may = judged.status.is_some_and(|status| status.allowed);
        let user = user.username.unwrap_or_default();
        let text = format!("{user} may not get the nonResourceURL {PATH}");
        Ok((!may).then(|| plain("403 Forbidden", &text)))
    }
}

fn plain(status: &'static str, text: &str) -> Page {
    (status, format!("{text}\n"))
}

fn question(user: &UserInfo) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: user.username.clone(),
        uid: user.uid.clone(),
        groups: user.groups.clone(),
        extra: user.extra.clone(),
        non_resource_attributes: Some(NonResourceAttributes {
            path: Some(PATH.to_string()),
            verb: Some("get".to_string()),
        }),
        resource_attributes: None,
    }
}
