//! The text of a profile -> what it says, or every problem at once with its place.

use crate::words::several;
use super::schema::schema;
use super::{
    Backend, Flops, Limit, Line, LinkFigures, Numa, Profile, Rdma, Setting, TopologyFile,
    takes_devices_per_node,
};
use crate::job::bytes_of;
use crate::problem::{Code, Problem, quoted};
use crate::read::Shaped;
use crate::resources::thousandths;
use moejob_protocol::canonical::canonical_hash;
use moejob_protocol::cpus::cpu_list;
use moejob_protocol::topology::Pci;
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};

/// Variables that the worker itself reads.
const OURS: &[&str] = &["MOEJOB_", "MOE_"];
/// Azure's own checks warn within 5% above their limit.
const WARN_ABOVE: f64 = 1.05;

/// As it is typed.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Typed {
    backend: Backend,
    devices: Json,
    memory: Option<String>,
    reserved: Option<String>,
    nvlink_domain: Option<u32>,
    #[serde(default)]
    selector: BTreeMap<String, String>,
    #[serde(default)]
    numa: Vec<TypedNuma>,
    rdma: Option<Rdma>,
    #[serde(default)]
    resources: BTreeMap<String, String>,
    #[serde(default)]
    env: Vec<Setting>,
    pci: Option<Pci>,
    topology_file: Option<String>,
    #[serde(default)]
    expect: BTreeMap<String, TypedLimit>,
    links: Option<TypedLinks>,
    flops: Option<Flops>,
    price: Option<f64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TypedLinks {
    all_to_all: Vec<TypedLine>,
    ring: Vec<TypedLine>,
    network: TypedLine,
    message_us: f64,
    #[serde(rename = "copyGBps")]
    copy_gbps: f64,
}

#[derive(Deserialize)]
struct TypedLine {
    us: f64,
    #[serde(rename = "GBps")]
    gbps: f64,
}

#[derive(Deserialize)]
struct TypedNuma {
    cpus: String,
    #[serde(default)]
    gpus: Vec<String>,
    #[serde(default)]
    hcas: Vec<String>,
}

#[derive(Deserialize)]
struct TypedLimit {
    fail: f64,
    warn: Option<f64>,
}

/// The profile `name`, which its file is called.
///
/// # Errors
/// Everything that is wrong with it, in the order of its lines.
pub fn read(name: &str, bytes: &[u8]) -> Result<Profile, Vec<Problem>> {
    let shaped = Shaped::read(bytes, &schema());
    let mut problems: Vec<Problem> = shaped.problems.iter().map(of_profiles).collect();
    let typed = shaped.json.clone().filter(|_| problems.is_empty());
    let typed = typed.and_then(|json| serde_json::from_value::<Typed>(json).ok());
    let Some(typed) = typed else {
        if problems.is_empty() {
            // The walk lets nothing pass that the types refuse; a test tries.
            problems.push(Problem::new(Code::WrongKind, "").found("no profile"));
        }
        return Err(problems);
    };
    let digest = digest(shaped.json.as_ref().unwrap_or(&Json::Null));
    let mut judge = Judge { name, problems };
    let profile = judge.profile(typed, digest);
    if judge.problems.is_empty() {
        return Ok(profile);
    }
    let mut problems = shaped.locate(judge.problems);
    problems.sort_by(|a, b| (a.place, a.code, &a.path).cmp(&(b.place, b.code, &b.path)));
    Err(problems)
}

/// A hash of all that is said, whatever its order and its comments. Figures of estimates and prices
/// are left out: no pod and no rank depends on them.
pub(super) fn digest(said: &Json) -> String {
    canonical_hash(said, &["about", "why", "links", "flops", "price"])[..16].to_string()
}

/// The reader's own words are of manifests.
fn of_profiles(problem: &Problem) -> Problem {
    let mut problem = problem.clone();
    let (allowed, advice) = match problem.code {
        Code::Documents => ("one profile", "write one profile a file"),
        Code::TooLarge => (&*problem.allowed.clone(), "give the file of a profile"),
        _ => return problem,
    };
    (problem.allowed, problem.advice) = (allowed.to_string(), advice.to_string());
    problem
}

struct Judge<'a> {
    name: &'a str,
    problems: Vec<Problem>,
}

impl Judge<'_> {
    fn refuse(&mut self, code: Code, path: &str, said: (String, &str, &str)) {
        let (found, allowed, advice) = said;
        let problem = Problem::new(code, path).found(found).allowed(allowed).advice(advice);
        self.problems.push(problem);
    }

    fn profile(&mut self, typed: Typed, digest: String) -> Profile {
        let devices = self.devices(&typed.devices);
        let numa = self.numa(&typed.numa, devices);
        let memory = self.bytes("memory", typed.memory.as_deref());
        let reserved = self.bytes("reserved", typed.reserved.as_deref());
        if memory.is_some() && reserved >= memory {
            let found = quoted(typed.reserved.as_deref().unwrap_or_default());
            let advice = "a rank has the difference of the two";
            self.refuse(Code::Quantity, "reserved", (found, "less than memory", advice));
        }
        let needs_memory = typed.backend == Backend::Cuda && !takes_devices_per_node(self.name);
        if typed.memory.is_none() && needs_memory {
            let said = ("nothing".to_string(), "the memory of a device, as 80Gi", "add `memory`");
            self.refuse(Code::Missing, "memory", said);
        }
        self.settings(&typed.env);
        self.quantities(&typed);
        let topology_file = self.topology_file(typed.topology_file.as_deref(), &numa);
        let expect = self.expect(&typed.expect);
        let links = typed.links.map(|links| self.links(links));
        let cuda = typed.backend == Backend::Cuda;
        Profile {
            name: self.name.to_string(),
            backend: typed.backend,
            devices: if cuda { devices } else { 0 },
            ranks: devices,
            rank_memory: memory.map(|memory| memory.saturating_sub(reserved.unwrap_or(0))),
            nvlink_domain: typed.nvlink_domain.unwrap_or(devices),
            node_selector: typed.selector,
            rdma: typed.rdma,
            requests: typed.resources,
            env: typed.env,
            numa,
            pci: typed.pci,
            topology_file,
            expect,
            links,
            flops: typed.flops,
            price: typed.price,
            digest,
        }
    }

    fn devices(&mut self, typed: &Json) -> u32 {
        match (typed.as_u64(), takes_devices_per_node(self.name)) {
            (Some(devices), false) if (1..=64).contains(&devices) => devices as u32,
            (None, true) => 1,
            (Some(devices), false) => {
                let said = (format!("`{devices}`"), "1 to 64", "it is the GPUs of one node");
                self.refuse(Code::OutOfRange, "devices", said);
                1
            }
            (Some(devices), true) => {
                let advice = "the job says it, by nodes.devicesPerNode";
                self.refuse(Code::NotOneOf, "devices", (format!("`{devices}`"), "auto", advice));
                1
            }
            (None, false) => {
                let allowed = "a number; auto is for the profiles cpu and gpu";
                let said = ("`auto`".to_string(), allowed, "write how many GPUs a node has");
                self.refuse(Code::NotOneOf, "devices", said);
                1
            }
        }
    }

    fn bytes(&mut self, path: &str, typed: Option<&str>) -> Option<u64> {
        let typed = typed?;
        let bytes = bytes_of(typed);
        if bytes.is_none() {
            let allowed = "a quantity of bytes above 0, such as 80Gi";
            let advice = "use one of the suffixes Ki Mi Gi Ti k M G T";
            self.refuse(Code::Quantity, path, (quoted(typed), allowed, advice));
        }
        bytes
    }

    fn numa(&mut self, typed: &[TypedNuma], devices: u32) -> Vec<Numa> {
        let (mut nodes, mut seen) = (Vec::new(), BTreeSet::new());
        let mut processors = BTreeSet::new();
        for (index, node) in typed.iter().enumerate() {
            let path = format!("numa[{index}]");
            let cpus = cpu_list(&node.cpus).unwrap_or_default();
            if cpus.is_empty() {
                let allowed = "processors, as 0-23 or 0-23,96-119";
                let said = (quoted(&node.cpus), allowed, "numactl --hardware lists them");
                self.refuse(Code::Quantity, &format!("{path}.cpus"), said);
            }
            let again = cpus.iter().find(|cpu| !processors.insert(**cpu));
            if let Some(cpu) = again {
                let said = (format!("processor {cpu} again"), "each in one node", "name it once");
                self.refuse(Code::Duplicate, &format!("{path}.cpus"), said);
            }
            for (field, all) in [("gpus", &node.gpus), ("hcas", &node.hcas)] {
                for (at, pci) in all.iter().enumerate() {
                    self.pci(pci, &format!("{path}.{field}[{at}]"), &mut seen);
                }
            }
            let (gpus, hcas) = (node.gpus.clone(), node.hcas.clone());
            nodes.push(Numa { cpus, gpus, hcas });
        }
        let gpus: usize = typed.iter().map(|node| node.gpus.len()).sum();
        if gpus > 0 && gpus != devices as usize {
            let allowed = format!("as many as devices, which is {devices}");
            let advice = "name each GPU once, or none";
            self.refuse(Code::Nodes, "numa", (several(gpus, "GPU"), &allowed, advice));
        }
        nodes.sort_by(|a, b| a.cpus.cmp(&b.cpus));
        nodes
    }

    fn pci(&mut self, typed: &str, path: &str, seen: &mut BTreeSet<String>) {
        if !is_pci(typed) {
            let allowed = "a PCI address in small letters, as 0001:00:00.0";
            let said = (quoted(typed), allowed, "lspci -D lists them; quote it");
            self.refuse(Code::Quantity, path, said);
        } else if !seen.insert(typed.to_string()) {
            let said = (format!("{} again", quoted(typed)), "each once", "delete one of the two");
            self.refuse(Code::Duplicate, path, said);
        }
    }

    fn settings(&mut self, env: &[Setting]) {
        let mut seen = BTreeSet::new();
        for (index, setting) in env.iter().enumerate() {
            let path = format!("env[{index}].name");
            let name = &setting.name;
            let letters = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
            let good = name.chars().all(letters) && !name.starts_with(|c: char| c.is_numeric());
            if !good || OURS.iter().any(|ours| name.starts_with(ours)) {
                let allowed = "A-Z, 0-9 and _, not beginning with MOE_ or MOEJOB_";
                self.refuse(Code::Pod, &path, (quoted(name), allowed, "choose another name"));
            } else if !seen.insert(name) {
                let said = (format!("{} again", quoted(name)), "each once", "delete one of them");
                self.refuse(Code::Duplicate, &path, said);
            }
        }
    }

    fn quantities(&mut self, typed: &Typed) {
        for (name, quantity) in &typed.resources {
            if thousandths(quantity).is_none_or(|amount| amount <= 0) {
                let allowed = "a quantity above 0, as 64 or 512Gi";
                let said = (quoted(quantity), allowed, "write it as Kubernetes does, in quotes");
                self.refuse(Code::Quantity, &format!("resources.{name}"), said);
            }
        }
        let is_qualified = |name: &str| {
            let parts = name.split_once('/');
            parts.is_some_and(|(domain, name)| !domain.is_empty() && !name.is_empty())
        };
        if let Some(rdma) = typed.rdma.as_ref().filter(|rdma| !is_qualified(&rdma.resource)) {
            let allowed = "an extended resource, as rdma/ib";
            let advice = "kubectl describe node lists them under Allocatable";
            self.refuse(Code::Pod, "rdma.resource", (quoted(&rdma.resource), allowed, advice));
        }
    }

    fn topology_file(&mut self, typed: Option<&str>, numa: &[Numa]) -> Option<TopologyFile> {
        let allowed = "generated, or a path that begins with /";
        match typed? {
            "generated" if numa.iter().any(|node| !node.gpus.is_empty()) => {
                Some(TopologyFile::Generated)
            }
            "generated" => {
                let said = ("`generated`".to_string(), "numa with gpus beside it", "add `numa`");
                self.refuse(Code::Missing, "topologyFile", said);
                None
            }
            path if path.starts_with('/') => Some(TopologyFile::Path(path.to_string())),
            other => {
                let said = (quoted(other), allowed, "the path is one of the worker's image");
                self.refuse(Code::Path, "topologyFile", said);
                None
            }
        }
    }

    fn links(&mut self, typed: TypedLinks) -> LinkFigures {
        for (name, lines) in [("allToAll", &typed.all_to_all), ("ring", &typed.ring)] {
            if lines.is_empty() {
                let said = ("no line".to_string(), "1 or more", "write { us: 6, GBps: 95 }");
                self.refuse(Code::Missing, &format!("links.{name}"), said);
            }
        }
        let line = |typed: &TypedLine| Line { seconds: typed.us * 1e-6, rate: typed.gbps * 1e9 };
        LinkFigures {
            all_to_all: typed.all_to_all.iter().map(line).collect(),
            ring: typed.ring.iter().map(line).collect(),
            network: line(&typed.network),
            message_seconds: typed.message_us * 1e-6,
            copy_rate: typed.copy_gbps * 1e9,
        }
    }

    fn expect(&mut self, typed: &BTreeMap<String, TypedLimit>) -> BTreeMap<String, Limit> {
        for (name, limit) in typed {
            if let Some(warn) = limit.warn.filter(|warn| *warn < limit.fail) {
                let allowed = format!("fail or more, which is {}", limit.fail);
                let said = (format!("`{warn}`"), &*allowed, "what fails has been warned of before");
                self.refuse(Code::OutOfRange, &format!("expect.{name}.warn"), said);
            }
        }
        let limit = |limit: &TypedLimit| Limit {
            fail: limit.fail,
            warn: limit.warn.unwrap_or(limit.fail * WARN_ABOVE),
        };
        typed.iter().map(|(name, typed)| (name.clone(), limit(typed))).collect()
    }
}

/// `0001:00:00.0`
fn is_pci(text: &str) -> bool {
    let hex = |text: &str, length: usize| {
        let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        text.len() == length && text.bytes().all(digit)
    };
    let parts: Vec<&str> = text.split([':', '.']).collect();
    matches!(&parts[..], [domain, bus, device, function]
        if hex(domain, 4) && hex(bus, 2) && hex(device, 2) && hex(function, 1))
        && text.len() == 12
        && text.as_bytes()[10] == b'.'
}
