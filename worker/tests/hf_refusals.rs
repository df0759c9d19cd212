//! Whatever may be wrong with a Hugging Face directory is refused by file and position.

mod common;
#[path = "common/hf.rs"]
mod fixture;

use fixture::{Fixture, Layout, Tensor, write_file, write_raw};
use moe_worker::hf::Weights;
use moejob_protocol::ModelConfig;
use moejob_protocol::checkpoint::TENSORS_MAX;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const ROUTER: &str = "model.layers.1.mlp.gate.weight";
const EXPERT: &str = "model.layers.0.mlp.experts.3.down_proj.weight";
const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn model() -> ModelConfig {
    let mut model = common::model();
    model.tie_word_embeddings = false;
    model
}

fn good() -> Fixture {
    Fixture::new(&model(), Layout::Each, "F32")
}

/// All that is said when a directory is opened and read.
fn refusal(directory: &Path) -> String {
    let weights = match Weights::open(directory) {
        Ok(weights) => weights,
        Err(refusal) => return refusal.to_string(),
    };
    let read = |index| weights.stream(index, &mut |_, _| Ok(()));
    let first = (0..weights.params().len()).find_map(|index| read(index).err());
    first.map_or("nothing".to_string(), |problem| problem.to_string())
}

fn check(name: &str, said: &[&str], make: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().expect("a folder");
    make(folder.path());
    let found = refusal(folder.path());
    for words in said {
        assert!(found.contains(words), "{name}: {found:?} does not say {words:?}");
    }
}

/// A good directory with something changed before it is written.
fn check_changed(name: &str, said: &[&str], change: impl FnOnce(&mut Fixture)) {
    check(name, said, |at| {
        let mut fixture = good();
        change(&mut fixture);
        fixture.write(at, 1);
    });
}

#[test]
fn the_directory_itself_is_good() {
    let folder = tempfile::tempdir().expect("a folder");
    good().write(folder.path(), 3);
    assert_eq!(refusal(folder.path()), "nothing");
}

fn bytes_of(name: &str, said: &[&str], change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
    check(name, &[&[FILE], said].concat(), |at| {
        good().write(at, 1);
        let path = at.join(FILE);
        let file = fs::read(&path).expect("a file");
        fs::write(&path, change(file)).expect("a file");
    });
}

fn with_length(mut file: Vec<u8>, length: u64) -> Vec<u8> {
    file[..8].copy_from_slice(&length.to_le_bytes());
    file
}

#[test]
fn headers_that_lie() {
    bytes_of("short", &["fewer than 8 bytes"], |file| file[..5].to_vec());
    bytes_of("endless", &["18446744073709551615 at byte 0"], |file| with_length(file, u64::MAX));
    bytes_of("200 MB", &["200000000 at byte 0"], |file| with_length(file, 200_000_000));
    bytes_of("empty", &["a length of 0"], |file| with_length(file, 0));
    bytes_of("no JSON", &["line 1 column"], |mut file| {
        file[20] = b'\x01';
        file
    });
    bytes_of("a space first", &["byte 8 is 0x20"], |file| {
        let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes"));
        let mut file = with_length(file, length + 1);
        file.insert(8, b' ');
        file
    });
    bytes_of("cut", &["cut short"], |file| file[..file.len() - 3].to_vec());
    bytes_of("more", &["4 bytes follow the last tensor"], |mut file| {
        file.extend_from_slice(b"PK\x03\x04");
        file
    });
}

fn header(name: &str, said: &[&str], change: impl FnOnce(&mut Value)) {
    check(name, &[&[FILE], said].concat(), |at| {
        let fixture = good();
        fixture.write(at, 1);
        let tensors = fixture.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        let (mut header, data) = fixture::parts(tensors);
        change(&mut header);
        write_file(&at.join(FILE), &header, &data);
    });
}

#[test]
fn entries_that_lie() {
    header("backwards", &[ROUTER, "bytes 9..3"], |all| all[ROUTER]["data_offsets"] = json!([9, 3]));
    header("shape", &[ROUTER, "are not [5, 16]"], |all| all[ROUTER]["shape"] = json!([5, 16]));
    header("overflow", &[ROUTER], |all| {
        all[ROUTER]["shape"] = json!([1_u64 << 40, 1_u64 << 40]);
    });
    header("dtype", &[ROUTER, "\"F7\" is unknown"], |all| all[ROUTER]["dtype"] = json!("F7"));
    header("overlap", &["an overlap at byte"], |all| {
        let other = all[EXPERT]["data_offsets"].clone();
        let first = other[0].as_u64().expect("a number");
        all[EXPERT]["data_offsets"] = json!([first - 64, first - 64 + 16 * 8 * 4]);
    });
    header("gap", &["a gap at byte"], |all| {
        all.as_object_mut().expect("an object").remove(EXPERT);
    });
    header("path", &["../../etc/passwd", "no name of a tensor"], |all| {
        let entry = all[EXPERT].take();
        all.as_object_mut().expect("an object").remove(EXPERT);
        all["../../etc/passwd"] = entry;
    });
    header("control", &["no name of a tensor"], |all| {
        let entry = all[EXPERT].take();
        all.as_object_mut().expect("an object").remove(EXPERT);
        all["a\u{1b}[2Jb"] = entry;
    });
    header("unknown field", &["unknown field `strides`"], |all| {
        all[EXPERT]["strides"] = json!([1]);
    });
    header("many", &["more than 786432 tensors"], |all| {
        let entry = json!({ "dtype": "F32", "shape": [0], "data_offsets": [0, 0] });
        (0..=TENSORS_MAX).for_each(|number| all[format!("x{number}")] = entry.clone());
    });
    check("the same name twice", &[FILE, "comes twice"], |at| {
        good().write(at, 1);
        let entry = r#""a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
        write_raw(&at.join(FILE), format!("{{{entry},{entry}}}").as_bytes(), &[]);
    });
}

#[test]
fn weights_that_are_no_model() {
    check_changed("missing", &[EXPERT, "it is missing"], |fixture| {
        fixture.tensors.remove(EXPERT);
    });
    check_changed("extra", &[FILE, "model.layers.7.mlp.gate.weight is none"], |fixture| {
        let more = fixture.tensors[ROUTER].clone();
        fixture.tensors.insert("model.layers.7.mlp.gate.weight".to_string(), more);
    });
    check_changed("an expert twice", &[EXPERT, "it comes twice", "block_sparse_moe"], |fixture| {
        let again = fixture.tensors[EXPERT].clone();
        let name = "model.layers.0.block_sparse_moe.experts.3.w2.weight".to_string();
        fixture.tensors.insert(name, again);
    });
    let fused = "model.layers.0.mlp.experts.down_proj";
    check_changed("fused and apart", &["it comes twice", fused], |fixture| {
        let bytes = vec![0; 4 * 16 * 8 * 4];
        let tensor = Tensor { dtype: "F32", shape: vec![4, 16, 8], bytes };
        fixture.tensors.insert(fused.to_string(), tensor);
    });
    check_changed("shape", &[FILE, ROUTER, "- [4, 16] by config.json", "+ [16, 4]"], |fixture| {
        fixture.tensors.get_mut(ROUTER).expect("a router").shape = vec![16, 4];
    });
    check_changed("integers", &[FILE, ROUTER, "I32, not F16, BF16, F32 or F64"], |fixture| {
        fixture.tensors.get_mut(ROUTER).expect("a router").dtype = "I32";
    });
    let value = |fixture: &mut Fixture, name: &str, at: usize, value: f32| {
        let tensor = fixture.tensors.get_mut(name).expect("a tensor");
        tensor.bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
    };
    check_changed("NaN", &[FILE, EXPERT, "row 2, column 1"], |fixture| {
        value(fixture, EXPERT, 17, f32::NAN);
    });
    check_changed("infinity", &[FILE, "lm_head.weight", "row 0, column 0"], |fixture| {
        value(fixture, "lm_head.weight", 0, f32::NEG_INFINITY);
    });
    check_changed("zeros", &[FILE, ROUTER, "the router is all zeros"], |fixture| {
        fixture.tensors.get_mut(ROUTER).expect("a router").bytes.fill(0);
    });
}

/// With `tie_word_embeddings` an output that is stored all the same is the embedding, bit for bit.
#[test]
fn an_output_that_is_tied_and_another() {
    let tied = |said: &[&str], change: &dyn Fn(&mut Tensor)| {
        check_changed("tied", said, |fixture| {
            fixture.config["tie_word_embeddings"] = json!(true);
            let mut output = fixture.tensors["model.embed_tokens.weight"].clone();
            change(&mut output);
            fixture.tensors.insert("lm_head.weight".to_string(), output);
        });
    };
    tied(&["nothing"], &|_| {});
    let said = [FILE, "lm_head.weight differs from the embedding", "tie_word_embeddings"];
    tied(&said, &|output| *output.bytes.last_mut().expect("bytes") ^= 1);
    tied(&["has another type"], &|output| output.dtype = "I32");
    tied(&["has another size"], &|output| {
        output.shape[0] -= 1;
        output.bytes.truncate(255 * 16 * 4);
    });
}

#[test]
fn formats_that_are_not_read() {
    for name in ["pytorch_model.bin", "model.pt", "last.ckpt", "m.pth"] {
        check(name, &[name, "pickle is refused", "save_pretrained"], |at| {
            good().write(at, 1);
            fs::rename(at.join(FILE), at.join(name)).expect("a file");
        });
    }
    check("gguf", &["model.gguf", "GGUF is not read"], |at| {
        good().write(at, 1);
        fs::rename(at.join(FILE), at.join("model.gguf")).expect("a file");
    });
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("model.bin");
    fs::write(&file, b"\x80\x02").expect("a file");
    assert!(refusal(&file).contains("pickle is refused"), "{}", refusal(&file));
    assert!(refusal(&folder.path().join("absent")).contains("there is no such folder"));
    check("empty", &["a folder without weights", "config.json"], |_| {});
    check("no weights", &["no *.safetensors"], |at| {
        good().write(at, 1);
        fs::remove_file(at.join(FILE)).expect("a file");
    });
}

#[test]
fn an_index_that_lies() {
    let index = |name: &str, said: &[&str], change: &dyn Fn(&mut Value, &Path)| {
        check(name, said, |at| {
            good().write(at, 3);
            let path = at.join(INDEX);
            let mut all: Value =
                serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
            change(&mut all, at);
            fs::write(path, all.to_string()).expect("a file");
        });
    };
    for outside in ["../other.safetensors", "/etc/passwd", "a/b.safetensors", "x\0.safetensors"] {
        index("outside", &[INDEX, "of this directory"], &|all, _| {
            all["weight_map"][ROUTER] = json!(outside);
        });
    }
    index("two versions", &[INDEX, FILE, "delete what is old"], &|_, at| {
        good().write(&at.join("other"), 1);
        fs::rename(at.join("other").join(FILE), at.join(FILE)).expect("a file");
    });
    index("pickle", &[INDEX, "pickle is refused"], &|all, _| {
        all["weight_map"][ROUTER] = json!("pytorch_model-00001-of-00002.bin");
    });
    let second = "model-00002-of-00003.safetensors";
    index("missing shard", &[second, "it is missing"], &|_, at| {
        fs::remove_file(at.join(second)).expect("a file");
    });
    index("elsewhere", &[INDEX, "says otherwise"], &|all, _| {
        all["weight_map"][ROUTER] = json!("model-00001-of-00003.safetensors");
    });
    index("not there", &[INDEX, "more.weight should be in", second], &|all, _| {
        all["weight_map"]["more.weight"] = json!(second);
    });
    index("nothing", &[INDEX, "weight_map names no file"], &|all, _| {
        all["weight_map"] = json!({});
    });
    check("no index", &[INDEX, "it is missing, and 3"], |at| {
        good().write(at, 3);
        fs::remove_file(at.join(INDEX)).expect("a file");
    });
}

#[test]
fn configurations_that_are_not_built_in() {
    let config = |field: &str, value: Value, said: &str| {
        check_changed(field, &["config.json", field, said], |fixture| {
            fixture.config[field] = value;
        });
    };
    config("architectures", json!(["LlamaForCausalLM"]), "MixtralForCausalLM, Qwen3MoeForCausalLM");
    config("architectures", json!(["DeepseekV3ForCausalLM"]), "latent attention");
    config("quantization_config", json!({ "quant_method": "gptq" }), "\"gptq\"");
    config("hidden_act", json!("gelu"), "gelu_pytorch_tanh");
    config("hidden_size", json!(-3), "-3 is no whole number");
    config("hidden_size", json!("16"), "no whole number");
    config("num_attention_heads", Value::Null, "it is missing");
    config("rms_norm_eps", json!("small"), "no finite number");
    config("tie_word_embeddings", json!(1), "neither true nor false");
    config("rope_parameters", json!({ "rope_type": "yarn" }), "\"yarn\" are not built in");
    check_changed("half turned", &["partial_rotary_factor", "0.5: heads are turned"], |fixture| {
        fixture.config["rope_scaling"] = Value::Null;
        fixture.config["partial_rotary_factor"] = json!(0.5);
    });
    config("sliding_window", json!(128), "a token would see 128 tokens at most");
    config("num_experts_per_tok", json!(9), "9 of 4 experts");
    config("model_type", json!("olmoe"), "olmoe, and architectures says MixtralForCausalLM");
    config("architectures", json!(["DeepseekForCausalLM"]), "none of the models of transformers");
    config("architectures", json!(["DeepseekV4ForCausalLM"]), "is unknown");
    config("rope_scaling", json!("yarn"), "\"yarn\" is no JSON object");
    config("rope_scaling", json!({ "rope_type": "default", "rope_theta": "1e6" }), "no finite");
    config("rope_parameters", json!({ "type": 3 }), "rotary positions 3 are not built in");
    config("rope_parameters", json!({ "full_attention": {} }), "each kind of layer");
    config("rope_parameters", json!({ "mrope_section": [2] }), "the rotary positions built in");
    config("rope_theta", json!(0), "it is 0");
    config("partial_rotary_factor", json!("1"), "no finite number");
    config("layer_types", json!("full_attention"), "full_attention alone");
    config("layer_types", json!(["full_attention"]), "not one for each of 2 layers");
    config("sliding_window", json!("none"), "no whole number");
    config("attention_chunk_size", json!(8), "over chunks");
    config("attention_dropout", json!(0.1), "training with it is not built in");
    config("router_jitter_noise", json!(0.1), "training with it is not built in");
    config("hidden_act", json!(3), "3 is not built in");
    config("is_causal", json!(false), "behind them");
    config("per_layer_config", json!({ "0": { "head_dim": 4 } }), "fields of their own");
    config("transformers_weights", json!("other.safetensors"), "in another file");
    config("compression_config", json!({ "quant_method": "fp8" }), "\"fp8\"");
    config("num_key_value_heads", json!(3), "3 does not divide 2 heads");
    config("vocab_size", json!(1_u64 << 31), "impossible sizes");
    let folder = tempfile::tempdir().expect("a folder");
    let mut fixture = good();
    fixture.config["architectures"] = json!(["DeepseekForCausalLM"]);
    fixture.write(folder.path(), 1);
    // Its heads are ordinary ones.
    assert!(!refusal(folder.path()).contains("latent"), "{}", refusal(folder.path()));
    check("no JSON", &["config.json", "line 1 column 2"], |at| {
        good().write(at, 1);
        fs::write(at.join("config.json"), "{,}").expect("a file");
    });
    check("no object", &["config.json", "no JSON object"], |at| {
        good().write(at, 1);
        fs::write(at.join("config.json"), "[]").expect("a file");
    });
}
