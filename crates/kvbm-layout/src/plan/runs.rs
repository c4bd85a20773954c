//! Walking a plan run by run, without allocation.

use super::{CopyPlan, MAX_DIMS, PlanError, Segment, Side};

/// One contiguous copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Run {
    /// Region of the source layout.
    pub src_region: u32,
    /// Byte offset in it.
    pub src_offset: u64,
    /// Region of the destination layout.
    pub dst_region: u32,
    /// Byte offset in it.
    pub dst_offset: u64,
    /// Bytes to copy.
    pub len: u64,
}

impl CopyPlan {
    /// The runs that copy `src_block` to `dst_block`, segment by segment, each in the order of the
    /// destination.
    ///
    /// # Errors
    /// [`PlanError::Block`] if a block is beyond its layout.
    pub fn runs(&self, src_block: u32, dst_block: u32) -> Result<Runs<'_>, PlanError> {
        self.check_blocks(src_block, dst_block)?;
        Ok(Runs {
            rest: &self.segments,
            src_block: u64::from(src_block),
            dst_block: u64::from(dst_block),
            left: self.num_runs,
            at: [0; MAX_DIMS],
        })
    }

    /// Calls `visit` for every run of [`runs`](Self::runs).
    ///
    /// # Errors
    /// [`PlanError::Block`] if a block is beyond its layout; `visit` is not called then.
    pub fn for_each_run(
        &self,
        src_block: u32,
        dst_block: u32,
        visit: impl FnMut(Run),
    ) -> Result<(), PlanError> {
        self.runs(src_block, dst_block)?.for_each(visit);
        Ok(())
    }

    pub(super) fn check_blocks(&self, src_block: u32, dst_block: u32) -> Result<(), PlanError> {
        for (side, block, count) in
            [(Side::Source, src_block, self.src_blocks), (Side::Destination, dst_block, self.dst_blocks)]
        {
            if block >= count {
                return Err(PlanError::Block { side, block, count });
            }
        }
        Ok(())
    }
}

/// Iterator over the runs of one block; see [`CopyPlan::runs`].
#[derive(Debug, Clone)]
pub struct Runs<'a> {
    rest: &'a [Segment],
    src_block: u64,
    dst_block: u64,
    left: u64,
    at: [u64; MAX_DIMS],
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let segment = self.rest.first()?;
        let mut run = Run {
            src_region: segment.src_region,
            src_offset: segment.src_offset + self.src_block * segment.src_block_stride,
            dst_region: segment.dst_region,
            dst_offset: segment.dst_offset + self.dst_block * segment.dst_block_stride,
            len: segment.run_bytes,
        };
        for (dim, at) in segment.dims().iter().zip(self.at) {
            run.src_offset += at * dim.src_stride;
            run.dst_offset += at * dim.dst_stride;
        }
        self.left -= 1;
        self.advance(segment);
        Some(run)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = usize::try_from(self.left);
        (left.unwrap_or(usize::MAX), left.ok())
    }
}

impl Runs<'_> {
    /// Steps the innermost index; an index that wraps steps the one before it, and the first one
    /// the segment.
    fn advance(&mut self, segment: &Segment) {
        for (index, dim) in segment.dims().iter().enumerate().rev() {
            self.at[index] += 1;
            if self.at[index] < dim.count {
                return;
            }
            self.at[index] = 0;
        }
        self.rest = &self.rest[1..];
    }
}
