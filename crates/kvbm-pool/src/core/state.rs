//! Everything that the lock of a registry protects.

use super::early_copies::EarlyCopies;
use super::entries::Entries;
use super::policy_calls::PolicyCalls;
use super::shares::TenantShares;
use super::tier_state::TierState;
use super::time_to_live::TimesToLive;
use super::timed_pins::TimedPins;
use crate::config::RegistryConfig;
use crate::entry::Entry;
use crate::event::EventRing;
use crate::policy::{EvictionPolicy, SlotSet};
use crate::random::Random;
use crate::slot::Slot;
use crate::status::TierStatus;
use crate::tier::TIERS;
use kvbm_plan::{BlockIdentity, Tier};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The registry without its lock and without handles. Each part owns its data and what concerns it
/// alone; the methods here change several parts together.
pub(crate) struct Core {
    pub entries: Entries,
    pub tiers: [TierState; TIERS],
    /// For each tier, the next one further from the compute that exists.
    pub below: [Option<usize>; TIERS],
    pub policy: PolicyCalls,
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
    next_ticket: u64,
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
        let blocks = capacity.iter().sum::<usize>().max(64);
        Self {
            entries: Entries::new(&config.groups, blocks, seed),
            tiers: capacity.map(TierState::new),
            below: std::array::from_fn(|tier| (tier + 1..TIERS).find(|&lower| capacity[lower] > 0)),
            policy: PolicyCalls::new(policy),
            random: Random::new(config.policy_seed),
            tenants: TenantShares::new(&config.tenants),
            events: EventRing::new(config.event_capacity, events_due),
            pins: TimedPins::default(),
            early_copies: EarlyCopies::default(),
            expiry: TimesToLive::default(),
            step: 0,
            next_ticket: 1,
            entered: Vec::new(),
            touched: Vec::new(),
        }
    }

    #[inline]
    pub(crate) fn entry(&self, index: u32) -> &Entry {
        &self.entries[index]
    }

    #[inline]
    pub(crate) fn slot(&self, tier: usize, slot: u32) -> &Slot {
        self.tiers[tier].slot(slot)
    }

    /// The entry of the block in a slot.
    #[inline]
    pub(crate) fn entry_of(&self, tier: usize, slot: u32) -> u32 {
        self.slot(tier, slot).entry.get()
    }

    /// What the block in a slot is.
    pub(crate) fn identity_in(&self, tier: usize, slot: u32) -> BlockIdentity {
        self.entries.identity(self.entry_of(tier, slot))
    }

    /// The iteration clock as entries keep it. It may wrap; differences stay right as long as they
    /// are below 2^16.
    #[inline]
    pub(crate) fn short_step(&self) -> u16 {
        self.step as u16
    }

    /// The entry's block is used now.
    #[inline]
    pub(crate) fn note_time(&self, index: u32) {
        self.entry(index).last_step.set(self.short_step());
        self.expiry.note(index);
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

    /// The slots of a slotted tier by usage.
    pub(crate) fn status(&self, tier: Tier) -> TierStatus {
        let on = tier.index();
        self.tiers[on].status(tier, self.pins.count(on))
    }
}
