//! Models as manifests have them, and what becomes of each on a GPU.

/// What becomes of a part of a model on a GPU.
#[derive(Clone, Copy, Debug)]
pub enum On {
    Trains,
    /// By this field of the model.
    Refused(&'static str),
}

/// Lines of `spec.model`, each of which trains on a GPU. A field or a word that is in none of them
/// nor of `MODELS` fails the test: write it here once it is known what GPUs do with it.
pub const ROUTERS: [&str; 34] = [
    // All that the fused op and the step around it have, in as few jobs as there can be.
    "router: { kind: topK, scoring: sigmoid, bias: true, biasUpdateRate: 0.01, groups: 4, \
     topkGroups: 2, scale: 2.5, normTopkProb: false, auxLossScope: sequence, balanceLoss: switch, \
     auxLossCoef: 0.1, zLossCoef: 0.01, initializerRange: 0.1 }",
    "router: { scoring: softmax, auxLossScope: microBatch, frozen: true }",
    "router: { warmupSteps: 1, zLossCoef: 0, auxLossCoef: 0, capacityFactor: 0 }",
    "router: { scoring: sigmoid, bias: true, groups: 8, topkGroups: 8 }",
    // Fields that say nothing with the kind or capacity of the job change nothing.
    "router: { jitter: 0, inputDropout: 0, gateNoise: 0, hysteresis: 0 }",
    "router: { entropyLossCoef: 0, evalCapacityFactor: 0 }",
    "router: { batchPrioritized: false }",
    "router: { kind: switch }",
    "router: { kind: gshard }",
    "router: { kind: tutel }",
    "router: { kind: tutel, capacityFactor: 0, balanceLoss: switch }",
    "router: { kind: noisyTopK }",
    "router: { kind: topP, topP: 0.5 }",
    "router: { kind: expertChoice }",
    "experts: { count: 40 }, router: { kind: expertChoice }",
    "router: { kind: hash, hashSeed: 3 }",
    "router: { capacityFactor: 1.5 }",
    "router: { capacityFactor: -1.5 }",
    "router: { capacityFactor: 1.5, batchPrioritized: true }",
    "router: { evalCapacityFactor: 2 }",
    "router: { jitter: 0.01 }",
    "router: { inputDropout: 0.1 }",
    "router: { gateNoise: 1 }",
    "router: { cosine: {} }",
    "router: { hysteresis: 0.1 }",
    "router: { balanceLoss: gshard }",
    "router: { balanceLoss: firstChoice }",
    "router: { balanceLoss: loadImportance, gateNoise: 1 }",
    "router: { kind: noisyTopK, balanceLoss: cvSquared }",
    "router: { balanceLoss: kl }",
    "router: { balanceLoss: none }",
    "router: { entropyLossCoef: 0.1 }",
    "router: { auxLossScope: global }",
    "router: { auxLossScope: hf }",
];

/// What else of a model meets kernels: heads, norms, biases, activations, widths, counts.
pub const MODELS: [(&str, On); 17] = [
    ("headDim: 32, attentionBias: true, qkNorm: perHead, clipQkv: 8", On::Trains),
    ("headDim: 64, numKeyValueHeads: 1, qkNorm: full, tieWordEmbeddings: true", On::Trains),
    ("headDim: 96, qkNorm: none, ropeTheta: 50000, rmsNormEps: 1.0e-6", On::Trains),
    ("headDim: 128, vocabSize: 300, initializerRange: 0.1", On::Trains),
    ("denseLayers: [0], denseIntermediateSize: 128", On::Trains),
    ("denseLayers: [1], denseIntermediateSize: 64", On::Trains),
    ("experts: { activation: gelu, shared: 1, count: 9, perToken: 3 }", On::Trains),
    ("experts: { activation: relu, count: 1, perToken: 1 }", On::Trains),
    ("experts: { activation: silu, count: 512, perToken: 16, routedHeadroom: 2 }", On::Trains),
    ("headDim: 16", On::Refused("headDim")),
    ("headDim: 80", On::Refused("headDim")),
    ("hiddenSize: 96", On::Refused("hiddenSize")),
    ("denseLayers: [0], denseIntermediateSize: 100", On::Refused("denseIntermediateSize")),
    ("experts: { intermediateSize: 72 }", On::Refused("experts.intermediateSize")),
    ("experts: { count: 513 }", On::Refused("experts.count")),
    ("experts: { count: 32, perToken: 17 }", On::Refused("experts.perToken")),
    (
        "experts: { count: 64 }, router: { groups: 64, topkGroups: 8 }",
        On::Refused("router.groups"),
    ),
];

/// Fields that stand in `lines` by name, and words that stand behind `field:`.
pub fn named(lines: &[&str], field: &str, word: Option<&str>) -> bool {
    let wanted = match word {
        Some(word) => format!("{field}: {word}"),
        None => format!("{field}: "),
    };
    let ends = |at: usize, line: &str| {
        word.is_none() || !line[at..].starts_with(|next: char| next.is_alphanumeric())
    };
    lines.iter().any(|line| {
        let mut places = line.match_indices(&wanted);
        places.any(|(at, _)| {
            let whole = !line[..at].ends_with(|before: char| before.is_alphanumeric());
            whole && ends(at + wanted.len(), line)
        })
    })
}

/// A job of two steps on a GPU whose model has these fields, beside what they do not say.
pub fn of_model(line: &str) -> String {
    let per_token = match line {
        line if line.contains("kind: switch") => 1,
        _ => 2,
    };
    let defaults = [
        ("hiddenSize", "64".to_string()),
        ("numHiddenLayers", "2".to_string()),
        ("numAttentionHeads", "2".to_string()),
        ("headDim", "32".to_string()),
        ("experts", format!("{{ count: 8, perToken: {per_token}, intermediateSize: 64 }}")),
    ];
    // What a line says of experts is over the defaults.
    let experts = line.split_once("experts: { ").map(|(_, rest)| rest);
    let own = experts.and_then(|rest| rest.split_once(" }")).map_or("", |(own, _)| own);
    let merged: Vec<String> = [("count", 8), ("perToken", per_token), ("intermediateSize", 64)]
        .iter()
        .filter(|(field, _)| !named(&[own], field, None))
        .map(|(field, value)| format!("{field}: {value}"))
        .chain((!own.is_empty()).then(|| own.to_string()))
        .collect();
    let line = match own.is_empty() {
        true => line.to_string(),
        false => line.replacen(own, &merged.join(", "), 1),
    };
    let mut fields = vec![line.clone()];
    let missing = defaults.iter().filter(|(field, _)| !named(&[&line], field, None));
    fields.extend(missing.map(|(field, value)| format!("{field}: {value}")));
    format!(
        "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: small }}\nspec:\n  \
         nodes: {{ profile: gpu }}\n  model: {{ {} }}\n  data:\n    train: {{ text: {{ paths: \
         [\"words/*.txt\"] }} }}\n    tokenizer: bytes\n    sequenceLength: 32\n    \
         validation: {{ fraction: 0 }}\n  training: {{ steps: 2, globalBatchSize: 4, \
         microBatchSize: 2 }}\n",
        fields.join(", ")
    )
}
