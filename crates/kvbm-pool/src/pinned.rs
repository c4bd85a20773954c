//! Shared batches: Registered blocks that stay in their slots while a handle holds them.

use crate::core::registered::Reference;
use crate::entry::Presence;
use crate::losses::Losses;
use crate::metadata::BlockMetadata;
use crate::shared::RegistryState;
use crate::sync::{Arc, Weak};
use crate::tier::{TIERS, TierMask, TierTag};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, SequenceHash, Tier};
use std::fmt;
use std::marker::PhantomData;

/// Registered blocks of a tier that is known at run time, pinned. [`Cached`] is the same with the
/// tier in its type.
///
/// Clone and drop take the lock once for the whole batch. Drop lets go of the last block first, so
/// that the first is the youngest; the blocks stay registered until the tier needs their slots.
#[must_use = "dropping a pinned batch makes its blocks evictable"]
pub struct Pinned {
    pub(crate) shared: Arc<RegistryState>,
    pub(crate) tier: Tier,
    pub(crate) ids: Vec<BlockId>,
    pub(crate) reference: Reference,
    /// When they were pinned.
    pub(crate) losses: Losses,
}

/// The time fits beside tier and pin.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<Pinned>() == 40);

impl Pinned {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Tier of all blocks.
    pub const fn tier(&self) -> Tier {
        self.tier
    }

    /// The blocks' slots.
    pub fn block_ids(&self) -> &[BlockId] {
        &self.ids
    }

    /// What the blocks hold, in order.
    pub fn identities(&self) -> Vec<BlockIdentity> {
        let hold = self.shared.store.lock();
        let tier = self.tier.index();
        self.ids.iter().map(|block| hold.identity_in(tier, block.0)).collect()
    }

    /// How many uses the eviction policy expects of each block while as many blocks are used as the
    /// largest tier holds; `None` where it does not estimate that.
    pub fn expected_reuse(&self) -> Vec<Option<f32>> {
        let hold = self.shared.store.lock();
        let memory = |block: &BlockId| hold.entry(hold.entry_of(self.tier.index(), block.0)).memory();
        self.ids.iter().map(|block| hold.policy.expected_reuse(memory(block))).collect()
    }

    /// Cuts off the blocks from `at` on; none where `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        let ids = self.ids.split_off(at.min(self.ids.len()));
        Self {
            shared: Arc::clone(&self.shared),
            tier: self.tier,
            ids,
            reference: self.reference,
            losses: self.losses,
        }
    }

    /// Lets go of the blocks from `len` on.
    pub fn truncate(&mut self, len: usize) {
        drop(self.split_off(len));
    }

    /// Takes the blocks of `other` over, behind its own.
    ///
    /// # Errors
    /// Gives `other` back where it is of another tier, registry or kind of pin.
    pub fn append(&mut self, mut other: Self) -> Result<(), Self> {
        if self.tier != other.tier
            || self.reference != other.reference
            || !Arc::ptr_eq(&self.shared, &other.shared)
        {
            return Err(other);
        }
        self.ids.append(&mut other.ids);
        // All of them are as old as the oldest.
        self.losses = self.losses.min(other.losses);
        Ok(())
    }

    /// Counts as a use: tail to head, on every tier that holds the blocks. Once for each request.
    pub fn touch(&self) {
        self.shared.store.lock().touch_pinned(self.tier.index(), &self.ids);
    }

    /// Holds the blocks for a transfer from now on: dropping them is then no use of them, and
    /// allocation errors name them as held by transfers.
    pub fn into_transfer(self) -> Self {
        self.change_reference(Reference::Transfer)
    }

    /// Holds the blocks for a user from now on: dropping them is then a use of them.
    pub fn into_use(self) -> Self {
        self.change_reference(Reference::Use)
    }

    fn change_reference(mut self, reference: Reference) -> Self {
        if self.reference != reference {
            self.shared.store.lock().change_references(self.tier.index(), self.ids.len(), reference);
            self.reference = reference;
        }
        self
    }

    /// How many of the blocks, from the first on, are on `tier` as well at this moment.
    pub fn prefix_on(&self, tier: Tier) -> usize {
        if tier.index() >= TIERS {
            return 0;
        }
        let hold = self.shared.store.lock();
        let is_there = |block: &&BlockId| {
            let entry = hold.entry(hold.entry_of(self.tier.index(), block.0));
            entry.presence(tier.index()) == Presence::Present
        };
        self.ids.iter().take_while(is_there).count()
    }

    /// For each block whether its slot still is one of the block's. False once the block was
    /// removed while it was pinned, also where it has come back since, in another slot.
    pub fn registered(&self) -> Vec<bool> {
        let tier = self.tier.index();
        self.shared.store.lock().are_registered(self.ids.iter().map(|&block| (tier, block)))
    }

    /// When the blocks were pinned.
    pub const fn losses(&self) -> Losses {
        self.losses
    }

    /// Whether the tier lost what it held since they were pinned
    /// ([`Registry::lose`](crate::Registry::lose)): then their bytes are not whole any more.
    pub fn is_lost(&self) -> bool {
        self.shared.store.losses.is_lost(self.tier.index(), self.losses)
    }

    /// Proof of the registration of block `index` that does not pin it.
    pub fn registration(&self, index: usize) -> Option<RegistrationHandle> {
        let block = *self.ids.get(index)?;
        let hold = self.shared.store.lock();
        let identity = hold.identity_in(self.tier.index(), block.0);
        Some(RegistrationHandle { shared: Arc::downgrade(&self.shared), identity })
    }

    /// The registration of block `index` and how far events must be drained to have announced it.
    pub fn publication(&self, index: usize) -> Option<PublishHandle> {
        let registration = self.registration(index)?;
        let announced_before = self.shared.store.lock().events.next_seq();
        Some(PublishHandle { registration, announced_before })
    }

    /// Priorities of the blocks ([`BlockMetadata`]), in order.
    pub fn priorities(&self) -> Vec<u8> {
        let hold = self.shared.store.lock();
        let tier = self.tier.index();
        self.ids.iter().map(|block| hold.entry(hold.entry_of(tier, block.0)).priority.get()).collect()
    }

    /// Metadata of block `index`.
    pub fn metadata(&self, index: usize) -> Option<BlockMetadata> {
        let block = *self.ids.get(index)?;
        let hold = self.shared.store.lock();
        let priority = hold.entry(hold.entry_of(self.tier.index(), block.0)).priority.get();
        Some(BlockMetadata { priority })
    }
}

impl Clone for Pinned {
    fn clone(&self) -> Self {
        let ids = self.ids.clone();
        let mut hold = self.shared.store.lock();
        for block in &ids {
            hold.add_reference(self.tier.index(), block.0, self.reference);
        }
        drop(hold);
        Self {
            shared: Arc::clone(&self.shared),
            tier: self.tier,
            ids,
            reference: self.reference,
            losses: self.losses,
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.ids.is_empty() {
            self.shared.store.lock().drop_references(self.tier.index(), &self.ids, self.reference);
        }
        self.shared.vectors.keep_ids(std::mem::take(&mut self.ids));
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned<{}>{:?}", self.tier, self.ids)
    }
}

/// Registered blocks of one tier, pinned and shared: no handle can write them any more.
#[derive(Clone)]
#[must_use = "dropping a cached batch makes its blocks evictable"]
pub struct Cached<T: TierTag> {
    inner: Pinned,
    tier: PhantomData<fn() -> T>,
}

/// The reference's name for registered blocks.
pub type ImmutableBlock<T> = Cached<T>;

impl<T: TierTag> Cached<T> {
    pub(crate) fn new(inner: Pinned) -> Self {
        Self { inner, tier: PhantomData }
    }

    /// The same batch with its tier known at run time only.
    pub fn erase(self) -> Pinned {
        self.inner
    }

    /// Cuts off the blocks from `at` on; none where `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        Self::new(self.inner.split_off(at))
    }

    /// Lets go of the blocks from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.inner.truncate(len);
    }

    /// Takes the blocks of `other` over, behind its own.
    ///
    /// # Errors
    /// Gives `other` back where it is of another registry or kind of pin.
    pub fn append(&mut self, other: Self) -> Result<(), Self> {
        self.inner.append(other.inner).map_err(Self::new)
    }
}

impl<T: TierTag> std::ops::Deref for Cached<T> {
    type Target = Pinned;
    fn deref(&self) -> &Pinned {
        &self.inner
    }
}

impl<T: TierTag> fmt::Debug for Cached<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cached<{}>{:?}", T::TIER, self.inner.ids)
    }
}

/// A registration, without a pin: the cached entry owns the registration, this only looks at it.
/// Dropping it does nothing; eviction of the block publishes Remove.
#[derive(Clone)]
pub struct RegistrationHandle {
    shared: Weak<RegistryState>,
    identity: BlockIdentity,
}

impl RegistrationHandle {
    /// The block.
    pub const fn identity(&self) -> BlockIdentity {
        self.identity
    }

    /// Group of the block.
    pub const fn group(&self) -> GroupId {
        self.identity.group
    }

    /// Sequence hash of the block.
    pub const fn hash(&self) -> SequenceHash {
        self.identity.hash
    }

    /// Tiers that hold the block now; none where the registry is gone.
    pub fn tiers(&self) -> TierMask {
        let Some(shared) = self.shared.upgrade() else { return TierMask::NONE };
        let hold = shared.store.lock();
        let found = hold.entries.find(self.identity.group, self.identity.hash);
        found.map_or(TierMask::NONE, |index| hold.entries.tiers_of(index))
    }

    /// Whether the block is on some tier now.
    pub fn is_registered(&self) -> bool {
        !self.tiers().is_empty()
    }
}

impl fmt::Debug for RegistrationHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistrationHandle").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// A registration with its announcement: events are published by the registry itself, in step with
/// what they say.
#[derive(Clone, Debug)]
pub struct PublishHandle {
    /// The registration.
    pub registration: RegistrationHandle,
    /// The Store event has a smaller number than this: a caller that has drained up to here has
    /// seen it.
    pub announced_before: u64,
}
