//! The handle of a registry.

use crate::arrivals::AnyArrivals;
use crate::block_state::BatchState;
use crate::blocks::BlockBatch;
use crate::config::{ConfigError, RegistryConfig};
use crate::core::lookup::{PrefixLookup, tiers_of_each, tiers_of_prefix};
use crate::core::registered::Reference;
use crate::core::store::Store;
use crate::error::{AllocError, PinError, TtlError};
use crate::event::{Drained, EventBacklog, EventRecord};
use crate::metadata::BlockMetadata;
use crate::pinned::Pinned;
use crate::policy::{self, EvictionPolicy};
use crate::pool::BlockPool;
use crate::prefix::Prefix;
use crate::shared::RegistryState;
use crate::status::{TierCounters, TierStatus};
use crate::sync::Arc;
use crate::tier::{TIERS, TierMask, TierTag};
use crate::vectors::VectorPool;
use kvbm_plan::{BlockId, BlockIdentity, Epoch, GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_tokens::{BlockChain, ChainOrigin};
use std::fmt;
use std::hash::BuildHasher;
use std::time::Duration;

/// All blocks on G1, G2 and G3. Cheap to clone; handles keep what they need alive.
#[derive(Clone)]
pub struct Registry {
    pub(crate) shared: Arc<RegistryState>,
}

/// Events that one hold of the lock drains.
const EVENTS_PER_HOLD: usize = 256;

/// Entries that one hold of the lock copies.
const ENTRIES_PER_HOLD: u32 = 512;

/// Blocks that one hold of the lock looks up for [`Registry::peek_each`].
const PEEKED_PER_HOLD: usize = 1024;

impl Registry {
    /// An empty registry.
    ///
    /// # Errors
    /// A configuration that is not [valid](RegistryConfig::validate).
    pub fn new(config: &RegistryConfig) -> Result<Self, ConfigError> {
        let capacity = config.capacity.map(|blocks| blocks as usize);
        Self::build(config, policy::build(config.policy, capacity, config.policy_seed))
    }

    /// An empty registry that evicts as `policy` says, whatever `config.policy` is.
    ///
    /// # Errors
    /// A configuration that is not [valid](RegistryConfig::validate).
    pub fn with_policy(
        config: &RegistryConfig,
        policy: Box<dyn EvictionPolicy>,
    ) -> Result<Self, ConfigError> {
        Self::build(config, Some(policy))
    }

    fn build(config: &RegistryConfig, policy: Option<Box<dyn EvictionPolicy>>) -> Result<Self, ConfigError> {
        config.validate()?;
        // Only the buckets of keys depend on the seed, and no caller sees them.
        let seed = std::hash::RandomState::new().hash_one(config.epoch.0);
        let shared = RegistryState {
            vectors: VectorPool::new(),
            store: Store::new(config, policy, seed),
            epoch: config.epoch,
            event_capacity: config.event_capacity as usize,
            has_tenants: !config.tenants.is_empty(),
            capacity: config.capacity,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A typed view of tier `T`.
    pub fn pool<T: TierTag>(&self) -> BlockPool<T> {
        BlockPool::new(Arc::clone(&self.shared))
    }

    /// Whether `prefix` was matched here. Its slots mean something else, or nothing, in another
    /// registry.
    pub fn owns_prefix(&self, prefix: &Prefix) -> bool {
        Arc::ptr_eq(&self.shared, &prefix.shared)
    }

    /// Whether the blocks of `pinned` are registered here.
    pub fn owns_pinned(&self, pinned: &Pinned) -> bool {
        Arc::ptr_eq(&self.shared, &pinned.shared)
    }

    /// Whether `blocks` were allocated here.
    pub fn owns_blocks<T: TierTag, S: BatchState>(&self, blocks: &BlockBatch<T, S>) -> bool {
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

    /// The longest useful prefix of a sequence that is on some tier, each block pinned on its
    /// nearest one. Does not count as a use by itself: [`touch`](Self::touch) once for each
    /// request.
    ///
    /// `hashes` are those of the whole sequence from its first block. For a Full group the prefix
    /// ends before the first block that is on no tier. For a sliding window it is the longest whose
    /// last window is there, and for state the longest whose last block is there; only those blocks
    /// are pinned.
    pub fn match_prefix(&self, group: GroupId, hashes: &[SequenceHash]) -> Prefix {
        // Before anything is found: what is lost meanwhile counts as found before.
        let losses = self.losses();
        let mut blocks = Vec::with_capacity(hashes.len());
        let hashes_kept = hashes.to_vec();
        let lookup = PrefixLookup::new(group, hashes, TierMask::ALL);
        let mut hold = self.shared.store.lock();
        let found = lookup.pin(&mut hold, |block| blocks.push(block));
        let arriving = lookup.arriving_after(&hold, found.start + found.count);
        drop(hold);
        Prefix {
            shared: Arc::clone(&self.shared),
            namespace: found.namespace,
            group,
            hashes: hashes_kept,
            origin: ChainOrigin::Root,
            start: found.start as u32,
            losses,
            blocks,
            arriving,
            outside: None,
        }
    }

    /// The same for a chain that need not begin with the first block of a sequence. A block that is
    /// registered with another parent or position ends the prefix: `false` then.
    pub fn match_chain(&self, group: GroupId, chain: BlockChain<'_>) -> (Prefix, bool) {
        let mut prefix = self.match_prefix(group, chain.hashes());
        // The position of a block of a whole sequence is implied by its hash.
        let agrees = chain.origin() == ChainOrigin::Root || prefix.begin_at(chain.origin());
        (prefix, agrees)
    }

    /// Looks for the listed blocks of `prefix` again, as far as that goes from the first on: they
    /// may have come to a tier since.
    pub fn match_again(&self, prefix: &Prefix) -> Prefix {
        let losses = self.losses();
        let mut blocks = Vec::with_capacity(prefix.blocks.len());
        let lookup = PrefixLookup::new(prefix.group, prefix.hashes(), TierMask::ALL);
        let found = lookup.pin_run(&mut self.shared.store.lock(), |block| blocks.push(block));
        let mut again = Prefix {
            shared: Arc::clone(&self.shared),
            namespace: found.namespace,
            group: prefix.group,
            hashes: prefix.hashes[..prefix.len()].to_vec(),
            origin: prefix.origin,
            start: prefix.start,
            losses,
            blocks,
            arriving: Vec::new(),
            outside: None,
        };
        if prefix.origin != ChainOrigin::Root {
            again.begin_at(prefix.origin);
        }
        again
    }

    /// Whether a copy of the block is on its way to `tier`.
    pub fn is_arriving(&self, tier: Tier, group: GroupId, hash: SequenceHash) -> bool {
        tier.index() < TIERS && self.shared.store.lock().entries.is_arriving(tier.index(), group, hash)
    }

    /// On which tiers the blocks are, up to the first that is on none. Neither pins nor touches.
    pub fn peek_prefix(&self, group: GroupId, hashes: &[SequenceHash]) -> Vec<TierMask> {
        let mut tiers = Vec::with_capacity(hashes.len());
        tiers_of_prefix(&self.shared.store.lock().entries, group, hashes, &mut tiers);
        tiers
    }

    /// On which tiers each of the blocks is, also behind blocks that are on none. Neither pins nor
    /// touches. Of a long list, blocks that come or go meanwhile may be seen before or after that.
    pub fn peek_each(&self, group: GroupId, hashes: &[SequenceHash]) -> Vec<TierMask> {
        let mut tiers = Vec::with_capacity(hashes.len());
        for part in hashes.chunks(PEEKED_PER_HOLD) {
            tiers_of_each(&self.shared.store.lock().entries, group, part, &mut tiers);
        }
        tiers
    }

    /// On which tiers one block is. Neither pins nor touches.
    pub fn tiers_of(&self, group: GroupId, hash: SequenceHash) -> TierMask {
        let entries = &self.shared.store.lock().entries;
        entries.find(group, hash).map_or(TierMask::NONE, |index| entries.tiers_of(index))
    }

    /// In which slot of `tier` a block is, where it is there. Neither pins nor touches: by the time
    /// it is known it may be gone from there.
    pub fn slot_of(&self, tier: Tier, group: GroupId, hash: SequenceHash) -> Option<BlockId> {
        let entries = &self.shared.store.lock().entries;
        let found = entries.find(group, hash).filter(|&index| entries.tiers_of(index).contains(tier));
        found.map(|index| BlockId(entries[index].slot(tier.index())))
    }

    /// A use of these blocks, tail to head, on every tier that holds them: once for each request,
    /// with its whole chain.
    ///
    /// There is no id of a request. To the default policy, this and the next registration behind a
    /// block that is there are one request if no other use comes in between. So touch a request
    /// right before you register its new blocks. Where several threads interleave, the policy
    /// counts new blocks with the request that was touched last, or as a request of their own. The
    /// ages that it learns differ by so many blocks, and eviction stays as safe as before.
    pub fn touch(&self, group: GroupId, hashes: &[SequenceHash]) {
        self.shared.store.lock().touch(group, hashes);
    }

    /// Nothing will continue this request: a soft hint. Concerns those of its blocks at its end
    /// that belong to no other branch, until they are used again. `hazard` learns what such hints
    /// are worth; under `lru-leaf` these blocks are the next victims, once they have no users. For
    /// an ended session, call it for the session's last request.
    pub fn branch_ends(&self, group: GroupId, hashes: &[SequenceHash]) {
        self.shared.store.lock().branch_ends(group, hashes);
    }

    /// Keeps what is there of a chain on `tiers` from eviction until iteration `until` (or until it
    /// is unpinned, or removed), with the ancestors that it needs there. Of several pins of a block
    /// the one that ends last counts. Pinned blocks are cached ones like others in all other
    /// respects: a pin is neither a use nor a handle. Returns how many of `hashes` are pinned.
    ///
    /// # Errors
    /// [`PinError`]: an iteration that is over, or more than [`RegistryConfig::most_pinned`] on a
    /// tier. Nothing changed.
    pub fn pin(
        &self,
        group: GroupId,
        hashes: &[SequenceHash],
        tiers: TierMask,
        until: u64,
    ) -> Result<usize, PinError> {
        self.shared.store.lock().pin_chain(group, hashes, tiers, until)
    }

    /// Takes pins back: of the blocks of a chain, given from its first block on, as far as no other
    /// pinned block continues them. Returns how many pins (of a block on a tier) ended.
    pub fn unpin(&self, group: GroupId, hashes: &[SequenceHash], tiers: TierMask) -> usize {
        self.shared.store.lock().unpin_chain(group, hashes, tiers)
    }

    /// Blocks of `namespace` leave every tier after `iterations` without use (`None`: they stay
    /// until their slots are needed). A use is what makes a block young: a touch, the end of a
    /// handle, and its arrival on a tier. Blocks that are in use, pinned or continued on the tier
    /// stay until they are not. [`step`](Self::step) removes them, from the ends of chains on. In a
    /// registry of up to 1,024 blocks that is in the iteration in which they are due, in larger
    /// ones within 1,024 further iterations.
    ///
    /// # Errors
    /// [`TtlError`]: 0, or more than [`RegistryConfig::MAX_TTL`]. Nothing changed.
    pub fn set_ttl(&self, namespace: NamespaceId, iterations: Option<u64>) -> Result<(), TtlError> {
        Self::check_ttl(iterations, None)?;
        self.shared.store.lock().expiry.limit(namespace, iterations.map(|iterations| iterations as u16));
        Ok(())
    }

    /// Blocks of `namespace` leave every tier after so much time without use (`None`: they stay
    /// until their slots are needed), beside what [`set_ttl`](Self::set_ttl) says. What is there
    /// counts as used now. [`second`](Self::second) removes them, within half a minute of their
    /// time.
    ///
    /// # Errors
    /// [`TtlError`]: less than a second, or more than [`RegistryConfig::MAX_TTL_SECONDS`]. Nothing
    /// changed.
    pub fn set_ttl_time(&self, namespace: NamespaceId, time: Option<Duration>) -> Result<(), TtlError> {
        Self::check_ttl(None, time)?;
        let mut hold = self.shared.store.lock();
        let end = hold.entries.end();
        hold.expiry.limit_seconds(namespace, time.map(|time| time.as_secs() as u32));
        hold.expiry.cover(end);
        Ok(())
    }

    /// Whether [`set_ttl`](Self::set_ttl) and [`set_ttl_time`](Self::set_ttl_time) take these.
    ///
    /// # Errors
    /// [`TtlError`]: one of them does not.
    pub fn check_ttl(iterations: Option<u64>, time: Option<Duration>) -> Result<(), TtlError> {
        let is_count = |iterations: &u64| (1..=RegistryConfig::MAX_TTL).contains(iterations);
        if let Some(iterations) = iterations.filter(|iterations| !is_count(iterations)) {
            return Err(TtlError::Iterations { iterations });
        }
        let is_time = |time: &Duration| (1..=RegistryConfig::MAX_TTL_SECONDS).contains(&time.as_secs());
        time.filter(|time| !is_time(time)).map_or(Ok(()), |time| Err(TtlError::Time { time }))
    }

    /// So many seconds of a clock have passed: removes the blocks whose time to live is over.
    pub fn second(&self, second: u32) {
        let mut hold = self.shared.store.lock();
        let end = hold.entries.end();
        if hold.expiry.begin_second(second, end) {
            while hold.expire() {
                hold.let_others_in();
            }
        }
    }

    /// The iteration clock.
    pub fn iteration(&self) -> u64 {
        self.shared.store.lock().step
    }

    /// Advances the iteration clock, ends the pins whose time is over, removes the blocks whose
    /// time to live is, and returns the clock.
    pub fn step(&self) -> u64 {
        let mut hold = self.shared.store.lock();
        hold.step += 1;
        let now = hold.step;
        while hold.end_timed_pins() {
            hold.let_others_in();
        }
        let end = hold.entries.end();
        hold.expiry.begin_iteration(end);
        while hold.expire() {
            hold.let_others_in();
        }
        now
    }

    /// Up to `n` unpinned blocks of `tier`, coldest first but every block after its ancestors. They
    /// are neither on `not_on` nor on their way there. They were not used during the last
    /// `min_idle` iterations (0: any; counted up to 65,535). Pinned for a transfer. Looks at a
    /// bounded number of blocks and goes on from there in the next call.
    pub fn coldest(&self, tier: Tier, n: usize, not_on: Tier, min_idle: u64) -> Pinned {
        let (losses, mut ids) = (self.losses(), Vec::new());
        if self.capacity(tier) > 0 && not_on.index() < TIERS {
            ids.reserve(n.min(self.capacity(tier) as usize));
            self.shared.store.coldest([tier.index(), not_on.index()], n, min_idle, &mut ids);
        }
        Pinned { shared: Arc::clone(&self.shared), tier, ids, reference: Reference::Transfer, losses }
    }

    /// Up to `n` blocks of `tier` that may be evicted soon and are neither on `not_on` nor on their
    /// way there, pinned for a transfer, parents before children. Under `lru-leaf` these are the
    /// oldest `share` (0 to 1) of its eviction order. Other policies may take any block next, so
    /// with one they all are, unless `share` is 0. Each use of a block puts it before this once:
    /// call it after every registration or arrival on the tier.
    pub fn uncopied_victims(&self, tier: Tier, share: f64, n: usize, not_on: Tier) -> Pinned {
        let (losses, mut ids) = (self.losses(), Vec::new());
        if self.capacity(tier) > 0 && not_on.index() < TIERS {
            self.shared.store.uncopied_victims([tier.index(), not_on.index()], share, n, &mut ids);
        }
        Pinned { shared: Arc::clone(&self.shared), tier, ids, reference: Reference::Transfer, losses }
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
        self.begin_arrivals_with(tier, identities, BlockMetadata::default())
    }

    /// The same, with metadata for those of the blocks that are on no tier.
    ///
    /// # Errors
    /// As [`begin_arrivals`](Self::begin_arrivals).
    pub fn begin_arrivals_with(
        &self,
        tier: Tier,
        identities: &[BlockIdentity],
        metadata: BlockMetadata,
    ) -> Result<AnyArrivals, AllocError> {
        AnyArrivals::begin(&self.shared, tier, identities, metadata)
    }

    /// Where the slots of `tier` are.
    pub fn occupancy(&self, tier: Tier) -> TierStatus {
        if tier.index() >= TIERS {
            TierStatus::without_slots(tier)
        } else {
            self.shared.store.lock().status(tier)
        }
    }

    /// Blocks of `tier` that are neither free, nor quarantined, nor on the next lower tier:
    /// [`TierStatus::not_copied_lower`].
    pub fn not_copied_lower(&self, tier: Tier) -> u32 {
        self.occupancy(tier).not_copied_lower
    }

    /// What happened on `tier` so far.
    pub fn counters(&self, tier: Tier) -> TierCounters {
        if tier.index() >= TIERS {
            return TierCounters::default();
        }
        self.shared.store.lock().tiers[tier.index()].counters
    }

    /// Blocks of which there is a record: those on some tier or on their way, and those that
    /// something on a tier continues.
    pub fn known_blocks(&self) -> usize {
        self.shared.store.lock().entries.used()
    }

    /// Appends up to `max` events to `out`, oldest first.
    pub fn drain_events(&self, out: &mut Vec<EventRecord>, max: usize) -> Drained {
        if out.capacity() - out.len() < max {
            let waiting = self.shared.store.lock().events.waiting();
            out.reserve(max.min(waiting.saturating_add(64)).min(2 * self.shared.event_capacity));
        }
        let mut drained = Drained::default();
        let mut hold = self.shared.store.lock();
        loop {
            let most = EVENTS_PER_HOLD.min(max - drained.records);
            let part = hold.events.drain(out, most);
            drained = Drained {
                records: drained.records + part.records,
                lost: drained.lost + part.lost,
                next_seq: part.next_seq,
                waiting: part.waiting,
            };
            if part.records < EVENTS_PER_HOLD || drained.records == max {
                return drained;
            }
            hold.let_others_in();
            // A loss between two records ends the call: it stands before the first record of the
            // next one.
            if hold.events.lost() > 0 {
                return drained;
            }
        }
    }

    /// Names what is called when a drain of events is due, as [`wake_when`](Self::wake_when) asks:
    /// without the registry's lock, on the thread that recorded the event. It must not block.
    /// Whether this was the first call; later ones change nothing.
    pub fn on_events_due(&self, waker: impl Fn() + Send + Sync + 'static) -> bool {
        self.shared.store.waker.set(Box::new(waker)).is_ok()
    }

    /// Asks for one call of the waker when `waiting` events wait to be drained, or half of what the
    /// ring holds: now or later.
    pub fn wake_when(&self, waiting: usize) {
        self.shared.store.lock().events.wake_when(waiting);
    }

    /// How full the ring of events is.
    pub fn event_backlog(&self) -> EventBacklog {
        self.shared.store.lock().events.backlog()
    }

    /// Events that were overwritten before they were drained, in all.
    pub fn events_lost(&self) -> u64 {
        self.shared.store.lock().events.lost_total()
    }

    /// The blocks on `tier`, parents before children, and the number of an event. The events from
    /// this number on bring the copy up to date; it may contain the effect of some of them, and
    /// contains all of them where nothing changes meanwhile. Takes time and memory in proportion to
    /// the registry. One hold of the lock looks at a bounded number of blocks.
    pub fn snapshot(&self, tier: Tier) -> (Vec<(BlockId, BlockIdentity)>, u64) {
        let (copied, next_seq) = self.copy_blocks(&[tier]);
        (copied.into_iter().map(|(_, slot, identity)| (slot, identity)).collect(), next_seq)
    }

    /// As [`snapshot`](Self::snapshot), of all tiers: each block with its tier, parents before
    /// children, on whichever tiers they are.
    pub fn snapshot_all(&self) -> (Vec<(Tier, BlockIdentity)>, u64) {
        let (copied, next_seq) = self.copy_blocks(&Tier::SLOTTED);
        (copied.into_iter().map(|(tier, _, identity)| (tier, identity)).collect(), next_seq)
    }

    fn copy_blocks(&self, tiers: &[Tier]) -> (Vec<(Tier, BlockId, BlockIdentity)>, u64) {
        let known = self.known_blocks();
        let mut copied = Vec::with_capacity(known);
        let mut hold = self.shared.store.lock();
        // Read first: what changes behind the copy is in the events from here on.
        let (next_seq, last) = (hold.events.next_seq(), hold.entries.end() as u32);
        let mut at = 0;
        while at < last {
            let end = last.min(at + ENTRIES_PER_HOLD);
            hold.entries.copy_blocks(at..end, tiers, &mut copied);
            at = end;
            hold.let_others_in();
        }
        drop(hold);
        let name = |(tier, _, block): &(Tier, BlockId, BlockIdentity)| (block.group, block.hash, *tier);
        copied.sort_unstable_by_key(|(tier, _, block)| (block.position, block.hash, block.group, *tier));
        // A block that came back meanwhile may have been copied twice.
        copied.dedup_by_key(|copy| name(copy));
        (copied, next_seq)
    }
}

/// A tier of a registry leads back to it.
impl<T: TierTag> BlockPool<T> {
    /// The registry that this tier belongs to.
    pub fn registry(&self) -> Registry {
        Registry { shared: Arc::clone(&self.shared) }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry{:?}", self.shared.capacity)
    }
}
