//! What wakes the committer, and what it reports to those who wait for a commit.

use kvbm_plan::deadline_after;
use parking_lot::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Whether a cycle is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CommitNeed {
    #[default]
    None,
    /// Something is dirty: at the end of the interval.
    Due,
    /// Now.
    Urgent,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CommitterState {
    #[default]
    Running,
    /// One last commit.
    Stopping,
    Ended,
}

#[derive(Debug, Default)]
pub(crate) struct Signals {
    pub(crate) work: CommitNeed,
    pub(crate) life: CommitterState,
    /// No operation was left when the engine was stopped: nothing will be written any more.
    pub(crate) in_order: bool,
    /// Dirty slots that went through a cycle, successful or not.
    pub(crate) processed: u64,
    /// Rounds, each of all cycles that were due, that began, and the last of them that is over.
    pub(crate) begun: u64,
    pub(crate) over: u64,
    pub(crate) failures: u64,
    pub(crate) last_failure: String,
}

/// Wakes the committer, and reports its progress.
#[derive(Debug, Default)]
pub(crate) struct CommitSignals {
    pub(crate) signals: Mutex<Signals>,
    pub(crate) wake: Condvar,
    pub(crate) progress: Condvar,
}

impl CommitSignals {
    /// The number of dirty slots grew from `before` to `after`. A commit becomes urgent once, when
    /// they reach `max_slots`: a device that fails is not asked again for each further slot.
    pub(crate) fn became_dirty(&self, before: usize, after: usize, max_slots: usize) {
        let urgent = before < max_slots && after >= max_slots;
        self.want(if urgent { CommitNeed::Urgent } else { CommitNeed::Due });
    }

    pub(crate) fn want(&self, work: CommitNeed) {
        let mut signals = self.signals.lock();
        if signals.work < work {
            signals.work = work;
            drop(signals);
            self.wake.notify_one();
        }
    }

    /// The end, `in_order` if no operation waits or runs and none will.
    pub(crate) fn stop(&self, in_order: bool) {
        let mut signals = self.signals.lock();
        if signals.life == CommitterState::Running {
            (signals.life, signals.in_order) = (CommitterState::Stopping, in_order);
        }
        drop(signals);
        self.wake.notify_one();
    }

    /// Returns whether this is the last time.
    pub(crate) fn wait_for_work(&self, interval: Duration) -> bool {
        let mut signals = self.signals.lock();
        let idle = |signals: &mut Signals| {
            signals.work == CommitNeed::None && signals.life == CommitterState::Running
        };
        self.wake.wait_while(&mut signals, idle);
        let until = deadline_after(Instant::now(), interval);
        let patient = |signals: &mut Signals| {
            signals.work < CommitNeed::Urgent && signals.life == CommitterState::Running
        };
        self.wake.wait_while_until(&mut signals, patient, until);
        signals.work = CommitNeed::None;
        signals.begun += 1;
        signals.life != CommitterState::Running
    }

    pub(crate) fn cycle_done(&self, processed: u64, result: Result<(), String>) {
        let mut signals = self.signals.lock();
        signals.processed += processed;
        if let Err(message) = result {
            signals.failures += 1;
            signals.last_failure = message;
        }
        drop(signals);
        self.progress.notify_all();
    }

    pub(crate) fn round_over(&self) {
        let mut signals = self.signals.lock();
        signals.over = signals.begun;
        drop(signals);
        self.progress.notify_all();
    }

    pub(crate) fn is_in_order(&self) -> bool {
        self.signals.lock().in_order
    }

    pub(crate) fn ended(&self) {
        self.signals.lock().life = CommitterState::Ended;
        self.progress.notify_all();
    }
}
