//! How blocks are cut into objects, for this number of ranks and for others, whose objects hold
//! other heads.

use crate::config::VolumeTier;
use kvbm_volume::BlobSlice;

/// One way to cut a block: the objects that together hold the heads of this rank, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) parts: Vec<CutPart>,
}

/// An object of a cut, and which of its heads are this rank's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CutPart {
    pub(crate) slice: BlobSlice,
    /// Heads before ours.
    pub(crate) before: u32,
    /// Ours.
    pub(crate) heads: u32,
    /// Heads behind ours.
    pub(crate) after: u32,
}

/// All cuts that a rank can read, its own first.
///
/// `alone`: objects are in an order that only ranks of the same size understand.
pub(crate) fn cuts(tier: &VolumeTier, alone: bool) -> Vec<Cut> {
    let own = tier.slice;
    let mut all =
        vec![Cut { parts: vec![CutPart { slice: own, before: 0, heads: own.num_heads, after: 0 }] }];
    let of_model = tier.model_heads;
    if alone || own.first_head.checked_add(own.num_heads).is_none_or(|end| end > of_model) {
        return all;
    }
    let widths = (1..=of_model).rev().filter(|width| of_model.is_multiple_of(*width));
    all.extend(widths.filter(|width| *width != own.num_heads).map(|width| Cut { parts: parts(own, width) }));
    all
}

/// The objects of `width` heads that hold those of `own`.
fn parts(own: BlobSlice, width: u32) -> Vec<CutPart> {
    let end = own.first_head + own.num_heads;
    let objects = own.first_head / width..end.div_ceil(width);
    let part = |object: u32| {
        let (start, stop) = (object * width, (object + 1) * width);
        let (first, last) = (start.max(own.first_head), stop.min(end));
        CutPart {
            slice: BlobSlice { first_head: start, num_heads: width, ..own },
            before: first - start,
            heads: last - first,
            after: stop - last,
        }
    };
    objects.map(part).collect()
}

/// Whether an object is this rank's to remove: of ranks that share one, that with its first head.
pub(crate) fn owns(tier: &VolumeTier, slice: &BlobSlice) -> bool {
    let own = tier.slice;
    let same_layers = (slice.first_layer, slice.num_layers) == (own.first_layer, own.num_layers);
    same_layers && (own.first_head..own.first_head.saturating_add(own.num_heads)).contains(&slice.first_head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_volume::{ObjectSeal, VolumeRegistry};
    use std::sync::Arc;

    fn tier(first_head: u32, num_heads: u32, model_heads: u32) -> VolumeTier {
        let slice = BlobSlice { first_layer: 0, num_layers: 4, first_head, num_heads };
        let registry = Arc::new(VolumeRegistry::new());
        VolumeTier { registry, slice, model_heads, writes: true, seal: ObjectSeal::default(), threads: 1 }
    }

    /// First head, heads before ours, ours, behind ours.
    fn shown(cut: &Cut) -> Vec<[u32; 4]> {
        let part = |part: &CutPart| [part.slice.first_head, part.before, part.heads, part.after];
        cut.parts.iter().map(part).collect()
    }

    #[test]
    fn objects_of_other_sizes_hold_our_heads() {
        let cuts = |tier: &VolumeTier| cuts(tier, false).iter().map(shown).collect::<Vec<_>>();
        assert_eq!(
            cuts(&tier(4, 2, 8)),
            [vec![[4, 0, 2, 0]], vec![[0, 4, 2, 2]], vec![[4, 0, 2, 2]], vec![[4, 0, 1, 0], [5, 0, 1, 0]],]
        );
        // Six heads among three ranks, read by the second of two.
        assert_eq!(cuts(&tier(3, 3, 6))[2], [[2, 1, 1, 0], [4, 0, 2, 0]]);
        assert_eq!(cuts(&tier(0, 1, 1)), [vec![[0, 0, 1, 0]]]);
        assert_eq!(super::cuts(&tier(4, 2, 8), true).len(), 1, "others are not understood");
        assert_eq!(super::cuts(&tier(7, 2, 8), false).len(), 1, "a slice beyond the model");
    }

    #[test]
    fn every_part_of_every_cut_holds_the_heads_once() {
        for of_model in 1..=12_u32 {
            for width in (1..=of_model).filter(|width| of_model.is_multiple_of(*width)) {
                for rank in 0..of_model / width {
                    for cut in cuts(&tier(rank * width, width, of_model), false) {
                        let mut next = rank * width;
                        for CutPart { slice, before, heads, after } in cut.parts {
                            assert_eq!(slice.first_head + before, next);
                            assert_eq!(before + heads + after, slice.num_heads);
                            next += heads;
                        }
                        assert_eq!(next, (rank + 1) * width);
                    }
                }
            }
        }
    }

    #[test]
    fn an_object_is_removed_by_one_rank() {
        for first_head in 0..8 {
            for num_heads in [1, 2, 4, 8] {
                let slice = BlobSlice { first_head, num_heads, ..tier(0, 2, 8).slice };
                let owners = (0..4).filter(|rank| owns(&tier(2 * rank, 2, 8), &slice)).count();
                assert_eq!(owners, 1);
            }
        }
        let other_layers = BlobSlice { first_layer: 4, ..tier(0, 2, 8).slice };
        assert!(!owns(&tier(0, 2, 8), &other_layers));
    }
}
