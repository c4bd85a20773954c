//! A tiny engine for tests: computes known bytes into G1 and reads them back, through a stream of
//! the device.
#![allow(dead_code, unreachable_pub)] // Each test binary uses its own part.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

#[cfg(feature = "worker")]
mod bytes;
#[cfg(feature = "worker")]
pub mod heads;
#[cfg(feature = "worker")]
pub mod host;
pub mod script;
#[cfg(feature = "worker")]
pub mod store;

#[cfg(feature = "worker")]
#[allow(unused_imports)] // Each test binary uses its own part.
pub use bytes::{
    compute, compute_in, compute_range, holds, holds_in, serve, three_tiers, three_tiers_of, two_tiers,
};
use kvbm::config::{Blocks, Config, LayoutKind, ModelConfig};
use kvbm::{Cached, G1, KvBlockManager, Namespace, Owned, SequenceHash, TokenSequence};
use std::path::Path;
use std::time::{Duration, Instant};

/// 2 layers x 2 x 16 tokens x 2 heads x 32 x bf16: 8 KiB a block.
pub fn model() -> ModelConfig {
    ModelConfig { num_layers: 2, num_kv_heads: 2, head_dim: 32, ..ModelConfig::default() }
}

/// A window of two blocks, full attention, state: blocks of three lengths.
pub const GROUPS: &str = "window=32 layers=2 heads=2 head_dim=8, full layers=3 heads=2 head_dim=8, \
                          state layers=1 bytes=1001";

/// A model with these cache groups.
pub fn model_of(groups: &str) -> ModelConfig {
    let mut text = Config::default();
    text.set("model.groups", groups).unwrap();
    ModelConfig { page_size: 16, ..text.model }
}

/// A model whose layers are alike, and one with three cache groups: what a test says of the first
/// goes for the second.
pub fn models() -> [ModelConfig; 2] {
    [model(), model_of(GROUPS)]
}

/// Blocks of all cache groups that a request of so many blocks keeps.
pub fn kept(model: &ModelConfig, blocks: usize) -> usize {
    let groups = model.cache_groups();
    groups.iter().map(|group| group.blocks_needed(model.page_size).unwrap_or(blocks).min(blocks)).sum()
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

/// A manager of these sizes that moves no bytes.
pub fn books(tiers: [u32; 3], configure: impl FnOnce(&mut Config)) -> KvBlockManager<Owned> {
    books_of(model(), tiers, configure)
}

/// The same for another model.
pub fn books_of(
    model: ModelConfig,
    [g1, g2, g3]: [u32; 3],
    configure: impl FnOnce(&mut Config),
) -> KvBlockManager<Owned> {
    let mut builder = KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2));
    if g3 > 0 {
        builder = builder.disk("never-opened", Blocks(g3));
    }
    builder
        .configure(|config| {
            unlimited(config);
            if config.model.has_groups() {
                config.device.layout = LayoutKind::FullyContiguous;
            }
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
    config.volumes.queue_share = 1.0;
}

/// Registers blocks of `tokens` from block `first` on without computing anything.
///
/// The decision what to offload holds registered blocks for a moment. Where they are all of G1, the
/// allocation waits for it.
pub fn fill(manager: &KvBlockManager<Owned>, tokens: &TokenSequence, first: usize) -> Cached<G1> {
    let count = tokens.num_blocks() - first;
    let fresh = manager.allocate(count).unwrap_or_else(|_| {
        manager.wait_offloads(Instant::now() + Duration::from_secs(30));
        manager.allocate(count).unwrap()
    });
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
