//! Losses of whole tiers. The hold of the lock that removes a tier's last blocks counts the loss,
//! so a thread with the lock sees the count of every loss whose blocks are gone.

use crate::losses::Losses;
use crate::tier::{TIERS, TierMask};
use std::sync::atomic::{AtomicU32, Ordering};

/// Losses so far. Threads write them under the lock and read them at any time.
#[derive(Default)]
pub(crate) struct LossCounts {
    /// Losses of any tiers.
    all: AtomicU32,
    /// For each tier, the number of its last loss.
    last: [AtomicU32; TIERS],
}

impl LossCounts {
    /// The time after so many losses: blocks given out from now on belong to it.
    #[inline]
    pub(crate) fn now(&self) -> Losses {
        Losses(self.all.load(Ordering::Acquire))
    }

    /// Whether `tier` lost its blocks since. Once true, it stays true; false is certain only under
    /// the lock.
    #[inline]
    pub(crate) fn is_lost(&self, tier: usize, since: Losses) -> bool {
        self.last.get(tier).is_some_and(|last| last.load(Ordering::Acquire) > since.0)
    }

    /// Counts a loss of `tiers`. The caller has the lock.
    pub(crate) fn count(&self, tiers: TierMask) {
        let number = self.all.load(Ordering::Relaxed).saturating_add(1);
        // The tiers first: a thread that reads the new total finds them lost.
        for tier in tiers.iter() {
            self.last[tier.index()].store(number, Ordering::Release);
        }
        self.all.store(number, Ordering::Release);
    }
}
