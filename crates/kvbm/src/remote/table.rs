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
    /// Seconds of a block, and when that was measured.
    speed: Option<(f64, Instant)>,
    /// When blocks of it last came.
    hit: Option<Instant>,
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
            if blocks > 0 {
                let each = elapsed.as_secs_f64() / blocks as f64;
                let known = peer.speed.filter(|(_, at)| now.saturating_duration_since(*at) < SPEED_COUNTS);
                let mixed = known.map_or(each, |(known, _)| known + NEWEST * (each - known));
                peer.speed = Some((mixed, now));
            }
        });
    }

    /// Measured time of a block, if that is recent.
    pub(super) fn time_per_block(&self, node: NodeId, now: Instant) -> Option<Duration> {
        let peers = self.peers.lock();
        let (each, at) = peers.get(&node)?.speed?;
        (now.saturating_duration_since(at) < SPEED_COUNTS)
            .then(|| Duration::try_from_secs_f64(each).unwrap_or(Duration::MAX))
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
