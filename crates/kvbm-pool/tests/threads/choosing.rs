//! Registries in which a policy chooses the victims, and what must be true of it when the threads
//! are done.

#![allow(dead_code, reason = "each of the tests that share this uses a part of it")]

use crate::blind::Blind;
use crate::watched::{Chooses, Seen, Watched};
use crate::world::{GROUP, World, hashes};
use kvbm_plan::{SequenceHash, Tier};
use kvbm_pool::{Duplicates, EvictionPolicy, Hazard, Registry, RegistryConfig};
use std::collections::{BTreeSet, HashSet};

/// Which policy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Policy {
    /// The default one, which is made to choose...
    Default,
    /// ... or has shown that it does better than recency.
    DefaultAhead,
    /// One that knows nothing.
    Blind,
}

pub(crate) struct Choosing {
    pub(crate) world: World,
    seen: Seen,
    /// Victims chosen before the threads began.
    before: usize,
}

/// Turns after which the default policy must be ahead.
const MOST_TURNS: u64 = 400;

impl Choosing {
    pub(crate) fn new(policy: Policy, capacity: [u32; 3], seed: u64) -> Self {
        let config = RegistryConfig { event_capacity: 1 << 16, ..RegistryConfig::new(capacity) };
        let inner: Box<dyn EvictionPolicy> = match policy {
            Policy::Blind => Box::new(Blind::default()),
            _ => Box::new(Hazard::new(capacity.map(|slots| slots as usize), seed)),
        };
        let how = match policy {
            Policy::Default => Chooses::Always,
            _ => Chooses::AsItSays,
        };
        let seen = Seen::default();
        let watched = Watched::new(inner, how, seen.clone());
        let registry = Registry::with_policy(&config, Box::new(watched)).expect("the configuration is valid");
        let mut choosing = Self { world: World::of(registry), seen, before: 0 };
        if matches!(policy, Policy::DefaultAhead) {
            choosing.teach();
        }
        choosing.before = choosing.seen.chosen();
        choosing
    }

    /// Recency finds nothing of a chain that comes back when the tier is full of what came once: so
    /// a policy that learns gets ahead.
    fn teach(&self) {
        let capacity = u64::from(self.world.registry.capacity(Tier::G1));
        for turn in 0..MOST_TURNS {
            if self.seen.chooses() {
                return;
            }
            self.request(&hashes(1 << 20, 2));
            (0..=capacity / 3).for_each(|at| self.request(&hashes((2 << 20) + turn * capacity + at, 3)));
        }
        panic!("the policy is not ahead of recency after {MOST_TURNS} turns of what recency never finds");
    }

    fn request(&self, chain: &[SequenceHash]) {
        let known = self.world.registry.match_prefix(GROUP, chain);
        let held = self.world.register(chain, known.len(), Duplicates::Reuse);
        self.world.registry.touch(GROUP, chain);
        drop((known, held));
        // As long as it takes: the ring has no room for all events.
        self.world.check_events();
    }

    /// Victims that the policy has chosen since the threads began.
    pub(crate) fn chosen(&self) -> usize {
        self.seen.chosen() - self.before
    }

    /// With no handle left: the policy lists exactly the blocks that no other continues on its
    /// tier.
    pub(crate) fn check_policy(&self) {
        for tier in [Tier::G1, Tier::G2] {
            let (blocks, _) = self.world.registry.snapshot(tier);
            let continued: HashSet<_> = blocks.iter().filter_map(|(_, identity)| identity.parent).collect();
            let ends = blocks.iter().filter(|(_, identity)| !continued.contains(&identity.hash));
            let ends: BTreeSet<u32> = ends.map(|(slot, _)| slot.0).collect();
            assert_eq!(self.seen.evictable(tier.index()), ends, "what the policy lists on {tier}");
        }
    }

    /// The same, and all goes when it is asked for, which the policy knows too.
    pub(crate) fn check(&self) {
        self.check_policy();
        self.world.all_may_go();
        for tier in 0..2 {
            assert_eq!(self.seen.evictable(tier), BTreeSet::new());
        }
    }
}
