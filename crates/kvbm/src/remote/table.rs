//! What is known of each peer: its circuit breaker, its speed, its counters.

use super::PeerStatus;
use crate::circuit_breaker::{CircuitBreaker, RequestResults, StateChange};
use crate::metrics::{Metrics, PeerCounters};
use kvbm_plan::{Failure, FailureKind, NodeId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A measured speed counts for so long; then the peer is tried again, however slow it was.
const SPEED_COUNTS: Duration = Duration::from_secs(10);
/// Weight of the newest read in a peer's speed.
const NEWEST: f64 = 0.3;

/// Every peer that is announced.
pub(super) struct PeerTable {
    peers: Mutex<BTreeMap<NodeId, Peer>>,
    metrics: Metrics,
    longest_pause: Duration,
    probe: Duration,
}

struct Peer {
    breaker: CircuitBreaker,
    counters: Arc<PeerCounters>,
    speed: Option<Speed>,
    /// When blocks of it last came.
    hit: Option<Instant>,
}

/// How fast bytes of a peer come. Blocks of its cache groups differ in size, so no block counts.
#[derive(Clone, Copy)]
struct Speed {
    /// Means over reads, the newest ones most: a read of few bytes says little about others.
    seconds: f64,
    bytes: f64,
    /// When the last read ended.
    measured: Instant,
}

impl Speed {
    /// With one more read.
    fn mixed(known: Option<Self>, elapsed: Duration, bytes: u64, measured: Instant) -> Self {
        let (seconds, bytes) = (elapsed.as_secs_f64(), bytes as f64);
        let Some(known) = known.filter(|known| known.counts(measured)) else {
            return Self { seconds, bytes, measured };
        };
        let mix = |known: f64, newest: f64| known + NEWEST * (newest - known);
        Self { seconds: mix(known.seconds, seconds), bytes: mix(known.bytes, bytes), measured }
    }

    /// Whether it is recent.
    fn counts(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.measured) < SPEED_COUNTS
    }

    /// Time of so many bytes.
    fn time_of(&self, bytes: u64) -> Duration {
        let seconds = self.seconds / self.bytes * bytes as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

impl PeerTable {
    /// Peers that fail are left alone for `longest_pause` at most; a probe may take `probe`.
    pub(super) fn new(metrics: Metrics, longest_pause: Duration, probe: Duration) -> Self {
        Self { peers: Mutex::default(), metrics, longest_pause, probe }
    }

    /// Nothing for a peer that is gone: its last answers may come later.
    fn with<R>(&self, node: NodeId, change: impl FnOnce(&mut Peer) -> R) -> Option<R> {
        self.peers.lock().get_mut(&node).map(change)
    }

    /// A peer is known from now on.
    pub(super) fn add(&self, node: NodeId) {
        self.peers.lock().entry(node).or_insert_with(|| Peer {
            breaker: CircuitBreaker::new(self.longest_pause, self.probe),
            counters: self.metrics.peer(node),
            speed: None,
            hit: None,
        });
    }

    /// A peer has started again: what its earlier life did does not count.
    pub(super) fn restarted(&self, node: NodeId) {
        self.forget(node);
        self.add(node);
    }

    /// A peer is gone.
    pub(super) fn forget(&self, node: NodeId) {
        if let Some(peer) = self.peers.lock().remove(&node) {
            peer.counters.down.set(0);
        }
    }

    /// The peers among `peers` that may get requests.
    pub(super) fn allowed(&self, peers: &[NodeId], now: Instant) -> Vec<NodeId> {
        let is_allowed = |node: &&NodeId| self.with(**node, |peer| peer.breaker.allows(now)) == Some(true);
        peers.iter().filter(is_allowed).copied().collect()
    }

    /// A request is sent.
    pub(super) fn note_request(&self, node: NodeId, now: Instant) {
        self.with(node, |peer| peer.breaker.note_request(now));
    }

    /// Blocks of a peer came, verified.
    pub(super) fn note_hit(&self, node: NodeId, now: Instant) {
        self.with(node, |peer| peer.hit = Some(now));
    }

    /// When blocks of a peer last came.
    pub(super) fn last_hit(&self, node: NodeId) -> Option<Instant> {
        self.with(node, |peer| peer.hit).flatten()
    }

    /// What a request that began at `began` came to.
    pub(super) fn note_answer(&self, node: NodeId, failure: Option<&Failure>, began: Instant, now: Instant) {
        let mut results = RequestResults::default();
        match failure {
            // A peer that sends wrong bytes is not asked either.
            Some(failure) if failure.kind == FailureKind::Corrupt => {
                results.add(Some(&Failure::new(FailureKind::Io, failure.detail.clone())));
            }
            other => results.add(other),
        }
        self.with(node, |peer| {
            if results.failures > 0 {
                peer.counters.errors.add(1);
            }
            match peer.breaker.record(&results, began, now) {
                StateChange::Opened => {
                    let reason = peer.breaker.failure().map_or(String::new(), |failure| failure.to_string());
                    tracing::warn!(target: "kvbm", peer = %node, reason, "a peer is left alone for a while");
                }
                StateChange::Closed => tracing::info!(target: "kvbm", peer = %node, "a peer answers again"),
                StateChange::None => {}
            }
            peer.counters.down.set(u64::from(peer.breaker.is_open()));
        });
    }

    /// So many blocks of so many bytes in all came in `elapsed`; so many others did not.
    pub(super) fn arrived(&self, node: NodeId, blocks: usize, bytes: u64, failed: usize, elapsed: Duration) {
        let now = kvbm_plan::clock::now();
        self.with(node, |peer| {
            peer.counters.blocks.add(blocks as u64);
            peer.counters.bytes.add(bytes);
            peer.counters.failed.add(failed as u64);
            if bytes > 0 {
                peer.speed = Some(Speed::mixed(peer.speed, elapsed, bytes, now));
            }
        });
    }

    /// Measured time of so many bytes, if that is recent.
    pub(super) fn time_of(&self, node: NodeId, bytes: u64, now: Instant) -> Option<Duration> {
        let peers = self.peers.lock();
        let speed = peers.get(&node)?.speed.filter(|speed| speed.counts(now))?;
        Some(speed.time_of(bytes))
    }

    /// Every peer; `reading` says how many prefixes are read from one, `refusal` why none can be.
    pub(super) fn status(
        &self,
        reading: impl Fn(NodeId) -> usize,
        refusal: impl Fn(NodeId) -> Option<String>,
    ) -> Vec<PeerStatus> {
        let peers = self.peers.lock();
        let status = |(node, peer): (&NodeId, &Peer)| PeerStatus {
            node: *node,
            circuit: peer.breaker.state(),
            failure: refusal(*node).or(peer.breaker.failure().map(|failure| failure.to_string())),
            reading: reading(*node),
        };
        peers.iter().map(status).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation that makes it fail: the time of a block is the mean over blocks of all groups.
    #[test]
    fn large_blocks_of_a_peer_do_not_make_its_small_blocks_slow() {
        let (node, now) = (NodeId(7), kvbm_plan::clock::now);
        let table = PeerTable::new(Metrics::new(), Duration::from_secs(60), Duration::from_secs(1));
        table.add(node);
        assert_eq!(table.time_of(node, 1 << 10, now()), None, "nothing was measured");
        // 1 GiB/s: blocks of 1 MiB, and a state of 64 MiB.
        let of = |mib: u64| Duration::from_secs(mib) / 1024;
        let is = |time: Option<Duration>, due: Duration| {
            let time = time.unwrap().as_secs_f64() / due.as_secs_f64();
            assert!((0.999..1.001).contains(&time), "{time} of what is due");
        };
        for _ in 0..10 {
            table.arrived(node, 16, 16 << 20, 0, of(16));
            table.arrived(node, 1, 64 << 20, 0, of(64));
            is(table.time_of(node, 1 << 20, now()), of(1));
            is(table.time_of(node, 64 << 20, now()), of(64));
        }
        // A small read that takes a while says little about large ones.
        table.arrived(node, 1, 1 << 10, 0, of(1));
        assert!(table.time_of(node, 1 << 20, now()).unwrap() < of(2));
        // What failed says nothing.
        let before = table.time_of(node, 1 << 20, now());
        table.arrived(node, 0, 0, 16, Duration::from_secs(9));
        assert_eq!(table.time_of(node, 1 << 20, now()), before);
        assert_eq!(table.time_of(node, 1 << 20, now() + SPEED_COUNTS), None, "it is tried again");
    }
}
