//! Time, injected, so that tests of the bandwidth model need not look at the wall.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A monotonic clock that can be slept on.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since the clock's own beginning.
    fn now(&self) -> Duration;

    /// Returns when [`Clock::now`] is at least `time`.
    fn sleep_until(&self, time: Duration);
}

/// Real time.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock that starts at zero now.
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn sleep_until(&self, time: Duration) {
        loop {
            let now = self.now();
            if now >= time {
                return;
            }
            std::thread::sleep(time.saturating_sub(now));
        }
    }
}

/// Time that passes only by sleeping: a sleep advances it and returns at once.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl ManualClock {
    /// A clock that stands at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves time on.
    pub fn advance(&self, by: Duration) {
        *self.now.lock() += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.now.lock()
    }

    fn sleep_until(&self, time: Duration) {
        let mut now = self.now.lock();
        *now = time.max(*now);
    }
}
