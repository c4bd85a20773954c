//! What goes wrong with a disk.

use super::expected::State;
use super::{BLOCK_BYTES, Disk, STRIDE};
use crate::random::Random;
use kvbm_disk::fault::{Call, DiskFault, JOURNAL_FILE, JOURNAL_TEMP_FILE, SLOT_FILE};
use kvbm_disk::stepped::{self, RECORD_BYTES};
use kvbm_plan::clock;
use std::io::ErrorKind;
use std::time::Instant;

/// Calls that fail together while a disk is stuck.
const STUCK: [&[(&str, Call)]; 5] = [
    &[(SLOT_FILE, Call::Sync)],
    &[(JOURNAL_FILE, Call::Sync)],
    &[(JOURNAL_TEMP_FILE, Call::Sync)],
    &[(JOURNAL_TEMP_FILE, Call::Rename)],
    &[(SLOT_FILE, Call::Sync), (JOURNAL_FILE, Call::Sync), (JOURNAL_TEMP_FILE, Call::Sync)],
];

/// Files that are synced.
const SYNCED: [&str; 3] = [SLOT_FILE, JOURNAL_FILE, JOURNAL_TEMP_FILE];

/// Faults that last for a while.
#[derive(Default)]
pub(super) struct Faults {
    /// It says that everything is durable and syncs nothing.
    lies: bool,
    /// Until then some of its syncs fail.
    stuck: Option<(Instant, usize)>,
    /// Until then it has room for so many bytes.
    full: Option<(Instant, u64)>,
}

impl Faults {
    /// Whether nothing is wrong.
    pub(super) fn is_none(&self) -> bool {
        !self.lies && self.stuck.is_none() && self.full.is_none()
    }
}

impl Disk {
    /// It says from now on that everything is durable, and writes nothing down.
    pub(crate) fn lie(&mut self) {
        (self.faults.lies, self.has_lied) = (true, true);
        self.inject();
    }

    pub(super) fn lies(&self) -> bool {
        self.faults.lies
    }

    /// Some of its syncs, which `kind` says, fail until then.
    pub(crate) fn stick(&mut self, until: Instant, kind: usize) {
        self.faults.stuck = Some((until, kind % STUCK.len()));
        self.inject();
    }

    /// It has room for `spare` more bytes until then.
    pub(crate) fn fill(&mut self, until: Instant, spare: u64) {
        self.faults.full = Some((until, self.medium.used() + spare));
        self.inject();
    }

    /// Whether it is full.
    pub(crate) fn is_full(&self) -> bool {
        self.faults.full.is_some_and(|(until, _)| clock::now() < until)
    }

    /// Nothing is wrong with it from now on.
    pub(crate) fn mend(&mut self) {
        self.faults = Faults::default();
        self.inject();
    }

    /// What is over is over.
    pub(super) fn refresh(&mut self) {
        let now = clock::now();
        let is_over = |until: Option<Instant>| until.is_some_and(|until| now >= until);
        let Faults { stuck, full, .. } = self.faults;
        let over = (is_over(stuck.map(|(until, _)| until)), is_over(full.map(|(until, _)| until)));
        if over.0 {
            self.faults.stuck = None;
        }
        if over.1 {
            self.faults.full = None;
        }
        if over != (false, false) {
            self.inject();
        }
    }

    /// Has the medium do what is wrong with it, and nothing else.
    pub(super) fn inject(&self) {
        self.medium.heal();
        if let Some((_, kind)) = self.faults.stuck {
            for &(file, call) in STUCK[kind] {
                self.medium.inject(file, call, 0, u64::MAX, DiskFault::Error(ErrorKind::Other));
            }
        }
        for file in SYNCED.into_iter().filter(|_| self.faults.lies) {
            self.medium.inject(file, Call::Sync, 0, u64::MAX, DiskFault::Lose);
        }
        self.medium.set_capacity(self.faults.full.map(|(_, bytes)| bytes));
    }

    /// The next write of a block fails after `moved` bytes.
    pub(super) fn fail_write(&self, moved: usize) {
        if moved > 0 {
            self.medium.inject(SLOT_FILE, Call::Write, 0, 1, DiskFault::Short(moved));
        }
        self.medium.inject(SLOT_FILE, Call::Write, 0, 1, DiskFault::Error(ErrorKind::StorageFull));
    }

    /// A bit flips: of a block, of a record, or rarely of the journal's header.
    pub(crate) fn flip(&mut self, random: &mut Random) -> Option<String> {
        if random.once_in(3) {
            return self.flip_journal(random);
        }
        let is_block = |slot: &_| matches!(self.expected.last(*slot), State::Block(_));
        let slots: Vec<_> = self.expected.slots().filter(is_block).collect();
        let slot = *random.pick(&slots)?;
        let byte = u64::from(slot.0) * STRIDE + random.below(BLOCK_BYTES) as u64;
        self.medium.flip(SLOT_FILE, byte, random.below(8) as u8).then(|| {
            self.expected.rot(slot);
            format!("a bit of slot {slot} flips")
        })
    }

    fn flip_journal(&mut self, random: &mut Random) -> Option<String> {
        let journal = self.medium.bytes(JOURNAL_FILE);
        let records = stepped::records(&journal);
        let bit = random.below(8) as u8;
        if random.once_in(20) {
            let byte = random.below(journal.len().min(128).max(1)) as u64;
            self.is_header_damaged = self.medium.flip(JOURNAL_FILE, byte, bit);
            return Some("a bit of the journal's header flips".to_owned());
        }
        let &(at, slot) = random.pick(&records)?;
        self.medium.flip(JOURNAL_FILE, at + random.below(RECORD_BYTES as usize) as u64, bit).then(|| {
            self.expected.rot(slot);
            format!("a bit of a record of slot {slot} flips")
        })
    }
}
