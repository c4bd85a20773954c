//! Who holds what, kept in no hurry: what an index must agree with.

use crate::{KvIndex, Place};
use kvbm_plan::{GroupId, NodeId, SequenceHash, VolumeId};
use std::collections::HashSet;

/// A block at a place.
type Held = (u64, u16, usize, NodeId, Option<VolumeId>, GroupId, SequenceHash);

#[derive(Default)]
pub(super) struct Holdings(HashSet<Held>);

fn held(place: Place, group: GroupId, hash: SequenceHash) -> Held {
    let Place { source, shard, location } = place;
    (source.0, shard, location.tier.index(), location.node, location.volume, group, hash)
}

impl Holdings {
    pub(super) fn store(&mut self, place: Place, group: GroupId, hash: SequenceHash) {
        self.0.insert(held(place, group, hash));
    }

    pub(super) fn remove(&mut self, place: Place, group: GroupId, hash: SequenceHash) {
        self.0.remove(&held(place, group, hash));
    }

    /// The shard of the only source holds nothing any more.
    pub(super) fn clear(&mut self, shard: u16) {
        self.0.retain(|held| held.1 != shard);
    }

    pub(super) fn agree_with(&self, index: &KvIndex) {
        let found: Vec<Held> =
            index.holdings().map(|(place, group, hash)| held(place, group, hash)).collect();
        let once: HashSet<Held> = found.iter().copied().collect();
        assert_eq!(once.len(), found.len(), "a block is held once at a place");
        assert_eq!(once, self.0);
        let blocks: HashSet<_> = self.0.iter().map(|held| (held.5, held.6)).collect();
        let stats = index.stats();
        assert_eq!((stats.blocks, stats.refused), (blocks.len() as u64, 0));
    }
}
