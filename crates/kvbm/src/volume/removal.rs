//! Removing namespaces from volumes, and what there is no room for. Until a removal is confirmed,
//! what it is about is neither looked up nor written there: it could not be told from what is to
//! go.
//!
//! What was being written when a namespace was forgotten may land behind its removal. So the
//! removal is asked for at once, and again when nothing can land any more: the last one ends it.

use super::index::Index;
use super::requests::followed;
use super::writes::Landing;
use super::{VolumeTier, Volumes, opening};
use crate::metrics::EvictReason;
use crate::ranks::requests::Request;
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{BlockIdentity, NamespaceId, Tier, VolumeAnswer, VolumeId, VolumeRequest};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Pause before a removal that failed is asked for again.
pub(super) const RETRY: Duration = Duration::from_secs(2);
/// How long a removal may take before it is asked for again; one of blocks for which there was no
/// room counts as over then.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

/// How often somebody who waits for removals looks.
const POLL: Duration = Duration::from_millis(5);

/// Removals that are not confirmed, by what they remove: a namespace, or all.
#[derive(Default)]
pub(super) struct Purges(HashMap<Option<NamespaceId>, Purge>);

impl Purges {
    pub(super) fn are_pending(&self) -> bool {
        !self.0.is_empty()
    }
}

struct Purge {
    /// While it is under way, with what could land when it was asked for.
    asked: Option<(Landing, Request<VolumeAnswer>)>,
    /// What could land when it was asked for the last time that it succeeded.
    done: Option<Landing>,
    /// When it is late, or may be asked for again.
    next: Instant,
}

impl Purge {
    fn new(now: Instant) -> Self {
        Self { asked: None, done: None, next: now }
    }

    fn ask(&mut self, landing: Landing, asked: Request<VolumeAnswer>, now: Instant) {
        self.asked = Some((landing, asked));
        self.next = now + PATIENCE;
    }

    /// Takes the answer, where it is there. Whether the removal is confirmed.
    fn is_over(&mut self, now: Instant) -> bool {
        let Some((landing, asked)) = self.asked.take_if(|(_, asked)| asked.is_answered()) else {
            return false;
        };
        match asked.wait(now, "a removal", followed) {
            Ok(_) => {
                self.done = Some(landing);
                self.next = now;
            }
            Err((rank, failure)) => {
                tracing::warn!(
                    target: "kvbm", %rank, %failure, "not removed from the volume yet: it is tried again"
                );
                self.next = now + RETRY;
            }
        }
        self.done == Some(Landing::Over) || planted(Planted::EndPurgeEarly) && self.done.is_some()
    }

    /// Whether it is to be asked for: the first time, when less can land than before, and when it
    /// failed or is late.
    fn is_due(&self, landing: Landing, now: Instant) -> bool {
        now >= self.next && (self.asked.is_some() || self.done < Some(landing))
    }
}

impl VolumeTier {
    /// Goes on with removals of namespaces. Called again and again.
    pub(super) fn tend_purges(&self, now: Instant) {
        let mut purges = self.purges.lock();
        let mut due = Vec::new();
        purges.0.retain(|namespace, purge| {
            let over = purge.is_over(now);
            let mut index = self.index.lock();
            if index.is_retired() {
                // Another place may have its id by now.
                return false;
            }
            if over {
                index.purged(*namespace);
                return false;
            }
            let landing = index.landing(*namespace, now);
            if purge.is_due(landing, now) {
                let asked = self.requests.pending.start(self.requests.ranks.len());
                due.push((asked.token, *namespace));
                purge.ask(landing, asked, now);
            }
            true
        });
        // A link may answer from inside `send`.
        drop(purges);
        for (token, namespace) in due {
            // Tried again like any other failure.
            let _unreached = self.requests.send(self.descriptor.id, token, VolumeRequest::Purge(namespace));
        }
    }

    /// Keeps the index of a volume within bounds, with `more` blocks to come; what goes is removed
    /// from a limited volume.
    pub(super) fn evict(&self, more: usize) {
        let evicted = self.let_go(|index| index.evict(more));
        self.evicted(&evicted);
    }

    /// A volume was full for `refused` blocks: known ones make room.
    pub(super) fn yield_room(&self, refused: usize) {
        let evicted = self.let_go(|index| index.yield_room(refused));
        self.evicted(&evicted);
    }

    /// Removes what [`VolumeTier::let_go`] gave.
    pub(super) fn evicted(&self, evicted: &[BlockIdentity]) {
        if !evicted.is_empty() {
            self.requests.metrics.tier(Tier::G4).evictions(EvictReason::Capacity).add(evicted.len() as u64);
            self.discard(evicted);
        }
    }

    /// Lets go of what `choose` picks. What of it is to be removed from the store: where the volume
    /// is not limited nothing is.
    pub(super) fn let_go(&self, choose: impl FnOnce(&mut Index) -> Vec<BlockIdentity>) -> Vec<BlockIdentity> {
        let mut index = self.index.lock();
        let mut chosen = choose(&mut index);
        if self.is_limited() {
            index.begin_removal(&chosen);
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

impl Volumes {
    /// Removes a namespace, or everything, from all volumes. How many blocks are known to have been
    /// there.
    pub(crate) fn forget(&self, namespace: Option<NamespaceId>, reason: EvictReason) -> u64 {
        let mut removed = 0;
        for volume in self.all() {
            let mut purges = volume.purges.lock();
            purges.0.insert(namespace, Purge::new(kvbm_plan::clock::now()));
            // Together, so that the end of an earlier removal does not count as the end of this
            // one.
            removed += volume.index.lock().purge(namespace);
        }
        self.metrics().tier(Tier::G4).evictions(reason).add(removed);
        self.tend(kvbm_plan::clock::now());
        removed
    }

    /// Sees to removals that are not confirmed, and to full volumes. Called again and again.
    pub(crate) fn tend(&self, now: Instant) {
        drop(self.former(now));
        for volume in self.all() {
            volume.index.lock().tidy_writes(now);
            volume.tend_purges(now);
            volume.tend_discards(now);
            opening::tend(&volume, now);
            volume.tend_reclaim(now);
        }
    }

    /// Waits until what was forgotten is removed from every volume, or `deadline` passes: nobody
    /// requests for it after this manager. Volumes that have not confirmed it.
    pub(crate) fn wait_purges(&self, deadline: Instant) -> usize {
        let pending = self.unconfirmed(deadline);
        for volume in &pending {
            tracing::warn!(
                target: "kvbm", %volume,
                "shut down before removals were confirmed: what was forgotten may be found there later; forget it again"
            );
        }
        pending.len()
    }

    /// Waits until what was forgotten is removed from every volume, or `deadline` passes. Volumes
    /// that have not confirmed it.
    pub(crate) fn unconfirmed(&self, deadline: Instant) -> Vec<VolumeId> {
        loop {
            let now = kvbm_plan::clock::now();
            self.tend(now);
            let mut pending = self.all();
            pending.retain(|volume| volume.purges.lock().are_pending());
            if pending.is_empty() || now >= deadline {
                return pending.iter().map(|volume| volume.descriptor.id).collect();
            }
            kvbm_plan::clock::sleep(POLL.min(deadline - now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::requests::Requests;
    use kvbm_plan::{Failure, FailureKind, Rank};
    use std::sync::Arc;

    /// Mutations that make it fail: a removal is over when it succeeded, whatever may land; or it
    /// is not asked for again where it failed.
    #[test]
    fn a_removal_is_asked_for_until_it_succeeded_when_nothing_can_land_any_more() {
        let requests = Arc::new(Requests::default());
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        // Asks where that is due, and answers. Whether it was due, and whether the removal is over.
        let tend = |purge: &mut Purge, landing, seconds, removed: bool| {
            let due = purge.is_due(landing, at(seconds));
            if due {
                let asked = requests.start(1);
                let token = asked.token;
                purge.ask(landing, asked, at(seconds));
                assert!(
                    !purge.is_over(at(seconds)) && !purge.is_due(Landing::Over, at(seconds + 1)),
                    "under way"
                );
                let failed = VolumeAnswer::Failed(Failure::new(FailureKind::Io, "planted"));
                requests.answer(Rank(0), token, if removed { VolumeAnswer::Removed(1) } else { failed });
            }
            (due, purge.is_over(at(seconds)))
        };
        let mut purge = Purge::new(begun);
        assert_eq!(tend(&mut purge, Landing::UnderWay, 0, true), (true, false), "some may land behind it");
        assert_eq!(tend(&mut purge, Landing::UnderWay, 1, true), (false, false), "they have not yet");
        assert_eq!(tend(&mut purge, Landing::Doubtful, 2, false), (true, false), "not removed");
        assert_eq!(tend(&mut purge, Landing::Doubtful, 3, true), (false, false), "not at once");
        assert_eq!(tend(&mut purge, Landing::Doubtful, 4, true), (true, false));
        assert_eq!(tend(&mut purge, Landing::Over, 5, true), (true, true));
        // Where nothing can land, once is enough.
        assert_eq!(tend(&mut Purge::new(begun), Landing::Over, 0, true), (true, true));
        // A rank that does not answer is asked again.
        let mut purge = Purge::new(begun);
        purge.ask(Landing::Over, requests.start(1), begun);
        assert!(purge.is_due(Landing::Over, begun + PATIENCE));
    }
}
