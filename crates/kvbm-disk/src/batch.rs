//! Batches of operations and their outcomes.

use crate::OpError;
use crate::buffer::{IoFragments, OwnedBuffer, ReadTarget};
use kvbm_plan::{BlockId, BlockIdentity};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A finished operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpDone {
    /// Checksum of the block, bound to its identity: computed by a write, verified by a read.
    pub checksum: u64,
    /// Bytes moved.
    pub bytes: u64,
}

/// Outcome of one operation of a batch.
pub type OpOutcome = Result<OpDone, OpError>;

/// Called once per batch, when the hardware is done with every fragment and the guards are dropped.
/// It gets one outcome per operation, in order. An I/O thread calls it, or for operations that
/// never started the thread that shuts the engine down. Must not block; a panic is caught and
/// counted.
pub type BatchCompletion = Box<dyn FnOnce(Vec<OpOutcome>) + Send>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    Read,
    Write(Source),
}

impl OpKind {
    /// Whether the engine sums the bytes up before it moves them. Those of reads are summed
    /// afterwards.
    pub(crate) fn sums_first(self) -> bool {
        matches!(self, Self::Write(Source::Unknown | Source::Compare(_)))
    }
}

/// The checksum of the memory that a write reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Unknown,
    /// Its checksum, to be compared before anything is written.
    Compare(u64),
    /// Its checksum, to be recorded.
    Trust(u64),
}

#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) kind: OpKind,
    pub(crate) slot: BlockId,
    pub(crate) identity: BlockIdentity,
    pub(crate) fragments: IoFragments,
}

/// Operations that complete together. They run in any order, side by side.
pub struct IoBatch {
    pub(crate) ops: Vec<Op>,
    pub(crate) guards: Vec<Arc<dyn Any + Send + Sync>>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) completion: BatchCompletion,
}

impl IoBatch {
    /// An empty batch.
    pub fn new(completion: impl FnOnce(Vec<OpOutcome>) + Send + 'static) -> Self {
        Self { ops: Vec::new(), guards: Vec::new(), deadline: None, completion: Box::new(completion) }
    }

    /// Keeps `owner` alive until the last operation of the batch is done, also after the caller is
    /// gone.
    pub fn guard(&mut self, owner: Arc<dyn Any + Send + Sync>) -> &mut Self {
        self.guards.push(owner);
        self
    }

    /// Operations that have not started by then fail with [`OpError::Deadline`].
    pub fn deadline(&mut self, deadline: Instant) -> &mut Self {
        self.deadline = Some(deadline);
        self
    }

    /// Reads the block `identity` from `slot` into `fragments`, whose contract is in
    /// [`IoFragments::from_raw`].
    pub fn read(&mut self, slot: BlockId, identity: BlockIdentity, fragments: IoFragments) -> &mut Self {
        self.push(OpKind::Read, slot, identity, fragments)
    }

    /// Writes the block `identity` from `fragments` to `slot`, whatever the slot held before.
    pub fn write(&mut self, slot: BlockId, identity: BlockIdentity, fragments: IoFragments) -> &mut Self {
        self.push(OpKind::Write(Source::Unknown), slot, identity, fragments)
    }

    /// Like [`IoBatch::write`], of a block whose checksum is known: refused if the memory no longer
    /// has it.
    pub fn write_checked(
        &mut self,
        slot: BlockId,
        identity: BlockIdentity,
        fragments: IoFragments,
        checksum: u64,
    ) -> &mut Self {
        self.push(OpKind::Write(Source::Compare(checksum)), slot, identity, fragments)
    }

    /// Like [`IoBatch::write_checked`], without the comparison, which costs a pass over the bytes.
    /// Memory that no longer has this checksum is written, and refused by every read. With a key
    /// it is refused as in [`IoBatch::write_checked`]: a signature needs all bytes anyway.
    pub fn write_trusted(
        &mut self,
        slot: BlockId,
        identity: BlockIdentity,
        fragments: IoFragments,
        checksum: u64,
    ) -> &mut Self {
        self.push(OpKind::Write(Source::Trust(checksum)), slot, identity, fragments)
    }

    /// Writes the block from a shared buffer, which the batch keeps alive.
    pub fn write_buffer(
        &mut self,
        slot: BlockId,
        identity: BlockIdentity,
        buffer: &Arc<OwnedBuffer>,
    ) -> &mut Self {
        let fragments = buffer.fragments();
        self.guard(Arc::clone(buffer) as Arc<dyn Any + Send + Sync>);
        self.write(slot, identity, fragments)
    }

    /// Reads the block into a target, which the batch keeps alive. `false`, and nothing added, if a
    /// read was already planned into this target.
    #[must_use]
    pub fn read_target(&mut self, slot: BlockId, identity: BlockIdentity, target: &Arc<ReadTarget>) -> bool {
        let Some(fragments) = target.claim() else { return false };
        self.guard(Arc::clone(target) as Arc<dyn Any + Send + Sync>);
        self.read(slot, identity, fragments);
        true
    }

    /// Number of operations.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    fn push(
        &mut self,
        kind: OpKind,
        slot: BlockId,
        identity: BlockIdentity,
        fragments: IoFragments,
    ) -> &mut Self {
        self.ops.push(Op { kind, slot, identity, fragments });
        self
    }
}

impl fmt::Debug for IoBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoBatch")
            .field("ops", &self.ops)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

/// A submitted batch. Dropping it changes nothing.
#[derive(Clone, Debug)]
pub struct BatchHandle(pub(crate) Arc<AtomicBool>);

impl BatchHandle {
    /// Operations that have not started fail with [`OpError::Cancelled`]; those that have run to
    /// their end.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Why a batch was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue has no room for all of the batch. A batch larger than the queue is taken when the
    /// queue is empty.
    #[error(
        "the disk queue holds {queued} of {depth} operations and has no room for the batch: retry after a completion"
    )]
    QueueFull {
        /// Operations queued or running.
        queued: usize,
        /// The bound.
        depth: usize,
    },
    /// Nothing to do.
    #[error("the batch has no operations")]
    Empty,
    /// The engine is shut down.
    #[error("the disk engine is shut down")]
    ShuttingDown,
}

/// A batch that was not taken; its completion was not called.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct UnsubmittedBatch {
    /// The batch, unchanged.
    pub batch: IoBatch,
    /// Why.
    pub error: SubmitError,
}
