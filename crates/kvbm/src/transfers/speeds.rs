//! Measured speeds of the paths, and how long reads may take by them.

use kvbm_plan::Path;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Blocks that have to be read before their speed says anything.
const EVIDENCE: f64 = 64.0;
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
}

impl Speeds {
    /// A plan of so many blocks was over after `elapsed`.
    pub(super) fn saw(&self, path: Path, blocks: usize, elapsed: Duration) {
        self.saw_at(path, blocks, elapsed, kvbm_plan::clock::now());
    }

    fn saw_at(&self, path: Path, blocks: usize, elapsed: Duration, now: Instant) {
        let mut paths = self.paths.lock();
        // What one plan waited for the ones before it, those have been counted for.
        let valid = |speed: &&mut Speed| now.saturating_duration_since(speed.seen) <= VALID;
        let alone = paths.get_mut(&path).filter(valid).map(|speed| now.saturating_duration_since(speed.seen));
        let fresh = Speed { seconds: 0.0, blocks: 0.0, seen: now };
        let speed = paths.entry(path).or_insert(fresh);
        if alone.is_none() {
            *speed = fresh;
        }
        let elapsed = alone.map_or(elapsed, |alone| elapsed.min(alone));
        speed.seconds = speed.seconds * DECAY + elapsed.as_secs_f64();
        speed.blocks = speed.blocks * DECAY + blocks as f64;
        speed.seen = now;
    }

    /// The time of a block, if enough of them went along `path` lately.
    pub(super) fn per_block(&self, path: Path, now: Instant) -> Option<Duration> {
        let paths = self.paths.lock();
        let speed = paths.get(&path)?;
        let known = speed.blocks >= EVIDENCE && now.saturating_duration_since(speed.seen) <= VALID;
        if !known {
            return None;
        }
        Duration::try_from_secs_f64(speed.seconds / speed.blocks).ok()
    }
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
        let times =
            |time: Duration, blocks: usize| time.saturating_mul(u32::try_from(blocks).unwrap_or(u32::MAX));
        let read = times(each, blocks.saturating_add(before));
        recompute.map_or(read, |recompute| read.min(times(recompute, blocks)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_need_evidence_follow_change_and_are_forgotten() {
        let (speeds, path, start) = (Speeds::default(), Path::G3_G1, Instant::now());
        let at = |s| start + Duration::from_secs(s);
        assert_eq!(speeds.per_block(path, start), None);
        speeds.saw_at(path, 63, Duration::from_millis(63), start);
        assert_eq!(speeds.per_block(path, start), None, "too little");
        speeds.saw_at(path, 64, Duration::from_millis(64), at(1));
        let ms = |speed: Option<Duration>| speed.map(|time| time.as_micros().div_ceil(10));
        assert_eq!(ms(speeds.per_block(path, at(1))), Some(100));
        assert_eq!(speeds.per_block(Path::G2_G1, at(1)), None, "another path");
        for second in 2..202 {
            speeds.saw_at(path, 16, Duration::from_millis(80), at(second));
        }
        assert_eq!(ms(speeds.per_block(path, at(201))), Some(500), "the newer ones count");
        assert_eq!(speeds.per_block(path, at(201 + 601)), None, "too long ago");
        speeds.saw_at(path, 100, Duration::from_millis(100), at(201 + 700));
        assert_eq!(ms(speeds.per_block(path, at(201 + 700))), Some(100), "begins anew");
    }

    /// Mutation that makes it fail: `elapsed` counts whole.
    #[test]
    fn plans_that_overlap_share_the_time_of_their_path() {
        let (speeds, path, start) = (Speeds::default(), Path::G3_G1, Instant::now());
        // Sent together, ended one after the other.
        for number in 1..=20 {
            let elapsed = Duration::from_millis(8 * number);
            speeds.saw_at(path, 8, elapsed, start + elapsed);
        }
        let block = speeds.per_block(path, start).expect("enough was seen");
        assert_eq!(block.as_micros().div_ceil(10), 100);
    }
}
