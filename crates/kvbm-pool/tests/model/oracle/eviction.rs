//! Who may go when room is needed, and who does.

use super::{Node, Oracle, Slot};
use std::collections::{BTreeSet, HashSet};

impl Oracle {
    /// The slots that an allocation of `n` must come from, or `None`. Victims are Held afterwards;
    /// after a failure they are free. So many blocks as `counted` stay without a pin, so that
    /// nobody sees beforehand that they will not go.
    pub(crate) fn allocate(&mut self, tier: usize, n: usize, counted: usize) -> Option<HashSet<u32>> {
        let free: HashSet<u32> = (0..self.tiers[tier].slots.len() as u32)
            .filter(|&slot| self.tiers[tier].slots[slot as usize] == Slot::Free)
            .collect();
        if n <= free.len() {
            return Some(free);
        }
        let missing = n - free.len();
        let most = self.inactive(tier) - self.kept_idle(tier);
        if missing > most {
            if missing <= most + counted {
                self.evict_in_vain(tier);
            }
            return None;
        }
        let mut victims = HashSet::new();
        while victims.len() < missing
            && let Some(slot) = self.next_victim(tier)
        {
            self.vacate(tier, slot);
            victims.insert(slot);
        }
        if victims.len() < missing {
            assert!(self.evictable(tier).is_empty(), "what may go was not taken");
            for &slot in &victims {
                self.tiers[tier].slots[slot as usize] = Slot::Free;
            }
            return None;
        }
        Some(free.union(&victims).copied().collect())
    }

    /// A request that looked as if there was room for it has evicted what it could.
    fn evict_in_vain(&mut self, tier: usize) {
        while self
            .spied
            .as_ref()
            .is_some_and(|seen| !seen.lock().expect("the policy did not panic").chosen.is_empty())
            && let Some(slot) = self.next_victim(tier)
        {
            self.vacate(tier, slot);
            self.tiers[tier].slots[slot as usize] = Slot::Free;
        }
    }

    /// Pinned blocks that nobody uses.
    fn kept_idle(&self, tier: usize) -> usize {
        let idle = |&&(on, node): &&(usize, Node)| {
            on == tier && self.tiers[tier].refs[self.tiers[tier].present[&node][0] as usize] == 0
        };
        self.hints.kept.keys().filter(idle).count()
    }

    /// Whether a policy may evict from the slot.
    pub(crate) fn is_evictable(&self, tier: usize, slot: u32) -> bool {
        let Slot::Registered(node) = self.tiers[tier].slots[slot as usize] else { return false };
        let copies = &self.tiers[tier].present[&node];
        let waits = copies.len() == 1 && self.is_full(node) && self.children(tier, node) > 0;
        let kept = self.hints.kept.contains_key(&(tier, node));
        copies[0] == slot && self.tiers[tier].refs[slot as usize] == 0 && !waits && !kept
    }

    /// All slots of which that is true.
    pub(crate) fn evictable(&self, tier: usize) -> BTreeSet<u32> {
        (0..self.tiers[tier].slots.len() as u32).filter(|&slot| self.is_evictable(tier, slot)).collect()
    }

    fn next_victim(&mut self, tier: usize) -> Option<u32> {
        if let Some(seen) = &self.spied {
            let chosen = seen.lock().expect("the policy did not panic").chosen.pop_front();
            return chosen.map(|(on, slot)| {
                assert!(on == tier && self.is_evictable(tier, slot), "slot {slot} must not be evicted");
                self.tiers[tier].order.retain(|&other| other != slot);
                slot
            });
        }
        while !self.tiers[tier].order.is_empty() {
            let slot = self.tiers[tier].order.remove(0);
            if self.is_evictable(tier, slot) {
                return Some(slot);
            }
        }
        None
    }

    /// Primaries of blocks with copies that may go: the block stays, and no event tells of it.
    pub(crate) fn replaceable(&self, tier: usize) -> Vec<u32> {
        let primaries =
            self.tiers[tier].present.values().filter(|slots| slots.len() > 1).map(|slots| slots[0]);
        primaries.filter(|&slot| self.is_evictable(tier, slot)).collect()
    }

    fn vacate(&mut self, tier: usize, slot: u32) {
        let Slot::Registered(node) = self.tiers[tier].slots[slot as usize] else { panic!("victim {slot}") };
        self.tiers[tier].slots[slot as usize] = Slot::Held { lost: false };
        self.forget_slot(tier, node, slot);
    }
}
