//! Does the same things to the pool and to the model, and compares all that can be seen.

mod compare;
mod transfers;
mod users;

use crate::oracle::{Node, Oracle, Pin, Refused, Slot, TierModel};
use crate::spy::{Seen, Spy};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, GroupKind, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    AnyArrivals, BlockChain, Blocks, Duplicates, EventKind, EventRecord, G1, G2, G3, GroupConfig, Pinned,
    Prefix, RegisterError, Registry, RegistryConfig, Reset, Selection, TierMask, TierTag,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

const CAPACITY: [u32; 3] = [9, 14, 22];
const NODES_PER_GROUP: usize = 26;

pub(crate) struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

enum Held {
    G1(Blocks<G1, Reset>),
    G2(Blocks<G2, Reset>),
    G3(Blocks<G3, Reset>),
}

impl Held {
    fn tier(&self) -> usize {
        match self {
            Self::G1(_) => 0,
            Self::G2(_) => 1,
            Self::G3(_) => 2,
        }
    }

    fn blocks(&self) -> &[BlockId] {
        match self {
            Self::G1(blocks) => blocks.block_ids(),
            Self::G2(blocks) => blocks.block_ids(),
            Self::G3(blocks) => blocks.block_ids(),
        }
    }

    fn is_lost(&self) -> bool {
        match self {
            Self::G1(blocks) => blocks.is_lost(),
            Self::G2(blocks) => blocks.is_lost(),
            Self::G3(blocks) => blocks.is_lost(),
        }
    }
}

pub(crate) struct Driver {
    rng: Rng,
    registry: Registry,
    oracle: Oracle,
    held: Vec<Held>,
    pinned: Vec<(Pinned, Pin)>,
    prefixes: Vec<Prefix>,
    arrivals: Vec<AnyArrivals>,
    /// What the events say is on each tier.
    told: [BTreeMap<(GroupId, SequenceHash), BlockIdentity>; 3],
    next_seq: u64,
    drain: Vec<EventRecord>,
    /// Number of the last operation, for messages.
    last: usize,
    shards: u32,
}

fn universe(rng: &mut Rng, groups: usize) -> (Vec<BlockIdentity>, Vec<Option<Node>>) {
    let mut identities: Vec<BlockIdentity> = Vec::new();
    let mut parents = Vec::new();
    for group in 0..groups {
        let first = identities.len();
        for index in 0..NODES_PER_GROUP {
            // Mostly long chains with some branches; the same hashes in every group.
            let parent = match rng.below(8) {
                _ if index == 0 => None,
                0 => None,
                1 | 2 => Some(first + rng.below(index)),
                _ => Some(first + index - 1),
            };
            let position = parent.map_or(0, |parent: Node| identities[parent].position + 1);
            let namespace =
                parent.map_or(NamespaceId(index as u32 % 2), |parent| identities[parent].namespace);
            identities.push(BlockIdentity {
                namespace,
                group: GroupId(group as u16),
                hash: SequenceHash::from_bytes([index as u8 + 1; 16]),
                parent: parent.map(|parent| identities[parent].hash),
                position,
            });
            parents.push(parent);
        }
    }
    (identities, parents)
}

impl Driver {
    /// With a watched policy, or with the built-in one whose every victim the model foretells. Over several shards it is known
    /// which blocks may go, not which does: events say it.
    pub(crate) fn new(seed: u64, watched: bool, shards: u32) -> Self {
        let mut rng = Rng(seed);
        let groups = vec![
            GroupConfig::full(16),
            GroupConfig { kind: GroupKind::SlidingWindow(40), tokens_per_block: 16 },
            GroupConfig { kind: GroupKind::State, tokens_per_block: 16 },
        ];
        let (universe, parents) = universe(&mut rng, groups.len());
        let kinds = groups.iter().map(|group| (group.kind, group.tokens_per_block)).collect();
        let config = RegistryConfig { groups, event_capacity: 256, shards, ..RegistryConfig::new(CAPACITY) };
        let tiers = CAPACITY.map(|capacity| TierModel {
            slots: vec![Slot::Free; capacity as usize],
            refs: vec![0; capacity as usize],
            ..TierModel::default()
        });
        let spied = (watched || shards > 1).then(|| Arc::new(Mutex::new(Seen::default())));
        let registry = match &spied {
            Some(seen) if watched => {
                let spy = Spy { seen: Arc::clone(seen), random: rng.next() };
                Registry::with_policy(&config, Box::new(spy))
            }
            _ => Registry::new(&config),
        };
        Self {
            rng,
            registry: registry.expect("the configuration is valid"),
            oracle: Oracle { kinds, universe, parents, tiers, spied },
            held: Vec::new(),
            pinned: Vec::new(),
            prefixes: Vec::new(),
            arrivals: Vec::new(),
            told: Default::default(),
            next_seq: 0,
            drain: Vec::new(),
            last: 0,
            shards,
        }
    }

    pub(crate) fn step(&mut self) {
        let choice = self.rng.below(100);
        self.last = choice;
        match choice {
            0..=11 => match self.rng.below(3) {
                0 => self.allocate::<G1>(Held::G1),
                1 => self.allocate::<G2>(Held::G2),
                _ => self.allocate::<G3>(Held::G3),
            },
            12..=31 => self.register(),
            32..=34 => self.drop_held(),
            35..=42 => self.match_prefix(),
            43..=48 => self.match_tier(),
            49..=58 => self.change_pinned(),
            59..=62 => self.drop_prefix(),
            63..=66 => self.touch(),
            67..=76 => self.begin_arrivals(),
            77..=88 => self.change_arrivals(),
            89..=92 => self.coldest(),
            93 => self.quarantine(),
            94 => self.remove(),
            95 => self.lose(),
            _ => {
                self.registry.step();
            }
        }
    }

    pub(super) fn any_path(&mut self) -> Vec<Node> {
        let node = self.rng.below(self.oracle.universe.len());
        self.oracle.path(node)
    }

    pub(super) fn hashes(&self, path: &[Node]) -> Vec<SequenceHash> {
        path.iter().map(|&node| self.oracle.universe[node].hash).collect()
    }

    pub(super) fn group(&self, path: &[Node]) -> GroupId {
        self.oracle.universe[path[0]].group
    }

    pub(super) fn node(&self, group: GroupId, hash: SequenceHash) -> Node {
        let same = |identity: &BlockIdentity| identity.group == group && identity.hash == hash;
        self.oracle.universe.iter().position(same).expect("the block is of the universe")
    }

    fn allocate<T: TierTag>(&mut self, hold: fn(Blocks<T, Reset>) -> Held) {
        if self.held.len() > 6 {
            return self.drop_held();
        }
        let n = self.rng.below(5);
        let tier = T::TIER.index();
        let allocated = self.registry.pool::<T>().get_mutable_blocks(n);
        self.follow_victims();
        let expected = self.oracle.allocate(tier, n);
        match allocated {
            Ok(blocks) => {
                let allowed = expected.expect("the model has no room");
                assert_eq!(blocks.len(), n);
                for block in blocks.block_ids() {
                    assert!(allowed.contains(&block.0), "{block} of {} is not to be given", T::TIER);
                    let slot = &mut self.oracle.tiers[tier].slots[block.index()];
                    *slot = Slot::Held { lost: false };
                }
                self.held.push(hold(blocks));
            }
            Err(error) => {
                assert_eq!(expected, None, "{error}");
                assert_eq!(error.tier, T::TIER);
                assert!(error.to_string().contains(error.way_out()));
            }
        }
    }

    /// Over several shards: the model takes the victims that the events of the last operation name.
    pub(super) fn follow_victims(&mut self) {
        let Some(seen) = self.oracle.spied.as_ref().filter(|_| self.shards > 1) else { return };
        let before = self.drain.len();
        self.registry.drain_events(&mut self.drain, usize::MAX);
        let mut seen = seen.lock().expect("nobody panicked with it");
        for event in self.drain[before..].iter().filter(|event| event.kind == EventKind::Remove) {
            seen.chosen.push_back((event.tier.index(), event.block.0));
        }
    }

    fn take_held(&mut self) -> Option<Held> {
        let index = self.rng.below(self.held.len());
        (!self.held.is_empty()).then(|| self.held.swap_remove(index))
    }

    pub(super) fn drop_held(&mut self) {
        let Some(held) = self.take_held() else { return };
        for block in held.blocks() {
            self.oracle.tiers[held.tier()].slots[block.index()] = Slot::Free;
        }
        drop(held);
    }

    fn register(&mut self) {
        match self.take_held() {
            Some(Held::G1(blocks)) => self.register_on(blocks, Held::G1),
            Some(Held::G2(blocks)) => self.register_on(blocks, Held::G2),
            Some(Held::G3(blocks)) => self.register_on(blocks, Held::G3),
            None => self.allocate::<G1>(Held::G1),
        }
    }

    fn register_on<T: TierTag>(&mut self, blocks: Blocks<T, Reset>, hold: fn(Blocks<T, Reset>) -> Held) {
        let path = self.any_path();
        // Most often what continues the part that is there.
        let (start, found) = self.oracle.longest_prefix(&path, &[0, 1, 2]);
        let known = start + found.len();
        let start =
            if self.rng.below(4) == 0 { self.rng.below(path.len()) } else { known.min(path.len() - 1) };
        let first = self.oracle.universe[path[0]];
        let partial =
            blocks.init_sequence(first.namespace, first.group, start as u32).expect("a short sequence");
        let hashes = self.hashes(&path);
        let (complete, rest) = match partial.commit(BlockChain::of_hashes(&hashes)) {
            Ok(split) => split,
            Err(rejected) => panic!("{rejected}"),
        };
        if !rest.is_empty() {
            self.held.push(hold(rest.into_reset()));
        }
        let tier = T::TIER.index();
        let slots: Vec<u32> = complete.block_ids().iter().map(|block| block.0).collect();
        let nodes = &path[start..start + slots.len()];
        // A duplicate that takes over for a victim is not in the events.
        let allow = self.rng.below(2) > 0 && self.shards == 1;
        let duplicates = if allow { Duplicates::Allow } else { Duplicates::Reuse };
        let is_lost = complete.is_lost();
        let expected = match self.oracle.register(tier, &slots, nodes, duplicates) {
            // The model has nothing of an empty batch that could have been lost.
            Ok(_) if slots.is_empty() && is_lost => Err(Refused::Lost),
            expected => expected,
        };
        match self.registry.pool::<T>().register(complete, duplicates) {
            Ok(cached) => {
                let expected = expected.expect("the model refuses");
                assert_eq!(cached.block_ids().iter().map(|block| block.0).collect::<Vec<_>>(), expected);
                self.pinned.push((cached.erase(), Pin::Use));
            }
            Err(rejected) => {
                let refused = match rejected.error {
                    RegisterError::Lost(lost) if lost.tier == T::TIER => Refused::Lost,
                    RegisterError::MissingParent { .. } => Refused::MissingParent,
                    error => panic!("{error}"),
                };
                assert_eq!(expected, Err(refused), "{rejected}");
                self.held.push(hold(rejected.batch.into_reset()));
            }
        }
    }

    fn lose(&mut self) {
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

    fn touch(&mut self) {
        let path = self.any_path();
        self.oracle.touch(&path);
        self.registry.touch(self.group(&path), &self.hashes(&path));
    }

    fn quarantine(&mut self) {
        // Few enough that a tier does not run dry over the test.
        if self.rng.below(4) > 0 {
            return;
        }
        let tier = Tier::SLOTTED[self.rng.below(3)];
        let block = BlockId(self.rng.below(CAPACITY[tier.index()] as usize) as u32);
        self.oracle.quarantine(tier.index(), block.0);
        self.registry.quarantine(tier, block);
    }

    fn remove(&mut self) {
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
                self.registry.remove(Selection::Group(group), tiers);
            }
            _ => {
                let nodes = self.oracle.subtree(node);
                self.oracle.remove(&nodes, &[0, 1, 2], false);
                self.registry.remove_subtree(group, hash, TierMask::ALL);
            }
        }
    }
}
