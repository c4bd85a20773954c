//! The invariants that this crate guards, by number.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, RecoveredBlock, SequenceHash, Tier};
use kvbm_pool::{
    Arrival, ArrivalOutcome, BlockChain, BlockMetadata, BlockPool, Duplicates, EventRecord, EventRecordKind,
    G1, G2, G3, PolicyKind, Quarantine, Registry, RegistryConfig, RestoreError, TierMask, TierTag,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const NAMESPACE: NamespaceId = NamespaceId(3);
const GROUP: GroupId = GroupId(0);

fn registry(capacity: [u32; 3]) -> Registry {
    Registry::new(&RegistryConfig::new(capacity)).unwrap()
}

fn hash(chain: u64, index: u64) -> SequenceHash {
    SequenceHash::from_bytes((u128::from(chain) << 64 | u128::from(index)).to_le_bytes())
}

fn hashes(chain: u64, count: u64) -> Vec<SequenceHash> {
    (0..count).map(|index| hash(chain, index)).collect()
}

fn identities(chain: &[SequenceHash]) -> Vec<BlockIdentity> {
    BlockIdentity::chain(NAMESPACE, GROUP, chain).collect()
}

/// Registers what `chain` lacks on G1 behind `known` blocks; `write` sees the slots before they are
/// visible.
fn register<T: TierTag>(
    pool: &BlockPool<T>,
    chain: &[SequenceHash],
    known: usize,
    write: impl Fn(BlockId, SequenceHash),
) -> Option<kvbm_pool::Cached<T>> {
    let blocks = pool.get_mutable_blocks(chain.len() - known).ok()?;
    let partial = blocks.init_sequence(NAMESPACE, GROUP, known as u32).unwrap();
    let (complete, _) = partial.commit(BlockChain::of_hashes(chain)).unwrap();
    for (block, identity) in complete.block_ids().iter().zip(complete.identities()) {
        write(*block, identity.hash);
    }
    pool.register(complete, Duplicates::Reuse).ok()
}

/// Nothing shows that the blocks are on G2: no lookup, no pin, no snapshot, no event.
fn assert_invisible(registry: &Registry, chain: &[SequenceHash]) {
    assert!(registry.pool::<G2>().match_sequence_hashes(GROUP, chain).is_empty());
    assert!(registry.match_prefix(GROUP, chain).is_empty());
    assert!(registry.peek_prefix(GROUP, chain).is_empty());
    assert!(chain.iter().all(|&hash| registry.tiers_of(GROUP, hash).is_empty()));
    assert!(registry.snapshot(Tier::G2).0.is_empty());
    assert_eq!(registry.drain_events(&mut Vec::new(), 100).records, 0);
}

/// Mutation that makes it fail: `Core::reserve` sets Present instead of Arriving.
#[test]
fn invariant_1_nothing_is_visible_before_it_is_complete() {
    let registry = registry([4, 4, 0]);
    let chain = hashes(1, 3);
    let pool = registry.pool::<G2>();
    let partial = pool.get_mutable_blocks(3).unwrap().init_sequence(NAMESPACE, GROUP, 0).unwrap();
    let (complete, _) = partial.commit(BlockChain::of_hashes(&chain)).unwrap();
    assert_invisible(&registry, &chain);
    drop(complete);
    assert_invisible(&registry, &chain);

    let arrivals = pool.begin_arrivals(&identities(&chain)).unwrap();
    assert_invisible(&registry, &chain);
    let waiting = registry.match_prefix(GROUP, &chain);
    let tickets: Vec<u64> = waiting.arriving().iter().map(|block| block.ticket).collect();
    assert_eq!(tickets, arrivals.reserved().map(|(.., ticket)| ticket).collect::<Vec<_>>());
    let joined = registry.begin_arrivals(Tier::G2, &identities(&chain)).unwrap();
    let expected: Vec<Arrival> = tickets.iter().map(|&ticket| Arrival::Joined { ticket }).collect();
    assert_eq!(joined.arrivals(), expected);
    drop(arrivals);
    assert_invisible(&registry, &chain);
    assert_eq!(registry.occupancy(Tier::G2).free, 4);

    let mut arrivals = pool.begin_arrivals(&identities(&chain)).unwrap();
    assert_eq!(arrivals.complete(0), ArrivalOutcome::Stored);
    arrivals.fail(1);
    assert_eq!(registry.peek_prefix(GROUP, &chain), [TierMask::only(Tier::G2)]);
    assert_eq!(registry.match_prefix(GROUP, &chain).len(), 1);
    assert_eq!(arrivals.complete(1), ArrivalOutcome::Removed, "what failed cannot complete");
    assert_eq!(arrivals.complete(99), ArrivalOutcome::Removed);
    let cached = arrivals.into_cached();
    assert_eq!(cached.identities(), identities(&chain)[..1]);
    assert_eq!(registry.occupancy(Tier::G2).arriving, 0);
    assert_eq!(registry.counters(Tier::G2).arrivals_failed, 5);
}

/// Mutation that makes it fail: `Core::cancel_arrival` leaves the slot Arriving.
#[test]
fn invariant_1_what_was_removed_on_its_way_stays_invisible() {
    let registry = registry([0, 4, 0]);
    let chain = hashes(1, 2);
    let mut arrivals = registry.begin_arrivals(Tier::G2, &identities(&chain)).unwrap();
    let removed = registry.forget(NAMESPACE);
    assert_eq!((removed.blocks, removed.cancelled), (0, 2));
    assert_eq!(arrivals.complete_all(), [ArrivalOutcome::Removed, ArrivalOutcome::Removed]);
    assert_invisible(&registry, &chain);
    assert_eq!(registry.occupancy(Tier::G2).free, 4);
}

#[test]
fn a_slot_is_vacant_when_nothing_is_there_nor_on_its_way() {
    let registry = registry([0, 6, 0]);
    let vacant = |tier: Tier| registry.vacant_slots(tier);
    assert_eq!([Tier::G2, Tier::G1, Tier::G4].map(|tier| vacant(tier).len()), [6, 0, 0]);
    let mut arrivals = registry.begin_arrivals(Tier::G2, &identities(&hashes(1, 2))).unwrap();
    let reserved: Vec<BlockId> = arrivals.reserved().map(|(_, block, _)| block).collect();
    assert!(vacant(Tier::G2).iter().all(|slot| !reserved.contains(slot)));
    arrivals.complete(0);
    registry.forget(NAMESPACE);
    assert_eq!(vacant(Tier::G2).len(), 4, "one is in use, the other on its way");
    drop(arrivals);
    assert_eq!(vacant(Tier::G2).len(), 6);
    assert_eq!(registry.retire(Tier::G2, &[BlockId(0)]), []);
    assert_eq!(vacant(Tier::G2).len(), 6, "one is out of use");
}

/// Mutation that makes it fail: `Core::detach` takes a slot with one user for unused.
#[test]
fn invariant_1_quarantined_bytes_are_never_found_nor_handed_out() {
    let registry = registry([0, 3, 0]);
    let pool = registry.pool::<G2>();
    let chain = hashes(1, 2);
    let mut cached = register(&pool, &chain, 0, |_, _| ()).unwrap();
    let bad = cached.block_ids()[0];
    assert_eq!(registry.quarantine(Tier::G2, bad), Quarantine::AfterLastUser);
    assert!(registry.peek_prefix(GROUP, &chain).is_empty());
    assert_eq!(registry.tiers_of(GROUP, chain[1]), TierMask::only(Tier::G2), "it is there, but not found");
    assert_eq!(cached.identities(), identities(&chain), "its users still know what they hold");
    let tail = cached.split_off(1);
    drop(cached);
    assert_eq!(registry.quarantine(Tier::G2, bad), Quarantine::Done);
    assert_eq!(registry.quarantine(Tier::G2, BlockId(77)), Quarantine::NotRegistered);
    drop(tail);
    for _ in 0..3 {
        let blocks = pool.get_mutable_blocks(2).unwrap();
        assert!(!blocks.block_ids().contains(&bad));
    }
    assert!(pool.get_mutable_blocks(3).unwrap_err().to_string().contains("1 quarantined"));

    let mut arrivals = pool.begin_arrivals(&identities(&chain)).unwrap();
    arrivals.fail_and_quarantine(0);
    drop(arrivals);
    assert_eq!(registry.occupancy(Tier::G2).quarantined, 2);
}

/// Mutation that makes it fail: `FreeSlots::hold` puts the slot into the list of free ones.
#[test]
fn slots_of_failed_arrivals_are_withheld_until_they_are_given_back() {
    let registry = registry([0, 3, 0]);
    let pool = registry.pool::<G2>();
    let mut arrivals = pool.begin_arrivals(&identities(&hashes(1, 3))).unwrap();
    let slots: Vec<_> = arrivals.reserved().map(|(_, block, _)| block).collect();
    let mut withheld = arrivals.fail_and_withhold([1, 2, 1, 7]);
    assert_eq!(withheld.block_ids(), &slots[1..], "each once, and none that was not asked for");
    assert_eq!(arrivals.complete_each([0, 1]), [ArrivalOutcome::Stored, ArrivalOutcome::Removed]);
    drop(arrivals);
    let status = registry.occupancy(Tier::G2);
    assert_eq!((status.free, status.held, status.arriving), (0, 2, 0));

    assert_eq!(
        pool.get_mutable_blocks(1).unwrap().block_ids(),
        &slots[..1],
        "the block that is there goes first"
    );
    drop(withheld.split_off(1));
    let blocks = pool.get_mutable_blocks(2).unwrap();
    assert!(!blocks.block_ids().contains(&slots[1]) && blocks.block_ids().contains(&slots[2]));
    assert!(pool.get_mutable_blocks(1).is_err());
    drop(withheld);
    assert_eq!(pool.get_mutable_blocks(1).unwrap().block_ids(), &slots[1..2]);
}

/// Slots carry "bytes" (the low half of the hash) that only exclusive owners write. Whoever pins a
/// block must find its bytes there, now and until it lets go. Mutation that makes it fail:
/// `Core::may_go` does not look at references.
#[test]
fn invariant_2_bytes_of_registered_blocks_never_change() {
    let registry = registry([48, 40, 0]);
    let memory: [Vec<AtomicU64>; 2] = [48, 40].map(|size| (0..size).map(|_| AtomicU64::new(0)).collect());
    let stop = AtomicBool::new(false);
    let checked = AtomicU64::new(0);
    let value = |hash: SequenceHash| hash.to_u128() as u64 ^ ((hash.to_u128() >> 64) as u64 * 0x9e37_79b9);
    let verify = |tier: Tier, ids: &[BlockId], identities: &[BlockIdentity]| {
        for (id, identity) in ids.iter().zip(identities) {
            let found = memory[tier.index()][id.index()].load(Ordering::SeqCst);
            assert_eq!(found, value(identity.hash), "{id} of {tier}");
            checked.fetch_add(1, Ordering::SeqCst);
        }
    };
    let request = |number: u64| {
        let chain = hashes(number * number % 11, 5 + number % 7);
        let prefix = registry.match_prefix(GROUP, &chain);
        for (block, identity) in prefix.blocks().iter().zip(prefix.identities()) {
            verify(block.tier, &[block.block], &[identity]);
        }
        // Onboard what is on G2 only.
        let Ok(mut arrivals) = registry.pool::<G1>().begin_arrivals(&prefix.identities()) else { return };
        for (index, block, _) in arrivals.reserved().collect::<Vec<_>>() {
            memory[0][block.index()].store(value(arrivals.identities()[index].hash), Ordering::SeqCst);
            arrivals.complete(index);
        }
        let onboarded = arrivals.into_cached();
        verify(Tier::G1, onboarded.block_ids(), &onboarded.identities());
        let write = |block: BlockId, hash| memory[0][block.index()].store(value(hash), Ordering::SeqCst);
        let fresh = register(&registry.pool::<G1>(), &chain, prefix.len(), write);
        registry.touch(GROUP, &chain);
        // Offload what is new.
        let Some(fresh) = fresh else { return };
        if let Ok(mut offload) = registry.pool::<G2>().begin_arrivals(&fresh.identities()) {
            for (index, block, _) in offload.reserved().collect::<Vec<_>>() {
                memory[1][block.index()].store(value(offload.identities()[index].hash), Ordering::SeqCst);
                if index % 5 == 4 {
                    offload.fail(index);
                } else {
                    offload.complete(index);
                }
            }
        }
        verify(Tier::G1, fresh.block_ids(), &fresh.identities());
        for (block, identity) in prefix.blocks().iter().zip(prefix.identities()) {
            verify(block.tier, &[block.block], &[identity]);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3)
            .map(|worker| scope.spawn(move || (0..3000).for_each(|n| request(n * 3 + worker))))
            .collect();
        let admin = scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                registry.clear(Tier::G1);
                registry.remove_subtree(GROUP, hash(3, 2), TierMask::ALL);
                std::thread::yield_now();
            }
        });
        let done: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stop.store(true, Ordering::SeqCst);
        assert!(admin.join().is_ok());
        assert!(done.into_iter().all(|worker| worker.is_ok()));
    });
    assert!(checked.load(Ordering::SeqCst) > 10_000);
    assert_eq!(registry.occupancy(Tier::G1).active, 0);
}

/// Mutation that makes it fail: `Core::vacate` does not set Absent.
#[test]
fn invariant_2_registered_slots_are_never_handed_out() {
    let registry = registry([16, 0, 0]);
    let pool = registry.pool::<G1>();
    for round in 0..200 {
        let kept = register(&pool, &hashes(round, 5), 0, |_, _| ()).unwrap();
        let all: Vec<BlockId> = registry.snapshot(Tier::G1).0.iter().map(|(block, _)| *block).collect();
        let fresh = pool.get_mutable_blocks(1 + round as usize % 11).unwrap();
        let left: Vec<BlockId> = registry.snapshot(Tier::G1).0.iter().map(|(block, _)| *block).collect();
        assert!(
            fresh.block_ids().iter().all(|block| !left.contains(block) && !kept.block_ids().contains(block))
        );
        assert!(left.iter().all(|block| all.contains(block)));
    }
}

/// Replays events; every number must follow the one before.
struct Replica {
    present: HashMap<(Tier, SequenceHash), BlockIdentity>,
    next: u64,
    records: Vec<EventRecord>,
}

impl Replica {
    fn new() -> Self {
        Self { present: HashMap::new(), next: 0, records: Vec::new() }
    }

    fn follow(&mut self, registry: &Registry) -> usize {
        let drained = registry.drain_events(&mut self.records, usize::MAX);
        assert_eq!(drained.lost, 0);
        for event in self.records.drain(..) {
            assert_eq!(event.seq, self.next);
            self.next += 1;
            let key = (event.tier, event.identity.hash);
            match event.kind {
                EventRecordKind::Store => assert!(self.present.insert(key, event.identity).is_none()),
                EventRecordKind::Remove => assert!(self.present.remove(&key).is_some()),
            }
        }
        assert_eq!(drained.next_seq, self.next);
        drained.records
    }
}

/// Registration races with the last drop and with eviction on several threads; the last event for
/// every block is true. Mutation that makes it fail: `Core::set_presence` writes no Remove.
#[test]
fn invariant_4_racing_register_and_drop_end_with_the_truth() {
    for policy in [PolicyKind::LruLeaf, PolicyKind::Hazard] {
        race(policy);
    }
}

fn race(policy: PolicyKind) {
    let config = RegistryConfig { event_capacity: 1 << 20, policy, ..RegistryConfig::new([24, 0, 0]) };
    let registry = Registry::new(&config).unwrap();
    let running = AtomicU64::new(4);
    let mut replica = Replica::new();
    std::thread::scope(|scope| {
        for worker in 0..4_u64 {
            let (registry, running) = (&registry, &running);
            scope.spawn(move || {
                let pool = registry.pool::<G1>();
                for round in 0..4000 {
                    // Few chains, so that all threads fight for the same blocks.
                    let chain = hashes((round * 7 + worker * 3) % 9, 4);
                    let known = pool.match_sequence_hashes(GROUP, &chain);
                    drop(register(&pool, &chain, known.len().min(3), |_, _| ()));
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        while running.load(Ordering::SeqCst) > 0 {
            replica.follow(&registry);
            std::thread::yield_now();
        }
    });
    replica.follow(&registry);
    assert!(replica.next > 0, "nothing happened");
    for chain in 0..9 {
        for hash in hashes(chain, 4) {
            let told = replica.present.contains_key(&(Tier::G1, hash));
            assert_eq!(told, registry.tiers_of(GROUP, hash).contains(Tier::G1));
        }
    }
    assert_eq!(replica.present.len(), registry.snapshot(Tier::G1).0.len());
}

/// Mutation that makes it fail: `EventRing::push_all` does not count what it overwrites.
#[test]
fn invariant_4_a_full_ring_is_a_counted_gap_and_a_snapshot_repairs_it() {
    let config = RegistryConfig { event_capacity: 8, ..RegistryConfig::new([16, 0, 0]) };
    let registry = Registry::new(&config).unwrap();
    let pool = registry.pool::<G1>();
    for chain in 0..3 {
        drop(register(&pool, &hashes(chain, 5), 0, |_, _| ()).unwrap());
    }
    let mut events = Vec::new();
    let drained = registry.drain_events(&mut events, 100);
    assert_eq!((drained.lost, drained.records, drained.next_seq), (7, 8, 15));
    assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), (7..15).collect::<Vec<_>>());
    assert_eq!(registry.events_lost(), 7);

    // Resync: the snapshot says which event comes next.
    let (blocks, next) = registry.snapshot(Tier::G1);
    let mut replica = Replica::new();
    replica.next = next;
    replica.present = blocks.iter().map(|(_, identity)| ((Tier::G1, identity.hash), *identity)).collect();
    assert_eq!(replica.present.len(), 15);
    drop(register(&pool, &hashes(9, 3), 0, |_, _| ()).unwrap());
    assert!(replica.follow(&registry) > 0);
    assert_eq!(replica.present.len(), registry.snapshot(Tier::G1).0.len());
}

/// Mutation that makes it fail: `Core::has_parent` is always true.
#[test]
fn invariant_5_recovered_blocks_may_be_anything() {
    let chain = hashes(1, 4);
    let good = identities(&chain);
    let other = identities(&hashes(2, 3));
    let record = |block, identity: BlockIdentity| RecoveredBlock { block: BlockId(block), identity };
    let recovered = [
        record(0, good[0]),
        record(1, good[1]),
        record(8, good[1]), // beyond the tier: it does not count
        record(9, good[2]), // beyond the tier
        record(2, good[3]), // its parent is the former
        record(3, other[0]),
        record(4, other[0]), // again: the later one counts
        record(5, other[2]), // overwritten below
        record(5, other[1]),
        record(6, BlockIdentity { group: GroupId(4), ..other[2] }), // no such group
        record(7, BlockIdentity { parent: None, ..other[2] }),      // contradicts its position
    ];
    let registry = registry([0, 4, 8]);
    let outcome = registry.restore(Tier::G3, &recovered, BlockMetadata::default()).unwrap();
    assert_eq!((outcome.restored, outcome.overwritten, outcome.invalid), (4, 1, 4));
    assert_eq!(outcome.orphans, [BlockId(2)]);
    assert_eq!(outcome.duplicates, [BlockId(3)]);
    assert_eq!(outcome.rejected, [BlockId(6), BlockId(7)]);
    assert_eq!(registry.peek_prefix(GROUP, &chain).len(), 2);
    let found = registry.pool::<G3>().match_sequence_hashes(GROUP, &hashes(2, 3));
    assert_eq!(found.block_ids(), [BlockId(4), BlockId(5)]);
    let free = registry.pool::<G3>().get_mutable_blocks(4).unwrap();
    let mut ids: Vec<u32> = free.block_ids().iter().map(|block| block.0).collect();
    ids.sort_unstable();
    assert_eq!(ids, [2, 3, 6, 7]);
    let again = registry.restore(Tier::G3, &recovered, BlockMetadata::default());
    assert_eq!(again, Err(RestoreError::InUse { tier: Tier::G3, free: 0, capacity: 8 }));
    assert!(registry.restore(Tier::G4, &[], BlockMetadata::default()).is_err());
}

/// Mutation that makes it fail: `FreeSlots::open` puts every slot that is not used into the free
/// list.
#[test]
fn invariant_5_retired_slots_are_never_used() {
    let good = identities(&hashes(1, 3));
    let record = |block, identity: BlockIdentity| RecoveredBlock { block: BlockId(block), identity };
    let registry = registry([0, 4, 8]);
    let pool = registry.pool::<G3>();
    drop(pool.get_mutable_blocks(3).unwrap());
    let bad = [1, 5, 7, 5, 8, u32::MAX].map(BlockId);
    assert_eq!(registry.retire(Tier::G3, &bad), [], "freed and fresh slots, each once, those that exist");
    assert_eq!(registry.retire(Tier::G3, &bad), []);
    assert_eq!(registry.retire(Tier::G4, &bad), []);
    let status = registry.occupancy(Tier::G3);
    assert_eq!((status.free, status.quarantined), (5, 3));
    let blocks = pool.get_mutable_blocks(5).unwrap();
    assert_eq!(
        blocks.block_ids(),
        [0, 2, 3, 4, 6].map(BlockId),
        "in the order in which they would have come"
    );
    assert_eq!(pool.get_mutable_blocks(1).unwrap_err().quarantined, 3);
    assert_eq!(registry.retire(Tier::G3, &bad[..1]), [], "it stays out of use");
    assert_eq!(registry.retire(Tier::G3, &[BlockId(0)]), [BlockId(0)], "a slot in use is left alone");
    drop(blocks);

    let recovered = [record(0, good[0]), record(2, good[1]), record(5, good[2])];
    let outcome = registry.restore(Tier::G3, &recovered, BlockMetadata::default()).unwrap();
    assert_eq!((outcome.restored, outcome.invalid), (2, 1));
    assert_eq!(outcome.rejected, [BlockId(5)]);
    let rest = pool.get_mutable_blocks(3).unwrap();
    assert_eq!(rest.block_ids(), [3, 4, 6].map(BlockId));
    assert_eq!(registry.occupancy(Tier::G3).free, 0);
}

/// Handles outlive the registry, and are dropped in any order, also while their thread unwinds.
/// Mutation that makes it fail: `FreeSlots::put` asserts that its thread does not panic (the
/// process then aborts).
#[test]
fn invariant_6_no_panic_in_drop() {
    let registry = registry([16, 16, 16]);
    let pool = registry.pool::<G1>();
    let chain = hashes(1, 6);
    let cached = register(&pool, &chain, 0, |_, _| ()).unwrap();
    let prefix = registry.match_prefix(GROUP, &chain);
    let mut arrivals = registry.begin_arrivals(Tier::G2, &identities(&chain)).unwrap();
    arrivals.complete(0);
    let cold = registry.coldest(Tier::G1, 4, Tier::G3, 0);
    let blocks = pool.get_mutable_blocks(3).unwrap();
    let handle = cached.registration(0).unwrap();
    let copy = cached.clone();
    registry.remove(kvbm_pool::BlockSelection::All, TierMask::ALL);
    drop((registry, pool));
    let thread = std::thread::spawn(move || {
        let _all = (cached, prefix, arrivals, cold, blocks);
        panic!("unwinds through the handles");
    });
    let message = thread.join().unwrap_err();
    assert_eq!(message.downcast_ref(), Some(&"unwinds through the handles"), "a second panic would abort");
    assert!(!handle.is_registered());
    drop(copy);
    assert!(handle.tiers().is_empty());
}
