//! Blocks of a peer that it holds in place for us, and their way into our memory.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{GroupId, LeaseId, NamespaceTag, NodeId, SequenceHash, clock};
use parking_lot::Mutex;

use super::{LocalRank, RemoteError, RemoteNodeState, messages::Message};
use crate::agent::{RemoteRequest, RemoteTransfer, TransferDirection};
use crate::digest::digest;
use crate::{ModelPart, NodeAnnouncement, ReadPlan};

/// Bytes that are read at a time, over all ranks: the next batch moves while the last one is
/// verified.
const BATCH_BYTES: u64 = 16 << 20;

/// How our ranks read one peer's blocks: made once, used for every read while the peer's
/// announcement stays the same.
#[derive(Debug)]
pub struct PeerPlans {
    pub(super) peer: Arc<NodeAnnouncement>,
    pub(super) namespace: NamespaceTag,
    pub(super) group: GroupId,
    pub(super) ranks: Vec<(LocalRank, ReadPlan)>,
}

impl PeerPlans {
    /// The peer.
    pub fn node(&self) -> NodeId {
        self.peer.node
    }

    /// Bytes that a block moves, over all our ranks.
    pub fn bytes_per_block(&self) -> u64 {
        self.ranks.iter().map(|(_, plan)| plan.bytes_per_block()).sum()
    }

    /// The plan of each rank.
    pub fn plans(&self) -> impl Iterator<Item = &ReadPlan> {
        self.ranks.iter().map(|(_, plan)| plan)
    }

    pub(super) fn parts(&self) -> Vec<ModelPart> {
        self.ranks.iter().map(|(_, plan)| plan.part().clone()).collect()
    }
}

/// A prefix of blocks that a peer holds in place for us under a lease. The node renews the lease
/// while this lives; dropping it gives the blocks back.
pub struct RemoteBlocks {
    pub(super) shared: Arc<RemoteNodeState>,
    pub(super) plans: Arc<PeerPlans>,
    pub(super) lease: LeaseId,
    pub(super) validity: Arc<Mutex<Instant>>,
    pub(super) hashes: Vec<SequenceHash>,
    pub(super) blocks: Vec<u32>,
    /// By block, then by rank.
    pub(super) digests: Vec<u64>,
}

/// What a read has brought.
#[derive(Debug)]
pub struct Arrived {
    /// So many blocks from the first on are complete and verified on every rank.
    pub blocks: usize,
    /// Why the rest is not there.
    pub failure: Option<RemoteError>,
}

/// A batch that is on its way.
struct Batch {
    first: usize,
    end: usize,
    transfers: Vec<Box<dyn RemoteTransfer>>,
}

impl RemoteBlocks {
    /// How many blocks are held: the longest prefix that the peer has of what was asked for.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the peer has none of the blocks.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The peer.
    pub fn node(&self) -> NodeId {
        self.plans.node()
    }

    /// Whether the lease still holds, by our clock.
    pub fn is_held(&self) -> bool {
        clock::now() < *self.validity.lock()
    }

    /// Reads the blocks into the slots `destination` of our ranks, the same slot on each, and
    /// verifies every byte. `claim` is dropped when no hardware can write to the slots any more,
    /// which may be after this has returned with a failure.
    ///
    /// # Errors
    /// [`RemoteError::Destination`] for too few slots. Failures on the way are in [`Arrived`].
    ///
    /// # Safety
    /// Until `claim` is dropped, nobody else may read or write the slots, but for those that this
    /// has reported as arrived.
    pub unsafe fn read_into(
        &self,
        destination: &[u32],
        claim: &Arc<dyn Any + Send + Sync>,
        deadline: Instant,
    ) -> Result<Arrived, RemoteError> {
        if destination.len() < self.blocks.len() {
            return Err(RemoteError::Destination { slots: destination.len(), blocks: self.blocks.len() });
        }
        let step = usize::try_from(BATCH_BYTES / self.plans.bytes_per_block().max(1)).unwrap_or(1).max(1);
        // SAFETY: as the caller promises.
        let beside = || unsafe { self.read_beside(step, destination, claim, deadline) };
        let is_worth_it = self.blocks.len() > step && !cfg!(kvbm_sim);
        if let Some(arrived) = is_worth_it.then(beside).flatten() {
            return Ok(arrived);
        }
        let (mut arrived, mut next) = (0, 0);
        while next < self.blocks.len() {
            let end = (next + step).min(self.blocks.len());
            // SAFETY: the caller keeps everybody else from the slots until `claim` is dropped.
            let batch = unsafe { self.start(next..end, destination, claim) };
            match batch
                .map_err(|error| (arrived, error))
                .and_then(|batch| self.finish(batch, destination, deadline))
            {
                Ok(end) => arrived = end,
                Err((blocks, error)) => return Ok(Arrived { blocks, failure: Some(error) }),
            }
            next = end;
        }
        Ok(Arrived { blocks: arrived, failure: None })
    }

    /// Starts batches on a thread of its own, while this one verifies: the start of a read between
    /// processes of one machine returns when its bytes have moved. `None` without a thread.
    ///
    /// # Safety
    /// As `read_into`.
    unsafe fn read_beside(
        &self,
        step: usize,
        destination: &[u32],
        claim: &Arc<dyn Any + Send + Sync>,
        deadline: Instant,
    ) -> Option<Arrived> {
        // One batch moves, and one is verified.
        let (given, batches) = sync_channel(0);
        let start = move || {
            for first in (0..self.blocks.len()).step_by(step) {
                let end = (first + step).min(self.blocks.len());
                // SAFETY: as the caller promises.
                let batch = unsafe { self.start(first..end, destination, claim) };
                let is_last = batch.is_err();
                // Nobody takes it where a batch before it has failed.
                if given.send(batch).is_err() || is_last {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("kvbm-remote-read".to_owned());
            thread.spawn_scoped(scope, start).ok()?;
            let mut arrived = 0;
            // Moved, so that the thread ends where this returns early.
            let batches = batches;
            for batch in &batches {
                let batch = batch.map_err(|error| (arrived, error));
                match batch.and_then(|batch| self.finish(batch, destination, deadline)) {
                    Ok(end) => arrived = end,
                    Err((blocks, error)) => return Some(Arrived { blocks, failure: Some(error) }),
                }
            }
            Some(Arrived { blocks: arrived, failure: None })
        })
    }

    /// # Safety
    /// As `read_into`.
    unsafe fn start(
        &self,
        range: std::ops::Range<usize>,
        destination: &[u32],
        claim: &Arc<dyn Any + Send + Sync>,
    ) -> Result<Batch, RemoteError> {
        if !self.is_held() {
            return Err(RemoteError::LeaseEnded { node: self.node() });
        }
        let pairs: Vec<(u32, u32)> =
            range.clone().map(|index| (self.blocks[index], destination[index])).collect();
        let mut transfers = Vec::new();
        for (rank, plan) in &self.plans.ranks {
            for lists in plan.lists(&pairs)? {
                let keep = Box::new((Arc::clone(claim), rank.bound.clone(), Arc::clone(&self.plans)));
                let request = RemoteRequest {
                    direction: TransferDirection::Read,
                    peer: lists.agent,
                    local: lists.local,
                    remote: lists.remote,
                    notification: None,
                    keep,
                };
                // SAFETY: the caller of `read_into` keeps everybody else from the slots until
                // `claim`, which the request holds, is dropped; the lease does so on the peer's
                // side.
                transfers.push(unsafe { self.shared.agent.start(request) }?);
            }
        }
        Ok(Batch { first: range.start, end: range.end, transfers })
    }

    /// Waits for a batch and verifies it. Gives the number of blocks that have arrived, also in an
    /// error.
    fn finish(
        &self,
        mut batch: Batch,
        destination: &[u32],
        deadline: Instant,
    ) -> Result<usize, (usize, RemoteError)> {
        let failed = |error: RemoteError| (batch.first, error);
        for transfer in &mut batch.transfers {
            transfer.wait(deadline).map_err(|error| failed(error.into()))?;
        }
        // What arrives after the lease may have been overwritten meanwhile.
        if !self.is_held() {
            return Err(failed(RemoteError::LeaseEnded { node: self.node() }));
        }
        for (index, slot) in destination.iter().enumerate().take(batch.end).skip(batch.first) {
            self.verify(index, *slot).map_err(|error| (index, error))?;
        }
        Ok(batch.end)
    }

    /// Whether a block has arrived in its slot of every rank.
    fn verify(&self, index: usize, slot: u32) -> Result<(), RemoteError> {
        let (hash, digests) = (&self.hashes[index], self.digests.chunks(self.plans.ranks.len()).nth(index));
        for ((rank, plan), expected) in self.plans.ranks.iter().zip(digests.unwrap_or_default()) {
            // SAFETY: the transfer into this slot is over, and the caller of `read_into` keeps
            // others away.
            let found = unsafe { digest(rank.blocks(), slot, hash, plan.part()) };
            let found = found.map_err(|error| RemoteError::Storage(error.to_string()))?;
            if found != *expected && !planted(Planted::SkipDigests) {
                let rank = rank.slice.rank;
                return Err(RemoteError::Corrupt { node: self.node(), hash: *hash, rank });
            }
        }
        Ok(())
    }
}

impl Drop for RemoteBlocks {
    fn drop(&mut self) {
        self.shared.held.lock().remove(&(self.node(), self.lease));
        // A peer that does not hear this ends the lease by itself.
        let _ = self.shared.send(&self.plans.peer.agent, &Message::Release { lease: self.lease });
    }
}

impl fmt::Debug for RemoteBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteBlocks({} blocks of node {}, lease {})", self.len(), self.node(), self.lease)
    }
}
