//! Copies between G1 and host memory by other processes: those whose memory G1 is.

use kvbm_plan::{BlockOutcome, TransferPlan};
use kvbm_storage::BoundLayout;
use std::fmt;
use std::sync::Arc;

/// Gets the result of each block of a copy, in order.
pub type MoveDone = Box<dyn FnOnce(Vec<BlockOutcome>) + Send>;

/// Copies between G1 and host memory where G1 belongs to other processes.
pub trait Movers: Send + Sync {
    /// Starts a copy of blocks of one cache group, which the plan names. It has an id that no other
    /// copy of this worker has. Slots of G2 beyond its last block are slots of staging rings. Never
    /// waits.
    ///
    /// `done` is called once, from any thread, when nothing can read or write these blocks and
    /// slots for this copy any more. That is not before the process that has the copy has answered,
    /// or has ended. A block that is done has the checksum that the plan asked for, of the bytes in
    /// host memory that were read or written. The worker compares it with what it knows.
    fn copy(&self, plan: TransferPlan, done: MoveDone);
}

/// G1 of a worker that has none: blocks of other processes.
#[derive(Clone)]
pub struct MoverTier {
    /// Blocks of G1, of all processes together: each holds a block of any cache group.
    pub blocks: u32,
    /// Who copies.
    pub movers: Arc<dyn Movers>,
    /// For each path from below G2 to G1 (disks, volumes): a staging ring in memory that the other
    /// processes map.
    pub rings: [MoverRing; 2],
}

/// A staging ring in memory that other processes map.
#[derive(Clone, Debug)]
pub struct MoverRing {
    /// Its slots as blocks of each cache group lie in them: in the order of the disk
    /// ([`disk_layout`](crate::disk_layout)), and in slots as long as those of G2.
    pub slots: Vec<BoundLayout>,
    /// What movers call its first slot, as a slot of G2.
    pub first: u32,
}

impl fmt::Debug for MoverTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, rings, .. } = self;
        f.debug_struct("MoverTier").field("blocks", blocks).field("rings", rings).finish_non_exhaustive()
    }
}
