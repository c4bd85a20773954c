//! A tiny engine for tests: computes known bytes into G1 and reads them back, through a stream of the device.
#![allow(dead_code, unreachable_pub)] // Each test binary uses its own part.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

pub mod heads;
pub mod script;
pub mod store;

use kvbm::config::{Blocks, Config, ModelConfig};
use kvbm::device::{CopyBatch, Direction, HostBuffer};
use kvbm::{BlockId, Cached, G1, KvBlockManager, LocalWorker, Namespace, Owned, SequenceHash, TokenSequence};
use std::path::Path;
use std::time::{Duration, Instant};

/// 2 layers x 2 x 16 tokens x 2 heads x 32 x bf16: 8 KiB a block.
pub fn model() -> ModelConfig {
    ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() }
}

pub fn namespace() -> Namespace {
    Namespace::new("test-model").weights("1")
}

/// The slot file of rank 0 of 1 in the only namespace of `dir`.
pub fn slot_file(dir: &Path) -> std::path::PathBuf {
    let namespaces: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(namespaces.len(), 1);
    namespaces[0].join("rank-0-of-1/slots.kvbm")
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// A manager with G1 and G2 of these sizes. It evicts by recency, so that a test can say which block goes.
pub fn two_tiers(g1: u32, g2: u32) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2))
        .configure(|config| {
            config.offload.g1_g2.queue_share = 1.0;
            config.policy.eviction = kvbm::config::EvictionPolicy::LruLeaf;
        })
        .build()
        .unwrap()
}

/// A manager with three tiers, whose disk takes everything at once.
pub fn three_tiers(
    [g1, g2, g3]: [u32; 3],
    dir: &Path,
    configure: impl FnOnce(&mut Config),
) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2))
        .disk(dir, Blocks(g3))
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            configure(config);
        })
        .build()
        .unwrap()
}

/// A manager of these sizes that moves no bytes.
pub fn books([g1, g2, g3]: [u32; 3], configure: impl FnOnce(&mut Config)) -> KvBlockManager<Owned> {
    let mut builder = KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2));
    if g3 > 0 {
        builder = builder.disk("never-opened", Blocks(g3));
    }
    builder
        .configure(|config| {
            unlimited(config);
            configure(config);
        })
        .build_metadata_only()
        .unwrap()
}

/// No limit of queues or wear, and nothing that starts by itself but write-through from G1.
pub fn unlimited(config: &mut Config) {
    config.disk.drive_writes_per_day = 0.0;
    for edge in [&mut config.offload.g1_g2, &mut config.offload.g2_g3] {
        edge.queue_share = 1.0;
        edge.watermark = 1.0;
        edge.idle_iterations = 0;
        edge.ahead_share = 0.0;
    }
}

/// Registers blocks of `tokens` from block `first` on without computing anything.
pub fn fill(manager: &KvBlockManager<Owned>, tokens: &TokenSequence, first: usize) -> Cached<G1> {
    let fresh = manager.allocate(tokens.num_blocks() - first).unwrap();
    let (done, rest) = manager.commit(fresh, tokens, first).unwrap();
    assert!(rest.is_empty());
    manager.register(done).unwrap()
}

/// A sequence of `blocks` blocks that begins with `start`.
pub fn tokens(manager: &KvBlockManager<Owned>, start: u32, blocks: u32) -> TokenSequence {
    let prompt: Vec<u32> =
        (0..blocks * 16).map(|token| token.wrapping_add(start.wrapping_mul(1_000_000))).collect();
    manager.sequence(&prompt, b"").unwrap()
}

/// The bytes that the engine computes for a block on a rank.
pub fn expected(hash: SequenceHash, rank: u16, len: usize) -> Vec<u8> {
    let mut state = u64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap()) ^ (u64::from(rank) << 32);
    let next = |state: &mut u64| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 56) as u8
    };
    (0..len).map(|_| next(&mut state)).collect()
}

/// Copies between a host buffer and a block's fragments in G1, and waits.
fn copy(worker: &LocalWorker, block: BlockId, buffer: &HostBuffer, direction: Direction) {
    let g1 = worker.g1();
    let stream = worker.device().create_stream("test-engine").unwrap();
    let mut batch = CopyBatch::new(direction);
    let mut at = 0;
    for fragment in g1.block_fragments(block.0).unwrap() {
        let kvbm::storage::RegionBytes::Device(memory) = g1.region(fragment.region).unwrap() else {
            panic!("G1 is device memory")
        };
        let pushed = match direction {
            Direction::HostToDevice => {
                batch.push_host_to_device(buffer.region(), at, memory, fragment.offset, fragment.len)
            }
            _ => batch.push_device_to_host(memory, fragment.offset, buffer.region(), at, fragment.len),
        };
        pushed.unwrap();
        at += fragment.len;
    }
    stream.copy(batch).unwrap().wait(soon()).unwrap();
}

/// Computes a block's bytes on every rank.
pub fn compute<G>(manager: &KvBlockManager<G>, block: BlockId, hash: SequenceHash) {
    for worker in manager.workers().iter() {
        let len = worker.g1().bytes_per_block() as usize;
        let buffer = HostBuffer::from_bytes(&expected(hash, worker.rank().0, len));
        copy(worker, block, &buffer, Direction::HostToDevice);
    }
}

/// Whether a block of G1 holds what `compute` wrote for `hash`, on every rank.
pub fn holds<G>(manager: &KvBlockManager<G>, block: BlockId, hash: SequenceHash) -> bool {
    manager.workers().iter().all(|worker| {
        let len = worker.g1().bytes_per_block() as usize;
        let buffer = HostBuffer::zeroed(len);
        copy(worker, block, &buffer, Direction::DeviceToHost);
        buffer.to_vec() == expected(hash, worker.rank().0, len)
    })
}

/// Serves a request as an engine does: onboard what is cached, compute and register the rest. Blocks that were cached.
pub fn serve(manager: &KvBlockManager<Owned>, tokens: &TokenSequence) -> usize {
    let prefix = manager.match_prefix(tokens);
    let cached = manager.onboard(prefix).wait().unwrap();
    let hits = cached.len();
    for (&block, &hash) in cached.block_ids().iter().zip(tokens.hashes()) {
        assert!(holds(manager, block, hash), "block {block} of a hit holds other bytes");
    }
    let fresh = manager.allocate(tokens.num_blocks() - hits).unwrap();
    for (&block, &hash) in fresh.block_ids().iter().zip(&tokens.hashes()[hits..]) {
        compute(manager, block, hash);
    }
    if !fresh.is_empty() {
        let (done, rest) = manager.commit(fresh, tokens, hits).unwrap();
        assert!(rest.is_empty());
        drop(manager.register(done).unwrap());
    }
    hits
}
