//! Which buckets travel together beside the ops of a step, and when.
//!
//! ```text
//! convoy     0: embedding, vectors, dense 0    l + 1: experts l, dense l + 1    L: also the head
//! backward   loss .. experts l', o l' -> reduce convoy l + 1 beside attention l' .. -> convoy 0
//! update     convoy 0 -> gather it beside the update of convoy 1 -> ..
//! forward    convoy 0 before the embedding, convoy l + 1 before the experts of l
//! ```
//! A convoy is reduced when the last of its gradients is written in the last round of a step, or
//! soon behind: attention, which leaves room for it, comes next. Every rank goes through each layer
//! of each round, with or without a micro-batch, so all enqueue the same collectives in the same
//! order.

use moejob_kernels::cuda::KeptFree;
use moejob_protocol::buckets::BucketKind;

/// How buckets travel, for measurements: `off`, all at once between the parts of a step; or how
/// many multiprocessors collectives take, `16`, and how many attention and the experts' products
/// leave free meanwhile, `16/16/0`. The same on every rank of a job.
pub const ENV_OVERLAP: &str = "MOEJOB_OVERLAP";

/// Of 16, 24 and 32 the one with which a step of OLMoE on two H200 was fastest (280.5, 274.3 and
/// 275.1 ms).
const CTAS: u32 = 24;

/// What [`ENV_OVERLAP`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// Multiprocessors of collectives at most.
    pub ctas: u32,
    pub free: KeptFree,
}

impl Overlap {
    /// None: nothing travels beside anything. `mostly` says whether most of the model travels: for
    /// less, two communicators cost more than they gain, and no kernel leaves room.
    pub fn parse(said: Option<&str>, mostly: bool) -> Option<Overlap> {
        let attention = if mostly { CTAS as usize } else { 0 };
        let usual = Overlap { ctas: CTAS, free: KeptFree { attention, products: 0 } };
        let unless_said = mostly.then_some(usual);
        let said = said.map(str::trim).filter(|said| !said.is_empty());
        match said {
            None => unless_said,
            Some("off") => None,
            Some(said) => {
                let parts: Result<Vec<u32>, _> = said.split('/').map(str::parse).collect();
                let read = parts.ok().and_then(|parts| match parts[..] {
                    [ctas] => {
                        let attention = if mostly { ctas as usize } else { 0 };
                        Some(Overlap { ctas, free: KeptFree { attention, products: 0 } })
                    }
                    [ctas, attention, products] => {
                        let [attention, products] = [attention, products].map(|n| n as usize);
                        Some(Overlap { ctas, free: KeptFree { attention, products } })
                    }
                    _ => None,
                });
                if read.is_none_or(|read| read.ctas == 0) {
                    tracing::warn!("{ENV_OVERLAP}={said} is not `off`, `16` or `16/16/0`: ignored");
                    return unless_said;
                }
                read
            }
        }
    }
}

/// How tokens travel beside products in backward, for measurements: how many blocks move them at
/// most, `4`, and how many multiprocessors products leave free meanwhile, `4/8`; as many, unless it
/// says so. `0`: they travel between products. The same on every rank of a job.
pub const ENV_BESIDE: &str = "MOEJOB_BESIDE";

/// The gradient of up takes eight times as long as a link does with 16 blocks.
const BLOCKS: u32 = 4;

/// What [`ENV_BESIDE`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BesideProducts {
    /// Of kernels that use windows; none: they wait.
    pub blocks: u32,
    pub free: usize,
}

impl BesideProducts {
    pub fn said() -> BesideProducts {
        BesideProducts::parse(std::env::var(ENV_BESIDE).ok().as_deref())
    }

    fn parse(said: Option<&str>) -> BesideProducts {
        let of = |blocks, free| BesideProducts { blocks, free: free as usize };
        let usual = of(BLOCKS, BLOCKS);
        let Some(said) = said.map(str::trim).filter(|said| !said.is_empty()) else { return usual };
        let parts: Result<Vec<u32>, _> = said.split('/').map(str::parse).collect();
        match parts.as_deref() {
            Ok([blocks]) => of(*blocks, *blocks),
            Ok([blocks, free]) => of(*blocks, *free),
            _ => {
                tracing::warn!("{ENV_BESIDE}={said} is not `4` or `4/8`: ignored");
                usual
            }
        }
    }
}

/// Convoys of a model with `layers`.
pub(crate) fn count(layers: u32) -> usize {
    layers as usize + 1
}

/// The convoy of a bucket.
pub(crate) fn convoy_of(kind: BucketKind, layers: u32) -> usize {
    match kind {
        BucketKind::Embedding | BucketKind::Vectors => 0,
        BucketKind::Dense { layer } => layer as usize,
        BucketKind::Experts { layer } => layer as usize + 1,
        BucketKind::Head => layers as usize,
    }
}

/// The convoy that is complete, in the last round, behind the feed-forward part of `layer`. In
/// forward this part is the first to need it.
pub(crate) fn convoy_at(layer: usize) -> usize {
    layer + 1
}

/// The convoy that is complete at the end of backward, and needed first in forward.
pub(crate) const FIRST: usize = 0;

#[cfg(test)]
mod tests {
    use super::*;

    /// Moments of a round, in order: forward's, then backward's.
    fn kinds(layers: u32) -> Vec<BucketKind> {
        let of_layer = |layer| [BucketKind::Dense { layer }, BucketKind::Experts { layer }];
        let ends = [BucketKind::Embedding, BucketKind::Vectors, BucketKind::Head];
        (0..layers).flat_map(of_layer).chain(ends).collect()
    }

    /// (part of a pass, layer from its begin): attention before feed-forward.
    const EMBEDDING: i64 = -1;
    fn attention(layer: u32) -> i64 {
        i64::from(layer) * 2
    }
    fn feed_forward(layer: u32) -> i64 {
        i64::from(layer) * 2 + 1
    }

    /// Where of a forward pass a bucket is read first; backward writes it last at the same place,
    /// and goes through the places in falling order.
    fn place(kind: BucketKind, layers: u32) -> i64 {
        match kind {
            // Gains of the first layer's norm are read there first, its router's last.
            BucketKind::Embedding | BucketKind::Vectors => EMBEDDING,
            BucketKind::Dense { layer } => attention(layer),
            BucketKind::Experts { layer } => feed_forward(layer),
            BucketKind::Head => feed_forward(layers),
        }
    }

    /// Where a convoy is waited for in forward, and reduced in backward, behind what is there.
    fn point(convoy: usize) -> i64 {
        if convoy == FIRST { EMBEDDING } else { feed_forward(convoy as u32 - 1) }
    }

    #[test]
    fn a_batch_is_complete_before_it_is_reduced_and_there_before_it_is_read() {
        for layers in 1..20 {
            assert_eq!((0..layers).map(|at| convoy_at(at as usize)).max(), Some(count(layers) - 1));
            for kind in kinds(layers) {
                let convoy = convoy_of(kind, layers);
                assert!(convoy < count(layers), "{kind:?} of {layers}");
                // Forward comes to the point before it reads, backward after it wrote.
                assert!(point(convoy) <= place(kind, layers), "{kind:?} of {layers}");
            }
        }
    }

    #[test]
    fn what_is_said_of_products_is_read() {
        let of = |blocks, free| BesideProducts { blocks, free };
        let (usual, parse) = (of(BLOCKS, BLOCKS as usize), BesideProducts::parse);
        assert_eq!(parse(None), usual);
        for said in [" ", "off", "8/", "8/-1", "1/2/3", "4294967296"] {
            assert_eq!(parse(Some(said)), usual, "{said:?}");
        }
        assert_eq!(parse(Some("0")), of(0, 0));
        assert_eq!(parse(Some(" 8 ")), of(8, 8));
        assert_eq!(parse(Some("32/0")), of(32, 0));
    }

    #[test]
    fn what_is_said_is_read() {
        let of = |ctas, attention, products| {
            Some(Overlap { ctas, free: KeptFree { attention, products } })
        };
        let usual = of(CTAS, CTAS as usize, 0);
        assert_eq!(Overlap::parse(None, true), usual);
        assert_eq!(Overlap::parse(None, false), None);
        assert_eq!(Overlap::parse(Some(" "), true), usual);
        assert_eq!(Overlap::parse(Some("off"), true), None);
        assert_eq!(Overlap::parse(Some("8"), true), of(8, 8, 0));
        assert_eq!(Overlap::parse(Some("8"), false), of(8, 0, 0));
        assert_eq!(Overlap::parse(Some("24/8/4"), true), of(24, 8, 4));
        for wrong in ["0", "on", "8/8", "-1", "1/2/3/4", "4294967296"] {
            assert_eq!(Overlap::parse(Some(wrong), true), usual, "{wrong}");
        }
    }
}
