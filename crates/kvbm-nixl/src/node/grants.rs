//! Slots of this node that peers write blocks into: who may write, until when, and when a slot can
//! be used again.
//!
//! A grant that its writer does not renew ends: what comes later is not registered. Its slots stay
//! out of use, because a write may still be on its way. They are free when the writer says that
//! none of its transfers runs, or when the agent says that the writer is gone.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_plan::{LeaseId, NamespaceTag, NodeId, SequenceHash, deadline_after};
use parking_lot::Mutex;

use super::export::Offered;
use super::messages::RefusedRead;
use crate::ModelPart;
use crate::digest::digest;

/// A writer that cannot be asked so many times in a row is gone: NIXL does not say why it cannot
/// send, and a failure may pass.
const GONE_AFTER: u32 = 3;

/// Set in the number of every grant: leases on blocks that peers read have it not.
const GRANT: u64 = 1 << 63;

/// A chain whose blocks a peer would write.
#[derive(Clone, Copy, Debug)]
pub struct OfferedChain<'a> {
    /// The peer.
    pub writer: NodeId,
    /// The namespace that the hashes are chained in.
    pub chain: NamespaceTag,
    /// The chain, from its first block on.
    pub hashes: &'a [SequenceHash],
    /// Index of the first block that the writer has.
    pub from: usize,
    /// Most blocks that slots may be set aside for.
    pub most: usize,
}

/// Where blocks go that peers write. Called by the node's thread, so it must not wait for anything
/// slow.
pub trait BlockSink: Send + Sync {
    /// Sets slots aside for blocks of a chain that are not here, in order.
    ///
    /// # Errors
    /// [`RefusedRead::NoRoom`].
    fn set_aside(&self, offer: OfferedChain<'_>) -> Result<Box<dyn Landing>, RefusedRead>;
}

/// Slots that are set aside for a writer. Dropping it gives those back that hold no block.
pub trait Landing: Send {
    /// The blocks that are wanted: index in the chain, and slot, the same on every rank.
    fn places(&self) -> &[(usize, u32)];

    /// The bytes of these places are in their slots on every rank, verified. How many of them, from
    /// the first on, are registered now.
    fn arrived(&mut self, places: Range<usize>) -> usize;

    /// Nothing more arrives, although somebody may still write to the slots.
    fn close(&mut self);
}

/// What a peer may write.
pub(super) struct Grant {
    pub(super) peer: String,
    offered: Arc<Offered>,
    hashes: Vec<SequenceHash>,
    slots: Vec<u32>,
    /// Blocks that were looked at, from the first on.
    seen: usize,
    landing: Box<dyn Landing>,
    expires: Instant,
    /// Not renewed beyond this.
    last: Instant,
    /// Nothing that comes is registered any more.
    is_over: bool,
    /// When the writer is asked next whether it has ended.
    ask_at: Instant,
    /// How often it could not be asked, since it last could.
    failures: u32,
    /// The peer is to be forgotten when its last grant ends.
    is_forgotten: bool,
}

/// What became of written blocks.
pub(super) struct Taken {
    /// So many of them, from the first on, are registered.
    pub(super) blocks: usize,
    /// Whether the next one has wrong bytes.
    pub(super) is_wrong: bool,
}

/// The grants of this node.
pub(super) struct Grants {
    ttl: Duration,
    longest: Duration,
    per_peer: usize,
    /// Most slots that are out of use for writers.
    most_blocks: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    held: BTreeMap<LeaseId, Grant>,
    /// One that the thread looks at now: it stays among `held` for everybody else.
    in_use: Option<(LeaseId, String, usize)>,
    /// Nothing more is granted.
    is_closed: bool,
}

impl State {
    fn blocks(&self) -> usize {
        let in_use = self.in_use.as_ref().map_or(0, |(.., blocks)| *blocks);
        self.held.values().map(|grant| grant.slots.len()).sum::<usize>() + in_use
    }

    fn of_peer(&self, peer: &str) -> usize {
        let in_use = self.in_use.as_ref().is_some_and(|(_, user, _)| user == peer);
        self.held.values().filter(|grant| grant.peer == peer).count() + usize::from(in_use)
    }
}

impl Grants {
    pub(super) fn new(ttl: Duration, longest: Duration, per_peer: usize, most_blocks: usize) -> Self {
        Self { ttl, longest, per_peer, most_blocks, state: Mutex::default() }
    }

    pub(super) fn ttl_ms(&self) -> u64 {
        self.ttl.as_millis() as u64
    }

    /// How many blocks more a peer may be granted.
    pub(super) fn room(&self, peer: &str) -> usize {
        let state = self.state.lock();
        if state.is_closed || state.of_peer(peer) >= self.per_peer {
            0
        } else {
            self.most_blocks - state.blocks().min(self.most_blocks)
        }
    }

    /// Grants what is set aside.
    pub(super) fn grant(
        &self,
        peer: &str,
        offered: Arc<Offered>,
        chain: &[SequenceHash],
        landing: Box<dyn Landing>,
        now: Instant,
    ) -> LeaseId {
        let places = landing.places().iter();
        let (hashes, slots) = places.filter_map(|(at, slot)| Some((*chain.get(*at)?, *slot))).unzip();
        let expires = deadline_after(now, self.ttl);
        let mut state = self.state.lock();
        state.next += 1;
        let id = LeaseId(GRANT | state.next);
        let grant = Grant {
            peer: peer.to_owned(),
            offered,
            hashes,
            slots,
            seen: 0,
            landing,
            expires,
            last: deadline_after(now, self.longest),
            is_over: false,
            ask_at: expires,
            failures: 0,
            is_forgotten: false,
        };
        state.held.insert(id, grant);
        id
    }

    /// The writer says that the next `blocks` blocks are in their slots: those that are right are
    /// registered. `digests` are by block, then by rank of this node. `None` if the grant is over.
    pub(super) fn written(
        &self,
        peer: &str,
        id: LeaseId,
        blocks: usize,
        digests: &[u64],
        now: Instant,
    ) -> Option<Taken> {
        let mut grant = {
            let mut state = self.state.lock();
            let is_theirs = state
                .held
                .get(&id)
                .is_some_and(|grant| grant.peer == peer && !grant.is_over && now < grant.expires);
            let grant = is_theirs.then(|| state.held.remove(&id)).flatten()?;
            state.in_use = Some((id, peer.to_owned(), grant.slots.len()));
            grant
        };
        let taken = grant.take(blocks, digests);
        let mut state = self.state.lock();
        state.in_use = None;
        state.held.insert(id, grant);
        Some(taken)
    }

    /// Lengthens a grant of this peer: see `Leases::renew`.
    pub(super) fn renew(&self, peer: &str, id: LeaseId, now: Instant) -> Option<u64> {
        let mut state = self.state.lock();
        let is_good = |grant: &&mut Grant| grant.peer == peer && !grant.is_over && now < grant.expires;
        let grant = state.held.get_mut(&id).filter(is_good)?;
        grant.expires = deadline_after(now, self.ttl).min(grant.last);
        grant.ask_at = grant.expires;
        Some(grant.expires.saturating_duration_since(now).as_millis() as u64)
    }

    /// None of the writer's transfers runs any more: its slots are free.
    pub(super) fn finished(&self, peer: &str, id: LeaseId) -> Option<Ended> {
        let mut state = self.state.lock();
        let is_theirs = state.held.get(&id).is_some_and(|grant| grant.peer == peer);
        let grant = is_theirs.then(|| state.held.remove(&id)).flatten()?;
        let forget = (grant.is_forgotten && state.of_peer(peer) == 0).then(|| peer.to_owned());
        // The landing is let go outside the lock.
        drop(state);
        Some(Ended { forget, was_over: grant.is_over })
    }

    /// Ends the grants that are over. Those whose writers have to be asked whether they have ended:
    /// agent and grant.
    pub(super) fn expire(&self, now: Instant) -> Vec<(String, LeaseId)> {
        let mut asked = Vec::new();
        for (id, grant) in self.state.lock().held.iter_mut().filter(|(_, grant)| now >= grant.ask_at) {
            if !grant.is_over {
                grant.is_over = true;
                grant.landing.close();
            }
            grant.ask_at = deadline_after(now, self.ttl);
            asked.push((grant.peer.clone(), *id));
        }
        asked
    }

    /// A writer was asked whether it has ended, or could not be. Whether it is gone.
    pub(super) fn note_asked(&self, id: LeaseId, is_asked: bool, now: Instant) -> bool {
        let mut state = self.state.lock();
        let Some(grant) = state.held.get_mut(&id) else { return false };
        grant.failures = if is_asked { 0 } else { grant.failures + 1 };
        if !is_asked {
            grant.ask_at = deadline_after(now, self.ttl / 4);
        }
        grant.failures >= GONE_AFTER
    }

    /// Whether the agent has to know this peer until its grants have ended.
    pub(super) fn forget_later(&self, peer: &str) -> bool {
        let mut state = self.state.lock();
        for grant in state.held.values_mut().filter(|grant| grant.peer == peer) {
            grant.is_forgotten = true;
        }
        state.of_peer(peer) > 0
    }

    /// Ends all grants, and gives no more. Their writers are asked at the next look.
    pub(super) fn close(&self, now: Instant) {
        let mut state = self.state.lock();
        state.is_closed = true;
        state.held.values_mut().for_each(|grant| grant.ask_at = now);
    }

    /// Leaves the slots of grants whose writes may not have ended to them for ever.
    pub(super) fn leak(&self) {
        let left = std::mem::take(&mut self.state.lock().held);
        std::mem::forget(left);
    }

    /// Whether a peer has a grant.
    pub(super) fn knows(&self, peer: &str) -> bool {
        self.state.lock().of_peer(peer) > 0
    }

    /// When the next grant ends, or its writer has to be asked.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.state.lock().held.values().map(|grant| grant.ask_at).min()
    }

    /// Slots of grants, and of those that are over.
    pub(super) fn slots(&self) -> (usize, usize) {
        let state = self.state.lock();
        let over = state.held.values().filter(|grant| grant.is_over).map(|grant| grant.slots.len()).sum();
        (state.blocks(), over)
    }
}

/// A grant that has ended.
pub(super) struct Ended {
    /// The agent that nothing keeps any more.
    pub(super) forget: Option<String>,
    pub(super) was_over: bool,
}

impl Grant {
    fn take(&mut self, blocks: usize, digests: &[u64]) -> Taken {
        let ranks = self.offered.ranks.len().max(1);
        let end = self.slots.len().min(self.seen.saturating_add(blocks));
        let (mut right, mut is_unread) = (0, false);
        for (at, expected) in (self.seen..end).zip(digests.chunks_exact(ranks)) {
            let is_right = self.is_right(at, expected);
            is_unread = is_right.is_none();
            if is_right != Some(true) {
                break;
            }
            right += 1;
        }
        let verified = self.seen..self.seen + right;
        let blocks = self.landing.arrived(verified.clone());
        let is_wrong = blocks == right && verified.end < end && !is_unread;
        // Behind a gap nothing is registered.
        self.seen =
            if blocks == verified.len() && !is_wrong && !is_unread { verified.end } else { self.slots.len() };
        Taken { blocks, is_wrong }
    }

    /// Whether a block has arrived in its slot of every rank; `None` where our own memory cannot be
    /// read.
    fn is_right(&self, at: usize, expected: &[u64]) -> Option<bool> {
        for (rank, expected) in self.offered.ranks.iter().zip(expected) {
            let part = ModelPart::of(&rank.slice);
            // SAFETY: the slot is set aside for this writer, who has said that its write is over.
            // One that breaks its word is noticed by the checksum of the block, or it changes the
            // block as any member of the deployment could.
            let found = unsafe { digest(rank.blocks(), self.slots[at], &self.hashes[at], &part) };
            match found {
                Ok(found) if found == *expected => {}
                Ok(_) => return Some(false),
                Err(error) => {
                    tracing::warn!(target: "kvbm", %error, "a block that a peer wrote cannot be read back: it is not registered");
                    return None;
                }
            }
        }
        Some(true)
    }
}
