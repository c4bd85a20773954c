//! What is known of a volume.

use super::VolumeTier;
use kvbm_plan::{Failure, VolumeDescriptor};

/// What is known of a volume. It may be shared: what others keep there is not counted. Counts go on
/// where it was registered before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStatus {
    /// What it was registered with.
    pub descriptor: VolumeDescriptor,
    /// Blocks that it holds, as far as is known.
    pub blocks: usize,
    /// Bytes of them on all ranks, without headers.
    pub bytes: u64,
    /// Blocks that came from it, verified.
    pub hits: u64,
    /// Blocks that were read there and were gone or damaged.
    pub misses: u64,
    /// Blocks and questions that its store failed.
    pub errors: u64,
    /// Blocks that it refused because it was full.
    pub full: u64,
    /// Whether it failed lately and is left alone.
    pub down: bool,
    /// What it failed with last, while it is left alone for that; none where it is because a rank
    /// that started again cannot open it.
    pub failure: Option<Failure>,
    /// Why it takes no blocks, where its store refuses writes. What it holds is found.
    pub refusal: Option<Failure>,
}

impl VolumeStatus {
    /// `block_bytes`: of a block on all ranks.
    pub(crate) fn of(volume: &VolumeTier, block_bytes: u64) -> Self {
        let (blocks, counters) = (volume.len(), &volume.counters);
        Self {
            descriptor: volume.descriptor.clone(),
            blocks,
            bytes: block_bytes.saturating_mul(blocks as u64),
            hits: counters.hits.get(),
            misses: counters.misses.get(),
            errors: counters.errors.get(),
            full: counters.full.get(),
            down: volume.is_down(),
            failure: volume.failure(),
            refusal: volume.refusal(),
        }
    }
}
