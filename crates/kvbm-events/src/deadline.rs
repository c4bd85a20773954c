//! Deadlines that any duration of a caller can set.

use kvbm_plan::deadline_after;
use std::time::{Duration, Instant};

/// The time `timeout` from now.
pub(crate) fn after(timeout: Duration) -> Instant {
    deadline_after(Instant::now(), timeout)
}

/// Time until `deadline`; zero after it.
pub(crate) fn remaining(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_a_deadline() {
        assert!(remaining(after(Duration::MAX)) > Duration::from_secs(364 * 86_400));
        assert_eq!(remaining(Instant::now()), Duration::ZERO);
    }
}
