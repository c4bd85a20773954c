//! Compares all that can be seen of the pool with the model.

use super::{Driver, Tally, Victims};
use crate::oracle::Slot;
use kvbm_plan::Tier;
use kvbm_pool::{BlockSelection, EventRecordKind, PrefixBlock, TierMask};
use std::collections::BTreeMap;

impl Driver {
    /// Everything that can be seen from outside.
    pub(crate) fn compare(&mut self) {
        for (node, identity) in self.oracle.universe.iter().enumerate() {
            let found = self.registry.tiers_of(identity.group, identity.hash);
            assert_eq!(found, self.oracle.tiers_of(node), "block {node} after operation {}", self.last);
        }
        for tier in Tier::SLOTTED {
            self.compare_occupancy(tier);
        }
        if let Some(spied) = &self.oracle.spied {
            let seen = spied.lock().expect("the policy did not panic");
            assert!(seen.chosen.is_empty(), "a victim that nobody needed");
            for tier in (0..3).filter(|_| self.setup.victims == Victims::Watched) {
                let expected = self.oracle.evictable(tier);
                assert_eq!(seen.evictable[tier], expected, "after operation {}", self.last);
            }
        }
        self.compare_losses();
        self.compare_events();
    }

    /// What is in our hands knows whether it was lost.
    fn compare_losses(&self) {
        for held in self.held.iter().filter(|held| !held.blocks().is_empty()) {
            assert_eq!(held.is_lost(), self.oracle.is_lost(held.tier(), held.blocks()));
        }
        for (pinned, _) in &self.pinned {
            let lost = self.oracle.is_lost(pinned.tier().index(), pinned.block_ids());
            assert!(pinned.is_lost() || !lost, "{pinned:?} after operation {}", self.last);
        }
        for prefix in &self.prefixes {
            let lost = |block: &PrefixBlock| self.oracle.is_lost(block.tier.index(), &[block.block]);
            let first = prefix.blocks().iter().filter(|block| lost(block)).map(|block| block.tier).min();
            assert_eq!(prefix.lost().map(|lost| lost.tier), first);
        }
    }

    pub(super) fn compare_occupancy(&self, tier: Tier) {
        let (index, status) = (tier.index(), self.registry.occupancy(tier));
        let count = |what: fn(Slot, u32) -> bool| self.oracle.count(index, what);
        assert_eq!(status.free, count(|slot, _| slot == Slot::Free), "free of {tier}");
        assert_eq!(status.held, count(|slot, _| matches!(slot, Slot::Held { .. })), "held of {tier}");
        let arriving = count(|slot, _| matches!(slot, Slot::Arriving(_) | Slot::Cancelled(_)));
        assert_eq!(status.arriving, arriving, "arriving on {tier}");
        let active = count(|slot, refs| matches!(slot, Slot::Registered(_)) && refs > 0);
        assert_eq!(status.active, active, "active on {tier}");
        let inactive = count(|slot, refs| matches!(slot, Slot::Registered(_)) && refs == 0);
        assert_eq!(status.inactive, inactive, "inactive on {tier}");
        assert_eq!(
            status.detached,
            count(|slot, _| matches!(slot, Slot::Detached { .. })),
            "detached of {tier}"
        );
        assert_eq!(status.quarantined, count(|slot, _| slot == Slot::Quarantined), "quarantined of {tier}");
        assert_eq!(status.pinned, self.oracle.count_kept(index), "pinned on {tier}");
        assert_eq!(status.transfer_pins, self.oracle.tiers[index].transfer_pins, "transfer pins of {tier}");
        if index < 2 {
            let below = &self.oracle.tiers[index + 1];
            let present = self.oracle.tiers[index].present.keys();
            let copied = present.clone().filter(|node| below.present.contains_key(node)).count();
            let copying = present.filter(|node| below.arriving.contains_key(node)).count();
            assert_eq!((status.copied_lower, status.copying_lower), (copied as u32, copying as u32));
        }
    }

    pub(super) fn compare_events(&mut self) {
        let drained = self.registry.drain_events(&mut self.drain, usize::MAX);
        assert_eq!((drained.lost, drained.waiting), (0, 0));
        for event in self.drain.drain(..) {
            assert_eq!(event.seq, self.next_seq, "numbers are dense");
            self.next_seq += 1;
            let key = (event.identity.group, event.identity.hash);
            let tier = &mut self.announced[event.tier.index()];
            let before = match event.kind {
                EventRecordKind::Store => tier.insert(key, event.identity),
                EventRecordKind::Remove => tier.remove(&key),
            };
            assert_eq!(
                before.is_some(),
                event.kind == EventRecordKind::Remove,
                "an event that changes nothing"
            );
        }
        for (tier, announced) in self.announced.iter().enumerate() {
            let present = self.oracle.tiers[tier].present.keys().map(|&node| {
                let identity = self.oracle.universe[node];
                ((identity.group, identity.hash), identity)
            });
            assert_eq!(*announced, present.collect::<BTreeMap<_, _>>(), "events of tier {tier}");
        }
    }

    /// Lets go of everything: all that is left are cached blocks and slots out of use.
    pub(crate) fn finish(mut self) -> Tally {
        while !self.held.is_empty() {
            self.drop_held();
        }
        while !self.withheld.is_empty() {
            self.drop_withheld();
        }
        for prefix in std::mem::take(&mut self.prefixes) {
            self.unpin_prefix(prefix);
        }
        for arrivals in std::mem::take(&mut self.arrivals) {
            self.drop_arrivals(arrivals);
        }
        for (pinned, pin) in std::mem::take(&mut self.pinned) {
            self.unpin(pinned, pin);
        }
        self.compare();
        for tier in Tier::SLOTTED {
            let (blocks, next_seq) = self.registry.snapshot(tier);
            assert_eq!(next_seq, self.next_seq);
            let announced: BTreeMap<_, _> =
                blocks.iter().map(|(_, identity)| ((identity.group, identity.hash), *identity)).collect();
            assert_eq!(announced, self.announced[tier.index()]);
            assert_eq!(announced.len(), blocks.len());
            let status = self.registry.occupancy(tier);
            assert_eq!(status.free + status.inactive + status.quarantined, status.capacity);
            assert_eq!(status.transfer_pins, 0);
        }
        self.registry.remove(BlockSelection::All, TierMask::ALL);
        assert_eq!(self.registry.known_blocks(), 0, "a record of nothing");
        self.tally
    }
}
