//! A typed view of one tier.

use crate::arrivals::{AnyArrivals, Arrivals};
use crate::blocks::{Blocks, HeldSlots};
use crate::core::Pin;
use crate::error::{AllocError, RegisterError, Rejected};
use crate::metadata::BlockMetadata;
use crate::pinned::{Cached, Pinned};
use crate::registry::{Registry, Shared};
use crate::state::{Complete, Reset, State, Trigger};
use crate::status::TierStatus;
use crate::sync::Arc;
use crate::tier::{TierMask, TierTag};
use kvbm_plan::{BlockIdentity, GroupId, SequenceHash};
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
    pub fn get_mutable_blocks(&self, n: usize) -> Result<Blocks<T, Reset>, AllocError> {
        let mut slots =
            HeldSlots { shared: Arc::clone(&self.shared), tier: T::TIER.index(), ids: Vec::new() };
        self.shared.allocate(T::TIER, n, &mut slots.ids)?;
        Ok(Blocks::new(slots, ()))
    }

    /// The longest useful prefix of `hashes` that is on this tier, pinned. For a group that is not Full only the
    /// blocks at its end that are needed (see [`Registry::match_prefix`]).
    pub fn match_sequence_hashes(&self, group: GroupId, hashes: &[SequenceHash]) -> Cached<T> {
        let mut ids = self.shared.spares.take_ids(hashes.len());
        let tier = TierMask::only(T::TIER);
        self.shared.core.lock().match_prefix(group, hashes, tier, |block| ids.push(block.block));
        Cached::new(Pinned { shared: Arc::clone(&self.shared), tier: T::TIER, ids, pin: Pin::Use })
    }

    /// Makes Complete blocks visible, all or none. The answer pins one block for each given, in order.
    pub fn register(
        &self,
        blocks: Blocks<T, Complete>,
        duplicates: Duplicates,
    ) -> Result<Cached<T>, Rejected<Blocks<T, Complete>, RegisterError>> {
        self.register_with(blocks, duplicates, BlockMetadata::default())
    }

    /// The same, with metadata for those of the blocks that are new on all tiers.
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
        let mut core = self.shared.core.lock();
        if let Err(error) = core.check_registration(blocks.identities()) {
            drop(core);
            return Err(Rejected { batch: blocks, error });
        }
        let (mut slots, identities) = blocks.into_inner();
        core.register(T::TIER.index(), &mut slots.ids, &identities, duplicates, metadata);
        drop(core);
        // The slots are Registered now: the batch must not give them back.
        let ids = std::mem::take(&mut slots.ids);
        self.shared.spares.keep_identities(identities);
        Ok(Cached::new(Pinned { shared: Arc::clone(&self.shared), tier: T::TIER, ids, pin: Pin::Use }))
    }

    /// Prepares a transfer of `identities` to this tier: for each block a reserved slot, the block itself where it is
    /// here already, or the transfer that brings it. Parents first. Evicts as [`get_mutable_blocks`](Self::get_mutable_blocks).
    pub fn begin_arrivals(&self, identities: &[BlockIdentity]) -> Result<Arrivals<T>, AllocError> {
        self.begin_arrivals_with(identities, BlockMetadata::default())
    }

    /// The same, with metadata for those of the blocks that are on no tier (of a peer or a volume).
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
        self.shared.core.lock().tiers[T::TIER.index()].status(T::TIER)
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
