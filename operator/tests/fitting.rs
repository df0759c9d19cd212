//! `moejob init --data`: whatever data are named, the manifest validates and trains, or a person is
//! told by name why not.

mod place;

use place::Place;

/// A folder with data of each kind.
fn data() -> Place {
    let place = Place::new();
    let write = |name: &str, text: &[u8]| {
        let path = place.path(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, text).expect("a file");
    };
    let words: String = (0..4000).map(|i| format!("word{} ", i * i % 53)).collect();
    write("one.txt", words.as_bytes());
    let odd = |i: usize| {
        let prose = &words[i * 40..i * 40 + 80];
        format!("{{\"id\": {i}, \"title\": \"t{i}\", \"prose\": \"{prose}\"}}\n")
    };
    write("odd.jsonl", (0..300).map(odd).collect::<String>().as_bytes());
    write("numbers.jsonl", b"{\"id\": 1}\n");
    write("table.csv", b"text,label\nhello,1\n");
    write("short.txt", b"too short");
    let ids: Vec<u8> = (0..20_000u32).flat_map(|i| ((i * 7 % 900) as u16).to_le_bytes()).collect();
    write("flat.bin", &ids);
    place.said(&["data", "tokenize", "words/*.txt", "--out", "pair", "--tokenizer", "bytes"]);
    place.said(&["data", "tokenizer", "words/*.txt", "--tokens", "270", "--out", "t.json"]);
    place
}

#[test]
fn seven_kinds_of_data_train_with_one_command_each() {
    let place = data();
    for (name, asked, expected) in [
        ("folder", &["--data", "words"][..], "text: { paths: [\"words/**/*.txt\"] }"),
        ("one", &["--data", "one.txt"], "1 file of text"),
        ("lines", &["--data", "odd.jsonl"], "jsonl: { paths: [\"odd.jsonl\"], field: prose }"),
        ("flat", &["--data", "flat.bin", "--dtype", "uint16"], "dtype: uint16"),
        ("pair", &["--data", "pair.bin"], "megatron: { paths: [\"pair.idx\"] }"),
        ("pieces", &["--data", "words", "--tokenizer", "t.json"], "tokenizer: \"t.json\""),
        ("known", &["--data", "one.txt", "--preset", "tiny"], "preset: tiny"),
    ] {
        place.said(&[&["init", name], asked].concat());
        let file = format!("{name}.yaml");
        let text = std::fs::read_to_string(place.path(&file)).expect("a manifest");
        assert!(text.contains(expected), "{name}: {text}");
        place.said(&["validate", &file]);
        place.said(&["plan", &file]);
        let run = place.moejob(&["run", &file, "--set", "training.steps=20"]);
        let told = String::from_utf8_lossy(&run.stderr).into_owned();
        assert!(run.status.success(), "{name}: {told}");
        assert!(place.path(&format!("runs/{name}/checkpoints/step-00000020")).is_dir(), "{name}");
    }
    // The same for a machine with a GPU: it validates and plans here.
    let gpu = ["init", "far", "--data", "one.txt", "--preset", "olmoe-1b-7b", "--gpu"];
    place.said(&gpu);
    place.said(&["validate", "far.yaml"]);
}

#[test]
fn what_cannot_be_trained_on_is_refused_by_name() {
    let place = data();
    for (asked, expected) in [
        (&["--data", "table.csv"][..], "table.csv: tables (csv) are not read: write the column"),
        (&["--data", "numbers.jsonl"], "no key holds a text; its keys: id"),
        (&["--data", "short.txt"], "is too little"),
        (&["--data", "flat.bin"], "--dtype uint16 or uint32"),
        (&["--data", "nowhere.txt"], "nowhere.txt"),
        (&["--data", "one.txt", "--preset", "mixtral-8x7b"], "add --gpu"),
        (&["--data", "one.txt", "--preset", "tinny"], "tiny"),
        (&["--gpu"], "--data PATH"),
    ] {
        let (code, told) = place.refused(&[&["init", "none"], asked].concat());
        assert!(code == 2 && told.contains(expected), "{asked:?}: {told}");
        assert!(!place.path("none.yaml").exists(), "{asked:?}");
    }
}
