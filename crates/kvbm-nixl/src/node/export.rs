//! Blocks of this node that peers may read: their memory, their hashes, and the leases on them.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockSetId, GroupId, LeaseId, NamespaceTag, RankSlice, SequenceHash, deadline_after};
use kvbm_storage::{BoundLayout, StorageError};
use parking_lot::Mutex;

use super::RemoteError;
use super::grants::BlockSink;
use crate::agent::Registration;
use crate::device_memory::DeviceAccess;
use crate::digest::{RankBlocks, digest};
use crate::shapes::{ModelPart, cover};

/// Most digests of a block that are kept.
const MAX_KEPT_DIGESTS: usize = 64;

/// The memory of one rank of this process.
#[derive(Clone, Debug)]
pub struct LocalRank {
    /// The part of every block that it holds.
    pub slice: RankSlice,
    /// Where.
    pub bound: BoundLayout,
    /// How the processor reads it, where it is device memory: digests are computed on the host.
    pub device: Option<Arc<DeviceAccess>>,
}

impl LocalRank {
    /// A rank in host memory.
    pub fn new(slice: RankSlice, bound: BoundLayout) -> Self {
        Self { slice, bound, device: None }
    }

    /// A rank in memory of the device that `access` reaches.
    pub fn on_device(slice: RankSlice, bound: BoundLayout, access: Arc<DeviceAccess>) -> Self {
        Self { slice, bound, device: Some(access) }
    }

    /// Whether the processor can read the rank's blocks.
    pub(super) fn check(&self) -> Result<(), RemoteError> {
        let reached = self.device.as_ref().map(|access| access.device());
        match self.bound.device() {
            Some(device) if reached != Some(device) => Err(RemoteError::Storage(format!(
                "rank {} lies in memory of {device}: make it with LocalRank::on_device and a DeviceAccess of that device",
                self.slice.rank
            ))),
            _ => Ok(()),
        }
    }

    pub(super) fn blocks(&self) -> RankBlocks<'_> {
        RankBlocks { slice: &self.slice, bound: &self.bound, device: self.device.as_deref() }
    }
}

/// Blocks that a node offers without publishing each: it is asked when a peer asks. Called by the
/// node's thread, so it must not wait for anything slow.
pub trait BlockSource: Send + Sync {
    /// How many of these blocks are there, from the first on. Nothing is held.
    fn count(&self, hashes: &[SequenceHash]) -> usize;

    /// Whether each of these blocks is there. Nothing is held.
    fn has_each(&self, hashes: &[SequenceHash]) -> Vec<bool>;

    /// Holds as many of these blocks as there are, from the first on.
    fn hold(&self, hashes: &[SequenceHash]) -> Vec<HeldBlock>;
}

/// A block that stays in place.
pub struct HeldBlock {
    /// Its slot, the same on every rank.
    pub block: u32,
    /// Keeps its bytes in place until this is dropped.
    pub guard: Arc<dyn Any + Send + Sync>,
}

impl std::fmt::Debug for HeldBlock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeldBlock").field("block", &self.block).finish_non_exhaustive()
    }
}

/// What a node offers of one namespace and group.
pub(super) struct Offered {
    pub(super) id: BlockSetId,
    pub(super) namespace: NamespaceTag,
    pub(super) group: GroupId,
    pub(super) ranks: Vec<LocalRank>,
    pub(super) published: Mutex<HashMap<SequenceHash, Arc<PublishedBlock>>>,
    /// Has blocks beside those that are published.
    pub(super) source: Option<Arc<dyn BlockSource>>,
    /// Takes blocks that peers write.
    pub(super) sink: OnceLock<Arc<dyn BlockSink>>,
    // Dropped last of all, when no lease holds a block: deregisters the memory.
    pub(super) registrations: Arc<Vec<Registration>>,
}

impl Offered {
    /// How many of these blocks there are, from the first on.
    pub(super) fn count(&self, hashes: &[SequenceHash]) -> usize {
        let published = {
            let published = self.published.lock();
            hashes.iter().take_while(|hash| published.contains_key(hash)).count()
        };
        let rest = &hashes[published..];
        published + self.source.as_ref().map_or(0, |source| source.count(rest).min(rest.len()))
    }

    /// Whether each of these blocks is there.
    pub(super) fn has_each(&self, hashes: &[SequenceHash]) -> Vec<bool> {
        let mut there = self.source.as_ref().map_or_else(Vec::new, |source| source.has_each(hashes));
        there.resize(hashes.len(), false);
        let published = self.published.lock();
        for (there, hash) in there.iter_mut().zip(hashes) {
            *there |= published.contains_key(hash);
        }
        there
    }

    /// Those blocks, held.
    pub(super) fn hold(self: &Arc<Self>, hashes: &[SequenceHash]) -> Vec<Arc<PublishedBlock>> {
        let mut blocks: Vec<Arc<PublishedBlock>> = {
            let published = self.published.lock();
            hashes.iter().map_while(|hash| published.get(hash).cloned()).collect()
        };
        let rest = &hashes[blocks.len()..];
        if let Some(source) = self.source.as_ref().filter(|_| !rest.is_empty()) {
            let held = rest.iter().zip(source.hold(rest));
            blocks.extend(
                held.map(|(hash, held)| Arc::new(PublishedBlock::new(self, *hash, held.block, held.guard))),
            );
        }
        blocks
    }
}

/// A block that peers may read. Its bytes do not change while this lives: a lease holds it by
/// `Arc`, after its publication has ended, too.
pub(super) struct PublishedBlock {
    hash: SequenceHash,
    pub(super) block: u32,
    digests: Mutex<Vec<(ModelPart, u64)>>,
    // Dropped after the last lease: what keeps the bytes in place, then the memory.
    _guard: Arc<dyn Any + Send + Sync>,
    offered: Arc<Offered>,
}

impl PublishedBlock {
    pub(super) fn new(
        offered: &Arc<Offered>,
        hash: SequenceHash,
        block: u32,
        guard: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        Self { hash, block, digests: Mutex::default(), _guard: guard, offered: Arc::clone(offered) }
    }

    /// The digest of a part of the block, over all ranks of this node that hold some of it.
    ///
    /// # Errors
    /// Ranks that do not hold all of the part; memory that cannot be read.
    pub(super) fn digest(&self, part: &ModelPart) -> Result<u64, StorageError> {
        if let Some((_, known)) = self.digests.lock().iter().find(|(known, _)| known == part) {
            return Ok(*known);
        }
        let slices: Vec<RankSlice> = self.offered.ranks.iter().map(|rank| rank.slice).collect();
        let pieces = cover(part, &slices, 0).map_err(|_| StorageError::Invalid {
            what: "part of a block",
            value: part.cells(),
            rule: "all its layers and heads have to be offered by this node",
        })?;
        let mut sum = 0_u64;
        for (index, piece) in pieces {
            let rank = self.offered.ranks[index].blocks();
            // SAFETY: `RemoteNode::publish` has been promised that nobody writes the block while
            // this lives.
            sum = sum.wrapping_add(unsafe { digest(rank, self.block, &self.hash, &piece) }?);
        }
        let mut digests = self.digests.lock();
        if digests.len() < MAX_KEPT_DIGESTS {
            digests.push((part.clone(), sum));
        }
        Ok(sum)
    }
}

/// Blocks that a peer reads.
pub(super) struct HeldLease {
    pub(super) peer: String,
    pub(super) expires: Instant,
    /// Not renewed beyond this.
    last: Instant,
    _blocks: Vec<Arc<PublishedBlock>>,
}

/// The leases that this node has granted.
pub(super) struct Leases {
    ttl: Duration,
    longest: Duration,
    per_peer: usize,
    state: Mutex<LeaseState>,
}

#[derive(Default)]
struct LeaseState {
    next: u64,
    held: BTreeMap<LeaseId, HeldLease>,
}

impl Leases {
    pub(super) fn new(ttl: Duration, longest: Duration, per_peer: usize) -> Self {
        Self { ttl, longest, per_peer, state: Mutex::default() }
    }

    pub(super) fn ttl_ms(&self) -> u64 {
        self.ttl.as_millis() as u64
    }

    /// A lease on these blocks; `None` if the peer holds too many.
    pub(super) fn grant(
        &self,
        peer: &str,
        blocks: Vec<Arc<PublishedBlock>>,
        now: Instant,
    ) -> Option<LeaseId> {
        let mut state = self.state.lock();
        if state.held.values().filter(|lease| lease.peer == peer).count() >= self.per_peer {
            return None;
        }
        state.next += 1;
        let id = LeaseId(state.next);
        let (expires, last) = (deadline_after(now, self.ttl), deadline_after(now, self.longest));
        state.held.insert(id, HeldLease { peer: peer.to_owned(), expires, last, _blocks: blocks });
        Some(id)
    }

    /// Lengthens a lease of this peer. Milliseconds that it holds from now on; `None` if it has
    /// ended.
    pub(super) fn renew(&self, peer: &str, id: LeaseId, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        let lease = state.held.get_mut(&id).filter(|lease| lease.peer == peer && now < lease.expires)?;
        lease.expires = deadline_after(now, self.ttl).min(lease.last);
        Some(lease.expires.saturating_duration_since(now).as_millis() as u64)
    }

    /// Ends a lease of this peer.
    pub(super) fn release(&self, peer: &str, id: LeaseId) {
        let mut state = self.state.lock();
        let is_theirs = state.held.get(&id).is_some_and(|lease| lease.peer == peer);
        let ended = is_theirs.then(|| state.held.remove(&id));
        // Blocks are let go outside the lock.
        drop(state);
        drop(ended);
    }

    /// Ends the leases that are over; how many were.
    pub(super) fn expire(&self, now: Instant) -> u64 {
        if planted(Planted::KeepEndedLeases) {
            return 0;
        }
        let mut state = self.state.lock();
        let over: Vec<LeaseId> =
            state.held.iter().filter(|(_, lease)| now >= lease.expires).map(|(id, _)| *id).collect();
        let ended: Vec<_> = over.iter().filter_map(|id| state.held.remove(id)).collect();
        drop(state);
        ended.len() as u64
    }

    /// Ends all leases of a peer, although it may still read.
    pub(super) fn revoke(&self, peer: &str) {
        let mut state = self.state.lock();
        let theirs: Vec<LeaseId> =
            state.held.iter().filter(|(_, lease)| lease.peer == peer).map(|(id, _)| *id).collect();
        let ended: Vec<_> = theirs.iter().filter_map(|id| state.held.remove(id)).collect();
        drop(state);
        drop(ended);
    }

    /// When the next lease ends.
    pub(super) fn next_end(&self) -> Option<Instant> {
        if planted(Planted::KeepEndedLeases) {
            return None;
        }
        self.state.lock().held.values().map(|lease| lease.expires).min()
    }

    pub(super) fn count(&self) -> usize {
        self.state.lock().held.len()
    }
}
