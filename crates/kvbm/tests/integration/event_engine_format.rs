//! A router that follows engines follows a manager: events in vLLM's format over `ZeroMQ`.
#![cfg(feature = "zmq")]

use crate::ports::free_port;
use crate::support::{books, fill, model, namespace, tokens, unlimited};
use kvbm::config::{Blocks, Secret};
use kvbm::events_plane::vllm::{self, EngineEvent, EngineHash, EngineSource, Follower};
use kvbm::events_plane::zmq::{MessageReceiver, ZmqAddress, ZmqConfig, ZmqMessage, ZmqTransport};
use kvbm::events_plane::{KvIndex, SourceId};
use kvbm::plan::NodeId;
use kvbm::{BlockId, KvBlockManager, Owned, SequenceHash, Tier};
use std::collections::BTreeSet;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

/// A manager that speaks as an engine does, and a router's end.
fn pair(ring: u32) -> (KvBlockManager<Owned>, ZmqTransport, MessageReceiver) {
    received_by_a_router(|url| {
        books([16, 32, 0], |config| {
            config.events.url = Some(Secret::new(url));
            config.events.ring_capacity = ring;
        })
    })
}

/// A manager that publishes at an address, and a router's end.
fn received_by_a_router<G>(
    build: impl FnOnce(String) -> KvBlockManager<G>,
) -> (KvBlockManager<G>, ZmqTransport, MessageReceiver) {
    let (port, replay) = (free_port(), free_port());
    let manager = build(format!("zmq+tcp://127.0.0.1:{port}?replay={replay}&format=vllm&topic="));
    let address = ZmqAddress::new(format!("tcp://127.0.0.1:{port}"));
    let address = address.with_replay(format!("tcp://127.0.0.1:{replay}"));
    let config = ZmqConfig { topic: String::new(), from_start: true, ..ZmqConfig::default() };
    let router = ZmqTransport::connect(config, &[address]).unwrap();
    let messages = router.messages().unwrap();
    (manager, router, messages)
}

fn key(hash: &SequenceHash) -> SequenceHash {
    EngineHash::Uint(u64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap())).index_key()
}

fn held<G>(manager: &KvBlockManager<G>) -> BTreeSet<(Tier, SequenceHash)> {
    let blocks = manager.events().snapshot().blocks;
    blocks.iter().map(|block| (block.location.tier, key(&block.identity.hash))).collect()
}

fn published(index: &KvIndex) -> BTreeSet<(Tier, SequenceHash)> {
    index.holdings().map(|(place, _, hash)| (place.location.tier, hash)).collect()
}

/// Receives until the index is what the manager holds.
fn receive_all<G>(manager: &KvBlockManager<G>, messages: &mut MessageReceiver) -> Vec<ZmqMessage> {
    assert!(manager.events().flush(PATIENCE));
    let (mut index, mut received) = (KvIndex::default(), Vec::new());
    let mut follower = Follower::new(EngineSource { source: SourceId(1), node: NodeId(0) });
    while received.is_empty() || published(&index) != held(manager) {
        let message = messages.next(PATIENCE).unwrap();
        let message = message.unwrap_or_else(|| panic!("{:?} of {:?}", published(&index), held(manager)));
        follower.receive(&mut index, message.sequence, &message.payload).unwrap();
        received.push(message);
    }
    assert_eq!((follower.stats().missing, follower.stats().unknown_medium), (0, 0));
    received
}

#[test]
fn a_router_learns_chains_tokens_and_media() {
    let (manager, _router, mut messages) = pair(1 << 16);
    let sequence = tokens(&manager, 1, 3);
    drop(fill(&manager, &sequence, 0));
    for start in 2..9 {
        drop(fill(&manager, &tokens(&manager, start, 4), 0));
    }
    assert!(manager.wait_offloads(crate::support::soon()));
    let received = receive_all(&manager, &mut messages);
    assert_eq!(received[0].sequence, 0);
    let events: Vec<EngineEvent> =
        received.iter().flat_map(|message| vllm::decode(&message.payload).unwrap().events).collect();
    let EngineEvent::Stored(stored) = &events[0] else { panic!("{:?}", events[0]) };
    assert_eq!((stored.block_hashes.len(), stored.block_size), (3, 16), "blocks of a chain together");
    assert_eq!((&stored.parent_block_hash, stored.medium.as_deref()), (&None, Some("GPU")));
    let all: Vec<u32> = (0..3).flat_map(|block| sequence.block_tokens(block).unwrap().to_vec()).collect();
    assert_eq!(stored.token_ids, all);
    let on_host = |event: &&EngineEvent| matches!(event, EngineEvent::Stored(stored) if stored.medium.as_deref() == Some("CPU"));
    let on_host: Vec<_> = events.iter().filter(on_host).collect();
    assert!(
        !on_host.is_empty() && on_host.iter().all(|event| {
            matches!(event, EngineEvent::Stored(stored) if stored.token_ids.len() == 16 * stored.block_hashes.len())
        })
    );
    assert!(events.iter().any(|event| matches!(event, EngineEvent::Removed(_))), "G1 holds four chains");
    assert!(!events.contains(&EngineEvent::AllBlocksCleared), "nothing was lost");
    assert_eq!(manager.events().status().without_tokens, 0);
}

/// `AllBlocksCleared` would take along what the engine has told of its own memory.
#[test]
fn after_a_loss_the_difference_is_published_block_by_block() {
    let (manager, _router, mut messages) = pair(8);
    drop(fill(&manager, &tokens(&manager, 1000, 2), 0));
    assert!(manager.wait_offloads(crate::support::soon()));
    assert!(manager.events().flush(PATIENCE));
    assert_eq!(manager.events().status().lost, 0);
    // More events at once than the ring keeps, again and again: some are lost.
    for round in 0..200 {
        drop(fill(&manager, &tokens(&manager, round, 8), 0));
        if manager.events().status().lost > 0 && round > 20 {
            break;
        }
    }
    assert!(manager.wait_offloads(crate::support::soon()));
    assert!(manager.events().status().lost > 0);
    let received = receive_all(&manager, &mut messages);
    let events = received.iter().flat_map(|message| vllm::decode(&message.payload).unwrap().events);
    let events: Vec<EngineEvent> = events.collect();
    assert!(!events.contains(&EngineEvent::AllBlocksCleared));
    assert!(
        events.iter().any(|event| matches!(event, EngineEvent::Removed(_))),
        "G1 holds two chains of the last"
    );
}

#[test]
fn blocks_that_were_hashed_elsewhere_have_no_tokens_and_that_is_counted() {
    let (manager, _router, mut messages) = pair(1 << 16);
    let hashes: Vec<SequenceHash> = (1..4).map(|byte| SequenceHash::from_bytes([byte; 16])).collect();
    let fresh = manager.allocate(3).unwrap();
    let (done, _) = manager.commit(fresh, kvbm::BlockChain::of_hashes(&hashes), 0).unwrap();
    drop(manager.register(done).unwrap());
    assert!(manager.wait_offloads(crate::support::soon()));
    receive_all(&manager, &mut messages);
    assert_eq!(manager.events().status().without_tokens, 6, "three blocks on two tiers");
}

/// The engine tells of its own memory itself; of its blocks on our tiers we tell with their tokens.
#[test]
fn memory_of_the_engine_causes_no_events_and_its_blocks_come_with_their_tokens() {
    let (manager, _router, mut messages) = received_by_a_router(|url| {
        let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
        let builder = builder.engine_blocks(8).host(Blocks(16)).configure(|config| {
            unlimited(config);
            config.events.url = Some(Secret::new(url));
        });
        builder.build_metadata_only().unwrap()
    });
    let prompt: Vec<u32> = (0..80).collect();
    let sequence = manager.sequence(&prompt, b"").unwrap();
    manager.offload(&[2, 7].map(BlockId), &sequence, 0, None).unwrap();
    manager.offload(&[0, 1, 5].map(BlockId), &sequence, 2, None).unwrap();
    assert!(manager.wait_offloads(crate::support::soon()));
    let received = receive_all(&manager, &mut messages);
    let (mut on_host, mut told) = (0, Vec::new());
    for event in received.iter().flat_map(|message| vllm::decode(&message.payload).unwrap().events) {
        let EngineEvent::Stored(stored) = event else { panic!("{event:?}") };
        assert_eq!(stored.medium.as_deref(), Some("CPU"));
        on_host += stored.block_hashes.len();
        told.extend(stored.token_ids);
    }
    told.sort_unstable();
    assert_eq!((on_host, told), (5, prompt));
    let blocks = manager.events().snapshot().blocks;
    assert!(blocks.iter().all(|block| block.local_hash.is_some()));
    assert_eq!(manager.events().status().without_tokens, 0);
}
