//! What the manager is doing, for people and dashboards.

use crate::leader::Leader;
use crate::leader::edge::{Edge, OffloadBacklog};
use crate::metrics::{EvictReason, SlotState};
use kvbm_plan::{Path, Tier, VolumeId};
use kvbm_pool::TierStatus;

/// A snapshot of a manager. Tiers and paths are each consistent in themselves, not with each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// G1, G2 and G3; a tier that is not configured has capacity 0.
    pub tiers: Vec<TierStatus>,
    /// Every local path.
    pub paths: Vec<PathStatus>,
    /// The volume, if there is one.
    pub volume: Option<VolumeStatus>,
    /// Whether the manager has been shut down.
    pub shut_down: bool,
}

/// What is known of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeStatus {
    /// The volume.
    pub id: VolumeId,
    /// Blocks that it holds, as far as is known.
    pub blocks: usize,
    /// Whether it failed lately and is left alone.
    pub down: bool,
}

/// A path at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathStatus {
    /// The path.
    pub path: Path,
    /// Plans in the hands of workers.
    pub plans: usize,
    /// Offloads that wait or run.
    pub backlog: OffloadBacklog,
}

impl Leader {
    pub(crate) fn status(&self) -> Status {
        let path = |path: Path| {
            let edge = self.offloads.edge(path);
            let backlog = edge.map_or_else(OffloadBacklog::default, Edge::backlog);
            PathStatus { path, plans: self.plans_on(path), backlog }
        };
        Status {
            tiers: Tier::SLOTTED.into_iter().map(|tier| self.registry.occupancy(tier)).collect(),
            paths: Path::ALL.into_iter().map(path).collect(),
            volume: self.volume.as_ref().map(|volume| VolumeStatus {
                id: volume.settings.id,
                blocks: volume.len(),
                down: volume.is_down(),
            }),
            shut_down: self.is_closed(),
        }
    }

    /// Copies what the registry counts to the metrics.
    pub(crate) fn refresh_metrics(&self) {
        for tier in Tier::SLOTTED {
            let status = self.registry.occupancy(tier);
            let metrics = self.metrics.tier(tier);
            metrics.slots(SlotState::Free).set(u64::from(status.free));
            metrics.slots(SlotState::Active).set(u64::from(status.active + status.held + status.detached));
            metrics.slots(SlotState::Cached).set(u64::from(status.inactive));
            metrics.slots(SlotState::Arriving).set(u64::from(status.arriving));
            metrics.slots(SlotState::Quarantined).set(u64::from(status.quarantined));
            let counters = self.registry.counters(tier);
            metrics.quarantined.raise_to(counters.quarantined);
            metrics.evictions(EvictReason::Capacity).raise_to(counters.evicted);
            metrics.evictions(EvictReason::Expired).raise_to(counters.expired);
            metrics.evictions(EvictReason::Corrupt).raise_to(counters.quarantined);
        }
        if let Some(volume) = &self.volume {
            self.metrics.tier(Tier::G4).slots(SlotState::Cached).set(volume.len() as u64);
        }
        for path in Path::ALL {
            let edge = self.offloads.edge(path);
            let waiting = edge.map_or(0, |edge| edge.backlog().queued_blocks);
            self.metrics.path(path).queue_depth.set(waiting as u64);
        }
        if let Some(events) = self.events.get().and_then(std::sync::Weak::upgrade) {
            events.refresh(&self.metrics);
        }
    }
}
