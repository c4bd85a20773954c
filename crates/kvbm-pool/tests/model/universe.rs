//! The blocks that there can be: chains with branches, in every group with the same hashes; and
//! random numbers.

use crate::oracle::Node;
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};

pub(crate) const CAPACITY: [u32; 3] = [9, 14, 22];
pub(crate) const NODES_PER_GROUP: usize = 26;
/// Namespaces have these numbers.
pub(crate) const NAMESPACES: u32 = 2;

pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// Once in so many times.
    pub(crate) fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// Identities, and the parent of each.
pub(crate) fn universe(rng: &mut Rng, groups: usize) -> (Vec<BlockIdentity>, Vec<Option<Node>>) {
    let mut identities: Vec<BlockIdentity> = Vec::new();
    let mut parents = Vec::new();
    for group in 0..groups {
        let first = identities.len();
        for index in 0..NODES_PER_GROUP {
            // Mostly long chains with some branches; the same hashes in every group.
            let parent = match rng.below(8) {
                _ if index == 0 => None,
                0 => None,
                1 | 2 => Some(first + rng.below(index)),
                _ => Some(first + index - 1),
            };
            let position = parent.map_or(0, |parent: Node| identities[parent].position + 1);
            let namespace =
                parent.map_or(NamespaceId(index as u32 % NAMESPACES), |parent| identities[parent].namespace);
            identities.push(BlockIdentity {
                namespace,
                group: GroupId(group as u16),
                hash: SequenceHash::from_bytes([index as u8 + 1; 16]),
                parent: parent.map(|parent| identities[parent].hash),
                position,
            });
            parents.push(parent);
        }
    }
    (identities, parents)
}
