//! The same scenarios over every kind of G1: kvbm's, the engine's on a device, the engine's in host
//! memory.
#![cfg(feature = "worker")]

use crate::support::{compute, holds, host, model, namespace, slot_file, soon, unlimited};
use kvbm::config::{Blocks, Config};
use kvbm::device::{Device, EmulatedConfig, EmulatedDevice, Event, HostBuffer};
use kvbm::layout::BlockLayout;
use kvbm::storage::{BoundLayout, DeviceStorage, HostStorage, Owner, RegionBinding, Storage};
use kvbm::{
    BlockId, Comparison, Elements, Engine, FailureKind, Fence, FinishedLoad, KvBlockManager, Owned, Path,
    Tier, TokenSequence, WorkerError,
};
use std::path::Path as FilePath;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

const G1: u32 = 32;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Owned,
    EngineDevice,
    EngineHost,
}

const KINDS: [Kind; 3] = [Kind::Owned, Kind::EngineDevice, Kind::EngineHost];

enum Manager {
    Owned(KvBlockManager<Owned>),
    Engine(KvBlockManager<Engine>),
}

/// Calls that both types of manager have.
macro_rules! on_either {
    ($manager:expr, $either:ident => $call:expr) => {
        match $manager {
            Manager::Owned($either) => $call,
            Manager::Engine($either) => $call,
        }
    };
}

mod calls;

fn engine_layout() -> Arc<dyn BlockLayout> {
    host::layer_separate(&model(), G1)
}

fn host_tensors() -> BoundLayout {
    let layout = engine_layout();
    host::host_tensors(layout)
}

fn device_tensors() -> (Arc<dyn Device>, BoundLayout) {
    let layout = engine_layout();
    let device: Arc<dyn Device> = Arc::new(EmulatedDevice::new(EmulatedConfig::default()).unwrap());
    let mut bindings = Vec::new();
    for region in layout.regions() {
        let memory = device.allocate(region.bytes, 4096).unwrap();
        let owner: Owner = Arc::new(memory.clone());
        // SAFETY: the owner keeps the memory.
        let storage =
            unsafe { DeviceStorage::from_external(memory.address(), memory.len(), &*device, owner) };
        bindings.push(RegionBinding::new(Arc::new(storage.unwrap())));
    }
    (device, BoundLayout::bind(layout, bindings).unwrap())
}

impl Manager {
    fn new(kind: Kind, disk: &FilePath, volume: Option<&FilePath>) -> Self {
        Self::with(kind, disk, volume, |_| ())
    }

    fn with(
        kind: Kind,
        disk: &FilePath,
        volume: Option<&FilePath>,
        configure: impl FnOnce(&mut Config),
    ) -> Self {
        let mut builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
        builder = builder.host(Blocks(64)).disk(disk, Blocks(64)).configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            config.volumes.queue_share = 1.0;
            configure(config);
        });
        if let Some(volume) = volume {
            builder = builder.volume(format!("dir://{}", volume.display()));
        }
        match kind {
            Kind::Owned => Self::Owned(builder.device(Blocks(G1)).build().unwrap()),
            Kind::EngineDevice => {
                Self::Engine(builder.engine_device(vec![device_tensors()]).build().unwrap())
            }
            Kind::EngineHost => Self::Engine(builder.engine_host(vec![host_tensors()]).build().unwrap()),
        }
    }

    /// A sequence of six blocks.
    fn sequence(&self, start: u32) -> TokenSequence {
        let prompt: Vec<u32> = (0..16 * 6).map(|token| token + 1_000_000 * start).collect();
        on_either!(self, manager => manager.sequence(&prompt, b"").unwrap())
    }

    /// Computes a sequence and copies it down. With `late`, it is computed behind a fence.
    fn put(&self, tokens: &TokenSequence, late: bool) {
        let (event, completer) = Event::completable();
        match self {
            Self::Owned(manager) => {
                if late {
                    manager.fence(&[event]).unwrap();
                }
                let fresh = manager.allocate(tokens.num_blocks()).unwrap();
                let ids = fresh.block_ids().to_vec();
                if !late {
                    fill(manager, &ids, tokens);
                }
                let (done, _) = manager.commit(fresh, tokens, 0).unwrap();
                let held = manager.register(done).unwrap();
                if late {
                    fill(manager, &ids, tokens);
                }
                completer.complete(Ok(()));
                drop(held);
            }
            Self::Engine(manager) => {
                let ids: Vec<_> = (0..tokens.num_blocks() as u32).map(BlockId).collect();
                manager.before_reuse(&ids, soon()).unwrap();
                if !late {
                    fill(manager, &ids, tokens);
                }
                let after = late.then(|| manager.fence(&[event]).unwrap());
                assert_eq!(manager.offload(&ids, tokens, 0, after).unwrap().started, ids.len());
                if late {
                    fill(manager, &ids, tokens);
                }
                completer.complete(Ok(()));
            }
        }
        assert!(on_either!(self, manager => manager.wait_offloads(soon())));
    }

    /// Blocks of a sequence that come back to G1, each with its bytes, and why others do not.
    fn take(&self, tokens: &TokenSequence) -> (usize, Option<String>) {
        let taken = self.bring_back(tokens);
        // What came from below G2 is on its way there.
        assert!(on_either!(self, manager => manager.wait_offloads(soon())));
        taken
    }

    fn bring_back(&self, tokens: &TokenSequence) -> (usize, Option<String>) {
        match self {
            Self::Owned(manager) => {
                manager.clear(Tier::G1).unwrap();
                let (cached, error) = match manager.onboard(manager.match_prefix(tokens)).wait() {
                    Ok(cached) => (cached, None),
                    Err(error) => {
                        let text = error.to_string();
                        (error.arrived, Some(text))
                    }
                };
                let hashes = cached.block_ids().iter().zip(tokens.hashes());
                assert!(hashes.into_iter().all(|(&block, &hash)| holds(manager, block, hash)));
                (cached.len(), error)
            }
            Self::Engine(manager) => {
                let prefix = manager.match_prefix(tokens);
                let ids: Vec<_> = (0..prefix.len() as u32).map(|at| BlockId(G1 - 1 - at)).collect();
                manager.before_reuse(&ids, soon()).unwrap();
                let (arrived, error) = match manager.onboard(prefix, &ids, None).unwrap().wait() {
                    Ok(arrived) => (arrived, None),
                    Err(error) => (error.arrived, Some(error.to_string())),
                };
                let mut blocks = ids[..arrived].iter().zip(tokens.hashes());
                assert!(blocks.all(|(&block, &hash)| holds(manager, block, hash)));
                (arrived, error)
            }
        }
    }

    fn clear(&self, tier: Tier) {
        on_either!(self, manager => manager.clear(tier).unwrap());
    }

    /// Blocks that took a path.
    fn moved(&self, path: Path) -> u64 {
        on_either!(self, manager => manager.metrics().path(path).blocks.get())
    }

    fn end(self) {
        let report = on_either!(&self, manager => manager.shutdown(Duration::from_secs(30)));
        assert!(report.is_complete(), "{report:?}");
    }
}

fn fill<G>(manager: &KvBlockManager<G>, ids: &[BlockId], tokens: &TokenSequence) {
    for (&id, &hash) in ids.iter().zip(tokens.hashes()) {
        compute(manager, id, hash);
    }
}

#[test]
fn blocks_take_every_path_and_come_back_from_every_tier() {
    for kind in KINDS {
        let (disk, volume) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let manager = Manager::new(kind, disk.path(), Some(volume.path()));
        let tokens = manager.sequence(1);
        manager.put(&tokens, false);
        for (path, emptied) in
            [(Path::G2_G1, None), (Path::G3_G1, Some(Tier::G2)), (Path::G4_G1, Some(Tier::G3))]
        {
            if let Some(tier) = emptied {
                manager.clear(Tier::G2);
                manager.clear(tier);
            }
            assert_eq!(manager.take(&tokens), (6, None), "{kind:?} {path}");
            assert_eq!(manager.moved(path), 6, "{kind:?} {path}");
        }
        manager.end();
    }
}

#[test]
fn what_is_computed_behind_a_fence_is_read_after_it() {
    for kind in KINDS {
        let disk = tempfile::tempdir().unwrap();
        let manager = Manager::new(kind, disk.path(), None);
        let tokens = manager.sequence(1);
        manager.put(&tokens, true);
        assert_eq!(manager.take(&tokens), (6, None), "{kind:?}");
    }
}

#[test]
fn a_block_that_is_reused_leaves_its_copy_as_it_was() {
    for kind in KINDS {
        let disk = tempfile::tempdir().unwrap();
        let manager = Manager::new(kind, disk.path(), None);
        let (first, second) = (manager.sequence(1), manager.sequence(2));
        manager.put(&first, false);
        manager.put(&second, false);
        for tokens in [&first, &second] {
            assert_eq!(manager.take(tokens), (6, None), "{kind:?}");
        }
    }
}

#[test]
fn a_damaged_block_is_named_and_those_before_it_arrive() {
    for kind in KINDS {
        let disk = tempfile::tempdir().unwrap();
        let manager = Manager::new(kind, disk.path(), None);
        let tokens = manager.sequence(1);
        manager.put(&tokens, false);
        on_either!(&manager, manager => manager.flush(Duration::from_secs(30)).unwrap());
        manager.clear(Tier::G2);
        let slots = slot_file(disk.path());
        let mut bytes = std::fs::read(&slots).unwrap();
        let slot_bytes = 8 << 10;
        let holds = |slot: &[u8]| slot.iter().any(|byte| *byte != 0);
        assert_eq!(bytes.chunks(slot_bytes).filter(|slot| holds(slot)).count(), 6, "each block in one slot");
        bytes[3 * slot_bytes + 7] ^= 1;
        std::fs::write(&slots, bytes).unwrap();
        let (arrived, error) = manager.take(&tokens);
        let error = error.unwrap_or_default();
        assert!(arrived < 6 && error.contains("g3"), "{kind:?}: {arrived} {error}");
        assert_eq!(manager.take(&tokens), (arrived, None), "{kind:?}: found once, served never");
    }
}

#[test]
fn a_restart_finds_on_disk_what_was_there() {
    for kind in KINDS {
        let disk = tempfile::tempdir().unwrap();
        let manager = Manager::new(kind, disk.path(), None);
        let tokens = manager.sequence(1);
        manager.put(&tokens, false);
        manager.end();
        // A cache outlives the kind of engine too.
        for reader in KINDS {
            let manager = Manager::new(reader, disk.path(), None);
            assert_eq!(manager.take(&tokens), (6, None), "{kind:?} to {reader:?}");
            assert_eq!(manager.moved(Path::G3_G1), 6);
            manager.end();
        }
    }
}

#[test]
fn host_memory_needs_no_device_and_device_memory_is_not_host_memory() {
    let builder = || KvBlockManager::<Owned>::builder().model(model()).namespace(namespace()).host(Blocks(8));
    let manager = builder().engine_host(vec![host_tensors()]).build().unwrap();
    assert!(manager.workers().iter().all(|worker| worker.device().is_none()));
    let (_device, bound) = device_tensors();
    let Err(kvbm::BuildError::Worker(error)) = builder().engine_host(vec![bound]).build() else {
        panic!("memory of a device was taken for host memory")
    };
    assert!(
        matches!(error, WorkerError::NotHostMemory { .. }) && error.to_string().contains("device memory")
    );
}

#[test]
fn the_owner_of_host_tensors_lives_as_long_as_the_manager() {
    let tensor = Arc::new(HostBuffer::zeroed(1 << 20));
    let weak = Arc::downgrade(&tensor);
    let layout = engine_layout();
    let mut at = 0;
    let mut bind = |bytes: u64| {
        let start = NonNull::new(tensor.as_ptr().wrapping_add(at)).unwrap();
        at += bytes as usize;
        assert!(at <= tensor.len() as usize);
        let owner: Owner = Arc::clone(&tensor) as Owner;
        // SAFETY: a part of the buffer, which is the owner; nobody else touches it.
        let storage = unsafe { HostStorage::from_external(start, bytes, owner) }.unwrap();
        assert_eq!(storage.len(), bytes);
        RegionBinding::new(Arc::new(storage))
    };
    let bindings = layout.regions().iter().map(|region| bind(region.bytes)).collect();
    let bound = BoundLayout::bind(layout, bindings).unwrap();
    drop(tensor);
    let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
    let manager = builder.engine_host(vec![bound]).host(Blocks(8)).build().unwrap();
    assert!(weak.upgrade().is_some());
    drop(manager);
    assert!(weak.upgrade().is_none(), "nothing keeps the tensors once the manager has ended");
}

const EXACT: Comparison = Comparison { elements: Elements::Bytes, tolerance_ppm: 0 };

/// Compares engine blocks with what is stored of a sequence, from its first block on.
fn audit(
    manager: &KvBlockManager<Engine>,
    tokens: &TokenSequence,
    ids: &[BlockId],
    after: Option<Fence>,
) -> FinishedLoad {
    manager.tickets().look_up("audit", tokens, 0).unwrap();
    manager.tickets().audit("audit", ids, after, EXACT).unwrap();
    let until = soon();
    loop {
        if let Some(over) = manager.tickets().finished().pop() {
            return over;
        }
        assert!(Instant::now() < until, "an audit ends");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_audit_finds_wrong_bytes_on_every_tier_and_names_their_history() {
    for (kind, tier) in [Kind::EngineDevice, Kind::EngineHost].into_iter().zip([Tier::G2, Tier::G3]) {
        let disk = tempfile::tempdir().unwrap();
        let Manager::Engine(manager) = Manager::new(kind, disk.path(), None) else { unreachable!() };
        let prompt: Vec<u32> = (0..16 * 6).collect();
        let tokens = manager.sequence(&prompt, b"").unwrap();
        let ids: Vec<_> = (0..6).map(BlockId).collect();
        fill(&manager, &ids, &tokens);
        // A defect somewhere before kvbm: intact checksums over wrong bytes.
        compute(&manager, BlockId(3), tokens.hashes()[5]);
        manager.offload(&ids, &tokens, 0, None).unwrap();
        assert!(manager.wait_offloads(soon()));
        if tier == Tier::G3 {
            manager.clear(Tier::G2).unwrap();
        }
        let again: Vec<_> = (10..16).map(BlockId).collect();
        manager.before_reuse(&again, soon()).unwrap();
        // Computed again, behind a fence.
        let (event, completer) = Event::completable();
        let fence = manager.fence(&[event]).unwrap();
        let over = std::thread::scope(|scope| {
            let audit = scope.spawn(|| audit(&manager, &tokens, &again, Some(fence)));
            fill(&manager, &again, &tokens);
            completer.complete(Ok(()));
            audit.join().unwrap()
        });
        assert_eq!((over.arrived, over.wanted, over.failures.len()), (3, 6, 1), "{kind:?}: {over:?}");
        let failure = &over.failures[0];
        assert_eq!((failure.failure.kind, failure.identity.hash), (FailureKind::Differs, tokens.hashes()[3]));
        let text = failure.to_string();
        for part in ["the first at byte 0", "s ago g1_g2 slot 3 to", "g2_g3", "quarantined"] {
            assert!(text.contains(part), "{text}");
        }
        // The engine's blocks are as they were, and the wrong copies are nowhere.
        assert!(again.iter().zip(tokens.hashes()).all(|(&id, &hash)| holds(&manager, id, hash)));
        assert_eq!(manager.match_prefix(&tokens).len(), 3, "{kind:?}");
        let quarantined: Vec<u32> = manager.status().tiers.iter().map(|tier| tier.quarantined).collect();
        assert_eq!(quarantined[1..3], if tier == Tier::G2 { [1, 1] } else { [0, 1] }, "{kind:?}");
        assert_eq!(manager.metrics().audited.get(), 6);
        assert_eq!(manager.metrics().path(Path::new(tier, Tier::G1)).failures(FailureKind::Differs).get(), 1);
        // What was computed again is stored in their place, and is right.
        manager.offload(&again, &tokens, 0, None).unwrap();
        assert!(manager.wait_offloads(soon()));
        let over = audit(&manager, &tokens, &again, None);
        assert_eq!((over.arrived, over.wanted), (6, 6), "{over:?}");
        assert!(manager.busy(&again).unwrap().is_empty());
    }
}

#[test]
fn a_block_that_is_reused_during_its_audit_condemns_nothing() {
    for kind in [Kind::EngineDevice, Kind::EngineHost] {
        let disk = tempfile::tempdir().unwrap();
        let manager = Manager::new(kind, disk.path(), None);
        let tokens = manager.sequence(1);
        manager.put(&tokens, false);
        let Manager::Engine(manager) = manager else { unreachable!() };
        let ids: Vec<_> = (0..6).map(BlockId).collect();
        let (event, completer) = Event::completable();
        let fence = manager.fence(&[event]).unwrap();
        manager.tickets().look_up("audit", &tokens, 0).unwrap();
        manager.tickets().audit("audit", &ids, Some(fence), EXACT).unwrap();
        assert_eq!(manager.busy(&ids).unwrap(), ids);
        manager.released(&ids[2..3]).unwrap();
        compute(&manager, BlockId(2), tokens.hashes()[5]);
        completer.complete(Ok(()));
        let until = soon();
        let over = loop {
            if let Some(over) = manager.tickets().finished().pop() {
                break over;
            }
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        };
        let kinds: Vec<_> = over.failures.iter().map(|failure| failure.failure.kind).collect();
        assert_eq!((over.arrived, kinds), (2, vec![FailureKind::Cancelled]), "{kind:?}");
        assert_eq!(manager.match_prefix(&tokens).len(), 6, "{kind:?}: all are there");
    }
}
