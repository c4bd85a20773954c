//! Batched copies of pairs of ranges of unequal lengths.

use crate::params::Params;
use crate::{DeviceLimits, Kernel, KernelError, Launch, Piece};

/// Bytes that a block of threads copies at a time; a multiple of 16.
const TILE_BYTES: u64 = 32 << 10;

/// Copies from anywhere to anywhere on a device, in one launch. Lengths and alignments may differ
/// from pair to pair; pairs aligned alike move fastest. What is written must not overlap anything
/// else of the batch.
#[derive(Debug, Clone)]
pub struct PairCopies {
    table: Vec<u64>,
    pairs: u32,
    work: u64,
    bytes: u64,
}

impl PairCopies {
    /// Most pairs of a batch.
    pub const MAX_PAIRS: u64 = 1 << 28;

    /// Checks the pairs. Empty ones are left out.
    ///
    /// # Errors
    /// [`KernelError::Pair`] names the pair, [`KernelError::TooMuch`] if there are more than
    /// [`PairCopies::MAX_PAIRS`].
    pub fn new(pieces: &[Piece]) -> Result<Self, KernelError> {
        for (pair, piece) in pieces.iter().enumerate() {
            for (side, address) in [("source", piece.from), ("destination", piece.to)] {
                if piece.bytes > 0 && (address == 0 || address.checked_add(piece.bytes).is_none()) {
                    return Err(KernelError::Pair { pair, side, address, bytes: piece.bytes });
                }
            }
        }
        let whole: Vec<&Piece> = pieces.iter().filter(|piece| piece.bytes > 0).collect();
        let count = whole.len() as u64;
        if count > Self::MAX_PAIRS {
            return Err(KernelError::TooMuch { what: "pairs", value: count, limit: Self::MAX_PAIRS });
        }
        let mut table = Vec::with_capacity(whole.len() * 4);
        table.extend(whole.iter().map(|piece| piece.from));
        table.extend(whole.iter().map(|piece| piece.to));
        table.extend(whole.iter().map(|piece| piece.bytes));
        let (mut work, mut bytes) = (0_u64, 0_u64);
        for piece in &whole {
            work += piece.bytes.div_ceil(TILE_BYTES);
            bytes = bytes.checked_add(piece.bytes).ok_or(KernelError::TooMuch {
                what: "bytes of all pairs",
                value: u64::MAX,
                limit: u64::MAX - 1,
            })?;
            table.push(work);
        }
        Ok(Self { table, pairs: count as u32, work, bytes })
    }

    /// Bytes of all pairs.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the launch needs in device memory, 8 bytes each in the machine's order.
    pub fn table(&self) -> &[u64] {
        &self.table
    }

    /// What to launch, the table lying at this device address. `None` if there is nothing to copy.
    pub fn launch(&self, limits: DeviceLimits, table: u64) -> Option<Launch> {
        let mut params = Params::default();
        let column = |n: u64| table + n * u64::from(self.pairs) * 8;
        params.wide([column(0), column(1), column(2), column(3), self.work]);
        params.narrow(self.pairs);
        params.narrow(TILE_BYTES as u32);
        (self.work > 0).then(|| Launch {
            kernel: Kernel::Pairs,
            grid: self.work.min(u64::from(limits.max_grid)) as u32,
            shared_bytes: 0,
            params: params.into_bytes(),
        })
    }
}
