//! What other trainers call the fields of a manifest, for whoever brings a habit along.

/// A word of theirs, in small letters without `_` and `-`; the field here, by its path below
/// `spec`; and what is to be known beside its name, if anything.
struct Synonym(&'static str, &'static str, &'static str);

const SYNONYMS: &[Synonym] = &[
    Synonym("lr", "training.optimizer.adamw.learningRate", ""),
    Synonym("maxlr", "training.optimizer.adamw.learningRate", ""),
    Synonym("minlr", "training.schedule.cosine.minLearningRate", ""),
    Synonym("warmup", "training.schedule.cosine.warmupSteps", ""),
    Synonym("warmupiters", "training.schedule.cosine.warmupSteps", ""),
    Synonym("lrwarmupiters", "training.schedule.cosine.warmupSteps", ""),
    Synonym("warmupratio", "training.schedule.cosine.warmupSteps", "it counts steps"),
    Synonym("eps", "training.optimizer.adamw.epsilon", ""),
    Synonym("adamepsilon", "training.optimizer.adamw.epsilon", ""),
    Synonym("clipgrad", "training.maxGradNorm", ""),
    Synonym("gradclip", "training.maxGradNorm", ""),
    Synonym("gradientclipping", "training.maxGradNorm", ""),
    Synonym("epochs", "training.steps", EPOCHS),
    Synonym("numepochs", "training.steps", EPOCHS),
    Synonym("numtrainepochs", "training.steps", EPOCHS),
    Synonym("maxsteps", "training.steps", ""),
    Synonym("maxiters", "training.steps", ""),
    Synonym("trainiters", "training.steps", ""),
    Synonym("trainsteps", "training.steps", ""),
    Synonym("batchsize", "training.globalBatchSize", BATCH),
    Synonym("trainbatchsize", "training.globalBatchSize", BATCH),
    Synonym("perdevicetrainbatchsize", "training.microBatchSize", ""),
    Synonym("devicebatchsize", "training.microBatchSize", ""),
    Synonym("gradientaccumulationsteps", "training.globalBatchSize", ACCUMULATION),
    Synonym("gradaccum", "training.globalBatchSize", ACCUMULATION),
    Synonym("dtype", "training.precision", ""),
    Synonym("bf16", "training.precision", "write precision: bf16"),
    Synonym("fp16", "training.precision", "write precision: fp16"),
    Synonym("activationcheckpointing", "training.recompute", ""),
    Synonym("gradientcheckpointing", "training.recompute", ""),
    Synonym("cpuoffload", "training.offload", "write offload: host"),
    Synonym("seqlen", "data.sequenceLength", ""),
    Synonym("seqlength", "data.sequenceLength", ""),
    Synonym("maxseqlen", "data.sequenceLength", ""),
    Synonym("maxlength", "data.sequenceLength", ""),
    Synonym("contextlength", "data.sequenceLength", ""),
    Synonym("blocksize", "data.sequenceLength", ""),
    Synonym("evalinterval", "data.validation.everySteps", ""),
    Synonym("evalsteps", "data.validation.everySteps", ""),
    Synonym("saveinterval", "checkpoint.everySteps", ""),
    Synonym("savesteps", "checkpoint.everySteps", ""),
    Synonym("savetotallimit", "checkpoint.keep", ""),
    Synonym("dmodel", "model.hiddenSize", ""),
    Synonym("nembd", "model.hiddenSize", ""),
    Synonym("hiddendim", "model.hiddenSize", ""),
    Synonym("nlayer", "model.numHiddenLayers", ""),
    Synonym("nlayers", "model.numHiddenLayers", ""),
    Synonym("numlayers", "model.numHiddenLayers", ""),
    Synonym("nhead", "model.numAttentionHeads", ""),
    Synonym("nheads", "model.numAttentionHeads", ""),
    Synonym("numheads", "model.numAttentionHeads", ""),
    Synonym("num", "model.experts.count", ""),
    Synonym("numexperts", "model.experts.count", ""),
    Synonym("nexperts", "model.experts.count", ""),
    Synonym("numlocalexperts", "model.experts.count", ""),
    Synonym("nroutedexperts", "model.experts.count", ""),
    Synonym("topk", "model.experts.perToken", ""),
    Synonym("numexpertspertok", "model.experts.perToken", ""),
    Synonym("moeroutertopk", "model.experts.perToken", ""),
    Synonym("moeintermediatesize", "model.experts.intermediateSize", ""),
    Synonym("ffnhiddensize", "model.experts.intermediateSize", ""),
    Synonym("nsharedexperts", "model.experts.shared", ""),
    Synonym("capacity", "model.router.capacityFactor", ""),
    Synonym("routerauxlosscoef", "model.router.auxLossCoef", ""),
    Synonym("ep", "parallelism.expert", ""),
    Synonym("expertparallelsize", "parallelism.expert", ""),
    Synonym("expertmodelparallelsize", "parallelism.expert", ""),
    Synonym("tp", "parallelism.tensor", ""),
    Synonym("tensormodelparallelsize", "parallelism.tensor", ""),
    Synonym("pp", "parallelism.pipeline", ""),
    Synonym("pipelinemodelparallelsize", "parallelism.pipeline", ""),
    Synonym("nnodes", "nodes.max", ""),
    Synonym("numnodes", "nodes.max", ""),
    Synonym("replicas", "nodes.max", ""),
    Synonym("gpus", "nodes.devicesPerNode", GPUS),
    Synonym("numgpus", "nodes.devicesPerNode", GPUS),
    Synonym("nprocpernode", "nodes.devicesPerNode", GPUS),
];

const EPOCHS: &str = "a step takes training.globalBatchSize sequences, and `moejob plan` tells how \
                      often that goes through the data";
const BATCH: &str = "it is that of all ranks together; microBatchSize is what one computes at once";
const ACCUMULATION: &str = "a rank does globalBatchSize / (microBatchSize x ranks) micro-batches a \
                            step by itself";
const GPUS: &str = "with profile: gpu";

/// The field that `word` is called here, below `spec`, and the advice to use it.
pub fn meant(word: &str) -> Option<(&'static str, String)> {
    let plain = word.to_lowercase().replace(['_', '-'], "");
    let Synonym(_, path, more) = SYNONYMS.iter().find(|Synonym(theirs, ..)| *theirs == plain)?;
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
        for Synonym(theirs, path, _) in SYNONYMS {
            let field = path.split('.').fold(crd::spec_schema(), |mut schema, name| {
                schema["properties"][name].take()
            });
            assert!(field.is_object(), "{theirs}: no field spec.{path}");
            let plain = theirs.to_lowercase().replace(['_', '-'], "");
            assert_eq!(plain, *theirs, "written as it is looked for");
            assert_eq!(SYNONYMS.iter().filter(|of| of.0 == *theirs).count(), 1, "{theirs} twice");
        }
        let (path, advice) = meant("num_train_epochs").expect("a synonym");
        assert_eq!(path, "training.steps");
        assert!(advice.starts_with("here it is spec.training.steps: a step takes"), "{advice}");
        assert_eq!(meant("hiddenSize"), None);
    }
}
