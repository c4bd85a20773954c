//! What a persistent tier held before the restart becomes Present again.

use super::prospects::FAR_FROM_TAIL;
use super::slot::Usage;
use super::{Core, NONE, Presence};
use crate::metadata::BlockMetadata;
use crate::registry::Restored;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, RecoveredBlock, SequenceHash};
use std::collections::HashMap;

/// The recovered blocks that count: each slot and each hash once, the last record wins. In order of last use.
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
        if slots[&recovered.block] == index {
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

impl Core {
    /// Places `blocks`, which [`latest`] chose, on a tier that was never used.
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
        let mut used = vec![false; self.tiers[tier].slots.len()];
        for index in by_position {
            let RecoveredBlock { block, identity } = &blocks[index];
            let unusable = self.tiers[tier].slots[block.index()].usage() == Usage::Quarantined;
            if unusable || self.check_identity(index, identity).is_err() {
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
        let tier_core = &mut self.tiers[tier];
        tier_core.claim(|slot| used[slot as usize]);
        for (recovered, _) in blocks.iter().zip(kept).filter(|(_, kept)| *kept) {
            tier_core.order.push_young(recovered.block.0, &mut tier_core.slots);
            outcome.restored += 1;
        }
        for recovered in blocks.iter().filter(|recovered| used[recovered.block.index()]) {
            let index = self.tiers[tier].slots[recovered.block.index()].entry;
            self.update_evictable(index, tier);
        }
    }

    fn has_parent(&self, identity: &BlockIdentity) -> bool {
        let Some(parent) = identity.parent.filter(|_| self.is_full(identity.group)) else { return true };
        self.entries.find(identity.group, parent).is_some_and(|found| {
            let entry = &self.entries[found];
            entry.nearest().is_some() && entry.position.checked_add(1) == Some(identity.position)
        })
    }

    fn place_restored(
        &mut self,
        tier: usize,
        block: BlockId,
        identity: &BlockIdentity,
        metadata: BlockMetadata,
    ) {
        let index = self.entries.find_or_insert(identity, None);
        let step = self.short_step();
        self.recall(index, FAR_FROM_TAIL);
        let tier_core = &mut self.tiers[tier];
        tier_core.inactive += 1;
        tier_core.counters.stored += 1;
        let state = &mut tier_core.slots[block.index()];
        state.entry = index;
        state.link = NONE;
        state.set_usage(Usage::Registered);
        let entry = &mut self.entries[index];
        if entry.is_nowhere() {
            entry.priority = metadata.priority;
        }
        entry.last_step = step;
        entry.slots[tier] = block.0;
        self.set_presence(index, tier, Presence::Present);
    }
}
