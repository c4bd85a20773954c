//! What a thread has locked: one shard, or all of them.

use super::MAX_SHARDS;
use super::entry::Entry;
use super::shards::{MOST_UNUSED, Shard, Store, TOLD};
use super::table::Table;
use super::tiers::TierPart;
use crate::event::{EventKind, Stored};
use crate::policy::SlotSet;
use crate::sync::MutexGuard;
use kvbm_plan::{BlockId, GroupId, SequenceHash, Tier};
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// Something that happened to the block of an entry: an event without the block's identity, which the entry has.
#[derive(Clone, Copy)]
pub(crate) struct Told {
    pub index: u32,
    pub slot: u32,
    pub tier: u8,
    pub kind: EventKind,
}

/// A hold: what the calling thread has locked.
pub(crate) struct Core<'a> {
    pub store: &'a Store,
    pub(super) held: Held<'a>,
    /// Parts of long work that this hold has had.
    pub(super) parts: usize,
}

/// Parts of long work in one hold where nobody waits.
pub(super) const PARTS_OF_A_HOLD: usize = 2;

/// Blocks of a batch that are dealt with in one part, where each takes a part of a microsecond.
pub(crate) const BLOCKS_OF_A_PART: usize = 32;

#[cfg_attr(feature = "hold-times", expect(clippy::large_enum_variant, reason = "for benchmarks alone"))]
pub(super) enum Held<'a> {
    One(MutexGuard<'a, Shard>),
    /// As many as there are shards.
    All([Option<MutexGuard<'a, Shard>>; MAX_SHARDS]),
}

const HELD: &str = "every shard is locked, and numbers of shards come from these";

type Guard<'a> = Option<MutexGuard<'a, Shard>>;

fn held<'g>(guards: &'g [Guard<'_>; MAX_SHARDS], number: usize) -> &'g Shard {
    guards[number].as_deref().expect(HELD)
}

fn held_mut<'g>(guards: &'g mut [Guard<'_>; MAX_SHARDS], number: usize) -> &'g mut Shard {
    guards[number].as_deref_mut().expect(HELD)
}

impl Core<'_> {
    /// Whether all shards are held.
    #[inline]
    pub(crate) fn holds_all(&self) -> bool {
        matches!(self.held, Held::All(_)) || self.store.is_whole()
    }

    /// Whether the entry belongs to a shard that is held: then nothing of it changes but through here.
    #[inline]
    pub(crate) fn holds(&self, index: u32) -> bool {
        self.holds_entry(&self.store.entries[index])
    }

    #[inline]
    pub(crate) fn holds_entry(&self, entry: &Entry) -> bool {
        match &self.held {
            Held::One(shard) => entry.shard() == shard.number,
            Held::All(_) => true,
        }
    }

    /// The shard of an entry, which is held.
    #[inline]
    pub(crate) fn shard(&mut self, index: u32) -> &mut Shard {
        match &mut self.held {
            Held::One(shard) => shard,
            Held::All(shards) => held_mut(shards, self.store.shard_of(index)),
        }
    }

    /// What the entry's shard keeps of a tier.
    #[inline]
    pub(crate) fn part(&mut self, index: u32, tier: usize) -> &mut TierPart {
        &mut self.shard(index).tiers[tier]
    }

    /// The first shard that is held; the only one, where there is one.
    #[inline]
    pub(crate) fn first(&self) -> &Shard {
        match &self.held {
            Held::One(shard) => shard,
            Held::All(shards) => held(shards, 0),
        }
    }

    #[inline]
    pub(crate) fn first_mut(&mut self) -> &mut Shard {
        match &mut self.held {
            Held::One(shard) => shard,
            Held::All(shards) => held_mut(shards, 0),
        }
    }

    /// Number of the first shard that is held.
    #[inline]
    pub(crate) fn number(&self) -> usize {
        self.first().number
    }

    /// Numbers of the shards that are held.
    pub(crate) fn numbers(&self) -> Range<usize> {
        match &self.held {
            Held::One(shard) => shard.number..shard.number + 1,
            Held::All(_) => 0..self.store.shards.len(),
        }
    }

    /// A shard that is held, by its number.
    #[inline]
    pub(crate) fn numbered(&mut self, number: usize) -> &mut Shard {
        match &mut self.held {
            Held::One(shard) => shard,
            Held::All(shards) => held_mut(shards, number),
        }
    }

    pub(crate) fn shards(&self) -> impl Iterator<Item = &Shard> {
        let (one, all) = match &self.held {
            Held::One(shard) => (Some(&**shard), None),
            Held::All(shards) => (None, Some(shards.iter().flatten().map(|shard| &**shard))),
        };
        one.into_iter().chain(all.into_iter().flatten())
    }

    pub(crate) fn shards_mut(&mut self) -> impl Iterator<Item = &mut Shard> {
        let (one, all) = match &mut self.held {
            Held::One(shard) => (Some(&mut **shard), None),
            Held::All(shards) => (None, Some(shards.iter_mut().flatten().map(|shard| &mut **shard))),
        };
        one.into_iter().chain(all.into_iter().flatten())
    }

    /// The table; it stays as long as something is held.
    #[inline]
    pub(crate) fn table(&self) -> &Table {
        &self.first().table
    }

    /// Holds that shard instead, unless it is held.
    #[inline]
    pub(crate) fn go(self, shard: usize) -> Self {
        if self.holds_all() || self.number() == shard {
            return self;
        }
        let store = self.store;
        drop(self);
        store.lock(shard)
    }

    /// The entry of a block, under the lock of its shard. One that comes and goes meanwhile may be missed.
    pub(crate) fn seek(self, group: GroupId, hash: SequenceHash) -> (Self, Option<u32>) {
        const TURNS: usize = 4;
        let mut core = self;
        for _ in 0..TURNS {
            let found = core.find(group, hash);
            match found {
                Some(index) if !core.holds(index) => {
                    let shard = core.store.entries[index].shard();
                    core = core.go(shard);
                }
                _ => return (core, found),
            }
        }
        let store = core.store;
        drop(core);
        let core = store.lock_all();
        let found = core.find(group, hash);
        (core, found)
    }

    /// What happened, for the ring of events.
    #[inline]
    pub(super) fn tell(&mut self, told: Told) {
        if self.store.events_on {
            let waiting = &mut self.first_mut().told;
            waiting.push(told);
            if waiting.len() >= TOLD {
                self.publish_events();
            }
        }
    }

    /// Events get their numbers before the lock under which they happened is released, and before an entry of which they tell is
    /// given up: of what happens to a block after another thing, the number is larger.
    #[inline]
    fn publish_events(&mut self) {
        let store = self.store;
        let told = &mut self.first_mut().told;
        if told.is_empty() {
            return;
        }
        store.events.lock().push_all(told.iter().map(|&Told { index, slot, tier, kind }| {
            let tier = Tier::SLOTTED[usize::from(tier)];
            Stored::new(kind, tier, BlockId(slot), store.entries.identity(index))
        }));
        told.clear();
    }

    /// What happened is told, and what is not needed any more goes: in this order.
    #[inline]
    pub(super) fn settle(&mut self) {
        self.publish_events();
        if !self.first().unused.is_empty() {
            self.give_up_unused();
        }
    }

    /// The same in the middle of a hold, once so much is not needed any more. Between parts that find nothing of each other's.
    pub(super) fn settle_many(&mut self) {
        if self.first().unused.len() >= MOST_UNUSED {
            self.settle();
        }
    }

    /// What others see of a shard without its lock.
    fn show_state(&mut self) {
        let store = self.store;
        for shard in self.shards_mut() {
            let place = &store.shards[shard.number];
            let Shard { tiers, policy, .. } = shard;
            for (tier, part) in tiers.iter_mut().enumerate() {
                part.order.set_population((part.active + part.inactive) as usize);
                let first = part.order.first();
                for (shown, now) in [
                    (&place.shown.oldest[tier], part.order.oldest()),
                    (&place.shown.inactive[tier], u64::from(part.inactive)),
                    (&place.shown.listed[tier], u64::from(part.listed)),
                    (&place.shown.copied[tier], u64::from(part.copied())),
                    (&place.shown.places[tier], part.order.end() - first),
                    (&place.shown.watched[tier], part.order.watched().saturating_sub(first)),
                ] {
                    if shown.load(Relaxed) != now {
                        shown.store(now, Relaxed);
                    }
                }
                if let Some(policy) = policy {
                    store.choice.show(tier, !policy.follows_recency(SlotSet::of_tier(tier)));
                }
            }
        }
    }

    /// What a hold leaves behind for others.
    #[inline]
    fn publish(&mut self) {
        self.settle();
        if !self.store.is_whole() {
            self.post_letters();
            self.show_state();
        }
    }

    /// Lets a waiting thread in, if there is one, between two parts of long work, and ends the hold after so many parts in any case:
    /// another one begins. Nothing that was found before means anything after.
    pub(crate) fn let_others_in(&mut self) {
        // Who comes later waits no longer for that than for a part of the work itself.
        self.settle_many();
        let wanted = match &self.held {
            Held::One(shard) => MutexGuard::is_wanted(shard),
            Held::All(shards) => shards.iter().flatten().any(MutexGuard::is_wanted),
        };
        self.parts += 1;
        if !wanted && self.parts < PARTS_OF_A_HOLD {
            return;
        }
        self.parts = 0;
        self.publish();
        let store = self.store;
        match &mut self.held {
            Held::One(shard) => MutexGuard::bump(shard),
            Held::All(shards) => {
                *shards = Default::default();
                store.let_waiters_in();
                *shards = store.guards();
            }
        }
        self.read_mail();
    }
}

impl Drop for Core<'_> {
    #[inline]
    fn drop(&mut self) {
        self.publish();
    }
}
