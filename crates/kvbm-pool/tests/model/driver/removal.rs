//! Blocks that go because somebody says so.

use super::Driver;
use crate::oracle::Node;
use crate::universe::{CAPACITY, NODES_PER_GROUP};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, Tier};
use kvbm_pool::{BlockSelection, TierMask};
use std::collections::BTreeSet;

impl Driver {
    pub(super) fn lose(&mut self) {
        // So seldom that tiers are full most of the time.
        if self.rng.below(3) > 0 {
            return self.remove();
        }
        let tiers: &[usize] = match self.rng.below(6) {
            0 => &[0],
            1 => &[1],
            2 => &[2],
            3 => &[0, 1, 2],
            _ => &[0, 1],
        };
        self.oracle.lose(tiers);
        self.registry.lose(tiers.iter().map(|&tier| Tier::SLOTTED[tier]).collect());
    }

    pub(super) fn quarantine(&mut self) {
        // Few enough that a tier does not run dry over the test.
        if self.rng.below(4) > 0 {
            return;
        }
        let tier = Tier::SLOTTED[self.rng.below(3)];
        let block = BlockId(self.rng.below(CAPACITY[tier.index()] as usize) as u32);
        self.oracle.quarantine(tier.index(), block.0);
        self.registry.quarantine(tier, block);
    }

    pub(super) fn remove(&mut self) {
        let every: BTreeSet<Node> = (0..self.oracle.universe.len()).collect();
        // Of a Full group: the chains of other groups are known only as far as their blocks are.
        let node = self.rng.below(NODES_PER_GROUP);
        let BlockIdentity { namespace, group, hash, .. } = self.oracle.universe[node];
        match self.rng.below(8) {
            0 => {
                let tier = Tier::SLOTTED[self.rng.below(3)];
                self.oracle.remove(&every, &[tier.index()], true);
                self.registry.clear(tier);
            }
            1 => {
                let nodes =
                    every.into_iter().filter(|&node| self.oracle.universe[node].namespace == namespace);
                self.oracle.remove(&nodes.collect(), &[0, 1, 2], false);
                self.registry.forget(namespace);
            }
            2 => {
                let group = GroupId(self.rng.below(3) as u16);
                let nodes = every.into_iter().filter(|&node| self.oracle.universe[node].group == group);
                self.oracle.remove(&nodes.collect(), &[1, 2], false);
                let tiers = TierMask::only(Tier::G2).with(Tier::G3);
                self.registry.remove(BlockSelection::Group(group), tiers);
            }
            _ => {
                let nodes = self.oracle.subtree(node);
                self.oracle.remove(&nodes, &[0, 1, 2], false);
                self.registry.remove_subtree(group, hash, TierMask::ALL);
            }
        }
    }
}
