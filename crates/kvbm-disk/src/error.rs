//! What can go wrong, where, and what to do about it.

use crate::EngineKind;
use kvbm_keys::{KeyId, MAX_ENCRYPTED_BYTES};
use kvbm_plan::{BlockId, BlockIdentity, FailureKind};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// A configuration that no engine can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// A field is zero.
    #[error("{field} is 0: it must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// The slot file would be longer than a file can be.
    #[error(
        "{num_slots} slots of {block_bytes} bytes exceed the largest file: lower num_slots or block_bytes"
    )]
    TooLarge {
        /// Slots asked for.
        num_slots: u32,
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// A number out of range.
    #[error("{field} is {value}: it must be 1 to {max}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The largest that works.
        max: usize,
    },
    /// The engine is the caller's own and what moves its bytes is not given, or the other way
    /// round.
    #[error(
        "slot_io is {}given: give it with the engine Custom, and with no other", if *given { "" } else { "not " }
    )]
    SlotIo {
        /// Whether it is given.
        given: bool,
    },
    /// Too long for the cipher.
    #[error(
        "blocks of {block_bytes} bytes are too long to be encrypted: {MAX_ENCRYPTED_BYTES} bytes are the most"
    )]
    EncryptedBytes {
        /// Bytes of a block.
        block_bytes: u64,
    },
    /// The description is too long for the journal's header.
    #[error("geometry takes {len} bytes, at most {max} fit the header: pass a digest of it")]
    Geometry {
        /// Bytes given.
        len: usize,
        /// Bytes allowed.
        max: usize,
    },
}

/// A journal that this build cannot or must not use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Shorter than a header.
    #[error("journal of {len} bytes is shorter than its header of {need}: clear the directory")]
    Truncated {
        /// Its length.
        len: u64,
        /// Bytes of a header.
        need: u64,
    },
    /// Not a journal of ours.
    #[error("the file does not start as a kvbm journal: choose another directory")]
    Magic,
    /// Written by another version of the format.
    #[error(
        "journal format version {found}, this build reads 2 to {supported}: use the kvbm that wrote it, \
         choose another directory, or clear this one"
    )]
    Version {
        /// Version found.
        found: u32,
        /// The newest version that this build reads.
        supported: u32,
    },
    /// Written without a key, with another one, or with one where we have none.
    #[error("{}", other_key(*found, *ours))]
    Key {
        /// The key that it names; none where its checksums are without one.
        found: Option<KeyId>,
        /// Ours.
        ours: Option<KeyId>,
    },
    /// The header's checksum does not match.
    #[error("the journal's header is damaged: clear the directory (its blocks cannot be trusted)")]
    HeaderChecksum,
    /// A field of the header is out of range although its checksum matches.
    #[error("the journal's header says {field} = {value}, which cannot be: clear the directory")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

fn other_key(found: Option<KeyId>, ours: Option<KeyId>) -> String {
    let named = |key: Option<KeyId>| key.map_or("no key".to_owned(), |key| format!("key {key}"));
    let remedy = match (found, ours) {
        (Some(_), None) => "give the deployment's secret (namespace.deployment_secret)",
        (None, Some(_)) => "leave the secret out to look at it; its blocks are not used with one",
        _ => "give the secret of the deployment that wrote it",
    };
    format!("the journal is signed with {}, ours is {}: {remedy}", named(found), named(ours))
}

/// A key file that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyFileError {
    /// Not a key file of this version, or damaged.
    #[error(
        "{0}: put back the file that belongs to the directory; without it its blocks cannot be read, and \
         `kvbm disk clear` makes room for new ones"
    )]
    Unreadable(String),
    /// Its data keys are wrapped with another operator's key.
    #[error(
        "its data keys are wrapped with the operator's key {found}, and {}: give {found} as \
         encryption.previous_key_file or encryption.key_file; if it is lost so are the blocks, and \
         `kvbm disk clear` makes room for new ones",
        given(*ours, *previous)
    )]
    Operator {
        /// The key that is needed.
        found: KeyId,
        /// The key that was given.
        ours: KeyId,
        /// The key before it, if that was given.
        previous: Option<KeyId>,
    },
}

fn given(ours: KeyId, previous: Option<KeyId>) -> String {
    match previous {
        None => format!("{ours} was given"),
        Some(previous) => format!("{ours} and, as the one before it, {previous} were given"),
    }
}

/// An engine could not be opened. What the directory held is still there, with one exception. Where
/// the number of slots was lowered, an error that comes later than the checks of the journal leaves
/// no blocks in slots beyond it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Another engine has the directory.
    #[error("{} is in use by {owner}: stop it, or choose another directory", dir.display())]
    Busy {
        /// The directory.
        dir: PathBuf,
        /// What the lock file says about the owner.
        owner: String,
    },
    /// The directories are no set, or not all of it. Nothing was changed that held blocks.
    #[error("{dir}, directory {member} of {members}: {reason}")]
    Stripe {
        /// The directory at fault.
        dir: String,
        /// Its place among those that were named, from 1.
        member: usize,
        /// How many were named.
        members: usize,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// There is no journal.
    #[error("{} is no directory of kvbm: it has no journal.kvbm", dir.display())]
    NoJournal {
        /// The directory.
        dir: PathBuf,
    },
    /// The journal is not one that this build reads.
    #[error("{file}: {source}")]
    Format {
        /// The journal.
        file: String,
        /// What is wrong with it.
        source: FormatError,
    },
    /// Blocks of the directory are encrypted and no operator's key was given, or the other way
    /// round.
    #[error("{file}: {}", if *encrypted {
        "its blocks are encrypted, and no operator's key was given: set disk.encrypt and encryption.key_file or \
         encryption.key_command (a command: --key-file), or choose another directory"
    } else {
        "its blocks are not encrypted, and disk.encrypt is set: remove them with `kvbm disk clear`, or choose another \
         directory"
    })]
    Encryption {
        /// The journal.
        file: String,
        /// Whether blocks are encrypted.
        encrypted: bool,
    },
    /// The key file cannot be used.
    #[error("{file}: {source}")]
    Keys {
        /// The key file.
        file: String,
        /// What is wrong with it.
        source: KeyFileError,
    },
    /// The directory belongs to another namespace.
    #[error(
        "the directory holds blocks of namespace {}, not {}: choose another directory for this model, or clear this one",
        hex(found),
        hex(expected)
    )]
    Namespace {
        /// Tag in the journal.
        found: [u8; 16],
        /// Tag configured.
        expected: [u8; 16],
    },
    /// The directory belongs to another geometry.
    #[error(
        "the directory was written with {what} = {found}, configured is {expected}: choose another directory, or clear this one"
    )]
    Geometry {
        /// What differs.
        what: &'static str,
        /// Value in the journal.
        found: String,
        /// Value configured.
        expected: String,
    },
    /// The slot file does not fit.
    #[error("no space for {bytes} bytes of slots: lower the capacity, or free space ({source})")]
    NoSpace {
        /// Bytes of the slot file.
        bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The engine that was asked for does not work here.
    #[error(
        "the engine {engine} is not possible here: {reason}; configure the engine auto, or another directory"
    )]
    NoEngine {
        /// The engine.
        engine: EngineKind,
        /// What the probe found.
        reason: String,
    },
    /// The system refused.
    #[error("cannot {doing}: {source}; {}", way_out(source))]
    Io {
        /// What was being done, with the file's name.
        doing: String,
        /// What the system said.
        source: io::Error,
    },
}

/// What to do about a file or folder that the system refuses.
fn way_out(refusal: &io::Error) -> &'static str {
    use io::ErrorKind::{
        AlreadyExists, NotADirectory, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem,
        StorageFull,
    };
    match refusal.kind() {
        // A file has the name of the directory that was to be created.
        AlreadyExists | NotADirectory | NotFound | PermissionDenied | ReadOnlyFilesystem => {
            "name a directory that this process may read and write"
        }
        QuotaExceeded | StorageFull => "free space there, or name another directory",
        _ => "the system's log may say more of the device; another directory does without it",
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// How a slot failed to be the block that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SlotCorruption {
    /// The bytes are not those that were encrypted as this block.
    #[error("the block does not decrypt with data key {key}")]
    Tag {
        /// Number of the data key.
        key: u64,
    },
    /// The bytes are not those that were written under this identity.
    #[error("checksum {found:016x}, expected {expected:016x}")]
    Checksum {
        /// From the slot's record.
        expected: u64,
        /// Of the bytes read.
        found: u64,
    },
    /// The slot's record names another block: the caller's index is stale, or slots were swapped.
    #[error("the slot holds block {} at position {}", found.hash, found.position)]
    WrongIdentity {
        /// The block that the slot holds.
        found: BlockIdentity,
    },
    /// The slot's record has another length.
    #[error("the slot holds {recorded} bytes, {requested} were asked for")]
    WrongLength {
        /// Bytes recorded.
        recorded: u64,
        /// Bytes asked for.
        requested: u64,
    },
    /// The slot file ends inside the block.
    #[error("the slot file ends {missing} bytes before the end of the block")]
    ShortFile {
        /// Bytes that are not there.
        missing: u64,
    },
}

/// Why an operation on one slot failed. A failed read delivers nothing: what is in its memory must
/// not be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OpError {
    /// The slot does not hold the block (see the cause): a miss. Recompute the block. With a wrong
    /// checksum the slot is quarantined; where the slot file ends too early it is free, as it is
    /// when the directory is opened again.
    #[error("slot {slot} is not block {} at position {}: {cause}", identity.hash, identity.position)]
    Corrupt {
        /// The slot.
        slot: BlockId,
        /// The block that was asked for.
        identity: BlockIdentity,
        /// What was found.
        cause: SlotCorruption,
    },
    /// The source of a write does not have the checksum that the caller gave: its memory is
    /// damaged.
    #[error(
        "source of the write to slot {slot} has checksum {found:016x}, expected {expected:016x}: nothing written"
    )]
    Source {
        /// The slot.
        slot: BlockId,
        /// From the caller.
        expected: u64,
        /// Of the bytes in memory.
        found: u64,
    },
    /// The slot holds nothing (never written, released, or its write failed): a miss.
    #[error("slot {slot} holds nothing: recompute the block")]
    Missing {
        /// The slot.
        slot: BlockId,
    },
    /// The slot was being overwritten when the engine's last life ended without a shutdown: a miss.
    /// It is free now.
    #[error("slot {slot} was being overwritten when the process before this one ended: recompute the block")]
    CutShort {
        /// The slot.
        slot: BlockId,
    },
    /// The slot is quarantined: its bytes were damaged once. Use another slot.
    #[error("slot {slot} is quarantined: use another slot")]
    Quarantined {
        /// The slot.
        slot: BlockId,
    },
    /// The slot was released while the operation ran.
    #[error("slot {slot} was released while the operation ran: nothing to do")]
    Released {
        /// The slot.
        slot: BlockId,
    },
    /// Another operation has the slot: a write beside a read or write of the same slot is a
    /// caller's mistake.
    #[error("slot {slot} is in use by another operation: wait for its completion")]
    Busy {
        /// The slot.
        slot: BlockId,
    },
    /// There is no such slot.
    #[error("slot {slot} does not exist: the engine has {num_slots}")]
    NoSuchSlot {
        /// The slot.
        slot: BlockId,
        /// Slots of the engine.
        num_slots: u32,
    },
    /// The fragments are empty or longer than a slot.
    #[error("a block of {bytes} bytes does not fit slot {slot}: 1 to {max} do")]
    Length {
        /// The slot.
        slot: BlockId,
        /// Bytes given.
        bytes: u64,
        /// Bytes of a block.
        max: u64,
    },
    /// The device failed. Recompute the block; check the disk if this repeats.
    #[error("{op} of slot {slot} failed at byte {at} of the block: {message}; check the disk")]
    Io {
        /// `read`, `write` or `scrub`.
        op: &'static str,
        /// The slot.
        slot: BlockId,
        /// Offset in the block that was reached.
        at: u64,
        /// Kind of the system's error.
        kind: io::ErrorKind,
        /// What the system said.
        message: String,
    },
    /// There is no data key for the block: nothing was written.
    #[error("slot {slot}: no data key to encrypt the block with: {message}")]
    NoKey {
        /// The slot.
        slot: BlockId,
        /// Why.
        message: String,
    },
    /// The batch's deadline passed before the operation started.
    #[error(
        "slot {slot}: the deadline passed before the operation started; recompute, or raise the deadline"
    )]
    Deadline {
        /// The slot.
        slot: BlockId,
    },
    /// The batch was cancelled before the operation started.
    #[error("slot {slot}: cancelled before the operation started")]
    Cancelled {
        /// The slot.
        slot: BlockId,
    },
    /// The engine was shut down before the operation started.
    #[error("slot {slot}: the engine was shut down before the operation started")]
    ShuttingDown {
        /// The slot.
        slot: BlockId,
    },
}

impl OpError {
    /// The kind that a transfer report carries.
    pub const fn kind(&self) -> FailureKind {
        match self {
            // The block is gone with the end of its file, or with the file on a network mount (a
            // stale handle); its slot is good.
            Self::Corrupt { cause: SlotCorruption::ShortFile { .. }, .. }
            | Self::Io { kind: io::ErrorKind::StaleNetworkFileHandle, .. }
            | Self::Missing { .. }
            | Self::CutShort { .. }
            | Self::Released { .. } => FailureKind::Missing,
            Self::Corrupt { .. } | Self::Source { .. } => FailureKind::Corrupt,
            Self::Quarantined { .. } | Self::Busy { .. } | Self::Io { .. } => FailureKind::Io,
            Self::NoSuchSlot { .. } | Self::Length { .. } => FailureKind::Unsupported,
            // The device was not asked.
            Self::Deadline { .. } | Self::NoKey { .. } => FailureKind::PathBusy,
            Self::Cancelled { .. } => FailureKind::Cancelled,
            Self::ShuttingDown { .. } => FailureKind::ShuttingDown,
        }
    }
}

/// A flush that did not reach its end. What was durable before still is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// The deadline passed; the commit goes on.
    #[error(
        "flush took longer than {deadline:?}: {durable_blocks} blocks are durable; raise the deadline or flush again"
    )]
    Deadline {
        /// Time allowed.
        deadline: Duration,
        /// Blocks that are durable now.
        durable_blocks: u64,
    },
    /// The device refused.
    #[error(
        "commit failed: {message}; {durable_blocks} blocks are durable; check the disk and its free space"
    )]
    Io {
        /// What failed.
        message: String,
        /// Blocks that are durable now.
        durable_blocks: u64,
    },
    /// The engine is shut down.
    #[error("the engine is shut down; {durable_blocks} blocks are durable")]
    ShutDown {
        /// Blocks that are durable.
        durable_blocks: u64,
    },
}
