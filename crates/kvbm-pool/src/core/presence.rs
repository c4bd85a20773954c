//! The only place where a block comes to a tier or leaves it. The counts of children and copies and
//! the event ring change with it, so no event is missing and none is false.

use super::state::Core;
use crate::entry::{NONE, Presence};
use crate::event::{EventRecordKind, PackedRecord};
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockId, Tier};

impl Core {
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
        if self.entry(index).is_pinned() {
            self.forget_timed_pin(index, tier);
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
            let record = PackedRecord::new(kind, Tier::SLOTTED[tier], slot, self.identity(index));
            self.events.push(record);
        }
    }

    /// Counts the blocks of a tier that are on, or on their way to, the tier below.
    #[inline]
    fn count_copies(&mut self, index: u32, tier: usize, old: Presence, new: Presence) {
        let entry = &self.entries[index as usize];
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
            self.tiers[tier].order.push_old(slot, &self.slots[tier]);
        }
        self.update_evictable(index, tier);
    }
}
