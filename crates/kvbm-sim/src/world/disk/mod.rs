//! The disk of a rank: the engine of `kvbm-disk` over a simulated medium.
//!
//! Engine, journal, checksums and recovery are the real ones. Only its threads are not there: the
//! world says when a block moves and when a commit is due. What the engine says is compared with a
//! naive model ([`expected`]): what a recovery may find, what it must find, and what a read may
//! bring.

mod expected;
mod faults;

use super::Bytes;
use crate::random::Random;
use expected::{Expected, State};
use faults::Faults;
use kvbm_disk::fault::{SLOT_FILE, SimMedium};
use kvbm_disk::medium::{Medium, OpenFile};
use kvbm_disk::stepped::{Held, SteppedEngine};
use kvbm_disk::{
    DiskConfig, EngineMode, IoBatch, OpError, OpOutcome, OpenError, OwnedBuffer, ReadTarget, Recovered,
};
use kvbm_plan::{BlockId, BlockIdentity, FailureKind, NamespaceId, RecoveredBlock};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::io::IoSliceMut;
use std::sync::Arc;

/// Bytes of a block on a disk: its name over and over. They lie in three sectors, so that a block
/// can be torn.
const BLOCK_BYTES: usize = 65 * 16;

/// One commit in so many, of those that change something, is followed by a rehearsal.
const REHEARSALS: usize = 2;

/// Bytes from slot to slot.
const STRIDE: u64 = kvbm_disk::SLOT_ALIGNMENT;

/// A block that was written, with what lies in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) identity: BlockIdentity,
    /// `None`: no block at all.
    pub(crate) bytes: Option<Bytes>,
    /// The step in which the leader asked for it.
    pub(crate) asked: u64,
}

/// Blocks that the engine gave up because it could not make them durable.
type GivenUp = Arc<Mutex<Vec<(BlockId, BlockIdentity)>>>;

/// See the module.
pub(crate) struct Disk {
    slots: u32,
    /// Records that a journal may have beside one for each block before a snapshot replaces it.
    slack: u64,
    medium: SimMedium,
    /// Of the worker that lives.
    engine: Option<SteppedEngine>,
    expected: Expected,
    /// Slots that may have something else than the leader knows.
    doubtful: BTreeSet<BlockId>,
    given_up: GivenUp,
    faults: Faults,
    has_lied: bool,
    /// A bit of the journal's header has flipped.
    is_header_damaged: bool,
    /// Changes at the last rehearsal.
    rehearsed: u64,
    /// The first rule that it broke.
    broken: Option<String>,
}

fn content(bytes: Option<Bytes>) -> [u8; BLOCK_BYTES] {
    let name = bytes.unwrap_or_default();
    std::array::from_fn(|at| name[at % name.len()])
}

/// Runs one operation.
fn run(engine: &mut SteppedEngine, plan: impl FnOnce(&mut IoBatch)) -> OpOutcome {
    let outcome = Arc::new(Mutex::new(None));
    let told = Arc::clone(&outcome);
    let mut batch = IoBatch::new(move |outcomes: Vec<OpOutcome>| *told.lock() = outcomes.into_iter().next());
    plan(&mut batch);
    engine.run(batch);
    let ended = outcome.lock().take();
    ended.unwrap_or(Err(OpError::ShuttingDown { slot: BlockId(0) }))
}

impl Disk {
    pub(crate) fn new(slots: u32, slack: u64) -> Self {
        Self {
            slots,
            slack,
            medium: SimMedium::new(),
            engine: None,
            expected: Expected::new(slots),
            doubtful: BTreeSet::new(),
            given_up: GivenUp::default(),
            faults: Faults::default(),
            has_lied: false,
            is_header_damaged: false,
            rehearsed: 0,
            broken: None,
        }
    }

    fn config(&self) -> DiskConfig {
        let mut config = DiskConfig::new("simulated", self.slots, BLOCK_BYTES as u64, [7; 16]);
        (config.engine, config.compact_slack_records) = (EngineMode::Buffered, self.slack);
        config
    }

    /// The first rule that it broke.
    pub(crate) fn take_broken(&mut self) -> Option<String> {
        self.broken.take()
    }

    fn breaks(&mut self, what: String) {
        self.broken.get_or_insert(what);
    }

    /// The block that a reader finds in a slot.
    pub(crate) fn get(&self, slot: BlockId) -> Option<Record> {
        let record = self.expected.last(slot).record()?;
        let is_it = |engine: &SteppedEngine| engine.held(slot) == Held::Block(record.identity);
        self.engine.as_ref().is_none_or(is_it).then_some(record)
    }

    /// Whether it may have something else in a slot than the leader knows.
    pub(crate) fn is_doubtful(&self, slot: BlockId) -> bool {
        self.doubtful.contains(&slot)
    }

    /// Whether bits have flipped there.
    pub(crate) fn is_rotten(&self, slot: BlockId) -> bool {
        self.expected.is_rotten(slot)
    }

    /// Writes a block. It fails after some bytes where `fails_after` says so.
    pub(crate) fn write(
        &mut self,
        slot: BlockId,
        record: Record,
        fails_after: Option<usize>,
    ) -> Result<(), FailureKind> {
        self.refresh();
        let Some(mut engine) = self.engine.take() else { return Err(FailureKind::Unsupported) };
        let buffer = Arc::new(OwnedBuffer::from_slice(&content(record.bytes)));
        if let Some(moved) = fails_after {
            self.fail_write(moved);
        }
        let outcome = run(&mut engine, |batch| {
            batch.write_buffer(slot, record.identity, &buffer);
        });
        self.engine = Some(engine);
        if fails_after.is_some() {
            self.inject();
        }
        match outcome {
            Ok(_) => {
                self.expected.write(slot, record);
                self.doubtful.remove(&slot);
                Ok(())
            }
            Err(error) => {
                if !matches!(error, OpError::Quarantined { .. }) {
                    self.expected.push(slot, State::Nothing);
                }
                self.follow(slot);
                Err(error.kind())
            }
        }
    }

    /// The worker is going to end in the middle of a write.
    pub(crate) fn begin_write(&mut self, slot: BlockId, bytes: Option<Bytes>, moved: usize) {
        let Some(engine) = &mut self.engine else { return };
        let begun = engine.begin_write(slot, &content(bytes), moved % (BLOCK_BYTES + 1));
        if !matches!(begun, Err(OpError::Quarantined { .. })) {
            self.expected.push(slot, State::Nothing);
        }
    }

    /// What a worker reads. The engine compares identity and checksum; what the checksum of a plan
    /// would find out is compared here.
    pub(crate) fn read(&mut self, slot: BlockId, identity: &BlockIdentity) -> Result<Bytes, FailureKind> {
        self.refresh();
        let Some(engine) = &mut self.engine else { return Err(FailureKind::Unsupported) };
        let target = ReadTarget::new(BLOCK_BYTES);
        let outcome = run(engine, |batch| {
            // A new target is read into once.
            let _is_first = batch.read_target(slot, *identity, &target);
        });
        if let Err(error) = outcome {
            self.follow(slot);
            return Err(error.kind());
        }
        let record = self.expected.last(slot).record();
        let is_right = target.into_buffer().is_ok_and(|buffer| {
            record.is_some_and(|record| {
                record.identity == *identity && buffer.as_slice() == content(record.bytes)
            })
        });
        if !is_right {
            self.breaks(format!("slot {slot} was read, with other bytes than were written there"));
        }
        self.expected.prove(slot);
        let bytes = record.and_then(|record| record.bytes);
        bytes.filter(|bytes| bytes == identity.hash.as_bytes()).ok_or(FailureKind::Corrupt)
    }

    /// The engine may have found a slot bad, and has a reason then.
    fn follow(&mut self, slot: BlockId) {
        let Some(held) = self.engine.as_ref().map(|engine| engine.held(slot)) else { return };
        let (last, state) = match (self.expected.last(slot), held) {
            (State::Block(record), Held::Block(identity)) if record.identity == identity => return,
            (State::Nothing, Held::Nothing) | (State::Quarantined, Held::Quarantined) => return,
            (last, Held::Quarantined) => (last, State::Quarantined),
            (last, _) => (last, State::Nothing),
        };
        if matches!(held, Held::Block(_)) || !self.expected.is_suspect(slot) && !self.has_lied {
            self.breaks(format!("slot {slot} has {held:?} for no reason; it had {last:?}"));
        }
        self.expected.push(slot, state);
        self.doubtful.insert(slot);
    }

    pub(crate) fn release(&mut self, slots: &[BlockId]) {
        let Some(engine) = &self.engine else { return };
        engine.engine().release(slots);
        for &slot in slots {
            if self.expected.last(slot).record().is_some() {
                self.expected.push(slot, State::Nothing);
            }
        }
    }

    pub(crate) fn forget(&mut self, namespace: NamespaceId) {
        let Some(engine) = &self.engine else { return };
        engine.engine().release_namespace(namespace);
        for slot in self.expected.slots() {
            if self.expected.last(slot).record().is_some_and(|record| record.identity.namespace == namespace)
            {
                self.expected.push(slot, State::Nothing);
            }
        }
    }

    /// Makes durable what was written. How many blocks are; `None` where it fails.
    pub(crate) fn sync(&mut self) -> Option<u64> {
        if self.slots == 0 {
            return Some(0);
        }
        self.refresh();
        let report = self.engine.as_mut()?.flush();
        self.note_given_up();
        let report = report.ok()?;
        if report.pending_blocks > 0 {
            self.breaks(format!("a flush succeeded and left {} blocks", report.pending_blocks));
        }
        if !self.lies() {
            self.expected.settle();
        }
        Some(report.durable_blocks)
    }

    fn note_given_up(&mut self) {
        for (slot, _) in self.given_up.lock().iter() {
            self.expected.push(*slot, State::Nothing);
            self.doubtful.insert(*slot);
        }
    }

    /// Blocks that it gave up since.
    pub(crate) fn take_given_up(&mut self) -> Vec<(BlockId, BlockIdentity)> {
        std::mem::take(&mut *self.given_up.lock())
    }

    /// The leader may have removals repeated that cost blocks there, and knows less than there is.
    pub(crate) fn doubt(&mut self) {
        self.doubtful.extend(self.expected.slots().filter(|slot| self.expected.may_hold(*slot)));
    }

    /// Its worker ends: with a last commit, or suddenly.
    pub(crate) fn close(&mut self, in_order: bool) {
        self.refresh();
        let Some(engine) = self.engine.take() else { return };
        if in_order {
            let is_durable = engine.shutdown();
            self.note_given_up();
            if is_durable && !self.lies() {
                self.expected.settle();
            }
        }
        self.given_up.lock().clear();
    }

    /// The machine loses its power, and with it some of what was not durable.
    pub(crate) fn lose_power(&mut self, random: &mut Random) {
        self.engine = None;
        self.medium = self.medium.crash(random.next());
        self.mend();
    }

    /// A worker opens it. Its blocks, the oldest first, and the slots that are out of use.
    pub(crate) fn open(&mut self) -> (Vec<RecoveredBlock>, Vec<BlockId>) {
        if self.slots == 0 {
            return (Vec::new(), Vec::new());
        }
        self.refresh();
        let Some((engine, recovered)) = self.recover() else { return (Vec::new(), Vec::new()) };
        let given_up = Arc::clone(&self.given_up);
        engine.engine().on_given_up(move |slot, identity| given_up.lock().push((slot, identity)));
        self.is_header_damaged = false;
        let found = self.held(&recovered);
        if let Err(what) = self.judge(&self.medium, &found) {
            self.breaks(what);
        }
        self.expected.recover(&found);
        self.engine = Some(engine);
        let block =
            |found: &kvbm_disk::RecoveredSlot| RecoveredBlock { block: found.slot, identity: found.identity };
        (recovered.blocks.iter().map(block).collect(), recovered.quarantined)
    }

    /// Opens the engine. What is in the way of that goes first: a fault passes, a directory whose
    /// journal cannot be read is removed.
    fn recover(&mut self) -> Option<(SteppedEngine, Recovered)> {
        for _ in 0..3 {
            match SteppedEngine::open(self.config(), Arc::new(self.medium.clone())) {
                Ok(opened) => return Some(opened),
                Err(OpenError::Format { .. }) if self.has_lied || self.is_header_damaged => {
                    (self.medium, self.is_header_damaged) = (SimMedium::new(), false);
                    self.expected.wipe();
                    self.inject();
                }
                Err(OpenError::Io { .. } | OpenError::NoSpace { .. }) if !self.faults.is_none() => {
                    self.mend()
                }
                Err(error) => {
                    self.breaks(format!("a disk does not open: {error}"));
                    return None;
                }
            }
        }
        self.breaks("a disk that nothing is wrong with does not open".to_owned());
        None
    }

    /// What a recovery reports, slot for slot.
    fn held(&self, recovered: &Recovered) -> Vec<Held> {
        let mut held = vec![Held::Nothing; self.slots as usize];
        for found in &recovered.blocks {
            held[found.slot.index()] = Held::Block(found.identity);
        }
        for slot in &recovered.quarantined {
            held[slot.index()] = Held::Quarantined;
        }
        held
    }

    /// What a recovery has found, and the bytes of the blocks that must be whole.
    fn judge(&self, medium: &SimMedium, found: &[Held]) -> Result<(), String> {
        let whole = self.expected.judge(found, self.has_lied)?;
        let file = medium.open(SLOT_FILE, OpenFile::default()).map_err(|error| error.to_string())?;
        for (slot, record) in whole {
            let mut bytes = [0; BLOCK_BYTES];
            let read = file.read_at(u64::from(slot.0) * STRIDE, &mut [IoSliceMut::new(&mut bytes)]);
            if !read.is_ok_and(|read| read == BLOCK_BYTES) || bytes != content(record.bytes) {
                let position = record.identity.position;
                return Err(format!(
                    "block {position} was durable in slot {slot}, and its bytes are not there"
                ));
            }
        }
        Ok(())
    }

    /// Whether recovery would be right if the worker ended now, or the power failed. Looked at once
    /// in [`REHEARSALS`] times, if something has changed since the last time.
    pub(crate) fn rehearse(&mut self, random: &mut Random) {
        let is_due = self.expected.changes > self.rehearsed && random.once_in(REHEARSALS);
        if !is_due || self.has_lied || self.is_header_damaged {
            return;
        }
        self.rehearsed = self.expected.changes;
        let seed = random.next();
        let (what, tried) = if random.once_in(2) {
            (self.try_recovery(&self.medium.crash(seed)).err(), "if the power failed now")
        } else {
            (self.try_restart(seed).err(), "if the worker ended now")
        };
        if let Some(what) = what {
            self.breaks(format!("{tried}: {what}"));
        }
    }

    /// What recovery finds on a copy of the medium.
    fn try_recovery(&self, image: &SimMedium) -> Result<Vec<Held>, String> {
        image.set_capacity(None);
        let opened = SteppedEngine::open(self.config(), Arc::new(image.clone()));
        let (_, recovered) = opened.map_err(|error| error.to_string())?;
        let found = self.held(&recovered);
        self.judge(image, &found).map(|()| found)
    }

    /// What a worker finds that starts on a copy of the medium is durable then.
    fn try_restart(&self, seed: u64) -> Result<(), String> {
        let image = self.medium.restart();
        let found = self.try_recovery(&image)?;
        let later = self.try_recovery(&image.crash(seed))?;
        match found.iter().zip(&later).position(|(found, later)| found != later) {
            Some(slot) => {
                Err(format!("slot {slot} has {:?}, and {:?} after a loss of power", found[slot], later[slot]))
            }
            None => Ok(()),
        }
    }

    /// What a loss of power may leave of a namespace that was asked for before a step.
    pub(crate) fn remains(&self, namespace: NamespaceId, before: u64) -> Option<(BlockId, u64)> {
        let found = self.expected.remains(namespace, before);
        found.map(|(slot, record)| (slot, record.asked))
    }
}
