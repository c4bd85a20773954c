//! Two deployments on one disk and one volume: neither takes the other's room, nor its blocks.
#![cfg(feature = "worker")]

use crate::support::store::{hashes, put};
use crate::support::{holds, model, soon, tokens, unlimited};
use kvbm::config::{Blocks, DiskEngine};
use kvbm::{BlockChain, Cached, G1, KvBlockManager, Namespace, Owned, Tier, TokenSequence};
use std::path::Path;
use std::time::{Duration, Instant};

/// A deployment that keeps so many blocks on the disk and on the volume.
fn manager(dir: &Path, weights: &str, on_disk: u32, on_volume: u32) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(Namespace::new("test-model").weights(weights))
        .device(Blocks(4))
        .host(Blocks(8))
        .disk(dir.join("disk"), Blocks(on_disk))
        .volume(format!("dir://{}", dir.join("volume").display()))
        .configure(|config| {
            unlimited(config);
            config.disk.engine = DiskEngine::Buffered;
            config.offload.g2_g3.write_through = true;
            config.volume[0].capacity = Blocks(on_volume).into();
        })
        .build()
        .expect("a manager")
}

/// Files below a folder, those that are not complete left out.
fn files(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
    let count = |entry: std::fs::DirEntry| {
        let is_folder = entry.file_type().expect("a type").is_dir();
        let incomplete = entry.file_name() == ".incomplete";
        if is_folder && !incomplete { files(&entry.path()) } else { usize::from(!is_folder) }
    };
    entries.map(count).sum()
}

fn arrived(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> Cached<G1> {
    let cached = match manager.onboard(manager.match_prefix(sequence)).wait() {
        Ok(cached) => cached,
        Err(error) => error.arrived,
    };
    for (block, hash) in cached.block_ids().iter().zip(hashes(sequence)) {
        assert!(holds(manager, *block, hash), "wrong bytes");
    }
    cached
}

#[test]
fn neither_deployment_takes_the_others_room_or_blocks() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(dir.path().join("volume")).expect("a folder");
    let (small, large) = (manager(dir.path(), "1", 8, 32), manager(dir.path(), "2", 16, 64));
    let chains: Vec<_> = (0..48).map(|start| [&small, &large].map(|one| tokens(one, start, 2))).collect();
    // Both write more than either may keep, in turn.
    for [ours, theirs] in &chains {
        put(&small, ours);
        put(&large, theirs);
    }
    let until = soon();
    let settled = |manager: &KvBlockManager<Owned>, most: usize| {
        while manager.status().volumes[0].blocks > most {
            assert!(Instant::now() < until, "what is beyond the capacity goes");
            std::thread::yield_now();
        }
    };
    settled(&small, 32);
    settled(&large, 64);
    while files(&dir.path().join("volume")) > 96 {
        assert!(Instant::now() < until, "what is beyond the capacities is removed");
        std::thread::yield_now();
    }
    for (manager, on_disk) in [(&small, 8), (&large, 16)] {
        let disk = manager.status().tiers[Tier::G3.index()];
        assert_eq!(disk.capacity, on_disk);
        assert_eq!(disk.free + disk.inactive, on_disk, "nobody else holds its slots: {disk:?}");
        assert_eq!(disk.free, 0, "it is full");
        assert_eq!(manager.status().volumes[0].full, 0, "the other one's objects do not count");
    }

    // The last chains of each are there, and no chain is the other's: the same tokens have other
    // hashes.
    let [ours, theirs] = &chains[47];
    assert_ne!(BlockChain::from(ours).hashes(), BlockChain::from(theirs).hashes());
    for (manager, own, others) in [(&small, ours, theirs), (&large, theirs, ours)] {
        manager.clear(Tier::G1).expect("ours");
        manager.clear(Tier::G2).expect("ours");
        assert_eq!(arrived(manager, own).len(), 2);
        assert_eq!(manager.match_prefix(others).len(), 0);
    }

    // One forgets all that it has; the other one keeps everything, also over a restart. What was
    // read back goes down again first.
    assert!(small.wait_offloads(soon()) && large.wait_offloads(soon()));
    let before = large.status();
    for tier in [Tier::G1, Tier::G2, Tier::G3, Tier::G4] {
        small.clear(tier).expect("configured");
    }
    while files(&dir.path().join("volume")) > before.volumes[0].blocks {
        assert!(Instant::now() < until, "its objects go, and only those");
        std::thread::yield_now();
    }
    assert!(small.shutdown(Duration::from_secs(60)).is_complete());
    assert_eq!(large.status().tiers[2].inactive, before.tiers[2].inactive);
    assert!(large.shutdown(Duration::from_secs(60)).is_complete());
    drop((small, large));
    let large = manager(dir.path(), "2", 16, 64);
    assert_eq!(arrived(&large, theirs).len(), 2);
    assert_eq!(large.status().tiers[2].capacity - large.status().tiers[2].free, 16);
    let small = manager(dir.path(), "1", 8, 32);
    assert_eq!(small.match_prefix(ours).len(), 0, "what was cleared does not come back");
}
