//! A pool of threads: with preadv / pwritev, which works everywhere, or with lanes of a [`SlotIo`].

use super::job::Job;
use super::lane::Lane;
use super::queue::{Ended, Queue};
use super::spawn;
use crate::batch::OpKind;
use crate::ops;
use crate::shared::{Alive, EngineState};
use crate::slot_file::Bounce;
use crate::{OpOutcome, SlotIo};
use kvbm_plan::deadline_after;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long all threads may take to open their lanes and read a page through them.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// What a thread moves bytes with.
enum Hands<'a> {
    /// System calls, and a buffer for memory that direct I/O cannot take.
    Calls(&'a mut Bounce),
    Lane(&'a mut Lane),
}

/// Starts the threads. After an error some may run: closing the queue ends them.
pub(super) fn start(queue: &Arc<Queue>, shared: &Arc<EngineState>, alive: &Arc<Alive>) -> io::Result<()> {
    for index in 0..shared.config.threads {
        let (queue, shared) = (Arc::clone(queue), Arc::clone(shared));
        spawn(format!("kvbm-disk-{index}"), alive, move || work(&queue, &shared))?;
    }
    Ok(())
}

/// Starts the threads, each with a lane of `slot_io`. After an error some may run: closing the
/// queue ends them.
pub(super) fn start_lanes(
    slot_io: &Arc<dyn SlotIo>,
    queue: &Arc<Queue>,
    shared: &Arc<EngineState>,
    alive: &Arc<Alive>,
) -> io::Result<()> {
    let (started, outcomes) = channel();
    for index in 0..shared.config.threads {
        let (queue, shared) = (Arc::clone(queue), Arc::clone(shared));
        let (slot_io, started) = (Arc::clone(slot_io), started.clone());
        // A lane belongs to the thread that opens it.
        spawn(format!("kvbm-disk-{index}"), alive, move || match Lane::open(&*slot_io, &shared) {
            // Who no longer listens has given up on these threads.
            Ok(mut lane) if started.send(Ok(())).is_ok() => {
                drop(started);
                while let Some(job) = queue.wait() {
                    take(job, &queue, &shared, &mut Hands::Lane(&mut lane));
                }
            }
            Ok(_) => {}
            Err(error) => drop(started.send(Err(error))),
        })?;
    }
    drop(started);
    let until = deadline_after(Instant::now(), START_DEADLINE);
    (0..shared.config.threads).try_for_each(|_| {
        let no_answer = |_| Err(io::Error::other("a thread did not start"));
        outcomes.recv_timeout(until.saturating_duration_since(Instant::now())).unwrap_or_else(no_answer)
    })
}

fn work(queue: &Queue, shared: &EngineState) {
    let mut bounce = Bounce::default();
    while let Some(job) = queue.wait() {
        take(job, queue, shared, &mut Hands::Calls(&mut bounce));
    }
}

/// What the threads do, by the caller's: runs every operation that waits.
#[cfg(any(test, kvbm_sim))]
pub(super) fn run_waiting(queue: &Queue, shared: &EngineState, bounce: &mut Bounce) {
    while let Some(job) = queue.next() {
        take(job, queue, shared, &mut Hands::Calls(bounce));
    }
}

fn take(job: Job, queue: &Queue, shared: &EngineState, hands: &mut Hands<'_>) {
    let outcome = match job.refusal() {
        Some(error) => Err(error),
        None => run(&job, shared, hands),
    };
    queue.done(Ended::default().and(job.op().kind));
    drop(job.finish(outcome));
}

/// Runs one operation. A medium that panics fails the operation, not the thread.
fn run(job: &Job, shared: &EngineState, hands: &mut Hands<'_>) -> OpOutcome {
    let op = job.op();
    // SAFETY: the job lives, so the contract of its fragments holds.
    let mut begun = unsafe { ops::begin(op, shared) }?;
    let passing = &mut begun;
    let transfer = AssertUnwindSafe(|| match op.kind {
        OpKind::Read => {
            let open = |staged: &mut [u8]| passing.open(op, staged, shared);
            match hands {
                // SAFETY: as above, and the slot was begun for a read.
                Hands::Calls(bounce) => unsafe { shared.slots.read(op.slot, &op.fragments, bounce, open) },
                // SAFETY: as above.
                Hands::Lane(lane) => unsafe { lane.read(&shared.slots, op.slot, &op.fragments, open) },
            }
        }
        OpKind::Write(_) => {
            let seal = |staged: &mut [u8]| passing.seal(op, staged, shared);
            match hands {
                // SAFETY: as above, and the slot was begun for a write.
                Hands::Calls(bounce) => unsafe { shared.slots.write(op.slot, &op.fragments, bounce, seal) },
                // SAFETY: as above.
                Hands::Lane(lane) => unsafe { lane.write(&shared.slots, op.slot, &op.fragments, seal) },
            }
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
