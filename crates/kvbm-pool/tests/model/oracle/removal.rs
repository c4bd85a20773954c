//! Blocks go because somebody says so.

use super::{Node, Oracle, Slot};
use kvbm_plan::BlockId;
use std::collections::BTreeSet;

impl Oracle {
    pub(crate) fn quarantine(&mut self, tier: usize, slot: u32) {
        let at = slot as usize;
        match self.tiers[tier].slots[at] {
            Slot::Registered(node) => {
                let in_use = self.tiers[tier].refs[at] > 0;
                self.tiers[tier].slots[at] =
                    if in_use { Slot::Detached { bad: true, lost: false } } else { Slot::Quarantined };
                self.tiers[tier].order.retain(|&other| other != slot);
                self.forget_slot(tier, node, slot);
            }
            Slot::Detached { lost, .. } => self.tiers[tier].slots[at] = Slot::Detached { bad: true, lost },
            _ => {}
        }
    }

    /// Removes `nodes`, children first. With `unused_only`, what is in use or continued stays.
    pub(crate) fn remove(&mut self, nodes: &BTreeSet<Node>, tiers: &[usize], unused_only: bool) {
        let mut nodes: Vec<Node> = nodes.iter().copied().collect();
        nodes.sort_by_key(|&node| std::cmp::Reverse(self.universe[node].position));
        for node in nodes {
            for &tier in tiers {
                let slots = self.tiers[tier].present.get(&node).cloned().unwrap_or_default();
                let used = slots.iter().any(|&slot| self.tiers[tier].refs[slot as usize] > 0);
                if unused_only
                    && (used || slots.is_empty() || self.is_full(node) && self.children(tier, node) > 0)
                {
                    continue;
                }
                self.expel(tier, node, &slots);
            }
        }
    }

    /// A tier lost what it held: nothing is there, and what is in somebody's hands is worth
    /// nothing.
    pub(crate) fn lose(&mut self, tiers: &[usize]) {
        self.remove(&(0..self.universe.len()).collect(), tiers, false);
        for &tier in tiers {
            for slot in &mut self.tiers[tier].slots {
                match slot {
                    Slot::Held { lost } | Slot::Detached { lost, .. } => *lost = true,
                    _ => {}
                }
            }
        }
    }

    /// Whether some of these slots were in somebody's hands when the tier lost what it held.
    pub(crate) fn is_lost(&self, tier: usize, blocks: &[BlockId]) -> bool {
        let slot = |block: &BlockId| self.tiers[tier].slots[block.index()];
        let lost = |slot| matches!(slot, Slot::Held { lost: true } | Slot::Detached { lost: true, .. });
        blocks.iter().map(slot).any(lost)
    }

    pub(super) fn expel(&mut self, tier: usize, node: Node, slots: &[u32]) {
        if let Some((slot, _)) = self.arrival_ends(tier, node) {
            self.tiers[tier].slots[slot as usize] = Slot::Cancelled(node);
            self.gone(tier, node);
        }
        for &slot in slots {
            let used = self.tiers[tier].refs[slot as usize] > 0;
            self.tiers[tier].slots[slot as usize] =
                if used { Slot::Detached { bad: false, lost: false } } else { Slot::Free };
            self.tiers[tier].order.retain(|&other| other != slot);
            self.forget_slot(tier, node, slot);
        }
    }

    /// Blocks that continue `root`, and `root`.
    pub(crate) fn subtree(&self, root: Node) -> BTreeSet<Node> {
        (0..self.universe.len()).filter(|&node| self.path(node).contains(&root)).collect()
    }
}
