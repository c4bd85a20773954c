//! What a caller says of blocks beforehand, through the facade.

use crate::support::{books, fill, soon, tokens};
use kvbm::config::Blocks;
use kvbm::metrics::EvictReason;
use kvbm::pool::{BlockMemory, EvictionPolicy, SlotNumbers, SlotSet};
use kvbm::{BlockMetadata, KvBlockManager, Owned, PinError, Places, Tier, TierMask};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

#[test]
fn a_pinned_prefix_outlives_what_came_later_until_its_iteration() {
    let manager = books([16, 0, 0], |_| ());
    let system = tokens(&manager, 1, 6);
    drop(fill(&manager, &system, 0));
    let until = manager.iteration() + 2;
    let g1 = TierMask::only(Tier::G1);
    assert_eq!(manager.pin(&system, g1, until).unwrap(), 6);
    assert_eq!(manager.status().tiers[0].pinned, 6);
    for other in 2..12 {
        drop(fill(&manager, &tokens(&manager, other, 10), 0));
    }
    assert_eq!(manager.look_up(&system).len(), 6);
    let refused = manager.allocate(11).unwrap_err();
    assert_eq!(refused.pinned, 6);
    manager.step();
    drop(fill(&manager, &tokens(&manager, 12, 10), 0));
    assert_eq!(manager.look_up(&system).len(), 6);
    assert_eq!(manager.step(), until);
    drop(manager.allocate(16).unwrap());
    assert_eq!(manager.look_up(&system).len(), 0);
    assert!(manager.wait_offloads(soon()));
}

#[test]
fn a_block_of_priority_outlives_others_on_every_tier() {
    for policy in ["lru-leaf", "hazard"] {
        let manager = books([16, 32, 0], |config| config.set("policy.eviction", policy).unwrap());
        let dear = tokens(&manager, 1, 2);
        let fresh = manager.allocate(2).unwrap();
        let (done, _) = manager.commit(fresh, &dear, 0).unwrap();
        drop(manager.register_with(done, BlockMetadata { priority: 255 }).unwrap());
        let plain = tokens(&manager, 2, 2);
        drop(fill(&manager, &plain, 0));
        for other in 10..50 {
            drop(fill(&manager, &tokens(&manager, other, 2), 0));
            assert!(manager.wait_offloads(soon()));
        }
        let on_both = TierMask::only(Tier::G1).with(Tier::G2);
        assert_eq!(manager.look_up(&dear), [Places::from(on_both); 2], "{policy}");
        assert!(manager.look_up(&plain).is_empty(), "{policy}");
    }
}

/// Evicts the block of the lowest slot.
struct Lowest([BTreeSet<u32>; 3]);

impl EvictionPolicy for Lowest {
    fn evictable(
        &mut self,
        set: SlotSet,
        slot: u32,
        _memory: BlockMemory,
        _priority: u8,
        _numbers: &mut SlotNumbers<'_>,
    ) {
        self.0[set.tier].insert(slot);
    }

    fn kept(&mut self, set: SlotSet, slot: u32, _numbers: &mut SlotNumbers<'_>) {
        self.0[set.tier].remove(&slot);
    }

    fn victims(&mut self, set: SlotSet, _want: usize, out: &mut Vec<u32>, _numbers: &mut SlotNumbers<'_>) {
        out.extend(self.0[set.tier].pop_first());
    }

    fn has_victim(&self, set: SlotSet) -> bool {
        !self.0[set.tier].is_empty()
    }
}

#[test]
fn a_users_eviction_policy_chooses_and_the_rules_stay() {
    let manager = KvBlockManager::<Owned>::builder()
        .model(crate::support::model())
        .namespace(crate::support::namespace())
        .device(Blocks(8))
        .eviction(|blocks| {
            assert_eq!(blocks, [8, 0, 0]);
            Lowest(Default::default())
        })
        .build_metadata_only()
        .unwrap();
    let [first, second] = [1, 2].map(|start| tokens(&manager, start, 4));
    let held = fill(&manager, &first, 0);
    let ids: Vec<_> = held.block_ids().to_vec();
    drop(fill(&manager, &second, 0));
    drop(held);
    drop(manager.match_prefix(&second));
    let lowest_leaf = manager.allocate(1).unwrap();
    // The leaves are the last blocks of both; a use of the second does not matter to this policy.
    assert_eq!(lowest_leaf.block_ids(), [*ids.last().unwrap()]);
    assert_eq!((manager.look_up(&first).len(), manager.look_up(&second).len()), (3, 4));
}

#[test]
fn pins_are_taken_back_and_are_limited() {
    let manager = books([16, 0, 0], |_| ());
    let system = tokens(&manager, 1, 9);
    drop(fill(&manager, &system, 0));
    let refused = manager.pin(&system, TierMask::ALL, 9).unwrap_err();
    assert_eq!(
        refused,
        PinError::Limit { tier: Tier::G1, asked: 9, pinned: 0, limit: 8, capacity: 16 },
        "half of the tier"
    );
    let part = tokens(&manager, 1, 8);
    assert_eq!(manager.pin(&part, TierMask::ALL, 9), Ok(8));
    assert_eq!(manager.unpin(&part, TierMask::ALL), 8);
    drop(manager.allocate(16).unwrap());
    assert_eq!(manager.look_up(&system).len(), 0);
    assert_eq!(manager.pin(&system, TierMask::ALL, 0), Err(PinError::Past { until: 0, now: 0 }));
}

#[test]
fn a_tenant_that_is_silent_leaves_all_tiers_and_another_stays() {
    let manager = books([32, 32, 0], |_| ());
    let tenant = |salt: &str| crate::support::namespace().page_size(16).dtype("bf16").tenant_salt(salt);
    let prompt: Vec<u32> = (0..96).collect();
    let [silent, talks, no_limit] =
        ["silent", "talks", "no limit"].map(|salt| manager.sequence_in(&tenant(salt), &prompt, b"").unwrap());
    for sequence in [&silent, &talks, &no_limit] {
        drop(fill(&manager, sequence, 0));
    }
    assert!(manager.wait_offloads(soon()));
    for salt in ["silent", "talks"] {
        manager.set_ttl(&tenant(salt), Some(4)).unwrap();
    }
    let on_both = Places::from(TierMask::only(Tier::G1).with(Tier::G2));
    for iteration in 1..=8 {
        manager.step();
        assert_eq!(manager.match_prefix(&talks).len(), 6);
        let expected = if iteration < 4 { vec![on_both; 6] } else { Vec::new() };
        assert_eq!(manager.look_up(&silent), expected, "iteration {iteration}");
    }
    assert_eq!(manager.look_up(&no_limit), [on_both; 6]);
    let expired = |tier| manager.metrics().tier(tier).evictions(EvictReason::Expired).get();
    assert_eq!((expired(Tier::G1), expired(Tier::G2)), (6, 6));
    assert!(manager.set_ttl(&tenant("talks"), Some(0)).is_err());
    manager.set_ttl(&tenant("talks"), None).unwrap();
    for _ in 0..8 {
        manager.step();
    }
    assert_eq!(manager.look_up(&talks), [on_both; 6]);
    // No iteration ends any more.
    manager.set_ttl_time(&tenant("talks"), Some(Duration::from_secs(1))).unwrap();
    let until = soon();
    while !manager.look_up(&talks).is_empty() {
        assert!(Instant::now() < until, "a second is over");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(manager.look_up(&no_limit), [on_both; 6]);
}
