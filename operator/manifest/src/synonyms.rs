//! This table says what other trainers call the fields of a manifest.

/// A field by its path below `spec`; what is to be known beside its name, if anything; and the
/// words that others have for it, in small letters without `_` and `-`.
struct Synonyms(&'static str, &'static str, &'static [&'static str]);

const SYNONYMS: &[Synonyms] = &[
    Synonyms("training.optimizer.adamw.learningRate", "", &["lr", "maxlr"]),
    Synonyms("training.schedule.cosine.minLearningRate", "", &["minlr"]),
    Synonyms(
        "training.schedule.cosine.warmupSteps",
        "",
        &["warmup", "warmupiters", "lrwarmupiters"],
    ),
    Synonyms("training.schedule.cosine.warmupSteps", "it counts steps", &["warmupratio"]),
    Synonyms("training.optimizer.adamw.epsilon", "", &["eps", "adamepsilon"]),
    Synonyms("training.maxGradNorm", "", &["clipgrad", "gradclip", "gradientclipping"]),
    Synonyms(
        "training.steps",
        "a step takes training.globalBatchSize sequences, and `moejob plan` tells how often \
         that goes through the data",
        &["epochs", "numepochs", "numtrainepochs"],
    ),
    Synonyms("training.steps", "", &["maxsteps", "maxiters", "trainiters", "trainsteps"]),
    Synonyms(
        "training.globalBatchSize",
        "it is that of all ranks together; microBatchSize is what one computes at once",
        &["batchsize", "trainbatchsize"],
    ),
    Synonyms("training.microBatchSize", "", &["perdevicetrainbatchsize", "devicebatchsize"]),
    Synonyms(
        "training.globalBatchSize",
        "a rank does globalBatchSize / (microBatchSize x ranks) micro-batches a step by itself",
        &["gradientaccumulationsteps", "gradaccum"],
    ),
    Synonyms("training.precision", "", &["dtype"]),
    Synonyms("training.precision", "write precision: bf16", &["bf16"]),
    Synonyms("training.precision", "write precision: fp16", &["fp16"]),
    Synonyms("training.recompute", "", &["activationcheckpointing", "gradientcheckpointing"]),
    Synonyms("training.offload", "write offload: host", &["cpuoffload"]),
    Synonyms(
        "data.sequenceLength",
        "",
        &["seqlen", "seqlength", "maxseqlen", "maxlength", "contextlength", "blocksize"],
    ),
    Synonyms("data.validation.everySteps", "", &["evalinterval", "evalsteps"]),
    Synonyms("checkpoint.everySteps", "", &["saveinterval", "savesteps"]),
    Synonyms("checkpoint.keep", "", &["savetotallimit"]),
    Synonyms("model.hiddenSize", "", &["dmodel", "nembd", "hiddendim"]),
    Synonyms("model.numHiddenLayers", "", &["nlayer", "nlayers", "numlayers"]),
    Synonyms("model.numAttentionHeads", "", &["nhead", "nheads", "numheads"]),
    Synonyms(
        "model.experts.count",
        "",
        &["num", "numexperts", "nexperts", "numlocalexperts", "nroutedexperts"],
    ),
    Synonyms("model.experts.perToken", "", &["topk", "numexpertspertok", "moeroutertopk"]),
    Synonyms("model.experts.intermediateSize", "", &["moeintermediatesize", "ffnhiddensize"]),
    Synonyms("model.experts.shared", "", &["nsharedexperts"]),
    Synonyms("model.router.capacityFactor", "", &["capacity"]),
    Synonyms("model.router.auxLossCoef", "", &["routerauxlosscoef"]),
    Synonyms("parallelism.expert", "", &["ep", "expertparallelsize", "expertmodelparallelsize"]),
    Synonyms("parallelism.tensor", "", &["tp", "tensormodelparallelsize"]),
    Synonyms("parallelism.pipeline", "", &["pp", "pipelinemodelparallelsize"]),
    Synonyms("nodes.max", "", &["nnodes", "numnodes", "replicas"]),
    Synonyms("nodes.devicesPerNode", "with profile: gpu", &["gpus", "numgpus", "nprocpernode"]),
];

/// The field that `word` is called here, below `spec`, and the advice to use it.
pub fn meant(word: &str) -> Option<(&'static str, String)> {
    let plain = word.to_lowercase().replace(['_', '-'], "");
    let Synonyms(path, more, _) = SYNONYMS.iter().find(|of| of.2.contains(&&plain[..]))?;
    let advice = match more.is_empty() {
        true => format!("here it is spec.{path}"),
        false => format!("here it is spec.{path}: {more}"),
    };
    Some((path, advice))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd;

    #[test]
    fn every_synonym_is_of_a_field_that_is_there_and_of_none_by_its_own_name() {
        let all = SYNONYMS.iter().flat_map(|Synonyms(path, _, words)| {
            words.iter().map(move |theirs| (theirs, path))
        });
        for (theirs, path) in all.clone() {
            let field = path.split('.').fold(crd::spec_schema(), |mut schema, name| {
                schema["properties"][name].take()
            });
            assert!(field.is_object(), "{theirs}: no field spec.{path}");
            let plain = theirs.to_lowercase().replace(['_', '-'], "");
            assert_eq!(plain, *theirs, "written as it is looked for");
            assert_eq!(all.clone().filter(|of| of.0 == theirs).count(), 1, "{theirs} twice");
        }
        let (path, advice) = meant("num_train_epochs").expect("a synonym");
        assert_eq!(path, "training.steps");
        assert!(advice.starts_with("here it is spec.training.steps: a step takes"), "{advice}");
        assert_eq!(meant("hiddenSize"), None);
    }
}
