//! A disk that hangs or fails is left alone for a while: what it holds counts as missing, and is computed again.

use super::Leader;
use super::operation::{Move, Operation};
use crate::breaker::{Breaker, Verdict};
use kvbm_plan::{Failure, Tier};
use kvbm_pool::Prefix;
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// The longest pause between two requests that try a disk which does not answer.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What reads from G3 have come to lately.
pub(super) struct DiskReads(Mutex<Breaker>);

impl Default for DiskReads {
    fn default() -> Self {
        Self(Mutex::new(Breaker::new(LONGEST_PAUSE)))
    }
}

impl Leader {
    /// Whether reads from G3 failed lately and its blocks are not offered.
    pub(crate) fn is_disk_down(&self) -> bool {
        self.disk_reads.0.lock().is_open()
    }

    /// Ends `prefix` before the first block that only disks have, while those are left alone.
    pub(crate) fn leave_out_disk(&self, prefix: &mut Prefix) {
        let Some(at) = prefix.blocks().iter().position(|block| block.tier == Tier::G3) else { return };
        if self.disk_reads.0.lock().allows(Instant::now()) {
            return;
        }
        let left_out = prefix.blocks().len() - at;
        self.metrics.disks.left_out.add(left_out as u64);
        prefix.truncate(prefix.start() + at);
    }

    /// An operation is over: what it says of the disks it read from, unless it has said so before.
    pub(super) fn note_disk_reads(
        &self,
        operation: &Operation,
        moves: &[Move],
        failures: &[Option<Failure>],
    ) {
        let reads = || moves.iter().zip(failures).filter(|(step, _)| step.from == Tier::G3);
        if reads().next().is_some() && operation.speaks_of_disk() {
            let first = reads().find_map(|(_, failure)| failure.as_ref());
            self.note_disk(&Verdict::of(reads().map(|(_, failure)| failure)), first);
        }
    }

    /// An operation is late: a disk that has given nothing of it by now does not answer.
    pub(super) fn note_late_disk_reads(&self, operation: &Operation, late: &Failure) {
        if let Some(arrived) = operation.has_arrived_from(Tier::G3)
            && operation.speaks_of_disk()
        {
            self.note_disk(&Verdict { answered: arrived, failures: usize::from(!arrived) }, Some(late));
        }
    }

    fn note_disk(&self, verdict: &Verdict, failure: Option<&Failure>) {
        let mut breaker = self.disk_reads.0.lock();
        if verdict.answered {
            if breaker.succeeded() {
                tracing::info!(target: "kvbm", "the disk tier answers again: its blocks are found from now on");
            }
        } else if verdict.failures > 0 && breaker.failed(Instant::now()) {
            let failure = failure.map(tracing::field::display);
            tracing::warn!(
                target: "kvbm", failure,
                "the disk tier fails or does not answer: it is left alone for a while, and what it holds counts as missing; \
                 `kvbm doctor` and the status of the disks say more"
            );
        }
    }
}
