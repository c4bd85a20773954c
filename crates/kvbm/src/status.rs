//! What the manager is doing, for people and dashboards.

use crate::leader::Leader;
use crate::leader::edge::{Edge, OffloadBacklog};
use crate::metrics::{EvictReason, SlotState};
use crate::tenants::TenantStatus;
use crate::volume::VolumeTier;
#[cfg(feature = "worker")]
use kvbm_disk::EngineInfo;
use kvbm_plan::{Failure, Path, Rank, Tier, VolumeDescriptor};
use kvbm_pool::TierStatus;

/// A snapshot of a manager. Tiers and paths are each consistent in themselves, not with each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// G1 to G4; a tier that is not configured has capacity 0. G4 is all volumes together, in blocks that they are known to hold, with
    /// room only where all of them are limited; [`volumes`](Self::volumes) has each.
    pub tiers: Vec<TierStatus>,
    /// Every local path.
    pub paths: Vec<PathStatus>,
    /// G3: the disk engine of every rank of this process, in order.
    #[cfg(feature = "worker")]
    pub disks: Vec<DiskStatus>,
    /// Whether reads from G3 failed lately or were not answered in time: its blocks are not found until one is again. A request tries it
    /// after each pause of at most 30 s.
    pub disk_down: bool,
    /// What those reads failed with last, while that is so.
    pub disk_failure: Option<Failure>,
    /// Slots of G3 that could not be written and are left alone for a while; its [`held`](TierStatus::held) has them too. Copies go to others
    /// meanwhile. Where all copies fail it does not grow any more, so that a disk that can be read keeps its blocks.
    pub disk_resting: u32,
    /// Every rank, in order.
    pub ranks: Vec<RankStatus>,
    /// G4: every volume, by id.
    pub volumes: Vec<VolumeStatus>,
    /// Every tenant with a share, first the blocks of all others; empty where none are configured.
    pub tenants: Vec<TenantStatus>,
    /// Whether the manager has been shut down.
    pub shut_down: bool,
}

/// A rank, as the manager sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankStatus {
    /// The rank.
    pub rank: Rank,
    /// Whether it is given up ([`KvBlockManager::rank_lost`](crate::KvBlockManager::rank_lost), `transfer.rank_lost_after`): every transfer
    /// fails until its worker starts again.
    pub is_lost: bool,
    /// Plans that it has not answered.
    pub plans: usize,
}

/// A rank's disk engine.
#[cfg(feature = "worker")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskStatus {
    /// The rank.
    pub rank: Rank,
    /// What it holds, who moves its bytes and why, and what each of its directories has failed.
    pub engine: EngineInfo,
}

/// What is known of a volume. It may be shared: what others keep there is not counted. Counts go on where it was registered before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStatus {
    /// What it was registered with.
    pub descriptor: VolumeDescriptor,
    /// Blocks that it holds, as far as is known.
    pub blocks: usize,
    /// Bytes of them on all ranks, without headers.
    pub bytes: u64,
    /// Blocks that came from it, verified.
    pub hits: u64,
    /// Blocks that were read there and were gone or damaged.
    pub misses: u64,
    /// Blocks and questions that its store failed.
    pub errors: u64,
    /// Blocks that it refused because it was full.
    pub full: u64,
    /// Whether it failed lately and is left alone.
    pub down: bool,
    /// What it failed with last, while it is left alone for that; none where it is because a rank that started again cannot open it.
    pub failure: Option<Failure>,
    /// Why it takes no blocks, where its store lets nobody write; what it holds is found.
    pub refusal: Option<Failure>,
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
    /// All but the disks, which the workers know.
    pub(crate) fn status(&self) -> Status {
        let path = |path: Path| {
            let edge = self.offloads.edge(path);
            let backlog = edge.map_or_else(OffloadBacklog::default, Edge::backlog);
            PathStatus { path, plans: self.plans_on(path), backlog }
        };
        Status {
            tiers: Tier::SLOTTED
                .into_iter()
                .map(|tier| self.registry.occupancy(tier))
                .chain([self.volumes.tier_status()])
                .collect(),
            paths: Path::ALL.into_iter().map(path).collect(),
            #[cfg(feature = "worker")]
            disks: Vec::new(),
            disk_down: self.is_disk_down(),
            disk_failure: self.disk_failure(),
            disk_resting: self.resting_slots(),
            ranks: self.rank_status(),
            volumes: self.volumes.all().iter().map(|volume| self.volume_status(volume)).collect(),
            tenants: self.tenant_status(),
            shut_down: self.is_closed(),
        }
    }

    fn resting_slots(&self) -> u32 {
        u32::try_from(self.resting.len()).unwrap_or(u32::MAX)
    }

    fn volume_status(&self, volume: &VolumeTier) -> VolumeStatus {
        let (blocks, counters) = (volume.len(), &volume.counters);
        VolumeStatus {
            descriptor: volume.descriptor.clone(),
            blocks,
            bytes: self.settings.block_costs.bytes.saturating_mul(blocks as u64),
            hits: counters.hits.get(),
            misses: counters.misses.get(),
            errors: counters.errors.get(),
            full: counters.full.get(),
            down: volume.is_down(),
            failure: volume.failure(),
            refusal: volume.refusal(),
        }
    }

    /// Copies what the registry counts to the metrics.
    pub(crate) fn refresh_metrics(&self) {
        for tier in Tier::SLOTTED {
            let status = self.registry.occupancy(tier);
            let metrics = self.metrics.tier(tier);
            metrics.slots(SlotState::Free).set(u64::from(status.free));
            // Counted at another moment than the others.
            let resting = if tier == Tier::G3 { self.resting_slots() } else { 0 };
            let active = status.active + status.detached + status.held.saturating_sub(resting);
            metrics.slots(SlotState::Active).set(u64::from(active));
            metrics.slots(SlotState::Resting).set(u64::from(resting.min(status.held)));
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
        self.metrics.disks.down.set(u64::from(self.is_disk_down()));
        self.refresh_tenant_metrics();
        for volume in self.volumes.all() {
            volume.counters.blocks.set(volume.len() as u64);
            volume.counters.down.set(u64::from(volume.is_down()));
        }
        let (volumes, metrics) = (self.volumes.tier_status(), self.metrics.tier(Tier::G4));
        metrics.slots(SlotState::Cached).set(u64::from(volumes.inactive));
        metrics.slots(SlotState::Free).set(u64::from(volumes.free));
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
