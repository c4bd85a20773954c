//! Managers without host memory over volumes: blocks go from G1 to G4, and come back from there.
#![cfg(feature = "worker")]

use crate::support::store::{Store, registry};
use crate::support::{kept, model, models, namespace, serve, soon, tokens, unlimited};
use kvbm::config::{Blocks, Bytes, Config, LayoutKind, ModelConfig, VolumeOffload};
use kvbm::{BuildError, FailureKind, KvBlockManager, OffloadError, Owned, Path, Tier};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const BLOCKS: u32 = 6;

fn open(
    store: &Arc<Store>,
    model: ModelConfig,
    disk: Option<&FilePath>,
    configure: impl FnOnce(&mut Config),
) -> KvBlockManager<Owned> {
    let mut builder = KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace())
        .device(Blocks(24))
        .volume("test:")
        .volumes(registry(&[("test", store)]));
    if let Some(dir) = disk {
        builder = builder.disk(dir, Blocks(64));
    }
    let configure = |config: &mut Config| {
        unlimited(config);
        config.device.layout = LayoutKind::FullyContiguous;
        config.volumes.recheck = Duration::from_millis(1);
        config.volumes.longest_pause = Duration::from_millis(50);
        configure(config);
    };
    builder.configure(configure).build().unwrap()
}

/// Blocks that came along a path.
fn along<G>(manager: &KvBlockManager<G>, path: Path) -> usize {
    manager.metrics().path(path).blocks.get() as usize
}

fn close<G>(manager: KvBlockManager<G>) {
    let report = manager.shutdown(Duration::from_secs(30));
    assert!(report.is_complete(), "{report:?}");
    drop(manager);
}

/// Mutation that makes it fail: `edges` makes no edge from G1 to G4.
#[test]
fn blocks_are_written_through_evicted_and_found_by_managers_with_and_without_host_memory() {
    for model in models() {
        for ranks in [1, 2] {
            let store = Store::new();
            let two = |config: &mut Config| config.parallelism.tensor_parallel = ranks;
            let first = open(&store, model.clone(), None, two);
            let requests: Vec<_> = (1..=6).map(|start| tokens(&first, start, BLOCKS)).collect();
            for request in &requests {
                assert_eq!(serve(&first, request), 0);
                assert!(first.wait_offloads(soon()));
            }
            assert_eq!(along(&first, Path::G1_G4), 6 * kept(&model, BLOCKS as usize));
            for request in &requests {
                assert_eq!(serve(&first, request), BLOCKS as usize, "from the volume, all bytes compared");
            }
            assert!(along(&first, Path::G4_G1) > 0);
            close(first);
            for host in [0, 48] {
                let other = open(&store, model.clone(), None, |config| {
                    two(config);
                    config.host.capacity = Blocks(host).into();
                });
                for request in &requests {
                    assert_eq!(serve(&other, request), BLOCKS as usize, "{host} blocks of host memory");
                }
                assert_eq!(along(&other, Path::G1_G4) + along(&other, Path::G2_G4), 0, "it is there already");
                close(other);
            }
        }
    }
}

#[test]
fn a_disk_and_a_volume_both_take_what_leaves_the_device() {
    let (store, dir) = (Store::new(), tempfile::tempdir().unwrap());
    let manager = open(&store, model(), Some(dir.path()), |_| {});
    let requests: Vec<_> = (1..=8).map(|start| tokens(&manager, start, BLOCKS)).collect();
    for request in &requests {
        assert_eq!(serve(&manager, request), 0);
        assert!(manager.wait_offloads(soon()));
    }
    assert_eq!([Path::G1_G3, Path::G1_G4].map(|path| along(&manager, path)), [48; 2]);
    for request in &requests {
        assert_eq!(serve(&manager, request), BLOCKS as usize);
    }
    assert!(along(&manager, Path::G3_G1) > 0);
    manager.clear(Tier::G3).unwrap();
    manager.clear(Tier::G1).unwrap();
    assert_eq!(serve(&manager, &requests[0]), BLOCKS as usize, "from the volume");
    assert!(along(&manager, Path::G4_G1) >= BLOCKS as usize);
    close(manager);
}

/// Without a disk, what eviction takes next goes to the volume before it goes.
#[test]
fn victims_go_to_a_volume_before_they_are_evicted() {
    let store = Store::new();
    let manager = open(&store, model(), None, |config| {
        config.volumes.offload = VolumeOffload::Victims;
        config.offload.g2_g3.ahead_share = 0.25;
    });
    let requests: Vec<_> = (1..=12).map(|start| tokens(&manager, start, 3)).collect();
    for request in &requests {
        assert_eq!(serve(&manager, request), 0);
        assert!(manager.wait_offloads(soon()));
    }
    assert!(along(&manager, Path::G1_G4) >= 12, "36 blocks came into 24 slots");
    for request in &requests {
        assert_eq!(serve(&manager, request), 3, "what was evicted is on the volume");
    }
    assert!(along(&manager, Path::G4_G1) >= 12);
    close(manager);
}

/// Mutation that makes it fail: `save_all` goes by G2 alone.
#[test]
fn a_shutdown_saves_what_only_the_device_has_and_a_caller_names_blocks() {
    let store = Store::new();
    let on_call = |config: &mut Config| config.volumes.offload = VolumeOffload::Explicit;
    let manager = open(&store, model(), None, on_call);
    let named = tokens(&manager, 1, BLOCKS);
    serve(&manager, &named);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(along(&manager, Path::G1_G4), 0);
    let held = manager.match_prefix(&named).into_parts().g1.erase();
    let refused = manager.offload(&held, Tier::G3).unwrap_err();
    assert!(matches!(refused, OffloadError::NoPath { from: Tier::G1, to: Tier::G3 }), "{refused}");
    manager.offload(&held, Tier::G4).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!(along(&manager, Path::G1_G4), BLOCKS as usize);
    drop(held);
    let saved = tokens(&manager, 2, BLOCKS);
    serve(&manager, &saved);
    close(manager);
    let manager = open(&store, model(), None, on_call);
    for request in [&named, &saved] {
        assert_eq!(serve(&manager, request), BLOCKS as usize);
    }
}

#[test]
fn a_volume_that_is_down_costs_the_blocks_nothing_but_their_copies() {
    let store = Store::new();
    let manager = open(&store, model(), None, |config| config.transfer.staging = Bytes(1));
    store.down.store(true, Ordering::Relaxed);
    let request = tokens(&manager, 1, BLOCKS);
    assert_eq!(serve(&manager, &request), 0);
    assert!(manager.wait_offloads(soon()));
    assert!(manager.metrics().path(Path::G1_G4).failures(FailureKind::Io).get() > 0);
    assert_eq!(serve(&manager, &request), BLOCKS as usize, "from the device");
    store.down.store(false, Ordering::Relaxed);
    std::thread::sleep(Duration::from_millis(60));
    let next = tokens(&manager, 2, BLOCKS);
    serve(&manager, &next);
    assert!(manager.wait_offloads(soon()));
    manager.clear(Tier::G1).unwrap();
    assert_eq!(serve(&manager, &next), BLOCKS as usize, "a ring of two slots carries them");
}

#[test]
fn blocks_need_memory_to_come_from() {
    let build = |device: u32| {
        let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
        builder.device(Blocks(device)).volume("memory:").build()
    };
    let error: BuildError = build(0).err().expect("nothing to come from");
    assert!(error.to_string().contains("needs device.capacity or host.capacity"), "{error}");
    drop(build(8).unwrap());
}
