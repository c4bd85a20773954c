//! The pool as simply as it can be said: maps, lists, scans. Slow and obvious.

use crate::spy::Seen;
use kvbm_plan::{BlockId, BlockIdentity, GroupKind, Tier};
use kvbm_pool::{Duplicates, TierMask};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex};

/// Index of a block in the universe.
pub(crate) type Node = usize;

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    Free,
    /// Of a batch; whether the tier lost what it held since it was allocated.
    Held {
        lost: bool,
    },
    Arriving(Node),
    Cancelled(Node),
    Registered(Node),
    Detached {
        bad: bool,
        lost: bool,
    },
    Quarantined,
}

/// One tier.
#[derive(Default)]
pub(crate) struct TierModel {
    pub(crate) slots: Vec<Slot>,
    pub(crate) refs: Vec<u32>,
    /// Primary slot and duplicates of every Present block.
    pub(crate) present: BTreeMap<Node, Vec<u32>>,
    pub(crate) arriving: BTreeMap<Node, (u32, u64)>,
    /// Slots in the order in which they come up for eviction.
    pub(crate) order: Vec<u32>,
    pub(crate) transfer_pins: u64,
}

/// All tiers over a universe of blocks.
pub(crate) struct Oracle {
    pub(crate) kinds: Vec<(GroupKind, u32)>,
    pub(crate) universe: Vec<BlockIdentity>,
    pub(crate) parents: Vec<Option<Node>>,
    pub(crate) tiers: [TierModel; 3],
    /// Where the policy is watched instead of foretold.
    pub(crate) spied: Option<Arc<Mutex<Seen>>>,
}

/// Why a batch is not registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Lost,
    MissingParent,
}

/// Whether a pin is a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pin {
    Use,
    Transfer,
}

impl Oracle {
    pub(crate) fn path(&self, node: Node) -> Vec<Node> {
        let mut path: Vec<Node> = std::iter::successors(Some(node), |&at| self.parents[at]).collect();
        path.reverse();
        path
    }

    fn is_full(&self, node: Node) -> bool {
        self.kinds[usize::from(self.universe[node].group.0)].0 == GroupKind::Full
    }

    pub(crate) fn tiers_of(&self, node: Node) -> TierMask {
        Tier::SLOTTED
            .into_iter()
            .filter(|tier| self.tiers[tier.index()].present.contains_key(&node))
            .collect()
    }

    pub(crate) fn is_on(&self, tier: usize, node: Node) -> bool {
        self.tiers[tier].present.contains_key(&node)
    }

    fn is_coming_or_on(&self, tier: usize, node: Node) -> bool {
        self.is_on(tier, node) || self.tiers[tier].arriving.contains_key(&node)
    }

    fn children(&self, tier: usize, node: Node) -> usize {
        let is_child = |&other: &Node| self.parents[other] == Some(node) && self.is_coming_or_on(tier, other);
        (0..self.universe.len()).filter(is_child).count()
    }

    fn young(&mut self, tier: usize, slot: u32) {
        self.tiers[tier].order.retain(|&other| other != slot);
        self.tiers[tier].order.push(slot);
    }

    fn old(&mut self, tier: usize, slot: u32) {
        self.tiers[tier].order.retain(|&other| other != slot);
        self.tiers[tier].order.insert(0, slot);
    }

    /// A block is no longer on, or coming to, `tier`: its parent may have to wait no longer.
    fn gone(&mut self, tier: usize, node: Node) {
        let Some(parent) = self.parents[node] else { return };
        if self.children(tier, parent) > 0 {
            return;
        }
        let Some(slots) = self.tiers[tier].present.get(&parent) else { return };
        let primary = slots[0];
        if self.tiers[tier].refs[primary as usize] == 0 && !self.tiers[tier].order.contains(&primary) {
            self.old(tier, primary);
        }
    }

    pub(crate) fn count(&self, tier: usize, what: impl Fn(Slot, u32) -> bool) -> u32 {
        let tier = &self.tiers[tier];
        tier.slots.iter().zip(&tier.refs).filter(|&(&slot, &refs)| what(slot, refs)).count() as u32
    }

    fn inactive(&self, tier: usize) -> usize {
        self.count(tier, |slot, refs| matches!(slot, Slot::Registered(_)) && refs == 0) as usize
    }

    /// The slots that an allocation of `n` must come from, or `None`. Victims are Held afterwards; after a failure
    /// they are free.
    pub(crate) fn allocate(&mut self, tier: usize, n: usize) -> Option<HashSet<u32>> {
        let free: HashSet<u32> = (0..self.tiers[tier].slots.len() as u32)
            .filter(|&slot| self.tiers[tier].slots[slot as usize] == Slot::Free)
            .collect();
        if n <= free.len() {
            return Some(free);
        }
        let missing = n - free.len();
        if missing > self.inactive(tier) {
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

    /// Whether a policy may evict from the slot.
    fn is_evictable(&self, tier: usize, slot: u32) -> bool {
        let Slot::Registered(node) = self.tiers[tier].slots[slot as usize] else { return false };
        let copies = &self.tiers[tier].present[&node];
        let waits = copies.len() == 1 && self.is_full(node) && self.children(tier, node) > 0;
        copies[0] == slot && self.tiers[tier].refs[slot as usize] == 0 && !waits
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
            let Slot::Registered(node) = self.tiers[tier].slots[slot as usize] else {
                panic!("{slot} in order")
            };
            let alone = self.tiers[tier].present[&node].len() == 1;
            let waits = alone && self.is_full(node) && self.children(tier, node) > 0;
            if self.tiers[tier].refs[slot as usize] == 0 && !waits {
                return Some(slot);
            }
        }
        None
    }

    fn vacate(&mut self, tier: usize, slot: u32) {
        let Slot::Registered(node) = self.tiers[tier].slots[slot as usize] else { panic!("victim {slot}") };
        self.tiers[tier].slots[slot as usize] = Slot::Held { lost: false };
        self.forget_slot(tier, node, slot);
    }

    /// Takes a slot from a Present block; the block goes with its last slot.
    fn forget_slot(&mut self, tier: usize, node: Node, slot: u32) {
        let slots = self.tiers[tier].present.get_mut(&node).expect("the block is present");
        slots.retain(|&other| other != slot);
        if slots.is_empty() {
            self.tiers[tier].present.remove(&node);
            self.gone(tier, node);
        }
    }

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
                    self.young(tier, slot);
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
                    if let Some((arriving, _)) = self.tiers[tier].arriving.remove(&node) {
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

    /// Blocks of the longest useful prefix of `path` on `tiers`: first index and (tier, slot) of each.
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
            for tier in 0..3 {
                if let Some(slots) = self.tiers[tier].present.get(&node) {
                    let primary = slots[0];
                    self.young(tier, primary);
                }
            }
        }
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

    pub(crate) fn complete(&mut self, tier: usize, slot: u32) -> Option<u32> {
        match self.tiers[tier].slots[slot as usize] {
            Slot::Arriving(node) => {
                self.tiers[tier].arriving.remove(&node);
                self.tiers[tier].slots[slot as usize] = Slot::Registered(node);
                self.tiers[tier].present.insert(node, vec![slot]);
                self.pin(tier, slot, Pin::Transfer);
                self.young(tier, slot);
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

    pub(crate) fn fail(&mut self, tier: usize, slot: u32, reusable: bool) {
        let after = if reusable { Slot::Free } else { Slot::Quarantined };
        let before = std::mem::replace(&mut self.tiers[tier].slots[slot as usize], after);
        if let Slot::Arriving(node) = before {
            self.tiers[tier].arriving.remove(&node);
            self.gone(tier, node);
        }
    }

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

    /// A tier lost what it held: nothing is there, and what is in somebody's hands is worth nothing.
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

    fn expel(&mut self, tier: usize, node: Node, slots: &[u32]) {
        if let Some((slot, _)) = self.tiers[tier].arriving.remove(&node) {
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
