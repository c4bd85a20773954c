//! G4 as the leader sees it: which blocks the volume holds is a hint here, kept beside the pool; the bytes are checked where they
//! arrive.

mod asks;
mod breaker;
mod index;
#[cfg(feature = "worker")]
pub(crate) mod local;
mod look_up;
mod removal;
mod transfers;

use asks::VolumeAsks;
use breaker::Breaker;
pub(crate) use index::Change;
use index::Index;
use kvbm_plan::{BlockIdentity, GroupId, SequenceHash, VolumeId};
use look_up::Absences;
use parking_lot::Mutex;
use removal::Purges;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the leader goes by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VolumeSettings {
    pub(crate) id: VolumeId,
    /// How long the volume may take for anything.
    pub(crate) deadline: Duration,
    /// Whether it is asked for chains that are not known here.
    pub(crate) probe: bool,
    /// How long it is not asked again for what it did not have.
    pub(crate) recheck: Duration,
    /// Longest pause after failures.
    pub(crate) longest_pause: Duration,
    /// Blocks that are kept in it, or, without a limit, known here.
    pub(crate) capacity: usize,
    /// Whether what goes beyond the capacity is removed from it, or only not known here any more.
    pub(crate) limited: bool,
    /// Changes that are kept for whoever follows.
    pub(crate) most_changes: usize,
    /// Whether blocks are copied to it when they are about to leave host memory.
    pub(crate) keeps_victims: bool,
}

/// The volume of a leader.
pub(crate) struct VolumeTier {
    pub(crate) settings: VolumeSettings,
    index: Mutex<Index>,
    breaker: Mutex<Breaker>,
    asks: Arc<VolumeAsks>,
    absences: Mutex<Absences>,
    purges: Mutex<Purges>,
}

impl VolumeTier {
    pub(crate) fn new(settings: VolumeSettings) -> Self {
        Self {
            settings,
            index: Mutex::new(Index::new(settings.capacity, settings.most_changes)),
            breaker: Mutex::new(Breaker::new(settings.longest_pause)),
            asks: Arc::default(),
            absences: Mutex::default(),
            purges: Mutex::default(),
        }
    }

    /// Blocks that it holds, as far as is known.
    pub(crate) fn len(&self) -> usize {
        self.index.lock().len()
    }

    pub(crate) fn contains(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.index.lock().contains(group, hash)
    }

    /// Whether the block is there or on its way there.
    pub(crate) fn awaits(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.index.lock().awaits(group, hash)
    }

    /// Whether it is left alone because it failed.
    pub(crate) fn is_down(&self) -> bool {
        self.breaker.lock().is_closed()
    }

    /// What happened, oldest first, and the number of the next change.
    pub(crate) fn drain(&self, max: usize, take: impl FnMut(u64, Change)) -> u64 {
        self.index.lock().drain(max, take)
    }

    /// What it is known for certain to hold, each block with the first of its chain, and the number of the next change.
    pub(crate) fn snapshot(&self) -> (Vec<(BlockIdentity, SequenceHash)>, u64) {
        self.index.lock().snapshot()
    }

    /// What came of a call: successes end a pause, failures of the store begin or prolong one.
    fn note(&self, answered: bool, failed: bool) {
        let mut breaker = self.breaker.lock();
        if answered {
            breaker.succeeded();
        } else if failed && breaker.failed(Instant::now()) {
            tracing::warn!(
                target: "kvbm", volume = %self.settings.id,
                "the volume fails: it is left alone for a while, and what it holds counts as missing"
            );
        }
    }

    fn allows(&self) -> bool {
        self.breaker.lock().allows(Instant::now())
    }
}
