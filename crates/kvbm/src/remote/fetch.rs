//! Blocks on their way from a peer to G2, and the transfer that follows.

use crate::signal::Signal;
use crate::transfers::Handle;
use kvbm_plan::Failure;
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

/// What follows when a fetch is over: the transfer of the blocks from G2, where there is one.
pub(crate) type Then = Box<dyn FnOnce() -> Option<Handle> + Send>;

/// Blocks on their way from a peer. Over when `then` has run: what it started is in
/// [`take_handle`](Self::take_handle).
pub(crate) struct Fetch {
    over: Signal,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_cancelled: bool,
    then: Option<Then>,
    handle: Option<Handle>,
    failure: Option<Failure>,
    /// Wait for what follows, too.
    wakers: Vec<Waker>,
}

/// A caller's share in a fetch. Dropped, it takes back what should follow; the blocks come to G2
/// all the same.
#[must_use = "dropping it cancels what should follow"]
pub(crate) struct Fetching(Arc<Fetch>);

impl Fetching {
    #[cfg(feature = "worker")]
    pub(crate) fn new(then: Then) -> Self {
        let state = Mutex::new(State { then: Some(then), ..State::default() });
        Self(Arc::new(Fetch { over: Signal::default(), state }))
    }

    /// What waits for the blocks, then until it is known whether a layer arrives, for whoever must
    /// not borrow this so long.
    pub(crate) fn layer_wait(&self) -> impl Fn(u32, Instant) + use<> {
        let fetch = Arc::clone(&self.0);
        move |layer, deadline| {
            fetch.wait_until(deadline);
            fetch.wait_layer(layer, deadline);
        }
    }

    /// For the thread that brings the blocks.
    #[cfg(feature = "worker")]
    pub(crate) fn share(&self) -> Arc<Fetch> {
        Arc::clone(&self.0)
    }
}

impl std::ops::Deref for Fetching {
    type Target = Fetch;

    fn deref(&self) -> &Fetch {
        &self.0
    }
}

impl Drop for Fetching {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Fetch {
    /// The blocks are on G2, or `failure` says why not all of them: starts what follows.
    #[cfg(feature = "worker")]
    pub(crate) fn finish(&self, failure: Option<Failure>) {
        let then = {
            let mut state = self.state.lock();
            state.failure = failure;
            state.then.take()
        };
        // Without the lock: it starts a transfer.
        let handle = then.and_then(|then| then());
        let dropped = {
            let mut state = self.state.lock();
            let wakers = std::mem::take(&mut state.wakers);
            match handle {
                Some(handle) if !state.is_cancelled => {
                    for waker in wakers {
                        let _pending = handle.poll(&Context::from_waker(&waker));
                    }
                    state.handle.replace(handle)
                }
                other => other,
            }
        };
        drop(dropped);
        self.over.set();
    }

    /// Nothing follows any more.
    pub(crate) fn cancel(&self) {
        let mut state = self.state.lock();
        state.is_cancelled = true;
        let dropped = (state.then.take(), state.handle.take());
        drop(state);
        // It may give up a transfer.
        drop(dropped);
    }

    /// Whether the blocks have come, or will not, and what follows has been started.
    pub(crate) fn is_over(&self) -> bool {
        self.over.is_set()
    }

    /// Whether what follows is done as well, or will not follow.
    pub(crate) fn is_done(&self) -> bool {
        let state = self.state.lock();
        state.is_cancelled || (self.over.is_set() && state.handle.as_ref().is_none_or(Handle::is_done))
    }

    pub(crate) fn wait_until(&self, deadline: Instant) -> bool {
        self.over.wait_until(deadline)
    }

    /// Waits for what follows, too.
    pub(crate) fn poll(&self, context: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.is_cancelled {
            return Poll::Ready(());
        }
        if self.over.poll(context).is_pending() {
            let waker = context.waker();
            match &state.handle {
                Some(handle) => {
                    let _pending = handle.poll(context);
                }
                None if state.wakers.iter().any(|known| known.will_wake(waker)) => {}
                None => state.wakers.push(waker.clone()),
            }
            return Poll::Pending;
        }
        state.handle.as_ref().map_or(Poll::Ready(()), |handle| handle.poll(context))
    }

    /// Waits until it is known whether `layer` arrives with the transfer that follows.
    fn wait_layer(&self, layer: u32, deadline: Instant) {
        let wait = self.state.lock().handle.as_ref().map(Handle::layer_wait);
        if let Some(wait) = wait {
            wait(layer, deadline);
        }
    }

    /// Looks at the transfer that follows, where it has begun.
    pub(crate) fn with_handle<R>(&self, look: impl FnOnce(&Handle) -> R) -> Option<R> {
        self.state.lock().handle.as_ref().map(look)
    }

    /// The transfer that follows. Once.
    pub(crate) fn take_handle(&self) -> Option<Handle> {
        self.state.lock().handle.take()
    }

    /// Why not all blocks came.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.state.lock().failure.clone()
    }
}
