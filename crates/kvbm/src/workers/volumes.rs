//! The volumes of the workers of this process.

use super::{WorkerError, volume_registry};
use crate::config::{self, CacheGroup, Config, LayerContent, VolumeCompress, VolumeLossy};
use crate::encryption::operator_keys;
use kvbm_layout::{DType, HeadSlice, Holders, slice_for_rank};
use kvbm_plan::Rank;
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{VolumeGroup, VolumeTier};
use kvbm_volume::{
    BlobSlice, LossyCodes, LossyNumbers, LossyTerms, ObjectSeal, VolumeCompression, VolumeEncryption,
    VolumeRegistry, VolumeTerms,
};
use std::sync::Arc;

/// Opens the volumes that are configured, for the deployment of namespace `tag`. None where there
/// are none and none can come. Reads files, and runs commands.
pub(crate) fn open_volumes(
    config: &Config,
    registry: Option<VolumeRegistry>,
    tag: NamespaceTag,
) -> Result<Option<Arc<VolumeRegistry>>, WorkerError> {
    if config.volume.is_empty() && registry.is_none() {
        return Ok(None);
    }
    let registry = registry.unwrap_or_else(|| volume_registry(config));
    let registry = for_deployment(config, registry, tag)?;
    for (descriptor, _) in config::volumes(config) {
        registry.register_volume(descriptor)?;
    }
    Ok(Some(Arc::new(registry)))
}

/// Volumes whose objects are encrypted, compressed and lossy, or are not, as it is configured.
/// Reads files, and runs commands.
pub(super) fn for_deployment(
    config: &Config,
    registry: VolumeRegistry,
    tag: NamespaceTag,
) -> Result<VolumeRegistry, WorkerError> {
    let keys = if config.volumes.encrypt { operator_keys(config)? } else { None };
    let encryption = keys.map(|(key, previous)| VolumeEncryption { key, previous });
    let compression = match config.volumes.compress {
        VolumeCompress::Off => VolumeCompression::Off,
        VolumeCompress::Lz4 => VolumeCompression::Lz4,
        VolumeCompress::Zstd => VolumeCompression::Zstd,
        VolumeCompress::Auto => VolumeCompression::Auto,
    };
    let lossy = lossy_terms(config);
    Ok(registry.for_deployment(VolumeTerms { namespace: tag, encryption, compression, lossy })?)
}

/// How blocks are shortened with loss, if they are.
fn lossy_terms(config: &Config) -> Option<LossyTerms> {
    let codes = match config.volumes.lossy {
        VolumeLossy::Off => return None,
        VolumeLossy::Fp8E4m3 => LossyCodes::Fp8E4m3,
        VolumeLossy::Int8 => LossyCodes::Int8,
        VolumeLossy::Int4 => LossyCodes::Int4,
    };
    let numbers = |dtype: DType| match dtype {
        DType::BF16 => Some(LossyNumbers::Bf16),
        DType::F16 => Some(LossyNumbers::F16),
        DType::F32 => Some(LossyNumbers::F32),
        _ => None,
    };
    // A configuration that is valid has no other types.
    let types = config.lossy_types().ok()?;
    let numbers = types.into_iter().map(numbers).collect::<Option<_>>()?;
    Some(LossyTerms { codes, numbers })
}

/// What the worker of `rank` needs to know.
pub(super) fn volume_tier(
    config: &Config,
    registry: &Arc<VolumeRegistry>,
    rank: Rank,
) -> Result<VolumeTier, WorkerError> {
    let threads = config.volumes.threads as usize;
    let seal = config.deployment_key().map_or_else(ObjectSeal::default, |key| ObjectSeal::keyed(&key));
    let groups = config.model.cache_groups();
    let groups = groups.iter().map(|group| volume_group(config, group, rank)).collect::<Result<_, _>>()?;
    let share =
        (config.writers().filter(|writer| *writer < rank).count() as u32, config.writers().count() as u32);
    let (registry, writes) = (Arc::clone(registry), config.writer_of(rank) == rank);
    Ok(VolumeTier { registry, groups, writes, share, seal, threads })
}

/// What `rank` holds of blocks of a group, as objects are named by it.
fn volume_group(config: &Config, group: &CacheGroup, rank: Rank) -> Result<VolumeGroup, WorkerError> {
    let (own, ranks) = (u32::from(rank.0), config.parallelism.tensor_parallel);
    if config.model.is_opaque() {
        // An object's name must say which rank of how many wrote it: only ranks with the same bytes
        // can read it.
        let own = u32::from(config.writer_of(rank).0);
        let slice = BlobSlice { first_layer: 0, num_layers: ranks, first_head: own, num_heads: 1 };
        return Ok(VolumeGroup { slice, heads: 1 });
    }
    let LayerContent::Kv { num_kv_heads: heads, .. } = group.content else {
        let own = u32::from(config.writer_of(rank).0);
        return Ok(VolumeGroup::of_rank(group.layers, 0, own, ranks));
    };
    let HeadSlice { heads: held, holders } = slice_for_rank(heads, ranks, own)?;
    if let Holders::Several { writer, .. } = holders
        && config.writer_of(rank) != Rank(writer as u16)
    {
        // Other ranks have the same heads of this group and not of another one, so each rank writes
        // for itself: under its own name, or they would write to one object.
        return Ok(VolumeGroup::of_rank(group.layers, heads, own, ranks));
    }
    let (first_head, num_heads) = (held.start, held.end - held.start);
    let slice = BlobSlice { first_layer: 0, num_layers: group.layers, first_head, num_heads };
    Ok(VolumeGroup { slice, heads })
}
