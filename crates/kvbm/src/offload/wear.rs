//! How much may still be written to a disk: in a day, and in a second.

use parking_lot::Mutex;
use std::time::Instant;

/// A day in seconds.
const DAY_S: f64 = 86_400.0;

/// Part of a day's budget that may be spent at once: a burst after a quiet hour is welcome, a day's
/// writes in a minute are not.
const BURST_SHARE: f64 = 1.0 / 24.0;

/// What both limits leave over, in blocks.
pub(crate) struct WearBudget {
    buckets: Vec<Bucket>,
}

/// A token bucket in blocks.
struct Bucket {
    blocks_per_s: f64,
    burst: f64,
    state: Mutex<(f64, Instant)>,
}

impl WearBudget {
    /// The budget of a tier of `capacity` blocks: `drive_writes_per_day * capacity` a day, an
    /// hour's worth of that at once, and `blocks_per_s` a second. 0 means no limit; `None` where
    /// there is neither.
    pub(crate) fn new(capacity: u32, drive_writes_per_day: f64, blocks_per_s: f64) -> Option<Self> {
        let per_day = f64::from(capacity) * drive_writes_per_day;
        let daily = Bucket::new(per_day / DAY_S, per_day * BURST_SHARE);
        let buckets: Vec<_> =
            [daily, Bucket::new(blocks_per_s, blocks_per_s)].into_iter().flatten().collect();
        (!buckets.is_empty()).then_some(Self { buckets })
    }

    /// How many of `wanted` blocks may be written now.
    pub(crate) fn affordable(&self, wanted: usize) -> usize {
        let now = kvbm_plan::clock::now();
        let left = |bucket: &Bucket| bucket.at(now, |tokens| tokens.max(0.0) as usize);
        self.buckets.iter().map(left).fold(wanted, usize::min)
    }

    /// Counts `blocks` as written, also beyond the budget: what was asked for by name is written,
    /// and paid for later.
    pub(crate) fn charge(&self, blocks: usize) {
        let now = kvbm_plan::clock::now();
        for bucket in &self.buckets {
            bucket.at(now, |tokens| *tokens -= blocks as f64);
        }
    }
}

impl Bucket {
    /// A full one, of at least one block; `None` where nothing is limited.
    fn new(blocks_per_s: f64, burst: f64) -> Option<Self> {
        let burst = burst.max(1.0);
        let state = Mutex::new((burst, kvbm_plan::clock::now()));
        (blocks_per_s > 0.0).then_some(Self { blocks_per_s, burst, state })
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
        let budget = WearBudget::new(2400, 1.0, 0.0).expect("limited");
        let [daily] = &budget.buckets[..] else { panic!("one limit") };
        let start = Instant::now();
        assert_eq!(daily.at(start, |tokens| *tokens as usize), 100, "an hour's worth to begin with");
        daily.at(start, |tokens| *tokens -= 150.0);
        assert_eq!(budget.affordable(10), 0, "overspent");
        let earned = daily.at(start + Duration::from_secs(3600), |tokens| tokens.round());
        assert!((earned - 50.0).abs() < 1.0, "{earned}");
        let rested = daily.at(start + Duration::from_secs(86_400), |tokens| *tokens as usize);
        assert_eq!(rested, 100);
    }

    #[test]
    fn a_second_earns_the_second_s_budget() {
        let budget = WearBudget::new(2400, 0.0, 40.0).expect("limited");
        let [each_second] = &budget.buckets[..] else { panic!("one limit") };
        let start = Instant::now();
        assert_eq!(each_second.at(start, |tokens| std::mem::replace(tokens, -20.0) as usize), 40);
        let half = start + Duration::from_millis(750);
        assert!((each_second.at(half, |tokens| *tokens) - 10.0).abs() < 1e-6);
        assert!((each_second.at(start + Duration::from_secs(9), |tokens| *tokens) - 40.0).abs() < 1e-6);
    }

    #[test]
    fn the_tighter_limit_counts_and_both_pay() {
        let budget = WearBudget::new(240, 1.0, 1e-9).expect("limited");
        assert_eq!(budget.affordable(5), 1, "at least a block, however slow");
        budget.charge(1);
        assert_eq!(budget.affordable(5), 0);
        let left: Vec<_> = budget.buckets.iter().map(|bucket| bucket.state.lock().0.round() as i64).collect();
        assert_eq!(left, [9, 0]);
    }

    #[test]
    fn zero_means_no_limit() {
        assert!(WearBudget::new(10, 0.0, 0.0).is_none());
    }
}
