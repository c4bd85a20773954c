//! The event plane: every stored and removed block told to the world, in order, nothing lost silently.
//!
//! **Knows:** what an event says, how events are batched, encoded, carried and followed: [`KvEvent`],
//! [`EventManager`] and [`Publisher`], the [`EventTransport`] seam with an in-process one, and a [`Subscriber`] that
//! detects loss.
//! **Must never know:** the pool (events come as plain data through an [`EventSource`]), where bytes are in memory,
//! who listens, and any network unless a feature of its own brings one: this base pulls no network crate.
//!
//! # Order and loss
//!
//! Each *stream* `(source, epoch, shard)` numbers its events 0, 1, 2, ... without holes, where they happen and under
//! the lock that orders them. Nothing later renumbers them, so a missing number is a lost event, wherever it was
//! lost: in a full ring, a full queue, a broken connection. Every batch also says which number comes next, and an
//! empty batch is a heartbeat, so a lost tail is noticed as well. What to do about a loss is the follower's choice;
//! [`Delivery::Gap`] and [`Delivery::Restarted`] tell it that its picture needs a resync.
//!
//! # Bounds
//!
//! A publisher holds at most one batch per stream: while a transport refuses, events wait in the source's own ring,
//! which loses and counts by its own rule. A subscriber's queue holds a fixed number of batches and bytes; the oldest
//! go first and are counted, and no other subscriber notices.

#![forbid(unsafe_code)]

mod batch;
pub mod conformance;
mod deadline;
mod event;
mod follower;
mod format;
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
pub use event::{EventBlock, EventKind, KvEvent, Unknown};
pub use follower::{FollowStats, IndexFollower};
pub use format::{Format, Instead};
pub use in_process::{InProcessConfig, InProcessTransport};
pub use index::{IndexStats, KvIndex, Place, PrefixMatch};
pub use manager::{ConfigError, EventManager, EventSource, PublisherConfig, PublisherStats, Pumped};
pub use msgpack::Malformed;
pub use publisher::{FlushError, Publisher};
pub use resync::{Repair, Resync};
pub use snapshot::{Answer, Part, Question, RemoteSnapshots, Snapshot, SnapshotServer, SnapshotSource};
pub use subscriber::{Subscriber, SubscriberStats};
pub use tracker::{Delivery, Tracker, TrackerStats, TwoLives};
pub use transport::{Answering, EventReceiver, EventTransport, Payload, Responder, TransportError};
pub use url::EventUrl;
