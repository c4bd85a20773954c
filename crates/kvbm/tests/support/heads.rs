//! An engine whose bytes belong to heads, whatever rank holds them: for deployments of several
//! sizes.

use super::store::hashes;
use super::{expected, namespace, soon, unlimited};
use kvbm::builder::WithOwned;
use kvbm::config::{Blocks, Config, LayerContent, LayoutKind, ModelConfig, VolumeLossy};
use kvbm::device::{CopyBatch, Direction, HostBuffer};
use kvbm::layout::{AxisOrder, DType, FragmentList, FullyContiguous, Selection, slice_for_rank};
use kvbm::{BlockId, Builder, GroupId, KvBlockManager, Owned, SequenceHash, TokenSequence, Worker};
use std::path::Path;

/// A manager of `ranks` ranks with G3 in `dir`, which takes everything at once.
pub fn on_disk(model: ModelConfig, dir: &Path, ranks: u32) -> Builder<WithOwned> {
    // Of several cache groups each has blocks of its own.
    let blocks = if model.has_groups() { 16 } else { 8 };
    KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace())
        .device(Blocks(blocks))
        .host(Blocks(2 * blocks))
        .disk(dir, Blocks(2 * blocks))
        .tensor_parallel(ranks)
        .configure(|config| {
            unlimited(config);
            if config.model.has_groups() {
                config.device.layout = LayoutKind::FullyContiguous;
            }
            config.offload.g2_g3.write_through = true;
        })
}

/// Two layers of four heads.
pub fn model() -> ModelConfig {
    ModelConfig { num_layers: 2, num_kv_heads: 4, head_dim: 32, ..ModelConfig::default() }
}

/// Three groups that keep tokens: windows of two blocks and of one, and full attention, with other
/// numbers of heads.
pub const GROUPS: &str = "window=32 layers=2 heads=4 head_dim=8, full layers=3 heads=2 head_dim=8, \
                          window=16 layers=1 heads=4 head_dim=16";

/// A model whose layers are alike, and one with three cache groups.
pub fn models() -> [ModelConfig; 2] {
    [model(), super::model_of(GROUPS)]
}

/// A block of a rank, head after head, each with bytes of its own whatever the rank.
pub fn of_heads(hash: SequenceHash, worker: &Worker, group: GroupId, config: &Config) -> Vec<u8> {
    let LayerContent::Kv { num_kv_heads, .. } = config.model.cache_groups()[usize::from(group.0)].content
    else {
        panic!("group {group} has no heads");
    };
    let ranks = config.parallelism.tensor_parallel;
    let heads = slice_for_rank(num_kv_heads, ranks, u32::from(worker.rank().0)).expect("heads").heads;
    let bytes = worker.g1_of(group).expect("G1 here").bytes_per_block() as usize / heads.len();
    let mut block: Vec<u8> =
        heads.flat_map(|head| expected(hash, head as u16 + 100 * group.0, bytes)).collect();
    if config.model.dtype == DType::F16 || config.volumes.lossy != VolumeLossy::Off {
        // Exponents of a model take few values, of bf16 too; all other bytes are noise, here as
        // there.
        block.iter_mut().skip(1).step_by(2).for_each(|upper| *upper = 0x38 | *upper & 0x83);
    }
    block
}

/// Computes a block of a cache group on every rank.
pub fn compute(manager: &KvBlockManager<Owned>, group: GroupId, block: BlockId, hash: SequenceHash) {
    for worker in manager.workers().iter() {
        let buffer = HostBuffer::from_bytes(&of_heads(hash, worker, group, manager.config()));
        copy(worker, group, block, &buffer, Direction::HostToDevice);
    }
}

/// Computes a block with other bytes on each rank, also on those that hold the same heads.
pub fn compute_unlike(manager: &KvBlockManager<Owned>, block: BlockId, hash: SequenceHash) {
    for worker in manager.workers().iter() {
        let bytes = worker.g1().expect("G1 here").bytes_per_block() as usize;
        let buffer = HostBuffer::from_bytes(&expected(hash, worker.rank().0, bytes));
        copy(worker, GroupId(0), block, &buffer, Direction::HostToDevice);
    }
}

/// Compares a block of a cache group on every rank.
pub fn check(manager: &KvBlockManager<Owned>, group: GroupId, block: BlockId, hash: SequenceHash) {
    check_as(manager, group, block, hash, &|_, bytes| bytes);
}

/// The same where a block of a group comes back as `back` says.
fn check_as(
    manager: &KvBlockManager<Owned>,
    group: GroupId,
    block: BlockId,
    hash: SequenceHash,
    back: &dyn Fn(GroupId, Vec<u8>) -> Vec<u8>,
) {
    for worker in manager.workers().iter() {
        let wanted = back(group, of_heads(hash, worker, group, manager.config()));
        let mut buffer = HostBuffer::zeroed(wanted.len());
        copy(worker, group, block, &buffer, Direction::DeviceToHost);
        let found = buffer.exclusive_bytes().expect("the copy is over");
        assert!(found == wanted, "wrong bytes in group {group} on {}", worker.rank());
    }
}

/// Copies a block between its place in G1 and a buffer in universal order.
fn copy(worker: &Worker, group: GroupId, block: BlockId, buffer: &HostBuffer, direction: Direction) {
    let g1 = worker.g1_of(group).expect("G1 here");
    let layout = g1.layout().as_ref();
    let mut one = layout.config().clone();
    (one.num_blocks, one.alignment) = (1, 1);
    let universal = FullyContiguous::new(one, AxisOrder::Universal).expect("a layout");
    let fragments = FragmentList::between(layout, &universal, &Selection::all()).expect("fragments");
    let stream = worker.device().expect("a device").create_stream("test-engine").expect("a stream");
    let mut batch = CopyBatch::new(direction);
    for piece in fragments.fragments(block.0).expect("a block of G1") {
        let kvbm::storage::RegionBytes::Device(memory) = g1.region(piece.region).expect("a region") else {
            panic!("G1 is device memory")
        };
        let pushed = match direction {
            Direction::HostToDevice => {
                batch.push_host_to_device(buffer.region(), piece.slot_offset, memory, piece.offset, piece.len)
            }
            _ => {
                batch.push_device_to_host(memory, piece.offset, buffer.region(), piece.slot_offset, piece.len)
            }
        };
        pushed.expect("within both");
    }
    stream.copy(batch).expect("copied").wait(soon()).expect("in time");
}

/// Computes and registers what is missing of a sequence in each cache group; compares every byte of
/// what is not. How many blocks came from somewhere.
pub fn serve(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> usize {
    serve_as(manager, sequence, &|_, bytes| bytes)
}

/// The same where a block of a group, in universal order, comes back as `back` says.
pub fn serve_as(
    manager: &KvBlockManager<Owned>,
    sequence: &TokenSequence,
    back: &dyn Fn(GroupId, Vec<u8>) -> Vec<u8>,
) -> usize {
    let found = match manager.onboard_groups(manager.match_groups(sequence)).wait() {
        Ok(found) => found,
        Err(error) => error.arrived,
    };
    let hashes = hashes(sequence);
    for (group, part) in (0_u16..).map(GroupId).zip(&found.parts) {
        for (&block, &hash) in part.blocks.block_ids().iter().zip(&hashes[part.start..]) {
            check_as(manager, group, block, hash, back);
        }
        for range in manager.kept_blocks(group, hashes.len()) {
            let range = range.start.max(found.len)..range.end;
            if range.is_empty() {
                continue;
            }
            let fresh = manager.allocate(range.len()).expect("room");
            for (&block, &hash) in fresh.block_ids().iter().zip(&hashes[range.clone()]) {
                compute(manager, group, block, hash);
            }
            let (done, _) = manager.commit_group(group, fresh, sequence, range.start).expect("commit");
            drop(manager.register(done).expect("register"));
        }
    }
    assert!(manager.wait_offloads(soon()));
    found.len
}
