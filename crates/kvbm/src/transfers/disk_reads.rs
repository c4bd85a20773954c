//! Reads from the disk tier and the circuit breakers of its directories: while a directory hangs or
//! fails, its blocks count as missing and are computed again.

use super::Transfers;
use super::transfer::{DiskResults, Transfer};
use crate::circuit_breaker::StateChange;
use kvbm_plan::{BlockId, Failure, Tier};
use kvbm_pool::Prefix;
use std::time::{Duration, Instant};

/// Within so long after a request to take a plan back, ranks report that they had not started it.
const TAKEN_BACK: Duration = Duration::from_millis(250);

/// How long nothing may come of a read before its disk is known to hang: its deadline and, where it
/// began late, half as long again. A probe takes no longer.
pub(crate) fn longest_probe(deadline: Duration) -> Duration {
    deadline.saturating_add(quiet_limit(deadline)).saturating_add(TAKEN_BACK)
}

/// A disk that serves nothing for so long while it is asked does not answer.
fn quiet_limit(deadline: Duration) -> Duration {
    deadline / 2
}

impl Transfers {
    /// Whether blocks of a directory of G3 are not offered, because reads from it failed.
    pub(crate) fn is_disk_down(&self) -> bool {
        self.slots.directories().is_down()
    }

    /// The last failure of these reads.
    pub(crate) fn disk_failure(&self) -> Option<Failure> {
        self.slots.directories().failure()
    }

    /// Ends `prefix` before the first block that only a directory has which may not be read now.
    pub(crate) fn leave_out_disk(&self, prefix: &mut Prefix) {
        let on_disk = prefix.blocks().iter().enumerate().filter(|(_, block)| block.tier == Tier::G3);
        let on_disk: Vec<_> = on_disk.map(|(at, block)| (at, block.block)).collect();
        let slots = on_disk.iter().map(|(_, slot)| *slot);
        let Some(first) = self.slots.directories().first_unreadable(slots) else { return };
        let at = on_disk[first].0;
        let left_out = prefix.blocks().len() - at;
        self.metrics.disks.left_out.add(left_out as u64);
        prefix.truncate(prefix.start() + at);
    }

    /// Another worker serves a rank: earlier results of reads say nothing about it.
    pub(crate) fn forget_disk_reads(&self) {
        self.slots.directories().reset_reads();
    }

    /// A transfer is over: what ranks said of the disks it read from, once for each transfer.
    pub(super) fn note_disk_reads(&self, transfer: &Transfer, results: &DiskResults) {
        if results.are_conclusive() && transfer.is_first_disk_result() {
            let slot = |at: &usize| transfer.moves[*at].src;
            let blocks = results.blocks.iter().map(|(at, failure)| (slot(at), failure.as_ref()));
            let late: Vec<BlockId> = results.late_blocks.iter().map(slot).collect();
            self.record_reads(transfer, blocks, (&late, results.late.as_ref()));
        }
    }

    /// A transfer is late. A disk that served nothing of it for half of the time that a read may
    /// take does not answer, if it was asked for so long. Ranks report what they have not started.
    /// A disk that goes on serving is only slow.
    pub(super) fn note_late_disk_reads(&self, transfer: &Transfer, now: Instant) {
        transfer.watch_quiet_disk(now, quiet_limit(self.settings.read_deadline.min(transfer.limit)));
    }

    /// What ranks still owe of a late transfer after its plans were taken back was started, if only
    /// in the last moment. A disk that served nothing for as long since does not answer.
    pub(super) fn note_hung_disk_reads(&self, transfer: &Transfer, late: &Failure, now: Instant) {
        let since = now.saturating_duration_since(transfer.deadline);
        if since < TAKEN_BACK || !transfer.is_owed_by_quiet_disk(now) {
            return;
        }
        let owed = transfer.owed_disk_slots();
        if transfer.is_first_disk_result() {
            self.record_reads(transfer, [], (&owed, Some(late)));
        }
    }

    fn record_reads<'a>(
        &self,
        transfer: &Transfer,
        blocks: impl IntoIterator<Item = (BlockId, Option<&'a Failure>)>,
        late: (&[BlockId], Option<&Failure>),
    ) {
        for change in self.slots.directories().record_reads(blocks, late, transfer.began) {
            let directory = change.directory;
            match change.change {
                StateChange::None => {}
                StateChange::Closed => tracing::info!(
                    target: "kvbm", directory,
                    "a directory of the disk tier answers again: its blocks are found from now on"
                ),
                StateChange::Opened => {
                    let failure = self.disk_failure();
                    let failure = failure.as_ref().map(tracing::field::display);
                    tracing::warn!(
                        target: "kvbm", directory, failure,
                        "a directory of the disk tier fails or does not answer: it is not read for a while, and its blocks \
                         count as missing; `kvbm doctor` and the status of the disks show why"
                    );
                }
            }
        }
    }
}
