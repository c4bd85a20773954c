//! Removing, saving, ending.

use crate::leader::Leader;
use crate::metrics::EvictReason;
use kvbm_plan::{BlockId, Command, Failure, NamespaceId, Rank, Tier};
use kvbm_pool::Removed;
use std::sync::Arc;
use std::time::Instant;

/// What a flush made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushReport {
    /// Blocks that every rank has durable on G3.
    pub durable_blocks: u64,
}

/// A flush that did not reach every disk. What was durable before still is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// There is nothing that could be made durable.
    #[error("no disk tier is configured: set disk.dir and disk.capacity")]
    NoDisk,
    /// A rank failed, or did not answer in time.
    #[error("flush failed on rank {rank}: {failure}")]
    Rank {
        /// The rank.
        rank: Rank,
        /// Why.
        failure: Failure,
    },
    /// Copies to disk were still under way at the deadline; what had arrived was not flushed.
    #[error("offloads to disk did not finish in time: allow more time, or flush again later")]
    Busy,
}

/// How a manager ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShutdownReport {
    /// Blocks durable on G3; `None` where no disk is configured or the flush failed.
    pub durable_blocks: Option<u64>,
    /// Blocks of G2 (of G1 where there is no G2) that were not copied to the next tier when the time was over.
    pub not_saved: u64,
    /// Whether every offload ended in time.
    pub drained: bool,
    /// Why the flush failed, if it did.
    pub flush_error: Option<FlushError>,
}

impl ShutdownReport {
    /// Whether everything that could be saved was.
    pub fn is_complete(&self) -> bool {
        self.drained && self.not_saved == 0 && self.flush_error.is_none()
    }
}

impl Leader {
    /// Waits for copies to disk that are under way, then makes them durable.
    pub(crate) fn flush(&self, deadline: Instant) -> Result<FlushReport, FlushError> {
        if self.registry.capacity(Tier::G3) == 0 {
            return Err(FlushError::NoDisk);
        }
        if !self.offloads.wait_idle(deadline) {
            return Err(FlushError::Busy);
        }
        let started = self.flushes.start(self.settings.ranks);
        for (rank, failure) in self.broadcast(&Command::Flush { token: started.token }) {
            self.flushes.answer(rank, started.token, kvbm_plan::FlushOutcome::Failed(failure));
        }
        match self.flushes.wait(&started, deadline) {
            Ok(durable_blocks) => Ok(FlushReport { durable_blocks }),
            Err((rank, failure)) => Err(FlushError::Rank { rank, failure }),
        }
    }

    pub(crate) fn shut_down(self: &Arc<Self>, deadline: Instant) -> ShutdownReport {
        // Callers are turned away first, so that the tiers hold still while they are written down.
        self.turn_away();
        for tier in [Tier::G1, Tier::G2] {
            self.drain_down(tier, deadline);
        }
        let drained = self.offloads.wait_idle(deadline);
        let (durable_blocks, flush_error) = match self.flush(deadline) {
            Ok(report) => (Some(report.durable_blocks), None),
            Err(FlushError::NoDisk) => (None, None),
            Err(error) => (None, Some(error)),
        };
        self.close();
        ShutdownReport { durable_blocks, not_saved: self.not_saved(), drained, flush_error }
    }

    fn not_saved(&self) -> u64 {
        let uncopied = |tier: Tier| {
            let status = self.registry.occupancy(tier);
            u64::from(status.active + status.inactive).min(u64::from(status.not_copied_lower))
        };
        match (self.registry.capacity(Tier::G2), self.registry.capacity(Tier::G3)) {
            (0, _) => uncopied(Tier::G1),
            (_, 0) => 0,
            _ => uncopied(Tier::G2),
        }
    }

    pub(crate) fn clear(&self, tier: Tier) -> u64 {
        let before = self.persistent(|_| true);
        let removed = self.registry.clear(tier);
        self.metrics.tier(tier).evictions(EvictReason::Cleared).add(removed.blocks);
        self.release_gone(before);
        removed.blocks
    }

    pub(crate) fn forget(&self, namespace: NamespaceId) -> u64 {
        let before = self.persistent(|id| id == namespace);
        let Removed { blocks, .. } = self.registry.forget(namespace);
        self.metrics.tier(Tier::G1).evictions(EvictReason::Forgotten).add(blocks);
        self.release_gone(before);
        blocks
    }

    /// Blocks on G3 of the namespaces that `select` picks.
    fn persistent(&self, select: impl Fn(NamespaceId) -> bool) -> Vec<BlockId> {
        let (blocks, _) = self.registry.snapshot(Tier::G3);
        blocks
            .into_iter()
            .filter(|(_, identity)| select(identity.namespace))
            .map(|(block, _)| block)
            .collect()
    }

    /// Tells the workers which of `before` hold nothing any more, so that a restart does not find it again.
    fn release_gone(&self, before: Vec<BlockId>) {
        let (now, _) = self.registry.snapshot(Tier::G3);
        let there: std::collections::HashSet<_> = now.into_iter().map(|(block, _)| block).collect();
        let gone: Vec<_> = before.into_iter().filter(|block| !there.contains(block)).collect();
        self.release(&gone);
    }

    /// These slots of G3 hold nothing that may be found after a restart.
    pub(crate) fn release(&self, slots: &[BlockId]) {
        for part in slots.chunks(Command::MAX_RELEASE) {
            let command = Command::Release { tier: Tier::G3, blocks: part.to_vec() };
            for (rank, failure) in self.broadcast(&command) {
                tracing::warn!(%rank, %failure, "slots of G3 not released: a restart may find their blocks again");
            }
        }
    }
}
