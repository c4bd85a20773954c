//! Bringing a prefix into blocks that the engine names.

use super::{Busy, Engine, EngineError};
use crate::error::{BlockFailure, FirstOf};
use crate::leader::Leader;
use crate::leader::operation::{Destination, Interest, Move, Operation, Parts, Purpose, Released};
use crate::manager::KvBlockManager;
use kvbm_plan::{BlockId, Failure, FailureKind, Path, Tier};
use kvbm_pool::Prefix;
use std::any::Any;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// A prefix on its way into engine blocks. Resolves by [`wait`](Self::wait) or as a [`Future`].
///
/// Dropping it cancels what has not started and detaches what has: the blocks stay busy until the hardware is done
/// ([`KvBlockManager::before_reuse`]).
#[must_use = "dropping it cancels the onboard"]
pub struct EngineOnboarding {
    leader: Arc<Leader>,
    prefix: Arc<Prefix>,
    interest: Option<Interest>,
}

/// A prefix that did not arrive whole: the first `arrived` blocks hold verified bytes, recompute the others. A copy that is late may still
/// write to their blocks: before anything is computed there, [`before_reuse`](KvBlockManager::before_reuse) says when that is over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{arrived} of {wanted} blocks arrived: {}", FirstOf(failures))]
pub struct EngineOnboardError {
    /// Blocks from the front that are complete and verified.
    pub arrived: usize,
    /// Blocks asked for.
    pub wanted: usize,
    /// The others.
    pub failures: Vec<BlockFailure>,
}

impl KvBlockManager<Engine> {
    /// Brings a prefix into engine blocks: listed block `i` of the prefix into `ids[i]`. They are the transfer's until it is over, also where
    /// nobody waits for it any more or it was late: see [`before_reuse`](Self::before_reuse).
    ///
    /// # Errors
    /// See [`EngineError`]; nothing was started.
    pub fn onboard(&self, prefix: Prefix, ids: &[BlockId]) -> Result<EngineOnboarding, EngineError> {
        self.check(ids)?;
        if !self.leader.registry.owns_prefix(&prefix) {
            return Err(EngineError::ForeignPrefix);
        }
        if ids.len() != prefix.blocks().len() {
            return Err(EngineError::Count { ids: ids.len(), blocks: prefix.blocks().len() });
        }
        if self.leader.is_turned_away() {
            return Err(EngineError::ShuttingDown);
        }
        let losses = self.leader.registry.losses();
        if let Some(lost) = prefix.lost() {
            self.leader.count_lost(lost);
            return Err(EngineError::LostPrefix(lost));
        }
        let identities = prefix.identities();
        let sources = prefix.blocks().iter().zip(&identities).zip(ids);
        let moves: Vec<_> = sources
            .map(|((block, &identity), &dst)| Move { identity, from: block.tier, src: block.block, dst })
            .collect();
        let prefix = Arc::new(prefix);
        let mut onboarding = EngineOnboarding {
            leader: Arc::clone(&self.leader),
            prefix: Arc::clone(&prefix),
            interest: None,
        };
        if moves.is_empty() {
            return Ok(onboarding);
        }
        // Of a volume that was unregistered since no block arrives.
        let volume = prefix.volume().and_then(|id| self.leader.volumes.get(id));
        let holds = self.g1.blocks.begin_write(ids, losses).map_err(EngineError::Busy)?;
        let given_away = "was given to another use while it was written";
        let source_check = Some(self.still_the_same(holds.clone(), given_away));
        let busy = Busy { blocks: Arc::clone(&self.g1.blocks), holds };
        let keep: Vec<Box<dyn Any + Send>> = vec![Box::new(prefix), Box::new(busy)];
        let destination = Destination::Unregistered;
        let parts = Parts { moves, destination, losses, keep, source_check, round: None, volume };
        let prepared = self.leader.prepare(Purpose::Private, Tier::G1, parts);
        onboarding.interest = Some(prepared.operation().interest());
        self.leader.send(prepared);
        Ok(onboarding)
    }
}

impl EngineOnboarding {
    /// Blocks asked for.
    pub fn len(&self) -> usize {
        self.prefix.blocks().len()
    }

    /// Whether nothing was asked for.
    pub fn is_empty(&self) -> bool {
        self.prefix.is_empty()
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.operation().is_none_or(|operation| operation.settled.is_set())
    }

    /// Waits at most the configured transfer deadline. How many blocks arrived: all.
    ///
    /// # Errors
    /// [`EngineOnboardError`] says how many blocks from the front did arrive.
    pub fn wait(mut self) -> Result<usize, EngineOnboardError> {
        if let Some(operation) = self.operation()
            && let Err(reason) = self.leader.await_operation(operation, "onboard")
        {
            self.interest = None;
            return Err(self.nothing_arrived(&reason));
        }
        self.resolve()
    }

    fn operation(&self) -> Option<&Arc<Operation>> {
        self.interest.as_ref().map(|interest| &interest.operation)
    }

    /// The outcome is not known, so nothing of it can be used.
    fn nothing_arrived(&self, reason: &Failure) -> EngineOnboardError {
        let blocks = self.prefix.blocks().iter().zip(self.prefix.identities());
        let failed = blocks.map(|(block, identity)| BlockFailure {
            identity,
            path: Path::new(block.tier, Tier::G1),
            failure: reason.clone(),
        });
        EngineOnboardError { arrived: 0, wanted: self.len(), failures: failed.collect() }
    }

    fn resolve(&mut self) -> Result<usize, EngineOnboardError> {
        let wanted = self.prefix.blocks().len();
        let failures = match self.interest.take() {
            Some(interest) => interest.operation.with_outcome(|outcome| outcome.failures.clone()),
            None => Vec::new(),
        };
        let start = self.prefix.start();
        let first_bad = failures.iter().map(|failure| failure.identity.position as usize).min();
        let arrived = first_bad.map_or(wanted, |position| position.saturating_sub(start));
        self.leader.count_hits(&self.prefix, arrived);
        if failures.is_empty() { Ok(wanted) } else { Err(EngineOnboardError { arrived, wanted, failures }) }
    }
}

impl Future for EngineOnboarding {
    type Output = Result<usize, EngineOnboardError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let pending = self.operation().is_some_and(|operation| operation.settled.poll(context).is_pending());
        if pending { Poll::Pending } else { Poll::Ready(self.resolve()) }
    }
}

impl Drop for EngineOnboarding {
    fn drop(&mut self) {
        let Some(interest) = self.interest.take() else { return };
        let cancelled = Failure::new(FailureKind::Cancelled, "the onboard was dropped");
        if interest.release(&cancelled) == Released::Abandoned {
            self.leader.cancel(&interest.operation);
        }
    }
}

impl fmt::Debug for EngineOnboarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineOnboarding({} blocks, done: {})", self.len(), self.is_done())
    }
}
