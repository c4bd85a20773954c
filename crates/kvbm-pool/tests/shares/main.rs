//! Tenants' shares of a tier: who gives blocks, under every policy, against a naive model and by
//! example.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod blind;
mod oracle;

use blind::Blind;
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    Arrival, ArrivalOutcome, BlockChain, ConfigError, Duplicates, EvictionPolicy, G1, G2, PinError,
    PolicyKind, Refusal, Registry, RegistryConfig, Share, TenantConfig, TenantError, TenantId, TierMask,
};

const GROUP: GroupId = GroupId(0);
const POLICIES: [PolicyKind; 2] = [PolicyKind::LruLeaf, PolicyKind::Hazard];

fn share(share: f64) -> Share {
    Share::new(share).unwrap()
}

fn tenant(part: f64, namespaces: &[u32]) -> TenantConfig {
    TenantConfig { share: share(part), namespaces: namespaces.iter().copied().map(NamespaceId).collect() }
}

/// Registries of every policy, and of one that knows nothing of tenants.
fn registries(config: &RegistryConfig) -> Vec<(String, Registry)> {
    let ours = POLICIES.map(|policy| {
        (format!("{policy:?}"), Registry::new(&RegistryConfig { policy, ..config.clone() }).unwrap())
    });
    let blind: Box<dyn EvictionPolicy> = Box::new(Blind::default());
    let blind = ("blind".to_owned(), Registry::with_policy(config, blind).unwrap());
    ours.into_iter().chain([blind]).collect()
}

/// `count` blocks of a chain of its own for each namespace and number.
fn chain(namespace: u32, number: u32, count: usize) -> Vec<SequenceHash> {
    let hash = |at: usize| {
        let mut bytes = [9; 16];
        bytes[..4].copy_from_slice(&namespace.to_le_bytes());
        bytes[4..8].copy_from_slice(&number.to_le_bytes());
        bytes[8..12].copy_from_slice(&(at as u32).to_le_bytes());
        SequenceHash::from_bytes(bytes)
    };
    (0..count).map(hash).collect()
}

/// Makes a chain present on G1, as a request of its namespace, and lets go of it.
fn serve(registry: &Registry, namespace: u32, number: u32, count: usize) {
    let (pool, namespace, hashes) =
        (registry.pool::<G1>(), NamespaceId(namespace), chain(namespace, number, count));
    let fresh = pool.get_mutable_blocks_for(namespace, count).unwrap();
    let partial = fresh.init_sequence(namespace, GROUP, 0).unwrap();
    let (done, _) = partial.commit(BlockChain::of_hashes(&hashes)).unwrap();
    drop(pool.register(done, Duplicates::Reuse).unwrap());
}

/// Blocks of nobody, and of each tenant.
fn blocks(registry: &Registry) -> Vec<u32> {
    registry.tenants(Tier::G1).iter().map(|tenant| tenant.blocks).collect()
}

#[test]
fn what_nobody_wants_is_lent_and_comes_back() {
    let tenants = vec![tenant(0.5, &[1, 11]), tenant(0.25, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([40, 0, 0]) };
    for (name, registry) in registries(&config) {
        (0..20).for_each(|number| serve(&registry, 1, number, 4));
        assert_eq!(blocks(&registry), [0, 40, 0], "{name}: nobody else wants it");
        (0..20).for_each(|number| serve(&registry, 2, number, 2));
        assert_eq!(blocks(&registry), [0, 25, 15], "{name}: what is nobody's they have in halves");
        (0..20).for_each(|number| serve(&registry, 9, number, 1));
        assert_eq!(blocks(&registry), [10, 20, 10], "{name}: what the shares leave is nobody's");
        (0..20).for_each(|number| serve(&registry, 11, number, 4));
        assert_eq!(blocks(&registry), [10, 20, 10], "{name}: two namespaces of a tenant have one share");
        let status = registry.tenants(Tier::G1);
        assert_eq!(status.iter().map(|tenant| tenant.limit).collect::<Vec<_>>(), [10, 20, 10]);
        assert_eq!(status.iter().map(|tenant| tenant.evicted).collect::<Vec<_>>(), [10, 140, 30], "{name}");
        let counters = registry.counters(Tier::G1);
        assert_eq!(counters.evicted, 180);
        match name.as_str() {
            "LruLeaf" => assert_eq!(counters.evicted_by_choice, 0),
            _ => assert!(counters.evicted_by_choice <= 180, "{name}"),
        }
    }
}

#[test]
fn whoever_is_over_its_share_takes_nothing_of_others() {
    let tenants = vec![tenant(0.5, &[1]), tenant(0.5, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([16, 0, 0]) };
    for (name, registry) in registries(&config) {
        (0..8).for_each(|number| serve(&registry, 2, number, 1));
        let pool = registry.pool::<G1>();
        let mine = pool.get_mutable_blocks_for(NamespaceId(1), 8).unwrap();
        let refused = pool.get_mutable_blocks_for(NamespaceId(1), 1).unwrap_err();
        assert!(refused.over_share && refused.to_string().contains("over its share"), "{name}: {refused}");
        assert_eq!(blocks(&registry), [0, 0, 8], "{name}");
        assert_eq!(registry.tenants(Tier::G1)[1].held, 8);
        let hostile = pool.get_mutable_blocks_for(NamespaceId(2), usize::MAX).unwrap_err();
        assert_eq!((hostile.asked, registry.tenants(Tier::G1)[2].held), (usize::MAX, 0), "{name}");
        drop(mine);
        // What is asked for in no tenant's name is not held against anybody.
        drop(pool.get_mutable_blocks(16).unwrap());
        assert_eq!(registry.tenants(Tier::G1)[1].held, 0);
        assert_eq!(blocks(&registry), [0, 0, 0]);
    }
}

#[test]
fn the_least_recently_used_of_the_tenant_goes() {
    let tenants = vec![tenant(0.5, &[1])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([8, 0, 0]) };
    let registry = Registry::new(&config).unwrap();
    for (namespace, number) in [(9, 0), (1, 0), (1, 1), (9, 1), (1, 2), (1, 3), (9, 2), (1, 4)] {
        serve(&registry, namespace, number, 1);
    }
    registry.touch(GROUP, &chain(1, 0, 1));
    serve(&registry, 9, 3, 1);
    serve(&registry, 1, 5, 1);
    let there = |namespace, number| !registry.peek_prefix(GROUP, &chain(namespace, number, 1)).is_empty();
    assert_eq!([0, 1, 2, 3, 4, 5].map(|number| there(1, number)), [true, false, false, true, true, true]);
    assert_eq!([0, 1, 2, 3].map(|number| there(9, number)), [true; 4]);
}

#[test]
fn a_request_that_cannot_be_met_takes_nothing() {
    let tenants = vec![tenant(0.5, &[1]), tenant(0.5, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([16, 0, 0]) };
    for (name, registry) in registries(&config) {
        (0..16).for_each(|number| serve(&registry, 2, number, 1));
        let pool = registry.pool::<G1>();
        let refused = pool.get_mutable_blocks_for(NamespaceId(1), 9).unwrap_err();
        assert!(refused.over_share, "{name}: {refused}");
        assert_eq!(blocks(&registry), [0, 0, 16], "{name}: what is not enough is not given");
        let mine = pool.get_mutable_blocks_for(NamespaceId(1), 8).unwrap();
        let hostile = pool.get_mutable_blocks_for(NamespaceId(1), usize::MAX).unwrap_err();
        assert_eq!((hostile.asked, registry.tenants(Tier::G1)[1].held), (usize::MAX, 8), "{name}");
        drop(mine);
        assert_eq!(registry.tenants(Tier::G1)[1].held, 0);
    }
}

#[test]
fn what_is_removed_while_it_is_used_still_counts() {
    let tenants = vec![tenant(0.5, &[1]), tenant(0.5, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([16, 0, 0]) };
    for (name, registry) in registries(&config) {
        (0..8).for_each(|number| serve(&registry, 2, number, 1));
        serve(&registry, 1, 0, 8);
        let pool = registry.pool::<G1>();
        let used = pool.match_sequence_hashes(GROUP, &chain(1, 0, 8));
        registry.forget(NamespaceId(1));
        assert_eq!(blocks(&registry), [0, 8, 8], "{name}");
        let refused = pool.get_mutable_blocks_for(NamespaceId(1), 8).unwrap_err();
        assert!(refused.over_share, "{name}: {refused}");
        assert_eq!(blocks(&registry), [0, 8, 8], "{name}: nobody within its share gives");
        drop(used);
        assert_eq!(blocks(&registry), [0, 0, 8], "{name}");
        drop(pool.get_mutable_blocks_for(NamespaceId(1), 8).unwrap());
    }
}

#[test]
fn copies_and_arrivals_count_as_long_as_they_have_slots() {
    let tenants = vec![tenant(0.5, &[1])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([8, 8, 0]) };
    for (name, registry) in registries(&config) {
        let pool = registry.pool::<G1>();
        let hashes = chain(1, 0, 2);
        let complete = || {
            let fresh = pool.get_mutable_blocks_for(NamespaceId(1), 2).unwrap();
            let partial = fresh.init_sequence(NamespaceId(1), GROUP, 0).unwrap();
            partial.commit(BlockChain::of_hashes(&hashes)).unwrap().0
        };
        let first = pool.register(complete(), Duplicates::Allow).unwrap();
        let identities: Vec<BlockIdentity> = first.identities().into_iter().collect();
        let second = pool.register(complete(), Duplicates::Allow).unwrap();
        assert_eq!(blocks(&registry), [0, 4], "{name}: copies have slots of their own");
        drop(second);
        assert_eq!(blocks(&registry), [0, 2], "{name}");
        drop(first);
        let on_host = || registry.tenants(Tier::G2)[1].blocks;
        let lower = registry.pool::<G2>();
        let mut arrivals = lower.begin_arrivals(&identities).unwrap();
        assert_eq!(on_host(), 2, "{name}: on their way");
        registry.forget(NamespaceId(1));
        assert_eq!(on_host(), 2, "{name}: cancelled, but written to");
        assert_eq!(arrivals.complete(0), ArrivalOutcome::Removed, "{name}");
        assert_eq!(on_host(), 1, "{name}");
        drop(arrivals);
        assert_eq!(on_host(), 0, "{name}");
    }
}

#[test]
fn arrivals_of_several_tenants_are_each_for_its_own() {
    let tenants = vec![tenant(0.3, &[1]), tenant(0.3, &[2]), tenant(0.4, &[3])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([100, 0, 0]) };
    for (name, registry) in registries(&config) {
        serve(&registry, 1, 0, 40);
        serve(&registry, 3, 0, 60);
        let identity = |namespace, number, at: usize| {
            let hashes = chain(namespace, number, at + 1);
            let parent = at.checked_sub(1).map(|before| hashes[before]);
            let namespace = NamespaceId(namespace);
            BlockIdentity { namespace, group: GROUP, hash: hashes[at], parent, position: at as u32 }
        };
        let mut coming: Vec<BlockIdentity> = (0..30).map(|at| identity(2, 0, at)).collect();
        coming.insert(7, identity(1, 1, 0));
        let pool = registry.pool::<G1>();
        let arrivals = pool.begin_arrivals(&coming).unwrap();
        assert!(
            arrivals.arrivals().iter().all(|arrival| matches!(arrival, Arrival::Reserved { .. })),
            "{name}"
        );
        assert_eq!(blocks(&registry), [0, 30, 30, 40], "{name}: nobody is below its share");
        // All of the first tenant's are in use; it gets nothing more, the second what it gives up
        // itself.
        let used = pool.match_sequence_hashes(GROUP, &chain(1, 0, 40));
        drop(arrivals);
        serve(&registry, 2, 1, 29);
        let more = [identity(1, 2, 0), identity(2, 2, 0), identity(2, 2, 1)];
        let arrivals = pool.begin_arrivals(&more).unwrap();
        let told = arrivals.arrivals();
        assert!(
            matches!(told[1..], [Arrival::Reserved { .. }, Arrival::Reserved { .. }]),
            "{name}: {told:?}"
        );
        drop((arrivals, used));
        let held: u32 = registry.tenants(Tier::G1).iter().map(|tenant| tenant.held).sum();
        assert_eq!(held, 0, "{name}");
    }
}

#[test]
fn pins_of_a_tenant_end_with_its_share() {
    let tenants = vec![tenant(0.25, &[1]), tenant(0.5, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([32, 0, 0]) };
    for (name, registry) in registries(&config) {
        serve(&registry, 1, 0, 6);
        let pin = |count| registry.pin(GROUP, &chain(1, 0, count), TierMask::only(Tier::G1), 9);
        let refused = pin(5).unwrap_err();
        assert_eq!(
            refused,
            PinError::Limit { tier: Tier::G1, asked: 5, pinned: 0, limit: 4, capacity: 32 },
            "{name}"
        );
        assert_eq!(pin(4), Ok(4), "{name}");
        assert!(pin(5).is_err(), "{name}");
        // The other tenant has a larger share; blocks that change hands take their pins along.
        registry.assign(NamespaceId(1), TenantId(1)).unwrap();
        assert_eq!(pin(6), Ok(6), "{name}");
        registry.unpin(GROUP, &chain(1, 0, 6), TierMask::only(Tier::G1));
        registry.assign(NamespaceId(1), TenantId(0)).unwrap();
        assert_eq!(pin(4), Ok(4), "{name}");
    }
}

#[test]
fn what_is_allocated_for_nobody_is_whose_sequence_it_becomes() {
    let tenants = vec![tenant(0.5, &[1])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([8, 0, 0]) };
    let registry = Registry::new(&config).unwrap();
    let fresh = registry.pool::<G1>().get_mutable_blocks(3).unwrap();
    let held = || registry.tenants(Tier::G1).iter().map(|tenant| tenant.held).collect::<Vec<_>>();
    assert_eq!(held(), [0, 0], "nobody said for whom");
    let partial = fresh.init_sequence(NamespaceId(1), GROUP, 0).unwrap();
    assert_eq!(held(), [0, 3]);
    let again = partial.into_reset().init_sequence(NamespaceId(9), GROUP, 0).unwrap();
    assert_eq!(held(), [3, 0]);
    drop(again);
    assert_eq!(held(), [0, 0]);
}

#[test]
fn blocks_change_hands_with_their_namespace() {
    let tenants = vec![tenant(0.5, &[1]), tenant(0.5, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([16, 0, 0]) };
    for (name, registry) in registries(&config) {
        (0..6).for_each(|number| serve(&registry, 3, number, 1));
        (0..10).for_each(|number| serve(&registry, 1, number, 1));
        assert_eq!(blocks(&registry), [6, 10, 0], "{name}");
        let used = registry.pool::<G1>().match_sequence_hashes(GROUP, &chain(3, 0, 1));
        registry.assign(NamespaceId(3), TenantId(1)).unwrap();
        registry.assign(NamespaceId(3), TenantId(1)).unwrap();
        assert_eq!(blocks(&registry), [0, 10, 6], "{name}");
        (10..12).for_each(|number| serve(&registry, 2, number, 1));
        assert_eq!(blocks(&registry), [0, 8, 8], "{name}: the first was over its share");
        (12..20).for_each(|number| serve(&registry, 2, number, 1));
        assert_eq!(blocks(&registry), [0, 8, 8], "{name}: then the second's own go, the one in use not");
        assert_eq!(registry.peek_prefix(GROUP, &chain(3, 0, 1)).len(), 1, "{name}");
        registry.assign(NamespaceId(3), TenantId(0)).unwrap();
        let of_it = |(_, identity): &(_, BlockIdentity)| identity.namespace == NamespaceId(3);
        let moved = registry.snapshot(Tier::G1).0.iter().filter(|block| of_it(block)).count() as u32;
        assert_eq!(blocks(&registry), [0, 8 + moved, 8 - moved], "{name}");
        drop(used);
    }
}

#[test]
fn shares_change_while_blocks_are_there() {
    let tenants = vec![tenant(0.5, &[1]), tenant(0.25, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([8, 0, 0]) };
    let registry = Registry::new(&config).unwrap();
    let [a, b, c] = [0, 1, 2].map(TenantId);
    assert_eq!(registry.set_share(a, share(0.8)), Err(TenantError::Shares { tenant: a, share: share(0.8) }));
    assert_eq!(registry.set_share(c, share(0.1)), Err(TenantError::Unknown { tenant: c, tenants: 2 }));
    assert_eq!(registry.assign(NamespaceId(3), c), Err(TenantError::Unknown { tenant: c, tenants: 2 }));
    registry.set_share(b, share(0.5)).unwrap();
    let limits = || registry.tenants(Tier::G1).iter().map(|tenant| tenant.limit).collect::<Vec<_>>();
    assert_eq!(limits(), [0, 4, 4]);
    registry.assign(NamespaceId(3), b).unwrap();
    registry.assign(NamespaceId(2), b).unwrap();
    assert_eq!(registry.tenant_of(NamespaceId(3)), Some(b));
    serve(&registry, 3, 0, 2);
    assert_eq!(blocks(&registry), [0, 0, 2]);
    registry.clear(Tier::G1);
    assert_eq!(blocks(&registry), [0, 0, 0]);
}

/// Threads allocate, register and let go while shares change: in the end what is counted is what is
/// there.
#[test]
fn counts_are_right_after_threads_raced() {
    let tenants = vec![tenant(0.5, &[1]), tenant(0.25, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([24, 0, 0]) };
    for (name, registry) in registries(&config) {
        let request = |thread: u32, round: u32| {
            let namespace = NamespaceId((thread + round) % 3);
            let count = 1 + (round % 4) as usize;
            let Ok(fresh) = registry.pool::<G1>().get_mutable_blocks_for(namespace, count) else { return };
            if round.is_multiple_of(5) {
                return;
            }
            let partial = fresh.init_sequence(namespace, GROUP, 0).unwrap();
            let hashes = chain(namespace.0, round * 7 % 16, count);
            let (done, _) = partial.commit(BlockChain::of_hashes(&hashes)).unwrap();
            drop(registry.pool::<G1>().register(done, Duplicates::Reuse).unwrap());
        };
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (request, registry) = (&request, &registry);
                scope.spawn(move || {
                    for round in 0..2000 {
                        request(thread, round);
                        if round % 64 == thread {
                            let part = share(f64::from(round % 5) / 10.0);
                            registry.set_share(TenantId(thread as u8 % 2), part).unwrap();
                        }
                    }
                });
            }
        });
        let status = registry.tenants(Tier::G1);
        assert_eq!(status.iter().map(|tenant| tenant.held).collect::<Vec<_>>(), [0; 3], "{name}");
        let mut there = [0; 3];
        for (_, identity) in registry.snapshot(Tier::G1).0 {
            there[identity.namespace.0 as usize] += 1;
        }
        assert_eq!(blocks(&registry), there, "{name}");
        assert_eq!(status.iter().map(|tenant| tenant.limit).sum::<u32>(), 24, "{name}");
        let evicted: u64 = status.iter().map(|tenant| tenant.evicted).sum();
        assert!(evicted > 0 && evicted == registry.counters(Tier::G1).evicted, "{name}: {evicted}");
    }
}

/// A namespace changes hands while room is made for its blocks: they may find none, and are no
/// worse for it.
#[test]
fn arrivals_of_a_namespace_that_changes_hands_are_not_called_bad() {
    let tenants = vec![tenant(0.5, &[1]), tenant(0.5, &[2])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([64, 64, 0]) };
    let registry = Registry::new(&config).unwrap();
    let hashes = chain(3, 0, 1);
    let identity =
        BlockIdentity { namespace: NamespaceId(3), group: GROUP, hash: hashes[0], parent: None, position: 0 };
    std::thread::scope(|scope| {
        // As long as there are arrivals, and not a moment longer if one of them is wrong.
        let (running, ended) = std::sync::mpsc::channel::<()>();
        let registry = &registry;
        scope.spawn(move || {
            let mut round = 0_u8;
            while ended.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                registry.assign(NamespaceId(3), TenantId(round % 2)).unwrap();
                round = round.wrapping_add(1);
            }
        });
        for _ in 0..4000 {
            let arrivals = registry.begin_arrivals(Tier::G2, &[identity]).unwrap();
            let told = arrivals.arrivals()[0];
            assert!(matches!(told, Arrival::Reserved { .. } | Arrival::Refused(Refusal::NoRoom)), "{told:?}");
        }
        drop(running);
    });
    assert!(registry.tenants(Tier::G2).iter().all(|tenant| tenant.held == 0 && tenant.blocks == 0));
    assert_eq!(registry.occupancy(Tier::G2).free, 64);
}

/// A large registry with tenants evicts in exact order; one without tenants has none for life.
#[test]
fn a_registry_has_tenants_from_the_start_or_never() {
    let config = |tenants| RegistryConfig { tenants, ..RegistryConfig::new([1 << 16, 0, 0]) };
    let registry = Registry::new(&config(vec![tenant(0.5, &[1])])).unwrap();
    (0..4).for_each(|number| serve(&registry, 1, number, 1 << 14));
    serve(&registry, 9, 0, 1);
    let last = chain(1, 0, 1 << 14);
    assert_eq!(registry.peek_prefix(GROUP, &last).len(), (1 << 14) - 1);
    assert_eq!(blocks(&registry), [1, (1 << 16) - 1]);
    let registry = Registry::new(&config(Vec::new())).unwrap();
    let unknown = TenantError::Unknown { tenant: TenantId(0), tenants: 0 };
    assert_eq!(registry.set_share(TenantId(0), share(0.5)), Err(unknown));
    assert_eq!(registry.assign(NamespaceId(1), TenantId(0)), Err(unknown));
    assert_eq!((registry.tenant_of(NamespaceId(1)), registry.tenants(Tier::G1)), (None, Vec::new()));
    serve(&registry, 1, 0, 4);
    assert_eq!(registry.occupancy(Tier::G1).held, 0);
}

#[test]
fn what_cannot_be_is_refused() {
    let registry = |tenants| Registry::new(&RegistryConfig { tenants, ..RegistryConfig::new([8, 0, 0]) });
    let error = |tenants| registry(tenants).err();
    assert_eq!(error(vec![tenant(0.6, &[]), tenant(0.5, &[])]), Some(ConfigError::Shares));
    assert_eq!(
        error(vec![tenant(0.1, &[4]), tenant(0.1, &[3, 4])]),
        Some(ConfigError::TwoTenants { namespace: NamespaceId(4) })
    );
    assert_eq!(error(vec![tenant(0.0, &[]); 64]), Some(ConfigError::Tenants { tenants: 64 }));
    assert!(registry(vec![tenant(1.0 / 64.0, &[]); 63]).is_ok());
    let without = Registry::new(&RegistryConfig::new([8, 0, 0])).unwrap();
    assert_eq!(without.tenants(Tier::G1), []);
    assert_eq!(
        without.assign(NamespaceId(0), TenantId(0)),
        Err(TenantError::Unknown { tenant: TenantId(0), tenants: 0 })
    );
    drop(without.pool::<G1>().get_mutable_blocks_for(NamespaceId(7), 8).unwrap());
}
