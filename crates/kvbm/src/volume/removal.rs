//! Removing namespaces from volumes, and what there is no room for. Until a removal is confirmed, what it is about is neither looked up
//! nor written there: it could not be told from what is to go.

use super::VolumeTier;
use super::index::Index;
use crate::leader::Leader;
use crate::leader::gather::Asked;
use crate::metrics::EvictReason;
use kvbm_plan::{BlockIdentity, Command, NamespaceId, Tier, VolumeAnswer, VolumeRequest};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Pause before a removal that failed is asked for again.
pub(super) const RETRY: Duration = Duration::from_secs(2);
/// How long a removal may take before it is asked for again; one of blocks for which there was no room counts as over then.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// Removals that are not confirmed, by what they remove: a namespace, or all.
#[derive(Default)]
pub(super) struct Purges(HashMap<Option<NamespaceId>, Purge>);

impl Purges {
    pub(super) fn are_pending(&self) -> bool {
        !self.0.is_empty()
    }
}

struct Purge {
    /// While it is under way.
    asked: Option<Asked<VolumeAnswer>>,
    /// When it is late, or is asked for again.
    next: Instant,
}

impl VolumeTier {
    /// Lets go of what `choose` picks. What of it is to be removed from the store: where the volume is not limited nothing is.
    pub(super) fn let_go(&self, choose: impl FnOnce(&mut Index) -> Vec<BlockIdentity>) -> Vec<BlockIdentity> {
        let mut index = self.index.lock();
        let mut chosen = choose(&mut index);
        if self.is_limited() {
            index.leave(&chosen);
        } else {
            chosen.clear();
        }
        chosen
    }

    /// Whether blocks of the namespace may still be there although they were removed.
    pub(super) fn is_purging(&self, namespace: NamespaceId) -> bool {
        let purges = self.purges.lock();
        purges.0.contains_key(&None) || purges.0.contains_key(&Some(namespace))
    }
}

impl Leader {
    /// Removes a namespace, or everything, from all volumes. How many blocks are known to have been there.
    pub(crate) fn forget_on_volumes(&self, namespace: Option<NamespaceId>, reason: EvictReason) -> u64 {
        let mut removed = 0;
        for volume in self.volumes.all() {
            let purge = Purge { asked: None, next: Instant::now() };
            let mut purges = volume.purges.lock();
            purges.0.insert(namespace, purge);
            // Together, so that the end of an earlier removal does not count as the end of this one.
            removed += volume.index.lock().purge(namespace);
        }
        self.metrics.tier(Tier::G4).evictions(reason).add(removed);
        self.tend_volumes(Instant::now());
        removed
    }

    /// Sees to removals that are not confirmed, and to full volumes. Called again and again.
    pub(crate) fn tend_volumes(&self, now: Instant) {
        for volume in self.volumes.all() {
            self.tend_purges(&volume, now);
            self.tend_discards(&volume, now);
            self.tend_introductions(&volume, now);
            self.tend_reclaim(&volume, now);
        }
    }

    /// Goes on with removals of namespaces. Called again and again.
    pub(super) fn tend_purges(&self, volume: &VolumeTier, now: Instant) {
        let mut purges = volume.purges.lock();
        let mut due = Vec::new();
        purges.0.retain(|namespace, purge| {
            let over = purge.asked.as_ref().is_some_and(Asked::is_answered);
            if over && let Some(asked) = purge.asked.take() {
                let removed = asked.wait(now, "a removal", |answer| match answer {
                    VolumeAnswer::Failed(failure) => Err(failure),
                    _ => Ok(()),
                });
                match removed {
                    Ok(_) => {
                        volume.index.lock().purged(*namespace);
                        return false;
                    }
                    Err((rank, failure)) => {
                        tracing::warn!(
                            target: "kvbm", %rank, %failure,
                            "not removed from the volume yet: it is tried again"
                        );
                        purge.next = now + RETRY;
                    }
                }
            }
            if now >= purge.next {
                let asked = self.volumes.asks.start(self.settings.ranks);
                due.push((asked.token, *namespace));
                *purge = Purge { asked: Some(asked), next: now + PATIENCE };
            }
            true
        });
        // A link may answer from inside `send`.
        drop(purges);
        for (token, namespace) in due {
            let request = VolumeRequest::Purge(namespace);
            // A rank that is not reached does not answer, so it is asked again.
            let _unreached =
                self.broadcast(&Command::Volume { token, volume: volume.descriptor.id, request });
        }
    }

    /// Keeps the index of a volume within bounds, with `more` blocks to come; what goes is removed from a limited volume.
    pub(super) fn evict_on_volume(&self, volume: &VolumeTier, more: usize) {
        let evicted = volume.let_go(|index| index.evict(more));
        self.evicted_on_volume(volume, &evicted);
    }

    /// A volume was full for `refused` blocks: known ones make room.
    pub(super) fn yield_on_volume(&self, volume: &VolumeTier, refused: usize) {
        let evicted = volume.let_go(|index| index.yield_room(refused));
        self.evicted_on_volume(volume, &evicted);
    }

    /// Removes what [`VolumeTier::let_go`] gave.
    pub(super) fn evicted_on_volume(&self, volume: &VolumeTier, evicted: &[BlockIdentity]) {
        if !evicted.is_empty() {
            self.metrics.tier(Tier::G4).evictions(EvictReason::Capacity).add(evicted.len() as u64);
            self.discard_on_volume(volume, evicted);
        }
    }
}
