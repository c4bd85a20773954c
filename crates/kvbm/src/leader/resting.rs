//! Slots of G3 that could not be written are left alone for a while, so that copies go elsewhere: a free slot is taken before any block
//! is evicted, so the next copies would take the same places again, and of several directories one that takes no writes would keep copies
//! from all.
//!
//! Each slot that rests makes one more block leave the tier for a slot that may be no better. So they rest on credit, which only what is
//! written earns: of a disk that takes no writes at all, but can be read, nearly everything stays. Where the credit is used up every copy
//! fails in the slot that is free then. After ever longer pauses one more rests, in case that others can be written.

use kvbm_plan::BlockId;
use kvbm_pool::Withheld;
use parking_lot::Mutex;
use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

/// Before slots are tried again.
const PAUSE: Duration = Duration::from_secs(30);
/// Before another one rests without credit, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);
/// The most credit is one slot for so many of the tier: what goes first for it was not used for longest.
const SLOTS_FOR_ONE: u32 = 16;
/// What a slot that was written earns: of eight directories, seven may take no writes.
const EARNED: usize = 8;

/// See the module.
pub(crate) struct Resting {
    most_credit: usize,
    state: Mutex<State>,
}

struct State {
    /// Those that have rested longest first.
    slots: VecDeque<Withheld>,
    count: usize,
    /// Slots that may begin to rest before one is written again.
    credit: usize,
    /// Given back to be tried, and not heard of since.
    tried: HashSet<BlockId>,
    /// So many are tried next, and then.
    trial: usize,
    next: Instant,
    /// Of a disk that takes nothing.
    pause: Duration,
}

impl Resting {
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

    /// How many rest.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().count
    }

    /// Those that rest.
    pub(super) fn slots(&self) -> Vec<BlockId> {
        self.state.lock().slots.iter().flat_map(Withheld::block_ids).copied().collect()
    }

    /// Slots were written, or could not be. How many of the latter, from the first on, are to rest.
    pub(super) fn hears(&self, written: &[BlockId], failed: &[BlockId], now: Instant) -> usize {
        let mut state = self.state.lock();
        state.credit = (state.credit + EARNED.saturating_mul(written.len())).min(self.most_credit);
        if !written.is_empty() && state.pause > PAUSE {
            (state.pause, state.next) = (PAUSE, now);
        }
        if !state.tried.is_empty() {
            state.hears_of_trial(written, failed, now);
        }
        failed.len().min(state.credit)
    }

    /// Slots begin to rest. Whether none did before.
    pub(super) fn rest(&self, slots: Withheld, now: Instant) -> bool {
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

    /// Slots that have rested and are to be tried, for whoever is about to reserve some. Dropped, they are the first that are taken.
    pub(super) fn due(&self, now: Instant) -> Vec<Withheld> {
        let mut state = self.state.lock();
        if state.count == 0 || now < state.next {
            return Vec::new();
        }
        if state.credit == 0 {
            state.credit = 1;
            state.pause = (state.pause * 2).min(LONGEST_PAUSE);
            state.next = now + state.pause;
            return Vec::new();
        }
        state.next = now + PAUSE;
        let trial = state.trial;
        state.take(trial)
    }

    /// All that rest: a worker has opened its disk again.
    pub(super) fn all(&self) -> Vec<Withheld> {
        let mut state = self.state.lock();
        (state.credit, state.trial) = (self.most_credit, 1);
        let count = state.count;
        state.take(count)
    }
}

impl State {
    /// One that could be written says that more can, one that could not that it is too early for others.
    fn hears_of_trial(&mut self, written: &[BlockId], failed: &[BlockId], now: Instant) {
        let mut heard = |slots: &[BlockId]| slots.iter().filter(|slot| self.tried.remove(slot)).count() > 0;
        let (took, failed) = (heard(written), heard(failed));
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
