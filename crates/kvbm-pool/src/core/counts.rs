//! What the calling thread's holds are like: how many blocks come or go in one, how often all shards are locked, how much is looked at to know
//! whether a tenant's request can be met, and whether memory for a removal is had under locks. And what others do when they are let in.

use std::cell::Cell;

thread_local! {
    static ALL: Cell<usize> = const { Cell::new(0) };
    static CHANGED: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
    static PLACES: Cell<usize> = const { Cell::new(0) };
    static IN_HOLD: Cell<usize> = const { Cell::new(0) };
    static MOST_PLACES: Cell<usize> = const { Cell::new(0) };
    static GROWN: Cell<usize> = const { Cell::new(0) };
    static OTHERS: Cell<Option<Box<dyn FnMut()>>> = const { Cell::new(None) };
}

pub(super) fn all_are_locked() {
    ALL.set(ALL.get() + 1);
}

pub(super) fn a_hold_begins() {
    CHANGED.set(0);
    IN_HOLD.set(0);
}

/// A block is evicted or removed, or its arrival is complete.
pub(super) fn one_changes() {
    CHANGED.set(CHANGED.get() + 1);
    MOST.set(MOST.get().max(CHANGED.get()));
}

/// Times that all shards were locked while `work` ran, and the most blocks that came with arrivals, or went, in one hold.
pub(super) fn of(work: impl FnOnce()) -> (usize, usize) {
    ALL.set(0);
    MOST.set(0);
    work();
    (ALL.get(), MOST.get())
}

/// A place of an order is looked at to count what a tenant has that could go.
pub(super) fn a_place_is_looked_at() {
    PLACES.set(PLACES.get() + 1);
    IN_HOLD.set(IN_HOLD.get() + 1);
    MOST_PLACES.set(MOST_PLACES.get().max(IN_HOLD.get()));
}

/// How many were while `work` ran, and in one hold at most.
pub(super) fn places_of(work: impl FnOnce()) -> (usize, usize) {
    PLACES.set(0);
    MOST_PLACES.set(0);
    work();
    (PLACES.get(), MOST_PLACES.get())
}

/// What is known of a removal's entries needs more memory, under locks.
pub(super) fn answers_grow() {
    GROWN.set(GROWN.get() + 1);
}

/// How often it did while `work` ran.
pub(super) fn growth_of(work: impl FnOnce()) -> usize {
    GROWN.set(0);
    work();
    GROWN.get()
}

/// The calling thread lets others in, and holds nothing.
pub(crate) fn others_are_in() {
    if let Some(mut others) = OTHERS.take() {
        others();
        OTHERS.set(Some(others));
    }
}

/// What others do, each time that they are let in while `work` runs.
pub(super) fn while_others<T>(others: impl FnMut() + 'static, work: impl FnOnce() -> T) -> T {
    OTHERS.set(Some(Box::new(others)));
    let done = work();
    OTHERS.set(None);
    done
}

#[cfg(not(any(kvbm_loom, kvbm_shuttle)))]
mod meanwhile;

#[cfg(not(any(kvbm_loom, kvbm_shuttle)))]
mod tests {
    use super::{growth_of, of, places_of};
    use crate::core::chains::{GROUP, chain, register, register_as};
    use crate::{
        Cached, Completion, G1, PolicyKind, Registry, RegistryConfig, Share, TenantConfig, TierMask,
    };
    use kvbm_plan::{BlockIdentity, NamespaceId, SequenceHash, Tier};
    use std::ops::Range;

    pub(super) fn registry(shards: u32, policy: PolicyKind) -> Registry {
        let config = RegistryConfig { policy, shards, ..RegistryConfig::new([1024, 1024, 0]) };
        Registry::new(&config).expect("a valid configuration")
    }

    fn identities(chain: &[SequenceHash]) -> Vec<BlockIdentity> {
        BlockIdentity::chain(NamespaceId(0), GROUP, chain).collect()
    }

    /// What a manager with a tier below does for a registration.
    fn copy_down(registry: &Registry, chain: &[SequenceHash], from: usize, held: &Cached<G1>) {
        assert_eq!(held.expected_reuse().len() + held.priorities().len(), 2 * held.len());
        let mut arrivals =
            registry.begin_arrivals(Tier::G2, &identities(chain)[from..]).expect("there is room");
        assert!(arrivals.complete_all().iter().all(|completion| *completion == Completion::Stored));
        drop(arrivals.into_pinned());
        assert!(registry.not_copied_lower(Tier::G1) < 1024 - held.len() as u32, "what is held is copied");
        drop(registry.uncopied_victims(Tier::G1, 0.2, 100, Tier::G2));
        drop(registry.coldest(Tier::G1, 100, Tier::G2, 0));
    }

    #[test]
    fn a_registration_and_its_copy_lock_one_shard_at_a_time() {
        let registry = registry(4, PolicyKind::LruLeaf);
        let root = chain(0, 8);
        let held = register::<G1>(&registry, &root, 0);
        copy_down(&registry, &root, 0, &held);
        for number in 1..=40 {
            // Also behind a parent in another shard, and where victims are needed on both tiers.
            let forked = [root.clone(), chain(number, 50)].concat();
            let (all, _) = of(|| {
                let held = register::<G1>(&registry, &forked, 8);
                copy_down(&registry, &forked, 8, &held);
            });
            assert_eq!(all, 0, "chain {number}");
        }
        drop(held);
        assert_eq!(registry.pool::<G1>().get_mutable_blocks(1024).map(|blocks| blocks.len()), Ok(1024));
    }

    #[test]
    fn blocks_that_come_from_elsewhere_lock_one_shard_at_a_time() {
        let registry = registry(4, PolicyKind::LruLeaf);
        let (all, _) = of(|| {
            for number in 0..10 {
                let blocks = identities(&chain(number, 100));
                for part in [&blocks[..60], &blocks[60..]] {
                    registry.begin_arrivals(Tier::G2, part).expect("there is room").complete_all();
                }
            }
        });
        assert_eq!(all, 0);
    }

    #[test]
    fn no_hold_completes_more_than_64_blocks() {
        for shards in [1, 4] {
            let registry = registry(shards, PolicyKind::LruLeaf);
            let blocks = identities(&chain(1, 1000));
            let (_, most) = of(|| {
                let mut arrivals = registry.begin_arrivals(Tier::G2, &blocks).expect("there is room");
                assert_eq!(arrivals.complete_all(), [Completion::Stored; 1000]);
            });
            assert!((1..=64).contains(&most), "{most} in a hold, {shards} shards");
        }
    }

    /// Each on one tier; one on several counts once for each, so that a hold goes a little further. Nor are all shards locked anew for every
    /// few of them: once for 64, and to look for them.
    #[test]
    fn no_hold_removes_more_than_64_blocks() {
        for shards in [1, 4] {
            let registry = registry(shards, PolicyKind::LruLeaf);
            (0..8).for_each(|number| drop(register::<G1>(&registry, &chain(number, 128), 0)));
            let (all, most) = of(|| assert_eq!(registry.forget(NamespaceId(0)).blocks, 1024));
            assert!((33..=64).contains(&most), "{most} in a hold, {shards} shards");
            assert!(all <= 16 + 3, "all were locked {all} times");
        }
    }

    #[test]
    fn several_chains_at_once_lock_all_shards_once() {
        let registry = registry(4, PolicyKind::LruLeaf);
        let chains: Vec<_> = (0..8).map(|number| chain(number, 100)).collect();
        for part in [0..40, 30..100] {
            let blocks: Vec<_> =
                chains.iter().flat_map(|chain| identities(chain)[part.clone()].to_vec()).collect();
            let (all, _) = of(|| {
                let arrivals = registry.begin_arrivals(Tier::G2, &blocks).expect("there is room");
                assert_eq!(arrivals.reserved().count(), 8 * if part.start == 0 { 40 } else { 60 });
                drop(arrivals.into_pinned());
            });
            assert_eq!(all, 1, "{part:?}");
            registry.begin_arrivals(Tier::G2, &blocks).expect("there is room").complete_all();
        }
    }

    /// A block that was complete before its parent failed, and what continues that, is looked for among all blocks: once for all that fail.
    #[test]
    fn what_continues_many_blocks_that_fail_is_looked_for_once() {
        let looks_for = |failing: usize| {
            let registry = registry(4, PolicyKind::LruLeaf);
            let chains: Vec<_> = (0..8).map(|number| identities(&chain(number, 3))).collect();
            let of_all = |part: Range<usize>| -> Vec<BlockIdentity> {
                chains.iter().flat_map(|chain| chain[part.clone()].to_vec()).collect()
            };
            let begin = |part| registry.begin_arrivals(Tier::G2, &of_all(part)).expect("there is room");
            let (mut heads, mut tails) = (begin(0..1), begin(1..3));
            assert_eq!(tails.complete_all(), [Completion::Stored; 16]);
            let (all, _) = of(|| heads.fail_each(0..failing));
            assert_eq!(registry.counters(Tier::G2).orphaned as usize, 2 * failing);
            all
        };
        assert_eq!(looks_for(8), looks_for(1));
    }

    #[test]
    fn a_hold_evicts_so_many_blocks_also_where_nobody_waits() {
        for (shards, policy) in [(1, PolicyKind::LruLeaf), (4, PolicyKind::LruLeaf), (1, PolicyKind::Hazard)]
        {
            let registry = registry(shards, policy);
            (0..8).for_each(|number| drop(register::<G1>(&registry, &chain(number, 128), 0)));
            let (_, most) = of(|| drop(registry.pool::<G1>().get_mutable_blocks(1024).expect("all may go")));
            assert!(
                (1..=RegistryConfig::MOST_EVICTED_AT_ONCE).contains(&most),
                "{policy:?}, {shards} shards: {most}"
            );
        }
    }

    #[test]
    fn a_removal_has_its_memory_before_it_locks() {
        for shards in [1, 4] {
            let registry = registry(shards, PolicyKind::LruLeaf);
            (0..8).for_each(|number| drop(register::<G1>(&registry, &chain(number, 100), 0)));
            let grown = growth_of(|| {
                let tops = [1, 6].map(|number| (GROUP, chain(number, 3)[2]));
                assert_eq!(registry.remove_subtrees(&tops, TierMask::ALL).blocks, 2 * 98);
                assert_eq!(registry.remove_subtree(GROUP, chain(7, 1)[0], TierMask::ALL).blocks, 100);
            });
            assert_eq!(grown, 0, "{shards} shards");
        }
    }

    /// A full tier of two tenants: the first has `in_use` blocks in use and `idle` that are older than all others, the second has the rest,
    /// none in use.
    fn shared(in_use: u64, idle: u64) -> (Registry, Cached<G1>) {
        let registry = of_two_tenants();
        if idle > 0 {
            drop(register_as::<G1>((NamespaceId(1), GROUP), &registry, &chain(1, idle), 0));
        }
        let held = register_as((NamespaceId(1), GROUP), &registry, &chain(2, in_use), 0);
        drop(register_as::<G1>((NamespaceId(2), GROUP), &registry, &chain(3, 1024 - in_use - idle), 0));
        (registry, held)
    }

    pub(super) fn of_a_quarter_each() -> Vec<TenantConfig> {
        let tenant = |namespace| TenantConfig {
            share: Share::new(0.25).expect("a share"),
            namespaces: vec![NamespaceId(namespace)],
        };
        vec![tenant(1), tenant(2)]
    }

    pub(super) fn of_two_tenants() -> Registry {
        let (tenants, policy) = (of_a_quarter_each(), PolicyKind::LruLeaf);
        let config = RegistryConfig { policy, tenants, ..RegistryConfig::new([1024, 1024, 0]) };
        Registry::new(&config).expect("a valid configuration")
    }

    #[test]
    fn the_order_is_not_searched_for_a_tenant_whose_blocks_are_all_in_use() {
        let (registry, held) = shared(600, 0);
        let (places, _) = places_of(|| {
            let allocate = |_| registry.pool::<G1>().get_mutable_blocks_for(NamespaceId(2), 8);
            let blocks: Vec<_> = (0..4).map(allocate).collect();
            assert!(blocks.iter().all(Result::is_ok), "{blocks:?}");
        });
        assert_eq!(places, 0);
        drop(held);
    }

    /// Blocks that have to stay may be out of the order already: then nothing says where the last one is, and each request looks to the end.
    #[test]
    fn a_tenant_whose_blocks_have_to_stay_is_searched_in_parts() {
        let registry = of_two_tenants();
        let kept = chain(2, 610);
        drop(register_as::<G1>((NamespaceId(1), GROUP), &registry, &kept[..10], 0));
        drop(register_as::<G1>((NamespaceId(1), GROUP), &registry, &chain(4, 1), 0));
        let held = register_as::<G1>((NamespaceId(1), GROUP), &registry, &kept, 10);
        drop(register_as::<G1>((NamespaceId(2), GROUP), &registry, &chain(3, 1024 - 611), 0));
        let (places, most) = places_of(|| {
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
        let (places, _) = places_of(|| {
            let blocks = registry.pool::<G1>().get_mutable_blocks_for(NamespaceId(2), 16);
            assert_eq!(blocks.map(|blocks| blocks.len()), Ok(16));
        });
        assert!((1..=16).contains(&places), "{places} places for 8 blocks");
        drop(held);
    }
}
