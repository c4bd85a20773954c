//! How arrivals end: what is complete becomes visible, in the shard of each block, one after the other. Nothing is visible before.

use super::slot::Usage;
use super::{Core, NONE, Pin, Presence, Store};
use crate::arrivals::Completion;
use kvbm_plan::BlockId;

/// What becomes of the slot of an arrival that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    Free,
    /// In exclusive use of whoever ends the arrival.
    Held,
    /// Out of use for good.
    Retired,
}

/// Times that it is looked whether a parent in another shard stays, before all are locked.
const MOST_LOOKS: usize = 4;

impl Store {
    /// Holds the shard of a slot whose arrival is the caller's, or whose block the caller pins.
    pub(crate) fn go_to_slot<'a>(&'a self, held: Option<Core<'a>>, tier: usize, block: BlockId) -> Core<'a> {
        let shard = self.shard_of_slot(tier, block.0);
        match held {
            Some(core) => core.go(shard),
            None => self.lock(shard),
        }
    }

    /// The bytes of a reserved slot are complete and verified: the block becomes Present, pinned once for the
    /// transfer. Not where the tier neither has nor awaits the parent that it needs.
    pub(crate) fn complete_arrival<'a>(
        &'a self,
        held: Option<Core<'a>>,
        tier: usize,
        block: BlockId,
    ) -> (Core<'a>, Completion) {
        let mut core = self.go_to_slot(held, tier, block);
        for _ in 0..MOST_LOOKS {
            let Some((index, parent)) = core.family_of_slot(tier, block) else {
                let completion = core.complete_arrival(tier, block, true);
                return (core, completion);
            };
            if core.holds(parent) {
                let there = core.awaits(parent, tier, index);
                let completion = core.complete_arrival(tier, block, there);
                return (core, completion);
            }
            // Under its lock what was told of the parent has a number. The block keeps it in use.
            let own = core.number();
            core = core.go(self.shard_of(parent));
            let (there, bereaved) = (core.awaits(parent, tier, index), self.bereaved());
            core = core.go(own);
            if bereaved == self.bereaved() {
                let completion = core.complete_arrival(tier, block, there);
                return (core, completion);
            }
        }
        drop(core);
        self.complete_arrival(Some(self.lock_all()), tier, block)
    }
}

impl Core<'_> {
    /// Entries of the block that arrives in a slot, and of the parent that it needs on the tier, if it needs one.
    fn family_of_slot(&self, tier: usize, block: BlockId) -> Option<(u32, u32)> {
        let store = self.store;
        let state = &store.slots[tier][block.index()];
        if state.usage() != Usage::Arriving {
            return None;
        }
        let index = state.entry.get();
        let entry = &store.entries[index];
        let parent =
            Some(entry.parent.get()).filter(|&parent| parent != NONE && store.is_full(entry.group()));
        parent.map(|parent| (index, parent))
    }

    /// The entry's arrival on `tier` will not become visible: the block was registered by another, or removed. The
    /// slot stays with its transfer; the entry stays for the slot.
    pub(crate) fn cancel_arrival(&mut self, index: u32, tier: usize) {
        let entry = &self.store.entries[index];
        self.store.slots[tier][entry.slot(tier) as usize].set_usage(Usage::Cancelled);
        entry.add_link();
    }

    /// See [`Store::complete_arrival`]; `with_parent`: the parent is there, or on its way, or not needed.
    fn complete_arrival(&mut self, tier: usize, block: BlockId, with_parent: bool) -> Completion {
        #[cfg(test)]
        super::counts::one_changes();
        let store = self.store;
        let state = &store.slots[tier][block.index()];
        let index = state.entry.get();
        match state.usage() {
            // Its parent failed, or was removed alone: nobody could find the block.
            Usage::Arriving if !with_parent => {
                self.fail_arrival(tier, block, After::Free);
                Completion::Removed
            }
            Usage::Arriving => {
                state.clear_ticket();
                state.set_usage(Usage::Registered);
                state.add_ref();
                let part = self.part(index, tier);
                part.arriving -= 1;
                part.active += 1;
                part.transfer_pins = part.transfer_pins.wrapping_add(1);
                part.counters.stored += 1;
                part.order.push_young(block.0, &store.slots[tier]);
                store.entries[index].last_step.set(self.short_step());
                self.set_presence(index, tier, Presence::Present);
                Completion::Stored
            }
            Usage::Cancelled => {
                let entry = &store.entries[index];
                let (presence, slot) = (entry.presence(tier), entry.slot(tier));
                if presence == Presence::Present {
                    self.pin(tier, slot, Pin::Transfer);
                }
                self.end_cancelled(tier, block, After::Free);
                if presence == Presence::Present {
                    Completion::Existing { block: BlockId(slot) }
                } else {
                    Completion::Removed
                }
            }
            _ => Completion::Removed,
        }
    }

    /// The transfer of a reserved slot failed or was given up.
    pub(crate) fn fail_arrival(&mut self, tier: usize, block: BlockId, after: After) {
        let store = self.store;
        let state = &store.slots[tier][block.index()];
        let index = state.entry.get();
        match state.usage() {
            Usage::Arriving => {
                self.part(index, tier).counters.arrivals_failed += 1;
                self.orphan(index, tier);
                self.set_presence(index, tier, Presence::Absent);
                store.entries[index].slots[tier].set(NONE);
                self.end_arriving(index, tier, block, after);
                self.unused(index);
            }
            Usage::Cancelled => {
                self.part(index, tier).counters.arrivals_failed += 1;
                self.end_cancelled(tier, block, after);
            }
            _ => {}
        }
    }

    fn end_cancelled(&mut self, tier: usize, block: BlockId, after: After) {
        let index = self.store.slots[tier][block.index()].entry.get();
        self.end_arriving(index, tier, block, after);
        self.store.entries[index].drop_link();
        self.unused(index);
    }

    fn end_arriving(&mut self, index: u32, tier: usize, block: BlockId, after: After) {
        self.count_for_tenant(index, tier, false);
        self.part(index, tier).arriving -= 1;
        let slots = &self.store.slots[tier];
        let mut free = self.store.free[tier].lock();
        match after {
            After::Free => free.put(slots, block.0),
            After::Held => free.hold(slots, block.0),
            After::Retired => free.retire(slots, block.0),
        }
    }
}
