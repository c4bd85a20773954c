//! The pool as simply as it can be said: maps, lists, scans. Slow and obvious.

mod coming;
mod eviction;
mod hints;
mod removal;
mod users;

use crate::spy::Seen;
use hints::Hints;
use kvbm_plan::{BlockIdentity, GroupKind, Tier};
use kvbm_pool::TierMask;
use std::collections::BTreeMap;
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
    /// For what is arriving, what was complete before it; and what was so before a block that
    /// failed.
    pub(crate) early: BTreeMap<Node, Vec<Node>>,
    pub(crate) orphans: Vec<Node>,
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
    pub(crate) hints: Hints,
    /// The next victims, where they are not foretold.
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
    /// Nothing is anywhere.
    pub(crate) fn new(
        kinds: Vec<(GroupKind, u32)>,
        (universe, parents): (Vec<BlockIdentity>, Vec<Option<Node>>),
        capacity: [u32; 3],
        spied: Option<Arc<Mutex<Seen>>>,
    ) -> Self {
        let tiers = capacity.map(|capacity| TierModel {
            slots: vec![Slot::Free; capacity as usize],
            refs: vec![0; capacity as usize],
            ..TierModel::default()
        });
        Self { kinds, universe, parents, tiers, hints: Hints::default(), spied }
    }

    pub(crate) fn path(&self, node: Node) -> Vec<Node> {
        let mut path: Vec<Node> = std::iter::successors(Some(node), |&at| self.parents[at]).collect();
        path.reverse();
        path
    }

    pub(crate) fn is_full(&self, node: Node) -> bool {
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
        self.waits_no_more(tier, parent);
    }

    /// A block that was passed over in the order may go now: it is among the oldest.
    fn waits_no_more(&mut self, tier: usize, node: Node) {
        let Some(slots) = self.tiers[tier].present.get(&node) else { return };
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

    /// Takes a slot from a Present block; the block goes with its last slot.
    fn forget_slot(&mut self, tier: usize, node: Node, slot: u32) {
        let slots = self.tiers[tier].present.get_mut(&node).expect("the block is present");
        slots.retain(|&other| other != slot);
        if slots.is_empty() {
            self.tiers[tier].present.remove(&node);
            self.hints.kept.remove(&(tier, node));
            self.gone(tier, node);
        }
    }
}
