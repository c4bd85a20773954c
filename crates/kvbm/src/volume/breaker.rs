//! A volume that fails is left alone for a while, so that not every request waits for its deadline.

use std::time::{Duration, Instant};

/// The first pause.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Failures in a row after which it is left alone.
const PATIENCE: u32 = 2;

/// Whether a volume may be asked.
#[derive(Debug)]
pub(crate) struct Breaker {
    failures: u32,
    pause: Duration,
    longest: Duration,
    /// Set while it is left alone: when it may be tried again.
    closed_until: Option<Instant>,
}

impl Breaker {
    /// Pauses grow up to `longest`.
    pub(crate) fn new(longest: Duration) -> Self {
        Self { failures: 0, pause: FIRST_PAUSE.min(longest), longest, closed_until: None }
    }

    /// Whether the volume may be asked now. After a pause one caller may; the others when that one was answered.
    pub(crate) fn allows(&mut self, now: Instant) -> bool {
        match self.closed_until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                self.closed_until = Some(now + self.pause);
                true
            }
        }
    }

    /// Whether the volume is left alone: says nothing about the one that may try it.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed_until.is_some()
    }

    /// It answered.
    pub(crate) fn succeeded(&mut self) {
        *self = Self::new(self.longest);
    }

    /// It failed. Whether it is left alone from now on and was not before.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        self.failures = self.failures.saturating_add(1);
        if self.failures < PATIENCE {
            return false;
        }
        let first = self.closed_until.is_none();
        if !first {
            self.pause = (self.pause * 2).min(self.longest);
        }
        self.closed_until = Some(now + self.pause);
        first
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
        breaker.succeeded();
        assert!(breaker.allows(at(2700)) && !breaker.is_closed());
    }
}
