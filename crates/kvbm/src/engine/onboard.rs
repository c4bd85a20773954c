//! Bringing a prefix into blocks that the engine names.

use super::generations::{Generations, Hold};
use super::offload::{Content, What, When};
use super::{Busy, Engine, EngineError, Fence, offload, still_the_same};
use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::onboard::PrefixTransfer;
use crate::remote::Fetching;
use crate::signal::Signal;
use crate::transfers::{Destination, Handle, Purpose};
use kvbm_plan::{BlockId, Comparison, Failure, FailureKind, Path, Tier, deadline_after};
use kvbm_pool::{BlockMetadata, Losses, Prefix};
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
    /// time than the plans for its layers. What comes from G3 or a volume comes whole, and so do
    /// blocks of several cache groups. Of tensors without axes each counts as a layer.
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

/// A load of engine blocks that has not begun.
struct Load {
    ids: Vec<BlockId>,
    busy: Busy,
    changed: &'static str,
    purpose: Purpose,
    losses: Losses,
    options: LoadOptions,
    compare: Option<Comparison>,
}

impl Load {
    /// Starts the copies of all blocks of a prefix, into the first of the engine's blocks.
    fn begin(self, transfer: &PrefixTransfer) -> Handle {
        let leader = &transfer.leader;
        let into = self.ids.iter().take(transfer.len()).enumerate();
        let moves: Vec<_> = into.map(|(at, &dst)| transfer.to(at, dst)).collect();
        let check = still_the_same(&self.busy.blocks, self.busy.holds.clone(), self.changed);
        let destination = Destination::Unregistered;
        let mut request = transfer.request(self.purpose, moves, destination, self.losses).hold(self.busy);
        request.check = Some(check);
        let options = self.options;
        if options.is_by_layer {
            request.layers = leader.transfers.layer_steps(Path::G2_G1, request.moves.len(), None);
        }
        request.fence = options.after;
        request.limit = options.until.map(|until| until.saturating_duration_since(kvbm_plan::clock::now()));
        request.compare = self.compare;
        leader.transfers.start(request)
    }

    /// The same for as much of `prefix` as is here, after a peer has given blocks. None where that
    /// is nothing: then no copy writes to the engine's blocks.
    fn begin_fetched(self, leader: &Arc<Leader>, prefix: &Prefix) -> Option<Handle> {
        let mut here = leader.registry.match_again(prefix);
        here.truncate(prefix.len());
        if here.is_empty() || leader.transfers.refuses_callers() {
            return None;
        }
        Some(self.begin(&PrefixTransfer::new(leader, here)))
    }
}

impl Engine {
    /// Checks an onboard, or a comparison, and starts it.
    pub(super) fn start_onboard(
        &self,
        leader: &Arc<Leader>,
        prefix: Prefix,
        ids: &[BlockId],
        options: LoadOptions,
        compare: Option<Comparison>,
    ) -> Result<EngineOnboarding, EngineError> {
        self.check(ids)?;
        if !leader.registry.owns_prefix(&prefix) {
            return Err(EngineError::ForeignPrefix);
        }
        if ids.len() != prefix.blocks().len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: prefix.blocks().len() });
        }
        if leader.transfers.refuses_callers() {
            return Err(EngineError::ShuttingDown);
        }
        let losses = leader.registry.losses();
        if let Some(lost) = prefix.lost() {
            leader.transfers.count_lost(lost);
            return Err(EngineError::LostPrefix(lost));
        }
        EngineOnboarding::start(leader, &self.blocks, prefix, ids, losses, options, compare)
    }
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
        let (over, is_audit) = (Arc::new(Signal::default()), compare.is_some());
        let (ids, blocks) = (ids.to_vec(), Arc::clone(blocks));
        let mut onboarding =
            Self { transfer, blocks, ids, holds: Vec::new(), over, cancelled: false, is_audit };
        let Self { transfer, ids, blocks, over, holds, .. } = &mut onboarding;
        if ids.is_empty() {
            over.set();
            return Ok(onboarding);
        }
        let (begun, changed, purpose) = if is_audit {
            (blocks.begin_read(ids), "was reused while it was compared", Purpose::Audit)
        } else {
            let changed = "was given to another use while it was written";
            (blocks.begin_write(ids, losses), changed, Purpose::EngineOnboard)
        };
        *holds = begun.map_err(EngineError::Busy)?;
        let busy = Busy { blocks: Arc::clone(blocks), holds: holds.clone(), over: Some(Arc::clone(over)) };
        let load = Load { ids: ids.clone(), busy, changed, purpose, losses, options, compare };
        match leader.peers.get().filter(|_| transfer.prefix.node().is_some()) {
            None => transfer.handles.push(load.begin(transfer)),
            Some(peers) => {
                let (prefix, leader) = (Arc::clone(&transfer.prefix), Arc::clone(leader));
                let then = Box::new(move || load.begin_fetched(&leader, &prefix));
                transfer.fetch = Some(peers.fetch(&transfer.prefix, options.until, then));
            }
        }
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
    /// there are no plans: the prefix is empty, or its blocks have not come from their peer yet.
    pub fn tag(&self) -> Option<u64> {
        let fetched = || self.transfer.fetch.as_ref().and_then(|fetch| fetch.with_handle(Handle::tag));
        self.transfer.handles.first().map(Handle::tag).or_else(fetched)
    }

    /// Whether `layer` of all blocks is in place, verified as whole blocks are: the engine may
    /// compute with it. `false` where a block failed: then [`wait`](Self::wait) says what arrived,
    /// and what was computed from the others is void. A load that is not
    /// [by layer](LoadOptions::by_layer) has all of its layers at once.
    pub fn layer_ready(&self, layer: u32) -> bool {
        let has_layer = |handle: &Handle| handle.has_layer(layer);
        let fetched = |fetch: &Fetching| {
            // A prefix that came in part has blocks without this layer.
            let whole = |handle: &Handle| handle.num_blocks() == self.len() && handle.has_layer(layer);
            fetch.with_handle(whole).unwrap_or(false)
        };
        !self.cancelled
            && self.transfer.fetch.as_ref().is_none_or(fetched)
            && self.transfer.handles.iter().all(has_layer)
    }

    /// Waits until it is known whether `layer` arrives, at most until `deadline`. Whether it has
    /// arrived.
    pub fn wait_layer(&self, layer: u32, deadline: Instant) -> bool {
        self.layer_wait()(layer, deadline);
        self.layer_ready(layer)
    }

    /// What waits as [`wait_layer`](Self::wait_layer) does, for whoever must not borrow the load so
    /// long.
    pub(super) fn layer_wait(&self) -> impl Fn(u32, Instant) + use<> {
        let fetched = self.transfer.fetch.as_ref().map(Fetching::layer_wait);
        let handles: Vec<_> = self.transfer.handles.iter().map(Handle::layer_wait).collect();
        move |layer, deadline| {
            if let Some(fetched) = &fetched {
                fetched(layer, deadline);
            }
            for wait in &handles {
                wait(layer, deadline);
            }
        }
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

    /// Waits at most three times the configured transfer deadline: for blocks of a peer, for the
    /// outcome, and for the copies that a failed one left. How many blocks arrived: all.
    ///
    /// # Errors
    /// [`EngineOnboardError`] says how many blocks from the front did arrive.
    pub fn wait(mut self) -> Result<usize, EngineOnboardError> {
        self.wait_fetched();
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

    /// Waits for blocks of a peer, which have a deadline, and takes over the transfer that follows.
    fn wait_fetched(&mut self) {
        // A load that was given up waits for nothing.
        if let Some(fetch) = self.transfer.fetch.as_ref().filter(|_| !self.cancelled) {
            let patience = self.transfer.leader.transfers.settings.transfer_deadline;
            fetch.wait_until(deadline_after(kvbm_plan::clock::now(), patience));
            self.transfer.handles.extend(fetch.take_handle());
        }
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
        if let Some(fetch) = &self.transfer.fetch {
            self.transfer.handles.extend(fetch.take_handle());
            fetch.cancel();
        }
        let reason = Failure::new(FailureKind::Cancelled, "the engine gave the load up");
        for handle in &mut self.transfer.handles {
            handle.stop(&reason);
        }
    }

    fn resolve(&mut self) -> Result<usize, EngineOnboardError> {
        let wanted = self.len();
        let mut failures = self.not_fetched();
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

    /// Blocks that did not come from their peer.
    fn not_fetched(&mut self) -> Vec<BlockFailure> {
        let Some(fetch) = self.transfer.fetch.take() else { return Vec::new() };
        // What begins only now was waited for by nobody. Its outcome is not known: it is given up.
        fetch.cancel();
        let begun = self.transfer.handles.iter().map(Handle::num_blocks).sum::<usize>();
        let missing = || Failure::new(FailureKind::Missing, "it was removed since it came from the peer");
        let failure = fetch.failure().unwrap_or_else(missing);
        (begun..self.len()).filter_map(|at| self.transfer.failed(at, &failure)).collect()
    }

    /// Blocks that came from below G2 are copied to G2 too, unless the configuration says no: the
    /// next request for them does not read the disk again. Where that is refused, they stay where
    /// they were.
    fn promote(&self, arrived: usize) {
        // What a peer has given is on G2.
        let is_remote = self.transfer.prefix.node().is_some();
        let found = self.transfer.prefix.blocks().iter().take(arrived);
        let lower = found
            .zip(&self.holds)
            .enumerate()
            .filter(|(_, (block, _))| block.tier == Tier::G3 || block.tier == Tier::G4 && !is_remote)
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
        // Known on a tier: what they are worth is known, too.
        let metadata = BlockMetadata::default();
        let what = What { identities: &identities, content: Content::Written(&holds), metadata };
        match offload::start(leader, &self.blocks, &ids, what, When::Now) {
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
