//! Blocks of G1 that requests may hold together.
//!
//! A request holds its cached blocks while it waits for room for the others. Without a limit
//! several requests could hold all of G1 and wait for each other for ever.

use std::sync::{Condvar, Mutex, PoisonError};

/// A counting semaphore over blocks, first come first served.
pub(super) struct Permits {
    total: usize,
    state: Mutex<FreePermits>,
    changed: Condvar,
}

struct FreePermits {
    free: usize,
    /// Who is next: a large request is not starved by small ones.
    serving: u64,
    next: u64,
}

/// Blocks that one request may hold; given back on drop.
pub(super) struct Permit<'a> {
    permits: &'a Permits,
    blocks: usize,
}

impl Permits {
    /// `total` blocks, at least one.
    pub(super) fn new(total: usize) -> Self {
        let total = total.max(1);
        Self {
            total,
            state: Mutex::new(FreePermits { free: total, serving: 0, next: 0 }),
            changed: Condvar::new(),
        }
    }

    /// The most that one request can get.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Waits for `blocks` blocks, or for all where there are fewer.
    pub(super) fn acquire(&self, blocks: usize) -> Permit<'_> {
        let blocks = blocks.min(self.total);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = state.next;
        state.next += 1;
        while state.serving != ticket || state.free < blocks {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.free -= blocks;
        state.serving += 1;
        drop(state);
        self.changed.notify_all();
        Permit { permits: self, blocks }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.permits.state.lock().unwrap_or_else(PoisonError::into_inner).free += self.blocks;
        self.permits.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    #[test]
    fn holders_never_have_more_than_the_total_and_all_get_their_turn() {
        let (permits, held, served) = (Permits::new(10), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for worker in 0..8 {
                let (permits, held, served) = (&permits, &held, &served);
                scope.spawn(move || {
                    for round in 0..200 {
                        let want = (worker * 7 + round) % 15;
                        let permit = permits.acquire(want);
                        let now = held.fetch_add(permit.blocks, SeqCst) + permit.blocks;
                        assert!(now <= 10, "{now} of 10 held");
                        held.fetch_sub(permit.blocks, SeqCst);
                        served.fetch_add(1, SeqCst);
                    }
                });
            }
        });
        assert_eq!(served.into_inner(), 1600);
        assert_eq!(permits.acquire(99).blocks, 10);
    }
}
