//! One-shot completion, waited for by threads and futures alike. Runtime-neutral.

use parking_lot::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// Set once; every waiter, early or late, sees it.
#[derive(Default)]
pub(crate) struct Signal {
    state: Mutex<SignalState>,
    changed: Condvar,
}

#[derive(Default)]
struct SignalState {
    set: bool,
    wakers: Vec<Waker>,
}

impl Signal {
    /// Sets the signal. Wakers run after the lock is gone: they are foreign code.
    pub(crate) fn set(&self) {
        self.mark().wake();
    }

    /// Sets the signal without running foreign code, for callers that hold a lock of their own.
    #[must_use = "somebody may wait to be woken"]
    pub(crate) fn mark(&self) -> Woken {
        let wakers = {
            let mut state = self.state.lock();
            state.set = true;
            std::mem::take(&mut state.wakers)
        };
        self.changed.notify_all();
        Woken(wakers)
    }

    /// Takes the signal back. Only where nobody waits for it any more.
    pub(crate) fn reset(&self) {
        self.state.lock().set = false;
    }

    pub(crate) fn is_set(&self) -> bool {
        self.state.lock().set
    }

    /// Blocks until the signal is set or `deadline` passes. Whether it is set.
    pub(crate) fn wait_until(&self, deadline: Instant) -> bool {
        #[cfg(kvbm_sim)]
        kvbm_plan::simulation::wait_until(deadline, || self.is_set());
        let mut state = self.state.lock();
        while !state.set {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.set;
            }
        }
        true
    }

    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.set {
            return Poll::Ready(());
        }
        // A future that is polled again replaces its own waker, so the list stays as long as there
        // are waiters.
        if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            state.wakers.push(context.waker().clone());
        }
        Poll::Pending
    }
}

/// Futures that a signal has to wake.
pub(crate) struct Woken(Vec<Waker>);

impl Woken {
    /// Wakes them. A waker that panics keeps neither the others nor the leader from going on.
    pub(crate) fn wake(self) {
        for waker in self.0 {
            if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
                tracing::error!("a waker panicked; its future may not be polled again");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::task::Wake;
    use std::time::Duration;

    #[test]
    fn late_and_early_waiters_see_it() {
        let signal = Arc::new(Signal::default());
        assert!(!signal.wait_until(Instant::now() + Duration::from_millis(1)));
        let waiter = {
            let signal = Arc::clone(&signal);
            std::thread::spawn(move || signal.wait_until(Instant::now() + Duration::from_secs(60)))
        };
        signal.set();
        assert!(waiter.join().unwrap());
        assert!(signal.is_set() && signal.wait_until(Instant::now()));
        assert!(signal.poll(&Context::from_waker(Waker::noop())).is_ready());
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker of somebody else's");
        }
    }

    #[test]
    fn a_waker_that_panics_stops_nobody() {
        let signal = Signal::default();
        let waker = Arc::new(Panics).into();
        assert!(signal.poll(&Context::from_waker(&waker)).is_pending());
        signal.set();
        assert!(signal.is_set());
    }
}
