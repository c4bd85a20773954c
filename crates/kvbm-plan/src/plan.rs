//! What the leader asks of its workers.

use crate::{BlockId, BlockIdentity, Comparison, Endpoint, Epoch, GroupId, Path, PlanId};
use serde::{Deserialize, Serialize};

/// One block of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockTransfer {
    /// Whose bytes move. A source that holds another identity is a failure, never a success.
    pub identity: BlockIdentity,
    /// Slot at the source (ignored by volumes, which are addressed by identity).
    pub src: BlockId,
    /// Slot at the destination (likewise).
    pub dst: BlockId,
}

/// Layers `first .. first + count` of the rank's own layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRange {
    /// First layer.
    pub first: u32,
    /// Number of layers, at least 1.
    pub count: u32,
}

/// What must have happened before a plan may touch its source or destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gate {
    /// Nothing: start at once.
    #[default]
    None,
    /// The model finished this iteration.
    Iteration(u64),
    /// The model finished this layer of this iteration.
    Layer {
        /// Iteration, as counted by [`Command::Advance`](crate::Command::Advance).
        iteration: u64,
        /// Layer of the rank, from 0.
        layer: u32,
    },
    /// A device event that the engine registered with the worker under this number.
    DeviceEvent(u64),
}

/// Order among queued plans of one path; within a priority, first come first served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Priority {
    /// No caller waits: offloads, write-back.
    #[default]
    Background,
    /// Needed soon: flush, park.
    Normal,
    /// A request waits for it: onboard.
    Urgent,
}

/// What the worker does about checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChecksumMode {
    /// Memory to memory on one machine: neither computed nor compared.
    None,
    /// Computed where bytes leave memory, compared where they come back.
    #[default]
    Required,
}

/// An order to move blocks along one path. Every rank gets the same plan and moves its own slice of
/// each block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferPlan {
    /// Unique within `epoch`; reports quote it.
    pub plan_id: PlanId,
    /// Life of the leader that made the plan.
    pub epoch: Epoch,
    /// Cache group of all blocks.
    pub group: GroupId,
    /// Where bytes come from.
    pub src: Endpoint,
    /// Where bytes go.
    pub dst: Endpoint,
    /// The blocks, at most [`TransferPlan::MAX_BLOCKS`].
    pub blocks: Vec<BlockTransfer>,
    /// Only these layers; all where `None`.
    pub layers: Option<LayerRange>,
    /// What must have happened first.
    pub gate: Gate,
    /// Plans that must have finished first, on this worker; a failed one fails this plan.
    pub after: Vec<PlanId>,
    /// Order in the queue of the path.
    pub priority: Priority,
    /// Time from acceptance to the start of the last copy, in milliseconds; 0 means no limit. A
    /// plan that is still queued then fails with
    /// [`FailureKind::GateShut`](crate::FailureKind::GateShut) or
    /// [`FailureKind::PathBusy`](crate::FailureKind::PathBusy).
    pub budget_ms: u32,
    /// Checksums.
    pub checksums: ChecksumMode,
    /// What the worker's own side knows the plan by, such as an engine that asks its worker which
    /// loads are over; 0 for nothing. Several plans may have the same.
    #[serde(default, skip_serializing_if = "is_none")]
    pub tag: u64,
    /// The blocks are compared, and nothing is written: a block that differs fails with
    /// [`FailureKind::Differs`](crate::FailureKind::Differs). Such a plan ends at G1 and has a tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compare: Option<Comparison>,
}

/// A plan without a tag is written as it was before there were tags.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_none(tag: &u64) -> bool {
    *tag == 0
}

/// A plan that no worker may execute.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No blocks.
    #[error("plan {0} moves no blocks: do not send it")]
    Empty(PlanId),
    /// More blocks than a worker accepts at once.
    #[error("plan {plan_id} moves {blocks} blocks, more than {max}: split it", max = TransferPlan::MAX_BLOCKS)]
    TooManyBlocks {
        /// The plan.
        plan_id: PlanId,
        /// Blocks asked for.
        blocks: usize,
    },
    /// More predecessors than a worker tracks.
    #[error("plan {plan_id} waits for {after} plans, more than {max}", max = TransferPlan::MAX_AFTER)]
    TooManyPredecessors {
        /// The plan.
        plan_id: PlanId,
        /// Predecessors named.
        after: usize,
    },
    /// Source and destination are the same place.
    #[error("plan {plan_id} copies {tier} onto itself: a path joins two different tiers")]
    SameTier {
        /// The plan.
        plan_id: PlanId,
        /// The tier named twice.
        tier: crate::Tier,
    },
    /// An identity whose parent and position disagree, or of another group.
    #[error(
        "plan {plan_id}, block {index}: identity of {hash} is inconsistent (group, parent and position disagree)"
    )]
    BadIdentity {
        /// The plan.
        plan_id: PlanId,
        /// Index in `blocks`.
        index: usize,
        /// The block.
        hash: crate::SequenceHash,
    },
    /// A layer range without layers.
    #[error("plan {0} names an empty layer range: use None for all layers")]
    EmptyLayers(PlanId),
    /// A comparison without a tag, or with another tier than G1.
    #[error("plan {0} compares blocks: it needs a tag, and G1 as its destination")]
    Comparison(PlanId),
}

impl TransferPlan {
    /// Most blocks in one plan.
    pub const MAX_BLOCKS: usize = 4096;
    /// Most predecessors of one plan.
    pub const MAX_AFTER: usize = 64;

    /// The path that the plan travels.
    pub fn path(&self) -> Path {
        Path::new(self.src.tier(), self.dst.tier())
    }

    /// Checks what a type cannot: sizes, path, identities.
    pub fn validate(&self) -> Result<(), PlanError> {
        let plan_id = self.plan_id;
        if self.blocks.is_empty() {
            return Err(PlanError::Empty(plan_id));
        }
        if self.blocks.len() > Self::MAX_BLOCKS {
            return Err(PlanError::TooManyBlocks { plan_id, blocks: self.blocks.len() });
        }
        if self.after.len() > Self::MAX_AFTER {
            return Err(PlanError::TooManyPredecessors { plan_id, after: self.after.len() });
        }
        if self.src == self.dst {
            return Err(PlanError::SameTier { plan_id, tier: self.src.tier() });
        }
        if self.layers.is_some_and(|layers| layers.count == 0) {
            return Err(PlanError::EmptyLayers(plan_id));
        }
        if self.compare.is_some() && (self.tag == 0 || self.dst != Endpoint::Local(crate::Tier::G1)) {
            return Err(PlanError::Comparison(plan_id));
        }
        let bad =
            |block: &BlockTransfer| block.identity.group != self.group || !block.identity.is_consistent();
        match self.blocks.iter().position(bad) {
            Some(index) => {
                let hash = self.blocks[index].identity.hash;
                Err(PlanError::BadIdentity { plan_id, index, hash })
            }
            None => Ok(()),
        }
    }
}
