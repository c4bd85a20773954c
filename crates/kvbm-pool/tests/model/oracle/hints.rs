//! What callers say beforehand: pins that end by themselves, times to live, branches that end.

use super::{Node, Oracle};
use crate::universe::CAPACITY;
use kvbm_plan::{NamespaceId, Tier};
use kvbm_pool::{PinError, RegistryConfig};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Default)]
pub(crate) struct Hints {
    pub(crate) now: u64,
    /// Until when which block stays on which tier.
    pub(crate) kept: BTreeMap<(usize, Node), u64>,
    /// When a block was used last.
    pub(super) used: BTreeMap<Node, u64>,
    /// Iterations without use after which a namespace's blocks leave.
    pub(super) limits: BTreeMap<NamespaceId, u64>,
    /// Blocks of branches that are said to have ended, until they are used again.
    pub(super) ended: BTreeSet<Node>,
}

impl Oracle {
    /// The block is used.
    pub(super) fn use_now(&mut self, node: Node) {
        self.hints.used.insert(node, self.hints.now);
    }

    /// What was said of a block that comes is forgotten, unless it is somewhere.
    pub(super) fn comes(&mut self, node: Node) {
        if !(0..3).any(|tier| self.is_coming_or_on(tier, node)) {
            self.hints.ended.remove(&node);
        }
    }

    /// The block and those that it needs to be found on a tier, as far as they are there.
    fn needed(&self, tier: usize, node: Node) -> Vec<Node> {
        let above = |&at: &Node| self.parents[at].filter(|_| self.is_full(node));
        std::iter::successors(Some(node), above).take_while(|&at| self.is_on(tier, at)).collect()
    }

    /// Pins what is there of a path, or says why not. How many of its blocks are pinned then.
    pub(crate) fn keep(&mut self, path: &[Node], tiers: &[usize], until: u64) -> Result<usize, PinError> {
        if until <= self.hints.now {
            return Err(PinError::Past { until, now: self.hints.now });
        }
        let mut places = BTreeSet::new();
        for &tier in tiers {
            let wanted: BTreeSet<Node> = path.iter().flat_map(|&node| self.needed(tier, node)).collect();
            let asked = wanted.iter().filter(|&&node| !self.hints.kept.contains_key(&(tier, node))).count();
            let (capacity, pinned) = (CAPACITY[tier], self.count_kept(tier));
            let limit = RegistryConfig::most_pinned(capacity);
            if asked > (limit - pinned) as usize {
                return Err(PinError::Limit { tier: Tier::SLOTTED[tier], asked, pinned, limit, capacity });
            }
            places.extend(wanted.into_iter().map(|node| (tier, node)));
        }
        for place in places {
            let end = self.hints.kept.entry(place).or_default();
            *end = until.max(*end);
        }
        let is_kept = |&&node: &&Node| tiers.iter().any(|&tier| self.hints.kept.contains_key(&(tier, node)));
        Ok(path.iter().filter(is_kept).count())
    }

    /// Takes pins back from the end of a path on, as far as no pinned block continues them; how
    /// many.
    pub(crate) fn unkeep(&mut self, path: &[Node], tiers: &[usize]) -> usize {
        let before = self.hints.kept.len();
        for &node in path.iter().rev() {
            for &tier in tiers {
                let continues =
                    |&(on, other): &(usize, Node)| on == tier && self.parents[other] == Some(node);
                if !self.hints.kept.keys().any(continues) {
                    self.end_keep(tier, node);
                }
            }
        }
        before - self.hints.kept.len()
    }

    /// If the block was passed over in the order while it was pinned, it is among the oldest.
    fn end_keep(&mut self, tier: usize, node: Node) {
        if self.hints.kept.remove(&(tier, node)).is_some() {
            self.waits_no_more(tier, node);
        }
    }

    pub(crate) fn count_kept(&self, tier: usize) -> u32 {
        self.hints.kept.keys().filter(|(on, _)| *on == tier).count() as u32
    }

    pub(crate) fn limit(&mut self, namespace: NamespaceId, iterations: Option<u64>) {
        self.hints.limits.remove(&namespace);
        self.hints.limits.extend(iterations.map(|iterations| (namespace, iterations)));
    }

    /// An iteration: pins whose time is over end.
    pub(crate) fn tick(&mut self) {
        self.hints.now += 1;
        let over = |&(&place, &until): &(&(usize, Node), &u64)| (until <= self.hints.now).then_some(place);
        let mut ends: Vec<_> = self.hints.kept.iter().filter(|at| over(at).is_some()).collect();
        // Of a chain the end first.
        ends.sort_by_key(|&(&(_, node), &until)| (until, Reverse(self.universe[node].position)));
        let ends: Vec<(usize, Node)> = ends.into_iter().map(|(&place, _)| place).collect();
        for (tier, node) in ends {
            self.end_keep(tier, node);
        }
    }

    /// Whether the block's time to live on a tier is over and nothing keeps it there.
    fn is_due(&self, tier: usize, node: Node) -> bool {
        let Some(slots) = self.tiers[tier].present.get(&node) else { return false };
        let limit = self.hints.limits.get(&self.universe[node].namespace);
        limit.is_some_and(|limit| self.hints.now - self.hints.used[&node] >= *limit)
            && slots.iter().all(|&slot| self.tiers[tier].refs[slot as usize] == 0)
            && !self.hints.kept.contains_key(&(tier, node))
            && !(self.is_full(node) && self.children(tier, node) > 0)
    }

    /// The block's time to live is over, in the order in which it is with others.
    pub(crate) fn expire(&mut self, tier: usize, node: Node) {
        assert!(self.is_due(tier, node), "block {node} has to stay on tier {tier}");
        let slots = self.tiers[tier].present[&node].clone();
        self.expel(tier, node, &slots);
    }

    /// All that should have left.
    pub(crate) fn overdue(&self) -> Vec<(usize, Node)> {
        let places = (0..3).flat_map(|tier| (0..self.universe.len()).map(move |node| (tier, node)));
        places.filter(|&(tier, node)| self.is_due(tier, node)).collect()
    }

    /// Nothing will continue a path: those of its blocks at its end that nothing else continues on
    /// any tier are the next to go.
    pub(crate) fn branch_ends(&mut self, path: &[Node]) {
        let mut ended = Vec::new();
        let mut below: Option<Node> = None;
        for &node in path.iter().rev() {
            let continued = |tier: usize| {
                let own = below.is_some_and(|below| self.is_coming_or_on(tier, below));
                self.children(tier, node) > usize::from(own)
            };
            if (0..3).any(continued) {
                break;
            }
            below = Some(node);
            ended.push(node);
        }
        for node in ended.into_iter().rev() {
            let somewhere = (0..3).any(|tier| self.is_coming_or_on(tier, node));
            if !somewhere || !self.hints.ended.insert(node) {
                continue;
            }
            for tier in 0..3 {
                let primary = self.tiers[tier].present.get(&node).map(|slots| slots[0]);
                if let Some(slot) = primary.filter(|&slot| self.tiers[tier].refs[slot as usize] == 0) {
                    self.old(tier, slot);
                }
            }
        }
    }
}
