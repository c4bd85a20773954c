//! Flushes that are under way on the ranks.

use crate::signal::Signal;
use kvbm_plan::{Failure, FailureKind, FlushOutcome, Rank};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Flushes by token.
#[derive(Default)]
pub(crate) struct Flushes {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    pending: HashMap<u64, Pending>,
}

struct Pending {
    outcomes: Vec<Option<FlushOutcome>>,
    complete: Arc<Signal>,
}

/// A flush that was started.
pub(crate) struct Started {
    pub(crate) token: u64,
    complete: Arc<Signal>,
}

impl Flushes {
    pub(crate) fn start(&self, ranks: usize) -> Started {
        let mut state = self.state.lock();
        state.next += 1;
        let token = state.next;
        let complete = Arc::new(Signal::default());
        let pending = Pending { outcomes: vec![None; ranks], complete: Arc::clone(&complete) };
        state.pending.insert(token, pending);
        Started { token, complete }
    }

    /// A rank's answer; repeated and late ones change nothing.
    pub(crate) fn answer(&self, rank: Rank, token: u64, outcome: FlushOutcome) {
        let mut state = self.state.lock();
        let Some(pending) = state.pending.get_mut(&token) else { return };
        match pending.outcomes.get_mut(rank.index()) {
            Some(slot @ None) => *slot = Some(outcome),
            _ => return,
        }
        if pending.outcomes.iter().all(Option::is_some) {
            let complete = Arc::clone(&pending.complete);
            drop(state);
            complete.set();
        }
    }

    /// `rank` will not answer any flush.
    pub(crate) fn lost(&self, rank: Rank, failure: &Failure) {
        let tokens: Vec<u64> = self.state.lock().pending.keys().copied().collect();
        for token in tokens {
            self.answer(rank, token, FlushOutcome::Failed(failure.clone()));
        }
    }

    /// Waits for every rank. Blocks that are durable on all of them.
    ///
    /// # Errors
    /// The first rank that failed or did not answer by `deadline`.
    pub(crate) fn wait(&self, started: &Started, deadline: Instant) -> Result<u64, (Rank, Failure)> {
        started.complete.wait_until(deadline);
        let pending = self.state.lock().pending.remove(&started.token);
        let outcomes = pending.map(|pending| pending.outcomes).unwrap_or_default();
        let mut durable = u64::MAX;
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            let rank = Rank(rank as u16);
            match outcome {
                Some(FlushOutcome::Durable { blocks }) => durable = durable.min(blocks),
                Some(FlushOutcome::Failed(failure)) => return Err((rank, failure)),
                None => {
                    let detail = format!("rank {rank} did not answer the flush in time");
                    return Err((rank, Failure::new(FailureKind::Deadline, detail)));
                }
            }
        }
        Ok(if durable == u64::MAX { 0 } else { durable })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn durable_is_what_every_rank_has() {
        let flushes = Flushes::default();
        let started = flushes.start(2);
        flushes.answer(Rank(0), started.token, FlushOutcome::Durable { blocks: 7 });
        flushes.answer(Rank(0), started.token, FlushOutcome::Durable { blocks: 1 });
        flushes.answer(Rank(1), started.token, FlushOutcome::Durable { blocks: 5 });
        assert_eq!(flushes.wait(&started, Instant::now() + Duration::from_secs(60)), Ok(5));
        flushes.answer(Rank(1), started.token, FlushOutcome::Durable { blocks: 5 });
    }

    #[test]
    fn a_silent_or_failing_rank_is_named() {
        let flushes = Flushes::default();
        let started = flushes.start(2);
        flushes.answer(Rank(0), started.token, FlushOutcome::Durable { blocks: 7 });
        let (rank, failure) = flushes.wait(&started, Instant::now()).unwrap_err();
        assert_eq!((rank, failure.kind), (Rank(1), FailureKind::Deadline));

        let started = flushes.start(1);
        let broken = Failure::new(FailureKind::Io, "EIO");
        flushes.answer(Rank(0), started.token, FlushOutcome::Failed(broken.clone()));
        assert_eq!(flushes.wait(&started, Instant::now()), Err((Rank(0), broken)));
    }
}
