//! How blocks are cut into objects, for this number of ranks and for others, whose objects hold
//! other heads.

use crate::config::{VolumeGroup, VolumeTier};
use kvbm_plan::GroupId;
use kvbm_volume::{BlobKey, BlobSlice};

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
pub(crate) fn cuts(group: &VolumeGroup, alone: bool) -> Vec<Cut> {
    let own = group.slice;
    let mut all =
        vec![Cut { parts: vec![CutPart { slice: own, before: 0, heads: own.num_heads, after: 0 }] }];
    let of_model = group.heads;
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

/// A cache group of `tier`; `None` where the model has no such group.
pub(crate) fn group_of(tier: &VolumeTier, group: GroupId) -> Option<&VolumeGroup> {
    tier.groups.get(usize::from(group.0))
}

/// Whether an object is this rank's to remove: of ranks that share one, that with its first head.
/// What is named by a rank goes to the ranks that write, in turn: there may have been more ranks.
pub(crate) fn owns(tier: &VolumeTier, key: &BlobKey) -> bool {
    let Some(VolumeGroup { slice: own, heads }) = group_of(tier, key.group) else { return false };
    let slice = &key.slice;
    if (slice.first_layer, slice.num_layers) != (own.first_layer, own.num_layers) {
        return false;
    }
    match slice.first_head.checked_sub(*heads) {
        Some(rank) => {
            let (place, writers) = tier.share;
            tier.writes && rank % writers.max(1) == place
        }
        None => (own.first_head..own.first_head.saturating_add(own.num_heads)).contains(&slice.first_head),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{NamespaceId, NamespaceTag, SequenceHash};
    use kvbm_volume::{ObjectSeal, VolumeRegistry};
    use std::sync::Arc;

    const LAYERS: u32 = 4;

    fn group(first_head: u32, num_heads: u32, heads: u32) -> VolumeGroup {
        let slice = BlobSlice { first_layer: 0, num_layers: LAYERS, first_head, num_heads };
        VolumeGroup { slice, heads }
    }

    fn tier(groups: Vec<VolumeGroup>, share: (u32, u32)) -> VolumeTier {
        let (registry, seal) = (Arc::new(VolumeRegistry::new()), ObjectSeal::default());
        VolumeTier { registry, groups, writes: true, share, seal, threads: 1 }
    }

    fn key(group: u16, slice: BlobSlice) -> BlobKey {
        let (namespace, hash) = (NamespaceTag::from_bytes([0; 16]), SequenceHash::from_bytes([1; 16]));
        BlobKey { namespace, label: NamespaceId(1), group: GroupId(group), hash, slice }
    }

    /// First head, heads before ours, ours, behind ours.
    fn shown(cut: &Cut) -> Vec<[u32; 4]> {
        let part = |part: &CutPart| [part.slice.first_head, part.before, part.heads, part.after];
        cut.parts.iter().map(part).collect()
    }

    #[test]
    fn objects_of_other_sizes_hold_our_heads() {
        let cuts = |group: &VolumeGroup| cuts(group, false).iter().map(shown).collect::<Vec<_>>();
        assert_eq!(
            cuts(&group(4, 2, 8)),
            [vec![[4, 0, 2, 0]], vec![[0, 4, 2, 2]], vec![[4, 0, 2, 2]], vec![[4, 0, 1, 0], [5, 0, 1, 0]],]
        );
        // Six heads among three ranks, read by the second of two.
        assert_eq!(cuts(&group(3, 3, 6))[2], [[2, 1, 1, 0], [4, 0, 2, 0]]);
        assert_eq!(cuts(&group(0, 1, 1)), [vec![[0, 0, 1, 0]]]);
        assert_eq!(super::cuts(&group(4, 2, 8), true).len(), 1, "others are not understood");
        assert_eq!(super::cuts(&group(7, 2, 8), false).len(), 1, "a slice beyond the model");
    }

    #[test]
    fn every_part_of_every_cut_holds_the_heads_once() {
        for of_model in 1..=12_u32 {
            for width in (1..=of_model).filter(|width| of_model.is_multiple_of(*width)) {
                for rank in 0..of_model / width {
                    for cut in cuts(&group(rank * width, width, of_model), false) {
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
        // Four ranks of a model with heads in one group and a state in the other.
        let ranks = [0, 1, 2, 3].map(|rank| {
            tier(vec![group(2 * rank, 2, 8), VolumeGroup::of_rank(LAYERS, 0, rank, 4)], (rank, 4))
        });
        let owners = |key: &BlobKey| ranks.iter().filter(|tier| owns(tier, key)).count();
        for first_head in 0..8 {
            for num_heads in [1, 2, 4, 8] {
                let slice = BlobSlice { first_head, num_heads, ..group(0, 2, 8).slice };
                assert_eq!(owners(&key(0, slice)), 1);
            }
        }
        for of_ranks in [1, 2, 4, 8] {
            for rank in 0..of_ranks {
                let slice = VolumeGroup::of_rank(LAYERS, 0, rank, of_ranks).slice;
                assert_eq!(owners(&key(1, slice)), 1, "rank {rank} of {of_ranks}");
            }
        }
        let other_layers = BlobSlice { first_layer: 4, ..group(0, 2, 8).slice };
        assert_eq!(owners(&key(0, other_layers)), 0);
        assert_eq!(owners(&key(2, group(0, 2, 8).slice)), 0, "no such group");
    }

    #[test]
    fn what_is_named_by_a_rank_is_read_by_that_rank_alone() {
        let replicated = VolumeGroup::of_rank(LAYERS, 2, 1, 4);
        assert_eq!(shown(&cuts(&replicated, false)[0]), [[3, 0, 4, 0]]);
        assert_eq!(cuts(&replicated, false).len(), 1);
        // No rank that is named by its heads has the same name.
        assert!((1..=2).all(|width| (0..2 / width).all(|at| group(at * width, width, 2) != replicated)));
    }
}
