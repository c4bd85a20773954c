//! Pins that end at a time. The pool knows iterations alone, and an engine that is idle has none.

use super::Leader;
use kvbm_pool::{PinError, TierMask};
use kvbm_tokens::{BlockChain, SequenceHash};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::time::Instant;

/// Most hashes of chains that are pinned until a time, all together: 16 MiB.
const MAX_HASHES: usize = 1 << 20;
/// No iteration ends such a pin.
const NEVER: u64 = u64::MAX;

/// A pin until a time that cannot be. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinForError {
    /// The tiers refuse it.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// Too much is remembered.
    #[error(
        "a pin of {asked} blocks: chains of {known} blocks are pinned until a time, and {MAX_HASHES} are the limit; unpin others"
    )]
    TooMany {
        /// Blocks of the chain.
        asked: usize,
        /// Blocks of all chains that are pinned until a time.
        known: usize,
    },
}

/// See the module.
#[derive(Default)]
pub(crate) struct TimedPins(Mutex<Vec<TimedPin>>);

struct TimedPin {
    until: Instant,
    tiers: TierMask,
    hashes: Vec<SequenceHash>,
}

impl TimedPin {
    fn chain(&self) -> BlockChain<'_> {
        BlockChain::of_hashes(&self.hashes)
    }
}

impl Leader {
    /// Pins what is there of `chain` until a time.
    pub(crate) fn pin_until(
        &self,
        chain: BlockChain<'_>,
        tiers: TierMask,
        until: Instant,
    ) -> Result<usize, PinForError> {
        let mut pins = self.timed_pins.0.lock();
        let known: usize = pins.iter().map(|pin| pin.hashes.len()).sum();
        if chain.len() > MAX_HASHES.saturating_sub(known) {
            return Err(PinForError::TooMany { asked: chain.len(), known });
        }
        let pinned = self.pin(chain, tiers, NEVER)?;
        if pinned > 0 {
            pins.push(TimedPin { until, tiers, hashes: chain.hashes().to_vec() });
        }
        Ok(pinned)
    }

    /// Takes the pins of `chain` on `tiers` back, whatever they would have ended with.
    pub(crate) fn unpin(&self, chain: BlockChain<'_>, tiers: TierMask) -> usize {
        let gone: HashSet<_> = chain.hashes().iter().copied().collect();
        let mut pins = self.timed_pins.0.lock();
        for pin in pins.iter_mut().filter(|pin| pin.hashes.iter().all(|hash| gone.contains(hash))) {
            pin.tiers = pin.tiers.iter().filter(|tier| !tiers.contains(*tier)).collect();
        }
        pins.retain(|pin| !pin.tiers.is_empty());
        self.unpin_blocks(chain, tiers)
    }

    /// Ends pins whose time is over. What another pin until a time still holds stays pinned.
    pub(crate) fn end_timed_pins(&self, now: Instant) {
        let mut pins = self.timed_pins.0.lock();
        if pins.iter().all(|pin| pin.until > now) {
            return;
        }
        let (over, rest): (Vec<_>, Vec<_>) = pins.drain(..).partition(|pin| pin.until <= now);
        let mut ended = HashSet::new();
        for pin in &over {
            self.unpin_blocks(pin.chain(), pin.tiers);
            ended.extend(pin.hashes.iter().copied());
        }
        for pin in rest.iter().filter(|pin| pin.hashes.iter().any(|hash| ended.contains(hash))) {
            // They were pinned a moment ago, so there is room.
            let _limit = self.pin(pin.chain(), pin.tiers, NEVER);
        }
        *pins = rest;
    }

    fn unpin_blocks(&self, chain: BlockChain<'_>, tiers: TierMask) -> usize {
        self.groups().map(|group| self.registry.unpin(group, chain.hashes(), tiers)).sum()
    }
}
