use moejob_manifest::several::{Document, documents};

#[test]
fn documents_keep_their_lines_and_other_kinds_are_named() {
    let file = b"# two of them\n---\nkind: Service\nmetadata: {name: web}\n--- # the job\n\
                 kind: MoeJob\nspec: {node: 1}\n...\n---\n# nothing\n";
    let found = documents(file);
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].other.as_deref(), Some("Service web"));
    assert_eq!(found[1].other, None);
    let text = String::from_utf8(found[1].bytes.clone()).expect("text");
    assert_eq!(text, "\n\n\n\n--- # the job\nkind: MoeJob\nspec: {node: 1}\n");
}

#[test]
fn one_document_is_left_as_it_is() {
    for file in [&b"---\nkind: Service\n"[..], b"", b"a: |\n  ---\n  b\n", b"\xff\n---\n"] {
        let whole = Document { bytes: file.to_vec(), other: None };
        assert_eq!(documents(file), [whole]);
    }
    let other = documents(b"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: corpus}\n");
    assert_eq!(other[0].other.as_deref(), Some("ConfigMap corpus"));
    // A mistake in the kind of a job is none of another kind.
    let job = "apiVersion: moejob.dev/v1\nkind: MoEJob\n";
    for file in [job.to_string(), format!("{job}---\nkind: Service\n")] {
        assert_eq!(documents(file.as_bytes())[0].other, None, "{file}");
    }
    // What cannot be read is judged as a job.
    let found = documents(b"a: [\n---\nkind: MoeJob\n");
    assert!(found.len() == 2 && found.iter().all(|of| of.other.is_none()), "{found:?}");
}
