//! A disk that hangs or fails is left alone for a while: what it holds counts as missing, and is computed again.

use super::Leader;
use super::operation::Operation;
use crate::breaker::{Breaker, Turn, Verdict};
use kvbm_plan::{Failure, Tier};
use kvbm_pool::Prefix;
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// The longest pause between two requests that try a disk which does not answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Ranks that are told to take a plan back have said within so long that they had not started it.
const TAKEN_BACK: Duration = Duration::from_millis(250);

/// How long nothing may come of a read before its disk is known to hang: its deadline and, where it began late, half as long again. Who
/// tries a disk keeps others from it for so long.
fn until_known(deadline: Duration) -> Duration {
    deadline.saturating_add(patience(deadline)).saturating_add(TAKEN_BACK)
}

/// A disk that gives nothing for so long while it is asked does not answer.
fn patience(deadline: Duration) -> Duration {
    deadline / 2
}

/// What reads from G3 have come to lately.
pub(super) struct DiskReads(Mutex<Breaker>);

impl DiskReads {
    /// Reads that may take so long, and the time of their bytes.
    pub(super) fn new(deadline: Duration) -> Self {
        Self(Mutex::new(Breaker::new(LONGEST_PAUSE, until_known(deadline))))
    }
}

impl Leader {
    /// Whether reads from G3 failed lately and its blocks are not offered.
    pub(crate) fn is_disk_down(&self) -> bool {
        self.disk_reads.0.lock().is_open()
    }

    /// What they failed with, while they are left alone.
    pub(crate) fn disk_failure(&self) -> Option<Failure> {
        self.disk_reads.0.lock().why()
    }

    /// Ends `prefix` before the first block that only disks have, while those are left alone.
    pub(crate) fn leave_out_disk(&self, prefix: &mut Prefix) {
        let Some(at) = prefix.blocks().iter().position(|block| block.tier == Tier::G3) else { return };
        if self.disk_reads.0.lock().may_ask(Instant::now()) {
            return;
        }
        let left_out = prefix.blocks().len() - at;
        self.metrics.disks.left_out.add(left_out as u64);
        prefix.truncate(prefix.start() + at);
    }

    /// A read from G3 is about to be sent.
    pub(super) fn ask_disk(&self) {
        self.disk_reads.0.lock().asks(Instant::now());
    }

    /// Another worker serves a rank: what reads came to before says nothing of it.
    pub(super) fn forget_disk_reads(&self) {
        *self.disk_reads.0.lock() = Breaker::new(LONGEST_PAUSE, until_known(self.settings.read_deadline));
    }

    /// A plan brought blocks from G3.
    pub(super) fn disk_gives(&self) {
        self.disk_reads.0.lock().gives(Instant::now());
    }

    /// An operation is over: what ranks said of the disks it read from, unless it has been told before.
    pub(super) fn note_disk_reads(&self, operation: &Operation, told: &Verdict) {
        let says_something = told.answered || told.failures > 0 || told.is_late || told.was_crowded_out;
        if says_something && operation.speaks_of_disk() {
            self.note_disk(operation, told);
        }
    }

    /// An operation is late. A disk that has given nothing of it for half of the time that a read may take does not answer, if it was asked
    /// for so long: ranks say so of what they have not started. One that goes on giving is neither well nor hung.
    pub(super) fn note_late_disk_reads(&self, operation: &Operation, now: Instant) {
        operation.watch_quiet_disk(now, patience(self.settings.read_deadline.min(operation.limit)));
    }

    /// What ranks still owe of a late operation after its plans were taken back has started, if only in the last moment: a disk was asked for
    /// it, and where it has given nothing for as long since, it does not answer.
    pub(super) fn note_hung_disk_reads(&self, operation: &Operation, late: &Failure, now: Instant) {
        let since = now.saturating_duration_since(operation.deadline);
        if since >= TAKEN_BACK && operation.is_owed_by_quiet_disk(now) && operation.speaks_of_disk() {
            let mut verdict = Verdict::default();
            verdict.comes_late(late.clone());
            self.note_disk(operation, &verdict);
        }
    }

    fn note_disk(&self, operation: &Operation, verdict: &Verdict) {
        let change = self.disk_reads.0.lock().hears(verdict, operation.began, Instant::now());
        match change {
            Turn::None => {}
            Turn::Closed => {
                tracing::info!(target: "kvbm", "the disk tier answers again: its blocks are found from now on");
            }
            Turn::Opened => {
                let failure = verdict.first.as_ref().map(tracing::field::display);
                tracing::warn!(
                    target: "kvbm", failure,
                    "the disk tier fails or does not answer: it is left alone for a while, and what it holds counts as missing; \
                     `kvbm doctor` and the status of the disks say more"
                );
            }
        }
    }
}
