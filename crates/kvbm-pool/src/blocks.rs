//! Exclusive batches: blocks that only their owner can see.

use crate::block_state::{BatchPosition, BatchState, BlockState, BlockTrigger, Complete, Partial, Reset};
use crate::core::shares::Claim;
use crate::error::{AllocError, RejectedBatch, SequenceError};
use crate::losses::Losses;
use crate::shared::RegistryState;
use crate::sync::Arc;
use crate::tier::TierTag;
use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId};
use kvbm_tokens::BlockChain;
use std::fmt;
use std::marker::PhantomData;

/// Slots in exclusive use; they are free again when this is dropped.
pub(crate) struct HeldSlots {
    pub shared: Arc<RegistryState>,
    pub tier: usize,
    pub ids: Vec<BlockId>,
    /// For whom they were allocated.
    pub claim: Claim,
    /// When they were allocated.
    pub losses: Losses,
}

/// The time fits beside the claim.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<HeldSlots>() == 48);

impl HeldSlots {
    /// Cuts them in two at `at` (all stay here where `at` is beyond the end).
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let at = at.min(self.ids.len());
        let ids = self.ids.split_off(at);
        let Self { ref shared, tier, claim, losses, .. } = *self;
        Self { shared: Arc::clone(shared), tier, ids, claim, losses }
    }

    /// They will be blocks of a namespace, and so its tenant's.
    fn claim_for(&mut self, namespace: NamespaceId) {
        if self.shared.has_tenants && !self.ids.is_empty() {
            let Self { shared, tier, ids, claim, .. } = self;
            shared.store.lock().tenants.claim_for(*tier, claim, namespace, ids.len());
        }
    }
}

impl Drop for HeldSlots {
    fn drop(&mut self) {
        if !self.ids.is_empty() {
            let mut hold = self.shared.store.lock();
            hold.tenants.let_go(self.tier, self.claim, self.ids.len());
            hold.tiers[self.tier].give_back(&self.ids);
        }
        self.shared.vectors.keep_ids(std::mem::take(&mut self.ids));
    }
}

/// Blocks of one tier in one state, owned exclusively. Dropping it returns them to Reset and to the
/// pool.
///
/// The state is part of the type: a transition that is not in [`TRANSITIONS`](crate::TRANSITIONS)
/// does not compile.
///
/// ```compile_fail
/// # use kvbm_pool::{BlockBatch, BlockPool, Duplicates, G1, Partial};
/// fn register_unfinished(pool: &BlockPool<G1>, blocks: BlockBatch<G1, Partial>) {
///     let _ = pool.register(blocks, Duplicates::Reuse);
/// }
/// ```
///
/// ```compile_fail
/// # use kvbm_pool::{BlockBatch, BlockPool, Complete, Duplicates, G1, G2};
/// fn register_on_another_tier(pool: &BlockPool<G1>, blocks: BlockBatch<G2, Complete>) {
///     let _ = pool.register(blocks, Duplicates::Reuse);
/// }
/// ```
///
/// ```compile_fail
/// # use kvbm_plan::{GroupId, NamespaceId};
/// # use kvbm_pool::{BlockBatch, Complete, G1};
/// fn use_again(blocks: BlockBatch<G1, Complete>) {
///     let _ = blocks.init_sequence(NamespaceId(0), GroupId(0), 0);
/// }
/// ```
#[must_use = "dropping a batch returns its blocks to the pool"]
pub struct BlockBatch<T: TierTag, S: BatchState> {
    slots: HeldSlots,
    content: S::Content,
    types: PhantomData<fn() -> (T, S)>,
}

/// The reference's name for blocks that their owner may write.
pub type MutableBlock<T, S = Reset> = BlockBatch<T, S>;

impl<T: TierTag, S: BatchState> BlockBatch<T, S> {
    pub(crate) fn new(slots: HeldSlots, content: S::Content) -> Self {
        Self { slots, content, types: PhantomData }
    }

    pub(crate) fn into_inner(self) -> (HeldSlots, S::Content) {
        (self.slots, self.content)
    }

    pub(crate) fn belongs_to(&self, shared: &Arc<RegistryState>) -> bool {
        Arc::ptr_eq(&self.slots.shared, shared)
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.slots.ids.len()
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.slots.ids.is_empty()
    }

    /// The blocks' slots on their tier.
    pub fn block_ids(&self) -> &[BlockId] {
        &self.slots.ids
    }

    /// When the blocks were allocated.
    pub const fn losses(&self) -> Losses {
        self.slots.losses
    }

    /// Whether the tier lost what it held since they were allocated
    /// ([`Registry::lose`](crate::Registry::lose)): what is in them is gone, and they cannot be
    /// registered. Drop them, and allocate others.
    pub fn is_lost(&self) -> bool {
        self.slots.shared.store.losses.is_lost(self.slots.tier, self.slots.losses)
    }

    /// State of every block in the batch.
    pub const fn state(&self) -> BlockState {
        S::STATE
    }
}

impl<T: TierTag> BlockBatch<T, Reset> {
    /// `n` blocks of `T`, for a namespace where one is given.
    pub(crate) fn allocate(
        shared: &Arc<RegistryState>,
        n: usize,
        namespace: Option<NamespaceId>,
    ) -> Result<Self, AllocError> {
        let most = shared.capacity.get(T::TIER.index()).map_or(0, |&blocks| blocks as usize);
        let ids = shared.vectors.take_ids(n.min(most));
        let claim = namespace.and_then(|namespace| shared.claim_of(namespace));
        let losses = shared.store.losses.now();
        let mut slots = HeldSlots { shared: Arc::clone(shared), tier: T::TIER.index(), ids, claim, losses };
        shared.allocate_into(T::TIER, n, claim, &mut slots.ids)?;
        Ok(Self::new(slots, ()))
    }

    /// Cuts off the blocks from `at` on; none where `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        Self::new(self.slots.split_off(at), ())
    }

    /// The blocks will hold consecutive blocks of a sequence, the first of them at `position`.
    /// Moves them to Partial.
    ///
    /// # Errors
    /// The batch comes back where its positions do not fit in 32 bits ([`SequenceError::TooLong`]).
    pub fn init_sequence(
        self,
        namespace: NamespaceId,
        group: GroupId,
        position: u32,
    ) -> Result<BlockBatch<T, Partial>, RejectedBatch<Self, SequenceError>> {
        if let Err(error) = self.state().after(BlockTrigger::InitSequence) {
            return Err(RejectedBatch { batch: self, error: error.into() });
        }
        let blocks = self.len();
        if u64::from(position) + blocks as u64 > u64::from(u32::MAX) {
            return Err(RejectedBatch { batch: self, error: SequenceError::TooLong { position, blocks } });
        }
        let (mut slots, ()) = self.into_inner();
        slots.claim_for(namespace);
        Ok(BlockBatch::new(slots, BatchPosition { namespace, group, position }))
    }
}

impl<T: TierTag> BlockBatch<T, Partial> {
    /// Where the batch lies in its sequence.
    pub const fn origin(&self) -> BatchPosition {
        self.content
    }

    /// Cuts off the blocks from `at` on; none where `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        let slots = self.slots.split_off(at);
        let position = self.content.position + self.len() as u32;
        Self::new(slots, BatchPosition { position, ..self.content })
    }

    /// Moves the blocks that `sequence` fills to Complete and gives the rest back as they are. The
    /// chain is that of the whole sequence (`&TokenSequence`, `&ExternalSequence` or
    /// [`BlockChain::of_hashes`]).
    ///
    /// # Errors
    /// [`SequenceError::NotFull`] where not even the first block is full.
    pub fn commit<'a>(
        mut self,
        sequence: impl Into<BlockChain<'a>>,
    ) -> Result<(BlockBatch<T, Complete>, Self), RejectedBatch<Self, SequenceError>> {
        let chain = sequence.into();
        match self.committed(chain) {
            Ok(identities) => {
                let rest = self.split_off(identities.len());
                Ok((BlockBatch::new(self.into_inner().0, identities), rest))
            }
            Err(error) => Err(RejectedBatch { batch: self, error }),
        }
    }

    /// Identities of the blocks that `chain` fills.
    fn committed(&self, chain: BlockChain<'_>) -> Result<Vec<BlockIdentity>, SequenceError> {
        self.state().after(BlockTrigger::Commit)?;
        let BatchPosition { namespace, group, position } = self.content;
        let first = chain.first_position();
        let Some(skip) = position.checked_sub(first) else {
            return Err(SequenceError::ChainStart { position, first });
        };
        let skip = skip as usize;
        if skip >= chain.len() && !self.is_empty() {
            return Err(SequenceError::NotFull { position, full: first as usize + chain.len() });
        }
        let end = skip.saturating_add(self.len());
        let links = chain.slice(skip..end);
        let identity = |link: kvbm_tokens::ChainLink| BlockIdentity {
            namespace,
            group,
            hash: link.hash,
            parent: link.parent,
            position: link.position,
        };
        let mut identities = self.slots.shared.vectors.take_identities(links.len());
        identities.extend(links.iter().map(identity));
        Ok(identities)
    }

    /// Gives the sequence up: back to Reset.
    pub fn into_reset(self) -> BlockBatch<T, Reset> {
        BlockBatch::new(self.into_inner().0, ())
    }
}

impl<T: TierTag> BlockBatch<T, Complete> {
    /// What the blocks hold, in order.
    pub fn identities(&self) -> &[BlockIdentity] {
        &self.content
    }

    /// Cuts off the blocks from `at` on; none where `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        let slots = self.slots.split_off(at);
        let content = self.content.split_off(self.len());
        Self::new(slots, content)
    }

    /// Invalidates the blocks (rejected tokens of a speculation, a failed step): back to Reset.
    pub fn into_reset(self) -> BlockBatch<T, Reset> {
        BlockBatch::new(self.into_inner().0, ())
    }
}

impl<T: TierTag, S: BatchState> fmt::Debug for BlockBatch<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockBatch<{}, {}>{:?}", T::TIER, S::STATE, self.slots.ids)
    }
}
