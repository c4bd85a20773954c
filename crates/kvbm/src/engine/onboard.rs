//! Bringing a prefix into blocks that the engine names.

use super::generations::{Generations, Hold};
use super::offload::{Content, When};
use super::{Busy, EngineError, Fence, offload, still_the_same};
use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::onboard::PrefixTransfer;
use crate::signal::Signal;
use crate::transfers::{Destination, Handle, Purpose};
use kvbm_plan::{BlockId, Comparison, Failure, FailureKind, Path, Tier, deadline_after};
use kvbm_pool::{Losses, Prefix};
use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// A prefix on its way into engine blocks. Resolves by [`wait`](Self::wait) or as a [`Future`].
///
/// It reports a failure only when no copy can write to its blocks any more: the engine may compute
/// into them at once.
///
/// Dropping it cancels what has not started and detaches what has: the blocks stay busy until the
/// hardware is done ([`KvBlockManager::busy`](crate::KvBlockManager::busy)).
#[must_use = "dropping it cancels the onboard"]
pub struct EngineOnboarding {
    transfer: PrefixTransfer,
    blocks: Arc<Generations>,
    ids: Vec<BlockId>,
    /// What the blocks were when the copies began, in the order of `ids`.
    holds: Vec<Hold>,
    /// Set when no copy writes to the blocks any more.
    over: Arc<Signal>,
    /// The engine gave it up.
    cancelled: bool,
    /// Nothing is written: the blocks are compared.
    is_audit: bool,
}

/// When the copies of a load begin and end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    pub(super) after: Option<Fence>,
    pub(super) until: Option<Instant>,
    pub(super) is_by_layer: bool,
}

impl LoadOptions {
    /// The copies wait for this device event: the engine may still read what is in the blocks.
    #[must_use]
    pub const fn after(self, fence: Fence) -> Self {
        Self { after: Some(fence), ..self }
    }

    /// The request does not wait beyond `deadline`: what has arrived by then counts, and what has
    /// not begun to be copied into its block never is. A copy that has begun is waited for; it
    /// comes from memory and takes milliseconds.
    #[must_use]
    pub const fn until(self, deadline: Instant) -> Self {
        Self { until: Some(deadline), ..self }
    }

    /// What comes from G2 is copied layer by layer, the first layers first:
    /// [`EngineOnboarding::layer_ready`] says when the engine may compute a layer. In at most
    /// `transfer.layer_steps` steps, and at once where that is as fast: where all of it takes less
    /// time than the plans for its layers. What comes from G3 or a volume comes whole.
    #[must_use]
    pub const fn by_layer(self) -> Self {
        Self { is_by_layer: true, ..self }
    }
}

/// A prefix that did not arrive whole: the first `arrived` blocks hold verified bytes, compute the
/// others.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{arrived} of {wanted} blocks arrived: {}", FirstOf(failures))]
pub struct EngineOnboardError {
    /// Blocks from the front that are complete and verified.
    pub arrived: usize,
    /// Blocks asked for.
    pub wanted: usize,
    /// The others.
    pub failures: Vec<BlockFailure>,
    /// Blocks that a late copy may still write: wait with
    /// [`before_reuse`](crate::KvBlockManager::before_reuse) before anything is computed there.
    /// Only a [`wait`](EngineOnboarding::wait) that ended before the copies did names any.
    pub busy: Vec<BlockId>,
}

impl EngineOnboarding {
    /// Starts the transfer of `prefix` into `ids`, as many as it has blocks, or its comparison with
    /// them.
    pub(super) fn start(
        leader: &Arc<Leader>,
        blocks: &Arc<Generations>,
        prefix: Prefix,
        ids: &[BlockId],
        losses: Losses,
        options: LoadOptions,
        compare: Option<Comparison>,
    ) -> Result<Self, EngineError> {
        let transfer = PrefixTransfer::new(leader, prefix);
        let (over, ids, is_audit) = (Arc::new(Signal::default()), ids.to_vec(), compare.is_some());
        let (blocks_of, holds) = (Arc::clone(blocks), Vec::new());
        let mut onboarding =
            Self { transfer, blocks: blocks_of, ids, holds, over, cancelled: false, is_audit };
        let Self { transfer, ids, over, .. } = &mut onboarding;
        let moves: Vec<_> = ids.iter().enumerate().map(|(at, &dst)| transfer.to(at, dst)).collect();
        if moves.is_empty() {
            over.set();
            return Ok(onboarding);
        }
        let (holds, changed, purpose) = if is_audit {
            (blocks.begin_read(ids), "was reused while it was compared", Purpose::Audit)
        } else {
            let changed = "was given to another use while it was written";
            (blocks.begin_write(ids, losses), changed, Purpose::EngineOnboard)
        };
        let holds = holds.map_err(EngineError::Busy)?;
        let (check, written) = (still_the_same(blocks, holds.clone(), changed), holds.clone());
        let busy = Busy { blocks: Arc::clone(blocks), holds, over: Some(Arc::clone(over)) };
        let destination = Destination::Unregistered;
        let mut request = transfer.request(purpose, moves, destination, losses).hold(busy);
        request.check = Some(check);
        if options.is_by_layer {
            request.layers = leader.transfers.layer_steps(Path::G2_G1, request.moves.len(), None);
        }
        request.fence = options.after;
        request.limit = options.until.map(|until| until.saturating_duration_since(kvbm_plan::clock::now()));
        request.compare = compare;
        transfer.handles.push(leader.transfers.start(request));
        onboarding.holds = written;
        Ok(onboarding)
    }

    /// Blocks of the prefix.
    pub fn len(&self) -> usize {
        self.transfer.len()
    }

    /// Whether the prefix is empty.
    pub fn is_empty(&self) -> bool {
        self.transfer.len() == 0
    }

    /// The tag of its plans: `drain_finished` of each rank's worker names them by it. None where
    /// the prefix is empty: then there are no plans.
    pub fn tag(&self) -> Option<u64> {
        self.transfer.handles.first().map(Handle::tag)
    }

    /// Whether `layer` of all blocks is in place, verified as whole blocks are: the engine may
    /// compute with it. `false` where a block failed: then [`wait`](Self::wait) says what arrived,
    /// and what was computed from the others is void. A load that is not
    /// [by layer](LoadOptions::by_layer) has all of its layers at once.
    pub fn layer_ready(&self, layer: u32) -> bool {
        !self.cancelled && self.transfer.handles.iter().all(|handle| handle.has_layer(layer))
    }

    /// Waits until it is known whether `layer` arrives, at most until `deadline`. Whether it has
    /// arrived.
    pub fn wait_layer(&self, layer: u32, deadline: Instant) -> bool {
        self.transfer.handles.iter().for_each(|handle| handle.wait_layer(layer, deadline));
        self.layer_ready(layer)
    }

    /// Whether [`wait`](Self::wait) would return at once: the outcome is known, and no copy writes
    /// to the blocks any more.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done() && self.over.is_set()
    }

    /// Wakes the waker of `context` when [`is_done`](Self::is_done) may have become true.
    pub(super) fn notify(&self, context: &Context<'_>) {
        let _pending = (self.transfer.poll(context), self.over.poll(context));
    }

    /// Waits at most twice the configured transfer deadline: for the outcome, and for the copies
    /// that a failed one left. How many blocks arrived: all.
    ///
    /// # Errors
    /// [`EngineOnboardError`] says how many blocks from the front did arrive.
    pub fn wait(mut self) -> Result<usize, EngineOnboardError> {
        for handle in &self.transfer.handles {
            if let Err(reason) = handle.wait("onboard") {
                // The outcome is not known, so no block counts.
                let wanted = self.len();
                let failures = (0..wanted).filter_map(|at| self.transfer.failed(at, &reason)).collect();
                return Err(EngineOnboardError { arrived: 0, wanted, failures, busy: self.still_busy() });
            }
        }
        self.resolve()
    }

    /// Waits for late copies, and says which of them are not over then.
    fn still_busy(&self) -> Vec<BlockId> {
        let patience = self.transfer.leader.transfers.settings.transfer_deadline;
        if self.over.wait_until(deadline_after(kvbm_plan::clock::now(), patience)) {
            Vec::new()
        } else {
            self.blocks.busy(&self.ids)
        }
    }

    /// Gives the load up: what has not started never will. It is done when no copy writes to its
    /// blocks any more, and no block counts as arrived then.
    pub fn cancel(&mut self) {
        self.cancelled = true;
        let reason = Failure::new(FailureKind::Cancelled, "the engine gave the load up");
        for handle in &mut self.transfer.handles {
            handle.stop(&reason);
        }
    }

    fn resolve(&mut self) -> Result<usize, EngineOnboardError> {
        let wanted = self.len();
        let mut failures = Vec::new();
        for handle in self.transfer.handles.drain(..) {
            handle.with_outcome(|outcome| failures.extend_from_slice(&outcome.failures));
        }
        if self.cancelled {
            return Err(EngineOnboardError { arrived: 0, wanted, failures, busy: self.still_busy() });
        }
        // Not by positions: a chain may begin anywhere, and its blocks may have none.
        let bad: HashSet<_> = failures.iter().map(|failure: &BlockFailure| failure.identity.hash).collect();
        let mut identities = self.transfer.identities.iter();
        let arrived = identities.position(|identity| bad.contains(&identity.hash)).unwrap_or(wanted);
        if self.is_audit {
            let differ = |failure: &&BlockFailure| failure.failure.kind == FailureKind::Differs;
            let compared = wanted - failures.len() + failures.iter().filter(differ).count();
            self.transfer.leader.metrics.audited.add(compared as u64);
        } else {
            self.transfer.leader.count_hits(&self.transfer.prefix, arrived);
            self.promote(arrived);
        }
        if failures.is_empty() {
            return Ok(wanted);
        }
        Err(EngineOnboardError { arrived, wanted, failures, busy: self.still_busy() })
    }

    /// Blocks that came from below G2 are copied to G2 too, unless the configuration says no: the
    /// next request for them does not read the disk again. Where that is refused, they stay where
    /// they were.
    fn promote(&self, arrived: usize) {
        let found = self.transfer.prefix.blocks().iter().take(arrived);
        let lower = found
            .zip(&self.holds)
            .enumerate()
            .filter(|(_, (block, _))| matches!(block.tier, Tier::G3 | Tier::G4))
            // The engine may have given a block to another use before it looked at the outcome.
            .filter(|(_, (_, hold))| self.blocks.is_valid(**hold))
            .map(|(at, (_, hold))| (*hold, self.transfer.identities[at]));
        let (holds, identities): (Vec<_>, Vec<_>) = lower.unzip();
        let ids: Vec<_> = holds.iter().map(|hold| hold.block).collect();
        let leader = &self.transfer.leader;
        let keeps = leader.transfers.settings.keep_loaded && leader.registry.capacity(Tier::G2) > 0;
        if ids.is_empty() || !keeps {
            return;
        }
        let (content, when) = (Content::Written(&holds), When::Now);
        match offload::start(leader, &self.blocks, &ids, &identities, content, when) {
            Ok(started) => tracing::trace!(target: "kvbm", ?started, "onboarded blocks are copied to G2"),
            Err(error) => tracing::debug!(target: "kvbm", %error, "onboarded blocks are not copied to G2"),
        }
    }
}

impl Future for EngineOnboarding {
    type Output = Result<usize, EngineOnboardError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.transfer.poll(context).is_pending() || self.over.poll(context).is_pending() {
            Poll::Pending
        } else {
            Poll::Ready(self.resolve())
        }
    }
}

impl fmt::Debug for EngineOnboarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineOnboarding({} blocks, done: {})", self.len(), self.is_done())
    }
}
