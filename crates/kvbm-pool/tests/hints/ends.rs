//! Branches that are said to have ended, under the policies that take the caller's word for it.

use crate::world::{CAPACITY, GROUP, Rng, World, chain, chains};
use kvbm_plan::{NamespaceId, SequenceHash};
use kvbm_pool::{G1, PolicyKind};
use std::collections::{BTreeMap, BTreeSet};

const NAMESPACE: NamespaceId = NamespaceId(0);

/// What `lru-leaf` keeps, naively: a number for each block that is there, the least goes first.
#[derive(Default)]
struct Model {
    there: BTreeMap<SequenceHash, i64>,
    parents: BTreeMap<SequenceHash, SequenceHash>,
    now: i64,
}

impl Model {
    fn children(&self, hash: SequenceHash) -> usize {
        self.there.keys().filter(|other| self.parents.get(other) == Some(&hash)).count()
    }

    fn serve(&mut self, chain: &[SequenceHash]) {
        let missing = chain.iter().filter(|hash| !self.there.contains_key(hash)).count();
        while self.there.len() + missing > CAPACITY as usize {
            let may_go = |hash: &SequenceHash| !chain.contains(hash) && self.children(*hash) == 0;
            let oldest = self.there.iter().filter(|(hash, _)| may_go(hash)).min_by_key(|(_, at)| **at);
            let oldest = *oldest.unwrap().0;
            self.there.remove(&oldest);
        }
        self.now += 1;
        for (&hash, depth) in chain.iter().zip(0..) {
            self.there.insert(hash, 1000 * self.now - depth);
        }
        self.parents.extend(chain.windows(2).map(|pair| (pair[1], pair[0])));
    }

    fn ends(&mut self, chain: &[SequenceHash]) {
        self.now += 1;
        let mut below = 0;
        let depths: Vec<_> = chain.iter().zip(0..).collect();
        for (&hash, depth) in depths.into_iter().rev() {
            if !self.there.contains_key(&hash) {
                continue;
            }
            if self.children(hash) > below {
                return;
            }
            below = 1;
            let at = self.there.entry(hash).or_default();
            if *at > 0 {
                *at = -1000 * self.now - depth;
            }
        }
    }
}

#[test]
fn under_lru_leaf_what_has_ended_is_older_than_anything_else() {
    let mut rng = Rng(11);
    let chains = chains();
    let (mut world, mut model) = (World::new(PolicyKind::LruLeaf), Model::default());
    let mut ended = 0;
    for _ in 0..3000 {
        let chain = &chains[rng.below(chains.len())];
        if rng.below(3) == 0 {
            world.registry.branch_ends(GROUP, chain);
            model.ends(chain);
            ended += model.there.values().filter(|at| **at < 0).count();
        } else {
            world.serve::<G1>(chain, NAMESPACE);
            model.serve(chain);
        }
        world.check_events();
        let kept: BTreeSet<_> = model.there.keys().copied().collect();
        assert_eq!(world.announced[0], kept);
    }
    assert!(ended > 3000, "hints meant something: {ended}");
}

/// Fills the tier with chains 0 to 3 of ten blocks each, of which 0 and 1 share the first four; 36
/// blocks in all.
fn filled(policy: PolicyKind) -> (World, Vec<Vec<SequenceHash>>) {
    let mut world = World::new(policy);
    let chains: Vec<_> =
        (0..4_u8).map(|branch| chain(0, if branch == 1 { 4 } else { 0 }, branch, 10)).collect();
    for chain in &chains {
        world.serve::<G1>(chain, NAMESPACE);
    }
    (world, chains)
}

fn there(world: &World, chain: &[SequenceHash]) -> usize {
    chain.iter().filter(|&&hash| !world.registry.tiers_of(GROUP, hash).is_empty()).count()
}

#[test]
fn an_ended_branch_goes_first_and_what_others_share_stays() {
    let (mut world, chains) = filled(PolicyKind::LruLeaf);
    world.registry.branch_ends(GROUP, &chains[1]);
    world.registry.branch_ends(GROUP, &chains[3]);
    // Four of 40 are free: 16 must go, and 16 have ended.
    world.serve::<G1>(&chain(9, 0, 9, 20), NAMESPACE);
    let left: Vec<usize> = chains.iter().map(|chain| there(&world, chain)).collect();
    assert_eq!(left, [10, 4, 10, 0]);
}

#[test]
fn a_use_takes_the_hint_back() {
    let (mut world, chains) = filled(PolicyKind::LruLeaf);
    world.registry.branch_ends(GROUP, &chains[3]);
    world.registry.branch_ends(GROUP, &chains[2]);
    world.serve::<G1>(&chains[3], NAMESPACE);
    world.serve::<G1>(&chain(9, 0, 9, 14), NAMESPACE);
    let left: Vec<usize> = chains.iter().map(|chain| there(&world, chain)).collect();
    assert_eq!(left, [10, 10, 0, 10]);
}

#[test]
fn a_hint_for_blocks_in_use_counts_when_they_are_not() {
    let (mut world, chains) = filled(PolicyKind::LruLeaf);
    let held = world.registry.pool::<G1>().match_sequence_hashes(GROUP, &chains[3]);
    world.registry.branch_ends(GROUP, &chains[3]);
    world.serve::<G1>(&chain(8, 0, 8, 7), NAMESPACE);
    assert_eq!(there(&world, &chains[3]), 10, "in use");
    drop(held);
    world.serve::<G1>(&chain(9, 0, 9, 10), NAMESPACE);
    assert_eq!(there(&world, &chains[3]), 0);
}
