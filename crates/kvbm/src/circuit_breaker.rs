//! A store that fails or hangs is left alone for a while, so that not every request waits for its deadline.

use kvbm_plan::{Failure, FailureKind, deadline_after};
use std::time::{Duration, Instant};

/// The first pause.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Failures that no answer made up for, after which it is left alone.
const PATIENCE: u32 = 2;
/// A trial that is never answered holds off the next one for so long at most, also where callers wait without a limit.
const LONGEST_TRIAL: Duration = Duration::from_secs(3600);

/// Whether a store may be asked.
#[derive(Debug)]
pub(crate) struct Breaker {
    state: State,
    /// The next one.
    pause: Duration,
    longest: Duration,
    /// How long a caller that tries it may wait for an answer.
    trial: Duration,
    /// When it last gave or took something, for whomever.
    gave: Option<Instant>,
    /// What it failed with, while it is left alone.
    why: Option<Failure>,
}

/// What calls have made of a [`Breaker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    None,
    /// The store is left alone from now on.
    Opened,
    /// It is not left alone any more.
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It may be asked; so many failures more than answers came before.
    Closed { failures: u32 },
    /// It is left alone.
    Open { until: Instant },
    /// One caller tries it. Where nothing is heard of that, another one may when that one's time is over.
    HalfOpen { until: Instant },
}

impl Breaker {
    /// Pauses grow up to `longest`; who tries the store waits up to `trial` for it.
    pub(crate) fn new(longest: Duration, trial: Duration) -> Self {
        Self {
            state: State::Closed { failures: 0 },
            pause: FIRST_PAUSE.min(longest),
            longest,
            trial: trial.min(LONGEST_TRIAL),
            gave: None,
            why: None,
        }
    }

    /// Whether the store may be asked now. After a pause one caller may, the first that [does](Self::asks); the others when that one was
    /// answered.
    pub(crate) fn may_ask(&self, now: Instant) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until } | State::HalfOpen { until } => now >= until,
        }
    }

    /// The store is asked.
    pub(crate) fn asks(&mut self, now: Instant) {
        if self.is_open() && self.may_ask(now) {
            self.state = State::HalfOpen { until: deadline_after(now, self.pause.max(self.trial)) };
        }
    }

    /// Whether the store is left alone: says nothing about the one that may try it.
    pub(crate) fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed { .. })
    }

    /// What it failed with last, where it is left alone.
    pub(crate) fn why(&self) -> Option<Failure> {
        self.why.clone()
    }

    /// Something came from it or arrived there, although the call is not over.
    pub(crate) fn gives(&mut self, now: Instant) {
        self.gave = Some(now);
    }

    /// Calls that began at `began` are over. Those that waited for others on their path until it was too late accuse it only where those
    /// others got nothing of it either.
    pub(crate) fn hears(&mut self, verdict: &Verdict, began: Instant, now: Instant) -> Turn {
        let Verdict { answered, failures, is_late, was_crowded_out, .. } = *verdict;
        let hangs = was_crowded_out && self.gave.is_none_or(|gave| gave < began);
        if answered && !is_late {
            self.why = None;
            return if self.succeeded() { Turn::Closed } else { Turn::None };
        }
        if !is_late && failures == 0 && !hangs {
            return Turn::None;
        }
        let opened = self.failed(now);
        if self.is_open() {
            self.why = verdict.first.clone().or_else(|| self.why.take());
        }
        if opened { Turn::Opened } else { Turn::None }
    }

    /// It answered. Whether it had been left alone until now. What failed before counts for one less: of several devices one may hang.
    fn succeeded(&mut self) -> bool {
        let was_open = self.is_open();
        let failures = match self.state {
            State::Closed { failures } => failures.saturating_sub(1),
            State::Open { .. } | State::HalfOpen { .. } => PATIENCE - 1,
        };
        if failures == 0 {
            self.pause = FIRST_PAUSE.min(self.longest);
        }
        self.state = State::Closed { failures };
        was_open
    }

    /// It failed. Whether it is left alone from now on and was not before. What was under way when that began says nothing new.
    fn failed(&mut self, now: Instant) -> bool {
        let first = match self.state {
            State::Open { .. } => return false,
            State::Closed { failures } if failures + 1 < PATIENCE => {
                self.state = State::Closed { failures: failures + 1 };
                return false;
            }
            State::Closed { .. } => true,
            State::HalfOpen { .. } => {
                self.pause = self.pause.saturating_mul(2).min(self.longest);
                false
            }
        };
        self.state = State::Open { until: deadline_after(now, self.pause) };
        first
    }
}

/// What calls say of the store that was to answer them.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// Whether it answered one.
    pub(crate) answered: bool,
    /// How many it failed.
    pub(crate) failures: usize,
    /// What is told of it: of those the first, where it is known; else why it was not asked, or that it is late.
    pub(crate) first: Option<Failure>,
    /// What it did answer came too late.
    pub(crate) is_late: bool,
    /// It was not asked, because others on the path went first for too long.
    pub(crate) was_crowded_out: bool,
}

impl Verdict {
    /// One block more went from or to it, or one question more was put to it.
    pub(crate) fn add(&mut self, block: Option<&Failure>) {
        match block.map(|failure| failure.kind) {
            None | Some(FailureKind::Missing | FailureKind::Corrupt | FailureKind::Full) => {
                self.answered = true;
            }
            Some(FailureKind::Io | FailureKind::Deadline) => {
                // What it failed says more of it than what others waited for.
                if self.failures == 0 {
                    self.first = block.cloned();
                }
                self.failures += 1;
            }
            Some(FailureKind::PathBusy) => {
                self.was_crowded_out = true;
                self.first = self.first.take().or_else(|| block.cloned());
            }
            // It was not asked, or not by itself at fault.
            Some(_) => {}
        }
    }

    /// It was asked in time and gave nothing until it was late.
    pub(crate) fn comes_late(&mut self, late: Failure) {
        self.is_late = true;
        self.first.get_or_insert(late);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_one_tries_after_each() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = Breaker::new(Duration::from_secs(1), Duration::ZERO);
        assert!(!breaker.failed(at(0)) && breaker.may_ask(at(0)), "once is nothing");
        assert!(breaker.failed(at(0)));
        assert!(!breaker.may_ask(at(499)));
        assert!(breaker.may_ask(at(500)) && breaker.may_ask(at(500)), "who does not ask leaves it to others");
        breaker.asks(at(500));
        assert!(!breaker.may_ask(at(501)), "one");
        assert!(!breaker.failed(at(600)), "said before");
        assert!(!breaker.may_ask(at(1599)) && breaker.may_ask(at(1600)));
        breaker.asks(at(1600));
        breaker.failed(at(1700));
        assert!(breaker.may_ask(at(2700)), "at most the longest pause");
        assert!(breaker.succeeded());
        assert!(breaker.may_ask(at(2700)) && !breaker.is_open());
    }

    #[test]
    fn every_step_between_its_states() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut breaker = Breaker::new(Duration::from_secs(30), Duration::from_secs(5));
        breaker.asks(at(0));
        breaker.failed(at(0));
        assert!(!breaker.succeeded(), "it was not left alone");
        breaker.failed(at(0));
        assert!(!breaker.is_open(), "an answer makes up for a failure");
        assert!(breaker.failed(at(1)));
        assert_eq!(breaker.state, State::Open { until: at(501) });
        for _ in 0..20 {
            assert!(!breaker.failed(at(400)), "what was under way");
        }
        breaker.asks(at(500));
        assert_eq!(
            breaker.state,
            State::Open { until: at(501) },
            "who was there before the pause tries nothing"
        );
        breaker.asks(at(501));
        assert_eq!(breaker.state, State::HalfOpen { until: at(5501) }, "as long as a read may take");
        breaker.asks(at(600));
        assert!(!breaker.may_ask(at(5500)) && breaker.may_ask(at(5501)), "the first one was never heard of");
        assert!(!breaker.failed(at(5600)));
        assert_eq!(breaker.state, State::Open { until: at(6600) }, "twice as long");
        assert!(breaker.succeeded(), "whoever it answers");
        assert_eq!(breaker.state, State::Closed { failures: 1 });
        assert!(breaker.failed(at(7000)), "once more is enough");
        assert_eq!(breaker.state, State::Open { until: at(8000) }, "for as long as before");
        assert!(breaker.succeeded() && !breaker.succeeded());
        assert!(!breaker.failed(at(9000)) && breaker.failed(at(9000)));
        assert_eq!(breaker.state, State::Open { until: at(9500) }, "from the first pause on");
    }

    #[test]
    fn callers_without_a_limit_hold_off_the_next_trial_for_an_hour_at_most() {
        let start = Instant::now();
        let mut breaker = Breaker::new(Duration::ZERO, Duration::MAX);
        assert!(!breaker.failed(start) && breaker.failed(start));
        breaker.asks(start);
        assert_eq!(breaker.state, State::HalfOpen { until: start + LONGEST_TRIAL });
    }

    #[test]
    fn what_is_not_there_was_answered_and_what_was_cancelled_says_nothing() {
        use FailureKind::{Cancelled, Corrupt, Deadline, GateShut, Io, Missing, PathBusy};
        let of = |kinds: &[Option<FailureKind>]| {
            let mut verdict = Verdict::default();
            for kind in kinds {
                verdict.add(kind.map(|kind| Failure::new(kind, "planted")).as_ref());
            }
            let Verdict { answered, failures, first, was_crowded_out, .. } = verdict;
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

    /// Mutation that makes it fail: `Verdict::add` keeps what came first, whatever that is.
    #[test]
    fn what_it_failed_is_told_rather_than_what_waited_behind_that() {
        use FailureKind::{Deadline, Io, PathBusy};
        for (kinds, told) in [([PathBusy, Io], Io), ([Deadline, PathBusy], Deadline), ([Io, Deadline], Io)] {
            let mut verdict = Verdict::default();
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
        let mut breaker = Breaker::new(Duration::from_secs(1), Duration::ZERO);
        let busy = Failure::new(FailureKind::PathBusy, "planted");
        let crowded_out = Verdict { was_crowded_out: true, first: Some(busy.clone()), ..Verdict::default() };
        for began in [0, 10, 20] {
            breaker.gives(at(began + 5));
            assert_eq!(breaker.hears(&crowded_out, at(began), at(began + 9)), Turn::None);
        }
        assert_eq!(breaker.state, State::Closed { failures: 0 }, "it has more to do than it can");
        assert_eq!(breaker.hears(&crowded_out, at(30), at(39)), Turn::None);
        assert_eq!(breaker.hears(&crowded_out, at(40), at(49)), Turn::Opened, "it hangs");
        let late = Verdict { answered: true, is_late: true, ..Verdict::default() };
        assert_eq!(breaker.hears(&late, at(40), at(50)), Turn::None);
        assert!(breaker.is_open() && breaker.why() == Some(busy));
        let answered = Verdict { answered: true, failures: 7, was_crowded_out: true, ..Verdict::default() };
        assert_eq!(breaker.hears(&answered, at(40), at(60)), Turn::Closed);
        assert_eq!(breaker.why(), None);
        assert_eq!(breaker.hears(&late, at(60), at(70)), Turn::Opened);
    }
}
