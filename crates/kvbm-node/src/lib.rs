//! The node daemon: a cache that outlives its engines, and the engine's side of it.
//!
//! **Knows:** which engines are attached, whose blocks of G1 are whose, and what is said over the
//! daemon's socket.
//! **Must never know:** which blocks are worth keeping, how bytes move, what a command line is.
//!
//! The daemon ([`NodeServer`]) has one `KvBlockManager<Engine>`. Its G1 is an id space that all
//! attached engines share, its G2 is memory that they map. An engine's process ([`NodeEngine`]) has
//! a line for its calls and one for each rank whose blocks it copies.
//!
//! ```text
//! engine's scheduler                       daemon
//!   look_up, commit, offload ------------> manager: registry, tickets, claims, checksums
//!   finished <---------------------------- |
//! engine's rank                            | worker of the rank: verifies, then
//!   mover: copies G1 <-> G2 <------------- |   "copy these blocks", one report each
//!     |                                    |
//!   G1 (the engine's)      host memory (sealed, mapped by both): G2, staging rings
//! ```
//!
//! # Failures
//! An engine whose process goes loses its G1 and nothing else. Slots that it may still write are
//! reused when the kernel says that it is gone, when it has answered, or when it has attached anew.
//! An engine whose daemon goes serves on with misses, and attaches again by itself.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `server` | the daemon: one manager, many engines | `successor`, `calls`, `node`, `instances`, `movers`, `handover`, `slots`, `shape`, `protocol`, `error` |
//! | `successor` | a daemon takes the place of another one | `node`, `handover`, `shape`, `protocol` |
//! | `calls` | a scheduler's calls, carried out | `node`, `instances`, `protocol` |
//! | `node` | what all sessions share | `instances`, `movers`, `handover`, `shape`, `protocol` |
//! | `instances` | engines that are attached, and their blocks | `movers`, `points`, `protocol` |
//! | `points` | points of an engine's work that copies wait for | - |
//! | `movers` | the movers of one rank, as the daemon's worker sees them | `protocol` |
//! | `fuzz` | the body of the fuzz target | `handover`, `slots`, `shape`, `protocol` |
//! | `handover` | what the new daemon is given: memory, and an index of it | `shape`, `protocol` |
//! | `engine` | the engine's side: its calls | `attachment`, `mover`, `terms`, `protocol`, `error` |
//! | `attachment` | attaching, and attaching again | `mover`, `terms`, `shape`, `protocol`, `error` |
//! | `mover` | copies in the engine's process | `slots`, `protocol` |
//! | `slots` | how the slots of host memory lie, for whoever maps it | `protocol` |
//! | `terms` | what a process attaches with, and what its calls return | `protocol` |
//! | `protocol` | what is said over the socket | `shape` |
//! | `shape` | what both sides must agree on of the cache groups and their blocks | - |
//! | `error` | errors | - |
#![forbid(unsafe_code)]

mod attachment;
mod calls;
mod engine;
mod error;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod handover;
mod instances;
mod mover;
mod movers;
mod node;
mod points;
mod protocol;
mod server;
mod shape;
mod slots;
mod successor;
mod terms;

pub use engine::NodeEngine;
pub use error::{DaemonError, NodeError, NotFree};
pub use kvbm_link::LineTimes;
pub use mover::MoverMemory;
pub use server::{AttachedEngine, NodeServer};
pub use terms::{EngineTerms, NodeLoad, NodeOffload, NodePromise, NodeStatus};
