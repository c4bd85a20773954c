//! An engine that hashes for itself registers its blocks, and routers hear of them as if it had
//! spoken: byte for byte what vLLM published of the same blocks.
#![cfg(feature = "zmq")]

use crate::ports::free_port;
use crate::support::{namespace, soon, unlimited};
use kvbm::config::{Blocks, ModelConfig, Secret};
use kvbm::events_plane::vllm::{
    self, Adapter, BlockStored, EngineBatch, EngineBlock, EngineEvent, EngineHash, Raw,
};
use kvbm::events_plane::zmq::{MessageReceiver, ZmqAddress, ZmqConfig, ZmqTransport};
use kvbm::{BlockChain, BlockId, DescribeError, ExternalSequence, KvBlockManager, Owned, SequenceHash, Tier};
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

/// The model of the captures.
fn model() -> ModelConfig {
    ModelConfig { num_layers: 1, num_kv_heads: 1, head_dim: 16, page_size: 32, ..ModelConfig::default() }
}

/// A manager that publishes at the URL that it is given, and a router's end.
fn heard<G>(
    extra: &str,
    build: impl FnOnce(&str) -> KvBlockManager<G>,
) -> (KvBlockManager<G>, ZmqTransport, MessageReceiver) {
    let (port, replay) = (free_port(), free_port());
    let manager = build(&format!("zmq+tcp://127.0.0.1:{port}?replay={replay}&format=vllm{extra}"));
    let address = ZmqAddress::new(format!("tcp://127.0.0.1:{port}"));
    let address = address.with_replay(format!("tcp://127.0.0.1:{replay}"));
    let config = ZmqConfig { topic: String::new(), from_start: true, ..ZmqConfig::default() };
    let router = ZmqTransport::connect(config, &[address]).unwrap();
    let messages = router.messages().unwrap();
    (manager, router, messages)
}

/// G1 of kvbm's own with `blocks` blocks, and no other tier.
fn owned(blocks: u32, extra: &str) -> (KvBlockManager<Owned>, ZmqTransport, MessageReceiver) {
    heard(extra, |url| {
        let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
        let builder = builder.device(Blocks(blocks)).configure(|config| {
            config.events.url = Some(Secret::new(url));
            config.policy.eviction = kvbm::config::EvictionPolicy::LruLeaf;
        });
        builder.build_metadata_only().unwrap()
    })
}

/// The payloads of what happened since the last call.
fn told<G>(manager: &KvBlockManager<G>, messages: &mut MessageReceiver, count: usize) -> Vec<Vec<u8>> {
    assert!(manager.events().flush(PATIENCE));
    (0..count).map(|_| messages.next(PATIENCE).unwrap().unwrap().payload.to_vec()).collect()
}

/// As another clock would have stamped it.
fn at(timestamp: f64, payload: &[u8]) -> Vec<u8> {
    vllm::encode(&EngineBatch { timestamp, ..vllm::decode(payload).unwrap() })
}

/// What the engine knows of the blocks of an event.
fn known(stored: &BlockStored, extra_keys: Option<&Raw>) -> Vec<EngineBlock> {
    let tokens = stored.token_ids.chunks(stored.block_size as usize);
    let one = |(hash, tokens): (&EngineHash, &[u32])| EngineBlock {
        hash: Some(hash.clone()),
        token_ids: tokens.into(),
        extra_keys: extra_keys.cloned(),
        adapter: None,
    };
    stored.block_hashes.iter().zip(tokens).map(one).collect()
}

fn external<G>(manager: &KvBlockManager<G>, hashes: &[EngineHash]) -> ExternalSequence {
    let bytes = hashes.iter().map(|hash| match hash {
        EngineHash::Uint(number) => number.to_le_bytes().to_vec(),
        other => panic!("{other:?}"),
    });
    manager.external_sequence(bytes)
}

fn register<'a>(manager: &KvBlockManager<Owned>, chain: impl Into<BlockChain<'a>>, first: usize) {
    let chain = chain.into();
    let fresh = manager.allocate(chain.len() - first).unwrap();
    let (done, _) = manager.commit(fresh, chain, first).unwrap();
    drop(manager.register(done).unwrap());
}

fn only_stored(captured: &EngineBatch) -> &BlockStored {
    let mut stored = captured.events.iter().filter_map(|event| match event {
        EngineEvent::Stored(stored) => Some(stored),
        _ => None,
    });
    let first = stored.next().unwrap();
    assert!(stored.next().is_none());
    first
}

const CHAIN_OF_4: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/vllm/gpu_evict_int_000.msgpack");
const CHAIN_OF_8: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/vllm/cpuspec_018.msgpack");
const ITS_LAST_BLOCK: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/vllm/cpuspec_013.msgpack");
const SALTED: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/vllm/gpu_evict_int_005.msgpack");
const ON_HOST: &[u8] = include_bytes!("../../../kvbm-events/tests/golden/vllm/cpuspec_006.msgpack");

/// The blocks are known to kvbm by the engine's hashes, or by their tokens: that is its own affair.
///
/// Mutation that makes it fail: `commit` that notes the tokens over what was described.
#[test]
fn stored_blocks_are_published_byte_for_byte_as_vllm_does() {
    for captured in [CHAIN_OF_4, CHAIN_OF_8] {
        for by_tokens in [false, true] {
            let (manager, _router, mut messages) = owned(16, "");
            let batch = vllm::decode(captured).unwrap();
            let stored = only_stored(&batch);
            if by_tokens {
                let sequence = manager.sequence(&stored.token_ids, b"").unwrap();
                let named = known(stored, None).into_iter();
                // The tokens are in the sequence already.
                let named = named.map(|block| EngineBlock { token_ids: [].into(), ..block });
                manager.describe(&sequence, 0, named).unwrap();
                register(&manager, &sequence, 0);
            } else {
                let sequence = external(&manager, &stored.block_hashes);
                manager.describe(&sequence, 0, known(stored, None)).unwrap();
                register(&manager, &sequence, 0);
            }
            let payload = told(&manager, &mut messages, 1).remove(0);
            assert_eq!(at(batch.timestamp, &payload), captured, "{}", vllm::decode(&payload).unwrap());
            let status = manager.events().status();
            assert_eq!((status.without_tokens, status.without_hash), (0, 0));
        }
    }
}

#[test]
fn a_block_behind_known_ones_names_its_parent_and_salts_travel_along() {
    let (manager, _router, mut messages) = owned(16, "");
    // The chain's first seven blocks, then the eighth alone.
    let (batch, last) = (vllm::decode(CHAIN_OF_8).unwrap(), vllm::decode(ITS_LAST_BLOCK).unwrap());
    let (chain, last_stored) = (only_stored(&batch), only_stored(&last));
    let mut hashes = chain.block_hashes[..7].to_vec();
    // The captures are of two runs whose chains differ: the parent is named as it was then.
    hashes[6] = last_stored.parent_block_hash.clone().unwrap();
    hashes.extend(last_stored.block_hashes.clone());
    let sequence = external(&manager, &hashes);
    let mut blocks = known(chain, None);
    blocks[6].hash = Some(hashes[6].clone());
    manager.describe(&sequence, 0, blocks.into_iter().take(7)).unwrap();
    manager.describe(&sequence, 7, known(last_stored, None)).unwrap();
    register(&manager, sequence.chain().slice(0..7), 0);
    told(&manager, &mut messages, 1);
    register(&manager, &sequence, 7);
    let payload = told(&manager, &mut messages, 1).remove(0);
    assert_eq!(at(last.timestamp, &payload), ITS_LAST_BLOCK, "{}", vllm::decode(&payload).unwrap());

    let batch = vllm::decode(SALTED).unwrap();
    let stored = only_stored(&batch);
    let salt = [&[0x91, 0xA8][..], b"tenant-a"].concat();
    let sequence = external(&manager, &stored.block_hashes);
    manager.describe(&sequence, 0, known(stored, Some(&Raw::new(salt).unwrap()))).unwrap();
    register(&manager, &sequence, 0);
    let payload = told(&manager, &mut messages, 1).remove(0);
    assert_eq!(vllm::decode(&payload).unwrap().events, [EngineEvent::Stored(stored.clone())]);
}

/// The engine owns G1 and tells of it itself; what is copied to host memory is told under the
/// engine's names.
#[test]
fn what_an_engine_offloads_is_published_on_its_medium_and_never_its_own_memory() {
    let (manager, _router, mut messages) = heard("&topic=", |url| {
        let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
        let builder = builder.engine_blocks(8).host(Blocks(16)).configure(|config| {
            unlimited(config);
            config.events.url = Some(Secret::new(url));
        });
        builder.build_metadata_only().unwrap()
    });
    let batch = vllm::decode(ON_HOST).unwrap();
    let stored = only_stored(&batch);
    assert_eq!(stored.medium.as_deref(), Some("CPU"));
    let sequence = external(&manager, &stored.block_hashes);
    manager.describe(&sequence, 0, known(stored, None)).unwrap();
    manager.offload(&[BlockId(3)], &sequence, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    let payload = told(&manager, &mut messages, 1).remove(0);
    let alone = EngineBatch { events: vec![EngineEvent::Stored(stored.clone())], ..batch.clone() };
    assert_eq!(at(batch.timestamp, &payload), vllm::encode(&alone));
}

/// Mutation that makes it fail: `Publishing` that writes `AllBlocksCleared` for what a clearing
/// leaves.
#[test]
fn clearing_a_tier_is_published_block_by_block_and_other_tiers_stay() {
    let (manager, _router, mut messages) = heard("&rank=3&kind=mla_attention", |url| {
        let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
        let builder = builder.device(Blocks(8)).host(Blocks(16)).configure(|config| {
            unlimited(config);
            config.events.url = Some(Secret::new(url));
        });
        builder.build_metadata_only().unwrap()
    });
    let batch = vllm::decode(CHAIN_OF_4).unwrap();
    let stored = only_stored(&batch);
    let sequence = external(&manager, &stored.block_hashes);
    manager.describe(&sequence, 0, known(stored, None)).unwrap();
    register(&manager, &sequence, 0);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1).unwrap(), 4);
    assert!(manager.events().flush(PATIENCE));
    let mut gone = Vec::new();
    while gone.len() < 4 {
        let batch = vllm::decode(&messages.next(PATIENCE).unwrap().unwrap().payload).unwrap();
        assert_eq!(batch.data_parallel_rank, Some(3));
        for event in batch.events {
            match event {
                EngineEvent::Removed(removed) => {
                    assert_eq!((removed.medium.as_deref(), removed.group_idx), (Some("GPU"), Some(0)));
                    gone.extend(removed.block_hashes);
                }
                EngineEvent::Stored(stored) => {
                    assert_eq!(stored.kv_cache_spec_kind.unwrap(), "mla_attention");
                }
                other => panic!("the engine's own memory was not cleared: {other}"),
            }
        }
    }
    gone.sort_by_key(|hash| stored.block_hashes.iter().position(|known| known == hash));
    assert_eq!(gone, stored.block_hashes, "all of them, under the engine's names");
    assert!(messages.next(Duration::from_millis(300)).unwrap().is_none(), "G2 keeps them");
}

#[test]
fn what_nobody_described_is_named_by_our_hash_and_counted() {
    let (manager, _router, mut messages) = owned(16, "");
    let prompt: Vec<u32> = (0..64).collect();
    let sequence = manager.sequence(&prompt, b"").unwrap();
    let adapter = Some(Arc::new(Adapter { id: Some(2), name: Some("poet".into()) }));
    let named = EngineBlock { hash: Some(EngineHash::Bytes(vec![9; 32])), adapter, ..EngineBlock::default() };
    manager.describe(&sequence, 1, [named.clone()]).unwrap();
    register(&manager, &sequence, 0);
    let payload = told(&manager, &mut messages, 1).remove(0);
    let batch = vllm::decode(&payload).unwrap();
    let [EngineEvent::Stored(first), EngineEvent::Stored(second)] = &batch.events[..] else {
        panic!("{batch}")
    };
    let ours =
        |hash: &SequenceHash| EngineHash::Uint(u64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap()));
    assert_eq!(first.block_hashes, [ours(&sequence.hashes()[0])]);
    assert_eq!(
        (&second.block_hashes[..], &second.parent_block_hash),
        (&[named.hash.unwrap()][..], &Some(ours(&sequence.hashes()[0])))
    );
    assert_eq!(
        (second.lora_id, second.lora_name.as_deref(), &second.token_ids[..]),
        (Some(2), Some("poet"), &prompt[32..])
    );
    let status = manager.events().status();
    assert_eq!((status.without_tokens, status.without_hash), (0, 1));
    assert!(manager.metrics().encode().contains("kvbm_events_without_hash_total 1"));
}

#[test]
fn descriptions_that_make_no_sense_are_refused_whole() {
    let (manager, _router, _messages) = owned(16, "");
    let sequence = manager.sequence(&(0..64).collect::<Vec<_>>(), b"").unwrap();
    let block = EngineBlock::default;
    let tokens = |count: usize| EngineBlock { token_ids: vec![1; count].into(), ..block() };
    let hash = |bytes: usize| EngineBlock { hash: Some(EngineHash::Bytes(vec![1; bytes])), ..block() };
    let name = |bytes: usize| {
        let name = Some("x".repeat(bytes));
        EngineBlock { adapter: Some(Arc::new(Adapter { id: None, name })), ..block() }
    };
    for (first, blocks, part) in [
        (1, vec![block(), block()], "2 blocks from block 1 on are described, and the chain has 2"),
        (usize::MAX, vec![block()], "the chain has 2"),
        (0, vec![tokens(32), tokens(31)], "block 1 is described with 31 tokens: give all 32"),
        (0, vec![hash(65)], "the hash of block 0 has 65 bytes: at most 64"),
        (0, vec![name(5000)], "the adapter's name of block 0 has 5000 bytes"),
    ] {
        let error: DescribeError = manager.describe(&sequence, first, blocks).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    }
    assert!(manager.describe(&sequence, 2, []).is_ok());
    assert!(Raw::new(vec![0x92, 1]).is_err() && Raw::new(vec![1, 2]).is_err());
}
