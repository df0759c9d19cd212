//! From choices of experts to those of their slices and back, against the definition in f64: on a
//! CPU always, on a GPU where there is one.

use moejob_kernels::cuda::Gpu;
use moejob_kernels::philox::normals;
use moejob_kernels::{ArenaPlan, DType, Device, NO_EXPERT, SliceChoices, SumSlices};

/// Random choices of 60 experts, some of them empty, and weights beside them.
fn choices(count: usize) -> (Vec<u32>, Vec<f32>) {
    let random = |at: usize| normals(11, 12, at as u64)[0];
    let id = |at: usize| match at % 7 {
        3 => NO_EXPERT,
        _ => (random(at).abs() * 1000.0) as u32 % 60,
    };
    ((0..count).map(id).collect(), (0..count).map(|at| random(at) as f32).collect())
}

/// Where slice `id` stands in another order.
fn place(id: u32, slices: usize) -> u32 {
    (id * 7 + 5) % (60 * slices as u32)
}

/// What the device makes of `count` choices and of as many times `slices` gradients.
fn run(
    count: usize,
    slices: usize,
    placed: bool,
    mut device: Device,
) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
    let (all, (given_ids, given_weights)) = (count * slices, choices(count));
    let mut plan = ArenaPlan::new();
    let [ids, slice_ids] = [count, all].map(|len| plan.alloc(DType::U32, len));
    let [weights, slice_weights, x, sums] =
        [count, all, all, count].map(|len| plan.alloc(DType::F32, len));
    let places = plan.alloc(DType::U32, 60 * slices);
    device.reserve(plan.bytes()).expect("an arena");
    device.write(ids, &given_ids);
    device.write(weights, &given_weights);
    let by_id: Vec<u32> = (0..60 * slices as u32).map(|id| place(id, slices)).collect();
    device.write(places, &by_id);
    let choices = count;
    let places = placed.then_some(places);
    let op = SliceChoices { choices, slices, ids, weights, places, slice_ids, slice_weights };
    device.slice_choices(&op);
    device.write(x, &gradients(all));
    device.sum_slices(&SumSlices { choices, slices, x, sums });
    device.finish().expect("no failure");
    let [slice_weights, sums] = [slice_weights, sums].map(|of| device.read_vec(of));
    (device.read_vec(slice_ids), slice_weights, sums)
}

fn gradients(all: usize) -> Vec<f32> {
    (0..all).map(|at| normals(13, 14, at as u64)[1] as f32).collect()
}

fn check(count: usize, slices: usize, placed: bool, device: Device) {
    let (slice_ids, slice_weights, sums) = run(count, slices, placed, device);
    let (ids, weights) = choices(count);
    for (choice, (id, weight)) in ids.iter().zip(&weights).enumerate() {
        for j in 0..slices {
            let at = choice * slices + j;
            let expected = match *id {
                NO_EXPERT => NO_EXPERT,
                id if placed => place(id * slices as u32 + j as u32, slices),
                id => id * slices as u32 + j as u32,
            };
            assert_eq!(slice_ids[at], expected, "slice {j} of choice {choice}");
            assert_eq!(slice_weights[at], *weight, "slice {j} of choice {choice}");
        }
    }
    let given = gradients(count * slices);
    for (choice, (sum, of_slices)) in sums.iter().zip(given.chunks(slices)).enumerate() {
        let exact: f64 = of_slices.iter().map(|x| f64::from(*x)).sum();
        let size: f64 = of_slices.iter().map(|x| f64::from(x.abs())).sum();
        let error = (f64::from(*sum) - exact).abs();
        assert!(error <= slices as f64 * size * f64::from(f32::EPSILON), "{choice}: {error}");
        // And in the promised order, which fixes every bit.
        let chain = of_slices[1..].iter().fold(of_slices[0], |sum, x| sum + x);
        assert_eq!(sum.to_bits(), chain.to_bits(), "choice {choice}");
    }
}

const CASES: [(usize, usize); 6] = [(1, 1), (7, 2), (256, 4), (1000, 2), (4097, 8), (12_345, 3)];

#[test]
fn slices_of_choices_and_sums_of_their_gradients() {
    for (count, slices) in CASES {
        for placed in [false, true] {
            check(count, slices, placed, Device::cpu(2, 0).expect("a CPU"));
        }
    }
    if let Err(why) = Gpu::open(0) {
        return eprintln!("skipped on a GPU: {why}");
    }
    for (count, slices) in CASES {
        for placed in [false, true] {
            check(count, slices, placed, Device::cuda(0, 0).expect("a GPU"));
        }
    }
}
