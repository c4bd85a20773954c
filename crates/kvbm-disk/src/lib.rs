//! G3: KV blocks in a preallocated slot file on an SSD, verified on every read, found again after a
//! restart.
//!
//! **Knows:** one directory, its slot file and journal; which slot holds which block, its checksum
//! and whether that is durable; how to read and write a slot from any number of memory fragments.
//! **Must never know:** which blocks are worth keeping, what is on other tiers or ranks, how a
//! block is laid out in memory (it sees byte fragments in order). It never chooses a slot: the
//! caller's pool does.
//!
//! What comes from the disk is untrusted. A read is `Ok` only after the slot's record named the
//! very block that was asked for and the checksum of the bytes matched. Everything else is a miss
//! that says why. A slot whose bytes are damaged is quarantined, and the quarantine survives a
//! restart.
//!
//! Blocks may be encrypted ([`DiskConfig::encryption`]): on their way to the disk they pass through
//! a buffer of bounded size, and nothing comes back from there before its tag is compared.
//!
//! Bytes are moved by a ring of the kernel (io_uring), by threads around the page cache, or by
//! threads through it: what a probe finds to work ([`EngineMode`]). Or the caller gives what moves
//! them ([`SlotIo`]).
//!
//! Write order: data, `fdatasync` of the slot file, append the record, `fdatasync` of the journal,
//! group-committed by a thread of its own. A block may be read as soon as its write completed; it
//! is *durable* when its record is synced ([`DiskEngine::flush`]). Byte formats are drawn in
//! `docs/formats.md`.
//!
//! ```
//! use kvbm_disk::{DiskConfig, DiskEngine, IoBatch, OwnedBuffer};
//! use kvbm_plan::{BlockId, BlockIdentity, GroupId, NamespaceId, SequenceHash};
//! use std::{sync::{Arc, mpsc}, time::Duration};
//!
//! let dir = tempfile::tempdir().unwrap();
//! let (engine, recovered) = DiskEngine::open(DiskConfig::new(dir.path(), 16, 8192, [7; 16])).unwrap();
//! assert!(recovered.blocks.is_empty());
//!
//! let identity = BlockIdentity {
//!     namespace: NamespaceId(0), group: GroupId(0), hash: SequenceHash::from_bytes([1; 16]), parent: None, position: 0,
//! };
//! let (done, outcomes) = mpsc::channel();
//! let mut batch = IoBatch::new(move |outcomes| done.send(outcomes).unwrap());
//! batch.write_buffer(BlockId(3), identity, &Arc::new(OwnedBuffer::from_slice(&[42; 8192])));
//! engine.submit(batch).unwrap();
//! assert!(outcomes.recv().unwrap()[0].is_ok());
//! assert_eq!(engine.flush(Duration::from_secs(10)).unwrap().durable_blocks, 1);
//! ```
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `scrub` | reads and verifies blocks in the background | `engine`, `ops`, `shared`, `slot_file`, `slot_table`, `medium`, `error` |
//! | `offline` | inspects, verifies and repairs a directory without an engine | `engine`, `archive`, `stripes`, `config`, `journal`, `recorded_slots`, `record`, `seal`, `medium`, `error`, `info`, `keyring` |
//! | `fuzz` | bodies of the fuzz targets | `fault`, `open`, `stripes`, `config`, `journal`, `recorded_slots`, `slot_table`, `record`, `seal`, `medium`, `error`, `info`, `checksum`, `keyring` |
//! | `fault` | a simulated medium that injects faults | `keyring`, `stripes`, `journal`, `medium` |
//! | `stepped` | an engine without threads, for simulations | `engine`, `commit`, `commit_signals`, `batch`, `slot_file`, `config`, `record`, `medium`, `error`, `info` |
//! | `engine` | the engine: batches in, outcomes out | `executor`, `follow`, `commit`, `shared`, `commit_signals`, `batch`, `open`, `slot_file`, `config`, `buffer`, `journal`, `slot_table`, `seal`, `medium`, `error`, `info`, `checksum`, `keyring` |
//! | `executor` | io_uring ring or thread pool that executes operations | `ops`, `shared`, `batch`, `slot_file`, `config`, `slot_io`, `buffer`, `medium`, `error`, `info`, `keyring` |
//! | `follow` | opens directories that another engine writes | `open`, `slot_file`, `stripes`, `config`, `slot_table`, `seal`, `medium`, `error`, `info`, `keyring` |
//! | `commit` | the committer thread: group commits | `rewrite`, `shared`, `commit_signals`, `slot_file`, `stripes`, `journal`, `record`, `medium`, `error`, `info`, `keyring` |
//! | `rewrite` | writes blocks again whose sync failed | `ops`, `shared`, `slot_file`, `slot_table`, `medium` |
//! | `ops` | one operation on one slot | `shared`, `batch`, `open`, `slot_file`, `buffer`, `slot_table`, `seal`, `medium`, `error`, `keyring`, `stripes` |
//! | `shared` | state that all threads of the engine share | `commit_signals`, `slot_file`, `config`, `slot_table`, `seal`, `medium`, `info`, `keyring` |
//! | `commit_signals` | wakes the committer and reports its progress | - |
//! | `batch` | batches of operations | `buffer`, `error` |
//! | `archive` | reads the blocks of a directory that no engine has open | `open`, `stripes`, `config`, `journal`, `recorded_slots`, `slot_table`, `record`, `seal`, `medium`, `error`, `info`, `keyring` |
//! | `open` | opens a directory: recovery and probes | `slot_file`, `stripes`, `config`, `buffer`, `journal`, `recorded_slots`, `slot_table`, `record`, `seal`, `medium`, `error`, `info`, `keyring` |
//! | `slot_file` | reads and writes slots of the slot files | `stripes`, `buffer`, `medium`, `info` |
//! | `keyring` | data keys of encrypted blocks, and their file | `config`, `medium`, `error`, `info`, `checksum` |
//! | `stripes` | spreads slots over several directories | `journal`, `medium`, `error`, `checksum` |
//! | `config` | configuration | `record`, `error`, `slot_io` |
//! | `slot_io` | the seam to what moves bytes in place of system calls | `buffer` |
//! | `buffer` | memory of reads and writes | - |
//! | `journal` | appends, snapshots and replays records | `recorded_slots`, `slot_table`, `record`, `seal`, `medium`, `error`, `info` |
//! | `recorded_slots` | slots that a journal names, without an engine | `slot_table`, `record` |
//! | `slot_table` | state of each slot | `record`, `error`, `seal` |
//! | `record` | bytes of the journal header and records | `seal`, `error` |
//! | `medium` | directories and files, real or simulated | `error` |
//! | `error` | errors | `info` |
//! | `info` | status and counters | - |
//! | `seal` | sums of blocks and journals, with the deployment's key or without | `checksum` |
//! | `checksum` | checksum of a block | - |

mod archive;
mod batch;
mod buffer;
mod checksum;
mod commit;
mod commit_signals;
mod config;
mod engine;
mod error;
mod executor;
pub mod fault;
mod follow;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod info;
mod journal;
mod keyring;
pub mod medium;
pub mod offline;
mod open;
mod ops;
mod record;
mod recorded_slots;
mod rewrite;
mod scrub;
mod seal;
mod shared;
mod slot_file;
mod slot_io;
mod slot_table;
#[cfg(any(test, kvbm_sim))]
#[doc(hidden)]
pub mod stepped;
mod stripes;

pub use archive::Archive;
pub use batch::{BatchCompletion, BatchHandle, IoBatch, OpDone, OpOutcome, SubmitError, UnsubmittedBatch};
pub use buffer::{IoFragments, IoMemory, OwnedBuffer, ReadTarget};
pub use checksum::{BlockChecksum, ContentCrc};
pub use config::{DiskConfig, DiskEncryption, DiskKeys, EngineMode, GroupCommit, SLOT_ALIGNMENT};
pub use engine::DiskEngine;
pub use error::{ConfigError, FlushError, FormatError, KeyFileError, OpError, OpenError, SlotCorruption};
pub use info::{
    DirInfo, DiskFlushReport, Dropped, EncryptionInfo, EngineChoice, EngineInfo, EngineKind, EngineStats,
    Recovered, RecoveredSlot,
};
pub use keyring::{DataKeyInfo, DataKeyState};
pub use kvbm_plan::FileAccess;
pub use scrub::{Scrubbed, Scrubber};
pub use slot_io::{SlotIo, SlotIoLane, SlotIoRequest};
