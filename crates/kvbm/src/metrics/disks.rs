//! What the disk tiers of this process are counted by: brought up to date from the engines before it is read.

use super::counters::Counter;
use kvbm_plan::Rank;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Counters of the disk tier of each rank, and of each of its directories.
#[derive(Debug, Default)]
pub struct DiskMetrics {
    /// By rank and name.
    dirs: Mutex<BTreeMap<(Rank, String), Arc<Counter>>>,
    snapshots: Mutex<BTreeMap<Rank, Arc<Counter>>>,
}

impl DiskMetrics {
    /// Operations that the device of a directory failed: reads, writes, syncs, the journal.
    pub fn errors(&self, rank: Rank, dir: &str) -> Arc<Counter> {
        // Nothing panics while it is held, here and below.
        let mut dirs = self.dirs.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(dirs.entry((rank, dir.to_owned())).or_default())
    }

    /// Times that a rank's journal could not be replaced by a shorter one, as on a full disk.
    pub fn failed_snapshots(&self, rank: Rank) -> Arc<Counter> {
        let mut snapshots = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(snapshots.entry(rank).or_default())
    }

    pub(super) fn all_errors(&self) -> Vec<(Rank, String, u64)> {
        let dirs = self.dirs.lock().unwrap_or_else(PoisonError::into_inner);
        dirs.iter().map(|((rank, dir), errors)| (*rank, dir.clone(), errors.get())).collect()
    }

    pub(super) fn all_failed_snapshots(&self) -> Vec<(Rank, u64)> {
        let snapshots = self.snapshots.lock().unwrap_or_else(PoisonError::into_inner);
        snapshots.iter().map(|(rank, failed)| (*rank, failed.get())).collect()
    }
}
