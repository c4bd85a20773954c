//! Blocks of G1 where that is a pool of the manager's: allocation, registration, copies.

use super::{Committed, FenceError, KvBlockManager, OffloadError, Owned, fences};
use crate::config::FIRST_GROUP;
use crate::groups::{GroupOnboarding, GroupPrefix};
use crate::onboard::Onboarding;
use crate::park::{ParkRejected, Parked, ParkedGroups};
#[cfg(feature = "worker")]
use kvbm_device::Event;
use kvbm_plan::{GroupId, NamespaceId, Tier};
use kvbm_pool::{
    AllocError, BlockBatch, BlockMetadata, Cached, Complete, Duplicates, G1, Partial, Pinned, Prefix,
    RegisterError, RejectedBatch, Reset, SequenceError as CommitError,
};
use kvbm_tokens::{BlockChain, Namespace};
use std::time::Instant;

impl KvBlockManager<Owned> {
    /// Brings a prefix to G1. Blocks that are there stay where they are.
    pub fn onboard(&self, prefix: Prefix) -> Onboarding {
        Onboarding::start(&self.leader, prefix, None)
    }

    /// Like [`onboard`](Self::onboard), for a request that does not wait beyond `deadline`: what
    /// has arrived by then counts, and copies that have not started never do.
    pub fn onboard_until(&self, prefix: Prefix, deadline: Instant) -> Onboarding {
        Onboarding::start(&self.leader, prefix, Some(deadline))
    }

    /// Brings a prefix of all cache groups to G1. Blocks that are there stay where they are.
    pub fn onboard_groups(&self, prefix: GroupPrefix) -> GroupOnboarding {
        GroupOnboarding::start(&self.leader, prefix)
    }

    /// `n` blocks of G1 to compute into, all or none, evicting what nobody uses. Never waits for a
    /// transfer. They are for sequences of the manager's namespace; where tenants have shares, ask
    /// for those of another one with [`allocate_in`](Self::allocate_in).
    ///
    /// # Errors
    /// [`AllocError`] says what holds the blocks.
    pub fn allocate(&self, n: usize) -> Result<BlockBatch<G1, Reset>, AllocError> {
        let namespace = NamespaceId::from(self.hasher.tag());
        self.leader.allocate(namespace, n)
    }

    /// Like [`allocate`](Self::allocate), for blocks of another namespace. They count for its
    /// tenant from now on. A tenant that is over its share with them gets what is free and what
    /// tenants have beyond their shares, itself above all. It gets nothing of a tenant that is
    /// within.
    ///
    /// # Errors
    /// [`AllocError`] says what holds the blocks, and whether it is for the share.
    pub fn allocate_in(&self, namespace: &Namespace, n: usize) -> Result<BlockBatch<G1, Reset>, AllocError> {
        self.leader.allocate(NamespaceId::from(namespace.tag()), n)
    }

    /// Says that `blocks` hold consecutive blocks of `sequence`, the first of them at position
    /// `first`. What `sequence` fills comes back complete, the rest as it is.
    ///
    /// # Errors
    /// The batch comes back where not even its first block is full.
    pub fn commit<'a>(
        &self,
        blocks: BlockBatch<G1, Reset>,
        sequence: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<Committed, RejectedBatch<BlockBatch<G1, Reset>, CommitError>> {
        self.commit_group(FIRST_GROUP, blocks, sequence, first)
    }

    /// As [`commit`](Self::commit), for blocks of a cache group. Blocks of a group with a window or
    /// state may begin anywhere in the sequence: see [`kept_blocks`](Self::kept_blocks).
    ///
    /// # Errors
    /// The batch comes back where not even its first block is full. A group that there is not shows
    /// when the blocks are registered.
    pub fn commit_group<'a>(
        &self,
        group: GroupId,
        blocks: BlockBatch<G1, Reset>,
        sequence: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<Committed, RejectedBatch<BlockBatch<G1, Reset>, CommitError>> {
        let chain = sequence.into();
        let namespace = NamespaceId::from(chain.namespace());
        let position = u32::try_from(first).unwrap_or(u32::MAX);
        let partial = match blocks.init_sequence(namespace, group, position) {
            Ok(partial) => partial,
            Err(RejectedBatch { batch, error }) => return Err(RejectedBatch { batch, error }),
        };
        let committed = partial.commit(chain);
        if let Ok((done, _)) = &committed {
            self.events.note(&chain, first, done.len());
        }
        committed.map_err(|RejectedBatch { batch, error }| RejectedBatch { batch: batch.into_reset(), error })
    }

    /// Makes computed blocks visible to everybody and starts their offload. A block that another
    /// request registered in the meantime is taken instead of ours.
    ///
    /// Speculative decoding registers what was accepted and nothing else:
    /// [`TokenSequence::roll_back`](crate::TokenSequence::roll_back) takes rejected tokens off, and
    /// what `commit` then leaves over goes back to the pool with its bytes.
    ///
    /// ```
    /// # use kvbm::config::{Blocks, ModelConfig};
    /// # use kvbm::{KvBlockManager, Namespace, Owned};
    /// # let model = ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() };
    /// # let manager = KvBlockManager::<Owned>::builder()
    /// #     .model(model).namespace(Namespace::new("llama-3-8b")).device(Blocks(8)).build()?;
    /// let mut tokens = manager.sequence(&[7; 20], b"")?; // 16 tokens a block: one is full
    /// tokens.add_tokens(&[8; 30]); // drafted: three blocks would be full
    /// let fresh = manager.allocate(tokens.len().div_ceil(16))?;
    /// // ... the engine computes the draft into `fresh`; the target model takes 13 of its 30 tokens ...
    /// tokens.roll_back(17)?;
    /// let (accepted, rest) = manager.commit(fresh, &tokens, 0)?;
    /// assert_eq!((accepted.len(), rest.len()), (2, 2));
    /// drop(rest); // drafted into, not full: free again
    /// drop(manager.register(accepted)?);
    /// assert_eq!(manager.match_prefix(&tokens).len(), 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The batch comes back with the reason: [`RegisterError::Lost`] where it was allocated before
    /// a worker lost its memory ([`rank_lost`](Self::rank_lost)).
    pub fn register(
        &self,
        blocks: BlockBatch<G1, Complete>,
    ) -> Result<Cached<G1>, RejectedBatch<BlockBatch<G1, Complete>, RegisterError>> {
        self.register_with(blocks, BlockMetadata::default())
    }

    /// The same, with a priority for those of the blocks that are on no tier yet: the larger, the
    /// longer they stay, on every tier.
    ///
    /// # Errors
    /// The batch comes back with the reason.
    pub fn register_with(
        &self,
        blocks: BlockBatch<G1, Complete>,
        metadata: BlockMetadata,
    ) -> Result<Cached<G1>, RejectedBatch<BlockBatch<G1, Complete>, RegisterError>> {
        self.events.make_room();
        let pool = self.leader.registry.pool::<G1>();
        let cached = pool.register_with(blocks, Duplicates::Reuse, metadata).inspect_err(|rejected| {
            if let RegisterError::Lost(lost) = rejected.error {
                self.leader.transfers.count_lost(lost);
            }
        })?;
        self.leader.offload.registered(&cached.clone().erase(), None);
        Ok(cached)
    }

    /// Copies blocks to the next tier in the background, now rather than when a trigger says so:
    /// `&Cached<G1>` to G2 (to G3 where there is no host memory), `&Cached<G2>` to G3 or to a
    /// volume (G4). Ancestors that are missing there go first.
    ///
    /// # Errors
    /// [`OffloadError`]; nothing was started.
    pub fn offload(&self, blocks: &Pinned, to: Tier) -> Result<(), OffloadError> {
        self.offload_pinned(blocks, to)
    }

    /// Moves a sequence's unregistered blocks to G2 and frees their G1 slots. Waits at most the
    /// transfer deadline.
    ///
    /// # Errors
    /// The blocks come back with the reason: [`ParkError::Lost`](crate::ParkError::Lost) where
    /// G1 lost what it held since they were allocated.
    pub fn park(
        &self,
        blocks: BlockBatch<G1, Partial>,
    ) -> Result<Parked, ParkRejected<BlockBatch<G1, Partial>>> {
        Parked::of_batch(&self.leader, blocks)
    }

    /// Brings parked blocks back to G1, where their sequence goes on. Waits at most the transfer
    /// deadline.
    ///
    /// # Errors
    /// The blocks stay parked, and come back with the reason:
    /// [`ParkError::Lost`](crate::ParkError::Lost) where G2 lost what it held since they were
    /// parked.
    pub fn resume(&self, parked: Parked) -> Result<BlockBatch<G1, Partial>, ParkRejected<Parked>> {
        parked.into_batch(&self.leader)
    }

    /// As [`park`](Self::park), for a request with private blocks in several cache groups: all
    /// batches are parked or none is. A group may have several batches, or none. All belong to one
    /// namespace.
    ///
    /// # Errors
    /// As of `park`: all batches come back, with the reason.
    pub fn park_groups(
        &self,
        batches: Vec<BlockBatch<G1, Partial>>,
    ) -> Result<ParkedGroups, ParkRejected<Vec<BlockBatch<G1, Partial>>>> {
        ParkedGroups::of_batches(&self.leader, batches)
    }

    /// As [`resume`](Self::resume), for the batches of several cache groups: all come back, in the
    /// order in which they were parked, or none does.
    ///
    /// # Errors
    /// As of `resume`: all batches stay parked, and come back with the reason.
    pub fn resume_groups(
        &self,
        parked: ParkedGroups,
    ) -> Result<Vec<BlockBatch<G1, Partial>>, ParkRejected<ParkedGroups>> {
        parked.into_batches(&self.leader)
    }

    /// Everything that the engine has submitted to its streams so far lies before `events`, one per
    /// rank in order. Plans that touch G1 start only after the last ones handed over: blocks are
    /// read after the engine wrote them and overwritten after the engine read them. An engine that
    /// orders its work otherwise (or waits for its streams before it calls) need not call this.
    ///
    /// # Errors
    /// Not one event for each rank, or the workers are in other processes: nothing changed.
    #[cfg(feature = "worker")]
    pub fn fence(&self, events: &[Event]) -> Result<(), FenceError> {
        let fence = fences::of_events(self, events)?;
        self.leader.transfers.set_fence(fence);
        Ok(())
    }

    /// Like `fence`, for workers in other processes: every rank's worker knows its device event
    /// under `number`, or will know it. Plans that touch G1 wait for it there.
    ///
    /// # Errors
    /// A number that is not above all earlier ones, or the workers are in this process: nothing
    /// changed.
    pub fn fence_at(&self, number: u64) -> Result<(), FenceError> {
        let fence = fences::numbered(self, number)?;
        self.leader.transfers.set_fence(fence);
        Ok(())
    }
}
