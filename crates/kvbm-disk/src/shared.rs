//! What the engine's threads share.

use crate::commit_signals::CommitSignals;
use crate::keyring::Keyring;
use crate::medium::Medium;
use crate::seal::Seal;
use crate::slot_file::SlotFile;
use crate::slot_table::SlotTable;
use crate::{DirInfo, DiskConfig, EngineStats};
use kvbm_plan::{BlockId, BlockIdentity};
use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Everything but the queue. The locks inside are leaves: none is taken while another is held.
#[derive(Debug)]
pub(crate) struct EngineState {
    pub(crate) config: DiskConfig,
    /// Held by every thread that may still touch the directory: its lock ends with the last of
    /// them.
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) seal: Seal,
    /// Where blocks are encrypted.
    pub(crate) keyring: Option<Keyring>,
    pub(crate) slots: SlotFile,
    pub(crate) table: Mutex<SlotTable>,
    /// Another engine writes the slot files: writes move nothing, and there is no journal of ours.
    pub(crate) follows: bool,
    pub(crate) commit: CommitSignals,
    pub(crate) stats: Mutex<EngineStats>,
    pub(crate) journal_records: AtomicU64,
    /// Directories, and what their devices failed.
    pub(crate) dirs: Mutex<Vec<DirInfo>>,
    pub(crate) given_up: OnceLock<GivenUp>,
}

/// Callback for blocks that are given up.
pub(crate) struct GivenUp(pub(crate) Box<dyn Fn(BlockId, BlockIdentity) + Send + Sync>);

impl fmt::Debug for GivenUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GivenUp")
    }
}

impl EngineState {
    /// Changes the table, then lets the committer know what became due.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut SlotTable) -> R) -> R {
        let mut table = self.table.lock();
        let before = table.dirty();
        let result = change(&mut table);
        let after = table.dirty();
        drop(table);
        if after > before {
            self.commit.became_dirty(before, after, self.config.commit.max_slots as usize);
        }
        result
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut EngineStats)) {
        count(&mut self.stats.lock());
    }

    /// Counts a failure of the device of `slot`. Returns the text for the log: with several
    /// directories it names the one.
    pub(crate) fn note_failure(&self, slot: BlockId, error: &std::io::Error) -> String {
        self.note_failure_of(self.slots.place(slot).0, error)
    }

    /// The device of directory `member` failed.
    pub(crate) fn note_failure_of(&self, member: usize, error: &std::io::Error) -> String {
        let mut message = error.to_string();
        let mut dirs = self.dirs.lock();
        let several = dirs.len() > 1;
        if let Some(dir) = dirs.get_mut(member) {
            dir.io_errors += 1;
            dir.last_error = Some(message.clone());
            if several {
                message = format!("{}: {message}", dir.location);
            }
        }
        message
    }

    /// Blocks that are durable now.
    pub(crate) fn durable_blocks(&self) -> u64 {
        self.table.lock().counts().1
    }
}

/// How many threads of a kind still run.
#[derive(Debug, Default)]
pub(crate) struct Alive {
    count: Mutex<usize>,
    fewer: Condvar,
}

/// One running thread. Made before the thread starts; dropped as the last thing that it does.
#[derive(Debug)]
pub(crate) struct AliveGuard(Arc<Alive>);

impl Alive {
    pub(crate) fn guard(self: &Arc<Self>) -> AliveGuard {
        *self.count.lock() += 1;
        AliveGuard(Arc::clone(self))
    }

    /// Whether all threads ended by `deadline`.
    pub(crate) fn wait_none(&self, deadline: Instant) -> bool {
        let mut count = self.count.lock();
        self.fewer.wait_while_until(&mut count, |count| *count > 0, deadline);
        *count == 0
    }
}

impl Drop for AliveGuard {
    fn drop(&mut self) {
        *self.0.count.lock() -= 1;
        self.0.fewer.notify_all();
    }
}
