//! The calls of an engine that owns G1.

use super::offload::{Source, When};
use super::{
    Engine, EngineError, EngineOnboarding, Fence, LoadOptions, NoSuchBlock, OffloadOptions, OffloadStarted,
    StillBusy, Tickets,
};
use crate::config::FIRST_GROUP;
use crate::manager::{FenceError, KvBlockManager, OffloadError, fences};
use crate::park::{ParkRejected, Parked, ParkedGroups};
use kvbm_plan::{BlockId, Command, Failure, FailureKind, GroupId, Tier};
use kvbm_pool::{BatchPosition, Pinned, Prefix};
use kvbm_tokens::BlockChain;
#[cfg(feature = "worker")]
use std::collections::HashSet;
#[cfg(feature = "worker")]
use std::sync::Arc;
use std::time::Instant;

impl KvBlockManager<Engine> {
    /// Names a point behind everything that the engine has submitted to its streams so far:
    /// `events`, one per rank in order. An [`offload`](Self::offload) of blocks that the engine has
    /// just computed waits for it.
    ///
    /// # Errors
    /// Not one event for each rank, or the workers are in other processes.
    #[cfg(feature = "worker")]
    pub fn fence(&self, events: &[kvbm_device::Event]) -> Result<Fence, FenceError> {
        fences::of_events(self, events)
    }

    /// Like `fence`, for workers in other processes: every rank's worker knows its device event
    /// under `number`, or will know it.
    ///
    /// # Errors
    /// A number that is not above all earlier ones, or the workers are in this process.
    pub fn fence_at(&self, number: u64) -> Result<Fence, FenceError> {
        fences::numbered(self, number)
    }

    /// Host memory that other processes map, by rank, and the blocks of G2 in it, for
    /// [`Builder::keep_host`](crate::Builder::keep_host) of another process. Call it when this
    /// manager was [shut down](Self::shutdown): what changes later is not in it.
    #[cfg(feature = "worker")]
    pub fn kept_host(&self) -> Vec<crate::KeptHost> {
        let (blocks, _) = self.leader.registry.snapshot(Tier::G2);
        let held: HashSet<_> = blocks.into_iter().collect();
        let mut ranks: Vec<_> = self.workers.iter().filter_map(crate::Worker::kept_host).collect();
        for rank in &mut ranks {
            rank.contents.retain(|content| held.contains(&(content.block, content.identity)));
        }
        ranks
    }

    /// The engine has no more use for the content of these blocks. Copies under way are discarded
    /// when they are over. The blocks that the hardware still touches are returned: wait with
    /// [`before_reuse`](Self::before_reuse).
    ///
    /// # Errors
    /// An id beyond the registered memory.
    pub fn released(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NoSuchBlock> {
        self.g1.blocks.check(ids)?;
        self.g1.blocks.invalidate(ids, self.leader.registry.losses());
        Ok(self.g1.blocks.busy(ids))
    }

    /// Makes sure that these blocks can be overwritten: copies under way are discarded, and the
    /// call returns when the hardware no longer touches the blocks. What is in them from now on is
    /// what the engine computes after this: where G1 was lost, they can be offloaded again.
    ///
    /// # Errors
    /// What is still busy at `deadline`; an id beyond the registered memory is never busy.
    pub fn before_reuse(&self, ids: &[BlockId], deadline: Instant) -> Result<(), StillBusy> {
        self.g1.blocks.invalidate(ids, self.leader.registry.losses());
        // Offloads all of whose sources are among these: what has not started never will.
        let reason = Failure::new(FailureKind::Cancelled, "the engine reuses the block");
        let reused = ids.iter().copied().collect();
        self.leader.transfers.cancel_reads(Tier::G1, &reused, &reason);
        match self.g1.blocks.wait_idle(ids, deadline) {
            busy if busy.is_empty() => Ok(()),
            blocks => Err(StillBusy { blocks }),
        }
    }

    /// Those of `ids` that a copy may still read or write.
    ///
    /// # Errors
    /// An id beyond the registered memory.
    pub fn busy(&self, ids: &[BlockId]) -> Result<Vec<BlockId>, NoSuchBlock> {
        self.g1.blocks.check(ids)?;
        Ok(self.g1.blocks.busy(ids))
    }

    /// Copies a prefix into engine blocks: listed block `i` of the prefix into `ids[i]`. The copy
    /// waits for `after`, where the engine may still read what is in these blocks now. They are the
    /// transfer's until it is over, also where nobody waits for it any more or it was late: see
    /// [`busy`](Self::busy). What came from below G2 is copied to G2 too.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn onboard(
        &self,
        prefix: Prefix,
        ids: &[BlockId],
        after: Option<Fence>,
    ) -> Result<EngineOnboarding, EngineError> {
        self.onboard_with(prefix, ids, LoadOptions { after, ..LoadOptions::default() })
    }

    /// Like [`onboard`](Self::onboard), with what [`LoadOptions`] say.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn onboard_with(
        &self,
        prefix: Prefix,
        ids: &[BlockId],
        options: LoadOptions,
    ) -> Result<EngineOnboarding, EngineError> {
        self.g1.start_onboard(&self.leader, prefix, ids, options, None)
    }

    /// Copies engine blocks to G2 in the background. `ids[i]` holds block `first + i` of `chain`,
    /// where `chain` begins at the sequence's first block and `first` is the position of the first
    /// id.
    ///
    /// The blocks must hold their final bytes once the events of `after` are complete, or now where
    /// there is none. A block whose content may have changed before its copy was over
    /// ([`released`](Self::released), [`before_reuse`](Self::before_reuse), an onboard into it) is
    /// not made visible.
    ///
    /// Offering blocks again is cheap: what G2 has counts as present. Where a block was refused
    /// because the one before it is missing, offer the sequence again from its first block.
    ///
    /// Where a worker starts anew, or a rank is given up, what G1 held is gone
    /// ([`rank_lost`](Self::rank_lost)). Blocks are taken again that were given to something since
    /// ([`before_reuse`](Self::before_reuse), [`released`](Self::released), an onboard).
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn offload<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        after: Option<Fence>,
    ) -> Result<OffloadStarted, EngineError> {
        self.offload_group(FIRST_GROUP, ids, chain, first, after)
    }

    /// As [`offload`](Self::offload), with what [`OffloadOptions`] say.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started. Blocks of a group that there is not are refused.
    pub fn offload_with<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        options: OffloadOptions,
    ) -> Result<OffloadStarted, EngineError> {
        let when = options.after.map_or(When::Now, When::After);
        let source = Source { ids, chain: chain.into(), first };
        self.g1.start_offload(&self.leader, &self.events, source, when, options)
    }

    /// Copies registered blocks down in the background, now rather than when a trigger says so:
    /// blocks of G2 to G3 or to a volume (G4). Blocks before them that are missing there go first.
    /// The parts of a [`Prefix`](kvbm_pool::Prefix) are pinned blocks of a tier
    /// ([`into_parts`](kvbm_pool::Prefix::into_parts)).
    ///
    /// # Errors
    /// [`OffloadError`]; nothing was started.
    pub fn offload_down(&self, blocks: &Pinned, to: Tier) -> Result<(), OffloadError> {
        self.offload_pinned(blocks, to)
    }

    /// As [`offload`](Self::offload), of blocks of a cache group. Blocks of a group with a window
    /// or state may begin anywhere in the sequence: see [`kept_blocks`](Self::kept_blocks).
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started. Blocks of a group that there is not are refused.
    pub fn offload_group<'a>(
        &self,
        group: GroupId,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
        after: Option<Fence>,
    ) -> Result<OffloadStarted, EngineError> {
        self.offload_with(ids, chain, first, OffloadOptions { group, after, ..OffloadOptions::default() })
    }

    /// Like [`offload`](Self::offload), for blocks that the running iteration computes. Each layer
    /// is copied while the next one is computed, as soon as [`layer_done`](Self::layer_done) says
    /// that it is written. All are copied when [`step`](Self::step) ends the iteration. The copies
    /// take `transfer.layer_steps` steps at most. Where copying takes less time than the plans for
    /// the layers, they take one, when the last layer is written.
    ///
    /// The blocks count as read from now on: whatever becomes of the iteration, ask
    /// [`before_reuse`](Self::before_reuse) before they are given to something else.
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn offload_by_layer<'a>(
        &self,
        ids: &[BlockId],
        chain: impl Into<BlockChain<'a>>,
        first: usize,
    ) -> Result<OffloadStarted, EngineError> {
        let when = When::Computed(self.running_iteration());
        let source = Source { ids, chain: chain.into(), first };
        self.g1.start_offload(&self.leader, &self.events, source, when, OffloadOptions::default())
    }

    /// The running iteration has written `layer` of all its blocks on every rank's device: not
    /// submitted, written. Layers count from 0, in the order in which they are computed. Opens the
    /// gates of copies that wait for it.
    pub fn layer_done(&self, layer: u32) {
        // A worker that cannot be reached fails its plans by itself.
        let _not_sent = self.leader.ranks.broadcast(&self.written(layer));
    }

    /// As [`layer_done`](Self::layer_done), when `event` completes: the engine has submitted
    /// `layer` to the only rank's stream, and recorded the event behind it. Call it before
    /// [`step`](Self::step). Where the event fails, only the end of the iteration opens the gates.
    #[cfg(feature = "worker")]
    pub fn layer_done_after(&self, layer: u32, event: &kvbm_device::Event) {
        let (ranks, written) = (Arc::downgrade(&self.leader.ranks), self.written(layer));
        event.on_complete(move |result| {
            if let (Ok(()), Some(ranks)) = (result, ranks.upgrade()) {
                let _not_sent = ranks.broadcast(&written);
            }
        });
    }

    /// What tells a rank that the running iteration has written a layer.
    fn written(&self, layer: u32) -> Command {
        Command::Advance { iteration: self.running_iteration(), layer: Some(layer) }
    }

    /// Whether a load of `blocks` blocks from G2 that goes layer by layer hides behind the
    /// computing of `tokens` tokens: with the blocks that wait for the same path it takes no longer
    /// than these. So an engine may begin its step at once, and hardly waits for a layer. `false`
    /// where nobody knows: too little came from G2 lately, or neither
    /// [`prefilled`](Self::prefilled) nor `policy.prefill_tokens_per_s` says what computing takes.
    /// `false` also where such blocks go whole.
    pub fn hides_load(&self, blocks: usize, tokens: u64) -> bool {
        self.leader.transfers.hides_load(blocks, tokens)
    }

    /// The number that [`step`](Self::step) will give to the iteration when it is over.
    fn running_iteration(&self) -> u64 {
        self.iteration().saturating_add(1)
    }

    /// Copies blocks to G2 as they are, for a request that is preempted: blocks that are not whole,
    /// or that nobody else may find. They belong to `origin`: the namespace counts for its tenant's
    /// share. The copies wait for `after`, where the blocks hold their bytes only then. Waits at
    /// most the transfer deadline. Then nothing reads the blocks, and they may be reused.
    ///
    /// Whole blocks that others may use are better given to [`offload`](Self::offload).
    ///
    /// # Errors
    /// See [`EngineError`]; [`EngineError::Private`] where the copies failed, were late
    /// ([`busy`](Self::busy) says which blocks are still read), or the blocks were reused
    /// meanwhile. The blocks are what they were.
    pub fn park(
        &self,
        ids: &[BlockId],
        origin: BatchPosition,
        after: Option<Fence>,
    ) -> Result<Parked, EngineError> {
        self.g1.park(&self.leader, ids, origin, after)
    }

    /// Copies parked blocks into the engine's blocks `ids`, one for each, in order. The copies wait
    /// for `after`, where the engine may still read what is in them now. Waits at most the transfer
    /// deadline.
    ///
    /// # Errors
    /// The blocks stay parked, and come back with the reason: see [`EngineError`]. After
    /// [`EngineError::Private`] ask [`busy`](Self::busy) for the blocks that a late copy may still
    /// write.
    pub fn resume(
        &self,
        parked: Parked,
        ids: &[BlockId],
        after: Option<Fence>,
    ) -> Result<(), ParkRejected<Parked, EngineError>> {
        self.g1
            .load_parked(&self.leader, parked.as_groups(), &[ids], after)
            .map_err(|error| ParkRejected { blocks: Some(parked), error })
    }

    /// As [`park`](Self::park), for a request with private blocks in several cache groups: each of
    /// `batches` has a position and the blocks from there on. All are parked or none is. A group
    /// may have several batches, or none. All positions are in one namespace.
    ///
    /// # Errors
    /// As of `park`; every block of every group is what it was.
    pub fn park_groups(
        &self,
        batches: &[(BatchPosition, &[BlockId])],
        after: Option<Fence>,
    ) -> Result<ParkedGroups, EngineError> {
        self.g1.park_groups(&self.leader, batches, after)
    }

    /// As [`resume`](Self::resume), for blocks of several cache groups: `ids[i]` has a block for
    /// each block of batch `i`. All arrive or none counts.
    ///
    /// # Errors
    /// As of `resume`; all batches stay parked.
    pub fn resume_groups(
        &self,
        parked: ParkedGroups,
        ids: &[&[BlockId]],
        after: Option<Fence>,
    ) -> Result<(), ParkRejected<ParkedGroups, EngineError>> {
        self.g1
            .load_parked(&self.leader, &parked, ids, after)
            .map_err(|error| ParkRejected { blocks: Some(parked), error })
    }

    /// Tickets of requests, for schedulers that ask before they have room.
    pub fn tickets(&self) -> Tickets<'_> {
        Tickets(self)
    }
}
