//! What a thread does to a registry: a few operations at random over few blocks, so that threads
//! meet.

use crate::world::{GROUP, World, hashes, identities};
use kvbm_plan::{BlockIdentity, SequenceHash, Tier};
use kvbm_pool::{Cached, Duplicates, G1, Prefix, TierMask};

/// Chains of blocks that the threads share, and the length of each.
const CHAINS: u64 = 4;
const LENGTH: u64 = 4;
/// Blocks with which two of them begin.
const SHARED: usize = 2;

/// The first blocks of a chain. Every other one is a branch of the one before.
fn chain(number: u64, length: u64) -> Vec<SequenceHash> {
    let mut chain = hashes(number, length);
    let trunk = hashes(number & !1, length);
    chain.iter_mut().zip(trunk).take(SHARED).for_each(|(block, shared)| *block = shared);
    chain
}

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Says with which seed a test was under way that fails.
pub(crate) struct Seed(pub(crate) u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this was seed {}", self.0);
        }
    }
}

/// What one thread holds.
#[derive(Default)]
struct Hands {
    cached: Vec<Cached<G1>>,
    prefixes: Vec<Prefix>,
}

/// One thread: `operations` operations, then it lets go of everything.
pub(crate) fn work(world: &World, seed: u64, operations: usize) {
    let mut random = Random(seed);
    let mut hands = Hands::default();
    for _ in 0..operations {
        operate(world, &mut random, &mut hands);
    }
}

/// Blocks come to a tier, and that ends well, badly or not at all.
fn bring(world: &World, random: &mut Random, tier: Tier, blocks: &[BlockIdentity]) {
    world.note_copies(tier, blocks);
    let Ok(mut arrivals) = world.registry.begin_arrivals(tier, blocks) else { return };
    match random.below(3) {
        0 => drop(arrivals.complete_all()),
        1 => arrivals.fail(0),
        _ => {}
    }
    drop(arrivals.into_pinned());
}

fn operate(world: &World, random: &mut Random, hands: &mut Hands) {
    let chain = chain(random.below(CHAINS), 1 + random.below(LENGTH));
    match random.below(16) {
        0..=3 => {
            let known = world.registry.match_prefix(GROUP, &chain);
            let duplicates = if random.below(4) == 0 { Duplicates::Allow } else { Duplicates::Reuse };
            let from = known.count(Tier::G1).min(chain.len() - 1);
            hands.cached.extend(world.register(&chain, from, duplicates));
        }
        4 => hands.prefixes.push(world.registry.match_prefix(GROUP, &chain)),
        5 | 6 if !hands.cached.is_empty() => {
            let at = random.below(hands.cached.len() as u64) as usize;
            let mut batch = hands.cached.swap_remove(at);
            if random.below(2) == 0 {
                hands.cached.push(batch.clone());
            } else {
                drop(batch.split_off(1));
            }
        }
        7 => drop(hands.prefixes.pop()),
        8 => {
            let up = world.registry.match_prefix(GROUP, &chain);
            // Perhaps without the blocks that are there already.
            let from = if up.is_empty() { 0 } else { random.below(up.len() as u64) as usize };
            bring(world, random, Tier::G2, &identities(&chain[..up.len()])[from..]);
        }
        13 => {
            let there = world.registry.match_prefix(GROUP, &chain);
            bring(world, random, Tier::G1, &identities(&chain[..there.len()]));
        }
        14 => {
            let leaving = world.registry.uncopied_victims(Tier::G1, 1.0, 3, Tier::G2);
            bring(world, random, Tier::G2, &leaving.identities());
        }
        15 => drop(world.pool().get_mutable_blocks(1 + random.below(LENGTH) as usize)),
        9 => world.registry.touch(GROUP, &chain),
        10 => {
            let tiers = if random.below(2) == 0 { TierMask::ALL } else { TierMask::only(Tier::G2) };
            world.registry.remove_subtree(GROUP, chain[chain.len() - 1], tiers);
        }
        11 => {
            let before = hands.cached.len();
            let tiers = TierMask::only(Tier::G1).with(Tier::G2);
            world.registry.lose(tiers);
            assert!(hands.cached[..before].iter().all(|cached| cached.is_lost()));
        }
        _ => hands.cached.clear(),
    }
}
