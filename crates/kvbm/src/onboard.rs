//! Bringing a prefix to G1.

use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::leader::operation::{Destination, Interest, Move, Operation, Parts, Purpose, expired};
use crate::manager::ONLY_GROUP;
use kvbm_plan::{BlockIdentity, Failure, FailureKind, GroupId, Path, SequenceHash, Tier};
use kvbm_pool::{AllocError, Arrival, Cached, G1, Prefix};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

type Key = (GroupId, SequenceHash);

/// Blocks on their way to G1 and the operation that brings each, so that a second request for one joins the first.
#[derive(Default)]
pub(crate) struct Joins {
    arriving: Mutex<HashMap<Key, Arc<Operation>>>,
}

impl Joins {
    /// Held from the reservation of blocks until they are entered here: nobody can find a block Arriving without its
    /// operation.
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Operation>>> {
        self.arriving.lock()
    }

    pub(crate) fn remove(&self, operation: &Arc<Operation>) {
        if operation.purpose == Purpose::Onboard {
            self.lock().retain(|_, arriving| !Arc::ptr_eq(arriving, operation));
        }
    }
}

/// A prefix on its way to G1. Resolves by [`wait`](Self::wait), as a [`Future`], or is looked at with
/// [`is_done`](Self::is_done); no runtime is needed.
///
/// Dropping it cancels what has not started and detaches what has: blocks that nobody waits for any more are not made
/// visible, and their slots come back when the hardware is done.
#[must_use = "dropping it cancels the onboard"]
pub struct Onboarding {
    leader: Arc<Leader>,
    group: GroupId,
    identities: Vec<BlockIdentity>,
    /// Pins on every block of the prefix where it was found.
    prefix: Arc<Prefix>,
    interests: Vec<Interest>,
    refused: Option<AllocError>,
    deadline: Instant,
    limit: Duration,
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

impl Leader {
    /// Starts bringing what is not in G1 yet; joins what is on its way already.
    pub(crate) fn onboard(self: &Arc<Self>, prefix: Prefix) -> Onboarding {
        let limit = self.settings.transfer_deadline;
        let identities = prefix.identities();
        let mut onboarding = Onboarding {
            leader: Arc::clone(self),
            group: identities.first().map_or(ONLY_GROUP, |identity| identity.group),
            identities,
            prefix: Arc::new(prefix),
            interests: Vec::new(),
            refused: None,
            deadline: Instant::now() + limit,
            limit,
        };
        let lower = onboarding.prefix.blocks().iter().any(|block| block.tier != Tier::G1);
        if lower && !self.is_turned_away() {
            self.start_onboard(&mut onboarding);
        }
        onboarding
    }

    fn start_onboard(self: &Arc<Self>, onboarding: &mut Onboarding) {
        let prefix = Arc::clone(&onboarding.prefix);
        let lower: Vec<usize> =
            (0..prefix.len()).filter(|&at| prefix.blocks()[at].tier != Tier::G1).collect();
        let identities: Vec<_> = lower.iter().map(|&at| onboarding.identities[at]).collect();
        let mut arriving = self.joins.lock();
        let arrivals = match self.registry.begin_arrivals(Tier::G1, &identities) {
            Ok(arrivals) => arrivals,
            Err(error) => {
                onboarding.refused = Some(error);
                return;
            }
        };
        let (mut moves, mut places) = (Vec::new(), Vec::new());
        for (place, (arrival, identity)) in arrivals.arrivals().iter().zip(&identities).enumerate() {
            match *arrival {
                Arrival::Reserved { block: dst, .. } => {
                    let source = prefix.blocks()[lower[place]];
                    moves.push(Move { identity: *identity, from: source.tier, src: source.block, dst });
                    places.push(place);
                }
                Arrival::Joined { .. } => {
                    let theirs = arriving.get(&(identity.group, identity.hash));
                    onboarding.join(theirs);
                }
                _ => {}
            }
        }
        if moves.is_empty() {
            return;
        }
        let keys: Vec<Key> = moves.iter().map(|step| (step.identity.group, step.identity.hash)).collect();
        let parts = Parts {
            moves,
            destination: Destination::Reserved { arrivals, places },
            keep: vec![Box::new(prefix)],
            source_check: None,
        };
        let prepared = self.prepare(Purpose::Onboard, Tier::G1, parts);
        let operation = Arc::clone(prepared.operation());
        arriving.extend(keys.into_iter().map(|key| (key, Arc::clone(&operation))));
        onboarding.interests.push(operation.interest());
        drop(arriving);
        self.send(prepared);
    }
}

impl Onboarding {
    fn join(&mut self, theirs: Option<&Arc<Operation>>) {
        let Some(theirs) = theirs else { return };
        if !self.interests.iter().any(|known| Arc::ptr_eq(&known.operation, theirs)) {
            self.interests.push(theirs.interest());
        }
    }

    /// Blocks asked for.
    pub fn len(&self) -> usize {
        self.identities.len()
    }

    /// Whether nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.identities.is_empty()
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.interests.iter().all(|interest| interest.operation.settled.is_set())
    }

    /// Waits at most the configured transfer deadline. The prefix in G1, verified and pinned.
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
        for interest in &self.interests {
            interest.operation.settled.wait_until(deadline);
        }
        self.resolve()
    }

    /// All operations have settled, or the time is up.
    fn resolve(&mut self) -> Result<Cached<G1>, OnboardError> {
        let interests = std::mem::take(&mut self.interests);
        let late = self.let_go(&interests, &expired("onboard", self.limit));
        let pool = self.leader.registry.pool::<G1>();
        let hashes: Vec<_> = self.identities.iter().map(|identity| identity.hash).collect();
        let arrived = pool.match_sequence_hashes(self.group, &hashes);
        self.leader.count_hits(&self.prefix, arrived.len());
        if arrived.len() == self.identities.len() {
            return Ok(arrived);
        }
        let mut failures: Vec<BlockFailure> = late;
        for interest in &interests {
            interest.operation.with_outcome(|outcome| failures.extend(outcome.failures.iter().cloned()));
        }
        Err(OnboardError { arrived, wanted: self.identities.len(), failures, refused: self.refused.take() })
    }

    /// Gives up this caller's share in what has not settled. The blocks that are late because of that.
    fn let_go(&self, interests: &[Interest], reason: &Failure) -> Vec<BlockFailure> {
        let mut shared = false;
        for interest in interests {
            let unsettled = !interest.operation.settled.is_set();
            if interest.release() {
                self.leader.abandon(&interest.operation, reason);
            } else {
                shared |= unsettled;
            }
        }
        if !shared {
            return Vec::new();
        }
        // Others still wait for these operations, so their outcome does not tell this caller's failure.
        let blocks = self.identities.iter().zip(self.prefix.blocks());
        let failed = blocks.filter(|(_, block)| block.tier != Tier::G1).map(|(&identity, block)| {
            BlockFailure { identity, path: Path::new(block.tier, Tier::G1), failure: reason.clone() }
        });
        failed.collect()
    }
}

impl Future for Onboarding {
    type Output = Result<Cached<G1>, OnboardError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        for interest in &self.interests {
            if interest.operation.settled.poll(context).is_pending() {
                return Poll::Pending;
            }
        }
        Poll::Ready(self.resolve())
    }
}

impl Drop for Onboarding {
    fn drop(&mut self) {
        let cancelled = Failure::new(FailureKind::Cancelled, "the onboard was dropped");
        for interest in self.interests.drain(..) {
            if interest.release() {
                self.leader.abandon(&interest.operation, &cancelled);
            }
        }
    }
}
