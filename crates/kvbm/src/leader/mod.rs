//! The leader: decides, handles ids, never touches bytes. It holds the parts together; each part
//! decides its own matters.
//!
//! Callers' threads start transfers; the workers' threads bring their messages (`inbox`). Two
//! threads belong to the leader: `kvbm-deadlines` looks for what is late, `kvbm-offload` decides
//! which blocks are copied down.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `inbox` | messages of the workers | - |
//! | `loads` | what of a prefix is copied, and what is computed | - |
//! | `prefetch_budget` | blocks that prefetches may have on their way | - |
//! | `rank_loss` | ranks that go away and come back | - |
//! | `shutdown` | flush, clear, forget, shutdown | - |
//! | `status` | the status and its metrics | - |

mod inbox;
mod loads;
mod prefetch_budget;
mod rank_loss;
mod shutdown;
mod status;

use crate::config::ONLY_GROUP;
use crate::events::EventPump;
use crate::metrics::Metrics;
use crate::offload::Offload;
use crate::ranks::Ranks;
use crate::ranks::recovery::Recoveries;
pub(crate) use crate::slots::Commit;
use crate::slots::Slots;
use crate::tenants::Tenants;
use crate::transfers::Transfers;
use crate::volume::{Probe, Volumes};
use inbox::Inbox;
use kvbm_plan::Tier;
use kvbm_pool::{Prefix, Registry};
use kvbm_tokens::BlockChain;
use parking_lot::Mutex;
pub(crate) use prefetch_budget::PrefetchBudget;
pub use shutdown::{ClearError, FlushError, FlushReport, ShutdownReport};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// How often late transfers are looked for.
const EXPIRY_TICK: Duration = Duration::from_millis(50);

/// The parts of a leader.
pub(crate) struct Parts {
    pub(crate) registry: Registry,
    pub(crate) tenants: Tenants,
    pub(crate) metrics: Metrics,
    pub(crate) ranks: Arc<Ranks>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) offload: Arc<Offload>,
    pub(crate) prefetch_budget: PrefetchBudget,
}

/// See the module.
pub(crate) struct Leader {
    pub(crate) registry: Registry,
    pub(crate) tenants: Tenants,
    pub(crate) metrics: Metrics,
    pub(crate) ranks: Arc<Ranks>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) volumes: Arc<Volumes>,
    pub(crate) offload: Arc<Offload>,
    pub(crate) prefetch_budget: PrefetchBudget,
    pub(crate) recoveries: Recoveries,
    /// For its figures; the manager owns it.
    pub(crate) events: OnceLock<Weak<EventPump>>,
    inbox: Mutex<Inbox>,
    /// Names given to private blocks.
    private_names: AtomicU64,
}

impl Leader {
    pub(crate) fn new(parts: Parts) -> Arc<Self> {
        let Parts { registry, tenants, metrics, ranks, slots, transfers, volumes, offload, prefetch_budget } =
            parts;
        let leader = Arc::new(Self {
            recoveries: Recoveries::new(ranks.len(), registry.capacity(Tier::G3)),
            events: OnceLock::new(),
            inbox: Mutex::default(),
            private_names: AtomicU64::new(0),
            registry,
            tenants,
            metrics,
            ranks,
            slots,
            transfers,
            volumes,
            offload,
            prefetch_budget,
        });
        let weak = Arc::downgrade(&leader);
        leader.metrics.refresh_by(move || {
            if let Some(leader) = weak.upgrade() {
                leader.refresh_metrics();
            }
        });
        leader
    }

    /// Starts the leader's threads. They end with the leader.
    ///
    /// # Errors
    /// The name of the thread that the system refused, and why.
    pub(crate) fn start_threads(self: &Arc<Self>) -> Result<(), (&'static str, std::io::Error)> {
        if cfg!(kvbm_sim) {
            // The simulator does what they do.
            return Ok(());
        }
        let name = "kvbm-offload";
        self.offload.start_thread(name).map_err(|error| (name, error))?;
        let weak = Arc::downgrade(self);
        let watch = move || {
            while let Some(leader) = weak.upgrade() {
                leader.expire(kvbm_plan::clock::now());
                drop(leader);
                std::thread::sleep(EXPIRY_TICK);
            }
        };
        let name = "kvbm-deadlines";
        std::thread::Builder::new().name(name.into()).spawn(watch).map(drop).map_err(|error| (name, error))
    }

    /// Gives up on what is past its deadline.
    pub(crate) fn expire(&self, now: Instant) {
        let tasks: [&dyn Fn(); 3] =
            [&|| self.volumes.tend(now), &|| self.watch_ranks(now), &|| self.transfers.expire(now)];
        for task in tasks {
            // Links and policies are foreign code. Whatever they do, deadlines are kept: others
            // wait for them.
            if catch_unwind(AssertUnwindSafe(task)).is_err() {
                tracing::error!("the leader failed while it looked for late transfers; it goes on looking");
            }
        }
    }

    /// The longest prefix of `chain` that is on some tier, pinned, and whether volumes were asked,
    /// or would be. Counts as one use of every block in it.
    pub(crate) fn match_prefix(&self, chain: BlockChain<'_>, probe: Probe) -> (Prefix, bool) {
        let (mut prefix, agrees) = self.registry.match_chain(ONLY_GROUP, chain);
        self.transfers.leave_out_disk(&mut prefix);
        // On every tier that holds them: a block that is hot in G1 does not grow cold below. The
        // whole chain, since the eviction policy asks how far a block is from the end of its
        // request.
        self.registry.touch(ONLY_GROUP, chain.hashes());
        // A chain that contradicts what is known is none of ours: volumes have nothing to add.
        let asks = agrees && self.volumes.extend(&mut prefix, chain, probe);
        (prefix, asks)
    }

    /// Takes the next `count` numbers of private blocks. The first of them.
    pub(crate) fn next_private(&self, count: usize) -> u64 {
        self.private_names.fetch_add(count as u64, Ordering::Relaxed)
    }

    /// A hit counts once, on the nearest tier that held the block, after the block was verified.
    pub(crate) fn count_hits(&self, prefix: &Prefix, arrived: usize) {
        let volume = prefix.volume().and_then(|id| self.volumes.get(id));
        for block in prefix.blocks().iter().take(arrived) {
            self.metrics.tier(block.tier).hits.add(1);
            if let (Tier::G4, Some(volume)) = (block.tier, &volume) {
                volume.counters.hits.add(1);
            }
        }
    }
}
