//! Bad data: each is refused by name and place, before a token of it is trained on.

mod common;

use moe_worker::data::inspect::inspect;
use moe_worker::data::{Corpus, Encoder};
use moejob_protocol::config::{DataConfig, DataSource, TokenType, Tokenizer};
use std::io::Write;
use std::path::Path;

/// Lets a case change the one good index: two documents of three sequences, uint16.
fn index(change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(8);
    bytes.extend(3_u64.to_le_bytes());
    bytes.extend(3_u64.to_le_bytes());
    bytes.extend([200_i32, 100, 100].iter().flat_map(|length| length.to_le_bytes()));
    bytes.extend([0_i64, 400, 600].iter().flat_map(|place| place.to_le_bytes()));
    bytes.extend([0_i64, 2, 3].iter().flat_map(|mark| mark.to_le_bytes()));
    change(&mut bytes);
    bytes
}

/// Byte of the index where its lengths, places and marks begin.
const LENGTHS: usize = 34;
const PLACES: usize = LENGTHS + 3 * 4;
const MARKS: usize = PLACES + 3 * 8;

fn put(bytes: &mut [u8], at: usize, word: &[u8]) {
    bytes[at..at + word.len()].copy_from_slice(word);
}

fn llm_c(magic: u32, version: u32, said: u32, tokens: &[u16]) -> Vec<u8> {
    let mut words = [0_u32; 256];
    (words[0], words[1], words[2]) = (magic, version, said);
    let head = words.iter().flat_map(|word| word.to_le_bytes());
    head.chain(tokens.iter().flat_map(|token| token.to_le_bytes())).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).expect("memory");
    out.finish().expect("memory")
}

fn data(folder: &Path, name: &str, dtype: Option<TokenType>) -> DataConfig {
    let (root, paths, exclude) = (folder.display().to_string(), vec![name.to_string()], vec![]);
    let field = "text".to_string();
    let mut data = common::data(folder);
    data.validation.fraction = 0.0;
    data.source = match name {
        name if name.contains(".jsonl") => DataSource::Jsonl { root, paths, exclude, field },
        name if name.ends_with(".parquet") => DataSource::Parquet { root, paths, exclude, field },
        name if name.ends_with(".idx") => DataSource::Megatron { root, paths, exclude },
        name if name.ends_with(".bin") => DataSource::Tokens { root, paths, exclude, dtype },
        _ => DataSource::Text { root, paths, exclude },
    };
    data
}

/// The refusal of `data` names the file, and says `why` with the place in it.
fn refused(data: &DataConfig, name: &str, exit_code: i32, why: &str) {
    let error = Corpus::open(data, &common::training(), 300).expect_err(name);
    let failure = error.failure();
    assert_eq!(failure.exit_code, exit_code, "{failure}");
    assert!(failure.message.contains(name), "{failure} does not name {name}");
    assert!(failure.message.contains(why), "{failure}\nexpected {why}");
    assert!(!failure.advice.is_empty());
}

#[test]
fn bad_indices_are_refused_by_place() {
    type Change = fn(&mut Vec<u8>);
    let cases: [(Change, &str); 21] = [
        (
            |bytes| {
                put(bytes, 18, &[0; 16]);
                bytes.truncate(34);
            },
            "byte 18: it has no documents",
        ),
        (|bytes| put(bytes, 0, b"MMAPIDX"), "byte 0: it does not begin with MMIDIDX"),
        (|bytes| bytes.truncate(20), "byte 0: 20 bytes are no index"),
        (|bytes| put(bytes, 9, &[2]), "byte 9: version 2, and 1 is known"),
        (|bytes| put(bytes, 17, &[0]), "byte 17: dtype 0 is unknown"),
        (|bytes| put(bytes, 17, &[9]), "byte 17: dtype 9 is unknown"),
        (|bytes| put(bytes, 17, &[7]), "byte 17: dtype 7 is a float"),
        (|bytes| put(bytes, 17, &[4]), "sequence 1: it is said to lie at byte 400"),
        (|bytes| put(bytes, 18, &[0xff; 8]), "byte 18: 18446744073709551615 sequences"),
        (|bytes| put(bytes, 26, &[9]), "byte 18: 3 sequences and 9 marks"),
        (|bytes| bytes.push(0), "need 94 bytes, the file has 95"),
        (|bytes| bytes.extend([0; 3]), "multimodal"),
        (|bytes| put(bytes, LENGTHS + 4, &(-5_i32).to_le_bytes()), "sequence 1: a length of -5"),
        (|bytes| put(bytes, LENGTHS + 8, &[101]), "sequence 2: 101 tokens at byte 600"),
        (|bytes| put(bytes, LENGTHS + 8, &[99]), "the end: the sequences have 798 bytes"),
        (|bytes| put(bytes, PLACES + 8, &[0; 8]), "sequence 1: it is said to lie at byte 0"),
        (|bytes| put(bytes, PLACES + 16, &[89]), "sequence 2: it is said to lie at byte 601"),
        (|bytes| put(bytes, MARKS, &[1]), "document 0: it begins with sequence 1"),
        (|bytes| put(bytes, MARKS + 8, &[4]), "document 1: its first sequence lies before"),
        (|bytes| put(bytes, MARKS + 16, &[1]), "document 2: its first sequence lies before"),
        (|bytes| put(bytes, MARKS + 16, &[2]), "sequence 2: it belongs to no document"),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(name), bytes).expect("a file");
    };
    let only = data(folder.path(), "bad.idx", None);
    write("bad.bin", &[1; 800]);
    write("bad.idx", &index(|_| ()));
    // Every id is 257.
    Corpus::open(&only, &common::training(), 300).expect("the good one");
    for (change, why) in cases {
        write("bad.idx", &index(change));
        refused(&only, "bad.idx", 3, why);
    }
    write("bad.idx", &index(|_| ()));
    for (bytes, name, why) in [
        (801, "bad.bin", "the end: 801 bytes are no whole number of uint16"),
        (802, "bad.idx", "the sequences have 800 bytes, the .bin has 802"),
        (600, "bad.idx", "sequence 2: 100 tokens at byte 600 of a .bin of 600 bytes"),
    ] {
        write("bad.bin", &vec![1; bytes]);
        refused(&only, name, 3, why);
    }
    write("bad.bin", &[&[1; 702][..], &[0xff, 0x7f], &[1; 96]].concat());
    refused(&only, "bad.bin, token 351", 3, "the id 32767 is outside of the vocabulary of 300");
    std::fs::remove_file(folder.path().join("bad.bin")).expect("a file");
    refused(&only, "bad.bin", 3, "cannot be read");
    std::fs::create_dir(folder.path().join("bad.bin")).expect("a folder");
    refused(&only, "bad.bin", 3, "it is a directory");
    write("other.idx.txt", b"x");
    let mut text = data(folder.path(), "bad.idx", None);
    let DataSource::Megatron { paths, .. } = &mut text.source else { panic!("megatron") };
    *paths = vec!["*.txt".to_string()];
    refused(&text, "other.idx.txt", 3, "it is no .idx file of Megatron");
}

#[test]
fn files_of_tokens_are_told_apart_and_never_guessed() {
    let folder = tempfile::tempdir().expect("a folder");
    let (u16, u32) = (Some(TokenType::Uint16), Some(TokenType::Uint32));
    let ids = [7_u16; 100];
    let flat: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let mut large = flat.clone();
    put(&mut large, 34, &300_u16.to_le_bytes());
    let cases = [
        (flat.clone(), None, "byte 0: it has no header of llm.c: say dtype"),
        (flat[..199].to_vec(), u16, "byte 198: 199 bytes are no whole number of uint16"),
        (flat[..198].to_vec(), u32, "byte 196: 198 bytes are no whole number of uint32"),
        (flat, u32, "token 0: the id 458759 is outside of the vocabulary of 300"),
        (large, u16, "token 17: the id 300 is outside"),
        (llm_c(20_240_520, 1, 99, &ids), None, "byte 8: 99 tokens in the header need 1222 bytes"),
        (llm_c(20_240_520, 1, 101, &ids), u16, "the file has 1224"),
        (llm_c(20_240_520, 2, 100, &ids), None, "byte 4: a header of llm.c (20240520)"),
        (llm_c(20_240_520, 1, 100, &ids), u32, "its header means uint16, the manifest says uint32"),
        (llm_c(20_240_801, 7, 100, &ids), None, "100 tokens in the header need 1424 bytes"),
        (llm_c(20_240_520, 1, 100, &ids)[..10].to_vec(), u16, "byte 8: 0 tokens in the header"),
        (llm_c(20_240_520, 1, 0, &[]), None, "byte 8: 0 tokens in the header"),
    ];
    for (bytes, dtype, why) in cases {
        std::fs::write(folder.path().join("bad.bin"), bytes).expect("a file");
        refused(&data(folder.path(), "bad.bin", dtype), "bad.bin", 3, why);
    }
    std::fs::write(folder.path().join("bad.bin"), llm_c(20_240_520, 1, 100, &ids)).expect("a file");
    Corpus::open(&data(folder.path(), "bad.bin", None), &common::training(), 300).expect("good");
}

#[test]
fn bad_lines_are_refused_by_line_and_column() {
    let folder = tempfile::tempdir().expect("a folder");
    let good = b"{\"text\":\"enough of it\"}\n".repeat(20);
    let after = |line: &[u8]| [&good[..], line].concat();
    let cases: [(&str, Vec<u8>, &str); 19] = [
        ("a.jsonl", after(b"{\"text\":\"\xc3\x28\"}\n"), "line 21, column 10: bytes that are no"),
        ("a.jsonl", after(b"{\"body\":\"x\"}\n"), "line 21: no key `text`; its keys: bo"),
        ("a.jsonl", after(b"{\"text\":12}\n"), "line 21, column 10: invalid type: integer `12`"),
        ("a.jsonl", after(b"{\"text\":\"a\0b\"}\n"), "line 21, column 11: a NUL byte"),
        ("a.jsonl", after(b"[\"text\"]\n"), "line 21"),
        ("a.jsonl", after(b"{\"text\":\"cut o"), "line 21, column 14: the line is cut off"),
        ("a.jsonl", after(b"{\"text\":\"a\"} {\"text\":\"b\"}\n"), "line 21, column 14: trailing"),
        ("a.jsonl", [b"\xef\xbb\xbf", &good[..]].concat(), "line 1, column 1: a byte-order mark"),
        ("a.jsonl", b"\xff\xfe{\0\"\0t\0".to_vec(), "line 1, column 1: the file is UTF-16"),
        ("a.jsonl", vec![b' '; 9 << 20], "line 1: the line has more than 8 MiB"),
        ("a.jsonl", after(&vec![b'x'; 10 << 20]), "line 21: the line has more than 8 MiB"),
        ("a.jsonl", b"\n\n  \n".to_vec(), "0 tokens"),
        ("a.jsonl.gz", good.clone(), "byte 0: it is not compressed as its name says"),
        ("a.jsonl.zst", gzip(&good), "byte 0: it is not compressed as its name says"),
        ("a.jsonl.gz", gzip(&good)[..40].to_vec(), "the file is cut off"),
        ("a.jsonl.gz", [gzip(&good), gzip(&good)[..9].to_vec()].concat(), "the file is cut off"),
        ("a.jsonl.gz", [gzip(&good), b"more".to_vec()].concat(), "reading: bytes that are no gzip"),
        ("a.jsonl.gz", [gzip(&good), vec![0; 512]].concat(), "reading: bytes that are no gzip"),
        ("a.jsonl.gz", gzip(&vec![b'a'; 64 << 20]), "line 1: the line has more than 8 MiB"),
    ];
    for (name, bytes, why) in cases {
        std::fs::write(folder.path().join(name), bytes).expect("a file");
        let name_in = if why == "0 tokens" { "training files" } else { name };
        refused(&data(folder.path(), name, None), name_in, 3, why);
    }
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    let packed = ruzstd::encoding::compress_to_vec(&good[..], level);
    for damaged in [packed[..packed.len() - 5].to_vec(), [&packed[..], b"more"].concat()] {
        std::fs::write(folder.path().join("a.jsonl.zst"), damaged).expect("a file");
        refused(&data(folder.path(), "a.jsonl.zst", None), "a.jsonl.zst", 3, "reading: ");
    }
}

/// Names and links inside of an archive are never looked at: none is unpacked.
#[test]
fn what_is_no_text_is_told_by_its_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut tar = vec![0; 2048];
    put(&mut tar, 0, b"../../etc/passwd");
    put(&mut tar, 257, b"ustar\0");
    let zip = [&b"PK\x03\x04"[..], &[0; 600]].concat();
    let line = b"{\"text\":\"enough of it\"}\n".repeat(20);
    let uint16 = Some(TokenType::Uint16);
    let cases: [(&str, Vec<u8>, &str); 10] = [
        ("a.txt", tar.clone(), "byte 257: it is a tar archive (WebDataset): unpack it"),
        ("a.jsonl", tar.clone(), "byte 257: it is a tar archive (WebDataset): unpack it"),
        ("a.jsonl.gz", gzip(&tar), "byte 257: it is a tar archive (WebDataset): unpack it"),
        ("a.bin", tar, "byte 257: it is a tar archive (WebDataset): unpack it"),
        ("a.txt", gzip(&line), "byte 0: it is compressed by gzip"),
        ("a.txt", zip, "byte 0: it is a zip archive"),
        ("a.txt", b"PAR1 and so on".to_vec(), "byte 0: it is a Parquet file: name it under"),
        ("a.bin", b"\x93NUMPY\x01\0 and so on".to_vec(), "byte 0: it is NumPy's .npy"),
        ("a.txt", b"BZh91AY&SY".to_vec(), "byte 0: it is compressed by bzip2"),
        ("a.jsonl", b"\xfd7zXZ\0\0".to_vec(), "byte 0: it is compressed by xz"),
    ];
    for (name, bytes, why) in cases {
        std::fs::write(folder.path().join(name), bytes).expect("a file");
        refused(&data(folder.path(), name, uint16), name, 3, why);
    }
    // Two bytes alone may be tokens.
    std::fs::write(folder.path().join("a.bin"), [0x1f, 0x00].repeat(200)).expect("a file");
    Corpus::open(&data(folder.path(), "a.bin", uint16), &common::training(), 300).expect("ids");
}

#[test]
fn no_kind_of_data_waits_for_what_is_no_file() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["pipe.jsonl", "pipe.bin", "pipe.idx", "pipe.txt", "pipe.parquet"] {
        let path = folder.path().join(name);
        let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, mode, 0).expect("a pipe");
        let data = data(folder.path(), name, Some(TokenType::Uint16));
        refused(&data, name, 3, "it is no regular file");
    }
}

#[test]
fn bad_tokenizers_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("a.jsonl"), b"{\"text\":\"enough of it\"}\n".repeat(20)).expect("a file");
    let mut data = data(folder.path(), "a.jsonl", None);
    let unclosed = br#"{"version":"1.0","pre_tokenizer":{"type":"Split","pattern":
        {"Regex":"(a"},"behavior":"Isolated","invert":false},
        "model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#;
    let gap = br#"{"added_tokens":[{"id":9,"content":"<end>","single_word":false,"lstrip":false,
        "rstrip":false,"normalized":false,"special":true}],
        "model":{"type":"WordLevel","vocab":{"a":0,"b":1},"unk_token":"a"}}"#;
    let dropout = br#"{"model":{"type":"BPE","dropout":0.1,"vocab":{"a":0,"b":1},"merges":[]}}"#;
    let cases: [(&str, &[u8], &str); 6] = [
        ("gap.json", gap, "the added token \"<end>\" has the id 9, and the library gives it 2: "),
        ("dropout.json", dropout, "model.dropout is 0.1: text would become other tokens"),
        ("cut.json", b"{\"version\":\"1.0\",", "cannot be used: "),
        ("other.json", b"{\"model\":{\"type\":\"Unheard\"}}", "cannot be used: "),
        ("empty.json", br#"{"model":{"type":"WordLevel","vocab":{},"unk_token":"?"}}"#, "no tok"),
        ("regex.json", unclosed, "cannot be used: "),
    ];
    for (name, bytes, why) in cases {
        std::fs::write(at(name), bytes).expect("a file");
        data.tokenizer = Tokenizer::Path(at(name));
        refused(&data, name, 3, why);
    }
    // Its words are none of the text's, and it has no token for those.
    let words = br#"{"model":{"type":"WordLevel","vocab":{"a":0,"b":1},"unk_token":"?"}}"#;
    std::fs::write(at("words.json"), words).expect("a file");
    data.tokenizer = Tokenizer::Path(at("words.json"));
    refused(&data, "a.jsonl, line 1", 3, "the tokenizer fails: ");
    data.tokenizer = Tokenizer::Path(at("gone.json"));
    refused(&data, "gone.json", 3, "No such file");
    data.tokenizer = Tokenizer::Bytes;
    data.end_of_document = Some(300);
    refused(&data, "data.endOfDocument is 300", 2, "the model's vocabulary is 300");
    data.end_of_document = None;
    let error = Corpus::open(&data, &common::training(), 255).expect_err("a small vocabulary");
    assert!(error.to_string().contains("bytes need a vocabulary of 256, the model has 255"));
}

/// A pattern that takes exponential time on some texts gives up; no token of the text is lost.
#[test]
fn a_regex_bomb_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let bomb = br#"{"version":"1.0","pre_tokenizer":{"type":"Split","pattern":
        {"Regex":"(?:(?=a)(?:a|aa)+)+c"},"behavior":"Isolated","invert":false},
        "model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}}"#;
    let path = folder.path().join("bomb.json");
    std::fs::write(&path, bomb).expect("a file");
    let line = format!("{{\"text\":\"{}b\"}}\n", "a".repeat(200));
    std::fs::write(folder.path().join("a.jsonl"), line).expect("a file");
    let mut data = data(folder.path(), "a.jsonl", None);
    data.tokenizer = Tokenizer::Path(path.display().to_string());
    let began = std::time::Instant::now();
    match Corpus::open(&data, &common::training(), 300) {
        Ok(corpus) => assert_eq!(corpus.sizes()[0].1, 201),
        Err(error) => assert!(error.to_string().contains("a.jsonl, line 1"), "{error}"),
    }
    assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
}

#[test]
#[cfg(not(feature = "parquet"))]
fn parquet_needs_its_feature() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("a.parquet"), b"PAR1PAR1").expect("a file");
    refused(&data(folder.path(), "a.parquet", None), "a.parquet", 2, "this build reads no Parquet");
}

#[test]
fn an_inspection_tells_formats_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    let line = b"{\"text\":\"h\xc3\xb6\"}\n";
    let ids: Vec<u16> = (0..100).collect();
    let flat: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let files: [(&str, Vec<u8>); 7] = [
        ("a.jsonl", line.repeat(3)),
        ("a.jsonl.gz", gzip(&line.repeat(3))),
        ("text.md", b"# Title\n".to_vec()),
        ("gpt2.bin", llm_c(20_240_520, 1, 100, &ids)),
        ("flat.bin", flat),
        ("mega.idx", index(|_| ())),
        ("mega.bin", vec![1; 800]),
    ];
    for (name, bytes) in &files {
        std::fs::write(folder.path().join(name), bytes).expect("a file");
    }
    let look = |name: &str, dtype| {
        inspect(&folder.path().join(name), "text", dtype, &Encoder::Bytes)
    };
    let cases = [
        ("a.jsonl", "JSONL, text in `text`", Some(3), 9),
        ("a.jsonl.gz", "JSONL, text in `text`", Some(3), 9),
        ("text.md", "text, one document", Some(1), 8),
        ("gpt2.bin", "tokens with llm.c's header, uint16", None, 100),
        ("mega.idx", "Megatron's indexed dataset, uint16, 3 sequences", Some(2), 400),
        ("mega.bin", "Megatron's indexed dataset, uint16, 3 sequences", Some(2), 400),
    ];
    for (name, what, documents, tokens) in cases {
        let found = look(name, None).expect(name);
        assert_eq!((&found.what[..], found.documents, found.tokens), (what, documents, tokens));
        assert_eq!(found.first.len() as u64, tokens.min(64), "{name}");
    }
    assert_eq!(look("a.jsonl", None).expect("lines").first[..3], [104, 0xc3, 0xb6]);
    assert_eq!(look("gpt2.bin", None).expect("tokens").largest, Some(99));
    let error = look("flat.bin", None).expect_err("no header").to_string();
    assert!(error.contains("say --dtype uint16 or uint32"), "{error}");
    let flat = look("flat.bin", Some(TokenType::Uint16)).expect("flat");
    assert_eq!((&flat.what[..], flat.tokens), ("flat tokens, uint16", 100));
    for (name, why) in [
        ("a.npy", "NumPy"),
        ("a.tar", "its format is not read"),
        ("a.txt.gz", "of compressed files JSONL is read"),
        ("noise", "it has no header"),
    ] {
        std::fs::write(folder.path().join(name), [0, 1, 2, 0]).expect("a file");
        let error = look(name, None).expect_err(name).to_string();
        assert!(error.contains(name) && error.contains(why), "{error}");
    }
}
