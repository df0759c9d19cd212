//! Documents packed into one sequence, kept apart, are what each is alone.

mod common;

use moe_worker::comm::Comm;
use moe_worker::dispatch::{Round, Source};
use moe_worker::model::Model;
use moe_worker::snapshot::initialize;
use moejob_protocol::Mesh;
use moejob_protocol::config::Precision;
use moejob_protocol::layout::Layout;
use moejob_protocol::model::QkNorm;

/// A model in f64 for one sequence of `length` tokens; all have the same weights.
fn model(length: usize) -> Model {
    let mut config = common::model();
    config.qk_norm = QkNorm::PerHead;
    // Initial weights this large make every token attend to others.
    config.initializer_range = 0.5;
    let mut training = common::training();
    training.precision = Precision::Fp64;
    training.sequence_length = length as u32;
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let mut model = Model::new(&config, &layout, 0, &training, 1).expect("a small arena");
    initialize(&mut model, 11);
    model
}

/// [T, V]
fn logits(model: &mut Model, tokens: usize) -> Vec<f64> {
    let round = Round { tokens, sources: vec![Source { position: 0, tokens }] };
    model.forward(&round, &mut Comm::solo(1)).expect("no peers");
    let vocab = model.config.vocab_size as usize;
    model.device.read_vec::<f64>(model.buffers.head.logits.slice(0, tokens * vocab))
}

fn furthest(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn packed_documents_do_not_see_each_other() {
    let lengths = [5, 1, 7, 3];
    let total: usize = lengths.iter().sum();
    let ids: Vec<u32> = (0..total as u32).map(|i| (i * 37 + i * i) % 251).collect();
    let targets = vec![0; total];
    let mut alone = Vec::new();
    let mut starts = Vec::new();
    for length in lengths {
        let start = starts.len();
        let mut one = model(length);
        one.load(&ids[start..start + length], &targets[start..start + length]);
        alone.extend(logits(&mut one, length));
        starts.extend(vec![start as u32; length]);
    }
    let mut packed = model(total);
    packed.load_documents(&ids, &targets, Some(&starts));
    let apart = logits(&mut packed, total);
    assert!(furthest(&apart, &alone) < 1e-12, "{}", furthest(&apart, &alone));
    // Without the boundaries they do, and a batch without them comes back to plain positions.
    packed.load(&ids, &targets);
    let together = logits(&mut packed, total);
    assert!(furthest(&together, &alone) > 1e-3);
    let mut plain = model(total);
    plain.load(&ids, &targets);
    assert_eq!(logits(&mut plain, total), together);
    packed.load_documents(&ids, &targets, Some(&starts));
    assert_eq!(logits(&mut packed, total), apart);
}
