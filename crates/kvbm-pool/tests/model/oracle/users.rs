//! Users come and go.

use super::{Node, Oracle, Pin, Slot};
use kvbm_plan::GroupKind;

impl Oracle {
    pub(crate) fn pin(&mut self, tier: usize, slot: u32, pin: Pin) {
        self.tiers[tier].refs[slot as usize] += 1;
        self.tiers[tier].transfer_pins += u64::from(pin == Pin::Transfer);
    }

    pub(crate) fn unpin(&mut self, tier: usize, slot: u32, pin: Pin) {
        let at = slot as usize;
        self.tiers[tier].refs[at] -= 1;
        self.tiers[tier].transfer_pins -= u64::from(pin == Pin::Transfer);
        let last = self.tiers[tier].refs[at] == 0;
        match self.tiers[tier].slots[at] {
            Slot::Registered(node) if self.tiers[tier].present[&node][0] == slot => {
                if pin == Pin::Use {
                    self.use_now(node);
                    if self.hints.ended.contains(&node) {
                        self.old(tier, slot);
                    } else {
                        self.young(tier, slot);
                    }
                } else if last && !self.tiers[tier].order.contains(&slot) {
                    self.old(tier, slot);
                }
            }
            Slot::Registered(node) if last => {
                self.tiers[tier].slots[at] = Slot::Free;
                self.forget_slot(tier, node, slot);
            }
            Slot::Detached { bad, .. } if last => {
                self.tiers[tier].slots[at] = if bad { Slot::Quarantined } else { Slot::Free };
            }
            _ => {}
        }
    }

    /// Blocks of the longest useful prefix of `path` on `tiers`: first index and (tier, slot) of
    /// each.
    pub(crate) fn longest_prefix(&self, path: &[Node], tiers: &[usize]) -> (usize, Vec<(usize, u32)>) {
        let Some(&first) = path.first() else { return (0, Vec::new()) };
        let (kind, tokens_per_block) = self.kinds[usize::from(self.universe[first].group.0)];
        let on = |node: Node| tiers.iter().copied().find(|&tier| self.is_on(tier, node));
        for len in (1..=path.len()).rev() {
            let needed = match kind {
                GroupKind::Full => len,
                GroupKind::SlidingWindow(tokens) => tokens.div_ceil(tokens_per_block) as usize,
                GroupKind::State => 1,
            };
            let start = len.saturating_sub(needed);
            let found: Option<Vec<(usize, u32)>> = path[start..len]
                .iter()
                .map(|&node| on(node).map(|tier| (tier, self.tiers[tier].present[&node][0])))
                .collect();
            if let Some(found) = found {
                return (start, found);
            }
        }
        (0, Vec::new())
    }

    pub(crate) fn touch(&mut self, path: &[Node]) {
        for &node in path.iter().rev() {
            self.use_now(node);
            self.hints.ended.remove(&node);
            for tier in 0..3 {
                if let Some(slots) = self.tiers[tier].present.get(&node) {
                    let primary = slots[0];
                    self.young(tier, primary);
                }
            }
        }
    }
}
