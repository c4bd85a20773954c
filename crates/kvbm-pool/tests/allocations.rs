//! In steady state the bookkeeping asks the heap for nothing.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbm_plan::{GroupId, NamespaceId, SequenceHash};
use kvbm_pool::{BlockChain, Duplicates, G1, PolicyKind, Registry, RegistryConfig};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator as it is; counting touches no memory of
// the caller.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

/// Requests that find nothing in a full pool: allocate, fill, register, let go, drain events.
fn calls_of_churn(policy: PolicyKind, requests: usize) -> u64 {
    const LENGTH: usize = 24;
    const DRAINED: usize = 1024;
    let mut config = RegistryConfig::new([1000, 100, 100]);
    config.policy = policy;
    let registry = Registry::new(&config).unwrap();
    let pool = registry.pool::<G1>();
    let mut events = Vec::with_capacity(DRAINED);
    let mut backlog = 0;
    let mut number = 0_u128;
    let mut chain = Vec::with_capacity(LENGTH);
    let mut churn = |requests: usize| {
        for _ in 0..requests {
            chain.clear();
            chain.extend((0..LENGTH).map(|_| {
                number += 1;
                SequenceHash::from_bytes((number * 0x9e37_79b9_7f4a_7c15).to_le_bytes())
            }));
            let fresh = pool.get_mutable_blocks(LENGTH).unwrap();
            let partial = fresh.init_sequence(NamespaceId(0), GroupId(0), 0).unwrap();
            let (complete, rest) = partial.commit(BlockChain::of_hashes(&chain)).unwrap();
            assert!(rest.is_empty());
            let cached = pool.register(complete, Duplicates::Reuse).unwrap();
            registry.touch(GroupId(0), &chain);
            drop(cached);
            // Now and then whoever drains is late: as late again asks for nothing either.
            backlog = (backlog + 1) % 200;
            if !(3..=170).contains(&backlog) {
                events.clear();
                registry.drain_events(&mut events, DRAINED);
            }
        }
    };
    churn(1000);
    let before = CALLS.get();
    churn(requests);
    CALLS.get() - before
}

#[test]
fn churn_allocates_nothing() {
    for policy in [PolicyKind::LruLeaf, PolicyKind::Hazard] {
        assert_eq!(calls_of_churn(policy, 1000), 0, "{policy:?}");
    }
}
