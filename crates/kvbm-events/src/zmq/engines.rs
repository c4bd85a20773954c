//! Following engines that publish for themselves: vLLM, SGLang and whoever speaks as they do.

use super::MessageReceiver;
use crate::vllm::{Follower, FollowerStats, Heard, Worker};
use crate::{KvIndex, TransportError};
use std::time::{Duration, Instant};

/// Keeps an index from the messages of engines, one publisher each.
///
/// What an engine could not repeat is lost, and engines give no snapshots: then all that is known of it is forgotten, and
/// learnt again from what it says next. So the index may know too little of an engine for a while, and never too much.
pub struct EngineFollower {
    receiver: MessageReceiver,
    engines: Vec<Engine>,
    index: KvIndex,
}

struct Engine {
    worker: Worker,
    follower: Follower,
    forgotten: u64,
}

impl EngineFollower {
    /// Follows `receiver`, whose publishers are `workers` in the order of the addresses. Messages of a publisher
    /// without a worker are ignored.
    pub fn new(receiver: MessageReceiver, workers: &[Worker], index: KvIndex) -> Self {
        let engine =
            |worker: &Worker| Engine { worker: *worker, follower: Follower::new(*worker), forgotten: 0 };
        Self { receiver, engines: workers.iter().map(engine).collect(), index }
    }

    /// The index.
    pub const fn index(&self) -> &KvIndex {
        &self.index
    }

    /// Counters of a publisher.
    pub fn stats(&self, publisher: usize) -> FollowerStats {
        self.engines.get(publisher).map_or_else(FollowerStats::default, |engine| engine.follower.stats())
    }

    /// How often all that was known of a publisher was forgotten because of a loss.
    pub fn forgotten(&self, publisher: usize) -> u64 {
        self.engines.get(publisher).map_or(0, |engine| engine.forgotten)
    }

    /// Messages in one poll.
    const MAX_MESSAGES: usize = 64;

    /// Takes in what has come, waiting at most `timeout` for the first message; whether there was one.
    pub fn poll(&mut self, timeout: Duration) -> Result<bool, TransportError> {
        let deadline = Instant::now() + timeout;
        let mut any = false;
        for _ in 0..Self::MAX_MESSAGES {
            let left = if any { Duration::ZERO } else { deadline.saturating_duration_since(Instant::now()) };
            let Some(message) = self.receiver.next(left)? else { break };
            any = true;
            if let Some(engine) = self.engines.get_mut(message.publisher as usize) {
                engine.take(&mut self.index, message.sequence, &message.payload);
            }
        }
        Ok(any)
    }
}

impl Engine {
    fn take(&mut self, index: &mut KvIndex, sequence: u64, payload: &[u8]) {
        // What is missing may have been removals: nothing from before it can be trusted.
        if sequence > self.follower.next_sequence() {
            self.forget(index);
        }
        match self.follower.hear(index, sequence, payload) {
            Ok(Heard::Next | Heard::Repeated | Heard::Gap { .. } | Heard::Restarted { .. }) => {}
            Err(_) => {
                self.forget(index);
                self.follower.skip(sequence);
            }
        }
    }

    fn forget(&mut self, index: &mut KvIndex) {
        index.forget(self.worker.source);
        self.forgotten += 1;
    }
}
