//! The begin of arrivals: which blocks come, and which blocks must stay while the tier makes room
//! for them.

use super::policy_calls::FAR_FROM_TAIL;
use super::reference::Reference;
use super::state::Core;
use crate::arrival::{Arrival, Refusal};
use crate::entry::{NONE, Presence};
use crate::metadata::BlockMetadata;
use crate::slot::Usage;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, SequenceHash};

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
            match self.presence_of(tier, identity.group, identity.hash) {
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

    /// Presence of a block on `tier`, and its slot there.
    fn presence_of(&self, tier: usize, group: GroupId, hash: SequenceHash) -> (Presence, Option<u32>) {
        match self.find(group, hash) {
            Some(found) => (self.entry(found).presence(tier), Some(self.entry(found).slot(tier))),
            None => (Presence::Absent, None),
        }
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
        let Some(parent) = identity.parent.filter(|_| self.is_full(identity.group)) else {
            return (true, None);
        };
        match self.presence_of(tier, identity.group, parent) {
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
        if let Some(index) = self.find(identity.group, identity.hash) {
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
        if let Some(parent) = identity.parent.filter(|_| self.is_full(identity.group)) {
            let there = self.find(identity.group, parent).is_some_and(|above| {
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
        self.recall(index, FAR_FROM_TAIL);
        let ticket = self.new_ticket();
        let counts = &mut self.tiers[tier];
        counts.held -= 1;
        counts.arriving += 1;
        let state = &self.slots[tier][block.index()];
        state.entry.set(index);
        state.set_usage(Usage::Arriving);
        state.set_ticket(ticket);
        let entry = &self.entries[index as usize];
        debug_assert!(entry.slot(tier) == NONE, "an Absent block has no slot");
        if entry.is_nowhere() {
            entry.priority.set(metadata.priority);
        }
        entry.slots[tier].set(block.0);
        self.tenants.count(tier, entry.namespace(), true);
        self.set_presence(index, tier, Presence::Arriving);
        Arrival::Reserved { block, ticket }
    }
}
