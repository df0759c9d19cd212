//! Weights of Hugging Face directories: every layout the same, bits there and back, trained from at
//! any world size, measured.

mod common;
#[path = "common/hf.rs"]
mod fixture;

use common::{Job, bits, state_hash, trainers};
use fixture::{Fixture, Layout, tensors, values};
use moe_worker::engine::computer::Computer;
use moe_worker::engine::eval::{evaluate, source_of};
use moe_worker::data::Encoder;
use moe_worker::hf::{Options, Weights, export, import, text};
use moe_worker::attempt::api::AttemptEnd;
use moejob_kernels::DType;
use moe_worker::checkpoint::Disk;
use moejob_protocol::ModelConfig;
use moejob_protocol::config::{DataConfig, Precision, ValidationConfig};
use moejob_protocol::layout::Layout as Mapping;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{QkNorm, Role, Scoring};
use serde_json::{Value, json};
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

/// A job of one step and its weights.
fn trained(change: impl FnOnce(&mut ModelConfig)) -> Job {
    let mut job = Job::new(Mapping::contiguous(Mesh::data_parallel(1, 1)));
    change(&mut job.config.model);
    job.config.training.steps = 1;
    let _ = job.run(&mut trainers(1), None);
    job
}

fn config_of(directory: &Path) -> Value {
    let text = std::fs::read(directory.join("config.json")).expect("a config.json");
    serde_json::from_slice(&text).expect("JSON")
}

#[test]
fn an_export_rounds_once() {
    let folder = folder();
    let mut given = Fixture::new(&mixtral(), Layout::Each, "F32");
    let name = "model.layers.1.mlp.experts.2.up_proj.weight";
    // Of 1 + 2^-8 + 2^-23 the nearest bf16 is 1 + 2^-7, and that of 1 + 2^-8 is 1.
    for (at, bits) in [0x3f80_8001_u32, 0x3f80_8000].into_iter().enumerate() {
        let bytes = &mut given.tensors.get_mut(name).expect("an expert").bytes;
        bytes[4 * at..4 * at + 4].copy_from_slice(&bits.to_le_bytes());
    }
    let [source, out] = ["source", "out"].map(|name| folder.path().join(name));
    given.write(&source, 1);
    let options = Options { dtype: Some(DType::Bf16), like: None };
    export(&open(&source), &out, options, &mut |_, _| {}).expect("it fits");
    let name = "model.layers.1.block_sparse_moe.experts.2.w3.weight";
    assert_eq!(tensors(&out)[name].2[..4], [0x81, 0x3f, 0x80, 0x3f]);
}

/// Sigmoid is GLM-4-MoE, which has corrections and shared experts: with zeros and matrices without
/// elements nothing is missing, and the model is the one that was trained.
#[test]
fn a_sigmoid_router_is_exported_whole() {
    let job = trained(|model| {
        model.router.scoring = Scoring::Sigmoid;
        (model.router.bias, model.experts.shared) = (false, 0);
    });
    let out = job.folder.path().join("exported");
    let weights = open(&job.location());
    export(&weights, &out, Options::default(), &mut |_, _| {}).expect("GLM-4-MoE");
    let found = tensors(&out);
    let model = weights.model();
    for layer in (0..model.num_hidden_layers).filter(|layer| model.is_moe_layer(*layer)) {
        let at = format!("model.layers.{layer}.mlp");
        let (dtype, shape, bytes) = &found[&format!("{at}.gate.e_score_correction_bias")];
        assert_eq!((&dtype[..], shape, bytes), ("F32", &vec![4], &vec![0; 16]));
        let (_, shape, bytes) = &found[&format!("{at}.shared_experts.down_proj.weight")];
        assert_eq!((shape, bytes), (&vec![16, 0], &vec![]));
    }
    let step = import(&open(&out), &job.folder.path().join("again"), &mut |_, _| {});
    step.expect("what was exported is read");
    let data = DataConfig {
        validation: ValidationConfig { fraction: 0.0, every_steps: 0, max_sequences: 0 },
        ..job.config.data.clone()
    };
    let loss = |weights: &Weights| {
        let length = job.config.training.sequence_length;
        evaluate(weights, &data, length, threads(1), &mut |_, _| {}).expect("good").loss
    };
    assert_eq!(loss(&open(&out)), loss(&weights));
}

/// A tokenizer that puts `<s>` in front of a text, as a run never sees it.
fn tokenizer_with_begin() -> Value {
    let special = |content: &str, id: u32| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special("<unk>", 0), special("<s>", 1), special("</s>", 2)],
        "pre_tokenizer": { "type": "Whitespace" },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } },
                       { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } },
                     { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
        },
        "decoder": null,
        "model": { "type": "WordLevel", "unk_token": "<unk>",
                   "vocab": { "<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4 } },
    })
}

#[test]
fn an_exported_tokenizer_gives_what_the_run_has_seen() {
    let job = trained(|_| {});
    let tokenizer = tokenizer_with_begin();
    let text = json!({ "tokenizer": "tokenizer.json", "sequenceLength": 24, "endOfDocument": 2 });
    for (name, value) in [("tokenizer.json", &tokenizer), ("text.json", &text)] {
        std::fs::write(job.location().join(name), value.to_string()).expect("a file");
    }
    let out = job.folder.path().join("exported");
    export(&open(&job.location()), &out, Options::default(), &mut |_, _| {}).expect("Mixtral");
    let encoder = Encoder::read(&out).expect("a tokenizer");
    assert_eq!(encoder.encode_with_special("a b a"), Ok(vec![3, 4, 3]));
    assert_eq!(config_of(&out)["max_position_embeddings"], 24);
    // Weights from elsewhere keep the tokens that they were made with.
    let [source, imported, again] =
        ["source", "imported", "again"].map(|name| job.folder.path().join(name));
    let mut given = Fixture::new(&mixtral(), Layout::Letters, "F32");
    given.config["eos_token_id"] = json!(2);
    given.write(&source, 1);
    std::fs::write(source.join("tokenizer.json"), tokenizer.to_string()).expect("a file");
    import(&open(&source), &imported, &mut |_, _| {}).expect("room on the disk");
    export(&open(&imported), &again, Options::default(), &mut |_, _| {}).expect("Mixtral");
    for directory in [&source, &again] {
        let encoder = Encoder::read(directory).expect("a tokenizer");
        assert_eq!(encoder.encode_with_special("a b a"), Ok(vec![1, 3, 4, 3]));
    }
    assert_eq!(config_of(&again)["eos_token_id"], 2);
    let texts = [&source, &imported].map(|at| text::find(&open(at)).expect("its text"));
    assert!(texts.iter().all(|text| text.special && text.trained.is_none()), "{texts:?}");
}

#[test]
fn positions_survive_import_and_export() {
    for (typed, expected) in [(Some(32_768), 32_768), (None, 131_072)] {
        let folder = folder();
        let [source, imported, out] =
            ["source", "imported", "out"].map(|name| folder.path().join(name));
        let mut given = Fixture::new(&mixtral(), Layout::Letters, "F32");
        given.config["max_position_embeddings"] = json!(typed);
        given.write(&source, 1);
        import(&open(&source), &imported, &mut |_, _| {}).expect("room on the disk");
        export(&open(&imported), &out, Options::default(), &mut |_, _| {}).expect("Mixtral");
        assert_eq!(config_of(&out)["max_position_embeddings"], expected);
    }
}

/// What is computed is said by the export's own fields, whatever stands where its tokenizer is.
#[test]
fn nothing_that_is_computed_is_taken_from_elsewhere() {
    let folder = folder();
    let [source, like, out] = ["source", "like", "out"].map(|name| folder.path().join(name));
    Fixture::new(&qwen(), Layout::Each, "F32").write(&source, 1);
    let other = json!({
        "rope_scaling": { "rope_type": "yarn", "factor": 4.0 }, "partial_rotary_factor": 0.5,
        "sliding_window": 4, "use_sliding_window": true, "layer_types": ["sliding_attention"],
        "num_local_experts": 9, "attention_dropout": 0.1, "is_causal": false, "auto_map": {},
        "per_layer_config": { "0": {} }, "bos_token_id": 7, "of_somebody": "else",
    });
    std::fs::create_dir(&like).expect("a folder");
    std::fs::write(like.join("config.json"), other.to_string()).expect("a file");
    let options = Options { dtype: None, like: Some(&like) };
    export(&open(&source), &out, options, &mut |_, _| {}).expect("room on the disk");
    let (found, written) = (config_of(&out), open(&out));
    assert_eq!(written.model(), open(&source).model());
    assert_eq!((&found["bos_token_id"], &found["of_somebody"]), (&json!(7), &json!("else")));
    let taken = ["rope_scaling", "sliding_window", "layer_types", "num_local_experts", "is_causal"];
    assert!(taken.iter().all(|field| found.get(field).is_none()), "{found}");
    let told = written.warnings();
    assert!(told.len() == 1 && told[0].contains("of_somebody"), "{told:?}");
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

fn threads(threads: usize) -> Computer {
    Computer::Processors { threads, precision: Precision::Fp32 }
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
