//! The volumes of the workers of this process.

use super::WorkerError;
use crate::config::{self, Config, FIRST_GROUP};
use kvbm_layout::slice_for_rank;
use kvbm_plan::Rank;
use kvbm_transfer::VolumeTier;
use kvbm_volume::{BlobSlice, ObjectSeal, VolumeRegistry};
use std::sync::Arc;

/// Opens the volumes that are configured. None where there are none and none can come.
pub(crate) fn open_volumes(
    config: &Config,
    registry: Option<VolumeRegistry>,
) -> Result<Option<Arc<VolumeRegistry>>, WorkerError> {
    if config.volume.is_empty() && registry.is_none() {
        return Ok(None);
    }
    let registry = registry.unwrap_or_default();
    for (descriptor, _) in config::volumes(config) {
        registry.register_volume(descriptor)?;
    }
    Ok(Some(Arc::new(registry)))
}

/// What the worker of `rank` needs to know.
pub(super) fn volume_tier(
    config: &Config,
    registry: &Arc<VolumeRegistry>,
    rank: Rank,
) -> Result<VolumeTier, WorkerError> {
    let threads = config.volumes.threads as usize;
    let seal = config.deployment_key().map_or_else(ObjectSeal::default, |key| ObjectSeal::keyed(&key));
    let (heads, ranks) = (config.model.heads(), config.parallelism.tensor_parallel);
    if config.model.is_opaque() {
        // An object's name must say which rank of how many wrote it: no other one can read it.
        let slice = BlobSlice { first_layer: 0, num_layers: ranks, first_head: rank.0.into(), num_heads: 1 };
        return Ok(VolumeTier {
            registry: Arc::clone(registry),
            slice,
            model_heads: 1,
            writes: true,
            seal,
            threads,
        });
    }
    let held = slice_for_rank(heads, ranks, u32::from(rank.0))?.heads;
    let slice = BlobSlice {
        first_layer: 0,
        num_layers: config.model.cache_group(FIRST_GROUP).layers,
        first_head: held.start,
        num_heads: held.end - held.start,
    };
    // Of ranks with the same heads, the first writes.
    let first = (0..rank.0)
        .all(|before| slice_for_rank(heads, ranks, u32::from(before)).is_ok_and(|other| other.heads != held));
    Ok(VolumeTier { registry: Arc::clone(registry), slice, model_heads: heads, writes: first, seal, threads })
}
