//! The end of a worker that its leader knows of.

use parking_lot::{Condvar, Mutex};
use std::time::Instant;

/// What a worker that is about to end waits for: that the leader has saved, or that the line ends.
#[derive(Default)]
pub(crate) struct Farewell {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Farewell {
    /// There is nothing to wait for any more.
    pub(crate) fn over(&self) {
        *self.is_over.lock() = true;
        self.changed.notify_all();
    }

    /// Whether it was over by then.
    pub(crate) fn wait_until(&self, until: Instant) -> bool {
        let mut is_over = self.is_over.lock();
        while !*is_over {
            if self.changed.wait_until(&mut is_over, until).timed_out() {
                return *is_over;
            }
        }
        true
    }
}
