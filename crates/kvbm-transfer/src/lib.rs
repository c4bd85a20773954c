//! The worker: takes plans from a leader and moves the bytes of KV blocks between tiers.
//!
//! **Knows:** one rank's tiers as bound memory and a disk engine; queues, gates, deadlines; which
//! identity and checksum each slot of host memory holds.
//! **Must never know:** why a block moves,
//! what else is cached, what other ranks do. It chooses no slot and evicts nothing: plans name
//! slots, and the leader keeps them from being used for anything else meanwhile.
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
//! - A report comes after the hardware let go of source and destination, and says for each block
//!   whether it arrived.
//! - A plan that has not started can be cancelled and can expire; a started one runs to its end.
//! - Queues are bounded: a full one answers [`QueueFull`](kvbm_plan::FailureKind::QueueFull) at
//!   once.
//! - No executor blocks on the hardware: completions come back as messages. Only the thread that
//!   flushes waits for the disk.
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `start` | builds a worker: tiers, executors, threads | `manager`, `volume_requests`, `scrub`, `flush`, `execute`, `threads`, `hub`, `schedule`, `host`, `slot_layout`, `damaged_objects`, `config`, `movers`, `error`, `completion_queue` |
//! | `remote_writes` | blocks written to G2 of peers, and by them | `remote`, `host` |
//! | `remote` | G2 offered to peers, and filled from theirs | `manager`, `host` |
//! | `predecessor` | blocks that a deployment with another number of ranks left on disk | `geometry`, `config` |
//! | `manager` | the worker: commands in, reports out | `volume_requests`, `scrub`, `handle`, `flush`, `hub`, `host`, `schedule`, `stats`, `finished`, `report_slot`, `config`, `error` |
//! | `volume_requests` | queues and threads of requests about volumes | `volume_answers`, `execute`, `volume_threads`, `hub`, `damaged_objects`, `config`, `error` |
//! | `stepped` | a worker's side of volumes, without threads | `volume_answers`, `execute`, `damaged_objects`, `cuts`, `config` |
//! | `volume_answers` | probes, removals, opening and closing of volumes | `execute`, `damaged_objects`, `cuts`, `config` |
//! | `scrub` | verifies G3 in the background | `hub` |
//! | `handle` | a submitted plan: future, wait, cancel | `hub`, `report_slot` |
//! | `fuzz` | bodies of the fuzz targets | `geometry` |
//! | `flush` | flushes G3 on its own thread | `hub`, `error` |
//! | `execute` | moves blocks: one executor per path | `volume_threads`, `hub`, `schedule`, `host`, `slot_layout`, `damaged_objects`, `cuts`, `config`, `movers`, `error`, `completion_queue` |
//! | `volume_threads` | threads that call volumes | `threads`, `hub`, `error` |
//! | `threads` | names and starts threads | `error` |
//! | `hub` | the lock around all plans, and the thread that reports | `schedule`, `stats`, `finished`, `error`, `completion_queue` |
//! | `schedule` | state of all plans: queues, gates, deadlines | `stats`, `finished`, `report_slot`, `error` |
//! | `stats` | counters | - |
//! | `finished` | finished plans with a tag | - |
//! | `report_slot` | where a report waits for its handle | - |
//! | `host` | G2: identity, checksum and users of each slot | `slot_layout`, `config`, `error` |
//! | `slot_layout` | layout of a block in a slot of G3 | `geometry`, `error` |
//! | `geometry` | text form of a slot layout in the journal | - |
//! | `damaged_objects` | objects that a read found damaged | - |
//! | `cuts` | how blocks are cut into objects | `config` |
//! | `config` | configuration | `movers`, `error` |
//! | `movers` | copies by the processes that G1 belongs to | - |
//! | `error` | errors | - |
//! | `agent_io` | bytes of the disk tier moved by an agent for files | - |
//! | `completion_queue` | finished stages of an executor, and its wake-up | - |

mod agent_io;
mod completion_queue;
mod config;
mod cuts;
mod damaged_objects;
mod error;
mod execute;
mod finished;
mod flush;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod geometry;
mod handle;
mod host;
mod hub;
mod manager;
mod movers;
mod predecessor;
mod remote;
mod remote_writes;
mod report_slot;
mod schedule;
mod scrub;
mod slot_layout;
mod start;
mod stats;
#[cfg(any(test, kvbm_sim))]
pub mod stepped;
mod threads;
mod volume_answers;
mod volume_requests;
mod volume_threads;

pub use agent_io::{AgentIo, MakeAgent};
pub use config::{
    DiskTier, GroupMemory, HostContent, PathConfig, PathConfigs, VerifyHost, VolumeGroup, VolumeTier,
    WorkerConfig,
};
pub use error::{BlocksBusy, ShutdownError, StartError, SubmitError};
pub use finished::FinishedPlan;
pub use geometry::{GroupsGeometry, OpaqueGeometry, SlotGeometry, UnknownGeometry};
pub use handle::{NotYet, TransferHandle};
pub use hub::Sink;
pub use kvbm_kernels::Backend;
pub use manager::TransferManager;
pub use movers::{MoveDone, MoverRing, MoverTier, Movers};
pub use predecessor::{LeftOut, NewRanks, OldFolder, OldFolders, Predecessor, PredecessorError, TakenOver};
pub use remote::{HostRead, PinnedBlocks, Pins, RemoteHost};
pub use remote_writes::{HostWrite, Reservation, ReservedBlocks};
pub use slot_layout::disk_layout;
pub use stats::{PathStats, WorkerStats};
