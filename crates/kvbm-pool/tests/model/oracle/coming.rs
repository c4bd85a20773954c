//! Blocks come: registered, or with a transfer.

use super::{Node, Oracle, Pin, Refused, Slot};
use kvbm_pool::Duplicates;

impl Oracle {
    /// Whether `nodes` may be registered, and if so the slots that then hold them.
    pub(crate) fn register(
        &mut self,
        tier: usize,
        slots: &[u32],
        nodes: &[Node],
        duplicates: Duplicates,
    ) -> Result<Vec<u32>, Refused> {
        if slots.iter().any(|&slot| self.tiers[tier].slots[slot as usize] == Slot::Held { lost: true }) {
            return Err(Refused::Lost);
        }
        for (index, &node) in nodes.iter().enumerate() {
            let Some(parent) = self.parents[node].filter(|_| self.is_full(node)) else { continue };
            if self.tiers_of(parent).is_empty() && !nodes[..index].contains(&parent) {
                return Err(Refused::MissingParent);
            }
        }
        let mut result = Vec::new();
        for (&slot, &node) in slots.iter().zip(nodes) {
            let existing = self.tiers[tier].present.get(&node).map(|slots| slots[0]);
            let used = match existing {
                Some(primary) if duplicates == Duplicates::Reuse => {
                    self.tiers[tier].slots[slot as usize] = Slot::Free;
                    primary
                }
                _ => {
                    self.comes(node);
                    if existing.is_none() {
                        self.use_now(node);
                    }
                    if let Some((arriving, _)) = self.arrival_ends(tier, node) {
                        self.tiers[tier].slots[arriving as usize] = Slot::Cancelled(node);
                    }
                    self.tiers[tier].slots[slot as usize] = Slot::Registered(node);
                    let slots = self.tiers[tier].present.entry(node).or_default();
                    // The newest duplicate is the first to take over.
                    slots.insert(slots.len().min(1), slot);
                    let primary = slots[0];
                    let placed = self.tiers[tier].order.contains(&primary);
                    // It was passed over while it could not go; now it can.
                    if primary != slot && self.tiers[tier].refs[primary as usize] == 0 && !placed {
                        self.old(tier, primary);
                    }
                    slot
                }
            };
            self.pin(tier, used, Pin::Use);
            result.push(used);
        }
        Ok(result)
    }

    /// What an arrival of `nodes` pins while it makes room, and how much room it needs.
    pub(crate) fn prepare(&mut self, tier: usize, nodes: &[Node]) -> (Vec<u32>, usize) {
        let (mut pins, mut needed) = (Vec::new(), 0);
        for (index, &node) in nodes.iter().enumerate() {
            if let Some(slots) = self.tiers[tier].present.get(&node) {
                pins.push(slots[0]);
            } else if !self.tiers[tier].arriving.contains_key(&node) {
                match self.parents[node].filter(|_| self.is_full(node)) {
                    None => needed += 1,
                    Some(parent) => {
                        let there = self.is_coming_or_on(tier, parent) || nodes[..index].contains(&parent);
                        needed += usize::from(there);
                        pins.extend(self.tiers[tier].present.get(&parent).map(|slots| slots[0]));
                    }
                }
            }
        }
        for &slot in &pins {
            self.pin(tier, slot, Pin::Transfer);
        }
        (pins, needed)
    }

    /// Whether the tier may take `node` now.
    pub(crate) fn admits(&self, tier: usize, node: Node) -> bool {
        !self.is_full(node) || self.parents[node].is_none_or(|parent| self.is_coming_or_on(tier, parent))
    }

    /// A block is on its way to a slot.
    pub(crate) fn reserve(&mut self, tier: usize, node: Node, slot: u32, ticket: u64) {
        self.comes(node);
        self.tiers[tier].slots[slot as usize] = Slot::Arriving(node);
        self.tiers[tier].arriving.insert(node, (slot, ticket));
    }

    pub(crate) fn complete(&mut self, tier: usize, slot: u32) -> Option<u32> {
        match self.tiers[tier].slots[slot as usize] {
            // Its parent failed, or was removed alone.
            Slot::Arriving(node) if !self.admits(tier, node) => {
                self.fail(tier, slot, Slot::Free);
                None
            }
            Slot::Arriving(node) => {
                self.note_early(tier, node);
                self.arrival_ends(tier, node);
                self.tiers[tier].slots[slot as usize] = Slot::Registered(node);
                self.tiers[tier].present.insert(node, vec![slot]);
                self.pin(tier, slot, Pin::Transfer);
                self.young(tier, slot);
                self.use_now(node);
                Some(slot)
            }
            Slot::Cancelled(node) => {
                self.tiers[tier].slots[slot as usize] = Slot::Free;
                let other = self.tiers[tier].present.get(&node).map(|slots| slots[0]);
                if let Some(other) = other {
                    self.pin(tier, other, Pin::Transfer);
                }
                other
            }
            other => panic!("complete of {other:?}"),
        }
    }

    /// The slot is `after` that.
    pub(crate) fn fail(&mut self, tier: usize, slot: u32, after: Slot) {
        let before = std::mem::replace(&mut self.tiers[tier].slots[slot as usize], after);
        if let Slot::Arriving(node) = before {
            let early = self.tiers[tier].early.remove(&node);
            self.tiers[tier].orphans.extend(early.unwrap_or_default());
            self.arrival_ends(tier, node);
            self.gone(tier, node);
        }
    }

    /// A block is complete, perhaps before its parent.
    fn note_early(&mut self, tier: usize, node: Node) {
        let awaited = |parent: &Node| self.tiers[tier].arriving.contains_key(parent);
        if let Some(parent) = self.parents[node].filter(|_| self.is_full(node)).filter(awaited) {
            self.tiers[tier].early.entry(parent).or_default().push(node);
        }
    }

    /// A block is not on its way any more; where it would have come.
    pub(super) fn arrival_ends(&mut self, tier: usize, node: Node) -> Option<(u32, u64)> {
        self.tiers[tier].early.remove(&node);
        self.tiers[tier].arriving.remove(&node)
    }

    /// What was complete before a block that failed goes, with all that continues it.
    pub(crate) fn remove_orphans(&mut self) {
        for tier in 0..self.tiers.len() {
            let is_orphan = |&node: &Node| {
                self.is_coming_or_on(tier, node)
                    && self.parents[node].is_some_and(|parent| !self.is_coming_or_on(tier, parent))
            };
            let orphans: Vec<Node> = self.tiers[tier].orphans.iter().copied().filter(is_orphan).collect();
            self.tiers[tier].orphans.clear();
            let gone = orphans.into_iter().flat_map(|node| self.subtree(node)).collect();
            self.remove(&gone, &[tier], false);
        }
    }
}
