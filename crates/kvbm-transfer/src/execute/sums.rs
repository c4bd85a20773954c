//! Checksums of blocks computed while a device copies them, where it shows their bytes.

use kvbm_device::CopyObserver;
use kvbm_disk::ContentCrc;
use parking_lot::Mutex;

/// The content of each block of a batch, piece after piece.
pub(crate) struct PassingSums {
    pieces_per_block: usize,
    block_bytes: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    content: ContentCrc,
    bytes: u64,
    finished: Vec<u64>,
}

impl PassingSums {
    /// Of blocks of `block_bytes` bytes, each in so many pieces, in the order in which their content is summed.
    pub(crate) fn new(pieces_per_block: usize, block_bytes: u64) -> Self {
        Self { pieces_per_block: pieces_per_block.max(1), block_bytes, state: Mutex::default() }
    }

    /// The content's checksum of every block, if `blocks` whole blocks passed.
    pub(crate) fn of(&self, blocks: usize) -> Option<Vec<u64>> {
        let mut state = self.state.lock();
        let whole = state.bytes == 0 && state.finished.len() == blocks;
        whole.then(|| std::mem::take(&mut state.finished))
    }
}

impl CopyObserver for PassingSums {
    fn passed(&self, piece: usize, bytes: &[u8]) {
        let mut state = self.state.lock();
        if piece / self.pieces_per_block != state.finished.len() {
            // Not what was promised: what follows would be of another block. `of` sees that something is missing.
            state.finished.clear();
            return;
        }
        state.content.update(bytes);
        state.bytes += bytes.len() as u64;
        if state.bytes == self.block_bytes {
            let content = std::mem::take(&mut state.content).finish();
            state.finished.push(content);
            state.bytes = 0;
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
        let sums = PassingSums::new(2, 24);
        for (piece, range) in [(0, 0..10), (1, 10..17), (1, 17..24), (2, 24..40), (3, 40..48)] {
            assert_eq!(sums.of(2), None, "not whole yet");
            sums.passed(piece, &bytes[range]);
        }
        assert_eq!(sums.of(2), Some(vec![content(&bytes[..24]), content(&bytes[24..])]));
        let sums = PassingSums::new(2, 24);
        sums.passed(2, &bytes[..24]);
        assert_eq!(sums.of(1), None, "a block was skipped");
        assert_eq!(PassingSums::new(1, 8).of(1), None, "the device showed nothing");
    }
}
