//! A typed view of one tier.

use crate::arrivals::{AnyArrivals, Arrivals};
use crate::blocks::Blocks;
use crate::core::Pin;
use crate::core::register::Batch;
use crate::error::{AllocError, RegisterError, Rejected};
use crate::metadata::BlockMetadata;
use crate::pinned::{Cached, Pinned};
use crate::registry::Registry;
use crate::shared::Shared;
use crate::state::{Complete, Reset, State, Trigger};
use crate::status::TierStatus;
use crate::sync::Arc;
use crate::tier::{TierMask, TierTag};
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};
use std::fmt;
use std::marker::PhantomData;

/// What to do with a block that the tier already has when it is registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Duplicates {
    /// Use the block that is there; the slot of the new one is free again.
    #[default]
    Reuse,
    /// Keep the new copy beside the old one for as long as it is held: the engine's tables point at it.
    Allow,
}

/// One tier of a [`Registry`]. Cheap to clone.
pub struct BlockPool<T: TierTag> {
    shared: Arc<Shared>,
    tier: PhantomData<fn() -> T>,
}

impl<T: TierTag> BlockPool<T> {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, tier: PhantomData }
    }

    /// The registry that this tier belongs to.
    pub fn registry(&self) -> Registry {
        Registry { shared: Arc::clone(&self.shared) }
    }

    /// Blocks to write, all or none. Evicts unpinned blocks where too few are free; never waits for a transfer.
    /// Where tenants have shares, these count for nobody before they are registered: ask with
    /// [`get_mutable_blocks_for`](Self::get_mutable_blocks_for).
    ///
    /// # Errors
    /// Fewer than `n` blocks are free or may be evicted: none is taken. Says where the others are.
    pub fn get_mutable_blocks(&self, n: usize) -> Result<Blocks<T, Reset>, AllocError> {
        self.shared.allocate(T::TIER, n, None)
    }

    /// The same, for blocks of `namespace`: they count for its tenant from now on. A tenant that is over its share with them gets what
    /// is free, and blocks of tenants that are over theirs, itself above all; never those of one that is not.
    ///
    /// # Errors
    /// As [`get_mutable_blocks`](Self::get_mutable_blocks), also where there would be room but for other tenants' shares
    /// ([`AllocError::over_share`]).
    pub fn get_mutable_blocks_for(
        &self,
        namespace: NamespaceId,
        n: usize,
    ) -> Result<Blocks<T, Reset>, AllocError> {
        self.shared.allocate(T::TIER, n, Some(namespace))
    }

    /// The longest useful prefix of `hashes` that is on this tier, pinned. For a group that is not Full only the
    /// blocks at its end that are needed (see [`Registry::match_prefix`]).
    pub fn match_sequence_hashes(&self, group: GroupId, hashes: &[SequenceHash]) -> Cached<T> {
        // Before anything is found: what is lost meanwhile counts as found before.
        let losses = self.shared.store.losses();
        let mut ids = self.shared.spares.take_ids(hashes.len());
        let tier = TierMask::only(T::TIER);
        self.shared.store.match_prefix(group, hashes, tier, |block| ids.push(block.block), None);
        Cached::new(Pinned { shared: Arc::clone(&self.shared), tier: T::TIER, ids, pin: Pin::Use, losses })
    }

    /// Makes Complete blocks visible, all or none. The answer pins one block for each given, in order.
    ///
    /// # Errors
    /// The batch comes back with the reason. [`RegisterError::Lost`] where the tier lost what it held since the batch was allocated.
    pub fn register(
        &self,
        blocks: Blocks<T, Complete>,
        duplicates: Duplicates,
    ) -> Result<Cached<T>, Rejected<Blocks<T, Complete>, RegisterError>> {
        self.register_with(blocks, duplicates, BlockMetadata::default())
    }

    /// The same, with metadata for those of the blocks that are new on all tiers.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn register_with(
        &self,
        blocks: Blocks<T, Complete>,
        duplicates: Duplicates,
        metadata: BlockMetadata,
    ) -> Result<Cached<T>, Rejected<Blocks<T, Complete>, RegisterError>> {
        debug_assert!(Complete::STATE.after(Trigger::Register).is_ok());
        if !blocks.belongs_to(&self.shared) {
            return Err(Rejected { batch: blocks, error: RegisterError::ForeignBatch });
        }
        let (mut slots, identities) = blocks.into_inner();
        let (claim, losses) = (slots.claim, slots.losses);
        let tier = T::TIER.index();
        let batch = Batch { tier, identities: &identities, duplicates, metadata, claim, losses };
        if let Err(error) = self.shared.store.register(batch, &mut slots.ids) {
            return Err(Rejected { batch: Blocks::new(slots, identities), error });
        }
        // The slots are Registered now: the batch must not give them back.
        let ids = std::mem::take(&mut slots.ids);
        self.shared.spares.keep_identities(identities);
        let shared = Arc::clone(&self.shared);
        Ok(Cached::new(Pinned { shared, tier: T::TIER, ids, pin: Pin::Use, losses }))
    }

    /// Prepares a transfer of `identities` to this tier: for each block a reserved slot, the block itself where it is
    /// here already, or the transfer that brings it. Parents first. Evicts as [`get_mutable_blocks`](Self::get_mutable_blocks).
    /// Each tenant's blocks are for that tenant: where one of several gets no room, its blocks are refused and the others' go on.
    ///
    /// # Errors
    /// There is room for none of them: nothing is under way.
    pub fn begin_arrivals(&self, identities: &[BlockIdentity]) -> Result<Arrivals<T>, AllocError> {
        self.begin_arrivals_with(identities, BlockMetadata::default())
    }

    /// The same, with metadata for those of the blocks that are on no tier (of a peer or a volume).
    ///
    /// # Errors
    /// As [`begin_arrivals`](Self::begin_arrivals).
    pub fn begin_arrivals_with(
        &self,
        identities: &[BlockIdentity],
        metadata: BlockMetadata,
    ) -> Result<Arrivals<T>, AllocError> {
        let arrivals: AnyArrivals = self.shared.begin_arrivals(T::TIER, identities, metadata)?;
        Ok(Arrivals::new(arrivals))
    }

    /// Where the slots are.
    pub fn status(&self) -> TierStatus {
        self.shared.store.status(T::TIER)
    }
}

impl<T: TierTag> Clone for BlockPool<T> {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.shared))
    }
}

impl<T: TierTag> fmt::Debug for BlockPool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockPool<{}>", T::TIER)
    }
}
