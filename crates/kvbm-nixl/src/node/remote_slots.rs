//! Slots that a peer has set aside for our blocks, and the way of the blocks into them.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvbm_plan::{GroupId, LeaseId, NamespaceTag, NodeId, RankSlice, SequenceHash, clock, deadline_after};
use parking_lot::Mutex;

use super::messages::{self, MAX_FIND, MAX_PARTS, Message};
use super::{Held, LocalRank, RemoteError, RemoteNode, RemoteNodeState, receive};
use crate::agent::{RemoteRequest, RemoteTransfer, TransferDirection};
use crate::digest::digest;
use crate::shapes::{ModelPart, check_whole, cover};
use crate::{NodeAnnouncement, ReadPlan, TransferLists};

/// Bytes that are written at a time, over all ranks: digests of the next batch are computed while
/// the last one is on its way.
const BATCH_BYTES: u64 = 16 << 20;

/// How our ranks write blocks into one peer's memory: made once, used while the peer's announcement
/// stays the same.
#[derive(Debug)]
pub struct WritePlans {
    peer: Arc<NodeAnnouncement>,
    namespace: NamespaceTag,
    group: GroupId,
    ranks: Vec<(LocalRank, ReadPlan)>,
    /// For each rank of the peer: which of our ranks has which part of what it holds.
    parts: Vec<Vec<(usize, ModelPart)>>,
}

impl WritePlans {
    /// The peer.
    pub fn node(&self) -> NodeId {
        self.peer.node
    }

    /// Bytes that a block moves, over all ranks of the peer.
    pub fn bytes_per_block(&self) -> u64 {
        self.ranks.iter().map(|(_, plan)| plan.bytes_per_block()).sum()
    }
}

/// Slots that a peer has set aside for blocks of a chain, under a grant. The node renews the grant
/// while this lives. Dropping it gives the slots back that hold no block, as soon as no transfer
/// can write to them any more.
pub struct RemoteSlots {
    plans: Arc<WritePlans>,
    validity: Arc<Mutex<Instant>>,
    hashes: Vec<SequenceHash>,
    places: Vec<usize>,
    slots: Vec<u32>,
    writing: Arc<Writing>,
}

/// What a write has brought.
#[derive(Debug)]
pub struct Written {
    /// So many blocks from the first on are registered at the peer.
    pub blocks: usize,
    /// Why the rest is not.
    pub failure: Option<RemoteError>,
}

/// Says to the peer that no transfer under a grant runs any more, when it is dropped: each transfer
/// has it, until the hardware is done.
struct Writing {
    // The agent keeps transfers that hang, and this node has the agent.
    shared: Weak<RemoteNodeState>,
    node: NodeId,
    agent: String,
    lease: LeaseId,
}

impl Drop for Writing {
    fn drop(&mut self) {
        let Some(shared) = self.shared.upgrade() else { return };
        shared.writing.lock().remove(&(self.node, self.lease));
        // A peer that does not hear this asks.
        shared.answer(&self.agent, &Message::Finished { lease: self.lease });
    }
}

/// A batch on its way.
struct Batch {
    blocks: usize,
    transfers: Vec<Box<dyn RemoteTransfer>>,
    /// What says to the peer that the blocks are there; none where the transfer brings it.
    message: Option<Vec<u8>>,
    request: u64,
    answers: Receiver<Message>,
}

impl RemoteNode {
    /// How our ranks write blocks into a peer's memory: every rank of it gets its part.
    ///
    /// # Errors
    /// [`RemoteError::UnknownNode`], [`RemoteError::Shape`] with what does not fit.
    pub fn plan_writes(
        &self,
        peer: NodeId,
        namespace: NamespaceTag,
        group: GroupId,
        ranks: &[LocalRank],
    ) -> Result<Arc<WritePlans>, RemoteError> {
        let peer = self.shared.registry.get(peer).ok_or(RemoteError::UnknownNode { node: peer })?;
        if !(1..=MAX_PARTS).contains(&ranks.len()) {
            let (option, rule) = ("ranks", "give 1 to 64 ranks of this process");
            return Err(RemoteError::Option { option, value: ranks.len().to_string(), rule });
        }
        let sets = peer.sets_of(&namespace, group);
        check_whole(ranks.iter().map(|rank| &rank.bound), &sets)?;
        let ours: Vec<RankSlice> = ranks.iter().map(|rank| rank.slice).collect();
        let mut parts = Vec::with_capacity(sets.len());
        let mut given = vec![Vec::new(); ranks.len()];
        for (at, set) in sets.iter().enumerate() {
            let pieces = cover(&ModelPart::of(&set.slice), &ours, at)?;
            for (rank, part) in &pieces {
                given[*rank].push((at, part.clone()));
            }
            parts.push(pieces);
        }
        let plan = |(rank, given): (&LocalRank, &Vec<(usize, ModelPart)>)| -> Result<_, RemoteError> {
            rank.check()?;
            Ok((rank.clone(), ReadPlan::towards(&rank.slice, &rank.bound, group, &sets, given)?))
        };
        let ranks = ranks.iter().zip(&given).map(plan).collect::<Result<_, _>>()?;
        Ok(Arc::new(WritePlans { peer, namespace, group, ranks, parts }))
    }

    /// Whether plans were made from what is known of their peer now.
    pub fn is_current_for_writes(&self, plans: &WritePlans) -> bool {
        self.shared.registry.get(plans.node()).is_some_and(|known| Arc::ptr_eq(&known, &plans.peer))
    }

    /// Asks a peer to set slots aside for the blocks of a chain, from index `from` on, that it
    /// lacks, for `most` of them at most (up to 1024). `hashes` is the chain from its first block
    /// on, up to 8192 blocks; `chain` is the namespace that they are chained in.
    ///
    /// # Errors
    /// [`RemoteError::NoAnswer`] at the deadline, [`RemoteError::Refused`], [`RemoteError::Agent`].
    pub fn get_remote_blocks_mutable(
        &self,
        plans: &Arc<WritePlans>,
        (chain, hashes, from): (NamespaceTag, &[SequenceHash], usize),
        most: usize,
        deadline: Instant,
    ) -> Result<RemoteSlots, RemoteError> {
        let hashes = &hashes[..hashes.len().min(MAX_FIND)];
        let (shared, node, agent) = (&self.shared, plans.node(), &plans.peer.agent);
        let request = shared.next.fetch_add(1, Ordering::Relaxed);
        let offer = Message::Offer {
            request,
            epoch: plans.peer.epoch,
            namespace: plans.namespace,
            group: plans.group,
            chain,
            hashes: hashes.to_vec(),
            from: from.min(hashes.len()) as u32,
            most: u32::try_from(most).unwrap_or(u32::MAX),
        };
        // The grant counts from before the peer gives it, so that ours ends first.
        let asked = clock::now();
        let (lease, ttl, places, slots) = match self.ask(node, agent, request, &offer, deadline)? {
            Message::Room { lease, ttl_ms, places, slots, .. } => {
                (lease, Duration::from_millis(ttl_ms), places, slots)
            }
            Message::Refuse { why, .. } => return Err(RemoteError::Refused { node, why }),
            _ => return Err(RemoteError::Malformed { node }),
        };
        let validity = Arc::new(Mutex::new(deadline_after(asked, ttl)));
        shared.writing.lock().insert((node, lease));
        let writing = Writing { shared: Arc::downgrade(shared), node, agent: agent.clone(), lease };
        let places: Vec<usize> = places.into_iter().map(|at| at as usize).collect();
        // A block that was not offered is none of ours.
        let wanted = |at: &usize| hashes.get(*at).copied().filter(|_| *at >= from);
        let wanted: Option<Vec<SequenceHash>> = places.iter().map(wanted).collect();
        let plans = Arc::clone(plans);
        // Dropping what was made of it gives the slots back.
        let writing = Arc::new(writing);
        let hashes = wanted.ok_or(RemoteError::Malformed { node })?;
        let renew_at = deadline_after(asked, ttl / 3);
        let held = Held { agent: agent.clone(), validity: Arc::clone(&validity), asked: None, renew_at, ttl };
        shared.held.lock().insert((node, lease), held);
        // It has to be renewed earlier than the thread may look next.
        shared.wake.set();
        Ok(RemoteSlots { plans, validity, hashes, places, slots, writing })
    }
}

impl RemoteSlots {
    /// The blocks that the peer wants, by their index in the chain.
    pub fn places(&self) -> &[usize] {
        &self.places
    }

    /// Whether the peer wants none: it has them all.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The peer.
    pub fn node(&self) -> NodeId {
        self.plans.node()
    }

    /// Whether the grant still holds, by our clock.
    pub fn is_held(&self) -> bool {
        clock::now() < *self.validity.lock()
    }

    /// Writes blocks from the slots `sources` of our ranks, the same slot on each, one for each of
    /// [`places`](Self::places). The peer verifies every byte before it registers a block. `claim`
    /// is dropped when no hardware reads the slots any more, which may be after this has returned
    /// with a failure.
    ///
    /// # Errors
    /// [`RemoteError::Destination`] for too few slots. Failures on the way are in [`Written`].
    ///
    /// # Safety
    /// Until `claim` is dropped, nobody may write the slots.
    pub unsafe fn write_from(
        self,
        sources: &[u32],
        claim: &Arc<dyn Any + Send + Sync>,
        deadline: Instant,
    ) -> Result<Written, RemoteError> {
        if sources.len() < self.slots.len() {
            return Err(RemoteError::Destination { slots: sources.len(), blocks: self.slots.len() });
        }
        let step = usize::try_from(BATCH_BYTES / self.plans.bytes_per_block().max(1)).unwrap_or(1).max(1);
        let (mut blocks, mut next, mut running) = (0, 0, None::<Batch>);
        loop {
            let end = (next + step).min(self.slots.len());
            // The digests of the next batch are computed while the last one moves, and it starts
            // when the peer has taken that: a receiver is behind by one batch at most.
            let digests = (next < end).then(|| self.digests(next..end, sources)).transpose();
            if let Some(batch) = running.take() {
                let wanted = batch.blocks;
                match self.finish(batch, deadline) {
                    Ok(taken) => blocks += taken.min(wanted),
                    Err((taken, error)) => {
                        return Ok(Written { blocks: blocks + taken, failure: Some(error) });
                    }
                }
            }
            let started = match digests {
                Ok(None) => return Ok(Written { blocks, failure: None }),
                // SAFETY: nobody writes our slots until `claim` is dropped; the peer has set its
                // own aside for us.
                Ok(Some(digests)) => unsafe { self.start(next..end, sources, digests, claim) },
                Err(error) => Err(error),
            };
            match started {
                Ok(batch) => running = Some(batch),
                Err(error) => return Ok(Written { blocks, failure: Some(error) }),
            }
            next = end;
        }
    }

    /// Digests of our own bytes, by block, then by rank of the peer.
    fn digests(&self, range: Range<usize>, sources: &[u32]) -> Result<Vec<u64>, RemoteError> {
        let mut digests = Vec::with_capacity(range.len() * self.plans.parts.len());
        for at in range {
            for pieces in &self.plans.parts {
                let mut sum = 0_u64;
                for (rank, part) in pieces {
                    let blocks = self.plans.ranks[*rank].0.blocks();
                    // SAFETY: the caller of `write_from` keeps writers away from the slot.
                    let part = unsafe { digest(blocks, sources[at], &self.hashes[at], part) };
                    sum = sum.wrapping_add(part.map_err(|error| RemoteError::Storage(error.to_string()))?);
                }
                digests.push(sum);
            }
        }
        Ok(digests)
    }

    /// # Safety
    /// As `write_from`.
    unsafe fn start(
        &self,
        range: Range<usize>,
        sources: &[u32],
        digests: Vec<u64>,
        claim: &Arc<dyn Any + Send + Sync>,
    ) -> Result<Batch, RemoteError> {
        if !self.is_held() {
            return Err(RemoteError::LeaseEnded { node: self.node() });
        }
        let Some(shared) = self.writing.shared.upgrade() else {
            return Err(RemoteError::Thread("the node has ended".to_owned()));
        };
        let pairs: Vec<(u32, u32)> = range.clone().map(|at| (self.slots[at], sources[at])).collect();
        let mut lists: Vec<TransferLists> = Vec::new();
        for (_, plan) in &self.plans.ranks {
            lists.extend(plan.lists(&pairs)?);
        }
        let (blocks, lease) = (range.len(), self.writing.lease);
        let request = shared.next.fetch_add(1, Ordering::Relaxed);
        let message = Message::Written { request, lease, blocks: blocks as u32, digests };
        let mut message = Some(messages::encode(&message));
        let (answer, answers) = sync_channel(1);
        shared.wait_for(request, &self.plans.peer.agent, answer)?;
        let mut batch = Batch { blocks, transfers: Vec::new(), message: None, request, answers };
        let is_alone = lists.len() == 1;
        for lists in lists {
            let bounds: Vec<_> = self.plans.ranks.iter().map(|(rank, _)| rank.bound.clone()).collect();
            let keep = Box::new((Arc::clone(claim), Arc::clone(&self.writing), bounds));
            let transfer = RemoteRequest {
                direction: TransferDirection::Write,
                peer: lists.agent,
                local: lists.local,
                remote: lists.remote,
                // It comes when the bytes are there. That of one transfer says nothing of others.
                notification: if is_alone { message.take() } else { None },
                keep,
            };
            // SAFETY: as the caller promises; `keep` has `claim`.
            match unsafe { shared.agent.start(transfer) } {
                Ok(transfer) => batch.transfers.push(transfer),
                Err(error) => {
                    shared.waiting.lock().remove(&request);
                    return Err(error.into());
                }
            }
        }
        batch.message = message;
        Ok(batch)
    }

    /// Waits until the peer has taken a batch. How many blocks it has, also in an error.
    fn finish(&self, mut batch: Batch, deadline: Instant) -> Result<usize, (usize, RemoteError)> {
        let taken = self.wait_for(&mut batch, deadline);
        if let Some(shared) = self.writing.shared.upgrade() {
            shared.waiting.lock().remove(&batch.request);
        }
        let node = self.node();
        match taken.map_err(|error| (0, error))? {
            Message::Taken { blocks, .. } if blocks as usize >= batch.blocks => Ok(batch.blocks),
            Message::Taken { blocks, is_wrong, .. } => {
                Err((blocks as usize, RemoteError::NotTaken { node, is_wrong }))
            }
            Message::Refuse { why, .. } => Err((0, RemoteError::Refused { node, why })),
            _ => Err((0, RemoteError::Malformed { node })),
        }
    }

    fn wait_for(&self, batch: &mut Batch, deadline: Instant) -> Result<Message, RemoteError> {
        for transfer in &mut batch.transfers {
            transfer.wait(deadline)?;
        }
        if let Some(message) = &batch.message {
            let Some(shared) = self.writing.shared.upgrade() else {
                return Err(RemoteError::Thread("the node has ended".to_owned()));
            };
            shared.agent.notify(&self.plans.peer.agent, message)?;
        }
        receive(&batch.answers, deadline).map_err(|error| match error {
            RecvTimeoutError::Timeout => RemoteError::NoAnswer { node: self.node() },
            RecvTimeoutError::Disconnected => RemoteError::Thread("the node has ended".to_owned()),
        })
    }
}

impl Drop for RemoteSlots {
    fn drop(&mut self) {
        // Not renewed any more. `writing` says the rest, when the last transfer has ended.
        if let Some(shared) = self.writing.shared.upgrade() {
            shared.held.lock().remove(&(self.node(), self.writing.lease));
        }
    }
}

impl RemoteNodeState {
    /// Whether transfers of ours may run under a grant of this peer.
    pub(super) fn is_writing(&self, node: NodeId, lease: LeaseId) -> bool {
        self.writing.lock().contains(&(node, lease))
    }
}

impl fmt::Debug for RemoteSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteSlots({} slots of node {})", self.slots.len(), self.node())
    }
}
