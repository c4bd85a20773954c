//! An engine whose bytes belong to heads, whatever rank holds them: for deployments of several
//! sizes.

use super::store::hashes;
use super::{expected, soon};
use kvbm::config::{Config, ModelConfig};
use kvbm::device::{CopyBatch, Direction, HostBuffer};
use kvbm::layout::{AxisOrder, FragmentList, FullyContiguous, Selection, slice_for_rank};
use kvbm::{BlockId, KvBlockManager, Owned, SequenceHash, TokenSequence, Worker};

/// Two layers of four heads.
pub fn model() -> ModelConfig {
    ModelConfig { num_layers: 2, num_kv_heads: 4, head_dim: 32, ..ModelConfig::default() }
}

/// A block of a rank, head after head, each with bytes of its own whatever the rank.
pub fn of_heads(hash: SequenceHash, worker: &Worker, config: &Config) -> Vec<u8> {
    let (all, ranks) = (config.model.num_kv_heads, config.parallelism.tensor_parallel);
    let heads = slice_for_rank(all, ranks, u32::from(worker.rank().0)).expect("heads").heads;
    let bytes = worker.g1().expect("G1 here").bytes_per_block() as usize / heads.len();
    heads.flat_map(|head| expected(hash, head as u16, bytes)).collect()
}

/// Copies a block between its place in G1 and a buffer in universal order.
pub fn copy(worker: &Worker, block: BlockId, buffer: &HostBuffer, direction: Direction) {
    let layout = worker.g1().expect("G1 here").layout().as_ref();
    let mut one = layout.config().clone();
    (one.num_blocks, one.alignment) = (1, 1);
    let universal = FullyContiguous::new(one, AxisOrder::Universal).expect("a layout");
    let fragments = FragmentList::between(layout, &universal, &Selection::all()).expect("fragments");
    let stream = worker.device().expect("a device").create_stream("test-engine").expect("a stream");
    let mut batch = CopyBatch::new(direction);
    for piece in fragments.fragments(block.0).expect("a block of G1") {
        let kvbm::storage::RegionBytes::Device(memory) =
            worker.g1().expect("G1 here").region(piece.region).expect("a region")
        else {
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

/// Computes and registers what is missing of a sequence; compares every byte of what is not. How
/// many blocks came from somewhere.
pub fn serve(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> usize {
    let cached = match manager.onboard(manager.match_prefix(sequence)).wait() {
        Ok(cached) => cached,
        Err(error) => error.arrived,
    };
    let hashes = hashes(sequence);
    for (&block, &hash) in cached.block_ids().iter().zip(&hashes) {
        for worker in manager.workers().iter() {
            let mut buffer = HostBuffer::zeroed(worker.g1().expect("G1 here").bytes_per_block() as usize);
            copy(worker, block, &buffer, Direction::DeviceToHost);
            assert!(
                buffer.exclusive_bytes().expect("the copy is over")
                    == of_heads(hash, worker, manager.config()),
                "wrong bytes on {}",
                worker.rank()
            );
        }
    }
    let hits = cached.len();
    if hits < hashes.len() {
        let fresh = manager.allocate(hashes.len() - hits).expect("room");
        for (&block, &hash) in fresh.block_ids().iter().zip(&hashes[hits..]) {
            for worker in manager.workers().iter() {
                let buffer = HostBuffer::from_bytes(&of_heads(hash, worker, manager.config()));
                copy(worker, block, &buffer, Direction::HostToDevice);
            }
        }
        let (done, _) = manager.commit(fresh, sequence, hits).expect("commit");
        drop(manager.register(done).expect("register"));
    }
    assert!(manager.wait_offloads(soon()));
    hits
}
