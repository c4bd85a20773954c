//! Write backoff: a slot of G3 that failed a write is not written for a while, so that copies go to other slots. Without it the next copies
//! would take the same slots again, because a free slot is taken before any block is evicted. Of several directories, one that takes no
//! writes would keep copies from all.
//!
//! Each slot in backoff costs the tier one more evicted block, for a slot that may be no better. So backoff needs credit, which only
//! successful writes earn: a disk that takes no writes at all, but can be read, keeps nearly all its blocks. Without credit every copy fails in
//! the slot that is free then. After growing pauses one more slot begins a backoff, in case that others can be written.

use kvbm_plan::BlockId;
use kvbm_pool::Withheld;
use parking_lot::Mutex;
use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

/// Before slots are tried again.
const PAUSE: Duration = Duration::from_secs(30);
/// Longest pause before another slot begins a backoff without credit.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);
/// The most credit is one slot for so many of the tier: what goes first for it was not used for longest.
const SLOTS_FOR_ONE: u32 = 16;
/// What a slot that was written earns: of eight directories, seven may take no writes.
const EARNED: usize = 8;

/// See the module.
pub(crate) struct WriteBackoff {
    most_credit: usize,
    state: Mutex<State>,
}

struct State {
    /// Longest in backoff first.
    slots: VecDeque<Withheld>,
    count: usize,
    /// Slots that may begin a backoff before one is written again.
    credit: usize,
    /// Given back to be tried; the outcome is not known yet.
    tried: HashSet<BlockId>,
    /// So many are tried next, and then.
    trial: usize,
    next: Instant,
    /// Of a disk that takes nothing.
    pause: Duration,
}

impl WriteBackoff {
    pub(super) fn new(capacity: u32) -> Self {
        let most_credit = (capacity / SLOTS_FOR_ONE) as usize;
        let state = State {
            slots: VecDeque::new(),
            count: 0,
            credit: most_credit,
            tried: HashSet::new(),
            trial: 1,
            next: Instant::now(),
            pause: PAUSE,
        };
        Self { most_credit, state: Mutex::new(state) }
    }

    /// Slots in backoff.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().count
    }

    /// The slots in backoff.
    pub(super) fn slots(&self) -> Vec<BlockId> {
        self.state.lock().slots.iter().flat_map(Withheld::block_ids).copied().collect()
    }

    /// Writes are over. How many of the failed slots, from the first on, may begin a backoff.
    pub(super) fn writes_ended(&self, written: &[BlockId], failed: &[BlockId], now: Instant) -> usize {
        let mut state = self.state.lock();
        state.credit = (state.credit + EARNED.saturating_mul(written.len())).min(self.most_credit);
        if !written.is_empty() && state.pause > PAUSE {
            (state.pause, state.next) = (PAUSE, now);
        }
        if !state.tried.is_empty() {
            state.trial_ended(written, failed, now);
        }
        failed.len().min(state.credit)
    }

    /// Slots begin a backoff. Whether none was in backoff before.
    pub(super) fn begin(&self, slots: Withheld, now: Instant) -> bool {
        if slots.is_empty() {
            return false;
        }
        let mut state = self.state.lock();
        let are_first = state.count == 0;
        if are_first {
            (state.trial, state.next) = (1, now + PAUSE);
        }
        state.credit = state.credit.saturating_sub(slots.len());
        state.count += slots.len();
        state.slots.push_back(slots);
        are_first
    }

    /// Slots whose backoff is over, for a caller that is about to reserve some. Dropped, they are the first that are taken.
    pub(super) fn due(&self, now: Instant) -> Vec<Withheld> {
        let mut state = self.state.lock();
        if state.count == 0 || now < state.next {
            return Vec::new();
        }
        if state.credit == 0 {
            state.credit = 1;
            state.pause = (state.pause * 2).min(LONGEST_PAUSE);
            state.next = kvbm_plan::deadline_after(now, state.pause);
            return Vec::new();
        }
        state.next = now + PAUSE;
        let trial = state.trial;
        state.take(trial)
    }

    /// All slots in backoff: a worker has opened its disk again.
    pub(super) fn all(&self) -> Vec<Withheld> {
        let mut state = self.state.lock();
        (state.credit, state.trial) = (self.most_credit, 1);
        let count = state.count;
        state.take(count)
    }
}

impl State {
    /// One that could be written says that more can, one that could not that it is too early for others.
    fn trial_ended(&mut self, written: &[BlockId], failed: &[BlockId], now: Instant) {
        let mut tried = |slots: &[BlockId]| slots.iter().filter(|slot| self.tried.remove(slot)).count() > 0;
        let (took, failed) = (tried(written), tried(failed));
        if failed {
            (self.trial, self.next) = (1, now + PAUSE);
        } else if took {
            (self.trial, self.next) = (self.trial.saturating_mul(2), now);
        }
    }

    fn take(&mut self, wanted: usize) -> Vec<Withheld> {
        self.tried.clear();
        let mut taken = Vec::new();
        let mut left = wanted.min(self.count);
        while left > 0
            && let Some(mut slots) = self.slots.pop_front()
        {
            let rest = slots.split_off(left);
            if !rest.is_empty() {
                self.slots.push_front(rest);
            }
            left -= slots.len();
            self.count -= slots.len();
            self.tried.extend(slots.block_ids());
            taken.push(slots);
        }
        taken
    }
}

#[cfg(test)]
mod tests;
