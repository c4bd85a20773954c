//! What others do between two parts of long work, and what becomes of that.

use super::tests::{of_a_quarter_each, of_two_tenants, registry};
use super::{of, places_of, while_others};
use crate::core::chains::{GROUP, chain, register, register_as};
use crate::{Blocks, Cached, G1, PolicyKind, Registry, RegistryConfig, Reset, TenantConfig, TierMask};
use kvbm_plan::NamespaceId;
use std::cell::Cell;
use std::rc::Rc;

/// Turns in which others go on and on.
const MANY: usize = 200;

/// A full tier of two tenants. The first has most of it in use, ten blocks that nobody uses but that have to stay, and two that could go:
/// one is the oldest of all, between the two are the second one's. So the order is searched for the first one's.
struct Searched {
    registry: Registry,
    /// Two slots that nobody's blocks are in.
    held: Option<Blocks<G1, Reset>>,
    _in_use: Cached<G1>,
}

impl Searched {
    const FIRST: NamespaceId = NamespaceId(1);
    const SECOND: NamespaceId = NamespaceId(2);
    /// Blocks of the second tenant.
    const SECONDS: u64 = 400;

    fn new() -> Self {
        let registry = of_two_tenants();
        let kept = chain(2, 1020 - Self::SECONDS);
        drop(register_as::<G1>((Self::FIRST, GROUP), &registry, &kept[..10], 0));
        drop(register_as::<G1>((Self::FIRST, GROUP), &registry, &chain(4, 1), 0));
        let in_use = register_as::<G1>((Self::FIRST, GROUP), &registry, &kept, 10);
        drop(register_as::<G1>((Self::SECOND, GROUP), &registry, &chain(3, Self::SECONDS), 0));
        drop(register_as::<G1>((Self::FIRST, GROUP), &registry, &chain(5, 1), 0));
        let held = registry.pool::<G1>().get_mutable_blocks(2).ok();
        Self { registry, held, _in_use: in_use }
    }

    /// How many slots the second tenant gets of those that it asks for.
    fn get(&self, count: usize) -> Option<usize> {
        let blocks = self.registry.pool::<G1>().get_mutable_blocks_for(Self::SECOND, count);
        blocks.ok().map(|blocks| blocks.len())
    }
}

#[test]
fn a_count_ends_although_others_use_blocks_faster_than_they_are_counted() {
    let world = Searched::new();
    let (registry, mut turns) = (world.registry.clone(), 0);
    let others = move || {
        turns += 1;
        if turns < MANY {
            drop(registry.match_prefix(GROUP, &chain(3, Searched::SECONDS)));
        }
    };
    let (places, _) = places_of(|| {
        while_others(others, || assert_eq!(world.get(16), Some(16)));
    });
    assert!((400..8000).contains(&places), "{places} places of an order of about 1500");
}

/// Each time, both counts miss a block that comes to the young end before they are there.
#[test]
fn a_request_is_met_although_others_move_what_is_counted() {
    let world = Searched::new();
    let seconds = world.registry.match_prefix(GROUP, &chain(3, Searched::SECONDS));
    let registry = world.registry.clone();
    let others = move || drop(registry.match_prefix(GROUP, &chain(5, 1)));
    assert_eq!(while_others(others, || world.get(2)), Some(2));
    drop(seconds);
}

#[test]
fn a_request_is_met_by_what_is_given_back_while_it_is_counted() {
    for gives_back in [false, true] {
        let mut world = Searched::new();
        let seconds = world.registry.match_prefix(GROUP, &chain(3, Searched::SECONDS));
        let mut held = world.held.take();
        let others = move || {
            if gives_back {
                drop(held.take());
            }
        };
        assert_eq!(while_others(others, || world.get(4)), gives_back.then_some(4));
        drop(seconds);
    }
}

/// Others use all blocks that may go, each time that they are let in: what is looked for is always as far away as it was. How often they did
/// before two more blocks were had by the second tenant, of a tier of 4,096 slots.
fn turns_until_met(tenants: Vec<TenantConfig>, shards: u32) -> usize {
    let policy = PolicyKind::LruLeaf;
    let config = RegistryConfig { policy, tenants, shards, ..RegistryConfig::new([4096, 0, 0]) };
    let registry = Registry::new(&config).expect("a valid configuration");
    let _in_use = register_as::<G1>((Searched::FIRST, GROUP), &registry, &chain(1, 2400), 0);
    let (seconds, firsts) = (chain(3, 1690), chain(2, 6));
    drop(register_as::<G1>((Searched::SECOND, GROUP), &registry, &seconds, 0));
    drop(register_as::<G1>((Searched::FIRST, GROUP), &registry, &firsts, 0));
    let (others, turns) = (registry.clone(), Rc::new(Cell::new(0)));
    let counted = Rc::clone(&turns);
    let use_all = move || {
        counted.set(counted.get() + 1);
        if counted.get() < MANY {
            others.touch(GROUP, &seconds);
            others.touch(GROUP, &firsts);
        }
    };
    use_all();
    let got = while_others(use_all, || registry.pool::<G1>().get_mutable_blocks_for(Searched::SECOND, 2));
    assert_eq!(got.map(|blocks| blocks.len()), Ok(2));
    turns.get()
}

#[test]
fn a_request_is_met_although_others_use_all_blocks_while_it_looks() {
    for (tenants, shards) in [(Vec::new(), 1), (Vec::new(), 4), (of_a_quarter_each(), 1)] {
        let what = format!("{} tenants, {shards} shards", tenants.len());
        let turns = turns_until_met(tenants, shards);
        assert!(turns < MANY, "others had {turns} turns: {what}");
    }
}

/// What comes behind a block while a tier is lost keeps it, and what is before it, until the next turn.
#[test]
fn no_hold_of_a_loss_removes_more_than_64_blocks_where_others_go_on() {
    for shards in [1, 4] {
        let registry = registry(shards, PolicyKind::LruLeaf);
        let blocks = chain(1, 400);
        let in_use = register::<G1>(&registry, &blocks, 0);
        let (others, mut more) = (registry.clone(), Some([&blocks[..200], &chain(2, 201)[200..]].concat()));
        let others_come = move || drop(more.take().map(|more| register::<G1>(&others, &more, 200)));
        let mut lost = None;
        let (_, most) = of(|| lost = Some(while_others(others_come, || registry.lose(TierMask::ALL))));
        assert_eq!(lost.map(|lost| lost.blocks), Some(401), "{shards} shards: one came meanwhile");
        assert!((1..=64).contains(&most), "{most} in a hold, {shards} shards");
        drop(in_use);
    }
}
