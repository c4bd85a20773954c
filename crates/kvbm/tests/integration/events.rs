//! What the manager tells the world: events, status, metrics.
#![cfg(feature = "worker")]

use crate::support::{
    books, books_of, compute, fill, model, models, namespace, serve, soon, tokens, two_tiers,
};
use kvbm::device::Event;
use kvbm::events_plane::{Delivery, EventKind, Subscriber};
use kvbm::{FenceError, GroupId, KvBlockManager, Owned, Path, SequenceHash, Tier, TierMask, TokenSequence};
use std::collections::HashMap;
use std::io::{Read, Write};
use std::time::Duration;

/// Everything that was published, replayed.
#[derive(Default)]
struct Replayed {
    tiers: HashMap<(GroupId, SequenceHash), TierMask>,
    events: Vec<EventKind>,
}

fn replay(manager: &KvBlockManager<Owned>, subscriber: &mut Subscriber, into: &mut Replayed) {
    assert!(manager.events().pump());
    while let Some(delivery) = subscriber.next(Duration::ZERO).unwrap() {
        let Delivery::Events { events, .. } = delivery else { panic!("nothing was lost: {delivery:?}") };
        for event in events {
            let mask = |block: &kvbm::events_plane::EventBlock| TierMask::only(block.location.tier);
            let key = |block: &kvbm::events_plane::EventBlock| (block.identity.group, block.identity.hash);
            match &event.kind {
                EventKind::Store(block) => {
                    let tiers = into.tiers.entry(key(block)).or_insert(TierMask::NONE);
                    assert!(!tiers.contains(block.location.tier), "stored twice");
                    *tiers = tiers.iter().chain(mask(block).iter()).collect();
                }
                EventKind::Remove(block) => {
                    let tiers = into.tiers.get_mut(&key(block)).expect("removed before it was stored");
                    assert!(tiers.contains(block.location.tier), "removed twice");
                    *tiers = tiers.iter().filter(|&tier| tier != block.location.tier).collect();
                }
                EventKind::Cleared => into.tiers.clear(),
            }
            into.events.push(event.kind);
        }
    }
}

#[test]
fn two_managers_are_two_sources() {
    let sources = [1, 2].map(|_| {
        let manager = books([8, 8, 0], |_| ());
        let mut subscriber = manager.events().subscribe().unwrap();
        drop(fill(&manager, &tokens(&manager, 1, 2), 0));
        assert!(manager.events().flush(Duration::MAX), "no limit is beyond the clock");
        match subscriber.next(Duration::from_secs(60)).unwrap() {
            Some(Delivery::Events { stream, .. }) => stream.source,
            other => panic!("an event: {other:?}"),
        }
    });
    assert_ne!(sources[0], sources[1]);
}

/// Mutation that makes it fail: an `Outlet` that always has listeners; or one whose `subscribe`
/// wakes nobody.
#[test]
fn the_event_thread_rests_while_nobody_listens() {
    let manager = books([8, 8, 0], |config| config.events.heartbeat = Duration::from_secs(3600));
    let events = manager.events();
    assert!(events.pump());
    let before = events.stats();
    drop(fill(&manager, &tokens(&manager, 1, 2), 0));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(events.stats(), before, "published to nobody");
    assert_eq!(events.status().lag, Duration::ZERO, "nobody waits");
    let mut subscriber = events.subscribe().unwrap();
    drop(fill(&manager, &tokens(&manager, 5, 1), 0));
    // What was told before it came is a gap, and what follows comes without a heartbeat.
    let first = loop {
        match subscriber.next(Duration::from_secs(60)).unwrap() {
            Some(Delivery::Events { events, .. }) => break events[0].sequence,
            Some(Delivery::Gap { missing, .. }) => assert_eq!(missing.start, 0),
            other => panic!("an event: {other:?}"),
        }
    };
    assert!(first >= 2, "two blocks were stored before");
}

#[test]
fn a_scrape_sees_the_tiers_as_they_are() {
    let manager = books([8, 8, 0], |_| ());
    let metrics = manager.metrics().clone();
    let cached = fill(&manager, &tokens(&manager, 1, 3), 0);
    assert!(manager.wait_offloads(soon()));
    for part in ["{tier=\"g1\",state=\"free\"} 5", "{tier=\"g2\",state=\"free\"} 5"] {
        let text = metrics.encode();
        assert!(text.contains(&format!("kvbm_tier_slots{part}")), "{part}: {text}");
    }
    drop((cached, manager));
    assert!(metrics.encode().contains("kvbm_lookup_blocks_total"), "counters outlive their manager");
}

/// A request without bytes: what is cached is onboarded, and what each group keeps of the rest is
/// registered.
fn request(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) {
    let found = match manager.onboard_groups(manager.match_groups(sequence)).wait() {
        Ok(found) => found,
        Err(error) => error.arrived,
    };
    let mut computed = Vec::new();
    for group in (0..found.parts.len() as u16).map(GroupId) {
        for range in manager.kept_blocks(group, sequence.num_blocks()) {
            let start = range.start.max(found.len);
            if let Ok(fresh) = manager.allocate(range.end.saturating_sub(start))
                && !fresh.is_empty()
            {
                let chain = kvbm::BlockChain::from(sequence).slice(0..range.end);
                computed.push(manager.commit_group(group, fresh, chain, start).unwrap().0);
            }
        }
    }
    // The last user of these blocks goes while others register the same ones.
    drop(found);
    for done in computed {
        drop(manager.register(done));
    }
}

#[test]
fn invariant_4_events_replayed_give_the_registry_s_state() {
    for model in models() {
        let tiers = if model.has_groups() { [36, 60, 96] } else { [24, 40, 64] };
        let manager = books_of(model.clone(), tiers, |config| config.offload.g2_g3.write_through = true);
        let mut subscriber = manager.events().subscribe().unwrap();
        let all: Vec<_> =
            (0..12).flat_map(|start| [3, 5].map(|blocks| tokens(&manager, start, blocks))).collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (manager, all) = (&manager, &all);
                scope.spawn(move || {
                    for round in 0..300 {
                        request(manager, &all[(thread * 5 + round * 7) % all.len()]);
                        // Offloads have their own thread, and what waits for it is pinned.
                        if round % 5 == 4 {
                            assert!(manager.wait_offloads(soon()));
                        }
                        if round % 100 == 99 {
                            manager.clear([Tier::G1, Tier::G2, Tier::G3][thread % 3]).unwrap();
                        }
                    }
                });
            }
        });
        assert!(manager.wait_offloads(soon()));
        let mut replayed = Replayed::default();
        replay(&manager, &mut subscriber, &mut replayed);
        assert!(replayed.events.len() > 1000, "{}", replayed.events.len());
        for group in (0..model.cache_groups().len() as u16).map(GroupId) {
            for &hash in all.iter().flat_map(TokenSequence::hashes) {
                let told = replayed.tiers.get(&(group, hash)).copied().unwrap_or(TierMask::NONE);
                let alone = kvbm::BlockChain::of_hashes(std::slice::from_ref(&hash));
                let there = manager.places_of(group, alone).first().map_or(TierMask::NONE, |at| at.tiers);
                assert_eq!(told, there, "{hash} of group {group}");
            }
        }
        assert_eq!(manager.metrics().events_lost.get(), 0);
    }
}

#[test]
fn a_subscriber_sees_stores_and_removes_in_order_with_the_beginning_of_the_chain() {
    let manager = books([4, 16, 0], |_| ());
    let mut subscriber = manager.events().subscribe().unwrap();
    let sequence = tokens(&manager, 1, 3);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    drop(fill(&manager, &tokens(&manager, 2, 4), 0));
    let mut replayed = Replayed::default();
    replay(&manager, &mut subscriber, &mut replayed);
    let root = sequence.hashes()[0];
    let told = |tier, stores: bool| -> Vec<u32> {
        let ours = replayed.events.iter().filter_map(|kind| match kind {
            EventKind::Store(block) if stores => Some(block),
            EventKind::Remove(block) if !stores => Some(block),
            _ => None,
        });
        ours.filter(|block| block.location.tier == tier && block.prefix_hash == root)
            .map(|block| block.identity.position)
            .collect()
    };
    assert_eq!((told(Tier::G1, true), told(Tier::G2, true)), (vec![0, 1, 2], vec![0, 1, 2]));
    assert_eq!((told(Tier::G1, false), told(Tier::G2, false)), (vec![2, 1, 0], vec![]), "children go first");
    let block = replayed.events[0].block().unwrap();
    assert_eq!((block.block_bytes, block.block_tokens), (8192, 16));
}

#[test]
fn status_and_metrics_agree_and_are_served() {
    let manager = two_tiers(8, 32);
    let sequence = tokens(&manager, 1, 6);
    serve(&manager, &sequence);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(6));
    assert_eq!(serve(&manager, &sequence), 6);
    assert!(manager.wait_offloads(soon()));
    let (status, metrics) = (manager.status(), manager.metrics());
    for tier in &status.tiers {
        use kvbm::metrics::SlotState;
        let slots =
            SlotState::ALL.iter().map(|&state| metrics.tier(tier.tier).slots(state).get()).sum::<u64>();
        assert_eq!(slots, u64::from(tier.capacity), "{tier:?}");
        assert_eq!(metrics.tier(tier.tier).slots(SlotState::Cached).get(), u64::from(tier.inactive));
    }
    assert!(!status.shut_down && status.paths.iter().all(|path| path.plans == 0));
    assert_eq!(metrics.path(Path::G2_G1).summary().bytes, 6 * 8192);
    let server = metrics.serve("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut stream = std::net::TcpStream::connect(server.addr()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    for series in [
        "kvbm_hit_blocks_total{tier=\"g2\"} 6",
        "kvbm_transfer_blocks_total{path=\"g2_g1\"} 6",
        "kvbm_transfer_bytes_total{path=\"g1_g2\"} 49152",
        "kvbm_evicted_blocks_total{tier=\"g1\",reason=\"cleared\"} 6",
        "kvbm_tier_slots{tier=\"g2\",state=\"cached\"} 6",
        "kvbm_offload_dropped_blocks_total{path=\"g1_g2\",reason=\"queue_full\"} 0",
        "kvbm_sync_offloads_total 0",
        "kvbm_transfer_latency_seconds_bucket",
    ] {
        assert!(text.contains(series), "{series} is not in\n{text}");
    }
}

#[test]
fn a_plan_that_touches_g1_waits_for_the_engine_s_event() {
    let manager = two_tiers(16, 32);
    let sequence = tokens(&manager, 1, 4);
    let on_host = || manager.look_up(&sequence).iter().filter(|tiers| tiers.contains(Tier::G2)).count();
    let (event, completer) = Event::completable();
    assert_eq!(manager.fence(&[]), Err(FenceError::Ranks { given: 0, ranks: 1 }));
    assert_eq!(manager.fence_at(7), Err(FenceError::Here(7)), "nobody would open that gate");
    manager.fence(&[event]).unwrap();
    // The engine's kernels have been submitted, not run: the blocks are registered before their
    // bytes are there.
    let fresh = manager.allocate(4).unwrap();
    let ids = fresh.block_ids().to_vec();
    let (done, _) = manager.commit(fresh, &sequence, 0).unwrap();
    drop(manager.register(done).unwrap());
    assert!(!manager.wait_offloads(std::time::Instant::now() + Duration::from_millis(20)));
    assert_eq!(on_host(), 0);
    for (&id, &hash) in ids.iter().zip(sequence.hashes()) {
        compute(&manager, id, hash);
    }
    completer.complete(Ok(()));
    assert!(manager.wait_offloads(soon()));
    assert_eq!((on_host(), manager.clear(Tier::G1)), (4, Ok(4)));

    let (event, completer) = Event::completable();
    manager.fence(&[event]).unwrap();
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!onboarding.is_done(), "the engine may still read what was in these slots");
    completer.complete(Ok(()));
    let cached = onboarding.wait().unwrap();
    assert!(
        cached
            .block_ids()
            .iter()
            .zip(sequence.hashes())
            .all(|(&id, &hash)| crate::support::holds(&manager, id, hash))
    );
}

#[test]
fn a_manager_of_another_namespace_shares_nothing() {
    let [one, other] = ["1", "2"].map(|weights| {
        KvBlockManager::<Owned>::builder()
            .model(model())
            .namespace(namespace().weights(weights))
            .device(kvbm::config::Blocks(8))
            .build_metadata_only()
            .unwrap()
    });
    assert_ne!(tokens(&one, 1, 2).hashes(), tokens(&other, 1, 2).hashes());
}

#[test]
fn events_know_a_block_s_own_tokens() {
    let manager = books([8, 8, 0], |_| ());
    let mut subscriber = manager.events().subscribe().unwrap();
    let sequence = tokens(&manager, 1, 3);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    let mut replayed = Replayed::default();
    replay(&manager, &mut subscriber, &mut replayed);
    assert_eq!(replayed.events.len(), 6);
    for block in replayed.events.iter().filter_map(EventKind::block) {
        assert_eq!(block.local_hash, sequence.local_hash(block.identity.position as usize));
        assert!(block.local_hash.is_some());
    }
    let snapshot = manager.events().snapshot().blocks;
    assert!(snapshot.iter().all(|block| block.local_hash.is_some()));
}
