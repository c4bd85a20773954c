//! Does the same things to the pool and to the model, and compares all that can be seen.

use crate::oracle::{Node, Oracle, Pin, Slot, TierModel};
use crate::spy::{Seen, Spy};
use kvbm_plan::{BlockId, BlockIdentity, GroupId, GroupKind, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    AnyArrivals, Arrival, BlockChain, Blocks, Completion, Duplicates, EventKind, EventRecord, G1, G2, G3,
    GroupConfig, Pinned, Prefix, Registry, RegistryConfig, Reset, Selection, TierMask, TierTag,
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
    /// With a watched policy, or with the built-in one whose every victim the model foretells.
    pub(crate) fn new(seed: u64, watched: bool) -> Self {
        let mut rng = Rng(seed);
        let groups = vec![
            GroupConfig::full(16),
            GroupConfig { kind: GroupKind::SlidingWindow(40), tokens_per_block: 16 },
            GroupConfig { kind: GroupKind::State, tokens_per_block: 16 },
        ];
        let (universe, parents) = universe(&mut rng, groups.len());
        let kinds = groups.iter().map(|group| (group.kind, group.tokens_per_block)).collect();
        let config = RegistryConfig { groups, event_capacity: 256, ..RegistryConfig::new(CAPACITY) };
        let tiers = CAPACITY.map(|capacity| TierModel {
            slots: vec![Slot::Free; capacity as usize],
            refs: vec![0; capacity as usize],
            ..TierModel::default()
        });
        let spied = watched.then(|| Arc::new(Mutex::new(Seen::default())));
        let registry = match &spied {
            Some(seen) => {
                let spy = Spy { seen: Arc::clone(seen), random: rng.next() };
                Registry::with_policy(&config, Box::new(spy))
            }
            None => Registry::new(&config),
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
            94..=95 => self.remove(),
            _ => {
                self.registry.step();
            }
        }
    }

    fn any_path(&mut self) -> Vec<Node> {
        let node = self.rng.below(self.oracle.universe.len());
        self.oracle.path(node)
    }

    fn hashes(&self, path: &[Node]) -> Vec<SequenceHash> {
        path.iter().map(|&node| self.oracle.universe[node].hash).collect()
    }

    fn group(&self, path: &[Node]) -> GroupId {
        self.oracle.universe[path[0]].group
    }

    fn node(&self, group: GroupId, hash: SequenceHash) -> Node {
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
        let expected = self.oracle.allocate(tier, n);
        match allocated {
            Ok(blocks) => {
                let allowed = expected.expect("the model has no room");
                assert_eq!(blocks.len(), n);
                for block in blocks.block_ids() {
                    assert!(allowed.contains(&block.0), "{block} of {} is not to be given", T::TIER);
                    let slot = &mut self.oracle.tiers[tier].slots[block.index()];
                    *slot = Slot::Held;
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

    fn take_held(&mut self) -> Option<Held> {
        let index = self.rng.below(self.held.len());
        (!self.held.is_empty()).then(|| self.held.swap_remove(index))
    }

    fn drop_held(&mut self) {
        let Some(held) = self.take_held() else { return };
        let (tier, ids) = match &held {
            Held::G1(blocks) => (0, blocks.block_ids()),
            Held::G2(blocks) => (1, blocks.block_ids()),
            Held::G3(blocks) => (2, blocks.block_ids()),
        };
        for block in ids {
            self.oracle.tiers[tier].slots[block.index()] = Slot::Free;
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
        let duplicates = if self.rng.below(2) == 0 { Duplicates::Reuse } else { Duplicates::Allow };
        let expected = self.oracle.register(tier, &slots, nodes, duplicates);
        match self.registry.pool::<T>().register(complete, duplicates) {
            Ok(cached) => {
                let expected = expected.expect("the model refuses");
                assert_eq!(cached.block_ids().iter().map(|block| block.0).collect::<Vec<_>>(), expected);
                self.pinned.push((cached.erase(), Pin::Use));
            }
            Err(rejected) => {
                assert_eq!(expected, None, "{rejected}");
                self.held.push(hold(rejected.batch.into_reset()));
            }
        }
    }

    fn match_prefix(&mut self) {
        if self.prefixes.len() > 4 {
            return self.drop_prefix();
        }
        let path = self.any_path();
        let (start, expected) = self.oracle.longest_prefix(&path, &[0, 1, 2]);
        let hashes = self.hashes(&path);
        let prefix = self.registry.match_prefix(self.group(&path), &hashes);
        let found: Vec<(usize, u32)> =
            prefix.blocks().iter().map(|block| (block.tier.index(), block.block.0)).collect();
        assert_eq!(found, expected);
        if !expected.is_empty() {
            assert_eq!(prefix.start(), start);
        }
        for (index, identity) in prefix.identities().into_iter().enumerate() {
            assert_eq!(identity, self.oracle.universe[path[start + index]]);
        }
        for arriving in prefix.arriving() {
            let (_, ticket) = self.oracle.tiers[arriving.tier.index()].arriving[&path[arriving.index]];
            assert_eq!(arriving.ticket, ticket);
        }
        for &(tier, slot) in &expected {
            self.oracle.pin(tier, slot, Pin::Use);
        }
        if self.rng.below(3) > 0 {
            self.prefixes.push(prefix);
            return;
        }
        let parts = prefix.into_parts();
        for part in [parts.g1.erase(), parts.g2.erase(), parts.g3.erase()] {
            self.pinned.push((part, Pin::Use));
        }
    }

    fn unpin_prefix(&mut self, prefix: Prefix) {
        for block in prefix.blocks().iter().rev() {
            self.oracle.unpin(block.tier.index(), block.block.0, Pin::Use);
        }
        drop(prefix);
    }

    fn drop_prefix(&mut self) {
        if self.prefixes.is_empty() {
            return;
        }
        let index = self.rng.below(self.prefixes.len());
        let mut prefix = self.prefixes.swap_remove(index);
        let tail = prefix.split_off(self.rng.below(prefix.len() + 1));
        self.unpin_prefix(tail);
        if self.rng.below(2) == 0 {
            self.prefixes.push(prefix);
        } else {
            self.unpin_prefix(prefix);
        }
    }

    fn match_tier(&mut self) {
        let path = self.any_path();
        let tier = self.rng.below(3);
        let (_, expected) = self.oracle.longest_prefix(&path, &[tier]);
        let (group, hashes) = (self.group(&path), self.hashes(&path));
        let pinned = match tier {
            0 => self.registry.pool::<G1>().match_sequence_hashes(group, &hashes).erase(),
            1 => self.registry.pool::<G2>().match_sequence_hashes(group, &hashes).erase(),
            _ => self.registry.pool::<G3>().match_sequence_hashes(group, &hashes).erase(),
        };
        let found: Vec<(usize, u32)> = pinned.block_ids().iter().map(|block| (tier, block.0)).collect();
        assert_eq!(found, expected);
        for &(tier, slot) in &expected {
            self.oracle.pin(tier, slot, Pin::Use);
        }
        self.pinned.push((pinned, Pin::Use));
    }

    fn unpin(&mut self, pinned: Pinned, pin: Pin) {
        for block in pinned.block_ids().iter().rev() {
            self.oracle.unpin(pinned.tier().index(), block.0, pin);
        }
        drop(pinned);
    }

    fn change_pinned(&mut self) {
        if self.pinned.is_empty() {
            return;
        }
        let index = self.rng.below(self.pinned.len());
        let (mut pinned, pin) = self.pinned.swap_remove(index);
        let tier = pinned.tier().index();
        let many = self.pinned.len() > 5;
        match if many { 9 } else { self.rng.below(10) } {
            0 => {
                for block in pinned.block_ids() {
                    self.oracle.pin(tier, block.0, pin);
                }
                self.pinned.push((pinned.clone(), pin));
                self.pinned.push((pinned, pin));
            }
            1 => {
                let tail = pinned.split_off(self.rng.below(pinned.len() + 1));
                self.unpin(tail, pin);
                self.pinned.push((pinned, pin));
            }
            2 => {
                let count = pinned.len() as u64;
                let counts = &mut self.oracle.tiers[tier].transfer_pins;
                if pin == Pin::Use {
                    *counts += count;
                    self.pinned.push((pinned.into_transfer(), Pin::Transfer));
                } else {
                    *counts -= count;
                    self.pinned.push((pinned.into_use(), Pin::Use));
                }
            }
            _ => self.unpin(pinned, pin),
        }
    }

    fn touch(&mut self) {
        let path = self.any_path();
        self.oracle.touch(&path);
        self.registry.touch(self.group(&path), &self.hashes(&path));
    }

    fn begin_arrivals(&mut self) {
        if self.arrivals.len() > 4 {
            return self.change_arrivals();
        }
        let path = self.any_path();
        let tier = Tier::SLOTTED[self.rng.below(3)];
        let index = tier.index();
        let from = if self.rng.below(3) == 0 { self.rng.below(path.len()) } else { 0 };
        let nodes: Vec<Node> = path[from..].iter().copied().take(1 + self.rng.below(6)).collect();
        let identities: Vec<BlockIdentity> = nodes.iter().map(|&node| self.oracle.universe[node]).collect();
        let begun = self.registry.begin_arrivals(tier, &identities);
        let (pins, needed) = self.oracle.prepare(index, &nodes);
        let room = self.oracle.allocate(index, needed);
        match begun {
            Ok(arrivals) => {
                let room = room.expect("the model has no room");
                self.check_arrivals(index, &nodes, &arrivals, &room);
                self.arrivals.push(arrivals);
                // What was made free for a refused block is free.
                for slot in room {
                    let slot = &mut self.oracle.tiers[index].slots[slot as usize];
                    if *slot == Slot::Held {
                        *slot = Slot::Free;
                    }
                }
            }
            Err(error) => assert_eq!(room, None, "{error}"),
        }
        for slot in pins.into_iter().rev() {
            self.oracle.unpin(index, slot, Pin::Transfer);
        }
    }

    fn check_arrivals(
        &mut self,
        tier: usize,
        nodes: &[Node],
        arrivals: &AnyArrivals,
        room: &std::collections::HashSet<u32>,
    ) {
        assert_eq!(arrivals.len(), nodes.len());
        for (&node, arrival) in nodes.iter().zip(arrivals.arrivals()) {
            let model = &mut self.oracle.tiers[tier];
            match *arrival {
                Arrival::Present { block } => {
                    assert_eq!(model.present[&node][0], block.0);
                    self.oracle.pin(tier, block.0, Pin::Transfer);
                }
                Arrival::Joined { ticket } => assert_eq!(model.arriving[&node].1, ticket),
                Arrival::Reserved { block, ticket } => {
                    assert!(!model.present.contains_key(&node) && !model.arriving.contains_key(&node));
                    assert!(room.contains(&block.0));
                    assert!(self.oracle.admits(tier, node));
                    let model = &mut self.oracle.tiers[tier];
                    model.slots[block.index()] = Slot::Arriving(node);
                    model.arriving.insert(node, (block.0, ticket));
                }
                Arrival::Refused(_) => assert!(!self.oracle.admits(tier, node)),
                Arrival::Completed { .. } | Arrival::Failed => panic!("{arrival:?} at the start"),
            }
        }
    }

    fn change_arrivals(&mut self) {
        if self.arrivals.is_empty() {
            return;
        }
        let index = self.rng.below(self.arrivals.len());
        let mut arrivals = self.arrivals.swap_remove(index);
        let tier = arrivals.tier().index();
        let reserved: Vec<(usize, BlockId, u64)> = arrivals.reserved().collect();
        let choice = self.rng.below(10);
        if choice < 7 && !reserved.is_empty() {
            let (at, block, _) = reserved[self.rng.below(reserved.len())];
            if choice < 5 {
                let expected = self.oracle.complete(tier, block.0);
                let completion = arrivals.complete(at);
                let found = match completion {
                    Completion::Stored => Some(block.0),
                    Completion::Existing { block } => Some(block.0),
                    Completion::Removed => None,
                };
                assert_eq!(found, expected);
                assert_eq!(arrivals.complete(at), Completion::Removed, "an arrival completes once");
            } else if choice == 5 && self.rng.below(8) == 0 {
                self.oracle.fail(tier, block.0, false);
                arrivals.fail_and_quarantine(at);
            } else {
                self.oracle.fail(tier, block.0, true);
                arrivals.fail(at);
            }
            self.arrivals.push(arrivals);
        } else if choice == 9 {
            let pinned = arrivals.into_pinned();
            for (_, block, _) in reserved.iter().rev() {
                self.oracle.fail(tier, block.0, true);
            }
            self.pinned.push((pinned, Pin::Transfer));
        } else {
            self.drop_arrivals(arrivals);
        }
    }

    fn drop_arrivals(&mut self, arrivals: AnyArrivals) {
        let tier = arrivals.tier().index();
        for arrival in arrivals.arrivals().iter().rev() {
            match *arrival {
                Arrival::Reserved { block, .. } => self.oracle.fail(tier, block.0, true),
                Arrival::Present { block } | Arrival::Completed { block } => {
                    self.oracle.unpin(tier, block.0, Pin::Transfer);
                }
                _ => {}
            }
        }
        drop(arrivals);
    }

    fn coldest(&mut self) {
        let (tier, not_on) =
            [(Tier::G1, Tier::G2), (Tier::G2, Tier::G3), (Tier::G1, Tier::G3)][self.rng.below(3)];
        let pinned = self.registry.coldest(tier, self.rng.below(6), not_on, 0);
        let mut chosen: BTreeSet<Node> = BTreeSet::new();
        for (identity, block) in pinned.identities().iter().zip(pinned.block_ids()) {
            let node = self.node(identity.group, identity.hash);
            assert_eq!(self.oracle.tiers[tier.index()].present[&node][0], block.0);
            assert!(!self.oracle.is_on(not_on.index(), node));
            assert!(!self.oracle.tiers[not_on.index()].arriving.contains_key(&node));
            let full = self.oracle.kinds[usize::from(identity.group.0)].0 == GroupKind::Full;
            if let Some(parent) = self.oracle.parents[node].filter(|_| full) {
                let below = &self.oracle.tiers[not_on.index()];
                let there = below.present.contains_key(&parent) || below.arriving.contains_key(&parent);
                assert!(there || chosen.contains(&parent), "a child before its parent");
            }
            assert!(chosen.insert(node), "a block twice");
            self.oracle.pin(tier.index(), block.0, Pin::Transfer);
        }
        self.pinned.push((pinned, Pin::Transfer));
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

    /// Everything that can be seen from outside.
    pub(crate) fn compare(&mut self) {
        for (node, identity) in self.oracle.universe.iter().enumerate() {
            let found = self.registry.tiers_of(identity.group, identity.hash);
            assert_eq!(found, self.oracle.tiers_of(node), "block {node} after operation {}", self.last);
        }
        for tier in Tier::SLOTTED {
            self.compare_occupancy(tier);
        }
        if let Some(spied) = &self.oracle.spied {
            let seen = spied.lock().expect("the policy did not panic");
            assert!(seen.chosen.is_empty(), "a victim that nobody needed");
            for tier in 0..3 {
                assert_eq!(
                    seen.evictable[tier],
                    self.oracle.evictable(tier),
                    "after operation {}",
                    self.last
                );
            }
        }
        self.compare_events();
    }

    fn compare_occupancy(&self, tier: Tier) {
        let (index, status) = (tier.index(), self.registry.occupancy(tier));
        let count = |what: fn(Slot, u32) -> bool| self.oracle.count(index, what);
        assert_eq!(status.free, count(|slot, _| slot == Slot::Free), "free of {tier}");
        assert_eq!(status.held, count(|slot, _| slot == Slot::Held), "held of {tier}");
        let arriving = count(|slot, _| matches!(slot, Slot::Arriving(_) | Slot::Cancelled(_)));
        assert_eq!(status.arriving, arriving, "arriving on {tier}");
        let active = count(|slot, refs| matches!(slot, Slot::Registered(_)) && refs > 0);
        assert_eq!(status.active, active, "active on {tier}");
        let inactive = count(|slot, refs| matches!(slot, Slot::Registered(_)) && refs == 0);
        assert_eq!(status.inactive, inactive, "inactive on {tier}");
        assert_eq!(
            status.detached,
            count(|slot, _| matches!(slot, Slot::Detached { .. })),
            "detached of {tier}"
        );
        assert_eq!(status.quarantined, count(|slot, _| slot == Slot::Quarantined), "quarantined of {tier}");
        assert_eq!(status.transfer_pins, self.oracle.tiers[index].transfer_pins, "transfer pins of {tier}");
        if index < 2 {
            let below = &self.oracle.tiers[index + 1];
            let present = self.oracle.tiers[index].present.keys();
            let copied = present.clone().filter(|node| below.present.contains_key(node)).count();
            let copying = present.filter(|node| below.arriving.contains_key(node)).count();
            assert_eq!((status.copied_lower, status.copying_lower), (copied as u32, copying as u32));
        }
    }

    fn compare_events(&mut self) {
        let drained = self.registry.drain_events(&mut self.drain, usize::MAX);
        assert_eq!((drained.lost, drained.waiting), (0, 0));
        for event in self.drain.drain(..) {
            assert_eq!(event.seq, self.next_seq, "numbers are dense");
            self.next_seq += 1;
            let key = (event.identity.group, event.identity.hash);
            let tier = &mut self.told[event.tier.index()];
            let before = match event.kind {
                EventKind::Store => tier.insert(key, event.identity),
                EventKind::Remove => tier.remove(&key),
            };
            assert_eq!(before.is_some(), event.kind == EventKind::Remove, "an event that changes nothing");
        }
        for (tier, told) in self.told.iter().enumerate() {
            let present = self.oracle.tiers[tier].present.keys().map(|&node| {
                let identity = self.oracle.universe[node];
                ((identity.group, identity.hash), identity)
            });
            assert_eq!(*told, present.collect::<BTreeMap<_, _>>(), "events of tier {tier}");
        }
    }

    /// Lets go of everything: all that is left are cached blocks and slots out of use.
    pub(crate) fn finish(mut self) {
        while !self.held.is_empty() {
            self.drop_held();
        }
        for prefix in std::mem::take(&mut self.prefixes) {
            self.unpin_prefix(prefix);
        }
        for arrivals in std::mem::take(&mut self.arrivals) {
            self.drop_arrivals(arrivals);
        }
        for (pinned, pin) in std::mem::take(&mut self.pinned) {
            self.unpin(pinned, pin);
        }
        self.compare();
        for tier in Tier::SLOTTED {
            let (blocks, next_seq) = self.registry.snapshot(tier);
            assert_eq!(next_seq, self.next_seq);
            let told: BTreeMap<_, _> =
                blocks.iter().map(|(_, identity)| ((identity.group, identity.hash), *identity)).collect();
            assert_eq!(told, self.told[tier.index()]);
            assert_eq!(told.len(), blocks.len());
            let status = self.registry.occupancy(tier);
            assert_eq!(status.free + status.inactive + status.quarantined, status.capacity);
            assert_eq!(status.transfer_pins, 0);
        }
        self.registry.remove(Selection::All, TierMask::ALL);
        assert_eq!(self.registry.known_blocks(), 0, "a record of nothing");
    }
}
