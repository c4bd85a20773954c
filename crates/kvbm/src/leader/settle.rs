//! The end of an operation: what arrived becomes visible, what failed is told, what was held is let go.

use super::Leader;
use super::operation::{Destination, Move, Operation, Outcome, Parts, Purpose, Unsettled};
use crate::error::{BlockFailure, condemns_source, lost};
use crate::metrics::DropReason;
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, Path, SequenceHash, Tier};
use kvbm_pool::{AnyArrivals, ArrivalOutcome, Losses, Lost, Quarantine, TierMask};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

impl Leader {
    /// All plans of an operation are over: arrivals become visible, sources are let go, waiters are told, in this order.
    pub(super) fn settle(self: &Arc<Self>, operation: &Arc<Operation>, unsettled: Unsettled) {
        let _inside = operation.span.enter();
        // Dropped in the opposite order: should this panic, whoever waits is told after what was held is let go.
        let Unsettled { promise, parts, mut failures, kept, told } = unsettled;
        self.note_disk_reads(operation, &told.disk);
        self.lose(operation.to, &parts, &mut failures, kept);
        let joinable = Joinable { leader: self, operation, moves: promise.moves() };
        if let Some(check) = &parts.source_check {
            for (index, slot) in failures.iter_mut().enumerate().skip(kept) {
                if slot.is_none() {
                    *slot = check(index);
                }
            }
        }
        self.condemn_sources(&parts.moves, &failures, Some(parts.losses));
        self.drop_missing(&parts.moves, &failures);
        if let Some(volume) = &parts.volume {
            volume.note(&told.volume, operation.began);
            self.note_reads(volume, &parts.moves, &failures, operation.since);
        }
        let arrived = match parts.destination {
            Destination::Reserved { arrivals, places } => {
                let order = (operation.to == Tier::G3).then(|| self.disk_order.lock());
                let chained = operation.purpose == Purpose::Onboard;
                let (mut arrivals, spare) =
                    complete((arrivals, &places, kept), &parts.moves, &mut failures, chained);
                if order.is_some() {
                    self.release_lost(&parts.moves, &failures);
                    self.release(&spare);
                    self.rest(&mut arrivals, &places, &parts.moves, &failures, &told.unwritten);
                }
                // What is still reserved failed: its slot goes back to Reset.
                Some(arrivals.into_pinned())
            }
            Destination::Volume => {
                if let Some(volume) = &parts.volume {
                    self.complete_on_volume(volume, &parts.moves, &mut failures);
                }
                None
            }
            Destination::Unregistered => None,
        };
        if operation.to == Tier::G3 {
            self.retire_doomed();
        }
        drop(joinable);
        let failures = self.tell(operation, &parts.moves, failures);
        if let Some(arrived) = &arrived {
            self.registered(operation.to, parts.round, || arrived.clone());
        }
        // Nobody waits for the blocks of an offload. They are let go before it counts as over (`keep` ends its account): who waits for
        // offloads may evict or clear what they brought.
        let arrived = arrived.filter(|_| operation.purpose != Purpose::Offload);
        // Before anybody is told: who waited may want back what was kept for the transfer.
        drop(parts.keep);
        promise.keep(Outcome { arrived, failures });
        self.pump();
    }

    /// What was read from, or written to, a tier that was lost since it was known to be there did not arrive, whatever the ranks say: a
    /// worker that started anew may have copied what it never had. Its answers come after its start has been handled.
    /// What had counted before was there then.
    fn lose(&self, to: Tier, parts: &Parts, failures: &mut [Option<Failure>], kept: usize) {
        let is_lost = |tier: &Tier| self.registry.is_lost(*tier, parts.losses);
        let tiers: TierMask = Tier::SLOTTED.into_iter().filter(is_lost).collect();
        if tiers.is_empty() {
            return;
        }
        for (step, slot) in parts.moves.iter().zip(failures).skip(kept) {
            let tier = [step.from, to].into_iter().find(|&tier| tiers.contains(tier));
            if let (None, Some(tier)) = (&slot, tier) {
                self.metrics.path(Path::new(step.from, to)).failures(FailureKind::Lost).add(1);
                *slot = Some(lost(Lost { tier }, "while the block was on its way"));
            }
        }
    }

    /// The failures with their blocks. Nobody waits for an offload, so the log tells of its failures: of one in a while, and how many more
    /// there were.
    fn tell(
        &self,
        operation: &Operation,
        moves: &[Move],
        failures: Vec<Option<Failure>>,
    ) -> Vec<BlockFailure> {
        let failed = moves.iter().zip(failures);
        let failed = failed.filter_map(|(step, slot)| Some(step.failed(operation.to, slot?)));
        let failures: Vec<BlockFailure> = failed.collect();
        for failure in &failures {
            let kind = failure.failure.kind;
            let expected = matches!(kind, FailureKind::Cancelled | FailureKind::ShuttingDown);
            let is_offload = operation.purpose == Purpose::Offload && !expected;
            if is_offload {
                self.metrics.path(failure.path).dropped(DropReason::Failed).add(1);
            }
            // A loss was told once, of the rank. Who waits for a block is told why it did not come; what is broken concerns others too.
            let is_broken = matches!(kind, FailureKind::Io | FailureKind::Device);
            let is_news = is_offload && kind != FailureKind::Lost || is_broken;
            let topic = (failure.path, operation.volume, kind);
            let untold = if is_news { self.told.again(topic, Instant::now()) } else { None };
            if let Some(untold) = untold {
                tracing::warn!(target: "kvbm", %failure, untold, "block not transferred");
            } else {
                tracing::debug!(target: "kvbm", %failure, "block not transferred");
            }
        }
        failures
    }

    /// Slots of G3 that could not be written are left alone for a while.
    fn rest(
        &self,
        arrivals: &mut AnyArrivals,
        places: &[usize],
        moves: &[Move],
        failures: &[Option<Failure>],
        unwritten: &[usize],
    ) {
        let now = Instant::now();
        let written: Vec<_> =
            moves.iter().zip(failures).filter(|(_, slot)| slot.is_none()).map(|(step, _)| step.dst).collect();
        let failed: Vec<_> = unwritten.iter().map(|&index| moves[index].dst).collect();
        let count = self.resting.hears(&written, &failed, now);
        // What goes out of use for good has no rest.
        let doomed = self.doomed.lock();
        let may_rest = unwritten.iter().filter(|&&index| !doomed.contains(&moves[index].dst));
        let slots = arrivals.fail_and_withhold(may_rest.take(count).map(|&index| places[index]));
        drop(doomed);
        let total = slots.len();
        if self.resting.rest(slots, now) {
            tracing::warn!(
                target: "kvbm", slots = total,
                "slots of G3 that could not be written are left alone for a while: see the errors of its directories in the status"
            );
        }
    }

    /// A source whose bytes were bad never serves again, nor after a restart. Of a tier that was lost since nothing is said by that of its
    /// slots.
    fn condemn_sources(&self, moves: &[Move], failures: &[Option<Failure>], since: Option<Losses>) {
        for (step, slot) in moves.iter().zip(failures) {
            let condemned = slot.as_ref().is_some_and(|failure| condemns_source(failure.kind));
            let is_lost = since.is_some_and(|since| self.registry.is_lost(step.from, since));
            if !condemned || is_lost || step.src.0 >= self.registry.capacity(step.from) {
                continue;
            }
            self.metrics.tier(step.from).corrupt.add(1);
            let quarantine = self.registry.quarantine(step.from, step.src);
            tracing::warn!(
                target: "kvbm", tier = %step.from, block = %step.src, hash = %step.identity.hash, ?quarantine,
                "bad bytes: slot quarantined"
            );
            if step.from == Tier::G3 && quarantine != Quarantine::NotRegistered {
                self.release(&[step.src]);
            }
        }
    }

    /// A worker found a block of its disk bad without having been asked: what follows is what follows a read.
    pub(super) fn disk_damaged(&self, block: BlockId, identity: BlockIdentity, failure: Failure) {
        let step = Move { identity, from: Tier::G3, src: block, dst: block };
        let condemned = condemns_source(failure.kind) && block.0 < self.registry.capacity(Tier::G3);
        let failures = [Some(failure)];
        self.condemn_sources(&[step], &failures, None);
        self.drop_missing(&[step], &failures);
        if condemned {
            // Where the registry had given the block up already, its slot is free, or on its way to another block.
            self.doomed.lock().push(block);
            self.retire_doomed();
        }
    }

    /// A worker that started again found these slots out of use on its disk, as a repair leaves them: no rank writes there, and what the
    /// others have there is not whole.
    pub(super) fn disk_opened_again(&self, mut unusable: Vec<BlockId>) {
        // It may be another device.
        drop(self.resting.all());
        unusable.retain(|slot| slot.0 < self.registry.capacity(Tier::G3));
        if unusable.is_empty() {
            return;
        }
        let mut doomed = self.doomed.lock();
        doomed.append(&mut unusable);
        doomed.sort_unstable();
        doomed.dedup();
        drop(doomed);
        self.retire_doomed();
    }

    /// Takes bad slots out of use that the registry did not know to hold a block when they were found.
    fn retire_doomed(&self) {
        if self.doomed.lock().is_empty() {
            return;
        }
        // Nothing arrives meanwhile.
        let _order = self.disk_order.lock();
        let mut doomed = self.doomed.lock();
        let is_out = |block: BlockId| {
            self.registry.quarantine(Tier::G3, block) != Quarantine::NotRegistered
                || self.registry.retire(Tier::G3, &[block]) > 0
        };
        doomed.retain(|&block| !is_out(block));
        let status = self.registry.occupancy(Tier::G3);
        if status.arriving + status.held == 0 {
            // With nothing on its way to them, those that are left were out of use before.
            doomed.clear();
        }
    }

    /// Blocks of the disk that are not there after all (their slots were being overwritten when the last process ended, or a disk gave them
    /// up) are on no list any more, nor is what continues them: of each chain the topmost one says it all. What has come to another slot
    /// since is there.
    fn drop_missing(&self, moves: &[Move], failures: &[Option<Failure>]) {
        let is_missing = |failure: &Option<Failure>| {
            failure.as_ref().is_some_and(|failure| failure.kind == FailureKind::Missing)
        };
        let missing =
            moves.iter().zip(failures).filter(|(step, slot)| step.from == Tier::G3 && is_missing(slot));
        let mut missing: Vec<_> = missing.map(|(step, _)| (step.identity, step.src)).collect();
        if missing.is_empty() {
            return;
        }
        // Nothing arrives meanwhile.
        let _order = self.disk_order.lock();
        missing
            .retain(|(block, slot)| self.registry.slot_of(Tier::G3, block.group, block.hash) == Some(*slot));
        let missing: Vec<_> = missing.into_iter().map(|(block, _)| block).collect();
        let gone: HashSet<_> = missing.iter().map(|block| (block.group, block.hash)).collect();
        let continues =
            |block: &BlockIdentity| block.parent.is_some_and(|parent| gone.contains(&(block.group, parent)));
        let topmost: Vec<_> =
            missing.iter().filter(|block| !continues(block)).map(|block| (block.group, block.hash)).collect();
        let removed = self.registry.remove_subtrees(&topmost, TierMask::only(Tier::G3));
        tracing::info!(target: "kvbm", missing = missing.len(), blocks = removed.blocks, "not on disk after all");
    }

    /// Slots of G3 whose block did not become visible may hold a complete record, which a restart would find.
    fn release_lost(&self, moves: &[Move], failures: &[Option<Failure>]) {
        let lost = moves.iter().zip(failures).filter(|(_, slot)| slot.is_some());
        let lost: Vec<_> = lost.map(|(step, _)| step.dst).collect();
        self.release(&lost);
    }
}

/// An operation that others may join, until this is dropped: nobody joins one whose end failed.
struct Joinable<'a> {
    leader: &'a Leader,
    operation: &'a Arc<Operation>,
    moves: &'a [Move],
}

impl Drop for Joinable<'_> {
    fn drop(&mut self) {
        self.leader.joins.remove(self.operation, self.moves);
    }
}

/// Makes arrivals visible, first block first, behind the so many that are. In a chain, what comes after a failure is failed too: a
/// prefix has no holes. Elsewhere only blocks behind a failed parent are. Also the slots that were filled for nothing: their block was removed
/// on the way and has come to another slot since.
fn complete(
    (mut arrivals, places, kept): (AnyArrivals, &[usize], usize),
    moves: &[Move],
    failures: &mut [Option<Failure>],
    chained: bool,
) -> (AnyArrivals, Vec<BlockId>) {
    let mut broken: Vec<SequenceHash> = Vec::new();
    for (step, slot) in moves.iter().zip(failures.iter_mut()) {
        let after_hole = chained && !broken.is_empty();
        let parent_failed = step.identity.parent.is_some_and(|parent| broken.contains(&parent));
        if slot.is_none() && (after_hole || parent_failed) {
            *slot = Some(Failure::new(FailureKind::Predecessor, "a block before it did not arrive"));
        }
        if slot.is_some() {
            broken.push(step.identity.hash);
        }
    }
    let rest = places.iter().zip(failures.iter()).skip(kept);
    let whole = rest.filter(|(_, slot)| slot.is_none()).map(|(&place, _)| place);
    let completions = arrivals.complete_each(whole);
    let completed = moves.iter().zip(failures).skip(kept).filter(|(_, slot)| slot.is_none());
    let mut spare = Vec::new();
    for ((step, slot), completion) in completed.zip(completions) {
        match completion {
            ArrivalOutcome::Removed => {
                let removed = "the block was removed while it was on its way";
                *slot = Some(Failure::new(FailureKind::Missing, removed));
            }
            ArrivalOutcome::Existing { .. } => spare.push(step.dst),
            ArrivalOutcome::Stored => {}
        }
    }
    (arrivals, spare)
}
