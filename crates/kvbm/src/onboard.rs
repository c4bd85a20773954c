//! Bringing a prefix to G1.

use crate::error::{BlockFailure, FirstOf, lost};
use crate::leader::operation::{Destination, Interest, Move, Operation, Parts, Purpose, Released, expired};
use crate::leader::{Leader, Prepared};
use crate::signal::deadline;
use crate::volume::VolumeTier;
use kvbm_plan::{BlockIdentity, Failure, FailureKind, GroupId, Path, SequenceHash, Tier};
use kvbm_pool::{AllocError, AnyArrivals, Arrival, Cached, G1, Losses, Pinned, Prefix, PrefixBlock};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

type Key = (GroupId, SequenceHash);

/// How often blocks whose transfer others gave up are asked for again.
const RETRIES: u32 = 8;

/// How long an operation that has all its answers may take to settle: bookkeeping, no transfer.
const SETTLEMENT: Duration = Duration::from_secs(10);

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

    /// The operation is over: its blocks are there, or not on their way any more.
    pub(crate) fn remove(&self, operation: &Arc<Operation>, moves: &[Move]) {
        if operation.purpose != Purpose::Onboard {
            return;
        }
        let mut arriving = self.lock();
        for step in moves {
            let key = (step.identity.group, step.identity.hash);
            // The block may be on its way again already, with another operation.
            if arriving.get(&key).is_some_and(|known| Arc::ptr_eq(known, operation)) {
                arriving.remove(&key);
            }
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
    /// Blocks that were in G1 by the time they were asked for.
    present: Vec<Pinned>,
    /// Blocks that cannot be brought.
    failures: Vec<BlockFailure>,
    refused: Option<AllocError>,
    /// How often it may still start again what others gave up.
    retries: u32,
    began: Instant,
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

impl Leader {
    /// Starts bringing what is not in G1 yet; joins what is on its way already.
    pub(crate) fn onboard(self: &Arc<Self>, prefix: Prefix) -> Onboarding {
        let identities = prefix.identities();
        let mut onboarding = Onboarding {
            leader: Arc::clone(self),
            group: prefix.group(),
            identities,
            prefix: Arc::new(prefix),
            interests: Vec::new(),
            present: Vec::new(),
            failures: Vec::new(),
            refused: None,
            retries: RETRIES,
            began: Instant::now(),
            deadline: deadline(self.settings.transfer_deadline),
        };
        if !self.registry.owns_prefix(&onboarding.prefix) {
            let detail = "the prefix was matched by another manager: match it again with this one";
            onboarding.fail_from(0, &Failure::new(FailureKind::Missing, detail));
        } else if onboarding.lower().next().is_some() {
            self.start_onboard(&mut onboarding);
        }
        onboarding
    }

    fn start_onboard(self: &Arc<Self>, onboarding: &mut Onboarding) {
        if self.is_turned_away() {
            let detail = "the manager is shutting down: no transfer starts";
            onboarding.fail_from(0, &Failure::new(FailureKind::ShuttingDown, detail));
            return;
        }
        let lower: Vec<usize> = onboarding.lower().collect();
        let identities: Vec<_> = lower.iter().map(|&at| onboarding.identities[at]).collect();
        let mut arriving = self.joins.lock();
        let mut arrivals = match self.registry.begin_arrivals(Tier::G1, &identities) {
            Ok(arrivals) => arrivals,
            Err(error) => {
                identities.iter().take(1).for_each(|first| self.count_refusal(first.namespace, &error));
                onboarding.refused = Some(error);
                return;
            }
        };
        let losses = self.registry.losses();
        let there = onboarding.still_there();
        let (mut moves, mut places, mut removed) = (Vec::new(), Vec::new(), Vec::new());
        for (place, &at) in lower.iter().enumerate() {
            match arrivals.arrivals()[place] {
                Arrival::Reserved { .. } if at >= there => removed.push(place),
                Arrival::Reserved { block: dst, .. } => {
                    let (identity, source) = (identities[place], onboarding.prefix.blocks()[at]);
                    moves.push(Move { identity, from: source.tier, src: source.block, dst });
                    places.push(place);
                }
                Arrival::Joined { .. } => onboarding.join(at, &arriving),
                Arrival::Refused(refusal) => {
                    onboarding.fail(at, &Failure::new(FailureKind::Missing, refusal.to_string()));
                }
                _ => {}
            }
        }
        arrivals.fail_each(removed);
        if there < onboarding.identities.len() {
            let removed = "it was removed since it was matched";
            let failure = match onboarding.prefix.lost() {
                Some(gone) => lost(gone, &format!("{removed}: match it again")),
                None => Failure::new(FailureKind::Missing, removed),
            };
            onboarding.fail_from(there, &failure);
        }
        let prepared = self.prepare_onboard(onboarding, arrivals, moves, places, losses, &mut arriving);
        drop(arriving);
        if let Some(prepared) = prepared {
            self.send(prepared);
        }
    }

    /// The operation of those blocks that nobody else brings.
    fn prepare_onboard(
        &self,
        onboarding: &mut Onboarding,
        arrivals: AnyArrivals,
        moves: Vec<Move>,
        places: Vec<usize>,
        losses: Losses,
        arriving: &mut HashMap<Key, Arc<Operation>>,
    ) -> Option<Prepared> {
        if moves.is_empty() {
            onboarding.present.push(arrivals.into_pinned());
            return None;
        }
        let keys: Vec<Key> = moves.iter().map(|step| (step.identity.group, step.identity.hash)).collect();
        let parts = Parts {
            moves,
            destination: Destination::Reserved { arrivals, places },
            losses,
            keep: vec![Box::new(Arc::clone(&onboarding.prefix))],
            source_check: None,
            round: None,
            volume: onboarding.volume(),
        };
        let prepared = self.prepare(Purpose::Onboard, Tier::G1, parts);
        let operation = prepared.operation();
        arriving.extend(keys.into_iter().map(|key| (key, Arc::clone(operation))));
        onboarding.interests.push(operation.interest());
        Some(prepared)
    }
}

impl Onboarding {
    /// Indices of the blocks that are not in G1.
    fn lower(&self) -> impl Iterator<Item = usize> + '_ {
        let blocks = self.prefix.blocks().iter().enumerate();
        blocks.filter(|(_, block)| block.tier != Tier::G1).map(|(at, _)| at)
    }

    /// How many blocks from the front still are where they were found, in the same slot. Asked after the destinations are reserved: what is
    /// removed later cancels the arrival, so nothing that was removed (a tenant that was forgotten) comes back.
    fn still_there(&self) -> usize {
        let hashes: Vec<_> = self.identities.iter().map(|identity| identity.hash).collect();
        let mut registered = self.prefix.registered().into_iter();
        let volume = self.volume();
        let mut there = |at: usize, block: &PrefixBlock| match block.tier {
            Tier::G4 => volume.as_ref().is_some_and(|volume| volume.contains(self.group, hashes[at])),
            _ => registered.next().unwrap_or(false),
        };
        let blocks = self.prefix.blocks().iter().enumerate();
        blocks.take_while(|(at, block)| there(*at, block)).count()
    }

    /// The volume that a part of the prefix is on, unless it was unregistered.
    fn volume(&self) -> Option<Arc<VolumeTier>> {
        self.leader.volumes.get(self.prefix.volume()?)
    }

    /// Waits for whoever brings block `at`.
    fn join(&mut self, at: usize, arriving: &HashMap<Key, Arc<Operation>>) {
        let identity = &self.identities[at];
        let Some(theirs) = arriving.get(&(identity.group, identity.hash)) else { return };
        if self.interests.iter().any(|known| Arc::ptr_eq(&known.operation, theirs)) {
            return;
        }
        match theirs.join(Instant::now()) {
            Some(interest) => self.interests.push(interest),
            None => self.fail(at, &expired("an earlier transfer of the block", theirs.limit)),
        }
    }

    fn fail(&mut self, at: usize, failure: &Failure) {
        let (Some(&identity), Some(block)) = (self.identities.get(at), self.prefix.blocks().get(at)) else {
            return;
        };
        let path = Path::new(block.tier, Tier::G1);
        self.failures.push(BlockFailure { identity, path, failure: failure.clone() });
    }

    fn fail_from(&mut self, first: usize, failure: &Failure) {
        let late: Vec<usize> = self.lower().filter(|&at| at >= first).collect();
        for at in late {
            self.fail(at, failure);
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
        loop {
            for interest in &self.interests {
                interest.operation.settled.wait_until(deadline);
            }
            if Instant::now() >= deadline || !self.start_again() {
                return self.resolve();
            }
        }
    }

    /// Everything has settled. Where others gave up a transfer that this one had joined, the blocks are asked for again.
    fn start_again(&mut self) -> bool {
        let given_up = |interest: &Interest| {
            interest.joined
                && interest.operation.with_outcome(|outcome| {
                    outcome.failures.iter().any(|failed| failed.failure.kind == FailureKind::Cancelled)
                })
        };
        if self.retries == 0 || Instant::now() >= self.deadline || !self.interests.iter().any(given_up) {
            return false;
        }
        self.retries -= 1;
        for interest in &mut self.interests {
            interest.joined = false;
        }
        let leader = Arc::clone(&self.leader);
        leader.start_onboard(self);
        true
    }

    /// All operations have settled, or the time is up.
    fn resolve(&mut self) -> Result<Cached<G1>, OnboardError> {
        let interests = std::mem::take(&mut self.interests);
        let late = expired("onboard", self.began.elapsed());
        let mut told: HashMap<SequenceHash, BlockFailure> = HashMap::new();
        for failure in std::mem::take(&mut self.failures) {
            told.insert(failure.identity.hash, failure);
        }
        if self.let_go(&interests, &late) {
            self.fail_from(0, &late);
        }
        for interest in &interests {
            interest.operation.with_outcome(|outcome| {
                told.extend(outcome.failures.iter().map(|failed| (failed.identity.hash, failed.clone())));
            });
        }
        for failure in std::mem::take(&mut self.failures) {
            told.entry(failure.identity.hash).or_insert(failure);
        }
        let pool = self.leader.registry.pool::<G1>();
        let hashes: Vec<_> = self.identities.iter().map(|identity| identity.hash).collect();
        let arrived = pool.match_sequence_hashes(self.group, &hashes);
        self.leader.count_hits(&self.prefix, arrived.len());
        self.present.clear();
        if arrived.len() == self.identities.len() {
            return Ok(arrived);
        }
        let refused = self.refused.take();
        let missing = &self.identities[arrived.len()..];
        let mut failures: Vec<_> =
            missing.iter().filter_map(|identity| told.remove(&identity.hash)).collect();
        if failures.is_empty() && refused.is_none() {
            let removed = Failure::new(FailureKind::Missing, "it was removed before it could be used");
            self.fail(arrived.len(), &removed);
            failures.append(&mut self.failures);
        }
        Err(OnboardError { arrived, wanted: self.identities.len(), failures, refused })
    }

    /// Gives up this caller's share in what has not settled. Whether anything was late.
    fn let_go(&self, interests: &[Interest], reason: &Failure) -> bool {
        let mut late = false;
        for interest in interests {
            self.leader.keep_arrived(&interest.operation);
            match interest.release(reason) {
                Released::Over => {
                    interest.operation.settled.wait_until(deadline(SETTLEMENT));
                }
                Released::Shared => late = true,
                Released::Abandoned => {
                    late = true;
                    self.leader.cancel(&interest.operation);
                    self.leader.tell_of_kept(&interest.operation);
                }
            }
        }
        late
    }
}

impl Future for Onboarding {
    type Output = Result<Cached<G1>, OnboardError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            for interest in &self.interests {
                if interest.operation.settled.poll(context).is_pending() {
                    return Poll::Pending;
                }
            }
            if !self.start_again() {
                return Poll::Ready(self.resolve());
            }
        }
    }
}

impl Drop for Onboarding {
    fn drop(&mut self) {
        let cancelled = Failure::new(FailureKind::Cancelled, "the onboard was dropped");
        for interest in self.interests.drain(..) {
            if interest.release(&cancelled) == Released::Abandoned {
                self.leader.cancel(&interest.operation);
            }
        }
    }
}
