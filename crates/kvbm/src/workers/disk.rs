//! G3 of a rank: where its folder is, what it says of itself, and opening it.

use super::{WorkerError, nixl_slot_io};
use crate::config::{self, Config, HostOrder, LayerContent};
use crate::encryption::{OperatorKeyError, operator_keys};
use kvbm_disk::{
    DiskConfig, DiskEncryption, DiskEngine, DiskKeys, EngineMode, GroupCommit, OpenError, Recovered,
};
use kvbm_layout::{AxisOrder, BlockLayout, slice_for_rank};
use kvbm_plan::{FileAccess, Rank, Tier};
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{DiskTier, GroupsGeometry, OpaqueGeometry, SlotGeometry, disk_layout};
use std::fs::{self, DirEntry};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a rank waits for the one that writes its blocks to open its folders the first time.
const WRITER_TIMEOUT: Duration = Duration::from_secs(30);
/// How often it looks.
const WRITER_PAUSE: Duration = Duration::from_millis(10);

/// Opens the folders of `rank`, or those of the rank that writes the same bytes. `host`: how its
/// blocks of each cache group lie in G2.
pub(super) fn open_disk(
    config: &Config,
    keys: &DiskKeys,
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
    if rank == Rank(0) {
        warn_of_others(config, tag);
    }
    let writer = config.writer_of(rank);
    let mut dirs =
        rank_dirs(config, tag, u32::from(writer.0), config.parallelism.tensor_parallel).into_iter();
    let dir = dirs.next().unwrap_or_default();
    let mut disk = DiskConfig::new(&dir, blocks, block_bytes, *tag.as_bytes());
    disk.more_dirs = dirs.collect();
    disk.access = disk_access(config);
    disk.key.clone_from(&keys.signing);
    disk.encryption.clone_from(&keys.encryption);
    let ranks = config.parallelism.tensor_parallel;
    disk.geometry = header(config, u32::from(writer.0), ranks, config.host.order)?.into_bytes();
    let settings = &config.disk;
    disk.engine = match settings.engine {
        config::DiskEngine::Auto => EngineMode::Auto,
        config::DiskEngine::IoUring => EngineMode::IoUring,
        config::DiskEngine::Threads => EngineMode::Threads,
        config::DiskEngine::Buffered => EngineMode::Buffered,
        config::DiskEngine::Nixl => EngineMode::Custom,
    };
    if disk.engine == EngineMode::Custom {
        disk.slot_io = Some(nixl_slot_io(config, rank)?);
    }
    disk.depth = settings.depth as usize;
    disk.threads = settings.threads as usize;
    disk.queue_depth = settings.queue_depth as usize;
    disk.commit = GroupCommit { interval: settings.commit_interval, ..GroupCommit::default() };
    let opened = if writer == rank { DiskEngine::open(disk) } else { follow(&disk, WRITER_TIMEOUT) };
    let (engine, recovered) = opened.map_err(|source| match source {
        OpenError::NoJournal { dir } => WorkerError::NoWriter { rank, writer, dir },
        source => WorkerError::Disk { dir, source },
    })?;
    Ok(DiskTier { engine: Arc::new(engine), recovered })
}

/// Opens folders that another rank's worker writes, perhaps in another process which starts at the
/// same time.
fn follow(disk: &DiskConfig, timeout: Duration) -> Result<(DiskEngine, Recovered), OpenError> {
    let until = kvbm_plan::deadline_after(Instant::now(), timeout);
    loop {
        match DiskEngine::follow(disk.clone()) {
            Err(OpenError::NoJournal { .. }) if Instant::now() < until => std::thread::sleep(WRITER_PAUSE),
            opened => return opened,
        }
    }
}

/// The keys of blocks on G3. Reads files, and runs commands.
pub(super) fn disk_keys(config: &Config) -> Result<DiskKeys, OperatorKeyError> {
    let keys = if config.disk.encrypt { operator_keys(config)? } else { None };
    let encryption = keys.map(|(key, previous)| DiskEncryption { key, previous });
    Ok(DiskKeys { signing: config.deployment_key(), encryption })
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

/// Folders of other namespaces stay until somebody clears them: an upgrade of the engine or other
/// weights may have left them, and the disk fills.
fn warn_of_others(config: &Config, tag: NamespaceTag) {
    for dir in config.disk.dir.iter().chain(config.disk.more_dirs.as_slice()) {
        let others = other_namespaces(dir, tag);
        if !others.is_empty() {
            let bytes: u64 = others.iter().map(|folder| bytes_in(folder, 2)).sum();
            tracing::warn!(
                "{} has {} other namespaces, {} MiB, such as {}: this manager finds nothing in them; if no engine serves \
                 them any more, remove them with `kvbm disk clear FOLDER`",
                dir.display(),
                others.len(),
                bytes >> 20,
                others[0].display()
            );
        }
    }
}

/// Folders of namespaces in `dir` but that of `tag`, in the order of their names. None where `dir`
/// cannot be read: opening it says why.
fn other_namespaces(dir: &Path, tag: NamespaceTag) -> Vec<PathBuf> {
    let ours = namespace_dir(dir, tag);
    let is_namespace = |entry: &DirEntry| {
        entry.file_name().to_str().is_some_and(|name| name.starts_with("ns-"))
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut others: Vec<_> = entries.filter(is_namespace).map(|entry| entry.path()).collect();
    others.retain(|folder| *folder != ours);
    others.sort();
    others
}

/// Bytes that the files in `dir` take, and in folders `depth` levels below it.
fn bytes_in(dir: &Path, depth: usize) -> u64 {
    const SECTOR: u64 = 512;
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let bytes_of = |entry: DirEntry| match entry.metadata() {
        Ok(found) if found.is_file() => found.blocks().saturating_mul(SECTOR),
        Ok(found) if found.is_dir() && depth > 0 => bytes_in(&entry.path(), depth - 1),
        _ => 0,
    };
    entries.map(bytes_of).sum()
}

/// Where a rank keeps its blocks, in each of the directories. Namespaces, and deployments of
/// another number of ranks, lie side by side: none is damaged by another one.
pub(super) fn rank_dirs(config: &Config, tag: NamespaceTag, rank: u32, ranks: u32) -> Vec<PathBuf> {
    let dirs = config.disk.dir.iter().chain(config.disk.more_dirs.as_slice());
    dirs.map(|dir| namespace_dir(dir, tag).join(format!("rank-{rank}-of-{ranks}"))).collect()
}

/// What tells one slot's content from that of another shape: everything but the number of blocks,
/// which may change.
pub(super) fn header(
    config: &Config,
    rank: u32,
    ranks: u32,
    order: HostOrder,
) -> Result<String, WorkerError> {
    let model = &config.model;
    if model.is_opaque() {
        return Ok(opaque_geometry(config, rank, ranks).to_string());
    }
    match geometries(config, rank, ranks, order)? {
        Some(geometries) if geometries.len() == 1 => Ok(geometries[0].to_string()),
        _ => Ok(groups_geometry(config, rank, ranks, order).to_string()),
    }
}

/// What a rank of `ranks` has of the blocks of each cache group. None where another number of ranks
/// cannot divide them anew: states, tensors without axes, scales.
pub(super) fn geometries(
    config: &Config,
    rank: u32,
    ranks: u32,
    order: HostOrder,
) -> Result<Option<Vec<SlotGeometry>>, WorkerError> {
    let model = &config.model;
    if !model.divides_anew() {
        return Ok(None);
    }
    let mut geometries = Vec::new();
    for group in model.cache_groups() {
        let LayerContent::Kv { num_kv_heads, head_dim, outer_dim, dtype } = group.content else {
            return Ok(None);
        };
        geometries.push(SlotGeometry {
            model: config.namespace.model.clone(),
            rank: (rank, ranks),
            order: axes(order),
            layers: 0..group.layers,
            of_layers: group.layers,
            outer: outer_dim,
            tokens: model.page_size,
            heads: slice_for_rank(num_kv_heads, ranks, rank)?.heads,
            of_heads: num_kv_heads,
            head_dim,
            dtype: dtype.unwrap_or(model.dtype),
            pieces: 1,
        });
    }
    Ok(Some(geometries))
}

const fn axes(order: HostOrder) -> AxisOrder {
    match order {
        HostOrder::Nhd => AxisOrder::Nhd,
        HostOrder::Universal => AxisOrder::Universal,
    }
}

/// The header of blocks of several cache groups, or with scales or a state.
fn groups_geometry(config: &Config, rank: u32, ranks: u32, order: HostOrder) -> GroupsGeometry {
    GroupsGeometry {
        model: config.namespace.model.clone(),
        rank: (rank, ranks),
        order: axes(order),
        groups: config.model.cache_groups().iter().map(ToString::to_string).collect(),
        tokens: config.model.page_size,
        dtype: config.model.dtype,
    }
}

/// The header of blocks without axes.
fn opaque_geometry(config: &Config, rank: u32, ranks: u32) -> OpaqueGeometry {
    OpaqueGeometry {
        model: config.namespace.model.clone(),
        rank: (rank, ranks),
        tensor_bytes: config.model.opaque_tensors.as_slice().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_other_namespaces_are_counted_with_their_bytes() {
        let dir = tempfile::tempdir().expect("a directory");
        let (ours, dir) = (NamespaceTag::from_bytes([7; 16]), dir.path());
        assert!(other_namespaces(&dir.join("none"), ours).is_empty());
        let other = dir.join("ns-0000000000000001");
        for folder in [&namespace_dir(dir, ours), &other.join("rank-0-of-1"), &dir.join("else")] {
            fs::create_dir_all(folder).expect("a folder");
            fs::write(folder.join("slots"), vec![1; 1 << 16]).expect("a file");
        }
        fs::write(dir.join("ns-file"), "x").expect("a file");
        std::os::unix::fs::symlink(dir.join("else"), dir.join("ns-link")).expect("a link");
        let others = other_namespaces(dir, ours);
        assert_eq!(others, [other]);
        let bytes = bytes_in(&others[0], 2);
        assert!((1 << 16..1 << 20).contains(&bytes), "{bytes}");
    }

    #[test]
    fn a_writer_that_comes_late_is_waited_for_and_one_that_does_not_is_missed() {
        let dir = tempfile::tempdir().expect("a directory");
        let disk = DiskConfig::new(dir.path(), 4, 4096, [1; 16]);
        let error = follow(&disk, Duration::ZERO).expect_err("nobody writes there");
        assert!(matches!(error, OpenError::NoJournal { .. }), "{error}");
        std::thread::scope(|scope| {
            let late = scope.spawn(|| follow(&disk, WRITER_TIMEOUT));
            std::thread::sleep(2 * WRITER_PAUSE);
            let _writer = DiskEngine::open(disk.clone()).expect("an engine");
            late.join().expect("no panic").expect("it is there now");
        });
    }
}
