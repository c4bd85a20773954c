//! Accounts of offloads under way, for callers that wait for them.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::time::Instant;

/// The time between two calls that wait for offloads. An offload belongs to the interval in which
/// it was requested; what follows from it (the copy on the next tier, ancestors that go first)
/// belongs to the same interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Interval(u64);

/// Blocks that are to be decided about, queued or running, by interval.
#[derive(Default)]
pub(super) struct Accounts {
    state: Mutex<OpenAccounts>,
    closed: Condvar,
}

#[derive(Default)]
struct OpenAccounts {
    now: Interval,
    /// None of them 0. As many intervals as there are callers that wait.
    open: BTreeMap<Interval, usize>,
}

impl Accounts {
    /// Blocks until nothing is under way, or `deadline` passes. Whether it was reached.
    pub(super) fn wait_idle(&self, deadline: Instant) -> bool {
        self.wait_closed(self.state.lock(), Interval(u64::MAX), deadline)
    }

    /// Blocks until what is under way now, and what follows from it, is over, or `deadline` passes.
    /// What is requested meanwhile is not waited for. Whether that was reached.
    pub(super) fn wait_under_way(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        let last = state.now;
        state.now = Interval(last.0 + 1);
        self.wait_closed(state, last, deadline)
    }

    fn wait_closed(
        &self,
        mut state: MutexGuard<'_, OpenAccounts>,
        last: Interval,
        deadline: Instant,
    ) -> bool {
        let is_open = |state: &OpenAccounts| state.open.keys().next().is_some_and(|first| *first <= last);
        #[cfg(kvbm_sim)]
        MutexGuard::unlocked(&mut state, || {
            kvbm_plan::simulation::wait_until(deadline, || !is_open(&self.state.lock()))
        });
        while is_open(&state) {
            if self.closed.wait_until(&mut state, deadline).timed_out() {
                return !is_open(&state);
            }
        }
        true
    }

    /// The interval of what is requested now.
    pub(super) fn now(&self) -> Interval {
        self.state.lock().now
    }

    pub(super) fn add(&self, interval: Interval, blocks: usize) {
        if blocks > 0 {
            *self.state.lock().open.entry(interval).or_default() += blocks;
        }
    }

    pub(super) fn remove(&self, interval: Interval, blocks: usize) {
        let mut state = self.state.lock();
        let Some(open) = state.open.get_mut(&interval) else { return };
        *open = open.saturating_sub(blocks);
        if *open == 0 {
            state.open.remove(&interval);
            self.closed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_requested_later_is_not_waited_for() {
        let accounts = Accounts::default();
        assert!(accounts.wait_under_way(Instant::now()), "nothing is");
        let before = accounts.now();
        accounts.add(before, 3);
        assert!(!accounts.wait_under_way(Instant::now()));
        let after = accounts.now();
        assert!(after > before);
        let reached = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| accounts.wait_under_way(Instant::now() + Duration::from_secs(60)));
            while accounts.now() == after {
                std::thread::yield_now();
            }
            accounts.add(accounts.now(), 2);
            // What follows from a block of the round is of the round.
            accounts.add(before, 1);
            accounts.remove(before, 3);
            accounts.remove(before, 1);
            waiter.join().unwrap()
        });
        assert!(reached);
        assert!(!accounts.wait_idle(Instant::now()), "the later ones go on");
        accounts.remove(accounts.now(), 2);
        assert!(accounts.wait_idle(Instant::now()));
    }
}
