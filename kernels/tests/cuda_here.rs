//! Rows of the experts that one rank of several computes, against their definition: on a CPU
//! always, on a GPU where there is one.

use moejob_kernels::cuda::Gpu;
use moejob_kernels::philox::philox4x32_10;
use moejob_kernels::{ArenaPlan, DType, Device, MoePlace, NO_EXPERT, Saved, Sources};

struct Case {
    experts: usize,
    top_k: usize,
    ranks: usize,
    tokens: usize,
    first: usize,
    locals: usize,
    present: usize,
}

/// Distinct experts a token, ascending, as a router gives them; some slots are empty.
fn choices(case: &Case) -> Vec<u32> {
    let of_token = |token: usize| {
        let random = |n: u32| -> usize { philox4x32_10(5, [token as u32, n, 0, 0])[0] as usize };
        let mut chosen: Vec<u32> = Vec::new();
        let mut n = 0;
        while chosen.len() < case.top_k {
            let id = (random(n) % case.experts) as u32;
            n += 1;
            if !chosen.contains(&id) {
                chosen.push(id);
            }
        }
        chosen.sort_unstable();
        if token.is_multiple_of(11) {
            chosen[case.top_k - 1] = NO_EXPERT;
        }
        chosen
    };
    (0..case.ranks * case.tokens).flat_map(of_token).collect()
}

fn check(case: &Case, mut device: Device) {
    let (slots, ids) = (case.ranks * case.tokens * case.top_k, choices(case));
    let weights: Vec<f32> = (0..slots).map(|slot| slot as f32 + 0.5).collect();
    let on_gpu = device.as_cuda().is_some();
    let mut plan = ArenaPlan::new();
    let mut words = |len: usize| plan.alloc(DType::U32, len);
    let (all, offsets, order) = (words(slots), words(case.locals + 1), words(case.locals));
    let (rows, pos, choices) = (words(slots), words(slots), words(slots));
    let ends = words(case.ranks + 1);
    let none = words(0);
    let mut floats = |len: usize| plan.alloc(DType::F32, len);
    let (given, row_weights) = (floats(slots), floats(slots));
    let overflows = plan.alloc(DType::F64, 1);
    device.reserve(plan.bytes()).expect("an arena");
    let saved = Saved {
        h: none,
        a: none,
        logits: none,
        probs: none,
        lse: none,
        ids: all,
        weights: given,
        counts: none,
        offsets,
        order: if on_gpu { order } else { none },
        rows,
        pos,
        row_weights,
        segment_counts: none,
        prob_sums: none,
        losses: none,
        router_halves: none,
    };
    let Case { top_k, tokens, ranks, first, locals, present, .. } = *case;
    let room = usize::MAX;
    let each = tokens;
    let sources = Sources::Even { ranks, each, present };
    let op = MoePlace { top_k, sources, first, locals, room, overflows, saved, choices: None };
    device.write(all, &ids);
    device.write(given, &weights);
    // What was there before, of another batch, says nothing.
    device.write(pos, &vec![7_u32; slots]);
    device.moe_place(&op);
    device.finish().expect("no failure");
    let here = |slot: usize| {
        let rank = slot / (tokens * top_k);
        let id = ids[slot] as usize;
        (rank < present && (first..first + locals).contains(&id)).then(|| id - first)
    };
    let mut by_expert: Vec<Vec<usize>> = vec![Vec::new(); locals];
    (0..slots).filter_map(|slot| Some((slot, here(slot)?))).for_each(|(slot, place)| {
        by_expert[place].push(slot);
    });
    let mut starts = vec![0_u32];
    by_expert.iter().for_each(|of| starts.push(starts[starts.len() - 1] + of.len() as u32));
    assert_eq!(device.read_vec::<u32>(offsets), starts);
    let sorted: Vec<usize> = by_expert.concat();
    assert!(!sorted.is_empty() && sorted.len() < slots, "{} rows", sorted.len());
    let found: Vec<u32> = device.read_vec(rows.slice(0, sorted.len()));
    let expected: Vec<u32> = sorted.iter().map(|slot| (slot / top_k) as u32).collect();
    assert_eq!(found, expected);
    let found: Vec<f32> = device.read_vec(row_weights.slice(0, sorted.len()));
    let expected: Vec<f32> = sorted.iter().map(|slot| weights[*slot]).collect();
    assert_eq!(found, expected);
    let mut expected = vec![NO_EXPERT; slots];
    sorted.iter().enumerate().for_each(|(row, slot)| expected[*slot] = row as u32);
    assert_eq!(device.read_vec::<u32>(pos), expected);
    // As many tokens are listed, and the rows of choices in the order of their slots.
    let told = (0..=ranks).map(|rank| (rank.min(present) * tokens) as u32);
    device.write(ends, &told.collect::<Vec<u32>>());
    device.write(choices, &vec![7_u32; slots]);
    let listed = MoePlace { sources: Sources::Listed(ends), choices: Some(choices), ..op };
    device.moe_place(&listed);
    let found: Vec<u32> = device.read_vec(pos.slice(0, present * tokens * top_k));
    assert_eq!(found, expected[..found.len()]);
    let some: Vec<u32> = found.into_iter().filter(|row| *row != NO_EXPERT).collect();
    assert_eq!(device.read_vec::<u32>(choices.slice(0, some.len())), some);
    // As many as there are have room, one less has not.
    device.moe_place(&MoePlace { room: sorted.len(), ..op });
    assert_eq!(device.read_vec::<u32>(pos), expected);
    assert_eq!(device.read_vec::<f64>(overflows), [0.0]);
    for times in [1.0, 2.0] {
        device.moe_place(&MoePlace { room: sorted.len() - 1, ..op });
        assert_eq!(device.read_vec::<u32>(offsets), vec![0; locals + 1]);
        assert_eq!(device.read_vec::<u32>(pos), vec![NO_EXPERT; slots]);
        assert_eq!(device.read_vec::<f64>(overflows), [times]);
    }
    device.finish().expect("no failure");
    if on_gpu {
        let mut heaviest: Vec<u32> = (0..locals as u32).collect();
        heaviest.sort_by_key(|e| (std::cmp::Reverse(by_expert[*e as usize].len()), *e));
        assert_eq!(device.read_vec::<u32>(order), heaviest);
    }
}

#[test]
fn rows_lie_by_expert_and_token() {
    let case = |experts, top_k, size: [usize; 2], here: [usize; 2], present| {
        let ([ranks, tokens], [first, locals]) = (size, here);
        Case { experts, top_k, ranks, tokens, first, locals, present }
    };
    for case in [
        case(64, 8, [2, 300], [32, 32], 2),
        case(64, 8, [2, 300], [0, 32], 1),
        case(6, 2, [3, 7], [2, 2], 2),
        case(512, 16, [2, 1000], [256, 256], 2),
        case(100, 1, [4, 64], [25, 25], 4),
        case(200, 2, [100, 8], [50, 2], 99),
        case(64, 8, [3, 300], [60, 4], 2),
    ] {
        check(&case, Device::cpu(1, 0).expect("a CPU"));
        if Gpu::open(0).is_ok() {
            check(&case, Device::cuda(0, 0).expect("a GPU"));
        }
    }
}
