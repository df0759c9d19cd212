//! Fake nodes for the test cluster: `tests/cluster/up --fake N` starts it.
//!
//!   fake_nodes NODES ORDERS FIRST-ADDRESS [--renew-s S] [--step-ms MS]
//!
//! It finds the API server by `KUBECONFIG`. See `moejob_tests::fake`.

use moejob_tests::fake::nodes::{Failure, Options, run};
use std::time::Duration;

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [nodes, orders, first, rest @ ..] = &words[..] else {
        return Err("usage: fake_nodes NODES ORDERS FIRST [--renew-s S] [--step-ms MS]".into());
    };
    let option = |name: &str, default: u64| {
        let at = rest.iter().position(|word| word == name);
        at.map_or(Ok(default), |at| rest.get(at + 1).map_or("", String::as_str).parse())
    };
    let options = Options {
        nodes: nodes.parse()?,
        nodes_a_rack: 16,
        renew: Duration::from_secs(option("--renew-s", 20)?),
        pace: Duration::from_millis(option("--step-ms", 100)?),
        orders: orders.into(),
        first: first.parse()?,
        gauge: Default::default(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async { run(kube::Client::try_default().await?, options).await })
}
