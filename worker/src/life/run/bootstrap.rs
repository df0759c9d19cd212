//! What a worker is started with, and what it answers.

use super::RunError;
use crate::life::affinity::{self, Allowed, Share};
use crate::life::machine::{Machine, allowed};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Read};
use std::net::SocketAddr;
use std::path::PathBuf;

/// The owner's line is short: a name, a token and a certificate or two.
const BOOTSTRAP_BYTES_MAX: u64 = 64 << 10;

/// What a worker is started with: one line of JSON on its standard input.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bootstrap {
    pub worker: String,
    pub job_uid: String,
    /// PEM of the operator's authority.
    pub authority: String,
    /// Shown to the operator alone.
    pub token: String,
    /// In a pod: where the kubelet keeps a fresh token; read again for each leader.
    #[serde(skip)]
    pub token_file: Option<PathBuf>,
    /// In a pod: its own address. Without it a free port of the loopback is taken.
    #[serde(skip)]
    pub listen: Option<SocketAddr>,
    /// Among the workers of this machine.
    #[serde(default)]
    pub share: Share,
}

impl Bootstrap {
    pub(super) fn token(&self) -> io::Result<String> {
        match &self.token_file {
            None => Ok(self.token.clone()),
            Some(file) => Ok(std::fs::read_to_string(file)?.trim_end().to_string()),
        }
    }
}

/// The worker's answer: one line of JSON on its standard output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Announcement {
    pub port: u16,
}

/// The bootstrap line, up to its end.
///
/// # Errors
/// `Bootstrap`, `Parse`.
pub fn read_bootstrap(from: &mut impl BufRead) -> Result<Bootstrap, RunError> {
    let mut line = Vec::new();
    let read = from.take(BOOTSTRAP_BYTES_MAX).read_until(b'\n', &mut line);
    read.map_err(RunError::Bootstrap)?;
    if line.ends_with(b"\n") {
        return Ok(serde_json::from_slice(&line)?);
    }
    let found = format!("no end of line in {} bytes", line.len());
    Err(RunError::Bootstrap(io::Error::new(io::ErrorKind::UnexpectedEof, found)))
}

/// Before any other thread exists. A worker that cannot be bound is slower, and right.
pub(super) fn take_share(share: Share) -> Allowed {
    let all = allowed().unwrap_or_default();
    if share.of < 2 {
        return Allowed { share: all.clone(), all };
    }
    let bound = Machine::here().and_then(|machine| {
        let cpus = affinity::share(&machine, share);
        cpus.as_deref().map(|cpus| affinity::bind(None, cpus)).transpose().map(|_| cpus)
    });
    match bound {
        Ok(Some(cpus)) => tracing::info!(?cpus, "bound"),
        Ok(None) => {}
        Err(error) => tracing::warn!(%error, ?share, "cannot be bound to processors"),
    }
    Allowed { all, share: allowed().unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> String {
        match read_bootstrap(&mut text.as_bytes()) {
            Ok(bootstrap) => format!("{} of {}", bootstrap.worker, bootstrap.job_uid),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_bootstrap_is_one_line_of_known_fields() {
        let good = r#"{"worker":"w","jobUid":"j","authority":"PEM","token":"t"}"#;
        let cut = "cannot read the bootstrap line";
        let not = "the bootstrap line is not understood";
        for (text, expected) in [
            (format!("{good}\n"), "w of j"),
            (format!("{good}\nmore"), "w of j"),
            (good.to_string(), cut),
            (String::new(), cut),
            ("x".repeat(1 << 20), cut),
            ("\n".to_string(), not),
            ("{}\n".to_string(), not),
            (format!("{}\n", good.replace("token", "tokens")), not),
            (format!("{}\n", good.replace("token", "listen")), not),
        ] {
            assert_eq!(read(&text), expected, "{text:.80}");
        }
    }
}
