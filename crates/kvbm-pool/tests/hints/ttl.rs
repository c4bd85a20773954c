//! Times to live.

use crate::world::{Chain, GROUP, POLICIES, Rng, World, chains};
use kvbm_plan::{NamespaceId, SequenceHash, Tier};
use kvbm_pool::{Cached, G1, PolicyKind, Registry, RegistryConfig, TierMask, TtlError};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Chains of four share beginnings, and a namespace.
fn namespace(branch: usize) -> NamespaceId {
    NamespaceId(branch as u32 / 4)
}

#[derive(Default)]
struct Model {
    parents: BTreeMap<SequenceHash, SequenceHash>,
    namespaces: BTreeMap<SequenceHash, NamespaceId>,
    used: BTreeMap<SequenceHash, u64>,
    limits: BTreeMap<NamespaceId, u64>,
    pins: BTreeMap<(usize, SequenceHash), u64>,
    now: u64,
}

impl Model {
    fn new(chains: &[Chain]) -> Self {
        let mut model = Self::default();
        for (branch, chain) in chains.iter().enumerate() {
            model.parents.extend(chain.windows(2).map(|pair| (pair[1], pair[0])));
            model.namespaces.extend(chain.iter().map(|&hash| (hash, namespace(branch))));
        }
        model
    }

    fn used(&mut self, chain: &[SequenceHash]) {
        self.used.extend(chain.iter().map(|&hash| (hash, self.now)));
    }

    /// What is left of a tier: one after the other, whatever is over, not held, not pinned and not
    /// continued goes.
    fn left(&self, tier: usize, mut there: BTreeSet<SequenceHash>, held: &[Chain]) -> BTreeSet<SequenceHash> {
        loop {
            let over = |hash: &&SequenceHash| {
                let stays = self.pins.contains_key(&(tier, **hash))
                    || tier == 0 && held.iter().any(|chain| chain.contains(hash))
                    || there.iter().any(|other| self.parents.get(other) == Some(*hash));
                let limit = self.limits.get(&self.namespaces[*hash]);
                !stays && limit.is_some_and(|limit| self.now - self.used[*hash] >= *limit)
            };
            let Some(&gone) = there.iter().find(over) else { return there };
            there.remove(&gone);
        }
    }
}

fn run(policy: PolicyKind, seed: u64, steps: usize) -> usize {
    let (mut rng, mut world, chains) = (Rng(seed), World::new(policy), chains());
    let mut model = Model::new(&chains);
    let mut held: Vec<(Chain, Cached<G1>)> = Vec::new();
    let mut expired = 0;
    for _ in 0..steps {
        let branch = rng.below(chains.len());
        let chain = &chains[branch];
        match rng.below(14) {
            0..=4 => {
                world.serve_on(rng.below(2), chain, namespace(branch));
                model.used(chain);
            }
            5 => {
                let limit = Some(1 + rng.below(12) as u64).filter(|limit| *limit < 10);
                world.registry.set_ttl(namespace(branch), limit).unwrap();
                model.limits.remove(&namespace(branch));
                model.limits.extend(limit.map(|limit| (namespace(branch), limit)));
            }
            6 if held.len() < 2 => {
                let cached = world.registry.pool::<G1>().match_sequence_hashes(GROUP, chain);
                held.push((chain[..cached.len()].to_vec(), cached));
            }
            7 if !held.is_empty() => {
                let (chain, cached) = held.swap_remove(rng.below(held.len()));
                drop(cached);
                model.used(&chain);
            }
            8 => {
                let until = model.now + 1 + rng.below(9) as u64;
                let part = &chain[..3];
                if world.registry.pin(GROUP, part, TierMask::only(Tier::G2), until).is_ok() {
                    for hash in part.iter().filter(|hash| world.announced[1].contains(hash)) {
                        let end = model.pins.entry((1, *hash)).or_default();
                        *end = until.max(*end);
                    }
                }
            }
            9..=13 => {
                world.check_events();
                model.now = world.registry.step();
                let now = model.now;
                model.pins.retain(|_, until| *until > now);
                let in_use: Vec<Chain> = held.iter().map(|(chain, _)| chain.clone()).collect();
                let before = world.announced[0].len() + world.announced[1].len();
                let expected = [0, 1].map(|tier| model.left(tier, world.announced[tier].clone(), &in_use));
                world.check_events();
                assert_eq!(world.announced, expected);
                expired += before - world.announced[0].len() - world.announced[1].len();
            }
            _ => {}
        }
        world.check_events();
    }
    expired
}

#[test]
fn what_is_not_used_leaves_when_it_is_due_and_nothing_else_does() {
    for policy in POLICIES {
        for seed in 0..4 {
            let expired = run(policy, seed, 1500);
            assert!(expired > 300, "{policy:?}: {expired}");
        }
    }
}

/// More blocks than an iteration looks at, in one chain: all of them leave within a round, also
/// when the clock of blocks turns over.
#[test]
fn a_large_registry_is_done_within_a_round() {
    let config = RegistryConfig { policy: PolicyKind::Hazard, ..RegistryConfig::new([5000, 0, 0]) };
    let mut world = World::new(PolicyKind::Hazard);
    world.registry = Registry::new(&config).unwrap();
    for _ in 0..65_000 {
        world.registry.step();
    }
    let long: Chain = (0..4000_u128).map(|id| SequenceHash::from_bytes((id + 1).to_le_bytes())).collect();
    world.serve::<G1>(&long, NamespaceId(7));
    world.registry.set_ttl(NamespaceId(7), Some(1000)).unwrap();
    for _ in 0..999 {
        world.registry.step();
    }
    assert_eq!(world.registry.occupancy(Tier::G1).inactive, 4000);
    for _ in 0..1025 {
        world.registry.step();
    }
    assert_eq!(world.registry.occupancy(Tier::G1).free, 5000);
    assert_eq!(world.registry.counters(Tier::G1).expired, 4000);
    world.check_events();
    assert!(world.announced[0].is_empty());
}

/// The engine is idle: no iteration ends meanwhile.
#[test]
fn blocks_leave_after_a_time_without_use_and_others_stay() {
    let mut world = World::new(PolicyKind::LruLeaf);
    let chains = chains();
    let (silent, talks, no_limit) = (&chains[0], &chains[4], &chains[8]);
    world.registry.second(100);
    for (namespace, chain) in [(0, silent), (1, talks), (2, no_limit)] {
        world.serve::<G1>(chain, NamespaceId(namespace));
    }
    let minute = Some(Duration::from_secs(60));
    for namespace in [0, 1] {
        world.registry.set_ttl_time(NamespaceId(namespace), minute).unwrap();
    }
    let there = |world: &mut World, chain: &Chain| {
        world.check_events();
        chain.iter().filter(|hash| world.announced[0].contains(hash)).count()
    };
    world.registry.second(130);
    world.serve::<G1>(talks, NamespaceId(1));
    world.registry.second(160);
    assert_eq!(there(&mut world, silent), silent.len(), "the clock may be a second behind");
    world.registry.second(159);
    world.registry.second(161);
    assert_eq!((there(&mut world, silent), there(&mut world, talks)), (0, talks.len()));
    world.registry.second(191);
    assert_eq!((there(&mut world, talks), there(&mut world, no_limit)), (0, no_limit.len()));
    world.serve::<G1>(silent, NamespaceId(0));
    world.registry.set_ttl_time(NamespaceId(0), None).unwrap();
    world.registry.set_ttl_time(NamespaceId(1), None).unwrap();
    world.registry.second(100_000);
    assert_eq!(there(&mut world, silent), silent.len(), "the limit was lifted");
    world.registry.set_ttl_time(NamespaceId(0), minute).unwrap();
    world.registry.second(100_059);
    assert_eq!(there(&mut world, silent), silent.len(), "what is there counts as used now");
    let held = world.registry.pool::<G1>().match_sequence_hashes(GROUP, silent);
    world.registry.second(100_999);
    assert_eq!(there(&mut world, silent), silent.len(), "somebody uses it");
    drop(held);
    world.registry.second(101_059);
    assert_eq!(there(&mut world, silent), silent.len(), "it was used until then");
    world.registry.second(101_061);
    assert_eq!(there(&mut world, silent), 0);
}

#[test]
fn a_time_that_blocks_cannot_measure_is_refused() {
    let world = World::new(PolicyKind::LruLeaf);
    for iterations in [0, RegistryConfig::MAX_TTL + 1] {
        let refused = world.registry.set_ttl(NamespaceId(1), Some(iterations)).unwrap_err();
        assert_eq!(refused, TtlError::Iterations { iterations });
        assert!(refused.to_string().contains("1 to 32768"), "{refused}");
    }
    world.registry.set_ttl(NamespaceId(1), Some(RegistryConfig::MAX_TTL)).unwrap();
    let year = Duration::from_secs(RegistryConfig::MAX_TTL_SECONDS);
    for time in [Duration::from_millis(999), year + Duration::from_secs(1)] {
        let refused = world.registry.set_ttl_time(NamespaceId(1), Some(time)).unwrap_err();
        assert_eq!(refused, TtlError::Time { time });
        assert!(refused.to_string().contains("1 s to 31536000 s"), "{refused}");
    }
    world.registry.set_ttl_time(NamespaceId(1), Some(year)).unwrap();
}
