//! The bookkeeping itself, without handles or tier types.
//!
//! What shards share and what each has of its own is in [`shards`]; every operation is one of [`Core`], a hold of one
//! shard or of all. An entry's presence on a tier changes only in [`Core::set_presence`], which keeps the child counts, the copy
//! counts and the event ring in step with it: an event can be neither forgotten nor false.

mod ahead;
pub(crate) mod arrive;
pub(crate) mod begin;
#[cfg(test)]
pub(crate) mod chains;
#[cfg(test)]
pub(crate) mod counts;
pub(crate) mod entry;
pub(crate) mod evict;
pub(crate) mod expire;
pub(crate) mod field;
pub(crate) mod hold;
pub(crate) mod homes;
pub(crate) mod index;
pub(crate) mod keep;
mod line;
pub(crate) mod lookup;
pub(crate) mod losses;
mod mail;
pub(crate) mod offload;
pub(crate) mod order;
mod orphans;
pub(crate) mod prospects;
pub(crate) mod register;
pub(crate) mod remove;
pub(crate) mod restore;
pub(crate) mod select;
pub(crate) mod shards;
pub(crate) mod slot;
pub(crate) mod table;
pub(crate) mod tenants;
pub(crate) mod tiers;
pub(crate) mod touch;
pub(crate) mod users;

use crate::config::RegistryConfig;
use crate::event::EventKind;
use crate::sync::Arc;
use entry::Entry;
use hold::Told;
use mail::Letter;

pub(crate) use arrive::After;
pub(crate) use hold::Core;
pub(crate) use shards::Store;

/// No entry, slot or place.
pub(crate) const NONE: u32 = u32::MAX;

/// Most shards.
pub(crate) const MAX_SHARDS: usize = RegistryConfig::MAX_SHARDS as usize;

/// What a cached block costs in heap: its entry, its slot, its share of the table at full load and of the eviction order.
const HEAP_BYTES_PER_BLOCK: usize =
    size_of::<entry::Entry>() + size_of::<slot::Slot>() + table::BYTES_PER_KEY + order::BYTES_PER_SLOT;
const _: () = assert!(HEAP_BYTES_PER_BLOCK <= 96);

/// Whether a block is on a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Presence {
    Absent = 0,
    Arriving = 1,
    Present = 2,
}

/// Why a block is pinned: a use makes it young when it ends, being copied does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pin {
    Use,
    Transfer,
}

impl Core<'_> {
    /// The one place where presence changes. For `Present`, the entry's slot on the tier is already set.
    pub(crate) fn set_presence(&mut self, index: u32, tier: usize, new: Presence) {
        let entry = &self.store.entries[index];
        let old = entry.presence(tier);
        if old != new {
            self.change_presence((index, entry), tier, old, new);
        }
    }

    /// The same where it is known what it was.
    #[expect(
        clippy::inline_always,
        reason = "most callers know what presence was and what it becomes: most of it is then nothing"
    )]
    #[inline(always)]
    fn change_presence(&mut self, (index, entry): (u32, &Entry), tier: usize, old: Presence, new: Presence) {
        let store = self.store;
        debug_assert_eq!(entry.presence(tier), old);
        entry.set_presence(tier, new);
        if old == Presence::Arriving {
            self.arrival_ended(index, tier);
        }
        let parent = entry.parent.get();
        if entry.is_kept() {
            self.forget_keep(index, tier);
        }
        if old == Presence::Present && entry.children(tier) > 0 && store.is_full(entry.group()) {
            debug_assert!(self.holds_all(), "who keeps a place behind a parent elsewhere relies on that");
            store.bereave();
        }
        self.count_copies((index, entry), tier, old, new);
        if (old == Presence::Absent) != (new == Presence::Absent) && parent != NONE {
            let above = &store.entries[parent];
            match (new == Presence::Absent, self.holds_entry(above)) {
                (true, true) => self.child_left((parent, above), tier),
                (true, false) => self.write(Letter::Child { parent, tier: tier as u8 }),
                (false, true) => {
                    above.add_child(tier);
                    self.update_evictable(parent, tier);
                }
                // Counted under its own shard's lock, before this block came (`register`).
                (false, false) => {}
            }
        }
        let kind = match (old, new) {
            (_, Presence::Present) => EventKind::Store,
            (Presence::Present, _) => EventKind::Remove,
            _ => return,
        };
        self.tell(Told { index, slot: entry.slot(tier), tier: tier as u8, kind });
    }

    /// Keeps `copied` and `copying`: blocks of a tier that are on, or on their way to, the tier below.
    #[expect(
        clippy::inline_always,
        reason = "most callers know what presence was and what it becomes: most of it is then nothing"
    )]
    #[inline(always)]
    fn count_copies(&mut self, (index, entry): (u32, &Entry), tier: usize, old: Presence, new: Presence) {
        let below = self.store.below[tier].map_or(Presence::Absent, |lower| entry.presence(lower));
        if below != Presence::Absent {
            self.part(index, tier).count_copy(below, old, new);
        }
        if tier > 0 {
            self.count_copies_above(index, tier, old, new);
        }
    }

    /// The same for the tiers of which this is the one below.
    fn count_copies_above(&mut self, index: u32, tier: usize, old: Presence, new: Presence) {
        let store = self.store;
        let entry = &store.entries[index];
        for upper in 0..tier {
            if store.below[upper] == Some(tier) && entry.presence(upper) == Presence::Present {
                let counts = self.part(index, upper);
                counts.count_copy(old, Presence::Present, Presence::Absent);
                counts.count_copy(new, Presence::Absent, Presence::Present);
            }
        }
    }

    /// One child less on `tier`.
    #[inline]
    fn child_left(&mut self, (parent, entry): (u32, &Entry), tier: usize) {
        if entry.drop_child(tier) == 0 && entry.presence(tier) == Presence::Present {
            self.waits_no_more((parent, entry), tier);
        }
    }

    /// A Present block may go although it could not before: nothing continues it any more, or it has a copy that takes over. If it
    /// was passed over in the eviction order meanwhile, it gets its place at the old end back: everything still there is younger.
    #[inline]
    fn waits_no_more(&mut self, (index, entry): (u32, &Entry), tier: usize) {
        let slot = entry.slot(tier);
        let state = &self.store.slots[tier][slot as usize];
        if state.place.get() == NONE && state.refs() == 0 {
            self.come_back(index, tier, slot);
        }
        self.update_evictable(index, tier);
    }

    #[cold]
    fn come_back(&mut self, index: u32, tier: usize, slot: u32) {
        let slots = &self.store.slots[tier];
        self.part(index, tier).order.push_old(slot, slots);
    }

    /// The clock as entries keep it. It may wrap; differences stay right as long as they are below 2^16.
    #[inline]
    pub(crate) fn short_step(&self) -> u16 {
        self.store.step() as u16
    }
}
