//! Flush, clear, forget and shutdown.

use super::{ForgottenKey, Leader};
use crate::metrics::EvictReason;
use crate::slots::Commit;
use kvbm_plan::{
    BlockIdentity, Failure, FailureKind, GroupId, NamespaceId, Path, Rank, SequenceHash, Tier, VolumeId,
};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::time::Instant;

/// What a flush made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushReport {
    /// Blocks that every rank has durable on G3; where there is no disk, blocks on volumes.
    pub durable_blocks: u64,
}

/// A flush that did not reach every disk. What was durable before still is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// There is nothing that could be made durable.
    #[error("nothing that lasts is configured: set disk.dir and disk.capacity, or volume.uri")]
    NoDisk,
    /// A rank failed, or did not answer in time.
    #[error("flush failed on rank {rank}: {failure}")]
    Rank {
        /// The rank.
        rank: Rank,
        /// Why.
        failure: Failure,
    },
    /// Copies to disk were still under way at the deadline; what had arrived was not flushed.
    #[error("offloads to disk did not finish in time: allow more time, or flush again later")]
    Busy,
}

/// How a manager ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Blocks durable on G3, or on volumes where there is no disk; `None` where there is neither or
    /// the flush failed.
    pub durable_blocks: Option<u64>,
    /// Blocks of G1 and G2 that are not on G3 (on a volume, where there is no disk) and are lost
    /// with the process. It is 0 where there is neither, for then nothing could be saved.
    pub not_saved: u64,
    /// Whether every offload ended in time.
    pub drained: bool,
    /// Why the flush failed, if it did.
    pub flush_error: Option<FlushError>,
    /// Ranks and volumes that have not confirmed what `forget` and `clear` removed there: another
    /// manager may find it. Repeat it there.
    pub removals_unconfirmed: usize,
    /// Events that nobody took in time: followers learn of them from the next life.
    pub events_unpublished: u64,
}

/// What a `forget` removed, and what is not confirmed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForgetReceipt {
    /// Blocks that went from G1, G2 and G3. They cannot be found any more.
    pub blocks: u64,
    /// Copies that left each of G1, G2 and G3: a block may have had several.
    pub copies: [u64; 3],
    /// Copies that left volumes, as far as they were known.
    pub on_volumes: u64,
    /// Slots of G1, G2 and G3 with removed blocks of any namespace that somebody still uses. Their
    /// bytes stay until the last user lets go.
    pub in_use: u32,
    /// Ranks whose disks have not confirmed all removals. They are sent them again when their
    /// workers start, with the next flush and at the shutdown. Where blocks are encrypted, their
    /// data keys are to be destroyed until then, and are not among [`keys`](Self::keys) unless the
    /// rank has named them.
    pub disks_unconfirmed: usize,
    /// Volumes that have not confirmed all removals. They are asked again.
    pub volumes_unconfirmed: Vec<VolumeId>,
    /// Data keys of the namespace, where blocks are encrypted: destroyed, or to be destroyed.
    pub keys: Vec<ForgottenKey>,
}

impl ForgetReceipt {
    /// Whether nothing is left on this node. Its peers keep what they have read from it.
    pub fn is_complete(&self) -> bool {
        self.in_use == 0
            && self.disks_unconfirmed == 0
            && self.volumes_unconfirmed.is_empty()
            && self.keys.iter().all(|key| key.is_destroyed)
    }
}

/// A tier that has no blocks of ours to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tier} cannot be cleared: {}", match tier {
    Tier::G1 => "the engine owns its blocks; it releases them",
    _ => "it is not configured",
})]
pub struct ClearError {
    /// The tier.
    pub tier: Tier,
}

impl ShutdownReport {
    /// Whether everything that could be saved was, and everything that was removed is gone for
    /// good.
    pub fn is_complete(&self) -> bool {
        self.drained && self.not_saved == 0 && self.flush_error.is_none() && self.removals_unconfirmed == 0
    }
}

impl Leader {
    /// Waits for copies to disk that are under way, then makes them durable; also removals that
    /// ranks could not be sent when they were due.
    pub(crate) fn flush(&self, deadline: Instant) -> Result<FlushReport, FlushError> {
        let span = tracing::info_span!(target: "kvbm", "flush", durable = tracing::field::Empty);
        let _inside = span.enter();
        let Some(lasting) = self.lasting() else { return Err(FlushError::NoDisk) };
        self.slots.send_removals_again();
        if !self.offload.wait_under_way(deadline) {
            return Err(FlushError::Busy);
        }
        if lasting == Tier::G4 {
            // A volume has made durable what it said that it has.
            let durable_blocks = self.volumes.blocks() as u64;
            return Ok(FlushReport { durable_blocks });
        }
        match self.slots.flush(deadline) {
            Ok(ranks) => {
                let durable_blocks = ranks.into_iter().min().unwrap_or(0);
                span.record("durable", durable_blocks);
                Ok(FlushReport { durable_blocks })
            }
            Err((rank, failure)) => Err(FlushError::Rank { rank, failure }),
        }
    }

    /// The flush that a manager ends with.
    fn flush_last(&self, deadline: Instant) -> Result<FlushReport, FlushError> {
        let report = self.flush_unless_clean(deadline)?;
        if self.slots.unconfirmed() == 0 {
            return Ok(report);
        }
        // Slots of bad blocks, say, that were released while the disks were flushed. What does not
        // become durable stays unconfirmed.
        Ok(self.flush(deadline).unwrap_or(report))
    }

    /// A flush. Where it reaches not every disk and there is nothing to make durable, it does not
    /// fail: the workers are gone already, say.
    pub(super) fn flush_unless_clean(&self, deadline: Instant) -> Result<FlushReport, FlushError> {
        match self.flush(deadline) {
            Err(FlushError::Rank { .. }) if self.slots.is_durable() => {
                Ok(FlushReport { durable_blocks: self.registry.snapshot(Tier::G3).0.len() as u64 })
            }
            flushed => flushed,
        }
    }

    pub(crate) fn shut_down(&self, deadline: Instant) -> ShutdownReport {
        let span = tracing::info_span!(target: "kvbm", "shutdown");
        let _inside = span.enter();
        // Callers are refused first, so that the tiers do not change while they are written down.
        self.transfers.refuse_callers();
        let drained = self.save_all(deadline);
        let lasting = self.lasting();
        let (durable_blocks, flush_error) = match self.flush_last(deadline) {
            Ok(report) => (Some(report.durable_blocks), None),
            Err(FlushError::NoDisk) => (None, None),
            Err(error) => (None, Some(error)),
        };
        let removals_unconfirmed = self.volumes.wait_purges(deadline) + self.slots.unconfirmed();
        self.transfers.close();
        self.offload.drop_queued();
        let not_saved = lasting.map_or(0, |last| self.not_saved(last));
        ShutdownReport {
            durable_blocks,
            not_saved,
            drained,
            flush_error,
            removals_unconfirmed,
            events_unpublished: 0,
        }
    }

    /// Sends what is not saved on the lowest tier of this node down to it, as far as time allows.
    /// Whether no copy is under way any more.
    pub(super) fn save_all(&self, deadline: Instant) -> bool {
        let Some(last) = self.lasting() else { return self.offload.wait_idle(deadline) };
        // Without G2, blocks go straight from G1.
        let has_host = self.registry.capacity(Tier::G2) > 0;
        let src = if has_host { Tier::G2 } else { Tier::G1 };
        let (path, sent) = (Path::new(src, last), RefCell::default());
        let late = || self.metrics.path(path).failures(FailureKind::Deadline).get();
        let late_before = late();
        let save_last = || self.save(path, last, deadline, &sent, &|| ());
        // G2 first and after every batch from above: what comes down must not push out what is not
        // saved yet.
        save_last();
        if has_host {
            self.save(Path::G1_G2, last, deadline, &RefCell::default(), &save_last);
        }
        let is_idle = self.offload.wait_idle(deadline);
        // Copies of an engine's blocks that were under way have arrived in G2 now. What a disk
        // refused is not sent again. Where a copy was late, what is left is sent once more: a busy
        // machine may have been the reason.
        let is_new = |identity: &BlockIdentity| !sent.borrow().contains(&(identity.group, identity.hash));
        let was_late = late() > late_before;
        if !is_idle || !self.unsaved(src, last).iter().any(|block| was_late || is_new(block)) {
            return is_idle;
        }
        save_last();
        self.offload.wait_idle(deadline)
    }

    /// The tier that blocks are saved on: the disk, else volumes.
    pub(super) fn lasting(&self) -> Option<Tier> {
        if self.registry.capacity(Tier::G3) > 0 {
            return Some(Tier::G3);
        }
        (!self.volumes.is_empty()).then_some(Tier::G4)
    }

    /// Sends every block of the source of `path` that is not saved on `last` one step down, in use
    /// or not, chain by chain and each once. They are added to `sent`. `after_each` runs after
    /// every batch.
    fn save(
        &self,
        path: Path,
        last: Tier,
        deadline: Instant,
        sent: &RefCell<HashSet<(GroupId, SequenceHash)>>,
        after_each: &dyn Fn(),
    ) {
        let Some(edge) = self.offload.edge(path) else { return };
        let src = path.src;
        let room = match path.dst {
            Tier::G4 => usize::MAX,
            dst => self.registry.capacity(dst) as usize / 2,
        };
        let unsaved = self.unsaved(src, last);
        for part in unsaved.chunks(edge.limit.min(room).max(1)) {
            if kvbm_plan::clock::now() >= deadline {
                return;
            }
            let mut batch = self.offload.nothing(src);
            sent.borrow_mut().extend(part.iter().map(|identity| (identity.group, identity.hash)));
            for identity in part {
                if let Some(block) = self.offload.pin(src, identity.group, identity.hash) {
                    // Of the same registry, tier and kind of pin, so it is never refused.
                    let _refused = batch.append(block);
                }
            }
            self.offload.enqueue(edge, self.offload.interval(), batch);
            if !self.offload.wait_idle(deadline) {
                return;
            }
            after_each();
        }
    }

    /// Blocks of `tier` that are not saved on `last`, chain by chain, parents first.
    fn unsaved(&self, tier: Tier, last: Tier) -> Vec<BlockIdentity> {
        let key = |identity: &BlockIdentity| (identity.group, identity.hash);
        let on_disk: HashSet<_> = match last {
            Tier::G3 => self.registry.snapshot(last).0.iter().map(|(_, identity)| key(identity)).collect(),
            _ => HashSet::new(),
        };
        let is_saved = |identity: &BlockIdentity| match last {
            Tier::G4 => self.volumes.contains(identity.group, identity.hash),
            _ => on_disk.contains(&key(identity)),
        };
        let mut chains: HashMap<_, usize> = HashMap::new();
        let mut unsaved = Vec::new();
        for (_, identity) in self.registry.snapshot(tier).0 {
            // Parents come before children, so a chain is known by the time it goes on.
            let of_parent = identity.parent.and_then(|parent| chains.get(&(identity.group, parent)).copied());
            let chain = of_parent.unwrap_or(chains.len());
            chains.insert(key(&identity), chain);
            if !is_saved(&identity) {
                unsaved.push((chain, identity.position, identity));
            }
        }
        unsaved.sort_unstable_by_key(|&(chain, position, _)| (chain, position));
        unsaved.into_iter().map(|(.., identity)| identity).collect()
    }

    /// Blocks of the upper tiers that are not saved on `last`.
    pub(super) fn not_saved(&self, last: Tier) -> u64 {
        let unsaved = [Tier::G1, Tier::G2].map(|tier| self.unsaved(tier, last));
        let unsaved: HashSet<_> =
            unsaved.iter().flatten().map(|identity| (identity.group, identity.hash)).collect();
        unsaved.len() as u64
    }

    pub(crate) fn clear(&self, tier: Tier, commit: Commit) -> Result<u64, ClearError> {
        if tier == Tier::G4 && !self.volumes.is_empty() {
            return Ok(self.volumes.forget(None, EvictReason::Cleared));
        }
        if self.registry.capacity(tier) == 0 {
            return Err(ClearError { tier });
        }
        let removed = self.slots.clear(tier, commit);
        self.metrics.tier(tier).evictions(EvictReason::Cleared).add(removed);
        Ok(removed)
    }

    /// Removes a namespace from every tier: blocks of G1, G2 and G3, copies there, copies on
    /// volumes.
    pub(crate) fn forget(&self, namespace: NamespaceId, commit: Commit) -> (u64, [u64; 3], u64) {
        let (blocks, copies) = self.slots.forget(namespace, commit);
        for (tier, copies) in Tier::SLOTTED.into_iter().zip(copies) {
            self.metrics.tier(tier).evictions(EvictReason::Forgotten).add(copies);
        }
        (blocks, copies, self.volumes.forget(Some(namespace), EvictReason::Forgotten))
    }

    /// As [`forget`](Self::forget); waits until `deadline` for disks and volumes to confirm it.
    pub(crate) fn forget_with_receipt(&self, namespace: NamespaceId, deadline: Instant) -> ForgetReceipt {
        let (blocks, copies, on_volumes) = self.forget(namespace, Commit::Await);
        let volumes_unconfirmed = self.volumes.unconfirmed(deadline);
        let detached = |tier| self.registry.occupancy(tier).detached;
        ForgetReceipt {
            blocks,
            copies,
            on_volumes,
            in_use: Tier::SLOTTED.into_iter().map(detached).sum(),
            disks_unconfirmed: self.slots.unconfirmed(),
            volumes_unconfirmed,
            keys: self.key_notices.take(namespace),
        }
    }
}
