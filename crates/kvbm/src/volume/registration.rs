//! Registering and unregistering volumes while the manager runs.

use super::opening::{self, OPENING};
use super::requests::followed;
use super::{VolumeTier, Volumes};
use crate::config::FIRST_GROUP;
use crate::metrics::EvictReason;
use kvbm_plan::{
    BlockIdentity, Failure, NamespaceId, SequenceHash, Tier, VolumeDescriptor, VolumeId, VolumePlace,
    VolumeRequest, deadline_after, shown_uri,
};
use kvbm_tokens::Namespace;
use std::sync::Arc;
use std::time::Duration;

/// A volume that cannot be registered or unregistered. Nothing changed. The leader's own errors,
/// beside those of a registry: a scheduler without workers has no registry.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeSetError {
    /// Workers have no paths to volumes.
    #[error(
        "volume {id}: this manager's workers have no paths to volumes: give its builder `volumes(VolumeRegistry::new())` or a \
         `volume`, and memory on G1 or G2; workers in other processes need a `[volume]` or host.capacity"
    )]
    NoPaths {
        /// The volume.
        id: VolumeId,
    },
    /// The id is taken.
    #[error("volume {id} is already registered as {uri:?}: unregister it first, or take another id")]
    Duplicate {
        /// The volume.
        id: VolumeId,
        /// Where the other one is.
        uri: String,
    },
    /// No such volume.
    #[error("volume {id} is not registered; registered: {known:?}")]
    Unknown {
        /// The volume.
        id: VolumeId,
        /// Volumes that are.
        known: Vec<VolumeId>,
    },
    /// No time, or more than anybody waits.
    #[error("volume {id}: a deadline of {deadline:?} is not allowed: longer than zero, at most an hour")]
    Deadline {
        /// The volume.
        id: VolumeId,
        /// What was given.
        deadline: Duration,
    },
    /// Not one block would fit.
    #[error("volume {id}: a capacity of {capacity} bytes holds no block: one takes {block} bytes there")]
    TooSmall {
        /// The volume.
        id: VolumeId,
        /// What was given.
        capacity: u64,
        /// What a block takes on all ranks, headers included.
        block: u64,
    },
    /// The descriptor makes no sense, its scheme is not known, or the store cannot be opened.
    #[cfg(feature = "worker")]
    #[error(transparent)]
    Open(#[from] kvbm_volume::RegistryError),
    /// A rank does not reach the store.
    #[error("volume {id} does not answer: {failure}")]
    Unreachable {
        /// The volume.
        id: VolumeId,
        /// What the rank said.
        failure: Failure,
    },
    /// What is on the volume could not be found again by its hash.
    #[error(transparent)]
    NotPersistable(#[from] kvbm_tokens::NotPersistable),
    /// The manager is shutting down.
    #[error("the manager is shutting down: volumes stay as they are")]
    ShuttingDown,
}

/// Opens and closes volumes for the workers of this process.
pub(crate) trait LocalVolumes {
    /// `false` where they know the volume already, because somebody else opened it.
    fn open(&self, descriptor: &VolumeDescriptor) -> Result<bool, VolumeSetError>;
    fn close(&self, id: VolumeId);
}

impl Volumes {
    /// Adds a volume on which a block of this deployment takes `block_bytes` bytes.
    pub(crate) fn register(
        &self,
        descriptor: VolumeDescriptor,
        namespace: &Namespace,
        block_bytes: u64,
        local: &dyn LocalVolumes,
    ) -> Result<(), VolumeSetError> {
        let id = descriptor.id;
        if !self.reachable {
            return Err(VolumeSetError::NoPaths { id });
        }
        if self.transfers.refuses_callers() {
            return Err(VolumeSetError::ShuttingDown);
        }
        namespace.check_persistable()?;
        let mut others = self.changing.lock();
        if let Some(other) = self.get(id) {
            return Err(VolumeSetError::Duplicate { id, uri: shown_uri(&other.descriptor.uri) });
        }
        let deadline = descriptor.deadline;
        if deadline.is_zero() || deadline > VolumeDescriptor::MAX_DEADLINE {
            return Err(VolumeSetError::Deadline { id, deadline });
        }
        let blocks = descriptor.capacity_bytes.map(|bytes| bytes / block_bytes);
        if let (Some(0), Some(capacity)) = (blocks, descriptor.capacity_bytes) {
            return Err(VolumeSetError::TooSmall { id, capacity, block: block_bytes });
        }
        let unreachable = |failure| VolumeSetError::Unreachable { id, failure };
        self.handshakes
            .wait(self.ranks().len(), deadline_after(kvbm_plan::clock::now(), deadline))
            .map_err(unreachable)?;
        let opened = local.open(&descriptor)?;
        let starts = self.starts();
        let tier = self.tier(descriptor, blocks);
        if let Err(failure) = open_everywhere(&tier).and_then(|()| probe_absent(&tier)) {
            close_everywhere(&tier);
            if opened {
                local.close(id);
            }
            return Err(unreachable(failure));
        }
        if !opened {
            others.insert(id);
        }
        self.enter(Arc::clone(&tier));
        if self.starts() != starts {
            // Some rank started when it had been sent the volume already and before the volume was
            // there to be sent again.
            let now = kvbm_plan::clock::now();
            self.ranks().all().for_each(|rank| opening::start(&tier, rank, now));
        }
        Ok(())
    }

    /// Forgets a volume. How many blocks it was known to hold.
    pub(crate) fn unregister(&self, id: VolumeId, local: &dyn LocalVolumes) -> Result<u64, VolumeSetError> {
        let mut others = self.changing.lock();
        let Some(tier) = self.remove(id) else {
            let known = self.all().iter().map(|tier| tier.descriptor.id).collect();
            return Err(VolumeSetError::Unknown { id, known });
        };
        if tier.purges.lock().are_pending() {
            tracing::warn!(
                target: "kvbm", volume = %id,
                "unregistered before removals were confirmed: what was forgotten may be found when it is registered again"
            );
        }
        let blocks = tier.index.lock().retire();
        tier.counters.blocks.set(0);
        tier.counters.down.set(0);
        self.metrics().tier(Tier::G4).evictions(EvictReason::Cleared).add(blocks);
        self.transfers.end_with_volume(id, tier.descriptor.deadline);
        tier.openings.end(deadline_after(kvbm_plan::clock::now(), tier.descriptor.deadline));
        close_everywhere(&tier);
        if !others.remove(&id) {
            local.close(id);
        }
        Ok(blocks)
    }
}

/// Requests that every rank opens the volume.
fn open_everywhere(tier: &VolumeTier) -> Result<(), Failure> {
    let request = VolumeRequest::Register(VolumePlace::from(&tier.descriptor));
    request_everywhere(tier, request, tier.descriptor.deadline.saturating_mul(OPENING))
}

/// Requests that every rank closes the volume, where it opened it for this leader. A rank that does
/// not gets no more requests about it.
fn close_everywhere(tier: &VolumeTier) {
    if let Err(failure) = request_everywhere(tier, VolumeRequest::Unregister, tier.descriptor.deadline) {
        tracing::debug!(target: "kvbm", volume = %tier.descriptor.id, %failure, "a rank has not closed a volume");
    }
}

/// Sends a request about the volume to every rank and waits for the answers. The first failure.
fn request_everywhere(tier: &VolumeTier, request: VolumeRequest, most: Duration) -> Result<(), Failure> {
    let deadline = deadline_after(kvbm_plan::clock::now(), most);
    tier.requests
        .wait(tier.descriptor.id, request, deadline, "a request about a volume", followed)
        .map(drop)
        .map_err(|unanswered| unanswered.failure)
}

/// Whether every rank knows the volume and its store answers, by a probe for a block that does not
/// exist.
fn probe_absent(tier: &VolumeTier) -> Result<(), Failure> {
    let absent = BlockIdentity {
        namespace: NamespaceId(0),
        group: FIRST_GROUP,
        hash: SequenceHash::from_bytes([0; 16]),
        parent: None,
        position: 0,
    };
    tier.probe(&[absent], deadline_after(kvbm_plan::clock::now(), tier.descriptor.deadline)).map(drop)
}
