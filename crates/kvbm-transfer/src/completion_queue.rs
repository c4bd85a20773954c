//! Finished stages of an executor, and the wake-up for new work.
//!
//! The thread is woken after the lock was released, and once for all messages that come before it
//! runs. Waking a thread costs about as much as the checksum of half a megabyte.

use kvbm_device::DeviceError;
use kvbm_disk::OpOutcome;
use kvbm_plan::{BlockOutcome, Failure};
use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// A stage of some blocks is over.
pub(crate) struct Done {
    pub(crate) ticket: u64,
    pub(crate) result: Stage,
}

pub(crate) enum Stage {
    Copy(Result<(), DeviceError>),
    /// Results of the operations of a batch, in order.
    Disk(Vec<OpOutcome>),
    /// Checksums of the blocks of a task, in order, or why they did not arrive.
    Volume(Vec<Result<u64, Failure>>),
    /// Results of the blocks of a copy by a mover, in order.
    Moved(Vec<BlockOutcome>),
}

/// The completions of one executor: one message per ticket, so there are never more of them than it
/// has blocks in flight.
#[derive(Default)]
pub(crate) struct CompletionQueue {
    state: Mutex<CompletionState>,
    news: Condvar,
}

#[derive(Default)]
struct CompletionState {
    done: Vec<Done>,
    is_rung: bool,
}

impl CompletionQueue {
    /// Reports a stage that is over.
    pub(crate) fn put(&self, done: Done) {
        self.state.lock().done.push(done);
        self.news.notify_one();
    }

    /// Says that there may be more to issue.
    pub(crate) fn wake(&self) {
        self.state.lock().is_rung = true;
        self.news.notify_one();
    }

    /// All reported stages that were not taken yet, in order.
    pub(crate) fn take(&self) -> Vec<Done> {
        std::mem::take(&mut self.state.lock().done)
    }

    /// Waits until there is something to take or a wake-up came, and resets the wake-up; no longer
    /// than `most`.
    pub(crate) fn wait(&self, most: Duration) {
        let mut state = self.state.lock();
        if state.done.is_empty() && !state.is_rung {
            let _timed_out = self.news.wait_for(&mut state, most);
        }
        state.is_rung = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn what_came_before_the_wait_ends_it() {
        let completions = CompletionQueue::default();
        completions.wake();
        completions.wait(LONG);
        for ticket in [3, 5] {
            completions.put(Done { ticket, result: Stage::Copy(Ok(())) });
        }
        completions.wait(LONG);
        assert_eq!(completions.take().iter().map(|done| done.ticket).collect::<Vec<_>>(), [3, 5]);
        assert!(completions.take().is_empty());
    }

    #[test]
    fn who_waits_is_woken_by_either() {
        let completions = CompletionQueue::default();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                completions.wait(LONG);
                loop {
                    match completions.take().first() {
                        Some(done) => return done.ticket,
                        None => completions.wait(LONG),
                    }
                }
            });
            completions.wake();
            completions.put(Done { ticket: 1, result: Stage::Copy(Ok(())) });
            assert_eq!(waiter.join().expect("no panic"), 1);
        });
    }
}
