//! Compressed volumes through a manager: what lies in the folder, who reads it, and what a forget
//! leaves.
#![cfg(all(feature = "worker", feature = "compress"))]

use crate::encrypted_files::{files, key_file};
use crate::support::heads::{self, GROUPS, serve};
use crate::support::{model_of, namespace, tokens, unlimited};
use kvbm::config::{Blocks, Config, LayoutKind, ModelConfig, VolumeCompress};
use kvbm::layout::DType;
use kvbm::{KvBlockManager, Owned, Tier, VolumeId};
use std::path::Path;
use std::time::Duration;

const BLOCKS: u32 = 6;

fn half(model: ModelConfig) -> ModelConfig {
    ModelConfig { dtype: DType::F16, ..model }
}

fn build(
    model: ModelConfig,
    dir: &Path,
    ranks: u32,
    configure: impl FnOnce(&mut Config),
) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace())
        .device(Blocks(24))
        .host(Blocks(48))
        .volume(format!("dir://{}", dir.display()))
        .tensor_parallel(ranks)
        .configure(|config| {
            unlimited(config);
            config.volumes.recheck = Duration::from_millis(1);
            config.device.layout = LayoutKind::FullyContiguous;
            configure(config);
        })
        .build()
        .expect("a manager")
}

fn compressing(config: &mut Config) {
    config.volumes.compress = VolumeCompress::Zstd;
}

/// Bytes of all files.
fn size(dir: &Path) -> u64 {
    files(dir).iter().map(|path| path.metadata().expect("a file").len()).sum()
}

/// One group and three, on one rank and on two; the second half by a manager of each kind.
#[test]
fn blocks_become_shorter_and_every_manager_reads_them() {
    for (model, ranks) in
        [(heads::model(), 1), (heads::model(), 2), (model_of(GROUPS), 1), (model_of(GROUPS), 2)]
    {
        let model = half(model);
        let [plain_dir, dir] = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
        let plain = build(model.clone(), plain_dir.path(), ranks, |_| ());
        let sequence = tokens(&plain, 1, BLOCKS);
        serve(&plain, &sequence);
        let manager = build(model.clone(), dir.path(), ranks, compressing);
        assert_eq!(serve(&manager, &sequence), 0);
        let (stored, before) = (size(dir.path()), size(plain_dir.path()));
        assert!(stored < before * 9 / 10, "{stored} of {before} bytes, {ranks} ranks");
        drop(manager);
        // With the setting off, after a restart; then with it, what was written without.
        let off = build(model.clone(), dir.path(), ranks, |_| ());
        assert_eq!(serve(&off, &sequence), BLOCKS as usize, "{ranks} ranks");
        assert_eq!(off.metrics().tier(Tier::G4).corrupt.get(), 0);
        drop(plain);
        let on = build(model, plain_dir.path(), ranks, compressing);
        assert_eq!(serve(&on, &sequence), BLOCKS as usize, "{ranks} ranks");
    }
}

/// Mutation that makes it fail: bytes are counted as they are stored.
#[test]
fn metrics_have_bytes_before_and_after() {
    let dir = tempfile::tempdir().expect("a folder");
    let manager = build(half(heads::model()), dir.path(), 1, compressing);
    let sequence = tokens(&manager, 1, BLOCKS);
    serve(&manager, &sequence);
    let metrics = manager.metrics();
    let _text = metrics.encode();
    let volume = metrics.volume(VolumeId(0));
    // Two layers of keys and values, four heads of 32 numbers for each of 16 tokens.
    let bytes = u64::from(BLOCKS) * 2 * 2 * 16 * 4 * 32 * 2;
    assert_eq!(volume.written_bytes.get(), bytes);
    let stored = volume.written_stored_bytes.get();
    assert!(
        stored < bytes * 9 / 10 && stored > bytes / 2 && stored < size(dir.path()),
        "{stored} of {bytes}"
    );
    assert_eq!((volume.compresses.get(), volume.read_bytes.get()), (1, 0));
    drop(manager);
    let manager = build(half(heads::model()), dir.path(), 1, |_| ());
    serve(&manager, &sequence);
    let metrics = manager.metrics();
    let text = metrics.encode();
    let volume = metrics.volume(VolumeId(0));
    assert_eq!((volume.read_bytes.get(), volume.read_stored_bytes.get()), (bytes, stored));
    assert_eq!(volume.compresses.get(), 0);
    assert!(text.contains("kvbm_volume_read_stored_bytes_total{volume=\"0\"}"), "{text}");
}

#[test]
fn compressed_blocks_are_encrypted_and_forgotten_like_others() {
    let dir = tempfile::tempdir().expect("a folder");
    let store = dir.path().join("store");
    std::fs::create_dir(&store).expect("a folder");
    let key = key_file(dir.path(), '7');
    let both = |config: &mut Config| {
        compressing(config);
        config.volumes.encrypt = true;
        config.encryption.key_file = Some(key.clone());
    };
    let manager = build(half(heads::model()), &store, 2, both);
    let sequence = tokens(&manager, 1, BLOCKS);
    serve(&manager, &sequence);
    drop(manager);
    let manager = build(half(heads::model()), &store, 2, both);
    assert_eq!(serve(&manager, &sequence), BLOCKS as usize);
    assert_eq!(manager.metrics().tier(Tier::G4).corrupt.get(), 0);
    let receipt = manager.forget_with_receipt(&manager.namespace().clone(), Duration::from_secs(30));
    assert!(receipt.is_complete() && receipt.on_volumes == u64::from(BLOCKS), "{receipt:?}");
    assert_eq!(receipt.keys.len(), 1);
    drop(manager);
    assert_eq!(serve(&build(half(heads::model()), &store, 2, both), &sequence), 0);
}

/// Every object gets one byte of its payload changed. Mutation that makes it fail: a frame that
/// does not open counts as a block.
#[test]
fn a_damaged_object_is_a_miss_and_is_computed_again() {
    let dir = tempfile::tempdir().expect("a folder");
    let manager = build(half(heads::model()), dir.path(), 1, compressing);
    let sequence = tokens(&manager, 1, BLOCKS);
    serve(&manager, &sequence);
    drop(manager);
    for path in files(dir.path()) {
        let mut bytes = std::fs::read(&path).expect("a file");
        let at = bytes.len() - 100;
        bytes[at] ^= 4;
        std::fs::write(&path, bytes).expect("written");
    }
    let manager = build(half(heads::model()), dir.path(), 1, compressing);
    assert_eq!(serve(&manager, &sequence), 0, "and what is computed instead is right");
    assert!(manager.metrics().tier(Tier::G4).corrupt.get() > 0);
}
