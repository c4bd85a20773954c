//! Does the same things to the pool and to the model, and compares all that can be seen.

mod batches;
mod compare;
mod hints;
mod removal;
mod transfers;
mod users;

use crate::oracle::{Node, Oracle, Pin};
use crate::spy::{Seen, Spy};
use crate::universe::{CAPACITY, NODES_PER_GROUP, Rng, universe};
use batches::Held;
use kvbm_plan::{BlockIdentity, GroupId, GroupKind, SequenceHash};
use kvbm_pool::{
    AnyArrivals, EventRecord, G1, G2, G3, GroupConfig, Pinned, PolicyKind, Prefix, Registry, RegistryConfig,
    Withheld,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// How the model knows who goes when room is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victims {
    /// It knows the order: under `lru-leaf`, without priorities.
    Foretold,
    /// A policy that is watched chooses at random, and is told what may go.
    Watched,
    /// It is told afterwards, and knows who had to stay.
    Told,
}

/// A registry under test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) policy: PolicyKind,
    pub(crate) victims: Victims,
}

/// How often it came to what is rare.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) pinned: u64,
    pub(crate) pins_refused: u64,
    pub(crate) unpinned: u64,
    pub(crate) expired: u64,
    /// Victims whose copies took over.
    pub(crate) replaced: u64,
}

impl Tally {
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            pinned: self.pinned + other.pinned,
            pins_refused: self.pins_refused + other.pins_refused,
            unpinned: self.unpinned + other.unpinned,
            expired: self.expired + other.expired,
            replaced: self.replaced + other.replaced,
        }
    }
}

pub(crate) struct Driver {
    rng: Rng,
    registry: Registry,
    oracle: Oracle,
    held: Vec<Held>,
    /// Slots of arrivals that failed, with their tier.
    withheld: Vec<(usize, Withheld)>,
    pinned: Vec<(Pinned, Pin)>,
    prefixes: Vec<Prefix>,
    arrivals: Vec<AnyArrivals>,
    /// What the events say is on each tier.
    announced: [BTreeMap<(GroupId, SequenceHash), BlockIdentity>; 3],
    next_seq: u64,
    drain: Vec<EventRecord>,
    /// Number of the last operation, for messages.
    last: usize,
    setup: Setup,
    tally: Tally,
}

impl Driver {
    pub(crate) fn new(seed: u64, setup: Setup) -> Self {
        let mut rng = Rng(seed);
        let Setup { policy, victims } = setup;
        let groups = vec![
            GroupConfig::full(16),
            GroupConfig { kind: GroupKind::SlidingWindow(40), tokens_per_block: 16 },
            GroupConfig { kind: GroupKind::State, tokens_per_block: 16 },
        ];
        let blocks = universe(&mut rng, groups.len());
        let kinds = groups.iter().map(|group| (group.kind, group.tokens_per_block)).collect();
        let config = RegistryConfig { groups, event_capacity: 256, policy, ..RegistryConfig::new(CAPACITY) };
        let spied = (victims != Victims::Foretold).then(|| Arc::new(Mutex::new(Seen::default())));
        let registry = match &spied {
            Some(seen) if victims == Victims::Watched => {
                Registry::with_policy(&config, Box::new(Spy::new(Arc::clone(seen), rng.next())))
            }
            _ => Registry::new(&config),
        };
        Self {
            rng,
            registry: registry.expect("the configuration is valid"),
            oracle: Oracle::new(kinds, blocks, CAPACITY, spied),
            held: Vec::new(),
            withheld: Vec::new(),
            pinned: Vec::new(),
            prefixes: Vec::new(),
            arrivals: Vec::new(),
            announced: Default::default(),
            next_seq: 0,
            drain: Vec::new(),
            last: 0,
            setup,
            tally: Tally::default(),
        }
    }

    pub(crate) fn step(&mut self) {
        let choice = self.rng.below(124);
        self.last = choice;
        match choice {
            0..=11 => match self.rng.below(3) {
                0 => self.allocate::<G1>(Held::G1),
                1 => self.allocate::<G2>(Held::G2),
                _ => self.allocate::<G3>(Held::G3),
            },
            12..=31 => self.register(),
            32 | 33 if !self.withheld.is_empty() => self.drop_withheld(),
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
            96..=103 => self.iterate(),
            104..=112 => self.pin_for_a_time(),
            113 | 114 => self.take_pins_back(),
            115..=119 => self.branch_ends(),
            _ => self.set_time_to_live(),
        }
    }

    pub(super) fn any_path(&mut self) -> Vec<Node> {
        let node = self.rng.below(self.oracle.universe.len());
        self.oracle.path(node)
    }

    pub(super) fn full_path(&mut self) -> Vec<Node> {
        let node = self.rng.below(NODES_PER_GROUP);
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

    fn touch(&mut self) {
        let path = self.any_path();
        self.oracle.touch(&path);
        self.registry.touch(self.group(&path), &self.hashes(&path));
    }
}
