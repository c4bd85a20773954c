//! Who has which blocks: a question to several peers at once.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use kvbm_plan::{GroupId, NamespaceTag, NodeId, SequenceHash};

use super::messages::{MAX_FIND, Message};
use super::{RemoteNode, receive};

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
        let mut found: Vec<_> = peers.iter().map(|node| (*node, None)).collect();
        let (answer, answers) = sync_channel(peers.len());
        let mut asked: HashMap<u64, usize> = HashMap::new();
        for (at, node) in peers.iter().enumerate() {
            let Some(peer) = self.shared.registry.get(*node) else { continue };
            let request = self.shared.next.fetch_add(1, Ordering::Relaxed);
            let find = Message::Find { request, namespace, group, hashes: hashes.to_vec() };
            let waits = self.shared.wait_for(request, &peer.agent, answer.clone()).is_ok();
            if waits && self.shared.send(&peer.agent, &find).is_err() {
                self.shared.waiting.lock().remove(&request);
            } else if waits {
                asked.insert(request, at);
            }
        }
        let mut left = asked.len();
        while left > 0 {
            let Ok(message) = receive(&answers, deadline) else { break };
            left -= 1;
            if let Message::Found { request, blocks } = message
                && let Some(at) = asked.get(&request)
            {
                let blocks = (blocks as usize).min(hashes.len());
                found[*at].1 = Some(blocks);
                if blocks == hashes.len() {
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
