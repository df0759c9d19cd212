//! Experts placed by how often they were chosen.

use moejob_protocol::by_load::Loads;
use moejob_protocol::mesh::split;

/// Loads like those of a router that prefers some experts: a few of many tokens, many of few.
fn skewed(layers: usize, experts: usize, seed: u64) -> Vec<u64> {
    let mut x = seed;
    let mut next = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) % 1000
    };
    (0..layers * experts).map(|_| 1 + next() * next() / 200).collect()
}

fn held(order: &[u32], ep: u32, place: u32) -> &[u32] {
    let run = split(order.len() as u32, ep, place);
    &order[run.start as usize..run.end as usize]
}

#[test]
fn every_expert_has_one_place() {
    for (experts, ep) in [(64, 2), (64, 8), (60, 8), (7, 3), (3, 3), (2, 4), (1, 1), (256, 64)] {
        let counts = skewed(3, experts, experts as u64);
        let loads = Loads { counts: &counts, experts };
        let order = loads.order(ep, &loads.in_order());
        assert_eq!(order.len(), 3);
        for of_layer in order {
            let mut all = of_layer.clone();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..experts as u32), "{experts} over {ep}: {of_layer:?}");
            for place in 0..ep {
                assert!(held(&of_layer, ep, place).is_sorted());
            }
        }
    }
}

#[test]
fn ranks_have_as_many_tokens_as_they_can() {
    for (experts, ep, most) in [(64, 2, 1.001), (64, 8, 1.15), (128, 8, 1.05)] {
        for seed in 0..20 {
            let counts = skewed(4, experts, seed);
            let loads = Loads { counts: &counts, experts };
            let before = loads.in_order();
            let after = loads.unevenness(ep, &loads.order(ep, &before));
            // One expert may have more than a rank's share.
            let least = counts.chunks_exact(experts).map(|of| {
                let (most, all) = (of.iter().max().unwrap(), of.iter().sum::<u64>());
                (*most as f64 * f64::from(ep) / all as f64).max(1.0)
            });
            let least = least.sum::<f64>() / 4.0;
            assert!(after <= least * most, "{experts} over {ep}: {after}, at least {least}");
            assert!(after < loads.unevenness(ep, &before), "{experts} over {ep}");
        }
    }
}

/// Four experts on two ranks, by hand.
#[test]
fn the_best_of_few() {
    let loads = Loads { counts: &[8, 7, 2, 1], experts: 4 };
    assert_eq!(loads.unevenness(2, &loads.in_order()), 15.0 / 9.0);
    let order = loads.order(2, &loads.in_order());
    // 8 + 1 and 7 + 2; the first lie where most of them lay.
    assert_eq!(order, vec![vec![0, 3, 1, 2]]);
    assert_eq!(loads.unevenness(2, &order), 1.0);
    // What lies well stays where it is.
    let turned = vec![vec![1, 2, 0, 3]];
    assert_eq!(loads.order(2, &turned), turned);
}

#[test]
fn without_tokens_nothing_is_uneven() {
    let loads = Loads { counts: &[0; 8], experts: 4 };
    assert_eq!(loads.unevenness(2, &loads.in_order()), 1.0);
    assert_eq!(loads.order(2, &loads.in_order()).len(), 2);
    let none = Loads { counts: &[], experts: 4 };
    assert_eq!(none.unevenness(2, &none.in_order()), 0.0);
}
