//! The clock of leaders.
//!
//! In a build for the simulator (`--cfg kvbm_sim`) each thread that simulates has a clock of its
//! own.

use std::time::{Duration, Instant};

/// The time now.
#[cfg(not(kvbm_sim))]
#[inline]
pub fn now() -> Instant {
    Instant::now()
}

/// Waits for `duration`.
#[cfg(not(kvbm_sim))]
pub fn sleep(duration: Duration) {
    std::thread::sleep(duration);
}

/// The simulated time; the system's where this thread simulates nothing.
#[cfg(kvbm_sim)]
pub fn now() -> Instant {
    crate::simulation::now().unwrap_or_else(Instant::now)
}

/// Lets the simulated world go on for `duration`.
#[cfg(kvbm_sim)]
pub fn sleep(duration: Duration) {
    crate::simulation::wait_until(crate::deadline_after(now(), duration), || false);
}
