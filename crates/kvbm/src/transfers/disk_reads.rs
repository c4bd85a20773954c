//! The circuit breaker of the disk tier: while a disk hangs or fails, its blocks count as missing and are computed again.

use super::Transfers;
use super::transfer::Transfer;
use crate::circuit_breaker::{Breaker, Turn, Verdict};
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
    deadline.saturating_add(quiet_limit(deadline)).saturating_add(TAKEN_BACK)
}

/// A disk that gives nothing for so long while it is asked does not answer.
fn quiet_limit(deadline: Duration) -> Duration {
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

impl Transfers {
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
    pub(crate) fn forget_disk_reads(&self) {
        *self.disk_reads.0.lock() = Breaker::new(LONGEST_PAUSE, until_known(self.settings.read_deadline));
    }

    /// A plan brought blocks from G3.
    pub(super) fn disk_gives(&self) {
        self.disk_reads.0.lock().gives(Instant::now());
    }

    /// A transfer is over: what ranks said of the disks it read from, once for each transfer.
    pub(super) fn note_disk_reads(&self, transfer: &Transfer, results: &Verdict) {
        let says_something =
            results.answered || results.failures > 0 || results.is_late || results.was_crowded_out;
        if says_something && transfer.speaks_of_disk() {
            self.note_disk(transfer, results);
        }
    }

    /// A transfer is late. A disk that has given nothing of it for half of the time that a read may take does not answer, if it was asked
    /// for so long: ranks say so of what they have not started. One that goes on giving is neither well nor hung.
    pub(super) fn note_late_disk_reads(&self, transfer: &Transfer, now: Instant) {
        transfer.watch_quiet_disk(now, quiet_limit(self.settings.read_deadline.min(transfer.limit)));
    }

    /// What ranks still owe of a late transfer after its plans were taken back has started, if only in the last moment: a disk was asked for
    /// it, and where it has given nothing for as long since, it does not answer.
    pub(super) fn note_hung_disk_reads(&self, transfer: &Transfer, late: &Failure, now: Instant) {
        let since = now.saturating_duration_since(transfer.deadline);
        if since >= TAKEN_BACK && transfer.is_owed_by_quiet_disk(now) && transfer.speaks_of_disk() {
            let mut verdict = Verdict::default();
            verdict.comes_late(late.clone());
            self.note_disk(transfer, &verdict);
        }
    }

    fn note_disk(&self, transfer: &Transfer, verdict: &Verdict) {
        let change = self.disk_reads.0.lock().hears(verdict, transfer.began, Instant::now());
        match change {
            Turn::None => {}
            Turn::Closed => {
                tracing::info!(target: "kvbm", "the disk tier answers again: its blocks are found from now on");
            }
            Turn::Opened => {
                let failure = verdict.first.as_ref().map(tracing::field::display);
                tracing::warn!(
                    target: "kvbm", failure,
                    "the disk tier fails or does not answer: it is not read for a while, and its blocks count as missing; \
                     `kvbm doctor` and the status of the disks show why"
                );
            }
        }
    }
}
