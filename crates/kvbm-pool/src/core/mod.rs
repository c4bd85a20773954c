//! The bookkeeping itself, without locks, handles or tier types: what one shard is.
//!
//! Everything a shard knows is in [`Core`]'s fields. An entry's presence on a tier changes only in
//! [`Core::set_presence`], which keeps the child counts, the copy counts and the event ring in step with it: an event
//! can be neither forgotten nor false.

pub(crate) mod arrive;
pub(crate) mod entry;
pub(crate) mod evict;
pub(crate) mod expire;
pub(crate) mod keep;
pub(crate) mod lookup;
pub(crate) mod offload;
pub(crate) mod order;
pub(crate) mod prospects;
pub(crate) mod register;
pub(crate) mod remove;
pub(crate) mod restore;
pub(crate) mod slot;
pub(crate) mod table;
pub(crate) mod tiers;

use crate::config::{GroupConfig, RegistryConfig};
use crate::event::{EventKind, EventRing};
use crate::policy::EvictionPolicy;
use crate::tier::TIERS;
use entry::Entries;
use kvbm_plan::{BlockId, GroupId, GroupKind, Tier};
use tiers::TierCore;

/// No entry, slot or place.
pub(crate) const NONE: u32 = u32::MAX;

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

/// One shard.
pub(crate) struct Core {
    pub groups: Box<[GroupConfig]>,
    /// Chooses victims; none for least recently used, which is built in.
    pub policy: Option<Box<dyn EvictionPolicy>>,
    /// Where the policy looks at blocks next.
    observed: u32,
    /// Entries of a request, while it is touched.
    touched: Vec<u32>,
    /// Slots that the policy chose.
    pub(crate) chosen: Vec<u32>,
    pub entries: Entries,
    pub tiers: [TierCore; TIERS],
    /// For each tier, the next one further from the compute that exists.
    pub below: [Option<usize>; TIERS],
    pub events: EventRing,
    /// What leaves after some iterations without use.
    pub expiry: expire::Expiry,
    /// What is pinned until some iteration.
    pub keeps: keep::Keeps,
    pub step: u64,
    next_ticket: u64,
}

impl Core {
    pub(crate) fn new(config: &RegistryConfig, policy: Option<Box<dyn EvictionPolicy>>, seed: u64) -> Self {
        let capacity = config.capacity.map(|blocks| blocks as usize);
        let below = |tier: usize| (tier + 1..TIERS).find(|&lower| capacity[lower] > 0);
        Self {
            groups: config.groups.clone().into_boxed_slice(),
            policy,
            observed: 0,
            touched: Vec::new(),
            chosen: Vec::with_capacity(evict::MAX_VICTIMS),
            entries: Entries::new(capacity.iter().sum(), seed),
            tiers: capacity.map(TierCore::new),
            below: std::array::from_fn(below),
            events: EventRing::new(config.event_capacity),
            expiry: expire::Expiry::default(),
            keeps: keep::Keeps::default(),
            step: 0,
            next_ticket: 1,
        }
    }

    pub(crate) fn group(&self, group: GroupId) -> Option<GroupConfig> {
        self.groups.get(usize::from(group.0)).copied()
    }

    /// Whether the group's blocks are useless without their parents.
    #[inline]
    pub(crate) fn is_full(&self, group: GroupId) -> bool {
        self.groups.get(usize::from(group.0)).is_some_and(|config| config.kind == GroupKind::Full)
    }

    /// The one place where presence changes. For `Present`, the entry's slot on the tier is already set.
    pub(crate) fn set_presence(&mut self, index: u32, tier: usize, new: Presence) {
        let entry = &mut self.entries[index];
        let old = entry.presence(tier);
        if old == new {
            return;
        }
        entry.set_presence(tier, new);
        let parent = entry.parent;
        if entry.is_kept() {
            self.forget_keep(index, tier);
        }
        self.count_copies(index, tier, old, new);
        if (old == Presence::Absent) != (new == Presence::Absent) && parent != NONE {
            if new == Presence::Absent {
                self.child_left(parent, tier);
            } else {
                self.entries[parent].children[tier] += 1;
                self.update_evictable(parent, tier);
            }
        }
        if self.events.is_on() {
            let kind = match (old, new) {
                (_, Presence::Present) => EventKind::Store,
                (Presence::Present, _) => EventKind::Remove,
                _ => return,
            };
            let block = BlockId(self.entries[index].slots[tier]);
            self.events.push(kind, Tier::SLOTTED[tier], block, self.entries.identity(index));
        }
    }

    /// Keeps `copied` and `copying`: blocks of a tier that are on, or on their way to, the tier below.
    fn count_copies(&mut self, index: u32, tier: usize, old: Presence, new: Presence) {
        let entry = &self.entries[index];
        if let Some(lower) = self.below[tier] {
            let there = entry.presence(lower);
            self.tiers[tier].count_copy(there, old, new);
        }
        for upper in 0..tier {
            if self.below[upper] == Some(tier) && entry.presence(upper) == Presence::Present {
                let counts = &mut self.tiers[upper];
                counts.count_copy(old, Presence::Present, Presence::Absent);
                counts.count_copy(new, Presence::Absent, Presence::Present);
            }
        }
    }

    /// One child less on `tier`. A parent that was passed over in the eviction order because of its children gets its
    /// place at the old end back: everything still in the order is younger.
    fn child_left(&mut self, parent: u32, tier: usize) {
        let entry = &mut self.entries[parent];
        entry.children[tier] -= 1;
        if entry.children[tier] == 0 && entry.presence(tier) == Presence::Present {
            let slot = entry.slots[tier];
            let tier_core = &mut self.tiers[tier];
            let state = &tier_core.slots[slot as usize];
            if state.refs() == 0 && state.place == NONE {
                tier_core.order.push_old(slot, &mut tier_core.slots);
            }
            self.update_evictable(parent, tier);
        }
    }

    /// A ticket that no other arrival has.
    pub(crate) fn new_ticket(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        ticket
    }

    /// The clock as entries keep it. It may wrap; differences stay right as long as they are below 2^16.
    #[inline]
    pub(crate) fn short_step(&self) -> u16 {
        self.step as u16
    }
}
