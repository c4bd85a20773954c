//! Events that go elsewhere: what a manager does when nobody takes them.

#[cfg(feature = "zmq")]
use crate::ports::free_port;
use crate::support::{books, fill, tokens};
use kvbm::config::{Secret, WhenFull};
use kvbm::{KvBlockManager, Owned, Tier};
use std::time::Duration;
#[cfg(feature = "nats")]
use std::time::Instant;

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

/// Mutation that makes it fail: `make_room` without `stuck_at`; it waits 100 times then.
#[cfg(feature = "nats")]
#[test]
fn a_server_that_is_down_costs_who_would_wait_for_it_a_few_waits_at_most() {
    let manager = books([64, 0, 0], |config| {
        config.events.url = Some(Secret::new("nats://127.0.0.1:9"));
        config.events.ring_capacity = 64;
        config.events.batch_events = 16;
        config.events.when_full = WhenFull::Block;
        config.events.full_wait = Duration::from_secs(2);
    });
    let started = Instant::now();
    register(&manager, 200);
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    let status = manager.events().status();
    assert_eq!(status.published, 0);
    assert!(status.lost >= 1000 && status.gaps > 0, "{status:?}");
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
fn what_no_transport_of_this_build_can_do_is_reported_when_the_manager_is_built() {
    let build = |url: &str| {
        let builder = KvBlockManager::<Owned>::builder()
            .model(crate::support::model())
            .namespace(crate::support::namespace())
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

/// Everything that a follower of `manager` holds once it has heard of everything.
#[cfg(feature = "zmq")]
fn follow_to_the_end(
    manager: &KvBlockManager<Owned>,
    mut subscriber: kvbm::events_plane::Subscriber,
) -> std::collections::BTreeSet<(Tier, kvbm::SequenceHash)> {
    use kvbm::events_plane::Delivery;
    assert!(manager.events().flush(Duration::from_secs(20)));
    let (published, mut heard) = (manager.events().status().published, 0);
    let mut index = kvbm::events_plane::KvIndex::default();
    while heard < published {
        match subscriber.next(Duration::from_secs(20)).unwrap() {
            Some(Delivery::Events { stream, events }) => {
                assert_eq!(stream.source, manager.events().source());
                heard += events.len() as u64;
                index.apply(stream, &events);
            }
            other => panic!("{heard} of {published} events, then {other:?}"),
        }
    }
    index.holdings().map(|(place, _, hash)| (place.location.tier, hash)).collect()
}

#[cfg(feature = "zmq")]
#[test]
fn a_follower_over_zmq_comes_to_what_the_tiers_hold() {
    use kvbm::events_plane::{EventUrl, Subscriber, url::EventRole};
    let url = format!("zmq+tcp://127.0.0.1:{}?replay={}&from=start", free_port(), free_port());
    let manager = books([16, 32, 0], |config| {
        config.events.url = Some(Secret::new(url.as_str()));
        config.events.worker_id = 77;
    });
    assert_eq!(manager.events().source().0, 77);
    register(&manager, 5);
    // Late: what was before comes from the replay socket.
    assert!(manager.events().pump());
    let transport =
        url.parse::<EventUrl>().unwrap().open(EventRole::Subscriber, Duration::from_secs(20)).unwrap();
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    register(&manager, 9);
    assert!(manager.wait_offloads(crate::support::soon()));
    let told = follow_to_the_end(&manager, subscriber);
    let held = manager.events().snapshot().blocks;
    let held: std::collections::BTreeSet<_> =
        held.iter().map(|block| (block.location.tier, block.identity.hash)).collect();
    assert_eq!(told, held);
}

#[cfg(feature = "zmq")]
#[test]
fn a_port_that_the_system_chose_is_reported_and_followed() {
    use kvbm::events_plane::{EventUrl, Subscriber, url::EventRole};
    let manager = books([16, 32, 0], |config| {
        config.events.url = Some(Secret::new("zmq+tcp://127.0.0.1:*?replay=*"));
    });
    let [events, replay] = manager.events().listens_at().try_into().unwrap();
    let url = format!("zmq+{events}?replay={replay}&from=start").parse::<EventUrl>().unwrap();
    let transport = url.open(EventRole::Subscriber, Duration::from_secs(20)).unwrap();
    let subscriber = Subscriber::new(transport.subscribe().unwrap());
    register(&manager, 5);
    assert!(manager.wait_offloads(crate::support::soon()));
    let told = follow_to_the_end(&manager, subscriber).len();
    assert_eq!(told, manager.events().snapshot().blocks.len());
    assert_eq!(books([16, 32, 0], |_| ()).events().listens_at(), Vec::<String>::new());
}

#[cfg(feature = "zmq")]
#[test]
fn an_address_that_cannot_be_bound_is_an_error_of_build() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let build = |url: String| {
        let builder = KvBlockManager::<Owned>::builder()
            .model(crate::support::model())
            .namespace(crate::support::namespace())
            .device(kvbm::config::Blocks(8))
            .configure(|config| config.events.url = Some(Secret::new(url)));
        builder.build_metadata_only().err().unwrap().to_string()
    };
    let address = taken.local_addr().unwrap();
    assert!(build(format!("zmq+tcp://{address}")).contains("cannot publish events"));
    assert!(build("zmq+tcp://0.0.0.0:5557".into()).contains("insecure"));
}

#[test]
fn a_snapshot_is_what_the_tiers_hold() {
    let manager = books([16, 32, 0], |_| ());
    register(&manager, 3);
    assert!(manager.wait_offloads(crate::support::soon()));
    let snapshot = manager.events().snapshot();
    let on = |tier| snapshot.blocks.iter().filter(|block| block.location.tier == tier).count();
    assert_eq!((on(Tier::G1), on(Tier::G2)), (12, 12));
    assert_eq!(snapshot.next_sequence, 24);
    let root = tokens(&manager, 1, 4).hashes()[0];
    assert_eq!(snapshot.blocks.iter().filter(|block| block.prefix_hash == root).count(), 8);
}
