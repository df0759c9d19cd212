//! How long experts' tokens take to travel: an estimate of two ways to exchange them among many
//! GPUs, by latencies and rates alone (the alpha-beta model of Hockney).
//!
//! ```text
//! flat           each GPU sends a message to every other one
//! hierarchical   GPUs of a node exchange what is bound for GPUs of the same place on other nodes,
//!                then those of one place exchange whole pieces: Tutel's 2DH (section 3.4 of the
//!                paper, arXiv 2206.03382)
//! ```
//! A message over the network costs its sender time whatever its size. The flat way sends one to
//! each GPU elsewhere, the hierarchical one to each node: fewer and larger, for a copy more within
//! the node. Nothing is modelled of contention between switches, or of tokens that are bound for
//! several GPUs of a node. `docs/exchange.md` has the figures with what they assume.

/// Protocols of one link, each with its latency in seconds and its rate in bytes a second; the one
/// that is fastest for a size carries it.
#[derive(Clone, Debug)]
pub struct Link(pub Vec<(f64, f64)>);

impl Link {
    /// Seconds until `bytes` have arrived, one way.
    pub fn time(&self, bytes: f64) -> f64 {
        let times = self.0.iter().map(|(latency, rate)| latency + bytes / rate);
        times.fold(f64::INFINITY, f64::min)
    }
}

/// Machines of one kind, joined by a network without bottlenecks.
#[derive(Clone, Debug)]
pub struct Machines {
    pub name: &'static str,
    pub gpus_per_node: u32,
    /// Between two GPUs of a node.
    pub nvlink: Link,
    /// Between a GPU's adapter and one on another node, of one message.
    pub network: Link,
    /// Of the sender, for each message, in seconds.
    pub per_message: f64,
    /// At which a GPU rearranges rows in its own memory, read and written, in bytes a second.
    pub copy: f64,
}

impl Machines {
    /// NVLink by our own readings on two H200 (`docs/benchmarks/links_h200x2_2026-11-22.md`, NCCL
    /// in a graph): its three protocols are lines through them. One ConnectX-7 of 400 Gb/s a GPU.
    pub fn nd_h200_v5() -> Machines {
        Machines {
            name: "nd-h200-v5",
            gpus_per_node: 8,
            nvlink: Link(vec![(6.2e-6, 9.5e10), (9.0e-6, 2.03e11), (22.7e-6, 2.96e11)]),
            network: Link(vec![(8e-6, 4.6e10)]),
            per_message: 2e-6,
            copy: 1.9e12,
        }
    }

    /// NVLink 3 has half of the rate; one HDR adapter of 200 Gb/s a GPU.
    pub fn ndm_a100_v4() -> Machines {
        let half = |(latency, rate): &(f64, f64)| (*latency, rate / 2.0);
        let Machines { gpus_per_node, nvlink, per_message, .. } = Machines::nd_h200_v5();
        Machines {
            name: "ndm-a100-v4",
            gpus_per_node,
            nvlink: Link(nvlink.0.iter().map(half).collect()),
            network: Link(vec![(8e-6, 2.3e10)]),
            per_message,
            copy: 0.7e12,
        }
    }

    /// Seconds of `messages` of `bytes` each, by one adapter.
    fn sent(&self, messages: f64, bytes: f64) -> f64 {
        if messages <= 0.0 {
            return 0.0;
        }
        let first = self.network.time(bytes);
        let rate = self.network.0.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        first + self.per_message + (messages - 1.0) * (self.per_message + bytes / rate)
    }

    /// Seconds in which every one of `gpus` exchanges `bytes` of its own, divided evenly, with all.
    pub fn flat(&self, gpus: u32, bytes: f64) -> f64 {
        let (all, near) = (f64::from(gpus), f64::from(self.gpus_per_node.min(gpus)));
        let message = bytes / all;
        // NVLink and the adapter work at once.
        self.nvlink.time((near - 1.0) * message).max(self.sent(all - near, message))
    }

    /// The same, first within each node, then between GPUs of one place.
    pub fn hierarchical(&self, gpus: u32, bytes: f64) -> f64 {
        let (all, near) = (f64::from(gpus), f64::from(self.gpus_per_node.min(gpus)));
        let nodes = all / near;
        let within = self.nvlink.time(bytes * (near - 1.0) / near);
        if nodes <= 1.0 {
            return within;
        }
        // Rows are put in the order of places, and after the first exchange in that of nodes.
        let rearranged = 2.0 * (2.0 * bytes / self.copy);
        rearranged + within + self.sent(nodes - 1.0, bytes / nodes)
    }
}
