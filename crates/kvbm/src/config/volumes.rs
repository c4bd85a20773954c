//! Volumes as they are registered.

use super::Config;
use kvbm_plan::{VolumeDescriptor, VolumeId};

/// Bytes that a block takes on a volume, headers included: an object for each slice that some rank
/// writes.
pub(crate) fn stored_bytes(config: &Config, alignment: u32) -> u64 {
    let ranks = config.parallelism.tensor_parallel;
    // Ranks with the same heads write one object. Opaque blocks have no heads: each rank writes its
    // own.
    let slices = if config.model.is_opaque() { ranks } else { ranks.min(config.model.heads()) }.max(1);
    // A checksum for each head, and up to an alignment less one of padding.
    let header = 96 + 8 * u64::from(config.heads_per_rank()) + u64::from(alignment);
    config.rank_block_bytes().saturating_add(header).saturating_mul(u64::from(slices))
}

/// The configured volumes, and how many blocks each may hold.
pub(crate) fn volumes(config: &Config) -> impl Iterator<Item = (VolumeDescriptor, Option<u64>)> {
    config.volume.iter().map(|volume| {
        let blocks = volume.capacity.blocks(config.rank_block_bytes());
        let blocks = (!volume.capacity.is_none()).then_some(blocks);
        let descriptor = VolumeDescriptor {
            id: VolumeId(volume.id),
            uri: volume.uri.clone(),
            capacity_bytes: blocks
                .map(|blocks| blocks.saturating_mul(stored_bytes(config, volume.alignment))),
            alignment: volume.alignment,
            deadline: volume.deadline,
        };
        (descriptor, blocks)
    })
}
