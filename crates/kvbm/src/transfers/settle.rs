//! Settlement: what follows when all plans of a transfer are over.

use super::transfer::{Parts, Transfer, Unsettled};
use super::{Destination, Move, Outcome, Purpose, Transfers};
use crate::error::{BlockFailure, concerns_both_ends, condemns_source, lost};
use crate::metrics::DropReason;
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, Path, SequenceHash, Tier};
use kvbm_pool::{AnyArrivals, ArrivalOutcome, Losses, Lost, Pinned, TierMask};
use std::sync::Arc;

impl Transfers {
    /// All plans of a transfer are over: arrivals become visible, sources are released, the outcome
    /// is published, in this order.
    pub(super) fn settle(&self, transfer: &Arc<Transfer>, unsettled: Unsettled) {
        let _inside = transfer.span.enter();
        // Dropped in the opposite order: should this panic, the outcome is published after the
        // holds are dropped.
        let Unsettled { settlement, parts, mut failures, kept, results } = unsettled;
        let Parts { destination, losses, holds, check } = parts;
        self.note_disk_reads(transfer, &results.disk);
        self.lose(transfer, losses, &mut failures, kept);
        let joinable = Joinable { transfers: self, transfer };
        if let Some(check) = check {
            for (index, failure) in failures.iter_mut().enumerate().skip(kept) {
                if concerns_both_ends(failure.as_ref())
                    && let Some(changed) = check(index)
                {
                    *failure = Some(changed);
                }
            }
        }
        self.add_history(transfer, &mut failures);
        self.quarantine_sources(transfer, &failures, losses);
        self.slots.drop_missing(missing_on_disk(&transfer.moves, &failures));
        if let Some(volume) = &transfer.volume {
            volume.transfer_ended(&results.volume, transfer.began);
            volume.reads_ended(&transfer.moves, &failures);
        }
        let arrived = match destination {
            Destination::Reserved { arrivals, places } => {
                let reserved = (arrivals, &places[..], kept);
                Some(self.complete(transfer, reserved, &mut failures, &results.unwritten))
            }
            Destination::Volume => {
                if let Some(volume) = &transfer.volume {
                    volume.writes_ended(&transfer.moves, &mut failures);
                }
                None
            }
            Destination::Unregistered => None,
        };
        if transfer.to == Tier::G3 {
            self.slots.retire_due();
        }
        drop(joinable);
        let failures = self.log_failures(transfer, failures);
        if let (Some(on_arrival), Some(arrived)) = (&transfer.on_arrival, &arrived) {
            on_arrival(arrived);
        }
        // Nobody waits for the blocks of an offload. They are released before the offload counts as
        // over (a hold ends its account): who waits for offloads may evict or clear what they
        // brought.
        let arrived = arrived.filter(|_| transfer.purpose != Purpose::Offload);
        // Before the outcome: a waiter may want back what was held for the transfer.
        drop(holds);
        settlement.publish(Outcome { arrived, failures });
    }

    /// Makes the blocks visible that arrived. What is still reserved afterwards failed: its slot
    /// goes back to Reset.
    fn complete(
        &self,
        transfer: &Transfer,
        (arrivals, places, kept): (AnyArrivals, &[usize], usize),
        failures: &mut [Option<Failure>],
        unwritten: &[usize],
    ) -> Pinned {
        let moves = &transfer.moves;
        let order = (transfer.to == Tier::G3).then(|| self.slots.order());
        let chained = transfer.purpose == Purpose::Onboard;
        let (mut arrivals, spare) = complete((arrivals, places, kept), moves, failures, chained);
        if order.is_some() {
            // A slot whose block did not become visible may hold a complete record, which a restart
            // would find.
            let outcomes = || moves.iter().zip(failures.iter());
            let not_visible: Vec<BlockId> =
                outcomes().filter(|(_, failure)| failure.is_some()).map(|(block, _)| block.dst).collect();
            self.slots.release(&not_visible);
            self.slots.release(&spare);
            let written: Vec<BlockId> =
                outcomes().filter(|(_, failure)| failure.is_none()).map(|(block, _)| block.dst).collect();
            let failed: Vec<_> = unwritten.iter().map(|&at| (places[at], moves[at].dst)).collect();
            self.slots.writes_ended(&mut arrivals, &written, &failed);
        }
        // Still under the lock `order`.
        arrivals.into_pinned()
    }

    /// What was read from, or written to, a tier that was lost since it was known to be there did
    /// not arrive, whatever the ranks say. A worker that started anew may have copied what it never
    /// had. Its answers come after its start has been handled. What had counted before was there
    /// then.
    fn lose(&self, transfer: &Transfer, losses: Losses, failures: &mut [Option<Failure>], kept: usize) {
        let is_lost = |tier: &Tier| self.registry.is_lost(*tier, losses);
        let tiers: TierMask = Tier::SLOTTED.into_iter().filter(is_lost).collect();
        if tiers.is_empty() {
            return;
        }
        let to = transfer.to;
        for (block, failure) in transfer.moves.iter().zip(failures).skip(kept) {
            let tier = [block.from, to].into_iter().find(|&tier| tiers.contains(tier));
            if let (true, Some(tier)) = (concerns_both_ends(failure.as_ref()), tier) {
                self.metrics.path(Path::new(block.from, to)).failures(FailureKind::Lost).add(1);
                *failure = Some(lost(Lost { tier }, "while the block was on its way"));
            }
        }
    }

    /// The failures with their blocks. Nobody waits for an offload, so its failures are logged, at
    /// a limited rate.
    fn log_failures(&self, transfer: &Transfer, failures: Vec<Option<Failure>>) -> Vec<BlockFailure> {
        let failed = transfer.moves.iter().zip(failures);
        let failed = failed.filter_map(|(block, failure)| Some(block.failed(transfer.to, failure?)));
        let failures: Vec<BlockFailure> = failed.collect();
        for failure in &failures {
            let kind = failure.failure.kind;
            let expected = matches!(kind, FailureKind::Cancelled | FailureKind::ShuttingDown);
            let is_offload = transfer.purpose == Purpose::Offload && !expected;
            if is_offload {
                self.metrics.path(failure.path).dropped(DropReason::Failed).add(1);
            }
            // A loss was logged once, of the rank. A caller that waits for a block gets its
            // failure; what is broken concerns others too.
            let is_broken = matches!(kind, FailureKind::Io | FailureKind::Device);
            let is_logged = is_offload && kind != FailureKind::Lost || is_broken;
            let topic = (failure.path, transfer.volume_id(), kind);
            let suppressed =
                if is_logged { self.log_limit.allow(topic, kvbm_plan::clock::now()) } else { None };
            if let Some(suppressed) = suppressed {
                tracing::warn!(target: "kvbm", %failure, suppressed, "block not transferred");
            } else {
                tracing::debug!(target: "kvbm", %failure, "block not transferred");
            }
        }
        failures
    }

    /// Remembers the copies. An audit that found wrong bytes gets the story of the block instead.
    fn add_history(&self, transfer: &Transfer, failures: &mut [Option<Failure>]) {
        let now = kvbm_plan::clock::now();
        if transfer.compare.is_none() {
            return self.history.add(&transfer.moves, transfer.to, failures, now);
        }
        for (block, failure) in transfer.moves.iter().zip(failures) {
            if let Some(failure) = failure.as_mut().filter(|failure| failure.kind == FailureKind::Differs) {
                let story = self.history.of(block.identity.hash, now);
                *failure = Failure::new(failure.kind, format!("{}; copies: {story}", failure.detail));
                tracing::error!(
                    target: "kvbm", hash = %block.identity.hash, detail = failure.detail,
                    "an audit found wrong bytes: what was served from this block is in doubt"
                );
            }
        }
    }

    /// A source whose bytes were bad never serves again. If its tier lost its blocks since, the
    /// slot holds something else by now.
    fn quarantine_sources(&self, transfer: &Transfer, failures: &[Option<Failure>], losses: Losses) {
        for (block, failure) in transfer.moves.iter().zip(failures) {
            let is_bad = failure.as_ref().is_some_and(|failure| condemns_source(failure.kind));
            if is_bad && !self.registry.is_lost(block.from, losses) {
                self.slots.quarantine(block.from, block.src, block.identity.hash);
            }
            let is_wrong = failure.as_ref().is_some_and(|failure| failure.kind == FailureKind::Differs);
            if is_wrong {
                self.quarantine_copies(block);
            }
        }
    }

    /// What was wrong when it was stored is wrong on every tier that it was copied to.
    fn quarantine_copies(&self, block: &Move) {
        let BlockIdentity { group, hash, .. } = block.identity;
        for tier in [Tier::G2, Tier::G3].into_iter().filter(|tier| *tier != block.from) {
            if let Some(slot) = self.registry.slot_of(tier, group, hash) {
                self.slots.quarantine(tier, slot, hash);
            }
        }
    }

    /// A worker found a block of its disk bad without having been sent to read it: what follows is
    /// what follows a read.
    pub(crate) fn disk_damaged(&self, slot: BlockId, identity: BlockIdentity, failure: Failure) {
        if condemns_source(failure.kind) {
            self.slots.quarantine(Tier::G3, slot, identity.hash);
            // Where the registry had given the block up already, its slot is free, or on its way to
            // another block.
            self.slots.retire(vec![slot]);
        } else {
            let block = Move { identity, from: Tier::G3, src: slot, dst: slot };
            self.slots.drop_missing(missing_on_disk(&[block], &[Some(failure)]));
        }
    }
}

/// Blocks that a disk was to give and does not hold, with their slots.
fn missing_on_disk(moves: &[Move], failures: &[Option<Failure>]) -> Vec<(BlockIdentity, BlockId)> {
    let is_missing = |failure: &Option<Failure>| {
        failure.as_ref().is_some_and(|failure| failure.kind == FailureKind::Missing)
    };
    let missing =
        moves.iter().zip(failures).filter(|(block, failure)| block.from == Tier::G3 && is_missing(failure));
    missing.map(|(block, _)| (block.identity, block.src)).collect()
}

/// A transfer that others may join, until this is dropped: nobody joins one whose end failed.
struct Joinable<'a> {
    transfers: &'a Transfers,
    transfer: &'a Arc<Transfer>,
}

impl Drop for Joinable<'_> {
    fn drop(&mut self) {
        self.transfers.joins.remove(self.transfer);
    }
}

/// Makes arrivals visible, first block first, behind the so many that are. In a chain, what comes
/// after a failure is failed too: a prefix has no holes. Elsewhere only blocks behind a failed
/// parent are. Also the slots that were filled for nothing: their block was removed on the way and
/// has come to another slot since.
fn complete(
    (mut arrivals, places, kept): (AnyArrivals, &[usize], usize),
    moves: &[Move],
    failures: &mut [Option<Failure>],
    chained: bool,
) -> (AnyArrivals, Vec<BlockId>) {
    let mut broken: Vec<SequenceHash> = Vec::new();
    for (block, failure) in moves.iter().zip(failures.iter_mut()) {
        let after_hole = chained && !broken.is_empty();
        let parent_failed = block.identity.parent.is_some_and(|parent| broken.contains(&parent));
        if failure.is_none() && (after_hole || parent_failed) {
            *failure = Some(Failure::new(FailureKind::Predecessor, "a block before it did not arrive"));
        }
        if failure.is_some() {
            broken.push(block.identity.hash);
        }
    }
    let rest = places.iter().zip(failures.iter()).skip(kept);
    let whole = rest.filter(|(_, slot)| slot.is_none()).map(|(&place, _)| place);
    let completions = arrivals.complete_each(whole);
    let completed = moves.iter().zip(failures).skip(kept).filter(|(_, slot)| slot.is_none());
    let mut spare = Vec::new();
    for ((block, slot), completion) in completed.zip(completions) {
        match completion {
            ArrivalOutcome::Removed => {
                let removed = "the block was removed while it was on its way";
                *slot = Some(Failure::new(FailureKind::Missing, removed));
            }
            ArrivalOutcome::Existing { .. } => spare.push(block.dst),
            ArrivalOutcome::Stored => {}
        }
    }
    (arrivals, spare)
}
