//! The worker: takes plans from a leader and moves the bytes of KV blocks between tiers.
//!
//! **Knows:** one rank's tiers as bound memory and a disk engine; queues, gates, deadlines; which identity and checksum each
//! slot of host memory holds.
//! **Must never know:** why a block moves, what else is cached, what other ranks do. It chooses no slot and evicts nothing:
//! plans name slots, and the leader keeps them from being used for anything else meanwhile.
//!
//! | what | where |
//! |---|---|
//! | commands and reports in wire form, or handles | [`TransferManager`], [`TransferHandle`] |
//! | queues, gates, predecessors, deadlines, repeated plans | `schedule` |
//! | executors: device streams and kernels, CPU, disk, staging ring | `execute` |
//! | identities and checksums of host slots | `host` |
//! | what a deployment of another size left on the disk | `predecessor`, `geometry` |
//!
//! Rules that hold for every path:
//! - A report comes after the hardware let go of source and destination, and says for each block whether it arrived.
//! - A plan that has not started can be cancelled and can expire; a started one runs to its end.
//! - Queues are bounded: a full one answers [`QueueFull`](kvbm_plan::FailureKind::QueueFull) at once.
//! - No executor blocks on the hardware: completions come back as messages. Only the thread that flushes waits for the disk.

mod asks;
mod config;
mod crew;
mod cuts;
mod damaged;
mod error;
mod execute;
mod flush;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod geometry;
mod handle;
mod host;
mod hub;
mod inbox;
mod manager;
mod predecessor;
mod schedule;
mod scrub;
mod slots;
mod start;
mod stats;

pub use config::{DiskTier, PathConfig, PathConfigs, VerifyHost, VolumeTier, WorkerConfig};
pub use error::{ShutdownError, StartError, SubmitError};
pub use geometry::{SlotGeometry, UnknownGeometry};
pub use handle::{NotYet, TransferHandle};
pub use hub::Sink;
pub use kvbm_kernels::Backend;
pub use manager::TransferManager;
pub use predecessor::{LeftOut, Predecessor, PredecessorError, TakenOver};
pub use slots::disk_layout;
pub use stats::{PathStats, WorkerStats};
