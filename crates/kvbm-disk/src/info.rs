//! Status and counters of an engine.

use kvbm_keys::KeyId;
use kvbm_plan::{BlockId, BlockIdentity};
use std::fmt;

/// Who moves bytes between memory and the slot file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// A ring of the kernel, `O_DIRECT`.
    IoUring,
    /// Threads with preadv / pwritev, `O_DIRECT`.
    Threads,
    /// Threads with preadv / pwritev through the page cache.
    Buffered,
    /// Threads with a [`SlotIo`](crate::SlotIo) of this name.
    Custom(&'static str),
}

impl EngineKind {
    /// As in the configuration: `io_uring`, `threads`, `buffered`, or the name of a
    /// [`SlotIo`](crate::SlotIo).
    pub const fn name(self) -> &'static str {
        match self {
            Self::IoUring => "io_uring",
            Self::Threads => "threads",
            Self::Buffered => "buffered",
            Self::Custom(name) => name,
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The engine that was chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineChoice {
    /// Who moves the bytes.
    pub kind: EngineKind,
    /// Why this one: what was configured, or what a probe of a better one found.
    pub reason: String,
    /// Memory, lengths and offsets at multiples of this many bytes go without a copy.
    pub alignment: u32,
    /// Bytes of memory registered with the kernel, or with a [`SlotIo`](crate::SlotIo).
    pub registered_bytes: u64,
    /// Why memory that was to be registered is not, if so: it is used all the same, for more CPU.
    pub unregistered: Option<String>,
    /// Bytes of a ring's buffer for blocks whose memory the device does not get as it is; 0 until
    /// there is one ([`DiskConfig::bounce_bytes`](crate::DiskConfig::bounce_bytes)).
    pub bounce_bytes: u64,
}

/// One directory of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DirInfo {
    /// Where it is.
    pub location: String,
    /// Operations that its device failed since the engine was opened.
    pub io_errors: u64,
    /// The last error of its device.
    pub last_error: Option<String>,
}

/// What an engine's keys are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncryptionInfo {
    /// The operator's key.
    pub operator: KeyId,
    /// Data keys that there are.
    pub data_keys: u64,
    /// Receipts in the key file of keys that were destroyed.
    pub destroyed: u64,
    /// Keys that are forgotten and not yet overwritten in the file.
    pub pending: u64,
}

/// What an engine is and holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineInfo {
    /// Directory or medium, for people.
    pub location: String,
    /// Every directory, the one with the journal first.
    pub dirs: Vec<DirInfo>,
    /// Who moves the bytes, and why.
    pub engine: EngineChoice,
    /// Operations at the device at a time.
    pub depth: usize,
    /// Operations that may be queued or running.
    pub queue_depth: usize,
    /// Operations queued or running now.
    pub queued_ops: usize,
    /// Slots.
    pub num_slots: u32,
    /// Bytes of the largest block.
    pub block_bytes: u64,
    /// Bytes from slot to slot.
    pub slot_stride: u64,
    /// Whether the file system reserved the slot file's space. If not, a write may still meet a
    /// full disk.
    pub preallocated: bool,
    /// Slots that hold a block.
    pub present_blocks: u64,
    /// Those whose record is synced.
    pub durable_blocks: u64,
    /// Blocks that can be read and whose sync failed: they are written again with one of the next
    /// commits, or given up.
    pub unsynced_blocks: u64,
    /// Slots that are never used again.
    pub quarantined_slots: u64,
    /// Records in the journal, dead ones included.
    pub journal_records: u64,
    /// The keys, where blocks are encrypted.
    pub encryption: Option<EncryptionInfo>,
}

/// Counters since the engine was opened. They never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineStats {
    /// Reads that delivered a verified block.
    pub reads: u64,
    /// Writes that completed.
    pub writes: u64,
    /// Bytes of those reads.
    pub read_bytes: u64,
    /// Bytes of those writes.
    pub written_bytes: u64,
    /// Reads refused: bytes do not match their checksum.
    pub corrupt_checksum: u64,
    /// Reads refused: the slot holds another block.
    pub corrupt_identity: u64,
    /// Reads refused: the record has another length.
    pub corrupt_length: u64,
    /// Reads refused: the slot file ends too early.
    pub corrupt_short_file: u64,
    /// Writes refused: the source in memory does not have the checksum that the caller gave.
    pub corrupt_source: u64,
    /// Reads of a slot that holds nothing.
    pub missing: u64,
    /// Reads of a slot that was being overwritten when the last life ended without a shutdown.
    pub cut_short: u64,
    /// Operations that the device failed.
    pub io_errors: u64,
    /// Operations refused for another reason (busy, quarantined, deadline, cancelled, shut down,
    /// bad arguments).
    pub refused: u64,
    /// Requests that a ring made of operations: those on neighbouring slots share one.
    pub requests: u64,
    /// Operations whose memory the device cannot take, or in too short pieces, or whose blocks are
    /// encrypted, and that went through a buffer.
    pub bounced: u64,
    /// Reads or writes that the system cut short and that were continued.
    pub continued: u64,
    /// Group commits that reached the medium.
    pub commits: u64,
    /// Group commits that failed.
    pub commit_failures: u64,
    /// Blocks that were written again because their sync had failed.
    pub renewed: u64,
    /// Blocks given up because their sync had failed and they could not be written again: misses
    /// from then on.
    pub given_up: u64,
    /// Snapshots that replaced the journal.
    pub compactions: u64,
    /// Snapshots that could not be written or put in the journal's place: it goes on as it is,
    /// longer than it should be.
    pub failed_snapshots: u64,
    /// Blocks that scrubbing read and found good.
    pub scrubbed: u64,
    /// Blocks that scrubbing found damaged or could not read.
    pub scrub_failures: u64,
    /// Records that opening found under another key ([`Dropped::other_key`]), or without their data
    /// key ([`Dropped::without_key`]).
    pub other_key_records: u64,
    /// Completion callbacks, and drops of guards, that panicked.
    pub callback_panics: u64,
}

/// A block found at opening.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveredSlot {
    /// Where.
    pub slot: BlockId,
    /// What.
    pub identity: BlockIdentity,
    /// Its checksum, verified when it is read.
    pub checksum: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Records that recovery did not take, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dropped {
    /// Bytes cut at the end of the journal: a record that was being written at the crash.
    pub torn_tail_bytes: u64,
    /// Records in the middle whose checksum does not match.
    pub damaged_records: u64,
    /// Blocks in slots beyond the configured number.
    pub beyond_capacity: u64,
    /// Older copies of a block that a newer slot holds.
    pub duplicates: u64,
    /// Records that are intact and say something impossible (unknown kind, bad length).
    pub invalid_records: u64,
    /// Blocks whose bytes the slot file did not have: it was removed, or cut.
    pub without_bytes: u64,
    /// Records of a journal that is signed with another key, or with none where there is one now.
    pub other_key: u64,
    /// Blocks whose data key is not in the key file: it was destroyed, or the file is another one.
    pub without_key: u64,
}

/// What opening a directory found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovered {
    /// The blocks, oldest write first. All of them are durable.
    pub blocks: Vec<RecoveredSlot>,
    /// Slots that must not be used: quarantined in this or an earlier life. A write to one is
    /// refused.
    pub quarantined: Vec<BlockId>,
    /// What was dropped.
    pub dropped: Dropped,
    /// The last life ended with a shutdown. Otherwise a slot whose bytes turn out wrong at the
    /// first read was being overwritten then: it is free again, not quarantined.
    pub clean: bool,
}

/// Result of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskFlushReport {
    /// Blocks whose record is synced.
    pub durable_blocks: u64,
    /// Blocks that can be read but are not durable: their writes ended after the flush began.
    pub pending_blocks: u64,
}
