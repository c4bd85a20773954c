//! Deadlines that any duration of a caller can set.

use std::time::{Duration, Instant};

/// A year: `Duration::MAX` from now is beyond the clock of some systems.
const MAX_WAIT: Duration = Duration::from_secs(365 * 86_400);

/// The moment `timeout` from now, or one so late that it makes no difference.
pub(crate) fn after(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(MAX_WAIT)
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
