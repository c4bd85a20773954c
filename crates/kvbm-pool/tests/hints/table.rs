//! Every hint under every policy: what it does to the blocks that it is given for, and to others.

use crate::world::{CAPACITY, GROUP, POLICIES, World, chain};
use kvbm_plan::{NamespaceId, SequenceHash, Tier};
use kvbm_pool::{BlockChain, BlockMetadata, Duplicates, G1, PolicyKind, TierMask};

const NAMED: NamespaceId = NamespaceId(1);
const OTHERS: NamespaceId = NamespaceId(2);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Hint {
    None,
    Priority(u8),
    Pin,
    TimeToLive,
    Ends,
}

/// Registers a chain, with a priority, and lets go of it.
fn register(world: &World, chain: &[SequenceHash], namespace: NamespaceId, priority: u8) {
    let pool = world.registry.pool::<G1>();
    let fresh = pool.get_mutable_blocks(chain.len()).unwrap();
    let partial = fresh.init_sequence(namespace, GROUP, 0).unwrap();
    let (done, _) = partial.commit(BlockChain::of_hashes(chain)).unwrap();
    drop(pool.register_with(done, Duplicates::Reuse, BlockMetadata { priority }).unwrap());
}

fn is_there(world: &World, chain: &[SequenceHash]) -> bool {
    chain.iter().all(|&hash| !world.registry.tiers_of(GROUP, hash).is_empty())
}

/// For how many single blocks of others a chain of two blocks stays, registered in the middle of
/// others.
fn outlives(policy: PolicyKind, hint: Hint, round: u8) -> usize {
    let world = World::seeded(policy, u64::from(round));
    let mine = chain(0, 0, 200 + round, 2);
    let other = |number: usize| {
        let mut bytes = [round; 16];
        bytes[..8].copy_from_slice(&(number as u64).to_le_bytes());
        [SequenceHash::from_bytes(bytes)]
    };
    let half = CAPACITY as usize / 2;
    (0..half).for_each(|number| register(&world, &other(number), OTHERS, 0));
    register(&world, &mine, NAMED, if let Hint::Priority(priority) = hint { priority } else { 0 });
    (half..2 * half - 2).for_each(|number| register(&world, &other(number), OTHERS, 0));
    match hint {
        Hint::Pin => {
            let until = world.registry.iteration() + 100;
            assert_eq!(world.registry.pin(GROUP, &mine, TierMask::only(Tier::G1), until), Ok(2));
        }
        Hint::TimeToLive => world.registry.set_ttl(NAMED, Some(5)).unwrap(),
        Hint::Ends => world.registry.branch_ends(GROUP, &mine),
        Hint::None | Hint::Priority(_) => {}
    }
    for number in 0..4000 {
        world.registry.step();
        register(&world, &other(1000 + number), OTHERS, 0);
        if !is_there(&world, &mine) {
            return number;
        }
    }
    4000
}

/// The mean over a few worlds.
fn mean(policy: PolicyKind, hint: Hint) -> usize {
    (0..24).map(|round| outlives(policy, hint, round)).sum::<usize>() / 24
}

#[test]
fn every_hint_does_what_it_says_under_every_policy() {
    for policy in POLICIES {
        let without = mean(policy, Hint::None);
        let [one, four] = [1, 4].map(|priority| mean(policy, Hint::Priority(priority)));
        let summary = format!("{policy:?}: {without} without, {one} and {four} by priority");
        assert!((10..=60).contains(&without), "{summary}");
        assert!(one > without + 10 && four > one + 40, "{summary}");
        assert_eq!(mean(policy, Hint::TimeToLive), 4, "{policy:?}");
        let pinned = mean(policy, Hint::Pin);
        assert!((99..=160).contains(&pinned), "{policy:?}: {pinned}");
        let ended = mean(policy, Hint::Ends);
        match policy {
            // It believes what such hints have proved to be, and nothing is proved here.
            PolicyKind::Hazard => assert!(ended <= without, "{policy:?}: {ended}"),
            _ => assert_eq!(ended, 0, "{policy:?}"),
        }
    }
}
