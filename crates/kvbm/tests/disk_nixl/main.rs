//! The disk tier over NIXL's real back end POSIX.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod engine;
#[path = "../support/mod.rs"]
mod support;

use crate::support::{kept, models, serve, three_tiers_of, tokens};
use kvbm::config::{Config, DiskEngine, NixlFiles};
use std::time::{Duration, Instant};

const BLOCKS: u32 = 48;

fn through_nixl(config: &mut Config) {
    config.disk.engine = DiskEngine::Nixl;
    config.disk.threads = 4;
}

/// Blocks go to the disk through NIXL and come back from there, in the same life and after a
/// restart, also by io_uring.
#[test]
fn a_manager_keeps_its_blocks_through_nixl() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        let open = |engine: DiskEngine| {
            three_tiers_of(model.clone(), [128, 128, 256], dir.path(), |config| {
                through_nixl(config);
                config.disk.engine = engine;
            })
        };
        let manager = open(DiskEngine::Nixl);
        let sequence = tokens(&manager, 1, BLOCKS);
        assert_eq!(serve(&manager, &sequence), 0);
        manager.wait_offloads(Instant::now() + Duration::from_secs(60));
        let disk = manager.status().disks.remove(0).engine;
        assert_eq!(disk.engine.kind.name(), "nixl");
        assert!(disk.engine.reason.starts_with("NIXL's back end POSIX of /"), "{}", disk.engine.reason);
        assert!(disk.engine.registered_bytes > 0 && disk.engine.unregistered.is_none(), "{:?}", disk.engine);
        assert!(disk.present_blocks as usize >= kept(&model, BLOCKS as usize), "{disk:?}");
        for tier in [kvbm::Tier::G1, kvbm::Tier::G2] {
            manager.clear(tier).unwrap();
        }
        assert_eq!(serve(&manager, &sequence), BLOCKS as usize, "every byte is compared");
        drop(manager);
        for engine in [DiskEngine::Nixl, DiskEngine::Auto] {
            let manager = open(engine);
            assert_eq!(serve(&manager, &tokens(&manager, 1, BLOCKS)), BLOCKS as usize, "{engine:?}");
        }
    }
}

#[test]
fn a_back_end_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for (backend, name) in [(NixlFiles::GdsMt, "GDS_MT")] {
        let built = kvbm::KvBlockManager::<kvbm::Owned>::builder()
            .model(support::model())
            .namespace(support::namespace())
            .device(kvbm::config::Blocks(8))
            .host(kvbm::config::Blocks(8))
            .disk(dir.path(), kvbm::config::Blocks(8))
            .configure(|config| {
                through_nixl(config);
                config.disk.nixl_backend = backend;
            })
            .build();
        // With a GPU and GPUDirect Storage it is there.
        let Err(error) = built.map(drop) else { continue };
        let error = error.to_string();
        for part in
            [&format!("disk.nixl_backend is \"{name}\""), "GPUDirect Storage", "disk.engine to \"auto\""]
        {
            assert!(error.contains(part), "{error}");
        }
    }
}
