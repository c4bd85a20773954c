//! Two sides of a benchmark: an owner whose blocks are published, and a reader.

use std::any::Any;
use std::sync::Arc;

use anyhow::{Context, Result};
use kvbm::SequenceHash;
use kvbm::plan::{Epoch, GroupId, HeadRange, NamespaceTag, NodeId, Rank, RankSlice, Replication};
use kvbm::storage::{BoundLayout, SystemAllocator};
use kvbm_layout::{
    AxisOrder, BlockLayout, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
    slice_for_rank,
};
use kvbm_nixl::{Export, InProcessNetwork, LocalRank, NodeOptions, Publication, RemoteAgent, RemoteNode};

use super::AgentName;

pub(super) const GROUP: GroupId = GroupId(0);
pub(super) const OWNER: NodeId = NodeId(1);
pub(super) const READER: NodeId = NodeId(2);
const LAYERS: u32 = 16;
const PAGE_SIZE: u32 = 16;
const HEADS: u32 = 8;
const HEAD_DIM: u32 = 128;
/// 16 layers x 2 x 16 tokens x 8 heads x 128 x bf16.
pub(super) const BLOCK_BYTES: u64 = 1 << 20;

/// One row: the ranks of both sides, and whether their layers lie apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    owners: u32,
    readers: u32,
    is_separate: bool,
}

pub(super) const CASES: [Case; 3] = [
    Case { name: "contiguous", owners: 1, readers: 1, is_separate: false },
    Case { name: "layer_separate", owners: 1, readers: 1, is_separate: true },
    Case { name: "tp4_to_tp2", owners: 4, readers: 2, is_separate: false },
];

impl Case {
    /// The blocks of each case have a namespace of their own.
    pub(super) fn namespace(&self) -> NamespaceTag {
        let mut bytes = [0; 16];
        for (byte, letter) in bytes.iter_mut().zip(self.name.bytes()) {
            *byte = letter;
        }
        NamespaceTag::from_bytes(bytes)
    }

    fn ranks(&self, ranks: u32, blocks: u32) -> Result<Vec<LocalRank>> {
        (0..ranks).map(|rank| self.rank(rank, ranks, blocks)).collect()
    }

    fn rank(&self, rank: u32, ranks: u32, blocks: u32) -> Result<LocalRank> {
        let heads = slice_for_rank(HEADS, ranks, rank)?.heads;
        let count = heads.len() as u32;
        let config = LayoutConfig::builder().num_blocks(blocks).num_layers(LAYERS).outer_dim(2);
        let config = config.page_size(PAGE_SIZE).inner_dim(count * HEAD_DIM).num_heads(count);
        let config = config.dtype(DType::BF16).alignment(4096).build()?;
        let layout: Arc<dyn BlockLayout> = if self.is_separate {
            Arc::new(LayerSeparate::new(config, AxisOrder::Nhd, OuterPlacement::KvOuter)?)
        } else {
            Arc::new(FullyContiguous::new(config, AxisOrder::Nhd)?)
        };
        let slice = RankSlice {
            rank: Rank(rank as u16),
            first_layer: 0,
            num_layers: LAYERS,
            heads: HeadRange { start: heads.start, count },
            replication: Replication::None,
        };
        Ok(LocalRank::new(slice, BoundLayout::allocate(layout, &SystemAllocator::default())?))
    }
}

/// The hash of a block: whatever tells blocks apart.
pub(super) fn hash(block: u32) -> SequenceHash {
    let mut bytes = [7; 16];
    bytes[..4].copy_from_slice(&block.to_le_bytes());
    SequenceHash::from_bytes(bytes)
}

/// An agent for one side.
pub(super) fn agent(name: AgentName, side: &str, network: &InProcessNetwork) -> Result<Arc<dyn RemoteAgent>> {
    let full = format!("kvbm-bench-{side}-{}", std::process::id());
    match name {
        AgentName::InProcess => Ok(Arc::new(network.agent(&full)?)),
        AgentName::Nixl => nixl(&full),
    }
}

#[cfg(feature = "nixl")]
fn nixl(name: &str) -> Result<Arc<dyn RemoteAgent>> {
    Ok(Arc::new(kvbm_nixl::NixlAgent::new(&kvbm_nixl::NixlOptions::new(name))?))
}

#[cfg(not(feature = "nixl"))]
fn nixl(name: &str) -> Result<Arc<dyn RemoteAgent>> {
    anyhow::bail!("{}; `--agent in-process` needs nothing", kvbm_nixl::NixlOptions::new(name).probe())
}

/// A node over an agent.
pub(super) fn node(agent: &Arc<dyn RemoteAgent>, id: NodeId) -> Result<RemoteNode> {
    let options = NodeOptions::new(id, Epoch(1));
    RemoteNode::start(Arc::clone(agent), options).with_context(|| format!("node {id} does not start"))
}

/// What an owner offers, while this lives.
pub(super) struct Offer {
    _publications: Vec<Publication>,
    _exports: Vec<Export>,
}

impl Offer {
    /// Publishes the blocks of all cases.
    pub(super) fn new(node: &RemoteNode, blocks: u32) -> Result<Self> {
        let (mut exports, mut publications) = (Vec::new(), Vec::new());
        let nothing: Arc<dyn Any + Send + Sync> = Arc::new(());
        for case in CASES {
            let ranks = case.ranks(case.owners, blocks)?;
            ranks.iter().try_for_each(|rank| (0..blocks).try_for_each(|block| fill(rank, block)))?;
            let export = node.export_local_blockset(case.namespace(), GROUP, ranks)?;
            let all: Vec<_> = (0..blocks).map(|block| (hash(block), block)).collect();
            // SAFETY: nothing writes the blocks any more.
            publications.push(unsafe { export.publish(&all, &nothing) }?);
            exports.push(export);
        }
        Ok(Self { _publications: publications, _exports: exports })
    }
}

/// Writes bytes that depend on rank and block.
fn fill(rank: &LocalRank, block: u32) -> Result<()> {
    let seed = block.wrapping_mul(0x9e37_79b1) ^ u32::from(rank.slice.rank.0);
    let bytes: Vec<u8> = (0..rank.bound.bytes_per_block() as u32)
        .map(|at| ((at ^ seed).wrapping_mul(0x85eb_ca6b) >> 24) as u8)
        .collect();
    // SAFETY: nobody else knows this memory yet.
    Ok(unsafe { rank.bound.write_block(block, &bytes) }?)
}

/// The reader's memory of a case, registered while this lives.
pub(super) struct Landing {
    pub(super) ranks: Vec<LocalRank>,
    _export: Export,
}

impl Landing {
    pub(super) fn new(node: &RemoteNode, case: &Case, blocks: u32) -> Result<Self> {
        let ranks = case.ranks(case.readers, blocks)?;
        let export = node.export_local_blockset(case.namespace(), GROUP, ranks.clone())?;
        Ok(Self { ranks, _export: export })
    }
}
