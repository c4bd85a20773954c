//! What a stream's shard holds, told on request: how a follower that lost something, or came late,
//! gets the whole truth.

mod client;
mod server;
mod wire;

pub use client::RemoteSnapshots;
pub use server::SnapshotServer;
pub use wire::{Answer, Part, Question};

use crate::{EventBlock, StreamId};

/// What a stream's shard holds at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The state is the one after every event below this number. It may also show some of the
    /// events from here on: applied again they change nothing.
    pub next_sequence: u64,
    /// Every block at every place, in any order.
    pub blocks: Vec<EventBlock>,
}

/// Where snapshots come from: the pool itself in its own process, else [`RemoteSnapshots`].
pub trait SnapshotSource {
    /// The state of a stream now, after every event below number `reach`; `None` when the source
    /// cannot say it at the moment: it is asked again.
    fn snapshot(&mut self, stream: StreamId, reach: u64) -> Option<Snapshot>;

    /// Whether a snapshot of the stream is under way, which a later call of
    /// [`snapshot`](Self::snapshot) hands over: its `next_sequence` as soon as that is known, 0
    /// before. What is published below it need not be remembered.
    fn under_way(&self, stream: StreamId) -> Option<u64> {
        let _ = stream;
        None
    }

    /// Nobody wants the stream's snapshot any more.
    fn cancel(&mut self, stream: StreamId) {
        let _ = stream;
    }
}

impl<F: FnMut(StreamId) -> Option<Snapshot>> SnapshotSource for F {
    fn snapshot(&mut self, stream: StreamId, _reach: u64) -> Option<Snapshot> {
        self(stream)
    }
}
