//! Measured speeds of the paths, and how long reads may take by them.

use kvbm_plan::Path;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Blocks that have to be read before their speed says anything.
const EVIDENCE: f64 = 64.0;
/// Or the time of a path after which it does: few blocks that took so long are slow.
const EVIDENCE_S: f64 = 0.1;
/// A path that is slower than computing is tried again once it has rested for so many times what
/// the try may cost. Such tries take half a percent of the time.
const REST: u32 = 200;
/// What one plan more leaves of what the earlier ones count for.
const DECAY: f64 = 0.95;
/// A speed that was measured longer ago than this is not known any more: a path that is slow gets
/// another chance.
const VALID: Duration = Duration::from_secs(600);

/// How much longer than lately a read may take: others read at the same time.
const SLOWDOWN: u32 = 2;
/// Bytes a second of a disk or volume of which nothing is known yet: a slow one.
const UNKNOWN_BYTES_PER_S: u64 = 64 << 20;

/// What the leader knows of the deployment's costs, beside its measurements.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockCosts {
    pub(crate) bytes: u64,
    pub(crate) tokens: u32,
    pub(crate) recompute: Option<Duration>,
}

/// How long blocks took along each path lately, while it had any. Plans that overlap share that
/// time.
#[derive(Default)]
pub(super) struct Speeds {
    paths: Mutex<HashMap<Path, Speed>>,
}

#[derive(Clone, Copy)]
struct Speed {
    seconds: f64,
    blocks: f64,
    seen: Instant,
    /// It was slow and is being tried again: the next measurement stands alone.
    is_tried: bool,
}

/// What is known of a path where a decision is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Too little came along it lately.
    Unknown,
    /// The time of a block.
    Each(Duration),
    /// It was slower than computing, and is tried again.
    Retried,
}

impl Speeds {
    /// A plan was over after `elapsed`, and so many of its blocks arrived: none where it was late.
    pub(super) fn saw(&self, path: Path, blocks: f64, elapsed: Duration) {
        self.saw_at(path, blocks, elapsed, kvbm_plan::clock::now());
    }

    fn saw_at(&self, path: Path, blocks: f64, elapsed: Duration, now: Instant) {
        let mut paths = self.paths.lock();
        // What one plan waited for the ones before it, those have been counted for.
        let valid = |speed: &&mut Speed| now.saturating_duration_since(speed.seen) <= VALID;
        let alone = paths.get_mut(&path).filter(valid).map(|speed| now.saturating_duration_since(speed.seen));
        let fresh = Speed { seconds: 0.0, blocks: 0.0, seen: now, is_tried: false };
        let speed = paths.entry(path).or_insert(fresh);
        if alone.is_none() || speed.is_tried {
            *speed = fresh;
        }
        let elapsed = alone.map_or(elapsed, |alone| elapsed.min(alone));
        speed.seconds = speed.seconds * DECAY + elapsed.as_secs_f64();
        speed.blocks = speed.blocks * DECAY + blocks;
        speed.seen = now;
    }

    /// The time of a block, if enough of them went along `path` lately.
    pub(super) fn per_block(&self, path: Path, now: Instant) -> Option<Duration> {
        self.paths.lock().get(&path)?.per_block(now)
    }

    /// What is known of `path` where a request decides whether it waits for so many blocks or
    /// computes them, each in `recompute`. A try costs at most `patience`. One caller in a while is
    /// told to try a slow path again.
    pub(super) fn pace(
        &self,
        path: Path,
        recompute: Duration,
        blocks: usize,
        patience: Duration,
        now: Instant,
    ) -> Pace {
        let mut paths = self.paths.lock();
        let Some(speed) = paths.get_mut(&path) else { return Pace::Unknown };
        let Some(each) = speed.per_block(now) else { return Pace::Unknown };
        let cost = times(each, blocks).min(patience);
        if each >= recompute && now.saturating_duration_since(speed.seen) >= cost.saturating_mul(REST) {
            (speed.seen, speed.is_tried) = (now, true);
            return Pace::Retried;
        }
        Pace::Each(each)
    }
}

impl Speed {
    fn per_block(&self, now: Instant) -> Option<Duration> {
        let is_enough = self.blocks >= EVIDENCE || self.seconds >= EVIDENCE_S;
        if !is_enough || now.saturating_duration_since(self.seen) > VALID {
            return None;
        }
        Duration::try_from_secs_f64(self.seconds / self.blocks.max(1.0)).ok()
    }
}

/// The time of so many blocks.
pub(crate) fn times(each: Duration, blocks: usize) -> Duration {
    each.saturating_mul(u32::try_from(blocks).unwrap_or(u32::MAX))
}

impl Speeds {
    /// How long it may take to read `blocks` blocks along `path`, behind `before` others: at half
    /// the measured speed, and no longer than computing them takes, where that is known.
    pub(super) fn time_of_read(
        &self,
        path: Path,
        costs: BlockCosts,
        blocks: usize,
        before: usize,
    ) -> Duration {
        let BlockCosts { bytes, recompute, .. } = costs;
        let unknown = || {
            Duration::try_from_secs_f64(bytes as f64 / UNKNOWN_BYTES_PER_S as f64).unwrap_or(Duration::MAX)
        };
        let measured = self.per_block(path, kvbm_plan::clock::now());
        let each = measured.map_or_else(unknown, |time| time.saturating_mul(SLOWDOWN));
        let read = times(each, blocks.saturating_add(before));
        recompute.map_or(read, |recompute| read.min(times(recompute, blocks)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_blocks_that_take_long_are_evidence_and_so_is_a_plan_that_brings_none() {
        let (path, start) = (Path::G3_G1, Instant::now());
        let speeds = Speeds::default();
        speeds.saw_at(path, 4.0, Duration::from_millis(99), start);
        assert_eq!(speeds.per_block(path, start), None, "neither many blocks nor much time");
        speeds.saw_at(path, 4.0, Duration::from_millis(400), start + Duration::from_secs(1));
        let block = speeds.per_block(path, start).map(|time| time.as_millis());
        assert_eq!(block, Some(63));
        let late = Speeds::default();
        late.saw_at(path, 0.0, Duration::from_secs(2), start);
        assert_eq!(late.per_block(path, start), Some(Duration::from_secs(2)));
    }

    /// Mutation that makes it fail: `pace` leaves `is_tried` as it is.
    #[test]
    fn a_slow_path_is_tried_again_by_one_caller_after_a_rest_and_measured_anew() {
        let (speeds, path, start) = (Speeds::default(), Path::G3_G1, Instant::now());
        let ms = Duration::from_millis;
        let pace = |at| speeds.pace(path, ms(10), 5, ms(250), at);
        assert_eq!(pace(start), Pace::Unknown);
        speeds.saw_at(path, 100.0, ms(2_000), start);
        assert_eq!(pace(start), Pace::Each(ms(20)), "slower than computing");
        // Five blocks cost 100 ms.
        assert_eq!(pace(start + ms(19_999)), Pace::Each(ms(20)));
        let again = start + ms(20_000);
        assert_eq!(pace(again), Pace::Retried);
        assert_eq!(pace(again), Pace::Each(ms(20)), "others wait for what comes of it");
        speeds.saw_at(path, 100.0, ms(100), again + ms(100));
        assert_eq!(pace(again + ms(100)), Pace::Each(ms(1)), "what was slow is forgotten");
        assert_eq!(pace(again + Duration::from_secs(500)), Pace::Each(ms(1)), "a fast one is no try");
    }

    #[test]
    fn speeds_need_evidence_follow_change_and_are_forgotten() {
        let (speeds, path, start) = (Speeds::default(), Path::G3_G1, Instant::now());
        let at = |s| start + Duration::from_secs(s);
        assert_eq!(speeds.per_block(path, start), None);
        speeds.saw_at(path, 63.0, Duration::from_millis(63), start);
        assert_eq!(speeds.per_block(path, start), None, "too little");
        speeds.saw_at(path, 64.0, Duration::from_millis(64), at(1));
        let ms = |speed: Option<Duration>| speed.map(|time| time.as_micros().div_ceil(10));
        assert_eq!(ms(speeds.per_block(path, at(1))), Some(100));
        assert_eq!(speeds.per_block(Path::G2_G1, at(1)), None, "another path");
        for second in 2..202 {
            speeds.saw_at(path, 16.0, Duration::from_millis(80), at(second));
        }
        assert_eq!(ms(speeds.per_block(path, at(201))), Some(500), "the newer ones count");
        assert_eq!(speeds.per_block(path, at(201 + 601)), None, "too long ago");
        speeds.saw_at(path, 100.0, Duration::from_millis(100), at(201 + 700));
        assert_eq!(ms(speeds.per_block(path, at(201 + 700))), Some(100), "begins anew");
    }

    /// Mutation that makes it fail: `elapsed` counts whole.
    #[test]
    fn plans_that_overlap_share_the_time_of_their_path() {
        let (speeds, path, start) = (Speeds::default(), Path::G3_G1, Instant::now());
        // Sent together, ended one after the other.
        for number in 1..=20 {
            let elapsed = Duration::from_millis(8 * number);
            speeds.saw_at(path, 8.0, elapsed, start + elapsed);
        }
        let block = speeds.per_block(path, start).expect("enough was seen");
        assert_eq!(block.as_micros().div_ceil(10), 100);
    }
}
