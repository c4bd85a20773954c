//! Which way is faster by measurement: to compress objects, or to leave them as they are.
//!
//! Both ways are tried, and timed from end to end: a write with what compressing takes, a read with
//! what opening takes. So a store that is slow for another reason than its bandwidth, such as the
//! time of a request, does not count as one that compression helps.

use std::time::Duration;

/// How objects are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// As they are.
    Plain,
    /// Compressed.
    Compressed,
}

/// Bytes of blocks that are timed before a way is judged.
const ENOUGH: f64 = (4_u64 << 20) as f64;
/// Bytes after which what was timed before counts half.
const HALF_LIFE: f64 = (64_u64 << 20) as f64;
/// Of so many calls one goes the other way, to time it anew.
const PROBE: u64 = 16;
/// The way in use is left for one that takes less than this share of its time.
const BETTER: f64 = 0.95;

/// Bytes and the time that they took; the older ones count less.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    bytes: f64,
    seconds: f64,
}

impl Pace {
    fn add(&mut self, bytes: u64, time: Duration) {
        self.bytes += bytes as f64;
        self.seconds += time.as_secs_f64();
        if self.bytes > HALF_LIFE {
            self.bytes /= 2.0;
            self.seconds /= 2.0;
        }
    }

    /// Seconds for a byte; `None` while too few were timed.
    fn each(&self) -> Option<f64> {
        (self.bytes >= ENOUGH).then(|| self.seconds / self.bytes)
    }
}

/// What both ways took, and which one is in use.
#[derive(Debug, Default)]
pub(crate) struct AdaptiveCompression {
    /// Plain, compressed.
    writes: [Pace; 2],
    reads: [Pace; 2],
    calls: u64,
    is_compressed: bool,
}

impl AdaptiveCompression {
    /// The way of the next call.
    pub(crate) fn next(&mut self) -> Way {
        self.calls += 1;
        let known = self.writes.map(|pace| pace.each().is_some());
        let other = match self.choice() {
            Way::Plain => Way::Compressed,
            Way::Compressed => Way::Plain,
        };
        match known {
            [false, _] => Way::Plain,
            [true, false] => Way::Compressed,
            _ if self.calls.is_multiple_of(PROBE) => other,
            _ => self.choice(),
        }
    }

    /// The way in use.
    pub(crate) fn choice(&self) -> Way {
        if self.is_compressed { Way::Compressed } else { Way::Plain }
    }

    pub(crate) fn has_written(&mut self, way: Way, bytes: u64, took: Duration) {
        self.writes[usize::from(way == Way::Compressed)].add(bytes, took);
        self.choose();
    }

    /// Blocks of one call, plain and compressed ones. A call with both says nothing of either.
    pub(crate) fn has_read(&mut self, bytes: [u64; 2], took: Duration) {
        match bytes {
            [0, 0] => {}
            [plain, 0] => self.reads[0].add(plain, took),
            [0, compressed] => self.reads[1].add(compressed, took),
            _ => {}
        }
        self.choose();
    }

    /// A block is written once and read once. Where only one kind was read, writes alone decide.
    fn choose(&mut self) {
        let [Some(plain), Some(compressed)] = self.writes.map(|pace| pace.each()) else { return };
        let reads = match self.reads.map(|pace| pace.each()) {
            [Some(plain), Some(compressed)] => [plain, compressed],
            _ => [0.0, 0.0],
        };
        let (plain, compressed) = (plain + reads[0], compressed + reads[1]);
        let (ours, other) = if self.is_compressed { (compressed, plain) } else { (plain, compressed) };
        if other < BETTER * ours {
            self.is_compressed = !self.is_compressed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u64 = 1 << 20;

    /// So many seconds for a gigabyte each way.
    fn run(adaptive: &mut AdaptiveCompression, [plain, compressed]: [f64; 2], calls: usize) -> [usize; 2] {
        let mut taken = [0; 2];
        for _ in 0..calls {
            let way = adaptive.next();
            let each = if way == Way::Plain { plain } else { compressed };
            let took = Duration::from_secs_f64(each * BLOCK as f64 / 1e9);
            adaptive.has_written(way, BLOCK, took);
            taken[usize::from(way == Way::Compressed)] += 1;
        }
        taken
    }

    #[test]
    fn the_faster_way_is_taken_and_the_other_one_tried_now_and_then() {
        let mut slow = AdaptiveCompression::default();
        run(&mut slow, [10.0, 8.0], 16);
        let [plain, compressed] = run(&mut slow, [10.0, 8.0], 160);
        assert_eq!((plain, compressed), (10, 150));
        let mut fast = AdaptiveCompression::default();
        let [_, compressed] = run(&mut fast, [0.2, 2.0], 160);
        assert!(compressed <= 4 + 10, "{compressed} of a link that is faster than the codec");
        assert_eq!(fast.choice(), Way::Plain);
    }

    #[test]
    fn a_link_that_becomes_slow_is_noticed_and_a_small_difference_changes_nothing() {
        let mut adaptive = AdaptiveCompression::default();
        run(&mut adaptive, [1.0, 2.0], 100);
        assert_eq!(adaptive.choice(), Way::Plain);
        run(&mut adaptive, [10.0, 8.0], 600);
        assert_eq!(adaptive.choice(), Way::Compressed);
        run(&mut adaptive, [8.0, 8.2], 1600);
        assert_eq!(adaptive.choice(), Way::Compressed, "not by more than a twentieth");
    }

    #[test]
    fn reads_count_where_both_kinds_were_read() {
        let mut adaptive = AdaptiveCompression::default();
        run(&mut adaptive, [1.0, 0.9], 100);
        assert_eq!(adaptive.choice(), Way::Compressed);
        let read = |seconds: f64| Duration::from_secs_f64(seconds * BLOCK as f64 / 1e9);
        for _ in 0..8 {
            adaptive.has_read([0, BLOCK], read(3.0));
            adaptive.has_read([BLOCK, BLOCK], read(50.0));
        }
        assert_eq!(adaptive.choice(), Way::Compressed, "nothing to compare with");
        for _ in 0..8 {
            adaptive.has_read([BLOCK, 0], read(1.0));
        }
        assert_eq!(adaptive.choice(), Way::Plain);
    }
}
