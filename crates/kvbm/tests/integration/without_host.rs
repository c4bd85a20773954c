//! Managers without host memory: blocks go from G1 to the disk, and come back from there.
#![cfg(feature = "worker")]

use crate::encrypted_files::key_file;
use crate::support::script::{Mode, Ranks};
use crate::support::{
    fill, heads, kept, model, models, namespace, serve, slot_file, soon, three_tiers_of, tokens, unlimited,
};
use kvbm::config::{Blocks, Bytes, Config, DiskEngine, EvictionPolicy, ModelConfig};
use kvbm::metrics::DropReason;
use kvbm::{FailureKind, KvBlockManager, OffloadError, Owned, ParkError, Path, Tier, TokenSequence};
use std::path::Path as FilePath;
use std::time::Duration;

const BLOCKS: u32 = 6;

fn open(model: ModelConfig, dir: &FilePath, configure: impl FnOnce(&mut Config)) -> KvBlockManager<Owned> {
    three_tiers_of(model, [24, 0, 96], dir, |config| {
        config.policy.eviction = EvictionPolicy::LruLeaf;
        configure(config);
    })
}

fn on_disk<G>(manager: &KvBlockManager<G>, sequence: &TokenSequence) -> usize {
    manager.look_up(sequence).iter().filter(|places| places.contains(Tier::G3)).count()
}

fn close<G>(manager: KvBlockManager<G>) {
    let report = manager.shutdown(Duration::from_secs(30));
    assert!(report.is_complete(), "{report:?}");
    drop(manager);
}

/// Blocks that came along a path.
fn along<G>(manager: &KvBlockManager<G>, path: Path) -> usize {
    manager.metrics().path(path).blocks.get() as usize
}

/// Mutation that makes it fail: `edges` makes no edge from G1 to G3.
#[test]
fn blocks_are_written_through_evicted_and_found_again_also_after_a_restart() {
    for model in models() {
        for ranks in [1, 2] {
            let dir = tempfile::tempdir().unwrap();
            let two = |config: &mut Config| config.parallelism.tensor_parallel = ranks;
            let manager = open(model.clone(), dir.path(), two);
            let requests: Vec<_> = (1..=8).map(|start| tokens(&manager, start, BLOCKS)).collect();
            for request in &requests {
                assert_eq!(serve(&manager, request), 0);
                assert!(manager.wait_offloads(soon()));
            }
            let written = 8 * kept(&model, BLOCKS as usize);
            assert_eq!(along(&manager, Path::G1_G3), written);
            for request in &requests {
                assert_eq!(serve(&manager, request), BLOCKS as usize, "from the disk, all bytes compared");
            }
            assert!(along(&manager, Path::G3_G1) > written / 2);
            assert_eq!([Path::G1_G2, Path::G2_G3, Path::G3_G2].map(|path| along(&manager, path)), [0; 3]);
            close(manager);

            let manager = open(model.clone(), dir.path(), two);
            for request in &requests {
                assert_eq!(serve(&manager, request), BLOCKS as usize, "after a restart");
            }
            assert_eq!(along(&manager, Path::G1_G3), 0, "it is there already");
        }
    }
}

#[test]
fn an_encrypted_or_signed_disk_gives_its_blocks_back() {
    let keys = tempfile::tempdir().unwrap();
    let key = key_file(keys.path(), '7');
    for is_encrypted in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let name = namespace();
            KvBlockManager::<Owned>::builder()
                .model(model())
                .namespace(if is_encrypted { name } else { name.deployment_secret([b'x'; 32]) })
                .device(Blocks(24))
                .disk(dir.path(), Blocks(96))
                .configure(|config| {
                    unlimited(config);
                    config.disk.encrypt = is_encrypted;
                    config.encryption.key_file = is_encrypted.then(|| key.clone());
                })
                .build()
                .unwrap()
        };
        let manager = open();
        let request = tokens(&manager, 1, BLOCKS);
        assert_eq!(serve(&manager, &request), 0);
        close(manager);
        let manager = open();
        assert_eq!(serve(&manager, &request), BLOCKS as usize, "all bytes compared");
        assert_eq!(along(&manager, Path::G3_G1), BLOCKS as usize);
        close(manager);
    }
}

/// Mutation that makes it fail: `save_all` goes by G2 alone.
#[test]
fn a_shutdown_saves_what_only_the_device_has() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        let manager = open(model.clone(), dir.path(), |config| config.offload.g1_g2.write_through = false);
        let request = tokens(&manager, 1, BLOCKS);
        assert_eq!(serve(&manager, &request), 0);
        assert!(manager.wait_offloads(soon()));
        assert_eq!(along(&manager, Path::G1_G3), 0);
        close(manager);
        let manager = open(model, dir.path(), |_| {});
        assert_eq!(serve(&manager, &request), BLOCKS as usize);
    }
}

#[test]
fn a_caller_sends_blocks_to_the_disk_by_name_and_a_flush_makes_them_durable() {
    let dir = tempfile::tempdir().unwrap();
    let manager = open(model(), dir.path(), |config| config.offload.g1_g2.write_through = false);
    let request = tokens(&manager, 1, BLOCKS);
    serve(&manager, &request);
    let held = manager.match_prefix(&request).into_parts().g1.erase();
    let refused = manager.offload(&held, Tier::G2).unwrap_err();
    assert!(matches!(refused, OffloadError::NoPath { from: Tier::G1, to: Tier::G2 }), "{refused}");
    manager.offload(&held, Tier::G3).unwrap();
    assert_eq!(manager.flush(Duration::from_secs(30)).unwrap().durable_blocks, u64::from(BLOCKS));
    assert_eq!(on_disk(&manager, &request), BLOCKS as usize);
    drop(held);
    manager.clear(Tier::G1).unwrap();
    assert_eq!(serve(&manager, &request), BLOCKS as usize);

    let dir = tempfile::tempdir().unwrap();
    let with_host = three_tiers_of(model(), [24, 24, 96], dir.path(), |_| {});
    serve(&with_host, &request);
    let held = with_host.match_prefix(&request).into_parts().g1.erase();
    let refused = with_host.offload(&held, Tier::G3).unwrap_err();
    assert!(matches!(refused, OffloadError::NoPath { from: Tier::G1, to: Tier::G3 }), "{refused}");
}

#[test]
fn a_ring_that_is_smaller_than_a_batch_carries_it() {
    let dir = tempfile::tempdir().unwrap();
    let manager = three_tiers_of(model(), [64, 0, 128], dir.path(), |config| {
        config.transfer.staging = Bytes(1);
    });
    let request = tokens(&manager, 1, 40);
    assert_eq!(serve(&manager, &request), 0);
    assert!(manager.wait_offloads(soon()));
    manager.clear(Tier::G1).unwrap();
    assert_eq!(serve(&manager, &request), 40);
}

/// The disk has one copy of what ranks share; each rank has a ring of its own.
#[test]
fn ranks_that_hold_the_same_bytes_write_them_once() {
    let latent = ModelConfig { num_kv_heads: 1, outer_dim: 1, head_dim: 64, ..heads::model() };
    let mut written = Vec::new();
    for ranks in [1, 4] {
        let dir = tempfile::tempdir().unwrap();
        let open = || {
            let builder = heads::on_disk(latent.clone(), dir.path(), ranks).host(Blocks(0));
            builder.configure(|config| config.host.one_copy = true).build().unwrap()
        };
        let manager = open();
        let request = tokens(&manager, 1, BLOCKS);
        assert_eq!(heads::serve(&manager, &request), 0);
        assert!(manager.wait_offloads(soon()));
        written.push(slot_bytes(dir.path()));
        manager.clear(Tier::G1).unwrap();
        assert_eq!(heads::serve(&manager, &request), BLOCKS as usize);
        close(manager);
        assert_eq!(heads::serve(&open(), &request), BLOCKS as usize, "after a restart");
    }
    assert_eq!(written[0], written[1]);
}

/// Bytes of the slot files below a directory.
fn slot_bytes(dir: &FilePath) -> u64 {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let of = |path: std::path::PathBuf| match path {
        path if path.is_dir() => slot_bytes(&path),
        path if path.ends_with("slots.kvbm") => path.metadata().unwrap().len(),
        _ => 0,
    };
    entries.map(of).sum()
}

/// The layout of the disk is that of a deployment with host memory.
#[test]
fn a_disk_serves_managers_with_and_without_host_memory() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        for g2 in [0, 24, 0] {
            let manager = three_tiers_of(model.clone(), [24, g2, 96], dir.path(), |_| {});
            for start in 1..=4 {
                serve(&manager, &tokens(&manager, start, BLOCKS));
                assert!(manager.wait_offloads(soon()));
            }
            let fresh = along(&manager, Path::G1_G3) + along(&manager, Path::G2_G3);
            assert_eq!(fresh > 0, dir.path().join("seen").metadata().is_err(), "only the first computes");
            std::fs::write(dir.path().join("seen"), "").unwrap();
            close(manager);
        }
    }
}

/// A disk that takes no writes any more costs the blocks nothing but their copies.
#[test]
fn a_disk_that_fails_writes_is_named_and_the_engine_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let manager = open(model(), dir.path(), |config| {
        // The ring has files of its own, which nobody can replace.
        config.disk.engine = DiskEngine::Buffered;
    });
    let first = tokens(&manager, 1, 2);
    serve(&manager, &first);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on_disk(&manager, &first), 2);
    let file = slot_file(dir.path());
    crate::disk_unwritable::open_anew(&file, false);
    let second = tokens(&manager, 2, BLOCKS);
    assert_eq!(serve(&manager, &second), 0);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on_disk(&manager, &second), 0);
    assert_eq!(manager.metrics().path(Path::G1_G3).failures(FailureKind::Io).get(), u64::from(BLOCKS));
    assert_eq!(serve(&manager, &second), BLOCKS as usize, "from the device");
    crate::disk_unwritable::open_anew(&file, true);
    manager.clear(Tier::G1).unwrap();
    assert_eq!(serve(&manager, &first), 2, "what was on the disk is");
}

#[test]
fn the_wear_budget_bounds_what_goes_to_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    // Four blocks at once: an hour's worth.
    let manager = open(model(), dir.path(), |config| config.disk.drive_writes_per_day = 1.0);
    let request = tokens(&manager, 1, BLOCKS);
    serve(&manager, &request);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on_disk(&manager, &request), 4);
    assert_eq!(manager.metrics().path(Path::G1_G3).dropped(DropReason::WearBudget).get(), 2);
}

#[test]
fn private_blocks_need_host_memory_and_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let manager = open(model(), dir.path(), |_| {});
    let fresh = manager.allocate(2).unwrap();
    let (done, partial) = manager.commit(fresh, &tokens(&manager, 1, 1), 0).unwrap();
    drop(done);
    let rejected = manager.park(partial).unwrap_err();
    assert!(matches!(rejected.error, ParkError::NoHostMemory), "{rejected}");
    assert_eq!(rejected.blocks.expect("they come back").len(), 1);
    assert_eq!(manager.prefetch(&tokens(&manager, 1, 1)).started, 0);
}

/// One rank without the block is none with it.
#[test]
fn a_block_counts_when_every_rank_has_written_it() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([32, 0, 64], |config| config.offload.g1_g2.write_through = true);
    ranks.set_all(Mode::Hold);
    let request = tokens(&manager, 1, 3);
    drop(fill(&manager, &request, 0));
    ranks.execute(0);
    assert_eq!(on_disk(&manager, &request), 0);
    let plan = ranks.next_plan(1);
    ranks.fail(1, &plan, 1, FailureKind::Io);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on_disk(&manager, &request), 1);
}
