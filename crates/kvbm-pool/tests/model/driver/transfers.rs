//! Transfers: arrivals of every end, and what is chosen to be copied down.

use super::Driver;
use crate::oracle::{Node, Pin, Slot};
use kvbm_plan::{BlockId, BlockIdentity, GroupKind, Tier};
use kvbm_pool::{AnyArrivals, Arrival, ArrivalOutcome, Arrivals, G1, G2, G3};
use std::collections::BTreeSet;

impl Driver {
    pub(super) fn begin_arrivals(&mut self) {
        if self.arrivals.len() > 4 {
            return self.change_arrivals();
        }
        let path = self.any_path();
        let tier = Tier::SLOTTED[self.rng.below(3)];
        let index = tier.index();
        let from = if self.rng.below(3) == 0 { self.rng.below(path.len()) } else { 0 };
        let nodes: Vec<Node> = path[from..].iter().copied().take(1 + self.rng.below(6)).collect();
        let identities: Vec<BlockIdentity> = nodes.iter().map(|&node| self.oracle.universe[node]).collect();
        let metadata = self.metadata();
        let begun = match tier {
            Tier::G1 => {
                self.registry.pool::<G1>().begin_arrivals_with(&identities, metadata).map(Arrivals::erase)
            }
            Tier::G2 => {
                self.registry.pool::<G2>().begin_arrivals_with(&identities, metadata).map(Arrivals::erase)
            }
            _ => self.registry.pool::<G3>().begin_arrivals_with(&identities, metadata).map(Arrivals::erase),
        };
        let (pins, needed) = self.oracle.prepare(index, &nodes);
        let reserved = begun.iter().flat_map(AnyArrivals::reserved).map(|(_, block, _)| block);
        let reserved: Vec<BlockId> = reserved.collect();
        self.follow_victims(tier, &reserved);
        let room = self.oracle.allocate(index, needed, 0);
        match begun {
            Ok(arrivals) => {
                let room = room.expect("the model has no room");
                self.check_arrivals(index, &nodes, &arrivals, &room);
                self.arrivals.push(arrivals);
                // What was made free for a refused block is free.
                for slot in room {
                    let slot = &mut self.oracle.tiers[index].slots[slot as usize];
                    if *slot == (Slot::Held { lost: false }) {
                        *slot = Slot::Free;
                    }
                }
            }
            Err(error) => assert_eq!(room, None, "{error}"),
        }
        for slot in pins.into_iter().rev() {
            self.oracle.unpin(index, slot, Pin::Transfer);
        }
    }

    pub(super) fn check_arrivals(
        &mut self,
        tier: usize,
        nodes: &[Node],
        arrivals: &AnyArrivals,
        room: &std::collections::HashSet<u32>,
    ) {
        assert_eq!(arrivals.len(), nodes.len());
        for (&node, arrival) in nodes.iter().zip(arrivals.arrivals()) {
            let model = &mut self.oracle.tiers[tier];
            match *arrival {
                Arrival::Present { block } => {
                    assert_eq!(model.present[&node][0], block.0);
                    self.oracle.pin(tier, block.0, Pin::Transfer);
                }
                Arrival::Joined { ticket } => assert_eq!(model.arriving[&node].1, ticket),
                Arrival::Reserved { block, ticket } => {
                    assert!(!model.present.contains_key(&node) && !model.arriving.contains_key(&node));
                    assert!(room.contains(&block.0));
                    assert!(self.oracle.admits(tier, node));
                    self.oracle.reserve(tier, node, block.0, ticket);
                }
                Arrival::Refused(_) => assert!(!self.oracle.admits(tier, node)),
                Arrival::Completed { .. } | Arrival::Failed => panic!("{arrival:?} at the start"),
            }
        }
    }

    pub(super) fn change_arrivals(&mut self) {
        if self.arrivals.is_empty() {
            return;
        }
        let index = self.rng.below(self.arrivals.len());
        let mut arrivals = self.arrivals.swap_remove(index);
        let tier = arrivals.tier().index();
        let reserved: Vec<(usize, BlockId, u64)> = arrivals.reserved().collect();
        let choice = self.rng.below(10);
        if choice < 7 && !reserved.is_empty() {
            let (at, block, _) = reserved[self.rng.below(reserved.len())];
            if choice < 5 {
                let expected = self.oracle.complete(tier, block.0);
                let completion = arrivals.complete(at);
                let found = match completion {
                    ArrivalOutcome::Stored => Some(block.0),
                    ArrivalOutcome::Existing { block } => Some(block.0),
                    ArrivalOutcome::Removed => None,
                };
                assert_eq!(found, expected);
                assert_eq!(arrivals.complete(at), ArrivalOutcome::Removed, "an arrival completes once");
            } else if choice == 5 && self.rng.below(8) == 0 {
                self.oracle.fail(tier, block.0, Slot::Quarantined);
                arrivals.fail_and_quarantine(at);
            } else if choice == 5 && self.withheld.is_empty() {
                self.oracle.fail(tier, block.0, Slot::Held { lost: false });
                let withheld = arrivals.fail_and_withhold([at, at]);
                assert_eq!(withheld.block_ids(), [block]);
                self.withheld.push((tier, withheld));
            } else {
                self.oracle.fail(tier, block.0, Slot::Free);
                arrivals.fail(at);
            }
            self.oracle.remove_orphans();
            self.arrivals.push(arrivals);
        } else if choice == 9 {
            let pinned = arrivals.into_pinned();
            for (_, block, _) in reserved.iter().rev() {
                self.oracle.fail(tier, block.0, Slot::Free);
            }
            self.oracle.remove_orphans();
            self.pinned.push((pinned, Pin::Transfer));
        } else {
            self.drop_arrivals(arrivals);
        }
    }

    pub(super) fn drop_arrivals(&mut self, arrivals: AnyArrivals) {
        let tier = arrivals.tier().index();
        for arrival in arrivals.arrivals().iter().rev() {
            match *arrival {
                Arrival::Reserved { block, .. } => self.oracle.fail(tier, block.0, Slot::Free),
                Arrival::Present { block } | Arrival::Completed { block } => {
                    self.oracle.unpin(tier, block.0, Pin::Transfer);
                }
                _ => {}
            }
        }
        self.oracle.remove_orphans();
        drop(arrivals);
    }

    pub(super) fn drop_withheld(&mut self) {
        let Some((tier, mut withheld)) = self.withheld.pop() else { return };
        for block in withheld.block_ids() {
            self.oracle.tiers[tier].slots[block.index()] = Slot::Free;
        }
        let rest = withheld.split_off(self.rng.below(2));
        drop((withheld, rest));
    }

    pub(super) fn coldest(&mut self) {
        let (tier, not_on) =
            [(Tier::G1, Tier::G2), (Tier::G2, Tier::G3), (Tier::G1, Tier::G3)][self.rng.below(3)];
        let pinned = self.registry.coldest(tier, self.rng.below(6), not_on, 0);
        let mut chosen: BTreeSet<Node> = BTreeSet::new();
        for (identity, block) in pinned.identities().iter().zip(pinned.block_ids()) {
            let node = self.node(identity.group, identity.hash);
            assert_eq!(self.oracle.tiers[tier.index()].present[&node][0], block.0);
            assert!(!self.oracle.is_on(not_on.index(), node));
            assert!(!self.oracle.tiers[not_on.index()].arriving.contains_key(&node));
            let full = self.oracle.kinds[usize::from(identity.group.0)].0 == GroupKind::Full;
            if let Some(parent) = self.oracle.parents[node].filter(|_| full) {
                let below = &self.oracle.tiers[not_on.index()];
                let there = below.present.contains_key(&parent) || below.arriving.contains_key(&parent);
                assert!(there || chosen.contains(&parent), "a child before its parent");
            }
            assert!(chosen.insert(node), "a block twice");
            self.oracle.pin(tier.index(), block.0, Pin::Transfer);
        }
        self.pinned.push((pinned, Pin::Transfer));
    }
}
