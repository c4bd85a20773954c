//! Everything that passes between a leader and a worker.

use crate::{BlockId, BlockIdentity, Epoch, PlanId, Rank, Tier, TransferPlan, TransferReport};
use serde::{Deserialize, Serialize};

/// Leader to worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Move blocks; answered by [`Message::Transfer`].
    Transfer(TransferPlan),
    /// Drop a plan that has not started. A started one runs to its end; both are answered by [`Message::Transfer`].
    Cancel {
        /// The plan.
        plan_id: PlanId,
    },
    /// The model finished `layer` (or, with `None`, all layers) of `iteration`: opens gates.
    Advance {
        /// Iteration, counted by the leader.
        iteration: u64,
        /// Last finished layer of the rank.
        layer: Option<u32>,
    },
    /// These slots of a persistent tier no longer hold anything that may be found after a restart.
    Release {
        /// The tier.
        tier: Tier,
        /// Its slots, at most [`Command::MAX_RELEASE`].
        blocks: Vec<BlockId>,
    },
    /// Make every completed write of the persistent tiers durable; answered by [`Message::Flushed`].
    Flush {
        /// Quoted in the answer.
        token: u64,
    },
}

impl Command {
    /// Most slots in one [`Command::Release`].
    pub const MAX_RELEASE: usize = 4096;
}

/// A block that a worker found on its persistent tier at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveredBlock {
    /// Slot.
    pub block: BlockId,
    /// What the slot holds.
    pub identity: BlockIdentity,
}

/// Result of a flush on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FlushOutcome {
    /// This many blocks are durable in all.
    Durable {
        /// Blocks whose record is synced.
        blocks: u64,
    },
    /// The medium refused; what was durable before still is.
    Failed(crate::Failure),
}

/// Worker to leader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Answer to [`Command::Transfer`].
    Transfer(TransferReport),
    /// Answer to [`Command::Flush`].
    Flushed {
        /// Who.
        rank: Rank,
        /// Epoch of the leader that asked.
        epoch: Epoch,
        /// Token of the command.
        token: u64,
        /// What came of it.
        outcome: FlushOutcome,
    },
    /// Contents of a persistent tier at start, in parts of at most [`Message::MAX_RECOVERED`] blocks and as many unusable
    /// slots.
    Recovered {
        /// Who.
        rank: Rank,
        /// The tier.
        tier: Tier,
        /// Part of the contents, oldest use first.
        blocks: Vec<RecoveredBlock>,
        /// Part of the slots that this rank never writes again (quarantined): no block may be placed there.
        unusable: Vec<BlockId>,
        /// Whether this is the last part.
        last: bool,
    },
}

impl Message {
    /// Most blocks, and most unusable slots, in one [`Message::Recovered`].
    pub const MAX_RECOVERED: usize = 4096;
}
