//! A store that fails or hangs is left alone for a while, so that not every request waits for its deadline.

use kvbm_plan::{Failure, FailureKind};
use std::time::{Duration, Instant};

/// The first pause.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Failures in a row after which it is left alone.
const PATIENCE: u32 = 2;

/// Whether a store may be asked.
#[derive(Debug)]
pub(crate) struct Breaker {
    state: State,
    /// The next one.
    pause: Duration,
    longest: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It may be asked; so many failures in a row came before.
    Closed { failures: u32 },
    /// It is left alone.
    Open { until: Instant },
    /// One caller tries it. Where nothing is heard of that, another one may after a pause.
    HalfOpen { until: Instant },
}

impl Breaker {
    /// Pauses grow up to `longest`.
    pub(crate) fn new(longest: Duration) -> Self {
        Self { state: State::Closed { failures: 0 }, pause: FIRST_PAUSE.min(longest), longest }
    }

    /// Whether the store may be asked now. After a pause one caller may; the others when that one was answered.
    pub(crate) fn allows(&mut self, now: Instant) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until } | State::HalfOpen { until } if now < until => false,
            State::Open { .. } | State::HalfOpen { .. } => {
                self.state = State::HalfOpen { until: now + self.pause };
                true
            }
        }
    }

    /// Whether the store is left alone: says nothing about the one that may try it.
    pub(crate) fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed { .. })
    }

    /// It answered. Whether it had been left alone until now.
    pub(crate) fn succeeded(&mut self) -> bool {
        let was_open = self.is_open();
        *self = Self::new(self.longest);
        was_open
    }

    /// It failed. Whether it is left alone from now on and was not before.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        let first = match self.state {
            State::Closed { failures } if failures + 1 < PATIENCE => {
                self.state = State::Closed { failures: failures + 1 };
                return false;
            }
            State::Closed { .. } => true,
            State::Open { .. } | State::HalfOpen { .. } => {
                self.pause = (self.pause * 2).min(self.longest);
                false
            }
        };
        self.state = State::Open { until: now + self.pause };
        first
    }
}

/// What calls say of the store that was to answer them.
pub(crate) struct Verdict {
    /// Whether it answered one.
    pub(crate) answered: bool,
    /// How many it failed.
    pub(crate) failures: usize,
}

impl Verdict {
    /// Of blocks that went from or to it.
    pub(crate) fn of<'a>(blocks: impl Iterator<Item = &'a Option<Failure>>) -> Self {
        let mut verdict = Self { answered: false, failures: 0 };
        for block in blocks {
            match block.as_ref().map(|failure| failure.kind) {
                None | Some(FailureKind::Missing | FailureKind::Corrupt | FailureKind::Full) => {
                    verdict.answered = true;
                }
                Some(FailureKind::Io | FailureKind::Deadline) => verdict.failures += 1,
                Some(_) => {}
            }
        }
        verdict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_one_tries_after_each() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = Breaker::new(Duration::from_secs(1));
        assert!(!breaker.failed(at(0)) && breaker.allows(at(0)), "once is nothing");
        assert!(breaker.failed(at(0)));
        assert!(!breaker.allows(at(499)));
        assert!(breaker.allows(at(500)), "one tries");
        assert!(!breaker.allows(at(501)), "one");
        assert!(!breaker.failed(at(600)), "said before");
        assert!(!breaker.allows(at(1599)) && breaker.allows(at(1600)));
        breaker.failed(at(1700));
        assert!(breaker.allows(at(2700)), "at most the longest pause");
        assert!(breaker.succeeded());
        assert!(breaker.allows(at(2700)) && !breaker.is_open());
    }

    #[test]
    fn every_step_between_its_states() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = Breaker::new(Duration::from_secs(30));
        breaker.failed(at(0));
        assert!(!breaker.succeeded(), "it was not left alone");
        breaker.failed(at(0));
        assert!(!breaker.is_open(), "failures in a row count");
        assert!(breaker.failed(at(1)));
        assert_eq!(breaker.state, State::Open { until: at(501) });
        assert!(breaker.allows(at(501)));
        assert_eq!(breaker.state, State::HalfOpen { until: at(1001) });
        assert!(!breaker.allows(at(1000)) && breaker.allows(at(1001)), "the first one was never heard of");
        assert!(!breaker.failed(at(1100)));
        assert_eq!(breaker.state, State::Open { until: at(2100) }, "twice as long");
        assert!(breaker.succeeded(), "whoever it answers");
        assert_eq!(breaker.state, State::Closed { failures: 0 });
        assert!(!breaker.failed(at(3000)) && breaker.failed(at(3000)));
        assert_eq!(breaker.state, State::Open { until: at(3500) }, "from the first pause on");
    }

    #[test]
    fn what_is_not_there_was_answered_and_what_was_cancelled_says_nothing() {
        use FailureKind::{Cancelled, Corrupt, Deadline, Io, Missing};
        let of = |kinds: &[Option<FailureKind>]| {
            let blocks: Vec<_> =
                kinds.iter().map(|kind| kind.map(|kind| Failure::new(kind, "planted"))).collect();
            let Verdict { answered, failures } = Verdict::of(blocks.iter());
            (answered, failures)
        };
        assert_eq!(of(&[None, Some(Io)]), (true, 1));
        assert_eq!(of(&[Some(Missing)]), (true, 0));
        assert_eq!(of(&[Some(Corrupt), Some(Cancelled)]), (true, 0));
        assert_eq!(of(&[Some(Deadline), Some(Io), Some(Cancelled)]), (false, 2));
        assert_eq!(of(&[]), (false, 0));
    }
}
