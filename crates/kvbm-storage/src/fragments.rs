//! The contiguous runs of bytes that a block consists of.

use kvbm_layout::{BlockLayout, CellView, LayoutError};

use crate::StorageError;

/// One contiguous run of bytes of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BoundFragment {
    /// Region of the layout.
    pub region: u32,
    /// First byte, as an offset in the region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Fragments of block 0, and how far apart blocks are.
#[derive(Clone, Debug)]
pub(crate) struct FragmentTable {
    num_blocks: u32,
    runs: Vec<Run>,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    first: BoundFragment,
    block_stride: u64,
}

/// Most runs that are listed for a block.
const MAX_RUNS: u64 = 1 << 20;

impl FragmentTable {
    /// Payload only, merged to the fewest runs, ordered by region and offset.
    pub(crate) fn new(layout: &dyn BlockLayout) -> Result<Self, StorageError> {
        let config = layout.config();
        let num_blocks = config.num_blocks;
        if let Some(whole) = layout.contiguous_block() {
            let first = BoundFragment { region: whole.region, offset: whole.offset, len: whole.bytes };
            return Ok(Self { num_blocks, runs: vec![Run { first, block_stride: whole.stride }] });
        }
        let mut runs = Vec::new();
        for layer in 0..config.num_layers {
            for cell in config.cells() {
                push_runs(&layout.view(layer, cell)?, &mut runs)?;
            }
        }
        runs.sort_unstable_by_key(|run: &Run| run.first);
        runs.dedup_by(|next, run| {
            let adjacent = run.first.region == next.first.region
                && run.block_stride == next.block_stride
                && run.first.offset.checked_add(run.first.len) == Some(next.first.offset);
            if adjacent {
                run.first.len += next.first.len;
            }
            adjacent
        });
        Ok(Self { num_blocks, runs })
    }

    pub(crate) fn per_block(&self) -> usize {
        self.runs.len()
    }

    pub(crate) fn of(&self, block: u32) -> Result<Vec<BoundFragment>, StorageError> {
        if block >= self.num_blocks {
            let count = self.num_blocks;
            return Err(LayoutError::OutOfRange { axis: "block", index: block, count }.into());
        }
        let shift = |run: &Run| BoundFragment {
            offset: run.first.offset + run.block_stride * u64::from(block),
            ..run.first
        };
        Ok(self.runs.iter().map(shift).collect())
    }
}

/// The contiguous runs of one cell in block 0.
fn push_runs(view: &CellView, runs: &mut Vec<Run>) -> Result<(), StorageError> {
    let mut axes = [
        (view.elem_stride, view.elems),
        (view.head_stride, u64::from(view.heads)),
        (view.token_stride, u64::from(view.tokens)),
    ];
    axes.sort_unstable();
    let mut len = u64::from(view.elem_bytes);
    let mut outer = Vec::new();
    for (stride, count) in axes {
        match count {
            0 => return Ok(()),
            1 => {}
            _ if stride == len && outer.is_empty() => len = len.saturating_mul(count),
            _ => outer.push((stride, count)),
        }
    }
    let count = outer.iter().fold(1_u64, |product, axis| product.saturating_mul(axis.1));
    let found = count.saturating_add(runs.len() as u64);
    if found > MAX_RUNS {
        return Err(StorageError::TooManyFragments { found, limit: MAX_RUNS });
    }
    for index in 0..count {
        let mut rest = index;
        let mut offset = view.offset;
        for (stride, count) in &outer {
            offset += stride * (rest % count);
            rest /= count;
        }
        let first = BoundFragment { region: view.region, offset, len };
        runs.push(Run { first, block_stride: view.block_stride });
    }
    Ok(())
}
