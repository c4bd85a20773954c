//! What the manager is doing, for people and dashboards.

use crate::offload::OffloadBacklog;
use crate::ranks::RankStatus;
use crate::slots::DirectoryStatus;
use crate::tenants::TenantStatus;
use crate::volume::VolumeStatus;
#[cfg(feature = "worker")]
use crate::workers::DiskStatus;
use kvbm_plan::{Failure, Path};
use kvbm_pool::TierStatus;

/// A snapshot of a manager. Tiers and paths are each consistent in themselves, not with each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// G1 to G4; a tier that is not configured has capacity 0. G4 is all volumes together, in
    /// blocks that they are known to hold, with room only where all of them are limited;
    /// [`volumes`](Self::volumes) has each.
    pub tiers: Vec<TierStatus>,
    /// Every local path.
    pub paths: Vec<PathStatus>,
    /// G3: the disk engine of every rank of this process, in order.
    #[cfg(feature = "worker")]
    pub disks: Vec<DiskStatus>,
    /// Whether the circuit breaker for reads of a directory of G3 is not closed: blocks there are
    /// not found.
    pub disk_down: bool,
    /// The last failure of those reads, while that is so.
    pub disk_failure: Option<Failure>,
    /// The directories of G3, over all ranks: `disk.dir` first, then `disk.more_dirs`. Their
    /// withheld slots are part of [`held`](TierStatus::held).
    pub disk_directories: Vec<DirectoryStatus>,
    /// Every rank, in order.
    pub ranks: Vec<RankStatus>,
    /// G4: every volume, by id.
    pub volumes: Vec<VolumeStatus>,
    /// Every tenant with a share, first the blocks of all others; empty where none are configured.
    pub tenants: Vec<TenantStatus>,
    /// Whether the manager has been shut down.
    pub shut_down: bool,
}

/// A path at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStatus {
    /// The path.
    pub path: Path,
    /// Plans in the hands of workers.
    pub plans: usize,
    /// Offloads that wait or run.
    pub backlog: OffloadBacklog,
}
