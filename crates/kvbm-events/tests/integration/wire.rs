//! The wire form: golden bytes, round trips, size, hostile input.

use kvbm_events::wire::{self, DecodeError, EncodeError};
use kvbm_events::{EventBatch, EventBlock, EventKind, KvEvent, SourceId, StreamId, Unknown};
use kvbm_plan::{
    BlockIdentity, Epoch, GroupId, LocalHash, Location, NamespaceId, NodeId, SequenceHash, Tier, VolumeId,
};
use proptest::prelude::*;
use std::time::{Duration, UNIX_EPOCH};

const GOLDEN: &[u8] = include_bytes!("../golden/batch_v1.bin");

fn stream() -> StreamId {
    StreamId { source: SourceId(0x1122_3344_5566_7788), epoch: Epoch(5), shard: 2 }
}

fn golden_batch() -> EventBatch {
    let mut events: Vec<KvEvent> = [1_000, 1_001, 1_004].map(crate::support::event).into();
    events[1].extra = vec![("reason".into(), "evicted".into()), ("session".into(), "é".into())];
    events.push(KvEvent::new(70_000, EventKind::Cleared));
    EventBatch::new(stream(), 70_002, events)
}

#[test]
fn golden_batch_is_written_and_read_the_same() {
    let bytes = wire::encode(&golden_batch()).unwrap();
    assert_eq!(bytes, GOLDEN, "the wire form changed: that needs a new version, not a new golden file");
    assert_eq!(wire::decode(GOLDEN).unwrap(), golden_batch());
}

#[test]
fn an_event_takes_at_most_100_bytes() {
    let with_local_hash = |n| {
        let mut event = crate::support::event(n);
        if let EventKind::Store(block) | EventKind::Remove(block) = &mut event.kind {
            block.local_hash = Some(LocalHash(u64::MAX - n));
        }
        event
    };
    let events: Vec<KvEvent> = (1_000_000..1_001_000).map(with_local_hash).collect();
    let batch = EventBatch::new(stream(), 1_001_000, events);
    let bytes = wire::encode(&batch).unwrap();
    assert!(
        bytes.len() <= 100 * batch.events.len(),
        "{} bytes for {} events",
        bytes.len(),
        batch.events.len()
    );
    let heartbeat = EventBatch { events: Vec::new(), published_us: Some(u64::MAX), ..batch };
    assert!(wire::encode(&heartbeat).unwrap().len() <= wire::MAX_HEADER_BYTES);
}

#[test]
fn the_size_bound_holds_for_the_largest_values() {
    let identity = BlockIdentity {
        namespace: NamespaceId(u32::MAX),
        group: GroupId(u16::MAX),
        hash: SequenceHash::from_bytes([0xFF; 16]),
        parent: Some(SequenceHash::from_bytes([0xFF; 16])),
        position: u32::MAX,
    };
    let location = Location { tier: Tier::G4, node: NodeId(u32::MAX), volume: Some(VolumeId(u32::MAX)) };
    let (prefix_hash, block_bytes, block_tokens) = (identity.hash, u64::MAX, u32::MAX);
    let local_hash = Some(LocalHash(u64::MAX));
    let block = EventBlock { identity, prefix_hash, local_hash, block_bytes, block_tokens, location };
    let mut event = KvEvent::new(u64::MAX - 1, EventKind::Remove(block));
    let stream = StreamId { source: SourceId(u64::MAX), epoch: Epoch(u64::MAX), shard: u16::MAX };
    let batch = |event: &KvEvent| EventBatch::new(stream, u64::MAX, vec![event.clone()]);
    let plain = wire::encode(&batch(&event)).unwrap().len();
    assert!(plain <= wire::MAX_HEADER_BYTES + wire::MAX_PLAIN_EVENT_BYTES, "{plain}");
    event.extra = vec![("k".repeat(500), "v".repeat(524)); KvEvent::MAX_EXTRA];
    let full = wire::encode(&batch(&event)).unwrap().len();
    assert!(full <= wire::MAX_HEADER_BYTES + wire::max_encoded_len(&event), "{full}");
}

#[test]
fn batches_that_a_receiver_would_refuse_are_not_written() {
    let encode =
        |events: Vec<KvEvent>, next| wire::encode(&EventBatch::new(stream(), next, events)).unwrap_err();
    let many = (0..=EventBatch::MAX_EVENTS as u64).map(|n| KvEvent::new(n, EventKind::Cleared)).collect();
    assert!(matches!(encode(many, 5_000), EncodeError::TooLarge { what: "events", found: 4097, .. }));
    let swapped = vec![crate::support::event(1), crate::support::event(0)];
    assert!(matches!(encode(swapped, 2), EncodeError::Disordered { .. }));
    assert!(matches!(encode(vec![crate::support::event(1)], 1), EncodeError::Disordered { .. }));
    let mut wordy = crate::support::event(7);
    wordy.extra = vec![("k".into(), "v".into()); KvEvent::MAX_EXTRA + 1];
    assert!(matches!(encode(vec![wordy.clone()], 8), EncodeError::Extra { sequence: 7 }));
    wordy.extra = vec![("k".into(), "v".repeat(KvEvent::MAX_EXTRA_BYTES))];
    assert!(matches!(encode(vec![wordy], 8), EncodeError::Extra { sequence: 7 }));
}

/// MessagePack of a batch whose list of events is `events`, already encoded.
fn raw_batch(version: u8, events: &[u8], tail: &[u8], elements: u8) -> Vec<u8> {
    let mut bytes = vec![0x90 | elements, version, 1, 5, 2, 100];
    bytes.extend_from_slice(events);
    bytes.extend_from_slice(tail);
    bytes
}

#[test]
fn what_a_later_revision_appends_survives() {
    // A cleared event with a fourth element (a map), a batch without a time and with an eighth
    // element (a string).
    let events = [0x91, 0x94, 7, 2, 0xC0, 0x81, 0xA1, b'x', 0x93, 1, 2, 3];
    let bytes = raw_batch(1, &events, &[0xC0, 0xA2, b'h', b'i'], 8);
    let batch = wire::decode(&bytes).unwrap();
    assert_eq!((batch.events[0].sequence, batch.events[0].kind), (7, EventKind::Cleared));
    assert_eq!((batch.events[0].unknown.values(), batch.unknown.values()), (1, 1));
    assert_eq!(batch.unknown.bytes(), [0xA2, b'h', b'i']);
    assert_eq!((batch.next_sequence, batch.published_us), (100, None));
    assert_eq!(wire::encode(&batch).unwrap(), bytes, "whoever passes it on loses nothing");
}

#[test]
fn the_time_of_publishing_is_reported_and_may_be_missing() {
    let made = UNIX_EPOCH + Duration::from_micros(1_795_149_476_080_123);
    let batch = golden_batch().published_at(made);
    let bytes = wire::encode(&batch).unwrap();
    let golden = wire::encode(&golden_batch()).unwrap();
    assert_eq!(bytes.len(), golden.len() + 9, "one integer behind what was there before");
    let found = wire::decode(&bytes).unwrap();
    assert_eq!((found.published_us, &found), (Some(1_795_149_476_080_123), &batch));
    assert_eq!(found.age(made + Duration::from_millis(7)), Some(Duration::from_millis(7)));
    assert_eq!(found.age(made - Duration::from_secs(1)), Some(Duration::ZERO), "clocks differ");
    assert_eq!(wire::decode(&golden).unwrap().age(made), None);
    // A time that no calendar has, and something that is no time.
    let latest = EventBatch { published_us: Some(u64::MAX), ..golden_batch() };
    assert!(wire::decode(&wire::encode(&latest).unwrap()).unwrap().age(made).is_some());
    assert!(wire::decode(&raw_batch(1, &[0x90], &[0xA1, b'x'], 7)).is_err());
}

/// A store event of a later revision, without a local hash: the place of the hash is kept.
#[test]
fn unknown_fields_of_a_block_survive_beside_its_own() {
    for local_hash in [None, Some(LocalHash(77))] {
        let mut event = crate::support::event(0);
        if let EventKind::Store(block) = &mut event.kind {
            block.local_hash = local_hash;
        }
        let batch = EventBatch::new(stream(), 1, vec![event]);
        let mut bytes = wire::encode(&batch).unwrap();
        let head = bytes.iter().position(|&byte| byte == 0x9E || byte == 0x9F).unwrap();
        // Sixteen elements and more need a longer head.
        bytes.splice(head..=head, [0xDC, 0, 17]);
        bytes.extend_from_slice(if local_hash.is_some() { &[] } else { &[0xC0] });
        bytes.extend_from_slice(&[0xA1, b'x', 0x92, 1, 0xC0]);
        let found = wire::decode(&bytes).unwrap();
        assert_eq!(found.events[0].kind, batch.events[0].kind);
        assert_eq!(found.events[0].unknown.values(), 2);
        assert_eq!(wire::encode(&found).unwrap(), bytes);
        assert!(bytes.len() <= wire::MAX_HEADER_BYTES + wire::max_encoded_len(&found.events[0]));
    }
}

#[test]
fn too_many_unknown_bytes_are_refused() {
    let tail = |len: usize| {
        let mut tail = vec![0xC0, 0xC5];
        tail.extend((len as u16).to_be_bytes());
        tail.resize(len + 4, 0);
        wire::decode(&raw_batch(1, &[0x90], &tail, 8))
    };
    assert!(tail(Unknown::MAX_BYTES - 3).is_ok());
    assert!(matches!(tail(Unknown::MAX_BYTES - 2), Err(DecodeError::Malformed(_))));
}

#[test]
fn another_version_is_refused_by_number_whatever_follows() {
    let error = wire::decode(&raw_batch(9, &[0xC3], &[], 6)).unwrap_err();
    assert!(matches!(error, DecodeError::Version { found: 9 }), "{error}");
    assert!(error.to_string().contains("version 9"));
}

#[test]
fn invariant_5_hostile_batches_are_errors() {
    let cleared = [0x91, 0x93, 7, 2, 0xC0];
    assert!(wire::decode(&raw_batch(1, &cleared, &[], 6)).is_ok(), "the base of the cases below is valid");
    let mut deep = vec![0x96, 1, 1, 5, 2, 100];
    deep.extend(std::iter::repeat_n(0x91, 100_000));
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", vec![]),
        ("not a list", vec![0xC0]),
        ("too few fields", vec![0x91, 1]),
        ("an event of an unknown kind", raw_batch(1, &[0x91, 0x93, 7, 3, 0xC0], &[], 6)),
        ("a store without its block", raw_batch(1, &[0x91, 0x93, 7, 0, 0xC0], &[], 6)),
        ("a list that claims four billion events", raw_batch(1, &[0xDD, 0xFF, 0xFF, 0xFF, 0xFF], &[], 6)),
        ("a string that claims four billion bytes", raw_batch(1, &[0xDB, 0xFF, 0xFF, 0xFF, 0xFF], &[], 6)),
        ("a number above next_sequence", raw_batch(1, &[0x91, 0x93, 101, 2, 0xC0], &[], 6)),
        ("a number twice", raw_batch(1, &[0x92, 0x93, 7, 2, 0xC0, 0x93, 7, 2, 0xC0], &[], 6)),
        ("bytes behind the batch", raw_batch(1, &cleared, &[0], 6)),
        ("bottomless nesting", deep),
        ("too long", vec![0; wire::MAX_BYTES + 1]),
    ];
    for (what, bytes) in cases {
        assert!(wire::decode(&bytes).is_err(), "{what} was accepted");
    }
}

/// Mutation that makes it fail: no bound in the visitor of lists.
#[test]
fn invariant_5_a_batch_of_too_many_small_events_is_an_error() {
    let count = EventBatch::MAX_EVENTS as u16 + 1;
    let mut events = vec![0xDC];
    events.extend(count.to_be_bytes());
    for n in 0..count {
        events.extend([0x93, 0xCD]);
        events.extend(n.to_be_bytes());
        events.extend([2, 0xC0]);
    }
    let mut bytes = vec![0x96, 1, 1, 5, 2, 0xCD, 0xFF, 0xFF];
    bytes.extend(events);
    assert!(matches!(wire::decode(&bytes), Err(DecodeError::Malformed(_))));
}

#[test]
fn every_truncation_and_bit_flip_of_the_golden_batch_is_read_or_refused_without_panic() {
    let mut refused = 0;
    for len in 0..GOLDEN.len() {
        assert!(wire::decode(&GOLDEN[..len]).is_err(), "{len} of {} bytes were accepted", GOLDEN.len());
    }
    for bit in 0..GOLDEN.len() * 8 {
        let mut bytes = GOLDEN.to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        match wire::decode(&bytes) {
            // A flip inside a value gives another value; that is what checksums of transports are
            // for.
            Ok(batch) => assert!(wire::encode(&batch).is_ok(), "bit {bit}: read, but cannot be written"),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 0);
}

fn any_hash() -> impl Strategy<Value = SequenceHash> {
    any::<[u8; 16]>().prop_map(SequenceHash::from_bytes)
}

prop_compose! {
    fn any_block()(
        namespace in any::<u32>(), group in any::<u16>(), hash in any_hash(), parent in prop::option::of(any_hash()),
        position in any::<u32>(), prefix_hash in any_hash(), block_bytes in any::<u64>(), block_tokens in any::<u32>(),
        local_hash in prop::option::of(any::<u64>().prop_map(LocalHash)), tier in 0usize..4, node in any::<u32>(), volume in prop::option::of(any::<u32>()),
    ) -> EventBlock {
        let identity =
            BlockIdentity { namespace: NamespaceId(namespace), group: GroupId(group), hash, parent, position };
        let location = Location { tier: Tier::ALL[tier], node: NodeId(node), volume: volume.map(VolumeId) };
        EventBlock { identity, prefix_hash, local_hash, block_bytes, block_tokens, location }
    }
}

fn any_kind() -> impl Strategy<Value = EventKind> {
    prop_oneof![
        any_block().prop_map(EventKind::Store),
        any_block().prop_map(EventKind::Remove),
        Just(EventKind::Cleared),
    ]
}

prop_compose! {
    fn any_batch()(
        source in any::<u64>(), epoch in any::<u64>(), shard in any::<u16>(), first in any::<u32>(),
        tail in 0u64..5, published_us in any::<Option<u64>>(),
        events in prop::collection::vec(
            (1u64..100, any_kind(), prop::collection::vec(("[a-z]{0,8}", "\\PC{0,8}"), 0..4)), 0..40),
    ) -> EventBatch {
        let mut sequence = u64::from(first);
        let events: Vec<KvEvent> = events.into_iter().map(|(step, kind, extra)| {
            sequence += step;
            KvEvent { extra, ..KvEvent::new(sequence, kind) }
        }).collect();
        let stream = StreamId { source: SourceId(source), epoch: Epoch(epoch), shard };
        EventBatch { published_us, ..EventBatch::new(stream, sequence + 1 + tail, events) }
    }
}

proptest! {
    #[test]
    fn any_batch_is_read_as_it_was_written(batch in any_batch()) {
        prop_assert_eq!(wire::decode(&wire::encode(&batch).unwrap()).unwrap(), batch);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        // Almost all are refused; what is accepted can be written again.
        prop_assert!(wire::decode(&bytes).map_or(true, |batch| wire::encode(&batch).is_ok()));
    }
}
