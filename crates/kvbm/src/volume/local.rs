//! The volume of the workers of this process.

use crate::config::Config;
use crate::workers::WorkerError;
use kvbm_layout::slice_for_rank;
use kvbm_plan::{Rank, VolumeId};
use kvbm_transfer::VolumeTier;
use kvbm_volume::{BlobSlice, VolumeDescriptor, VolumeRegistry};
use std::sync::Arc;

/// Opens the volume that is configured.
pub(crate) fn open_volume(
    config: &Config,
    registry: VolumeRegistry,
) -> Result<Option<Arc<VolumeRegistry>>, WorkerError> {
    let volume = &config.volume;
    let Some(uri) = &volume.uri else { return Ok(None) };
    let blocks = volume.capacity.blocks(config.rank_block_bytes());
    // Headers, with a checksum for each head, come on top.
    let overhead = 96 + 8 * u64::from(config.heads_per_rank()) + u64::from(volume.alignment);
    let object = config.rank_block_bytes().saturating_add(overhead);
    let ranks = u64::from(config.parallelism.tensor_parallel);
    let bytes = object.saturating_mul(blocks).saturating_mul(ranks);
    registry.register_volume(VolumeDescriptor {
        id: VolumeId(volume.id),
        uri: uri.clone(),
        capacity_bytes: (!volume.capacity.is_none()).then_some(bytes),
        alignment: volume.alignment,
        deadline: volume.deadline,
    })?;
    Ok(Some(Arc::new(registry)))
}

/// What the worker of `rank` needs to know.
pub(crate) fn volume_tier(
    config: &Config,
    registry: &Arc<VolumeRegistry>,
    rank: Rank,
) -> Result<VolumeTier, WorkerError> {
    let (heads, ranks) = (config.model.num_kv_heads, config.parallelism.tensor_parallel);
    let held = slice_for_rank(heads, ranks, u32::from(rank.0))?.heads;
    let slice = BlobSlice {
        first_layer: 0,
        num_layers: config.model.num_layers,
        first_head: held.start,
        num_heads: held.end - held.start,
    };
    // Of ranks with the same heads, the first writes.
    let first = (0..rank.0)
        .all(|before| slice_for_rank(heads, ranks, u32::from(before)).is_ok_and(|other| other.heads != held));
    let threads = config.volume.threads as usize;
    Ok(VolumeTier { registry: Arc::clone(registry), slice, writes: first, threads })
}
