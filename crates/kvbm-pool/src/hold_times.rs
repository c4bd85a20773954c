//! How long a thread holds locks, for benchmarks (the feature `hold-times`).

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    static TIMES: RefCell<Vec<Duration>> = const { RefCell::new(Vec::new()) };
}

/// Does `work`, and says how long each hold of the lock took that the calling thread ended on the
/// way. Long work releases the lock in between.
pub fn measure_holds<T>(work: impl FnOnce() -> T) -> (T, Vec<Duration>) {
    ON.set(true);
    let done = work();
    ON.set(false);
    (done, TIMES.take())
}

/// One hold, from here until it ends or is dropped. Nothing is measured but within
/// [`measure_holds`].
pub(crate) struct HoldTime(Option<Instant>);

impl HoldTime {
    #[inline]
    pub(crate) fn begin() -> Self {
        Self(ON.get().then(Instant::now))
    }

    pub(crate) fn end(&mut self) {
        if let Some(since) = self.0.take() {
            let time = since.elapsed();
            TIMES.with_borrow_mut(|times| times.push(time));
        }
    }
}

impl Drop for HoldTime {
    #[inline]
    fn drop(&mut self) {
        self.end();
    }
}
