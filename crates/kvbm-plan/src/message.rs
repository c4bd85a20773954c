//! Everything that passes between a leader and a worker.

use crate::{
    BlockId, BlockIdentity, Epoch, GroupId, NamespaceId, PlanId, Rank, SequenceHash, Tier, TransferPlan,
    TransferReport, VolumeId, VolumePlace,
};
use serde::{Deserialize, Serialize};

/// Leader to worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Move blocks; answered by [`Message::Transfer`].
    Transfer(TransferPlan),
    /// Drop a plan that has not started. A started one runs to its end; both are answered by
    /// [`Message::Transfer`].
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
    /// A persistent tier no longer holds any block of a namespace that may be found after a
    /// restart, also in slots that the leader knows nothing of any more. Writes that have not ended
    /// are left alone.
    Forget {
        /// The tier.
        tier: Tier,
        /// The namespace.
        namespace: NamespaceId,
    },
    /// Make every completed write of the persistent tiers durable; answered by
    /// [`Message::Flushed`].
    Flush {
        /// Quoted in the answer.
        token: u64,
    },
    /// Ask a volume something, or remove blocks from it; answered by [`Message::Volume`].
    Volume {
        /// Quoted in the answer.
        token: u64,
        /// Which volume.
        volume: VolumeId,
        /// What to do.
        request: VolumeRequest,
    },
}

/// What a leader wants of a volume, beside transfers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeRequest {
    /// Which of these blocks are there? At most [`Command::MAX_VOLUME_BLOCKS`].
    Probe(Vec<BlockIdentity>),
    /// Remove these blocks, at most [`Command::MAX_VOLUME_BLOCKS`], to make room: the rank's
    /// objects, and where it has none those that others wrote of them.
    Discard(Vec<BlockIdentity>),
    /// Remove what reads of the rank found damaged of these blocks, at most
    /// [`Command::MAX_VOLUME_BLOCKS`], with what the same writer has put beside it. What others
    /// wrote of them stays: they can still use it.
    DiscardDamaged(Vec<BlockIdentity>),
    /// Remove every block of a namespace, or of the whole deployment where `None`.
    Purge(Option<NamespaceId>),
    /// Which blocks does it hold of the rank's deployment? The next ones after this one, in an
    /// order of the volume's own.
    List(Option<StoredBlock>),
    /// Open it, unless it is open as this one: transfers may come. Answered by
    /// [`VolumeAnswer::Done`].
    Register(VolumePlace),
    /// Close it: what is under way ends, and nothing comes any more. Answered by
    /// [`VolumeAnswer::Done`], also where it was not open.
    Unregister,
}

/// What a volume knows of a block: its name, not its place in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoredBlock {
    /// Namespace that the hash is chained in.
    pub namespace: NamespaceId,
    /// Cache group.
    pub group: GroupId,
    /// Content.
    pub hash: SequenceHash,
}

/// What a volume's worker says to a [`VolumeRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeAnswer {
    /// Whether the rank's slice of each probed block is there, in order: a hint.
    Present(Vec<bool>),
    /// So many objects were removed.
    Removed(u64),
    /// Some of what is there, at most [`Command::MAX_VOLUME_BLOCKS`]; nothing where there is no
    /// more.
    Listed(Vec<StoredBlock>),
    /// It was opened, or closed.
    Done,
    /// The volume could not be asked, or failed part of the way.
    Failed(crate::Failure),
}

impl Command {
    /// Most blocks in one [`VolumeRequest`].
    pub const MAX_VOLUME_BLOCKS: usize = 4096;

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

/// What becomes of a data key whose namespace was forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyNotice {
    /// Whose blocks it encrypted.
    pub namespace: NamespaceId,
    /// The key's public name.
    pub id: [u8; 16],
    /// Whether it is gone for good. Else its store could not be written; that is tried again.
    pub is_destroyed: bool,
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
    /// Answer to [`Command::Volume`].
    Volume {
        /// Who.
        rank: Rank,
        /// Epoch of the leader that asked.
        epoch: Epoch,
        /// Token of the command.
        token: u64,
        /// What came of it.
        answer: VolumeAnswer,
    },
    /// Data keys of forgotten namespaces. It comes before the answer to the command that makes the
    /// forgetting durable. Keys that are not destroyed are named again each time.
    Keys {
        /// Who.
        rank: Rank,
        /// Epoch of the leader that is served.
        epoch: Epoch,
        /// The volume whose keys they are; `None` for G3.
        volume: Option<VolumeId>,
        /// At most [`Message::MAX_KEYS`].
        keys: Vec<KeyNotice>,
    },
    /// Contents of a persistent tier at start, in parts of at most [`Message::MAX_RECOVERED`]
    /// blocks and as many unusable slots.
    Recovered {
        /// Who.
        rank: Rank,
        /// The tier.
        tier: Tier,
        /// Part of the contents, oldest use first.
        blocks: Vec<RecoveredBlock>,
        /// Part of the slots that this rank never writes again (quarantined): no block may be
        /// placed there.
        unusable: Vec<BlockId>,
        /// Whether this is the last part.
        last: bool,
    },
    /// Scrubbing found a damaged block.
    Damaged {
        /// Who.
        rank: Rank,
        /// Epoch of the leader that is served.
        epoch: Epoch,
        /// The tier.
        tier: Tier,
        /// Its slot.
        block: BlockId,
        /// The block.
        identity: BlockIdentity,
        /// The failure that a transfer of the block would report.
        failure: crate::Failure,
    },
    /// A worker has started, perhaps after others, perhaps anew: its memory holds no block, and it
    /// knows no volume but those that it was started with. Where it takes volumes, the leader
    /// answers with [`VolumeRequest::Register`] for each.
    Ready {
        /// Who.
        rank: Rank,
        /// Epoch of the leader that is served.
        epoch: Epoch,
        /// Whether it has paths to volumes.
        volumes: bool,
    },
}

impl Message {
    /// Most blocks, and most unusable slots, in one [`Message::Recovered`].
    pub const MAX_RECOVERED: usize = 4096;

    /// Most data keys in one [`Message::Keys`].
    pub const MAX_KEYS: usize = 1024;
}
