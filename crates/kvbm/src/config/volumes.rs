//! Volumes as they are registered.

use super::{CacheGroup, Config, LayerContent};
use kvbm_plan::{VolumeDescriptor, VolumeId};

/// Bytes that a block takes on a volume, headers included: an object for each slice that some rank
/// writes.
pub(crate) fn stored_bytes(config: &Config, alignment: u32) -> u64 {
    let (model, ranks) = (&config.model, config.parallelism.tensor_parallel.max(1));
    // Ranks with the same bytes write one object.
    let slices = config.writers().count().max(1) as u64;
    let heads = |group: &CacheGroup| match group.content {
        LayerContent::Kv { num_kv_heads, .. } if !model.is_opaque() => num_kv_heads.div_ceil(ranks),
        _ => 1,
    };
    let heads = model.cache_groups().iter().map(heads).max().unwrap_or(1);
    // A checksum for each head, what encryption adds, and up to an alignment less one of padding.
    let stamp = if config.volumes.encrypt { 32 } else { 0 };
    let header = 96 + stamp + 8 * u64::from(heads) + u64::from(alignment);
    config.rank_block_bytes().saturating_add(header).saturating_mul(slices)
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
