//! What an engine is opened with.

use crate::record::MAX_GEOMETRY_BYTES;
use crate::{ConfigError, SlotIo};
use kvbm_keys::{DeploymentKey, MAX_ENCRYPTED_BYTES, OperatorKey};
use kvbm_plan::FileAccess;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Slots start at multiples of this many bytes, so that direct I/O is possible on every common
/// device.
pub const SLOT_ALIGNMENT: u64 = kvbm_plan::Striping::SLOT_ALIGNMENT;

/// Blocks of 1 MiB in pieces of 16 KiB were written at 0.70 of a device's speed straight and at
/// 0.92 collected; in pieces of 64 KiB at 0.94 straight.
const STRAIGHT_BYTES: u64 = 32 << 10;

/// 32 blocks of 8 MiB.
const BOUNCE_BYTES: u64 = 256 << 20;

/// Who moves bytes between memory and the slot file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineMode {
    /// The first of the others that works here; [`EngineInfo::engine`](crate::EngineInfo::engine)
    /// says which, and why.
    #[default]
    Auto,
    /// A ring of the kernel around the page cache (`O_DIRECT`), or an error.
    IoUring,
    /// A pool of threads around the page cache (`O_DIRECT`), or an error.
    Threads,
    /// A pool of threads through the page cache. Works everywhere.
    Buffered,
    /// A pool of threads with [`DiskConfig::slot_io`], around the page cache where that is
    /// possible, or an error.
    Custom,
}

/// When completed writes are made durable without being asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupCommit {
    /// Longest time that a completed write waits for its commit.
    pub interval: Duration,
    /// A commit starts early once this many slots changed.
    pub max_slots: u32,
}

impl Default for GroupCommit {
    fn default() -> Self {
        Self { interval: Duration::from_millis(50), max_slots: 4096 }
    }
}

/// Configuration of a [`DiskEngine`](crate::DiskEngine).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DiskConfig {
    /// Directory that the engine owns alone; created if absent.
    pub dir: PathBuf,
    /// Further directories, best on devices of their own: slots are spread over all, the journal
    /// stays in `dir`. Their number and order must not change while they hold blocks; one that is
    /// missing is an error at opening, and blocks on one that fails later are misses.
    pub more_dirs: Vec<PathBuf>,
    /// Who may use the files beside their owner. Modes of files and of these directories are set at
    /// each opening. A file of another user is refused, and so is a symbolic link.
    pub access: FileAccess,
    /// Number of slots. May change between openings; blocks beyond a smaller number are dropped and
    /// counted.
    pub num_slots: u32,
    /// Bytes of the largest block: one rank's slice. A slot takes this, rounded up to 4096.
    pub block_bytes: u64,
    /// Namespace tag. A directory of another namespace is refused.
    pub namespace: [u8; 16],
    /// Signs the journal and the bytes of blocks, so that nobody without it can make a block that
    /// is taken for one of ours. What the directory holds without this key, or with another one, is
    /// not used ([`Dropped::other_key`](crate::Dropped::other_key)). Without a key, checksums find
    /// accidents only.
    pub key: Option<DeploymentKey>,
    /// Blocks are encrypted before they are written. A directory has encrypted blocks or others,
    /// not both. `None`: they are not.
    pub encryption: Option<DiskEncryption>,
    /// What lies in a slot: rank slice, layout, axis order, in any encoding; at most
    /// [`DiskConfig::MAX_GEOMETRY_BYTES`]. A directory of another geometry is refused.
    pub geometry: Vec<u8>,
    /// Who moves the bytes.
    pub engine: EngineMode,
    /// What moves the bytes with [`EngineMode::Custom`]; `None` with the others.
    pub slot_io: Option<Arc<dyn SlotIo>>,
    /// Operations at each device at a time where a ring moves the bytes, 1 to 4096.
    pub depth: usize,
    /// Threads of a pool, 1 to 256: its number of operations at the device.
    pub threads: usize,
    /// Operations that may be queued or running; more are refused with
    /// [`SubmitError::QueueFull`](crate::SubmitError::QueueFull).
    pub queue_depth: usize,
    /// Blocks whose memory lies in pieces of at least so many bytes, in the mean, are read and
    /// written straight, any number of pieces. Around the page cache, shorter pieces are collected
    /// in a buffer: a device spends time on every piece. With 0 only memory that the device cannot
    /// take goes through a buffer, and blocks that are encrypted.
    pub straight_bytes: u64,
    /// Bytes of that buffer at most, where a ring moves the bytes; but always room for one block.
    /// It is made when the first block needs it: half a megabyte, or a block that is larger, for
    /// each operation at a device ([`depth`](Self::depth)). Where that would be more, operations
    /// wait for each other. A pool has room for one block in each of its threads.
    pub bounce_bytes: u64,
    /// Group commit.
    pub commit: GroupCommit,
    /// The journal is rewritten as a snapshot when it holds this many records more than there are
    /// occupied slots, and at least a fifth more. That makes 96 bytes an entry from five times as
    /// many slots on. While the snapshot is written it takes 80 bytes an entry beside that.
    pub compact_slack_records: u64,
    /// How long dropping the engine waits for running operations and the last commit. What still
    /// runs then is detached: it keeps its memory until the kernel is done with it.
    pub drop_deadline: Duration,
}

/// The keys of a directory that is read without an engine: those that it was written with.
#[derive(Clone, Debug, Default)]
pub struct DiskKeys {
    /// As [`DiskConfig::key`].
    pub signing: Option<DeploymentKey>,
    /// As [`DiskConfig::encryption`].
    pub encryption: Option<DiskEncryption>,
}

/// The operator's keys of a directory whose blocks are encrypted.
#[derive(Clone, Debug)]
pub struct DiskEncryption {
    /// The key that wraps data keys.
    pub key: OperatorKey,
    /// The one before it: data keys that it has wrapped are wrapped anew at opening, and new blocks
    /// get new ones.
    pub previous: Option<OperatorKey>,
}

impl DiskConfig {
    /// Longest `geometry`, in bytes.
    pub const MAX_GEOMETRY_BYTES: usize = MAX_GEOMETRY_BYTES;

    /// A configuration with defaults: the best engine, 32 operations at the device (8 without a
    /// ring), 2048 queued, commit every 50 ms.
    pub fn new(dir: impl Into<PathBuf>, num_slots: u32, block_bytes: u64, namespace: [u8; 16]) -> Self {
        Self {
            dir: dir.into(),
            more_dirs: Vec::new(),
            access: FileAccess::Owner,
            num_slots,
            block_bytes,
            namespace,
            key: None,
            encryption: None,
            geometry: Vec::new(),
            engine: EngineMode::Auto,
            slot_io: None,
            depth: 32,
            threads: 8,
            queue_depth: 2048,
            straight_bytes: STRAIGHT_BYTES,
            bounce_bytes: BOUNCE_BYTES,
            commit: GroupCommit::default(),
            compact_slack_records: 16_384,
            drop_deadline: Duration::from_secs(5),
        }
    }

    /// Directories in all.
    pub(crate) fn num_dirs(&self) -> usize {
        1 + self.more_dirs.len()
    }

    /// Operations that a ring has at all devices at a time.
    pub(crate) fn ring_depth(&self) -> usize {
        self.depth.saturating_mul(self.num_dirs()).min(4096)
    }

    /// Distance between slots in bytes: `block_bytes` rounded up to 4096.
    ///
    /// # Errors
    /// A block so large that this does not fit in 64 bits.
    pub fn slot_stride(&self) -> Result<u64, ConfigError> {
        self.block_bytes
            .checked_next_multiple_of(SLOT_ALIGNMENT)
            .ok_or(ConfigError::TooLarge { num_slots: self.num_slots, block_bytes: self.block_bytes })
    }

    /// Length of the slot file in bytes.
    ///
    /// # Errors
    /// More than a file can have (2^63 - 1).
    pub fn slot_file_bytes(&self) -> Result<u64, ConfigError> {
        let too_large = ConfigError::TooLarge { num_slots: self.num_slots, block_bytes: self.block_bytes };
        let bytes = self.slot_stride()?.checked_mul(u64::from(self.num_slots)).ok_or(too_large.clone())?;
        if i64::try_from(bytes).is_err() { Err(too_large) } else { Ok(bytes) }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// The first field with a value that cannot be: zero, beyond its range, or slots that together
    /// are longer than a file can be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        positive("num_slots", u64::from(self.num_slots))?;
        positive("block_bytes", self.block_bytes)?;
        positive("queue_depth", self.queue_depth as u64)?;
        positive("commit.max_slots", u64::from(self.commit.max_slots))?;
        within("threads", self.threads, 256)?;
        within("depth", self.depth, 4096)?;
        within("directories", self.num_dirs(), 64)?;
        if self.slot_io.is_some() != (self.engine == EngineMode::Custom) {
            return Err(ConfigError::SlotIo { given: self.slot_io.is_some() });
        }
        if self.encryption.is_some() && self.block_bytes > MAX_ENCRYPTED_BYTES {
            return Err(ConfigError::EncryptedBytes { block_bytes: self.block_bytes });
        }
        if self.geometry.len() > Self::MAX_GEOMETRY_BYTES {
            return Err(ConfigError::Geometry { len: self.geometry.len(), max: Self::MAX_GEOMETRY_BYTES });
        }
        self.slot_file_bytes().map(drop)
    }
}

fn positive(field: &'static str, value: u64) -> Result<(), ConfigError> {
    if value == 0 { Err(ConfigError::Zero { field }) } else { Ok(()) }
}

fn within(field: &'static str, value: usize, max: usize) -> Result<(), ConfigError> {
    if (1..=max).contains(&value) { Ok(()) } else { Err(ConfigError::Range { field, value, max }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Break = fn(&mut DiskConfig);

    #[test]
    fn each_bad_field_is_named_with_its_value() {
        let good = DiskConfig::new("d", 4, 5000, [0; 16]);
        assert_eq!(good.validate(), Ok(()));
        assert_eq!(good.slot_stride(), Ok(8192));
        assert_eq!(good.slot_file_bytes(), Ok(4 * 8192));
        let cases: [(Break, &str); 9] = [
            (|c| c.num_slots = 0, "num_slots"),
            (|c| c.block_bytes = 0, "block_bytes"),
            (|c| c.block_bytes = u64::MAX, "18446744073709551615"),
            (|c| c.block_bytes = 1 << 62, "4 slots"),
            (|c| c.threads = 257, "257"),
            (|c| c.depth = 0, "depth is 0: it must be 1 to 4096"),
            (|c| c.queue_depth = 0, "queue_depth"),
            (|c| c.engine = EngineMode::Custom, "slot_io is not given"),
            (|c| c.geometry = vec![0; DiskConfig::MAX_GEOMETRY_BYTES + 1], "geometry"),
        ];
        for (break_it, named) in cases {
            let mut bad = good.clone();
            break_it(&mut bad);
            let error = bad.validate().unwrap_err().to_string();
            assert!(error.contains(named), "{error} names {named}");
        }
    }
}
