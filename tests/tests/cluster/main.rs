//! Tests against a real Kubernetes that `tests/cluster/up` has brought up. They share one cluster,
//! so they run one after the other (`--test-threads=1`): `tests/run cluster`.

mod bench;
mod crash;
mod engines;
mod gpus;
mod identity;
mod inside;
mod install;
mod jobs;
#[path = "../../../operator/tests/knock/mod.rs"]
mod knock;
mod lag;
mod life;
mod moe;
#[path = "../../../operator/manifest/tests/manifests/mod.rs"]
mod manifests;
mod queue;
mod recovery;
mod refused;
