//! The status of a leader, and its metrics that are brought up to date before they are read.

use super::Leader;
use crate::circuit_breaker::CircuitState;
use crate::metrics::{EvictReason, SlotState};
use crate::ranks::RankStatus;
use crate::status::{PathStatus, Status};
use crate::volume::VolumeStatus;
use kvbm_plan::{Path, Tier};

impl Leader {
    /// All but the disks, which the workers know.
    pub(crate) fn status(&self) -> Status {
        let path = |path| PathStatus {
            path,
            plans: self.transfers.plans_on(path),
            backlog: self.offload.backlog(path),
        };
        let rank = |rank| RankStatus {
            rank,
            is_lost: self.ranks.is_lost(rank),
            plans: self.transfers.owed_by(rank).len(),
        };
        let block_bytes = self.transfers.settings.block_costs.bytes;
        Status {
            tiers: Tier::SLOTTED
                .into_iter()
                .map(|tier| self.registry.occupancy(tier))
                .chain([self.volumes.tier_status()])
                .collect(),
            paths: Path::ALL.into_iter().map(path).collect(),
            #[cfg(feature = "worker")]
            disks: Vec::new(),
            disk_down: self.transfers.is_disk_down(),
            disk_failure: self.transfers.disk_failure(),
            disk_directories: if self.registry.capacity(Tier::G3) > 0 {
                self.slots.directories().status()
            } else {
                Vec::new()
            },
            ranks: self.ranks.all().map(rank).collect(),
            volumes: self.volumes.all().iter().map(|volume| VolumeStatus::of(volume, block_bytes)).collect(),
            tenants: self.tenants.status(),
            shut_down: self.transfers.is_closed(),
        }
    }

    /// Copies what the registry counts to the metrics.
    pub(crate) fn refresh_metrics(&self) {
        for tier in Tier::SLOTTED {
            let status = self.registry.occupancy(tier);
            let metrics = self.metrics.tier(tier);
            metrics.slots(SlotState::Free).set(u64::from(status.free));
            // Counted at another moment than the others.
            let withheld = if tier == Tier::G3 { self.slots.directories().num_withheld() as u32 } else { 0 };
            let active = status.active + status.detached + status.held.saturating_sub(withheld);
            metrics.slots(SlotState::Active).set(u64::from(active));
            metrics.slots(SlotState::Withheld).set(u64::from(withheld.min(status.held)));
            metrics.slots(SlotState::Cached).set(u64::from(status.inactive));
            metrics.slots(SlotState::Arriving).set(u64::from(status.arriving));
            metrics.slots(SlotState::Quarantined).set(u64::from(status.quarantined));
            let counters = self.registry.counters(tier);
            metrics.quarantined.raise_to(counters.quarantined);
            metrics.evictions(EvictReason::Capacity).raise_to(counters.evicted);
            metrics.evictions(EvictReason::Expired).raise_to(counters.expired);
            metrics.evictions(EvictReason::Corrupt).raise_to(counters.quarantined);
            metrics.evictions(EvictReason::RankLost).raise_to(counters.lost);
            metrics.evictions(EvictReason::ParentFailed).raise_to(counters.orphaned);
        }
        if self.registry.capacity(Tier::G3) > 0 {
            let is_down = |state: CircuitState| state != CircuitState::Closed;
            let directories = self.slots.directories().status().into_iter();
            let down = directories.map(|status| [status.reads, status.writes].map(is_down));
            self.metrics.disks.set_directories(down.collect());
        }
        self.metrics.disks.down.set(u64::from(self.transfers.is_disk_down()));
        self.tenants.refresh_metrics();
        for volume in self.volumes.all() {
            volume.counters.blocks.set(volume.len() as u64);
            volume.counters.down.set(u64::from(volume.is_down()));
        }
        let (volumes, metrics) = (self.volumes.tier_status(), self.metrics.tier(Tier::G4));
        metrics.slots(SlotState::Cached).set(u64::from(volumes.inactive));
        metrics.slots(SlotState::Free).set(u64::from(volumes.free));
        for path in Path::ALL {
            let waiting = self.offload.backlog(path).queued_blocks;
            self.metrics.path(path).queue_depth.set(waiting as u64);
        }
        if let Some(events) = self.events.get().and_then(std::sync::Weak::upgrade) {
            events.refresh(&self.metrics);
        }
    }
}
