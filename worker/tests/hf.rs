//! Weights of Hugging Face directories: every layout the same, bits there and back, trained from at
//! any world size, measured.

mod common;
#[path = "common/hf.rs"]
mod fixture;

use common::{Job, bits, state_hash, trainers};
use fixture::{Fixture, Layout, tensors, values};
use moe_worker::engine::eval::{Measurer, evaluate, source_of};
use moe_worker::hf::{Options, Weights, export, import};
use moe_worker::attempt::api::AttemptEnd;
use moejob_kernels::DType;
use moe_worker::checkpoint::Disk;
use moejob_protocol::ModelConfig;
use moejob_protocol::config::{DataConfig, ValidationConfig};
use moejob_protocol::layout::Layout as Mapping;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{QkNorm, Role};
use std::path::Path;

fn mixtral() -> ModelConfig {
    let mut model = common::model();
    model.tie_word_embeddings = false;
    model
}

fn qwen() -> ModelConfig {
    let mut model = common::model();
    model.qk_norm = QkNorm::PerHead;
    model.num_hidden_layers = 3;
    model.dense_layers = vec![1];
    model
}

fn glm() -> ModelConfig {
    let mut model = common::model();
    model.qk_norm = QkNorm::PerHead;
    common::route_like_deepseek(&mut model);
    model
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn open(path: &Path) -> Weights {
    Weights::open(path).unwrap_or_else(|refusal| panic!("{refusal}"))
}

fn stored(weights: &Weights, index: usize) -> Vec<u8> {
    let mut all = Vec::new();
    let mut take = |_: u64, bytes: &[u8]| {
        all.extend_from_slice(bytes);
        Ok(())
    };
    weights.stream(index, &mut take).expect("good weights");
    all
}

#[test]
fn every_layout_holds_the_same_weights() {
    let cases = [
        (mixtral(), vec![Layout::Each, Layout::Letters, Layout::Fused]),
        (qwen(), vec![Layout::Each, Layout::Fused]),
        (glm(), vec![Layout::Each, Layout::Fused]),
    ];
    for (model, layouts) in cases {
        for layout in layouts {
            for (dtype, files) in [("F32", 1), ("BF16", 5), ("F16", 2)] {
                let folder = folder();
                Fixture::new(&model, layout, dtype).write(folder.path(), files);
                let weights = open(folder.path());
                for (index, param) in model.params().iter().enumerate() {
                    assert_eq!(weights.params()[index], *param);
                    let expected = fixture::encoded(&values(param), dtype);
                    let found = stored(&weights, index);
                    assert!(found == expected, "{layout:?} {dtype} {files}: {}", param.name);
                }
            }
        }
    }
}

#[test]
fn bits_survive_import_and_export() {
    let published =
        [(mixtral(), Layout::Letters), (qwen(), Layout::Each), (glm(), Layout::Each)];
    for (model, layout) in published {
        for (dtype, files) in [("BF16", 3), ("F16", 1), ("F32", 2)] {
            let folder = folder();
            let [source, checkpoints, exported] =
                ["source", "checkpoints", "exported"].map(|name| folder.path().join(name));
            let mut given = Fixture::new(&model, layout, dtype);
            for (param, (_, tensor)) in corrections(&model).zip(
                given.tensors.iter_mut().filter(|(name, _)| name.ends_with("correction_bias")),
            ) {
                // As published: 32 bits whatever the rest has.
                (tensor.dtype, tensor.bytes) = ("F32", fixture::encoded(&values(&param), "F32"));
            }
            given.write(&source, files);
            let mut heard = (0, 0);
            let step = import(&open(&source), &checkpoints, &mut |done, all| heard = (done, all))
                .expect("room on the disk");
            assert_eq!(heard.0, heard.1);
            moe_worker::checkpoint::verify(&Disk::real(), &step).expect("a whole checkpoint");
            export(&open(&checkpoints), &exported, Options::default(), &mut |_, _| {})
                .expect("room on the disk");
            assert_eq!(tensors(&source), tensors(&exported), "{dtype}");
            // What was exported is read again, and says the same model.
            assert_eq!(open(&exported).params(), open(&source).params());
            let again = import(&open(&source), &checkpoints, &mut |_, _| {});
            assert!(again.expect_err("it is there").to_string().contains("exists already"));
        }
    }
}

fn corrections(model: &ModelConfig) -> impl Iterator<Item = moejob_protocol::model::Param> {
    let params = model.params().into_iter();
    params.filter(|param| matches!(param.role, Role::Correction { .. }))
}

#[test]
fn an_export_of_another_type_rounds_and_tells_what_does_not_fit() {
    let folder = folder();
    let model = mixtral();
    let mut given = Fixture::new(&model, Layout::Each, "F32");
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    let large = given.tensors.get_mut(name).expect("an expert");
    large.bytes[20..24].copy_from_slice(&1e6_f32.to_le_bytes());
    let source = folder.path().join("source");
    given.write(&source, 1);
    let to = |dtype, out: &str| {
        let options = Options { dtype: Some(dtype), like: None };
        export(&open(&source), &folder.path().join(out), options, &mut |_, _| {})
    };
    let error = to(DType::F16, "half").expect_err("1e6 is too large").to_string();
    assert!(error.contains(name) && error.contains("element 5 is too large for F16"), "{error}");
    assert!(!folder.path().join("half").exists(), "nothing half-written is left");
    let out = to(DType::Bf16, "brain").expect("it fits");
    let name = "model.layers.1.block_sparse_moe.experts.2.w3.weight";
    let (dtype, _, bytes) = &tensors(&out)[name];
    assert_eq!(dtype, "BF16");
    assert_eq!(bytes[10..12], half::bf16::from_f32(1e6).to_le_bytes());
}

#[test]
fn a_model_that_no_family_computes_is_not_exported() {
    let job = Job::new(Mapping::contiguous(Mesh::data_parallel(1, 1)));
    let mut config = job.config.clone();
    config.model.router.norm_topk_prob = false;
    config.training.steps = 1;
    let job = Job { config, ..job };
    let _ = job.run(&mut trainers(1), None);
    let out = job.location().join("out");
    let error = export(&open(&job.location()), &out, Options::default(), &mut |_, _| {});
    let error = error.expect_err("Mixtral always normalises").to_string();
    assert!(error.contains("router.normTopkProb"), "{error}");
}

#[test]
fn a_job_starts_from_weights_at_any_world_size() {
    let folder = folder();
    Fixture::new(&glm(), Layout::Fused, "BF16").write(folder.path(), 3);
    let imported = folder.path().join("imported");
    import(&open(folder.path()), &imported, &mut |_, _| {}).expect("room on the disk");
    let run = |dp, ep, from: &Path| {
        let mut job = Job::new(Mapping::contiguous(Mesh::data_parallel(dp, ep)));
        job.config.model = glm();
        job.config.model_from = Some(from.display().to_string());
        let (ends, reports) = job.run(&mut trainers(dp), None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
        (bits(&reports), state_hash(&job.location().join("step-00000010")))
    };
    let expected = run(1, 1, folder.path());
    for (dp, ep) in [(2, 1), (3, 3), (4, 2)] {
        assert_eq!(run(dp, ep, folder.path()), expected, "dp {dp}, ep {ep}");
    }
    assert_eq!(run(2, 2, &imported), expected, "from a checkpoint of ours");
}

#[test]
fn a_job_of_another_model_is_refused_with_the_difference() {
    let folder = folder();
    Fixture::new(&mixtral(), Layout::Each, "F32").write(folder.path(), 1);
    let mut job = Job::new(Mapping::contiguous(Mesh::data_parallel(1, 1)));
    job.config.model = mixtral();
    job.config.model.experts.per_token = 3;
    job.config.model_from = Some(folder.path().display().to_string());
    let (ends, _) = job.run(&mut trainers(1), None);
    let AttemptEnd::Failed(failure) = &ends[0] else { panic!("{ends:?}") };
    assert_eq!(failure.exit_code, 3);
    let said = "model.experts.perToken: 2 in the weights, 3 in the job";
    assert!(failure.message.contains(said), "{failure}");
}

fn threads(threads: usize) -> Measurer {
    Measurer::Processors { threads }
}

#[test]
fn the_measured_loss_is_that_of_training() {
    let mut job = Job::new(Mapping::contiguous(Mesh::data_parallel(1, 1)));
    job.config.training.steps = 1;
    job.config.training.adamw.learning_rate = 0.0;
    job.config.data.validation.fraction = 0.0;
    let data = DataConfig {
        validation: ValidationConfig { fraction: 0.0, every_steps: 0, max_sequences: 0 },
        ..job.config.data.clone()
    };
    let length = job.config.training.sequence_length;
    let corpus = moe_worker::data::Corpus::open(&data, &job.config.training, 256).expect("text");
    let windows = corpus.windows();
    job.config.training.global_batch_size = windows as u32;
    let (_, reports) = job.run(&mut trainers(1), None);
    let weights = open(&job.location());
    let mut told = 0;
    let found = evaluate(&weights, &data, length, threads(2), &mut |done, _| told = done);
    let found = found.expect("good");
    assert_eq!((found.sequences, found.tokens), (windows, windows * u64::from(length)));
    assert_eq!(told, found.tokens);
    assert!((found.loss - reports[0].loss).abs() < 1e-12, "{} {}", found.loss, reports[0].loss);
    let exported = job.folder.path().join("exported");
    export(&weights, &exported, Options::default(), &mut |_, _| {}).expect("Mixtral");
    let again = evaluate(&open(&exported), &data, length, threads(1), &mut |_, _| {});
    let again = again.expect("good");
    assert_eq!(again, found, "the exported weights are the same");
}

#[test]
fn data_is_told_apart_by_its_name() {
    let kind = |name: &str| {
        let source = source_of(Path::new(name), "text", None);
        source.map_or("refused".to_string(), |source| {
            format!("{source:?}").split_whitespace().next().unwrap_or_default().to_string()
        })
    };
    let cases = [
        ("/a/b.txt", "Text"),
        ("/a/b.rs", "Text"),
        ("/", "Text"),
        ("/a/b.jsonl", "Jsonl"),
        ("/a/b.jsonl.zst", "Jsonl"),
        ("/a/b.idx", "Megatron"),
        ("/a/b.bin", "Tokens"),
        ("/a/b.parquet", "Parquet"),
        ("/a/b.tar", "refused"),
    ];
    for (name, expected) in cases {
        assert_eq!(kind(name), expected, "{name}");
    }
}
