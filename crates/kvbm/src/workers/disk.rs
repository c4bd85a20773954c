//! G3 of a rank: where its folder is, what it says of itself, and opening it.

use super::WorkerError;
use crate::config::{self, Config, FIRST_GROUP, HostOrder, LayerContent};
use kvbm_disk::{DiskConfig, DiskEngine, EngineMode, GroupCommit};
use kvbm_layout::{AxisOrder, BlockLayout, slice_for_rank};
use kvbm_plan::{FileAccess, Rank, Tier};
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{DiskTier, GroupsGeometry, OpaqueGeometry, SlotGeometry, disk_layout};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the folders of `rank`. `host`: how its blocks of each cache group lie in G2.
pub(super) fn open_disk(
    config: &Config,
    host: &[&dyn BlockLayout],
    blocks: u32,
    tag: NamespaceTag,
    rank: Rank,
) -> Result<DiskTier, WorkerError> {
    let mut block_bytes = 0;
    for group in host {
        let layout = disk_layout(*group, blocks);
        let layout = layout.map_err(|source| WorkerError::Layout { tier: Tier::G3, source })?;
        block_bytes = layout.config().bytes_per_block().max(block_bytes);
    }
    let mut dirs = rank_dirs(config, tag, u32::from(rank.0), config.parallelism.tensor_parallel).into_iter();
    let dir = dirs.next().unwrap_or_default();
    let mut disk = DiskConfig::new(&dir, blocks, block_bytes, *tag.as_bytes());
    disk.more_dirs = dirs.collect();
    disk.access = disk_access(config);
    disk.key = config.deployment_key();
    disk.geometry = match geometry(config, rank)? {
        Some(geometry) => geometry.to_string(),
        None if config.model.is_opaque() => opaque_geometry(config, rank).to_string(),
        None => groups_geometry(config, rank).to_string(),
    }
    .into_bytes();
    let settings = &config.disk;
    disk.engine = match settings.engine {
        config::DiskEngine::Auto => EngineMode::Auto,
        config::DiskEngine::IoUring => EngineMode::IoUring,
        config::DiskEngine::Threads => EngineMode::Threads,
        config::DiskEngine::Buffered => EngineMode::Buffered,
    };
    disk.depth = settings.depth as usize;
    disk.threads = settings.threads as usize;
    disk.queue_depth = settings.queue_depth as usize;
    disk.commit = GroupCommit { interval: settings.commit_interval, ..GroupCommit::default() };
    let (engine, recovered) = DiskEngine::open(disk).map_err(|source| WorkerError::Disk { dir, source })?;
    Ok(DiskTier { engine: Arc::new(engine), recovered })
}

/// Who may use the files of G3.
pub(super) const fn disk_access(config: &Config) -> FileAccess {
    match config.disk.mode {
        config::DiskMode::Owner => FileAccess::Owner,
        config::DiskMode::GroupRead => FileAccess::GroupRead,
        config::DiskMode::GroupWrite => FileAccess::GroupWrite,
    }
}

/// The folder of a namespace.
pub(super) fn namespace_dir(dir: &Path, tag: NamespaceTag) -> PathBuf {
    // The first eight of the tag's sixteen bytes: the high half of the number that they are in
    // big-endian order.
    let namespace = u128::from_be_bytes(*tag.as_bytes()) >> 64;
    dir.join(format!("ns-{namespace:016x}"))
}

/// Where a rank keeps its blocks, in each of the directories. Namespaces, and deployments of
/// another number of ranks, lie side by side: none is damaged by another one.
pub(super) fn rank_dirs(config: &Config, tag: NamespaceTag, rank: u32, ranks: u32) -> Vec<PathBuf> {
    let dirs = config.disk.dir.iter().chain(config.disk.more_dirs.as_slice());
    dirs.map(|dir| namespace_dir(dir, tag).join(format!("rank-{rank}-of-{ranks}"))).collect()
}

/// What tells one slot's content from that of another shape: everything but the number of blocks,
/// which may change. None where blocks have no axes.
pub(super) fn geometry(config: &Config, rank: Rank) -> Result<Option<SlotGeometry>, WorkerError> {
    let (model, ranks) = (&config.model, config.parallelism.tensor_parallel);
    let group = model.cache_group(FIRST_GROUP);
    let LayerContent::Kv { num_kv_heads, head_dim, outer_dim, dtype } = group.content else {
        return Ok(None);
    };
    if !model.has_heads() {
        return Ok(None);
    }
    Ok(Some(SlotGeometry {
        model: config.namespace.model.clone(),
        rank: (u32::from(rank.0), ranks),
        order: match config.host.order {
            HostOrder::Nhd => AxisOrder::Nhd,
            HostOrder::Universal => AxisOrder::Universal,
        },
        layers: 0..group.layers,
        of_layers: group.layers,
        outer: outer_dim,
        tokens: model.page_size,
        heads: slice_for_rank(num_kv_heads, ranks, u32::from(rank.0))?.heads,
        of_heads: num_kv_heads,
        head_dim,
        dtype: dtype.unwrap_or(model.dtype),
        pieces: 1,
    }))
}

/// The same for blocks of several cache groups.
fn groups_geometry(config: &Config, rank: Rank) -> GroupsGeometry {
    GroupsGeometry {
        model: config.namespace.model.clone(),
        rank: (u32::from(rank.0), config.parallelism.tensor_parallel),
        groups: config.model.cache_groups().iter().map(ToString::to_string).collect(),
        tokens: config.model.page_size,
        dtype: config.model.dtype,
    }
}

/// The same for blocks without axes.
fn opaque_geometry(config: &Config, rank: Rank) -> OpaqueGeometry {
    OpaqueGeometry {
        model: config.namespace.model.clone(),
        rank: (u32::from(rank.0), config.parallelism.tensor_parallel),
        tensor_bytes: config.model.opaque_tensors.as_slice().to_vec(),
    }
}
