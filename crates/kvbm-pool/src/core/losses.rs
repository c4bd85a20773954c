//! What tiers lost. A loss is counted in the hold that takes the tier's last blocks from the registry, of all shards: who holds a
//! shard sees the count of every loss whose blocks are gone from it.

use super::register::Batch;
use super::{Core, Store};
use crate::error::RegisterError;
use crate::losses::{Losses, Lost};
use crate::tier::{TIERS, TierMask};
use kvbm_plan::Tier;
use std::sync::atomic::{AtomicU32, Ordering};

/// Read with every batch and hardly ever written, so in a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
pub(super) struct LossCounts {
    /// Losses so far, of whichever tiers.
    all: AtomicU32,
    /// For each tier, which of them was its last.
    last: [AtomicU32; TIERS],
}

impl Store {
    /// What is given out from now on belongs to the time after so many losses.
    #[inline]
    pub(crate) fn losses(&self) -> Losses {
        Losses(self.losses.all.load(Ordering::Acquire))
    }

    /// Whether `tier` lost what it held since. True, it stays true; false is for sure while a shard is held.
    #[inline]
    pub(crate) fn is_lost(&self, tier: usize, since: Losses) -> bool {
        self.losses.last.get(tier).is_some_and(|last| last.load(Ordering::Acquire) > since.0)
    }
}

impl Core<'_> {
    /// Counts a loss of `tiers`. All shards are held.
    pub(crate) fn count_loss(&mut self, tiers: TierMask) {
        let counts = &self.store.losses;
        let number = counts.all.load(Ordering::Relaxed).saturating_add(1);
        for tier in tiers.iter() {
            counts.last[tier.index()].store(number, Ordering::Release);
        }
        counts.all.store(number, Ordering::Release);
    }

    /// Whether what is in the slots of a batch is gone.
    #[inline]
    pub(super) fn lacks(&self, batch: &Batch<'_>) -> bool {
        self.store.is_lost(batch.tier, batch.losses)
    }

    /// Refuses a batch of which that is so, and counts it.
    #[inline]
    pub(super) fn refuse_lost(&mut self, batch: &Batch<'_>) -> Result<(), RegisterError> {
        if !self.lacks(batch) {
            return Ok(());
        }
        self.first_mut().tiers[batch.tier].counters.registrations_lost += 1;
        Err(RegisterError::Lost(Lost { tier: Tier::SLOTTED[batch.tier] }))
    }
}
