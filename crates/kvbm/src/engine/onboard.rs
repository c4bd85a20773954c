//! Bringing a prefix into blocks that the engine names.

use crate::error::{BlockFailure, FirstOf};
use crate::onboard::PrefixTransfer;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// A prefix on its way into engine blocks. Resolves by [`wait`](Self::wait) or as a [`Future`].
///
/// Dropping it cancels what has not started and detaches what has: the blocks stay busy until the hardware is done
/// ([`KvBlockManager::before_reuse`](crate::KvBlockManager::before_reuse)).
#[must_use = "dropping it cancels the onboard"]
pub struct EngineOnboarding(pub(super) PrefixTransfer);

/// A prefix that did not arrive whole: the first `arrived` blocks hold verified bytes, recompute the others. A copy that is late may still
/// write to their blocks: before anything is computed there, [`before_reuse`](crate::KvBlockManager::before_reuse) says when that is over.
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

impl EngineOnboarding {
    /// Blocks of the prefix.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the prefix is empty.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Waits at most the configured transfer deadline. How many blocks arrived: all.
    ///
    /// # Errors
    /// [`EngineOnboardError`] says how many blocks from the front did arrive.
    pub fn wait(mut self) -> Result<usize, EngineOnboardError> {
        for handle in &self.0.handles {
            if let Err(reason) = handle.wait("onboard") {
                // The outcome is not known, so no block counts.
                let wanted = self.len();
                let failures = (0..wanted).filter_map(|at| self.0.failed(at, &reason)).collect();
                return Err(EngineOnboardError { arrived: 0, wanted, failures });
            }
        }
        self.resolve()
    }

    fn resolve(&mut self) -> Result<usize, EngineOnboardError> {
        let (wanted, start) = (self.len(), self.0.prefix.start());
        let mut failures = Vec::new();
        for handle in self.0.handles.drain(..) {
            handle.with_outcome(|outcome| failures.extend_from_slice(&outcome.failures));
        }
        let first_bad = failures.iter().map(|failure| failure.identity.position as usize).min();
        let arrived = first_bad.map_or(wanted, |position| position.saturating_sub(start));
        self.0.leader.count_hits(&self.0.prefix, arrived);
        if failures.is_empty() { Ok(wanted) } else { Err(EngineOnboardError { arrived, wanted, failures }) }
    }
}

impl Future for EngineOnboarding {
    type Output = Result<usize, EngineOnboardError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.0.poll(context).is_pending() { Poll::Pending } else { Poll::Ready(self.resolve()) }
    }
}

impl fmt::Debug for EngineOnboarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineOnboarding({} blocks, done: {})", self.len(), self.is_done())
    }
}
