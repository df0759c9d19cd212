//! Who is who on a socket: keys, certificates and the TLS configurations of both streams.
//!
//! ```text
//! control  leader: operator's certificate (authority)   worker: self-signed, proven by its token;
//!                                                       in an attempt its leaf, proven by that
//! data     both: a leaf with SAN moejob://JOBUID/ATTEMPT/WORKER (authority)
//! ```
//!
//! TLS 1.3 only, no resumption: each connection proves its identity anew. A worker's key is made
//! in its process and never leaves it.

use moejob_protocol::message::{CONTROL_VERSIONS, alpn};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use std::fmt;
use std::sync::Arc;
use x509_parser::prelude::{FromDer, GeneralName, ParsedExtension, X509Certificate};

/// The control stream in the version that all releases speak.
pub const ALPN_CONTROL: &[u8] = b"moejob-control/1";
pub const ALPN_DATA: &[u8] = b"moejob-data/1";
/// A further stream between two workers, for bulk data (`gang::comm`).
pub const ALPN_STRAND: &[u8] = b"moejob-strand/1";

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot make a key or a certificate")]
    Make(#[from] rcgen::Error),
    #[error("not a PEM certificate or key")]
    Pem(#[from] rustls::pki_types::pem::Error),
    #[error("TLS does not take this certificate or key")]
    Config(#[from] rustls::Error),
    #[error("the authority's certificate cannot verify anybody")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    #[error("the peer showed no certificate")]
    NoCertificate,
    #[error("the certificate names nobody of ours: {found}")]
    Identity { found: String },
    #[error("the certificate is for another key than this worker's")]
    OtherKey,
}

/// What the URI name of a certificate says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// The leader.
    Operator,
    /// A worker in one attempt of one job.
    Worker { job_uid: String, attempt: u32, worker: String },
}

const SCHEME: &str = "moejob://";

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Identity::Operator => write!(f, "{SCHEME}operator"),
            Identity::Worker { job_uid, attempt, worker } => {
                write!(f, "{SCHEME}{job_uid}/{attempt}/{worker}")
            }
        }
    }
}

impl Identity {
    /// The inverse of `to_string`, and of nothing else: what does not print as it was read is
    /// refused.
    pub fn parse(uri: &str) -> Option<Identity> {
        let path = uri.strip_prefix(SCHEME)?;
        let identity = match path.split('/').collect::<Vec<_>>()[..] {
            ["operator"] => Identity::Operator,
            [job_uid, attempt, worker] if !job_uid.is_empty() && !worker.is_empty() => {
                let attempt = attempt.parse().ok()?;
                Identity::Worker { job_uid: job_uid.into(), attempt, worker: worker.into() }
            }
            _ => return None,
        };
        (identity.to_string() == uri).then_some(identity)
    }

    /// The one URI name of a certificate. It says nothing about who signed it.
    ///
    /// # Errors
    /// `Identity` when there is none, several, or another kind of name.
    pub fn of(certificate: &CertificateDer) -> Result<Identity, TlsError> {
        let refuse = |found: String| TlsError::Identity { found };
        let (_, parsed) = X509Certificate::from_der(certificate)
            .map_err(|error| refuse(format!("unreadable ({error})")))?;
        let mut names = Vec::new();
        for extension in parsed.extensions() {
            if let ParsedExtension::SubjectAlternativeName(san) = extension.parsed_extension() {
                names.extend(san.general_names.iter());
            }
        }
        match names[..] {
            [GeneralName::URI(uri)] => {
                Identity::parse(uri).ok_or_else(|| refuse(format!("{uri:?}")))
            }
            ref other => Err(refuse(format!("{} names", other.len()))),
        }
    }

    /// The identity of the other side of a finished handshake.
    ///
    /// # Errors
    /// `NoCertificate`, `Identity`.
    pub fn of_peer(certificates: Option<&[CertificateDer]>) -> Result<Identity, TlsError> {
        Identity::of(certificates.and_then(<[_]>::first).ok_or(TlsError::NoCertificate)?)
    }
}

/// Whom a worker trusts: the operator's authority, and its successor when there is one.
#[derive(Clone, Debug)]
pub struct Trust(Arc<RootCertStore>);

impl Trust {
    /// # Errors
    /// `Pem` and `Config` when the text is not one or more certificates.
    pub fn from_pem(authority: &str) -> Result<Trust, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
            roots.add(certificate?)?;
        }
        if roots.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        Ok(Trust(Arc::new(roots)))
    }

    /// Whether it is a certificate of this authority's that is valid now; PEM.
    pub fn has_signed(&self, leaf: &str) -> bool {
        let leaf = CertificateDer::from_pem_slice(leaf.as_bytes());
        leaf.is_ok_and(|leaf| self.whose(&leaf).is_some())
    }

    /// Whom a certificate names that the authority has signed and that is valid now. That the
    /// other side has its key is for the handshake to show.
    pub fn whose(&self, leaf: &CertificateDer) -> Option<Identity> {
        is_signed(leaf, &self.0, &[], UnixTime::now()).ok()?;
        Identity::of(leaf).ok()
    }
}

fn is_signed(
    leaf: &CertificateDer,
    roots: &RootCertStore,
    intermediates: &[CertificateDer],
    now: UnixTime,
) -> Result<(), rustls::Error> {
    let algorithms = provider().signature_verification_algorithms.all;
    let leaf = ParsedCertificate::try_from(leaf)?;
    rustls::client::verify_server_cert_signed_by_trust_anchor(
        &leaf,
        roots,
        intermediates,
        now,
        algorithms,
    )
}

/// A worker's key, which lives as long as its process.
pub struct WorkerKey {
    key: KeyPair,
    self_signed: CertificateDer<'static>,
    /// PEM, for `Hello`.
    pub signing_request: String,
}

impl fmt::Debug for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerKey")
    }
}

impl WorkerKey {
    /// # Errors
    /// `Make` when the system gives no randomness.
    pub fn generate() -> Result<WorkerKey, TlsError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "moejob worker");
        let signing_request = params.serialize_request(&key)?.pem()?;
        let self_signed = params.self_signed(&key)?.der().clone();
        Ok(WorkerKey { key, self_signed, signing_request })
    }

    fn private(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.serialize_der()).into()
    }

    /// The listener's side of a control stream: only the authority's certificates get through,
    /// and the caller then checks for `Identity::Operator`.
    ///
    /// # Errors
    /// `Config`, `Verifier`.
    pub fn control_server(&self, trust: &Trust) -> Result<Arc<ServerConfig>, TlsError> {
        server(trust, vec![self.self_signed.clone()], self.private(), alpn(CONTROL_VERSIONS))
    }

    /// Both sides of the data streams of one attempt, and what the listener shows to leaders from
    /// now on, from the leaf that the leader sent.
    ///
    /// # Errors
    /// `OtherKey` and `Identity` when the leaf is not a worker's for this key.
    pub fn attempt(&self, trust: &Trust, leaf: &str) -> Result<AttemptTls, TlsError> {
        let leaf = CertificateDer::from_pem_slice(leaf.as_bytes())?;
        let identity = Identity::of(&leaf)?;
        let Identity::Worker { job_uid, attempt, worker } = identity else {
            return Err(TlsError::Identity { found: identity.to_string() });
        };
        if public_key(&leaf).as_deref() != Some(self.key.der_bytes()) {
            return Err(TlsError::OtherKey);
        }
        let (data, strand) = (ALPN_DATA.to_vec(), ALPN_STRAND.to_vec());
        let control = server(trust, vec![leaf.clone()], self.private(), alpn(CONTROL_VERSIONS))?;
        let both = vec![data.clone(), strand.clone()];
        let server = server(trust, vec![leaf.clone()], self.private(), both)?;
        let dials = |name: Vec<u8>| {
            let verifier = Expect::Authority(Arc::clone(&trust.0));
            client(verifier, vec![leaf.clone()], self.private(), vec![name])
        };
        let (client, strand) = (dials(data)?, dials(strand)?);
        Ok(AttemptTls { job_uid, attempt, worker, control, server, client, strand })
    }
}

/// The TLS configurations of one attempt, and whom its leaf names.
#[derive(Clone, Debug)]
pub struct AttemptTls {
    pub job_uid: String,
    pub attempt: u32,
    pub worker: String,
    pub control: Arc<ServerConfig>,
    pub server: Arc<ServerConfig>,
    pub client: Arc<ClientConfig>,
    /// Of who dials a strand.
    pub strand: Arc<ClientConfig>,
}

/// The leader's side of a control stream. It takes any worker's self-signed certificate: the
/// worker proves itself by its token, which it sends to nobody but the operator.
///
/// # Errors
/// `Pem`, `Config`.
pub fn leader_client(certificate: &str, key: &str) -> Result<Arc<ClientConfig>, TlsError> {
    let certificate = CertificateDer::from_pem_slice(certificate.as_bytes())?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())?;
    client(Expect::SelfSigned, vec![certificate], key, alpn(CONTROL_VERSIONS))
}

/// Nobody is looked up by name: certificates name identities, not hosts.
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from("worker.moejob.internal").expect("a valid DNS name")
}

/// The bits of the public key in a certificate.
pub fn public_key(certificate: &CertificateDer) -> Option<Vec<u8>> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(parsed.public_key().subject_public_key.data.to_vec())
}

fn server(
    trust: &Trust,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    alpn: Vec<Vec<u8>>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(&trust.0), provider()).build()?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    config.alpn_protocols = alpn;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn client(
    expect: Expect,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    alpn: Vec<Vec<u8>>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let algorithms = provider().signature_verification_algorithms;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(WorkerVerifier { expect, algorithms }))
        .with_client_auth_cert(chain, key)?;
    config.alpn_protocols = alpn;
    config.enable_sni = false;
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Verifies the certificate that a worker's listener presents.
#[derive(Debug)]
struct WorkerVerifier {
    expect: Expect,
    algorithms: WebPkiSupportedAlgorithms,
}

#[derive(Debug)]
enum Expect {
    /// Possession of the key alone; see `leader_client`.
    SelfSigned,
    /// A chain to the authority. The caller checks the identity after the handshake.
    Authority(Arc<RootCertStore>),
}

impl ServerCertVerifier for WorkerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if let Expect::Authority(roots) = &self.expect {
            is_signed(end_entity, roots, intermediates, now)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_read_as_they_are_printed_and_no_other_way() {
        let worker = |job_uid: &str, attempt, worker: &str| {
            Some(Identity::Worker { job_uid: job_uid.into(), attempt, worker: worker.into() })
        };
        for (uri, expected) in [
            ("moejob://operator", Some(Identity::Operator)),
            ("moejob://j/3/w", worker("j", 3, "w")),
            ("moejob://operator/3/w", worker("operator", 3, "w")),
            ("moejob://j/03/w", None),
            ("moejob://j/+3/w", None),
            ("moejob://j/-1/w", None),
            ("moejob://j/4294967296/w", None),
            ("moejob://j//w", None),
            ("moejob:///3/w", None),
            ("moejob://j/3/", None),
            ("moejob://j/3/w/x", None),
            ("moejob://j/3", None),
            ("moejob://", None),
            ("moejob://operators", None),
            ("Moejob://operator", None),
            ("https://operator", None),
        ] {
            assert_eq!(Identity::parse(uri), expected, "{uri}");
        }
    }

    #[test]
    fn trust_needs_a_certificate() {
        for text in ["", "garbage", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"]
        {
            assert!(Trust::from_pem(text).is_err(), "{text:?}");
        }
    }
}
