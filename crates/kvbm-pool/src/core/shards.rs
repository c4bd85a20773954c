//! The shards of a registry and their locks: what they share, what each has of its own, and what is locked now.
//!
//! An entry, and the slots of its block, belong to one shard for the entry's life. [`Core`] is a hold: of one shard, or of all,
//! in order, for what is rare. Whoever holds one lock takes no other but leaf locks.

use super::entry::Arena;
use super::hold::{Core, Held, Told};
use super::keep::Keeps;
use super::losses::LossCounts;
use super::mail::Mailbox;
use super::order::Common;
use super::orphans::Orphans;
use super::slot::Slot;
use super::table::Table;
use super::tenants::Tenants;
use super::tiers::{FreeSlots, TierPart};
use super::{MAX_SHARDS, NONE, homes};
use crate::config::{GroupConfig, RegistryConfig};
use crate::event::EventRing;
use crate::policy::{EvictionPolicy, Random};
use crate::sync::{Arc, Leaf, Mutex, MutexGuard, SeenLeaf};
use crate::tier::TIERS;
use kvbm_plan::{BlockId, GroupId, Tier};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Entries that a shard takes from the others' at a time, and twice as many it keeps at most.
pub(super) const VACANT_AT_ONCE: usize = 64;

/// Events that wait in a hold before they are written to the ring.
pub(super) const TOLD: usize = 128;

/// Entries that nothing keeps any more wait in a long hold until they are so many.
pub(super) const MOST_UNUSED: usize = 64;

/// What one lock protects.
pub(crate) struct Shard {
    pub number: usize,
    /// Chooses victims of the shard; none for least recently used, which is built in.
    pub policy: Option<Box<dyn EvictionPolicy>>,
    /// Decides which blocks of some priority are passed over.
    pub(super) random: Random,
    /// Who may count on a share of every tier. Only where there is one shard.
    pub tenants: Tenants,
    /// Entries of a batch that is registered.
    pub(super) entered: Vec<u32>,
    /// Slots that the policy chose.
    pub chosen: Vec<u32>,
    pub(super) run: super::prospects::Run,
    pub tiers: [TierPart; TIERS],
    /// The table of all shards: it is replaced while all are locked.
    pub(super) table: Arc<Table>,
    /// Vacant entries at hand: a list through `Entry::parent` where there is one shard, else these; and some that were
    /// never used.
    pub(super) vacant: u32,
    pub(super) at_hand: Vec<u32>,
    pub(super) fresh: Range<u32>,
    /// Entries in use.
    pub used: usize,
    /// Events of the hold.
    pub(super) told: Vec<Told>,
    /// Entries that nothing keeps any more, as far as the hold knows; and those that are given up at this moment.
    pub(super) unused: Vec<u32>,
    pub(super) ended: Vec<(u32, usize)>,
    /// What other shards have to know of the hold.
    pub(super) letters: Vec<super::mail::Letter>,
    /// What leaves after some iterations without use: kept by the first shard.
    pub expiry: super::expire::Expiry,
}

/// A shard, and what others see of it without its lock.
#[repr(align(128))]
pub(crate) struct Place {
    pub(super) lock: Mutex<Shard>,
    pub(super) mail: Mailbox,
    pub(super) shown: Shown,
}

/// What a hold leaves to see for all, in cache lines that only change with it.
#[repr(align(128))]
pub(super) struct Shown {
    /// For each tier when the oldest places of its order were written ([`Common::now`]), its blocks without users, and how many of them
    /// the policy may choose.
    pub oldest: [AtomicU64; TIERS],
    pub inactive: [AtomicU64; TIERS],
    pub listed: [AtomicU64; TIERS],
    /// Its blocks that are on the tier below as well.
    pub copied: [AtomicU64; TIERS],
    /// Places of its order, and how many of the oldest were looked at by whoever copies victims before they go.
    pub places: [AtomicU64; TIERS],
    pub watched: [AtomicU64; TIERS],
}

/// What goes by the policy, where there is one, for all shards.
#[repr(align(128))]
pub(super) struct Choice {
    pub has_policy: bool,
    /// Whether the policy chooses the victims of a tier, rather than recency, as far as is known without a lock.
    pub chooses: [AtomicBool; TIERS],
    /// Where the policy looks at blocks next.
    observed: Apart<AtomicU32>,
    /// Draws shards.
    draws: Apart<AtomicU64>,
}

/// In lines of its own: each request writes it, and what lies beside it is read for each block.
#[repr(align(128))]
struct Apart<T>(T);

impl Choice {
    fn new(has_policy: bool, seed: u64) -> Self {
        Self {
            has_policy,
            chooses: Default::default(),
            observed: Apart(AtomicU32::new(0)),
            draws: Apart(AtomicU64::new(seed)),
        }
    }

    /// Whether the policy chooses the victims of a tier now.
    #[inline]
    pub(super) fn show(&self, tier: usize, chooses: bool) {
        if self.chooses[tier].load(Relaxed) != chooses {
            self.chooses[tier].store(chooses, Relaxed);
        }
    }

    /// The next `looks` of the entries below `end`, each of them in its turn.
    pub(super) fn next_looks(&self, looks: usize, end: usize) -> impl Iterator<Item = u32> {
        let end = end.max(1);
        let from = self.observed.0.load(Relaxed) as usize % end;
        // Another thread that begins at the same moment looks at the same ones: so be it.
        self.observed.0.store(((from + looks) % end) as u32, Relaxed);
        (from + 1..=from + looks).map(move |at| (at % end) as u32)
    }

    /// A number that looks random, below `end`, which must not be 0.
    pub(super) fn draw(&self, end: usize) -> usize {
        Random::new(self.draws.0.fetch_add(Random::STEP, Relaxed)).below(end)
    }
}

/// Entries that no shard has at hand.
pub(super) struct Vacant {
    pub parcels: Vec<[u32; VACANT_AT_ONCE]>,
    /// Entries from here on were never used.
    pub fresh: u32,
}

/// Everything.
pub(crate) struct Store {
    pub groups: Box<[GroupConfig]>,
    /// For each tier, the next one further from the compute that exists.
    pub below: [Option<usize>; TIERS],
    pub slots: [Box<[Slot]>; TIERS],
    pub entries: Arena,
    table_lock: SeenLeaf<()>,
    pub(super) vacant: Leaf<Vacant>,
    pub free: [SeenLeaf<FreeSlots>; TIERS],
    pub events: SeenLeaf<EventRing>,
    pub(super) events_on: bool,
    /// Whether tenants have shares; then there is one shard.
    pub(super) has_tenants: bool,
    /// What is pinned until some iteration.
    pub keeps: Leaf<Keeps>,
    /// Blocks of each tier that are pinned so, for who does not look there.
    pub(super) kept: [AtomicU32; TIERS],
    pub(super) losses: LossCounts,
    /// What was copied faster than its parent.
    pub(super) orphans: Orphans,
    /// Times that a block of a Full group left a tier although something continued it there: only a hold of all shards does that.
    bereaved: AtomicU64,
    /// For each tier, the shard where blocks to copy down are looked for next; `NONE`: where the oldest are.
    pub(super) coldest_next: [AtomicU32; TIERS],
    step: AtomicU64,
    tickets: AtomicU64,
    pub(super) choice: Choice,
    /// Room for the entries of a request while it is touched, some for each thread.
    pub(super) touched: [Leaf<Vec<u32>>; super::touch::ROOMS],
    orders: [Arc<Common>; TIERS],
    pub(super) homes: homes::Homes,
    pub(super) shards: Box<[Place]>,
}

impl Store {
    pub(crate) fn new(
        config: &RegistryConfig,
        policies: Vec<Box<dyn EvictionPolicy>>,
        shards: usize,
        seed: u64,
    ) -> Self {
        let shards = shards.clamp(1, MAX_SHARDS);
        let capacity = config.capacity.map(|blocks| blocks as usize);
        let below = |tier: usize| (tier + 1..TIERS).find(|&lower| capacity[lower] > 0);
        let hoards = if shards > 1 { shards * 3 * VACANT_AT_ONCE } else { 0 };
        let entries = Arena::new(capacity.iter().sum::<usize>() + hoards);
        let table = Arc::new(Table::new(entries.len(), seed));
        let orders = capacity.map(|capacity| Arc::new(Common::new(capacity, shards)));
        let has_policy = !policies.is_empty();
        let mut policies = policies.into_iter();
        let place = |number| {
            let tier = |tier: usize| TierPart::new(capacity[tier], number, Arc::clone(&orders[tier]));
            let shard = Shard {
                number,
                policy: policies.next(),
                random: Random::new(config.policy_seed.wrapping_add(number as u64)),
                tenants: Tenants::new(&config.tenants),
                entered: Vec::new(),
                chosen: Vec::with_capacity(super::evict::MAX_VICTIMS),
                run: super::prospects::Run::NONE,
                tiers: std::array::from_fn(tier),
                table: Arc::clone(&table),
                vacant: NONE,
                at_hand: Vec::with_capacity(if shards == 1 { 0 } else { 2 * VACANT_AT_ONCE }),
                // The only shard needs nobody to share with.
                fresh: if shards == 1 { 0..entries.len() as u32 } else { 0..0 },
                used: 0,
                told: Vec::with_capacity(TOLD),
                unused: Vec::with_capacity(TOLD),
                ended: Vec::with_capacity(TOLD),
                letters: Vec::new(),
                expiry: super::expire::Expiry::default(),
            };
            Place {
                lock: Mutex::new(shard),
                mail: Mailbox::default(),
                shown: Shown {
                    oldest: std::array::from_fn(|_| AtomicU64::new(u64::MAX)),
                    inactive: Default::default(),
                    listed: Default::default(),
                    copied: Default::default(),
                    places: Default::default(),
                    watched: Default::default(),
                },
            }
        };
        let places: Box<[Place]> = (0..shards).map(place).collect();
        Self {
            groups: config.groups.clone().into_boxed_slice(),
            below: std::array::from_fn(below),
            slots: capacity.map(Slot::many),
            entries,
            table_lock: SeenLeaf::default(),
            vacant: Leaf::new(Vacant { parcels: Vec::new(), fresh: 0 }),
            free: capacity.map(|capacity| SeenLeaf::new(FreeSlots::new(capacity))),
            events: SeenLeaf::new(EventRing::new(config.event_capacity)),
            events_on: config.event_capacity > 0,
            has_tenants: !config.tenants.is_empty(),
            keeps: Leaf::default(),
            kept: Default::default(),
            losses: LossCounts::default(),
            orphans: Orphans::default(),
            bereaved: AtomicU64::new(0),
            coldest_next: std::array::from_fn(|_| AtomicU32::new(NONE)),
            step: AtomicU64::new(0),
            tickets: AtomicU64::new(1),
            choice: Choice::new(has_policy, config.policy_seed),
            touched: Default::default(),
            orders,
            homes: homes::Homes::new(capacity, shards),
            shards: places,
        }
    }

    /// Whether there is one shard, so that every hold holds everything.
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        self.shards.len() == 1
    }

    /// The shard of the block in a slot that the caller pins, or whose arrival is the caller's.
    #[inline]
    pub(crate) fn shard_of_slot(&self, tier: usize, slot: u32) -> usize {
        if self.is_whole() {
            return 0;
        }
        self.entries[self.slots[tier][slot as usize].entry.get()].shard()
    }

    /// The shard of an entry in use. Were it not, something would have been counted wrong: then some shard's number.
    #[inline]
    pub(super) fn shard_of(&self, index: u32) -> usize {
        let shard = self.entries[index].shard();
        debug_assert!(shard < self.shards.len(), "entry {index} is not in use");
        shard.min(self.shards.len() - 1)
    }

    /// Locks one shard.
    #[inline]
    pub(crate) fn lock(&self, shard: usize) -> Core<'_> {
        let place = &self.shards[shard.min(self.shards.len() - 1)];
        self.hold(place.lock.lock())
    }

    #[inline]
    pub(super) fn try_lock(&self, shard: usize) -> Option<Core<'_>> {
        self.shards[shard].lock.try_lock().map(|guard| self.hold(guard))
    }

    #[inline]
    fn hold<'a>(&'a self, guard: MutexGuard<'a, Shard>) -> Core<'a> {
        let mut core = Core { store: self, held: Held::One(guard), parts: 0 };
        core.read_mail();
        core
    }

    /// Locks all shards, in order.
    pub(crate) fn lock_all(&self) -> Core<'_> {
        if self.is_whole() {
            return self.lock(0);
        }
        let mut core = Core { store: self, held: Held::All(self.guards()), parts: 0 };
        core.read_mail();
        core
    }

    /// The locks of all shards, taken in order.
    pub(super) fn guards(&self) -> [Option<MutexGuard<'_, Shard>>; MAX_SHARDS] {
        #[cfg(test)]
        super::counts::all_are_locked();
        let mut places = self.shards.iter();
        std::array::from_fn(|_| places.next().map(|place| place.lock.lock()))
    }

    /// Whoever waits for a lock that the caller has just released gets it before the caller takes it again.
    pub(super) fn let_waiters_in(&self) {
        #[cfg(test)]
        super::counts::others_are_in();
        for place in &self.shards {
            place.lock.let_waiters_in();
        }
    }

    /// The table is looked at without its lock. A model checker sees that only so.
    #[inline]
    pub(super) fn about_to_look(&self) {
        if cfg!(any(kvbm_loom, kvbm_shuttle)) {
            drop(self.table_lock().map(SeenLeaf::lock));
        }
    }

    /// The lock under which the table changes, where there are shards whose threads could change it at the same time.
    #[inline]
    pub(super) fn table_lock(&self) -> Option<&SeenLeaf<()>> {
        (!self.is_whole()).then_some(&self.table_lock)
    }

    /// Number of a shard for new blocks of the calling thread, which come to `blocks` more.
    pub(crate) fn home(&self, blocks: usize) -> usize {
        self.homes.home(blocks)
    }

    /// Locks the shard where a reader of the calling thread begins.
    #[inline]
    pub(crate) fn lock_any(&self) -> Core<'_> {
        self.lock(if self.is_whole() { 0 } else { self.homes.home(0) })
    }

    /// Locks a shard for new blocks of the calling thread, which come to `blocks` more.
    pub(crate) fn lock_home(&self, blocks: usize) -> Core<'_> {
        let count = self.shards.len();
        if count == 1 {
            return self.lock(0);
        }
        let home = self.homes.home(blocks);
        for next in 0..count {
            if let Some(core) = self.try_lock((home + next) % count) {
                homes::Homes::move_by(next);
                return core;
            }
        }
        self.lock(home)
    }

    /// For each shard, when the oldest places of `tier`'s order there were written, and the clock.
    pub(super) fn ages(&self, tier: usize) -> ([u64; MAX_SHARDS], u64) {
        let mut oldest = [u64::MAX; MAX_SHARDS];
        for (place, oldest) in self.shards.iter().zip(&mut oldest) {
            *oldest = place.shown.oldest[tier].load(Relaxed);
        }
        (oldest, self.orders[tier].now())
    }

    /// Blocks of `tier` that may be evicted at most, as far as that is known without a lock.
    pub(super) fn about_evictable(&self, tier: usize) -> u64 {
        let inactive: u64 = self.shards.iter().map(|place| place.shown.inactive[tier].load(Relaxed)).sum();
        inactive.saturating_sub(u64::from(self.kept[tier].load(Relaxed)))
    }

    /// Blocks of `tier` that are neither free, nor out of use, nor on the tier below, as the last hold of each shard left it. Where there
    /// are several shards none is locked.
    pub(crate) fn not_copied_lower(&self, tier: Tier) -> u32 {
        let index = tier.index();
        if index >= TIERS || self.is_whole() {
            return self.status(tier).not_copied_lower;
        }
        let copied: u64 = self.shards.iter().map(|place| place.shown.copied[index].load(Relaxed)).sum();
        let in_use = {
            let free = self.free[index].lock();
            self.slots[index].len() as u32 - free.free - free.quarantined
        };
        in_use.saturating_sub(u32::try_from(copied).unwrap_or(u32::MAX))
    }

    /// Slots in exclusive use are free again.
    pub(crate) fn give_back(&self, tier: usize, blocks: &[BlockId]) {
        self.free[tier].lock().give_back(&self.slots[tier], blocks);
    }

    /// The iteration clock.
    pub(crate) fn step(&self) -> u64 {
        self.step.load(Relaxed)
    }

    /// Advances the iteration clock.
    pub(crate) fn advance(&self) -> u64 {
        self.step.fetch_add(1, Relaxed) + 1
    }

    /// How often something that continues a block was left on a tier without it. While a shard is held that stays as it is.
    #[inline]
    pub(super) fn bereaved(&self) -> u64 {
        self.bereaved.load(Relaxed)
    }

    /// Something was left so. All shards are held.
    #[cold]
    pub(super) fn bereave(&self) {
        self.bereaved.fetch_add(1, Relaxed);
    }

    /// A ticket that no other arrival has.
    pub(crate) fn new_ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Relaxed)
    }

    pub(crate) fn group(&self, group: GroupId) -> Option<GroupConfig> {
        self.groups.get(usize::from(group.0)).copied()
    }

    /// Whether the group's blocks are useless without their parents.
    #[inline]
    pub(crate) fn is_full(&self, group: GroupId) -> bool {
        self.groups.get(usize::from(group.0)).is_some_and(|config| config.kind == kvbm_plan::GroupKind::Full)
    }
}
