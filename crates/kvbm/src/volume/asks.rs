//! Questions to volumes that the ranks have not all answered.

use crate::signal::Signal;
use kvbm_plan::{Failure, FailureKind, Rank, VolumeAnswer};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Questions by token.
#[derive(Default)]
pub(crate) struct VolumeAsks {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    pending: HashMap<u64, Pending>,
}

struct Pending {
    answers: Vec<Option<VolumeAnswer>>,
    complete: Arc<Signal>,
}

/// A question that was asked. Dropped, its answers are ignored.
pub(crate) struct Asked {
    asks: Arc<VolumeAsks>,
    pub(crate) token: u64,
    complete: Arc<Signal>,
}

impl VolumeAsks {
    pub(crate) fn start(self: &Arc<Self>, ranks: usize) -> Asked {
        let mut state = self.state.lock();
        state.next += 1;
        let token = state.next;
        let complete = Arc::new(Signal::default());
        state.pending.insert(token, Pending { answers: vec![None; ranks], complete: Arc::clone(&complete) });
        drop(state);
        Asked { asks: Arc::clone(self), token, complete }
    }

    /// A rank's answer. `false` where nobody waits for it: repeated, late, or to an order.
    pub(crate) fn answer(&self, rank: Rank, token: u64, answer: VolumeAnswer) -> bool {
        let mut state = self.state.lock();
        let Some(pending) = state.pending.get_mut(&token) else { return false };
        match pending.answers.get_mut(rank.index()) {
            Some(slot @ None) => *slot = Some(answer),
            _ => return false,
        }
        if pending.answers.iter().all(Option::is_some) {
            let complete = Arc::clone(&pending.complete);
            drop(state);
            complete.set();
        }
        true
    }
}

impl Asked {
    /// Whether [`wait`](Self::wait) would not wait.
    pub(crate) fn is_answered(&self) -> bool {
        self.complete.is_set()
    }

    /// Waits for every rank.
    ///
    /// # Errors
    /// The first rank that failed or did not answer by `deadline`.
    pub(crate) fn wait(self, deadline: Instant) -> Result<Vec<VolumeAnswer>, Failure> {
        self.complete.wait_until(deadline);
        let answers = self.asks.state.lock().pending.remove(&self.token).map(|pending| pending.answers);
        let mut all = Vec::new();
        for (rank, answer) in answers.unwrap_or_default().into_iter().enumerate() {
            match answer {
                Some(VolumeAnswer::Failed(failure)) => return Err(failure),
                Some(answer) => all.push(answer),
                None => {
                    let detail = format!("rank {rank} did not hear of the volume in time");
                    return Err(Failure::new(FailureKind::Deadline, detail));
                }
            }
        }
        Ok(all)
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.asks.state.lock().pending.remove(&self.token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_answers_once() {
        let asks = Arc::new(VolumeAsks::default());
        let asked = asks.start(2);
        let present = |there| VolumeAnswer::Present(vec![there]);
        assert!(asks.answer(Rank(1), asked.token, present(true)));
        assert!(!asks.answer(Rank(1), asked.token, present(false)), "repeated");
        assert!(!asks.answer(Rank(7), asked.token, present(false)), "no such rank");
        assert!(asks.answer(Rank(0), asked.token, present(false)));
        let token = asked.token;
        assert_eq!(asked.wait(Instant::now()), Ok(vec![present(false), present(true)]));
        assert!(!asks.answer(Rank(0), token, present(true)), "late");
        let asked = asks.start(1);
        assert_eq!(asked.wait(Instant::now()).unwrap_err().kind, FailureKind::Deadline);
        assert!(asks.state.lock().pending.is_empty());
    }
}
