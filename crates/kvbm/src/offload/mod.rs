//! Offloads: copies on the next tier down. Which blocks go, when they start, and who waits for
//! them.
//!
//! Registering blocks only marks them ([`Offload::registered`]) and wakes the thread
//! `kvbm-offload`. That thread applies the triggers, consults the admission policy, and starts
//! transfers; so do the ends of transfers. Nothing here makes an allocation wait. What is marked or
//! queued pins its source, so an edge holds at most a share of the upper tier. Beyond it, the
//! blocks that are least likely to be used again are dropped and counted.
//!
//! A block that is marked counts as under way from the mark on: whoever waits for offloads waits
//! for the decision too.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `ancestors` | ancestors that go before a block | `edge`, `accounts` |
//! | `start` | starting queued offloads | `edge` |
//! | `triggers` | which blocks go down | `edge`, `accounts` |
//! | `edge` | what waits and runs on an edge | `accounts`, `wear` |
//! | `accounts` | offloads under way, for who waits for them | - |
//! | `wear` | write budget of a disk | - |

mod accounts;
mod ancestors;
mod edge;
mod start;
mod triggers;
mod wear;

use crate::admission::AdmissionPolicy;
use crate::metrics::{DropReason, Metrics};
use crate::slots::Slots;
use crate::transfers::{OnArrival, Transfers};
use crate::volume::Volumes;
use accounts::Accounts;
pub(crate) use accounts::Interval;
use edge::Batch;
pub(crate) use edge::Edge;
pub use edge::OffloadBacklog;
use kvbm_plan::{Path, Tier};
use kvbm_pool::{Pinned, Registry};
use parking_lot::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
pub(crate) use wear::WearBudget;

/// How often blocks that wait for an ancestor are looked at: the end of an arrival that failed
/// wakes nobody.
const RECHECK: Duration = Duration::from_millis(50);

/// See the module.
pub(crate) struct Offload {
    registry: Registry,
    transfers: Arc<Transfers>,
    slots: Arc<Slots>,
    volumes: Arc<Volumes>,
    metrics: Metrics,
    admission: Arc<dyn AdmissionPolicy>,
    edges: Vec<Edge>,
    accounts: Accounts,
    marks: Mutex<Marks>,
    wake: Arc<Wake>,
    inline: Inline,
    this: Weak<Self>,
}

/// Decisions on the thread that marks, for managers that move no bytes: their results repeat.
#[derive(Default)]
struct Inline {
    is_on: AtomicBool,
    is_due: AtomicBool,
    /// Held by the thread that decides. A mark made meanwhile, by whichever thread, is left to it.
    deciding: Mutex<()>,
}

/// What the thread has to look at, beside the batches that wait for a decision. Each mark holds an
/// account open.
#[derive(Default)]
struct Marks {
    /// Tiers on which blocks have become visible.
    tiers: [Option<Interval>; Tier::ALL.len()],
    /// An iteration of the engine is over.
    iteration: Option<Interval>,
}

/// Wakes the thread.
#[derive(Default)]
struct Wake {
    state: Mutex<WakeState>,
    changed: Condvar,
}

#[derive(Default)]
struct WakeState {
    is_due: bool,
    is_over: bool,
}

impl Wake {
    fn set(&self) {
        let mut state = self.state.lock();
        if !std::mem::replace(&mut state.is_due, true) {
            self.changed.notify_one();
        }
    }

    fn end(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_one();
    }

    /// Waits for work, for [`RECHECK`] at most where `recheck` says so. `false` at the end.
    fn wait(&self, recheck: bool) -> bool {
        let mut state = self.state.lock();
        while !state.is_due && !state.is_over {
            if !recheck {
                self.changed.wait(&mut state);
            } else if self.changed.wait_for(&mut state, RECHECK).timed_out() {
                break;
            }
        }
        state.is_due = false;
        !state.is_over
    }
}

/// Ends an offload's share in the accounts, however the offload ends. The table of transfers holds
/// it, so it must not keep the offloads alive.
pub(crate) struct Running {
    offload: Weak<Offload>,
    /// The edge whose queue it was taken from, if it was queued.
    queue: Option<Path>,
    interval: Interval,
    blocks: usize,
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(offload) = self.offload.upgrade() else { return };
        if let Some(edge) = self.queue.and_then(|path| offload.edge(path)) {
            edge.finished(self.blocks);
        }
        offload.accounts.remove(self.interval, self.blocks);
        offload.wake();
    }
}

impl Offload {
    pub(crate) fn new(
        registry: Registry,
        transfers: Arc<Transfers>,
        slots: Arc<Slots>,
        volumes: Arc<Volumes>,
        metrics: Metrics,
        admission: Arc<dyn AdmissionPolicy>,
        edges: Vec<Edge>,
    ) -> Arc<Self> {
        let (accounts, marks, wake) = (Accounts::default(), Mutex::default(), Arc::default());
        Arc::new_cyclic(|this| Self {
            registry,
            transfers,
            slots,
            volumes,
            metrics,
            admission,
            edges,
            accounts,
            marks,
            wake,
            inline: Inline::default(),
            this: Weak::clone(this),
        })
    }

    /// Decides on the thread that marks from now on: no bytes move, so nobody waits for long.
    pub(crate) fn decide_inline(&self) {
        self.inline.is_on.store(true, Ordering::Release);
    }

    /// Which blocks are worth a copy.
    pub(crate) fn admission(&self) -> &dyn AdmissionPolicy {
        &*self.admission
    }

    /// Has what is marked and queued looked at.
    fn wake(&self) {
        if !self.inline.is_on.load(Ordering::Acquire) {
            self.wake.set();
            return;
        }
        self.inline.is_due.store(true, Ordering::SeqCst);
        let Some(this) = self.this.upgrade() else { return };
        // Looked at again after the lock was released: a mark in between found it taken.
        while self.inline.is_due.load(Ordering::SeqCst) {
            let Some(_deciding) = self.inline.deciding.try_lock() else { return };
            while self.inline.is_due.swap(false, Ordering::SeqCst) {
                this.run_guarded();
            }
        }
    }

    /// Policies and links are foreign code. Whatever they do, others wait for this thread.
    fn run_guarded(self: &Arc<Self>) {
        if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
            tracing::error!("deciding about offloads failed; the blocks of that decision are not offloaded");
            self.wake();
        }
    }

    /// What the thread does, once.
    #[cfg(kvbm_sim)]
    pub(crate) fn decide_once(self: &Arc<Self>) {
        let is_due = std::mem::take(&mut self.wake.state.lock().is_due);
        if is_due || self.edges.iter().any(Edge::is_waiting) {
            self.run_guarded();
        }
    }

    /// Starts the thread that decides. It ends with the last reference to the offloads.
    pub(crate) fn start_thread(self: &Arc<Self>, name: &str) -> std::io::Result<()> {
        let (weak, wake) = (Arc::downgrade(self), Arc::clone(&self.wake));
        let decide = move || {
            let mut recheck = false;
            while wake.wait(recheck)
                && let Some(offload) = weak.upgrade()
            {
                offload.run_guarded();
                recheck = offload.edges.iter().any(Edge::is_waiting);
            }
        };
        std::thread::Builder::new().name(name.into()).spawn(decide).map(drop)
    }

    pub(crate) fn edge(&self, path: Path) -> Option<&Edge> {
        self.edges.iter().find(|edge| edge.path == path)
    }

    pub(crate) fn backlog(&self, path: Path) -> OffloadBacklog {
        self.edge(path).map_or_else(OffloadBacklog::default, Edge::backlog)
    }

    /// Edges whose lower tier is there: volumes come and go.
    fn open_edges(&self) -> impl Iterator<Item = &Edge> {
        let volumes = !self.volumes.is_empty();
        self.edges.iter().filter(move |edge| volumes || edge.path.dst != Tier::G4)
    }

    /// Those of them that begin on `src`.
    fn edges_from(&self, src: Tier) -> impl Iterator<Item = &Edge> {
        self.open_edges().filter(move |edge| edge.path.src == src)
    }

    /// Blocks became visible on a tier. `interval`: that of the offload that brought them, if one
    /// did. Only marks them; the thread decides.
    pub(crate) fn registered(&self, blocks: &Pinned, interval: Option<Interval>) {
        let tier = blocks.tier();
        if self.transfers.refuses_callers() || self.edges_from(tier).next().is_none() {
            return;
        }
        let interval = interval.unwrap_or_else(|| self.accounts.now());
        for edge in self.edges_from(tier).filter(|edge| edge.triggers.write_through) {
            let blocks = blocks.clone().into_transfer();
            self.accounts.add(interval, blocks.len());
            let dropped = edge.mark(Batch { blocks, interval });
            self.drop_all(edge, dropped, DropReason::QueueFull);
        }
        self.mark(interval, |marks| &mut marks.tiers[tier.index()]);
    }

    /// An iteration of the engine is over.
    pub(crate) fn iteration_ended(&self) {
        if !self.transfers.refuses_callers() {
            self.mark(self.accounts.now(), |marks| &mut marks.iteration);
        }
    }

    fn mark(&self, interval: Interval, which: impl FnOnce(&mut Marks) -> &mut Option<Interval>) {
        // The account is open before the mark is visible.
        self.accounts.add(interval, 1);
        let mut marks = self.marks.lock();
        let mark = which(&mut marks);
        // One look serves all marks. The account of the earliest stays open: it comes before those
        // that wait for a later interval.
        let earlier = mark.map_or(interval, |known| known.min(interval));
        let replaced = mark.replace(earlier).map(|known| known.max(interval));
        drop(marks);
        if let Some(replaced) = replaced {
            self.accounts.remove(replaced, 1);
        }
        self.wake();
    }

    /// What is called with the blocks that a transfer brought to a tier. It keeps nothing alive.
    pub(crate) fn on_arrival(self: &Arc<Self>, interval: Option<Interval>) -> OnArrival {
        let weak = Arc::downgrade(self);
        Box::new(move |blocks: &Pinned| {
            if let Some(offload) = weak.upgrade() {
                offload.registered(blocks, interval);
            }
        })
    }

    /// The interval of what is requested now.
    pub(crate) fn interval(&self) -> Interval {
        self.accounts.now()
    }

    /// An offload that starts without having been queued.
    pub(crate) fn running(self: &Arc<Self>, interval: Interval, blocks: usize) -> Running {
        self.accounts.add(interval, blocks);
        Running { offload: Arc::downgrade(self), queue: None, interval, blocks }
    }

    /// Queues an offload that a caller requested by name, and starts it if it may start: there is
    /// nothing to decide. `false` where no edge leads from there to `to`.
    pub(crate) fn offload_now(self: &Arc<Self>, blocks: Pinned, to: Tier) -> bool {
        let path = Path::new(blocks.tier(), to);
        let Some(edge) = self.open_edges().find(|edge| edge.path == path) else { return false };
        let blocks = self.without_copied(edge, blocks);
        self.enqueue(edge, self.accounts.now(), blocks);
        self.start_queued();
        true
    }

    /// Queues `blocks`; what the queue has no room for is dropped.
    pub(crate) fn enqueue(&self, edge: &Edge, interval: Interval, blocks: Pinned) {
        let blocks = blocks.into_transfer();
        if self.transfers.is_closed() || blocks.is_empty() {
            return;
        }
        // Opens the account first: the batch may be started and over before this returns.
        self.accounts.add(interval, blocks.len());
        let dropped = edge.push(Batch { blocks, interval });
        self.drop_all(edge, dropped, DropReason::QueueFull);
        self.wake();
    }

    /// Drops everything that is queued: the manager is shut down.
    pub(crate) fn drop_queued(&self) {
        for edge in &self.edges {
            self.drop_all(edge, edge.take_queued(), DropReason::ShuttingDown);
        }
    }

    fn drop_all(&self, edge: &Edge, batches: Vec<Batch>, reason: DropReason) {
        for Batch { blocks, interval } in batches {
            if reason == DropReason::QueueFull && edge.overflows() {
                tracing::warn!(path = %edge.path, limit = edge.limit, "offloads are requested faster than they are copied: the queue drops and counts those least likely to be used again");
            }
            let count = blocks.len();
            self.metrics.path(edge.path).dropped(reason).add(count as u64);
            // Before the count goes down: a caller that waits for offloads finds their blocks
            // released.
            drop(blocks);
            self.accounts.remove(interval, count);
        }
    }

    /// Blocks until no offload is to be decided about, queued or running, or `deadline` passes.
    /// Whether that was reached.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> bool {
        self.accounts.wait_idle(deadline)
    }

    /// Blocks until the offloads under way now, and what follows from them, are over, or `deadline`
    /// passes. Whether that was reached.
    pub(crate) fn wait_under_way(&self, deadline: Instant) -> bool {
        self.accounts.wait_under_way(deadline)
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        self.wake.end();
    }
}
