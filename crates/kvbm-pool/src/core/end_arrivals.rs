//! The end of arrivals: complete blocks become visible, one after the other. No lookup finds them
//! before.

use super::reference::Reference;
use super::state::Core;
use crate::arrival::ArrivalOutcome;
use crate::entry::{NONE, Presence};
use crate::slot::Usage;
use kvbm_plan::BlockId;

/// What becomes of the slot of an arrival that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FailedSlot {
    Free,
    /// In exclusive use of the caller that ends the arrival.
    Held,
    /// Out of use for good.
    Retired,
}

impl Core {
    /// The entry's arrival on `tier` will not become visible: the block was registered by another,
    /// or removed. The slot stays with its transfer, and the entry stays for the slot.
    pub(crate) fn cancel_arrival(&mut self, index: u32, tier: usize) {
        let entry = self.entry(index);
        self.slot(tier, entry.slot(tier)).set_usage(Usage::Cancelled);
        entry.add_link();
    }

    /// The bytes of a reserved slot are complete and verified: the block becomes Present, with one
    /// reference for the transfer. Not where the tier neither has nor awaits the parent that it
    /// needs.
    pub(crate) fn complete_arrival(&mut self, tier: usize, block: BlockId) -> ArrivalOutcome {
        #[cfg(test)]
        crate::probe::block_changes();
        let state = self.slot(tier, block.0);
        let index = state.entry.get();
        match state.usage() {
            // Its parent failed, or was removed alone: no lookup could find the block.
            Usage::Arriving if !self.has_needed_parent(index, tier) => {
                self.fail_arrival(tier, block, FailedSlot::Free);
                ArrivalOutcome::Removed
            }
            Usage::Arriving => {
                let state = self.slot(tier, block.0);
                state.clear_ticket();
                state.set_usage(Usage::Registered);
                state.add_ref();
                let counts = &mut self.tiers[tier];
                counts.arriving -= 1;
                counts.active += 1;
                counts.transfer_pins += 1;
                counts.counters.stored += 1;
                counts.order.push_young(block.0, &self.slots[tier]);
                self.entry(index).last_step.set(self.short_step());
                self.expiry.note(index);
                self.set_presence(index, tier, Presence::Present);
                ArrivalOutcome::Stored
            }
            Usage::Cancelled => {
                let (presence, slot) = (self.entry(index).presence(tier), self.entry(index).slot(tier));
                let exists = presence == Presence::Present;
                if exists {
                    self.add_reference(tier, slot, Reference::Transfer);
                }
                self.end_cancelled(tier, block, FailedSlot::Free);
                if exists {
                    ArrivalOutcome::Existing { block: BlockId(slot) }
                } else {
                    ArrivalOutcome::Removed
                }
            }
            _ => ArrivalOutcome::Removed,
        }
    }

    /// Whether a block that arrives needs no parent on the tier, or the parent is there or on its
    /// way.
    fn has_needed_parent(&mut self, index: u32, tier: usize) -> bool {
        let entry = self.entry(index);
        let parent = entry.parent.get();
        parent == NONE || !self.is_full(entry.group()) || self.awaits(parent, tier, index)
    }

    /// Whether the parent of a block that arrives on `tier` is there or on its way; in the second
    /// case the block is noted behind it.
    pub(crate) fn awaits(&mut self, parent: u32, tier: usize, child: u32) -> bool {
        let presence = self.entry(parent).presence(tier);
        if presence == Presence::Arriving {
            let child = self.entry(child);
            let key = (child.group(), child.hash());
            self.early_copies.waiting.entry((parent, tier as u8)).or_default().push(key);
        }
        presence != Presence::Absent
    }

    /// The transfer of a reserved slot failed or was given up.
    pub(crate) fn fail_arrival(&mut self, tier: usize, block: BlockId, after: FailedSlot) {
        let state = self.slot(tier, block.0);
        let index = state.entry.get();
        match state.usage() {
            Usage::Arriving => {
                self.tiers[tier].counters.arrivals_failed += 1;
                self.early_copies.fail(index, tier);
                self.set_presence(index, tier, Presence::Absent);
                self.entry(index).slots[tier].set(NONE);
                self.end_arriving(index, tier, block, after);
                self.give_up_unused(index);
            }
            Usage::Cancelled => {
                self.tiers[tier].counters.arrivals_failed += 1;
                self.end_cancelled(tier, block, after);
            }
            _ => {}
        }
    }

    fn end_cancelled(&mut self, tier: usize, block: BlockId, after: FailedSlot) {
        let index = self.entry_of(tier, block.0);
        self.end_arriving(index, tier, block, after);
        self.entry(index).drop_link();
        self.give_up_unused(index);
    }

    fn end_arriving(&mut self, index: u32, tier: usize, block: BlockId, after: FailedSlot) {
        self.tenants.count(tier, self.entries[index as usize].namespace(), false);
        self.tiers[tier].arriving -= 1;
        let slots = &self.slots[tier];
        match after {
            FailedSlot::Free => self.free[tier].put(slots, block.0),
            FailedSlot::Retired => self.free[tier].retire(slots, block.0),
            FailedSlot::Held => {
                self.tiers[tier].held += 1;
                slots[block.index()].reset(Usage::Held);
            }
        }
    }
}
