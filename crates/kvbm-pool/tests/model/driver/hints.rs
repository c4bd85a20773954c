//! What callers say beforehand, and iterations, in which it ends.

use super::{Driver, Victims};
use crate::universe::NAMESPACES;
use kvbm_plan::{NamespaceId, Tier};
use kvbm_pool::{EventRecordKind, PinError, TierMask};

impl Driver {
    fn some_tiers(&mut self) -> (&'static [usize], TierMask) {
        let tiers: &[usize] = [&[0][..], &[1], &[2], &[0, 1], &[1, 2], &[0, 1, 2]][self.rng.below(6)];
        (tiers, tiers.iter().map(|&tier| Tier::SLOTTED[tier]).collect())
    }

    /// An iteration that is over, or one in which no other pin ends: of those that end together
    /// nobody says which one goes first.
    fn until(&mut self) -> u64 {
        if self.rng.one_in(8) {
            return self.oracle.hints.now - self.rng.below(2) as u64 * u64::from(self.oracle.hints.now > 0);
        }
        let mut until = self.oracle.hints.now + 1 + self.rng.below(40) as u64;
        while self.oracle.hints.kept.values().any(|&other| other == until) {
            until += 1;
        }
        until
    }

    pub(super) fn pin_for_a_time(&mut self) {
        let path = self.any_path();
        let from = if self.rng.one_in(2) { 0 } else { self.rng.below(path.len()) };
        let ((tiers, mask), until) = (self.some_tiers(), self.until());
        let expected = self.oracle.keep(&path[from..], tiers, until);
        let pinned = self.registry.pin(self.group(&path), &self.hashes(&path[from..]), mask, until);
        assert_eq!(pinned, expected);
        self.tally.pinned += u64::from(pinned.is_ok_and(|blocks| blocks > 0));
        self.tally.pins_refused += u64::from(matches!(pinned, Err(PinError::Limit { .. })));
    }

    pub(super) fn take_pins_back(&mut self) {
        let path = self.any_path();
        let (tiers, mask) = self.some_tiers();
        let expected = self.oracle.unkeep(&path, tiers);
        assert_eq!(self.registry.unpin(self.group(&path), &self.hashes(&path), mask), expected);
        self.tally.unpinned += expected as u64;
    }

    pub(super) fn branch_ends(&mut self) {
        // Where the order is foretold, of a Full group: the chains of other groups are known only
        // as far as their blocks are.
        let foretold = self.setup.victims == Victims::Foretold;
        let path = if foretold { self.full_path() } else { self.any_path() };
        self.oracle.branch_ends(&path);
        self.registry.branch_ends(self.group(&path), &self.hashes(&path));
    }

    pub(super) fn set_time_to_live(&mut self) {
        let namespace = NamespaceId(self.rng.below(NAMESPACES as usize) as u32);
        let iterations = self.rng.one_in(2).then(|| 2 + self.rng.below(12) as u64);
        self.oracle.limit(namespace, iterations);
        self.registry.set_ttl(namespace, iterations).expect("few iterations");
    }

    /// What leaves because its time is over may leave in any order in which nothing is continued by
    /// what stays.
    pub(super) fn iterate(&mut self) {
        let (now, before) = (self.registry.step(), self.drain.len());
        self.oracle.tick();
        assert_eq!(now, self.oracle.hints.now);
        self.registry.drain_events(&mut self.drain, usize::MAX);
        for at in before..self.drain.len() {
            let event = self.drain[at];
            assert_eq!(event.kind, EventRecordKind::Remove);
            let node = self.node(event.identity.group, event.identity.hash);
            self.oracle.expire(event.tier.index(), node);
            self.tally.expired += 1;
        }
        assert_eq!(self.oracle.overdue(), []);
    }
}
