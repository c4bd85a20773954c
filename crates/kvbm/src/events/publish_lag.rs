//! How far behind the world is.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Remembers when the stream had reached which number, coarsely: a few hundred marks, however long
/// the transport is away.
#[derive(Default)]
pub(super) struct Marks {
    marks: VecDeque<(u64, Instant)>,
}

impl Marks {
    const MAX: usize = 256;

    /// All events below `next` had happened by `now`.
    pub(super) fn note(&mut self, next: u64, now: Instant) {
        if self.marks.back().is_some_and(|(last, _)| *last >= next) {
            return;
        }
        if self.marks.len() >= Self::MAX {
            // Every second one goes: the older, the coarser.
            let mut keep = false;
            self.marks.retain(|_| {
                keep = !keep;
                keep
            });
        }
        self.marks.push_back((next, now));
    }

    /// How long the oldest event that is not below `told` has waited, where one was noted.
    pub(super) fn lag(&mut self, announced: u64, now: Instant) -> Duration {
        while self.marks.front().is_some_and(|(next, _)| *next <= announced) {
            self.marks.pop_front();
        }
        self.marks.front().map_or(Duration::ZERO, |(_, since)| now.saturating_duration_since(*since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_event_that_waits_says_how_far_behind_it_is() {
        let (mut marks, start) = (Marks::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(marks.lag(0, at(9)), Duration::ZERO);
        for second in 0..5 {
            marks.note(10 * (second + 1), at(second));
            marks.note(10 * (second + 1), at(second + 1));
        }
        assert_eq!(marks.lag(0, at(5)), Duration::from_secs(5));
        assert_eq!(marks.lag(15, at(5)), Duration::from_secs(4), "event 15 had happened by the first second");
        assert_eq!(marks.lag(20, at(5)), Duration::from_secs(3));
        assert_eq!(marks.lag(50, at(5)), Duration::ZERO);
    }

    #[test]
    fn marks_are_few() {
        let (mut marks, start) = (Marks::default(), Instant::now());
        for number in 1..10_000 {
            marks.note(number, start + Duration::from_millis(number));
        }
        assert!(marks.marks.len() <= Marks::MAX);
        let lag = marks.lag(0, start + Duration::from_secs(10));
        assert_eq!(lag, Duration::from_millis(9_999), "the oldest mark is kept");
    }
}
