//! The end of a worker that its leader knows of.

use parking_lot::{Condvar, Mutex};
use std::time::Instant;

/// What a worker that is about to end waits for: that the leader has saved, or that the line ends.
#[derive(Default)]
pub(crate) struct GracefulShutdown {
    stage: Mutex<Stage>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// The worker serves.
    #[default]
    Serving,
    /// It has said that it is about to end.
    Leaving,
    /// There is nothing to wait for any more.
    Over,
}

impl GracefulShutdown {
    /// The worker is about to end. Whether nobody has said so before.
    pub(crate) fn begin(&self) -> bool {
        let mut stage = self.stage.lock();
        let is_first = *stage == Stage::Serving;
        if is_first {
            *stage = Stage::Leaving;
        }
        is_first
    }

    /// The worker may end. Whether it has said that it is about to.
    pub(crate) fn dismissed(&self) -> bool {
        let mut stage = self.stage.lock();
        if *stage != Stage::Leaving {
            return false;
        }
        *stage = Stage::Over;
        self.changed.notify_all();
        true
    }

    /// There is nobody to wait for any more.
    pub(crate) fn over(&self) {
        *self.stage.lock() = Stage::Over;
        self.changed.notify_all();
    }

    /// Whether it was over by then.
    pub(crate) fn wait_until(&self, until: Instant) -> bool {
        let mut stage = self.stage.lock();
        while *stage != Stage::Over {
            if self.changed.wait_until(&mut stage, until).timed_out() {
                return *stage == Stage::Over;
            }
        }
        true
    }
}
