//! G4 as the leader sees it: which blocks volumes hold is a hint here, kept beside the pool; the
//! bytes are checked where they arrive.
//!
//! A chain lies on one volume: its first block chooses one, and what continues it follows. So a
//! look-up needs one volume to answer, and a volume that goes takes whole chains with it.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `copies` | copies to volumes, and what transfers say about them | `set`, `index`, `history` |
//! | `group_look_up` | finding prefixes of several cache groups on volumes | `look_up`, `set` |
//! | `look_up` | finding chains on volumes | `set` |
//! | `reclaim` | room on a volume full of unknown blocks | - |
//! | `registration` | registering and unregistering volumes | `set`, `opening`, `requests` |
//! | `discards` | removing single blocks | `removal`, `requests` |
//! | `removal` | removing namespaces, and blocks without room | `set`, `index`, `opening`, `requests`, `writes` |
//! | `set` | all volumes of a leader | `index`, `log`, `opening`, `place`, `requests`, `writes` |
//! | `index` | what is on a volume, as far as known | `history`, `log`, `writes` |
//! | `history` | when blocks came and went | - |
//! | `log` | changes, for events | - |
//! | `opening` | ranks that start open every volume | `requests` |
//! | `place` | where a volume is | - |
//! | `requests` | requests to ranks about a volume | - |
//! | `read_only` | a store that takes no writes | - |
//! | `status` | what is known of a volume | - |
//! | `writes` | copies that may land yet | - |

mod copies;
mod discards;
mod group_look_up;
mod history;
mod index;
mod log;
mod look_up;
mod opening;
mod place;
mod read_only;
mod reclaim;
mod registration;
mod removal;
mod requests;
mod set;
mod status;
#[cfg(all(test, feature = "worker"))]
mod test_manager;
mod writes;

use crate::circuit_breaker::{CircuitBreaker, RequestResults, StateChange};
use crate::metrics::VolumeCounters;
pub(crate) use copies::transfer_end;
use discards::Discards;
pub(crate) use group_look_up::{GroupChain, known_of};
use history::Moment;
use index::Index;
use kvbm_plan::{Failure, GroupId, SequenceHash, VolumeDescriptor};
pub(crate) use log::{Change, Log};
use look_up::Absences;
pub(crate) use look_up::Probe;
use opening::Openings;
use parking_lot::Mutex;
use read_only::Seal;
use reclaim::Reclaim;
pub(crate) use registration::LocalVolumes;
pub use registration::VolumeSetError;
use removal::Purges;
use requests::VolumeRequests;
pub(crate) use set::Volumes;
pub use status::VolumeStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Blocks on a volume without a limit that are known, at about 200 bytes each.
const MAX_KNOWN: usize = 1 << 22;
/// Blocks at most that a limited volume has room for beyond those that are kept: what comes need
/// not wait until what goes is removed.
const MAX_SLACK: u64 = 256;

/// A volume of a leader.
pub(crate) struct VolumeTier {
    pub(crate) descriptor: VolumeDescriptor,
    pub(crate) counters: Arc<VolumeCounters>,
    /// Blocks that it may hold, where it is limited.
    pub(crate) limit: Option<u64>,
    requests: Arc<VolumeRequests>,
    index: Mutex<Index>,
    breaker: Mutex<CircuitBreaker>,
    seal: Mutex<Seal>,
    /// Between two attempts to use what failed or refused.
    longest_pause: Duration,
    absences: Mutex<Absences>,
    purges: Mutex<Purges>,
    discards: Mutex<Discards>,
    openings: Openings,
    reclaim: Mutex<Reclaim>,
}

impl VolumeTier {
    /// `blocks`: how many it may hold, where it is limited. `full`: by cache group, whether it has
    /// full attention.
    fn new(
        descriptor: VolumeDescriptor,
        blocks: Option<u64>,
        longest_pause: Duration,
        log: Arc<Mutex<Log>>,
        counters: Arc<VolumeCounters>,
        requests: Arc<VolumeRequests>,
        full: Arc<[bool]>,
    ) -> Self {
        let limit = |blocks: u64| usize::try_from(blocks - (blocks / 8).min(MAX_SLACK)).unwrap_or(usize::MAX);
        let capacity = blocks.map_or(MAX_KNOWN, limit);
        Self {
            index: Mutex::new(Index::new(descriptor.id, capacity, log, full)),
            breaker: Mutex::new(CircuitBreaker::new(longest_pause, descriptor.deadline)),
            seal: Mutex::default(),
            longest_pause,
            absences: Mutex::default(),
            purges: Mutex::default(),
            discards: Mutex::default(),
            openings: Openings::default(),
            reclaim: Mutex::default(),
            limit: blocks,
            counters,
            requests,
            descriptor,
        }
    }

    /// Blocks that it holds, as far as is known.
    pub(crate) fn len(&self) -> usize {
        self.index.lock().len()
    }

    pub(crate) fn contains(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.index.lock().contains(group, hash)
    }

    /// When a look at it that begins now begins.
    pub(crate) fn now(&self) -> Moment {
        self.index.lock().now()
    }

    /// Whether it is left alone because it failed, or because a rank that started again cannot open
    /// it.
    pub(crate) fn is_down(&self) -> bool {
        self.breaker.lock().is_open() || self.openings.lacks_one()
    }

    /// What it failed with, while it is left alone for that.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.breaker.lock().failure()
    }

    /// Whether what goes beyond the capacity is removed from it, or only not known here any more.
    fn is_limited(&self) -> bool {
        self.descriptor.capacity_bytes.is_some()
    }

    /// What came of a call that began then: successes end a pause, failures of the store begin or
    /// prolong one.
    pub(crate) fn note(&self, results: &RequestResults, began: Instant) {
        self.counters.errors.add(results.failures as u64);
        let change = self.breaker.lock().record(results, began, kvbm_plan::clock::now());
        let volume = self.descriptor.id;
        match change {
            StateChange::None => {}
            StateChange::Closed => {
                tracing::info!(target: "kvbm", %volume, "the volume answers again: its blocks are found from now on");
            }
            StateChange::Opened => {
                let failure = results.first.as_ref().map(tracing::field::display);
                tracing::warn!(
                    target: "kvbm", %volume, failure,
                    "the volume fails or does not answer: it is left alone for a while, and what it holds counts as missing"
                );
            }
        }
    }

    /// Results of copies there.
    fn note_copies(&self, copies: &[Option<Failure>], now: Instant) {
        let mut seal = self.seal.lock();
        let change = seal.record(copies, now, self.longest_pause);
        let failure = seal.why();
        drop(seal);
        let volume = self.descriptor.id;
        match change {
            StateChange::None => {}
            StateChange::Closed => {
                tracing::info!(target: "kvbm", %volume, "the volume takes blocks again");
            }
            StateChange::Opened => {
                let failure = failure.as_ref().map(tracing::field::display);
                tracing::warn!(
                    target: "kvbm", %volume, failure,
                    "the volume rejects writes: its blocks are still found, and copies to it are tried again every {:?}", self.longest_pause
                );
            }
        }
    }

    /// Why it takes no blocks, where its store refuses writes.
    pub(crate) fn refusal(&self) -> Option<Failure> {
        self.seal.lock().why()
    }

    /// Whether blocks may be copied there now.
    fn takes_writes(&self) -> bool {
        self.allows_requests() && self.seal.lock().allows(kvbm_plan::clock::now())
    }

    /// Blocks came from it or arrived there.
    pub(crate) fn note_service(&self) {
        self.breaker.lock().note_service(kvbm_plan::clock::now());
    }

    /// Whether a request may be sent to it now.
    fn allows_requests(&self) -> bool {
        !self.openings.lacks_one() && self.breaker.lock().allows(kvbm_plan::clock::now())
    }

    /// A request is sent to it.
    pub(crate) fn note_request(&self) {
        self.breaker.lock().note_request(kvbm_plan::clock::now());
    }
}
