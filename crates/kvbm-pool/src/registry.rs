//! The registry: one index of all blocks on all tiers.

mod remove;
mod restore;
mod tenants;

pub use remove::{Quarantine, Removed, Selection};
pub use restore::{RestoreError, Restored};

use crate::arrivals::AnyArrivals;
use crate::config::{ConfigError, RegistryConfig};
use crate::core::{Pin, Store};
use crate::error::{AllocError, PinError, TtlError};
use crate::event::{Drained, EventRecord};
use crate::metadata::BlockMetadata;
use crate::pinned::Pinned;
use crate::policy::{self, EvictionPolicy};
use crate::pool::BlockPool;
use crate::prefix::Prefix;
use crate::shared::Shared;
use crate::spares::Spares;
use crate::status::{Counters, TierStatus};
use crate::sync::Arc;
use crate::tier::{TierMask, TierTag};
use kvbm_plan::{BlockId, BlockIdentity, Epoch, GroupId, NamespaceId, SequenceHash, Tier};
use std::fmt;
use std::hash::BuildHasher;

/// All blocks on G1, G2 and G3. Cheap to clone; handles keep what they need alive.
#[derive(Clone)]
pub struct Registry {
    pub(crate) shared: Arc<Shared>,
}

/// A part of a policy for each shard.
type Parts = Vec<Box<dyn EvictionPolicy>>;

impl Registry {
    /// An empty registry.
    ///
    /// # Errors
    /// A configuration that is not [valid](RegistryConfig::validate).
    pub fn new(config: &RegistryConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let capacity = config.capacity.map(|blocks| blocks as usize);
        Self::build(config, policy::build(config.policy, capacity, config.policy_seed))
    }

    /// An empty registry that evicts as `policy` says, whatever `config.policy` is.
    ///
    /// # Errors
    /// A configuration that is not [valid](RegistryConfig::validate); several shards, and a policy that is not split, or not into as many
    /// parts.
    pub fn with_policy(
        config: &RegistryConfig,
        policy: Box<dyn EvictionPolicy>,
    ) -> Result<Self, ConfigError> {
        Self::build(config, Some(policy))
    }

    fn build(config: &RegistryConfig, policy: Option<Box<dyn EvictionPolicy>>) -> Result<Self, ConfigError> {
        let wanted = config.check(true)?;
        let (shards, policies) = match policy {
            None => (wanted, Vec::new()),
            Some(policy) => match Self::split(policy.as_ref(), wanted)? {
                Some(parts) => (wanted, parts),
                None => (config.shards_with(false)?, vec![policy]),
            },
        };
        // Only the places of keys in the table depend on the seed, nothing that anybody can see.
        let seed = std::hash::RandomState::new().hash_one(config.epoch.0);
        let shared = Shared {
            spares: Spares::default(),
            store: Store::new(config, policies, shards, seed),
            epoch: config.epoch,
            event_capacity: config.event_capacity as usize,
            has_tenants: !config.tenants.is_empty(),
            capacity: config.capacity,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A part of the policy for each of several shards, where that is possible.
    fn split(policy: &dyn EvictionPolicy, shards: usize) -> Result<Option<Parts>, ConfigError> {
        let parts = if shards > 1 { policy.split(shards) } else { None };
        match parts.as_ref().map(Vec::len) {
            Some(parts) if parts != shards => Err(ConfigError::Parts { shards, parts }),
            _ => Ok(parts),
        }
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
        // Before anything is found: what is lost meanwhile counts as found before.
        let losses = self.losses();
        let mut blocks = Vec::with_capacity(hashes.len());
        let hashes_kept = hashes.to_vec();
        let mut arriving = Vec::new();
        let push = |block| blocks.push(block);
        let found = self.shared.store.match_prefix(group, hashes, TierMask::ALL, push, Some(&mut arriving));
        Prefix {
            shared: Arc::clone(&self.shared),
            namespace: found.namespace,
            group,
            hashes: hashes_kept,
            start: found.start as u32,
            losses,
            blocks,
            arriving,
            volume: None,
        }
    }

    /// On which tiers the blocks are, up to the first that is on none. Neither pins nor touches.
    pub fn peek_prefix(&self, group: GroupId, hashes: &[SequenceHash]) -> Vec<TierMask> {
        let mut tiers = Vec::with_capacity(hashes.len());
        self.shared.store.tiers_of_each(group, hashes, &mut tiers);
        tiers
    }

    /// On which tiers one block is. Neither pins nor touches.
    pub fn tiers_of(&self, group: GroupId, hash: SequenceHash) -> TierMask {
        self.shared.store.tiers_of(group, hash)
    }

    /// In which slot of `tier` a block is, where it is there. Neither pins nor touches: by the time it is known it may be gone from there.
    pub fn slot_of(&self, tier: Tier, group: GroupId, hash: SequenceHash) -> Option<BlockId> {
        self.shared.store.slot_of(tier, group, hash)
    }

    /// A use of these blocks, tail to head, on every tier that holds them: once for each request, with its whole chain.
    ///
    /// There is no id of a request. To the default policy, this and the next registration behind a block that is there are one request,
    /// where the same thread makes both and touches nothing in between (with one shard, where no thread does). So a thread that serves
    /// several requests in turn, or hands one over to another thread, best touches a request right before it registers what is new
    /// of it. Nothing has to be said where that is not so: new blocks are then counted with the request that the thread touched last, or
    /// as one of their own. The ages that the policy learns, and what it compares by request, differ by so many blocks; who is
    /// evicted stays as safe as before. The last request of a thread counts when that thread begins another.
    pub fn touch(&self, group: GroupId, hashes: &[SequenceHash]) {
        self.shared.store.touch(group, hashes);
    }

    /// Nothing will continue this request: a soft hint. Concerns those of its blocks at its end that belong to no other
    /// branch, until they are used again. `hazard` learns what such hints are worth; under `lru-leaf` and `s3-fifo` these
    /// blocks are the next to go, once nobody uses them. For an ended session, call it for the session's last request.
    pub fn branch_ends(&self, group: GroupId, hashes: &[SequenceHash]) {
        self.shared.store.lock_all().branch_ends(group, hashes);
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
        self.shared.store.lock_all().keep(group, hashes, tiers, until)
    }

    /// Takes pins back: of the blocks of a chain, given from its first block on, as far as no other pinned block continues
    /// them. Returns on how many places (a block on a tier) a pin ended.
    pub fn unpin(&self, group: GroupId, hashes: &[SequenceHash], tiers: TierMask) -> usize {
        self.shared.store.lock_all().unkeep(group, hashes, tiers)
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
        let mut core = self.shared.store.lock_all();
        core.first_mut().expiry.limit(namespace, iterations.map(|iterations| iterations as u16));
        Ok(())
    }

    /// The iteration clock.
    pub fn iteration(&self) -> u64 {
        self.shared.store.step()
    }

    /// Advances the iteration clock, ends the pins whose time is over, removes the blocks whose time to live is, and returns
    /// the clock.
    pub fn step(&self) -> u64 {
        let mut core = self.shared.store.lock_all();
        let now = self.shared.store.advance();
        while core.end_keeps() {
            core.let_others_in();
        }
        core.begin_expiry();
        while core.expire() {
            core.let_others_in();
        }
        now
    }

    /// Up to `n` unpinned blocks of `tier`, coldest first but every block after its ancestors, that are neither on
    /// `not_on` nor on their way there and were not used during the last `min_idle` iterations (0: any; counted up to 65,535). Pinned for a
    /// transfer. Looks at a bounded number of blocks and goes on from there in the next call.
    pub fn coldest(&self, tier: Tier, n: usize, not_on: Tier, min_idle: u64) -> Pinned {
        let (losses, mut ids) = (self.losses(), Vec::new());
        if self.capacity(tier) > 0 && not_on.index() < crate::tier::TIERS {
            ids.reserve(n.min(self.capacity(tier) as usize));
            self.shared.store.coldest([tier.index(), not_on.index()], n, min_idle, &mut ids);
        }
        Pinned { shared: Arc::clone(&self.shared), tier, ids, pin: Pin::Transfer, losses }
    }

    /// Up to `n` blocks of `tier` that may be evicted soon and are neither on `not_on` nor on their way there, pinned for a
    /// transfer, parents before children. Under `lru-leaf` these are the oldest `share` (0 to 1) of its eviction order;
    /// other policies may take any block next, so with one they all are, unless `share` is 0. Each use of a block puts it
    /// before this once: call it after every registration or arrival on the tier. Where there are several shards, one whose order has
    /// hardly anything new is left for a later call (a sixteenth of the share at most).
    pub fn uncopied_victims(&self, tier: Tier, share: f64, n: usize, not_on: Tier) -> Pinned {
        let (losses, mut ids) = (self.losses(), Vec::new());
        if self.capacity(tier) > 0 && not_on.index() < crate::tier::TIERS {
            self.shared.store.uncopied_victims([tier.index(), not_on.index()], share, n, &mut ids);
        }
        Pinned { shared: Arc::clone(&self.shared), tier, ids, pin: Pin::Transfer, losses }
    }

    /// Prepares a transfer to a tier that is known at run time (see [`BlockPool::begin_arrivals`]).
    ///
    /// # Errors
    /// As there, and always on a tier without slots (G4).
    pub fn begin_arrivals(
        &self,
        tier: Tier,
        identities: &[BlockIdentity],
    ) -> Result<AnyArrivals, AllocError> {
        self.shared.begin_arrivals(tier, identities, BlockMetadata::default())
    }

    /// Where the slots of `tier` are.
    pub fn occupancy(&self, tier: Tier) -> TierStatus {
        self.shared.store.status(tier)
    }

    /// Blocks of `tier` that are neither free, nor quarantined, nor on the next lower tier: [`TierStatus::not_copied_lower`], for who
    /// asks often. Where several shards are, it locks none, and does not count what other threads change at this moment.
    pub fn not_copied_lower(&self, tier: Tier) -> u32 {
        self.shared.store.not_copied_lower(tier)
    }

    /// What happened on `tier` so far.
    pub fn counters(&self, tier: Tier) -> Counters {
        if tier.index() >= crate::tier::TIERS {
            return Counters::default();
        }
        let core = self.shared.store.lock_all();
        core.parts(tier.index()).fold(Counters::default(), |all, part| all.plus(&part.counters))
    }

    /// Blocks of which there is a record: those on some tier or on their way, and those that something on a tier
    /// continues.
    pub fn known_blocks(&self) -> usize {
        self.shared.store.lock_all().shards().map(|shard| shard.used).sum()
    }

    /// Appends up to `max` events to `out`, oldest first.
    pub fn drain_events(&self, out: &mut Vec<EventRecord>, max: usize) -> Drained {
        if out.capacity() - out.len() < max {
            let waiting = self.shared.store.events.lock().waiting();
            out.reserve(max.min(waiting.saturating_add(64)).min(2 * self.shared.event_capacity));
        }
        self.shared.store.events.lock().drain(out, max)
    }

    /// How full the ring of events is.
    pub fn event_backlog(&self) -> crate::EventBacklog {
        self.shared.store.events.lock().backlog()
    }

    /// Events that were overwritten before they were drained, in all.
    pub fn events_lost(&self) -> u64 {
        self.shared.store.events.lock().lost_total()
    }

    /// Everything on `tier`, parents before children, and the number of the first event that is not in it. Takes
    /// time and memory in proportion to the tier, under the lock: for resync, not for every day.
    pub fn snapshot(&self, tier: Tier) -> (Vec<(BlockId, BlockIdentity)>, u64) {
        let core = self.shared.store.lock_all();
        let blocks = if tier.index() < crate::tier::TIERS { core.snapshot(tier.index()) } else { Vec::new() };
        (blocks, self.shared.store.events.lock().next_seq())
    }

    /// As [`snapshot`](Self::snapshot), of all tiers at one moment: each block with its tier, parents before children.
    pub fn snapshot_all(&self) -> (Vec<(Tier, BlockIdentity)>, u64) {
        let core = self.shared.store.lock_all();
        let blocks = Tier::SLOTTED.into_iter().flat_map(|tier| {
            core.snapshot(tier.index()).into_iter().map(move |(_, identity)| (tier, identity))
        });
        let blocks = blocks.collect();
        (blocks, self.shared.store.events.lock().next_seq())
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry{:?}", self.shared.capacity)
    }
}
