//! The event plane: every stored and removed block is published, in order, and no loss is silent.
//!
//! **Knows:** what an event says, and how events are batched, encoded, carried and followed:
//! [`KvEvent`], [`EventManager`] and [`Publisher`], the [`EventTransport`] seam with an in-process
//! implementation, and a [`Subscriber`] that detects loss. With the feature `nats` also a bucket of
//! named values (`nats::NatsBucket`), in which nodes find each other.
//!
//! **Must never know:** the pool (events come as plain data through an [`EventSource`]), where
//! bytes are in memory, who subscribes, and any network unless a feature adds one. Without features
//! this crate uses no network crate.
//!
//! # Order and loss
//!
//! Each *stream* `(source, epoch, shard)` numbers its events 0, 1, 2, ... without gaps, under the
//! lock that orders them. Nothing later renumbers them. So a missing number is a lost event,
//! wherever it was lost: in a full ring, a full queue or a broken connection. Every batch also says
//! the number of the next event, and an empty batch is a heartbeat, so the loss of the last events
//! is detected as well. [`Delivery::Gap`] and [`Delivery::Restarted`] report a loss. The follower
//! decides whether it resyncs.
//!
//! # Bounds
//!
//! A publisher holds at most one batch per stream. While a transport is unavailable, events wait in
//! the source's own ring, which drops and counts by its own rule. A subscriber's queue holds a
//! fixed number of batches and bytes. It drops the oldest ones and counts them; other subscribers
//! are not affected.
//!
//! # Modules
//!
//! A module uses only modules in rows below its own.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `fuzz` | what must hold of any bytes that are read | `vllm`, `index`, `snapshot`, `wire`, `batch`, `event` |
//! | `conformance` | the contract of a transport, as a test | `transport`, `batch`, `deadline` |
//! | `url` | transports by their URL | `zmq`, `nats`, `vllm`, `transport` |
//! | `zmq` | transport over `ZeroMQ` | `vllm`, `index`, `responders`, `queue`, `transport`, `batch`, `deadline` |
//! | `nats` | transport over NATS, core and `JetStream` | `queue`, `transport`, `batch`, `deadline` |
//! | `in_process` | transport inside this process | `responders`, `queue`, `transport`, `batch` |
//! | `vllm` | the events of engines: reads, writes and follows them | `encoder`, `index`, `snapshot`, `wire`, `batch`, `event`, `msgpack` |
//! | `publisher` | a manager on a thread of its own | `manager`, `commands`, `transport`, `deadline` |
//! | `manager` | from a source's events to batches on a transport | `encoder`, `commands`, `transport`, `wire`, `batch`, `event` |
//! | `commands` | what the thread of a publisher is told | `transport` |
//! | `encoder` | from a batch to payloads | `wire`, `batch` |
//! | `follower` | an index that is kept right by snapshots | `resync`, `subscriber`, `snapshot`, `tracker`, `index`, `transport`, `batch`, `event`, `deadline` |
//! | `resync` | streams that wait for a snapshot | `snapshot`, `tracker`, `batch`, `event` |
//! | `snapshot` | what a shard holds: questions and answers | `transport`, `wire`, `batch`, `event`, `msgpack`, `deadline` |
//! | `subscriber` | receives, decodes and tracks batches | `tracker`, `transport`, `wire`, `batch`, `deadline` |
//! | `tracker` | gaps and restarts by the numbers | `batch`, `event` |
//! | `wire` | the encoding of a batch | `batch`, `event`, `msgpack` |
//! | `index` | which source holds which prefix | `batch`, `event` |
//! | `responders` | who answers for which source | `transport`, `batch` |
//! | `queue` | the bounded queue of a subscriber | `transport`, `deadline` |
//! | `transport` | the seam to whatever carries batches | `batch` |
//! | `batch` | a batch and its stream | `event` |
//! | `event` | an event and its block | `-` |
//! | `msgpack` | `MessagePack` | `-` |
//! | `deadline` | deadlines of any duration | `-` |

#![forbid(unsafe_code)]

mod batch;
mod commands;
pub mod conformance;
mod deadline;
mod encoder;
mod event;
mod follower;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod in_process;
mod index;
mod manager;
mod msgpack;
#[cfg(feature = "nats")]
pub mod nats;
mod publisher;
mod queue;
mod responders;
mod resync;
mod snapshot;
mod subscriber;
mod tracker;
mod transport;
pub mod url;
pub mod vllm;
pub mod wire;
#[cfg(feature = "zmq")]
pub mod zmq;

pub use batch::{EventBatch, SourceId, StreamId};
pub use commands::PublisherWaker;
pub use encoder::{BatchEncoder, Replacement};
pub use event::{EventBlock, EventKind, KvEvent, Unknown};
pub use follower::{FollowStats, IndexFollower};
pub use in_process::InProcessTransport;
pub use index::{IndexStats, KvIndex, Place, PrefixMatch};
pub use manager::{ConfigError, EventManager, EventSource, PublisherConfig, PublisherStats, Pumped};
pub use msgpack::Malformed;
pub use publisher::{FlushError, Publisher};
pub use queue::InProcessConfig;
pub use resync::{Resync, StreamRepair};
pub use snapshot::{Answer, Part, Question, RemoteSnapshots, Snapshot, SnapshotServer, SnapshotSource};
pub use subscriber::{Subscriber, SubscriberStats};
pub use tracker::{ConflictingEpochs, Delivery, Tracker, TrackerStats};
pub use transport::{Answering, EventReceiver, EventTransport, Payload, Responder, TransportError};
pub use url::{BucketUrl, EventUrl};
