//! The certificate authority of the operator; of a local run, in memory alone.
//!
//! It signs two kinds of certificates: the operator's own, by which workers know the leader, and
//! leaves for workers, one an attempt, which name job, attempt and worker.

use moe_worker::gang::tls::{Identity, TlsError, Trust, leader_client};
use moejob_protocol::Down;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use x509_parser::prelude::{FromDer, X509Certificate};

/// Of a leaf. The stream renews it long before (`control::LEAF_RENEWED`).
const LEAF_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Of the authority and of the operator's certificate.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// Certificates are valid so long before they were made: clocks of nodes differ.
const BACKDATED: Duration = Duration::from_secs(2 * 3600);
/// A request for a P-256 key is a third of this.
const REQUEST_BYTES_MAX: usize = 2048;

#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("cannot make or sign a certificate")]
    Certificate(#[from] rcgen::Error),
    #[error("the operator's own certificate is not usable")]
    Tls(#[from] TlsError),
    #[error("the system gives no randomness")]
    Random(#[source] std::io::Error),
    #[error("a signing request of {found} bytes, at most {REQUEST_BYTES_MAX}")]
    RequestSize { found: usize },
    #[error("{found} cannot stand in a certificate's name")]
    Name { found: String },
    #[error("not a certificate")]
    Unreadable,
}

pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
    /// Itself and its successor, while it has one; PEM.
    with_successor: Option<String>,
    trust: Trust,
    client: Arc<ClientConfig>,
    /// Secrets are its keyed hashes of a counter.
    seed: [u8; 32],
    secrets: AtomicU64,
}

impl Authority {
    /// A new one, with the operator's certificate.
    ///
    /// # Errors
    /// When the system gives no randomness.
    pub fn new() -> Result<Authority, AuthorityError> {
        let (params, key) = root()?;
        let certificate = params.self_signed(&key)?.pem();
        Authority::of(Issuer::new(params, key), certificate)
    }

    /// One that was made before, with a new certificate for this operator.
    ///
    /// # Errors
    /// When the texts are not a certificate and its key.
    pub fn from_pem(certificate: &str, key: &str) -> Result<Authority, AuthorityError> {
        let issuer = Issuer::from_ca_cert_pem(certificate, KeyPair::from_pem(key)?)?;
        Authority::of(issuer, certificate.to_string())
    }

    fn of(
        issuer: Issuer<'static, KeyPair>,
        certificate: String,
    ) -> Result<Authority, AuthorityError> {
        let key = KeyPair::generate()?;
        let operator = leaf(&Identity::Operator, AUTHORITY_LIFETIME)?;
        let operator = operator.signed_by(&key, &issuer)?.pem();
        let client = leader_client(&operator, &key.serialize_pem())?;
        let seed = random().map_err(AuthorityError::Random)?;
        let (trust, secrets) = (Trust::from_pem(&certificate)?, AtomicU64::new(0));
        let with_successor = None;
        Ok(Authority { issuer, certificate, with_successor, trust, client, seed, secrets })
    }

    /// One that is to be followed by another: workers are told of it with their leaves.
    pub fn followed_by(self, successor: &str) -> Authority {
        Authority { with_successor: Some(format!("{}{successor}", self.certificate)), ..self }
    }

    /// What workers trust; PEM.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate
    }

    /// The leaf of `sign` as it is sent, with whom to trust from now on.
    ///
    /// # Errors
    /// See `sign`.
    pub fn leaf(
        &self,
        request: &str,
        job_uid: &str,
        attempt: u32,
        worker: &str,
    ) -> Result<Down, AuthorityError> {
        let certificate = self.sign(request, job_uid, attempt, worker)?;
        Ok(Down::Leaf { certificate, authority: self.with_successor.clone() })
    }

    /// How the operator shows itself to workers.
    pub fn client(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.client)
    }

    /// Whether this is a leaf of ours for that worker, in whichever attempt.
    pub fn names(&self, leaf: &CertificateDer, job_uid: &str, worker: &str) -> bool {
        matches!(self.trust.whose(leaf), Some(Identity::Worker { job_uid: job, worker: of, .. })
            if job == job_uid && of == worker)
    }

    /// 256 bits that nobody can guess, in hex; another at each call.
    pub fn new_secret(&self) -> String {
        let count = self.secrets.fetch_add(1, Ordering::Relaxed);
        blake3::keyed_hash(&self.seed, &count.to_le_bytes()).to_hex().to_string()
    }

    /// A leaf for the key of a worker's signing request; PEM. Of the request only the key counts:
    /// who it is for is the caller's knowledge.
    ///
    /// # Errors
    /// When the request is no request, or a name would not survive in the certificate.
    pub fn sign(
        &self,
        request: &str,
        job_uid: &str,
        attempt: u32,
        worker: &str,
    ) -> Result<String, AuthorityError> {
        if request.len() > REQUEST_BYTES_MAX {
            return Err(AuthorityError::RequestSize { found: request.len() });
        }
        let identity =
            Identity::Worker { job_uid: job_uid.into(), attempt, worker: worker.into() };
        let key = CertificateSigningRequestParams::from_pem(request)?.public_key;
        let params = leaf(&identity, LEAF_LIFETIME)?;
        Ok(params.signed_by(&key, &self.issuer)?.pem())
    }
}

/// Bytes that nobody can guess.
///
/// # Errors
/// When the system gives no randomness.
pub fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// The certificate and key of a new authority; PEM.
///
/// # Errors
/// When the system gives no randomness.
pub fn new_pem() -> Result<(String, String), AuthorityError> {
    let (params, key) = root()?;
    Ok((params.self_signed(&key)?.pem(), key.serialize_pem()))
}

/// The end of a certificate's life, in seconds since 1970.
///
/// # Errors
/// When the text is not a certificate.
pub fn ends_at(certificate: &str) -> Result<i64, AuthorityError> {
    let der = CertificateDer::from_pem_slice(certificate.as_bytes());
    let der = der.map_err(|_| AuthorityError::Unreadable)?;
    let (_, parsed) = X509Certificate::from_der(&der).map_err(|_| AuthorityError::Unreadable)?;
    Ok(parsed.validity().not_after.timestamp())
}

fn root() -> Result<(CertificateParams, KeyPair), AuthorityError> {
    let mut params = named("moejob authority", AUTHORITY_LIFETIME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    Ok((params, KeyPair::generate()?))
}

/// The key that a request asks a certificate for, after its signature has verified.
///
/// # Errors
/// When the request is no request.
pub fn requested_key(request: &str) -> Result<Vec<u8>, AuthorityError> {
    if request.len() > REQUEST_BYTES_MAX {
        return Err(AuthorityError::RequestSize { found: request.len() });
    }
    let request = CertificateSigningRequestParams::from_pem(request)?;
    Ok(rcgen::PublicKeyData::der_bytes(&request.public_key).to_vec())
}

fn leaf(identity: &Identity, lifetime: Duration) -> Result<CertificateParams, AuthorityError> {
    let uri = identity.to_string();
    let mut params = named("moejob", lifetime);
    match uri.as_str().try_into() {
        Ok(name) if Identity::parse(&uri).as_ref() == Some(identity) => {
            params.subject_alt_names = vec![SanType::URI(name)];
        }
        _ => return Err(AuthorityError::Name { found: uri }),
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
    Ok(params)
}

fn named(name: &str, lifetime: Duration) -> CertificateParams {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + lifetime).into();
    params
}

#[cfg(test)]
mod tests {
    use super::*;
    use moe_worker::gang::tls::WorkerKey;

    /// Its request is bounded before it is parsed, and the last byte of the bound is still good.
    #[test]
    fn a_request_of_the_largest_size_is_read_and_a_larger_one_is_not() {
        let authority = Authority::new().expect("an authority");
        let request = WorkerKey::generate().expect("a key").signing_request;
        let padded = |length: usize| request.clone() + &"\n".repeat(length - request.len());
        let largest = padded(REQUEST_BYTES_MAX);
        assert!(authority.sign(&largest, "j", 1, "w").is_ok());
        assert_eq!(requested_key(&largest).ok(), requested_key(&request).ok());
        let larger = padded(REQUEST_BYTES_MAX + 1);
        let is_size = |error: AuthorityError| {
            matches!(error, AuthorityError::RequestSize { found } if found == larger.len())
        };
        assert!(authority.sign(&larger, "j", 1, "w").is_err_and(is_size));
        assert!(requested_key(&larger).is_err_and(is_size));
    }

    /// Clocks of nodes differ by less than two hours, and a stolen leaf is worth a day.
    #[test]
    fn a_leaf_is_valid_for_a_day_and_for_clocks_that_are_late() {
        let authority = Authority::new().expect("an authority");
        let request = WorkerKey::generate().expect("a key").signing_request;
        let leaf = authority.sign(&request, "job", 1, "w").expect("a leaf");
        for (pem, days) in [(leaf.as_str(), 1), (authority.certificate_pem(), 365)] {
            let der = CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate");
            let (_, parsed) = X509Certificate::from_der(&der).expect("a certificate");
            let validity = parsed.validity();
            let [first, last] =
                [validity.not_before, validity.not_after].map(|time| time.timestamp());
            let span = last - first;
            assert_eq!(span, days * 24 * 3600 + 2 * 3600, "{days} days");
            assert_eq!(ends_at(pem).expect("an end"), last);
        }
    }
}
