//! Speed of `moejob data tokenize`: `cargo bench -p moe-worker --bench tokenize -- FILE.jsonl
//! TOKENIZER.json [THREADS]`. Without arguments it tokenises text of its own as bytes.

use moe_worker::data::prepare::{Layout, Prepare, SAVE_EVERY};
use moe_worker::data::{DataFile, Encoder, Format, Recipe};
use std::path::PathBuf;
use std::time::Instant;

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let input = arguments.first().map(PathBuf::from).unwrap_or_else(|| {
        let path = folder.path().join("lines.jsonl");
        let lines = "{\"text\":\"a line of some words\"}\n".repeat(200_000);
        std::fs::write(&path, lines).expect("a file");
        path
    });
    let encoder = match arguments.get(1) {
        Some(path) => Encoder::read(path.as_ref()).expect("a tokenizer"),
        None => Encoder::Bytes,
    };
    let threads = arguments.get(2).map_or(1, |count| count.parse().expect("a number of threads"));
    let file = DataFile::named(&input).expect("a file");
    let megabytes = file.bytes as f64 / 1e6;
    let prepare = Prepare {
        files: vec![file],
        format: Format::Jsonl("text".to_string()),
        recipe: Recipe { encoder, field: "text".to_string(), end_of_document: Some(0) },
        output: folder.path().join("out"),
        layout: Layout::Megatron,
        threads,
        save_every: SAVE_EVERY,
    };
    let began = Instant::now();
    let done = prepare.run(&mut |_| ()).expect("tokens");
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{threads} threads | {:.2} s | {:.1} MB/s | {} documents, {} tokens, {:.2}M tokens/s",
        seconds,
        megabytes / seconds,
        done.documents,
        done.tokens,
        done.tokens as f64 / seconds / 1e6
    );
}
