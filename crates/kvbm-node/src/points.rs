//! Points of an engine's work that copies wait for: every rank says which it has passed.

use kvbm::Fence;
use kvbm::device::{Completer, Event};
use std::collections::BTreeMap;

/// Points of a rank that copies may wait for at a time; what waits for the oldest fails beyond
/// that.
const MAX_OPEN: usize = 1024;

/// The points of one engine.
pub(crate) struct Points {
    ranks: Vec<RankPoints>,
    /// The latest one that was named, and what the manager calls it.
    last: Option<(u64, Fence)>,
}

#[derive(Default)]
struct RankPoints {
    passed: u64,
    open: BTreeMap<u64, Completer>,
}

impl Points {
    pub(crate) fn new(ranks: u16) -> Self {
        Self { ranks: (0..ranks).map(|_| RankPoints::default()).collect(), last: None }
    }

    /// What the manager calls point `number`: `register` tells it of the event of each rank. None
    /// where all ranks have passed it, and for number 0. Points that make room for it go to
    /// `displaced`: what waits for them fails when that is dropped.
    ///
    /// # Errors
    /// A number below an earlier one; what `register` says.
    pub(crate) fn fence(
        &mut self,
        number: u64,
        displaced: &mut Vec<Completer>,
        register: impl FnOnce(&[Event]) -> Result<Fence, String>,
    ) -> Result<Option<Fence>, String> {
        if self.ranks.iter().all(|rank| rank.passed >= number) {
            return Ok(None);
        }
        match self.last {
            Some((last, fence)) if last == number => return Ok(Some(fence)),
            Some((last, _)) if last > number => {
                return Err(format!("point {number} of the engine's work comes after {last}: numbers grow"));
            }
            _ => {}
        }
        let events: Vec<_> = self.ranks.iter_mut().map(|rank| rank.event(number, displaced)).collect();
        let fence = register(&events)?;
        self.last = Some((number, fence));
        Ok(Some(fence))
    }

    /// `rank` has passed point `number`, and all before it: whoever gets these completes them.
    #[must_use]
    pub(crate) fn passed(&mut self, rank: u16, number: u64) -> Vec<Completer> {
        let Some(rank) = self.ranks.get_mut(usize::from(rank)) else { return Vec::new() };
        rank.passed = rank.passed.max(number);
        let later = match number.checked_add(1) {
            Some(next) => rank.open.split_off(&next),
            None => BTreeMap::new(),
        };
        std::mem::replace(&mut rank.open, later).into_values().collect()
    }

    /// Nobody passes a point any more: what waits for one fails when the result is dropped.
    #[must_use]
    pub(crate) fn give_up(&mut self) -> Vec<Completer> {
        self.ranks.iter_mut().flat_map(|rank| std::mem::take(&mut rank.open).into_values()).collect()
    }
}

impl RankPoints {
    fn event(&mut self, number: u64, displaced: &mut Vec<Completer>) -> Event {
        if self.passed >= number {
            return Event::complete();
        }
        if self.open.len() >= MAX_OPEN {
            displaced.extend(self.open.pop_first().map(|(_, oldest)| oldest));
        }
        let (event, completer) = Event::completable();
        self.open.insert(number, completer);
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::device::EventStatus;

    /// The events of a point, as the manager gets them.
    fn events(points: &mut Points, number: u64) -> Vec<Event> {
        let mut seen = Vec::new();
        let refused = points.fence(number, &mut Vec::new(), |events| {
            seen = events.to_vec();
            Err("not registered".into())
        });
        assert_eq!(refused.err().as_deref(), Some("not registered"));
        seen
    }

    fn pending(events: &[Event]) -> Vec<bool> {
        events.iter().map(|event| event.query() == EventStatus::Pending).collect()
    }

    fn complete(completers: Vec<Completer>) {
        for completer in completers {
            completer.complete(Ok(()));
        }
    }

    #[test]
    fn a_point_is_passed_when_every_rank_has_passed_it_or_a_later_one() {
        let mut points = Points::new(2);
        let never = |_: &[Event]| -> Result<Fence, String> { panic!("nothing waits") };
        assert_eq!(points.fence(0, &mut Vec::new(), never).unwrap(), None);
        let third = events(&mut points, 3);
        complete(points.passed(1, 2));
        assert_eq!(pending(&third), [true, true]);
        complete(points.passed(1, 4));
        assert_eq!(pending(&third), [true, false]);
        // A rank may be ahead of the scheduler.
        let fourth = events(&mut points, 4);
        assert_eq!(pending(&fourth), [true, false]);
        complete(points.passed(0, 4));
        assert_eq!((pending(&third), pending(&fourth)), (vec![false; 2], vec![false; 2]));
        assert_eq!(points.fence(4, &mut Vec::new(), never).unwrap(), None);
        assert!(points.passed(9, 1).is_empty(), "there is no such rank");
    }

    #[test]
    fn what_waits_fails_when_nobody_passes_it_and_when_too_many_wait() {
        let mut points = Points::new(1);
        let first = events(&mut points, 1);
        for number in 2..=MAX_OPEN as u64 + 1 {
            assert_eq!(pending(&events(&mut points, number)), [true]);
        }
        assert!(matches!(first[0].query(), EventStatus::Failed(_)), "the oldest makes room");
        let last = events(&mut points, 5000);
        drop(points.give_up());
        assert!(matches!(last[0].query(), EventStatus::Failed(_)));
    }
}
