//! Blocks without axes: they take every path, and blocks of another shape are never served.
#![cfg(feature = "worker")]

use crate::support::{compute, holds, host, namespace, soon, unlimited};
use kvbm::config::{Blocks, Config, ModelConfig};
use kvbm::layout::{OpaqueLayout, OpaqueTensor};
use kvbm::storage::BoundLayout;
use kvbm::{BlockId, BuildError, Engine, KvBlockManager, Owned, Path, Tier, TokenSequence};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

const G1: u32 = 16;

/// Three tensors: two are packed into one allocation, one is padded and of an odd length.
const TENSORS: [OpaqueTensor; 3] = [
    OpaqueTensor { region: 0, offset: 64, block_stride: 8192, block_bytes: 4096 },
    OpaqueTensor { region: 0, offset: 64 + 4096, block_stride: 8192, block_bytes: 4096 },
    OpaqueTensor { region: 1, offset: 3, block_stride: 1024, block_bytes: 701 },
];

fn engine_memory(tensors: &[OpaqueTensor]) -> BoundLayout {
    let layout = Arc::new(OpaqueLayout::new(G1, tensors.to_vec()).unwrap());
    host::host_tensors(layout)
}

fn model(tensors: &[OpaqueTensor]) -> ModelConfig {
    ModelConfig::opaque(16, tensors.iter().map(|tensor| tensor.block_bytes))
}

fn open(
    tensors: &[OpaqueTensor],
    ranks: u32,
    disk: &FilePath,
    configure: impl FnOnce(&mut Config),
) -> Result<KvBlockManager<Engine>, BuildError> {
    KvBlockManager::<Owned>::builder()
        .model(model(tensors))
        .namespace(namespace())
        .engine_host((0..ranks).map(|_| engine_memory(tensors)).collect())
        .tensor_parallel(ranks)
        .host(Blocks(32))
        .disk(disk, Blocks(32))
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            configure(config);
        })
        .build()
}

fn sequence<G>(manager: &KvBlockManager<G>) -> TokenSequence {
    let prompt: Vec<u32> = (0..16 * 5).collect();
    manager.sequence(&prompt, b"").unwrap()
}

/// Computes a sequence and copies it to the lower tiers.
fn put(manager: &KvBlockManager<Engine>) {
    let tokens = sequence(manager);
    let ids: Vec<_> = (0..5).map(BlockId).collect();
    for (&id, &hash) in ids.iter().zip(tokens.hashes()) {
        compute(manager, id, hash);
    }
    assert_eq!(manager.offload(&ids, &tokens, 0, None).unwrap().started, 5);
    assert!(manager.wait_offloads(soon()));
}

/// Blocks of the sequence that are found, brought back and right.
fn take(manager: &KvBlockManager<Engine>) -> usize {
    let tokens = sequence(manager);
    let prefix = manager.match_prefix(&tokens);
    let ids: Vec<_> = (0..prefix.len() as u32).map(|at| BlockId(G1 - 1 - at)).collect();
    let arrived = manager.onboard(prefix, &ids, None).unwrap().wait().unwrap();
    assert!(ids.iter().zip(tokens.hashes()).all(|(&id, &hash)| holds(manager, id, hash)));
    // What came from below is on its way to G2.
    assert!(manager.wait_offloads(soon()));
    arrived
}

fn end(manager: KvBlockManager<Engine>) {
    let report = manager.shutdown(Duration::from_secs(30));
    assert!(report.is_complete(), "{report:?}");
    // Its directories are free for the next one.
    drop(manager);
}

/// With `model.replicas`, ranks hold the same bytes, and disk, volume and, where that is wanted,
/// host memory have one copy of them. Mutations that make it fail: the writer of a rank does not
/// depend on `model.replicas`; a rank reads objects of its own number.
#[test]
fn opaque_blocks_take_every_path() {
    for (ranks, replicas, one_copy) in [(1, 1, false), (2, 1, true), (4, 2, false), (4, 2, true)] {
        let (disk, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let volume = format!("dir://{}", folder.path().display());
        let with_volume = |config: &mut Config| {
            (config.model.replicas, config.host.one_copy) = (replicas, one_copy);
            config.volume = vec![kvbm::config::VolumeConfig { uri: volume.clone(), ..Default::default() }];
        };
        let manager = open(&TENSORS, ranks, disk.path(), with_volume).unwrap();
        put(&manager);
        let copies = if one_copy { ranks / replicas } else { ranks };
        let saved = manager.metrics().path(Path::G1_G2).bytes.get();
        assert_eq!(saved, 5 * u64::from(copies) * manager.config().rank_block_bytes());
        assert_eq!(slot_files(disk.path()), ranks / replicas);
        assert_eq!(take(&manager), 5);
        manager.clear(Tier::G2).unwrap();
        assert_eq!((take(&manager), manager.metrics().path(Path::G3_G1).blocks.get()), (5, 5));
        end(manager);
        let manager = open(&TENSORS, ranks, disk.path(), with_volume).unwrap();
        assert_eq!((take(&manager), manager.metrics().path(Path::G3_G1).blocks.get()), (5, 5), "restart");
        manager.clear(Tier::G2).unwrap();
        manager.clear(Tier::G3).unwrap();
        assert_eq!((take(&manager), manager.metrics().path(Path::G4_G1).blocks.get()), (5, 5));
    }
}

#[test]
fn blocks_of_another_shape_are_not_found() {
    let (disk, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let volume = format!("dir://{}", folder.path().display());
    let with_volume = |config: &mut Config| {
        config.volume = vec![kvbm::config::VolumeConfig { uri: volume.clone(), ..Default::default() }];
    };
    let manager = open(&TENSORS, 1, disk.path(), with_volume).unwrap();
    put(&manager);
    end(manager);
    // As many bytes in all, in other tensors.
    let packed = [OpaqueTensor { region: 0, offset: 0, block_stride: 9000, block_bytes: 2 * 4096 + 701 }];
    let swapped =
        [TENSORS[2], TENSORS[1], TENSORS[0]].map(|tensor| OpaqueTensor { region: tensor.region, ..tensor });
    for other in [&packed[..], &swapped[..]] {
        let manager = open(other, 1, disk.path(), with_volume).unwrap();
        assert_eq!(take(&manager), 0);
        end(manager);
    }
    // Other places of the same tensors are another matter.
    let apart =
        [0, 1, 2].map(|at| OpaqueTensor { region: at as u32, offset: 0, block_stride: 4096, ..TENSORS[at] });
    let manager = open(&apart, 1, disk.path(), with_volume).unwrap();
    assert_eq!(take(&manager), 5);
}

#[test]
fn another_number_of_ranks_finds_nothing_and_the_log_of_the_start_says_why() {
    let (disk, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let volume = format!("dir://{}", folder.path().display());
    let with_volume = |config: &mut Config| {
        config.volume = vec![kvbm::config::VolumeConfig { uri: volume.clone(), ..Default::default() }];
    };
    let manager = open(&TENSORS, 2, disk.path(), with_volume).unwrap();
    put(&manager);
    end(manager);
    let manager = open(&TENSORS, 1, disk.path(), with_volume).unwrap();
    let took_over = manager.workers().took_over();
    let reason = took_over[0].refused.as_deref().unwrap_or_default();
    assert_eq!((took_over[0].ranks, took_over[0].blocks), (2, 0));
    assert!(reason.contains("opaque tensors") && reason.contains("start with 2 ranks"), "{reason}");
    assert_eq!(take(&manager), 0, "neither from the disk nor from the volume");
    end(manager);
    let manager = open(&TENSORS, 2, disk.path(), with_volume).unwrap();
    assert_eq!(take(&manager), 5, "what was refused is still there");
}

#[test]
fn invariant_7_memory_of_other_tensors_than_the_model_has_is_refused_at_the_start() {
    let disk = tempfile::tempdir().unwrap();
    let builder = || KvBlockManager::<Owned>::builder().model(model(&TENSORS)).namespace(namespace());
    let other = builder().engine_host(vec![engine_memory(&TENSORS[..2])]).host(Blocks(8)).build();
    let error = other.err().expect("a tensor is missing").to_string();
    assert!(error.contains("planes") && error.contains("t2:701"), "{error}");
    // A pool of ours has such blocks too.
    let ours = builder().device(Blocks(8)).host(Blocks(8)).disk(disk.path(), Blocks(8));
    let ours = ours.configure(unlimited).build().unwrap();
    let tokens = sequence(&ours);
    assert_eq!(crate::support::serve(&ours, &tokens), 0);
    assert!(ours.wait_offloads(soon()));
    ours.clear(Tier::G1).unwrap();
    assert_eq!(crate::support::serve(&ours, &tokens), 5);
}

/// Slot files below a folder.
fn slot_files(folder: &FilePath) -> u32 {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| if path.is_dir() { slot_files(&path) } else { path.ends_with("slots.kvbm").into() })
        .sum()
}
