//! A worker at a socket, and the engine on its side of the line.
#![cfg(feature = "worker")]

use crate::support::{expected, host, model, namespace, soon, unlimited};
use kvbm::config::{Blocks, Config};
use kvbm::device::Event;
use kvbm::storage::BoundLayout;
use kvbm::{BlockId, BuildError, Engine, G1Memory, KvBlockManager, Owned, Rank, Tier, WorkerServer};
use std::path::Path;
use std::time::{Duration, Instant};

const G1: u32 = 8;

fn config(folder: &Path) -> Config {
    let mut config = Config { model: model(), ..Config::default() };
    unlimited(&mut config);
    config.namespace.model = "test-model".into();
    config.host.capacity = Blocks(16).into();
    config.parallelism.workers = [folder.join("rank-0.sock")].into_iter().collect();
    config
}

fn tensors() -> BoundLayout {
    let model = model();
    host::host_tensors(host::contiguous(&model, model.num_kv_heads, G1))
}

/// Ends a server with the test, however that ends.
struct Stop<F: Fn()>(F);

impl<F: Fn()> Drop for Stop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

fn leader(folder: &Path, g1: u32) -> Result<KvBlockManager<Engine>, BuildError> {
    let given = config(folder);
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .engine_blocks(g1)
        .configure(|own| {
            let namespace = own.namespace.clone();
            *own = given;
            own.namespace = namespace;
        })
        .build()
}

/// Each leader counts its device events from 1. Mutation that makes it fail: the server keeps the
/// events of the leader before.
#[test]
fn an_event_of_the_leader_before_opens_no_gate_of_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    let (config, tensors) = (config(folder.path()), tensors());
    let memory = G1Memory::EngineHost(tensors.clone());
    let socket = config.parallelism.workers.as_slice()[0].clone();
    let server = WorkerServer::bind(&config, Rank(0), &memory, &socket).unwrap();
    let ids = [BlockId(0), BlockId(1)];
    std::thread::scope(|scope| {
        scope.spawn(|| server.serve());
        let _stop = Stop(server.stopper());
        for life in 0..3 {
            let manager = leader(folder.path(), G1).unwrap();
            let sequence = manager.sequence(&(0..32).collect::<Vec<u32>>(), b"").unwrap();
            let fence = manager.fence_at(1).unwrap();
            assert_eq!(manager.offload(&ids, &sequence, 0, Some(fence)).unwrap().started, 2);
            assert!(!manager.wait_offloads(Instant::now() + Duration::from_millis(100)), "life {life}");
            assert_eq!(server.wait_idle(&ids, Instant::now()).unwrap_err().blocks, ids);
            // The engine's computation ends now.
            for (&id, &hash) in ids.iter().zip(sequence.hashes()) {
                let bytes = expected(hash, 0, tensors.bytes_per_block() as usize);
                // SAFETY: the gate is shut: no transfer touches the block.
                unsafe { tensors.write_block(id.0, &bytes) }.unwrap();
            }
            let (event, completer) = Event::completable();
            server.register_event(1, &event);
            completer.complete(Ok(()));
            assert!(manager.wait_offloads(soon()));
            assert_eq!(manager.status().tiers[Tier::G2.index()].inactive, 2);
            server.wait_idle(&ids, soon()).unwrap();
        }
    });
}

#[test]
fn a_leader_that_knows_other_blocks_of_the_engine_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let socket = config.parallelism.workers.as_slice()[0].clone();
    let server = WorkerServer::bind(&config, Rank(0), &G1Memory::EngineHost(tensors()), &socket).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.serve());
        let _stop = Stop(server.stopper());
        let error = leader(folder.path(), G1 + 1).err().unwrap();
        let differs = "blocks of G1 differs: the leader has 9, the worker has 8";
        assert!(error.to_string().contains(differs), "{error}");
    });
    let none = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace()).engine_blocks(4);
    let error = none.host(Blocks(8)).build().err().unwrap();
    assert!(error.to_string().contains("parallelism.workers"), "{error}");
}
