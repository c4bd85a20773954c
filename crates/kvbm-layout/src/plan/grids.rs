//! Walking a plan grid by grid: many runs in a regular pattern, for consumers that copy them
//! together.

use super::{CopyPlan, Dim, MAX_DIMS, PlanError, Segment};

/// An axis that has one run.
const NO_AXIS: Dim = Dim { count: 1, src_stride: 0, dst_stride: 0 };

/// Runs of equal length along up to two axes of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RunGrid {
    /// Region of the source layout.
    pub src_region: u32,
    /// Byte offset of the first run in it.
    pub src_offset: u64,
    /// Region of the destination layout.
    pub dst_region: u32,
    /// Byte offset of the first run in it.
    pub dst_offset: u64,
    /// Length of each run.
    pub run_bytes: u64,
    /// The axis along which runs are closest in the source, if that is another one; and that along
    /// which they are closest in the destination. A count of 1 is no axis.
    pub axes: [Dim; 2],
}

impl RunGrid {
    /// How many runs.
    pub fn num_runs(&self) -> u64 {
        self.axes[0].count * self.axes[1].count
    }

    /// Whether the destination is one range, in the order of the source.
    pub fn is_dense(&self) -> bool {
        self.axes[0].count == 1 && (self.axes[1].count == 1 || self.axes[1].dst_stride == self.run_bytes)
    }
}

/// Which axes of a segment its grids have.
#[derive(Debug, Clone, Copy)]
struct Axes {
    source: Option<usize>,
    destination: Option<usize>,
}

impl Axes {
    /// Axes are sorted: the last has the smallest stride in the destination.
    fn of(segment: &Segment) -> Self {
        let dims = segment.dims();
        let destination = dims.len().checked_sub(1);
        let closest = (0..dims.len()).min_by_key(|index| dims[*index].src_stride);
        Self { source: closest.filter(|closest| Some(*closest) != destination), destination }
    }

    fn has(&self, index: usize) -> bool {
        [self.source, self.destination].contains(&Some(index))
    }
}

impl CopyPlan {
    /// The runs that copy `src_block` to `dst_block`, in grids: the same as those of
    /// [`runs`](Self::runs). Where no axes are permuted they also have the same order.
    ///
    /// # Errors
    /// [`PlanError::Block`] if a block is beyond its layout.
    pub fn grids(&self, src_block: u32, dst_block: u32) -> Result<Grids<'_>, PlanError> {
        self.check_blocks(src_block, dst_block)?;
        Ok(Grids {
            rest: &self.segments,
            src_block: u64::from(src_block),
            dst_block: u64::from(dst_block),
            at: [0; MAX_DIMS],
        })
    }

    /// How many grids a block has.
    pub fn num_grids(&self) -> u64 {
        let of_one = |segment: &Segment| {
            let axes = Axes::of(segment);
            let others = segment.dims().iter().enumerate().filter(|(index, _)| !axes.has(*index));
            others.map(|(_, dim)| dim.count).product::<u64>()
        };
        self.segments.iter().map(of_one).sum()
    }
}

/// Iterator over the grids of one block; see [`CopyPlan::grids`].
#[derive(Debug, Clone)]
pub struct Grids<'a> {
    rest: &'a [Segment],
    src_block: u64,
    dst_block: u64,
    /// 0 along the axes of the grid.
    at: [u64; MAX_DIMS],
}

impl Iterator for Grids<'_> {
    type Item = RunGrid;

    fn next(&mut self) -> Option<RunGrid> {
        let segment = self.rest.first()?;
        let axes = Axes::of(segment);
        let axis = |index: Option<usize>| index.map_or(NO_AXIS, |index| segment.dims()[index]);
        let mut grid = RunGrid {
            src_region: segment.src_region,
            src_offset: segment.src_offset + self.src_block * segment.src_block_stride,
            dst_region: segment.dst_region,
            dst_offset: segment.dst_offset + self.dst_block * segment.dst_block_stride,
            run_bytes: segment.run_bytes,
            axes: [axis(axes.source), axis(axes.destination)],
        };
        for (dim, at) in segment.dims().iter().zip(self.at) {
            grid.src_offset += at * dim.src_stride;
            grid.dst_offset += at * dim.dst_stride;
        }
        self.advance(segment, axes);
        Some(grid)
    }
}

impl Grids<'_> {
    fn advance(&mut self, segment: &Segment, axes: Axes) {
        for (index, dim) in segment.dims().iter().enumerate().rev().filter(|(index, _)| !axes.has(*index)) {
            self.at[index] += 1;
            if self.at[index] < dim.count {
                return;
            }
            self.at[index] = 0;
        }
        self.rest = &self.rest[1..];
    }
}
