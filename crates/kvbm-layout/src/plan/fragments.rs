//! The one-sided view of a plan: the pieces of a scattered block in the order of a contiguous slot,
//! as a vectored read or write wants them.

use super::{CopyPlan, PlanError, Side};
use crate::layout::BlockLayout;
use crate::slice::Selection;

/// Most fragments of a block that are listed: beyond that, a staging copy is faster than any
/// vectored I/O.
pub const MAX_FRAGMENTS: u64 = 1 << 18;

/// One piece of a block in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Region of the memory layout.
    pub region: u32,
    /// Byte offset in it.
    pub offset: u64,
    /// Byte offset in the slot.
    pub slot_offset: u64,
    /// Bytes.
    pub len: u64,
}

/// A fragment of block 0, and how far it moves per block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    fragment: Fragment,
    block_stride: u64,
}

/// Where the bytes of a block of one layout stand in a contiguous slot of another layout. The list
/// is ordered, for `preadv`, `pwritev` or a gather of descriptors. So a scattered block moves to
/// and from a slot without a staging copy.
///
/// Made once per pair of layouts; fragments are sorted by `slot_offset`, never overlap, and
/// touching ones are joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FragmentList {
    pieces: Vec<Piece>,
    blocks: u32,
    bytes: u64,
    slot_bytes: u64,
}

impl FragmentList {
    /// The fragments of `selection` of blocks of `memory`, in the byte order of blocks of `slot`.
    ///
    /// In `selection`, `memory` is the source and `slot` the destination; the list serves reads and
    /// writes alike.
    ///
    /// # Errors
    /// As [`CopyPlan::between`]; also a slot layout whose blocks are not contiguous, and more than
    /// [`MAX_FRAGMENTS`] fragments.
    pub fn between(
        memory: &dyn BlockLayout,
        slot: &dyn BlockLayout,
        selection: &Selection,
    ) -> Result<Self, PlanError> {
        let Some(run) = slot.contiguous_block() else {
            return Err(PlanError::SlotNotContiguous {
                slot: format!("{:?}, {}", slot.layout_type(), slot.axis_order()),
            });
        };
        let plan = CopyPlan::between(memory, slot, selection)?;
        if plan.num_runs() > MAX_FRAGMENTS {
            return Err(PlanError::TooManyFragments { count: plan.num_runs(), limit: MAX_FRAGMENTS });
        }
        let mut pieces = pieces_of_block_0(&plan)?;
        for piece in &mut pieces {
            piece.fragment.slot_offset -= run.offset;
        }
        pieces.sort_unstable_by_key(|piece| piece.fragment.slot_offset);
        pieces.dedup_by(|next, kept| {
            let joins = next.fragment.region == kept.fragment.region
                && next.block_stride == kept.block_stride
                && next.fragment.offset == kept.fragment.offset + kept.fragment.len
                && next.fragment.slot_offset == kept.fragment.slot_offset + kept.fragment.len;
            if joins {
                kept.fragment.len += next.fragment.len;
            }
            joins
        });
        let blocks = memory.config().num_blocks;
        Ok(Self { pieces, blocks, bytes: plan.bytes_per_block(), slot_bytes: run.bytes })
    }

    /// Fragments per block.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Always false: a plan moves at least one byte.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes of all fragments of a block.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Payload bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// True if the fragments cover the payload of the slot without gaps: one vectored read or write
    /// moves the block.
    pub fn covers_slot(&self) -> bool {
        self.bytes == self.slot_bytes
    }

    /// The fragments of `block`, by slot offset.
    ///
    /// # Errors
    /// [`PlanError::Block`] if the block is beyond the memory layout.
    pub fn fragments(&self, block: u32) -> Result<Fragments<'_>, PlanError> {
        if block >= self.blocks {
            return Err(PlanError::Block { side: Side::Source, block, count: self.blocks });
        }
        Ok(Fragments { pieces: self.pieces.iter(), block: u64::from(block) })
    }
}

fn pieces_of_block_0(plan: &CopyPlan) -> Result<Vec<Piece>, PlanError> {
    let mut pieces = Vec::with_capacity(usize::try_from(plan.num_runs()).unwrap_or(0));
    let mut runs = plan.runs(0, 0)?;
    for segment in plan.segments() {
        for run in runs.by_ref().take(usize::try_from(segment.num_runs()).unwrap_or(usize::MAX)) {
            pieces.push(Piece {
                fragment: Fragment {
                    region: run.src_region,
                    offset: run.src_offset,
                    slot_offset: run.dst_offset,
                    len: run.len,
                },
                block_stride: segment.src_block_stride,
            });
        }
    }
    Ok(pieces)
}

/// Iterator over the fragments of one block; see [`FragmentList::fragments`].
#[derive(Debug, Clone)]
pub struct Fragments<'a> {
    pieces: std::slice::Iter<'a, Piece>,
    block: u64,
}

impl Iterator for Fragments<'_> {
    type Item = Fragment;

    fn next(&mut self) -> Option<Fragment> {
        let piece = self.pieces.next()?;
        Some(Fragment { offset: piece.fragment.offset + self.block * piece.block_stride, ..piece.fragment })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.pieces.size_hint()
    }
}

impl ExactSizeIterator for Fragments<'_> {}
