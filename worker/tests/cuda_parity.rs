//! A step in bf16 on a GPU beside `transformers`, which computed it in float32 and in bfloat16: our
//! loss and each of our gradients may be as far from float32 as twice theirs.
//!
//! `tests/parity/generate.py --bf16 3 FOLDER` writes the references; MOEJOB_PARITY_BF16 names the
//! folder. Without one, and without a GPU, there is nothing to compare.

mod common;

use common::reference::{Reference, distance};
use moe_worker::engine::forward::Pass;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::round::Round;
use moe_worker::engine::buckets::BucketSums;
use moe_worker::state::rank::RankState;
use moejob_kernels::{DType, Device};
use moejob_protocol::checkpoint::Part;
use moejob_protocol::config::{Backend, Precision, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::Shape;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::AuxLossScope;
use std::path::Path;

/// Theirs times this is allowed.
const ALLOWED: f64 = 2.0;

fn training(batch: u32, sequence: u32, precision: Precision) -> TrainingConfig {
    let mut training = common::training();
    (training.global_batch_size, training.micro_batch_size) = (batch, batch);
    (training.sequence_length, training.precision) = (sequence, precision);
    training.compute.backend = Backend::Cuda;
    training
}

/// The loss and the gradients of one step, in table order.
fn step(reference: &Reference, precision: Precision) -> (f64, Vec<(String, Vec<f64>)>) {
    let [_, batch, sequence] = reference.sizes;
    let training = training(batch as u32, sequence as u32, precision);
    let mut config = reference.config.clone();
    config.router.aux_loss_scope = AuxLossScope::MicroBatch;
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let shape = Shape::new(&config, &layout, 0, &training);
    let device = Device::cuda(0, 0).expect("a GPU");
    let mut model =
        Model::on(device, shape, &config, &layout, 0, &training).expect("its kernels");
    for index in 0..model.params.len() {
        let name = format!("initial/{}", model.params[index].name);
        let values = reference.get(&name);
        let bytes: Vec<u8> =
            values.iter().flat_map(|value| (*value as f32).to_le_bytes()).collect();
        model.write(Part::Master, index, 0..values.len() as u64, &bytes);
    }
    model.clear_moments();
    model.finish().expect("a device that works");
    let windows: Vec<&[f64]> = reference.get("tokens").chunks_exact(sequence + 1).collect();
    let column = |from: usize| -> Vec<u32> {
        windows.iter().flat_map(|w| &w[from..from + sequence]).map(|id| *id as u32).collect()
    };
    model.load(&column(0), &column(1));
    let (round, mut links) = (Round::alone(batch * sequence), Links::solo());
    let mut sums = BucketSums::new(&model);
    model.begin_step(&training, 0);
    sums.clear();
    let mut pass = Pass::new(&mut model, &mut links, &round);
    pass.forward();
    let leaf = sums.leaf(&round);
    pass.loss(Some(&leaf));
    pass.backward(&leaf);
    sums.push(&round, &mut model);
    sums.measure(&mut model);
    let loss = model.read_numbers(&training, 0).loss;
    model.device.check().expect("a device that works");
    let gradients = (0..model.params.len()).map(|index| {
        let buffer = model.bucket_gradient(index).expect("one rank holds everything");
        let values: Vec<f64> = match buffer.dtype() {
            DType::F32 => {
                model.device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect()
            }
            DType::Bf16 => {
                let halves = model.device.read_vec::<i16>(buffer.reinterpret(DType::I16));
                let wide = |half: i16| f64::from(f32::from_bits(u32::from(half as u16) << 16));
                halves.into_iter().map(wide).collect()
            }
            other => panic!("gradients of {other:?}"),
        };
        (model.params[index].name.clone(), values)
    });
    (loss, gradients.collect())
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn check(path: &Path) {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let reference = Reference::open(path);
    let exact = |of: &str| reference.get(&format!("f32/{of}"));
    // In float32 the two are the same model.
    let (loss, gradients) = step(&reference, Precision::Fp32);
    let apart = (loss / exact("loss")[0] - 1.0).abs();
    assert!(apart < 1e-5, "{name} fp32: the loss is {apart:.1e} apart");
    for (param, found) in &gradients {
        let expected = exact(&format!("gradient/{param}"));
        let apart = distance(found, expected) / norm(expected).max(1e-30);
        assert!(apart < 1e-4, "{name} fp32: {param} is {apart:.1e} apart");
    }
    let (loss, gradients) = step(&reference, Precision::Bf16);
    let theirs = (reference.get("bf16/loss")[0] - exact("loss")[0]).abs();
    let ours = (loss - exact("loss")[0]).abs();
    // One bf16 rounding of the loss is nothing that either could avoid.
    let floor = exact("loss")[0] / 512.0;
    println!("{name}: loss {ours:.1e} beside {theirs:.1e}");
    assert!(ours <= (ALLOWED * theirs).max(floor), "{name}: loss {ours:e} beside {theirs:e}");
    let mut worst = (0.0, "");
    for (param, found) in &gradients {
        let expected = exact(&format!("gradient/{param}"));
        let theirs = distance(reference.get(&format!("bf16/gradient/{param}")), expected);
        let ours = distance(found, expected);
        let ratio = ours / theirs.max(1e-30);
        if ratio > worst.0 {
            worst = (ratio, param);
        }
        assert!(
            ours <= ALLOWED * theirs,
            "{name}: {param}: {:.2e} beside {:.2e}, relative",
            ours / norm(expected),
            theirs / norm(expected),
        );
    }
    println!("{name}: {} gradients, worst {:.2} of theirs: {}", gradients.len(), worst.0, worst.1);
}

#[test]
fn beside_transformers_in_bf16() {
    let Some(folder) = std::env::var_os("MOEJOB_PARITY_BF16") else {
        return println!("skipped: MOEJOB_PARITY_BF16 names no folder");
    };
    if moejob_kernels::cuda::Gpu::open(0).is_err() {
        return println!("skipped: no GPU");
    }
    let entries = std::fs::read_dir(&folder).expect("a folder of references");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "safetensors"));
    paths.sort();
    assert!(!paths.is_empty(), "no references in {folder:?}");
    paths.iter().for_each(|path| check(path));
}
