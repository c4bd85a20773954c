//! What a caller says of blocks beforehand, through the facade.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod support;

use kvbm::metrics::EvictReason;
use kvbm::{PinError, Tier, TierMask};
use support::{books, fill, soon, tokens};

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
    let tenant = |salt: &str| support::namespace().page_size(16).dtype("bf16").tenant_salt(salt);
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
    let on_both = TierMask::only(Tier::G1).with(Tier::G2);
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
}
