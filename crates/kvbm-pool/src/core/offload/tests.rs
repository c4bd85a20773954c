//! Victims whose ancestors are in another shard, behind places that were looked at: none is left out.

use crate::core::chains::{GROUP, chain, register};
use crate::core::counts;
use crate::{G1, Registry, RegistryConfig};
use kvbm_plan::{BlockIdentity, SequenceHash, Tier};
use std::collections::BTreeSet;

fn registry(capacity: u32) -> Registry {
    let config = RegistryConfig { shards: 2, ..RegistryConfig::new([capacity, capacity, 0]) };
    Registry::new(&config).expect("a valid configuration")
}

/// Registers what comes in `chain` from the block at `from` on, and says in which shard it is.
fn come(registry: &Registry, chain: &[SequenceHash], from: usize) -> usize {
    let held = register::<G1>(registry, chain, from);
    registry.shared.store.shard_of_slot(0, held.block_ids()[0].0)
}

fn next_victims(registry: &Registry, n: usize) -> (crate::Pinned, Vec<BlockIdentity>) {
    let blocks = registry.uncopied_victims(Tier::G1, 1.0, n, Tier::G2);
    let identities = blocks.identities();
    (blocks, identities)
}

/// Registers a beginning of which every place was looked at, and behind it an end in the other shard, which is next to be looked at.
fn parted_chain(registry: &Registry, shared: u64, more: u64) -> Vec<SequenceHash> {
    let root = chain(1, shared);
    let home = come(registry, &root, 0);
    for end in 2.. {
        drop(next_victims(registry, usize::MAX));
        let whole = [&root[..], &chain(end, more)].concat();
        if come(registry, &whole, root.len()) != home {
            return whole;
        }
    }
    unreachable!("a thread goes on to the other shard, and only the first end stays with its parent")
}

/// Where a call has room for ancestors alone, the block itself comes in a later one.
#[test]
fn a_victim_for_whose_ancestors_alone_there_was_room_comes_later() {
    let registry = registry(200);
    let parted = parted_chain(&registry, 6, 6);
    let (mut begun, mut chosen) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let (blocks, identities) = next_victims(&registry, 5);
        chosen.extend(identities.iter().map(|identity| identity.hash));
        begun.push((registry.begin_arrivals(Tier::G2, &identities).expect("there is room"), blocks));
    }
    assert_eq!(chosen, parted);
}

/// While a long line of ancestors is looked at others are let in. Where they move the mark back, since cleaning has brought something before
/// it, the search goes on from there.
#[test]
fn what_comes_before_the_mark_while_ancestors_are_looked_at_is_looked_at() {
    let registry = registry(2000);
    let store = &registry.shared.store;
    let parted = parted_chain(&registry, 1, 600);
    let others: BTreeSet<SequenceHash> = (0..5).map(|number| chain(1000 + number, 1)[0]).collect();
    let shards: BTreeSet<usize> = others.iter().map(|&hash| come(&registry, &[hash], 0)).collect();
    registry.touch(GROUP, &parted);
    // In the order of the shard: others, then the chain, its end first. All before that end was looked at, as far as the mark says.
    let mut core = store.lock_all();
    let end = core.find(GROUP, parted[600]).expect("it was registered");
    let (number, slot) = (store.shard_of(end), store.entries[end].slot(0));
    assert_eq!(shards, BTreeSet::from([number]));
    let order = &mut core.numbered(number).tiers[0].order;
    let place = order.places(0..u64::MAX, &store.slots[0]).find(|(_, found)| *found == Some(slot));
    order.watch(place.expect("it has a place").0);
    drop(core);
    let (other, mut once) = (registry.clone(), Some(()));
    let others_move_it = move || {
        if once.take().is_some() {
            let mut core = other.shared.store.lock_all();
            let order = &mut core.numbered(number).tiers[0].order;
            order.watch(order.first());
        }
    };
    let (_blocks, identities) = counts::while_others(others_move_it, || next_victims(&registry, 2000));
    let chosen: BTreeSet<SequenceHash> = identities.iter().map(|identity| identity.hash).collect();
    assert!(parted.iter().all(|hash| chosen.contains(hash)));
    assert!(others.is_subset(&chosen), "what is before the mark since others were let in");
}
