//! What the plan never sees: an executor, a client of the API, a source of randomness.

#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "the test runs cargo")]

use std::process::Command;

/// What it stands on is in its own tree.
#[test]
fn the_plan_links_no_client_executor_or_randomness() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_string());
    let tree = Command::new(cargo)
        .args(["tree", "-p", "moejob-plan", "-e", "normal", "--prefix", "none", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).unwrap();
    let names: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(&"moejob-manifest") && names.contains(&"moejob-fabric"));
    let refused = [
        "tokio", "async-std", "smol", "futures", "kube", "kube-client", "kube-runtime", "hyper",
        "reqwest", "rand", "rand_core", "getrandom", "fastrand", "chrono", "moe-worker",
        "moejob-offline",
    ];
    for name in refused {
        assert!(!names.contains(&name), "moejob-plan depends on {name}");
    }
}
