//! Arrivals: slots that a transfer fills. Nothing is visible before it is complete.

use super::prospects::FAR_FROM_TAIL;
use super::slot::Usage;
use super::{Core, NONE, Pin, Presence};
use crate::arrivals::{Arrival, Completion, Refusal};
use crate::metadata::BlockMetadata;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, SequenceHash};

impl Core<'_> {
    /// What must not be evicted while room is made for `identities`: those of them that are there, and parents.
    /// Pins them into `pins`; returns how many slots are needed.
    pub(crate) fn prepare_arrivals(
        &mut self,
        tier: usize,
        identities: &[BlockIdentity],
        pins: &mut Vec<BlockId>,
    ) -> usize {
        let mut needed = 0;
        for (index, identity) in identities.iter().enumerate() {
            match self.presence_of(tier, identity.group, identity.hash) {
                (Presence::Arriving, _) => {}
                (Presence::Present, slot) => self.pin_into(tier, slot, pins),
                (Presence::Absent, _) => {
                    let (admitted, parent) = self.admits(tier, identity, &identities[..index]);
                    needed += usize::from(admitted);
                    if let Some(slot) = parent {
                        self.pin_into(tier, slot, pins);
                    }
                }
            }
        }
        needed
    }

    fn presence_of(&self, tier: usize, group: GroupId, hash: SequenceHash) -> (Presence, u32) {
        match self.find(group, hash) {
            Some(found) => {
                let entry = &self.store.entries[found];
                (entry.presence(tier), entry.slot(tier))
            }
            None => (Presence::Absent, NONE),
        }
    }

    fn pin_into(&mut self, tier: usize, slot: u32, pins: &mut Vec<BlockId>) {
        self.pin(tier, slot, Pin::Transfer);
        pins.push(BlockId(slot));
    }

    /// Whether a block may be brought to `tier` after those of `earlier`, and the parent's slot if it is there now.
    fn admits(
        &self,
        tier: usize,
        identity: &BlockIdentity,
        earlier: &[BlockIdentity],
    ) -> (bool, Option<u32>) {
        let Some(parent) = identity.parent.filter(|_| self.store.is_full(identity.group)) else {
            return (true, None);
        };
        match self.presence_of(tier, identity.group, parent) {
            (Presence::Present, slot) => (true, Some(slot)),
            (Presence::Arriving, _) => (true, None),
            (Presence::Absent, _) => {
                let same = |other: &BlockIdentity| other.hash == parent && other.group == identity.group;
                (earlier.iter().rev().any(same), None)
            }
        }
    }

    /// Decides for one identity, taking a Held slot from `room` where one is needed.
    pub(crate) fn begin_arrival(
        &mut self,
        tier: usize,
        identity: &BlockIdentity,
        metadata: BlockMetadata,
        room: &mut Vec<BlockId>,
    ) -> Arrival {
        match self.presence_of(tier, identity.group, identity.hash) {
            (Presence::Present, slot) => {
                self.pin(tier, slot, Pin::Transfer);
                return Arrival::Present { block: BlockId(slot) };
            }
            (Presence::Arriving, slot) => {
                return Arrival::Joined { ticket: self.store.slots[tier][slot as usize].ticket() };
            }
            (Presence::Absent, _) => {}
        }
        if self.store.is_full(identity.group)
            && let Some(parent) = identity.parent
        {
            let there = self.find(identity.group, parent).is_some_and(|found| {
                let entry = &self.store.entries[found];
                entry.presence(tier) != Presence::Absent && entry.comes_before(identity.position)
            });
            if !there {
                return Arrival::Refused(Refusal::MissingParent { parent });
            }
        }
        match room.pop() {
            Some(block) => self.reserve(tier, identity, metadata, block),
            None => Arrival::Refused(Refusal::NoRoom),
        }
    }

    fn reserve(
        &mut self,
        tier: usize,
        identity: &BlockIdentity,
        metadata: BlockMetadata,
        block: BlockId,
    ) -> Arrival {
        let store = self.store;
        let index = self.find_or_insert(identity, None, store.home(1));
        self.recall(index, FAR_FROM_TAIL);
        let ticket = store.new_ticket();
        let part = self.part(index, tier);
        part.drop_held(1);
        part.arriving += 1;
        let state = &store.slots[tier][block.index()];
        state.entry.set(index);
        state.set_usage(Usage::Arriving);
        state.set_ticket(ticket);
        let entry = &store.entries[index];
        if entry.is_nowhere() {
            entry.priority.set(metadata.priority);
        }
        entry.slots[tier].set(block.0);
        self.count_for_tenant(index, tier, true);
        self.set_presence(index, tier, Presence::Arriving);
        Arrival::Reserved { block, ticket }
    }

    /// The entry's arrival on `tier` will not become visible: the block was registered by another, or removed. The
    /// slot stays with its transfer; the entry stays for the slot.
    pub(crate) fn cancel_arrival(&mut self, index: u32, tier: usize) {
        let entry = &self.store.entries[index];
        self.store.slots[tier][entry.slot(tier) as usize].set_usage(Usage::Cancelled);
        entry.add_link();
    }

    /// The bytes of a reserved slot are complete and verified: the block becomes Present, pinned once for the
    /// transfer.
    pub(crate) fn complete_arrival(&mut self, tier: usize, block: BlockId) -> Completion {
        let store = self.store;
        let state = &store.slots[tier][block.index()];
        let index = state.entry.get();
        match state.usage() {
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
                self.end_cancelled(tier, block, true);
                if presence == Presence::Present {
                    Completion::Existing { block: BlockId(slot) }
                } else {
                    Completion::Removed
                }
            }
            _ => Completion::Removed,
        }
    }

    /// The transfer of a reserved slot failed or was given up. A slot that is not `reusable` is
    /// never handed out again.
    pub(crate) fn fail_arrival(&mut self, tier: usize, block: BlockId, reusable: bool) {
        let store = self.store;
        let state = &store.slots[tier][block.index()];
        let index = state.entry.get();
        match state.usage() {
            Usage::Arriving => {
                self.part(index, tier).counters.arrivals_failed += 1;
                self.set_presence(index, tier, Presence::Absent);
                store.entries[index].slots[tier].set(NONE);
                self.end_arriving(index, tier, block, reusable);
                self.unused(index);
            }
            Usage::Cancelled => {
                self.part(index, tier).counters.arrivals_failed += 1;
                self.end_cancelled(tier, block, reusable);
            }
            _ => {}
        }
    }

    fn end_cancelled(&mut self, tier: usize, block: BlockId, reusable: bool) {
        let index = self.store.slots[tier][block.index()].entry.get();
        self.end_arriving(index, tier, block, reusable);
        self.store.entries[index].drop_link();
        self.unused(index);
    }

    /// An arrival's slot is free again, or out of use for good.
    fn end_arriving(&mut self, index: u32, tier: usize, block: BlockId, reusable: bool) {
        self.count_for_tenant(index, tier, false);
        self.part(index, tier).arriving -= 1;
        let slots = &self.store.slots[tier];
        let mut free = self.store.free[tier].lock();
        if reusable {
            free.put(slots, block.0);
        } else {
            free.retire(slots, block.0);
        }
    }
}
