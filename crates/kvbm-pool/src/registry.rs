//! The registry: one index of all blocks on all tiers.

use crate::arrivals::{AnyArrivals, Arrival, Refusal};
use crate::blocks::HeldSlots;
use crate::config::{ConfigError, RegistryConfig};
use crate::core::evict::MAX_VICTIMS;
use crate::core::remove::Reach;
use crate::core::{Core, Pin, restore};
use crate::error::{AllocError, PinError, TtlError};
use crate::event::{Drained, EventRecord};
use crate::metadata::BlockMetadata;
use crate::pinned::Pinned;
use crate::policy::{self, EvictionPolicy};
use crate::pool::BlockPool;
use crate::prefix::Prefix;
use crate::spares::Spares;
use crate::status::{Counters, TierStatus};
use crate::sync::{Arc, Mutex, MutexGuard, yield_to_waiters};
use crate::tier::{TierMask, TierTag};
use kvbm_plan::{BlockId, BlockIdentity, Epoch, GroupId, NamespaceId, RecoveredBlock, SequenceHash, Tier};
use std::fmt;
use std::hash::BuildHasher;

/// What handles and registry share.
pub(crate) struct Shared {
    pub core: Mutex<Core>,
    pub spares: Spares,
    epoch: Epoch,
    event_capacity: usize,
    capacity: [u32; crate::tier::TIERS],
}

/// All blocks on G1, G2 and G3. Cheap to clone; handles keep what they need alive.
#[derive(Clone)]
pub struct Registry {
    pub(crate) shared: Arc<Shared>,
}

/// Which blocks to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Every block.
    All,
    /// The blocks of a group.
    Group(GroupId),
    /// The blocks of a namespace (a model, a tenant).
    Namespace(NamespaceId),
    /// A block and everything that continues it.
    Subtree {
        /// Group of the block.
        group: GroupId,
        /// The block.
        hash: SequenceHash,
    },
}

/// What a removal did. All of it is invisible now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Blocks that were on a tier (one on two tiers counts twice).
    pub blocks: u64,
    /// Slots of these that come back only after their last user.
    pub in_use: u64,
    /// Blocks on their way, which will not become visible.
    pub cancelled: u64,
}

/// What became of a slot whose bytes are bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quarantine {
    /// Out of use for good.
    Done,
    /// Invisible now, out of use for good after its last user.
    AfterLastUser,
    /// The slot holds no registered block: nothing was done.
    NotRegistered,
}

/// What [`Registry::restore`] made of the recovered blocks. The slots listed hold nothing that can be found: their
/// records may be released.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that are Present again.
    pub restored: u64,
    /// Earlier records of a slot that was written again.
    pub overwritten: u64,
    /// Records with a slot beyond the tier or out of use, an unknown group or a contradictory identity.
    pub invalid: u64,
    /// Slots of the latter, where the tier has them.
    pub rejected: Vec<BlockId>,
    /// Slots with a block that a later record has in another slot.
    pub duplicates: Vec<BlockId>,
    /// Slots with a block some ancestor of which is missing.
    pub orphans: Vec<BlockId>,
}

/// Blocks can only be restored before anything else happens on their tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// The tier is in use.
    #[error("{tier} is in use ({free} of {capacity} blocks free): restore before the first allocation")]
    InUse {
        /// The tier.
        tier: Tier,
        /// Its free slots.
        free: u32,
        /// Its slots.
        capacity: u32,
    },
    /// The tier has no slots that could be restored.
    #[error("{0} has no slots: restore G1, G2 or G3")]
    NoSlots(Tier),
}

impl Registry {
    /// An empty registry.
    pub fn new(config: &RegistryConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let capacity = config.capacity.map(|blocks| blocks as usize);
        Self::build(config, policy::build(config.policy, capacity, config.policy_seed))
    }

    /// An empty registry that evicts as `policy` says, whatever `config.policy` is.
    pub fn with_policy(
        config: &RegistryConfig,
        policy: Box<dyn EvictionPolicy>,
    ) -> Result<Self, ConfigError> {
        Self::build(config, Some(policy))
    }

    fn build(config: &RegistryConfig, policy: Option<Box<dyn EvictionPolicy>>) -> Result<Self, ConfigError> {
        config.validate()?;
        // Only the places of keys in the table depend on the seed, nothing that anybody can see.
        let seed = std::hash::RandomState::new().hash_one(config.epoch.0);
        let shared = Shared {
            spares: Spares::default(),
            core: Mutex::new(Core::new(config, policy, seed)),
            epoch: config.epoch,
            event_capacity: config.event_capacity as usize,
            capacity: config.capacity,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A typed view of tier `T`.
    pub fn pool<T: TierTag>(&self) -> BlockPool<T> {
        BlockPool::new(Arc::clone(&self.shared))
    }

    /// Whether `prefix` was matched here. Its slots mean something else, or nothing, in another registry.
    pub fn owns_prefix(&self, prefix: &Prefix) -> bool {
        Arc::ptr_eq(&self.shared, &prefix.shared)
    }

    /// Whether the blocks of `pinned` are registered here.
    pub fn owns_pinned(&self, pinned: &Pinned) -> bool {
        Arc::ptr_eq(&self.shared, &pinned.shared)
    }

    /// Whether `blocks` were allocated here.
    pub fn owns_blocks<T: TierTag, S: crate::state::State>(
        &self,
        blocks: &crate::blocks::Blocks<T, S>,
    ) -> bool {
        blocks.belongs_to(&self.shared)
    }

    /// Life of the leader, as configured.
    pub fn epoch(&self) -> Epoch {
        self.shared.epoch
    }

    /// Slots of `tier`; 0 where there is no such tier.
    pub fn capacity(&self, tier: Tier) -> u32 {
        self.shared.capacity.get(tier.index()).copied().unwrap_or(0)
    }

    /// The longest useful prefix of a sequence that is on some tier, each block pinned on its nearest one. Does not
    /// count as a use by itself: [`touch`](Self::touch) once for each request.
    ///
    /// `hashes` are those of the whole sequence from its first block. For a Full group the prefix ends before the
    /// first block that is on no tier. For a sliding window it is the longest whose last window is there, and for
    /// state the longest whose last block is there; only those blocks are pinned.
    pub fn match_prefix(&self, group: GroupId, hashes: &[SequenceHash]) -> Prefix {
        let mut blocks = Vec::with_capacity(hashes.len());
        let hashes_kept = hashes.to_vec();
        let mut arriving = Vec::new();
        let mut core = self.shared.core.lock();
        let found = core.match_prefix(group, hashes, TierMask::ALL, |block| blocks.push(block));
        core.arriving_after(group, hashes, found.start + found.count, &mut arriving);
        drop(core);
        Prefix {
            shared: Arc::clone(&self.shared),
            namespace: found.namespace,
            group,
            hashes: hashes_kept,
            start: found.start,
            blocks,
            arriving,
        }
    }

    /// On which tiers the blocks are, up to the first that is on none. Neither pins nor touches.
    pub fn peek_prefix(&self, group: GroupId, hashes: &[SequenceHash]) -> Vec<TierMask> {
        let mut tiers = Vec::with_capacity(hashes.len());
        let core = self.shared.core.lock();
        let each = hashes.iter().map(|&hash| core.tiers_of(group, hash));
        tiers.extend(each.take_while(|tiers| !tiers.is_empty()));
        tiers
    }

    /// On which tiers one block is. Neither pins nor touches.
    pub fn tiers_of(&self, group: GroupId, hash: SequenceHash) -> TierMask {
        self.shared.core.lock().tiers_of(group, hash)
    }

    /// A use of these blocks, tail to head, on every tier that holds them: once for each request.
    pub fn touch(&self, group: GroupId, hashes: &[SequenceHash]) {
        self.shared.core.lock().touch(group, hashes);
    }

    /// Nothing will continue this request: a soft hint for policies that learn what such hints are worth (`hazard`).
    /// Concerns those of its blocks at its end that belong to no other branch, until they are used again. For an ended
    /// session, call it for the session's last request.
    pub fn branch_ends(&self, group: GroupId, hashes: &[SequenceHash]) {
        self.shared.core.lock().branch_ends(group, hashes);
    }

    /// Keeps what is there of a chain on `tiers` from eviction until iteration `until` (or until it is unpinned, or
    /// removed), with the ancestors that it needs there. Of several pins of a block the one that ends last counts. Pinned
    /// blocks are cached ones like others in all other respects: a pin is neither a use nor a handle. Returns how many of
    /// `hashes` are pinned.
    ///
    /// # Errors
    /// [`PinError`]: an iteration that is over, or more than [`RegistryConfig::most_pinned`] on a tier. Nothing changed.
    pub fn pin(
        &self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
        until: u64,
    ) -> Result<usize, PinError> {
        self.shared.core.lock().keep(group, hashes, tiers, until)
    }

    /// Takes pins back: of the blocks of a chain, given from its first block on, as far as no other pinned block continues
    /// them. Returns on how many places (a block on a tier) a pin ended.
    pub fn unpin(&self, group: GroupId, hashes: &[SequenceHash], tiers: TierMask) -> usize {
        self.shared.core.lock().unkeep(group, hashes, tiers)
    }

    /// Blocks of `namespace` leave every tier after `iterations` without use (`None`: they stay until their slots are needed).
    /// A use is what makes a block young: a touch, the end of a handle, and its arrival on a tier. Blocks that are in use,
    /// pinned or continued on the tier stay until they are not. [`step`](Self::step) removes them, from the ends of
    /// chains on: in a registry of up to 1,024 blocks in the iteration in which they are due, in larger ones within
    /// 1,024 further iterations.
    ///
    /// # Errors
    /// [`TtlError`]: 0, or more than [`RegistryConfig::MAX_TTL`]. Nothing changed.
    pub fn set_ttl(&self, namespace: NamespaceId, iterations: Option<u64>) -> Result<(), TtlError> {
        let allowed = |&iterations: &u64| (1..=RegistryConfig::MAX_TTL).contains(&iterations);
        if let Some(iterations) = iterations.filter(|iterations| !allowed(iterations)) {
            return Err(TtlError { iterations });
        }
        self.shared.core.lock().expiry.limit(namespace, iterations.map(|iterations| iterations as u16));
        Ok(())
    }

    /// The iteration clock.
    pub fn iteration(&self) -> u64 {
        self.shared.core.lock().step
    }

    /// Advances the iteration clock, ends the pins whose time is over, removes the blocks whose time to live is, and returns
    /// the clock.
    pub fn step(&self) -> u64 {
        let mut core = self.shared.core.lock();
        core.step += 1;
        let now = core.step;
        while core.end_keeps() {
            yield_to_waiters(&mut core);
        }
        core.begin_expiry();
        while core.expire() {
            yield_to_waiters(&mut core);
        }
        now
    }

    /// Up to `n` unpinned blocks of `tier`, coldest first but every block after its ancestors, that are neither on
    /// `not_on` nor on their way there and were not used during the last `min_idle` iterations (0: any; counted up to 65,535). Pinned for a
    /// transfer. Looks at a bounded number of blocks and goes on from there in the next call.
    pub fn coldest(&self, tier: Tier, n: usize, not_on: Tier, min_idle: u64) -> Pinned {
        let mut ids = Vec::new();
        if self.capacity(tier) > 0 && not_on.index() < crate::tier::TIERS {
            ids.reserve(n.min(self.capacity(tier) as usize));
            self.shared.core.lock().coldest(tier.index(), n, not_on.index(), min_idle, &mut ids);
        }
        Pinned { shared: Arc::clone(&self.shared), tier, ids, pin: Pin::Transfer }
    }

    /// Up to `n` blocks of `tier` that may be evicted soon and are neither on `not_on` nor on their way there, pinned for a
    /// transfer, parents before children. Under `lru-leaf` these are the oldest `share` (0 to 1) of its eviction order;
    /// other policies may take any block next, so with one they all are, unless `share` is 0. Each use of a block puts it
    /// before this once: call it after every registration or arrival on the tier.
    pub fn uncopied_victims(&self, tier: Tier, share: f64, n: usize, not_on: Tier) -> Pinned {
        let mut ids = Vec::new();
        if self.capacity(tier) > 0 && not_on.index() < crate::tier::TIERS {
            self.shared.core.lock().uncopied_victims(tier.index(), share, n, not_on.index(), &mut ids);
        }
        Pinned { shared: Arc::clone(&self.shared), tier, ids, pin: Pin::Transfer }
    }

    /// Prepares a transfer to a tier that is known at run time (see [`BlockPool::begin_arrivals`]).
    pub fn begin_arrivals(
        &self,
        tier: Tier,
        identities: &[BlockIdentity],
    ) -> Result<AnyArrivals, AllocError> {
        self.shared.begin_arrivals(tier, identities, BlockMetadata::default())
    }

    /// Where the slots of `tier` are.
    pub fn occupancy(&self, tier: Tier) -> TierStatus {
        let core = self.shared.core.lock();
        match core.tiers.get(tier.index()) {
            Some(_) => core.status(tier),
            None => TierStatus::without_slots(tier),
        }
    }

    /// What happened on `tier` so far.
    pub fn counters(&self, tier: Tier) -> Counters {
        self.shared.core.lock().tiers.get(tier.index()).map_or_else(Counters::default, |core| core.counters)
    }

    /// Blocks of which there is a record: those on some tier or on their way, and those that something on a tier
    /// continues.
    pub fn known_blocks(&self) -> usize {
        self.shared.core.lock().entries.used()
    }

    /// Appends up to `max` events to `out`, oldest first.
    pub fn drain_events(&self, out: &mut Vec<EventRecord>, max: usize) -> Drained {
        if out.capacity() - out.len() < max {
            let waiting = self.shared.core.lock().events.waiting();
            out.reserve(max.min(waiting.saturating_add(64)).min(2 * self.shared.event_capacity));
        }
        self.shared.core.lock().events.drain(out, max)
    }

    /// How full the ring of events is.
    pub fn event_backlog(&self) -> crate::EventBacklog {
        self.shared.core.lock().events.backlog()
    }

    /// Events that were overwritten before they were drained, in all.
    pub fn events_lost(&self) -> u64 {
        self.shared.core.lock().events.lost_total()
    }

    /// Everything on `tier`, parents before children, and the number of the first event that is not in it. Takes
    /// time and memory in proportion to the tier, under the lock: for resync, not for every day.
    pub fn snapshot(&self, tier: Tier) -> (Vec<(BlockId, BlockIdentity)>, u64) {
        let core = self.shared.core.lock();
        let blocks = if tier.index() < crate::tier::TIERS { core.snapshot(tier.index()) } else { Vec::new() };
        (blocks, core.events.next_seq())
    }

    /// As [`snapshot`](Self::snapshot), of all tiers at one moment: each block with its tier, parents before children.
    pub fn snapshot_all(&self) -> (Vec<(Tier, BlockIdentity)>, u64) {
        let core = self.shared.core.lock();
        let blocks = Tier::SLOTTED.into_iter().flat_map(|tier| {
            core.snapshot(tier.index()).into_iter().map(move |(_, identity)| (tier, identity))
        });
        (blocks.collect(), core.events.next_seq())
    }

    /// Removes every block from `tier` that nobody uses and that nothing in use continues.
    pub fn clear(&self, tier: Tier) -> Removed {
        self.remove_if(Selection::All, TierMask::only(tier), Reach::Unused)
    }

    /// Removes the blocks of a namespace from all tiers.
    pub fn forget(&self, namespace: NamespaceId) -> Removed {
        self.remove(Selection::Namespace(namespace), TierMask::ALL)
    }

    /// Removes a block and everything that continues it from `tiers`. In groups that are not Full, blocks are known to
    /// continue it only as long as the blocks between are on some tier.
    pub fn remove_subtree(&self, group: GroupId, hash: SequenceHash, tiers: TierMask) -> Removed {
        self.remove(Selection::Subtree { group, hash }, tiers)
    }

    /// Removes the blocks of a selection that are on `tiers` now. Blocks in use become invisible too; their slots come
    /// back after their last user. Blocks on their way will not become visible. Scans the registry once under the
    /// lock, then removes in small parts.
    pub fn remove(&self, selection: Selection, tiers: TierMask) -> Removed {
        self.remove_if(selection, tiers, Reach::InUse)
    }

    fn remove_if(&self, selection: Selection, tiers: TierMask, reach: Reach) -> Removed {
        let mut removed = Removed::default();
        let selected = self.shared.core.lock().select(selection, tiers);
        for part in selected.chunks(MAX_VICTIMS) {
            self.shared.core.lock().remove(part, tiers, reach, &mut removed);
        }
        removed
    }

    /// The bytes in a slot of `tier` are bad: the block is absent there from now on and the slot is never used again.
    /// What continues the block on this tier cannot be found until the block returns.
    pub fn quarantine(&self, tier: Tier, block: BlockId) -> Quarantine {
        if tier.index() >= crate::tier::TIERS {
            return Quarantine::NotRegistered;
        }
        self.shared.core.lock().quarantine(tier.index(), block)
    }

    /// Takes slots that nothing uses out of use for good (their medium is known to be bad) and returns how many that
    /// were. Slots in use and slots beyond the tier are left alone: a registered block goes by
    /// [`quarantine`](Self::quarantine). Takes time in proportion to the tier, under the lock: for the start, before
    /// [`restore`](Self::restore).
    pub fn retire(&self, tier: Tier, blocks: &[BlockId]) -> u32 {
        self.shared.core.lock().tiers.get_mut(tier.index()).map_or(0, |core| core.retire_free(blocks))
    }

    /// Makes what a persistent tier held before a restart Present again, in its slots. `blocks` are in order of last
    /// use, oldest first; where a slot or a hash occurs twice, the last record counts. Blocks whose ancestors are
    /// missing are left out. Untrusted input: anything may be in it.
    pub fn restore(
        &self,
        tier: Tier,
        blocks: &[RecoveredBlock],
        metadata: BlockMetadata,
    ) -> Result<Restored, RestoreError> {
        let mut outcome = Restored::default();
        let capacity = self.capacity(tier);
        if tier.index() >= crate::tier::TIERS {
            return Err(RestoreError::NoSlots(tier));
        }
        let kept = restore::latest(blocks, capacity, &mut outcome);
        let mut core = self.shared.core.lock();
        let tier_core = &core.tiers[tier.index()];
        if !tier_core.is_all_free() {
            return Err(RestoreError::InUse { tier, free: tier_core.free, capacity });
        }
        core.restore(tier.index(), &kept, metadata, &mut outcome);
        Ok(outcome)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry{:?}", self.shared.capacity)
    }
}

impl Shared {
    /// Puts `n` Held slots of `tier` into `out`, which is empty, or nothing.
    pub(crate) fn allocate(&self, tier: Tier, n: usize, out: &mut Vec<BlockId>) -> Result<(), AllocError> {
        let most = self.capacity.get(tier.index()).map_or(0, |&blocks| blocks as usize);
        *out = self.spares.take_ids(n.min(most));
        let mut core = self.core.lock();
        Self::allocate_locked(&mut core, tier, n, out)
    }

    fn allocate_locked(
        core: &mut MutexGuard<'_, Core>,
        tier: Tier,
        n: usize,
        out: &mut Vec<BlockId>,
    ) -> Result<(), AllocError> {
        let index = tier.index();
        let start = out.len();
        loop {
            let Some(tier_core) = core.tiers.get_mut(index) else {
                return Err(Self::alloc_error(&TierStatus::without_slots(tier), n));
            };
            while out.len() - start < n
                && let Some(slot) = tier_core.take_free()
            {
                out.push(BlockId(slot));
            }
            let missing = n - (out.len() - start);
            if missing == 0 {
                return Ok(());
            }
            // Hopeless requests evict nothing.
            let more = missing <= core.evictable_at_most(index, missing) && core.evict(index, missing, out);
            if out.len() - start < n && !more {
                core.tiers[index].give_back(&out[start..]);
                out.truncate(start);
                core.tiers[index].counters.allocations_failed += 1;
                return Err(Self::alloc_error(&core.status(tier), n));
            }
            yield_to_waiters(core);
        }
    }

    fn alloc_error(status: &TierStatus, asked: usize) -> AllocError {
        AllocError {
            tier: status.tier,
            asked,
            capacity: status.capacity,
            free: status.free,
            inactive: status.inactive,
            in_use: status.active + status.detached,
            held: status.held,
            arriving: status.arriving,
            transfer_pins: u32::try_from(status.transfer_pins).unwrap_or(u32::MAX),
            quarantined: status.quarantined,
            pinned: status.pinned,
        }
    }

    pub(crate) fn begin_arrivals(
        self: &Arc<Self>,
        tier: Tier,
        identities: &[BlockIdentity],
        metadata: BlockMetadata,
    ) -> Result<AnyArrivals, AllocError> {
        let index = tier.index();
        if index >= crate::tier::TIERS {
            return Err(Self::alloc_error(&TierStatus::without_slots(tier), identities.len()));
        }
        let mut pins = Vec::with_capacity(identities.len() + 1);
        let mut arrivals = Vec::with_capacity(identities.len());
        let mut room =
            HeldSlots { shared: Arc::clone(self), tier: index, ids: Vec::with_capacity(identities.len()) };
        let mut core = self.core.lock();
        let needed = core.prepare_arrivals(index, identities, &mut pins);
        let allocated = Self::allocate_locked(&mut core, tier, needed, &mut room.ids);
        if allocated.is_ok() {
            room.ids.reverse();
            for (at, identity) in identities.iter().enumerate() {
                arrivals.push(match core.check_identity(at, identity) {
                    Ok(()) => core.begin_arrival(index, identity, metadata, &mut room.ids),
                    Err(_) => Arrival::Refused(Refusal::BadIdentity),
                });
            }
        }
        core.unpin_all(index, &pins, Pin::Transfer);
        drop(core);
        allocated.map(|()| AnyArrivals::new(Arc::clone(self), tier, identities.to_vec(), arrivals))
    }
}
