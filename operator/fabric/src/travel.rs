//! How long experts' tokens and gradients take between GPUs: an estimate by latencies and rates
//! alone (the alpha-beta model of Hockney), from the figures that a profile says of its links.
//!
//! ```text
//! flat           each GPU sends a message to every other one
//! hierarchical   GPUs of a node exchange what is bound for GPUs of the same place on other nodes,
//!                then those of one place exchange whole pieces: Tutel's 2DH (section 3.4 of the
//!                paper, arXiv 2206.03382)
//! ring           a reduce-scatter or an all-gather
//! ```
//! GPUs of a job do not exchange so: each gathers all tokens of its group, by a ring or along
//! rails ([`Machines::along_rails`]), and sums go back likewise.
//!
//! A message over the network costs its sender time whatever its size. The flat way sends one to
//! each GPU elsewhere, the hierarchical one to each node: fewer and larger, for a copy more within
//! the node. Nothing is modelled of contention between switches, or of tokens that are bound for
//! several GPUs of a node. `docs/exchange.md` has the figures with what they assume.

use moejob_manifest::job::Job;
use moejob_manifest::profile::{Backend, Line, LinkFigures, Profile};
use moejob_manifest::words::aligned;
use moejob_protocol::config::Exchange;
use moejob_protocol::layout::Layout;
use moejob_protocol::rails::Rails;
use serde::Serialize;

const MIB: f64 = 1048576.0;

/// Machines of one kind, joined by a network without bottlenecks.
#[derive(Clone, Copy, Debug)]
pub struct Machines<'a> {
    /// At least 1.
    pub gpus_per_node: u32,
    pub figures: &'a LinkFigures,
}

/// What one GPU sends in one stage of an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Bytes to GPUs of its own node.
    pub near: f64,
    /// Messages to GPUs of other nodes.
    pub messages: f64,
    /// Bytes of all of them.
    pub far: f64,
}

/// Seconds until `bytes` have arrived by the line that is fastest for them.
pub fn fastest(lines: &[Line], bytes: f64) -> f64 {
    let times = lines.iter().map(|line| line.seconds + bytes / line.rate);
    times.fold(f64::INFINITY, f64::min)
}

impl<'a> Machines<'a> {
    /// None where the profile says nothing of its links.
    pub fn of(profile: &'a Profile) -> Option<Machines<'a>> {
        let figures = profile.links.as_ref()?;
        Some(Machines { gpus_per_node: profile.ranks.max(1), figures })
    }

    /// Seconds of one stage for a GPU with this load. NVLink and its adapter work at once.
    pub fn stage(&self, load: Load) -> f64 {
        let LinkFigures { all_to_all, network, message_seconds, .. } = self.figures;
        let near = if load.near > 0.0 { fastest(all_to_all, load.near) } else { 0.0 };
        let posted = load.messages * message_seconds;
        let far = network.seconds + posted + load.far / network.rate;
        if load.messages > 0.0 { near.max(far) } else { near }
    }

    /// Seconds in which every one of `gpus` exchanges `bytes` of its own, divided evenly, with all.
    pub fn flat(&self, gpus: u32, bytes: f64) -> f64 {
        let (all, near) = self.counts(gpus);
        let message = bytes / all;
        let messages = all - near;
        self.stage(Load { near: (near - 1.0) * message, messages, far: messages * message })
    }

    /// The same, first within each node, then between GPUs of one place.
    pub fn hierarchical(&self, gpus: u32, bytes: f64) -> f64 {
        let (all, near) = self.counts(gpus);
        let others = (all / near).ceil() - 1.0;
        let within = self.stage(Load { near: bytes * (near - 1.0) / near, ..Load::default() });
        if others <= 0.0 {
            return within;
        }
        // Rows are put in the order of places, and after the first stage in that of nodes. Each
        // time all of them are read and written.
        let rearranged = 2.0 * (2.0 * bytes / self.figures.copy_rate);
        let far = bytes * others / (others + 1.0);
        rearranged + within + self.stage(Load { near: 0.0, messages: others, far })
    }

    /// Seconds of a reduce-scatter of `bytes` that every one of `gpus` has, or of an all-gather
    /// after which every one has them: NCCL's ring, which enters and leaves a node by all of its
    /// adapters.
    pub fn ring(&self, gpus: u32, bytes: f64) -> f64 {
        let (all, near) = self.counts(gpus);
        if all <= 1.0 {
            return 0.0;
        }
        let LinkFigures { ring, network, message_seconds, .. } = self.figures;
        let travels = bytes * (all - 1.0) / all;
        let within = if near > 1.0 { fastest(ring, travels) } else { 0.0 };
        let hops = (all / near).ceil() - 1.0;
        if hops <= 0.0 {
            return within;
        }
        let rate = near * network.rate;
        within.max(hops * (network.seconds + message_seconds) + travels / rate)
    }

    /// Seconds in which every GPU of a group gets `bytes` of all of its tokens: first those of the
    /// GPUs of its place on other nodes, then what its neighbours have got so. Sums go back in as
    /// long, without the additions.
    pub fn along_rails(&self, rails: Rails, bytes: f64) -> f64 {
        let messages = (rails.nodes - 1) as f64;
        let between = Load { near: 0.0, messages, far: along_rail(rails, bytes) };
        self.stage(between) + self.ring(rails.places as u32, bytes)
    }

    /// Seconds in which a GPU adds up the sums of all nodes of its own tokens, of `bytes` of all.
    pub(crate) fn added(&self, rails: Rails, bytes: f64) -> f64 {
        // Each addition reads two rows and writes one.
        3.0 * along_rail(rails, bytes) / self.figures.copy_rate
    }

    /// Ranks in all, and those of a node.
    fn counts(&self, gpus: u32) -> (f64, f64) {
        (f64::from(gpus), f64::from(self.gpus_per_node.min(gpus)))
    }
}

/// How the expert groups of `layout` exchange, and where there is something to choose, why. The job
/// may say it, else between GPUs it is flat, with what is expected of the other way. Processors
/// send each row to those that need it, once to each node.
pub fn choice(job: &Job, layout: &Layout) -> (Exchange, Option<String>) {
    let (ranks, ep) = (job.profile.ranks.max(1), layout.mesh.ep);
    // A group of one node has nothing to send to others.
    if ranks.is_multiple_of(ep) {
        return (Exchange::Flat, None);
    }
    let Some(rails) = Rails::of(&layout.mesh, ranks) else {
        let uneven = "not every node has as many ranks of an expert group".to_string();
        let asked = job.exchange == Some(Exchange::Hierarchical);
        return (Exchange::Flat, asked.then_some(uneven));
    };
    let said = "parallelism.exchange says so".to_string();
    if let Some(exchange) = job.exchange {
        return (exchange, Some(said));
    }
    if job.profile.backend == Backend::Cpu {
        return match rails.places {
            1 => (Exchange::Flat, None),
            _ => (Exchange::Hierarchical, Some("a token crosses to a node once".to_string())),
        };
    }
    let Some(machines) = Machines::of(&job.profile) else {
        return (Exchange::Flat, None);
    };
    let training = &job.training;
    let tokens = u64::from(training.micro_batch_size) * u64::from(training.sequence_length);
    let (element, dim) = (training.precision.element(), u64::from(job.model.hidden_size));
    // One GPU of the group on each node: there is nothing to pass on.
    if rails.places == 1 {
        return (Exchange::Flat, None);
    }
    let formats = training.compute.formats(element, job.model.slices().per_token);
    let out = [formats.tokens, formats.gradients].map(|of| of.bytes(dim));
    let ways = [out[0], out[1], formats.token_bytes(dim)[1]];
    let ways = ways.map(|row| (tokens * row) as f64 * f64::from(ep));
    let [flat, rails] = gathered(&machines, rails, ways).map(|seconds| seconds * 1e3);
    let why = if rails < flat {
        // Nobody has measured rails between nodes of GPUs, so they are for who asks.
        format!(
            "{flat:.2} ms a layer expected; `exchange: hierarchical` {rails:.2}, not measured on \
             GPUs"
        )
    } else {
        format!("{flat:.2} ms a layer expected, else {rails:.2}")
    };
    (Exchange::Flat, Some(why))
}

/// The rails along which the expert groups of `layout` exchange, if they do so.
pub fn rails(job: &Job, layout: &Layout) -> Option<Rails> {
    let along = choice(job, layout).0 == Exchange::Hierarchical;
    Rails::of(&layout.mesh, job.profile.ranks.max(1)).filter(|_| along)
}

/// Of `bytes` of all tokens of a group those that a GPU gets from the others of its rail.
fn along_rail(rails: Rails, bytes: f64) -> f64 {
    let (others, all) = ((rails.nodes - 1) as f64, (rails.nodes * rails.places) as f64);
    others * bytes / all
}

/// Seconds of a layer, flat and along rails, with so many bytes of rows of all: out in forward, out
/// in backward, and back in each.
fn gathered(machines: &Machines, rails: Rails, [forward, backward, back]: [f64; 3]) -> [f64; 2] {
    let all = |of: &dyn Fn(f64) -> f64| of(forward) + of(backward) + 2.0 * of(back);
    let flat = all(&|bytes| machines.ring((rails.nodes * rails.places) as u32, bytes));
    let two = all(&|bytes| machines.along_rails(rails, bytes));
    [flat, two + 2.0 * machines.added(rails, back)]
}

/// Two ways to exchange, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Estimate {
    /// What each GPU sends, to all others together.
    pub mebibytes: u32,
    pub flat_seconds: f64,
    pub hierarchical_seconds: f64,
}

/// Estimates for so many GPUs of one kind of machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    pub profile: String,
    pub gpus: u32,
    pub estimates: Vec<Estimate>,
}

/// A row a profile and a number of GPUs.
///
/// # Errors
/// A profile says nothing of its links, or its nodes cannot be filled by so many GPUs.
pub fn rows(profiles: &[&Profile], gpus: &[u32], mebibytes: &[u32]) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for profile in profiles {
        let name = &profile.name;
        let Some(machines) = Machines::of(profile) else {
            return Err(format!("profile {name} says nothing of its links: add `links` to it"));
        };
        for gpus in gpus {
            let node = machines.gpus_per_node;
            if *gpus > node && gpus % node != 0 {
                let why = format!("a node of {name} has {node}, so a multiple of it");
                return Err(format!("{gpus} GPUs: {why}"));
            }
            let estimate = |mebibytes: &u32| {
                let bytes = f64::from(*mebibytes) * MIB;
                Estimate {
                    mebibytes: *mebibytes,
                    flat_seconds: machines.flat(*gpus, bytes),
                    hierarchical_seconds: machines.hierarchical(*gpus, bytes),
                }
            };
            let estimates = mebibytes.iter().map(estimate).collect();
            rows.push(Row { profile: name.clone(), gpus: *gpus, estimates });
        }
    }
    Ok(rows)
}

/// Milliseconds in columns; every row has estimates of the same sizes.
pub fn text(rows: &[Row]) -> String {
    let sizes = rows.first().map(|row| &row.estimates[..]).unwrap_or_default();
    let sizes = sizes.iter().map(|of| format!("{} MiB", of.mebibytes));
    let heads = ["machines".to_string(), "GPUs".to_string()].into_iter().chain(sizes).collect();
    let cell = |of: &Estimate| {
        let (flat, two) = (of.flat_seconds * 1e3, of.hierarchical_seconds * 1e3);
        format!("{flat:.2} / {two:.2} ({:.2}x)", flat / two)
    };
    let cells = |row: &Row| -> Vec<String> {
        let first = [row.profile.clone(), row.gpus.to_string()];
        first.into_iter().chain(row.estimates.iter().map(cell)).collect()
    };
    let lines: Vec<Vec<String>> = std::iter::once(heads).chain(rows.iter().map(cells)).collect();
    aligned(&lines, 0..0)
}
