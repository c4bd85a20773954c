//! An engine without threads, for simulations and tests in which nothing may happen by itself.
//!
//! It is the engine, its journal and its recovery. Only the threads are not there: the caller of
//! [`SteppedEngine`] does what the executor and the committer do, when it wants that done. So the
//! same calls have the same outcome each time.

use crate::commit::{Committer, FlushRequest};
use crate::commit_signals::CommitNeed;
use crate::medium::{Medium, complete};
use crate::record::{HEADER_BYTES, record_bytes, slot_of};
use crate::slot_file::Bounce;
use crate::{DiskConfig, DiskEngine, DiskFlushReport, FlushError, IoBatch, OpError, OpenError, Recovered};
use kvbm_plan::{BlockId, BlockIdentity};
use std::io::IoSlice;
use std::sync::Arc;
use std::time::Duration;

/// What an engine has in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// No block, or one that is being written.
    Nothing,
    /// A block.
    Block(BlockIdentity),
    /// Bytes that were wrong once: the slot is quarantined.
    Quarantined,
}

/// See the module. Dropping it is the sudden end of a process: nothing is committed any more.
#[derive(Debug)]
pub struct SteppedEngine {
    engine: DiskEngine,
    committer: Committer,
    memory: Bounce,
}

impl SteppedEngine {
    /// Like [`DiskEngine::open_on`].
    ///
    /// # Errors
    /// As [`DiskEngine::open_on`].
    pub fn open(config: DiskConfig, medium: Arc<dyn Medium>) -> Result<(Self, Recovered), OpenError> {
        let (engine, journal, recovered) = DiskEngine::without_threads(config, medium)?;
        let (committer, memory) = (Committer::new(journal), Bounce::default());
        Ok((Self { engine, committer, memory }, recovered))
    }

    /// The engine, for all that needs no threads. A flush or a shutdown of it commits nothing.
    pub fn engine(&self) -> &DiskEngine {
        &self.engine
    }

    /// Runs a batch to its end. Its completion is called meanwhile, unless it was not taken.
    pub fn run(&mut self, batch: IoBatch) {
        drop(self.engine.submit(batch));
        self.engine.run_waiting(&mut self.memory);
    }

    /// A write that this engine does not live to end: the first `moved` of `bytes` reach the slot
    /// file. From then on the slot is being written.
    ///
    /// # Errors
    /// The slot cannot be written, or the medium failed.
    pub fn begin_write(&mut self, slot: BlockId, bytes: &[u8], moved: usize) -> Result<(), OpError> {
        let shared = self.engine.shared();
        shared.change(|table| table.begin_write(slot))?;
        let (file, offset) = shared.slots.file_of(slot);
        let part = &bytes[..moved.min(bytes.len())];
        let result = complete::write(file, offset, &mut [IoSlice::new(part)], shared.slots.alignment());
        result.map(drop).map_err(|stopped| OpError::Io {
            op: "write",
            slot,
            at: stopped.done,
            kind: stopped.error.as_ref().map_or(std::io::ErrorKind::WriteZero, std::io::Error::kind),
            message: "the write that was to be cut short failed".to_owned(),
        })
    }

    /// What the committer does when it is woken. Whether this was its end.
    fn turn(&mut self) -> bool {
        let shared = self.engine.shared();
        shared.commit.want(CommitNeed::Urgent);
        let stop = shared.commit.wait_for_work(Duration::ZERO);
        let healthy = self.committer.round(shared);
        if stop {
            self.committer.end(shared, healthy);
        }
        stop && healthy
    }

    /// Like [`DiskEngine::flush`]; also what the committer does by itself from time to time.
    ///
    /// # Errors
    /// As [`DiskEngine::flush`].
    pub fn flush(&mut self) -> Result<DiskFlushReport, FlushError> {
        let asked = FlushRequest::begin(self.engine.shared());
        self.turn();
        let shared = self.engine.shared();
        asked.answer(shared.commit.signals.lock(), shared, Duration::ZERO)
    }

    /// Like [`DiskEngine::shutdown`]: whether everything was committed.
    pub fn shutdown(mut self) -> bool {
        self.engine.shutdown(Duration::ZERO);
        self.turn()
    }

    /// What the engine has in a slot.
    pub fn held(&self, slot: BlockId) -> Held {
        let table = self.engine.shared().table.lock();
        match table.block(slot) {
            Some((_, content)) => Held::Block(content.identity),
            None if table.is_quarantined(slot) => Held::Quarantined,
            None => Held::Nothing,
        }
    }
}

/// Bytes of a record of a journal without encryption.
pub const RECORD_BYTES: u64 = record_bytes(false) as u64;

/// Where the records of a journal without encryption begin in its file, and the slot that each
/// names.
pub fn records(journal: &[u8]) -> Vec<(u64, BlockId)> {
    let Some(records) = journal.get(HEADER_BYTES..) else { return Vec::new() };
    let records = records.chunks_exact(record_bytes(false)).enumerate();
    let found = records.map(|(at, bytes)| (HEADER_BYTES as u64 + at as u64 * RECORD_BYTES, slot_of(bytes)));
    found.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{Call, DiskFault, JOURNAL_FILE, SLOT_FILE, SimMedium};
    use crate::{EngineMode, OpOutcome, OwnedBuffer, ReadTarget};
    use kvbm_plan::{GroupId, NamespaceId, SequenceHash};
    use parking_lot::Mutex;
    use std::io::ErrorKind;

    const BLOCK: usize = 1040;

    fn open(medium: &SimMedium) -> (SteppedEngine, Recovered) {
        let mut config = DiskConfig::new("", 4, BLOCK as u64, [7; 16]);
        config.engine = EngineMode::Buffered;
        SteppedEngine::open(config, Arc::new(medium.clone())).unwrap()
    }

    fn identity(number: u8) -> BlockIdentity {
        let hash = SequenceHash::from_bytes([number; 16]);
        BlockIdentity { namespace: NamespaceId(1), group: GroupId(0), hash, parent: None, position: 0 }
    }

    fn run(engine: &mut SteppedEngine, plan: impl FnOnce(&mut IoBatch)) -> OpOutcome {
        let outcome = Arc::new(Mutex::new(None));
        let told = Arc::clone(&outcome);
        let mut batch = IoBatch::new(move |outcomes| *told.lock() = outcomes.into_iter().next());
        plan(&mut batch);
        engine.run(batch);
        let outcome = outcome.lock().take();
        outcome.unwrap()
    }

    fn write(engine: &mut SteppedEngine, slot: u32, number: u8) -> OpOutcome {
        let buffer = Arc::new(OwnedBuffer::from_slice(&[number; BLOCK]));
        run(engine, |batch| {
            batch.write_buffer(BlockId(slot), identity(number), &buffer);
        })
    }

    fn read(engine: &mut SteppedEngine, slot: u32, number: u8) -> Result<Vec<u8>, OpError> {
        let target = ReadTarget::new(BLOCK);
        run(engine, |batch| assert!(batch.read_target(BlockId(slot), identity(number), &target)))?;
        Ok(target.into_buffer().unwrap().as_slice().to_vec())
    }

    fn slots(recovered: &Recovered) -> Vec<(u32, BlockIdentity)> {
        recovered.blocks.iter().map(|found| (found.slot.0, found.identity)).collect()
    }

    #[test]
    fn what_is_flushed_is_there_after_every_loss_of_power_and_nothing_happens_by_itself() {
        let medium = SimMedium::new();
        let (mut engine, _) = open(&medium);
        write(&mut engine, 2, 5).unwrap();
        let before = medium.bytes(JOURNAL_FILE);
        assert_eq!(
            (engine.held(BlockId(2)), engine.held(BlockId(1))),
            (Held::Block(identity(5)), Held::Nothing)
        );
        for seed in 0..16 {
            assert!(slots(&open(&medium.crash(seed)).1).is_empty());
        }
        assert!(before == medium.bytes(JOURNAL_FILE), "only a flush commits");
        let report = engine.flush().unwrap();
        assert_eq!((report.durable_blocks, report.pending_blocks), (1, 0));
        assert_eq!(records(&medium.bytes(JOURNAL_FILE)), [(HEADER_BYTES as u64, BlockId(2))]);
        for seed in 0..16 {
            let (mut engine, recovered) = open(&medium.crash(seed));
            assert_eq!(slots(&recovered), [(2, identity(5))]);
            assert_eq!(read(&mut engine, 2, 5).unwrap(), [5; BLOCK]);
        }
    }

    #[test]
    fn a_sudden_end_is_told_from_a_shutdown() {
        let medium = SimMedium::new();
        let (mut engine, _) = open(&medium);
        write(&mut engine, 0, 1).unwrap();
        assert!(engine.shutdown());
        let (mut engine, recovered) = open(&medium);
        assert!(recovered.clean && slots(&recovered) == [(0, identity(1))]);
        // The process ends in the middle of a write: the slot is no block's, and not bad.
        engine.begin_write(BlockId(0), &[2; BLOCK], 600).unwrap();
        assert_eq!(engine.held(BlockId(0)), Held::Nothing);
        drop(engine);
        let (mut engine, recovered) = open(&medium);
        assert!(!recovered.clean && slots(&recovered) == [(0, identity(1))]);
        assert!(matches!(read(&mut engine, 0, 1), Err(OpError::CutShort { .. })));
        assert_eq!(engine.held(BlockId(0)), Held::Nothing);
    }

    /// A commit whose sync of the journal fails: the records are in the page cache alone.
    fn fail_a_commit(engine: &mut SteppedEngine, medium: &SimMedium) {
        medium.inject(JOURNAL_FILE, Call::Sync, 0, 1, DiskFault::Error(ErrorKind::Other));
        assert!(matches!(engine.flush(), Err(FlushError::Io { .. })));
    }

    /// Mutation that makes it fail: [`crate::open::open`] does not write the journal again.
    #[test]
    fn what_an_opening_finds_in_the_page_cache_is_durable_afterwards() {
        let medium = SimMedium::new();
        let (mut engine, _) = open(&medium);
        write(&mut engine, 0, 1).unwrap();
        engine.flush().unwrap();
        write(&mut engine, 1, 2).unwrap();
        engine.engine().release(&[BlockId(0)]);
        fail_a_commit(&mut engine, &medium);
        // The process ends before it can replace the journal, and another one goes on.
        drop(engine);
        let (mut engine, recovered) = open(&medium);
        assert_eq!(slots(&recovered), [(1, identity(2))]);
        assert_eq!(engine.flush().unwrap().durable_blocks, 1);
        for seed in 0..16 {
            assert_eq!(slots(&open(&medium.crash(seed)).1), [(1, identity(2))]);
        }
    }

    /// Mutation that makes it fail: [`crate::slot_table::SlotTable::put_back`] notes no record.
    #[test]
    fn a_block_that_is_gone_after_a_commit_that_failed_stays_gone() {
        let medium = SimMedium::new();
        let (mut engine, _) = open(&medium);
        write(&mut engine, 0, 1).unwrap();
        fail_a_commit(&mut engine, &medium);
        engine.engine().release(&[BlockId(0)]);
        assert_eq!(engine.flush().unwrap().durable_blocks, 0);
        drop(engine);
        assert!(slots(&open(&medium).1).is_empty());
    }

    /// Mutation that makes it fail: the opening does not drop the page cache of the slot files.
    #[test]
    fn what_a_failed_sync_left_in_the_page_cache_is_not_read_by_the_next_process() {
        let medium = SimMedium::new();
        let (mut engine, _) = open(&medium);
        write(&mut engine, 0, 1).unwrap();
        engine.flush().unwrap();
        // No record reaches the journal any more. The slot gets another block, whose bytes reach
        // the device, and then the first block again, whose bytes stay in the page cache.
        medium.inject(JOURNAL_FILE, Call::Write, 0, u64::MAX, DiskFault::Error(ErrorKind::Other));
        medium.inject(SLOT_FILE, Call::Sync, 1, 1, DiskFault::Error(ErrorKind::Other));
        for number in [2, 1] {
            engine.engine().release(&[BlockId(0)]);
            write(&mut engine, 0, number).unwrap();
            assert!(matches!(engine.flush(), Err(FlushError::Io { .. })));
        }
        medium.heal();
        drop(engine);
        let (mut engine, recovered) = open(&medium);
        assert_eq!(slots(&recovered), [(0, identity(1))]);
        assert!(matches!(read(&mut engine, 0, 1), Err(OpError::CutShort { .. })));
    }

    #[test]
    fn bits_that_flip_cost_their_slot() {
        let medium = SimMedium::new();
        let (mut engine, _) = open(&medium);
        write(&mut engine, 1, 3).unwrap();
        engine.flush().unwrap();
        assert!(medium.flip(SLOT_FILE, 4096 + 7, 2) && !medium.flip("none", 0, 0));
        assert!(matches!(read(&mut engine, 1, 3), Err(OpError::Corrupt { .. })));
        assert_eq!(engine.held(BlockId(1)), Held::Quarantined);
    }
}
