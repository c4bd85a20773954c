//! The callers that want the result of a transfer.

use super::{Outcome, Transfer};
use crate::signal::Woken;
use kvbm_plan::Failure;
use std::sync::Arc;
use std::time::Instant;

/// What a caller's loss of interest did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// It is over, or about to be.
    Over,
    /// Others still wait for it.
    Shared,
    /// Nobody does: it was given up, and what has not started is to be cancelled.
    Abandoned,
}

/// A caller's share in a transfer.
pub(crate) struct Interest {
    pub(crate) transfer: Arc<Transfer>,
    /// Whether somebody else had started it.
    pub(crate) joined: bool,
}

impl Drop for Interest {
    fn drop(&mut self) {
        self.transfer.drop_seen_outcome();
    }
}

impl Interest {
    /// Lets go; a transfer that this was the last share of is given up for `reason`. What arrived
    /// stays pinned until this is dropped.
    pub(crate) fn release(&self, reason: &Failure) -> Released {
        self.transfer.release(reason)
    }

    /// Lets go without an end to the transfer.
    pub(crate) fn detach(&self) {
        let mut state = self.transfer.state.lock();
        state.interested = state.interested.saturating_sub(1);
    }
}

impl Transfer {
    /// A caller that wants the result, from the start.
    pub(crate) fn interest(self: &Arc<Self>) -> Interest {
        self.state.lock().interested += 1;
        Interest { transfer: Arc::clone(self), joined: false }
    }

    /// One more caller that wants the result. A transfer that nobody wanted any more is wanted
    /// again, and what was kept of it stays pinned; `None` where it was given up because it is
    /// late.
    pub(crate) fn join(self: &Arc<Self>, now: Instant) -> Option<Interest> {
        let mut given_up = Outcome::default();
        let mut state = self.state.lock();
        if state.abandoned.is_some() {
            if now >= self.deadline {
                return None;
            }
            state.abandoned = None;
            given_up = std::mem::take(&mut state.outcome);
            state.front = given_up.arrived.take();
            self.settled.reset();
        }
        state.interested += 1;
        drop(state);
        drop(given_up);
        Some(Interest { transfer: Arc::clone(self), joined: true })
    }

    /// One caller less. Decided in one step with [`join`](Self::join): a transfer that was joined
    /// in time goes on.
    fn release(&self, reason: &Failure) -> Released {
        let mut state = self.state.lock();
        state.interested = state.interested.saturating_sub(1);
        if state.parts.is_none() || state.abandoned.is_some() {
            return Released::Over;
        }
        if state.interested > 0 {
            return Released::Shared;
        }
        self.give_up(&mut state, reason);
        let woken = self.mark_settled();
        drop(state);
        woken.into_iter().for_each(Woken::wake);
        Released::Abandoned
    }

    /// What arrived is let go once the last caller is through with the outcome, although the leader
    /// may hold the transfer a moment longer.
    fn drop_seen_outcome(&self) {
        let mut state = self.state.lock();
        let arrived = if state.interested == 0 { state.outcome.arrived.take() } else { None };
        drop(state);
        drop(arrived);
    }
}
