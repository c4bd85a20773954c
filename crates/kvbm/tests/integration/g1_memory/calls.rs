//! Calls that both types of manager have, each in its own form.

use super::{G1, KINDS, Kind, Manager, fill};
use crate::support::{compute, holds, soon};
use kvbm::config::{Config, VolumeOffload};
use kvbm::device::Event;
use kvbm::pool::BatchPosition;
use kvbm::{
    BlockId, BlockMetadata, Cached, Engine, EngineError, FailureKind, G2, GroupId, KvBlockManager,
    OffloadError, OffloadOptions, ParkError, Parked, Path, Tier, TokenSequence,
};
use std::time::Duration;

/// Nothing goes below G2 unless the caller says so.
fn by_hand(config: &mut Config) {
    config.offload.g2_g3.write_through = false;
    config.volumes.offload = VolumeOffload::Explicit;
}

fn engine_of(manager: Manager) -> KvBlockManager<Engine> {
    let Manager::Engine(manager) = manager else { panic!("an engine's manager") };
    manager
}

fn position<G>(manager: &KvBlockManager<G>) -> BatchPosition {
    BatchPosition { namespace: manager.namespace().tag().into(), group: GroupId(0), position: 1 }
}

impl Manager {
    /// Two blocks that a request has computed and registered nowhere, moved out of G1.
    fn park(&self, contents: &TokenSequence) -> Parked {
        match self {
            Self::Owned(manager) => {
                let one = manager.sequence(&[5; 16], b"").unwrap();
                let (_done, private) = manager.commit(manager.allocate(3).unwrap(), &one, 0).unwrap();
                fill(manager, private.block_ids(), contents);
                manager.park(private).unwrap()
            }
            Self::Engine(manager) => {
                let ids = [4, 9].map(BlockId);
                fill(manager, &ids, contents);
                let parked = manager.park(&ids, position(manager), None).unwrap();
                assert_eq!(manager.busy(&ids).unwrap(), [], "they may be reused");
                fill(manager, &ids, &self.sequence(9));
                parked
            }
        }
    }

    /// Brings them back; whether they hold what they held.
    fn resume(&self, parked: Parked, contents: &TokenSequence) -> bool {
        let is_right = |ids: &[BlockId]| {
            let mut blocks = ids.iter().zip(contents.hashes());
            blocks.all(|(&id, &hash)| on_either!(self, manager => holds(manager, id, hash)))
        };
        match self {
            Self::Owned(manager) => is_right(manager.resume(parked).unwrap().block_ids()),
            Self::Engine(manager) => {
                let ids = [30, 2].map(BlockId);
                manager.before_reuse(&ids, soon()).unwrap();
                manager.resume(parked, &ids, None).unwrap();
                is_right(&ids)
            }
        }
    }

    /// What G2 has of a sequence, pinned.
    fn in_host(&self, tokens: &TokenSequence) -> Cached<G2> {
        on_either!(self, manager => {
            if let Self::Owned(_) = self {
                manager.clear(Tier::G1).unwrap();
            }
            manager.match_prefix(tokens).into_parts().g2
        })
    }

    fn offload(&self, blocks: &Cached<G2>, to: Tier) -> Result<(), OffloadError> {
        match self {
            Self::Owned(manager) => manager.offload(blocks, to),
            Self::Engine(manager) => manager.offload_down(blocks, to),
        }
    }

    /// Computes a sequence whose blocks have a priority, and copies it to G2.
    fn put_with(&self, tokens: &TokenSequence, metadata: BlockMetadata) {
        match self {
            Self::Owned(manager) => {
                let fresh = manager.allocate(tokens.num_blocks()).unwrap();
                let (done, _) = manager.commit(fresh, tokens, 0).unwrap();
                drop(manager.register_with(done, metadata).unwrap());
            }
            Self::Engine(manager) => {
                let ids: Vec<_> = (0..tokens.num_blocks() as u32).map(BlockId).collect();
                let options = OffloadOptions::default().metadata(metadata);
                assert_eq!(manager.offload_with(&ids, tokens, 0, options).unwrap().started, ids.len());
            }
        }
        assert!(on_either!(self, manager => manager.wait_offloads(soon())));
    }
}

#[test]
fn private_blocks_are_parked_and_come_back() {
    for kind in KINDS {
        let disk = tempfile::tempdir().unwrap();
        let manager = Manager::new(kind, disk.path(), None);
        let contents = manager.sequence(77);
        let parked = manager.park(&contents);
        assert_eq!((parked.len(), parked.origin().position), (2, 1), "{kind:?}");
        let held = || on_either!(&manager, manager => manager.status().tiers[1].held);
        assert_eq!((held(), manager.moved(Path::G1_G2)), (2, 2), "{kind:?}");
        let found = on_either!(&manager, manager => manager.match_prefix(&contents).len());
        assert_eq!(found, 0, "{kind:?}: nobody finds them");
        assert!(manager.resume(parked, &contents), "{kind:?}");
        assert_eq!(held(), 0, "{kind:?}");
        manager.end();
    }
}

#[test]
fn what_an_engine_cannot_park_or_resume_is_what_it_was() {
    for kind in [Kind::EngineDevice, Kind::EngineHost] {
        let disks = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [ours, theirs] = [0, 1].map(|at| Manager::new(kind, disks[at].path(), None));
        let contents = ours.sequence(77);
        let foreign = theirs.park(&contents);
        let manager = engine_of(ours);
        let at = position(&manager);
        let park = |ids: &[u32]| {
            let ids: Vec<_> = ids.iter().map(|&id| BlockId(id)).collect();
            manager.park(&ids, at, None).unwrap_err()
        };
        assert!(matches!(park(&[0, G1]), EngineError::NoSuchBlock(error) if error.block == BlockId(G1)));
        assert!(matches!(park(&[3, 3]), EngineError::NamedTwice(BlockId(3))));
        let ids = [4, 9].map(BlockId);
        let rejected = manager.resume(foreign, &ids, None).unwrap_err();
        assert!(matches!(rejected.error, EngineError::Private(ParkError::Foreign)), "{rejected}");
        fill(&manager, &ids, &contents);
        let parked = manager.park(&ids, at, None).unwrap();
        let rejected = manager.resume(parked, &ids[..1], None).unwrap_err();
        assert!(matches!(rejected.error, EngineError::Count { ids: 1, blocks: 2 }), "{rejected}");
        manager.resume(rejected.blocks.unwrap(), &ids, None).unwrap();
        assert!(holds(&manager, ids[1], contents.hashes()[1]), "{kind:?}");
        assert!(manager.shutdown(Duration::from_secs(30)).is_complete());
        let error = manager.park(&ids, at, None).unwrap_err();
        assert!(matches!(error, EngineError::Private(ParkError::ShuttingDown)), "{error}");
    }
}

#[test]
fn blocks_that_are_reused_while_they_are_parked_or_resumed_do_not_count() {
    for kind in [Kind::EngineDevice, Kind::EngineHost] {
        let disk = tempfile::tempdir().unwrap();
        let manager = Manager::new(kind, disk.path(), None);
        let contents = manager.sequence(77);
        let manager = engine_of(manager);
        let ids = [4, 9].map(BlockId);
        // Its copies wait for the event, until the blocks were given to something else.
        let reused_meanwhile = |call: &(dyn Fn(kvbm::Fence) -> EngineError + Sync)| {
            let (event, completer) = Event::completable();
            let fence = manager.fence(&[event]).unwrap();
            let error = std::thread::scope(|scope| {
                let call = scope.spawn(|| call(fence));
                while manager.busy(&ids).unwrap().is_empty() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                manager.released(&ids[..1]).unwrap();
                completer.complete(Ok(()));
                call.join().unwrap()
            });
            let EngineError::Private(ParkError::Failed(failures)) = &error else { panic!("{error}") };
            assert_eq!(failures[0].failure.kind, FailureKind::Cancelled, "{kind:?}: {error}");
            assert!(error.to_string().contains("engine block 4 was"), "{kind:?}: {error}");
        };
        reused_meanwhile(&|fence| manager.park(&ids, position(&manager), Some(fence)).unwrap_err());
        assert_eq!(manager.status().tiers[1].held, 0, "{kind:?}");
        fill(&manager, &ids, &contents);
        let parked = std::sync::Mutex::new(Some(manager.park(&ids, position(&manager), None).unwrap()));
        reused_meanwhile(&|fence| {
            let taken = parked.lock().unwrap().take().unwrap();
            let rejected = manager.resume(taken, &ids, Some(fence)).unwrap_err();
            *parked.lock().unwrap() = rejected.blocks;
            rejected.error
        });
        // They are still parked.
        compute(&manager, ids[0], contents.hashes()[3]);
        let parked = parked.into_inner().unwrap().unwrap();
        manager.resume(parked, &ids, None).unwrap();
        assert!(ids.iter().zip(contents.hashes()).all(|(&id, &hash)| holds(&manager, id, hash)), "{kind:?}");
    }
}

#[test]
fn blocks_go_to_the_tier_that_the_caller_names() {
    for kind in KINDS {
        let (disk, volume) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let manager = Manager::with(kind, disk.path(), Some(volume.path()), by_hand);
        let tokens = manager.sequence(1);
        manager.put(&tokens, false);
        let moved = || [Path::G1_G2, Path::G2_G3, Path::G2_G4].map(|path| manager.moved(path));
        assert_eq!(moved(), [6, 0, 0], "{kind:?}");
        let host = manager.in_host(&tokens);
        let wrong = OffloadError::NoPath { from: Tier::G2, to: Tier::G1 };
        assert_eq!(manager.offload(&host, Tier::G1), Err(wrong), "{kind:?}");
        for (to, then) in [(Tier::G3, [6, 6, 0]), (Tier::G4, [6, 6, 6])] {
            manager.offload(&host, to).unwrap();
            assert!(on_either!(&manager, manager => manager.wait_offloads(soon())));
            assert_eq!(moved(), then, "{kind:?}");
        }
        let another = Manager::new(kind, tempfile::tempdir().unwrap().path(), None);
        assert_eq!(another.offload(&host, Tier::G3), Err(OffloadError::Foreign), "{kind:?}");
        drop(host);
        manager.end();
    }
}

#[test]
fn a_priority_stays_with_a_block() {
    for kind in KINDS {
        let disk = tempfile::tempdir().unwrap();
        let manager = Manager::new(kind, disk.path(), None);
        let (dear, usual) = (manager.sequence(1), manager.sequence(2));
        manager.put_with(&dear, BlockMetadata { priority: 7 });
        manager.put_with(&usual, BlockMetadata::default());
        // Offered again, by somebody who does not know it.
        if let Manager::Engine(engine) = &manager {
            engine.offload(&(0..6).map(BlockId).collect::<Vec<_>>(), &dear, 0, None).unwrap();
        }
        let of = |tokens: &TokenSequence| {
            let host = manager.in_host(tokens);
            (0..host.len()).map(|at| host.metadata(at).unwrap().priority).collect::<Vec<_>>()
        };
        assert_eq!((of(&dear), of(&usual)), (vec![7; 6], vec![0; 6]), "{kind:?}");
    }
}
