//! The engine: batches in, outcomes out.

use crate::commit;
use crate::commit_signals::{CommitNeed, CommitSignals};
use crate::executor::{Executor, on_engine_thread};
use crate::follow::{self, Followed};
use crate::keyring::Keyring;
use crate::medium::{DirMedium, Medium};
use crate::open::{self, Opened};
use crate::shared::{Alive, EngineState, GivenUp};
use crate::slot_file::SlotFile;
use crate::slot_table::SlotTable;
use crate::{
    BatchHandle, BlockChecksum, DirInfo, DiskConfig, DiskFlushReport, EngineInfo, EngineStats, FlushError,
    IoBatch, IoMemory, OpenError, Recovered, UnsubmittedBatch,
};
use kvbm_plan::{BlockId, BlockIdentity, KeyNotice, NamespaceId, deadline_after};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Slots that are looked through under one hold of the table's lock.
const RELEASED_AT_ONCE: u32 = 4096;

/// The G3 engine over one directory. All methods may be called from any thread.
///
/// Dropping it is [`DiskEngine::shutdown`] with the configured deadline. Then the directory is
/// free, unless an operation is stuck in the kernel, which keeps its memory and the directory's
/// lock to its end.
pub struct DiskEngine {
    shared: Arc<EngineState>,
    executor: Executor,
    committer: Arc<Alive>,
}

impl DiskEngine {
    /// Opens or creates the directory and reads what it holds.
    ///
    /// # Errors
    /// Nothing is changed when another engine has the directory, or it holds another format
    /// version, namespace or geometry.
    pub fn open(config: DiskConfig) -> Result<(Self, Recovered), OpenError> {
        config.validate()?;
        let dirs: Vec<_> = std::iter::once(&config.dir).chain(&config.more_dirs).cloned().collect();
        let medium = DirMedium::lock_all(&dirs, config.access)?;
        Self::open_on(config, Arc::new(medium))
    }

    /// Like [`DiskEngine::open`] on a medium of the caller's, which has as many directories as the
    /// configuration names.
    ///
    /// # Errors
    /// As [`DiskEngine::open`].
    pub fn open_on(config: DiskConfig, medium: Arc<dyn Medium>) -> Result<(Self, Recovered), OpenError> {
        let Opened { slots, table, journal, recovered, keyring } = open::open(&config, &medium)?;
        let shared = share(config, medium, (slots, table, keyring), &recovered, false);
        shared.journal_records.store(journal.records(), Ordering::Relaxed);
        let start = |source| OpenError::Io { doing: "start a thread".to_owned(), source };
        let committer: Arc<Alive> = Arc::default();
        let executor = Executor::start(&shared)?;
        spawn_committer(&shared, journal, &committer).map_err(|error| {
            executor.close();
            start(error)
        })?;
        Ok((Self { shared, executor, committer }, recovered))
    }

    /// Like [`DiskEngine::open_on`] without threads: who has the journal commits. Operations wait
    /// for [`DiskEngine::run_waiting`].
    #[cfg(any(test, kvbm_sim))]
    pub(crate) fn without_threads(
        config: DiskConfig,
        medium: Arc<dyn Medium>,
    ) -> Result<(Self, crate::journal::Journal, Recovered), OpenError> {
        let Opened { slots, table, journal, recovered, keyring } = open::open(&config, &medium)?;
        let shared = share(config, medium, (slots, table, keyring), &recovered, false);
        let executor = Executor::without_threads(&shared);
        Ok((Self { shared, executor, committer: Arc::default() }, journal, recovered))
    }

    /// Runs every operation that waits, on this thread.
    #[cfg(any(test, kvbm_sim))]
    pub(crate) fn run_waiting(&self, bounce: &mut crate::slot_file::Bounce) {
        self.executor.run_waiting(bounce);
    }

    /// Opens directories that another engine writes: ranks that hold the same bytes need one copy
    /// of them. Nothing is changed there, and no lock is taken; the configuration is the writer's.
    ///
    /// A write to this engine moves nothing and completes with 0 bytes: it says which block, of
    /// which checksum, the other engine writes to the slot. A read is verified against that as
    /// any other is. Who sends both engines their writes knows when a block may be read: when the
    /// other engine has completed it. What is released or quarantined here is so for this engine
    /// alone.
    ///
    /// # Errors
    /// [`OpenError::NoJournal`] where no engine has opened the directories yet; else as
    /// [`DiskEngine::open`].
    pub fn follow(config: DiskConfig) -> Result<(Self, Recovered), OpenError> {
        let dirs: Vec<_> = std::iter::once(&config.dir).chain(&config.more_dirs).cloned().collect();
        let medium = DirMedium::follow(&dirs, config.access);
        Self::follow_on(config, Arc::new(medium))
    }

    /// Like [`DiskEngine::follow`] on a medium of the caller's.
    ///
    /// # Errors
    /// As [`DiskEngine::follow`].
    pub fn follow_on(config: DiskConfig, medium: Arc<dyn Medium>) -> Result<(Self, Recovered), OpenError> {
        let Followed { slots, table, recovered, keyring } = follow::follow(&config, &medium)?;
        let shared = share(config, medium, (slots, table, keyring), &recovered, true);
        let executor = Executor::start(&shared)?;
        Ok((Self { shared, executor, committer: Arc::default() }, recovered))
    }

    /// Hands a batch to the I/O threads. Never blocks.
    ///
    /// # Errors
    /// Gives the batch back when the queue has no room for it.
    pub fn submit(&self, batch: IoBatch) -> Result<BatchHandle, UnsubmittedBatch> {
        self.executor.submit(batch)
    }

    /// Makes memory known to the kernel, or to a [`SlotIo`](crate::SlotIo), that many operations
    /// will use: they cost less CPU then. Takes effect soon, not at once; [`EngineInfo::engine`]
    /// says for how many bytes. The engine holds the owner until it is dropped. Without either this
    /// does nothing.
    pub fn register_memory(&self, memory: IoMemory) {
        self.executor.register(memory);
    }

    /// These slots no longer hold anything that may be read or found after a restart. Unknown, free
    /// and quarantined slots are left alone; a write that runs ends with
    /// [`OpError::Released`](crate::OpError::Released). Lasting with the next commit.
    pub fn release(&self, slots: &[BlockId]) {
        self.shared.change(|table| slots.iter().for_each(|&slot| table.release(slot)));
    }

    /// Calls `notify` for each block from now on that could not be made durable and is given up.
    /// Its slot is free then. The committer calls it, one block at a time. Only the first callback
    /// that is set counts.
    pub fn on_given_up(&self, notify: impl Fn(BlockId, BlockIdentity) + Send + Sync + 'static) {
        let _is_set = self.shared.given_up.set(GivenUp(Box::new(notify)));
    }

    /// Releases every block of a namespace, except those that are being written. Returns their
    /// number. Durable with the next commit. Takes time in proportion to the number of slots.
    ///
    /// Where blocks are encrypted, the namespace's data keys go too, and with them the blocks that
    /// are being written. Once a later flush has succeeded, the keys are overwritten on the disk.
    pub fn release_namespace(&self, namespace: NamespaceId) -> u64 {
        let num_slots = self.shared.config.num_slots;
        let encrypts = self.shared.keyring.is_some();
        let mut of_key: HashMap<u64, u64> = HashMap::new();
        let mut release = |from: u32| {
            let slots = (from..from.saturating_add(RELEASED_AT_ONCE).min(num_slots)).map(BlockId);
            self.shared.change(|table| {
                let is_of = |slot: &BlockId| {
                    table.block(*slot).is_some_and(|(_, content)| content.identity.namespace == namespace)
                };
                let found: Vec<_> = slots.filter(is_of).collect();
                for &slot in &found {
                    if let Some((_, content)) = table.block(slot).filter(|_| encrypts) {
                        *of_key.entry(content.recorded.word).or_default() += 1;
                    }
                    table.release(slot);
                }
                found.len() as u64
            })
        };
        let released = (0..num_slots).step_by(RELEASED_AT_ONCE as usize).map(&mut release).sum();
        match &self.shared.keyring {
            Some(keyring) if self.shared.follows => keyring.forget(namespace),
            Some(keyring) => {
                keyring.doom(namespace, &of_key);
                self.shared.commit.want(CommitNeed::Due);
            }
            None => {}
        }
        released
    }

    /// Quarantines slots: they are never read, written or recovered again. A read that finds
    /// damaged bytes quarantines its slot by itself. Unknown slots are ignored. Durable with the
    /// next commit.
    pub fn quarantine(&self, slots: &[BlockId]) {
        self.shared.change(|table| slots.iter().for_each(|&slot| table.quarantine(slot)));
    }

    /// Makes every block durable whose write completed before the call; waits at most `deadline`.
    /// Of an engine that follows another one ([`DiskEngine::follow`]), every block counts as
    /// durable: the other one says which are.
    /// Not to be called from a completion. Blocks whose sync failed before are written again for
    /// it, or given up: then they are misses.
    ///
    /// # Errors
    /// A commit failed since the call, also one that had begun before; the engine ended; the
    /// deadline passed.
    pub fn flush(&self, deadline: Duration) -> Result<DiskFlushReport, FlushError> {
        if self.shared.follows {
            let (durable_blocks, ..) = self.shared.table.lock().counts();
            return Ok(DiskFlushReport { durable_blocks, pending_blocks: 0 });
        }
        commit::flush(&self.shared, deadline)
    }

    /// Data keys of forgotten namespaces: those that were destroyed since the last call, and those
    /// that are still to be, each time. None of an engine that follows another one: that one
    /// destroys them.
    pub fn take_key_notices(&self) -> Vec<KeyNotice> {
        self.shared.keyring.as_ref().map_or_else(Vec::new, Keyring::take_notices)
    }

    /// What the engine is and holds.
    pub fn info(&self) -> EngineInfo {
        let (config, slots) = (&self.shared.config, &self.shared.slots);
        let ((present_blocks, durable_blocks, quarantined_slots), unsynced_blocks) = {
            let table = self.shared.table.lock();
            (table.counts(), table.unsynced())
        };
        EngineInfo {
            location: self.shared.medium.location(),
            dirs: self.shared.dirs.lock().clone(),
            engine: self.executor.choice(),
            depth: self.executor.depth(),
            queue_depth: config.queue_depth,
            queued_ops: self.executor.outstanding(),
            num_slots: config.num_slots,
            block_bytes: config.block_bytes,
            slot_stride: slots.stride,
            preallocated: slots.preallocated,
            present_blocks,
            durable_blocks,
            unsynced_blocks,
            quarantined_slots,
            journal_records: self.shared.journal_records.load(Ordering::Relaxed),
            encryption: self.shared.keyring.as_ref().map(Keyring::info),
        }
    }

    /// Counters.
    pub fn stats(&self) -> EngineStats {
        *self.shared.stats.lock()
    }

    /// How this engine computes the checksums that callers know blocks by, so that a mover of bytes
    /// can compute the same. They need no key.
    pub fn checksums(&self) -> BlockChecksum {
        self.shared.seal.checksums
    }

    /// Stops admission, fails what has not started, waits for what runs, commits. Returns whether
    /// all of that was done by `deadline`; what was not goes on by itself. From a completion it
    /// does not wait.
    pub fn shutdown(&self, deadline: Duration) -> bool {
        let until =
            deadline_after(Instant::now(), if on_engine_thread() { Duration::ZERO } else { deadline });
        self.executor.close();
        let idle = self.executor.wait(until);
        self.shared.commit.stop(self.executor.outstanding() == 0);
        idle & self.committer.wait_none(until)
    }

    pub(crate) fn shared(&self) -> &EngineState {
        &self.shared
    }

    /// Whether operations wait or run.
    pub(crate) fn is_busy(&self) -> bool {
        self.executor.outstanding() > 0
    }

    /// Blocks that are durable now.
    pub fn durable_blocks(&self) -> u64 {
        self.shared.durable_blocks()
    }
}

/// What the threads of an engine share.
fn share(
    config: DiskConfig,
    medium: Arc<dyn Medium>,
    (slots, table, keyring): (SlotFile, Mutex<SlotTable>, Option<Keyring>),
    recovered: &Recovered,
    follows: bool,
) -> Arc<EngineState> {
    let dir = |location| DirInfo { location, io_errors: 0, last_error: None };
    let dirs = open::dir_names(&config).into_iter().map(dir).collect();
    Arc::new(EngineState {
        medium,
        seal: open::seal_of(&config),
        keyring,
        config,
        slots,
        table,
        follows,
        commit: CommitSignals::default(),
        stats: Mutex::new(EngineStats {
            other_key_records: recovered.dropped.other_key + recovered.dropped.without_key,
            ..EngineStats::default()
        }),
        journal_records: AtomicU64::new(0),
        dirs: Mutex::new(dirs),
        given_up: OnceLock::new(),
    })
}

fn spawn_committer(
    shared: &Arc<EngineState>,
    journal: crate::journal::Journal,
    alive: &Arc<Alive>,
) -> io::Result<()> {
    let (shared, guard) = (Arc::clone(shared), alive.guard());
    let work = move || {
        commit::work(&shared, journal);
        drop(shared);
        drop(guard);
    };
    std::thread::Builder::new().name("kvbm-disk-commit".to_owned()).spawn(work).map(drop)
}

impl Drop for DiskEngine {
    fn drop(&mut self) {
        self.shutdown(self.shared.config.drop_deadline);
    }
}

impl fmt::Debug for DiskEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskEngine").field("info", &self.info()).finish_non_exhaustive()
    }
}
