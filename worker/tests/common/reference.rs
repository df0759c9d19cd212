//! What `tests/parity/generate.py` writes: the weights of a model of `transformers`, and what it
//! computes with them.

use moejob_protocol::model::{AuxLossScope, ModelConfig};
use std::collections::BTreeMap;
use std::path::Path;

/// The tensors of one reference file, as f64 whatever their type there.
pub struct Reference {
    pub tensors: BTreeMap<String, Vec<f64>>,
    /// Of `transformers`, as read by `import`.
    pub config: ModelConfig,
    /// Steps, sequences of a batch, tokens of a sequence.
    pub sizes: [usize; 3],
}

impl Reference {
    pub fn open(path: &Path) -> Reference {
        #[derive(serde::Deserialize)]
        struct Entry {
            dtype: String,
            shape: Vec<usize>,
            data_offsets: [usize; 2],
        }
        let file = std::fs::read(path).expect("a reference");
        let (length, rest) = file.split_first_chunk::<8>().expect("a header");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let mut header: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(header).expect("a header");
        let metadata = header.remove("__metadata__").expect("the model's config");
        let mut sizes = [0; 3];
        let read = |entry: Entry| -> Vec<f64> {
            let bytes = &data[entry.data_offsets[0]..entry.data_offsets[1]];
            let four = bytes.chunks_exact(4).map(|b| b.try_into().expect("four bytes"));
            let eight = bytes.chunks_exact(8).map(|b| b.try_into().expect("eight bytes"));
            match entry.dtype.as_str() {
                "F32" => four.map(|b| f64::from(f32::from_le_bytes(b))).collect(),
                "U32" => four.map(|b| f64::from(u32::from_le_bytes(b))).collect(),
                "F64" => eight.map(f64::from_le_bytes).collect(),
                other => panic!("{other} is not expected in a reference"),
            }
        };
        let mut tensors = BTreeMap::new();
        for (name, entry) in header {
            let entry: Entry = serde_json::from_value(entry).expect("a tensor's entry");
            if name == "tokens" {
                sizes.copy_from_slice(&entry.shape);
                // Each sequence has one token more, the last one's target.
                sizes[2] -= 1;
            }
            tensors.insert(name, read(entry));
        }
        let folder = tempfile::tempdir().expect("a folder");
        let text = metadata["config"].as_str().expect("the model's config");
        std::fs::write(folder.path().join("config.json"), text).expect("a file");
        let (mut config, _) = moe_worker::hf::read_model(folder.path()).expect("a family of ours");
        config.router.aux_loss_scope = AuxLossScope::Hf;
        // Theirs move in a trainer, if at all.
        config.router.bias_update_rate = 0.0;
        if !tensors.contains_key("f64/aux") {
            config.router.aux_loss_coef = 0.0;
        }
        Reference { tensors, config, sizes }
    }

    pub fn get(&self, name: &str) -> &[f64] {
        self.tensors.get(name).unwrap_or_else(|| panic!("{name} is not in the reference"))
    }
}

/// max |difference| / max |reference|
pub fn relative(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    let error = pairs.fold(0.0_f64, |most, (a, b)| most.max((a - b).abs()));
    error / largest.max(1e-30)
}

/// In the Euclidean norm.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}
