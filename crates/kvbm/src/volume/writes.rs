//! Copies to a volume that may land yet: those under way, and those that failed, for a store whose
//! answer is late may still write.

use kvbm_plan::NamespaceId;
use std::collections::HashMap;
use std::time::Instant;

/// What may land yet, of a namespace or of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Landing {
    /// Copies are under way.
    UnderWay,
    /// Some have failed lately.
    Doubtful,
    /// Nothing.
    Over,
}

/// See the module.
#[derive(Default)]
pub(super) struct Writes {
    under_way: HashMap<NamespaceId, usize>,
    /// Until when what failed may land.
    doubtful: HashMap<NamespaceId, Instant>,
}

impl Writes {
    pub(super) fn begin(&mut self, namespace: NamespaceId) {
        *self.under_way.entry(namespace).or_default() += 1;
    }

    /// One is over; where it failed, it may land until then.
    pub(super) fn end(&mut self, namespace: NamespaceId, doubtful_until: Option<Instant>) {
        if let Some(count) = self.under_way.get_mut(&namespace) {
            *count -= 1;
            if *count == 0 {
                self.under_way.remove(&namespace);
            }
        }
        if let Some(until) = doubtful_until {
            let known = self.doubtful.entry(namespace).or_insert(until);
            *known = until.max(*known);
        }
    }

    /// What could land by an earlier registration of the place still can; copies of it that are
    /// under way, until then.
    pub(super) fn inherit(&mut self, earlier: &Self, until: Instant) {
        let under_way = earlier.under_way.keys().map(|namespace| (*namespace, until));
        for (namespace, until) in earlier.doubtful.iter().map(|(one, until)| (*one, *until)).chain(under_way)
        {
            let known = self.doubtful.entry(namespace).or_insert(until);
            *known = until.max(*known);
        }
    }

    /// Forgets doubts that are over.
    pub(super) fn tidy(&mut self, now: Instant) {
        self.doubtful.retain(|_, until| *until > now);
    }

    /// What may land of a namespace, or of all of them.
    pub(super) fn landing(&self, namespace: Option<NamespaceId>, now: Instant) -> Landing {
        let selected = |found: &NamespaceId| namespace.is_none_or(|wanted| wanted == *found);
        if self.under_way.keys().any(selected) {
            Landing::UnderWay
        } else if self.doubtful.iter().any(|(found, until)| selected(found) && *until > now) {
            Landing::Doubtful
        } else {
            Landing::Over
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_under_way_and_what_failed_lately_may_land() {
        let (mut writes, now) = (Writes::default(), Instant::now());
        let later = now + Duration::from_secs(1);
        let [ours, theirs] = [1, 2].map(NamespaceId);
        let of = |writes: &Writes, at| {
            [Some(ours), Some(theirs), None].map(|namespace| writes.landing(namespace, at))
        };
        for _ in 0..2 {
            writes.begin(ours);
        }
        writes.end(ours, None);
        assert_eq!(of(&writes, now), [Landing::UnderWay, Landing::Over, Landing::UnderWay]);
        writes.end(ours, Some(later));
        assert_eq!(of(&writes, now), [Landing::Doubtful, Landing::Over, Landing::Doubtful]);
        writes.begin(ours);
        writes.end(ours, Some(now));
        assert_eq!(of(&writes, now)[0], Landing::Doubtful, "the longest counts");
        assert_eq!(of(&writes, later), [Landing::Over; 3]);
        writes.tidy(now);
        assert_eq!(writes.doubtful.len(), 1);
        writes.tidy(later);
        assert!(writes.doubtful.is_empty() && writes.under_way.is_empty());
        writes.end(theirs, None);
    }
}
