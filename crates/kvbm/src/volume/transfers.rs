//! Copies to volumes, and what transfers from and to them say about them.

use super::index::Admission;
use super::{Moment, VolumeTier, Volumes};
use crate::error::may_land;
use crate::leader::Leader;
use crate::leader::edge::{Batch, Edge};
use crate::leader::offload::Running;
use crate::leader::operation::{Destination, Move, Parts, Purpose};
use crate::metrics::DropReason;
use kvbm_plan::{
    BlockId, BlockIdentity, Failure, FailureKind, Rank, SequenceHash, Tier, VolumeAnswer, VolumeId,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

/// Where the blocks of a batch go.
struct Targets<'a> {
    volumes: &'a Volumes,
    /// Which volumes take blocks now: asked once a batch.
    open: BTreeMap<VolumeId, bool>,
    moves: Vec<(Arc<VolumeTier>, Vec<Move>)>,
    /// Blocks that their volume does not take now, what continues them, and why.
    refused: HashMap<SequenceHash, DropReason>,
}

impl<'a> Targets<'a> {
    fn new(volumes: &'a Volumes) -> Self {
        Self { volumes, open: BTreeMap::new(), moves: Vec::new(), refused: HashMap::new() }
    }

    fn is_open(&mut self, volume: &VolumeTier) -> bool {
        *self.open.entry(volume.descriptor.id).or_insert_with(|| volume.takes())
    }

    /// The volume of a block: that of the block before it, for a first one the most preferred one that works.
    fn volume(&mut self, identity: &BlockIdentity) -> Result<Arc<VolumeTier>, Admission> {
        let group = identity.group;
        if self.volumes.awaits(group, identity.hash) {
            return Err(Admission::Known);
        }
        let mut tiers = self.volumes.preferred(identity.hash);
        if let Some(parent) = identity.parent {
            tiers.retain(|tier| tier.index.lock().awaits(group, parent));
        }
        let first = tiers.first().map(Arc::clone).ok_or(Admission::Orphan)?;
        Ok(tiers.into_iter().find(|tier| self.is_open(tier)).unwrap_or(first))
    }

    fn add(&mut self, step: Move) -> Admission {
        let BlockIdentity { hash, parent, .. } = step.identity;
        let after_refused = parent.and_then(|parent| self.refused.get(&parent).copied());
        let volume = match (self.volume(&step.identity), after_refused) {
            (Ok(volume), _) if !self.is_open(&volume) => Err(DropReason::VolumeDown),
            (Ok(volume), _) => Ok(volume),
            (Err(Admission::Orphan), Some(reason)) => Err(reason),
            (Err(admission), _) => return admission,
        };
        let volume = match volume {
            Ok(volume) => volume,
            Err(reason) => {
                self.refused.insert(hash, reason);
                return Admission::Known;
            }
        };
        let admission = volume.index.lock().begin(&step.identity);
        match admission {
            Admission::New => {
                let known = self.moves.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &volume));
                match known {
                    Some((_, moves)) => moves.push(step),
                    None => self.moves.push((volume, vec![step])),
                }
            }
            Admission::Leaving => {
                self.refused.insert(hash, DropReason::Leaving);
            }
            Admission::Known | Admission::Orphan => {}
        }
        admission
    }
}

impl Leader {
    /// A rank's answer to a question or an order about a volume.
    pub(crate) fn volume_answered(&self, rank: Rank, token: u64, answer: VolumeAnswer) {
        if self.volumes.asks.answer(rank, token, answer) {
            let now = Instant::now();
            for volume in self.volumes.all() {
                self.tend_purges(&volume, now);
                volume.tend_discards(now);
                self.tend_introductions(&volume, now);
            }
        } else {
            self.metrics.ignored_reports.add(1);
        }
    }

    /// Sends a batch to volumes, each chain to its own. Blocks that cannot go before their parents come back.
    pub(crate) fn carry_to_volumes(self: &Arc<Self>, edge: &Edge, batch: Batch) -> Vec<BlockIdentity> {
        let Batch { blocks, round } = batch;
        let running = Running::queued(self, edge.path, round, blocks.len());
        let identities = blocks.identities();
        let losses = self.registry.losses();
        let there = blocks.registered();
        let sources = blocks.block_ids().to_vec();
        let keep = Arc::new((blocks, running));
        let mut targets = Targets::new(&self.volumes);
        let mut orphans = Vec::new();
        for (at, &identity) in identities.iter().enumerate().filter(|(at, _)| there[*at]) {
            let step = Move { identity, from: edge.path.src, src: sources[at], dst: BlockId(0) };
            match targets.add(step) {
                Admission::Orphan => orphans.push(identity),
                Admission::New | Admission::Known | Admission::Leaving => {}
            }
        }
        for reason in targets.refused.values() {
            self.metrics.path(edge.path).dropped(*reason).add(1);
        }
        for (volume, moves) in targets.moves {
            let keep: Vec<Box<dyn std::any::Any + Send>> = vec![Box::new(Arc::clone(&keep))];
            let destination = Destination::Volume;
            self.evict_on_volume(&volume, moves.len());
            let volume = Some(volume);
            let round = Some(round);
            let parts = Parts { moves, destination, losses, keep, source_check: None, round, volume };
            let prepared = self.prepare(Purpose::Offload, Tier::G4, parts);
            self.send(prepared);
        }
        orphans
    }

    /// Copies to the volume are over: what arrived behind what arrived is known from now on. What was forgotten meanwhile is removed by the
    /// purge, which waits for this.
    pub(crate) fn complete_on_volume(
        &self,
        volume: &VolumeTier,
        moves: &[Move],
        failures: &mut [Option<Failure>],
    ) {
        let refused = failures.iter().flatten().filter(|failure| failure.kind == FailureKind::Full).count();
        volume.counters.full.add(refused as u64);
        let now = Instant::now();
        volume.note_copies(failures, now);
        let doubtful_until = now + volume.descriptor.deadline;
        let mut broken: Vec<SequenceHash> = Vec::new();
        let mut index = volume.index.lock();
        for (step, slot) in moves.iter().zip(failures.iter_mut()) {
            let identity = &step.identity;
            if slot.is_none() && identity.parent.is_some_and(|parent| broken.contains(&parent)) {
                *slot = Some(Failure::new(FailureKind::Predecessor, "a block before it did not arrive"));
            }
            if let Some(failure) = slot {
                broken.push(identity.hash);
                index.fail(identity, may_land(failure.kind).then_some(doubtful_until));
            } else if index.complete(identity) {
                volume.counters.stored.add(1);
            } else {
                *slot =
                    Some(Failure::new(FailureKind::Missing, "the block was removed while it was on its way"));
            }
        }
        drop(index);
        {
            let mut absences = volume.absences.lock();
            for step in moves {
                absences.forget(step.identity.hash);
            }
        }
        self.tend_purges(volume, now);
        self.reclaim_on_volume(volume, refused, now);
        self.evict_on_volume(volume, 0);
    }

    /// Reads that began at `since` are over. What was not there or was damaged is known to be absent.
    pub(crate) fn note_reads(
        &self,
        volume: &VolumeTier,
        moves: &[Move],
        failures: &[Option<Failure>],
        since: Moment,
    ) {
        let reads = moves.iter().zip(failures).filter(|(step, _)| step.from == Tier::G4);
        let reads: Vec<_> = reads.collect();
        if reads.is_empty() {
            return;
        }
        let mut damaged = Vec::new();
        let mut index = volume.index.lock();
        for (step, slot) in reads {
            match slot.as_ref().map(|failure| failure.kind) {
                None => index.learn(&step.identity, true, since),
                Some(FailureKind::Missing) => {
                    volume.counters.misses.add(1);
                    index.remove(step.identity.group, step.identity.hash, since);
                }
                Some(FailureKind::Corrupt) => {
                    volume.counters.misses.add(1);
                    volume.counters.corrupt.add(1);
                    // Of several reads that found it damaged one has it removed, once.
                    if index.remove(step.identity.group, step.identity.hash, since) {
                        damaged.push(step.identity);
                    }
                }
                Some(_) => {}
            }
        }
        index.leave(&damaged);
        drop(index);
        if !damaged.is_empty() {
            self.metrics.tier(Tier::G4).corrupt.add(damaged.len() as u64);
            tracing::warn!(target: "kvbm", blocks = damaged.len(), "damaged objects: removed from the volume");
            self.discard_damaged_on_volume(volume, &damaged);
        }
        self.evict_on_volume(volume, 0);
    }
}

#[cfg(all(test, feature = "worker"))]
mod tests {
    use super::super::silent::{self, VOLUME, block};
    use super::super::writes::Landing;
    use super::*;

    /// Mutation that makes it fail: `note_reads` takes the moment when it is called.
    #[test]
    fn what_was_read_before_it_was_removed_or_written_says_nothing() {
        let (manager, heard) = silent::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let identity = block();
        let contains = || volume.contains(identity.group, identity.hash);
        let step = Move { identity, from: Tier::G4, src: BlockId(0), dst: BlockId(0) };
        let since = volume.now();
        volume.index.lock().learn(&identity, true, since);
        // It is read, there is no room for it, it is removed, and only then the read is told of.
        assert_eq!(volume.index.lock().yield_room(1), [identity]);
        volume.index.lock().leave(&[identity]);
        volume.index.lock().left(&[(identity.group, identity.hash)]);
        leader.note_reads(&volume, &[step], &[None], since);
        assert!(!contains());
        // Others find it missing or damaged while it is written again.
        let since = volume.now();
        assert_eq!(volume.index.lock().begin(&identity), Admission::New);
        leader.complete_on_volume(&volume, &[step], &mut [None]);
        for kind in [FailureKind::Missing, FailureKind::Corrupt] {
            let failure = Failure::new(kind, "planted");
            leader.note_reads(&volume, &[step], &[Some(failure)], since);
        }
        assert!(contains() && heard.damaged().is_empty());
        let failure = Failure::new(FailureKind::Missing, "planted");
        leader.note_reads(&volume, &[step], &[Some(failure)], volume.now());
        assert!(!contains());
    }

    /// Mutation that makes it fail: `complete_on_volume` gives every failure until then.
    #[test]
    fn what_found_no_room_or_no_parent_does_not_land_later() {
        let (manager, _) = silent::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let identity = block();
        let step = Move { identity, from: Tier::G2, src: BlockId(0), dst: BlockId(0) };
        let kinds = [FailureKind::Full, FailureKind::Unsupported, FailureKind::Predecessor, FailureKind::Io];
        for (kind, landing) in
            kinds.into_iter().zip([Landing::Over, Landing::Over, Landing::Over, Landing::Doubtful])
        {
            assert_eq!(volume.index.lock().begin(&identity), Admission::New);
            let failure = Failure::new(kind, "planted");
            leader.complete_on_volume(&volume, &[step], &mut [Some(failure)]);
            assert_eq!(volume.index.lock().landing(None, Instant::now()), landing, "{kind}");
        }
    }

    /// Mutation that makes it fail: every damaged block is discarded, whatever `Index::remove` says.
    #[test]
    fn a_damaged_block_that_several_reads_found_is_discarded_once() {
        let (manager, heard) = silent::manager();
        let leader = &manager.leader;
        let volume = leader.volumes.get(VOLUME).expect("configured");
        let identity = block();
        let since = volume.now();
        volume.index.lock().learn(&identity, true, since);
        let step = Move { identity, from: Tier::G4, src: BlockId(0), dst: BlockId(0) };
        for _ in 0..2 {
            let failure = Failure::new(FailureKind::Corrupt, "planted");
            leader.note_reads(&volume, &[step], &[Some(failure)], since);
        }
        assert_eq!(heard.damaged(), [identity]);
        assert_eq!(volume.index.lock().begin(&identity), Admission::Leaving, "not confirmed");
        // It is not written now, nor is what continues it, and not because the volume is down.
        let mut targets = Targets::new(&leader.volumes);
        assert_eq!(targets.add(step), Admission::Leaving);
        let next = SequenceHash::from_bytes([2; 16]);
        let next = BlockIdentity { hash: next, parent: Some(identity.hash), position: 1, ..identity };
        assert_eq!(targets.add(Move { identity: next, ..step }), Admission::Known);
        assert!(targets.moves.is_empty());
        assert!(targets.refused.values().eq(&[DropReason::Leaving; 2]));
    }
}
