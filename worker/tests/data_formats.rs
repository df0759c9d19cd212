//! The same documents in every format give the same batches; where documents begin, what is held
//! out, how sources are mixed, and tokens that were made ahead.

mod common;

use moe_worker::checkpoint::Disk;
use moe_worker::data::prepare::{Layout, Prepare, PrepareError};
use moe_worker::data::{Batch, Corpus, DataFile, Encoder, Format, Recipe, Width, megatron};
use moejob_protocol::config::{
    DataConfig, DataSource, MixturePart, TokenType, Tokenizer, TrainingConfig,
};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Texts of 3 to 60 bytes, with escapes and letters of two bytes.
fn documents(count: usize) -> Vec<String> {
    let text = |i: usize| {
        let words = ["gate", "Wörter", "\"top-k\"", "a\tb", "line\nend", "x"];
        let count = 1 + i * i % 9;
        (0..count).map(|j| words[(i + j * j) % words.len()]).collect::<Vec<_>>().join(" ")
    };
    (0..count).map(text).collect()
}

fn jsonl(documents: &[String]) -> Vec<u8> {
    let line = |text: &String| {
        let text = serde_json::to_string(text).expect("a string");
        format!("{{\"meta\":{{\"text\":1}},\"text\":{text}}}\n")
    };
    documents.iter().map(line).collect::<String>().into_bytes()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).expect("memory");
    out.finish().expect("memory")
}

/// Two frames.
fn zstd(bytes: &[u8]) -> Vec<u8> {
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    let (a, b) = bytes.split_at(bytes.len() / 3);
    [a, b].map(|part| ruzstd::encoding::compress_to_vec(part, level)).concat()
}

/// A frame that says something about the others, as `pzstd` and the seekable format have it.
fn skippable(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u32).to_le_bytes();
    [&[kind, 0x2a, 0x4d, 0x18], &length[..], bytes].concat()
}

#[test]
fn frames_that_hold_no_data_are_skipped() {
    let folder = tempfile::tempdir().expect("a folder");
    let lines = jsonl(&documents(60));
    let (first, last) = (skippable(0x50, b"size"), skippable(0x5e, &[0; 70_000]));
    let packed = [&first[..], &zstd(&lines), &skippable(0x5f, b""), &last].concat();
    write(folder.path(), "plain.jsonl", &lines);
    write(folder.path(), "packed.jsonl.zst", &packed);
    let batches = |name: &str| {
        let mut corpus = open(&data(source(folder.path(), name), 0.0));
        let read = |window| {
            let mut batch = Batch::new(16);
            corpus.fill_in_order(window, &mut batch).expect("data");
            batch
        };
        (0..20).map(read).collect::<Vec<_>>()
    };
    assert_eq!(batches("packed.jsonl.zst"), batches("plain.jsonl"));
    let more = [&packed[..], b"\x50more"].concat();
    for damaged in [&packed[..packed.len() - 1], &packed[..6], &more] {
        write(folder.path(), "packed.jsonl.zst", damaged);
        let damaged = data(source(folder.path(), "packed.jsonl.zst"), 0.0);
        let refused = Corpus::open(&damaged, &common::training(), 300);
        let said = refused.expect_err("a damaged file").to_string();
        assert!(said.contains("packed.jsonl.zst, reading: "), "{said}");
    }
}

fn index(width: Width, lengths: &[i32]) -> Vec<u8> {
    let bytes: Vec<u8> = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
    let mut out = Vec::new();
    megatron::write_index(&mut out, width, lengths.len() as u64, &mut || Ok(&bytes[..]))
        .expect("memory");
    out
}

fn write(folder: &Path, name: &str, bytes: &[u8]) {
    std::fs::write(folder.join(name), bytes).expect("a file");
}

/// The documents' bytes as ids, in every format.
fn write_all(folder: &Path, documents: &[String]) {
    let lines = jsonl(documents);
    write(folder, "plain.jsonl", &lines);
    write(folder, "packed.jsonl.gz", &gzip(&lines));
    write(folder, "packed.jsonl.zst", &zstd(&lines));
    let ids: Vec<u8> = documents.concat().into_bytes();
    let wide: Vec<u8> = ids.iter().flat_map(|id| u16::from(*id).to_le_bytes()).collect();
    let wider: Vec<u8> = ids.iter().flat_map(|id| u32::from(*id).to_le_bytes()).collect();
    write(folder, "flat16.bin", &wide);
    write(folder, "flat32.bin", &wider);
    for (name, magic, version, tokens) in
        [("gpt2.bin", 20_240_520_u32, 1, &wide), ("llama.bin", 20_240_801, 7, &wider)]
    {
        let mut words = [0_u32; 256];
        (words[0], words[1], words[2]) = (magic, version, ids.len() as u32);
        let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        write(folder, name, &[&head[..], tokens].concat());
    }
    let lengths: Vec<i32> = documents.iter().map(|text| text.len() as i32).collect();
    for (name, width, tokens) in [("mega", Width::U16, &wide), ("mega32", Width::I32, &wider)] {
        write(folder, &format!("{name}.idx"), &index(width, &lengths));
        write(folder, &format!("{name}.bin"), tokens);
    }
}

fn files(folder: &Path, name: &str) -> (String, Vec<String>, Vec<String>) {
    (folder.display().to_string(), vec![name.to_string()], vec![])
}

/// The source that `name` is.
fn source(folder: &Path, name: &str) -> DataSource {
    let (root, paths, exclude) = files(folder, name);
    let dtype = match name {
        "flat16.bin" => Some(TokenType::Uint16),
        "flat32.bin" => Some(TokenType::Uint32),
        _ => None,
    };
    match name {
        name if name.contains(".jsonl") => {
            DataSource::Jsonl { root, paths, exclude, field: "text".to_string() }
        }
        name if name.ends_with(".idx") => DataSource::Megatron { root, paths, exclude },
        name if name.ends_with(".bin") => DataSource::Tokens { root, paths, exclude, dtype },
        _ => DataSource::Text { root, paths, exclude },
    }
}

/// Files of every format that were moved, under names that sort in another order.
#[test]
fn files_that_were_moved_keep_their_names_and_places() {
    let home = tempfile::tempdir().expect("a folder");
    let (training, kept) = (common::training(), home.path().join("kept"));
    std::fs::create_dir(&kept).expect("a folder");
    let all = ["*.txt", "*.jsonl", "f*.bin", "*.idx"];
    let written = |folder: &Path, names: [&str; 3]| {
        std::fs::create_dir(folder).expect("a folder");
        for (name, first) in names.iter().zip([0, 60, 150]) {
            let documents = &documents(250)[first..first + 80];
            let ids: Vec<u8> = documents.concat().into_bytes();
            let wide: Vec<u8> = ids.iter().flat_map(|id| u16::from(*id).to_le_bytes()).collect();
            let lengths: Vec<i32> = documents.iter().map(|text| text.len() as i32).collect();
            write(folder, &format!("{name}.txt"), &ids);
            write(folder, &format!("{name}.jsonl"), &jsonl(documents));
            write(folder, &format!("f{name}.bin"), &wide);
            write(folder, &format!("{name}.idx"), &index(Width::U16, &lengths));
            write(folder, &format!("{name}.bin"), &wide);
        }
    };
    let (before, after) = (home.path().join("before"), home.path().join("after"));
    written(&before, ["a", "b", "c"]);
    written(&after, ["z", "y", "x"]);
    let of = |folder: &Path, name: &str| {
        let mut source = source(folder, name);
        if let DataSource::Tokens { dtype, .. } = &mut source {
            *dtype = Some(TokenType::Uint16);
        }
        source
    };
    let each = |folder: &Path| -> Vec<DataConfig> {
        let mut each: Vec<_> = all.iter().map(|name| data(of(folder, name), 0.4)).collect();
        let part = |name: &str| MixturePart { weight: 1.0, source: of(folder, name) };
        let parts = ["*.jsonl", "*.txt"].map(part).to_vec();
        each.push(data(DataSource::Mixture { parts }, 0.4));
        each
    };
    for (was, is) in each(&before).into_iter().zip(each(&after)) {
        let mut old = open(&was);
        old.listing().expect("few files").keep(&kept).expect("written");
        let opened = |data: &DataConfig, kept: Option<&Path>| {
            Corpus::open_on(&Disk::real(), (data, kept), &training, 300).expect("data")
        };
        let (mut moved, other) = (opened(&is, Some(&kept)), opened(&is, None));
        assert_eq!(moved.fingerprint(), old.fingerprint(), "{is:?}");
        assert_ne!(other.fingerprint(), old.fingerprint(), "{is:?}");
        assert_eq!(moved.held_out_names(), old.held_out_names());
        let taken = |corpus: &mut Corpus| batches(corpus, &training, 40);
        assert_eq!(taken(&mut moved), taken(&mut old), "{is:?}");
    }
}

const ALL: [&str; 9] = [
    "plain.jsonl",
    "packed.jsonl.gz",
    "packed.jsonl.zst",
    "flat16.bin",
    "flat32.bin",
    "gpt2.bin",
    "llama.bin",
    "mega.idx",
    "mega32.idx",
];

fn data(source: DataSource, fraction: f64) -> DataConfig {
    let mut data = common::data(Path::new("."));
    data.source = source;
    data.validation.fraction = fraction;
    data
}

fn open(data: &DataConfig) -> Corpus {
    Corpus::open(data, &common::training(), 300).expect("data")
}

/// Samples `0 .. count`, one a micro-batch.
fn batches(corpus: &mut Corpus, training: &TrainingConfig, count: u64) -> Vec<Batch> {
    let each = u64::from(training.global_batch_size);
    let mut one = |sample: u64| {
        let mut batch = Batch::new(training.sequence_length as usize);
        corpus.fill_micro_batch(sample / each, (sample % each) as u32, &mut batch).expect("data");
        batch
    };
    (0..count).map(&mut one).collect()
}

#[test]
fn every_format_gives_the_same_batches() {
    let folder = tempfile::tempdir().expect("a folder");
    let texts = documents(100);
    write_all(folder.path(), &texts);
    write(folder.path(), "all.txt", texts.concat().as_bytes());
    let training = common::training();
    let mut text = open(&data(source(folder.path(), "all.txt"), 0.0));
    let expected = batches(&mut text, &training, 60);
    let mut fingerprints = vec![text.fingerprint().to_string()];
    for name in ALL {
        let mut corpus = open(&data(source(folder.path(), name), 0.0));
        assert_eq!(corpus.sizes()[0].1, text.sizes()[0].1, "{name}");
        assert_eq!(batches(&mut corpus, &training, 60), expected, "{name}");
        if name.contains("json") || name.contains("mega") {
            assert_eq!(corpus.documents(), [100, 0], "{name}");
        }
        fingerprints.push(corpus.fingerprint().to_string());
    }
    fingerprints.sort();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), 10, "two formats have one fingerprint");
}

#[test]
fn an_evaluation_reads_every_window_in_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let texts = documents(40);
    write_all(folder.path(), &texts);
    let bytes: Vec<u32> = texts.concat().bytes().map(u32::from).collect();
    let mut corpus = open(&data(source(folder.path(), "mega.idx"), 0.0));
    assert_eq!(corpus.windows(), (bytes.len() as u64 - 1) / 16);
    for window in (0..corpus.windows() as usize - 1).step_by(2) {
        let mut batch = Batch::new(32);
        corpus.fill_in_order(window as u64, &mut batch).expect("data");
        assert_eq!(batch.ids, bytes[window * 16..window * 16 + 32]);
        assert_eq!(batch.targets, bytes[window * 16 + 1..window * 16 + 33]);
    }
}

#[test]
fn documents_are_held_out_whole_and_by_their_place() {
    let folder = tempfile::tempdir().expect("a folder");
    write_all(folder.path(), &documents(400));
    for name in ["plain.jsonl", "packed.jsonl.zst", "mega.idx"] {
        let all = open(&data(source(folder.path(), name), 0.0));
        for fraction in [1e-6, 0.1, 0.5] {
            let corpus = open(&data(source(folder.path(), name), fraction));
            let [training, held_out] = corpus.documents();
            assert_eq!(training + held_out, 400, "{name}");
            let tokens = corpus.sizes().map(|(_, tokens)| tokens);
            assert_eq!(tokens[0] + tokens[1], all.sizes()[0].1);
            // Of few documents at least a window is held out.
            assert!(tokens[1] > 16, "{name} {fraction}: {tokens:?}");
            if fraction >= 0.1 {
                let share = held_out as f64 / 400.0;
                assert!((share - fraction).abs() < 0.08, "{name}: {share} of {fraction}");
            }
            assert_eq!(all.fingerprint(), corpus.fingerprint());
        }
    }
    // An only file of flat tokens gives its end.
    let corpus = open(&data(source(folder.path(), "flat16.bin"), 0.1));
    let [(_, training), (_, held_out)] = corpus.sizes();
    assert_eq!(held_out, (training + held_out) / 10);
    // Data of its own is held out whole, and training data stays whole.
    let mut apart = data(source(folder.path(), "mega.idx"), 0.1);
    apart.held_out = Some(source(folder.path(), "gpt2.bin"));
    let corpus = open(&apart);
    assert_eq!(corpus.sizes()[0].1, corpus.sizes()[1].1);
    let other = open(&data(source(folder.path(), "mega.idx"), 0.1));
    assert_ne!(corpus.fingerprint(), other.fingerprint());
}

/// For each token of a stream where its document begins.
fn beginnings(lengths: &[usize]) -> Vec<usize> {
    let mut begin = 0;
    let mut all = Vec::new();
    for length in lengths {
        all.extend(vec![begin; *length]);
        begin += length;
    }
    all
}

#[test]
fn windows_know_where_documents_begin() {
    let folder = tempfile::tempdir().expect("a folder");
    let texts = documents(60);
    write_all(folder.path(), &texts);
    let ended: Vec<String> = texts.iter().map(|text| format!("{text}\u{3}")).collect();
    let wide: Vec<u8> =
        ended.concat().bytes().flat_map(|id| u16::from(id).to_le_bytes()).collect();
    write(folder.path(), "flat16.bin", &wide);
    let lengths: Vec<usize> = texts.iter().map(String::len).collect();
    let longer: Vec<usize> = lengths.iter().map(|length| length + 1).collect();
    for (name, end, lengths) in [
        ("plain.jsonl", None, &lengths),
        ("plain.jsonl", Some(299), &longer),
        ("mega.idx", None, &lengths),
        ("flat16.bin", Some(3), &longer),
    ] {
        let mut data = data(source(folder.path(), name), 0.0);
        data.reset_at_boundaries = true;
        data.end_of_document = end;
        let mut corpus = open(&data);
        let begins = beginnings(lengths);
        let all = begins.clone();
        data.mask_at_boundaries = true;
        let mut masks = open(&data);
        data.mask_at_boundaries = false;
        for window in 0..corpus.windows() {
            let mut batch = Batch::new(16);
            corpus.fill_in_order(window, &mut batch).expect("data");
            let first = window as usize * 16;
            let begins = &begins[first..first + 16];
            let expected: Vec<u32> =
                begins.iter().map(|at| at.saturating_sub(first) as u32).collect();
            assert_eq!(batch.starts.as_deref(), Some(&expected[..]), "{name} {end:?} {window}");
            let mut masked = Batch::new(16);
            masks.fill_in_order(window, &mut masked).expect("data");
            for at in 0..16 {
                let token = first + at + 1;
                let begins = all.get(token).is_none_or(|begin| *begin == token);
                let expected = if begins { u32::MAX } else { batch.targets[at] };
                assert_eq!(masked.targets[at], expected, "{name} {end:?} {window} {at}");
            }
        }
        assert_ne!(masks.fingerprint(), corpus.fingerprint());
        data.reset_at_boundaries = false;
        let mut together = open(&data);
        let mut batch = Batch::new(16);
        together.fill_in_order(0, &mut batch).expect("data");
        assert_eq!(batch.starts, None);
        assert_ne!(together.fingerprint(), corpus.fingerprint());
    }
}

#[test]
fn a_mixture_draws_from_each_source_by_its_weight_and_shows_each_window_once() {
    let folder = tempfile::tempdir().expect("a folder");
    // Tokens of the sources are told apart by their ids.
    for (name, base, windows) in [("a.bin", 0_u16, 700), ("b.bin", 100, 300), ("c.bin", 200, 100)] {
        let ids: Vec<u8> = (0..windows * 16 + 1)
            .flat_map(|i| (base + (i / 16 % 10) as u16 * 10 + (i % 10) as u16).to_le_bytes())
            .collect();
        write(folder.path(), name, &ids);
    }
    let part = |name: &str, weight| {
        let (root, paths, exclude) = files(folder.path(), name);
        let dtype = Some(TokenType::Uint16);
        MixturePart { weight, source: DataSource::Tokens { root, paths, exclude, dtype } }
    };
    let parts = vec![part("a.bin", 3.0), part("b.bin", 1.5), part("c.bin", 0.75)];
    let data = data(DataSource::Mixture { parts }, 0.0);
    let training = common::training();
    let mut corpus = open(&data);
    let all = batches(&mut corpus, &training, 4096);
    let mut counts = [0; 3];
    for batch in &all {
        let of = batch.ids[0] as usize / 100;
        assert!(batch.ids.iter().all(|id| *id as usize / 100 == of), "a window of two sources");
        counts[of] += 1;
    }
    assert_eq!(counts, [2341, 1170, 585]);
    // A step is computed from nothing.
    let mut again = open(&data);
    let mut batch = Batch::new(16);
    again.fill_micro_batch(700, 3, &mut batch).expect("data");
    assert_eq!(batch, all[3503]);
    let mut heavier = data.clone();
    let DataSource::Mixture { parts } = &mut heavier.source else { panic!("a mixture") };
    parts[0].weight = 2.0;
    assert_ne!(open(&heavier).fingerprint(), corpus.fingerprint());
    parts_refused(&data);
}

fn parts_refused(data: &DataConfig) {
    let mut training = common::training();
    training.sequence_length = 2000;
    training.global_batch_size = 2;
    let failure = Corpus::open(data, &training, 300).expect_err("too small").failure();
    assert!(failure.message.contains("part 2 of the mixture has 1601 tokens"), "{failure}");
    assert_eq!(failure.exit_code, 3);
}

/// Words that white space divides.
fn word_tokenizer(words: &[&str]) -> String {
    let vocabulary: BTreeMap<&str, usize> =
        words.iter().enumerate().map(|(id, word)| (*word, id)).collect();
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "?" },
    })
    .to_string()
}

const WORDS: [&str; 8] = ["?", "gate", "Wörter", "\"top-k\"", "a", "b", "line", "<end>"];

#[test]
fn a_tokenizer_file_makes_the_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let texts = documents(200);
    write_all(folder.path(), &texts);
    write(folder.path(), "tokenizer.json", word_tokenizer(&WORDS).as_bytes());
    let path = folder.path().join("tokenizer.json");
    let mut config = data(source(folder.path(), "packed.jsonl.gz"), 0.0);
    config.tokenizer = Tokenizer::Path(path.display().to_string());
    config.end_of_document = Some(7);
    let id = |word: &str| WORDS.iter().position(|known| *known == word).unwrap_or(0) as u32;
    let expected: Vec<u32> = texts
        .iter()
        .flat_map(|text| text.split_whitespace().map(id).chain([7]).collect::<Vec<_>>())
        .collect();
    let mut corpus = Corpus::open(&config, &common::training(), 8).expect("data");
    assert_eq!(corpus.sizes()[0].1, expected.len() as u64);
    for window in 0..corpus.windows() {
        let mut batch = Batch::new(16);
        corpus.fill_in_order(window, &mut batch).expect("data");
        assert_eq!(batch.ids, expected[window as usize * 16..][..16]);
    }
    // A file of text is one document.
    write(folder.path(), "words.txt", texts.join(" ").as_bytes());
    config.source = source(folder.path(), "words.txt");
    let words = texts.join(" ").split_whitespace().count() as u64;
    let mut text = Corpus::open(&config, &common::training(), 8).expect("data");
    assert_eq!(text.sizes()[0].1, words + 1);
    let mut batch = Batch::new(16);
    text.fill_in_order(0, &mut batch).expect("data");
    // Another tokenizer is another fingerprint, and one that is too large is refused.
    let before = corpus.fingerprint().to_string();
    let mut other = WORDS;
    other.swap(1, 2);
    write(folder.path(), "tokenizer.json", word_tokenizer(&other).as_bytes());
    config.source = source(folder.path(), "packed.jsonl.gz");
    let corpus = Corpus::open(&config, &common::training(), 8).expect("data");
    assert_ne!(corpus.fingerprint(), before);
    let failure = Corpus::open(&config, &common::training(), 7).expect_err("ids").failure();
    assert!(failure.message.contains("has ids up to 7, the model's vocabulary is 7"), "{failure}");
    assert_eq!(failure.exit_code, 2);
}

fn prepare(folder: &Path, output: &str, layout: Layout, threads: usize) -> Prepare {
    Prepare {
        files: vec![DataFile::named(&folder.join("many.jsonl")).expect("a file")],
        format: Format::Jsonl("text".to_string()),
        recipe: Recipe {
            encoder: Encoder::read(&folder.join("tokenizer.json")).expect("a tokenizer"),
            field: "text".to_string(),
            end_of_document: Some(7),
        },
        output: folder.join(output),
        layout,
        threads,
        save_every: Duration::ZERO,
    }
}

#[test]
fn tokens_made_ahead_are_the_same_after_any_interruption() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    write(folder, "many.jsonl", &jsonl(&documents(60_000)));
    write(folder, "tokenizer.json", word_tokenizer(&WORDS).as_bytes());
    let straight = prepare(folder, "straight", Layout::Megatron, 1);
    let mut steps = 0;
    let done = straight.run(&mut |_| steps += 1).expect("tokens");
    assert!(steps > 4, "{steps} chunks are too few to stop between them");
    assert_eq!(done.documents, 60_000);
    for (number, stop) in [1, 3, steps - 1].into_iter().enumerate() {
        let job = prepare(folder, &format!("stopped-{number}"), Layout::Megatron, 2);
        let mut seen = 0;
        let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            job.run(&mut |_| {
                seen += 1;
                assert!(seen <= stop, "stopped by the test");
            })
        }));
        assert!(stopped.is_err(), "it was not stopped");
        let mut first = None;
        let again = job.run(&mut |done| {
            first.get_or_insert(done.tokens);
        });
        assert_eq!(again.expect("the rest"), done);
        assert!(stop < 3 || first > Some(0), "it began anew");
        for ending in ["bin", "idx"] {
            let read = |name: &str| std::fs::read(folder.join(name).with_extension(ending));
            let name = format!("stopped-{number}");
            assert_eq!(read(&name).expect("a file"), read("straight").expect("a file"));
        }
        assert!(!folder.join(format!("stopped-{number}.state.json")).exists());
        assert!(matches!(job.run(&mut |_| ()), Err(PrepareError::Exists { .. })));
    }
    // Training on them is training on the documents.
    let mut direct = data(source(folder, "many.jsonl"), 0.0);
    direct.tokenizer = Tokenizer::Path(folder.join("tokenizer.json").display().to_string());
    direct.end_of_document = Some(7);
    let mut ahead = direct.clone();
    ahead.source = source(folder, "straight.idx");
    let [a, b] = [direct, ahead].map(|data| {
        let mut corpus = Corpus::open(&data, &common::training(), 8).expect("data");
        batches(&mut corpus, &common::training(), 40)
    });
    assert_eq!(a, b);
}

#[test]
fn nothing_is_made_of_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), "many.jsonl", &b"{\"text\":\"\"}\n".repeat(9));
    write(folder.path(), "tokenizer.json", word_tokenizer(&WORDS).as_bytes());
    for layout in [Layout::Megatron, Layout::Flat] {
        let mut job = prepare(folder.path(), "out", layout, 1);
        job.recipe.end_of_document = None;
        assert!(matches!(job.run(&mut |_| ()), Err(PrepareError::Nothing)));
    }
    let left = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left, 2, "something was left");
}

#[test]
fn a_state_of_another_run_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    write(folder, "many.jsonl", b"{\"text\":\"gate a\"}\n{\"text\":");
    write(folder, "tokenizer.json", word_tokenizer(&WORDS).as_bytes());
    let job = prepare(folder, "out", Layout::Flat, 1);
    let error = job.run(&mut |_| ()).expect_err("a line is cut off");
    assert!(error.to_string().contains("many.jsonl, line 2"), "{error}");
    let mut other = job.clone();
    other.recipe.end_of_document = None;
    assert!(matches!(other.run(&mut |_| ()), Err(PrepareError::OtherRun { .. })));
    write(folder, "out.state.json", b"{");
    assert!(matches!(job.run(&mut |_| ()), Err(PrepareError::State { .. })));
}

/// Flat tokens tell where documents end by a token alone. Whoever keeps documents apart, or masks
/// their ends, and names none is told, for it does nothing within a file.
#[test]
fn ends_of_documents_that_nothing_tells_are_missed() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokens: Vec<u8> = (0..4096_u16).flat_map(|id| (id % 200).to_le_bytes()).collect();
    std::fs::write(folder.path().join("a.bin"), tokens).expect("a file");
    let (root, paths, exclude) = files(folder.path(), "a.bin");
    let dtype = Some(TokenType::Uint16);
    let flat = data(DataSource::Tokens { root, paths, exclude, dtype }, 0.0);
    for (resets, masks, end, expected) in [
        (false, false, None, ""),
        (true, false, None, "data.resetAtBoundaries: files of tokens tell no end"),
        (false, true, None, "data.maskAtBoundaries: files of tokens tell no end"),
        (true, true, Some(199), ""),
    ] {
        let data = DataConfig {
            reset_at_boundaries: resets,
            mask_at_boundaries: masks,
            end_of_document: end,
            ..flat.clone()
        };
        let told = open(&data).all_overlaps().expect("read").doubts;
        assert_eq!(told.len(), usize::from(!expected.is_empty()), "{told:?}");
        assert!(told.iter().all(|told| told.starts_with(expected)), "{told:?}");
    }
}
