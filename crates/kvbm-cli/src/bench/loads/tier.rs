//! A worker without bytes whose disk takes a modelled time, and stalls when it is told to.

use kvbm::plan::{
    BlockOutcome, Command, Epoch, Failure, FailureKind, Message, Path, Rank, TransferPlan, TransferReport,
    wire,
};
use kvbm::worker::{Lane, LinkError, MessageSink, MetadataWorker, WorkerLink};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The disk: plans one after the other, each block in the same time.
#[derive(Clone, Default)]
pub(super) struct SlowDisk(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Time of a block; zero answers at once.
    each: Duration,
    /// Until then it is busy, or stalls.
    busy_until: Option<Instant>,
    waiting: VecDeque<(Instant, TransferPlan, Vec<u8>)>,
    is_over: bool,
}

/// What waits for its time, or for the end of its budget.
enum Next {
    Done(Vec<u8>),
    Late(TransferPlan),
    Over,
}

impl SlowDisk {
    /// A line to a worker with this disk.
    pub(super) fn connect(&self, rank: Rank, epoch: Epoch, sink: MessageSink) -> Box<dyn WorkerLink> {
        let worker = Arc::new(MetadataWorker::start(rank, epoch, Arc::clone(&sink)));
        let (disk, answers) = (self.clone(), Arc::clone(&worker));
        let serve = move || {
            loop {
                match disk.next() {
                    Next::Done(command) => {
                        // It takes whatever it took when the command came.
                        let _taken = answers.send(Lane::Bulk, &command);
                    }
                    Next::Late(plan) => report_late(&plan, rank, &sink),
                    Next::Over => return,
                }
            }
        };
        std::thread::spawn(serve);
        Box::new(Line { worker, disk: self.clone() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on a block takes so long.
    pub(super) fn set_time_of_block(&self, each: Duration) {
        self.lock().each = each;
    }

    /// It does nothing for so long.
    pub(super) fn stall(&self, time: Duration) {
        let mut state = self.lock();
        state.busy_until = Some(state.busy_until.unwrap_or_else(Instant::now).max(Instant::now()) + time);
    }

    /// The next plan that is over, in order.
    fn next(&self) -> Next {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let due = match state.waiting.front() {
                _ if state.is_over => return Next::Over,
                None => now + Duration::from_secs(3600),
                Some((came, plan, _)) => {
                    let budget = Duration::from_millis(u64::from(plan.budget_ms));
                    let late = (plan.budget_ms > 0).then(|| *came + budget);
                    let start = state.busy_until.unwrap_or(*came).max(*came);
                    let done = start + state.each * plan.blocks.len() as u32;
                    if late.is_some_and(|late| late < done && late <= now) {
                        // What it had begun it goes on with.
                        let begun = late.is_some_and(|late| start < late);
                        let Some((_, plan, _)) = state.waiting.pop_front() else { continue };
                        if begun {
                            state.busy_until = Some(done);
                        }
                        return Next::Late(plan);
                    }
                    if done <= now {
                        state.busy_until = Some(done);
                        let Some((_, _, command)) = state.waiting.pop_front() else { continue };
                        return Next::Done(command);
                    }
                    late.map_or(done, |late| late.min(done))
                }
            };
            let wait = due.saturating_duration_since(now);
            state = self.0.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn report_late(plan: &TransferPlan, rank: Rank, sink: &MessageSink) {
    let failure = Failure::new(FailureKind::Deadline, "the modelled disk did not answer in time");
    let report = TransferReport {
        plan_id: plan.plan_id,
        epoch: plan.epoch,
        rank,
        path: plan.path(),
        blocks: vec![BlockOutcome::Failed(failure); plan.blocks.len()],
        bytes: 0,
        queued_us: 0,
        busy_us: u64::from(plan.budget_ms) * 1000,
    };
    if let Ok(bytes) = wire::encode_message(&Message::Transfer(report)) {
        sink(bytes);
    }
}

struct Line {
    worker: Arc<MetadataWorker>,
    disk: SlowDisk,
}

impl WorkerLink for Line {
    fn send(&self, lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        if let Ok(Command::Transfer(plan)) = wire::decode_command(command)
            && plan.path() == Path::G3_G1
        {
            let mut state = self.disk.lock();
            state.waiting.push_back((Instant::now(), plan, command.to_vec()));
            self.disk.0.changed.notify_all();
            return Ok(());
        }
        self.worker.send(lane, command)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.disk.lock().is_over = true;
        self.disk.0.changed.notify_all();
    }
}
