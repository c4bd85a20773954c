//! Splitting a transfer into plans.

use super::Move;
use super::layers::LayerSteps;
use kvbm_plan::{BlockTransfer, Tier, TransferPlan};
use std::ops::Range;

/// Blocks of one plan: enough to hide the cost of a plan, few enough that several are under way for
/// a large prefix.
pub(crate) const MAX_PLAN_BLOCKS: usize = 128;
/// Bytes of one plan that reads from a disk or a volume: of a prefix that comes too slowly, what
/// arrived counts plan by plan. As much as a worker hands to a disk at a time.
const MAX_READ_BYTES: u64 = 8 << 20;

/// Blocks of one plan that reads blocks of so many bytes on each rank from a disk or a volume.
pub(crate) fn max_read_blocks(rank_block_bytes: u64) -> usize {
    let blocks = MAX_READ_BYTES / rank_block_bytes.max(1);
    usize::try_from(blocks).unwrap_or(usize::MAX).clamp(1, MAX_PLAN_BLOCKS)
}

/// Runs of moves from one tier, at most `max_blocks` of that each. A plan has one source tier and
/// group, and several plans in flight keep a path busy from end to end.
pub(super) fn ranges(moves: &[Move], max_blocks: impl Fn(Tier) -> usize) -> Vec<Range<usize>> {
    let max_blocks = |tier| max_blocks(tier).clamp(1, TransferPlan::MAX_BLOCKS);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for (index, block) in moves.iter().enumerate() {
        let joins = |range: &&mut Range<usize>| {
            let first = &moves[range.start];
            range.len() < max_blocks(block.from)
                && first.from == block.from
                && first.identity.group == block.identity.group
        };
        match ranges.last_mut().filter(joins) {
            Some(range) => range.end = index + 1,
            None => ranges.push(index..index + 1),
        }
    }
    ranges
}

/// What one plan moves: these of the moves, all layers or those of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) moves: Range<usize>,
    pub(super) step: Option<usize>,
}

/// Whether blocks of `from` can go to `to` layer by layer: disks and volumes keep whole blocks.
pub(super) fn has_layers(from: Tier, to: Tier) -> bool {
    matches!((from, to), (Tier::G1, Tier::G2) | (Tier::G2, Tier::G1))
}

/// The parts of a transfer to `to`, in the order in which they are sent: whole blocks, then the
/// others step by step.
pub(super) fn parts(
    moves: &[Move],
    to: Tier,
    layers: Option<LayerSteps>,
    max_blocks: impl Fn(Tier) -> usize,
) -> Vec<Part> {
    let (stepped, whole): (Vec<_>, Vec<_>) = ranges(moves, max_blocks)
        .into_iter()
        .partition(|range| layers.is_some() && has_layers(moves[range.start].from, to));
    let steps = 0..layers.map_or(0, LayerSteps::count);
    let of_step = |step| stepped.iter().map(move |range| Part { moves: range.clone(), step: Some(step) });
    let whole = whole.into_iter().map(|moves| Part { moves, step: None });
    whole.chain(steps.flat_map(of_step)).collect()
}

/// The blocks of a plan.
pub(super) fn transfers(moves: &[Move]) -> Vec<BlockTransfer> {
    moves
        .iter()
        .map(|block| BlockTransfer { identity: block.identity, src: block.src, dst: block.dst })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};

    fn block(from: Tier) -> Move {
        let identity = BlockIdentity {
            namespace: NamespaceId(0),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([1; 16]),
            parent: None,
            position: 0,
        };
        Move { identity, from, src: BlockId(0), dst: BlockId(0) }
    }

    #[test]
    fn a_plan_has_one_source_tier_and_a_bounded_size() {
        let moves = [Tier::G2, Tier::G2, Tier::G2, Tier::G3, Tier::G3, Tier::G2].map(block);
        assert_eq!(ranges(&moves, |_| 2), [0..2, 2..3, 3..5, 5..6]);
        assert_eq!(ranges(&moves, |_| 100), [0..3, 3..5, 5..6]);
        assert_eq!(ranges(&moves, |tier| if tier == Tier::G3 { 1 } else { 100 }), [0..3, 3..4, 4..5, 5..6]);
        assert!(ranges(&[], |_| 100).is_empty());
        assert_eq!(transfers(&moves).len(), 6);
        let part = |moves, step| Part { moves, step };
        let steps = LayerSteps::new(4, 2, None);
        assert_eq!(
            parts(&moves, Tier::G1, steps, |_| 100),
            [
                part(3..5, None),
                part(0..3, Some(0)),
                part(5..6, Some(0)),
                part(0..3, Some(1)),
                part(5..6, Some(1))
            ]
        );
        assert_eq!(parts(&moves, Tier::G1, None, |_| 100).len(), 3);
    }
}
