//! Managers with workers of this process: bytes are computed, copied and compared.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use super::{expected, model, namespace, soon, unlimited};
use kvbm::config::{Blocks, Config, LayoutKind, ModelConfig};
use kvbm::device::{CopyBatch, Direction, HostBuffer};
use kvbm::storage::RegionBytes;
use kvbm::{BlockId, GroupId, KvBlockManager, Owned, SequenceHash, TokenSequence, Worker};
use std::ops::Range;
use std::path::Path;

/// A manager with G1 and G2 of these sizes. It evicts by recency, so that a test can say which
/// block goes.
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
    three_tiers_of(model(), [g1, g2, g3], dir, configure)
}

/// The same for another model.
pub fn three_tiers_of(
    model: ModelConfig,
    [g1, g2, g3]: [u32; 3],
    dir: &Path,
    configure: impl FnOnce(&mut Config),
) -> KvBlockManager<Owned> {
    KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2))
        .disk(dir, Blocks(g3))
        .configure(|config| {
            unlimited(config);
            if config.model.has_groups() {
                config.device.layout = LayoutKind::FullyContiguous;
            }
            config.offload.g2_g3.write_through = true;
            configure(config);
        })
        .build()
        .unwrap()
}

/// Copies between a host buffer and a block's fragments in G1, and waits.
fn copy(worker: &Worker, group: GroupId, block: BlockId, buffer: &HostBuffer, direction: Direction) {
    let g1 = worker.g1_of(group).expect("a group of the model");
    let mut batch = CopyBatch::new(direction);
    let mut at = 0;
    for fragment in g1.block_fragments(block.0).unwrap() {
        let (offset, len) = (fragment.offset, fragment.len);
        match (g1.region(fragment.region).unwrap(), direction) {
            (RegionBytes::Host(memory), Direction::HostToDevice) => {
                // SAFETY: the engine of a test touches a block only while no transfer does.
                unsafe { memory.copy_from(offset, buffer, at, len) }.unwrap();
            }
            // SAFETY: the engine of a test touches a block only while no transfer does.
            (RegionBytes::Host(memory), _) => unsafe { buffer.copy_from(at, memory, offset, len) }.unwrap(),
            (RegionBytes::Device(memory), Direction::HostToDevice) => {
                batch.push_host_to_device(buffer.region(), at, memory, offset, len).unwrap();
            }
            (RegionBytes::Device(memory), _) => {
                batch.push_device_to_host(memory, offset, buffer.region(), at, len).unwrap();
            }
            _ => panic!("G1 is memory"),
        }
        at += len;
    }
    if let Some(device) = worker.device().filter(|_| !batch.is_empty()) {
        device.create_stream("test-engine").unwrap().copy(batch).unwrap().wait(soon()).unwrap();
    }
}

/// The bytes of a group's block on one rank. Ranks with the same heads have the same.
fn group_bytes(worker: &Worker, group: GroupId, hash: SequenceHash, config: &Config) -> Vec<u8> {
    let len = worker.g1_of(group).expect("a group of the model").bytes_per_block() as usize;
    expected(hash, config.writer_of(worker.rank()).0 + 100 * group.0, len)
}

/// Computes a block's bytes on every rank.
pub fn compute<G>(manager: &KvBlockManager<G>, block: BlockId, hash: SequenceHash) {
    compute_in(manager, GroupId(0), block, hash);
}

/// The same of a block of a cache group.
pub fn compute_in<G>(manager: &KvBlockManager<G>, group: GroupId, block: BlockId, hash: SequenceHash) {
    for worker in manager.workers().iter() {
        let buffer = HostBuffer::from_bytes(&group_bytes(worker, group, hash, manager.config()));
        copy(worker, group, block, &buffer, Direction::HostToDevice);
    }
}

/// Whether a block of G1 holds what `compute` wrote for `hash`, on every rank.
pub fn holds<G>(manager: &KvBlockManager<G>, block: BlockId, hash: SequenceHash) -> bool {
    holds_in(manager, GroupId(0), block, hash)
}

/// The same of a block of a cache group.
pub fn holds_in<G>(manager: &KvBlockManager<G>, group: GroupId, block: BlockId, hash: SequenceHash) -> bool {
    manager.workers().iter().all(|worker| {
        let bytes = group_bytes(worker, group, hash, manager.config());
        let mut buffer = HostBuffer::zeroed(bytes.len());
        copy(worker, group, block, &buffer, Direction::DeviceToHost);
        buffer.exclusive_bytes().unwrap() == bytes
    })
}

/// Serves a request as an engine does: onboard what every cache group has, compute and register
/// what each group keeps of the rest. Blocks that were cached.
pub fn serve(manager: &KvBlockManager<Owned>, tokens: &TokenSequence) -> usize {
    let found = manager.onboard_groups(manager.match_groups(tokens)).wait().unwrap();
    let groups = (0_u16..).map(GroupId).zip(&found.parts);
    for (group, part) in groups.clone() {
        for (&block, &hash) in part.blocks.block_ids().iter().zip(&tokens.hashes()[part.start..]) {
            assert!(holds_in(manager, group, block, hash), "block {block} of a hit holds other bytes");
        }
    }
    for (group, _) in groups {
        for range in manager.kept_blocks(group, tokens.num_blocks()) {
            compute_range(manager, group, tokens, range.start.max(found.len)..range.end);
        }
    }
    found.len
}

/// Computes and registers blocks of a request in a cache group.
pub fn compute_range(
    manager: &KvBlockManager<Owned>,
    group: GroupId,
    tokens: &TokenSequence,
    range: Range<usize>,
) {
    if range.is_empty() {
        return;
    }
    let fresh = manager.allocate(range.len()).unwrap();
    for (&block, &hash) in fresh.block_ids().iter().zip(&tokens.hashes()[range.clone()]) {
        compute_in(manager, group, block, hash);
    }
    let chain = kvbm::BlockChain::from(tokens).slice(0..range.end);
    let (done, rest) = manager.commit_group(group, fresh, chain, range.start).unwrap();
    assert!(rest.is_empty());
    drop(manager.register(done).unwrap());
}
