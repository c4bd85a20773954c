//! Metrics of remote memory: what came from each peer, and what peers read here.

use super::counters::{Counter, Gauge};
use super::expose::{Labels, counter_value};
use kvbm_plan::NodeId;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// What is counted of remote memory.
#[derive(Debug, Default)]
pub struct RemoteMetrics {
    /// Leases that peers hold on blocks of this node.
    pub leases_held: Gauge,
    /// Leases that were granted to peers.
    pub leases_granted: Counter,
    /// Of those, leases that their readers did not renew.
    pub leases_expired: Counter,
    /// Blocks that peers wrote here and that were registered.
    pub received: Counter,
    /// Slots of host memory that are set aside for peers that write.
    pub slots_granted: Gauge,
    /// Of those, slots whose writer is late: they are free when its writes have ended.
    pub slots_quarantined: Gauge,
    /// Messages and announcements of peers that were refused, or that could not be read.
    pub refused: Counter,
    /// Every peer that was ever announced.
    peers: Mutex<BTreeMap<NodeId, Arc<PeerCounters>>>,
}

/// What is counted of one peer, for as long as the process lives.
#[derive(Debug, Default)]
pub struct PeerCounters {
    /// Blocks that requests found there and got.
    pub hits: Counter,
    /// Blocks that came from it.
    pub blocks: Counter,
    /// Their bytes on all ranks.
    pub bytes: Counter,
    /// Blocks that were written to it.
    pub pushed: Counter,
    /// Their bytes on all its ranks.
    pub pushed_bytes: Counter,
    /// Blocks that were asked for and did not come.
    pub failed: Counter,
    /// Requests that it failed, or did not answer in time.
    pub errors: Counter,
    /// 1 while it is left alone because it failed.
    pub down: Gauge,
}

impl RemoteMetrics {
    /// What is counted of a peer.
    pub fn peer(&self, node: NodeId) -> Arc<PeerCounters> {
        // Nothing panics while it is held.
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(peers.entry(node).or_default())
    }

    /// Blocks that requests found at any peer and got.
    pub fn hits(&self) -> u64 {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.values().map(|peer| peer.hits.get()).sum()
    }

    /// Nothing where there never was a peer.
    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Read = fn(&PeerCounters) -> u64;
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if peers.is_empty() {
            return Ok(());
        }
        let gauges: [(&str, &str, &Gauge); 3] = [
            ("remote_leases_held", "Leases that peers hold on blocks of this node", &self.leases_held),
            ("remote_slots_granted", "Slots that are set aside for peers that write", &self.slots_granted),
            ("remote_slots_quarantined", "Of those, slots whose writer is late", &self.slots_quarantined),
        ];
        for (name, help, gauge) in gauges {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            metric.encode_gauge(&gauge.get())?;
        }
        let own: [(&str, &str, &Counter); 4] = [
            ("remote_received_blocks", "Blocks that peers wrote here", &self.received),
            ("remote_leases_granted", "Leases that were granted to peers", &self.leases_granted),
            ("remote_leases_expired", "Leases that their readers did not renew", &self.leases_expired),
            (
                "remote_refused",
                "Messages and announcements of peers that were refused or unreadable",
                &self.refused,
            ),
        ];
        for (name, help, counter) in own {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            counter_value(&mut metric, counter.get())?;
        }
        let each: [(&str, &str, Read); 7] = [
            ("remote_pushed_blocks", "Blocks that were written to the peer", |peer| peer.pushed.get()),
            ("remote_pushed_bytes", "Bytes that were written to the peer", |peer| peer.pushed_bytes.get()),
            ("remote_hit_blocks", "Blocks that requests found at the peer and got", |peer| peer.hits.get()),
            ("remote_blocks", "Blocks that came from the peer", |peer| peer.blocks.get()),
            ("remote_bytes", "Bytes that came from the peer", |peer| peer.bytes.get()),
            ("remote_failed_blocks", "Blocks that the peer should have given", |peer| peer.failed.get()),
            ("remote_errors", "Requests that the peer failed", |peer| peer.errors.get()),
        ];
        for (name, help, read) in each {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (node, peer) in &peers {
                let labels: Labels<'_> = &[("peer", &node.to_string())];
                counter_value(&mut metric.encode_family(&labels)?, read(peer))?;
            }
        }
        let help = "1 while the peer is left alone because it failed";
        let mut metric = encoder.encode_descriptor("remote_down", help, None, MetricType::Gauge)?;
        for (node, peer) in &peers {
            let labels: Labels<'_> = &[("peer", &node.to_string())];
            metric.encode_family(&labels)?.encode_gauge(&peer.down.get())?;
        }
        Ok(())
    }
}
