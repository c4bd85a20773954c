//! Everything that the lock of a registry protects.

use super::early_copies::EarlyCopies;
use super::free_slots::FreeSlots;
use super::pin_ends::TimedPins;
use super::shares::TenantShares;
use super::table::Table;
use super::tier_state::TierState;
use super::time_to_live::TimesToLive;
use crate::config::{GroupConfig, RegistryConfig};
use crate::entry::{Entry, NONE, identity_of};
use crate::event::EventRing;
use crate::policy::{EvictionPolicy, SlotSet};
use crate::random::Random;
use crate::slot::Slot;
use crate::tier::TIERS;
use kvbm_plan::{BlockIdentity, GroupId, GroupKind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The registry without its lock and without handles: entries, slots, eviction orders, policy,
/// tenants, events.
pub(crate) struct Core {
    pub groups: Box<[GroupConfig]>,
    /// For each tier, the next one further from the compute that exists.
    pub below: [Option<usize>; TIERS],
    pub entries: Vec<Entry>,
    pub table: Table,
    /// First of the vacant entries, a list through `Entry::parent`.
    pub vacant: u32,
    /// Entries from here on were never used.
    pub fresh: u32,
    /// Entries in use.
    pub used: usize,
    pub slots: [Box<[Slot]>; TIERS],
    pub free: [FreeSlots; TIERS],
    pub tiers: [TierState; TIERS],
    /// Chooses victims; none for least recently used, which is built in.
    pub policy: Option<Box<dyn EvictionPolicy>>,
    /// Decides which blocks of some priority are passed over.
    pub random: Random,
    pub tenants: TenantShares,
    pub events: EventRing,
    /// Blocks that are pinned until some iteration.
    pub pins: TimedPins,
    /// Copies that are complete before that of their parent.
    pub early_copies: EarlyCopies,
    /// Namespaces with a time to live.
    pub expiry: TimesToLive,
    /// The iteration clock.
    pub step: u64,
    /// Ticket of the next arrival.
    pub next_ticket: u64,
    /// Entry that the policy observes next.
    pub observed: u32,
    /// Slots that the policy chose.
    pub chosen: Vec<u32>,
    /// Entries of a batch that is being registered.
    pub entered: Vec<u32>,
    /// Entries of a request that is being touched.
    pub touched: Vec<u32>,
}

impl Core {
    /// `seed` places the keys of the table.
    /// `events_due` tells that events are to be drained.
    pub(crate) fn new(
        config: &RegistryConfig,
        policy: Option<Box<dyn EvictionPolicy>>,
        seed: u64,
        events_due: Arc<AtomicBool>,
    ) -> Self {
        let capacity = config.capacity.map(|blocks| blocks as usize);
        let entries = Entry::many(capacity.iter().sum::<usize>().max(64));
        Self {
            groups: config.groups.clone().into_boxed_slice(),
            below: std::array::from_fn(|tier| (tier + 1..TIERS).find(|&lower| capacity[lower] > 0)),
            table: Table::new(entries.len(), seed),
            entries,
            vacant: NONE,
            fresh: 0,
            used: 0,
            slots: capacity.map(Slot::many),
            free: capacity.map(FreeSlots::new),
            tiers: capacity.map(TierState::new),
            policy,
            random: Random::new(config.policy_seed),
            tenants: TenantShares::new(&config.tenants),
            events: EventRing::new(config.event_capacity, events_due),
            pins: TimedPins::default(),
            early_copies: EarlyCopies::default(),
            expiry: TimesToLive::default(),
            step: 0,
            next_ticket: 1,
            observed: 0,
            chosen: Vec::with_capacity(RegistryConfig::MOST_EVICTED_AT_ONCE),
            entered: Vec::new(),
            touched: Vec::new(),
        }
    }

    #[inline]
    pub(crate) fn entry(&self, index: u32) -> &Entry {
        &self.entries[index as usize]
    }

    #[inline]
    pub(crate) fn slot(&self, tier: usize, slot: u32) -> &Slot {
        &self.slots[tier][slot as usize]
    }

    /// The entry of the block in a slot.
    #[inline]
    pub(crate) fn entry_of(&self, tier: usize, slot: u32) -> u32 {
        self.slot(tier, slot).entry.get()
    }

    /// Identity of the block of an entry in use.
    #[inline]
    pub(crate) fn identity(&self, index: u32) -> BlockIdentity {
        identity_of(&self.entries, index)
    }

    pub(crate) fn group(&self, group: GroupId) -> Option<GroupConfig> {
        self.groups.get(usize::from(group.0)).copied()
    }

    /// Whether the group's blocks are useless without their parents.
    #[inline]
    pub(crate) fn is_full(&self, group: GroupId) -> bool {
        self.groups.get(usize::from(group.0)).is_some_and(|config| config.kind == GroupKind::Full)
    }

    /// Slots of a tier that blocks can be in.
    pub(crate) fn usable(&self, tier: usize) -> u32 {
        self.slots[tier].len() as u32 - self.free[tier].quarantined
    }

    /// The iteration clock as entries keep it. It may wrap; differences stay right as long as they
    /// are below 2^16.
    #[inline]
    pub(crate) fn short_step(&self) -> u16 {
        self.step as u16
    }

    /// A ticket that no other arrival has.
    pub(crate) fn new_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket - 1
    }

    /// The set of slots from which a victim in the slot of an entry on a tier is chosen.
    #[inline]
    pub(crate) fn set_of(&self, index: u32, tier: usize) -> SlotSet {
        SlotSet { tier, tenant: self.tenants.number_of(self.entry(index).namespace()) }
    }

    /// Entries with an index in use are below this.
    pub(crate) fn end(&self) -> usize {
        self.fresh as usize
    }
}
