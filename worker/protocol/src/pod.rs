//! What the operator writes into a worker's pod and the worker reads there.

/// Names the file to which rank 0 writes a trace of a few steps of each attempt.
pub const ENV_TRACE: &str = "MOEJOB_TRACE";
/// The worker's name: that of its pod.
pub const ENV_WORKER: &str = "MOEJOB_WORKER";
pub const ENV_JOB_UID: &str = "MOEJOB_JOB_UID";
/// PEM of the operator's authority, and of its successor when there is one. Public.
pub const ENV_AUTHORITY: &str = "MOEJOB_AUTHORITY";
/// Of profiles with `rdma`: the PCI addresses of the cards that NCCL may use, separated by commas;
/// empty where the profile lists none.
pub const ENV_HCAS: &str = "MOEJOB_HCAS";
/// The pod's own address, by the downward API.
pub const ENV_ADDRESS: &str = "MOEJOB_POD_IP";
/// Of the worker's listener, at the pod's address.
pub const PORT: u16 = 7777;
/// Whom the projected service-account token is for.
pub const TOKEN_AUDIENCE: &str = "moejob.dev";
/// The volume of the token.
pub const TOKEN_FOLDER: &str = "/var/run/secrets/moejob.dev";
pub const TOKEN_FILE: &str = "/var/run/secrets/moejob.dev/token";
