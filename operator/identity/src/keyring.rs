//! What the operator keeps in its Secret: the authority, its successor, the key of seals.

use crate::authority::{self, AuthorityError};
use crate::is_same;
use k8s_openapi::ByteString;
use std::collections::BTreeMap;
use std::sync::Arc;

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
        self.hash(&format!("{namespace}/{job_uid}/{pod}"))
    }

    /// Names the key of the seals without telling it: a record says by which its pods were sealed.
    pub fn id(&self) -> String {
        self.hash("moejob.dev name of this key")[..16].to_string()
    }

    /// Whether the seal of a pod is one of ours.
    pub fn is_sealed(&self, seal: &str, namespace: &str, job_uid: &str, pod: &str) -> bool {
        is_same(&self.seal(namespace, job_uid, pod), seal)
    }

    fn hash(&self, text: &str) -> String {
        let key = blake3::Hash::from_hex(&self.seal).expect("checked when it was read");
        blake3::keyed_hash(key.as_bytes(), text.as_bytes()).to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for wrong in ["", &seal[3..], &seal[..seal.len() - 1]] {
            assert!(!keyring.is_sealed(wrong, "a", "job", "pod"), "{wrong}");
        }
    }
}
