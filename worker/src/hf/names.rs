//! Which tensor of a Hugging Face directory holds which of our parameters.
//!
//! Our names are those of the directories but for experts, which come one by one (`mlp.experts.N`,
//! Mixtral: `block_sparse_moe.experts.N.w1`) or fused (`mlp.experts.gate_up_proj` [E, 2 F, D]).

use super::config::Family;
use moejob_protocol::ModelConfig;
use moejob_protocol::model::{Param, Role};

/// A tensor that may hold a parameter, as a run of its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub tensor: String,
    pub shape: Vec<u64>,
    /// First element.
    pub offset: u64,
}

/// All forms in which `param` may come.
pub fn candidates(model: &ModelConfig, param: &Param) -> Vec<Candidate> {
    let own = param.shape.iter().map(|dim| u64::from(*dim)).collect::<Vec<_>>();
    let whole = |tensor: String| Candidate { tensor, shape: own.clone(), offset: 0 };
    let mut found = vec![whole(param.name.clone())];
    match param.role {
        Role::Router { layer } => {
            found.push(whole(format!("model.layers.{layer}.block_sparse_moe.gate.weight")));
        }
        Role::Expert { layer, expert } => {
            let at = format!("model.layers.{layer}");
            let part = Part::of(&param.name);
            let forms = [
                ("block_sparse_moe", part.letter()),
                ("block_sparse_moe", part.name()),
                ("mlp", part.letter()),
            ];
            for (place, name) in forms {
                found.push(whole(format!("{at}.{place}.experts.{expert}.{name}.weight")));
            }
            for place in ["mlp", "block_sparse_moe"] {
                found.push(fused(model, &format!("{at}.{place}.experts"), part, expert));
            }
        }
        _ => {}
    }
    found
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Gate,
    Up,
    Down,
}

impl Part {
    fn of(name: &str) -> Part {
        if name.ends_with("gate_proj.weight") {
            Part::Gate
        } else if name.ends_with("up_proj.weight") {
            Part::Up
        } else {
            Part::Down
        }
    }

    fn name(self) -> &'static str {
        match self {
            Part::Gate => "gate_proj",
            Part::Up => "up_proj",
            Part::Down => "down_proj",
        }
    }

    /// As Mixtral calls it.
    fn letter(self) -> &'static str {
        match self {
            Part::Gate => "w1",
            Part::Up => "w3",
            Part::Down => "w2",
        }
    }
}

/// The run of one expert in `gate_up_proj` [E, 2 F, D] or `down_proj` [E, D, F].
fn fused(model: &ModelConfig, at: &str, part: Part, expert: u32) -> Candidate {
    let experts = u64::from(model.experts.count);
    let (d, f) = (u64::from(model.hidden_size), u64::from(model.experts.intermediate_size));
    let expert = u64::from(expert);
    if part == Part::Down {
        let (tensor, shape) = (format!("{at}.down_proj"), vec![experts, d, f]);
        return Candidate { tensor, shape, offset: expert * d * f };
    }
    let second = if part == Part::Up { f * d } else { 0 };
    let (tensor, shape) = (format!("{at}.gate_up_proj"), vec![experts, 2 * f, d]);
    Candidate { tensor, shape, offset: expert * 2 * f * d + second }
}

/// The name under which `param` is exported: that of the published checkpoints.
pub fn exported(family: Family, param: &Param) -> String {
    let Family::Mixtral = family else { return param.name.clone() };
    match param.role {
        Role::Router { layer } => format!("model.layers.{layer}.block_sparse_moe.gate.weight"),
        Role::Expert { layer, expert } => {
            let letter = Part::of(&param.name).letter();
            format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{letter}.weight")
        }
        _ => param.name.clone(),
    }
}

/// Tensors that may be there and are not used: buffers of older versions.
pub fn is_ignored(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}
