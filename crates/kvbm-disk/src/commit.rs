//! The committer: one thread that makes completed writes durable, many at a time.
//!
//! A cycle takes the dirty slots, syncs the slot file, appends their records, syncs the journal, and only then
//! calls them durable. Before that, blocks whose sync failed are written again. The table keeps one state per slot, so a slot
//! that changed ten times costs one record.

use crate::journal::{Journal, Record, RecordState};
use crate::renew;
use crate::shared::Shared;
use crate::slots::Bounce;
use crate::stripes::JOURNAL_MEMBER;
use crate::{FlushError, FlushReport};
use kvbm_plan::deadline_after;
use parking_lot::{Condvar, Mutex};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Most slots of one cycle: bounds its memory and its hold of the table's lock.
const MAX_RECORDS: usize = 16_384;

/// Slots that are looked at under one hold of the table's lock.
const LOOK: u32 = 4096;

/// Shortest time between two cycles of which the first failed: it grows from there.
const SHORTEST_PAUSE: Duration = Duration::from_millis(50);

/// After a failure the interval doubles, so many times at most: a disk that is full or failing is not kept busy by attempts in
/// vain. A flush does not wait for it.
const MAX_DOUBLINGS: u32 = 7;

/// Whether a cycle is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    #[default]
    None,
    /// Something is dirty: at the end of the interval.
    Due,
    /// Now.
    Urgent,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Life {
    #[default]
    Running,
    /// One last commit.
    Stopping,
    Ended,
}

#[derive(Debug, Default)]
struct Signals {
    work: Work,
    life: Life,
    /// No operation was left when the engine was stopped: nothing will be written any more.
    in_order: bool,
    /// Dirty slots that went through a cycle, successful or not.
    processed: u64,
    /// Rounds, each of all cycles that were due, that began, and the last of them that is over.
    begun: u64,
    over: u64,
    failures: u64,
    last_failure: String,
}

/// How the committer is woken, and what it tells.
#[derive(Debug, Default)]
pub(crate) struct CommitSignals {
    signals: Mutex<Signals>,
    wake: Condvar,
    progress: Condvar,
}

impl CommitSignals {
    /// The number of dirty slots grew from `before` to `after`. Beyond `max_slots` it is said once that this is urgent: a
    /// device that fails is not asked again for each of them.
    pub(crate) fn became_dirty(&self, before: usize, after: usize, max_slots: usize) {
        let urgent = before < max_slots && after >= max_slots;
        self.want(if urgent { Work::Urgent } else { Work::Due });
    }

    fn want(&self, work: Work) {
        let mut signals = self.signals.lock();
        if signals.work < work {
            signals.work = work;
            drop(signals);
            self.wake.notify_one();
        }
    }

    /// The end, `in_order` if no operation waits or runs and none will.
    pub(crate) fn stop(&self, in_order: bool) {
        let mut signals = self.signals.lock();
        if signals.life == Life::Running {
            (signals.life, signals.in_order) = (Life::Stopping, in_order);
        }
        drop(signals);
        self.wake.notify_one();
    }

    /// Returns whether this is the last time.
    fn wait_for_work(&self, interval: Duration) -> bool {
        let mut signals = self.signals.lock();
        let idle = |signals: &mut Signals| signals.work == Work::None && signals.life == Life::Running;
        self.wake.wait_while(&mut signals, idle);
        let until = deadline_after(Instant::now(), interval);
        let patient = |signals: &mut Signals| signals.work < Work::Urgent && signals.life == Life::Running;
        self.wake.wait_while_until(&mut signals, patient, until);
        signals.work = Work::None;
        signals.begun += 1;
        signals.life != Life::Running
    }

    fn cycle_done(&self, processed: u64, result: Result<(), String>) {
        let mut signals = self.signals.lock();
        signals.processed += processed;
        if let Err(message) = result {
            signals.failures += 1;
            signals.last_failure = message;
        }
        drop(signals);
        self.progress.notify_all();
    }

    fn round_over(&self) {
        let mut signals = self.signals.lock();
        signals.over = signals.begun;
        drop(signals);
        self.progress.notify_all();
    }

    fn is_in_order(&self) -> bool {
        self.signals.lock().in_order
    }

    fn ended(&self) {
        self.signals.lock().life = Life::Ended;
        self.progress.notify_all();
    }
}

/// Waits until everything that is dirty now was committed.
pub(crate) fn flush(shared: &Shared, deadline: Duration) -> Result<FlushReport, FlushError> {
    let until = deadline_after(Instant::now(), deadline);
    // First of all: what fails from here on is this flush's.
    let failures = shared.commit.signals.lock().failures;
    let (target, unsynced) = {
        let table = shared.table.lock();
        (table.dirtied(), table.unsynced())
    };
    let mut signals = shared.commit.signals.lock();
    // What a sync failed before is dealt with by every round.
    let round = if unsynced > 0 { signals.begun + 1 } else { 0 };
    let is_done = |signals: &Signals| signals.processed >= target && signals.over >= round;
    signals.work = Work::Urgent;
    shared.commit.wake.notify_one();
    let waiting = |signals: &mut Signals| {
        !is_done(signals) && signals.failures == failures && signals.life != Life::Ended
    };
    shared.commit.progress.wait_while_until(&mut signals, waiting, until);
    let (failed, done) = (signals.failures != failures, is_done(&signals));
    let (ended, message) = (signals.life == Life::Ended, signals.last_failure.clone());
    drop(signals);
    let (present, durable_blocks, _) = shared.table.lock().counts();
    match (failed, done, ended) {
        (true, ..) => Err(FlushError::Io { message, durable_blocks }),
        (false, true, _) => Ok(FlushReport { durable_blocks, pending_blocks: present - durable_blocks }),
        (false, false, true) => Err(FlushError::ShutDown { durable_blocks }),
        (false, false, false) => Err(FlushError::Deadline { deadline, durable_blocks }),
    }
}

/// The life of the committer.
pub(crate) fn work(shared: &Shared, mut journal: Journal) {
    let mut failures = 0_u32;
    let mut memory = Bounce::default();
    loop {
        // Dirty since the opening, or left by a cycle that failed: nobody says so.
        if due(shared) != (0, 0) {
            shared.commit.want(Work::Due);
        }
        let interval = shared.config.commit.interval;
        let interval = if failures == 0 { interval } else { interval.max(SHORTEST_PAUSE) };
        let interval = interval.saturating_mul(1 << failures.min(MAX_DOUBLINGS));
        let stop = shared.commit.wait_for_work(interval);
        let mut healthy = true;
        // What becomes dirty meanwhile has its own wake-up.
        let (mut left, mut unsynced) = due(shared);
        while healthy && (left > 0 || unsynced > 0) {
            if unsynced > 0 {
                let dealt = renew::some(shared, &mut memory);
                unsynced = if dealt == 0 { 0 } else { unsynced.saturating_sub(dealt) };
                left = shared.table.lock().dirty();
                if left == 0 {
                    continue;
                }
            }
            let (processed, result) = cycle(shared, &mut journal);
            left = left.saturating_sub(processed as usize);
            healthy = result.is_ok();
            shared.journal_records.store(journal.records(), Ordering::Relaxed);
            shared.count(|stats| {
                stats.commits += u64::from(healthy);
                stats.commit_failures += u64::from(!healthy);
                (stats.compactions, stats.failed_snapshots) = journal.snapshots();
            });
            shared.commit.cycle_done(processed, result);
        }
        shared.commit.round_over();
        failures = if healthy { 0 } else { failures.saturating_add(1) };
        if stop {
            if healthy && shared.commit.is_in_order() && shared.table.lock().is_at_rest() {
                // Without the mark the next opening is more careful, and that is all.
                let _unmarked = contained(|| journal.mark_clean());
            }
            shared.commit.ended();
            return;
        }
    }
}

/// Dirty slots, and blocks that have to be written again.
fn due(shared: &Shared) -> (usize, u64) {
    let table = shared.table.lock();
    (table.dirty(), table.unsynced())
}

/// A medium that panics fails the commit, not the committer: there is no other.
pub(crate) fn contained(call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(io::Error::other("the medium panicked")))
}

/// A sync of file `member` failed. Before the next, none of its blocks counts as synced that is not durable by now.
fn distrust_unsynced(shared: &Shared, member: usize) {
    let lies_there = |slot| shared.slots.place(slot).0 == member;
    for from in (0..shared.config.num_slots).step_by(LOOK as usize) {
        shared.table.lock().distrust_unsynced(from, LOOK, lies_there);
    }
}

/// One group commit: how many dirty slots it took, and whether all of them are as durable as they can be.
fn cycle(shared: &Shared, journal: &mut Journal) -> (u64, Result<(), String>) {
    let (processed, mut records) = shared.table.lock().take_dirty(MAX_RECORDS);
    let is_block = |record: &Record| matches!(record.state, RecordState::Present { .. });
    let mut result = Ok(());
    for (member, file) in shared.slots.files.iter().enumerate() {
        let written = |record: &Record| is_block(record) && shared.slots.place(record.slot).0 == member;
        if records.iter().any(written)
            && let Err(error) = contained(|| file.sync_data())
        {
            // The kernel may have dropped the pages, also those of writes that ended since or run: syncing again proves nothing.
            // Such blocks stay readable (their checksums guard them) and are called durable only after they were written again.
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
