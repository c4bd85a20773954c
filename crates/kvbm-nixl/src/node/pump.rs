//! The node's thread: it takes messages, answers them, and keeps time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvbm_plan::{Epoch, GroupId, LeaseId, NamespaceTag, NodeId, SequenceHash, clock, deadline_after};

use super::grants::OfferedChain;
use super::messages::{self, Message, RefusedRead};
use super::wake::Pauses;
use super::{Offered, PublishedBlock, RemoteNodeState};
use crate::ModelPart;
use crate::agent::Notification;

/// Most peers that are named because they speak another version.
const MAX_OTHER_VERSIONS: usize = 1024;

/// Runs until the node ends. `is_called`: the agent wakes the thread when a message comes.
pub(super) fn run(shared: &Arc<RemoteNodeState>, is_called: bool) {
    let mut pauses = Pauses::new(is_called);
    while !shared.stop.load(Ordering::Acquire) {
        let now = clock::now();
        let heard = shared.turn(now);
        let expects = !shared.waiting.lock().is_empty();
        let next = pauses.until(now, heard, expects, !shared.registry.is_empty());
        shared.wake.wait_until(shared.due().map_or(next, |due| due.min(next)));
    }
}

impl RemoteNodeState {
    /// Takes the messages that have come, ends leases that are over, renews those that this node
    /// holds. Whether a message came.
    pub(super) fn turn(&self, now: Instant) -> bool {
        // An agent that fails to give messages is asked again; readers meet their deadlines.
        let messages = self.agent.notifications().unwrap_or_default();
        let heard = !messages.is_empty();
        for Notification { from, message } in messages {
            self.handle(&from, &message);
        }
        let expired = self.leases.expire(now);
        self.counters.expired.fetch_add(expired, Ordering::Relaxed);
        for (agent, lease) in self.grants.expire(now) {
            self.ask_finished(&agent, lease, now);
        }
        self.renew_held(now);
        heard
    }

    /// When the next lease ends or has to be renewed.
    pub(super) fn due(&self) -> Option<Instant> {
        let renewal = self.held.lock().values().map(|held| held.renew_at).min();
        renewal.into_iter().chain(self.leases.next_end()).chain(self.grants.next_end()).min()
    }

    fn handle(&self, from: &str, bytes: &[u8]) {
        let Some(peer) = self.registry.node_of(from) else {
            self.handle_stranger(from, bytes);
            return;
        };
        if let Some(message) = messages::decode(bytes) {
            self.handle_message(from, peer.node, message);
        } else {
            self.counters.malformed.fetch_add(1, Ordering::Relaxed);
            self.note_version(from, peer.node, bytes);
        }
    }

    /// Says once of each peer that it speaks another version: its messages are dropped, and what is
    /// asked of it ends at its deadline.
    fn note_version(&self, from: &str, peer: NodeId, bytes: &[u8]) {
        let Some(theirs) = messages::other_version(bytes) else { return };
        let mut named = self.other_versions.lock();
        if named.len() >= MAX_OTHER_VERSIONS || !named.insert(from.to_owned()) {
            return;
        }
        drop(named);
        tracing::warn!(
            target: "kvbm", peer = %peer, agent = from, theirs, ours = messages::VERSION,
            "a peer sends messages of another version: nothing is read from it or pushed to it; run the same kvbm version \
             on all nodes"
        );
    }

    fn handle_stranger(&self, from: &str, bytes: &[u8]) {
        // One that is not announced any more may have written until now.
        match messages::decode(bytes) {
            Some(Message::Finished { lease }) if self.grants.knows(from) => self.finished(from, lease),
            _ => {
                self.counters.strangers.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn handle_message(&self, from: &str, peer: NodeId, message: Message) {
        match message {
            Message::Ask { request, epoch, namespace, group, hashes, parts } => {
                let granted = self
                    .check_epoch(epoch)
                    .and_then(|()| self.hold(from, request, (namespace, group), &hashes, &parts));
                self.answer_or_refuse(from, request, granted);
            }
            Message::Find { request, namespace, group, hashes } => {
                let offered = self.offered_of(namespace, group);
                let blocks = offered.map_or(0, |offered| offered.count(&hashes)) as u32;
                self.counters.found.fetch_add(u64::from(blocks), Ordering::Relaxed);
                self.answer(from, &Message::Found { request, blocks });
            }
            Message::FindEach { request, namespace, groups, hashes } => {
                let there = self.found_each(namespace, groups, &hashes);
                self.answer(from, &Message::FoundEach { request, there });
            }
            Message::Renew { lease } => self.renew(from, lease),
            Message::Release { lease } => self.leases.release(from, lease),
            Message::Renewed { lease, ttl_ms } => self.renewed(peer, lease, ttl_ms),
            Message::Ended { lease } => self.ended(peer, lease),
            Message::Offer { request, epoch, namespace, group, chain, hashes, from: first, most } => {
                let (first, most) = (first as usize, most as usize);
                let offer = OfferedChain { writer: peer, chain, hashes: &hashes, from: first, most };
                let room = self
                    .check_epoch(epoch)
                    .and_then(|()| self.set_aside(from, request, (namespace, group), offer));
                self.answer_or_refuse(from, request, room);
            }
            Message::Written { request, lease, blocks, digests } => {
                let answer = self.take_written(from, request, lease, blocks, &digests);
                self.answer(from, &answer);
            }
            Message::Finished { lease } => self.finished(from, lease),
            Message::AskFinished { lease } => {
                if !self.is_writing(peer, lease) {
                    self.answer(from, &Message::Finished { lease });
                }
            }
            Message::Grant { request, .. }
            | Message::Refuse { request, .. }
            | Message::Found { request, .. }
            | Message::FoundEach { request, .. }
            | Message::Room { request, .. }
            | Message::Taken { request, .. } => {
                self.deliver(from, request, message);
            }
        }
    }

    /// Refuses what was asked of an earlier life of this node.
    fn check_epoch(&self, epoch: Epoch) -> Result<(), RefusedRead> {
        if epoch == self.options.epoch { Ok(()) } else { Err(RefusedRead::Epoch) }
    }

    /// Answers a request for a lease, or says why there is none.
    fn answer_or_refuse(&self, to: &str, request: u64, answer: Result<Message, RefusedRead>) {
        let answer = answer.unwrap_or_else(|why| {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            Message::Refuse { request, why }
        });
        self.answer(to, &answer);
    }

    /// What this node offers of a namespace and group.
    pub(super) fn offered_of(&self, namespace: NamespaceTag, group: GroupId) -> Option<Arc<Offered>> {
        let is_wanted = |offered: &&Arc<Offered>| offered.namespace == namespace && offered.group == group;
        self.offered.read().values().find(is_wanted).cloned()
    }

    /// Sends an answer. A reader that does not get it meets its deadline.
    pub(super) fn answer(&self, to: &str, answer: &Message) {
        let _ = self.send(to, answer);
    }

    /// Gives an answer to the request that waits for it, if it is of the peer that was asked. An
    /// answer that comes too late ends its lease.
    fn deliver(&self, from: &str, request: u64, message: Message) {
        let waiting = {
            let mut waiting = self.waiting.lock();
            let is_asked = waiting.get(&request).is_some_and(|waiting| waiting.agent == from);
            is_asked.then(|| waiting.remove(&request)).flatten()
        };
        let undo = match &message {
            Message::Grant { lease, .. } => Some(Message::Release { lease: *lease }),
            Message::Room { lease, .. } => Some(Message::Finished { lease: *lease }),
            _ => None,
        };
        let delivered = waiting.is_some_and(|waiting| waiting.answer.try_send(message).is_ok());
        if let Some(undo) = undo.filter(|_| !delivered) {
            self.answer(from, &undo);
        }
    }

    /// A lease on the longest prefix that is published, and its digests.
    fn hold(
        &self,
        peer: &str,
        request: u64,
        (namespace, group): (NamespaceTag, GroupId),
        hashes: &[SequenceHash],
        parts: &[ModelPart],
    ) -> Result<Message, RefusedRead> {
        let offered = self.offered_of(namespace, group).ok_or(RefusedRead::NotOffered)?;
        let blocks: Vec<Arc<PublishedBlock>> = offered.hold(hashes);
        let mut digests = Vec::with_capacity(blocks.len() * parts.len());
        for block in &blocks {
            for part in parts {
                digests.push(block.digest(part).map_err(|_| RefusedRead::Unreadable)?);
            }
        }
        let slots = blocks.iter().map(|block| block.block).collect();
        let lease = self.leases.grant(peer, blocks, clock::now()).ok_or(RefusedRead::TooManyLeases)?;
        self.counters.granted.fetch_add(1, Ordering::Relaxed);
        Ok(Message::Grant { request, lease, ttl_ms: self.leases.ttl_ms(), blocks: slots, digests })
    }

    /// Renews a lease that a peer holds on blocks of this node, or on slots that it writes to.
    fn renew(&self, from: &str, lease: LeaseId) {
        let now = clock::now();
        let renewed = self.leases.renew(from, lease, now);
        let answer = match renewed.or_else(|| self.grants.renew(from, lease, now)) {
            Some(ttl_ms) => Message::Renewed { lease, ttl_ms },
            None => Message::Ended { lease },
        };
        self.answer(from, &answer);
    }

    /// Renews the leases that this node holds, when a third of their time is over. One that it
    /// cannot count on any more is left to end: its owner may receive our messages although we
    /// receive none of its own.
    fn renew_held(&self, now: Instant) {
        let mut due = Vec::new();
        self.held.lock().retain(|(_, lease), held| {
            if now >= *held.validity.lock() {
                return false;
            }
            if now >= held.renew_at {
                held.renew_at = deadline_after(now, held.ttl / 3);
                // The answer counts from the first question that it may belong to.
                held.asked.get_or_insert(now);
                due.push((held.agent.clone(), *lease));
            }
            true
        });
        for (agent, lease) in due {
            self.answer(&agent, &Message::Renew { lease });
        }
    }

    /// A peer holds a lease for longer, counted from when that was asked for.
    fn renewed(&self, node: NodeId, lease: LeaseId, ttl_ms: u64) {
        if let Some(held) = self.held.lock().get_mut(&(node, lease))
            && let Some(asked) = held.asked.take()
        {
            *held.validity.lock() = deadline_after(asked, Duration::from_millis(ttl_ms).min(held.ttl));
        }
    }

    /// A peer has ended a lease that this node holds.
    fn ended(&self, node: NodeId, lease: LeaseId) {
        // The reader finds that its lease has ended.
        if let Some(held) = self.held.lock().remove(&(node, lease)) {
            *held.validity.lock() = clock::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::InProcessNetwork;
    use crate::node::{NodeOptions, RemoteNode};

    #[test]
    fn a_peer_of_another_version_is_named_once() {
        let agent = Arc::new(InProcessNetwork::new().agent("node-1").unwrap());
        let node = RemoteNode::start(agent, NodeOptions::new(NodeId(1), Epoch(1))).unwrap();
        let named = || node.shared.other_versions.lock().len();
        let later = [0x92, 0xcd, 0x7f, 0xff, 0xa5, b'L', b'a', b't', b'e', b'r'];
        node.shared.note_version("node-2", NodeId(2), b"not a message");
        node.shared.note_version(
            "node-2",
            NodeId(2),
            &messages::encode(&Message::Renew { lease: LeaseId(1) }),
        );
        assert_eq!(named(), 0, "malformed, and of this version");
        for _ in 0..2 {
            node.shared.note_version("node-2", NodeId(2), &later);
            assert_eq!(named(), 1);
        }
        for peer in 3..MAX_OTHER_VERSIONS as u32 + 9 {
            node.shared.note_version(&format!("node-{peer}"), NodeId(peer), &later);
        }
        assert_eq!(named(), MAX_OTHER_VERSIONS, "names are not kept without bound");
    }
}
