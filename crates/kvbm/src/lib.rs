//! KV-cache block manager for LLM inference engines: four memory tiers, blocks with checksums.
//!
//! **Knows:** tokens, block ids, tiers, policies: it decides which block is where and what moves
//! next ([`KvBlockManager`] is the leader of a deployment).
//! **Must never know:** how bytes move. That is the workers' business; they get plans and give
//! reports through their wire form, whether they run in this process or in another.
//!
//! ```
//! use kvbm::config::{Blocks, ModelConfig};
//! use kvbm::{KvBlockManager, Namespace};
//!
//! let model = ModelConfig { num_layers: 4, num_kv_heads: 2, head_dim: 64, ..ModelConfig::default() };
//! let manager = KvBlockManager::<kvbm::Owned>::builder()
//!     .model(model)
//!     .namespace(Namespace::new("llama-3-8b").weights("2026-11-01"))
//!     .device(Blocks(64)) // G1, a pool of ours
//!     .host(Blocks(256)) // G2
//!     .build()?;
//!
//! let prompt: Vec<u32> = (0..70).collect();
//! let tokens = manager.sequence(&prompt, b"")?;
//! let prefix = manager.match_prefix(&tokens); // which blocks, on which tier; pinned while held
//! let cached = manager.onboard(prefix).wait()?; // in G1
//! let fresh = manager.allocate(tokens.num_blocks() - cached.len())?;
//! // ... the engine computes into `fresh` ...
//! let (done, _tail) = manager.commit(fresh, &tokens, cached.len())?;
//! let blocks = manager.register(done)?; // visible; offload goes on in the background
//! drop(blocks); // cached until evicted
//! assert_eq!(manager.match_prefix(&tokens).len(), 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Which call when
//! The program above lets kvbm own the memory on the accelerator ([`Owned`]). Where an engine has
//! KV tensors and block ids of its own, as vLLM, SGLang and `TensorRT-LLM` have, it is [`Engine`].
//! The page docs/engine.md of the repository has a whole program for that.
//!
//! | an engine | with [`Owned`] | with [`Engine`] |
//! |---|---|---|
//! | starts | [`builder`](KvBlockManager::builder), [`Builder::device`](Builder::device) | `Builder::engine_device`, `Builder::engine_host` |
//! | gets a request | [`sequence`](KvBlockManager::sequence), [`match_prefix`](KvBlockManager::match_prefix) | the same |
//! | brings up what is known | [`onboard`](KvBlockManager::onboard), an [`Onboarding`] | `onboard` into blocks that it names, an [`EngineOnboarding`]; [`LoadOptions`] |
//! | begins before all is there | - | [`LoadOptions::by_layer`], [`EngineOnboarding::layer_ready`] |
//! | computes the rest | [`allocate`](KvBlockManager::allocate), [`commit`](KvBlockManager::commit), [`register`](KvBlockManager::register) | `fence`, `offload`, or `offload_by_layer` and `layer_done` |
//! | knows what comes | [`prefetch`](KvBlockManager::prefetch), [`session_resumes`](KvBlockManager::session_resumes), [`branch_ends`](KvBlockManager::branch_ends) | the same |
//! | knows its own speed | [`prefilled`](KvBlockManager::prefilled) | the same |
//! | preempts a request | [`park`](KvBlockManager::park), [`resume`](KvBlockManager::resume); `park_groups`, `resume_groups` | the same of blocks that it names; `offload` |
//! | frees, reuses a block | drops the handle | [`released`](KvBlockManager::released), [`before_reuse`](KvBlockManager::before_reuse) |
//! | ends an iteration | [`step`](KvBlockManager::step) | the same |
//! | removes a model or tenant | [`forget`](KvBlockManager::forget) | the same |
//! | is watched | [`status`](KvBlockManager::status), [`metrics`](KvBlockManager::metrics), [`events`](KvBlockManager::events) | the same |
//! | ends | [`shutdown`](KvBlockManager::shutdown) | the same |
//!
//! What did not arrive ([`OnboardError`], [`EngineOnboardError`]) is computed: every failure names
//! the block, the path, why, and what to do ([`BlockFailure`]). Settings are in [`config`]. Which
//! blocks are copied down is up to a policy of [`admission`], which are evicted to a
//! [`pool::EvictionPolicy`]. Workers in other processes listen at sockets
//! ([`Builder::remote_workers`]), or stand behind any other [`worker::WorkerLink`].
//!
//! # Features
//! `worker` (default): the workers of this process. Without it the crate is the leader alone, for a
//! scheduler whose workers are elsewhere. It has no device, no disk, no NIXL in its dependencies,
//! and managers come from `build_with_workers` and `build_metadata_only`. `nats`: events over NATS,
//! core and `JetStream`. `zmq`: events over `ZeroMQ`. `tls`: TLS for metrics, administration and
//! workers on other machines. `s3`: volumes in S3-compatible stores. `compress`: compressed and
//! lossy blocks on volumes. `nixl`: memory of other nodes over NIXL. What is left out and asked for
//! is an error of `build` that names the feature.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `fuzz` | bodies of the fuzz targets | `admin`, `config` |
//! | `builder` | building a manager: what is required cannot be forgotten | `admin`, `engine`, `manager`, `leader`, `remote`, `events`, `offload`, `admission`, `tenants`, `volume`, `workers`, `socket_link`, `encryption`, `config`, `transfers`, `slots`, `ranks`, `metrics`, `worker`, `http` |
//! | `engine` | G1 in the engine's hands | `manager`, `park`, `prefetch`, `onboard`, `leader`, `events`, `remote`, `volume`, `workers`, `config`, `transfers`, `error`, `signal` |
//! | `simulation` | what the simulator does in place of threads | `manager` |
//! | `manager` | `KvBlockManager`: the calls of an engine | `groups`, `park`, `admin`, `prefetch`, `onboard`, `leader`, `events`, `places`, `remote`, `status`, `tenants`, `volume`, `workers`, `config`, `transfers`, `metrics`, `signal` |
//! | `groups` | models with several cache groups: prefixes and onboards over all of them | `onboard`, `leader`, `config`, `error` |
//! | `park` | private blocks of preempted sequences | `leader`, `transfers`, `error` |
//! | `admin` | calls of operators, over a Unix socket and HTTP | `leader`, `places`, `remote`, `status`, `tenants`, `volume`, `config`, `transfers`, `slots`, `circuit_breaker`, `ranks`, `metrics`, `http` |
//! | `prefetch` | copying a prefix from G3 to G2, before it is promised or asked for | `onboard`, `leader`, `config`, `transfers`, `metrics` |
//! | `onboard` | copying a prefix up to G1 | `leader`, `remote`, `volume`, `transfers`, `error`, `signal` |
//! | `leader` | holds the parts together: messages, rank loss, shutdown | `config`, `events`, `remote`, `status`, `offload`, `admission`, `tenants`, `volume`, `transfers`, `slots`, `circuit_breaker`, `ranks`, `metrics` |
//! | `events` | publishing events of the pool and of volumes | `volume`, `config`, `metrics`, `signal` |
//! | `places` | where blocks are, without using them | `remote`, `volume`, `config` |
//! | `remote` | memory of other nodes: who has which blocks, and reading them | `volume`, `workers`, `config`, `transfers`, `circuit_breaker`, `metrics`, `signal` |
//! | `status` | a snapshot for people and dashboards | `offload`, `tenants`, `volume`, `workers`, `slots`, `ranks` |
//! | `offload` | copies one tier down: edges, triggers, write budget, queue | `admission`, `volume`, `config`, `transfers`, `slots`, `metrics` |
//! | `admission` | which blocks are worth a copy below | - |
//! | `tenants` | tenants by name | `metrics` |
//! | `volume` | G4: what volumes hold, and requests about it | `config`, `transfers`, `circuit_breaker`, `error`, `ranks`, `metrics`, `worker` |
//! | `workers` | the workers of this process | `socket_link`, `encryption`, `config`, `transfers`, `metrics`, `worker` |
//! | `socket_link` | links to workers in other processes | `config`, `worker` |
//! | `encryption` | operator's keys from files and commands | `config` |
//! | `config` | settings, declared once | `http` |
//! | `transfers` | from a request to the last report: plans, deadlines, settlement | `circuit_breaker`, `error`, `slots`, `ranks`, `metrics`, `signal` |
//! | `error` | failures of blocks | - |
//! | `slots` | slots of G3: releases, removals, directories, quarantine | `circuit_breaker`, `ranks`, `metrics`, `signal` |
//! | `circuit_breaker` | stops requests to a store that fails, then probes it | - |
//! | `ranks` | links to the workers, rank liveness, requests, handshakes | `metrics`, `signal`, `worker` |
//! | `metrics` | counters and their exposition | `http` |
//! | `http` | as much of HTTP as metrics and administration need | - |
//! | `signal` | one-shot completion for threads and futures | - |
//! | `worker` | the seam between leader and workers | - |

#![forbid(unsafe_code)]

/// The program of that page compiles and runs.
#[cfg(all(doctest, feature = "worker"))]
#[doc = include_str!("../../../docs/engine.md")]
mod for_engine_authors {}

pub mod admin;
pub mod admission;
pub mod builder;
mod circuit_breaker;
pub mod config;
pub mod encryption;
mod engine;
mod error;
mod events;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod groups;
pub mod http;
mod leader;
mod manager;
pub mod metrics;
mod offload;
mod onboard;
mod park;
mod places;
mod prefetch;
mod ranks;
mod remote;
mod signal;
#[cfg(kvbm_sim)]
pub mod simulation;
mod slots;
pub mod socket_link;
mod status;
mod tenants;
mod transfers;
mod volume;
pub mod worker;
#[cfg(feature = "worker")]
mod workers;

pub use builder::{BuildError, Builder, check_files};
pub use circuit_breaker::CircuitState;
pub use engine::{
    Engine, EngineError, EngineOnboardError, EngineOnboarding, Fence, FinishedLoad, LoadOptions, LookUp,
    NoSuchBlock, OffloadOptions, OffloadStarted, RefusedBlock, StillBusy, TicketError, Tickets,
};
pub use error::BlockFailure;
pub use events::{EventPump, EventsError, EventsStatus};
pub use groups::{GroupBlocks, GroupOnboardError, GroupOnboarding, GroupPart, GroupPrefix};
#[cfg(feature = "worker")]
pub use kvbm_transfer::{BlocksBusy, FinishedPlan, HostContent, MoveDone, Movers};
pub use leader::{
    ClearError, FlushError, FlushReport, ForgetReceipt, ForgottenKey, PinForError, ShutdownReport,
};
pub use manager::{
    Committed, DescribeError, FenceError, KvBlockManager, OffloadError, Owned, RankLostError, SequenceError,
};
pub use offload::OffloadBacklog;
pub use onboard::{OnboardError, Onboarding};
pub use park::{ParkError, ParkRejected, Parked, ParkedGroups};
pub use places::Places;
pub use prefetch::Prefetched;
pub use ranks::RankStatus;
#[cfg(feature = "worker")]
pub use remote::{DiscoveryError, RemoteStartError};
pub use remote::{PeerStatus, Pushed};
pub use slots::DirectoryStatus;
pub use status::{PathStatus, Status};
pub use tenants::{TenantError, TenantOnTier, TenantStatus};
pub use volume::{VolumeSetError, VolumeStatus};
#[cfg(feature = "worker")]
pub use workers::{
    DiskStatus, G1Memory, GroupTensors, KeptHost, NoNixl, SharedHost, TookOver, Worker, WorkerError,
    WorkerServer, Workers, nixl_slot_io, volume_registry,
};

#[cfg(feature = "worker")]
pub use kvbm_device as device;
#[cfg(feature = "worker")]
pub use kvbm_disk as disk;
pub use kvbm_events as events_plane;
#[cfg(feature = "worker")]
pub use kvbm_kernels as kernels;
pub use kvbm_layout as layout;
#[cfg(feature = "worker")]
pub use kvbm_nixl as remote_memory;
pub use kvbm_plan as plan;
pub use kvbm_pool as pool;
#[cfg(feature = "worker")]
pub use kvbm_storage as storage;
pub use kvbm_tokens as tokens;
#[cfg(feature = "worker")]
pub use kvbm_volume as volumes;

pub use kvbm_plan::{
    BlockId, BlockIdentity, Comparison, Elements, Failure, FailureKind, GroupId, GroupKind, Path, Rank, Tier,
    VolumeDescriptor, VolumeId,
};
pub use kvbm_pool::{
    AllocError, BatchPosition, BlockBatch, BlockMetadata, Cached, Complete, Duplicates, G1, G2, G3, Lost,
    Partial, PinError, Prefix, Reset, Share, TierMask, TtlError,
};
pub use kvbm_tokens::{
    BlockChain, ChainOrigin, ExternalSequence, Namespace, SequenceHash, Token, TokenSequence,
};
