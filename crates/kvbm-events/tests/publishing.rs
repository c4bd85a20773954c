//! kvbm's events as an engine's: whoever follows engines gets the truth, through losses too.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic like tests")]

mod support;

use kvbm_events::vllm::{
    self, EngineBlock, EngineBlocks, EngineHash, Event, Follower, Publishing, Worker, decode,
};
use kvbm_events::{
    EventBatch, EventKind, EventManager, EventTransport, Format, InProcessTransport, KvEvent, KvIndex,
    PublisherConfig, SourceId, StreamId,
};
use kvbm_plan::{Epoch, NodeId, SequenceHash, Tier};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{World, block};

const STREAM: StreamId = StreamId { source: SourceId(1), epoch: Epoch(1), shard: 0 };

fn events(publishing: &mut Publishing, next: u64, kinds: Vec<(u64, EventKind)>) -> Vec<Event> {
    let events = kinds.into_iter().map(|(sequence, kind)| KvEvent::new(sequence, kind)).collect();
    let mut payloads = Vec::new();
    publishing.encode(&EventBatch::new(STREAM, next, events), &mut payloads).unwrap();
    payloads.iter().flat_map(|payload| decode(payload).unwrap().events).collect()
}

#[test]
fn blocks_of_a_chain_travel_together_with_their_tokens_and_the_engines_names() {
    let engine = Arc::new(EngineBlocks::new(2));
    let name = |n: u32| EngineHash::Uint(1000 + u64::from(n));
    for n in 0..3 {
        let token_ids = (0..16).map(|t| n * 16 + t).collect();
        engine.note(
            block(n).identity.hash,
            EngineBlock { hash: Some(name(n)), token_ids, ..EngineBlock::default() },
        );
    }
    assert_eq!(engine.len(), 2, "the oldest went");
    let mut publishing = Publishing::new(engine, &[Tier::G2]).with_rank(3);
    let stats = publishing.stats();
    let told = events(&mut publishing, 3, (0..3).map(|n| (n, EventKind::Store(block(n as u32)))).collect());
    let [Event::Stored(first), Event::Stored(rest)] = &told[..] else { panic!("{told:?}") };
    // Nobody knows the first one any more: it goes by its own hash, without tokens.
    let own = EngineHash::Bytes(block(0).identity.hash.as_bytes().to_vec());
    assert_eq!((&first.block_hashes[..], first.token_ids.len()), (&[own.clone()][..], 0));
    assert_eq!(
        (&rest.block_hashes[..], &rest.parent_block_hash),
        (&[name(1), name(2)][..], &Some(own.clone()))
    );
    assert_eq!(rest.token_ids, (16..48).collect::<Vec<u32>>());
    assert_eq!((rest.block_size, rest.medium.as_deref()), (16, Some("CPU")));
    let counted = *stats.lock();
    assert_eq!((counted.without_tokens, counted.without_hash), (1, 1));
    assert_eq!((rest.group_idx, rest.kv_cache_spec_kind.as_deref()), (Some(0), Some("full_attention")));
    let told = events(&mut publishing, 4, vec![(3, EventKind::Cleared)]);
    let gone: BTreeSet<String> = told
        .iter()
        .flat_map(|event| match event {
            Event::Removed(removed) => removed.block_hashes.iter().map(|hash| format!("{hash:?}")),
            other => panic!("clearing is told block by block, not {other:?}"),
        })
        .collect();
    assert_eq!(gone, [own, name(1), name(2)].iter().map(|hash| format!("{hash:?}")).collect());
}

/// A block in the pool and on a volume is told of by two streams: a loss in one takes nothing back of the other.
///
/// Mutation that makes it fail: `Said` with the shard of its first tier alone.
#[test]
fn a_loss_takes_back_what_its_own_stream_has_told() {
    let mut publishing = Publishing::new(Arc::new(EngineBlocks::new(1)), &Tier::ALL).with_numbers();
    let on = |tier| {
        let mut block = block(0);
        block.location.tier = tier;
        EventKind::Store(block)
    };
    let mut tell = |shard, next, kinds: Vec<EventKind>| {
        let events = kinds.into_iter().map(|kind| KvEvent::new(next - 1, kind)).collect();
        let mut payloads = Vec::new();
        publishing
            .encode(&EventBatch::new(StreamId { shard, ..STREAM }, next, events), &mut payloads)
            .unwrap();
        payloads.iter().flat_map(|payload| decode(payload).unwrap().events).collect::<Vec<_>>()
    };
    tell(0, 1, vec![on(Tier::G2)]);
    tell(1, 1, vec![on(Tier::G4)]);
    let number = u64::from_le_bytes(block(0).identity.hash.as_bytes()[..8].try_into().unwrap());
    let gone = |told: Vec<Event>| {
        let [Event::Removed(gone)] = &told[..] else { panic!("{told:?}") };
        assert_eq!(gone.block_hashes, [EngineHash::Uint(number)]);
        gone.medium.clone().unwrap()
    };
    assert_eq!(gone(tell(0, 5, vec![])), "CPU", "heartbeats that tell of a lost tail");
    assert_eq!(gone(tell(1, 5, vec![])), "EXTERNAL");
}

#[test]
fn what_the_engine_owns_is_not_told_and_heartbeats_say_nothing() {
    let mut publishing = Publishing::new(Arc::new(EngineBlocks::new(1)), &[Tier::G3]);
    assert_eq!(
        events(&mut publishing, 2, (0..2).map(|n| (n, EventKind::Store(block(n as u32)))).collect()),
        []
    );
    assert_eq!(events(&mut publishing, 2, Vec::new()), []);
    assert_eq!(publishing.stats().lock().losses, 0);
}

/// A ring that is too small loses again and again; a follower of engines ends with exactly what is there.
///
/// Mutations that make it fail: `lost` that stores nothing; `lost` that removes nothing; `encode` that goes on below
/// the snapshot's number.
#[test]
fn a_follower_of_engines_knows_the_truth_after_losses() {
    for capacity in [5, 20, 10_000] {
        let world = World::new(capacity);
        let source = world.clone();
        let engine = Arc::new(EngineBlocks::new(1000));
        let publishing = Publishing::new(engine, &Tier::ALL);
        let stats = publishing.stats();
        let publishing = publishing.with_snapshots(move |_: StreamId| Some(source.snapshot()));
        let transport = Arc::new(InProcessTransport::default());
        let mut receiver = transport.subscribe().unwrap();
        let config =
            PublisherConfig { batch_events: 7, max_age: Duration::ZERO, ..PublisherConfig::default() };
        let mut manager =
            EventManager::new(config, SourceId(1), Epoch(1), transport).unwrap().with_format(publishing);
        manager.add_shard(0, world.clone()).unwrap();
        let mut follower = Follower::new(Worker { source: SourceId(9), node: NodeId(0) });
        let (mut index, mut number) = (KvIndex::default(), 0);
        for step in 0..200u32 {
            for change in 0..step % 30 {
                let random = (step * 30 + change).wrapping_mul(2_654_435_761) >> 8;
                world.toggle(random % 300, random as usize / 300 % 4);
            }
            manager.pump(Instant::now()).unwrap();
            while let Some(payload) = receiver.recv(Duration::ZERO).unwrap() {
                follower.hear(&mut index, number, &payload).unwrap();
                number += 1;
            }
        }
        let found: BTreeSet<(SequenceHash, usize)> =
            index.holdings().map(|(place, _, hash)| (hash, place.location.tier.index())).collect();
        let wanted: BTreeSet<(SequenceHash, usize)> = world
            .snapshot()
            .blocks
            .iter()
            .map(|block| (block.identity.hash, block.location.tier.index()))
            .collect();
        assert_eq!(found, wanted, "capacity {capacity}");
        assert_eq!(stats.lock().losses > 0, capacity < 10_000, "capacity {capacity}");
    }
}

#[test]
fn without_snapshots_a_loss_takes_everything_back() {
    let mut publishing = Publishing::new(Arc::new(EngineBlocks::new(1)), &Tier::ALL);
    events(&mut publishing, 2, (0..2).map(|n| (n, EventKind::Store(block(n as u32)))).collect());
    let told = events(&mut publishing, 6, vec![(5, EventKind::Store(block(2)))]);
    let [Event::Removed(gone), Event::Stored(stored)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((gone.block_hashes.len(), stored.block_hashes.len()), (2, 1));
}

#[test]
fn payloads_stay_far_below_what_followers_read() {
    let mut publishing = Publishing::new(Arc::new(EngineBlocks::new(1)), &Tier::ALL);
    let mut payloads = Vec::new();
    for first in (0..20_000u64).step_by(4000) {
        let stored =
            (first..first + 4000).map(|n| KvEvent::new(n, EventKind::Store(block(n as u32)))).collect();
        publishing.encode(&EventBatch::new(STREAM, first + 4000, stored), &mut payloads).unwrap();
    }
    payloads.clear();
    let cleared = vec![KvEvent::new(20_000, EventKind::Cleared)];
    publishing.encode(&EventBatch::new(STREAM, 20_001, cleared), &mut payloads).unwrap();
    assert!(payloads.iter().all(|payload| payload.len() < vllm::MAX_BYTES / 4), "{}", payloads.len());
}
