//! Requests to ranks that wait for answers, by token.

use crate::signal::Signal;
use kvbm_plan::{Failure, FailureKind, Rank};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// Requests that are not answered in full.
pub(crate) struct Requests<T> {
    state: Mutex<OpenRequests<T>>,
}

struct OpenRequests<T> {
    last: u64,
    pending: HashMap<u64, Pending<T>>,
}

struct Pending<T> {
    /// The rank of the first answer.
    first: u16,
    answers: Vec<Option<T>>,
    complete: Arc<Signal>,
}

/// A request that was made. Once it is dropped, its answers are ignored.
pub(crate) struct Request<T> {
    requests: Arc<Requests<T>>,
    pub(crate) token: u64,
    complete: Arc<Signal>,
}

impl<T> Default for Requests<T> {
    fn default() -> Self {
        Self { state: Mutex::new(OpenRequests { last: 0, pending: HashMap::new() }) }
    }
}

impl<T> Requests<T> {
    /// A token that no request has: for commands whose answer nobody waits for.
    pub(crate) fn token(&self) -> u64 {
        let mut state = self.state.lock();
        state.last += 1;
        state.last
    }

    /// A request to the first so many ranks.
    pub(crate) fn start(self: &Arc<Self>, ranks: usize) -> Request<T> {
        self.start_from(Rank(0), ranks)
    }

    /// A request to one rank.
    pub(crate) fn start_with(self: &Arc<Self>, rank: Rank) -> Request<T> {
        self.start_from(rank, 1)
    }

    fn start_from(self: &Arc<Self>, first: Rank, ranks: usize) -> Request<T> {
        let token = self.token();
        let complete = Arc::new(Signal::default());
        let answers = (0..ranks).map(|_| None).collect();
        let pending = Pending { first: first.0, answers, complete: Arc::clone(&complete) };
        self.state.lock().pending.insert(token, pending);
        Request { requests: Arc::clone(self), token, complete }
    }

    /// A rank's answer. `false` where nobody waits for it: repeated, late, or of no such rank.
    pub(crate) fn answer(&self, rank: Rank, token: u64, answer: T) -> bool {
        let mut state = self.state.lock();
        let Some(pending) = state.pending.get_mut(&token) else { return false };
        let at = rank.index().checked_sub(usize::from(pending.first));
        match at.and_then(|at| pending.answers.get_mut(at)) {
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

    /// `rank` will not answer any more: `answer` stands for its answers.
    pub(crate) fn lost(&self, rank: Rank, answer: impl Fn() -> T) {
        let tokens: Vec<u64> = self.state.lock().pending.keys().copied().collect();
        for token in tokens {
            self.answer(rank, token, answer());
        }
    }
}

impl<T> Request<T> {
    /// Whether [`wait`](Self::wait) would not wait.
    pub(crate) fn is_answered(&self) -> bool {
        self.complete.is_set()
    }

    /// Waits for every rank, and takes their answers, rank by rank.
    ///
    /// # Errors
    /// The first rank whose answer `take` refuses, or that did not answer `what` by `deadline`.
    pub(crate) fn wait<R>(
        self,
        deadline: Instant,
        what: &str,
        take: impl FnMut(T) -> Result<R, Failure>,
    ) -> Result<Vec<R>, (Rank, Failure)> {
        self.wait_each(deadline, what, take).into_iter().collect()
    }

    /// The same, with the result of each rank.
    pub(crate) fn wait_each<R>(
        self,
        deadline: Instant,
        what: &str,
        mut take: impl FnMut(T) -> Result<R, Failure>,
    ) -> Vec<Result<R, (Rank, Failure)>> {
        self.complete.wait_until(deadline);
        let pending = self.requests.state.lock().pending.remove(&self.token);
        let (first, answers) = pending.map(|pending| (pending.first, pending.answers)).unwrap_or_default();
        let each = answers.into_iter().zip(first..).map(|(answer, rank)| {
            let late = || {
                let detail = format!("rank {rank} did not answer {what} in time");
                Err(Failure::new(FailureKind::Deadline, detail))
            };
            answer.map_or_else(late, &mut take).map_err(|failure| (Rank(rank), failure))
        });
        each.collect()
    }
}

impl<T> Drop for Request<T> {
    fn drop(&mut self) {
        self.requests.state.lock().pending.remove(&self.token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn taken(request: Request<u32>, deadline: Instant) -> Result<Vec<u32>, (Rank, FailureKind)> {
        let take = |answer| if answer == 9 { Err(Failure::new(FailureKind::Io, "EIO")) } else { Ok(answer) };
        request.wait(deadline, "a test", take).map_err(|(rank, failure)| (rank, failure.kind))
    }

    #[test]
    fn every_rank_answers_once() {
        let requests = Arc::new(Requests::default());
        let request = requests.start(2);
        let token = request.token;
        assert!(requests.answer(Rank(1), token, 7) && !request.is_answered());
        assert!(!requests.answer(Rank(1), token, 1), "repeated");
        assert!(!requests.answer(Rank(5), token, 1), "no such rank");
        assert!(requests.answer(Rank(0), token, 5) && request.is_answered());
        assert_eq!(taken(request, Instant::now() + Duration::from_secs(60)), Ok(vec![5, 7]));
        assert!(!requests.answer(Rank(0), token, 5), "late");
    }

    #[test]
    fn one_rank_answers_for_itself() {
        let requests = Arc::new(Requests::default());
        let request = requests.start_with(Rank(3));
        assert!(!requests.answer(Rank(0), request.token, 1) && !requests.answer(Rank(4), request.token, 1));
        assert!(requests.answer(Rank(3), request.token, 9) && request.is_answered());
        assert_eq!(taken(request, Instant::now()), Err((Rank(3), FailureKind::Io)));
    }

    #[test]
    fn a_rank_that_fails_is_lost_or_does_not_answer_is_named() {
        let requests = Arc::new(Requests::default());
        let request = requests.start(2);
        requests.answer(Rank(0), request.token, 7);
        assert_eq!(taken(request, Instant::now()), Err((Rank(1), FailureKind::Deadline)));
        let request = requests.start(1);
        requests.answer(Rank(0), request.token, 9);
        assert_eq!(taken(request, Instant::now()), Err((Rank(0), FailureKind::Io)));
        let request = requests.start(2);
        requests.lost(Rank(1), || 9);
        requests.answer(Rank(0), request.token, 1);
        assert_eq!(taken(request, Instant::now()), Err((Rank(1), FailureKind::Io)));
        drop(requests.start(1));
        assert!(requests.state.lock().pending.is_empty());
    }
}
