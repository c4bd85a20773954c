//! A latency histogram that is exact enough for percentiles and cheap enough for every transfer.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Each power of two is divided into this many buckets.
const SUB_BITS: u32 = 5;
const SUB: u64 = 1 << SUB_BITS;
/// Longer latencies count as this: 2^42 ns, more than an hour.
const MAX_EXPONENT: u32 = 42;
const BUCKETS: usize = bucket((1 << MAX_EXPONENT) - 1) + 1;

/// The exposed bucket bounds: 2^10 ns (1 us) to 2^35 ns (34 s), one per power of two.
const EXPOSED: std::ops::RangeInclusive<u32> = 10..=35;

/// Counts of latencies in logarithmic buckets: 32 to a power of two, from 1 ns to 73 minutes, 10
/// KB.
///
/// A quantile is the middle of its bucket, so it is off by at most 1/64 (1.6 %) of the true value;
/// below 64 ns it is exact. Recording is four relaxed atomic operations, without a lock; a reader
/// that runs meanwhile may miss what is being recorded.
#[derive(Debug)]
pub struct LatencyHistogram {
    counts: Box<[AtomicU64]>,
    count: AtomicU64,
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
}

/// Percentiles of a path's latencies, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LatencySummary {
    /// Latencies recorded.
    pub count: u64,
    /// Their mean.
    pub mean_us: f64,
    /// Half of them are at most this.
    pub p50_us: f64,
    /// 99 of 100 are at most this.
    pub p99_us: f64,
    /// The longest; exact.
    pub max_us: f64,
}

/// A range of latencies and how many fell into it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatencyBucket {
    /// Lower bound in microseconds, inclusive.
    pub from_us: f64,
    /// Upper bound in microseconds, exclusive.
    pub to_us: f64,
    /// Latencies in between.
    pub count: u64,
}

const fn bucket(ns: u64) -> usize {
    if ns < SUB {
        return ns as usize;
    }
    let exponent = ns.ilog2() - SUB_BITS;
    (exponent as u64 * SUB + (ns >> exponent)) as usize
}

/// Lowest value of a bucket, and its width.
const fn bounds(bucket: usize) -> (u64, u64) {
    let bucket = bucket as u64;
    if bucket < 2 * SUB {
        return (bucket, 1);
    }
    let exponent = bucket / SUB - 1;
    ((bucket - exponent * SUB) << exponent, 1 << exponent)
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1000.0
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self {
            counts: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            max_ns: AtomicU64::new(0),
        }
    }
}

impl LatencyHistogram {
    /// Records one latency.
    #[inline]
    pub fn record(&self, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(ns.min((1 << MAX_EXPONENT) - 1))].fetch_add(1, Relaxed);
        self.count.fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(ns, Relaxed);
        self.max_ns.fetch_max(ns, Relaxed);
    }

    /// Count, mean, percentiles and maximum; zeros if nothing was recorded.
    pub fn summary(&self) -> LatencySummary {
        let counts = self.counts();
        let count: u64 = counts.iter().sum();
        if count == 0 {
            return LatencySummary::default();
        }
        let max = self.max_ns.load(Relaxed);
        LatencySummary {
            count,
            mean_us: micros(self.sum_ns.load(Relaxed)) / count as f64,
            p50_us: quantile(&counts, count, 50).min(micros(max)),
            p99_us: quantile(&counts, count, 99).min(micros(max)),
            max_us: micros(max),
        }
    }

    /// The occupied range in buckets of a quarter of a power of two, for a plot of the
    /// distribution.
    pub fn distribution(&self) -> Vec<LatencyBucket> {
        const STEP: usize = SUB as usize / 4;
        let counts = self.counts();
        let sums: Vec<u64> = counts.chunks(STEP).map(|chunk| chunk.iter().sum()).collect();
        let Some(first) = sums.iter().position(|count| *count > 0) else { return Vec::new() };
        let last = sums.iter().rposition(|count| *count > 0).unwrap_or(first);
        (first..=last)
            .map(|chunk| {
                let (from, _) = bounds(chunk * STEP);
                let (to, width) = bounds(chunk * STEP + STEP - 1);
                LatencyBucket { from_us: micros(from), to_us: micros(to + width), count: sums[chunk] }
            })
            .collect()
    }

    /// Sum in seconds, count, and (upper bound in seconds, count) per exposed bucket, the last
    /// without a bound.
    pub(super) fn exposed(&self) -> (f64, u64, Vec<(f64, u64)>) {
        let counts = self.counts();
        let mut buckets = Vec::with_capacity(EXPOSED.count() + 1);
        let mut from = 0;
        for exponent in EXPOSED {
            let to = bucket(1 << exponent);
            buckets.push(((1_u64 << exponent) as f64 / 1e9, counts[from..to].iter().sum()));
            from = to;
        }
        buckets.push((f64::INFINITY, counts[from..].iter().sum()));
        (self.sum_ns.load(Relaxed) as f64 / 1e9, counts.iter().sum(), buckets)
    }

    fn counts(&self) -> Vec<u64> {
        self.counts.iter().map(|count| count.load(Relaxed)).collect()
    }
}

fn quantile(counts: &[u64], count: u64, percent: u64) -> f64 {
    let rank = (count * percent).div_ceil(100).max(1);
    let mut seen = 0;
    for (index, n) in counts.iter().enumerate() {
        seen += n;
        if seen >= rank {
            let (from, width) = bounds(index);
            return (from as f64 + (width - 1) as f64 / 2.0) / 1000.0;
        }
    }
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_tile_the_range() {
        let mut next = 0;
        for index in 0..BUCKETS {
            let (from, width) = bounds(index);
            assert_eq!(from, next, "bucket {index}");
            assert_eq!((bucket(from), bucket(from + width - 1)), (index, index));
            next = from + width;
        }
        assert_eq!(next, 1 << MAX_EXPONENT);
    }

    #[test]
    fn nothing_recorded_is_all_zero_and_too_long_is_counted() {
        let histogram = LatencyHistogram::default();
        assert_eq!(histogram.summary(), LatencySummary::default());
        assert!(histogram.distribution().is_empty());
        histogram.record(Duration::from_secs(100_000));
        assert_eq!(histogram.summary().count, 1);
        assert!((histogram.summary().max_us - 1e11).abs() < 1.0);
        let (_, count, buckets) = histogram.exposed();
        assert_eq!((count, buckets.last().unwrap().1), (1, 1));
    }

    proptest! {
        #[test]
        fn percentiles_are_within_the_documented_error(
            mut values in proptest::collection::vec(1_u64..20_000_000_000, 1..300)
        ) {
            let histogram = LatencyHistogram::default();
            for ns in &values {
                histogram.record(Duration::from_nanos(*ns));
            }
            values.sort_unstable();
            let summary = histogram.summary();
            for (percent, got) in [(50, summary.p50_us), (99, summary.p99_us)] {
                let rank = (values.len() * percent).div_ceil(100).max(1);
                let exact = values[rank - 1] as f64 / 1000.0;
                prop_assert!((got - exact).abs() <= exact / 64.0 + 1e-9, "p{}: {} for {}", percent, got, exact);
            }
            let plotted: u64 = histogram.distribution().iter().map(|bucket| bucket.count).sum();
            prop_assert_eq!(plotted, values.len() as u64);
            let (sum, count, buckets) = histogram.exposed();
            prop_assert_eq!(count, values.len() as u64);
            prop_assert!((sum - values.iter().sum::<u64>() as f64 / 1e9).abs() < 1e-6);
            let mut seen = 0;
            for (bound, n) in buckets {
                seen += n;
                let exact = values.iter().filter(|ns| (**ns as f64) < bound * 1e9).count();
                prop_assert_eq!(seen, exact as u64);
            }
        }
    }
}
