//! The leader: decides, handles ids, never touches bytes.
//!
//! Callers' threads start operations (`sending`); workers' threads bring the answers (`answers`), and the last answer of an
//! operation settles it (`settle`).

mod admission;
mod ancestors;
mod answers;
mod disk_reads;
pub(crate) mod edge;
pub(crate) mod gather;
pub(crate) mod inflight;
mod late;
pub(crate) mod offload;
pub(crate) mod operation;
pub(crate) mod plans;
mod ranks;
pub(crate) mod recovery;
mod removals;
mod resting;
mod sending;
mod settle;
mod told;
pub(crate) mod wear;

use crate::admission::AdmissionPolicy;
use crate::events::EventPump;
use crate::metrics::Metrics;
use crate::onboard::Joins;
use crate::tenants::Names;
use crate::volume::Volumes;
use crate::worker::WorkerLink;
pub(crate) use admission::BlockCosts;
use admission::Speeds;
use answers::Inbox;
use disk_reads::DiskReads;
use gather::Gather;
use inflight::Inflight;
use kvbm_plan::{BlockId, Command, Epoch, Failure, FailureKind, FlushOutcome, Path, PlanId, Rank, Tier};
use kvbm_pool::{Prefix, Registry};
use offload::Offloads;
use operation::{Operation, PlanPart};
use parking_lot::{Mutex, ReentrantMutex};
use ranks::Ranks;
use recovery::Recoveries;
pub(crate) use removals::Removal;
use resting::Resting;
pub(crate) use sending::Prepared;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use told::Told;

/// What the leader goes by.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) epoch: Epoch,
    pub(crate) ranks: usize,
    /// Blocks of one plan.
    pub(crate) max_plan_blocks: usize,
    /// Blocks of one plan that reads from a disk or a volume.
    pub(crate) max_read_blocks: usize,
    /// After this a transfer counts as failed.
    pub(crate) transfer_deadline: Duration,
    /// After this, and the time that its bytes take, a read from disk counts as failed: recomputing is faster.
    pub(crate) read_deadline: Duration,
    pub(crate) block_costs: BlockCosts,
    /// How long a rank may stay away until it is given up; 0 for ever.
    pub(crate) rank_lost_after: Duration,
}

/// See the module.
pub(crate) struct Leader {
    pub(crate) registry: Registry,
    pub(crate) tenants: Names,
    pub(crate) settings: Settings,
    pub(crate) metrics: Metrics,
    pub(crate) offloads: Offloads,
    pub(crate) admission: Arc<dyn AdmissionPolicy>,
    speeds: Speeds,
    disk_reads: DiskReads,
    pub(crate) resting: Resting,
    /// Failures of transfers that the log knows.
    told: Told,
    pub(crate) joins: Joins,
    /// G4.
    pub(crate) volumes: Volumes,
    pub(crate) flushes: Arc<Gather<FlushOutcome>>,
    pub(crate) recoveries: Recoveries,
    /// For its figures; the manager owns it.
    pub(crate) events: OnceLock<Weak<EventPump>>,
    links: OnceLock<Vec<Box<dyn WorkerLink>>>,
    pub(crate) ranks: Ranks,
    inflight: Inflight<PlanPart>,
    inbox: Mutex<Inbox>,
    /// Held while slots of G3 change hands and the workers are told, so that a slot is never released after its next block was
    /// sent to it. A link may answer from inside `send`, hence reentrant.
    pub(crate) disk_order: ReentrantMutex<()>,
    /// Slots of G3 that are bad and were about to be written when that was found: they go out of use when that write failed.
    doomed: Mutex<Vec<BlockId>>,
    /// Number of the last device event that the engine handed over; 0 for none.
    fence: AtomicU64,
    /// Numbers given to device events.
    fences: AtomicU64,
    /// Callers start nothing any more.
    turned_away: AtomicBool,
    /// Nothing starts any more.
    closed: AtomicBool,
}

impl Leader {
    pub(crate) fn new(
        (registry, tenants): (Registry, Names),
        settings: Settings,
        metrics: Metrics,
        offloads: Offloads,
        admission: Arc<dyn AdmissionPolicy>,
        volumes: Volumes,
    ) -> Arc<Self> {
        let (epoch, ranks, lost_after) = (settings.epoch, settings.ranks, settings.rank_lost_after);
        metrics.set_ranks(ranks);
        let capacity = registry.capacity(Tier::G3);
        let disk_reads = DiskReads::new(settings.read_deadline);
        let leader = Arc::new(Self {
            registry,
            tenants,
            settings,
            metrics,
            offloads,
            admission,
            speeds: Speeds::default(),
            disk_reads,
            resting: Resting::new(capacity),
            told: Told::default(),
            joins: Joins::default(),
            volumes,
            flushes: Arc::default(),
            recoveries: Recoveries::new(ranks, capacity),
            events: OnceLock::new(),
            links: OnceLock::new(),
            ranks: Ranks::new(ranks, lost_after),
            inflight: Inflight::new(epoch, ranks),
            inbox: Mutex::new(Inbox::default()),
            disk_order: ReentrantMutex::new(()),
            doomed: Mutex::default(),
            fence: AtomicU64::new(0),
            fences: AtomicU64::new(0),
            turned_away: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        });
        leader.name_tenant_metrics();
        let weak = Arc::downgrade(&leader);
        leader.metrics.refresh_by(move || {
            if let Some(leader) = weak.upgrade() {
                leader.refresh_metrics();
            }
        });
        leader
    }

    /// Connects the workers, rank by rank. Once.
    pub(crate) fn connect(&self, links: Vec<Box<dyn WorkerLink>>) {
        let connected = self.links.set(links);
        debug_assert!(connected.is_ok(), "workers are connected once");
    }

    /// No caller starts a transfer from now on.
    pub(crate) fn turn_away(&self) {
        self.turned_away.store(true, Ordering::Release);
    }

    pub(crate) fn is_turned_away(&self) -> bool {
        self.turned_away.load(Ordering::Acquire)
    }

    /// No operation starts from now on.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The next number for a device event.
    #[cfg(feature = "worker")]
    pub(crate) fn next_fence(&self) -> u64 {
        self.fences.fetch_add(1, Ordering::AcqRel).saturating_add(1)
    }

    /// Takes a number that somebody else gave to a device event. `false` where numbers do not grow.
    pub(crate) fn take_fence(&self, number: u64) -> bool {
        let grows = |last: u64| (number > last && number < u64::MAX).then_some(number);
        self.fences.fetch_update(Ordering::AcqRel, Ordering::Acquire, grows).is_ok()
    }

    /// Plans that touch G1 wait for the device event of this number from now on.
    pub(crate) fn set_fence(&self, number: u64) {
        self.fence.fetch_max(number, Ordering::AcqRel);
    }

    /// Plans in the hands of workers.
    pub(crate) fn plans_on(&self, path: Path) -> usize {
        self.inflight.on_path(path)
    }

    /// A hit counts once, where the block was found nearest, after it was verified.
    pub(crate) fn count_hits(&self, prefix: &Prefix, arrived: usize) {
        let volume = prefix.volume().and_then(|id| self.volumes.get(id));
        for block in prefix.blocks().iter().take(arrived) {
            self.metrics.tier(block.tier).hits.add(1);
            if let (Tier::G4, Some(volume)) = (block.tier, &volume) {
                volume.counters.hits.add(1);
            }
        }
    }

    /// Gives up on an operation: unstarted plans are cancelled, started ones detach. `false` where it was given up before, or is over.
    pub(crate) fn abandon(&self, operation: &Arc<Operation>, reason: &Failure) -> bool {
        let abandoned = operation.abandon(reason);
        if abandoned {
            self.cancel(operation);
        }
        abandoned
    }

    /// Takes the plans of an abandoned operation back, as far as they have not started.
    pub(crate) fn cancel(&self, operation: &Arc<Operation>) {
        for plan_id in self.plans_of(operation) {
            // A worker that cannot be reached has nothing that could be cancelled.
            let _unreached = self.broadcast(&Command::Cancel { plan_id });
        }
    }

    fn plans_of(&self, operation: &Arc<Operation>) -> Vec<PlanId> {
        self.inflight.select(|part| Arc::ptr_eq(&part.operation, operation))
    }

    /// Operations under way that `select` picks, each once.
    pub(crate) fn operations(&self, select: impl Fn(&Operation) -> bool) -> Vec<Arc<Operation>> {
        let mut all: HashMap<*const Operation, Arc<Operation>> = HashMap::new();
        self.inflight.select(|part| {
            all.entry(Arc::as_ptr(&part.operation)).or_insert_with(|| Arc::clone(&part.operation));
            false
        });
        // Looked at without the table's lock, and once, however many plans they have.
        all.into_values().filter(|operation| select(operation)).collect()
    }

    /// Gives up on what is past its deadline.
    pub(crate) fn expire(self: &Arc<Self>, now: Instant) {
        let tend: [&dyn Fn(); 3] =
            [&|| self.tend_volumes(now), &|| self.watch_ranks(now), &|| self.expire_operations(now)];
        for each in tend {
            // Links and policies are somebody else's. Whatever they do, deadlines are kept: others wait for them.
            if catch_unwind(AssertUnwindSafe(each)).is_err() {
                tracing::error!("the leader failed while it looked for what is late; it goes on looking");
            }
        }
    }
}

fn given_up(rank: Rank) -> Failure {
    Failure::new(FailureKind::Io, format!("rank {rank} was given up: start its worker again"))
}
