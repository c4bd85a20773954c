//! A disk engine alone, over agents of NIXL.

use kvbm::config::Config;
use kvbm::nixl_slot_io;
use kvbm::plan::{BlockId, BlockIdentity, GroupId, NamespaceId, Rank, SequenceHash};
use kvbm_disk::{
    DiskConfig, DiskEngine, EngineMode, IoBatch, IoFragments, IoMemory, OpError, OpOutcome, OwnedBuffer,
    SlotIo, SlotIoRequest,
};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, mpsc};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// What `disk.engine = "nixl"` uses.
fn agents() -> Arc<dyn SlotIo> {
    nixl_slot_io(&Config::default(), Rank(0)).unwrap()
}

fn config(dir: &Path, slots: u32, block_bytes: u64) -> DiskConfig {
    let mut config = DiskConfig::new(dir, slots, block_bytes, [4; 16]);
    (config.engine, config.threads) = (EngineMode::Custom, 4);
    config.slot_io = Some(agents());
    config
}

fn identity(number: u32) -> BlockIdentity {
    let hash = SequenceHash::from_bytes(u128::from(number + 1).to_le_bytes());
    BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: number }
}

fn pattern(number: u32, len: usize) -> Vec<u8> {
    let word = |index: u64| {
        ((u64::from(number) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            ^ index.wrapping_mul(0xD6E8_FEB8_6659_FD93))
        .to_le_bytes()
    };
    (0..len.div_ceil(8) as u64).flat_map(word).take(len).collect()
}

/// A block in `count` pieces of `len` bytes, each with a gap behind it.
struct Pieces {
    memory: Arc<OwnedBuffer>,
    count: usize,
    len: usize,
    gap: usize,
}

impl Pieces {
    fn new((count, len, gap): (usize, usize, usize), bytes: &[u8]) -> Self {
        let mut memory = OwnedBuffer::new(count * (len + gap));
        for (piece, bytes) in bytes.chunks(len).enumerate() {
            memory.as_mut_slice()[piece * (len + gap)..][..bytes.len()].copy_from_slice(bytes);
        }
        Self { memory: Arc::new(memory), count, len, gap }
    }

    fn fragments(&self) -> IoFragments {
        let start = self.memory.as_slice().as_ptr().cast_mut();
        let runs = (0..self.count).map(|piece| (start.wrapping_add(piece * (self.len + self.gap)), self.len));
        // SAFETY: the batch holds the memory, which is not touched before the batch completes.
        unsafe { IoFragments::from_raw(runs) }.unwrap()
    }

    fn gather(&self) -> Vec<u8> {
        let piece = |piece: usize| &self.memory.as_slice()[piece * (self.len + self.gap)..][..self.len];
        (0..self.count).flat_map(|number| piece(number).to_vec()).collect()
    }

    fn known(&self) -> IoMemory {
        let start = NonNull::from(self.memory.as_slice()).cast();
        // SAFETY: the memory stays allocated as long as its owner.
        unsafe { IoMemory::new(start, self.memory.as_slice().len(), Arc::clone(&self.memory) as _) }
    }
}

/// Writes or reads blocks in one batch: slot, and memory.
fn run(engine: &DiskEngine, write: bool, blocks: &[(u32, &Pieces)]) -> Vec<OpOutcome> {
    let (done, outcomes) = mpsc::channel();
    let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
    for (slot, pieces) in blocks {
        batch.guard(Arc::clone(&pieces.memory) as _);
        let (slot, identity, fragments) = (BlockId(*slot), identity(*slot), pieces.fragments());
        if write {
            batch.write(slot, identity, fragments)
        } else {
            batch.read(slot, identity, fragments)
        };
    }
    engine.submit(batch).unwrap();
    outcomes.recv_timeout(PATIENCE).unwrap()
}

#[test]
fn fragments_of_any_kind_come_back_also_after_a_restart() {
    // Many pieces, more than one request takes; pieces that direct I/O does not take; one piece.
    for (count, len, gap) in [(1100, 4096, 4096), (1100, 100, 3), (1, 1 << 20, 0), (7, 512, 512)] {
        let dir = tempfile::tempdir().unwrap();
        let bytes = count * len;
        let opened = |straight: u64| {
            let mut config = config(dir.path(), 12, bytes as u64);
            config.straight_bytes = straight;
            DiskEngine::open(config).unwrap()
        };
        let (engine, _) = opened(0);
        let sources: Vec<_> =
            (0..12).map(|slot| Pieces::new((count, len, gap), &pattern(slot, bytes))).collect();
        sources.iter().skip(6).for_each(|pieces| engine.register_memory(pieces.known()));
        let blocks: Vec<_> = (0..).zip(&sources).collect();
        assert!(run(&engine, true, &blocks).iter().all(Result::is_ok));
        assert!(engine.stats().bounced >= 6, "memory that is not registered");
        assert!(engine.shutdown(PATIENCE));
        drop(engine);
        for straight in [0, 1 << 30] {
            let (engine, recovered) = opened(straight);
            assert!(recovered.clean && recovered.blocks.len() == 12);
            let targets: Vec<_> = (0..12).map(|_| Pieces::new((count, len, 2 * gap), &[])).collect();
            targets.iter().skip(6).for_each(|pieces| engine.register_memory(pieces.known()));
            let blocks: Vec<_> = (0..).zip(&targets).collect();
            let outcomes = run(&engine, false, &blocks);
            assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
            for (slot, target) in blocks {
                assert!(target.gather() == pattern(slot, bytes), "block {slot} of {count} pieces");
            }
        }
    }
}

#[test]
fn many_blocks_are_written_and_read_at_the_same_time() {
    const BYTES: usize = 64 << 10;
    let dir = tempfile::tempdir().unwrap();
    let (engine, _) = DiskEngine::open(config(dir.path(), 256, BYTES as u64)).unwrap();
    let sources: Vec<_> = (0..256).map(|slot| Pieces::new((1, BYTES, 0), &pattern(slot, BYTES))).collect();
    let blocks: Vec<_> = (0..).zip(&sources).collect();
    assert!(run(&engine, true, &blocks).iter().all(Result::is_ok));
    std::thread::scope(|scope| {
        for reader in 0..4_u32 {
            let engine = &engine;
            scope.spawn(move || {
                for round in 0..8 {
                    let slots = (0..32).map(|slot| (slot * 7 + reader * 61 + round * 13) % 256);
                    let targets: Vec<_> = slots.map(|slot| (slot, Pieces::new((1, BYTES, 0), &[]))).collect();
                    let blocks: Vec<_> = targets.iter().map(|(slot, pieces)| (*slot, pieces)).collect();
                    assert!(run(engine, false, &blocks).iter().all(Result::is_ok));
                    assert!(targets.iter().all(|(slot, target)| target.gather() == pattern(*slot, BYTES)));
                }
            });
        }
    });
    assert!(engine.flush(PATIENCE).unwrap().durable_blocks == 256);
}

/// Whatever NIXL makes of a read behind the end, the engine calls the file cut.
#[test]
fn a_slot_file_that_was_cut_and_bytes_that_changed_are_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (engine, _) = DiskEngine::open(config(dir.path(), 4, 8192)).unwrap();
    let pieces: Vec<_> = (0..4).map(|slot| Pieces::new((1, 8192, 0), &pattern(slot, 8192))).collect();
    let blocks: Vec<_> = (0..).zip(&pieces).collect();
    assert!(run(&engine, true, &blocks).iter().all(Result::is_ok));
    let slots = std::fs::OpenOptions::new().write(true).open(dir.path().join("slots.kvbm")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&slots, b"wrong", 8192 + 77).unwrap();
    slots.set_len(3 * 8192 + 4096).unwrap();
    let outcomes = run(&engine, false, &blocks);
    assert!(outcomes[0].is_ok() && outcomes[2].is_ok(), "{outcomes:?}");
    assert!(matches!(outcomes[1], Err(OpError::Corrupt { .. })), "{outcomes:?}");
    assert!(matches!(outcomes[3], Err(OpError::Corrupt { .. } | OpError::Missing { .. })), "{outcomes:?}");
    let stats = engine.stats();
    assert_eq!((stats.corrupt_checksum, stats.corrupt_short_file, stats.io_errors), (1, 1, 0));
}

/// A write to a file that may only be read fails in the middle of NIXL. The lane says so, and goes
/// on with what works.
#[test]
fn a_failure_inside_of_nixl_is_an_error_and_the_lane_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, pattern(5, 1 << 20)).unwrap();
    let io = agents();
    {
        let mut lane = io.open_lane(vec![OwnedFd::from(File::open(&path).unwrap())]).unwrap();
        for round in 0..3 {
            let mut memory = OwnedBuffer::new(1 << 20);
            let start = memory.as_mut_slice().as_mut_ptr();
            let memory = Arc::new(memory);
            let nonnull = NonNull::new(start).unwrap();
            // SAFETY: the memory stays allocated as long as its owner.
            lane.register(unsafe { IoMemory::new(nonnull, 1 << 20, Arc::clone(&memory) as _) }).unwrap();
            assert!(lane.knows(start, 1 << 20) && !lane.knows(start, (1 << 20) + 1));
            let runs: Vec<_> = (0..256).map(|run| (start.wrapping_add(run * 4096), 4096)).collect();
            let request = |write, offset| SlotIoRequest { write, file: 0, offset, runs: &runs };
            // SAFETY: the memory lives, and nobody else uses it.
            let error = unsafe { lane.transfer(&request(true, 0)) }.unwrap_err();
            assert!(!error.to_string().is_empty(), "{error}");
            // SAFETY: as above.
            assert_eq!(unsafe { lane.transfer(&request(false, 0)) }.unwrap(), 1 << 20, "round {round}");
            assert!(memory.as_slice() == pattern(5, 1 << 20));
            // SAFETY: as above.
            assert_eq!(unsafe { lane.transfer(&request(false, 4096)) }.unwrap(), (1 << 20) - 4096);
        }
    }
}
