//! Whether a request waits for a copy of a block, or computes it.

use kvbm_plan::Tier;
use std::time::Duration;

/// Blocks of a prefix that follow each other on one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadRun {
    /// Where they are.
    pub tier: Tier,
    /// How many, at least 1.
    pub blocks: usize,
    /// Blocks of earlier transfers that wait on the same path.
    pub before: usize,
    /// Time in which a block came along that path lately; `None` while too little came. Zero where
    /// nothing has to be copied.
    pub each: Option<Duration>,
}

/// A prefix that a request could have copied instead of computing it, first block first.
#[derive(Clone, Copy, Debug)]
pub struct LoadOffer<'a> {
    /// The blocks by tier, in the order of the prefix.
    pub runs: &'a [LoadRun],
    /// Time in which the engine computes a block, measured or configured; `None` while it is not
    /// known.
    pub recompute: Option<Duration>,
}

impl LoadOffer<'_> {
    /// Blocks of the prefix.
    pub fn blocks(&self) -> usize {
        self.runs.iter().map(|run| run.blocks).sum()
    }

    /// How many blocks from the first on are worth a copy: the request has the prefix soonest when
    /// these are copied and the others computed. The tiers deliver at the same time, the blocks of
    /// a tier one after the other. What is not known is not held against a tier. Of two lengths
    /// that take as long, the longer one counts.
    pub fn soonest(&self) -> usize {
        let Some(recompute) = self.recompute.map(|time| time.as_nanos()) else { return self.blocks() };
        let mut left = self.blocks();
        let (mut best, mut best_time) = (0, recompute * left as u128);
        let mut busy = [0_u128; Tier::ALL.len()];
        let (mut len, mut arrival) = (0, 0_u128);
        for run in self.runs {
            let each = run.each.map_or(0, |time| time.as_nanos());
            let busy = &mut busy[run.tier.index()];
            // What waits on the path is waited for once.
            *busy = (*busy).max(each * run.before as u128);
            for _ in 0..run.blocks {
                *busy += each;
                arrival = arrival.max(*busy);
                (len, left) = (len + 1, left - 1);
                let time = arrival + recompute * left as u128;
                if time <= best_time {
                    (best, best_time) = (len, time);
                }
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(tier: Tier, blocks: usize, before: usize, each_us: Option<u64>) -> LoadRun {
        LoadRun { tier, blocks, before, each: each_us.map(Duration::from_micros) }
    }

    fn soonest(runs: &[LoadRun], recompute_us: Option<u64>) -> usize {
        LoadOffer { runs, recompute: recompute_us.map(Duration::from_micros) }.soonest()
    }

    #[test]
    fn a_tail_that_arrives_later_than_it_is_computed_is_left_out() {
        use Tier::{G1, G2, G3};
        let fast = run(G2, 100, 0, Some(10));
        assert_eq!(soonest(&[fast], Some(100)), 100);
        assert_eq!(soonest(&[fast, run(G3, 50, 0, Some(300))], Some(100)), 103, "3 while G2 delivers");
        assert_eq!(soonest(&[fast, run(G3, 50, 0, Some(5_000))], Some(100)), 100);
        assert_eq!(soonest(&[run(G3, 50, 0, Some(300))], Some(100)), 0);
        assert_eq!(soonest(&[run(G1, 7, 0, Some(0)), run(G3, 50, 0, Some(300))], Some(100)), 7);
        assert_eq!(soonest(&[run(G3, 50, 0, Some(100))], Some(100)), 50, "as fast");
        assert_eq!(soonest(&[], Some(100)), 0);
    }

    #[test]
    fn a_queue_counts_against_a_path_and_what_is_not_known_does_not() {
        use Tier::{G2, G3};
        // 40 blocks take 40 x 10 us and are computed in 4 ms.
        assert_eq!(soonest(&[run(G3, 40, 300, Some(10))], Some(100)), 40);
        assert_eq!(soonest(&[run(G3, 40, 400, Some(10))], Some(100)), 0);
        let behind_a_queue =
            [run(G2, 10, 0, Some(10)), run(G3, 20, 1_000, Some(10)), run(G2, 20, 0, Some(10))];
        assert_eq!(soonest(&behind_a_queue, Some(100)), 10);
        assert_eq!(soonest(&[run(G3, 40, 400, None)], Some(100)), 40);
        assert_eq!(soonest(&[run(G3, 40, 400, Some(1_000_000))], None), 40);
    }

    /// Against all lengths, one by one.
    #[test]
    fn no_other_length_is_sooner() {
        let mut state = 7_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let tiers = [Tier::G2, Tier::G3, Tier::G4];
            let runs: Vec<LoadRun> = (0..random(5))
                .map(|_| {
                    let tier = tiers[random(3) as usize];
                    // One speed and one queue for each tier.
                    let (before, each) = match tier {
                        Tier::G2 => (0, 20),
                        Tier::G3 => (10, 90),
                        _ => (50, 130),
                    };
                    run(tier, 1 + random(20) as usize, before, Some(each))
                })
                .collect();
            let offer = LoadOffer { runs: &runs, recompute: Some(Duration::from_micros(100)) };
            let blocks: Vec<&LoadRun> =
                runs.iter().flat_map(|run| std::iter::repeat_n(run, run.blocks)).collect();
            let time = |len: usize| {
                let of = |tier| blocks[..len].iter().filter(move |run| run.tier == tier);
                let arrival = |tier| {
                    let first = of(tier).next()?;
                    Some((first.before + of(tier).count()) as u64 * first.each?.as_micros() as u64)
                };
                tiers.into_iter().filter_map(arrival).max().unwrap_or(0) + 100 * (blocks.len() - len) as u64
            };
            let best = (0..=blocks.len()).map(time).min().unwrap();
            assert_eq!(time(offer.soonest()), best, "{runs:?}");
        }
    }
}
