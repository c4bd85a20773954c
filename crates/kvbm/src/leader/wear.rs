//! How much may still be written to a disk today.

use parking_lot::Mutex;
use std::time::Instant;

/// A day in seconds.
const DAY_S: f64 = 86_400.0;

/// Part of a day's budget that may be spent at once: a burst after a quiet hour is welcome, a day's writes in a minute are not.
const BURST_SHARE: f64 = 1.0 / 24.0;

/// A token bucket in blocks: `drive_writes_per_day * capacity` a day.
pub(crate) struct WearBudget {
    blocks_per_s: f64,
    burst: f64,
    state: Mutex<(f64, Instant)>,
}

impl WearBudget {
    /// The budget of a tier of `capacity` blocks; `None` where `drive_writes_per_day` is 0, which means no limit.
    pub(crate) fn new(capacity: u32, drive_writes_per_day: f64) -> Option<Self> {
        if drive_writes_per_day <= 0.0 {
            return None;
        }
        let per_day = f64::from(capacity) * drive_writes_per_day;
        let burst = (per_day * BURST_SHARE).max(1.0);
        let state = Mutex::new((burst, Instant::now()));
        Some(Self { blocks_per_s: per_day / DAY_S, burst, state })
    }

    /// How many of `wanted` blocks may be written now.
    pub(crate) fn affordable(&self, wanted: usize) -> usize {
        self.at(Instant::now(), |tokens| wanted.min(tokens.max(0.0) as usize))
    }

    /// Counts `blocks` as written, also beyond the budget: what was asked for by name is written, and paid for later.
    pub(crate) fn charge(&self, blocks: usize) {
        self.at(Instant::now(), |tokens| *tokens -= blocks as f64);
    }

    fn at<R>(&self, now: Instant, use_tokens: impl FnOnce(&mut f64) -> R) -> R {
        let mut state = self.state.lock();
        let elapsed = now.saturating_duration_since(state.1).as_secs_f64();
        state.0 = (state.0 + elapsed * self.blocks_per_s).min(self.burst);
        state.1 = now;
        use_tokens(&mut state.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_day_earns_the_day_s_budget_and_no_burst_exceeds_an_hour_s() {
        let budget = WearBudget::new(2400, 1.0).expect("limited");
        let start = Instant::now();
        assert_eq!(budget.at(start, |tokens| *tokens as usize), 100, "an hour's worth to begin with");
        budget.at(start, |tokens| *tokens -= 150.0);
        assert_eq!(budget.affordable(10), 0, "overspent");
        let earned = budget.at(start + Duration::from_secs(3600), |tokens| tokens.round());
        assert!((earned - 50.0).abs() < 1.0, "{earned}");
        let rested = budget.at(start + Duration::from_secs(86_400), |tokens| *tokens as usize);
        assert_eq!(rested, 100);
    }

    #[test]
    fn zero_means_no_limit() {
        assert!(WearBudget::new(10, 0.0).is_none());
    }
}
