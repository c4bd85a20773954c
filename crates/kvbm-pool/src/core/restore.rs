//! What a persistent tier held before the restart becomes Present again.

use super::prospects::FAR_FROM_TAIL;
use super::slot::Usage;
use super::{Core, NONE, Presence};
use crate::metadata::BlockMetadata;
use crate::registry::Restored;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, RecoveredBlock, SequenceHash};
use std::collections::HashMap;

/// The recovered blocks that count: each slot of the tier and each hash there once, the last record wins. In order of last use.
pub(crate) fn latest(
    blocks: &[RecoveredBlock],
    capacity: u32,
    outcome: &mut Restored,
) -> Vec<RecoveredBlock> {
    let mut slots: HashMap<BlockId, usize> = HashMap::with_capacity(blocks.len());
    for (index, recovered) in blocks.iter().enumerate() {
        slots.insert(recovered.block, index);
    }
    let mut hashes: HashMap<(GroupId, SequenceHash), usize> = HashMap::with_capacity(slots.len());
    for (index, recovered) in blocks.iter().enumerate() {
        if slots[&recovered.block] == index && recovered.block.0 < capacity {
            hashes.insert((recovered.identity.group, recovered.identity.hash), index);
        }
    }
    let mut kept = Vec::with_capacity(hashes.len());
    for (index, recovered) in blocks.iter().enumerate() {
        if slots[&recovered.block] != index {
            // The slot was written again: nothing to give back.
            outcome.overwritten += 1;
        } else if recovered.block.0 >= capacity {
            outcome.invalid += 1;
        } else if hashes[&(recovered.identity.group, recovered.identity.hash)] == index {
            kept.push(*recovered);
        } else {
            outcome.duplicates.push(recovered.block);
        }
    }
    kept
}

impl Core<'_> {
    /// Places `blocks`, which [`latest`] chose, on a tier of which nothing is used, whose free slots are closed; opens them. All shards are held.
    pub(crate) fn restore(
        &mut self,
        tier: usize,
        blocks: &[RecoveredBlock],
        metadata: BlockMetadata,
        outcome: &mut Restored,
    ) {
        let mut by_position: Vec<usize> = (0..blocks.len()).collect();
        by_position.sort_by_key(|&index| blocks[index].identity.position);
        let mut kept = vec![false; blocks.len()];
        let store = self.store;
        let slots = &store.slots[tier];
        let mut used = vec![false; slots.len()];
        for index in by_position {
            let RecoveredBlock { block, identity } = &blocks[index];
            let unusable = slots[block.index()].usage() == Usage::Quarantined;
            if unusable || self.store.check_identity(index, identity).is_err() {
                outcome.invalid += 1;
                outcome.rejected.push(*block);
            } else if self.has_parent(identity) {
                kept[index] = true;
                used[block.index()] = true;
                self.place_restored(tier, *block, identity, metadata);
            } else {
                outcome.orphans.push(*block);
            }
        }
        store.free[tier].lock().open(slots, |slot| used[slot as usize]);
        for (recovered, _) in blocks.iter().zip(kept).filter(|(_, kept)| *kept) {
            let index = slots[recovered.block.index()].entry.get();
            self.part(index, tier).order.push_young(recovered.block.0, slots);
            outcome.restored += 1;
        }
        for recovered in blocks.iter().filter(|recovered| used[recovered.block.index()]) {
            let index = slots[recovered.block.index()].entry.get();
            self.update_evictable(index, tier);
        }
    }

    fn has_parent(&self, identity: &BlockIdentity) -> bool {
        let Some(parent) = identity.parent.filter(|_| self.store.is_full(identity.group)) else {
            return true;
        };
        self.find(identity.group, parent).is_some_and(|found| {
            let entry = &self.store.entries[found];
            entry.nearest().is_some() && entry.comes_before(identity.position)
        })
    }

    fn place_restored(
        &mut self,
        tier: usize,
        block: BlockId,
        identity: &BlockIdentity,
        metadata: BlockMetadata,
    ) {
        let store = self.store;
        let index = self.find_or_insert(identity, None, store.home(1));
        self.recall(&store.entries[index], FAR_FROM_TAIL);
        let part = self.part(index, tier);
        part.inactive += 1;
        part.counters.stored += 1;
        let state = &store.slots[tier][block.index()];
        state.entry.set(index);
        state.link.set(NONE);
        state.set_usage(Usage::Registered);
        let entry = &store.entries[index];
        if entry.is_nowhere() {
            entry.priority.set(metadata.priority);
        }
        entry.last_step.set(self.short_step());
        entry.slots[tier].set(block.0);
        self.count_for_tenant(index, tier, true);
        self.count_idle_for_tenant(index, tier, true);
        self.set_presence(index, tier, Presence::Present);
    }
}
