//! Blocks travel down the tiers and come back byte for byte.
#![cfg(feature = "worker")]

use crate::support::{models, serve, slot_file, soon, three_tiers, three_tiers_of, tokens, two_tiers};
use kvbm::config::{Config, EvictionPolicy, ModelConfig};
use kvbm::{FailureKind, KvBlockManager, Owned, Path, Rank, Tier};

#[test]
fn a_block_evicted_from_g1_comes_back_from_g2() {
    let manager = two_tiers(8, 64);
    let first = tokens(&manager, 1, 6);
    assert_eq!(serve(&manager, &first), 0);
    assert!(manager.wait_offloads(soon()));
    for other in 2..6 {
        serve(&manager, &tokens(&manager, other, 6));
        assert!(manager.wait_offloads(soon()));
    }
    let where_now = manager.look_up(&first);
    assert_eq!(where_now.len(), 6);
    assert!(where_now.iter().all(|tiers| !tiers.contains(Tier::G1) && tiers.contains(Tier::G2)));
    assert_eq!(serve(&manager, &first), 6);
    assert_eq!(manager.metrics().tier(Tier::G2).hits.get(), 6);
}

#[test]
fn a_block_evicted_from_g2_comes_back_from_disk_and_survives_a_restart() {
    let found = models().map(|model| comes_back_from_disk(&model));
    assert_eq!(found, [6, 6], "found again after a restart");
}

/// Blocks that are found after a restart.
fn comes_back_from_disk(model: &ModelConfig) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let by_recency = |config: &mut Config| config.policy.eviction = EvictionPolicy::LruLeaf;
    let build = || three_tiers_of(model.clone(), [12, 20, 64], dir.path(), by_recency);
    let manager = build();
    let disks = manager.status().disks;
    assert_eq!(disks.len(), 1, "one rank");
    assert_eq!((disks[0].rank, disks[0].engine.num_slots), (Rank(0), 64));
    assert!(!disks[0].engine.engine.reason.is_empty(), "says why {}", disks[0].engine.engine.kind);
    let first = tokens(&manager, 1, 6);
    for start in 1..8 {
        assert_eq!(serve(&manager, &tokens(&manager, start, 6)), 0);
        assert!(manager.wait_offloads(soon()));
    }
    let where_now = manager.look_up(&first);
    assert!(where_now.iter().all(|tiers| tiers.nearest() == Some(Tier::G3)), "{where_now:?}");
    assert_eq!(serve(&manager, &first), 6);
    let report = manager.shutdown(std::time::Duration::from_secs(60));
    assert!(report.is_complete(), "{report:?}");
    drop(manager);

    let manager = build();
    serve(&manager, &first)
}

/// Nothing is closed: the process ends as if it were killed.
#[test]
fn what_was_flushed_survives_an_end_without_shutdown() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        let build = || three_tiers_of(model.clone(), [16, 32, 64], dir.path(), |_| ());
        let manager = build();
        let first = tokens(&manager, 1, 6);
        assert_eq!(serve(&manager, &first), 0);
        assert!(manager.wait_offloads(soon()));
        manager.flush(std::time::Duration::from_secs(60)).unwrap();
        let left = super::forget::copy_of(dir.path());
        let manager = three_tiers_of(model.clone(), [16, 32, 64], left.path(), |_| ());
        assert_eq!(serve(&manager, &first), 6);
    }
}

/// Without the worker's word about it the leader would offer the slot again and again, and every
/// write to it would fail.
#[test]
fn a_quarantined_slot_stays_unused_after_a_restart() {
    const SLOTS: u32 = 8;
    let dir = tempfile::tempdir().unwrap();
    let build = || three_tiers([4, 4, SLOTS], dir.path(), |_| ());
    let shut_down = |manager: KvBlockManager<Owned>| {
        let report = manager.shutdown(std::time::Duration::from_secs(60));
        assert!(report.is_complete(), "{report:?}");
    };
    let g3 = |manager: &KvBlockManager<Owned>| manager.status().tiers[Tier::G3.index()];
    let manager = build();
    let first = tokens(&manager, 1, 4);
    assert_eq!(serve(&manager, &first), 0);
    assert!(manager.wait_offloads(soon()));
    shut_down(manager);

    let path = slot_file(dir.path());
    let mut bytes = std::fs::read(&path).unwrap();
    let used = bytes.iter().position(|&byte| byte != 0).unwrap();
    bytes[used] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let manager = build();
    let error = manager.onboard(manager.match_prefix(&first)).wait_until(soon()).unwrap_err();
    assert_eq!(error.failures[0].failure.kind, FailureKind::Corrupt, "{error}");
    assert_eq!(g3(&manager).quarantined, 1);
    shut_down(manager);

    let manager = build();
    assert_eq!(g3(&manager).quarantined, 1);
    for start in 2..6 {
        serve(&manager, &tokens(&manager, start, 4));
        assert!(manager.wait_offloads(soon()));
    }
    let status = g3(&manager);
    // A finished offload may hold its blocks for a moment longer.
    let (quarantined, used) = (status.quarantined, status.active + status.inactive);
    assert_eq!((quarantined, used), (1, SLOTS - 1), "the others are in use: {status:?}");
    let failures = manager.metrics().path(Path::G2_G3).failures(FailureKind::Io).get();
    assert_eq!(failures, 0, "nothing was written to the bad slot");
}
