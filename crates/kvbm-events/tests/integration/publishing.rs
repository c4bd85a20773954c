//! kvbm's events as an engine's: whoever follows engines gets the truth, through losses too.

use crate::support::{World, block};
use kvbm_events::vllm::{
    self, EngineBlock, EngineBlocks, EngineEvent, EngineHash, EngineSource, Follower, Publishing, decode,
};
use kvbm_events::{
    Answering, BatchEncoder, EventBatch, EventBlock, EventKind, EventManager, EventReceiver, EventTransport,
    InProcessTransport, KvEvent, KvIndex, Payload, PublisherConfig, Responder, Snapshot, SourceId, StreamId,
    TransportError,
};
use kvbm_plan::{Epoch, Location, NodeId, SequenceHash, Tier, VolumeId};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const STREAM: StreamId = StreamId { source: SourceId(1), epoch: Epoch(1), shard: 0 };

fn events(publishing: &mut Publishing, next: u64, kinds: Vec<(u64, EventKind)>) -> Vec<EngineEvent> {
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
    let [EngineEvent::Stored(first), EngineEvent::Stored(rest)] = &told[..] else { panic!("{told:?}") };
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
            EngineEvent::Removed(removed) => removed.block_hashes.iter().map(|hash| format!("{hash:?}")),
            other => panic!("clearing is told block by block, not {other:?}"),
        })
        .collect();
    assert_eq!(gone, [own, name(1), name(2)].iter().map(|hash| format!("{hash:?}")).collect());
}

/// A block in the pool and on a volume is told of by two streams: a loss in one takes nothing back
/// of the other.
///
/// Mutation that makes it fail: `remove_of` that takes back what other shards have told.
#[test]
fn a_loss_removes_what_its_own_stream_stored() {
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
    let gone = |told: Vec<EngineEvent>| {
        let [EngineEvent::Removed(gone)] = &told[..] else { panic!("{told:?}") };
        assert_eq!(gone.block_hashes, [EngineHash::Uint(number)]);
        gone.medium.clone().unwrap()
    };
    assert_eq!(gone(tell(0, 5, vec![])), "CPU", "heartbeats that tell of a lost tail");
    assert_eq!(gone(tell(1, 5, vec![])), "EXTERNAL");
}

/// Places of the pool, which is shard 0, and of volumes, shard 1.
fn place(number: usize) -> (u16, Location) {
    let node = NodeId(3);
    match number {
        0..3 => (0, Location::on(node, Tier::ALL[number])),
        _ => (1, Location { tier: Tier::G4, node, volume: Some(VolumeId(number as u32)) }),
    }
}

fn at(n: u32, number: usize) -> EventBlock {
    EventBlock { location: place(number).1, ..block(n) }
}

/// What happens to a cache whose blocks lie in the pool and on six volumes.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Stored if it is not there, else removed.
    Toggle(u32, usize),
    /// Told twice.
    Again(u32, usize),
    Clear(u16),
    /// Something happens and the event is lost.
    Lose(u32, usize),
}

fn change() -> impl Strategy<Value = Change> {
    let held = || (0..3u32, 0..9usize);
    prop_oneof![
        8 => held().prop_map(|(n, place)| Change::Toggle(n, place)),
        2 => held().prop_map(|(n, place)| Change::Again(n, place)),
        1 => (0..2u16).prop_map(Change::Clear),
        2 => held().prop_map(|(n, place)| Change::Lose(n, place)),
    ]
}

/// What a naive follower makes of what it is told: no block is stored twice nor removed twice.
fn apply(known: &mut BTreeSet<(String, String)>, told: Vec<EngineEvent>) {
    for event in told {
        let (hashes, medium, is_stored) = match event {
            EngineEvent::Stored(stored) => (stored.block_hashes, stored.medium, true),
            EngineEvent::Removed(removed) => (removed.block_hashes, removed.medium, false),
            other => panic!("{other:?}"),
        };
        for hash in hashes {
            let told = (format!("{hash:?}"), medium.clone().unwrap());
            let is_news = if is_stored { known.insert(told.clone()) } else { known.remove(&told) };
            assert!(is_news, "{told:?} is told twice");
        }
    }
}

proptest! {
    /// Followers know tiers; several volumes are one of them. After each event they know a block
    /// there exactly while any has it.
    ///
    /// Mutations that make it fail: `store` that notes no second holder of a tier; `remove` that
    /// tells of every one; `remove_of` and `lost` that look at tiers alone.
    #[test]
    fn a_block_is_stored_as_long_as_any_volume_has_it(changes in prop::collection::vec(change(), 1..60)) {
        let held: Arc<Mutex<BTreeSet<(u32, usize)>>> = Arc::default();
        let next = Arc::new(Mutex::new([0u64; 2]));
        let (source, numbers) = (Arc::clone(&held), Arc::clone(&next));
        let snapshots = move |of: StreamId| {
            let held = source.lock().unwrap();
            let of_shard = held.iter().filter(|(_, number)| place(*number).0 == of.shard);
            let blocks = of_shard.map(|(n, number)| at(*n, *number)).collect();
            Some(Snapshot { next_sequence: numbers.lock().unwrap()[of.shard as usize], blocks })
        };
        let mut publishing = Publishing::new(Arc::new(EngineBlocks::new(1)), &Tier::ALL).with_snapshots(snapshots);
        let mut known = BTreeSet::new();
        for change in changes {
            let (shard, kind) = {
                let mut held = held.lock().unwrap();
                let toggle = |held: &mut BTreeSet<(u32, usize)>, n, number| {
                    if held.insert((n, number)) {
                        EventKind::Store(at(n, number))
                    } else {
                        held.remove(&(n, number));
                        EventKind::Remove(at(n, number))
                    }
                };
                match change {
                    Change::Toggle(n, number) => (place(number).0, Some(toggle(&mut held, n, number))),
                    Change::Again(n, number) if held.contains(&(n, number)) => {
                        (place(number).0, Some(EventKind::Store(at(n, number))))
                    }
                    Change::Again(n, number) => (place(number).0, Some(EventKind::Remove(at(n, number)))),
                    Change::Clear(shard) => {
                        held.retain(|(_, number)| place(*number).0 != shard);
                        (shard, Some(EventKind::Cleared))
                    }
                    Change::Lose(n, number) => {
                        toggle(&mut held, n, number);
                        (place(number).0, None)
                    }
                }
            };
            let sequence = {
                let mut next = next.lock().unwrap();
                next[shard as usize] += 1;
                next[shard as usize] - 1
            };
            let events = kind.into_iter().map(|kind| KvEvent::new(sequence, kind)).collect();
            let mut payloads = Vec::new();
            let batch = EventBatch::new(StreamId { shard, ..STREAM }, sequence + 1, events);
            publishing.encode(&batch, &mut payloads).unwrap();
            apply(&mut known, payloads.iter().flat_map(|payload| decode(payload).unwrap().events).collect());
            let wanted: BTreeSet<(String, String)> = held.lock().unwrap().iter().map(|(n, number)| {
                let media = ["GPU", "CPU", "STORAGE", "EXTERNAL"];
                let name = EngineHash::Bytes(block(*n).identity.hash.as_bytes().to_vec());
                (format!("{name:?}"), media[place(*number).1.tier.index()].to_owned())
            }).collect();
            prop_assert_eq!(&known, &wanted);
        }
    }
}

#[test]
fn blocks_of_the_engine_cause_no_events_and_heartbeats_change_nothing() {
    let mut publishing = Publishing::new(Arc::new(EngineBlocks::new(1)), &[Tier::G3]);
    assert_eq!(
        events(&mut publishing, 2, (0..2).map(|n| (n, EventKind::Store(block(n as u32)))).collect()),
        []
    );
    assert_eq!(events(&mut publishing, 2, Vec::new()), []);
    assert_eq!(publishing.stats().lock().losses, 0);
}

/// A ring that is too small loses again and again; a follower of engines ends with exactly what is
/// there.
///
/// Mutations that make it fail: `lost` that stores nothing; `lost` that removes nothing; `encode`
/// that goes on below the snapshot's number.
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
        let mut follower = Follower::new(EngineSource { source: SourceId(9), node: NodeId(0) });
        let (mut index, mut number) = (KvIndex::default(), 0);
        for step in 0..200u32 {
            for change in 0..step % 30 {
                let random = (step * 30 + change).wrapping_mul(2_654_435_761) >> 8;
                world.toggle(random % 300, random as usize / 300 % 4);
            }
            manager.pump(Instant::now()).unwrap();
            while let Some(payload) = receiver.recv(Duration::ZERO).unwrap() {
                follower.receive(&mut index, number, &payload).unwrap();
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
    let [EngineEvent::Removed(gone), EngineEvent::Stored(stored)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((gone.block_hashes.len(), stored.block_hashes.len()), (2, 1));
}

/// Of a page of 1,024 tokens, as large as they come.
fn noted(engine: &EngineBlocks, n: u32, tokens: u32) -> EventBlock {
    let token_ids = (0..tokens).map(|token| u32::MAX - token).collect();
    engine.note(block(n).identity.hash, EngineBlock { token_ids, ..EngineBlock::default() });
    EventBlock { block_tokens: tokens, ..block(n) }
}

/// Mutations that make it fail: `stored` or `into_payloads` that looks at the number of blocks
/// alone.
#[test]
fn payloads_stay_far_below_what_followers_read() {
    let engine = Arc::new(EngineBlocks::new(20_000));
    let mut publishing = Publishing::new(Arc::clone(&engine), &Tier::ALL);
    let mut follower = Follower::new(EngineSource { source: SourceId(9), node: NodeId(0) });
    let (mut index, mut number, mut sequence) = (KvIndex::default(), 0, 0);
    let mut tell = |publishing: &mut Publishing, kinds: Vec<EventKind>, there: u64| {
        let first = sequence;
        sequence += kinds.len() as u64;
        let events = (first..).zip(kinds).map(|(sequence, kind)| KvEvent::new(sequence, kind)).collect();
        let mut payloads = Vec::new();
        publishing.encode(&EventBatch::new(STREAM, sequence, events), &mut payloads).unwrap();
        for payload in &payloads {
            assert!(payload.len() < vllm::MAX_BYTES / 8, "{} bytes", payload.len());
            follower.receive(&mut index, number, payload).unwrap();
            number += 1;
        }
        assert_eq!(index.holdings().count() as u64, there);
    };
    // A chain in one event as far as that goes, blocks that follow none, and small ones.
    let chain = (0..4000).map(|n| EventKind::Store(noted(&engine, n, 1024))).collect();
    tell(&mut publishing, chain, 4000);
    let apart = (4000..8000).step_by(2).map(|n| EventKind::Store(noted(&engine, n, 1024))).collect();
    tell(&mut publishing, apart, 6000);
    let small = (8000..12_000).map(|n| EventKind::Store(noted(&engine, n, 16))).collect();
    tell(&mut publishing, small, 10_000);
    tell(&mut publishing, vec![EventKind::Cleared], 0);
    // The largest page there is, alone in its payload.
    let largest = (0..2).map(|n| EventKind::Store(noted(&engine, 12_000 + n, 1 << 20))).collect();
    let mut payloads = Vec::new();
    let kinds: Vec<EventKind> = largest;
    let events = (10_001..).zip(kinds).map(|(sequence, kind)| KvEvent::new(sequence, kind)).collect();
    publishing.encode(&EventBatch::new(STREAM, 10_003, events), &mut payloads).unwrap();
    assert_eq!(payloads.len(), 2);
    assert!(payloads.iter().all(|payload| payload.len() < vllm::MAX_BYTES / 2));
}

/// Carries no payload above a limit.
struct Narrow(InProcessTransport, usize);

impl EventTransport for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }

    fn publish(&self, payload: &Payload, timeout: Duration) -> Result<(), TransportError> {
        if payload.len() > self.1 {
            return Err(TransportError::Refused { transport: "narrow", reason: "too long".into() });
        }
        self.0.publish(payload, timeout)
    }

    fn subscribe(&self) -> Result<Box<dyn EventReceiver>, TransportError> {
        self.0.subscribe()
    }

    fn answer(&self, source: SourceId, responder: Responder) -> Result<Answering, TransportError> {
        self.0.answer(source, responder)
    }

    fn ask(
        &self,
        source: SourceId,
        question: &Payload,
        timeout: Duration,
    ) -> Result<Payload, TransportError> {
        self.0.ask(source, question, timeout)
    }
}

/// What a transport does not carry whole goes in pieces. A block that it does not carry at all
/// counts as refused, once for each time that it was stored, and nothing is told of its end.
///
/// Mutations that make it fail: `Publishing::refused` that halves nothing; that takes nothing back;
/// `say_otherwise` that puts the pieces at the end.
#[test]
fn what_a_transport_refuses_goes_in_pieces_or_counts_as_lost() {
    let engine = Arc::new(EngineBlocks::new(1000));
    let publishing = Publishing::new(Arc::clone(&engine), &Tier::ALL);
    let stats = publishing.stats();
    let transport = Arc::new(Narrow(InProcessTransport::default(), 4000));
    let mut receiver = transport.subscribe().unwrap();
    let config = PublisherConfig { max_age: Duration::ZERO, ..PublisherConfig::default() };
    let mut manager =
        EventManager::new(config, SourceId(1), Epoch(1), transport).unwrap().with_format(publishing);
    let (send, source) = std::sync::mpsc::channel::<EventKind>();
    let source = Mutex::new(source);
    let mut sequence = 0;
    let drain = move |max: usize, out: &mut Vec<KvEvent>| {
        for kind in source.lock().unwrap().try_iter().take(max) {
            out.push(KvEvent::new(sequence, kind));
            sequence += 1;
        }
        sequence
    };
    manager.add_shard(0, drain).unwrap();
    let mut follower = Follower::new(EngineSource { source: SourceId(9), node: NodeId(0) });
    let (mut index, mut number) = (KvIndex::default(), 0);
    let mut pump = |manager: &mut EventManager| {
        manager.flush(Duration::from_secs(60)).unwrap();
        let mut told = 0;
        while let Some(payload) = receiver.recv(Duration::ZERO).unwrap() {
            follower.receive(&mut index, number, &payload).unwrap();
            (number, told) = (number + 1, told + 1);
        }
        (index.holdings().count(), told)
    };
    // The seventh has 5,000 bytes of tokens.
    for n in 0..500 {
        send.send(EventKind::Store(noted(&engine, n, if n == 7 { 1000 } else { 16 }))).unwrap();
    }
    let (there, told) = pump(&mut manager);
    assert!(told > 10, "{told} payloads");
    assert_eq!((there, manager.stats().events, manager.stats().refused), (499, 499, 1));
    assert_eq!(stats.lock().refused, 1);
    // Nobody knows it, so nobody is told that it goes; stored again it would be told of.
    send.send(EventKind::Remove(EventBlock { block_tokens: 1000, ..block(7) })).unwrap();
    assert_eq!(pump(&mut manager), (499, 0));
    send.send(EventKind::Store(noted(&engine, 7, 1000))).unwrap();
    assert_eq!(pump(&mut manager), (499, 0));
    assert_eq!((stats.lock().refused, manager.stats().refused), (2, 2));
    send.send(EventKind::Store(noted(&engine, 7, 16))).unwrap();
    assert_eq!(pump(&mut manager), (500, 1), "what is not told of can be told of");
    // Clearing goes in pieces too.
    send.send(EventKind::Cleared).unwrap();
    assert_eq!(pump(&mut manager).0, 0);
    assert_eq!(stats.lock().refused, 2);
}
