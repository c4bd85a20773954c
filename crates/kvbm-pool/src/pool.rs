//! A typed view of one tier.

use crate::arrivals::Arrivals;
use crate::block_state::{BatchState, BlockTrigger, Complete, Reset};
use crate::blocks::BlockBatch;
use crate::core::lookup::{FoundPrefix, PrefixLookup};
use crate::core::register::RegisterBatch;
use crate::core::registered::Reference;
use crate::core::state::Core;
use crate::error::{AllocError, RegisterError, RejectedBatch};
use crate::metadata::{BlockMetadata, Duplicates};
use crate::pinned::{Cached, Pinned};
use crate::shared::RegistryState;
use crate::status::TierStatus;
use crate::sync::Arc;
use crate::tier::{TierMask, TierTag};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};
use std::fmt;
use std::marker::PhantomData;

/// One tier of a [`Registry`](crate::Registry). Cheap to clone.
pub struct BlockPool<T: TierTag> {
    pub(crate) shared: Arc<RegistryState>,
    tier: PhantomData<fn() -> T>,
}

impl<T: TierTag> BlockPool<T> {
    pub(crate) fn new(shared: Arc<RegistryState>) -> Self {
        Self { shared, tier: PhantomData }
    }

    /// Blocks to write, all or none. Evicts unpinned blocks where too few are free; never waits for
    /// a transfer. Where tenants have shares, these count for no tenant before they are registered:
    /// ask with [`get_mutable_blocks_for`](Self::get_mutable_blocks_for).
    ///
    /// # Errors
    /// Fewer than `n` blocks are free or may be evicted: none is taken. Says where the others are.
    pub fn get_mutable_blocks(&self, n: usize) -> Result<BlockBatch<T, Reset>, AllocError> {
        BlockBatch::allocate(&self.shared, n, None)
    }

    /// The same, for blocks of `namespace`: they count for its tenant from now on. A tenant that is
    /// over its share with them gets what is free, and blocks of tenants that are over theirs,
    /// itself above all. It never gets those of one that is not.
    ///
    /// # Errors
    /// As [`get_mutable_blocks`](Self::get_mutable_blocks), also where there would be room but for
    /// other tenants' shares ([`AllocError::over_share`]).
    pub fn get_mutable_blocks_for(
        &self,
        namespace: NamespaceId,
        n: usize,
    ) -> Result<BlockBatch<T, Reset>, AllocError> {
        BlockBatch::allocate(&self.shared, n, Some(namespace))
    }

    /// The longest useful prefix of `hashes` that is on this tier, pinned. For a group that is not
    /// Full only the blocks at its end that are needed (see
    /// [`Registry::match_prefix`](crate::Registry::match_prefix)).
    pub fn match_sequence_hashes(&self, group: GroupId, hashes: &[SequenceHash]) -> Cached<T> {
        let lookup = PrefixLookup::new(group, hashes, TierMask::only(T::TIER));
        self.matched(hashes.len(), |core, ids| lookup.pin(core, |block| ids.push(block.block)))
    }

    /// The blocks from the first of `hashes` on that are on this tier, pinned, whatever the kind of
    /// the group.
    pub fn match_run(&self, group: GroupId, hashes: &[SequenceHash]) -> Cached<T> {
        let lookup = PrefixLookup::new(group, hashes, TierMask::only(T::TIER));
        self.matched(hashes.len(), |core, ids| lookup.pin_run(core, |block| ids.push(block.block)))
    }

    /// What `pin` has pinned on this tier, `most` blocks at most.
    fn matched(
        &self,
        most: usize,
        pin: impl FnOnce(&mut Core, &mut Vec<BlockId>) -> FoundPrefix,
    ) -> Cached<T> {
        // Before anything is found: what is lost meanwhile counts as found before.
        let losses = self.shared.store.losses.now();
        let mut ids = self.shared.vectors.take_ids(most);
        pin(&mut self.shared.store.lock(), &mut ids);
        Cached::new(Pinned {
            shared: Arc::clone(&self.shared),
            tier: T::TIER,
            ids,
            reference: Reference::Use,
            losses,
        })
    }

    /// Makes Complete blocks visible, all or none. The answer pins one block for each given, in
    /// order.
    ///
    /// # Errors
    /// The batch comes back with the reason. [`RegisterError::Lost`] where the tier lost what it
    /// held since the batch was allocated.
    pub fn register(
        &self,
        blocks: BlockBatch<T, Complete>,
        duplicates: Duplicates,
    ) -> Result<Cached<T>, RejectedBatch<BlockBatch<T, Complete>, RegisterError>> {
        self.register_with(blocks, duplicates, BlockMetadata::default())
    }

    /// The same, with metadata for those of the blocks that are new on all tiers.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn register_with(
        &self,
        blocks: BlockBatch<T, Complete>,
        duplicates: Duplicates,
        metadata: BlockMetadata,
    ) -> Result<Cached<T>, RejectedBatch<BlockBatch<T, Complete>, RegisterError>> {
        debug_assert!(Complete::STATE.after(BlockTrigger::Register).is_ok());
        if !blocks.belongs_to(&self.shared) {
            return Err(RejectedBatch { batch: blocks, error: RegisterError::ForeignBatch });
        }
        let (mut slots, identities) = blocks.into_inner();
        let (claim, losses) = (slots.claim, slots.losses);
        let tier = T::TIER.index();
        let mut hold = self.shared.store.lock();
        // Read under the lock: a loss that is counted later takes these blocks too.
        let is_lost = self.shared.store.losses.is_lost(tier, losses);
        let batch = RegisterBatch { tier, identities: &identities, duplicates, metadata, claim, is_lost };
        let registered = batch.register(&mut hold, &mut slots.ids);
        drop(hold);
        if let Err(error) = registered {
            return Err(RejectedBatch { batch: BlockBatch::new(slots, identities), error });
        }
        // The slots are Registered now: the batch must not give them back.
        let ids = std::mem::take(&mut slots.ids);
        self.shared.vectors.keep_identities(identities);
        let shared = Arc::clone(&self.shared);
        Ok(Cached::new(Pinned { shared, tier: T::TIER, ids, reference: Reference::Use, losses }))
    }

    /// Prepares a transfer of `identities` to this tier: for each block a reserved slot, the block
    /// itself where it is here already, or the transfer that brings it. Parents first. Evicts as
    /// [`get_mutable_blocks`](Self::get_mutable_blocks). Each tenant's blocks are for that tenant:
    /// where one of several gets no room, its blocks are refused and the others' go on.
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
        Arrivals::begin(&self.shared, identities, metadata)
    }

    /// Where the slots are.
    pub fn status(&self) -> TierStatus {
        self.shared.store.lock().status(T::TIER)
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
