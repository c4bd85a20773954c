//! Chains that begin behind a known block, and keys without parents.
#![cfg(feature = "worker")]

use crate::support::host::{host_tensors, layer_separate};
use crate::support::script::{Mode, Ranks};
use crate::support::{compute, holds, model, namespace, soon, unlimited};
use kvbm::config::{Blocks, VolumeConfig};
use kvbm::pool::Refusal;
use kvbm::{
    BlockChain, BlockId, Engine, ExternalSequence, FailureKind, KvBlockManager, Namespace, Owned, Path, Tier,
};
use std::path::Path as FilePath;
use std::time::Duration;

const G1: u32 = 32;

fn manager(namespace: Namespace, g2: u32, disk: &FilePath, volume: &FilePath) -> KvBlockManager<Engine> {
    let model = model();
    let tensors = host_tensors(layer_separate(&model, G1));
    let volume = VolumeConfig { uri: format!("dir://{}", volume.display()), ..VolumeConfig::default() };
    KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace)
        .engine_host(vec![tensors])
        .host(Blocks(g2))
        .disk(disk, Blocks(32))
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            config.volumes.recheck = Duration::from_millis(1);
            config.volume = vec![volume];
        })
        .build()
        .unwrap()
}

/// An engine's hashes of blocks.
fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<[u8; 8]> {
    numbers.into_iter().map(u64::to_le_bytes).collect()
}

/// Computes the blocks of a chain into the engine's first blocks and offloads them. Refused ones.
fn put(manager: &KvBlockManager<Engine>, chain: BlockChain<'_>) -> Vec<Refusal> {
    let ids: Vec<_> = (0..chain.len() as u32).map(BlockId).collect();
    manager.before_reuse(&ids, soon()).unwrap();
    for (&id, &hash) in ids.iter().zip(chain.hashes()) {
        compute(manager, id, hash);
    }
    let started = manager.offload(&ids, chain, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    started.refused.iter().map(|refused| refused.reason).collect()
}

/// Blocks of a chain that come back, each with its bytes.
fn take(manager: &KvBlockManager<Engine>, chain: BlockChain<'_>) -> usize {
    let prefix = manager.match_prefix(chain);
    let ids: Vec<_> = (0..prefix.len() as u32).map(|at| BlockId(G1 - 1 - at)).collect();
    let arrived = manager.onboard(prefix, &ids, None).unwrap().wait().unwrap();
    assert!(ids.iter().zip(chain.hashes()).all(|(&id, &hash)| holds(manager, id, hash)));
    assert!(manager.wait_offloads(soon()));
    arrived
}

fn external(manager: &KvBlockManager<Engine>, numbers: impl IntoIterator<Item = u64>) -> ExternalSequence {
    manager.external_sequence(keys(numbers))
}

#[test]
fn a_part_of_a_sequence_is_stored_and_found_behind_its_parent() {
    let (disk, volume) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manager = manager(namespace(), 32, disk.path(), volume.path());
    let whole = external(&manager, 0..6);
    let tail = external(&manager, 3..6);
    let parent = 2_u64.to_le_bytes();
    let behind = tail.chain_after(&parent, 2);
    assert_eq!(behind.iter().collect::<Vec<_>>(), whole.chain().slice(3..6).iter().collect::<Vec<_>>());
    let missing = Refusal::MissingParent { parent: whole.hashes()[2] };
    assert_eq!(put(&manager, behind)[0], missing, "the blocks before them are nowhere");
    assert_eq!(put(&manager, whole.chain().slice(0..3)), []);
    assert_eq!(put(&manager, behind), []);
    for chain in [whole.chain(), behind, whole.chain().slice(2..5)] {
        assert_eq!(take(&manager, chain), chain.len());
    }
    // From every tier.
    for (path, emptied) in [(Path::G3_G1, Tier::G2), (Path::G4_G1, Tier::G3)] {
        manager.clear(Tier::G2).unwrap();
        manager.clear(emptied).unwrap();
        assert_eq!(take(&manager, behind), 3);
        assert_eq!(manager.metrics().path(path).blocks.get(), 3, "{path}");
    }
    assert!(manager.shutdown(Duration::from_secs(30)).is_complete());
}

#[test]
fn a_wrong_parent_or_position_is_a_miss_and_harms_nothing() {
    let (disk, volume) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let manager = manager(namespace(), 32, disk.path(), volume.path());
    let (whole, tail) = (external(&manager, 0..6), external(&manager, 3..6));
    assert_eq!(put(&manager, whole.chain()), []);
    for (parent, position) in [(2_u64, 3), (2, 1), (1, 2), (2, u32::MAX)] {
        let chain = tail.chain_after(&parent.to_le_bytes(), position);
        assert_eq!(manager.match_prefix(chain).len(), 0, "behind {parent} at {position}");
    }
    let flat = BlockChain::flat(tail.hasher().tag(), tail.hashes());
    assert_eq!(manager.match_prefix(flat).len(), 0, "they have parents");
    assert_eq!(take(&manager, whole.chain()), 6);
    assert_eq!(manager.status().tiers[1].quarantined, 0);
}

#[test]
fn keys_without_parents_come_and_go_in_any_order() {
    let (disk, volume) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let open = |g2| manager(namespace().flat(), g2, disk.path(), volume.path());
    let manager = open(8);
    assert_eq!(put(&manager, external(&manager, [5, 3]).chain()), [], "no parent is needed");
    assert_eq!(put(&manager, external(&manager, [4, 9]).chain()), []);
    for numbers in [vec![3], vec![9, 4], vec![5, 9, 3, 4]] {
        assert_eq!(take(&manager, external(&manager, numbers.clone()).chain()), numbers.len());
    }
    assert_eq!(take(&manager, external(&manager, [4, 7, 5]).chain()), 1, "up to the first that is missing");
    // Twice as many as G2 holds: any of them may go from there, and none takes another with it.
    assert_eq!(put(&manager, external(&manager, 10..18).chain()), []);
    assert_eq!(put(&manager, external(&manager, 20..24).chain()), []);
    let all = || [3, 4, 5, 9].into_iter().chain(10..18).chain(20..24);
    assert_eq!(take(&manager, external(&manager, all().rev()).chain()), 16);
    assert!(manager.metrics().path(Path::G3_G1).blocks.get() >= 8, "the others lie on the disk");
    assert!(manager.shutdown(Duration::from_secs(30)).is_complete());
    drop(manager);
    // A restart brings all of them back; a damaged one costs no other.
    let manager = open(32);
    assert_eq!(take(&manager, external(&manager, all()).chain()), 16);
    // So does a volume that is asked for keys that nobody here remembers.
    drop(manager);
    std::fs::remove_dir_all(disk.path()).unwrap();
    std::fs::create_dir(disk.path()).unwrap();
    let manager = open(32);
    assert_eq!(take(&manager, external(&manager, [16, 3, 22]).chain()), 3);
    assert_eq!(manager.metrics().path(Path::G4_G1).blocks.get(), 3);
    assert_eq!(take(&manager, external(&manager, [16, 100, 3]).chain()), 1);
}

#[test]
fn keys_never_match_blocks_with_parents() {
    let (disk, volume) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let flat = manager(namespace().flat(), 32, disk.path(), volume.path());
    assert_eq!(put(&flat, external(&flat, 0..4).chain()), []);
    assert!(flat.shutdown(Duration::from_secs(30)).is_complete());
    drop(flat);
    let chained = manager(namespace(), 32, disk.path(), volume.path());
    assert_eq!(take(&chained, external(&chained, 0..4).chain()), 0);
}

#[test]
fn a_failure_among_keys_or_behind_a_parent_is_counted_from_the_first() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 64);
    let whole = manager.external_sequence(keys(0..6));
    let ids = |range: std::ops::Range<u32>| range.map(BlockId).collect::<Vec<_>>();
    manager.offload(&ids(0..6), &whole, 0, None).unwrap();
    let tag = whole.hasher().tag();
    let others = manager.external_sequence(keys(10..14));
    let flat = BlockChain::flat(tag, others.hashes());
    assert_eq!(manager.offload(&ids(6..10), flat, 0, None).unwrap().started, 4);
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Hold);
    let behind = BlockChain::after(tag, whole.hashes()[1], 1, &whole.hashes()[2..]);
    for chain in [behind, flat] {
        let onboarding = manager.onboard(manager.match_prefix(chain), &ids(20..24), None).unwrap();
        let plan = ranks.next_plan(0);
        ranks.fail(0, &plan, 2, FailureKind::Corrupt);
        let error = onboarding.wait().unwrap_err();
        assert_eq!((error.arrived, error.wanted, error.failures.len()), (2, 4, 1));
        assert_eq!(error.failures[0].identity.hash, chain.hashes()[2]);
    }
}
