//! What a worker answers.

use crate::{Epoch, Path, PlanId, Rank};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a block did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FailureKind {
    /// The source's bytes are not those of the identity (checksum, identity or length): a miss. The
    /// source slot must not be used again.
    Corrupt,
    /// The source does not hold the block (evicted, volume lost it): a miss.
    Missing,
    /// The disk, volume or network failed.
    Io,
    /// The device failed or its stream is poisoned.
    Device,
    /// What was asked did not answer in time.
    Deadline,
    /// The leader cancelled it before it started.
    Cancelled,
    /// A plan named in `after` failed.
    Predecessor,
    /// The worker has no such tier, layout or path, or its store is read-only.
    Unsupported,
    /// The path's queue is full: try again later.
    QueueFull,
    /// The worker is shutting down.
    ShuttingDown,
    /// The destination's capacity is used up.
    Full,
    /// The memory of a worker that holds a part of it is gone: it ended and started anew, or its
    /// rank was given up. The leader reports this miss.
    Lost,
    /// The budget ran out while its gate was shut, or a plan named in `after` was not over. Neither
    /// end was asked.
    GateShut,
    /// The budget ran out before the copy started, because others on its path went first. Neither
    /// end was asked.
    PathBusy,
    /// The source's bytes are intact and are not what the destination holds, which computed them
    /// again: wrong bytes were stored. The source slot must not be used again.
    Differs,
}

impl FailureKind {
    /// Every kind, for metrics that start at 0.
    pub const ALL: [Self; 15] = [
        Self::Corrupt,
        Self::Missing,
        Self::Io,
        Self::Device,
        Self::Deadline,
        Self::Cancelled,
        Self::Predecessor,
        Self::Unsupported,
        Self::QueueFull,
        Self::ShuttingDown,
        Self::Full,
        Self::Lost,
        Self::GateShut,
        Self::PathBusy,
        Self::Differs,
    ];

    /// Name in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Corrupt => "corrupt",
            Self::Missing => "missing",
            Self::Io => "io",
            Self::Device => "device",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::Predecessor => "predecessor",
            Self::Unsupported => "unsupported",
            Self::QueueFull => "queue_full",
            Self::ShuttingDown => "shutting_down",
            Self::Full => "full",
            Self::Lost => "lost",
            Self::GateShut => "gate_shut",
            Self::PathBusy => "path_busy",
            Self::Differs => "differs",
        }
    }

    /// What the caller should do.
    pub const fn next_action(self) -> &'static str {
        match self {
            Self::Corrupt => "recompute the block; its slot is quarantined, check the disk if this repeats",
            Self::Missing => "recompute the block",
            Self::Io => "recompute the block; check the disk or volume",
            Self::Device => "recompute the block; check the device",
            Self::Deadline => "recompute the block, or raise the deadline",
            Self::Cancelled => "nothing: it was cancelled on request",
            Self::Predecessor => "see the failure of the plan it waited for",
            Self::Unsupported => "configure the tier or path on this worker, or let it write to its store",
            Self::QueueFull => "retry later, or raise the queue depth of the path",
            Self::ShuttingDown => "nothing: the worker is shutting down",
            Self::Full => "raise the volume's capacity, or remove objects",
            Self::Lost => "recompute the block; what was allocated or found before is to be dropped",
            Self::GateShut => {
                "recompute the block, or raise the deadline above what a step of the engine takes"
            }
            Self::PathBusy => {
                "recompute the block, or raise the deadline: the path has more to move than it can"
            }
            Self::Differs => {
                "keep what was computed: the stored copies are quarantined; look for what stored wrong bytes, or raise the tolerance"
            }
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure with its details.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Why.
    pub kind: FailureKind,
    /// Which thing, which value: at most [`Failure::MAX_DETAIL`] bytes.
    pub detail: String,
}

impl Failure {
    /// Longest detail that a report carries, in bytes.
    pub const MAX_DETAIL: usize = 512;

    /// A failure; a longer `detail` is cut at a character boundary.
    pub fn new(kind: FailureKind, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        let mut end = detail.len().min(Self::MAX_DETAIL);
        while !detail.is_char_boundary(end) {
            end -= 1;
        }
        detail.truncate(end);
        Self { kind, detail }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.kind, self.detail, self.kind.next_action())
    }
}

/// The fate of one block of a plan on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BlockOutcome {
    /// Complete at the destination, verified. `checksum` covers this rank's slice, bound to the
    /// identity; 0 where the plan asked for none.
    Done {
        /// CRC-64/NVME of the slice, combined with the identity.
        checksum: u64,
    },
    /// Not at the destination.
    Failed(Failure),
}

impl BlockOutcome {
    /// Whether the block arrived.
    pub const fn is_done(&self) -> bool {
        matches!(self, Self::Done { .. })
    }
}

/// A rank's answer to a plan. Sent once the hardware no longer touches source or destination;
/// repeating it is harmless.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferReport {
    /// The plan.
    pub plan_id: PlanId,
    /// Epoch of the plan.
    pub epoch: Epoch,
    /// Who reports.
    pub rank: Rank,
    /// The path that was travelled.
    pub path: Path,
    /// One outcome per block of the plan, in order.
    pub blocks: Vec<BlockOutcome>,
    /// Bytes moved by this rank.
    pub bytes: u64,
    /// Time in the queue, gates included, in microseconds.
    pub queued_us: u64,
    /// Time from start to completion, in microseconds.
    pub busy_us: u64,
}
