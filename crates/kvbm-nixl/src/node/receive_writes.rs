//! The side of the receiver: slots are set aside, what was written is verified and registered.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvbm_plan::{GroupId, LeaseId, NamespaceTag, clock, deadline_after};

use super::RemoteNodeState;
use super::grants::{Ended, OfferedChain};
use super::messages::{MAX_BLOCKS, MAX_DIGESTS, Message, RefusedRead};
use crate::agent::AgentError;

/// How long the end of a node waits for writes of peers.
const LAST_WAIT: Duration = Duration::from_secs(2);

impl RemoteNodeState {
    /// Room for blocks of a chain that a peer has.
    pub(super) fn set_aside(
        &self,
        peer: &str,
        request: u64,
        (namespace, group): (NamespaceTag, GroupId),
        mut offer: OfferedChain<'_>,
    ) -> Result<Message, RefusedRead> {
        let offered = self.offered_of(namespace, group).ok_or(RefusedRead::NotOffered)?;
        let sink = offered.sink.get().ok_or(RefusedRead::NotTaken)?;
        let fits = MAX_BLOCKS.min(MAX_DIGESTS / offered.ranks.len().max(1));
        let hashes = offer.hashes;
        offer.most = self.grants.room(peer).min(fits).min(offer.most);
        if offer.most == 0 {
            return Err(RefusedRead::NoRoom);
        }
        let landing = sink.set_aside(offer)?;
        let (places, slots) = landing.places().iter().map(|(at, slot)| (*at as u32, *slot)).unzip();
        let lease = self.grants.grant(peer, Arc::clone(&offered), hashes, landing, clock::now());
        Ok(Message::Room { request, lease, ttl_ms: self.grants.ttl_ms(), places, slots })
    }

    /// Verifies and registers what a peer has written.
    pub(super) fn take_written(
        &self,
        peer: &str,
        request: u64,
        lease: LeaseId,
        blocks: u32,
        digests: &[u64],
    ) -> Message {
        match self.grants.written(peer, lease, blocks as usize, digests, clock::now()) {
            Some(taken) => {
                self.counters.received.fetch_add(taken.blocks as u64, Ordering::Relaxed);
                Message::Taken { request, blocks: taken.blocks as u32, is_wrong: taken.is_wrong }
            }
            None => Message::Refuse { request, why: RefusedRead::Ended },
        }
    }

    /// A writer's transfers under a grant have ended, or never will be heard of again.
    pub(super) fn finished(&self, peer: &str, lease: LeaseId) {
        let Some(Ended { forget, was_over }) = self.grants.finished(peer, lease) else { return };
        if was_over {
            self.counters.grants_expired.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(agent) = forget {
            // It may have come back since it was to be forgotten.
            let _alone = self.importing.lock();
            if self.registry.node_of(&agent).is_none() {
                // An agent that cannot forget a peer keeps what it knows of it.
                let _ = self.agent.forget_peer(&agent);
            }
        }
    }

    /// Asks the writer of a grant that is over whether its transfers have ended. Where it is gone,
    /// they have: nothing comes over a connection that is broken.
    pub(super) fn ask_finished(&self, agent: &str, lease: LeaseId, now: Instant) {
        let sent = self.send(agent, &Message::AskFinished { lease });
        if self.grants.note_asked(lease, sent.is_ok(), now) {
            self.finished(agent, lease);
        }
    }

    /// The node's thread has ended: waits a while for writes of peers that are on their way. What
    /// they may still write to is not freed.
    pub(super) fn end_grants(&self) {
        let deadline = deadline_after(clock::now(), LAST_WAIT);
        self.grants.close(clock::now());
        while self.grants.slots().0 > 0 && clock::now() < deadline {
            self.turn(clock::now());
            clock::sleep(Duration::from_millis(1));
        }
        self.grants.leak();
    }

    /// Forgets a peer's agent, when nothing depends on it any more.
    pub(super) fn forget_agent(&self, agent: &str) -> Result<(), AgentError> {
        if self.grants.forget_later(agent) { Ok(()) } else { self.agent.forget_peer(agent) }
    }
}
