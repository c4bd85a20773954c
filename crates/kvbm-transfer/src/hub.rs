//! The lock around all plans, and the thread that sends reports and watches deadlines.
//!
//! One lock, held for bookkeeping only. The sink, wakers and executors are called after it was
//! released.

use crate::completion_queue::CompletionQueue;
use crate::error::{BlocksBusy, ShutdownError, SubmitError};
use crate::finished::FinishedPlan;
use crate::schedule::{Delivery, Portion, Reply, State};
use crate::stats::WorkerStats;
use kvbm_plan::{BlockId, BlockOutcome, Message, Path, PlanId, TransferPlan, TransferReport, VolumeId, wire};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Takes the encoded messages of a worker. Called from one thread of the worker, one message at a
/// time; it may block, and then submissions are refused once too many messages wait. It may submit
/// commands.
pub type Sink = Arc<dyn Fn(Vec<u8>) + Send + Sync>;

/// What threads of a worker share.
pub(crate) struct Hub {
    inner: Mutex<Inner>,
    /// Something for the reporter: a delivery, an earlier deadline, the end of a thread.
    changed: Condvar,
    executors: [Vec<Arc<CompletionQueue>>; Path::ALL.len()],
    sink: Sink,
    sink_panics: AtomicU64,
    host_verified: AtomicU64,
    /// Calls of volumes under way, by what they are for.
    calls: Mutex<BTreeMap<(String, VolumeId), usize>>,
}

struct Inner {
    state: State,
    /// Threads that may still produce deliveries.
    producers: usize,
    /// Whether the reporter runs.
    reporting: bool,
}

impl Hub {
    /// With the completion queues of the executors of each path, which the hub wakes.
    pub(crate) fn new(
        state: State,
        executors: [Vec<Arc<CompletionQueue>>; Path::ALL.len()],
        sink: Sink,
    ) -> Self {
        Self {
            inner: Mutex::new(Inner { state, producers: 0, reporting: false }),
            changed: Condvar::new(),
            executors,
            sink,
            sink_panics: AtomicU64::new(0),
            host_verified: AtomicU64::new(0),
            calls: Mutex::default(),
        }
    }

    /// Acts on the state, then tells everybody whom it concerns, without the lock.
    fn with<R>(&self, act: impl FnOnce(&mut State, Instant) -> R) -> R {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let before = inner.state.next_deadline();
        let result = act(&mut inner.state, now);
        inner.state.ripple(now);
        let notices = inner.state.take_notices();
        let wakes = inner.state.take_wakes();
        let after = inner.state.next_deadline();
        let report = !notices.is_empty()
            || inner.state.outgoing_len() > 0
            || after.is_some() && after != before
            || inner.state.is_closing();
        drop(inner);
        if report {
            self.changed.notify_all();
        }
        for (completion_queues, _) in self.executors.iter().zip(wakes).filter(|(_, woken)| *woken) {
            for completions in completion_queues {
                completions.wake();
            }
        }
        for (slot, report) in notices {
            slot.put(report);
        }
        result
    }

    pub(crate) fn submit(&self, plan: TransferPlan, reply: Reply) -> Result<bool, SubmitError> {
        self.with(|state, now| state.submit(plan, reply, now))
    }

    pub(crate) fn cancel(&self, plan_id: PlanId) {
        self.with(|state, now| state.cancel(plan_id, now));
    }

    pub(crate) fn advance(&self, iteration: u64, layer: Option<u32>) {
        self.with(|state, _| state.advance(iteration, layer));
    }

    /// Follows a device event that gates refer to as `id`.
    pub(crate) fn register_event(self: &Arc<Self>, id: u64, event: &kvbm_device::Event) {
        let generation = self.with(|state, now| state.register_event(id, now));
        let hub = Arc::downgrade(self);
        event.on_complete(move |result| {
            if let Some(hub) = hub.upgrade() {
                let result = result.map_err(|error| error.to_string());
                hub.with(|state, now| state.event_over(id, generation, result, now));
            }
        });
    }

    pub(crate) fn send(&self, message: Message) {
        self.with(|state, _| state.send(message));
    }

    /// `room`: how many blocks of a plan may go now.
    pub(crate) fn take(
        &self,
        path: Path,
        busy: bool,
        room: impl Fn(&TransferPlan) -> usize,
    ) -> Option<Portion> {
        self.with(|state, now| state.take(path, busy, room, now))
    }

    /// See [`State::begin_copies`].
    pub(crate) fn begin_copies(&self, plan_id: PlanId, indices: &[u32]) -> Vec<bool> {
        self.with(|state, _| state.begin_copies(plan_id, indices))
    }

    pub(crate) fn settle(&self, plan_id: PlanId, outcomes: Vec<(u32, BlockOutcome)>, bytes: u64) {
        self.with(|state, now| state.settle(plan_id, outcomes, bytes, now));
    }

    /// An executor of `path` is gone.
    pub(crate) fn retire(&self, path: Path) {
        self.with(|state, now| state.retire(path, now));
    }

    pub(crate) fn close(&self) {
        self.with(State::close);
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.inner.lock().state.is_closing()
    }

    /// Counts host blocks whose checksum was compared.
    pub(crate) fn count_verified(&self) {
        self.host_verified.fetch_add(1, Ordering::Relaxed);
    }

    /// A volume is called until the returned guard is dropped: what a shutdown waits for has a
    /// name.
    pub(crate) fn call<'a>(&'a self, what: &str, volume: VolumeId) -> Call<'a> {
        let call = (what.to_owned(), volume);
        *self.calls.lock().entry(call.clone()).or_default() += 1;
        Call { hub: self, call }
    }

    /// What has not come back.
    fn unfinished(&self) -> ShutdownError {
        let (running, paths) = {
            let inner = self.inner.lock();
            (inner.state.live_plans(), inner.state.path_stats())
        };
        let paths = paths.iter().filter(|stats| stats.running_plans > 0);
        let paths = paths.map(|stats| format!("path {}", stats.path));
        let volumes = self.calls.lock();
        let volumes = volumes.keys().map(|(what, volume)| format!("volume {volume} ({what})"));
        ShutdownError { running, waiting_for: paths.chain(volumes).collect() }
    }

    pub(crate) fn stats(&self) -> WorkerStats {
        let inner = self.inner.lock();
        WorkerStats {
            paths: inner.state.path_stats(),
            outgoing: inner.state.outgoing_len(),
            host_verified: self.host_verified.load(Ordering::Relaxed),
            sink_panics: self.sink_panics.load(Ordering::Relaxed),
            finished_dropped: inner.state.finished.dropped,
        }
    }

    // --- threads ---

    /// Announces a thread that produces deliveries until the returned guard is dropped.
    pub(crate) fn producer(self: &Arc<Self>) -> Producer {
        self.inner.lock().producers += 1;
        Producer(Arc::clone(self))
    }

    /// Waits until all threads are over, or says at `deadline` what still runs.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> Result<(), ShutdownError> {
        let mut inner = self.inner.lock();
        while inner.producers > 0 || inner.reporting {
            if self.changed.wait_until(&mut inner, deadline).timed_out() {
                drop(inner);
                return Err(self.unfinished());
            }
        }
        Ok(())
    }

    /// Waits until no accepted plan touches these blocks of G1.
    pub(crate) fn wait_blocks_idle(&self, blocks: &[BlockId], deadline: Instant) -> Result<(), BlocksBusy> {
        let blocks: HashSet<BlockId> = blocks.iter().copied().collect();
        let mut inner = self.inner.lock();
        loop {
            let busy = inner.state.busy_blocks(&blocks);
            if busy.is_empty() {
                return Ok(());
            }
            if self.changed.wait_until(&mut inner, deadline).timed_out() {
                let busy = inner.state.busy_blocks(&blocks);
                return if busy.is_empty() { Ok(()) } else { Err(BlocksBusy { blocks: busy }) };
            }
        }
    }

    pub(crate) fn drain_finished(&self) -> Vec<FinishedPlan> {
        self.inner.lock().state.finished.drain()
    }

    /// Announces the reporter before its thread starts.
    pub(crate) fn reporter(self: &Arc<Self>) -> Reporter {
        self.inner.lock().reporting = true;
        Reporter(Arc::clone(self))
    }

    /// The next delivery; `None` when there will be no more. Fails what is over its deadline
    /// meanwhile.
    fn next_delivery(&self) -> Option<Delivery> {
        loop {
            let mut inner = self.inner.lock();
            if let Some(delivery) = inner.state.next_delivery() {
                return Some(delivery);
            }
            if inner.state.is_closing() && inner.producers == 0 {
                return None;
            }
            match inner.state.next_deadline() {
                Some(deadline) if deadline <= Instant::now() => {
                    drop(inner);
                    self.with(State::expire);
                }
                Some(deadline) => {
                    let _ = self.changed.wait_until(&mut inner, deadline);
                }
                None => self.changed.wait(&mut inner),
            }
        }
    }

    fn deliver(&self, delivery: Delivery) {
        let (message, times) = match delivery {
            Delivery::Report(report, times) => (Message::Transfer(TransferReport::clone(&report)), times),
            Delivery::Message(message) => (message, 1),
        };
        let bytes = match wire::encode_message(&message) {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::error!(%error, "a message to the leader cannot be encoded");
                return;
            }
        };
        for _ in 0..times {
            let call = AssertUnwindSafe(|| (self.sink)(bytes.clone()));
            if catch_unwind(call).is_err() {
                self.sink_panics.fetch_add(1, Ordering::Relaxed);
                tracing::error!("the sink of a worker panicked; the message is lost");
            }
        }
    }
}

/// A call of a volume.
pub(crate) struct Call<'a> {
    hub: &'a Hub,
    call: (String, VolumeId),
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut calls = self.hub.calls.lock();
        if let Some(count) = calls.get_mut(&self.call) {
            *count -= 1;
            if *count == 0 {
                calls.remove(&self.call);
            }
        }
    }
}

/// A running thread that may produce deliveries.
pub(crate) struct Producer(Arc<Hub>);

impl Drop for Producer {
    fn drop(&mut self) {
        self.0.inner.lock().producers -= 1;
        self.0.changed.notify_all();
    }
}

/// The thread that calls the sink and watches deadlines.
pub(crate) struct Reporter(Arc<Hub>);

impl Reporter {
    pub(crate) fn run(self) {
        while let Some(delivery) = self.0.next_delivery() {
            self.0.deliver(delivery);
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.0.inner.lock().reporting = false;
        self.0.changed.notify_all();
    }
}
