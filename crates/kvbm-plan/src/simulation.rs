//! Hooks of the simulator `kvbm-sim`: a clock, waits and planted bugs.
//!
//! Only a build with `RUSTFLAGS="--cfg kvbm_sim"` has them. In every other build [`planted`] is
//! false.

#[cfg(kvbm_sim)]
pub use hooks::{Hooks, advance_to, begin, end, next_epoch, now, wait_until};

/// A bug that a run of the simulator may plant: it must find each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A plan is over when the first rank has reported it.
    SkipRankReport,
    /// A report that comes twice counts for another rank.
    CountReportTwice,
    /// Reports of an earlier leader count.
    TrustStaleEpoch,
    /// A block counts as arrived although its bytes were bad.
    RegisterUnverified,
    /// Slots of a transfer that was given up are free before its workers are done.
    FreeSlotsEarly,
    /// Removals count as durable whatever a rank answered to the flush.
    ConfirmRemovalEarly,
    /// A restarted worker still counts as having what its predecessor had in memory.
    IgnoreRestart,
    /// Some events of removed blocks are not written.
    DropRemoveEvent,
    /// Events that found no room in the ring are not counted.
    HideGap,
    /// A flush counts although some rank failed it.
    FlushWithoutRank,
    /// A removal from a volume is over although copies may still land there.
    EndPurgeEarly,
    /// A disk calls records durable that it has not synced.
    AcknowledgeUnsynced,
    /// A disk records blocks before it has synced their bytes.
    RecordUnsyncedBlocks,
    /// A disk puts a snapshot in the journal's place before it has synced it.
    ReplaceUnsynced,
    /// A disk writes no record of a block that is gone.
    SkipRemovalRecord,
    /// Recovery takes it that what it reads of a journal is on the device.
    TrustPageCache,
    /// Recovery takes a record whose checksum is wrong.
    TrustDamagedRecord,
    /// A removal from a volume ends before the last page of the listing.
    SkipLastPage,
    /// A volume takes what its capacity has no room for.
    IgnoreQuota,
    /// A volume takes an object for the one that was asked for without comparing their names.
    TrustOtherObject,
    /// A volume does not compare a payload with its checksums.
    TrustPayload,
    /// A forgotten namespace keeps its data keys on volumes.
    KeepDataKeys,
    /// A node serves what it read without comparing digests.
    SkipDigests,
    /// A reader counts its lease from the owner's answer, not from its question.
    CountLeaseFromAnswer,
    /// An owner keeps leases that are over.
    KeepEndedLeases,
    /// An owner ends the leases of a peer whose announcement is gone, although it may still read.
    EndLeasesAtForget,
    /// A node takes an announcement that is older than what it knows.
    ImportStale,
}

impl Planted {
    /// Those of a leader, and of the disks and volumes of its ranks.
    pub const OF_LEADER: [Self; 22] = [
        Self::SkipRankReport,
        Self::CountReportTwice,
        Self::TrustStaleEpoch,
        Self::RegisterUnverified,
        Self::FreeSlotsEarly,
        Self::ConfirmRemovalEarly,
        Self::IgnoreRestart,
        Self::DropRemoveEvent,
        Self::HideGap,
        Self::FlushWithoutRank,
        Self::EndPurgeEarly,
        Self::AcknowledgeUnsynced,
        Self::RecordUnsyncedBlocks,
        Self::ReplaceUnsynced,
        Self::SkipRemovalRecord,
        Self::TrustPageCache,
        Self::TrustDamagedRecord,
        Self::SkipLastPage,
        Self::IgnoreQuota,
        Self::TrustOtherObject,
        Self::TrustPayload,
        Self::KeepDataKeys,
    ];

    /// Those of nodes that read from each other.
    pub const OF_NODES: [Self; 5] = [
        Self::SkipDigests,
        Self::CountLeaseFromAnswer,
        Self::KeepEndedLeases,
        Self::EndLeasesAtForget,
        Self::ImportStale,
    ];
}

/// Whether this run of the simulator plants the bug.
#[cfg(not(kvbm_sim))]
#[inline]
pub const fn planted(_bug: Planted) -> bool {
    false
}

/// Whether this run of the simulator plants the bug.
#[cfg(kvbm_sim)]
pub fn planted(bug: Planted) -> bool {
    hooks::planted(bug)
}

#[cfg(kvbm_sim)]
mod hooks {
    use super::Planted;
    use crate::Epoch;
    use std::cell::RefCell;
    use std::rc::Rc;
    use std::time::Instant;

    /// What a thread simulates.
    pub struct Hooks {
        /// The simulated time.
        pub now: Instant,
        /// The last epoch of a leader.
        pub epoch: Epoch,
        /// The bug that is planted.
        pub planted: Option<Planted>,
        /// Does the next thing in the simulated world, or moves the clock, to the given time at
        /// most. Called where the product would block.
        pub world: Rc<dyn Fn(Instant)>,
    }

    thread_local! {
        static HOOKS: RefCell<Option<Hooks>> = const { RefCell::new(None) };
    }

    /// Things that may happen during one wait. More are a wait that never ends.
    const MAX_THINGS: usize = 1_000_000;

    /// This thread simulates from now on.
    pub fn begin(hooks: Hooks) {
        HOOKS.set(Some(hooks));
    }

    /// This thread simulates no more.
    pub fn end() {
        drop(HOOKS.take());
    }

    /// The simulated time.
    pub fn now() -> Option<Instant> {
        HOOKS.with_borrow(|hooks| hooks.as_ref().map(|hooks| hooks.now))
    }

    /// The epoch of the next leader.
    pub fn next_epoch() -> Option<Epoch> {
        HOOKS.with_borrow_mut(|hooks| {
            let hooks = hooks.as_mut()?;
            hooks.epoch.0 += 1;
            Some(hooks.epoch)
        })
    }

    /// Moves the clock, never back.
    pub fn advance_to(time: Instant) {
        HOOKS.with_borrow_mut(|hooks| {
            if let Some(hooks) = hooks {
                hooks.now = hooks.now.max(time);
            }
        });
    }

    /// Lets the world go on until `done`, or the clock reaches `deadline`. Whether it is done.
    ///
    /// # Panics
    /// If a million things happen before either.
    pub fn wait_until(deadline: Instant, done: impl Fn() -> bool) -> bool {
        for _ in 0..MAX_THINGS {
            if done() {
                return true;
            }
            match HOOKS.with_borrow(|hooks| hooks.as_ref().map(|hooks| (hooks.now, Rc::clone(&hooks.world))))
            {
                Some((now, world)) if now < deadline => world(deadline),
                _ => return false,
            }
        }
        panic!("a wait does not end: the simulated clock stands still");
    }

    pub(super) fn planted(bug: Planted) -> bool {
        HOOKS.with_borrow(|hooks| hooks.as_ref().is_some_and(|hooks| hooks.planted == Some(bug)))
    }
}
