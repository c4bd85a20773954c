//! Checksums of blocks computed while a device copies them, where it shows their bytes.

use kvbm_device::CopyObserver;
use kvbm_disk::ContentCrc;
use parking_lot::Mutex;
use std::sync::Arc;

/// The content of each block of a batch, grid after grid.
pub(crate) struct PassingSums {
    grids_per_block: usize,
    block_bytes: u64,
    content: ContentCrc,
    bytes: u64,
    finished: Vec<u64>,
    result: Arc<Mutex<Vec<u64>>>,
}

/// What [`PassingSums`] leaves behind: the content's checksums of whole blocks, in order, as far as
/// they were seen.
pub(crate) struct Summed(Arc<Mutex<Vec<u64>>>);

impl PassingSums {
    /// Of blocks of `block_bytes` bytes, each in so many grids, in the order in which their
    /// content is summed.
    pub(crate) fn new(grids_per_block: usize, block_bytes: u64) -> (Self, Summed) {
        let result = Arc::default();
        let summed = Summed(Arc::clone(&result));
        let (grids_per_block, content) = (grids_per_block.max(1), ContentCrc::new());
        (Self { grids_per_block, block_bytes, content, bytes: 0, finished: Vec::new(), result }, summed)
    }
}

impl Summed {
    /// The checksum of every block, if `blocks` whole blocks passed.
    pub(crate) fn of(self, blocks: usize) -> Option<Vec<u64>> {
        let finished = std::mem::take(&mut *self.0.lock());
        (finished.len() == blocks).then_some(finished)
    }
}

impl CopyObserver for PassingSums {
    fn passed(&mut self, grid: usize, bytes: &[u8]) {
        if grid / self.grids_per_block != self.finished.len() {
            // Not what was promised: what follows would be of another block. That something is
            // missing shows at the end.
            self.finished.clear();
            return;
        }
        self.content.update(bytes);
        self.bytes += bytes.len() as u64;
        if self.bytes == self.block_bytes {
            self.finished.push(std::mem::take(&mut self.content).finish());
            self.bytes = 0;
        }
    }
}

impl Drop for PassingSums {
    fn drop(&mut self) {
        if self.bytes == 0 {
            *self.result.lock() = std::mem::take(&mut self.finished);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(bytes: &[u8]) -> u64 {
        let mut content = ContentCrc::new();
        content.update(bytes);
        content.finish()
    }

    #[test]
    fn blocks_are_summed_whatever_the_parts_and_a_part_is_none() {
        let bytes: Vec<u8> = (0..48).collect();
        let parts = [(0, 0..10), (1, 10..17), (1, 17..24), (2, 24..40), (3, 40..48)];
        let pass = |count: usize| {
            let (mut sums, summed) = PassingSums::new(2, 24);
            parts[..count].iter().for_each(|(piece, range)| sums.passed(*piece, &bytes[range.clone()]));
            drop(sums);
            summed
        };
        assert_eq!(pass(5).of(2), Some(vec![content(&bytes[..24]), content(&bytes[24..])]));
        assert_eq!(pass(4).of(2), None, "the second is not whole");
        assert_eq!(pass(3).of(2), None, "there is no second");
        assert_eq!(pass(0).of(1), None, "the device showed nothing");
        let (mut sums, summed) = PassingSums::new(2, 24);
        sums.passed(2, &bytes[..24]);
        drop(sums);
        assert_eq!(summed.of(1), None, "a block was skipped");
    }
}
