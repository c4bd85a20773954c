//! The committer: one thread that makes completed writes durable, many at a time.
//!
//! A cycle takes the dirty slots, syncs the slot file, appends their records, syncs the journal,
//! and only then calls them durable. Before that, blocks whose sync failed are written again. The
//! table keeps one state per slot, so a slot that changed ten times costs one record.

use crate::commit_signals::{CommitNeed, CommitterState, Signals};
use crate::journal::Journal;
use crate::keyring::Keyring;
use crate::medium::complete::contained;
use crate::record::{Record, RecordState};
use crate::rewrite;
use crate::shared::EngineState;
use crate::slot_file::Bounce;
use crate::stripes::JOURNAL_MEMBER;
use crate::{DiskFlushReport, FlushError};
use kvbm_plan::deadline_after;
use kvbm_plan::simulation::{Planted, planted};
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most slots of one cycle: bounds its memory and its hold of the table's lock.
const MAX_RECORDS: usize = 16_384;

/// Slots that are looked at under one hold of the table's lock.
const LOOK: u32 = 4096;

/// Shortest time between two cycles of which the first failed: it grows from there.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);

/// After a failure the interval doubles, so many times at most: a disk that is full or failing is
/// not kept busy by attempts in vain. A flush does not wait for it.
const MAX_DOUBLINGS: u32 = 7;

/// Waits until everything that is dirty now was committed.
pub(crate) fn flush(shared: &EngineState, deadline: Duration) -> Result<DiskFlushReport, FlushError> {
    let until = deadline_after(Instant::now(), deadline);
    let asked = FlushRequest::begin(shared);
    let mut signals = shared.commit.signals.lock();
    let waiting = |signals: &mut Signals| !asked.is_over(signals);
    shared.commit.progress.wait_while_until(&mut signals, waiting, until);
    asked.answer(signals, shared, deadline)
}

/// A flush that was asked for.
pub(crate) struct FlushRequest {
    /// Failures before it.
    failures: u64,
    /// Dirty slots, and rounds, that must have been gone through.
    target: u64,
    round: u64,
}

impl FlushRequest {
    /// Wakes the committer.
    pub(crate) fn begin(shared: &EngineState) -> Self {
        // First of all: what fails from here on is this flush's.
        let failures = shared.commit.signals.lock().failures;
        let has_doomed = shared.keyring.as_ref().is_some_and(Keyring::has_doomed);
        let (target, unsynced) = {
            let table = shared.table.lock();
            (table.dirtied(), table.unsynced())
        };
        let mut signals = shared.commit.signals.lock();
        // What a sync failed before is dealt with by every round, and so are keys to be destroyed.
        let round = if unsynced > 0 || has_doomed { signals.begun + 1 } else { 0 };
        signals.work = CommitNeed::Urgent;
        shared.commit.wake.notify_one();
        Self { failures, target, round }
    }

    fn is_done(&self, signals: &Signals) -> bool {
        signals.processed >= self.target && signals.over >= self.round
    }

    /// Whether waiting any longer changes nothing.
    fn is_over(&self, signals: &Signals) -> bool {
        self.is_done(signals) || signals.failures != self.failures || signals.life == CommitterState::Ended
    }

    /// What came of it by now.
    pub(crate) fn answer(
        &self,
        signals: MutexGuard<'_, Signals>,
        shared: &EngineState,
        deadline: Duration,
    ) -> Result<DiskFlushReport, FlushError> {
        let (failed, done) = (signals.failures != self.failures, self.is_done(&signals));
        let (ended, message) = (signals.life == CommitterState::Ended, signals.last_failure.clone());
        drop(signals);
        let (present, durable_blocks, _) = shared.table.lock().counts();
        match (failed, done, ended) {
            (true, ..) => Err(FlushError::Io { message, durable_blocks }),
            (false, true, _) => {
                Ok(DiskFlushReport { durable_blocks, pending_blocks: present - durable_blocks })
            }
            (false, false, true) => Err(FlushError::ShutDown { durable_blocks }),
            (false, false, false) => Err(FlushError::Deadline { deadline, durable_blocks }),
        }
    }
}

/// The life of the committer.
pub(crate) fn work(shared: &EngineState, journal: Journal) {
    let mut failures = 0_u32;
    let mut committer = Committer::new(journal);
    loop {
        // Slots that are dirty since the opening or after a failed cycle wake nobody else.
        if due(shared) != (0, 0) || shared.keyring.as_ref().is_some_and(Keyring::has_doomed) {
            shared.commit.want(CommitNeed::Due);
        }
        let interval = shared.config.commit.interval;
        let interval = if failures == 0 { interval } else { interval.max(SHORTEST_PAUSE) };
        let interval = interval.saturating_mul(1 << failures.min(MAX_DOUBLINGS));
        let stop = shared.commit.wait_for_work(interval);
        let healthy = committer.round(shared);
        failures = if healthy { 0 } else { failures.saturating_add(1) };
        if stop {
            committer.end(shared, healthy);
            return;
        }
    }
}

/// What the committer owns.
#[derive(Debug)]
pub(crate) struct Committer {
    journal: Journal,
    memory: Bounce,
}

impl Committer {
    pub(crate) fn new(journal: Journal) -> Self {
        Self { journal, memory: Bounce::default() }
    }

    /// Commits all that is due. Whether nothing failed.
    pub(crate) fn round(&mut self, shared: &EngineState) -> bool {
        let mut healthy = destroy_keys(shared);
        // What becomes dirty meanwhile has its own wake-up.
        let (mut left, mut unsynced) = due(shared);
        while healthy && (left > 0 || unsynced > 0) {
            if unsynced > 0 {
                let dealt = rewrite::rewrite_some(shared, &mut self.memory);
                unsynced = if dealt == 0 { 0 } else { unsynced.saturating_sub(dealt) };
                left = shared.table.lock().dirty();
                if left == 0 {
                    continue;
                }
            }
            let (processed, result) = cycle(shared, &mut self.journal);
            left = left.saturating_sub(processed as usize);
            healthy = result.is_ok();
            shared.journal_records.store(self.journal.records(), Ordering::Relaxed);
            shared.count(|stats| {
                stats.commits += u64::from(healthy);
                stats.commit_failures += u64::from(!healthy);
                (stats.compactions, stats.failed_snapshots) = self.journal.snapshots();
            });
            shared.commit.cycle_done(processed, result);
        }
        shared.commit.round_over();
        healthy
    }

    /// The end, after a last round.
    pub(crate) fn end(&mut self, shared: &EngineState, healthy: bool) {
        if healthy && shared.commit.is_in_order() && shared.table.lock().is_at_rest() {
            // Without the mark the next opening trusts slots less. Nothing else is lost.
            let _unmarked = contained(|| self.journal.mark_clean());
        }
        shared.commit.ended();
    }
}

/// Overwrites keys that are to be destroyed. Whether none is left.
fn destroy_keys(shared: &EngineState) -> bool {
    let Some(Err(error)) = shared.keyring.as_ref().map(Keyring::destroy_doomed) else { return true };
    let error = shared.note_failure_of(JOURNAL_MEMBER, &error);
    shared.count(|stats| stats.commit_failures += 1);
    shared.commit.cycle_done(0, Err(format!("write of the key file: {error}")));
    false
}

/// Dirty slots, and blocks that have to be written again.
fn due(shared: &EngineState) -> (usize, u64) {
    let table = shared.table.lock();
    (table.dirty(), table.unsynced())
}

/// A sync of file `member` failed. Before the next, none of its blocks counts as synced that is not
/// durable by now.
fn distrust_unsynced(shared: &EngineState, member: usize) {
    let lies_there = |slot| shared.slots.place(slot).0 == member;
    for from in (0..shared.config.num_slots).step_by(LOOK as usize) {
        shared.table.lock().distrust_unsynced(from, LOOK, lies_there);
    }
}

/// One group commit: how many dirty slots it took, and whether all of them are as durable as they
/// can be.
fn cycle(shared: &EngineState, journal: &mut Journal) -> (u64, Result<(), String>) {
    let (processed, mut records) = shared.table.lock().take_dirty(MAX_RECORDS);
    let is_block = |record: &Record| matches!(record.state, RecordState::Present { .. });
    let mut result = Ok(());
    for (member, file) in shared.slots.files.iter().enumerate() {
        let written = |record: &Record| is_block(record) && shared.slots.place(record.slot).0 == member;
        if records.iter().any(written)
            && !planted(Planted::RecordUnsyncedBlocks)
            && let Err(error) = contained(|| file.sync_data())
        {
            // The kernel may have dropped the pages, also those of writes that ended since or run:
            // syncing again proves nothing. Such blocks stay readable (their checksums guard them)
            // and are called durable only after they were written again.
            distrust_unsynced(shared, member);
            let (unsynced, rest): (Vec<_>, Vec<_>) = records.into_iter().partition(written);
            records = rest;
            records.extend(shared.table.lock().give_up(&unsynced));
            result = Err(format!("sync of the slot file: {}", shared.note_failure_of(member, &error)));
        }
    }
    if !records.is_empty() {
        match contained(|| journal.persist(&shared.table, &records)) {
            Ok(()) => shared.table.lock().mark_recorded(&records),
            Err(error) => {
                shared.table.lock().put_back(&records);
                let error = shared.note_failure_of(JOURNAL_MEMBER, &error);
                result = Err(format!("write of the journal: {error}"));
            }
        }
    }
    (processed, result)
}
