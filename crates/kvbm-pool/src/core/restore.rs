//! What a persistent tier held before the restart becomes Present again.

use super::policy_calls::FAR_FROM_TAIL;
use super::state::Core;
use crate::entry::{NONE, Presence};
use crate::metadata::BlockMetadata;
use crate::recovery::Restored;
use crate::slot::Usage;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, RecoveredBlock, SequenceHash};
use std::collections::HashMap;

/// The recovered blocks that count: each slot of the tier and each hash there once, the last record
/// wins. In order of last use.
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

/// Makes `blocks`, which [`latest`] chose, Present on an unused tier whose free list was emptied,
/// and refills the free list.
pub(crate) fn restore(
    core: &mut Core,
    tier: usize,
    blocks: &[RecoveredBlock],
    metadata: BlockMetadata,
    outcome: &mut Restored,
) {
    let mut by_position: Vec<usize> = (0..blocks.len()).collect();
    by_position.sort_by_key(|&index| blocks[index].identity.position);
    let mut used = vec![false; core.tiers[tier].slots.len()];
    for index in by_position {
        let RecoveredBlock { block, identity } = &blocks[index];
        let unusable = core.slot(tier, block.0).usage() == Usage::Quarantined;
        if unusable || core.entries.check_identity(index, identity).is_err() {
            outcome.invalid += 1;
            outcome.rejected.push(*block);
        } else if core.entries.has_parent(identity) {
            used[block.index()] = true;
            place(core, tier, *block, identity, metadata);
        } else {
            outcome.orphans.push(*block);
        }
    }
    let on = &mut core.tiers[tier];
    on.free.refill(&on.slots, |slot| used[slot as usize]);
    let restored = || blocks.iter().map(|recovered| recovered.block).filter(|block| used[block.index()]);
    for block in restored() {
        on.push_young(block.0);
        outcome.restored += 1;
    }
    for block in restored() {
        core.update_evictable(core.entry_of(tier, block.0), tier);
    }
}

/// Makes one block Present in its slot.
fn place(core: &mut Core, tier: usize, block: BlockId, identity: &BlockIdentity, metadata: BlockMetadata) {
    let index = core.find_or_insert(identity, None);
    core.policy.recall(&core.entries[index], FAR_FROM_TAIL);
    let on = &mut core.tiers[tier];
    on.inactive += 1;
    on.counters.stored += 1;
    let state = on.slot(block.0);
    state.entry.set(index);
    state.link.set(NONE);
    state.set_usage(Usage::Registered);
    let entry = &core.entries[index];
    if entry.is_nowhere() {
        entry.priority.set(metadata.priority);
    }
    entry.slots[tier].set(block.0);
    core.tenants.count(tier, entry.namespace(), true);
    core.tenants.count_idle(tier, entry.namespace(), true);
    core.note_time(index);
    core.set_presence(index, tier, Presence::Present);
}
