//! Onboards: copying a prefix up to G1.

use crate::error::{BlockFailure, FirstOf, lost};
use crate::leader::Leader;
use crate::remote::Fetching;
use crate::transfers::{Arriving, Destination, Handle, Move, Purpose, Request, expired};
use crate::volume::{VolumeTier, transfer_end};
use kvbm_plan::{BlockIdentity, Failure, FailureKind, Path, SequenceHash, Tier, deadline_after};
use kvbm_pool::{AllocError, AnyArrivals, Arrival, Cached, G1, Losses, Pinned, Prefix, PrefixBlock};
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// How often an onboard starts blocks again whose transfer another caller gave up.
const RETRIES: u32 = 8;

/// The common part of all onboards: a pinned prefix and the transfers that bring its blocks.
pub(crate) struct PrefixTransfer {
    pub(crate) leader: Arc<Leader>,
    /// Pins on every block of the prefix where it was found.
    pub(crate) prefix: Arc<Prefix>,
    pub(crate) identities: Vec<BlockIdentity>,
    pub(crate) handles: Vec<Handle>,
    /// Blocks of the prefix that come from a peer first.
    pub(crate) fetch: Option<Fetching>,
}

impl PrefixTransfer {
    pub(crate) fn new(leader: &Arc<Leader>, prefix: Prefix) -> Self {
        let identities = prefix.identities();
        Self {
            leader: Arc::clone(leader),
            prefix: Arc::new(prefix),
            identities,
            handles: Vec::new(),
            fetch: None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.identities.len()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.fetch.as_ref().is_none_or(|fetch| fetch.is_done()) && self.handles.iter().all(Handle::is_done)
    }

    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<()> {
        if self.fetch.as_ref().is_some_and(|fetch| fetch.poll(context).is_pending()) {
            return Poll::Pending;
        }
        let pending = self.handles.iter().any(|handle| handle.poll(context).is_pending());
        if pending { Poll::Pending } else { Poll::Ready(()) }
    }

    /// The volume that a part of the prefix is on, unless it was unregistered.
    pub(crate) fn volume(&self) -> Option<Arc<VolumeTier>> {
        self.leader.volumes.get(self.prefix.volume()?)
    }

    /// Block `at`, moved into slot or engine block `dst`.
    pub(crate) fn to(&self, at: usize, dst: kvbm_plan::BlockId) -> Move {
        let source = self.prefix.blocks()[at];
        Move { identity: self.identities[at], from: source.tier, src: source.block, dst }
    }

    /// Block `at` did not arrive.
    pub(crate) fn failed(&self, at: usize, failure: &Failure) -> Option<BlockFailure> {
        let (identity, block) = (*self.identities.get(at)?, self.prefix.blocks().get(at)?);
        Some(BlockFailure { identity, path: Path::new(block.tier, Tier::G1), failure: failure.clone() })
    }

    pub(crate) fn request(
        &self,
        purpose: Purpose,
        moves: Vec<Move>,
        destination: Destination,
        losses: Losses,
    ) -> Request {
        let mut request =
            Request::new(purpose, Tier::G1, moves, destination, losses).hold(Arc::clone(&self.prefix));
        request.volume = self.volume().map(transfer_end);
        request
    }
}

/// A prefix on its way to G1. Resolves by [`wait`](Self::wait), as a [`Future`], or is looked at
/// with [`is_done`](Self::is_done); no runtime is needed.
///
/// Dropping it cancels what has not started and detaches what has. Blocks that nobody waits for any
/// more are not made visible, and their slots come back when the hardware is done.
#[must_use = "dropping it cancels the onboard"]
pub struct Onboarding {
    transfer: PrefixTransfer,
    /// Where the blocks were found, if a peer has given some since.
    found: Option<Arc<Prefix>>,
    /// Blocks that were in G1 by the time of the call.
    present: Vec<Pinned>,
    /// Blocks that cannot be brought.
    failures: Vec<BlockFailure>,
    refused: Option<AllocError>,
    /// How often it may still start again what other callers gave up.
    retries: u32,
    began: Instant,
    /// The caller's, where it has one.
    until: Option<Instant>,
    deadline: Instant,
}

/// A prefix that did not arrive whole. What did arrive is in `arrived`, pinned; recompute the rest.
#[derive(Debug, thiserror::Error)]
#[error("{} of {wanted} blocks are in G1: {}", arrived.len(), reason(failures, refused.as_ref()))]
pub struct OnboardError {
    /// The prefix that is in G1 now, possibly empty.
    pub arrived: Cached<G1>,
    /// Blocks asked for.
    pub wanted: usize,
    /// Blocks that failed.
    pub failures: Vec<BlockFailure>,
    /// Set when G1 had no room.
    pub refused: Option<AllocError>,
}

fn reason(failures: &[BlockFailure], refused: Option<&AllocError>) -> String {
    refused.map_or_else(|| FirstOf(failures).to_string(), ToString::to_string)
}

impl Onboarding {
    /// Starts the transfer of blocks that are not in G1 yet; joins transfers that bring some of
    /// them already.
    pub(crate) fn start(leader: &Arc<Leader>, prefix: Prefix, until: Option<Instant>) -> Self {
        let now = kvbm_plan::clock::now();
        let most = deadline_after(now, leader.transfers.settings.transfer_deadline);
        let mut onboarding = Self {
            transfer: PrefixTransfer::new(leader, prefix),
            found: None,
            present: Vec::new(),
            failures: Vec::new(),
            refused: None,
            retries: RETRIES,
            began: now,
            until,
            deadline: until.map_or(most, |until| until.min(most)),
        };
        if !leader.registry.owns_prefix(&onboarding.transfer.prefix) {
            let detail = "the prefix was matched by another manager: match it again with this one";
            onboarding.fail_from(0, &Failure::new(FailureKind::Missing, detail));
        } else if onboarding.start_fetch() {
            // The copies to G1 begin when the blocks of the peer are here.
        } else if onboarding.lower().next().is_some() {
            onboarding.start_lower();
        }
        onboarding
    }

    /// Starts to bring blocks that a peer has. Whether there are such.
    fn start_fetch(&mut self) -> bool {
        let transfer = &self.transfer;
        let peers = transfer.leader.peers.get().filter(|_| transfer.prefix.node().is_some());
        let Some(peers) = peers.filter(|_| !transfer.leader.transfers.refuses_callers()) else {
            return false;
        };
        let fetch = peers.fetch(&transfer.prefix, Some(self.deadline), Box::new(|| None));
        self.transfer.fetch = Some(fetch);
        true
    }

    /// The blocks of the peer are here, or will not come: starts the copies to G1. Whether it did.
    fn begin_fetched(&mut self) -> bool {
        let Some(fetch) = self.transfer.fetch.take_if(|fetch| fetch.is_over()) else { return false };
        let failure = fetch.failure();
        let prefix = Arc::clone(&self.transfer.prefix);
        let mut here = self.transfer.leader.registry.match_again(&prefix);
        here.truncate(prefix.len());
        let failure = failure.unwrap_or_else(|| {
            Failure::new(FailureKind::Missing, "it was removed since it came from the peer")
        });
        for at in here.blocks().len()..self.len() {
            self.fail(at, &failure);
        }
        self.transfer.prefix = Arc::new(here);
        self.found = Some(prefix);
        if self.lower().next().is_some() {
            self.start_lower();
        }
        true
    }

    fn start_lower(&mut self) {
        let leader = Arc::clone(&self.transfer.leader);
        if leader.transfers.refuses_callers() {
            let detail = "the manager is shutting down: no transfer starts";
            self.fail_from(0, &Failure::new(FailureKind::ShuttingDown, detail));
            return;
        }
        let lower: Vec<usize> = self.lower().collect();
        let identities: Vec<_> = lower.iter().map(|&at| self.transfer.identities[at]).collect();
        let arriving = leader.transfers.arriving();
        let mut arrivals = match leader.registry.begin_arrivals(Tier::G1, &identities) {
            Ok(arrivals) => arrivals,
            Err(error) => {
                if let Some(first) = identities.first() {
                    leader.tenants.count_refusal(first.namespace, &error);
                }
                self.refused = Some(error);
                return;
            }
        };
        let losses = leader.registry.losses();
        let (there, wanted) = (self.still_there(), self.transfer.prefix.blocks().len());
        let (mut moves, mut places, mut removed) = (Vec::new(), Vec::new(), Vec::new());
        for (place, &at) in lower.iter().enumerate() {
            match arrivals.arrivals()[place] {
                Arrival::Reserved { .. } if at >= there => removed.push(place),
                Arrival::Reserved { block: dst, .. } => {
                    moves.push(self.transfer.to(at, dst));
                    places.push(place);
                }
                Arrival::Joined { .. } => {
                    if let Err(late) = arriving.join(&identities[place], &mut self.transfer.handles) {
                        self.fail(at, &late);
                    }
                }
                Arrival::Refused(refusal) => {
                    self.fail(at, &Failure::new(FailureKind::Missing, refusal.to_string()));
                }
                _ => {}
            }
        }
        arrivals.fail_each(removed);
        if there < wanted {
            let removed = "it was removed since it was matched";
            let failure = match self.transfer.prefix.lost() {
                Some(gone) => lost(gone, &format!("{removed}: match it again")),
                None => Failure::new(FailureKind::Missing, removed),
            };
            self.fail_from(there, &failure);
        }
        self.start_moves(arriving, arrivals, moves, places, losses);
    }

    /// Starts the transfer of those blocks that no other caller brings.
    fn start_moves(
        &mut self,
        arriving: Arriving<'_>,
        arrivals: AnyArrivals,
        moves: Vec<Move>,
        places: Vec<usize>,
        losses: Losses,
    ) {
        if moves.is_empty() {
            self.present.push(arrivals.into_pinned());
            return;
        }
        let destination = Destination::Reserved { arrivals, places };
        let mut request = self.transfer.request(Purpose::Onboard, moves, destination, losses);
        request.on_arrival = Some(self.transfer.leader.offload.on_arrival(None));
        request.limit = self.until.map(|until| until.saturating_duration_since(kvbm_plan::clock::now()));
        self.transfer.handles.push(arriving.start(request));
    }

    /// Indices of the blocks that are not in G1.
    fn lower(&self) -> impl Iterator<Item = usize> + '_ {
        let blocks = self.transfer.prefix.blocks().iter().enumerate();
        blocks.filter(|(_, block)| block.tier != Tier::G1).map(|(at, _)| at)
    }

    /// How many blocks from the front still are where they were found, in the same slot. Asked
    /// after the destinations are reserved: what is removed later cancels the arrival, so nothing
    /// that was removed (a tenant that was forgotten) comes back.
    fn still_there(&self) -> usize {
        let hashes: Vec<_> = self.transfer.identities.iter().map(|identity| identity.hash).collect();
        let mut registered = self.transfer.prefix.registered().into_iter();
        let (volume, group) = (self.transfer.volume(), self.transfer.prefix.group());
        let mut there = |at: usize, block: &PrefixBlock| match block.tier {
            Tier::G4 => volume.as_ref().is_some_and(|volume| volume.contains(group, hashes[at])),
            _ => registered.next().unwrap_or(false),
        };
        let blocks = self.transfer.prefix.blocks().iter().enumerate();
        blocks.take_while(|(at, block)| there(*at, block)).count()
    }

    fn fail(&mut self, at: usize, failure: &Failure) {
        self.failures.extend(self.transfer.failed(at, failure));
    }

    fn fail_from(&mut self, first: usize, failure: &Failure) {
        let late: Vec<usize> = self.lower().filter(|&at| at >= first).collect();
        for at in late {
            self.fail(at, failure);
        }
    }

    /// Blocks asked for.
    pub fn len(&self) -> usize {
        self.transfer.identities.len()
    }

    /// Whether nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.transfer.identities.is_empty()
    }

    /// Whether [`wait`](Self::wait) would return at once; of blocks that a peer has given, at most
    /// their copy from host memory is waited for.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done() || kvbm_plan::clock::now() >= self.deadline
    }

    /// Waits at most until the deadline that it was started with, or for the configured transfer
    /// deadline. The prefix in G1, verified and pinned.
    ///
    /// # Errors
    /// [`OnboardError`] with the part that did arrive.
    pub fn wait(self) -> Result<Cached<G1>, OnboardError> {
        let deadline = self.deadline;
        self.wait_until(deadline)
    }

    /// Like [`wait`](Self::wait), until `deadline`.
    ///
    /// # Errors
    /// [`OnboardError`] with the part that did arrive.
    pub fn wait_until(mut self, deadline: Instant) -> Result<Cached<G1>, OnboardError> {
        loop {
            if let Some(fetch) = &self.transfer.fetch {
                fetch.wait_until(deadline);
                self.begin_fetched();
            }
            self.transfer.handles.iter().for_each(|handle| handle.wait_until(deadline));
            if kvbm_plan::clock::now() >= deadline || !self.start_again() {
                return self.resolve();
            }
        }
    }

    /// All transfers are done. Where other callers gave up a transfer that this one had joined, the
    /// blocks are started again.
    fn start_again(&mut self) -> bool {
        if self.retries == 0 || kvbm_plan::clock::now() >= self.deadline {
            return false;
        }
        let given_up =
            self.transfer.handles.iter_mut().filter_map(|handle| handle.take_given_up().then_some(()));
        if given_up.count() == 0 {
            return false;
        }
        self.retries -= 1;
        self.start_lower();
        true
    }

    /// All transfers are done, or the time is up.
    fn resolve(&mut self) -> Result<Cached<G1>, OnboardError> {
        let mut handles = std::mem::take(&mut self.transfer.handles);
        let late = expired("onboard", self.began.elapsed());
        let mut failed: HashMap<SequenceHash, BlockFailure> = HashMap::new();
        for failure in std::mem::take(&mut self.failures) {
            failed.insert(failure.identity.hash, failure);
        }
        let stopped = handles.iter_mut().filter_map(|handle| handle.stop(&late).then_some(()));
        if stopped.count() > 0 || self.transfer.fetch.take().is_some() {
            self.fail_from(0, &late);
        }
        for handle in &handles {
            handle.with_outcome(|outcome| {
                failed.extend(outcome.failures.iter().map(|block| (block.identity.hash, block.clone())));
            });
        }
        for failure in std::mem::take(&mut self.failures) {
            failed.entry(failure.identity.hash).or_insert(failure);
        }
        let pool = self.transfer.leader.registry.pool::<G1>();
        let hashes: Vec<_> = self.transfer.identities.iter().map(|identity| identity.hash).collect();
        let arrived = pool.match_sequence_hashes(self.transfer.prefix.group(), &hashes);
        let found = self.found.as_ref().unwrap_or(&self.transfer.prefix);
        self.transfer.leader.count_hits(found, arrived.len());
        self.present.clear();
        if arrived.len() == self.transfer.identities.len() {
            return Ok(arrived);
        }
        let refused = self.refused.take();
        let missing = &self.transfer.identities[arrived.len()..];
        let mut failures: Vec<_> =
            missing.iter().filter_map(|identity| failed.remove(&identity.hash)).collect();
        if failures.is_empty() && refused.is_none() {
            let removed = Failure::new(FailureKind::Missing, "it was removed before it could be used");
            self.fail(arrived.len(), &removed);
            // No transfer had it, so none has counted it.
            for block in &self.failures {
                self.transfer.leader.metrics.path(block.path).failures(block.failure.kind).add(1);
            }
            failures.append(&mut self.failures);
        }
        Err(OnboardError { arrived, wanted: self.transfer.identities.len(), failures, refused })
    }
}

impl Future for Onboarding {
    type Output = Result<Cached<G1>, OnboardError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            if self.transfer.poll(context).is_pending() && kvbm_plan::clock::now() < self.deadline {
                // A transfer that it joined may have another deadline.
                self.transfer.leader.transfers.wake_at(self.deadline, context.waker());
                return Poll::Pending;
            }
            if kvbm_plan::clock::now() < self.deadline && self.begin_fetched() {
                continue;
            }
            if !self.start_again() {
                return Poll::Ready(self.resolve());
            }
        }
    }
}
