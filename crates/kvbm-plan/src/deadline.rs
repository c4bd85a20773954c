//! Deadlines from durations that a caller chose.

use std::time::{Duration, Instant};

/// Longer than any process lives.
const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 3600);

/// The time `duration` after `now`. `Instant + Duration` panics where the clock cannot express the
/// sum; this function then returns a time 30 years ahead.
pub fn deadline_after(now: Instant, duration: Duration) -> Instant {
    now.checked_add(duration).or_else(|| now.checked_add(FAR)).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_duration_panics() {
        let now = Instant::now();
        assert_eq!(deadline_after(now, Duration::ZERO), now);
        assert_eq!(deadline_after(now, Duration::from_secs(5)) - now, Duration::from_secs(5));
        assert_eq!(deadline_after(now, Duration::MAX) - now, FAR);
        assert!(deadline_after(deadline_after(now, Duration::MAX), Duration::MAX) > now);
    }
}
