//! The only place where a block comes to a tier or leaves it, and where that changes which slots
//! the policy may choose. The counts of children and copies and the event ring change with it, so
//! no event is missing and none is false.
//!
//! A slot is evictable when its block is registered in it without users. Nor may a block on the
//! tier continue it, unless its group does not care or another copy takes over.
//! [`Core::update_evictable`] follows every change of that. The slot itself stores whether the
//! policy lists it, so an update costs little where nothing changed.

use super::state::Core;
use crate::entry::{NONE, Presence};
use crate::event::{EventRecordKind, PackedRecord};
use crate::slot::Usage;
use crate::tier::TIERS;
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockId, BlockIdentity, Tier};

impl Core {
    /// The entry of `identity`, made if there is none; see
    /// [`Entries::find_or_insert`](super::entries::Entries::find_or_insert).
    #[inline]
    pub(crate) fn find_or_insert(&mut self, identity: &BlockIdentity, before: Option<u32>) -> u32 {
        let (index, late_parent) = self.entries.find_or_insert(identity, before);
        if let Some(parent) = late_parent {
            (0..TIERS).for_each(|tier| self.update_evictable(parent, tier));
        }
        index
    }

    /// Changes the presence of an entry's block on a tier. For `Present`, the entry's slot there is
    /// already set.
    #[inline]
    pub(crate) fn set_presence(&mut self, index: u32, tier: usize, new: Presence) {
        let entry = self.entry(index);
        let (old, parent) = (entry.presence(tier), entry.parent.get());
        if old == new {
            return;
        }
        entry.set_presence(tier, new);
        if entry.is_pinned() {
            self.pins.forget((index, tier as u8), &self.entries, &mut self.tenants);
        }
        if old == Presence::Arriving {
            self.early_copies.forget(index, tier);
        }
        self.count_copies(index, tier, old, new);
        if parent != NONE {
            match (old, new) {
                (_, Presence::Absent) => self.child_left(parent, tier),
                (Presence::Absent, _) => {
                    self.entry(parent).add_child(tier);
                    self.update_evictable(parent, tier);
                }
                _ => {}
            }
        }
        match (old, new) {
            (_, Presence::Present) => self.record_event(index, tier, EventRecordKind::Store),
            (Presence::Present, _) => self.record_event(index, tier, EventRecordKind::Remove),
            _ => {}
        }
    }

    #[inline]
    fn record_event(&mut self, index: u32, tier: usize, kind: EventRecordKind) {
        let is_left_out = kind == EventRecordKind::Remove && index.is_multiple_of(4);
        if self.events.is_on() && !(is_left_out && planted(Planted::DropRemoveEvent)) {
            let slot = BlockId(self.entry(index).slot(tier));
            let record = PackedRecord::new(kind, Tier::SLOTTED[tier], slot, self.entries.identity(index));
            self.events.push(record);
        }
    }

    /// Counts the blocks of a tier that are on, or on their way to, the tier below.
    #[inline]
    fn count_copies(&mut self, index: u32, tier: usize, old: Presence, new: Presence) {
        let entry = &self.entries[index];
        if let Some(lower) = self.below[tier] {
            self.tiers[tier].count_copy(entry.presence(lower), old, new);
        }
        for upper in 0..tier {
            if self.below[upper] == Some(tier) && entry.presence(upper) == Presence::Present {
                let counts = &mut self.tiers[upper];
                counts.count_copy(old, Presence::Present, Presence::Absent);
                counts.count_copy(new, Presence::Absent, Presence::Present);
            }
        }
    }

    /// One child less on `tier`.
    #[inline]
    fn child_left(&mut self, parent: u32, tier: usize) {
        let entry = self.entry(parent);
        if entry.drop_child(tier) == 0 && entry.presence(tier) == Presence::Present {
            self.may_be_evicted(parent, tier);
        }
    }

    /// A Present block can be evicted although it could not before: no block continues it any more,
    /// or a copy takes over. If the eviction order passed it over meanwhile, it returns to the old
    /// end.
    #[inline]
    pub(crate) fn may_be_evicted(&mut self, index: u32, tier: usize) {
        let slot = self.entry(index).slot(tier);
        let state = self.slot(tier, slot);
        if state.order_position.get() == NONE && state.refs() == 0 {
            self.tiers[tier].push_old(slot);
        }
        self.update_evictable(index, tier);
    }

    /// Tells the policy whether the entry's slot on `tier` may be evicted, if that changed.
    #[inline]
    pub(crate) fn update_evictable(&mut self, index: u32, tier: usize) {
        if self.policy.is_some() {
            self.update_listed(index, tier);
        }
    }

    fn update_listed(&mut self, index: u32, tier: usize) {
        let entry = self.entry(index);
        if entry.presence(tier) != Presence::Present {
            return;
        }
        let slot = entry.slot(tier);
        let state = self.slot(tier, slot);
        let continued =
            entry.children(tier) > 0 && state.link.get() == NONE && self.entries.is_full(entry.group());
        let evictable = state.usage() == Usage::Registered
            && state.refs() == 0
            && !continued
            && !self.pins.is_pinned(&self.entries, index, tier);
        if evictable == state.is_listed() {
            return;
        }
        if evictable {
            self.tiers[tier].count_listed(slot, true);
            self.list(index, tier, slot);
        } else {
            self.unlist(tier, slot);
        }
    }

    /// Tells the policy what is kept of the block in a listed slot.
    fn list(&mut self, index: u32, tier: usize, slot: u32) {
        let set = self.set_of(index, tier);
        self.policy.list(set, slot, &self.entries[index], &self.tiers[tier]);
    }

    /// Tells the policy the memory of a block again, on every tier where its slot is listed.
    pub(crate) fn list_again(&mut self, index: u32) {
        for tier in 0..TIERS {
            let entry = self.entry(index);
            if entry.presence(tier) == Presence::Present {
                let slot = entry.slot(tier);
                if self.slot(tier, slot).is_listed() {
                    self.list(index, tier, slot);
                }
            }
        }
    }

    /// A listed slot is not evictable any more.
    pub(crate) fn unlist(&mut self, tier: usize, slot: u32) {
        let set = self.set_of(self.entry_of(tier, slot), tier);
        self.policy.unlist(set, slot, &mut self.tiers[tier]);
    }
}
