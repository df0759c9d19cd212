//! The profiles that there are, and the one that a job names.

use super::read::digest;
use super::{Backend, CPU, CUSTOM, GPU, Profile, Rdma, Setting, read, takes_devices_per_node};
use crate::keys::{FILE, Keys};
use crate::job::bytes_of;
use crate::problem::{Code, Problem, nearest, printable, quoted};
use crate::spec::NodesSpec;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Those of `manifests/profiles`, by name.
const SHIPPED: &[(&str, &str)] = &[
    (CPU, include_str!("../../../../manifests/profiles/cpu.yaml")),
    (GPU, include_str!("../../../../manifests/profiles/gpu.yaml")),
    ("nd-a100-v4", include_str!("../../../../manifests/profiles/nd-a100-v4.yaml")),
    ("nd-h100-v5", include_str!("../../../../manifests/profiles/nd-h100-v5.yaml")),
    ("nd-h200-v5", include_str!("../../../../manifests/profiles/nd-h200-v5.yaml")),
    ("ndm-a100-v4", include_str!("../../../../manifests/profiles/ndm-a100-v4.yaml")),
];
/// Of an admin's own; a ConfigMap has room for about 300.
const FILES_MAX: usize = 256;
/// A label's value, as the name stands in one.
const NAME_LEN_MAX: usize = 63;

/// What a job with the profile custom may set: how NCCL and UCX use links, and how much they say.
/// None of them loads a program or writes a file. A test compares it with the definition's.
pub const CUSTOM_ENV: &[&str] = &[
    "CUDA_DEVICE_ORDER",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CROSS_NIC",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_ADAPTIVE_ROUTING",
    "NCCL_IB_DISABLE",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_PCI_RELAXED_ORDERING",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_SL",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_IGNORE_CPU_AFFINITY",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_P2P_LEVEL",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_PROTO",
    "NCCL_PXN_DISABLE",
    "NCCL_SOCKET_FAMILY",
    "NCCL_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "UCX_TLS",
];

/// By name; those that could not be read have their problems in place of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Profiles {
    all: BTreeMap<String, Result<Profile, Vec<Problem>>>,
    fabric: Keys,
}

/// A file of an admin's own: what it is called, and its text.
pub type File = (String, Vec<u8>);

/// A profile of an admin's own that is none.
#[derive(Clone, Debug, PartialEq)]
pub struct Broken {
    pub file: String,
    pub problems: Vec<Problem>,
}

static OURS: LazyLock<Profiles> = LazyLock::new(|| {
    let read = |(name, text): &(&str, &str)| (name.to_string(), read(name, text.as_bytes()));
    Profiles { all: SHIPPED.iter().map(read).collect(), fabric: Keys::default() }
});

impl Default for Profiles {
    fn default() -> Profiles {
        Profiles::shipped().clone()
    }
}

impl Profiles {
    pub fn shipped() -> &'static Profiles {
        &OURS
    }

    /// With an admin's own, `NAME.yaml` each; one of a shipped name takes its place. What is wrong
    /// with some of them is told, and jobs that name them are refused: a shipped one never stands
    /// in for a broken one.
    pub fn with(&self, files: impl IntoIterator<Item = File>) -> (Profiles, Vec<Broken>) {
        let (mut all, mut broken) = (self.clone(), Vec::new());
        for (index, (file, text)) in files.into_iter().enumerate() {
            if file == FILE {
                match Keys::read(&text) {
                    Ok(keys) => all.fabric = keys,
                    Err(problems) => broken.push(Broken { file, problems }),
                }
                continue;
            }
            let name = file.strip_suffix(".yaml").or(file.strip_suffix(".yml")).unwrap_or(&file);
            let refused = refused_name(name, index);
            let profile = match refused {
                Some(problem) => Err(vec![problem]),
                None => read(name, &text),
            };
            if let Err(problems) = &profile {
                broken.push(Broken { file: file.clone(), problems: problems.clone() });
            }
            if !takes_devices_per_node(name) && name != CUSTOM && index < FILES_MAX {
                all.all.insert(name.to_string(), profile);
            }
        }
        (all, broken)
    }

    /// The labels that tell where nodes lie; `fabric.yaml` among the files may name others.
    pub fn fabric(&self) -> &Keys {
        &self.fabric
    }

    /// Those that can be used.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let good = self.all.iter().filter(|(_, profile)| profile.is_ok());
        good.map(|(name, _)| name.as_str())
    }

    pub fn get(&self, name: &str) -> Option<&Profile> {
        self.all.get(name)?.as_ref().ok()
    }

    /// The machine of a job; `custom` is read for profile custom alone, `devicesPerNode` for cpu
    /// and gpu.
    ///
    /// # Errors
    /// There is no such profile, or it is broken.
    pub fn choose(&self, nodes: &NodesSpec) -> Result<Profile, Box<Problem>> {
        let name = nodes.profile.as_deref().unwrap_or(CPU);
        if name == CUSTOM {
            return Ok(custom(nodes));
        }
        match self.all.get(name) {
            Some(Ok(profile)) => {
                let mut profile = profile.clone();
                if profile.devices_are_the_jobs() {
                    profile.ranks = nodes.devices_per_node.unwrap_or(1).max(1);
                    let cuda = profile.backend == Backend::Cuda;
                    profile.devices = if cuda { profile.ranks } else { 0 };
                    profile.nvlink_domain = if cuda { profile.ranks } else { 1 };
                }
                Ok(profile)
            }
            Some(Err(problems)) => Err(Box::new(self.broken(name, problems))),
            None => Err(Box::new(self.unknown(name))),
        }
    }

    fn unknown(&self, name: &str) -> Problem {
        let names: Vec<&str> = self.names().chain([CUSTOM]).collect();
        let advice = match nearest(name, names.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "choose one of them; --profiles and the ConfigMap moejob-profiles add your own"
                .to_string(),
        };
        Problem::new(Code::NotOneOf, "spec.nodes.profile")
            .found(quoted(name))
            .allowed(names.join(", "))
            .advice(advice)
    }

    fn broken(&self, name: &str, problems: &[Problem]) -> Problem {
        let first = problems.first().map(ToString::to_string).unwrap_or_default();
        let more = match problems.len() {
            0 | 1 => String::new(),
            count => format!(", and {} more", count - 1),
        };
        Problem::new(Code::NotOneOf, "spec.nodes.profile")
            .found(quoted(name))
            .allowed("a profile that can be read")
            .advice(format!("mend that profile: {}{more}", printable(&first)))
    }
}

fn refused_name(name: &str, index: usize) -> Option<Problem> {
    let known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let good = name.chars().all(known) && !name.starts_with('-') && !name.ends_with('-');
    let reserved = takes_devices_per_node(name) || name == CUSTOM;
    let (allowed, advice) = if index >= FILES_MAX {
        (format!("at most {FILES_MAX} profiles"), "delete some")
    } else if name.is_empty() || name.len() > NAME_LEN_MAX || !good {
        (format!("up to {NAME_LEN_MAX} of a-z, 0-9 and '-'"), "rename the file")
    } else if reserved {
        ("another name than cpu, gpu and custom".to_string(), "rename the file")
    } else {
        return None;
    };
    let problem = Problem::new(Code::Name, "").found(quoted(name));
    Some(problem.allowed(allowed).advice(advice))
}

/// The machine that the job itself describes.
fn custom(nodes: &NodesSpec) -> Profile {
    let typed = nodes.custom.clone().unwrap_or_default();
    let devices = typed.devices.unwrap_or(0);
    let backend = match devices {
        0 => Backend::Cpu,
        _ => typed.backend.map_or(Backend::Cuda, |of| of.0),
    };
    let said = json!(typed);
    let rdma = typed.rdma.map(|rdma| Rdma {
        resource: rdma.resource.unwrap_or_default(),
        count: rdma.count.unwrap_or(0),
    });
    let env = typed.env.unwrap_or_default().into_iter().map(|setting| Setting {
        name: setting.name.unwrap_or_default(),
        value: setting.value.unwrap_or_default(),
        why: String::new(),
    });
    Profile {
        name: CUSTOM.to_string(),
        backend,
        devices: if backend == Backend::Cuda { devices } else { 0 },
        ranks: devices.max(1),
        rank_memory: typed.device_memory.as_deref().and_then(bytes_of),
        nvlink_domain: typed.nvlink_domain.unwrap_or(devices.max(1)),
        node_selector: typed.node_selector.unwrap_or_default(),
        rdma,
        env: env.collect(),
        digest: digest(&said),
        ..Profile::default()
    }
}
