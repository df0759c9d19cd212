//! The rules that a spec must keep, all of them tried. The CEL beside `spec.rs` says the same where
//! one object alone is enough.

use crate::cost;
use crate::crd::NAME_LEN_MAX;
use crate::devices;
use crate::job::{Job, bytes_of, millis_of};
use crate::pod;
use crate::problem::{Code, Problem, quoted};
use crate::router;
use crate::profile::{self, CPU, CUSTOM};
use crate::spec::{MoeJobSpec, RecomputeName, SourceSpec, VolumeSpec};
use crate::steps;
use crate::workspace;
use moejob_protocol::config::Tokenizer;

/// Fields of `spec.recovery` that are durations, and the least milliseconds of each.
pub(crate) const DURATIONS: [(&str, u64); 6] = [
    ("heartbeatTimeout", 1_000),
    ("stepTimeout", 1_000),
    ("window", 1_000),
    ("growthInterval", 0),
    ("orphanTimeout", 0),
    ("gangTimeout", 1_000),
];

/// Problems and warnings. Rules about a field in `broken` say nothing: it has its problem already.
pub fn judge(spec: &MoeJobSpec, job: &Job, broken: &[String]) -> (Vec<Problem>, Vec<Problem>) {
    let (problems, warnings) = (Vec::new(), Vec::new());
    let mut rules = Rules { spec, job, broken, problems, warnings };
    rules.name();
    rules.nodes();
    rules.model_fields();
    rules.attention();
    rules.experts();
    rules.router();
    rules.layers();
    rules.data();
    rules.batch();
    rules.recompute();
    rules.devices();
    rules.ranks();
    rules.optimizer();
    rules.paths();
    rules.recovery();
    rules.image();
    rules.volumes();
    rules.cost();
    if let Some(template) = &spec.pod_template {
        rules.problems.extend(pod::problems(template));
    }
    rules.warnings.extend(steps::warnings(spec, job));
    rules.warnings.extend(devices::warnings(spec));
    (rules.problems, rules.warnings)
}

struct Rules<'a> {
    spec: &'a MoeJobSpec,
    job: &'a Job,
    broken: &'a [String],
    problems: Vec<Problem>,
    warnings: Vec<Problem>,
}

impl Rules<'_> {
    fn refuse(&mut self, problem: Problem, also: &[&str]) {
        let touches = |path: &str| {
            self.broken.iter().any(|broken| {
                broken == path
                    || path.starts_with(&format!("{broken}."))
                    || broken.starts_with(&format!("{path}."))
            })
        };
        if !touches(&problem.path) && !also.iter().any(|path| touches(path)) {
            self.problems.push(problem);
        }
    }

    fn name(&mut self) {
        let name = &self.job.name;
        let letter = name.starts_with(|c: char| c.is_ascii_lowercase());
        let known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let good = letter && name.chars().all(known) && !name.ends_with('-');
        if !good || name.len() > NAME_LEN_MAX {
            // A letter of another alphabet looks like one of ours: show which it is.
            let plain = |c: char| match c.is_ascii() {
                true => c.to_string(),
                false => c.escape_unicode().to_string(),
            };
            let problem = Problem::new(Code::Name, "metadata.name")
                .found(quoted(&name.chars().map(plain).collect::<String>()))
                .allowed(format!(
                    "up to {NAME_LEN_MAX} of a-z, 0-9 and '-', beginning with a letter"
                ))
                .advice("names of pods are made of it");
            self.refuse(problem, &[]);
        }
    }

    fn nodes(&mut self) {
        let Some(nodes) = &self.spec.nodes else { return };
        let (min, max) = (self.job.nodes.min, self.job.nodes.max);
        if min > max {
            let problem = Problem::new(Code::Nodes, "spec.nodes.min")
                .found(format!("`{min}`"))
                .allowed(format!("at most nodes.max, which is {max}"))
                .advice("lower min or raise max");
            self.refuse(problem, &["spec.nodes.max"]);
        }
        let name = nodes.profile.as_deref().unwrap_or(CPU);
        let custom = name == CUSTOM;
        if custom != nodes.custom.is_some() {
            let (found, advice) = match custom {
                true => ("nothing", "describe the machine: custom: { devices, deviceMemory }"),
                false => ("fields", "delete it, or set profile: custom"),
            };
            let problem = Problem::new(Code::Nodes, "spec.nodes.custom")
                .found(found)
                .allowed("fields with profile custom, and only then")
                .advice(advice);
            self.refuse(problem, &["spec.nodes.profile"]);
        }
        if let Some(devices) = nodes.devices_per_node
            && !profile::takes_devices_per_node(name)
        {
            let problem = Problem::new(Code::Nodes, "spec.nodes.devicesPerNode")
                .found(format!("`{devices}`"))
                .allowed("with the profiles cpu and gpu alone")
                .advice("delete it: the profile says how many devices a node has");
            self.refuse(problem, &["spec.nodes.profile"]);
        }
        if let Some(memory) = nodes.custom.as_ref().and_then(|c| c.device_memory.as_deref())
            && bytes_of(memory).is_none()
        {
            let problem = Problem::new(Code::Quantity, "spec.nodes.custom.deviceMemory")
                .found(quoted(memory))
                .allowed("a quantity of bytes above 0, such as 80Gi")
                .advice("use one of the suffixes Ki Mi Gi Ti k M G T");
            self.refuse(problem, &[]);
        }
        if let Some(rdma) = nodes.custom.as_ref().and_then(|custom| custom.rdma.as_ref()) {
            self.rdma(rdma.resource.as_deref().unwrap_or_default());
        }
        if let Some(topology) = &nodes.topology
            && topology.prefer.is_some() == topology.require.is_some()
        {
            self.one_of("spec.nodes.topology", "prefer or require", topology.prefer.is_some());
        }
    }

    fn rdma(&mut self, resource: &str) {
        let known = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let small = |c: char| known(c) && c != '_' && !c.is_ascii_uppercase();
        let good = resource.split_once('/').is_some_and(|(domain, name)| {
            let filled = !domain.is_empty() && !name.is_empty();
            filled && domain.chars().all(small) && name.chars().all(known)
        });
        if !good {
            let problem = Problem::new(Code::Pod, "spec.nodes.custom.rdma.resource")
                .found(quoted(resource))
                .allowed("an extended resource, as rdma/ib")
                .advice("kubectl describe node lists them under Allocatable");
            self.refuse(problem, &[]);
        }
    }

    fn one_of(&mut self, path: &str, names: &str, several: bool) {
        let found = if several { "more than one" } else { "none" };
        let problem = Problem::new(Code::OneOf, path)
            .found(found)
            .allowed(format!("one of {names}"))
            .advice("keep exactly one");
        self.refuse(problem, &[]);
    }

    /// Without a preset the dimensions are needed.
    fn model_fields(&mut self) {
        let Some(typed) = &self.spec.model else { return };
        if typed.preset.is_some() {
            return;
        }
        let experts = typed.experts.clone().unwrap_or_default();
        let model = &self.job.model;
        // What is not typed may stand in the weights to start from; nowhere, it was made zero.
        let needed = [
            ("spec.model.hiddenSize", typed.hidden_size, model.hidden_size),
            ("spec.model.numHiddenLayers", typed.num_hidden_layers, model.num_hidden_layers),
            ("spec.model.numAttentionHeads", typed.num_attention_heads, model.num_attention_heads),
            ("spec.model.experts.count", experts.count, model.experts.count),
            ("spec.model.experts.perToken", experts.per_token, model.experts.per_token),
            (
                "spec.model.experts.intermediateSize",
                experts.intermediate_size,
                model.experts.intermediate_size,
            ),
        ];
        for (path, value, filled) in needed {
            if value.is_none() && filled == 0 {
                let problem = Problem::new(Code::Missing, path)
                    .found("nothing")
                    .allowed("a number, or model.preset")
                    .advice("add it, or name a preset such as tiny");
                self.refuse(problem, &["spec.model.preset"]);
            }
        }
    }

    fn attention(&mut self) {
        let model = &self.job.model;
        let (heads, kv) = (model.num_attention_heads, model.num_key_value_heads);
        if heads == 0 || kv == 0 || model.hidden_size == 0 {
            return;
        }
        if heads % kv != 0 {
            let problem = Problem::new(Code::Divides, "spec.model.numKeyValueHeads")
                .found(format!("`{kv}`"))
                .allowed(format!("a divisor of numAttentionHeads, which is {heads}"))
                .advice("each key head serves equally many query heads");
            self.refuse(problem, &["spec.model.numAttentionHeads"]);
        }
        let typed = self.spec.model.as_ref();
        let dim = typed.and_then(|model| model.head_dim);
        let given = self.job.preset.is_some() || dim.is_some();
        if !given && !model.hidden_size.is_multiple_of(heads) {
            let problem = Problem::new(Code::Divides, "spec.model.hiddenSize")
                .found(format!("`{}`", model.hidden_size))
                .allowed(format!("a multiple of numAttentionHeads, which is {heads}"))
                .advice("choose a multiple, or set headDim");
            self.refuse(problem, &["spec.model.numAttentionHeads", "spec.model.headDim"]);
        } else if !model.head_dim.is_multiple_of(2) || model.head_dim == 0 {
            let problem = Problem::new(Code::Divides, "spec.model.headDim")
                .found(format!("`{}`", model.head_dim))
                .allowed("an even number")
                .advice("rotary positions turn pairs of numbers");
            let also = ["spec.model.hiddenSize", "spec.model.numAttentionHeads"];
            self.refuse(problem, &also);
        }
    }

    fn experts(&mut self) {
        let (experts, router) = (&self.job.model.experts, &self.job.model.router);
        if experts.count == 0 {
            return;
        }
        if experts.per_token > experts.count {
            let problem = Problem::new(Code::Experts, "spec.model.experts.perToken")
                .found(format!("`{}`", experts.per_token))
                .allowed(format!("at most experts.count, which is {}", experts.count))
                .advice("a token goes to different experts");
            self.refuse(problem, &["spec.model.experts.count"]);
        }
        let slices = experts.slices;
        if !experts.intermediate_size.is_multiple_of(slices) {
            let width = experts.intermediate_size;
            let problem = Problem::new(Code::Divides, "spec.parallelism.expertSlices")
                .found(format!("`{slices}`"))
                .allowed(format!("a divisor of experts.intermediateSize, which is {width}"))
                .advice("slices of an expert are equally wide");
            self.refuse(problem, &["spec.model.experts.intermediateSize"]);
        }
        // Without expert parallelism nothing is gained by them.
        let ranks = self.job.nodes.max.saturating_mul(self.job.profile.ranks);
        let alone = match self.job.expert_parallel {
            Some(1) => Some(("with parallelism.expert 1", "raise parallelism.expert")),
            None if ranks == 1 => Some(("with one rank", "raise the number of ranks")),
            _ => None,
        };
        if let Some((with, advice)) = alone.filter(|_| slices > 1 && self.spec.nodes.is_some()) {
            let problem = Problem::new(Code::Ranks, "spec.parallelism.expertSlices")
                .found(format!("`{slices}` {with}"))
                .allowed("1")
                .advice(format!("each rank has all slices of each expert then: {advice}"));
            self.refuse(problem, &["spec.parallelism.expert", "spec.nodes.max"]);
        }
        if experts.count % router.groups != 0 {
            let problem = Problem::new(Code::Divides, "spec.model.router.groups")
                .found(format!("`{}`", router.groups))
                .allowed(format!("a divisor of experts.count, which is {}", experts.count))
                .advice("groups have equally many experts");
            self.refuse(problem, &["spec.model.experts.count"]);
        }
        if router.topk_groups > router.groups {
            let problem = Problem::new(Code::Experts, "spec.model.router.topkGroups")
                .found(format!("`{}`", router.topk_groups))
                .allowed(format!("at most router.groups, which is {}", router.groups))
                .advice("lower it");
            self.refuse(problem, &["spec.model.router.groups"]);
        } else if experts.per_token <= experts.count
            && router.topk_groups * (experts.count / router.groups) < experts.per_token
        {
            let problem = Problem::new(Code::Experts, "spec.model.router.topkGroups")
                .found(format!("`{}`", router.topk_groups))
                .allowed("so many groups that they hold experts.perToken experts")
                .advice("raise it");
            let also = ["spec.model.experts.perToken", "spec.model.router.groups"];
            self.refuse(problem, &also);
        }
    }

    fn router(&mut self) {
        let typed = self.spec.model.as_ref().and_then(|model| model.router.as_ref());
        if self.job.model.experts.count == 0 {
            return;
        }
        for problem in router::problems(&self.job.model, typed) {
            let also = ["spec.model.router.kind", "spec.model.experts.perToken"];
            self.refuse(problem, &also);
        }
        self.warnings.extend(router::warnings(&self.job.model, &self.job.training));
    }

    fn layers(&mut self) {
        let model = &self.job.model;
        let layers = model.num_hidden_layers;
        let at = "spec.model.denseLayers";
        if let Some(layer) = model.dense_layers.iter().find(|layer| **layer >= layers) {
            let problem = Problem::new(Code::Layers, at)
                .found(format!("layer {layer}"))
                .allowed(format!("layers below numHiddenLayers, which is {layers}"))
                .advice("layers are counted from 0");
            self.refuse(problem, &["spec.model.numHiddenLayers"]);
        }
        if model.dense_layers.windows(2).any(|pair| pair[0] == pair[1]) {
            let problem = Problem::new(Code::Layers, at)
                .found("a layer twice")
                .allowed("each layer once")
                .advice("delete one of the two");
            self.refuse(problem, &[]);
        }
        if !model.dense_layers.is_empty() && model.dense_layers.len() as u32 >= layers {
            let problem = Problem::new(Code::Layers, at)
                .found("all layers")
                .allowed("at least one layer with experts")
                .advice("this trains mixture-of-experts models");
            self.refuse(problem, &["spec.model.numHiddenLayers"]);
        }
        if !model.dense_layers.is_empty() && model.dense_intermediate_size == 0 {
            let problem = Problem::new(Code::Missing, "spec.model.denseIntermediateSize")
                .found("nothing")
                .allowed("the width of the dense layers")
                .advice("add it");
            self.refuse(problem, &[]);
        }
    }

    fn data(&mut self) {
        let Some(data) = &self.spec.data else { return };
        let names = SourceSpec::NAMES;
        if let Some(train) = &data.train {
            let given = train.source().count() + usize::from(train.mixture.is_some());
            self.exactly_one("spec.data.train", &format!("{names}, mixture"), given);
            for (index, part) in train.mixture.iter().flatten().enumerate() {
                let path = format!("spec.data.train.mixture[{index}]");
                self.exactly_one(&path, names, part.source().count());
            }
        }
        if let Some(from) = data.validation.as_ref().and_then(|of| of.from.as_ref()) {
            self.exactly_one("spec.data.validation.from", names, from.count());
        }
        self.vocabulary();
    }

    fn exactly_one(&mut self, path: &str, names: &str, given: usize) {
        if given != 1 {
            self.one_of(path, names, given > 1);
        }
    }

    fn vocabulary(&mut self) {
        let (vocabulary, data) = (self.job.model.vocab_size, &self.job.data);
        let bytes = data.tokenizer == Tokenizer::Bytes && data.tokenizes();
        if bytes && vocabulary < 256 {
            let problem = Problem::new(Code::Vocabulary, "spec.model.vocabSize")
                .found(format!("`{vocabulary}`"))
                .allowed("256 or more with the tokenizer bytes")
                .advice("raise it to 256");
            self.refuse(problem, &["spec.data.tokenizer"]);
        }
        if !bytes && vocabulary == 0 {
            let problem = Problem::new(Code::Vocabulary, "spec.model.vocabSize")
                .found("nothing")
                .allowed("the size of the tokenizer's vocabulary")
                .advice("add it");
            let also = ["spec.model.preset", "spec.data.tokenizer", "spec.data.train"];
            self.refuse(problem, &also);
        }
        if let Some(end) = data.end_of_document.filter(|end| vocabulary > 0 && *end >= vocabulary) {
            let problem = Problem::new(Code::Vocabulary, "spec.data.endOfDocument")
                .found(format!("`{end}`"))
                .allowed(format!("an id below model.vocabSize, which is {vocabulary}"))
                .advice("name the tokenizer's token for the end of a text, or raise vocabSize");
            self.refuse(problem, &["spec.model.vocabSize", "spec.data.tokenizer"]);
        }
    }

    fn batch(&mut self) {
        let training = &self.job.training;
        let (global, micro) = (training.global_batch_size, training.micro_batch_size);
        if self.spec.training.is_some() && (micro == 0 || global % micro != 0) {
            let problem = Problem::new(Code::Batch, "spec.training.globalBatchSize")
                .found(format!("`{global}`"))
                .allowed(format!("a multiple of microBatchSize, which is {micro}"))
                .advice("a step is made of whole micro-batches");
            self.refuse(problem, &["spec.training.microBatchSize"]);
        }
    }

    fn recompute(&mut self) {
        let Some(training) = &self.spec.training else { return };
        if training.recompute_layers.is_some() && training.recompute != Some(RecomputeName::Full) {
            let problem = Problem::new(Code::Batch, "spec.training.recomputeLayers")
                .found("recomputeLayers without recompute: full")
                .allowed("recompute: full, or no recomputeLayers")
                .advice("only whole layers are computed again together");
            self.refuse(problem, &["spec.training.recompute"]);
        }
    }

    fn devices(&mut self) {
        let also = ["spec.nodes.profile", "spec.nodes.custom", "spec.training.precision"];
        for problem in devices::problems(self.spec, self.job) {
            self.refuse(problem, &also);
        }
    }

    /// dp ranks need a micro-batch each, and ep ranks an expert each.
    fn ranks(&mut self) {
        let (job, nodes) = (self.job, &self.job.nodes);
        if self.spec.training.is_none() || self.spec.nodes.is_none() {
            return;
        }
        let micro_batches = job.training.global_batch_size / job.training.micro_batch_size.max(1);
        let ranks = nodes.max.saturating_mul(job.profile.ranks);
        let also = [
            "spec.nodes.profile",
            "spec.nodes.custom",
            "spec.nodes.devicesPerNode",
            "spec.training.globalBatchSize",
            "spec.training.microBatchSize",
        ];
        if ranks > micro_batches {
            let problem = Problem::new(Code::Ranks, "spec.nodes.max")
                .found(format!("`{}`, which makes {ranks} ranks", nodes.max))
                .allowed(format!("as many ranks as a step has micro-batches, {micro_batches}"))
                .advice("lower nodes.max, raise globalBatchSize or lower microBatchSize");
            return self.refuse(problem, &also);
        }
        let Some(ep) = job.expert_parallel else { return };
        let path = "spec.parallelism.expert";
        let slices = job.model.slices();
        let (most, of) = match slices.each {
            1 => ("experts.count", "expert"),
            _ => ("experts.count times expertSlices", "slice of one"),
        };
        if slices.count > 0 && ep > slices.count {
            let problem = Problem::new(Code::Ranks, path)
                .found(format!("`{ep}`"))
                .allowed(format!("at most {most}, which is {}", slices.count))
                .advice(format!(
                    "each of those ranks holds at least one {of}; auto is a good choice"
                ));
            let also = ["spec.model.experts.count", "spec.parallelism.expertSlices"];
            return self.refuse(problem, &also);
        }
        let mut sizes = nodes.min..=nodes.max;
        if nodes.min <= nodes.max && !sizes.any(|n| devices::divides(ep, n * job.profile.ranks)) {
            let problem = Problem::new(Code::Ranks, path)
                .found(format!("`{ep}`"))
                .allowed("a divisor of the ranks of at least one number of nodes from min to max")
                .advice("auto is a good choice");
            self.refuse(problem, &["spec.nodes.min", "spec.nodes.max", "spec.nodes.profile"]);
        }
    }

    fn optimizer(&mut self) {
        let training = &self.job.training;
        let Some(typed) = &self.spec.training else { return };
        if let Some(schedule) = &typed.schedule {
            let given =
                [schedule.constant.is_some(), schedule.linear.is_some(), schedule.cosine.is_some()];
            let given = given.iter().filter(|given| **given).count();
            if given != 1 {
                self.one_of("spec.training.schedule", "constant, linear, cosine", given > 1);
                return;
            }
        }
        for (problem, also) in steps::problems(training) {
            self.refuse(problem, &[also]);
        }
    }

    fn paths(&mut self) {
        for (at, path) in workspace::paths(self.job) {
            if let Some(found) = workspace::address(path) {
                self.refuse(workspace::no_path(&at, found), &[]);
            }
        }
    }

    fn recovery(&mut self) {
        let typed = serde_json::to_value(&self.spec.recovery).unwrap_or_default();
        for (name, least) in DURATIONS {
            let Some(text) = typed[name].as_str() else { continue };
            let auto = name == "stepTimeout" && text == "auto";
            if auto || millis_of(text).is_some_and(|millis| millis >= least) {
                continue;
            }
            let or = if name == "stepTimeout" { ", or auto" } else { "" };
            let problem = Problem::new(Code::Duration, format!("spec.recovery.{name}"))
                .found(quoted(text))
                .allowed(format!("a duration of {least}ms to 720h{or}"))
                .advice("write it as 500ms, 3s, 10m or 1h");
            self.refuse(problem, &[]);
        }
    }

    /// Of what would take too much to plan. The fields that a bound is made of have, where they are
    /// broken, their own problem.
    fn cost(&mut self) {
        let parts = ["spec.model", "spec.nodes", "spec.training"];
        for problem in cost::problems(self.job) {
            self.refuse(problem, &parts);
        }
    }

    fn image(&mut self) {
        let Some(image) = &self.spec.image else { return };
        let known = |c: char| c.is_ascii_alphanumeric() || "./:@_-".contains(c);
        if image.is_empty() || image.contains("://") || !image.chars().all(known) {
            let problem = Problem::new(Code::Image, "spec.image")
                .found(quoted(image))
                .allowed("registry/name:tag or registry/name@sha256:...")
                .advice("name the image as in a pod");
            return self.refuse(problem, &[]);
        }
        let last = image.rsplit('/').next().unwrap_or_default();
        let tag = last.split_once(':').map(|(_, tag)| tag);
        if !image.contains('@') && tag.is_none_or(|tag| tag == "latest") {
            self.warnings.push(
                Problem::new(Code::Image, "spec.image")
                    .found(quoted(image))
                    .allowed("an image with a digest or a version")
                    .advice("workers that start later may run another image"),
            );
        }
    }

    fn volumes(&mut self) {
        let volumes: &[VolumeSpec] = self.spec.volumes.as_deref().unwrap_or_default();
        let mut seen: Vec<String> = Vec::new();
        for (index, volume) in volumes.iter().enumerate() {
            let at = format!("spec.volumes[{index}]");
            if volume.claim.is_some() == volume.config_map.is_some() {
                self.one_of(&at, "claim or configMap", volume.claim.is_some());
            }
            for (field, name) in [("claim", &volume.claim), ("configMap", &volume.config_map)] {
                let known =
                    |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
                if let Some(name) = name.as_deref().filter(|name| !name.chars().all(known)) {
                    let problem = Problem::new(Code::Name, format!("{at}.{field}"))
                        .found(quoted(name))
                        .allowed("the name of an object in the job's own namespace")
                        .advice("references never cross namespaces");
                    self.refuse(problem, &[]);
                }
            }
            let Some(path) = volume.mount_path.as_deref() else { continue };
            let is_up = workspace::goes_up(path);
            if let Some(found) = workspace::address(path).or(is_up.then(|| quoted(path))) {
                self.refuse(workspace::no_path(&format!("{at}.mountPath"), found), &[]);
            }
            let place = workspace::in_workspace(path);
            if workspace::is_reserved(path) || path.contains(':') || seen.contains(&place) {
                let problem = Problem::new(Code::Path, format!("{at}.mountPath"))
                    .found(quoted(path))
                    .allowed("a place of its own that is not the system's")
                    .advice("a relative path lies in /workspace");
                self.refuse(problem, &[]);
            }
            seen.push(place);
        }
    }
}
