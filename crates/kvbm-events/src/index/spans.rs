//! Which blocks of a run a place holds, as intervals.

/// Consecutive blocks of a run, both ends included, at one place of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Slot of the worker.
    pub(super) worker: u16,
    /// Which of the worker's places.
    pub(super) place: u8,
    /// The place's tier, 0 to 3, here so that a search need not look it up.
    pub(super) tier: u8,
    pub(super) first: u8,
    pub(super) last: u8,
}

/// Sorted by worker, then by first block; those of one place neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Spans(Vec<Span>);

impl Spans {
    pub(super) fn as_slice(&self) -> &[Span] {
        &self.0
    }

    pub(super) fn capacity(&self) -> usize {
        self.0.capacity()
    }

    /// Where a worker's spans begin and end.
    fn of_worker(&self, worker: u16) -> std::ops::Range<usize> {
        let start = self.0.partition_point(|span| span.worker < worker);
        let len = self.0[start..].iter().take_while(|span| span.worker == worker).count();
        start..start + len
    }

    /// Whether a worker holds any block.
    pub(super) fn has_worker(&self, worker: u16) -> bool {
        let start = self.0.partition_point(|span| span.worker < worker);
        self.0.get(start).is_some_and(|span| span.worker == worker)
    }

    /// Every worker that holds a block, once.
    pub(super) fn workers(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.chunk_by(|a, b| a.worker == b.worker).map(|spans| spans[0].worker)
    }

    /// Adds the blocks of `new`; how many of them its place did not hold yet.
    pub(super) fn add(&mut self, new: Span) -> u32 {
        let range = self.of_worker(new.worker);
        let same = |span: &Span| span.place == new.place;
        let touches = |span: &Span| {
            span.first <= new.last.saturating_add(1) && new.first <= span.last.saturating_add(1)
        };
        let mut near = range.clone().filter(|&at| same(&self.0[at]) && touches(&self.0[at]));
        let Some(at) = near.next() else {
            self.insert(range, new);
            return width(new);
        };
        if near.next().is_none() && self.0[at].first <= new.first {
            // The usual case: a chain grows at its end.
            let span = &mut self.0[at];
            let added = u32::from(new.last.saturating_sub(span.last));
            span.last = span.last.max(new.last);
            return added;
        }
        self.merge(range, new)
    }

    fn insert(&mut self, range: std::ops::Range<usize>, new: Span) {
        let before = self.0[range.clone()].partition_point(|span| span.first <= new.first);
        self.0.insert(range.start + before, new);
    }

    /// Joins `new` with every span that it touches.
    fn merge(&mut self, range: std::ops::Range<usize>, new: Span) -> u32 {
        let (mut joined, mut held, mut kept) = (new, 0, range.start);
        for at in range.clone() {
            let span = self.0[at];
            let near = span.first <= new.last.saturating_add(1) && new.first <= span.last.saturating_add(1);
            if span.place == new.place && near {
                joined.first = joined.first.min(span.first);
                joined.last = joined.last.max(span.last);
                held += width(span);
            } else {
                self.0[kept] = span;
                kept += 1;
            }
        }
        self.0.drain(kept..range.end);
        self.insert(range.start..kept, joined);
        width(joined) - held
    }

    /// Takes one block from a place; whether it held it.
    pub(super) fn remove(&mut self, worker: u16, place: u8, block: u8) -> bool {
        let range = self.of_worker(worker);
        let holds = |span: &Span| span.place == place && (span.first..=span.last).contains(&block);
        let Some(at) = range.clone().find(|&at| holds(&self.0[at])) else { return false };
        let span = self.0[at];
        match (span.first == block, span.last == block) {
            (true, true) => {
                self.0.remove(at);
            }
            (false, true) => self.0[at].last -= 1,
            (true, false) => {
                // Its place in the order may change.
                self.0.remove(at);
                self.insert(range.start..range.end - 1, Span { first: block + 1, ..span });
            }
            (false, false) => {
                self.0[at].last = block - 1;
                self.insert(range, Span { first: block + 1, ..span });
            }
        }
        true
    }

    /// Whether any place holds the block.
    pub(super) fn hold(&self, block: u8) -> bool {
        self.0.iter().any(|span| span.first <= block && block <= span.last)
    }

    /// Drops the spans that `gone` selects; whether there were any.
    pub(super) fn drop_where(&mut self, mut gone: impl FnMut(&Span) -> bool) -> bool {
        let before = self.0.len();
        self.0.retain(|span| !gone(span));
        self.0.len() != before
    }

    /// The parts inside `first..=last`, counted from `first`.
    pub(super) fn clipped(&self, first: u8, last: u8) -> Self {
        let inside = self.0.iter().filter(|span| span.first <= last && first <= span.last);
        let mut clipped: Vec<Span> = inside
            .map(|span| Span {
                first: span.first.max(first) - first,
                last: span.last.min(last) - first,
                ..*span
            })
            .collect();
        clipped.sort_by_key(|span| (span.worker, span.first));
        clipped.shrink_to_fit();
        Self(clipped)
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        assert!(self.0.is_sorted_by_key(|span| (span.worker, span.first)), "{self:?}");
        for (at, span) in self.0.iter().enumerate() {
            assert!(span.first <= span.last);
            for other in &self.0[at + 1..] {
                let apart = u16::from(span.last) + 1 < u16::from(other.first)
                    || u16::from(other.last) + 1 < u16::from(span.first);
                assert!(apart || (span.worker, span.place) != (other.worker, other.place), "{self:?}");
            }
        }
    }
}

/// Blocks of a span.
pub(super) fn width(span: Span) -> u32 {
    u32::from(span.last - span.first) + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn span(worker: u16, place: u8, first: u8, last: u8) -> Span {
        Span { worker, place, tier: place % 4, first, last }
    }

    fn blocks(spans: &Spans) -> BTreeSet<(u16, u8, u8)> {
        let each = |span: &Span| {
            let Span { worker, place, first, last, .. } = *span;
            (first..=last).map(move |block| (worker, place, block))
        };
        spans.as_slice().iter().flat_map(each).collect()
    }

    #[test]
    fn ends_of_a_run_do_not_overflow() {
        let mut spans = Spans::default();
        assert_eq!(spans.add(span(0, 0, 255, 255)), 1);
        assert_eq!(spans.add(span(0, 0, 0, 0)), 1);
        assert_eq!(spans.add(span(0, 0, 1, 254)), 254);
        assert_eq!(spans.as_slice(), [span(0, 0, 0, 255)]);
        assert!(spans.remove(0, 0, 255) && spans.remove(0, 0, 0));
        assert_eq!(spans.clipped(1, 254).as_slice(), [span(0, 0, 0, 253)]);
    }

    proptest! {
        /// Against a set of blocks.
        #[test]
        fn spans_are_sets_of_blocks(
            ops in prop::collection::vec((any::<bool>(), 0u16..3, 0u8..3, 0u8..24, 0u8..6), 1..200),
        ) {
            let (mut spans, mut model) = (Spans::default(), BTreeSet::new());
            for (add, worker, place, first, more) in ops {
                if add {
                    let new = (first..=first + more).filter(|&block| model.insert((worker, place, block))).count();
                    prop_assert_eq!(spans.add(span(worker, place, first, first + more)), new as u32);
                } else {
                    prop_assert_eq!(spans.remove(worker, place, first), model.remove(&(worker, place, first)));
                }
                spans.check();
                prop_assert_eq!(&blocks(&spans), &model);
                prop_assert_eq!(spans.has_worker(worker), model.iter().any(|held| held.0 == worker));
                let workers: BTreeSet<u16> = model.iter().map(|held| held.0).collect();
                prop_assert_eq!(spans.workers().collect::<Vec<_>>(), Vec::from_iter(workers));
                prop_assert_eq!(spans.hold(first), model.iter().any(|&(_, _, block)| block == first));
            }
            let clipped = spans.clipped(5, 17);
            clipped.check();
            let inside = model.iter().filter(|(_, _, block)| (5..=17).contains(block));
            prop_assert_eq!(blocks(&clipped), inside.map(|&(w, p, block)| (w, p, block - 5)).collect());
            prop_assert_eq!(spans.drop_where(|span| span.worker == 1), model.iter().any(|block| block.0 == 1));
            model.retain(|block| block.0 != 1);
            prop_assert_eq!(blocks(&spans), model);
        }
    }
}
