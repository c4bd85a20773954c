//! Ranks that go away and come back: what becomes of the transfers that they owe, and of blocks
//! that are not whole any more.

use super::Leader;
use crate::ranks::{Contact, given_up};
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{Failure, FailureKind, Rank, Tier};
use std::time::Instant;

impl Leader {
    /// Gives up on a rank. What it owes fails, and nothing is sent to it until its worker says that
    /// it has started. What would need its part of a block is not found any more. Plans that it
    /// owed.
    pub(crate) fn rank_lost(&self, rank: Rank) -> usize {
        self.give_up(rank, |_| true)
    }

    /// The same, where `still` is true of what is known of the rank at that moment.
    fn give_up(&self, rank: Rank, still: impl FnOnce(&Contact) -> bool) -> usize {
        // No worker of the rank is taken in meanwhile.
        let order = self.slots.order();
        // Before the look at what is under way: what is sent meanwhile is refused.
        if !self.ranks.give_up(rank, still) {
            return 0;
        }
        let owed = self.transfers.owed_by(rank);
        let blocks = self.slots.lose(&Tier::SLOTTED);
        self.end_requests(rank, &given_up(rank));
        drop(order);
        tracing::warn!(target: "kvbm", %rank, plans = owed.len(), blocks, "a rank was given up: its transfers fail, and no cached block is whole any more");
        self.transfers.fail_plans(rank, &owed, &given_up(rank));
        owed.len()
    }

    /// A worker of the rank says that it has started. Where another one served the rank before, the
    /// memory of that one is gone, and what lay there is not found any more. What lies on its disk
    /// is compared when it is read.
    pub(super) fn rank_started(&self, rank: Rank) {
        // The rank is not given up meanwhile.
        let _order = self.slots.order();
        let Some(contact) = self.ranks.contact(rank) else { return };
        let start = self.ranks.begin_start(rank);
        let was_lost = self.ranks.is_lost(rank);
        if (was_lost || contact.starts > 0) && !planted(Planted::IgnoreRestart) {
            let tiers: &[Tier] = if was_lost { &Tier::SLOTTED } else { &[Tier::G1, Tier::G2] };
            let blocks = self.slots.lose(tiers);
            self.end_requests(rank, &process_restarted(rank));
            self.transfers.forget_disk_reads();
            tracing::info!(target: "kvbm", %rank, blocks, was_lost, "a rank's worker started again: what the one before it held is gone");
        }
        // Before anything reaches the new worker: a flush that it answers says nothing about what
        // only the one before was sent.
        let due = self.slots.worker_replaced(rank);
        start.done();
        // Still under the lock: no block was sent to its disk since.
        self.slots.catch_up(rank, &due);
    }

    /// Gives up ranks whose link stays closed, and ends what earlier workers of a rank owe.
    pub(super) fn watch_ranks(&self, now: Instant) {
        for rank in self.ranks.all().filter(|&rank| !self.ranks.is_lost(rank)) {
            let Some(contact) = self.ranks.contact(rank) else { continue };
            if let (Some(started), 2..) = (contact.started, contact.starts) {
                let earlier = self.transfers.owed_by_earlier(rank, contact.announced, started, now);
                self.transfers.fail_plans(rank, &earlier, &process_restarted(rank));
            }
            if self.ranks.stays_away(&contact, now) {
                let same = |then: &Contact| then.starts == contact.starts && then.closed.is_some();
                self.give_up(rank, same);
            }
        }
    }

    /// The process of a rank's worker has ended: it writes to no memory any more, and answers
    /// nothing that it was sent. What its memory held counts as there until its successor says that
    /// it has started, or the rank is given up; until then nothing is sent to the rank.
    pub(crate) fn worker_ended(&self, rank: Rank) {
        let order = self.slots.order();
        self.ranks.closed(rank);
        // What is still being sent is refused by the link, or by the successor's start.
        let owed = self.transfers.sent_to(rank);
        self.end_requests(rank, &process_ended(rank));
        drop(order);
        if self.leaving.ended(rank) && owed.is_empty() {
            tracing::info!(target: "kvbm", %rank, "the process of a rank's worker has ended, after announcing its exit");
        } else {
            tracing::warn!(target: "kvbm", %rank, plans = owed.len(), "the process of a rank's worker has ended");
        }
        self.transfers.fail_plans(rank, &owed, &process_ended(rank));
    }

    /// Nobody answers what an earlier worker of a rank was sent.
    fn end_requests(&self, rank: Rank, reason: &Failure) {
        self.slots.fail_requests(rank, reason);
        self.volumes.fail_requests(rank, reason);
    }
}

fn process_ended(rank: Rank) -> Failure {
    let detail = format!("the process of rank {rank}'s worker has ended: start it again");
    Failure::new(FailureKind::Io, detail)
}

fn process_restarted(rank: Rank) -> Failure {
    let detail = format!("rank {rank} had taken it when its worker ended, and started again");
    Failure::new(FailureKind::Io, detail)
}
