//! What wakes the node's thread.

use std::time::{Duration, Instant};

use kvbm_plan::{clock, deadline_after};
use parking_lot::{Condvar, Mutex};

/// Pause between looks for messages where the agent does not call: while answers are expected or
/// messages have come recently, in the time after that, and otherwise.
const BUSY: Duration = Duration::from_micros(200);
const IDLE: Duration = Duration::from_millis(2);
const QUIET: Duration = Duration::from_millis(10);
/// The same while no peer is known: nobody is answered then.
const ALONE: Duration = Duration::from_millis(100);

/// How long messages count as recent, and how long the time after that is.
const RECENT: Duration = Duration::from_millis(100);
const WARM: Duration = Duration::from_secs(10);

/// Longest wait for an agent that calls.
const LONGEST: Duration = Duration::from_secs(1);

/// A flag that one thread waits for.
#[derive(Default)]
pub(super) struct Wake {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Wake {
    pub(super) fn set(&self) {
        *self.is_set.lock() = true;
        self.changed.notify_one();
    }

    /// Waits until the flag is set, at most until `deadline`, and takes it back.
    pub(super) fn wait_until(&self, deadline: Instant) {
        let mut is_set = self.is_set.lock();
        while !*is_set && !self.changed.wait_until(&mut is_set, deadline).timed_out() {}
        *is_set = false;
    }
}

/// When the thread looks for messages again.
pub(super) struct Pauses {
    /// The agent calls when a message comes.
    is_called: bool,
    /// When the last message came.
    last: Instant,
}

impl Pauses {
    pub(super) fn new(is_called: bool) -> Self {
        Self { is_called, last: clock::now() }
    }

    /// The end of the next pause, after a look at `now`: whether that brought messages, whether
    /// answers are expected, whether peers are known.
    pub(super) fn until(&mut self, now: Instant, heard: bool, expects: bool, has_peers: bool) -> Instant {
        if heard {
            self.last = now;
        }
        let since = now.saturating_duration_since(self.last);
        let pause = match () {
            () if self.is_called => LONGEST,
            () if expects || since < RECENT => BUSY,
            () if !has_peers => ALONE,
            () if since < WARM => IDLE,
            () => QUIET,
        };
        deadline_after(now, pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_was_set_before_the_wait_ends_it() {
        let wake = Wake::default();
        let far = deadline_after(Instant::now(), Duration::from_secs(600));
        wake.set();
        wake.wait_until(far);
        let (wake, began) = (Arc::new(wake), Instant::now());
        let other = Arc::clone(&wake);
        let thread = std::thread::spawn(move || other.set());
        wake.wait_until(far);
        thread.join().unwrap();
        wake.wait_until(began);
        assert!(began.elapsed() < Duration::from_secs(600));
    }

    #[test]
    fn a_node_that_nobody_asks_looks_seldom() {
        let mut pauses = Pauses::new(false);
        let begun = pauses.last;
        let mut pause = |after: u64, heard, expects, has_peers| {
            let now = deadline_after(begun, Duration::from_millis(after));
            pauses.until(now, heard, expects, has_peers).saturating_duration_since(now)
        };
        assert_eq!(pause(50, false, false, true), BUSY);
        assert_eq!(pause(500, false, false, true), IDLE);
        assert_eq!(pause(500, false, false, false), ALONE);
        assert_eq!(pause(20_000, false, false, true), QUIET);
        assert_eq!(pause(20_000, false, true, true), BUSY, "an answer is expected");
        assert_eq!(pause(30_000, true, false, true), BUSY, "a message has come");
        assert_eq!(Pauses::new(true).until(begun, true, true, true), deadline_after(begun, LONGEST));
    }
}
