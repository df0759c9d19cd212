//! How far a token sees, and how its place turns it: what `transformers` derives from several
//! fields, derived alike.

use super::fields::Fields;
use super::Family;
use serde_json::{Map, Value};

/// The base of the angles of rotary positions, where nothing else about them is special.
///
/// `rope_scaling`, which models before `transformers` 5 have, counts alone where it says anything,
/// even beside `rope_parameters`. What the one that counts leaves out is taken from the fields
/// around it.
pub fn rope_theta(family: Family, fields: &mut Fields) -> f64 {
    let default = if family == Family::Mixtral { 1e6 } else { 1e4 };
    let outer = fields.real("rope_theta", default);
    let nothing = Map::new();
    let mut said = |field: &'static str| match fields.get(field) {
        None => None,
        Some(Value::Object(found)) if found.is_empty() => None,
        Some(Value::Object(found)) => Some((field, found)),
        Some(other) => {
            fields.problem(field, &format!("{other} is no JSON object"));
            None
        }
    };
    let (scaling, parameters) = (said("rope_scaling"), said("rope_parameters"));
    let (field, rope) = scaling.or(parameters).unwrap_or(("rope_parameters", &nothing));
    check_kind(field, rope, fields);
    let typed = fields.get("partial_rotary_factor");
    let (at, factor) = match rope.get("partial_rotary_factor").filter(|factor| !factor.is_null()) {
        Some(inner) => (format!("{field}.partial_rotary_factor"), Some(inner)),
        None => ("partial_rotary_factor".to_string(), typed),
    };
    // GLM-4-MoE turns half of each head unless it is told otherwise.
    let half = if family == Family::Glm4Moe { 0.5 } else { 1.0 };
    let factor = fields.checked_real(&at, factor, half);
    let why = format!("{factor}: heads are turned as a whole here, which is 1");
    fields.refuse(&at, factor != 1.0, &why);
    let inner = rope.get("rope_theta").filter(|theta| !theta.is_null());
    let at = inner.map_or("rope_theta".to_string(), |_| format!("{field}.rope_theta"));
    let theta = fields.checked_real(&at, inner, outer);
    fields.refuse(&at, theta == 0.0, "it is 0");
    theta
}

fn check_kind(field: &str, rope: &Map<String, Value>, fields: &mut Fields) {
    // The older name counts where the newer one is not there.
    let named = ["rope_type", "type"].into_iter().find_map(|name| Some((name, rope.get(name)?)));
    if let Some((name, kind)) = named.filter(|(_, kind)| *kind != "default") {
        let why = format!("the rotary positions {kind} are not built in; \"default\" is");
        return fields.problem(&format!("{field}.{name}"), &why);
    }
    let known = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
    for (name, value) in rope.iter().filter(|(name, _)| !known.contains(&&name[..])) {
        let at = format!("{field}.{name}");
        match value {
            Value::Null => {}
            Value::Object(_) => {
                let why = "positions of each kind of layer by themselves are not built in";
                fields.problem(&at, why);
            }
            // Of the default kind it would say nothing, so another kind is meant.
            value => {
                let why = format!("{value}: the rotary positions built in have none");
                fields.problem(&at, &why);
            }
        }
    }
}

/// Attention that does not see all that came before is not built in: which layers have it is
/// derived as the family's model does it.
pub fn check_windows(family: Family, layers: u32, fields: &mut Fields) {
    let chunks = fields.get("attention_chunk_size").is_some();
    fields.refuse("attention_chunk_size", chunks, "attention over chunks is not built in");
    // Of kinds of layers that are told, none may be another, and there is one for each layer.
    let kinds = fields.get("layer_types");
    if let Some(kinds) = kinds {
        let full = |kind: &Value| kind == "full_attention" || kind == "attention";
        let all = kinds.as_array().filter(|kinds| kinds.iter().all(full));
        let why = "full_attention alone is built in";
        fields.refuse("layer_types", all.is_none(), why);
        let many = all.is_some_and(|kinds| kinds.len() != layers as usize);
        let why = format!("there is not one for each of {layers} layers");
        fields.refuse("layer_types", many, &why);
    }
    let wide = match family {
        Family::Qwen3Moe | Family::Dots1 => Some(4096),
        Family::Mixtral | Family::Olmoe | Family::Glm4Moe => None,
    };
    let switched = family == Family::Qwen3Moe && fields.flag("use_sliding_window", false);
    let window = match fields.raw("sliding_window") {
        None => wide,
        Some(Value::Null) => None,
        Some(_) => Some(fields.number("sliding_window", None)),
    };
    let Some(window) = window else { return };
    let (slides, which) = match family {
        Family::Mixtral | Family::Olmoe | Family::Glm4Moe => (true, String::new()),
        Family::Qwen3Moe => (switched, " since use_sliding_window is true".to_string()),
        Family::Dots1 => {
            let first = fields.number("max_window_layers", Some(62));
            let which = format!(" in layers from {first} on, which max_window_layers says");
            (kinds.is_none() && layers > first, which)
        }
    };
    let why = format!(
        "a token would see {window} tokens at most{which}: that is not built in. Where no text is \
         longer than that, set it to null"
    );
    fields.refuse("sliding_window", slides, &why);
}
