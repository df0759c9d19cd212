//! Why a worker ends, and errors as people read them.

use moejob_kernels::{KernelError, Lack};
use serde::{Deserialize, Serialize};

/// Why a worker ends; its message and advice reach the user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// 1 failed, 2 the user's input, 3 data or checkpoint refused, 75 fenced or try again.
    pub exit_code: i32,
    pub message: String,
    /// What to do next.
    pub advice: String,
    /// Steps done, where it failed in one: every attempt does that one alike.
    #[serde(default)]
    pub step: Option<u64>,
}

impl Failure {
    pub fn new(exit_code: i32, message: impl Into<String>, advice: impl Into<String>) -> Failure {
        Failure { exit_code, message: message.into(), advice: advice.into(), step: None }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        if !self.advice.is_empty() {
            write!(f, "\n  {}", self.advice)?;
        }
        Ok(())
    }
}

/// An error with its sources, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

/// What to do about a device that cannot be made.
pub(crate) fn advice_on(error: &KernelError) -> &'static str {
    match error.lack() {
        Some(Lack::Device) => {
            "end what else uses the GPU, lower training.microBatchSize, or set recompute, offload: \
             host, or momentDtype: bf16"
        }
        Some(Lack::Host) => {
            "free memory of the machine, give the container more of it or let it lock more \
             (`ulimit -l unlimited`), or set training.offload: none"
        }
        None if error.is_device() => {
            "give the container all GPUs that spec.nodes.profile says, or name the profile of this \
             machine; `moejob doctor` in it tells what it was given"
        }
        None => "free memory or use fewer threads",
    }
}
