//! A pool of threads with preadv / pwritev: works everywhere.

use super::job::Job;
use super::queue::{Ended, Queue};
use super::spawn;
use crate::OpOutcome;
use crate::batch::OpKind;
use crate::ops;
use crate::shared::{Alive, EngineState};
use crate::slot_file::Bounce;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Starts the threads. After an error some may run: closing the queue ends them.
pub(super) fn start(queue: &Arc<Queue>, shared: &Arc<EngineState>, alive: &Arc<Alive>) -> io::Result<()> {
    for index in 0..shared.config.threads {
        let (queue, shared) = (Arc::clone(queue), Arc::clone(shared));
        spawn(format!("kvbm-disk-{index}"), alive, move || work(&queue, &shared))?;
    }
    Ok(())
}

fn work(queue: &Queue, shared: &EngineState) {
    let mut bounce = Bounce::default();
    while let Some(job) = queue.wait() {
        take(job, queue, shared, &mut bounce);
    }
}

/// What the threads do, by the caller's: runs every operation that waits.
#[cfg(any(test, kvbm_sim))]
pub(super) fn run_waiting(queue: &Queue, shared: &EngineState, bounce: &mut Bounce) {
    while let Some(job) = queue.next() {
        take(job, queue, shared, bounce);
    }
}

fn take(job: Job, queue: &Queue, shared: &EngineState, bounce: &mut Bounce) {
    let outcome = match job.refusal() {
        Some(error) => Err(error),
        None => run(&job, shared, bounce),
    };
    queue.done(Ended::default().and(job.op().kind));
    drop(job.finish(outcome));
}

/// Runs one operation. A medium that panics fails the operation, not the thread.
fn run(job: &Job, shared: &EngineState, bounce: &mut Bounce) -> OpOutcome {
    let op = job.op();
    // SAFETY: the job lives, so the contract of its fragments holds.
    let mut begun = unsafe { ops::begin(op, shared) }?;
    let passing = &mut begun;
    let transfer = AssertUnwindSafe(|| match op.kind {
        OpKind::Read => {
            let open = |staged: &mut [u8]| passing.open(op, staged, shared);
            // SAFETY: as above, and the slot was begun for a read.
            unsafe { shared.slots.read(op.slot, &op.fragments, bounce, open) }
        }
        OpKind::Write(_) => {
            let seal = |staged: &mut [u8]| passing.seal(op, staged, shared);
            // SAFETY: as above, and the slot was begun for a write.
            unsafe { shared.slots.write(op.slot, &op.fragments, bounce, seal) }
        }
    });
    if let Ok(result) = catch_unwind(transfer) {
        // SAFETY: as above; the transfer is over.
        let over = unsafe { ops::over(op, &begun, result, shared) };
        ops::end(op, over, shared)
    } else {
        ops::abandon(op, shared);
        Err(job.panicked())
    }
}
