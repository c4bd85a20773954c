//! Pins that end by themselves.

use crate::world::{CAPACITY, Chain, GROUP, POLICIES, Rng, World, chain, chains};
use kvbm_plan::{NamespaceId, SequenceHash, Tier};
use kvbm_pool::{G1, G2, PinError, PolicyKind, RegistryConfig, TierMask};
use std::collections::BTreeMap;

const TIERS: [Tier; 2] = [Tier::G1, Tier::G2];

/// The promise, naively: until when which block stays on which tier.
#[derive(Default)]
struct Model {
    pins: BTreeMap<(usize, SequenceHash), u64>,
    parents: BTreeMap<SequenceHash, SequenceHash>,
    now: u64,
}

impl Model {
    fn new(chains: &[Chain]) -> Self {
        let pairs = chains.iter().flat_map(|chain| chain.windows(2).map(|pair| (pair[1], pair[0])));
        Self { parents: pairs.collect(), ..Self::default() }
    }

    fn count(&self, tier: usize) -> usize {
        self.pins.keys().filter(|(on, _)| *on == tier).count()
    }

    fn line(&self, hash: SequenceHash) -> Vec<SequenceHash> {
        std::iter::successors(Some(hash), |hash| self.parents.get(hash).copied()).collect()
    }

    /// Whether it is allowed, as it then is.
    fn pin(&mut self, world: &World, hashes: &[SequenceHash], tiers: &[usize], until: u64) -> bool {
        if until <= self.now {
            return false;
        }
        let mut pins = self.pins.clone();
        for &tier in tiers {
            let there = hashes.iter().filter(|hash| world.announced[tier].contains(hash));
            for above in there.flat_map(|&hash| self.line(hash)) {
                let end = pins.entry((tier, above)).or_default();
                *end = until.max(*end);
            }
        }
        let limit = RegistryConfig::most_pinned(CAPACITY) as usize;
        let fits = tiers.iter().all(|tier| pins.keys().filter(|(on, _)| on == tier).count() <= limit);
        if fits {
            self.pins = pins;
        }
        fits
    }

    fn unpin(&mut self, hashes: &[SequenceHash], tiers: &[usize]) -> usize {
        let before = self.pins.len();
        for &hash in hashes.iter().rev() {
            for &tier in tiers {
                let continues = |&(on, other): &(usize, SequenceHash)| {
                    on == tier && self.parents.get(&other) == Some(&hash)
                };
                if !self.pins.keys().any(continues) {
                    self.pins.remove(&(tier, hash));
                }
            }
        }
        before - self.pins.len()
    }

    fn check(&self, world: &World) {
        for (tier, hash) in self.pins.keys() {
            assert!(world.announced[*tier].contains(hash), "{hash} is pinned on tier {tier} and gone");
        }
        for tier in TIERS {
            assert_eq!(world.registry.occupancy(tier).pinned as usize, self.count(tier.index()));
        }
        assert_eq!(world.registry.iteration(), self.now);
    }
}

/// Asks for any number of blocks and gives them back: exactly what is not pinned can be had.
fn squeeze(world: &World, model: &Model, tier: usize, wanted: usize) {
    let error = match tier {
        0 => world.registry.pool::<G1>().get_mutable_blocks(wanted).err(),
        _ => world.registry.pool::<G2>().get_mutable_blocks(wanted).err(),
    };
    let room = CAPACITY as usize - model.count(tier);
    assert_eq!(error.is_some(), wanted > room, "{wanted} of {room}: {error:?}");
    if let Some(error) = error {
        assert_eq!(error.pinned as usize, model.count(tier));
        assert!(error.to_string().contains("pinned for a time"), "{error}");
    }
}

fn run(policy: PolicyKind, seed: u64, steps: usize) -> [usize; 3] {
    let (mut rng, mut world, chains) = (Rng(seed), World::new(policy), chains());
    let mut model = Model::new(&chains);
    let mut seen = [0; 3];
    for _ in 0..steps {
        let chain = &chains[rng.below(chains.len())];
        let tiers: &[usize] = [&[0][..], &[1], &[0, 1]][rng.below(3)];
        let mask: TierMask = tiers.iter().map(|&tier| TIERS[tier]).collect();
        match rng.below(12) {
            0..=4 => world.serve_on(rng.below(2), chain, NamespaceId(0)),
            5 | 6 => {
                let from = if rng.below(2) == 0 { 0 } else { rng.below(chain.len()) };
                let until = model.now + rng.below(24) as u64;
                let result = world.registry.pin(GROUP, &chain[from..], mask, until);
                let allowed = model.pin(&world, &chain[from..], tiers, until);
                assert_eq!(result.is_ok(), allowed, "{result:?}");
                seen[0] += usize::from(result.is_ok_and(|blocks| blocks > 0));
                seen[1] += usize::from(matches!(result, Err(PinError::Limit { .. })));
            }
            7 => {
                let ended = world.registry.unpin(GROUP, chain, mask);
                assert_eq!(ended, model.unpin(chain, tiers));
                seen[2] += usize::from(ended > 0);
            }
            8 => {
                let top = rng.below(chain.len());
                world.registry.remove_subtree(GROUP, chain[top], mask);
                let below = |model: &Model, hash| model.line(hash).contains(&chain[top]);
                let gone: Vec<_> = model
                    .pins
                    .keys()
                    .filter(|(tier, hash)| tiers.contains(tier) && below(&model, *hash))
                    .copied()
                    .collect();
                for place in &gone {
                    model.pins.remove(place);
                }
            }
            9 => squeeze(&world, &model, rng.below(2), 1 + rng.below(CAPACITY as usize)),
            _ => {
                model.now = world.registry.step();
                let now = model.now;
                model.pins.retain(|_, until| *until > now);
            }
        }
        world.check_events();
        model.check(&world);
    }
    seen
}

#[test]
fn pinned_blocks_stay_and_everything_else_can_be_had() {
    for policy in POLICIES {
        for seed in 0..4 {
            let [pinned, limited, unpinned] = run(policy, seed, 1500);
            assert!(
                pinned > 50 && limited > 10 && unpinned > 10,
                "{policy:?}: {pinned}, {limited}, {unpinned}"
            );
        }
    }
}

#[test]
fn a_refused_pin_names_the_limit() {
    let mut world = World::new(PolicyKind::LruLeaf);
    let long = chain(0, 0, 0, 21);
    world.serve::<G1>(&long, NamespaceId(0));
    let refused = world.registry.pin(GROUP, &long, TierMask::ALL, 5).unwrap_err();
    let expected = PinError::Limit { tier: Tier::G1, asked: 21, pinned: 0, limit: 20, capacity: CAPACITY };
    assert_eq!(refused, expected);
    assert_eq!(world.registry.pin(GROUP, &long[..20], TierMask::ALL, 5), Ok(20));
    assert_eq!(world.registry.pin(GROUP, &long, TierMask::ALL, 0), Err(PinError::Past { until: 0, now: 0 }));
    assert_eq!(world.registry.occupancy(Tier::G1).pinned, 20);
}

/// Many more pins than one hold of the lock ends.
#[test]
fn pins_that_end_together_end_in_their_iteration() {
    for policy in POLICIES {
        let config = RegistryConfig { policy, ..RegistryConfig::new([600, 0, 0]) };
        let mut world = World::new(policy);
        world.registry = kvbm_pool::Registry::new(&config).unwrap();
        let long: Vec<_> = (0..300_u128).map(|id| SequenceHash::from_bytes((id + 1).to_le_bytes())).collect();
        world.serve::<G1>(&long, NamespaceId(0));
        assert_eq!(world.registry.pin(GROUP, &long, TierMask::ALL, 2), Ok(300));
        assert_eq!(world.registry.step(), 1);
        assert!(world.registry.pool::<G1>().get_mutable_blocks(301).is_err());
        assert_eq!(world.registry.step(), 2);
        assert_eq!(world.registry.occupancy(Tier::G1).pinned, 0);
        assert!(world.registry.pool::<G1>().get_mutable_blocks(600).is_ok());
        world.check_events();
        assert!(world.announced[0].is_empty());
    }
}
