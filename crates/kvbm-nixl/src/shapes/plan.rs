//! Descriptor lists between a rank's memory and a peer's ranks.

use kvbm_layout::{BlockLayout, CopyPlan, Planes, Run, Selection, Span};
use kvbm_plan::{GroupId, RankSlice};
use kvbm_storage::BoundLayout;

use super::{ModelPart, ShapeError, cover};
use crate::agent::{Descriptor, DescriptorList, MAX_DESCRIPTORS};
use crate::{BlockSet, NixlStorage};

/// How to read a peer's blocks into the memory of one of our ranks. It serves every pair of blocks,
/// and writes as well as reads.
#[derive(Debug)]
pub struct ReadPlan {
    part: ModelPart,
    local: BoundLayout,
    pieces: Vec<Piece>,
}

/// What one of the peer's ranks gives.
#[derive(Debug)]
struct Piece {
    agent: String,
    memory: Vec<NixlStorage>,
    plan: CopyPlan,
}

/// The two sides of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferLists {
    /// The agent whose memory the remote side is in.
    pub agent: String,
    /// Ranges of our memory.
    pub local: DescriptorList,
    /// Ranges of the peer's memory.
    pub remote: DescriptorList,
}

impl ReadPlan {
    /// The plan for a rank of ours that holds `slice` in `local`, from a peer's block sets.
    ///
    /// # Errors
    /// [`ShapeError`]: what the peer lacks, or the field in which the layouts differ.
    pub fn new(
        slice: &RankSlice,
        local: &BoundLayout,
        group: GroupId,
        sets: &[BlockSet],
    ) -> Result<Self, ShapeError> {
        let sets: Vec<&BlockSet> = sets.iter().filter(|set| set.group == group).collect();
        if sets.is_empty() {
            return Err(ShapeError::NoSets { group });
        }
        let slices: Vec<RankSlice> = sets.iter().map(|set| set.slice).collect();
        let part = ModelPart::of(slice);
        let given = cover(&part, &slices, slice.rank.index())?;
        Self::of_pieces(slice, local, &sets, &given)
    }

    /// The plan to write parts of what a rank of ours holds into a peer's block sets: for each
    /// part, the index of the set among `sets`.
    pub(crate) fn towards(
        slice: &RankSlice,
        local: &BoundLayout,
        group: GroupId,
        sets: &[BlockSet],
        given: &[(usize, ModelPart)],
    ) -> Result<Self, ShapeError> {
        let sets: Vec<&BlockSet> = sets.iter().filter(|set| set.group == group).collect();
        if sets.is_empty() {
            return Err(ShapeError::NoSets { group });
        }
        Self::of_pieces(slice, local, &sets, given)
    }

    fn of_pieces(
        slice: &RankSlice,
        local: &BoundLayout,
        sets: &[&BlockSet],
        given: &[(usize, ModelPart)],
    ) -> Result<Self, ShapeError> {
        let pieces = given.iter().map(|(index, overlap)| {
            let set = sets[*index];
            let selection = selection(overlap, &set.slice, slice, &**local.layout());
            let plan = CopyPlan::between(set.layout.layout(), &**local.layout(), &selection)?;
            let memory = set.layout.memory().iter();
            let memory = memory.map(|memory| NixlStorage::of(&set.agent, memory)).collect();
            Ok(Piece { agent: set.agent.clone(), memory, plan })
        });
        let pieces = pieces.collect::<Result<_, ShapeError>>()?;
        Ok(Self { part: ModelPart::of(slice), local: local.clone(), pieces })
    }

    /// The part of each block that the plan moves.
    pub fn part(&self) -> &ModelPart {
        &self.part
    }

    /// The memory that it fills.
    pub fn local(&self) -> &BoundLayout {
        &self.local
    }

    /// Bytes that a block moves.
    pub fn bytes_per_block(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.plan.bytes_per_block()).sum()
    }

    /// Ranges that a block is cut into, before neighbours are joined.
    pub fn ranges_per_block(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.plan.num_runs()).sum()
    }

    /// The lists for pairs of (the peer's block, our block): one request or more for each of the
    /// peer's ranks, with touching ranges joined.
    ///
    /// # Errors
    /// [`ShapeError::Layout`] for a block outside a layout, [`ShapeError::Storage`].
    pub fn lists(&self, blocks: &[(u32, u32)]) -> Result<Vec<TransferLists>, ShapeError> {
        let mut requests = Vec::new();
        for piece in &self.pieces {
            let mut builder = Builder::new(piece, &self.local);
            for (theirs, ours) in blocks {
                let mut failed = None;
                piece.plan.for_each_run(*theirs, *ours, |run| {
                    if let Err(error) = builder.add(&run) {
                        failed.get_or_insert(error);
                    }
                })?;
                if let Some(error) = failed {
                    return Err(error);
                }
            }
            requests.extend(builder.finish());
        }
        Ok(requests)
    }
}

/// The layers and heads of an overlap, as each side counts them. Opaque planes move whole, and so
/// do layouts whose heads are not told apart.
fn selection(overlap: &ModelPart, src: &RankSlice, dst: &RankSlice, layout: &dyn BlockLayout) -> Selection {
    let span = |first: u32, end: u32, src: u32, dst: u32| Span {
        src: first - src,
        dst: first - dst,
        len: end - first,
    };
    let (layers, heads) = (&overlap.layers, &overlap.heads);
    let all_heads = src.heads == dst.heads && layout.config().num_heads == heads.len() as u32;
    Selection {
        layers: Some(span(layers.start, layers.end, src.first_layer, dst.first_layer)),
        heads: (!all_heads).then(|| span(heads.start, heads.end, src.heads.start, dst.heads.start)),
        planes: Planes::All,
    }
}

/// Joins ranges as they come and cuts lists that are too long.
struct Builder<'a> {
    piece: &'a Piece,
    local: &'a BoundLayout,
    requests: Vec<TransferLists>,
}

impl<'a> Builder<'a> {
    fn new(piece: &'a Piece, local: &'a BoundLayout) -> Self {
        Self { piece, local, requests: Vec::new() }
    }

    fn add(&mut self, run: &Run) -> Result<(), ShapeError> {
        let outside = || ShapeError::Storage(format!("region {} is not exported", run.src_region));
        let memory = self.piece.memory.get(run.src_region as usize).ok_or_else(outside)?;
        let theirs = memory.descriptor(run.src_offset, run.len).ok_or_else(outside)?;
        let binding = &self.local.bindings()[run.dst_region as usize];
        let ours = Descriptor::within(&*binding.storage, binding.offset + run.dst_offset, run.len)?;
        let fits = |list: &TransferLists| {
            list.remote.kind == memory.kind() && list.local.entries.len() < MAX_DESCRIPTORS
        };
        if let Some(list) = self.requests.last_mut().filter(|list| fits(list)) {
            if !join(list, &ours, &theirs) {
                list.local.entries.push(ours);
                list.remote.entries.push(theirs);
            }
            return Ok(());
        }
        let mut list = TransferLists {
            agent: self.piece.agent.clone(),
            local: DescriptorList::new(crate::SegmentKind::of(&*binding.storage)?),
            remote: DescriptorList::new(memory.kind()),
        };
        list.local.entries.push(ours);
        list.remote.entries.push(theirs);
        self.requests.push(list);
        Ok(())
    }

    fn finish(self) -> Vec<TransferLists> {
        self.requests
    }
}

/// Makes the last pair of ranges longer, if the next pair continues it on both sides.
fn join(list: &mut TransferLists, ours: &Descriptor, theirs: &Descriptor) -> bool {
    let (Some(last), Some(last_theirs)) = (list.local.entries.last_mut(), list.remote.entries.last_mut())
    else {
        return false;
    };
    let continues =
        |last: &Descriptor, next: &Descriptor| last.end() == next.address && last.device_id == next.device_id;
    if !continues(last, ours) || !continues(last_theirs, theirs) {
        return false;
    }
    last.bytes += ours.bytes;
    last_theirs.bytes += theirs.bytes;
    true
}
