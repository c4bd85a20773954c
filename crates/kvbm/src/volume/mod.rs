//! G4 as the leader sees it: which blocks volumes hold is a hint here, kept beside the pool; the bytes are checked where they arrive.
//!
//! A chain lies on one volume: its first block chooses one, and what continues it follows. So a look-up needs one volume to answer,
//! and a volume that goes takes whole chains with it.

mod asking;
mod discards;
mod hello;
mod history;
mod index;
mod introduction;
#[cfg(feature = "worker")]
pub(crate) mod local;
mod log;
mod look_up;
mod place;
mod reclaim;
mod registration;
mod removal;
mod seal;
mod set;
#[cfg(all(test, feature = "worker"))]
mod silent;
mod transfers;
mod writes;

use crate::breaker::{Breaker, Turn, Verdict};
use crate::config::Config;
use crate::metrics::VolumeCounters;
use discards::Discards;
pub(crate) use history::Moment;
use index::Index;
use introduction::Introductions;
use kvbm_plan::{Failure, GroupId, SequenceHash, VolumeDescriptor};
pub(crate) use log::{Change, Log};
use look_up::Absences;
use parking_lot::Mutex;
use reclaim::Reclaim;
pub use registration::VolumeSetError;
use removal::Purges;
use seal::Seal;
pub(crate) use set::Volumes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Blocks on a volume without a limit that are known, at about 200 bytes each.
const MAX_KNOWN: usize = 1 << 22;
/// Blocks at most that a limited volume has room for beyond those that are kept: what comes need not wait until what goes is removed.
const MAX_SLACK: u64 = 256;

/// A volume of a leader.
pub(crate) struct VolumeTier {
    pub(crate) descriptor: VolumeDescriptor,
    pub(crate) counters: Arc<VolumeCounters>,
    /// Blocks that it may hold, where it is limited.
    pub(crate) limit: Option<u64>,
    index: Mutex<Index>,
    breaker: Mutex<Breaker>,
    seal: Mutex<Seal>,
    /// Between two attempts to use what failed or refused.
    longest_pause: Duration,
    absences: Mutex<Absences>,
    purges: Mutex<Purges>,
    discards: Mutex<Discards>,
    introductions: Introductions,
    reclaim: Mutex<Reclaim>,
}

impl VolumeTier {
    /// `blocks`: how many it may hold, where it is limited.
    fn new(
        descriptor: VolumeDescriptor,
        blocks: Option<u64>,
        longest_pause: Duration,
        log: Arc<Mutex<Log>>,
        counters: Arc<VolumeCounters>,
    ) -> Self {
        let limit = |blocks: u64| usize::try_from(blocks - (blocks / 8).min(MAX_SLACK)).unwrap_or(usize::MAX);
        let capacity = blocks.map_or(MAX_KNOWN, limit);
        Self {
            index: Mutex::new(Index::new(descriptor.id, capacity, log)),
            breaker: Mutex::new(Breaker::new(longest_pause, descriptor.deadline)),
            seal: Mutex::default(),
            longest_pause,
            absences: Mutex::default(),
            purges: Mutex::default(),
            discards: Mutex::default(),
            introductions: Introductions::default(),
            reclaim: Mutex::default(),
            limit: blocks,
            counters,
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

    /// Whether it is left alone because it failed, or because a rank that started again cannot open it.
    pub(crate) fn is_down(&self) -> bool {
        self.breaker.lock().is_open() || self.introductions.lacks_one()
    }

    /// What it failed with, while it is left alone for that.
    pub(crate) fn failure(&self) -> Option<Failure> {
        self.breaker.lock().why()
    }

    /// Whether what goes beyond the capacity is removed from it, or only not known here any more.
    fn is_limited(&self) -> bool {
        self.descriptor.capacity_bytes.is_some()
    }

    /// What came of a call that began then: successes end a pause, failures of the store begin or prolong one.
    pub(crate) fn note(&self, verdict: &Verdict, began: Instant) {
        self.counters.errors.add(verdict.failures as u64);
        let change = self.breaker.lock().hears(verdict, began, Instant::now());
        let volume = self.descriptor.id;
        match change {
            Turn::None => {}
            Turn::Closed => {
                tracing::info!(target: "kvbm", %volume, "the volume answers again: its blocks are found from now on");
            }
            Turn::Opened => {
                let failure = verdict.first.as_ref().map(tracing::field::display);
                tracing::warn!(
                    target: "kvbm", %volume, failure,
                    "the volume fails or does not answer: it is left alone for a while, and what it holds counts as missing"
                );
            }
        }
    }

    /// What came of copies there.
    fn note_copies(&self, copies: &[Option<Failure>], now: Instant) {
        let mut seal = self.seal.lock();
        let turn = seal.hears(copies, now, self.longest_pause);
        let failure = seal.why();
        drop(seal);
        let volume = self.descriptor.id;
        match turn {
            Turn::None => {}
            Turn::Closed => {
                tracing::info!(target: "kvbm", %volume, "the volume takes blocks again");
            }
            Turn::Opened => {
                let failure = failure.as_ref().map(tracing::field::display);
                tracing::warn!(
                    target: "kvbm", %volume, failure,
                    "the volume takes nothing: what it holds is found, and copies there are tried again every {:?}", self.longest_pause
                );
            }
        }
    }

    /// Why it takes nothing, where its store lets nobody write.
    pub(crate) fn refusal(&self) -> Option<Failure> {
        self.seal.lock().why()
    }

    /// Whether blocks may be copied there now.
    fn takes(&self) -> bool {
        self.may_ask() && self.seal.lock().allows(Instant::now())
    }

    /// Blocks came from it or arrived there.
    pub(crate) fn gives(&self) {
        self.breaker.lock().gives(Instant::now());
    }

    /// Whether it may be asked now: where it is left alone, by one caller after a pause.
    fn may_ask(&self) -> bool {
        !self.introductions.lacks_one() && self.breaker.lock().may_ask(Instant::now())
    }

    /// It is asked.
    pub(crate) fn asks(&self) {
        self.breaker.lock().asks(Instant::now());
    }
}

/// Bytes that a block takes on a volume, headers included: an object for each slice that some rank writes.
fn stored_bytes(config: &Config, alignment: u32) -> u64 {
    let slices = config.parallelism.tensor_parallel.min(config.model.num_kv_heads).max(1);
    // A checksum for each head, and up to an alignment less one of padding.
    let header = 96 + 8 * u64::from(config.heads_per_rank()) + u64::from(alignment);
    config.rank_block_bytes().saturating_add(header).saturating_mul(u64::from(slices))
}

/// The volumes that are configured, and how many blocks each may hold.
pub(crate) fn configured(config: &Config) -> impl Iterator<Item = (VolumeDescriptor, Option<u64>)> {
    config.volume.iter().map(|volume| {
        let blocks = volume.capacity.blocks(config.rank_block_bytes());
        let blocks = (!volume.capacity.is_none()).then_some(blocks);
        let descriptor = VolumeDescriptor {
            id: kvbm_plan::VolumeId(volume.id),
            uri: volume.uri.clone(),
            capacity_bytes: blocks
                .map(|blocks| blocks.saturating_mul(stored_bytes(config, volume.alignment))),
            alignment: volume.alignment,
            deadline: volume.deadline,
        };
        (descriptor, blocks)
    })
}
