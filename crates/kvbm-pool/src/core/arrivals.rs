//! Arrivals: which blocks come, which must stay while the tier makes room for them, and how an
//! arrival ends. No lookup finds a block before it is complete.

use super::policy_calls::FAR_FROM_TAIL;
use super::registered::Reference;
use super::state::Core;
use crate::arrival::{Arrival, ArrivalOutcome, Refusal};
use crate::entry::{NONE, Presence};
use crate::metadata::BlockMetadata;
use crate::slot::Usage;
use kvbm_plan::{BlockId, BlockIdentity};

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
    /// Pins into `pins` the blocks that must not be evicted while the tier makes room for
    /// `identities`: those that are there, and their parents. Returns how many slots are needed.
    /// [`begin_arrival`](Self::begin_arrival) checks again.
    pub(crate) fn prepare_arrivals(
        &mut self,
        tier: usize,
        identities: &[BlockIdentity],
        pins: &mut Vec<BlockId>,
    ) -> usize {
        let mut needed = 0;
        for (at, identity) in identities.iter().enumerate() {
            match self.entries.presence_of(tier, identity.group, identity.hash) {
                (Presence::Arriving, _) => {}
                (Presence::Present, slot) => self.pin_into(tier, slot, pins),
                (Presence::Absent, _) => {
                    let (admitted, parent) = self.admits(tier, identity, &identities[..at]);
                    needed += usize::from(admitted);
                    self.pin_into(tier, parent, pins);
                }
            }
        }
        needed
    }

    fn pin_into(&mut self, tier: usize, slot: Option<u32>, pins: &mut Vec<BlockId>) {
        if let Some(slot) = slot {
            self.add_reference(tier, slot, Reference::Transfer);
            pins.push(BlockId(slot));
        }
    }

    /// Whether a block may come to `tier` after those of `earlier`, and the slot of its parent if
    /// that is there now.
    fn admits(
        &self,
        tier: usize,
        identity: &BlockIdentity,
        earlier: &[BlockIdentity],
    ) -> (bool, Option<u32>) {
        let Some(parent) = identity.parent.filter(|_| self.entries.is_full(identity.group)) else {
            return (true, None);
        };
        match self.entries.presence_of(tier, identity.group, parent) {
            (Presence::Present, slot) => (true, slot),
            (Presence::Arriving, _) => (true, None),
            (Presence::Absent, _) => {
                let same = |other: &BlockIdentity| other.hash == parent && other.group == identity.group;
                (earlier.iter().rev().any(same), None)
            }
        }
    }

    /// Decides for one block. Takes a Held slot from `room` where it needs one.
    pub(crate) fn begin_arrival(
        &mut self,
        tier: usize,
        identity: &BlockIdentity,
        metadata: BlockMetadata,
        room: &mut Vec<BlockId>,
    ) -> Arrival {
        if let Some(index) = self.entries.find(identity.group, identity.hash) {
            let slot = self.entry(index).slot(tier);
            match self.entry(index).presence(tier) {
                Presence::Present => {
                    self.add_reference(tier, slot, Reference::Transfer);
                    return Arrival::Present { block: BlockId(slot) };
                }
                Presence::Arriving => return Arrival::Joined { ticket: self.slot(tier, slot).ticket() },
                Presence::Absent => {}
            }
        }
        if let Some(parent) = identity.parent.filter(|_| self.entries.is_full(identity.group)) {
            let there = self.entries.find(identity.group, parent).is_some_and(|above| {
                let entry = self.entry(above);
                entry.presence(tier) != Presence::Absent && entry.comes_before(identity.position)
            });
            if !there {
                return Arrival::Refused(Refusal::MissingParent { parent });
            }
        }
        let Some(block) = room.pop() else { return Arrival::Refused(Refusal::NoRoom) };
        let index = self.find_or_insert(identity, None);
        self.reserve(tier, index, metadata, block)
    }

    fn reserve(&mut self, tier: usize, index: u32, metadata: BlockMetadata, block: BlockId) -> Arrival {
        self.policy.recall(&self.entries[index], FAR_FROM_TAIL);
        let ticket = self.new_ticket();
        let on = &mut self.tiers[tier];
        on.held -= 1;
        on.arriving += 1;
        let state = on.slot(block.0);
        state.entry.set(index);
        state.set_usage(Usage::Arriving);
        state.set_ticket(ticket);
        let entry = &self.entries[index];
        debug_assert!(entry.slot(tier) == NONE, "an Absent block has no slot");
        if entry.is_nowhere() {
            entry.priority.set(metadata.priority);
        }
        entry.slots[tier].set(block.0);
        self.tenants.count(tier, entry.namespace(), true);
        self.set_presence(index, tier, Presence::Arriving);
        Arrival::Reserved { block, ticket }
    }

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
            Usage::Arriving if !self.early_copies.has_needed_parent(&self.entries, index, tier) => {
                self.fail_arrival(tier, block, FailedSlot::Free);
                ArrivalOutcome::Removed
            }
            Usage::Arriving => {
                let on = &mut self.tiers[tier];
                let state = &on.slots[block.index()];
                state.clear_ticket();
                state.set_usage(Usage::Registered);
                state.add_ref();
                on.arriving -= 1;
                on.active += 1;
                on.transfer_pins += 1;
                on.counters.stored += 1;
                on.push_young(block.0);
                self.note_time(index);
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
                self.entries.give_up_unused(index);
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
        self.entries.give_up_unused(index);
    }

    fn end_arriving(&mut self, index: u32, tier: usize, block: BlockId, after: FailedSlot) {
        self.tenants.count(tier, self.entries[index].namespace(), false);
        let on = &mut self.tiers[tier];
        on.arriving -= 1;
        match after {
            FailedSlot::Free => on.put_free(block.0),
            FailedSlot::Retired => on.retire(block.0),
            FailedSlot::Held => {
                on.held += 1;
                on.slot(block.0).reset(Usage::Held);
            }
        }
    }
}
