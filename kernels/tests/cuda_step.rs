//! The memory-bound ops of a step on the device against the CPU in f64, over sizes that break
//! things: odd dims, tails, offsets that no vector access takes, garbage in outputs.

#[path = "cuda_common/step_bed.rs"]
mod step_bed;

use moejob_kernels::*;
use step_bed::{ELEMENTS, StepBed, below, check, rounded};

#[test]
fn norms() {
    for (rows, dim, accumulate) in
        [(1, 33, false), (77, 128, true), (1001, 2048, true), (530, 2880, false), (65, 7168, true)]
    {
        check(&format!("norms {rows} {dim}"), 3.0, |bed| {
            let (x, w, dy) = (bed.input(rows * dim), bed.vector(dim), bed.input(rows * dim));
            let (y, rstd) = (bed.floats(rows * dim), bed.statistics(rows));
            bed.device.rms_norm(&RmsNorm { rows, dim, eps: 1e-5, x, w, y, rstd });
            let dx = bed.target(bed.float, rows * dim, accumulate);
            let dw = bed.target(bed.vector, dim, accumulate);
            bed.device.rms_norm_backward(&RmsNormBackward {
                rows,
                dim,
                x,
                w,
                rstd,
                dy,
                dx,
                dw,
                accumulate_dx: accumulate,
                accumulate_dw: accumulate,
            });
            vec![y, rstd, dx, dw]
        });
    }
}

/// Positions in and beyond the table of turns.
fn positions(tokens: usize) -> Vec<u32> {
    let mut all = below(3, tokens, 5000);
    all.iter_mut().step_by(7).for_each(|position| *position += 40_000);
    all
}

#[test]
fn rotations() {
    for (tokens, heads, head_dim) in [(300, 16, 128), (77, 3, 34), (50, 5, 96), (1, 1, 64)] {
        for inverse in [false, true] {
            check(&format!("rotations {heads} {head_dim} {inverse}"), 2.0, |bed| {
                let x = bed.input(tokens * heads * head_dim);
                let positions = bed.words(&positions(tokens));
                let theta = 10_000.0;
                bed.device.rope(&Rope { tokens, heads, head_dim, theta, inverse, positions, x });
                vec![x]
            });
        }
    }
}

#[test]
fn norms_with_rotations() {
    for (tokens, heads, head_dim, per_head) in [
        (301, 16, 128, false),
        (301, 4, 128, true),
        (1100, 32, 128, true),
        (77, 3, 34, false),
        (77, 3, 34, true),
        (65, 5, 96, true),
        (64, 2, 64, true),
        (33, 4, 256, false),
    ] {
        let name = format!("norms with rotations {heads} {head_dim} {per_head}");
        check(&name, 3.0, |bed| {
            let size = tokens * heads * head_dim;
            let (spans, dim) =
                if per_head { (tokens * heads, head_dim) } else { (tokens, heads * head_dim) };
            let (x, w, dy) = (bed.input(size), bed.vector(dim), bed.input(size));
            let positions = bed.words(&positions(tokens));
            let (y, rstd) = (bed.floats(size), bed.statistics(spans));
            let (eps, theta) = (1e-6, 500_000.0);
            let forward = NormRope {
                tokens, heads, head_dim, per_head, eps, theta, positions, x, w, y, rstd,
            };
            bed.device.norm_rope(&forward);
            let (dx, accumulate_dw) = (bed.floats(size), tokens % 2 == 1);
            let dw = bed.target(bed.vector, dim, accumulate_dw);
            bed.device.norm_rope_backward(&NormRopeBackward { forward, dy, dx, dw, accumulate_dw });
            vec![y, rstd, dx, dw]
        });
    }
}

#[test]
fn embeddings() {
    for (tokens, dim, vocab, same) in [
        (700, 33, 50, false),
        (1, 8, 1, false),
        (1500, 2048, 4000, false),
        (900, 264, 70, true),
        (4097, 1032, 3, false),
    ] {
        // A row is a sum of elements, rounded once: its largest partial sum counts.
        check(&format!("embeddings {tokens} {dim} {vocab}"), 2.0, |bed| {
            let mut ids = below(9, tokens, vocab as u32);
            if same {
                ids.fill(vocab as u32 - 1);
            }
            let ids = bed.words(&ids);
            let (table, dx) = (bed.vector(vocab * dim), bed.input(tokens * dim));
            let (x, dtable) = (bed.floats(tokens * dim), bed.vector(vocab * dim));
            bed.device.embed(&Embed { tokens, dim, vocab, ids, table, x });
            bed.device.embed_backward(&EmbedBackward { tokens, dim, vocab, ids, dx, dtable });
            vec![x, dtable]
        });
    }
}

/// Additions in the order of the tokens: in fp32 the bits are those of the CPU in fp32.
#[test]
fn gradients_of_embeddings_are_added_in_order() {
    let (tokens, dim, vocab) = (3000, 260, 11);
    let run = |mut bed: StepBed| {
        let ids = bed.words(&below(4, tokens, vocab as u32));
        let (dx, dtable) = (bed.input(tokens * dim), bed.input(vocab * dim));
        bed.device.embed_backward(&EmbedBackward { tokens, dim, vocab, ids, dx, dtable });
        bed.bytes(dtable)
    };
    let Some(bed) = StepBed::cuda("gradients of embeddings", DType::F32, DType::F32) else {
        return;
    };
    assert!(run(bed) == run(StepBed::cpu(DType::F32, DType::F32)));
}

/// An id outside of the table is no access outside of it, and is seen.
#[test]
fn an_id_outside_of_the_table_gives_no_numbers() {
    for element in ELEMENTS {
        let Some(mut bed) = StepBed::cuda("ids", element, element) else { return };
        let (tokens, dim, vocab) = (3, 16, 2);
        let ids = bed.words(&[1, 2, u32::MAX]);
        let (table, x) = (bed.input(vocab * dim), bed.floats(tokens * dim));
        bed.device.embed(&Embed { tokens, dim, vocab, ids, table, x });
        let dtable = bed.put(element, &vec![1.0; vocab * dim]);
        bed.device.embed_backward(&EmbedBackward { tokens, dim, vocab, ids, dx: x, dtable });
        let (x, table) = (bed.get(x), bed.get(table));
        assert_eq!(x[..dim], table[dim..]);
        assert!(x[dim..].iter().all(|x| x.is_nan()), "{element:?}");
        let expected: Vec<f64> = table[dim..].iter().map(|x| rounded(element, 1.0 + x)).collect();
        let dtable = bed.get(dtable);
        assert_eq!((&dtable[..dim], &dtable[dim..]), (&vec![1.0; dim][..], &expected[..]));
    }
}

#[test]
fn ops_on_each_element() {
    for (len, shift) in [(1, 0), (4097, 0), (70_001, 3), (65_536, 0)] {
        check(&format!("ops on each element {len} {shift}"), 4.0, |bed| {
            let part = |buffer: Buffer| buffer.slice(shift, len);
            let mut inputs = [(); 5].map(|()| part(bed.input(len + shift)));
            let filled = part(bed.floats(len + shift));
            bed.device.add(&Add { a: inputs[0], b: inputs[1] });
            let total = part(bed.floats(len + shift));
            bed.device.sum(&Sum { a: inputs[1], b: inputs[2], out: total });
            bed.device.fill(&Fill { value: 1.625, x: filled });
            bed.device.clamp_backward(&ClampBackward { limit: 0.75, x: inputs[3], dx: inputs[4] });
            bed.device.clamp(&Clamp { limit: 0.75, x: inputs[3] });
            let mut all = inputs.to_vec();
            all.extend([filled, total]);
            for activation in [Activation::Silu, Activation::Relu, Activation::Gelu] {
                inputs = [(); 5].map(|()| part(bed.input(len + shift)));
                let [gate, up, d_out, ..] = inputs;
                let [out, dgate, dup] = [(); 3].map(|()| part(bed.floats(len + shift)));
                bed.device.gated_mul(&GatedMul { activation, gate, up, out });
                let op = GatedMulBackward { activation, gate, up, d_out, dgate, dup };
                bed.device.gated_mul_backward(&op);
                all.extend([out, dgate, dup]);
            }
            all
        });
    }
}

#[test]
fn biases() {
    for (rows, columns, accumulate) in [(1, 1, false), (301, 130, true), (5000, 96, false)] {
        check(&format!("biases {rows} {columns}"), 3.0, |bed| {
            let (x, bias) = (bed.input(rows * columns), bed.vector(columns));
            let dbias = bed.target(bed.vector, columns, accumulate);
            bed.device.bias_backward(&BiasBackward { rows, columns, accumulate, dy: x, dbias });
            bed.device.add_bias(&AddBias { rows, columns, x, bias });
            vec![x, dbias]
        });
    }
}

#[test]
fn conversions_have_the_bits_of_the_cpu() {
    let numbers: Vec<f64> = (0..20_011_u64)
        .flat_map(|i| philox::normals(1, 2, i))
        .zip((-60..60).cycle())
        .map(|(x, power)| x * 2_f64.powi(power))
        .chain([0.0, -0.0, f64::INFINITY, -f64::INFINITY, 65_520.0, 1e-41, 3.4e38])
        .collect();
    for from in ELEMENTS {
        for to in ELEMENTS.into_iter().filter(|to| *to != from) {
            let run = |mut bed: StepBed| {
                let from = bed.put(from, &numbers);
                let to = bed.output(to, numbers.len());
                bed.device.cast(&Cast { from, to });
                bed.bytes(to)
            };
            let Some(bed) = StepBed::cuda("conversions", from, from) else { return };
            assert!(run(bed) == run(StepBed::cpu(from, from)), "{from:?} to {to:?}");
        }
    }
    let run = |mut bed: StepBed| {
        let master = bed.put(DType::F32, &numbers);
        let len = numbers.len();
        let (weight, low) = (bed.output(DType::Bf16, len), bed.output(DType::I16, len));
        let back = bed.output(DType::F32, len);
        bed.device.split_master(&SplitMaster { master, weight, low });
        bed.device.join_master(&JoinMaster { weight, low, master: back });
        assert!(bed.bytes(back) == bed.bytes(master));
        [bed.bytes(weight), bed.bytes(low)]
    };
    let Some(bed) = StepBed::cuda("masters", DType::F32, DType::F32) else { return };
    assert!(run(bed) == run(StepBed::cpu(DType::F32, DType::F32)));
}

#[test]
fn stored_floats_cross_as_on_the_cpu() {
    // Pieces of the bus are 2 MiB; neither length fills one.
    for len in [1_100_003, 77] {
        let run = |mut bed: StepBed| {
            let numbers = bed.values(len);
            let from: Vec<u8> =
                numbers.iter().flat_map(|x| (*x as f32).to_ne_bytes()).collect();
            let [a, b, c] = [(); 3].map(|()| bed.output(DType::Bf16, len));
            let (low, half) = (bed.output(DType::I16, len), bed.output(DType::F16, len));
            let whole = bed.output(DType::F32, len);
            let places = [
                Stored::Plain(whole),
                Stored::Halves { weight: a, low },
                Stored::Upper(b),
                Stored::Bf16(c),
                Stored::F16(half),
            ];
            bed.device.write_all(&places.map(|place| (place, from.as_slice())));
            let mut back = places.map(|_| vec![7; from.len()]);
            let reads = places.into_iter().zip(back.iter_mut().map(|back| &mut back[..]));
            bed.device.read_all(reads.collect(), Pages::Stay);
            assert!(back[0] == from && back[1] == from, "{len}");
            (back, [a, b, c, low, half, whole].map(|of| bed.bytes(of)))
        };
        let Some(bed) = StepBed::cuda("stored floats", DType::F32, DType::F32) else { return };
        assert!(run(bed) == run(StepBed::cpu(DType::F32, DType::F32)), "{len}");
    }
}

#[test]
fn sums_in_fp64_have_the_bits_of_the_cpu() {
    for x in [DType::F32, DType::F64] {
        let run = |mut bed: StepBed| {
            let numbers = bed.values(20_011);
            let (x, sum) = (bed.put(x, &numbers), bed.output(DType::F64, numbers.len()));
            let rounded = bed.output(DType::F32, numbers.len());
            // What was there before counts nothing.
            for adds in [false, true, true] {
                bed.device.add_up(&AddUp { x, sum, adds });
            }
            bed.device.cast(&Cast { from: sum, to: rounded });
            [bed.bytes(sum), bed.bytes(rounded)]
        };
        let Some(bed) = StepBed::cuda("sums in fp64", DType::F32, DType::F32) else { return };
        assert!(run(bed) == run(StepBed::cpu(DType::F32, DType::F32)), "{x:?}");
    }
}

#[test]
fn initial_weights_have_the_bits_of_the_cpu() {
    let cut = Strided { from: 77, run: 64, stride: 192 };
    for (len, first, place) in [
        (1, 0, Strided::ALL),
        (1, 7, Strided::ALL),
        (300_001, 0, Strided::ALL),
        (4096, 12_345, Strided::ALL),
        (777, (1 << 33) + 1, Strided::ALL),
        (100_001, 0, cut),
        (4_097, (1 << 33) + 1, cut),
    ] {
        let run = |mut bed: StepBed| {
            let x = bed.output(DType::F32, len);
            let (seed, name_hash, std) = (17, 0xabcd_ef01_2345_6789, 0.02);
            bed.device.init_normal(&InitNormal { seed, name_hash, first, place, std, x });
            bed.bytes(x)
        };
        let Some(bed) = StepBed::cuda("initial weights", DType::F32, DType::F32) else { return };
        let expected = run(StepBed::cpu(DType::F32, DType::F32));
        assert!(run(bed) == expected, "{len} from {first} of {place:?}");
    }
}

#[test]
fn masks() {
    for (rows, dim, mask) in [
        (70, 33, Mask::Jitter { eps: 0.01 }),
        (129, 256, Mask::Dropout { p: 0.3 }),
        (1, 1, Mask::Dropout { p: 0.9 }),
    ] {
        check(&format!("masks {rows} {dim}"), 3.0, |bed| {
            let draw = philox::Draw { seed: 9, step: 1 << 34, layer: 3, first_token: 1 << 31 };
            let (x, y) = (bed.input(rows * dim), bed.floats(rows * dim));
            let added = bed.input(rows * dim);
            let op = MaskRows { rows, dim, mask, draw, accumulate: false, x, y };
            bed.device.mask_rows(&op);
            bed.device.mask_rows(&MaskRows { accumulate: true, y: added, ..op });
            vec![y, added]
        });
    }
}

/// Sums in the order of rows, as they are on a processor, bit for bit.
#[test]
fn sums_of_rows() {
    for (rows, width) in [(1, 1), (37, 5), (3, 1000)] {
        check_bits(&format!("sums of {rows} rows of {width}"), |bed| {
            let values = bed.values(rows * width);
            let (x, out) = (bed.put(DType::F64, &values), bed.put(DType::F64, &vec![7.0; width]));
            bed.device.sum_rows(&SumRows { x, out });
            vec![out]
        });
    }
}

/// Loads of layers that are even, that are not, and a mean between two whole numbers; in a step
/// that changes weights, and in ones that do not.
#[test]
fn corrections() {
    for experts in [1, 3, 64, 300] {
        let layout = StepNumbers { layers: 3, experts, tensors: 1 };
        let bad = [(StepNumbers::NON_FINITE, 1.0), (StepNumbers::LOSS, f64::NAN)];
        for flag in [None, Some(bad[0]), Some(bad[1])] {
            check_bits(&format!("corrections {experts} {flag:?}"), |bed| {
                let mut numbers = vec![0.0; layout.len()];
                let counts = below(3, 2 * experts, 5);
                numbers[layout.loads_of(0)].fill(7.0);
                let uneven = layout.loads_of(1).start..layout.loads().end;
                let pairs = numbers[uneven].iter_mut().zip(counts);
                pairs.for_each(|(load, count)| *load = f64::from(count) + 1e9);
                if let Some((at, value)) = flag {
                    numbers[at] = value;
                }
                let numbers = bed.put(DType::F64, &numbers);
                let biases = [0, 1, 2].map(|layer| {
                    let values = bed.values(experts);
                    let bias = bed.put(DType::F32, &values);
                    let loads = layout.loads_of(layer);
                    let op = MoveCorrections { rate: 1e-3, loads, numbers, bias };
                    bed.device.move_corrections(&op);
                    let rests = flag.is_some() || layer == 0 || experts == 1;
                    assert_eq!(bed.get(bias) == values, rests, "layer {layer}");
                    bias
                });
                biases.to_vec()
            });
        }
    }
}

/// The same bytes on both devices, floats being of 32 bits on the CPU, too.
fn check_bits(name: &str, case: impl Fn(&mut StepBed) -> Vec<Buffer>) {
    let mut cpu = StepBed::cpu(DType::F32, DType::F32);
    let expected = case(&mut cpu);
    let Some(mut gpu) = StepBed::cuda(name, DType::F32, DType::F32) else { return };
    let found = case(&mut gpu);
    gpu.device.finish().unwrap_or_else(|error| panic!("{name}: {error:?}"));
    for (found, expected) in found.into_iter().zip(expected) {
        assert!(gpu.bytes(found) == cpu.bytes(expected), "{name}");
    }
}
