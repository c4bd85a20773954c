//! Removing blocks from the volume. What was forgotten is not looked up there until its removal was confirmed.

use super::VolumeTier;
use super::asks::Asked;
use crate::leader::Leader;
use crate::metrics::EvictReason;
use kvbm_plan::{BlockIdentity, Command, NamespaceId, Tier, VolumeRequest};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Pause before a removal that failed is asked for again.
const RETRY: Duration = Duration::from_secs(2);
/// How long a removal may take before it is asked for again.
const PATIENCE: Duration = Duration::from_secs(600);
/// The token of orders whose answers nobody waits for.
pub(super) const NOBODY: u64 = 0;

/// Removals that are not confirmed, by what they remove: a namespace, or all.
#[derive(Default)]
pub(super) struct Purges(HashMap<Option<NamespaceId>, Purge>);

struct Purge {
    /// While it is under way.
    asked: Option<Asked>,
    /// When it is late, or is asked for again.
    next: Instant,
}

impl VolumeTier {
    /// Whether blocks of the namespace may still be there although they were removed.
    pub(super) fn is_purging(&self, namespace: NamespaceId) -> bool {
        let purges = self.purges.lock();
        purges.0.contains_key(&None) || purges.0.contains_key(&Some(namespace))
    }
}

impl Leader {
    /// Removes a namespace, or everything, from the volume. How many blocks are known to have been there.
    pub(crate) fn forget_on_volume(&self, namespace: Option<NamespaceId>, reason: EvictReason) -> u64 {
        let Some(volume) = &self.volume else { return 0 };
        let purge = Purge { asked: None, next: Instant::now() };
        volume.purges.lock().0.insert(namespace, purge);
        let removed = volume.index.lock().remove_all(|found| namespace.is_none_or(|wanted| found == wanted));
        self.metrics.tier(Tier::G4).evictions(reason).add(removed);
        self.tend_volume(Instant::now());
        removed
    }

    /// Sees to removals that are not confirmed. Called again and again.
    pub(crate) fn tend_volume(&self, now: Instant) {
        let Some(volume) = &self.volume else { return };
        let mut purges = volume.purges.lock();
        let mut due = Vec::new();
        purges.0.retain(|namespace, purge| {
            let over = purge.asked.as_ref().is_some_and(Asked::is_answered);
            if over && let Some(asked) = purge.asked.take() {
                match asked.wait(now) {
                    Ok(_) => return false,
                    Err(failure) => {
                        tracing::warn!(target: "kvbm", %failure, "not removed from the volume yet: it is tried again");
                        purge.next = now + RETRY;
                    }
                }
            }
            if now >= purge.next {
                let asked = volume.asks.start(self.settings.ranks);
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
            let _unreached = self.broadcast(&Command::Volume { token, volume: volume.settings.id, request });
        }
    }

    /// Removes single blocks from the volume: damaged ones, and those beyond its capacity. Not confirmed: what stays is found to be
    /// damaged again, or is found.
    pub(super) fn discard_on_volume(&self, volume: &VolumeTier, blocks: &[BlockIdentity]) {
        for part in blocks.chunks(Command::MAX_VOLUME_BLOCKS) {
            let request = VolumeRequest::Discard(part.to_vec());
            let command = Command::Volume { token: NOBODY, volume: volume.settings.id, request };
            for (rank, failure) in self.broadcast(&command) {
                tracing::debug!(target: "kvbm", %rank, %failure, "blocks not removed from the volume");
            }
        }
    }

    /// Makes room on the volume for `more` blocks, and keeps its index within bounds.
    pub(super) fn evict_on_volume(&self, volume: &VolumeTier, more: usize) {
        let evicted = volume.index.lock().evict(more);
        if evicted.is_empty() {
            return;
        }
        if volume.settings.limited {
            self.metrics.tier(Tier::G4).evictions(EvictReason::Capacity).add(evicted.len() as u64);
            self.discard_on_volume(volume, &evicted);
        }
    }
}
