//! What one hold of the lock does at most, and what becomes of long work while other threads have
//! their turn.

use crate::probe::{most_changed, positions_counted, removal_growth, while_others};
use crate::test_chains::{GROUP, chain, register, register_as};
use crate::{
    ArrivalOutcome, BlockBatch, Cached, EventRecordKind, G1, PolicyKind, Registry, RegistryConfig, Reset,
    Share, TenantConfig, TierMask,
};
use kvbm_plan::{BlockId, BlockIdentity, NamespaceId, SequenceHash, Tier};
use std::cell::Cell;
use std::collections::HashSet;
use std::rc::Rc;

fn registry(policy: PolicyKind) -> Registry {
    let config = RegistryConfig { policy, ..RegistryConfig::new([1024, 1024, 0]) };
    Registry::new(&config).expect("a valid configuration")
}

fn identities(chain: &[SequenceHash]) -> Vec<BlockIdentity> {
    BlockIdentity::chain(NamespaceId(0), GROUP, chain).collect()
}

#[test]
fn no_hold_completes_more_than_64_blocks() {
    let registry = registry(PolicyKind::LruLeaf);
    let blocks = identities(&chain(1, 1000));
    let most = most_changed(|| {
        let mut arrivals = registry.begin_arrivals(Tier::G2, &blocks).expect("there is room");
        assert_eq!(arrivals.complete_all(), [ArrivalOutcome::Stored; 1000]);
    });
    assert!((1..=64).contains(&most), "{most} in a hold");
}

/// Each on one tier; one on several counts once for each, so that a hold goes a little further. Nor
/// is the lock taken anew for every few of them: once for 64, and to look for them.
#[test]
fn no_hold_removes_more_than_64_blocks() {
    let registry = registry(PolicyKind::LruLeaf);
    (0..8).for_each(|number| drop(register::<G1>(&registry, &chain(number, 128), 0)));
    let most = most_changed(|| assert_eq!(registry.forget(NamespaceId(0)).blocks, 1024));
    assert!((33..=64).contains(&most), "{most} in a hold");
}

#[test]
fn a_hold_evicts_so_many_blocks_also_where_nobody_waits() {
    for policy in [PolicyKind::LruLeaf, PolicyKind::Hazard] {
        let registry = registry(policy);
        (0..8).for_each(|number| drop(register::<G1>(&registry, &chain(number, 128), 0)));
        let most = most_changed(|| drop(registry.pool::<G1>().get_mutable_blocks(1024).expect("all may go")));
        assert!((1..=RegistryConfig::MOST_EVICTED_AT_ONCE).contains(&most), "{policy:?}: {most}");
    }
}

#[test]
fn a_removal_has_its_memory_before_it_locks() {
    let registry = registry(PolicyKind::LruLeaf);
    (0..8).for_each(|number| drop(register::<G1>(&registry, &chain(number, 100), 0)));
    let grown = removal_growth(|| {
        let tops = [1, 6].map(|number| (GROUP, chain(number, 3)[2]));
        assert_eq!(registry.remove_subtrees(&tops, TierMask::ALL).blocks, 2 * 98);
        assert_eq!(registry.remove_subtree(GROUP, chain(7, 1)[0], TierMask::ALL).blocks, 100);
    });
    assert_eq!(grown, 0);
}

/// A full tier of two tenants: the first has `in_use` blocks in use and `idle` that are older than
/// all others, the second has the rest, none in use.
fn shared(in_use: u64, idle: u64) -> (Registry, Cached<G1>) {
    let registry = of_two_tenants();
    if idle > 0 {
        drop(register_as::<G1>((NamespaceId(1), GROUP), &registry, &chain(1, idle), 0));
    }
    let held = register_as((NamespaceId(1), GROUP), &registry, &chain(2, in_use), 0);
    drop(register_as::<G1>((NamespaceId(2), GROUP), &registry, &chain(3, 1024 - in_use - idle), 0));
    (registry, held)
}

fn of_a_quarter_each() -> Vec<TenantConfig> {
    let tenant = |namespace| TenantConfig {
        share: Share::new(0.25).expect("a share"),
        namespaces: vec![NamespaceId(namespace)],
    };
    vec![tenant(1), tenant(2)]
}

fn of_two_tenants() -> Registry {
    let (tenants, policy) = (of_a_quarter_each(), PolicyKind::LruLeaf);
    let config = RegistryConfig { policy, tenants, ..RegistryConfig::new([1024, 1024, 0]) };
    Registry::new(&config).expect("a valid configuration")
}

#[test]
fn the_order_is_not_searched_for_a_tenant_whose_blocks_are_all_in_use() {
    let (registry, held) = shared(600, 0);
    let (places, _) = positions_counted(|| {
        let allocate = |_| registry.pool::<G1>().get_mutable_blocks_for(NamespaceId(2), 8);
        let blocks: Vec<_> = (0..4).map(allocate).collect();
        assert!(blocks.iter().all(Result::is_ok), "{blocks:?}");
    });
    assert_eq!(places, 0);
    drop(held);
}

/// Blocks that have to stay may be out of the order already: then nothing says where the last one
/// is, and each request looks to the end.
#[test]
fn a_tenant_whose_blocks_have_to_stay_is_searched_in_parts() {
    let registry = of_two_tenants();
    let kept = chain(2, 610);
    drop(register_as::<G1>((NamespaceId(1), GROUP), &registry, &kept[..10], 0));
    drop(register_as::<G1>((NamespaceId(1), GROUP), &registry, &chain(4, 1), 0));
    let held = register_as::<G1>((NamespaceId(1), GROUP), &registry, &kept, 10);
    drop(register_as::<G1>((NamespaceId(2), GROUP), &registry, &chain(3, 1024 - 611), 0));
    let (places, most) = positions_counted(|| {
        let blocks = registry.pool::<G1>().get_mutable_blocks_for(NamespaceId(2), 16);
        assert_eq!(blocks.map(|blocks| blocks.len()), Ok(16));
    });
    assert!(places >= 400, "{places} places: it was not searched to the end");
    assert!((1..=258).contains(&most), "{most} in one hold");
    drop(held);
}

#[test]
fn the_search_ends_with_the_last_block_of_the_tenant_that_is_not_in_use() {
    let (registry, held) = shared(600, 8);
    let (places, _) = positions_counted(|| {
        let blocks = registry.pool::<G1>().get_mutable_blocks_for(NamespaceId(2), 16);
        assert_eq!(blocks.map(|blocks| blocks.len()), Ok(16));
    });
    assert!((1..=16).contains(&places), "{places} places for 8 blocks");
    drop(held);
}

/// Turns in which others go on and on.
const MANY: usize = 200;

/// A full tier of two tenants. The first has most of it in use, ten blocks that nobody uses but
/// that have to stay, and two that could go. One is the oldest of all, between the two are the
/// second one's. So the order is searched for the first one's.
struct Searched {
    registry: Registry,
    /// Two slots that nobody's blocks are in.
    held: Option<BlockBatch<G1, Reset>>,
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
    let (places, _) = positions_counted(|| {
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

/// Others use all blocks that may go, each time that they are let in: what is looked for is always
/// as far away as it was. How often they did before two more blocks were had by the second tenant,
/// of a tier of 4,096 slots.
fn turns_until_met(tenants: Vec<TenantConfig>) -> usize {
    let policy = PolicyKind::LruLeaf;
    let config = RegistryConfig { policy, tenants, ..RegistryConfig::new([4096, 0, 0]) };
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
    for tenants in [Vec::new(), of_a_quarter_each()] {
        let what = format!("{} tenants", tenants.len());
        let turns = turns_until_met(tenants);
        assert!(turns < MANY, "others had {turns} turns: {what}");
    }
}

/// What comes behind a block while a tier is lost keeps it, and what is before it, until the next
/// turn.
#[test]
fn no_hold_of_a_loss_removes_more_than_64_blocks_where_others_go_on() {
    let registry = registry(PolicyKind::LruLeaf);
    let blocks = chain(1, 400);
    let in_use = register::<G1>(&registry, &blocks, 0);
    let (others, mut more) = (registry.clone(), Some([&blocks[..200], &chain(2, 201)[200..]].concat()));
    let others_come = move || drop(more.take().map(|more| register::<G1>(&others, &more, 200)));
    let mut lost = None;
    let most = most_changed(|| lost = Some(while_others(others_come, || registry.lose(TierMask::ALL))));
    assert_eq!(lost.map(|lost| lost.blocks), Some(401), "one came meanwhile");
    assert!((1..=64).contains(&most), "{most} in a hold");
    drop(in_use);
}

/// Others remove blocks, and bring them and new ones, between two holds of a copy.
/// Mutations that make it fail: copy all entries in one hold; read the number of the next event
/// after the copy.
#[test]
fn a_snapshot_is_copied_in_parts_and_the_events_behind_it_complete_it() {
    let registry = registry(PolicyKind::LruLeaf);
    let chains: Vec<_> = (0..8).map(|number| chain(number, 125)).collect();
    for chain in &chains {
        drop(register::<G1>(&registry, chain, 0));
    }
    registry.drain_events(&mut Vec::new(), usize::MAX);
    let (others, turns) = (registry.clone(), Rc::new(Cell::new(0)));
    let counted = Rc::clone(&turns);
    let change = move || {
        counted.set(counted.get() + 1);
        // The first in the copy go, and come back behind those that were copied.
        others.remove_subtree(GROUP, chains[0][0], TierMask::ALL);
        drop(register::<G1>(&others, &chain(20, 20), 0));
        drop(register::<G1>(&others, &chains[0], 0));
        others.remove_subtree(GROUP, chains[7][60], TierMask::ALL);
    };
    let mut copy = None;
    let most = most_changed(|| copy = Some(while_others(change, || registry.snapshot_all())));
    assert!((1..=512).contains(&most), "{most} in a hold");
    assert!(turns.get() > 0);
    let (blocks, next_seq) = copy.expect("it was taken");
    assert!(blocks.is_sorted_by_key(|(_, identity)| identity.position));
    let mut copied: HashSet<_> = blocks.iter().map(|&(tier, identity)| (tier, identity.hash)).collect();
    assert_eq!(copied.len(), blocks.len(), "each once");
    let mut events = Vec::new();
    registry.drain_events(&mut events, usize::MAX);
    for event in events.iter().filter(|event| event.seq >= next_seq) {
        match event.kind {
            EventRecordKind::Store => copied.insert((event.tier, event.identity.hash)),
            EventRecordKind::Remove => copied.remove(&(event.tier, event.identity.hash)),
        };
    }
    let now = registry.snapshot_all().0;
    assert_eq!(copied, now.iter().map(|&(tier, identity)| (tier, identity.hash)).collect());
}

/// A walk of the whole tier for each slot would take minutes.
#[test]
fn slots_go_out_of_use_without_a_walk_of_the_tier() {
    const SLOTS: u32 = 1 << 20;
    let registry = Registry::new(&RegistryConfig::new([4, 0, SLOTS])).expect("a valid configuration");
    let pool = registry.pool::<crate::G3>();
    // Half of the slots were used, and are in the list of freed ones.
    drop(pool.get_mutable_blocks(SLOTS as usize / 2).expect("all are free"));
    let began = std::time::Instant::now();
    for slot in (0..SLOTS).step_by(64) {
        assert_eq!(registry.retire(Tier::G3, &[BlockId(slot)]), []);
    }
    let took = began.elapsed();
    assert!(took < std::time::Duration::from_secs(2), "{took:?} for {} slots", SLOTS / 64);
    let left = (SLOTS - SLOTS / 64) as usize;
    let blocks = pool.get_mutable_blocks(left).expect("all others are free");
    assert!(blocks.block_ids().iter().all(|slot| slot.0 % 64 != 0));
    assert_eq!(registry.occupancy(Tier::G3).free, 0);
}
