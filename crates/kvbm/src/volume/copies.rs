//! Copies to volumes, and what transfers from and to them say about them.

use super::history::Moment;
use super::index::Admission;
use super::{VolumeTier, Volumes};
use crate::circuit_breaker::RequestResults;
use crate::error::may_land;
use crate::metrics::DropReason;
use crate::transfers::{Destination, Move, Purpose, Request, VolumeEnd};
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, GroupId, SequenceHash, Tier, VolumeId};
use kvbm_pool::Pinned;
use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A transfer from or to a volume.
struct OnVolume {
    tier: Arc<VolumeTier>,
    /// When it began, in the history of the volume.
    since: Moment,
}

impl VolumeEnd for OnVolume {
    fn id(&self) -> VolumeId {
        self.tier.descriptor.id
    }

    fn deadline(&self) -> Duration {
        self.tier.descriptor.deadline
    }

    fn requested(&self) {
        self.tier.note_request();
    }

    fn served(&self) {
        self.tier.note_service();
    }

    fn transfer_ended(&self, results: &RequestResults, began: Instant) {
        self.tier.note(results, began);
    }

    fn reads_ended(&self, moves: &[Move], failures: &[Option<Failure>]) {
        self.tier.reads_ended(moves, failures, self.since);
    }

    fn writes_ended(&self, moves: &[Move], failures: &mut [Option<Failure>]) {
        self.tier.copies_ended(moves, failures);
    }
}

/// The volume's end of a transfer that begins now.
pub(crate) fn transfer_end(tier: Arc<VolumeTier>) -> Arc<dyn VolumeEnd> {
    Arc::new(OnVolume { since: tier.now(), tier })
}

/// The result of a batch.
pub(crate) struct Copied {
    /// Blocks that cannot go before their parents.
    pub(crate) orphans: Vec<BlockIdentity>,
    /// Why blocks were refused, one each.
    pub(crate) refused: Vec<DropReason>,
}

/// Where the blocks of a batch go.
struct Targets<'a> {
    volumes: &'a Volumes,
    /// Which volumes take blocks now: asked once a batch.
    open: BTreeMap<VolumeId, bool>,
    moves: Vec<(Arc<VolumeTier>, Vec<Move>)>,
    /// Blocks that their volume does not take now, what continues them, and why.
    refused: HashMap<(GroupId, SequenceHash), DropReason>,
}

impl<'a> Targets<'a> {
    fn new(volumes: &'a Volumes) -> Self {
        Self { volumes, open: BTreeMap::new(), moves: Vec::new(), refused: HashMap::new() }
    }

    fn is_open(&mut self, volume: &VolumeTier) -> bool {
        *self.open.entry(volume.descriptor.id).or_insert_with(|| volume.takes_writes())
    }

    /// The volume of a block: that of the block before it, for a first one the most preferred one
    /// that works. A window or state goes where its block before it is, or its place in the chain
    /// is in another group, where one of them is on a volume.
    fn volume(&mut self, identity: &BlockIdentity) -> Result<Arc<VolumeTier>, Admission> {
        let group = identity.group;
        if self.volumes.awaits(group, identity.hash) {
            return Err(Admission::Known);
        }
        let mut tiers = self.volumes.preferred(identity.hash);
        if let Some(parent) = identity.parent {
            if tiers.iter().all(|tier| tier.index.lock().is_full(group)) {
                tiers.retain(|tier| tier.index.lock().awaits(group, parent));
            } else {
                tiers.sort_by_key(|tier| !tier.index.lock().has_beside(identity));
            }
        }
        let first = tiers.first().map(Arc::clone).ok_or(Admission::Orphan)?;
        Ok(tiers.into_iter().find(|tier| self.is_open(tier)).unwrap_or(first))
    }

    fn add(&mut self, block: Move) -> Admission {
        let BlockIdentity { group, hash, parent, .. } = block.identity;
        let after_refused = parent.and_then(|parent| self.refused.get(&(group, parent)).copied());
        let volume = match (self.volume(&block.identity), after_refused) {
            (Ok(volume), _) if !self.is_open(&volume) => Err(DropReason::VolumeDown),
            (Ok(volume), _) => Ok(volume),
            (Err(Admission::Orphan), Some(reason)) => Err(reason),
            (Err(admission), _) => return admission,
        };
        let volume = match volume {
            Ok(volume) => volume,
            Err(reason) => {
                self.refused.insert((group, hash), reason);
                return Admission::Known;
            }
        };
        let admission = volume.index.lock().begin(&block.identity);
        match admission {
            Admission::New => {
                let known = self.moves.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &volume));
                match known {
                    Some((_, moves)) => moves.push(block),
                    None => self.moves.push((volume, vec![block])),
                }
            }
            Admission::Leaving => {
                self.refused.insert((group, hash), DropReason::Leaving);
            }
            Admission::Known | Admission::Orphan => {}
        }
        admission
    }
}

impl Volumes {
    /// Starts the copies of a batch to volumes, each chain to its own. `hold` is dropped when all
    /// of them are over.
    pub(crate) fn copy(&self, blocks: Pinned, hold: Box<dyn Any + Send + Sync>) -> Copied {
        let (identities, from) = (blocks.identities(), blocks.tier());
        let losses = self.transfers.losses();
        let there = blocks.registered();
        let sources = blocks.block_ids().to_vec();
        let hold = Arc::new((blocks, hold));
        let mut targets = Targets::new(self);
        let mut orphans = Vec::new();
        for (at, &identity) in identities.iter().enumerate().filter(|(at, _)| there[*at]) {
            let block = Move { identity, from, src: sources[at], dst: BlockId(0) };
            match targets.add(block) {
                Admission::Orphan => orphans.push(identity),
                Admission::New | Admission::Known | Admission::Leaving => {}
            }
        }
        let refused = targets.refused.values().copied().collect();
        for (tier, moves) in targets.moves {
            tier.evict(moves.len());
            let mut request = Request::new(Purpose::Offload, Tier::G4, moves, Destination::Volume, losses)
                .hold(Arc::clone(&hold));
            request.volume = Some(transfer_end(tier));
            self.transfers.start(request).detach();
        }
        Copied { orphans, refused }
    }
}

impl VolumeTier {
    /// Copies to the volume are over: what arrived behind what arrived is known from now on. What
    /// was forgotten meanwhile is removed by the purge, which waits for this.
    fn copies_ended(&self, moves: &[Move], failures: &mut [Option<Failure>]) {
        let refused = failures.iter().flatten().filter(|failure| failure.kind == FailureKind::Full).count();
        self.counters.full.add(refused as u64);
        let now = kvbm_plan::clock::now();
        self.note_copies(failures, now);
        let doubtful_until = kvbm_plan::deadline_after(now, self.descriptor.deadline);
        let mut broken: Vec<(GroupId, SequenceHash)> = Vec::new();
        let mut index = self.index.lock();
        for (block, slot) in moves.iter().zip(failures.iter_mut()) {
            let identity = &block.identity;
            let lacks = |parent| index.is_full(identity.group) && broken.contains(&(identity.group, parent));
            if slot.is_none() && identity.parent.is_some_and(lacks) {
                *slot = Some(Failure::new(FailureKind::Predecessor, "a block before it did not arrive"));
            }
            if let Some(failure) = slot {
                broken.push((identity.group, identity.hash));
                index.fail(identity, may_land(failure.kind).then_some(doubtful_until));
            } else if index.complete(identity) {
                self.counters.stored.add(1);
            } else {
                *slot =
                    Some(Failure::new(FailureKind::Missing, "the block was removed while it was on its way"));
            }
        }
        drop(index);
        {
            let mut absences = self.absences.lock();
            for block in moves {
                absences.forget(&block.identity);
            }
        }
        self.tend_purges(now);
        self.reclaim(refused, now);
        self.evict(0);
    }

    /// Reads that began at `since` are over. What was not there or was damaged is known to be
    /// absent.
    fn reads_ended(&self, moves: &[Move], failures: &[Option<Failure>], since: Moment) {
        let reads = moves.iter().zip(failures).filter(|(block, _)| block.from == Tier::G4);
        let reads: Vec<_> = reads.collect();
        if reads.is_empty() {
            return;
        }
        let mut damaged = Vec::new();
        let mut index = self.index.lock();
        for (block, slot) in reads {
            match slot.as_ref().map(|failure| failure.kind) {
                None => index.learn(&block.identity, true, since),
                Some(FailureKind::Missing) => {
                    self.counters.misses.add(1);
                    index.remove(block.identity.group, block.identity.hash, since);
                }
                Some(FailureKind::Corrupt) => {
                    self.counters.misses.add(1);
                    self.counters.corrupt.add(1);
                    // Of several reads that found it damaged one has it removed, once.
                    if index.remove(block.identity.group, block.identity.hash, since) {
                        damaged.push(block.identity);
                    }
                }
                Some(_) => {}
            }
        }
        index.begin_removal(&damaged);
        drop(index);
        if !damaged.is_empty() {
            self.requests.metrics.tier(Tier::G4).corrupt.add(damaged.len() as u64);
            tracing::warn!(target: "kvbm", blocks = damaged.len(), "objects that cannot be read: those that are damaged are removed from the volume");
            self.discard_damaged(&damaged);
        }
        self.evict(0);
    }
}

#[cfg(all(test, feature = "worker"))]
mod tests {
    use super::super::test_manager::{self, VOLUME, block};
    use super::super::writes::Landing;
    use super::*;

    /// Mutation that makes it fail: `reads_ended` takes the moment when it is called.
    #[test]
    fn what_was_read_before_it_was_removed_or_written_says_nothing() {
        let (manager, sent) = test_manager::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let identity = block();
        let contains = || volume.contains(identity.group, identity.hash);
        let block_move = Move { identity, from: Tier::G4, src: BlockId(0), dst: BlockId(0) };
        let since = volume.now();
        volume.index.lock().learn(&identity, true, since);
        // It is read, there is no room for it, it is removed, and only then the read is reported.
        assert_eq!(volume.index.lock().yield_room(1), [identity]);
        volume.index.lock().begin_removal(&[identity]);
        volume.index.lock().end_removal(&[(identity.group, identity.hash)]);
        volume.reads_ended(&[block_move], &[None], since);
        assert!(!contains());
        // Others find it missing or damaged while it is written again.
        let since = volume.now();
        assert_eq!(volume.index.lock().begin(&identity), Admission::New);
        volume.copies_ended(&[block_move], &mut [None]);
        for kind in [FailureKind::Missing, FailureKind::Corrupt] {
            let failure = Failure::new(kind, "planted");
            volume.reads_ended(&[block_move], &[Some(failure)], since);
        }
        assert!(contains() && sent.damaged().is_empty());
        let failure = Failure::new(FailureKind::Missing, "planted");
        volume.reads_ended(&[block_move], &[Some(failure)], volume.now());
        assert!(!contains());
    }

    /// Mutation that makes it fail: `copies_ended` keeps every failure until then.
    #[test]
    fn what_found_no_room_or_no_parent_does_not_land_later() {
        let (manager, _) = test_manager::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let identity = block();
        let block_move = Move { identity, from: Tier::G2, src: BlockId(0), dst: BlockId(0) };
        let kinds = [FailureKind::Full, FailureKind::Unsupported, FailureKind::Predecessor, FailureKind::Io];
        for (kind, landing) in
            kinds.into_iter().zip([Landing::Over, Landing::Over, Landing::Over, Landing::Doubtful])
        {
            assert_eq!(volume.index.lock().begin(&identity), Admission::New);
            let failure = Failure::new(kind, "planted");
            volume.copies_ended(&[block_move], &mut [Some(failure)]);
            assert_eq!(volume.index.lock().landing(None, kvbm_plan::clock::now()), landing, "{kind}");
        }
    }

    /// Mutation that makes it fail: every damaged block is discarded, whatever `Index::remove`
    /// says.
    #[test]
    fn a_damaged_block_that_several_reads_found_is_discarded_once() {
        let (manager, sent) = test_manager::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let identity = block();
        let since = volume.now();
        volume.index.lock().learn(&identity, true, since);
        let block_move = Move { identity, from: Tier::G4, src: BlockId(0), dst: BlockId(0) };
        for _ in 0..2 {
            let failure = Failure::new(FailureKind::Corrupt, "planted");
            volume.reads_ended(&[block_move], &[Some(failure)], since);
        }
        assert_eq!(sent.damaged(), [identity]);
        assert_eq!(volume.index.lock().begin(&identity), Admission::Leaving, "not confirmed");
        // It is not written now, nor is what continues it, and not because the volume is down.
        let mut targets = Targets::new(&leader.volumes);
        assert_eq!(targets.add(block_move), Admission::Leaving);
        let next = SequenceHash::from_bytes([2; 16]);
        let next = BlockIdentity { hash: next, parent: Some(identity.hash), position: 1, ..identity };
        assert_eq!(targets.add(Move { identity: next, ..block_move }), Admission::Known);
        assert!(targets.moves.is_empty());
        assert!(targets.refused.values().eq(&[DropReason::Leaving; 2]));
    }
}
