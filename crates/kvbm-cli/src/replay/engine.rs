//! Stands in for an inference engine: writes known bytes into G1 where an engine would compute, and
//! reads them back.

use anyhow::{Context, Result};
use kvbm::device::{CopyBatch, Direction, HostBuffer, Stream};
use kvbm::storage::{BoundLayout, RegionBytes};
use kvbm::{BlockId, GroupId, KvBlockManager, Owned, SequenceHash, Worker};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::pattern::{CellPattern, Mismatch};

/// Bytes that are filled or compared at a time.
const STAGING_BYTES: u64 = 8 << 20;
/// What the staging buffer holds before blocks are copied into it: a copy that moves nothing must
/// not leave the right bytes there.
const STALE: u8 = 0xA5;
/// Longest time for a copy to or from the emulated device.
const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// One thread's engine, on every rank.
pub(super) struct Engine<'a> {
    ranks: Vec<RankEngine<'a>>,
}

struct RankEngine<'a> {
    worker: &'a Worker,
    /// Whose bytes it computes: its own, or those of the first rank that holds the same.
    rank: u32,
    stream: Arc<dyn Stream>,
    staging: HostBuffer,
    blocks_at_a_time: usize,
    /// As long as the staging buffer, every byte [`STALE`].
    stale: Vec<u8>,
}

/// A block that does not hold what was computed for it.
#[derive(Clone, Debug)]
pub(super) struct WrongBytes {
    /// Where in G1.
    pub(super) block: BlockId,
    /// What should be there.
    pub(super) hash: SequenceHash,
    /// Rank, layer and outer index of the first bad cell.
    pub(super) place: [u32; 3],
    /// The first bad word.
    pub(super) mismatch: Mismatch,
}

/// One cell of one block in the staging buffer.
struct StagedCell {
    at: u64,
    /// Where it lies in G1.
    region: u32,
    offset: u64,
    bytes: u64,
    layer: u32,
    outer: u32,
}

impl<'a> Engine<'a> {
    /// An engine on the workers of `manager`.
    pub(super) fn new(manager: &'a KvBlockManager<Owned>) -> Result<Self> {
        let rank = |worker: &'a Worker| {
            let computes = manager.config().writer_of(worker.rank());
            RankEngine::new(worker, u32::from(computes.0))
        };
        let ranks = manager.workers().iter().map(rank).collect::<Result<_>>()?;
        Ok(Self { ranks })
    }

    /// Computes blocks of a cache group: `blocks[i]` gets the bytes of `hashes[i]`. When it returns
    /// the bytes are there.
    pub(super) fn compute(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        hashes: &[SequenceHash],
    ) -> Result<()> {
        self.ranks.iter_mut().try_for_each(|rank| rank.compute(group, blocks, hashes))
    }

    /// Compares `blocks[i]` of a cache group with the bytes of `hashes[i]`, on every rank. The
    /// blocks that differ.
    pub(super) fn verify(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        hashes: &[SequenceHash],
    ) -> Result<Vec<WrongBytes>> {
        let mut wrong: Vec<WrongBytes> = Vec::new();
        for rank in &mut self.ranks {
            rank.verify(group, blocks, hashes, &mut wrong)?;
        }
        // A block may be wrong in several cells and on several ranks.
        wrong.sort_by_key(|wrong| wrong.block);
        wrong.dedup_by_key(|wrong| wrong.block);
        Ok(wrong)
    }
}

impl<'a> RankEngine<'a> {
    fn new(worker: &'a Worker, rank: u32) -> Result<Self> {
        let groups = (0..).map_while(|group| worker.g1_of(GroupId(group)));
        let block_bytes = groups.map(BoundLayout::bytes_per_block).max().unwrap_or(1).max(1);
        let blocks_at_a_time = (STAGING_BYTES / block_bytes).max(1) as usize;
        let device = worker.device().context("a replay computes on the device of its configuration")?;
        let stream = device.create_stream("replay-engine").context("no stream for the engine")?;
        let staging = HostBuffer::zeroed(blocks_at_a_time * block_bytes as usize);
        let stale = vec![STALE; blocks_at_a_time * block_bytes as usize];
        Ok(Self { worker, rank, stream, staging, blocks_at_a_time, stale })
    }

    /// G1 as blocks of a group lie there.
    fn g1(&self, group: GroupId) -> Result<&'a BoundLayout> {
        self.worker.g1_of(group).with_context(|| format!("the model has no cache group {group}"))
    }

    /// What tells the cells of groups apart in the pattern.
    fn layer_of(group: GroupId, layer: u32) -> u32 {
        u32::from(group.0) << 16 | layer
    }

    fn compute(&mut self, group: GroupId, blocks: &[BlockId], hashes: &[SequenceHash]) -> Result<()> {
        let rank = self.rank;
        for (blocks, hashes) in blocks.chunks(self.blocks_at_a_time).zip(hashes.chunks(self.blocks_at_a_time))
        {
            let cells = self.stage(group, blocks)?;
            for (index, cell) in cells.iter().enumerate() {
                let hash = hashes[index / (cells.len() / blocks.len())];
                let place = cell.at as usize..(cell.at + cell.bytes) as usize;
                let bytes = &mut self.staging.exclusive_bytes()?[place];
                let layer = Self::layer_of(group, cell.layer);
                CellPattern::new(*hash.as_bytes(), rank, layer, cell.outer).fill(0, bytes);
            }
            self.copy(group, &cells, Direction::HostToDevice)?;
        }
        Ok(())
    }

    fn verify(
        &mut self,
        group: GroupId,
        blocks: &[BlockId],
        hashes: &[SequenceHash],
        wrong: &mut Vec<WrongBytes>,
    ) -> Result<()> {
        let rank = self.rank;
        for (blocks, hashes) in blocks.chunks(self.blocks_at_a_time).zip(hashes.chunks(self.blocks_at_a_time))
        {
            let cells = self.stage(group, blocks)?;
            let used = cells.last().map_or(0, |cell| cell.at + cell.bytes) as usize;
            self.staging.exclusive_bytes()?[..used].copy_from_slice(&self.stale[..used]);
            self.copy(group, &cells, Direction::DeviceToHost)?;
            for (index, cell) in cells.iter().enumerate() {
                let of = index / (cells.len() / blocks.len());
                let (block, hash) = (blocks[of], hashes[of]);
                let place = cell.at as usize..(cell.at + cell.bytes) as usize;
                let bytes = &self.staging.exclusive_bytes()?[place];
                let layer = Self::layer_of(group, cell.layer);
                let pattern = CellPattern::new(*hash.as_bytes(), rank, layer, cell.outer);
                if let Err(mismatch) = pattern.verify(0, bytes) {
                    wrong.push(WrongBytes { block, hash, place: [rank, cell.layer, cell.outer], mismatch });
                }
            }
        }
        Ok(())
    }

    /// The cells of `blocks`, side by side in the staging buffer.
    fn stage(&self, group: GroupId, blocks: &[BlockId]) -> Result<Vec<StagedCell>> {
        let g1 = self.g1(group)?;
        let layout = g1.layout();
        let config = layout.config();
        let of_block = (config.num_layers * config.cells_per_layer()) as usize;
        let mut cells = Vec::with_capacity(blocks.len() * of_block);
        let mut at = 0;
        for block in blocks {
            for layer in 0..config.num_layers {
                for (outer, cell) in (0..).zip(config.cells()) {
                    let view = layout.view(layer, cell)?;
                    anyhow::ensure!(
                        view.is_contiguous(),
                        "the replay's engine needs whole cells side by side"
                    );
                    let bytes = view.bytes();
                    let offset = view.offset + view.block_stride * u64::from(block.0);
                    cells.push(StagedCell { at, region: view.region, offset, bytes, layer, outer });
                    at += bytes;
                }
            }
        }
        Ok(cells)
    }

    /// Copies cells between the staging buffer and G1, and waits.
    fn copy(&self, group: GroupId, cells: &[StagedCell], direction: Direction) -> Result<()> {
        let g1 = self.g1(group)?;
        let mut batch = CopyBatch::new(direction);
        for &StagedCell { at, region, offset, bytes, .. } in cells {
            let RegionBytes::Device(memory) = g1.region(region)? else {
                anyhow::bail!("G1 is not device memory");
            };
            match direction {
                Direction::HostToDevice => {
                    batch.push_host_to_device(&self.staging, at, memory, offset, bytes)?;
                }
                _ => batch.push_device_to_host(memory, offset, &self.staging, at, bytes)?,
            }
        }
        let event = self.stream.copy(batch).map_err(|rejected| rejected.error)?;
        event.wait(Instant::now() + COPY_TIMEOUT).context("the engine's copy failed")
    }
}
