//! Volumes come and go while the manager runs.

use super::asking::followed;
use super::introduction::OPENING;
use super::{VolumeTier, stored_bytes};
use crate::leader::Leader;
use crate::leader::operation::expired;
use crate::manager::{KvBlockManager, ONLY_GROUP};
use crate::metrics::EvictReason;
use kvbm_plan::{
    BlockIdentity, Failure, NamespaceId, Rank, SequenceHash, Tier, VolumeDescriptor, VolumeId, VolumePlace,
    VolumeRequest, shown_uri,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A volume that cannot be registered or unregistered. Nothing changed. The leader's own errors, beside those of a registry: a scheduler
/// without workers has no registry.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeSetError {
    /// Workers have no paths to volumes.
    #[error(
        "volume {id}: this manager's workers have no paths to volumes: give its builder `volumes(VolumeRegistry::new())` or a \
         `volume`, and host memory"
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

impl<G> KvBlockManager<G> {
    /// Adds a volume of G4: a store that somebody made and mounted; nothing is created or formatted. From now on chains go to it and
    /// are looked for on it. Blocks choose a volume by the first of their chain, so several volumes share what is written.
    ///
    /// Every worker has to be there, says so within the descriptor's deadline, opens it, wherever it runs, and reaches it within that
    /// deadline (twelve times that for opening, where a capacity has its objects counted). One that starts later, or starts again, is
    /// told of all volumes that there are then.
    ///
    /// With a capacity, what is used least goes from it when it is full; a block for which that makes no room is refused and counted.
    ///
    /// # Errors
    /// [`VolumeSetError`]; nothing changed.
    pub fn register_volume(&self, descriptor: VolumeDescriptor) -> Result<(), VolumeSetError> {
        let (leader, volumes) = (&self.leader, &self.leader.volumes);
        let id = descriptor.id;
        if !volumes.reachable {
            return Err(VolumeSetError::NoPaths { id });
        }
        if leader.is_turned_away() {
            return Err(VolumeSetError::ShuttingDown);
        }
        self.namespace.check_persistable()?;
        let mut others = volumes.changing.lock();
        if let Some(other) = volumes.get(id) {
            return Err(VolumeSetError::Duplicate { id, uri: shown_uri(&other.descriptor.uri) });
        }
        let deadline = descriptor.deadline;
        if deadline.is_zero() || deadline > VolumeDescriptor::MAX_DEADLINE {
            return Err(VolumeSetError::Deadline { id, deadline });
        }
        let block = stored_bytes(&self.config, descriptor.alignment);
        let blocks = descriptor.capacity_bytes.map(|bytes| bytes / block);
        if let (Some(0), Some(capacity)) = (blocks, descriptor.capacity_bytes) {
            return Err(VolumeSetError::TooSmall { id, capacity, block });
        }
        let unreachable = |failure| VolumeSetError::Unreachable { id, failure };
        volumes.hellos.wait(leader.settings.ranks, Instant::now() + deadline).map_err(unreachable)?;
        let opened = self.open_volume(&descriptor)?;
        let starts = volumes.starts();
        let tier = volumes.tier(descriptor, blocks);
        if let Err(failure) = leader.open_everywhere(&tier).and_then(|()| leader.reach(&tier)) {
            leader.close_everywhere(&tier);
            if opened {
                self.close_volume(id);
            }
            return Err(unreachable(failure));
        }
        if !opened {
            others.insert(id);
        }
        volumes.enter(Arc::clone(&tier));
        if volumes.starts() != starts {
            // Some rank started when it was asked already and before the volume was there to be told of.
            let now = Instant::now();
            (0..leader.settings.ranks as u16).for_each(|rank| leader.introduce(&tier, Rank(rank), now));
        }
        Ok(())
    }

    /// Forgets a volume: its blocks leave (Remove events), transfers from and to it end, at the latest after its deadline, and its
    /// objects stay in the store. Workers that had opened it by their own configuration keep it open. How many blocks it was known to
    /// hold.
    ///
    /// # Errors
    /// [`VolumeSetError::Unknown`].
    pub fn unregister_volume(&self, id: VolumeId) -> Result<u64, VolumeSetError> {
        let volumes = &self.leader.volumes;
        let mut others = volumes.changing.lock();
        let Some(tier) = volumes.remove(id) else {
            let known = volumes.all().iter().map(|tier| tier.descriptor.id).collect();
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
        self.leader.metrics.tier(Tier::G4).evictions(EvictReason::Cleared).add(blocks);
        self.leader.end_transfers(id, tier.descriptor.deadline);
        tier.introductions.end(Instant::now() + tier.descriptor.deadline);
        self.leader.close_everywhere(&tier);
        if !others.remove(&id) {
            self.close_volume(id);
        }
        Ok(blocks)
    }

    /// Opens it for the workers of this process. `false` where they know it already, by somebody else's word.
    #[cfg(feature = "worker")]
    fn open_volume(&self, descriptor: &VolumeDescriptor) -> Result<bool, VolumeSetError> {
        let Some(registry) = self.workers.volumes() else { return Ok(true) };
        if registry.get(descriptor.id).is_ok_and(|known| known.descriptor() == descriptor) {
            return Ok(false);
        }
        registry.register_volume(descriptor.clone())?;
        Ok(true)
    }

    #[cfg(feature = "worker")]
    fn close_volume(&self, id: VolumeId) {
        if let Some(registry) = self.workers.volumes() {
            // Somebody else may have taken it out.
            let _unknown = registry.unregister_volume(id);
        }
    }

    #[cfg(not(feature = "worker"))]
    #[expect(clippy::unused_self, clippy::unnecessary_wraps, reason = "as with workers")]
    fn open_volume(&self, _descriptor: &VolumeDescriptor) -> Result<bool, VolumeSetError> {
        Ok(true)
    }

    #[cfg(not(feature = "worker"))]
    #[expect(clippy::unused_self, reason = "as with workers")]
    fn close_volume(&self, _id: VolumeId) {}
}

impl Leader {
    /// Has every rank open the volume.
    fn open_everywhere(&self, tier: &VolumeTier) -> Result<(), Failure> {
        let request = VolumeRequest::Register(VolumePlace::from(&tier.descriptor));
        self.order(tier, request, OPENING * tier.descriptor.deadline)
    }

    /// Has every rank close the volume, where it opened it for this leader. One that does not is not asked for anything there any more.
    fn close_everywhere(&self, tier: &VolumeTier) {
        if let Err(failure) = self.order(tier, VolumeRequest::Unregister, tier.descriptor.deadline) {
            tracing::debug!(target: "kvbm", volume = %tier.descriptor.id, %failure, "a rank has not closed a volume");
        }
    }

    /// Has every rank do something about a volume, and waits for it. The first failure.
    fn order(&self, tier: &VolumeTier, request: VolumeRequest, patience: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + patience;
        self.ask_about_volume(tier, request, deadline, "an order about a volume", followed)
            .map(drop)
            .map_err(|unanswered| unanswered.failure)
    }

    /// Whether every rank knows the volume and its store answers: it is asked for a block that nobody has.
    fn reach(&self, tier: &VolumeTier) -> Result<(), Failure> {
        let nobodys = BlockIdentity {
            namespace: NamespaceId(0),
            group: ONLY_GROUP,
            hash: SequenceHash::from_bytes([0; 16]),
            parent: None,
            position: 0,
        };
        self.probe(tier, &[nobodys], Instant::now() + tier.descriptor.deadline).map(drop)
    }

    /// Waits for transfers from and to a volume, at most so long; what is late is given up.
    fn end_transfers(self: &Arc<Self>, id: VolumeId, patience: Duration) {
        let deadline = Instant::now() + patience;
        for operation in self.operations(|operation| operation.volume == Some(id)) {
            operation.settled.wait_until(deadline);
            if !operation.settled.is_set() {
                self.abandon(&operation, &expired("a transfer of a volume that is unregistered", patience));
            }
        }
    }
}
