//! vLLM's events: captured payloads written back byte for byte, dialects, hostile input, an index
//! kept right.

use kvbm_events::vllm::{
    self, BlockRemoved, BlockStored, Continuity, EngineBatch, EngineEvent, EngineHash, EngineSource, Follower,
};
use kvbm_events::{KvIndex, SourceId};
use kvbm_plan::{GroupId, NodeId, SequenceHash, Tier};
use proptest::prelude::*;
use std::path::Path;

macro_rules! golden {
    ($($name:literal),*) => {
        [$((
            $name,
            include_bytes!(concat!("../golden/vllm/", $name, ".msgpack")).as_slice(),
            include_str!(concat!("../golden/vllm/", $name, ".json")),
        )),*]
    };
}

/// Captured from vLLM 0.32, decoded by another MessagePack library.
const GOLDEN: [(&str, &[u8], &str); 8] = golden!(
    "cpuspec_001",
    "cpuspec_002",
    "cpuspec_006",
    "cpuspec_013",
    "cpuspec_018",
    "gpu_evict_int_000",
    "gpu_evict_int_003",
    "gpu_evict_int_005"
);

#[test]
fn captured_payloads_are_read_and_written_back_byte_for_byte() {
    for (name, bytes, json) in GOLDEN {
        let batch = vllm::decode(bytes).unwrap();
        assert_eq!(vllm::encode(&batch), bytes, "{name}");
        let events: Vec<String> = batch.events.iter().map(ToString::to_string).collect();
        let (timestamp, rank) = (batch.timestamp, batch.data_parallel_rank.unwrap());
        let events = format!("[{timestamp:?},[{}],{rank}]", events.join(","));
        assert_eq!(events, json, "{name}: as JSON");
    }
}

/// The whole capture, where it lies beside the repository.
#[test]
fn every_vector_at_hand_is_written_back_byte_for_byte() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/vectors/vllm_events");
    let Ok(captures) = folder.read_dir() else {
        println!("skipped: the captures are not here; the golden files are a part of them");
        return;
    };
    let mut payloads = 0;
    for capture in captures.map(|capture| capture.unwrap().path()) {
        for file in capture.read_dir().unwrap().map(|file| file.unwrap().path()) {
            if file.extension().is_some_and(|extension| extension == "msgpack") {
                let bytes = std::fs::read(&file).unwrap();
                let batch = vllm::decode(&bytes).unwrap();
                assert_eq!(vllm::encode(&batch), bytes, "{}", file.display());
                payloads += 1;
            }
        }
    }
    assert!(payloads > 0, "the captures hold payloads");
}

/// Arrays with their trailing fields left out, signed hashes: SGLang and older vLLM.
#[test]
fn events_as_arrays_are_read() {
    let mut payload = vec![0x92, 0xCB, 0x3F, 0xF8, 0, 0, 0, 0, 0, 0, 0x93];
    payload.extend([0x96, 0xAB]);
    payload.extend(b"BlockStored");
    payload.extend([0x92, 5, 0xD3, 0x80, 0, 0, 0, 0, 0, 0, 1, 0xC0, 0x94, 1, 2, 3, 4, 2, 0xC0]);
    payload.extend([0x93, 0xAC]);
    payload.extend(b"BlockRemoved");
    payload.extend([0x91, 5, 0xAA]);
    payload.extend(b"CPU_PINNED");
    payload.extend([0x91, 0xB0]);
    payload.extend(b"AllBlocksCleared");
    let batch = vllm::decode(&payload).unwrap();
    assert_eq!((batch.timestamp, batch.data_parallel_rank), (1.5, None));
    let stored = BlockStored {
        block_hashes: vec![EngineHash::Uint(5), EngineHash::Int(i64::MIN + 1)],
        token_ids: vec![1, 2, 3, 4],
        block_size: 2,
        ..BlockStored::default()
    };
    let removed = BlockRemoved {
        block_hashes: vec![EngineHash::Uint(5)],
        medium: Some("CPU_PINNED".into()),
        ..BlockRemoved::default()
    };
    assert_eq!((stored.medium_tier(), removed.medium_tier()), (Some(Tier::G1), Some(Tier::G2)));
    assert_eq!(
        batch.events,
        [EngineEvent::Stored(stored), EngineEvent::Removed(removed), EngineEvent::AllBlocksCleared]
    );
}

#[test]
fn a_payload_as_a_map_is_read() {
    let mut payload = vec![0x83, 0xA2, b't', b's', 0xCB, 0x40, 0, 0, 0, 0, 0, 0, 0, 0xA6];
    payload.extend(b"events");
    payload.extend([0x90, 0xB2]);
    payload.extend(b"data_parallel_rank");
    payload.push(3);
    let batch = vllm::decode(&payload).unwrap();
    assert_eq!(batch, EngineBatch { timestamp: 2.0, events: vec![], data_parallel_rank: Some(3) });
}

#[test]
fn fields_of_a_later_engine_survive() {
    let (_, bytes, _) = GOLDEN[3];
    // One more field at the end of the only event: the head of its map counts eleven, then twelve.
    let mut longer = bytes.to_vec();
    let head = longer.iter().position(|&byte| byte == 0x8B).unwrap();
    longer[head] = 0x8C;
    let rank = longer.pop().unwrap();
    longer.extend([0xA3, b'n', b'e', b'w', 0x92, 1, 0x81, 0xA1, b'x', 0xC3, rank]);
    let batch = vllm::decode(&longer).unwrap();
    let EngineEvent::Stored(stored) = &batch.events[0] else { panic!("a stored event: {batch}") };
    assert_eq!(stored.unknown.len(), 1);
    assert_eq!(stored.unknown[0].1.to_string(), r#"[1,{"x":true}]"#);
    assert_eq!(vllm::encode(&batch), longer);
}

/// Mutation that makes it fail: `read_event` that refuses what it does not know, and with it the
/// message's other events.
#[test]
fn an_event_of_a_later_engine_survives_and_harms_no_other() {
    let mut longer = payload(vec![stored(0..2, "GPU")]);
    let rank = longer.pop().unwrap();
    assert_eq!(longer[10], 0x91, "the head of the list of events");
    longer[10] = 0x92;
    longer.extend([0x82, 0xA4]);
    longer.extend(b"type");
    longer.push(0xAD);
    longer.extend(b"BlockMigrated");
    longer.extend([0xA2, b't', b'o', 0xC4, 2, 7, 8, rank]);
    let batch = vllm::decode(&longer).unwrap();
    assert_eq!(vllm::encode(&batch), longer);
    assert_eq!(batch.events[1].to_string(), r#"{"type":"BlockMigrated","to":{"hex":"0708"}}"#);
    let (mut index, mut follower) = (KvIndex::default(), Follower::new(WORKER));
    follower.receive(&mut index, 0, &longer).unwrap();
    assert_eq!((prefix(&index), follower.stats().unknown_events), (2, 1));
}

#[test]
fn invariant_5_hostile_payloads_are_errors() {
    let mut cut = 0;
    for (_, bytes, _) in GOLDEN {
        for len in 0..bytes.len() {
            assert!(vllm::decode(&bytes[..len]).is_err());
            cut += 1;
        }
        let mut behind = bytes.to_vec();
        behind.push(0);
        assert!(matches!(vllm::decode(&behind), Err(vllm::Error::Trailing { extra: 1 })));
    }
    assert!(cut > 1000);
    let long = vec![0; vllm::MAX_BYTES + 1];
    assert!(matches!(vllm::decode(&long), Err(vllm::Error::TooLong { .. })));
    let claims = [0x93, 0xCB, 0, 0, 0, 0, 0, 0, 0, 0, 0xDD, 0xFF, 0xFF, 0xFF, 0xFF];
    assert!(vllm::decode(&claims).is_err(), "four billion events");
    let error = vllm::decode(&[0x91, 0x01]).unwrap_err().to_string();
    assert!(error.contains("third frame"), "{error}");
}

/// An event may have two bytes, and takes hundreds in memory. Mutation that makes it fail: no bound
/// but the payload's length.
#[test]
fn invariant_5_a_payload_of_too_many_small_events_is_an_error() {
    let of = |count: u32| {
        let mut bytes = vec![0x92, 0xCB, 0, 0, 0, 0, 0, 0, 0, 0, 0xDD];
        bytes.extend(count.to_be_bytes());
        bytes.extend([0x91, 0xA0].repeat(count as usize));
        vllm::decode(&bytes)
    };
    assert_eq!(of(1 << 10).unwrap().events.len(), 1 << 10);
    let error = of((1 << 18) + 1).unwrap_err().to_string();
    assert!(error.contains("at most 262144 events at byte 10"), "{error}");
}

/// A map whose key is a map whose key is a map: as strings of JSON within each other, each level
/// would double the length of the one inside, and cost a stack frame. Mutation that makes it fail:
/// keys of any kind shown as a string of their JSON.
#[test]
fn invariant_5_maps_as_keys_of_maps_are_shown_in_bounded_space() {
    let nested = |depth: usize| vllm::Raw::new([vec![0x81; depth], vec![0xC0; depth + 1]].concat()).unwrap();
    assert_eq!(nested(1).to_string(), r#"{"null":null}"#);
    assert_eq!(nested(2).to_string(), r#"{"81c0c0":null}"#);
    for depth in [40, 100_000] {
        assert!(nested(depth).to_string().len() < 5 * depth, "{depth}");
        let extra_keys = Some(vllm::Raw::new([vec![0x91], nested(depth).bytes().to_vec()].concat()).unwrap());
        let keyed = BlockStored {
            extra_keys,
            block_hashes: hashes(0..1),
            token_ids: vec![1],
            block_size: 1,
            ..BlockStored::default()
        };
        let (mut index, mut follower) = (KvIndex::default(), Follower::new(WORKER).by_tokens(8));
        follower.receive(&mut index, 0, &payload(vec![EngineEvent::Stored(keyed)])).unwrap();
        assert_eq!(index.stats().blocks, 1);
    }
}

const WORKER: EngineSource = EngineSource { source: SourceId(4), node: NodeId(2) };

fn hashes(range: std::ops::Range<u64>) -> Vec<EngineHash> {
    range.map(|n| EngineHash::Uint(n + 1_000)).collect()
}

fn keys(range: std::ops::Range<u64>) -> Vec<SequenceHash> {
    hashes(range).iter().map(EngineHash::index_key).collect()
}

fn stored(range: std::ops::Range<u64>, medium: &str) -> EngineEvent {
    let parent_block_hash = range.start.checked_sub(1).map(|n| EngineHash::Uint(n + 1_000));
    let medium = Some(medium.to_owned());
    EngineEvent::Stored(BlockStored {
        block_hashes: hashes(range),
        parent_block_hash,
        medium,
        ..BlockStored::default()
    })
}

fn removed(range: std::ops::Range<u64>, medium: &str) -> EngineEvent {
    let medium = Some(medium.to_owned());
    EngineEvent::Removed(BlockRemoved { block_hashes: hashes(range), medium, ..BlockRemoved::default() })
}

fn payload(events: Vec<EngineEvent>) -> Vec<u8> {
    vllm::encode(&EngineBatch { timestamp: 0.0, events, data_parallel_rank: Some(0) })
}

fn prefix(index: &KvIndex) -> u32 {
    let mut found = Vec::new();
    index.find(GroupId(0), &keys(0..100), &mut found);
    found.first().map_or(0, |found| found.blocks)
}

#[test]
fn an_index_follows_an_engine() {
    let (mut index, mut follower) = (KvIndex::default(), Follower::new(WORKER));
    let mut hear =
        |index: &mut KvIndex, sequence, events| follower.receive(index, sequence, &payload(events)).unwrap();
    assert_eq!(hear(&mut index, 0, vec![stored(0..8, "GPU"), stored(0..3, "CPU")]), Continuity::Next);
    assert_eq!((prefix(&index), index.blocks(WORKER.source)), (8, [8, 3, 0, 0]));
    assert_eq!(hear(&mut index, 1, vec![stored(8..12, "GPU"), removed(5..6, "GPU")]), Continuity::Next);
    assert_eq!(prefix(&index), 5);
    assert_eq!(index.blocks(WORKER.source), [11, 3, 0, 0]);
    assert_eq!(hear(&mut index, 4, vec![stored(5..6, "STORAGE")]), Continuity::Gap { missing: 2..4 });
    assert_eq!((prefix(&index), index.blocks(WORKER.source)), (12, [11, 3, 1, 0]));
    assert_eq!(hear(&mut index, 5, vec![stored(0..1, "MOON")]), Continuity::Next);
    assert_eq!(
        hear(&mut index, 6, vec![EngineEvent::AllBlocksCleared, stored(0..2, "GPU")]),
        Continuity::Next
    );
    assert_eq!((prefix(&index), index.stats().blocks), (2, 2));
    assert_eq!(hear(&mut index, 0, vec![stored(0..4, "GPU")]), Continuity::Restarted { expected: 7 });
    assert_eq!((prefix(&index), index.stats().blocks), (4, 4));
    assert!(follower.receive(&mut index, 1, b"no").is_err());
    assert_eq!(follower.next_sequence(), 1, "what cannot be read is missing");
    let stats = follower.stats();
    assert_eq!((stats.missing, stats.restarts), (2, 1));
    assert_eq!((stats.unknown_medium, stats.malformed), (1, 1));
}

#[test]
fn hostile_numbers_are_counted_without_overflow() {
    let (mut index, mut follower) = (KvIndex::default(), Follower::new(WORKER));
    for sequence in [u64::MAX - 1, 0, u64::MAX, u64::MAX] {
        follower.receive(&mut index, sequence, &payload(vec![])).unwrap();
    }
    assert_eq!(follower.stats().missing, u64::MAX);
}

#[test]
fn numbers_that_json_does_not_have_become_null() {
    let batch = EngineBatch { timestamp: f64::INFINITY, events: vec![], data_parallel_rank: None };
    assert_eq!(batch.to_string(), r#"{"ts":null,"events":[],"data_parallel_rank":null}"#);
}

fn any_hash() -> impl Strategy<Value = EngineHash> {
    prop_oneof![
        any::<u64>().prop_map(EngineHash::Uint),
        (i64::MIN..0).prop_map(EngineHash::Int),
        prop::collection::vec(any::<u8>(), 0..40).prop_map(EngineHash::Bytes),
    ]
}

prop_compose! {
    fn any_stored()(
        block_hashes in prop::collection::vec(any_hash(), 0..20), parent_block_hash in prop::option::of(any_hash()),
        token_ids in prop::collection::vec(any::<u32>(), 0..40), block_size in any::<u32>(),
        lora_id in prop::option::of(any::<u64>()), medium in prop::option::of("[A-Z]{0,40}"),
        lora_name in prop::option::of("\\PC{0,20}"), group_idx in prop::option::of(any::<u16>()),
        kv_cache_spec_kind in prop::option::of("[a-z_]{0,20}"),
        kv_cache_spec_sliding_window in prop::option::of(any::<u32>()),
    ) -> EngineEvent {
        EngineEvent::Stored(BlockStored {
            block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, group_idx,
            kv_cache_spec_kind, kv_cache_spec_sliding_window, ..BlockStored::default()
        })
    }
}

fn any_event() -> impl Strategy<Value = EngineEvent> {
    let removed = (prop::collection::vec(any_hash(), 0..20), prop::option::of(any::<u16>()));
    prop_oneof![
        any_stored(),
        removed.prop_map(|(block_hashes, group_idx)| {
            EngineEvent::Removed(BlockRemoved { block_hashes, group_idx, ..BlockRemoved::default() })
        }),
        Just(EngineEvent::AllBlocksCleared),
    ]
}

proptest! {
    #[test]
    fn any_batch_is_read_as_it_was_written(
        events in prop::collection::vec(any_event(), 0..8),
        timestamp in 0f64..1e10,
        data_parallel_rank in prop::option::of(any::<u32>()),
    ) {
        let batch = EngineBatch { timestamp, events, data_parallel_rank };
        prop_assert_eq!(vllm::decode(&vllm::encode(&batch)).unwrap(), batch);
    }

    #[test]
    fn flipped_bits_never_panic(which in 0..GOLDEN.len(), bit in any::<usize>()) {
        let mut bytes = GOLDEN[which].1.to_vec();
        let bit = bit % (bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        let (mut index, mut follower) = (KvIndex::default(), Follower::new(WORKER));
        let heard = follower.receive(&mut index, 0, &bytes);
        prop_assert_eq!(heard.is_err(), follower.stats().malformed == 1);
        if let Ok(batch) = vllm::decode(&bytes) {
            prop_assert_eq!(vllm::encode(&vllm::decode(&vllm::encode(&batch)).unwrap()), vllm::encode(&batch));
            prop_assert!(!batch.to_string().is_empty());
        }
    }
}
