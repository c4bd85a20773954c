//! Lossy volumes through a manager: what comes back, on which tiers, who finds it, and that it is
//! verified.
#![cfg(all(feature = "worker", feature = "compress"))]

use crate::encrypted_files::{files, key_file};
use crate::support::heads::{self, GROUPS, serve, serve_as};
use crate::support::{model_of, namespace, tokens, unlimited};
use kvbm::config::{Blocks, Config, LayoutKind, ModelConfig, VerifyHost, VolumeCompress, VolumeLossy};
use kvbm::layout::DType;
use kvbm::plan::{NamespaceId, NamespaceTag};
use kvbm::volumes::{
    BlobKey, BlobSlice, CompressedVolume, LossyCodes, LossyNumbers, LossyTerms, MemoryVolume,
    VolumeCompression, VolumeDescriptor, VolumeExt,
};
use kvbm::{FailureKind, GroupId, KvBlockManager, Owned, SequenceHash, Tier, VolumeId};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCKS: u32 = 6;
const ALL: [(VolumeLossy, LossyCodes); 3] = [
    (VolumeLossy::Fp8E4m3, LossyCodes::Fp8E4m3),
    (VolumeLossy::Int8, LossyCodes::Int8),
    (VolumeLossy::Int4, LossyCodes::Int4),
];

fn build(
    model: ModelConfig,
    dir: &Path,
    ranks: u32,
    configure: impl FnOnce(&mut Config),
) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace().deployment_secret("0123456789abcdef0123456789abcdef"))
        .device(Blocks(24))
        .host(Blocks(48))
        .volume(format!("dir://{}", dir.display()))
        .tensor_parallel(ranks)
        .configure(|config| {
            unlimited(config);
            config.volumes.recheck = Duration::from_millis(1);
            config.device.layout = LayoutKind::FullyContiguous;
            config.transfer.verify_host = VerifyHost::Always;
            configure(config);
        })
        .build()
        .expect("a manager")
}

/// What comes back of a block of 16-bit numbers, by the codec alone.
fn decoded(codes: LossyCodes, dtype: DType) -> impl Fn(GroupId, Vec<u8>) -> Vec<u8> {
    let numbers = if dtype == DType::F16 { LossyNumbers::F16 } else { LossyNumbers::Bf16 };
    move |_, bytes| {
        let store = MemoryVolume::open(VolumeDescriptor::new(VolumeId(1), "memory:")).expect("a volume");
        let terms = LossyTerms { codes, numbers: vec![numbers] };
        let volume = CompressedVolume::new(Arc::new(store), VolumeCompression::Off).with_lossy(&terms);
        let key = BlobKey {
            namespace: NamespaceTag::from_bytes([1; 16]),
            label: NamespaceId(1),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([2; 16]),
            slice: BlobSlice { first_layer: 0, num_layers: 1, first_head: 0, num_heads: 1 },
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        volume.put_one(&key, &bytes, deadline).expect("written");
        let back = volume.get_one(&key, bytes.len(), deadline).expect("read");
        assert!(back != bytes, "something is lost");
        back
    }
}

/// Nothing of what any tier of a manager has is damaged or failed.
fn assert_sound(manager: &KvBlockManager<Owned>) {
    for tier in [Tier::G1, Tier::G2, Tier::G3, Tier::G4] {
        let metrics = manager.metrics();
        assert_eq!(metrics.tier(tier).corrupt.get(), 0, "{tier}");
    }
    for (path, kind) in kvbm::Path::ALL.into_iter().flat_map(|path| FailureKind::ALL.map(|kind| (path, kind)))
    {
        // Only what is not there is looked for in vain.
        if kind != FailureKind::Missing {
            assert_eq!(manager.metrics().path(path).failures(kind).get(), 0, "{path} {kind}");
        }
    }
}

/// One group and three, a latent that two ranks hold, 16-bit types. The second manager reads after
/// a restart, and keeps what it read in host memory, with a checksum that is compared whenever it
/// is read there. Mutation that makes it fail: the checksum in a frame is that of the block before
/// it was shortened.
#[test]
fn what_comes_back_is_what_the_codes_say_on_every_tier() {
    let latent = ModelConfig { num_kv_heads: 1, outer_dim: 1, head_dim: 64, ..heads::model() };
    for (model, ranks, dtype, (lossy, codes)) in [
        (heads::model(), 1, DType::BF16, ALL[0]),
        (heads::model(), 2, DType::F16, ALL[1]),
        (heads::model(), 1, DType::F16, ALL[2]),
        (latent, 2, DType::BF16, ALL[2]),
        (model_of(GROUPS), 1, DType::BF16, ALL[1]),
        (model_of(GROUPS), 2, DType::F16, ALL[0]),
    ] {
        let model = ModelConfig { dtype, ..model };
        let dir = tempfile::tempdir().expect("a folder");
        let set = |config: &mut Config| config.volumes.lossy = lossy;
        let back = decoded(codes, dtype);
        let first = build(model.clone(), dir.path(), ranks, set);
        let sequence = tokens(&first, 1, BLOCKS);
        assert_eq!(serve(&first, &sequence), 0);
        let metrics = first.metrics();
        let _text = metrics.encode();
        let volume = metrics.volume(VolumeId(0));
        let (written, stored) = (volume.written_bytes.get(), volume.written_stored_bytes.get());
        assert!(written > 0 && stored * 100 < written * 56, "{lossy}: {stored} of {written}");
        assert_eq!(volume.compresses.get(), 1);
        first.clear(Tier::G1).expect("ours");
        assert_eq!(serve(&first, &sequence), BLOCKS as usize, "exact in host memory, until it leaves");
        // Once it is on the volume alone.
        for tier in [Tier::G1, Tier::G2] {
            first.clear(tier).expect("ours");
        }
        assert_eq!(serve_as(&first, &sequence, &back), BLOCKS as usize, "{lossy}, {ranks} ranks");
        assert_sound(&first);
        drop(first);

        let second = build(model, dir.path(), ranks, |config| {
            set(config);
            config.volumes.compress = VolumeCompress::Zstd;
        });
        assert_eq!(serve_as(&second, &sequence, &back), BLOCKS as usize, "{lossy}, {ranks} ranks");
        second.clear(Tier::G1).expect("ours");
        let before = second.metrics().tier(Tier::G2).hits.get();
        assert_eq!(serve_as(&second, &sequence, &back), BLOCKS as usize, "from host memory");
        assert!(second.metrics().tier(Tier::G2).hits.get() > before);
        assert_sound(&second);
    }
}

/// Also of the other ways to lose, and on a disk. Mutation that makes it fail: the setting does not
/// enter the namespace.
#[test]
fn exact_and_lossy_managers_find_nothing_of_each_other() {
    let [dir, disk] = [0, 1].map(|_| tempfile::tempdir().expect("a folder"));
    let settings = VolumeLossy::ALL.iter().map(|(lossy, _)| *lossy);
    let all = |found: usize, back: &dyn Fn(VolumeLossy) -> Option<LossyCodes>| {
        for lossy in settings.clone() {
            let model = ModelConfig { dtype: DType::F16, ..heads::model() };
            let manager = build(model, dir.path(), 1, |config| {
                config.volumes.lossy = lossy;
                config.disk.dir = Some(disk.path().to_owned());
                config.disk.capacity = Blocks(16).into();
                config.offload.g2_g3.write_through = true;
            });
            let sequence = tokens(&manager, 1, BLOCKS);
            let hits = match back(lossy) {
                // What is on disk is exact, and nearer.
                None => serve(&manager, &sequence),
                Some(codes) => {
                    manager.clear(Tier::G3).expect("ours");
                    serve_as(&manager, &sequence, &decoded(codes, DType::F16))
                }
            };
            assert_eq!(hits, found, "{lossy}");
            assert_sound(&manager);
        }
    };
    all(0, &|_| None);
    let codes = |lossy| ALL.iter().find(|(known, _)| *known == lossy).map(|(_, codes)| *codes);
    all(BLOCKS as usize, &codes);
}

#[test]
fn lossy_blocks_are_encrypted_and_forgotten_like_others() {
    let dir = tempfile::tempdir().expect("a folder");
    let store = dir.path().join("store");
    std::fs::create_dir(&store).expect("a folder");
    let key = key_file(dir.path(), '7');
    let set = |config: &mut Config| {
        config.volumes.lossy = VolumeLossy::Fp8E4m3;
        config.volumes.compress = VolumeCompress::Zstd;
        config.volumes.encrypt = true;
        config.encryption.key_file = Some(key.clone());
    };
    let manager = build(heads::model(), &store, 2, set);
    let sequence = tokens(&manager, 1, BLOCKS);
    serve(&manager, &sequence);
    drop(manager);
    let back = decoded(LossyCodes::Fp8E4m3, DType::BF16);
    let manager = build(heads::model(), &store, 2, set);
    assert_eq!(serve_as(&manager, &sequence, &back), BLOCKS as usize);
    assert_sound(&manager);
    let receipt = manager.forget_with_receipt(&manager.namespace().clone(), Duration::from_secs(30));
    assert!(receipt.is_complete() && receipt.on_volumes == u64::from(BLOCKS), "{receipt:?}");
    drop(manager);
    assert_eq!(serve(&build(heads::model(), &store, 2, set), &sequence), 0);
}

/// Every object gets one byte of its payload changed.
#[test]
fn a_damaged_lossy_object_is_a_miss_and_is_computed_again() {
    let dir = tempfile::tempdir().expect("a folder");
    let set = |config: &mut Config| config.volumes.lossy = VolumeLossy::Int8;
    let manager = build(heads::model(), dir.path(), 1, set);
    let sequence = tokens(&manager, 1, BLOCKS);
    serve(&manager, &sequence);
    drop(manager);
    for path in files(dir.path()) {
        let mut bytes = std::fs::read(&path).expect("a file");
        let at = bytes.len() - 100;
        bytes[at] ^= 4;
        std::fs::write(&path, bytes).expect("written");
    }
    let manager = build(heads::model(), dir.path(), 1, set);
    assert_eq!(serve(&manager, &sequence), 0, "and what is computed instead is right");
    assert!(manager.metrics().tier(Tier::G4).corrupt.get() > 0);
}
