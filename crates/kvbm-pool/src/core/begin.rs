//! How arrivals begin: which blocks come, in which shard, and what must not be evicted while room is made for them.
//!
//! A Full chain is one shard's: that of its first block's entry where it has one (what is copied down), else that of its parent. Where the
//! parent belongs to another shard, it counts the block under its own lock first, as it does for `register`: so it stays until the
//! block has come. Whatever lies in several shards otherwise is looked at in one after the other, where what must stay is pinned, and
//! begins in a hold of all.

use super::mail::Letter;
use super::prospects::FAR_FROM_TAIL;
use super::register::Place;
use super::slot::Usage;
use super::{Core, NONE, Pin, Presence, Store};
use crate::arrivals::{Arrival, Refusal};
use crate::metadata::BlockMetadata;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, SequenceHash};

/// A chain's way through the two holds in which its arrivals begin.
#[derive(Clone, Copy, Default)]
pub(crate) struct Ground {
    /// The shard, where one is enough.
    shard: Option<usize>,
    /// The parent of its first block, where that belongs to another.
    outside: Option<Place>,
}

/// The entries of a chain, made or found in the one shard that is held; none where all are.
pub(crate) type Entered = Option<Vec<u32>>;

impl Store {
    /// Locks the shard where the first look begins at blocks that are to come to `tier`.
    pub(crate) fn lock_for_arrivals(&self, tier: usize, identities: &[BlockIdentity]) -> (Core<'_>, Ground) {
        let sensible =
            || identities.iter().enumerate().all(|(at, block)| self.check_identity(at, block).is_ok());
        if self.is_whole() || !self.is_chain(identities) || !sensible() {
            return (self.lock_any(), Ground::default());
        }
        let (core, outside) = self.lock_ground(tier, identities);
        let is_here =
            |block: &BlockIdentity| core.find(block.group, block.hash).is_none_or(|index| core.holds(index));
        let one = !core.holds_all() && identities.iter().all(is_here);
        let shard = one.then(|| core.number());
        (core, Ground { shard, outside })
    }

    /// Locks the shard of a chain; a parent elsewhere that is on `tier` counts its first block.
    fn lock_ground(&self, tier: usize, identities: &[BlockIdentity]) -> (Core<'_>, Option<Place>) {
        let first = &identities[0];
        let (core, found) = self.lock_any().seek(first.group, first.hash);
        let Some(index) = found else {
            drop(core);
            let core = self.lock_home(identities.len());
            return match first.parent {
                Some(parent) => (core.seek(first.group, parent).0, None),
                None => (core, None),
            };
        };
        let parent = self.entries[index].parent.get();
        let counted = self.entries[index].presence(tier) != Presence::Absent;
        if parent == NONE || counted || core.holds(parent) {
            return (core, None);
        }
        let own = core.number();
        let mut core = core.go(self.shard_of(parent));
        let above = &self.entries[parent];
        let same = first.parent.is_some_and(|hash| above.is_block(first.group, hash));
        if !same || !core.holds(parent) || above.presence(tier) != Presence::Present {
            return (core.go(own), None);
        }
        above.add_child(tier);
        above.add_link();
        core.update_evictable(parent, tier);
        let outside = Place { parent, bereaved: self.bereaved() };
        (core.go(own), Some(outside))
    }

    /// Locks the ground of a chain again, and makes the entries that it lacks. Where one shard is not enough any more all are locked, and
    /// nobody keeps a place.
    pub(crate) fn enter_arrivals(
        &self,
        tier: usize,
        identities: &[BlockIdentity],
        ground: &mut Ground,
    ) -> (Core<'_>, Entered) {
        if let Some(shard) = ground.shard {
            let mut core = self.lock(shard);
            if core.enter_ground(tier, identities, ground.outside) {
                let entered = std::mem::take(&mut core.first_mut().entered);
                return (core, Some(entered));
            }
        }
        let mut core = self.lock_all();
        core.give_up_outside(tier, ground);
        (core, None)
    }
}

impl Core<'_> {
    /// Makes entries for a chain in the shard that is held. False where it takes more than that.
    fn enter_ground(&mut self, tier: usize, identities: &[BlockIdentity], outside: Option<Place>) -> bool {
        let store = self.store;
        let Some(first) = identities.first() else { return false };
        let known = self.find(first.group, first.hash).filter(|&index| self.holds(index));
        let elsewhere = |index: &u32| {
            let parent = store.entries[*index].parent.get();
            parent != NONE && !self.holds(parent)
        };
        let Some(index) = known.filter(elsewhere) else { return self.enter_chain(identities, None) };
        // Its coming must have been counted there.
        let parent = store.entries[index].parent.get();
        let keeps = |Place { parent: kept, .. }| kept == parent;
        let counted = store.entries[index].presence(tier) != Presence::Absent || outside.is_some_and(keeps);
        if !counted || !self.enter_chain(&identities[1..], None) {
            return false;
        }
        self.first_mut().entered.insert(0, index);
        true
    }

    /// A parent elsewhere need not keep a place any more.
    fn give_up_outside(&mut self, tier: usize, ground: &mut Ground) {
        let Some(Place { parent, .. }) = ground.outside.take() else { return };
        if self.holds(parent) {
            self.give_up_place(parent, tier);
        } else {
            self.write(Letter::Child { parent, tier: tier as u8 });
            self.write(Letter::Link { parent });
        }
    }

    /// All arrivals of a chain have begun that could: `first` is the one of its first block.
    pub(crate) fn leave_ground(
        &mut self,
        tier: usize,
        ground: &mut Ground,
        entered: Entered,
        first: Option<&Arrival>,
    ) {
        if let Some(mut entered) = entered {
            for &index in entered.iter().rev() {
                self.unused(index);
            }
            entered.clear();
            self.first_mut().entered = entered;
        }
        match ground.outside {
            // The child is counted for good, and its entry has a link of its own.
            Some(Place { parent, .. }) if matches!(first, Some(Arrival::Reserved { .. })) => {
                ground.outside = None;
                self.write(Letter::Link { parent });
            }
            _ => self.give_up_outside(tier, ground),
        }
    }

    /// What must not be evicted while room is made for `identities`: those of them that are there, and parents.
    /// Pins them into `pins`; returns how many slots are needed. What is not so any more is seen where the arrivals begin.
    pub(crate) fn prepare_arrivals(
        self,
        tier: usize,
        identities: &[BlockIdentity],
        ground: &Ground,
        pins: &mut Vec<BlockId>,
    ) -> (Self, usize) {
        let (mut core, mut needed) = (self, 0);
        let walks = ground.shard.is_none() && !core.holds_all();
        for (index, identity) in identities.iter().enumerate() {
            if walks {
                core = core.seek(identity.group, identity.hash).0;
            }
            match core.presence_of(tier, identity.group, identity.hash) {
                (Presence::Arriving, _) => {}
                (Presence::Present, slot) => core.pin_into(tier, slot, pins),
                (Presence::Absent, _) => {
                    if let Some(parent) = identity.parent.filter(|_| walks) {
                        core = core.seek(identity.group, parent).0;
                    }
                    let (admitted, parent) = core.admits(tier, identity, &identities[..index]);
                    needed += usize::from(admitted);
                    core.pin_into(tier, parent, pins);
                }
            }
        }
        (core, needed)
    }

    /// Presence on `tier`, and the slot there if the block's shard is held. Of a block elsewhere presence is a hint and the slot
    /// nothing at all: that block may be on its way out this very moment. Where it is a parent that has to stay it keeps a place.
    fn presence_of(&self, tier: usize, group: GroupId, hash: SequenceHash) -> (Presence, Option<u32>) {
        match self.find(group, hash) {
            Some(found) => {
                let entry = &self.store.entries[found];
                (entry.presence(tier), self.holds(found).then(|| entry.slot(tier)))
            }
            None => (Presence::Absent, None),
        }
    }

    fn pin_into(&mut self, tier: usize, slot: Option<u32>, pins: &mut Vec<BlockId>) {
        if let Some(slot) = slot {
            self.pin(tier, slot, Pin::Transfer);
            pins.push(BlockId(slot));
        }
    }

    /// Lets go of what was pinned so, as far as its shard is held.
    pub(crate) fn unpin_from(&mut self, tier: usize, pins: &mut Vec<BlockId>) {
        for at in (0..pins.len()).rev() {
            let slot = pins[at].0;
            if self.holds(self.store.slots[tier][slot as usize].entry.get()) {
                self.unpin(tier, slot, Pin::Transfer);
                pins.remove(at);
            }
        }
    }

    /// Whether a block may be brought to `tier` after those of `earlier`, and the parent's slot if it is there now and held.
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
            (Presence::Present, slot) => (true, slot),
            (Presence::Arriving, _) => (true, None),
            (Presence::Absent, _) => {
                let same = |other: &BlockIdentity| other.hash == parent && other.group == identity.group;
                (earlier.iter().rev().any(same), None)
            }
        }
    }

    /// Decides for one identity, taking a Held slot from `room` where one is needed. `entered`: its entry, where one shard is held.
    pub(crate) fn begin_arrival(
        &mut self,
        tier: usize,
        identity: &BlockIdentity,
        entered: Option<u32>,
        metadata: BlockMetadata,
        room: &mut Vec<BlockId>,
    ) -> Arrival {
        let store = self.store;
        let known = entered.or_else(|| self.find(identity.group, identity.hash));
        if let Some(index) = known {
            let slot = store.entries[index].slot(tier);
            match store.entries[index].presence(tier) {
                Presence::Present => {
                    self.pin(tier, slot, Pin::Transfer);
                    return Arrival::Present { block: BlockId(slot) };
                }
                Presence::Arriving => {
                    return Arrival::Joined { ticket: store.slots[tier][slot as usize].ticket() };
                }
                Presence::Absent => {}
            }
        }
        if store.is_full(identity.group)
            && let Some(parent) = identity.parent
        {
            let above = match entered {
                Some(index) => Some(store.entries[index].parent.get()).filter(|&above| above != NONE),
                None => self.find(identity.group, parent),
            };
            let there = above.is_some_and(|above| {
                let entry = &store.entries[above];
                entry.presence(tier) != Presence::Absent && entry.comes_before(identity.position)
            });
            if !there {
                return Arrival::Refused(Refusal::MissingParent { parent });
            }
        }
        let Some(block) = room.pop() else { return Arrival::Refused(Refusal::NoRoom) };
        let index = entered.unwrap_or_else(|| self.find_or_insert(identity, None, store.home(1)));
        self.reserve(tier, index, metadata, block)
    }

    fn reserve(&mut self, tier: usize, index: u32, metadata: BlockMetadata, block: BlockId) -> Arrival {
        let store = self.store;
        self.recall(&store.entries[index], FAR_FROM_TAIL);
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
}
