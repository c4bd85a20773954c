//! Copies to the volume, and what transfers from and to it say about it.

use super::VolumeTier;
use super::index::Admission;
use super::removal::NOBODY;
use crate::leader::Leader;
use crate::leader::edge::{Batch, Edge};
use crate::leader::offload::Running;
use crate::leader::operation::{Destination, Move, Parts, Purpose};
use crate::metrics::DropReason;
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, Rank, SequenceHash, Tier, VolumeAnswer};
use std::sync::Arc;

/// Blocks that go to make room where the volume says that it is full.
const ROOM: usize = 64;

impl Leader {
    /// A rank's answer to a question or an order about the volume.
    pub(crate) fn volume_answered(&self, rank: Rank, token: u64, answer: VolumeAnswer) {
        let expected = self
            .volume
            .as_ref()
            .is_some_and(|volume| token == NOBODY || volume.asks.answer(rank, token, answer));
        if !expected {
            self.metrics.ignored_reports.add(1);
        }
    }

    /// Sends a batch to the volume. Blocks that cannot go before their parents come back.
    pub(crate) fn carry_to_volume(self: &Arc<Self>, edge: &Edge, batch: Batch) -> Vec<BlockIdentity> {
        let Batch { blocks, round } = batch;
        let running = Running::queued(self, edge.path, round, blocks.len());
        let Some(volume) = self.volume.as_ref().filter(|volume| volume.allows()) else {
            self.metrics.path(edge.path).dropped(DropReason::VolumeDown).add(blocks.len() as u64);
            return Vec::new();
        };
        let identities = blocks.identities();
        let there = self.still_on(edge.path.src, &identities);
        let sources = blocks.block_ids();
        let (mut moves, mut orphans) = (Vec::new(), Vec::new());
        let mut index = volume.index.lock();
        for (at, &identity) in identities.iter().enumerate().filter(|(at, _)| there[*at]) {
            match index.begin(&identity) {
                Admission::New => {
                    moves.push(Move { identity, from: edge.path.src, src: sources[at], dst: BlockId(0) });
                }
                Admission::Orphan => orphans.push(identity),
                Admission::Known => {}
            }
        }
        drop(index);
        if !moves.is_empty() {
            let destination = Destination::Volume;
            let keep: Vec<Box<dyn std::any::Any + Send>> = vec![Box::new(blocks), Box::new(running)];
            let parts = Parts { moves, destination, keep, source_check: None, round: Some(round) };
            let prepared = self.prepare(Purpose::Offload, Tier::G4, parts);
            self.send(prepared);
        }
        orphans
    }

    /// Copies to the volume are over: what arrived behind what arrived is known from now on.
    pub(crate) fn complete_on_volume(&self, moves: &[Move], failures: &mut [Option<Failure>]) {
        let Some(volume) = &self.volume else { return };
        note_transfers(volume, failures);
        let full = failures.iter().flatten().any(|failure| failure.kind == FailureKind::Full);
        let (mut broken, mut unwanted): (Vec<SequenceHash>, Vec<BlockIdentity>) = Default::default();
        let mut index = volume.index.lock();
        for (step, slot) in moves.iter().zip(failures.iter_mut()) {
            let identity = &step.identity;
            if slot.is_none() && identity.parent.is_some_and(|parent| broken.contains(&parent)) {
                *slot = Some(Failure::new(FailureKind::Predecessor, "a block before it did not arrive"));
            }
            if slot.is_some() {
                broken.push(identity.hash);
                index.fail(identity);
            } else if !index.complete(identity) {
                // Its namespace was forgotten meanwhile: it must not be found again.
                unwanted.push(*identity);
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
        self.discard_on_volume(volume, &unwanted);
        self.evict_on_volume(volume, if full { ROOM } else { 0 });
    }

    /// Reads are over. What was not there or was damaged is known to be absent; the store's failures count against it.
    pub(crate) fn note_reads(&self, moves: &[Move], failures: &[Option<Failure>]) {
        let Some(volume) = &self.volume else { return };
        let reads = moves.iter().zip(failures).filter(|(step, _)| step.from == Tier::G4);
        let reads: Vec<_> = reads.collect();
        if reads.is_empty() {
            return;
        }
        note_transfers(volume, &reads.iter().map(|(_, slot)| (*slot).clone()).collect::<Vec<_>>());
        let mut damaged = Vec::new();
        let mut index = volume.index.lock();
        for (step, slot) in reads {
            match slot.as_ref().map(|failure| failure.kind) {
                None => index.learn(&step.identity, true),
                Some(FailureKind::Missing) => drop(index.remove(step.identity.group, step.identity.hash)),
                Some(FailureKind::Corrupt) => {
                    index.remove(step.identity.group, step.identity.hash);
                    damaged.push(step.identity);
                }
                Some(_) => {}
            }
        }
        drop(index);
        if !damaged.is_empty() {
            self.metrics.tier(Tier::G4).corrupt.add(damaged.len() as u64);
            tracing::warn!(target: "kvbm", blocks = damaged.len(), "damaged objects: removed from the volume");
            self.discard_on_volume(volume, &damaged);
        }
        self.evict_on_volume(volume, 0);
    }
}

/// Whether the store answered, or failed.
fn note_transfers(volume: &VolumeTier, failures: &[Option<Failure>]) {
    let answered = |slot: &Option<Failure>| {
        slot.as_ref().is_none_or(|failure| {
            matches!(failure.kind, FailureKind::Missing | FailureKind::Corrupt | FailureKind::Full)
        })
    };
    let failed = |failure: &Failure| matches!(failure.kind, FailureKind::Io | FailureKind::Deadline);
    volume.note(failures.iter().any(answered), failures.iter().flatten().any(failed));
}
