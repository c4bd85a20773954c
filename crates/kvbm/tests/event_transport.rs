//! Events that go elsewhere: what a manager does when nobody takes them.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod support;

use kvbm::config::{Secret, WhenFull};
use kvbm::{KvBlockManager, Owned, Tier};
use std::time::Duration;
use support::{books, fill, tokens};

fn register(manager: &KvBlockManager<Owned>, sequences: u32) {
    for start in 0..sequences {
        drop(fill(manager, &tokens(manager, start, 4), 0));
    }
}

/// Nobody listens on port 9 of this machine.
#[cfg(feature = "nats")]
#[test]
fn a_manager_runs_on_while_the_server_is_down_and_counts_what_it_cannot_keep() {
    let manager = books([64, 0, 0], |config| {
        config.events.url = Some(Secret::new("nats://127.0.0.1:9"));
        config.events.ring_capacity = 64;
        config.events.batch_events = 16;
        config.events.publish_timeout = Duration::from_millis(50);
    });
    register(&manager, 100);
    let status = manager.events().status();
    let happened = status.waiting + status.lost;
    // 400 stores, and as many removes but for the 64 blocks that are there.
    assert_eq!((status.published, happened), (0, 736));
    assert!(status.waiting <= 64 + 16, "the ring and one batch: {status:?}");
    assert!(status.gaps > 0 && status.lost >= 736 - 80, "{status:?}");
    assert!(manager.metrics().events_lost.get() >= 736 - 80);
    assert!(manager.metrics().encode().contains("kvbm_events_waiting"));
    let report = manager.shutdown(Duration::from_millis(200));
    assert_eq!(report.events_unpublished, manager.events().status().waiting);
    assert!(manager.events().status().unavailable > 0);
}

/// Mutation that makes it fail: `make_room` that does not wait.
#[test]
fn who_would_rather_wait_than_lose_events_loses_none() {
    let manager = books([64, 0, 0], |config| {
        config.events.ring_capacity = 64;
        config.events.when_full = WhenFull::Block;
        config.events.full_wait = Duration::from_secs(10);
    });
    register(&manager, 400);
    assert!(manager.events().pump());
    let status = manager.events().status();
    assert_eq!((status.published, status.lost, status.waiting), (2 * 1600 - 64, 0, 0), "{status:?}");
    assert_eq!(status.lag, Duration::ZERO);
}

#[test]
fn what_no_transport_of_this_build_can_do_is_said_when_the_manager_is_built() {
    let build = |url: &str| {
        let builder = KvBlockManager::<Owned>::builder()
            .model(support::model())
            .namespace(support::namespace())
            .device(kvbm::config::Blocks(8))
            .configure(|config| config.events.url = Some(Secret::new(url)));
        builder.build_metadata_only().err().map(|error| error.to_string())
    };
    assert!(build("carrier-pigeon://coop").unwrap().contains("no transport 'carrier-pigeon'"));
    assert!(build("nats://h?speed=high").unwrap().contains(if cfg!(feature = "nats") {
        "no parameter 'speed'"
    } else {
        "--features nats"
    }));
}

#[test]
fn a_snapshot_is_what_the_tiers_hold() {
    let manager = books([16, 32, 0], |_| ());
    register(&manager, 3);
    assert!(manager.wait_offloads(support::soon()));
    let snapshot = manager.events().snapshot();
    let on = |tier| snapshot.blocks.iter().filter(|block| block.location.tier == tier).count();
    assert_eq!((on(Tier::G1), on(Tier::G2)), (12, 12));
    assert_eq!(snapshot.next_sequence, 24);
    let root = tokens(&manager, 1, 4).hashes()[0];
    assert_eq!(snapshot.blocks.iter().filter(|block| block.prefix_hash == root).count(), 8);
}
