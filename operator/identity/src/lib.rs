//! Who the operator is to its workers, and which of the pods that knock are its own.
//!
//! ```text
//! Secret moejob-authority -> Keyring -> Authority (signs leaves), seals on pods
//! token of a pod -> public keys, else TokenReview -> Claims: the pod's uid, name and node,
//!     compared with what was dialled
//! ```

pub mod authority;
mod keyring;
mod keys;
mod review;

pub use keyring::{IdentityError, Keyring};
pub use review::{ReviewError, Reviewer};

/// Compares secrets by their hashes, which tells nobody how far a guess was right.
pub fn is_same(secret: &str, guess: &str) -> bool {
    blake3::hash(secret.as_bytes()) == blake3::hash(guess.as_bytes())
}
