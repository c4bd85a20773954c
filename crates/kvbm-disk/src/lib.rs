//! G3: KV blocks in a preallocated slot file on an SSD, verified on every read, found again after a restart.
//!
//! **Knows:** one directory, its slot file and journal; which slot holds which block, its checksum and whether
//! that is durable; how to read and write a slot from any number of memory fragments.
//! **Must never know:** which blocks are worth keeping, what is on other tiers or ranks, how a block is laid
//! out in memory (it sees byte fragments in order). It never chooses a slot: the caller's pool does.
//!
//! What comes from the disk is untrusted. A read is `Ok` only after the slot's record named the very block that
//! was asked for and the checksum of the bytes matched; everything else is a miss that says why. A slot whose
//! bytes are damaged is quarantined, and the quarantine survives a restart.
//!
//! Bytes are moved by a ring of the kernel (io_uring), by threads around the page cache, or by threads through it: what a
//! probe finds to work ([`EngineMode`]).
//!
//! Write order: data, `fdatasync` of the slot file, append the record, `fdatasync` of the journal, group-committed
//! by a thread of its own. A block may be read as soon as its write completed; it is *durable* when its record is
//! synced ([`DiskEngine::flush`]). Byte formats are drawn in `docs/formats.md`.
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

mod archive;
mod batch;
mod buffer;
mod checksum;
mod commit;
mod config;
mod engine;
mod error;
mod executor;
pub mod fault;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod info;
mod journal;
pub mod medium;
pub mod offline;
mod open;
mod ops;
mod recorded;
mod renew;
mod scrub;
mod shared;
mod slots;
mod stripes;
mod table;

pub use archive::Archive;
pub use batch::{BatchHandle, Completion, IoBatch, OpDone, OpOutcome, Rejected, SubmitError};
pub use buffer::{Fragments, IoMemory, OwnedBuffer, ReadTarget};
pub use checksum::{BlockChecksum, ContentCrc};
pub use config::{DiskConfig, EngineMode, GroupCommit, SLOT_ALIGNMENT};
pub use engine::DiskEngine;
pub use error::{ConfigError, Corruption, FlushError, FormatError, OpError, OpenError};
pub use info::{
    DirInfo, Dropped, EngineChoice, EngineInfo, EngineKind, EngineStats, FlushReport, Recovered,
    RecoveredSlot,
};
pub use kvbm_plan::FileAccess;
pub use scrub::{Scrubbed, Scrubber};
