//! Hugging Face directories made up for tests.
#![allow(dead_code)]

use moejob_protocol::ModelConfig;
use moejob_protocol::model::{Param, QkNorm, Role, Scoring};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// How experts lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `mlp.experts.N.gate_proj`
    Each,
    /// `block_sparse_moe.experts.N.w1`
    Letters,
    /// `mlp.experts.gate_up_proj`
    Fused,
}

/// A directory before it is written; tests change it.
#[derive(Clone, Debug)]
pub struct Fixture {
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

/// Values around zero (gains around one), the same for the same name.
pub fn values(param: &Param) -> Vec<f32> {
    let seed = param.name.bytes().fold(17_u64, |sum, byte| {
        sum.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(u64::from(byte))
    });
    let centre = if param.role == Role::Gain { 1.0 } else { 0.0 };
    let value = |at: u64| {
        let mixed = (seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // Eight bits: the same number in every float type.
        centre + ((mixed >> 40) % 255) as f32 / 256.0 - 0.5
    };
    (0..param.numel()).map(value).collect()
}

/// Little-endian bytes in a float type.
pub fn encoded(values: &[f32], dtype: &str) -> Vec<u8> {
    let half = |x: &f32| match dtype {
        "BF16" => half::bf16::from_f32(*x).to_le_bytes(),
        _ => half::f16::from_f32(*x).to_le_bytes(),
    };
    match dtype {
        "F32" => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => values.iter().flat_map(half).collect(),
    }
}

/// The family that a configuration belongs to.
fn config(model: &ModelConfig) -> Value {
    let mut fields = json!({
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
        "num_experts_per_tok": model.experts.per_token,
        "norm_topk_prob": model.router.norm_topk_prob,
        "hidden_act": "silu",
    });
    let mut set = |name: &str, value: Value| fields[name] = value;
    let (count, width) = (model.experts.count, model.experts.intermediate_size);
    if model.router.scoring == Scoring::Sigmoid {
        set("architectures", json!(["Glm4MoeForCausalLM"]));
        set("partial_rotary_factor", json!(1.0));
        set("n_routed_experts", json!(count));
        set("n_shared_experts", json!(model.experts.shared));
        set("moe_intermediate_size", json!(width));
        set("intermediate_size", json!(model.dense_intermediate_size));
        set("first_k_dense_replace", json!(model.dense_layers.len()));
        set("n_group", json!(model.router.groups));
        set("topk_group", json!(model.router.topk_groups));
        set("routed_scaling_factor", json!(model.router.scale));
        set("use_qk_norm", json!(model.qk_norm == QkNorm::PerHead));
    } else if model.qk_norm == QkNorm::PerHead {
        set("architectures", json!(["Qwen3MoeForCausalLM"]));
        set("num_experts", json!(count));
        set("moe_intermediate_size", json!(width));
        set("intermediate_size", json!(model.dense_intermediate_size));
        set("mlp_only_layers", json!(model.dense_layers));
    } else {
        set("architectures", json!(["MixtralForCausalLM"]));
        set("num_local_experts", json!(count));
        set("intermediate_size", json!(width));
    }
    fields
}

impl Fixture {
    pub fn new(model: &ModelConfig, layout: Layout, dtype: &'static str) -> Fixture {
        let mut tensors = BTreeMap::new();
        for param in model.params() {
            let shape = param.shape.iter().map(|dim| u64::from(*dim)).collect();
            let bytes = encoded(&values(&param), dtype);
            let tensor = Tensor { dtype, shape, bytes };
            let name = match layout {
                Layout::Letters => letters(&param.name),
                _ => param.name.clone(),
            };
            tensors.insert(name, tensor);
        }
        let mut fixture = Fixture { config: config(model), tensors };
        if layout == Layout::Fused {
            fixture.fuse(model);
        }
        fixture
    }

    fn fuse(&mut self, model: &ModelConfig) {
        let (experts, width) = (model.experts.count, u64::from(model.experts.intermediate_size));
        let dim = u64::from(model.hidden_size);
        for layer in (0..model.num_hidden_layers).filter(|layer| model.is_moe_layer(*layer)) {
            let at = format!("model.layers.{layer}.mlp.experts");
            let (mut up, mut down, mut dtype) = (Vec::new(), Vec::new(), "F32");
            for expert in 0..experts {
                let mut take = |part: &str| {
                    let name = format!("{at}.{expert}.{part}.weight");
                    self.tensors.remove(&name).expect("an expert's matrix")
                };
                let (gate, mut other) = (take("gate_proj"), take("up_proj"));
                dtype = gate.dtype;
                up.extend(gate.bytes);
                up.append(&mut other.bytes);
                down.extend(take("down_proj").bytes);
            }
            let e = u64::from(experts);
            let mut put = |part: &str, shape: Vec<u64>, bytes| {
                self.tensors.insert(format!("{at}.{part}"), Tensor { dtype, shape, bytes });
            };
            put("gate_up_proj", vec![e, 2 * width, dim], up);
            put("down_proj", vec![e, dim, width], down);
        }
    }

    /// Writes the directory, with an index if there is more than one file.
    pub fn write(&self, directory: &Path, files: usize) {
        std::fs::create_dir_all(directory).expect("a folder");
        std::fs::write(directory.join("config.json"), self.config.to_string()).expect("a file");
        let names: Vec<&String> = self.tensors.keys().collect();
        let mut map = Map::new();
        for (number, names) in names.chunks(names.len().div_ceil(files)).enumerate() {
            let file = match files {
                1 => "model.safetensors".to_string(),
                _ => format!("model-{:05}-of-{files:05}.safetensors", number + 1),
            };
            let some = names.iter().map(|name| (name.as_str(), &self.tensors[*name]));
            let (header, data) = parts(some);
            write_file(&directory.join(&file), &header, &data);
            map.extend(names.iter().map(|name| ((*name).clone(), json!(file))));
        }
        if files > 1 {
            let index = json!({ "metadata": {}, "weight_map": map });
            let path = directory.join("model.safetensors.index.json");
            std::fs::write(path, index.to_string()).expect("a file");
        }
    }
}

fn letters(name: &str) -> String {
    let mut name = name.replace(".mlp.", ".block_sparse_moe.");
    for (ours, letter) in [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")] {
        name = name.replace(ours, letter);
    }
    name
}

/// Header and data of a file.
pub fn parts<'a>(tensors: impl Iterator<Item = (&'a str, &'a Tensor)>) -> (Value, Vec<u8>) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, tensor) in tensors {
        let (begin, end) = (data.len(), data.len() + tensor.bytes.len());
        let (dtype, shape) = (tensor.dtype, &tensor.shape);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, end] });
        header.insert(name.to_string(), entry);
        data.extend_from_slice(&tensor.bytes);
    }
    (Value::Object(header), data)
}

pub fn write_file(path: &Path, header: &Value, data: &[u8]) {
    write_raw(path, header.to_string().as_bytes(), data);
}

pub fn write_raw(path: &Path, header: &[u8], data: &[u8]) {
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path, [&length, header, data].concat()).expect("a file");
}

/// All tensors of the files of a directory.
pub fn tensors(directory: &Path) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(directory).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let file = std::fs::read(&path).expect("a file");
        let (length, rest) = file.split_first_chunk::<8>().expect("a length");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let header: Map<String, Value> = serde_json::from_slice(header).expect("a header");
        for (name, entry) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
            let offsets: [usize; 2] =
                serde_json::from_value(entry["data_offsets"].clone()).expect("two numbers");
            let shape = serde_json::from_value(entry["shape"].clone()).expect("a shape");
            let dtype = entry["dtype"].as_str().expect("a name").to_string();
            found.insert(name, (dtype, shape, data[offsets[0]..offsets[1]].to_vec()));
        }
    }
    found
}
