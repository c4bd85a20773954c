//! The disk of a rank, by the crash rules of `kvbm-disk`.
//!
//! Blocks are written first and recorded when their bytes are durable. So what a crash leaves of an
//! unsynced slot is either what was durable there, or what was written last, or nothing. A reader
//! compares identity and bytes, so a slot with anything else is an error, never a block.

use super::Bytes;
use crate::random::Random;
use kvbm_plan::{BlockId, BlockIdentity, FailureKind, NamespaceId, RecoveredBlock, clock};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// A record of the journal with what lies in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) identity: BlockIdentity,
    /// `None`: no block at all.
    pub(crate) bytes: Option<Bytes>,
    /// The step in which the leader asked for it.
    pub(crate) asked: u64,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Disk {
    /// What a reader sees.
    current: BTreeMap<BlockId, Record>,
    /// What a loss of power leaves for certain.
    durable: BTreeMap<BlockId, Record>,
    /// Slots of which a loss of power may have left something else than the leader knows.
    doubtful: BTreeSet<BlockId>,
    /// Slots whose bits have flipped.
    rotten: BTreeSet<BlockId>,
    /// It says that everything is durable and writes nothing down.
    pub(crate) lies: bool,
    /// Until then it makes nothing durable.
    pub(crate) stuck_until: Option<Instant>,
    /// Until then there is no room for another record, so that nothing is written.
    pub(crate) full_until: Option<Instant>,
}

impl Disk {
    pub(crate) fn get(&self, slot: BlockId) -> Option<&Record> {
        self.current.get(&slot)
    }

    /// Whether a loss of power may have left something else there than the leader knows.
    pub(crate) fn is_doubtful(&self, slot: BlockId) -> bool {
        self.doubtful.contains(&slot)
    }

    /// Whether bits have flipped there.
    pub(crate) fn is_rotten(&self, slot: BlockId) -> bool {
        self.rotten.contains(&slot)
    }

    pub(crate) fn write(&mut self, slot: BlockId, record: Record) {
        self.doubtful.remove(&slot);
        self.rotten.remove(&slot);
        self.current.insert(slot, record);
    }

    /// What a worker reads, after it has compared identity and bytes.
    pub(crate) fn read(&self, slot: BlockId, identity: &BlockIdentity) -> Result<Bytes, FailureKind> {
        let record = self.current.get(&slot).ok_or(FailureKind::Missing)?;
        match record.bytes {
            Some(bytes) if record.identity == *identity && bytes == *identity.hash.as_bytes() => Ok(bytes),
            _ => Err(FailureKind::Corrupt),
        }
    }

    pub(crate) fn release(&mut self, slots: &[BlockId]) {
        for slot in slots {
            self.current.remove(slot);
        }
    }

    pub(crate) fn forget(&mut self, namespace: NamespaceId) {
        self.current.retain(|_, record| record.identity.namespace != namespace);
    }

    /// Makes durable what was written. How many blocks are; `None` where it fails.
    pub(crate) fn sync(&mut self) -> Option<u64> {
        if self.stuck_until.is_some_and(|until| clock::now() < until) {
            return None;
        }
        if !self.lies {
            self.durable.clone_from(&self.current);
        }
        Some(self.current.len() as u64)
    }

    /// Bits of a block flip.
    pub(crate) fn flip(&mut self, random: &mut Random) -> Option<BlockId> {
        let slots: Vec<BlockId> = self.current.keys().copied().collect();
        let slot = *random.pick(&slots)?;
        for side in [&mut self.current, &mut self.durable] {
            if let Some(record) = side.get_mut(&slot) {
                record.bytes = None;
            }
        }
        self.rotten.insert(slot);
        Some(slot)
    }

    /// Its worker dies. The leader may have removals repeated that cost blocks there.
    pub(crate) fn doubt(&mut self) {
        self.doubtful.extend(self.current.keys().chain(self.durable.keys()));
    }

    /// The machine loses its power, and with it some of what was not durable.
    pub(crate) fn lose_power(&mut self, random: &mut Random) {
        let slots: BTreeSet<BlockId> = self.current.keys().chain(self.durable.keys()).copied().collect();
        for slot in slots {
            let (current, durable) = (self.current.get(&slot).copied(), self.durable.get(&slot).copied());
            if current == durable {
                continue;
            }
            // The bytes of a slot that was being overwritten are neither block's.
            let torn = durable
                .map(|record| if current.is_some() { Record { bytes: None, ..record } } else { record });
            let left = match random.below(3) {
                0 => current,
                1 => torn,
                _ => None,
            };
            match left {
                Some(record) => self.current.insert(slot, record),
                None => self.current.remove(&slot),
            };
        }
        self.mend();
    }

    /// Nothing is wrong with it from now on.
    pub(crate) fn mend(&mut self) {
        (self.lies, self.stuck_until, self.full_until) = (false, None, None);
    }

    /// What a worker that opens the disk finds. All of it is durable then.
    pub(crate) fn open(&mut self) -> Vec<RecoveredBlock> {
        self.durable.clone_from(&self.current);
        let found = self.current.iter();
        found.map(|(&block, record)| RecoveredBlock { block, identity: record.identity }).collect()
    }

    /// What would be found after a loss of power for certain.
    pub(crate) fn durable(&self) -> impl Iterator<Item = (BlockId, &Record)> {
        self.durable.iter().map(|(&slot, record)| (slot, record))
    }
}
