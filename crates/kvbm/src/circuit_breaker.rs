//! A circuit breaker: stops requests to a store that fails or hangs, so that not every request
//! waits for its deadline, and probes the store after a pause.

use kvbm_plan::{Failure, FailureKind, deadline_after};
use std::time::{Duration, Instant};

/// The first pause.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Failures without an answer between them that open a breaker.
const PATIENCE: u32 = 2;
/// Longest wait for the result of a probe, also where its caller waits without a limit.
const LONGEST_PROBE: Duration = Duration::from_secs(3600);

/// Stops requests to a store that fails or hangs. Its states:
///
/// - *Closed*: every request is allowed. Two failures more than answers open it.
/// - *Open*: no request is allowed until a pause is over: 500 ms, doubled after each failed probe,
///   up to `longest`. Results of requests from before change nothing.
/// - *Half-open*: the first request after the pause is the probe. Others are not allowed until its
///   result is recorded, or until the longest time that a probe may take is over. An answer closes
///   the breaker, so that one more failure opens it again; a failure opens it.
#[derive(Debug)]
pub(crate) struct CircuitBreaker {
    phase: Phase,
    /// The next pause.
    pause: Duration,
    longest: Duration,
    /// How long a probe may take.
    probe: Duration,
    /// When the store last delivered or took a block of any request.
    served: Option<Instant>,
    /// The last failure, while the breaker is open or half-open.
    failure: Option<Failure>,
}

/// What [`CircuitBreaker::record`] changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateChange {
    None,
    /// Requests are not allowed from now on.
    Opened,
    /// Requests are allowed again.
    Closed,
}

/// The state of a circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CircuitState {
    /// Requests are sent.
    Closed,
    /// Requests are not sent: the last ones failed.
    Open,
    /// One request is sent as a probe, others are not.
    HalfOpen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// So many failures more than answers were recorded.
    Closed { failures: u32 },
    /// Until the pause is over.
    Open { until: Instant },
    /// A probe is under way. Another one is allowed after `until`.
    HalfOpen { until: Instant },
}

impl CircuitBreaker {
    /// A closed breaker. Pauses grow up to `longest`; a probe may take up to `probe`.
    pub(crate) fn new(longest: Duration, probe: Duration) -> Self {
        Self {
            phase: Phase::Closed { failures: 0 },
            pause: FIRST_PAUSE.min(longest),
            longest,
            probe: probe.min(LONGEST_PROBE),
            served: None,
            failure: None,
        }
    }

    pub(crate) fn state(&self) -> CircuitState {
        match self.phase {
            Phase::Closed { .. } => CircuitState::Closed,
            Phase::Open { .. } => CircuitState::Open,
            Phase::HalfOpen { .. } => CircuitState::HalfOpen,
        }
    }

    /// Whether a request may be sent now. Asking changes nothing: the probe is the request that is
    /// [sent](Self::note_request).
    pub(crate) fn allows(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Closed { .. } => true,
            Phase::Open { until } | Phase::HalfOpen { until } => now >= until,
        }
    }

    /// A request is sent.
    pub(crate) fn note_request(&mut self, now: Instant) {
        if self.is_open() && self.allows(now) {
            self.phase = Phase::HalfOpen { until: deadline_after(now, self.pause.max(self.probe)) };
        }
    }

    /// Whether it is open or half-open.
    pub(crate) fn is_open(&self) -> bool {
        self.state() != CircuitState::Closed
    }

    /// The last failure, while it is open or half-open.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failure.clone()
    }

    /// The store delivered or took a block, although the request is not over.
    pub(crate) fn note_service(&mut self, now: Instant) {
        self.served = Some(now);
    }

    /// Requests that began at `began` are over. Requests that waited behind others until they were
    /// late count as failed only where the store served those others no block since.
    pub(crate) fn record(&mut self, results: &RequestResults, began: Instant, now: Instant) -> StateChange {
        let RequestResults { answered, failures, is_late, was_crowded_out, .. } = *results;
        let hangs = was_crowded_out && self.served.is_none_or(|served| served < began);
        if answered && !is_late {
            self.failure = None;
            return if self.succeeded() { StateChange::Closed } else { StateChange::None };
        }
        if !is_late && failures == 0 && !hangs {
            return StateChange::None;
        }
        let opened = self.failed(now);
        if self.is_open() {
            self.failure = results.first.clone().or_else(|| self.failure.take());
        }
        if opened { StateChange::Opened } else { StateChange::None }
    }

    /// An answer. Whether it closed the breaker. It makes up for one failure.
    fn succeeded(&mut self) -> bool {
        let was_open = self.is_open();
        let failures = match self.phase {
            Phase::Closed { failures } => failures.saturating_sub(1),
            Phase::Open { .. } | Phase::HalfOpen { .. } => PATIENCE - 1,
        };
        if failures == 0 {
            self.pause = FIRST_PAUSE.min(self.longest);
        }
        self.phase = Phase::Closed { failures };
        was_open
    }

    /// A failure. Whether it opened a closed breaker.
    fn failed(&mut self, now: Instant) -> bool {
        let first = match self.phase {
            Phase::Open { .. } => return false,
            Phase::Closed { failures } if failures + 1 < PATIENCE => {
                self.phase = Phase::Closed { failures: failures + 1 };
                return false;
            }
            Phase::Closed { .. } => true,
            Phase::HalfOpen { .. } => {
                self.pause = self.pause.saturating_mul(2).min(self.longest);
                false
            }
        };
        self.phase = Phase::Open { until: deadline_after(now, self.pause) };
        first
    }
}

/// The results of requests to one store.
#[derive(Debug, Default)]
pub(crate) struct RequestResults {
    /// One request was answered.
    pub(crate) answered: bool,
    /// Requests that the store failed.
    pub(crate) failures: usize,
    /// The first failure of the store, else the reason why the store was not asked or is late.
    pub(crate) first: Option<Failure>,
    /// What was answered came too late.
    pub(crate) is_late: bool,
    /// Requests were not sent, because others on the path went first for too long.
    pub(crate) was_crowded_out: bool,
}

impl RequestResults {
    /// The result of one block, or of one question.
    pub(crate) fn add(&mut self, block: Option<&Failure>) {
        match block.map(|failure| failure.kind) {
            None
            | Some(FailureKind::Missing | FailureKind::Corrupt | FailureKind::Full | FailureKind::Differs) => {
                self.answered = true;
            }
            Some(FailureKind::Io | FailureKind::Deadline) => {
                // A failure of the store says more than what others waited for.
                if self.failures == 0 {
                    self.first = block.cloned();
                }
                self.failures += 1;
            }
            Some(FailureKind::PathBusy) => {
                self.was_crowded_out = true;
                self.first = self.first.take().or_else(|| block.cloned());
            }
            // The store was not asked, or is not itself at fault.
            Some(_) => {}
        }
    }

    /// The store was asked in time and served nothing until the request was late.
    pub(crate) fn add_late(&mut self, late: Failure) {
        self.is_late = true;
        self.first.get_or_insert(late);
    }

    /// Whether they say anything about the store.
    pub(crate) fn are_conclusive(&self) -> bool {
        self.answered || self.failures > 0 || self.is_late || self.was_crowded_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_one_tries_after_each() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = CircuitBreaker::new(Duration::from_secs(1), Duration::ZERO);
        assert!(!breaker.failed(at(0)) && breaker.allows(at(0)), "once is nothing");
        assert!(breaker.failed(at(0)));
        assert!(!breaker.allows(at(499)));
        assert!(breaker.allows(at(500)) && breaker.allows(at(500)), "who does not ask leaves it to others");
        breaker.note_request(at(500));
        assert!(!breaker.allows(at(501)), "one");
        assert!(!breaker.failed(at(600)), "said before");
        assert!(!breaker.allows(at(1599)) && breaker.allows(at(1600)));
        breaker.note_request(at(1600));
        breaker.failed(at(1700));
        assert!(breaker.allows(at(2700)), "at most the longest pause");
        assert!(breaker.succeeded());
        assert!(breaker.allows(at(2700)) && !breaker.is_open());
    }

    #[test]
    fn every_step_between_its_states() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = CircuitBreaker::new(Duration::from_secs(30), Duration::from_secs(5));
        breaker.note_request(at(0));
        breaker.failed(at(0));
        assert!(!breaker.succeeded(), "it was not left alone");
        breaker.failed(at(0));
        assert!(!breaker.is_open(), "an answer makes up for a failure");
        assert!(breaker.failed(at(1)));
        assert_eq!(breaker.phase, Phase::Open { until: at(501) });
        for _ in 0..20 {
            assert!(!breaker.failed(at(400)), "what was under way");
        }
        breaker.note_request(at(500));
        assert_eq!(
            breaker.phase,
            Phase::Open { until: at(501) },
            "who was there before the pause tries nothing"
        );
        breaker.note_request(at(501));
        assert_eq!(breaker.phase, Phase::HalfOpen { until: at(5501) }, "as long as a read may take");
        breaker.note_request(at(600));
        assert!(!breaker.allows(at(5500)) && breaker.allows(at(5501)), "the first one was never heard of");
        assert!(!breaker.failed(at(5600)));
        assert_eq!(breaker.phase, Phase::Open { until: at(6600) }, "twice as long");
        assert!(breaker.succeeded(), "whoever it answers");
        assert_eq!(breaker.phase, Phase::Closed { failures: 1 });
        assert!(breaker.failed(at(7000)), "once more is enough");
        assert_eq!(breaker.phase, Phase::Open { until: at(8000) }, "for as long as before");
        assert!(breaker.succeeded() && !breaker.succeeded());
        assert!(!breaker.failed(at(9000)) && breaker.failed(at(9000)));
        assert_eq!(breaker.phase, Phase::Open { until: at(9500) }, "from the first pause on");
    }

    #[test]
    fn callers_without_a_limit_hold_off_the_next_trial_for_an_hour_at_most() {
        let start = Instant::now();
        let mut breaker = CircuitBreaker::new(Duration::ZERO, Duration::MAX);
        assert!(!breaker.failed(start) && breaker.failed(start));
        breaker.note_request(start);
        assert_eq!(breaker.phase, Phase::HalfOpen { until: start + LONGEST_PROBE });
    }

    #[test]
    fn what_is_not_there_was_answered_and_what_was_cancelled_says_nothing() {
        use FailureKind::{Cancelled, Corrupt, Deadline, GateShut, Io, Missing, PathBusy};
        let of = |kinds: &[Option<FailureKind>]| {
            let mut verdict = RequestResults::default();
            for kind in kinds {
                verdict.add(kind.map(|kind| Failure::new(kind, "planted")).as_ref());
            }
            let RequestResults { answered, failures, first, was_crowded_out, .. } = verdict;
            assert_eq!(first.is_some(), failures > 0 || was_crowded_out);
            (answered, failures)
        };
        assert_eq!(of(&[None, Some(Io)]), (true, 1));
        assert_eq!(of(&[Some(Missing)]), (true, 0));
        assert_eq!(of(&[Some(Corrupt), Some(Cancelled)]), (true, 0));
        assert_eq!(of(&[Some(Deadline), Some(Io), Some(Cancelled)]), (false, 2));
        assert_eq!(of(&[Some(GateShut), Some(PathBusy)]), (false, 0), "it was not asked");
        assert_eq!(of(&[]), (false, 0));
    }

    /// Mutation that makes it fail: `RequestResults::add` keeps what came first, whatever that is.
    #[test]
    fn what_it_failed_is_reported_rather_than_what_waited_behind_that() {
        use FailureKind::{Deadline, Io, PathBusy};
        for (kinds, told) in [([PathBusy, Io], Io), ([Deadline, PathBusy], Deadline), ([Io, Deadline], Io)] {
            let mut verdict = RequestResults::default();
            for kind in kinds {
                verdict.add(Some(&Failure::new(kind, "planted")));
            }
            assert_eq!(verdict.first.map(|failure| failure.kind), Some(told));
        }
    }

    #[test]
    fn who_was_crowded_out_accuses_it_only_where_it_gave_nothing_to_others() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = CircuitBreaker::new(Duration::from_secs(1), Duration::ZERO);
        let busy = Failure::new(FailureKind::PathBusy, "planted");
        let crowded_out =
            RequestResults { was_crowded_out: true, first: Some(busy.clone()), ..RequestResults::default() };
        for began in [0, 10, 20] {
            breaker.note_service(at(began + 5));
            assert_eq!(breaker.record(&crowded_out, at(began), at(began + 9)), StateChange::None);
        }
        assert_eq!(breaker.phase, Phase::Closed { failures: 0 }, "it has more to do than it can");
        assert_eq!(breaker.record(&crowded_out, at(30), at(39)), StateChange::None);
        assert_eq!(breaker.record(&crowded_out, at(40), at(49)), StateChange::Opened, "it hangs");
        let late = RequestResults { answered: true, is_late: true, ..RequestResults::default() };
        assert_eq!(breaker.record(&late, at(40), at(50)), StateChange::None);
        assert!(breaker.is_open() && breaker.failure() == Some(busy));
        let answered = RequestResults {
            answered: true,
            failures: 7,
            was_crowded_out: true,
            ..RequestResults::default()
        };
        assert_eq!(breaker.record(&answered, at(40), at(60)), StateChange::Closed);
        assert_eq!(breaker.failure(), None);
        assert_eq!(breaker.record(&late, at(60), at(70)), StateChange::Opened);
    }
}
