//! Slots of G3 that change hands: releases, removals that must become durable, slots that are
//! withheld, and slots that are quarantined.
//!
//! The lock [`Slots::order`] is held while slots of G3 change hands and the workers are sent what
//! follows from it. So no slot is released after its next block was sent to it.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `removals` | removals that a disk may lack | - |
//! | `directories` | circuit breakers of the directories of the disk tier | - |

mod directories;
mod removals;

use crate::circuit_breaker::StateChange;
use crate::metrics::Metrics;
use crate::ranks::Ranks;
use crate::ranks::recovery::RankPart;
use crate::ranks::requests::Requests;
pub(crate) use directories::Directories;
pub use directories::DirectoryStatus;
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{
    BlockId, BlockIdentity, Command, Failure, FlushOutcome, NamespaceId, Rank, SequenceHash, Tier,
    deadline_after,
};
use kvbm_pool::{AnyArrivals, Quarantine, Registry, TierMask};
use parking_lot::{Mutex, ReentrantMutex, ReentrantMutexGuard};
use removals::PendingRemovals;
pub(crate) use removals::Removal;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whether the caller of a removal waits for the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Commit {
    /// Until the removal is durable, or its deadline passes.
    Await,
    /// The disks commit it later.
    Background,
}

/// See the module.
pub(crate) struct Slots {
    registry: Registry,
    ranks: Arc<Ranks>,
    metrics: Metrics,
    /// Flushes of the disks that wait for the ranks.
    flushes: Arc<Requests<FlushOutcome>>,
    /// A link may answer from inside `send`, hence reentrant.
    order: ReentrantMutex<()>,
    /// By rank.
    removals: Vec<Mutex<PendingRemovals>>,
    directories: Directories,
    /// Bad slots that were about to be written when they were found bad: they are retired when that
    /// write has failed.
    to_retire: Mutex<Vec<BlockId>>,
    /// Longest wait for the disks to make a removal durable.
    durable_within: Duration,
    /// Whether a namespace has data keys on the disks.
    encrypted: bool,
    /// Copies to G3 that have ended, and how many had when a flush began that every rank has
    /// answered.
    writes: AtomicU64,
    durable_writes: AtomicU64,
}

impl Slots {
    pub(crate) fn new(
        registry: Registry,
        ranks: Arc<Ranks>,
        metrics: Metrics,
        durable_within: Duration,
        directories: Directories,
        encrypted: bool,
    ) -> Self {
        Self {
            directories,
            removals: ranks.all().map(|_| Mutex::default()).collect(),
            flushes: Arc::default(),
            order: ReentrantMutex::new(()),
            to_retire: Mutex::default(),
            registry,
            ranks,
            metrics,
            durable_within,
            encrypted,
            writes: AtomicU64::new(0),
            durable_writes: AtomicU64::new(0),
        }
    }

    /// Keeps slots of G3 from changing hands while the guard lives.
    pub(crate) fn order(&self) -> ReentrantMutexGuard<'_, ()> {
        self.order.lock()
    }

    /// The directories of the disk tier.
    pub(crate) fn directories(&self) -> &Directories {
        &self.directories
    }

    /// Prepares a reservation of `wanted` slots: withheld slots whose time is over are free again.
    /// How many slots may be reserved.
    pub(crate) fn writable(&self, wanted: usize) -> usize {
        let now = kvbm_plan::clock::now();
        drop(self.directories.take_due(now));
        self.directories.writable(wanted, now)
    }

    /// Copies to G3 are over: slots that were written, and reservations whose slot could not be
    /// written (place in `arrivals` and slot).
    pub(crate) fn writes_ended(
        &self,
        arrivals: &mut AnyArrivals,
        written: &[BlockId],
        failed: &[(usize, BlockId)],
    ) {
        self.writes.fetch_add(1, Ordering::AcqRel);
        // A slot that is about to be retired is not withheld.
        let to_retire = self.to_retire.lock();
        let failed: Vec<_> = failed.iter().filter(|(_, slot)| !to_retire.contains(slot)).copied().collect();
        let changes = self.directories.record_writes(arrivals, written, &failed, kvbm_plan::clock::now());
        drop(to_retire);
        for change in changes {
            let directory = change.directory;
            match change.change {
                StateChange::None => {}
                StateChange::Closed => {
                    tracing::info!(target: "kvbm", directory, "a directory of the disk tier takes writes again");
                }
                StateChange::Opened => tracing::warn!(
                    target: "kvbm", directory,
                    "a directory of the disk tier fails writes: copies go to others for a while; \
                     the status shows the errors of each directory"
                ),
            }
        }
    }

    /// Quarantines a slot whose bytes were bad: it never serves again, nor after a restart.
    pub(crate) fn quarantine(&self, tier: Tier, slot: BlockId, hash: SequenceHash) {
        if slot.0 >= self.registry.capacity(tier) {
            return;
        }
        self.metrics.tier(tier).corrupt.add(1);
        let quarantine = self.registry.quarantine(tier, slot);
        tracing::warn!(target: "kvbm", %tier, %slot, %hash, ?quarantine, "bad bytes: slot quarantined");
        if tier == Tier::G3 && quarantine != Quarantine::NotRegistered {
            self.release(&[slot]);
        }
    }

    /// Retires bad slots of G3, at the latest when the writes to them are over.
    pub(crate) fn retire(&self, mut slots: Vec<BlockId>) {
        slots.retain(|slot| slot.0 < self.registry.capacity(Tier::G3));
        if slots.is_empty() {
            return;
        }
        {
            let mut to_retire = self.to_retire.lock();
            to_retire.append(&mut slots);
            to_retire.sort_unstable();
            to_retire.dedup();
        }
        self.retire_due();
    }

    /// Retires bad slots that the registry did not know to hold a block when they were found bad.
    pub(crate) fn retire_due(&self) {
        if self.to_retire.lock().is_empty() {
            return;
        }
        // Nothing arrives meanwhile.
        let _order = self.order();
        let mut to_retire = self.to_retire.lock();
        let slots = std::mem::take(&mut *to_retire);
        *to_retire = self.registry.retire(Tier::G3, &slots);
    }

    /// A worker that started again opened its disk, where these slots are out of use, as a repair
    /// leaves them. No rank writes there any more, and what the others have there is not whole.
    pub(crate) fn disk_reopened(&self, unusable: Vec<BlockId>) {
        // It may be another device.
        drop(self.directories.reset_writes());
        self.retire(unusable);
    }

    /// Removes blocks from the registry that a disk does not hold after all: their slots were being
    /// overwritten when the last process ended, or a disk gave them up. What continues them goes
    /// too. A block that has come to another slot since stays.
    pub(crate) fn drop_missing(&self, mut missing: Vec<(BlockIdentity, BlockId)>) {
        if missing.is_empty() {
            return;
        }
        // Nothing arrives meanwhile.
        let _order = self.order();
        missing
            .retain(|(block, slot)| self.registry.slot_of(Tier::G3, block.group, block.hash) == Some(*slot));
        let missing: Vec<_> = missing.into_iter().map(|(block, _)| block).collect();
        let gone: HashSet<_> = missing.iter().map(|block| (block.group, block.hash)).collect();
        let continues =
            |block: &BlockIdentity| block.parent.is_some_and(|parent| gone.contains(&(block.group, parent)));
        // Of each chain the topmost block stands for all.
        let topmost: Vec<_> =
            missing.iter().filter(|block| !continues(block)).map(|block| (block.group, block.hash)).collect();
        let removed = self.registry.remove_subtrees(&topmost, TierMask::only(Tier::G3));
        tracing::info!(target: "kvbm", missing = missing.len(), blocks = removed.blocks, "the disk does not hold these blocks: removed");
    }

    /// A rank has answered a flush.
    pub(crate) fn flush_answered(&self, rank: Rank, token: u64, outcome: FlushOutcome) {
        if matches!(outcome, FlushOutcome::Durable { .. }) {
            self.caught_up(rank, token);
        }
        self.flushes.answer(rank, token, outcome);
    }

    /// A rank will not answer flushes any more.
    pub(crate) fn fail_requests(&self, rank: Rank, reason: &Failure) {
        self.flushes.lost(rank, || FlushOutcome::Failed(reason.clone()));
    }

    /// Has every rank make durable what its disk was sent. The blocks that each rank holds then.
    pub(crate) fn flush(&self, deadline: Instant) -> Result<Vec<u64>, (Rank, Failure)> {
        // Read before any rank is sent the flush: what it is sent after that may not be part of it.
        let writes = self.writes.load(Ordering::Acquire);
        let sent: Vec<u64> = self.removals.iter().map(|pending| pending.lock().last_sent()).collect();
        let started = self.flushes.start(self.ranks.len());
        for (rank, failure) in self.ranks.broadcast(&Command::Flush { token: started.token }) {
            self.flushes.answer(rank, started.token, FlushOutcome::Failed(failure));
        }
        let each = started.wait_each(deadline, "the flush", |outcome| match outcome {
            FlushOutcome::Durable { blocks } => Ok(blocks),
            FlushOutcome::Failed(_) if planted(Planted::FlushWithoutRank) => Ok(u64::MAX),
            FlushOutcome::Failed(failure) => Err(failure),
        });
        for ((pending, upto), outcome) in self.removals.iter().zip(sent).zip(&each) {
            if outcome.is_ok() || planted(Planted::ConfirmRemovalEarly) {
                pending.lock().durable(upto);
            }
        }
        let durable: Result<Vec<u64>, _> = each.into_iter().collect();
        if durable.is_ok() {
            self.durable_writes.fetch_max(writes, Ordering::AcqRel);
        }
        durable
    }

    /// Whether every rank has made durable what its disk was sent, as far as copies to it have
    /// ended.
    pub(crate) fn is_durable(&self) -> bool {
        self.durable_writes.load(Ordering::Acquire) == self.writes.load(Ordering::Acquire)
            && self.unconfirmed() == 0
    }

    /// Waits until the disks have made durable what was removed from them, or logs which has not.
    /// A removal in the background is durable with the disks' next commit, or the next flush.
    fn commit_removal(&self, commit: Commit) {
        if commit == Commit::Background {
            return;
        }
        if let Err((rank, failure)) = self.flush(deadline_after(kvbm_plan::clock::now(), self.durable_within))
        {
            tracing::warn!(
                target: "kvbm", %rank, %failure,
                "a removal from G3 is not known to be durable: call flush. A worker that starts again is sent it once more; where the manager ends before either, repeat the removal"
            );
        }
    }

    /// Removes all inactive blocks from `tier`. How many went.
    pub(crate) fn clear(&self, tier: Tier, commit: Commit) -> u64 {
        let order = self.order();
        let removed = self.registry.clear(tier).blocks;
        if tier == Tier::G3 {
            self.remove_unused();
            drop(order);
            self.commit_removal(commit);
        }
        removed
    }

    /// Removes a namespace from G1, G2 and G3. How many blocks went, in all and from each tier.
    pub(crate) fn forget(&self, namespace: NamespaceId, commit: Commit) -> (u64, [u64; 3]) {
        let order = self.order();
        let removed = || Tier::SLOTTED.map(|tier| self.registry.counters(tier).removed);
        let before = removed();
        let blocks = self.registry.forget(namespace).blocks;
        // Nothing else removes blocks on request: clear takes the same lock.
        let after = removed();
        let each = std::array::from_fn(|at| after[at].saturating_sub(before[at]));
        if self.registry.capacity(Tier::G3) > 0 {
            // The disks know what they hold, also blocks that left the registry in another way. A
            // copy that is on its way there is released when it ends.
            self.remove(Removal::Namespace(namespace));
            drop(order);
            self.commit_removal(commit);
        }
        (blocks, each)
    }

    /// Removes the blocks of `tiers` from the registry, because a rank's part of them is gone.
    /// Records on disks stay, so that a later leader finds what all ranks have then. How many went.
    pub(crate) fn lose(&self, tiers: &[Tier]) -> u64 {
        let _order = self.order();
        self.registry.lose(tiers.iter().copied().collect()).blocks
    }

    /// A worker that has started again says what it found on its disk, or a part of that. Nothing
    /// is sent to it yet.
    pub(crate) fn disk_found_again(&self, rank: Rank, part: &RankPart) {
        let Some(pending) = self.removals.get(rank.index()) else { return };
        // No block comes to a slot of the disk meanwhile.
        let _order = self.order();
        pending.lock().found(&part.blocks);
        if !part.last {
            return;
        }
        let registered = self.registry.snapshot(Tier::G3).0.into_iter().collect();
        let missing = pending.lock().found_all(&registered);
        for block in missing {
            let removed =
                self.registry.remove_subtree(block.group, block.hash, TierMask::only(Tier::G3)).blocks;
            tracing::info!(target: "kvbm", %rank, hash = %block.hash, blocks = removed, "not on the disk of a rank that started again: its slot has an earlier block there");
        }
    }
}
