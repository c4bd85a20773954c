//! Digests that tell whether the bytes of a block have arrived, whatever the layouts of both sides.
//!
//! The digest of a part of a block is the sum of the hashes of its rows. A *row* is what one head
//! holds for one token in one cell. Its hash covers the block's sequence hash, the place of the row
//! in the model, and its bytes. Sums of parts add up, so a node can tell the digest of any range of
//! layers and heads, and a reader computes it from what arrived in its own layout.

use std::ops::Range;

use kvbm_layout::{BlockView, Cell, CellView};
use kvbm_plan::{RankSlice, SequenceHash};
use kvbm_storage::{BoundLayout, RegionBytes, StorageError};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::device_memory::DeviceAccess;
use crate::shapes::ModelPart;

/// The blocks of a rank of this process.
#[derive(Clone, Copy)]
pub(crate) struct RankBlocks<'a> {
    /// Which part of the model they have.
    pub(crate) slice: &'a RankSlice,
    pub(crate) bound: &'a BoundLayout,
    /// How the processor reads them, where they are device memory.
    pub(crate) device: Option<&'a DeviceAccess>,
}

/// The digest of `part` of `block`. `part` lies in the slice of the rank.
///
/// # Errors
/// Memory that the processor cannot read; a block that is not there.
///
/// # Safety
/// Nobody may write the block meanwhile.
pub(crate) unsafe fn digest(
    blocks: RankBlocks<'_>,
    block: u32,
    hash: &SequenceHash,
    part: &ModelPart,
) -> Result<u64, StorageError> {
    let RankBlocks { slice, bound, .. } = blocks;
    let layout = &**bound.layout();
    let mut cells = Vec::new();
    for layer in part.layers.clone() {
        for cell in layout.config().cells() {
            cells.push((layer, cell, layout.block_view(block, layer - slice.first_layer, cell)?));
        }
    }
    let is_on_device = matches!(bound.memory().first(), Some(RegionBytes::Device(_)));
    let downloaded = is_on_device.then(|| Downloaded::of(blocks, &cells)).transpose()?;
    let mut sum = 0_u64;
    for (layer, cell, view) in &cells {
        let bytes = match (bound.region(view.region)?, &downloaded) {
            // SAFETY: the caller excludes writers.
            (RegionBytes::Host(region), _) => unsafe { region.bytes(view.offset, view.cell.span()) }?,
            (_, Some(downloaded)) => downloaded.cell(view),
            _ => return Err(unreadable(bound)),
        };
        let seed = seed(hash, *layer, *cell);
        let heads = heads(&view.cell, slice, part);
        sum = sum.wrapping_add(cell_digest(bytes, &view.cell, heads, slice.heads.start, seed));
    }
    Ok(sum)
}

fn unreadable(bound: &BoundLayout) -> StorageError {
    StorageError::NotHostAccessible { kind: bound.kind(), operation: "digest (set LocalRank::device)" }
}

/// Cells of a block that lies in device memory. Cells may lie between each other, so their ranges
/// are united before they are copied.
struct Downloaded {
    /// Region, first and last offset of each range, and where it begins in `bytes`.
    ranges: Vec<(u32, Range<u64>, u64)>,
    bytes: Vec<u8>,
}

impl Downloaded {
    fn of(blocks: RankBlocks<'_>, cells: &[(u32, Cell, BlockView)]) -> Result<Self, StorageError> {
        let access = blocks.device.ok_or_else(|| unreadable(blocks.bound))?;
        let range_of = |view: &BlockView| view.offset..view.offset.saturating_add(view.cell.span());
        let mut spans: Vec<_> = cells.iter().map(|(_, _, view)| (view.region, range_of(view))).collect();
        spans.sort_unstable_by_key(|(region, range)| (*region, range.start));
        let mut ranges: Vec<(u32, Range<u64>, u64)> = Vec::new();
        for (region, span) in spans {
            match ranges.last_mut() {
                Some((known, range, _)) if *known == region && span.start <= range.end => {
                    range.end = range.end.max(span.end);
                }
                _ => ranges.push((region, span, 0)),
            }
        }
        let (mut copies, mut next) = (Vec::with_capacity(ranges.len()), 0);
        for (region, range, at) in &mut ranges {
            let RegionBytes::Device(memory) = blocks.bound.region(*region)? else {
                return Err(unreadable(blocks.bound));
            };
            let len = range.end - range.start;
            copies.push((memory, range.start, len));
            *at = next;
            next += len;
        }
        let bytes = access.read(&copies)?;
        Ok(Self { ranges, bytes })
    }

    /// The bytes of one of the cells.
    fn cell(&self, view: &BlockView) -> &[u8] {
        let behind = self
            .ranges
            .partition_point(|(region, range, _)| (*region, range.start) <= (view.region, view.offset));
        let (_, range, at) = &self.ranges[behind - 1];
        let first = (at + view.offset - range.start) as usize;
        &self.bytes[first..first + view.cell.span() as usize]
    }
}

/// Heads of the layout that belong to the part. An opaque cell counts as one head, which is there
/// whole.
fn heads(cell: &CellView, slice: &RankSlice, part: &ModelPart) -> Range<u32> {
    if cell.opaque {
        0..cell.heads
    } else {
        part.heads.start - slice.heads.start..part.heads.end - slice.heads.start
    }
}

/// The sum of a cell's rows.
fn cell_digest(bytes: &[u8], cell: &CellView, heads: Range<u32>, first_head: u32, seed: u64) -> u64 {
    let row_bytes = cell.elems as usize * cell.elem_bytes as usize;
    let is_run = cell.elem_stride == u64::from(cell.elem_bytes);
    let mut gathered = Vec::new();
    let mut sum = 0_u64;
    for token in 0..cell.tokens {
        for head in heads.clone() {
            let at = (u64::from(token) * cell.token_stride + u64::from(head) * cell.head_stride) as usize;
            let row =
                if is_run { &bytes[at..at + row_bytes] } else { gather(bytes, at, cell, &mut gathered) };
            let place = (u64::from(token) << 32) | u64::from(first_head + head);
            sum = sum.wrapping_add(bind(xxh3_64(row), seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        }
    }
    sum
}

/// The hash of a row, bound to its place: the halves of a product of 128 bits, folded. XXH3 with a
/// seed would do, too, but it makes a secret of 192 bytes for each row of more than 240 bytes.
fn bind(hash: u64, place: u64) -> u64 {
    // `PRIME64_1` and `PRIME64_2` of XXH64: short rows and low places give large factors, too.
    let product = u128::from(hash ^ 0x9e37_79b1_85eb_ca87) * u128::from(place ^ 0xc2b2_ae3d_27d4_eb4f);
    (product as u64) ^ ((product >> 64) as u64)
}

fn gather<'a>(bytes: &[u8], at: usize, cell: &CellView, into: &'a mut Vec<u8>) -> &'a [u8] {
    into.clear();
    for element in 0..cell.elems {
        let at = at + (element * cell.elem_stride) as usize;
        into.extend_from_slice(&bytes[at..at + cell.elem_bytes as usize]);
    }
    into
}

/// What binds a row to its block and its place.
fn seed(hash: &SequenceHash, layer: u32, cell: Cell) -> u64 {
    let cell = match cell {
        Cell::Kv(outer) => u64::from(outer),
        Cell::Plane(plane) => (1 << 31) | u64::from(plane),
    };
    let place = (u64::from(layer) << 32) | cell;
    xxh3_64_with_seed(hash.as_bytes(), place)
}
