//! Who has which blocks: a question to several peers at once.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use kvbm_plan::{GroupId, NamespaceTag, NodeId, SequenceHash};

use super::messages::{MAX_FIND, MAX_GROUPS, Message, WORD_BITS};
use super::{RemoteNode, RemoteNodeState, receive};

impl RemoteNode {
    /// Most blocks that one question names.
    pub const MAX_FIND: usize = MAX_FIND;

    /// Asks several peers at once how many of these blocks (up to 8192) each has, from the first
    /// on. Returns when all have answered, when one has all of them, or at the deadline. The peers
    /// in the order given; `None` for one that did not answer or cannot be asked. Nothing is held:
    /// a block may be gone by the time it is read.
    pub fn find(
        &self,
        peers: &[NodeId],
        namespace: NamespaceTag,
        group: GroupId,
        hashes: &[SequenceHash],
        deadline: Instant,
    ) -> Vec<(NodeId, Option<usize>)> {
        let hashes = &hashes[..hashes.len().min(MAX_FIND)];
        let find = |request| Message::Find { request, namespace, group, hashes: hashes.to_vec() };
        self.ask_all(peers, deadline, find, |message| match message {
            Message::Found { blocks, .. } => {
                let blocks = (blocks as usize).min(hashes.len());
                Some((blocks, blocks == hashes.len()))
            }
            _ => None,
        })
    }

    /// Asks several peers at once which of these blocks (up to 8192) each has in each of the cache
    /// groups from 0 on, `groups` of them. Returns when all have answered, or at the deadline. By
    /// peer in the order given, then by group and block; `None` for one that did not answer.
    /// Nothing is held.
    pub fn find_each(
        &self,
        peers: &[NodeId],
        namespace: NamespaceTag,
        groups: usize,
        hashes: &[SequenceHash],
        deadline: Instant,
    ) -> Vec<(NodeId, Option<Vec<Vec<bool>>>)> {
        let hashes = &hashes[..hashes.len().min(MAX_FIND)];
        let groups = groups.min(MAX_GROUPS);
        let find = |request| Message::FindEach {
            request,
            namespace,
            groups: groups as u16,
            hashes: hashes.to_vec(),
        };
        self.ask_all(peers, deadline, find, |message| match message {
            Message::FoundEach { there, .. } => {
                let mut there: Vec<Vec<bool>> =
                    there.iter().take(groups).map(|group| unpacked(group, hashes.len())).collect();
                there.resize_with(groups, || vec![false; hashes.len()]);
                Some((there, false))
            }
            _ => None,
        })
    }

    /// Asks several peers at once. `read` says what an answer is, and whether the others need not
    /// be waited for.
    fn ask_all<T>(
        &self,
        peers: &[NodeId],
        deadline: Instant,
        question: impl Fn(u64) -> Message,
        read: impl Fn(Message) -> Option<(T, bool)>,
    ) -> Vec<(NodeId, Option<T>)> {
        let mut found: Vec<_> = peers.iter().map(|node| (*node, None)).collect();
        let (answer, answers) = sync_channel(peers.len());
        let mut asked: HashMap<u64, usize> = HashMap::new();
        for (at, node) in peers.iter().enumerate() {
            let Some(peer) = self.shared.registry.get(*node) else { continue };
            let request = self.shared.next.fetch_add(1, Ordering::Relaxed);
            let waits = self.shared.wait_for(request, &peer.agent, answer.clone()).is_ok();
            if waits && self.shared.send(&peer.agent, &question(request)).is_err() {
                self.shared.waiting.lock().remove(&request);
            } else if waits {
                asked.insert(request, at);
            }
        }
        let mut left = asked.len();
        while left > 0 {
            let Ok(message) = receive(&answers, deadline) else { break };
            left -= 1;
            let Some(&at) = message.request().and_then(|request| asked.get(&request)) else { continue };
            if let Some((answer, is_enough)) = read(message) {
                found[at].1 = Some(answer);
                if is_enough {
                    break;
                }
            }
        }
        let mut waiting = self.shared.waiting.lock();
        for request in asked.keys() {
            waiting.remove(request);
        }
        drop(waiting);
        found
    }
}

impl RemoteNodeState {
    /// Which of these blocks this node has in each of so many groups, a bit for each block.
    pub(super) fn found_each(
        &self,
        namespace: NamespaceTag,
        groups: u16,
        hashes: &[SequenceHash],
    ) -> Vec<Vec<u64>> {
        let of_group = |group| {
            let offered = self.offered_of(namespace, GroupId(group));
            let there = offered.map_or_else(Vec::new, |offered| offered.has_each(hashes));
            let count = there.iter().filter(|there| **there).count() as u64;
            self.counters.found.fetch_add(count, Ordering::Relaxed);
            packed(&there)
        };
        (0..groups).map(of_group).collect()
    }
}

/// A bit for each of these.
fn packed(there: &[bool]) -> Vec<u64> {
    let word = |part: &[bool]| part.iter().rev().fold(0, |word, there| (word << 1) | u64::from(*there));
    there.chunks(WORD_BITS).map(word).collect()
}

/// The first `count` bits; those that are not there are not set.
fn unpacked(words: &[u64], count: usize) -> Vec<bool> {
    let bit = |at: usize| words.get(at / WORD_BITS).is_some_and(|word| word >> (at % WORD_BITS) & 1 == 1);
    (0..count).map(bit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_the_same_after_they_were_packed() {
        for count in [0, 1, 63, 64, 65, 200] {
            let there: Vec<bool> = (0..count).map(|at| at % 3 == 0 || at == count - 1).collect();
            assert_eq!(unpacked(&packed(&there), count), there);
        }
        assert_eq!(unpacked(&[], 3), [false; 3], "what an answer leaves out is not there");
    }
}
