//! What is counted, in flat arrays that are indexed by enums: counting is an atomic addition, no
//! look-up and no allocation.

use super::disks::DiskMetrics;
use super::node::EngineMetrics;
use super::peers::{PeerCounters, RemoteMetrics};
use super::ranks::RankMetrics;
use super::tenants::TenantMetrics;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kvbm_plan::{FailureKind, NodeId, Path, Tier, VolumeId};

use super::histogram::{LatencyBucket, LatencyHistogram, LatencySummary};

/// Declares an enum of label values with `ALL` and `as_str`.
macro_rules! label {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_meta])* $variant,)+ }

        impl $name {
            /// Every value.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// The label in metrics.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    };
}

label! {
    /// Why a block left a tier.
    EvictReason {
        /// Its slot was needed.
        Capacity = "capacity",
        /// The tier was cleared.
        Cleared = "cleared",
        /// Its namespace was forgotten.
        Forgotten = "forgotten",
        /// It was not used for its time to live.
        Expired = "expired",
        /// Its bytes were found wrong.
        Corrupt = "corrupt",
        /// A rank that has a part of it is gone, or started again with empty memory.
        RankLost = "rank_lost",
        /// It was copied there before a block that it continues, whose copy then failed.
        ParentFailed = "parent_failed",
    }
}

label! {
    /// Why a block was not copied to a lower tier.
    DropReason {
        /// Too many offloads were waiting; those least likely to be used again were dropped.
        QueueFull = "queue_full",
        /// An ancestor is not on the lower tier and cannot be brought there.
        MissingParent = "missing_parent",
        /// The lower tier has no slot that can be evicted.
        NoSlot = "no_slot",
        /// The disk's write budget is used up.
        WearBudget = "wear_budget",
        /// The admission policy sees no gain in the copy.
        NotWorthIt = "not_worth_it",
        /// The copy failed.
        Failed = "failed",
        /// The circuit breakers for writes of all directories of the disk tier are open.
        DiskDown = "disk_down",
        /// The volume fails and is left alone for a while.
        VolumeDown = "volume_down",
        /// Its last copy is being removed from the volume: what is written now could go with it.
        Leaving = "leaving",
        /// The manager shut down first.
        ShuttingDown = "shutting_down",
    }
}

label! {
    /// Why a block below G1 that a request found is copied up, or is computed again.
    LoadReason {
        /// Copied: it arrives sooner than it is computed.
        Sooner = "sooner",
        /// Copied: the speed of its path, or of the engine, is not known.
        Unknown = "unknown",
        /// Copied: its path was slower than computing a while ago, and is tried again.
        Retried = "retried",
        /// Computed: its path is slower than computing.
        Slower = "slower",
        /// Computed: too much waits on its path.
        Queue = "queue",
    }
}

label! {
    /// The result of a prefetch of a block of G3.
    PrefetchOutcome {
        /// It is copied to G2.
        Started = "started",
        /// Earlier prefetches have the budget.
        OverBudget = "over_budget",
        /// G2 has no room for it.
        NoRoom = "no_room",
    }
}

label! {
    /// The result of recovery for a block that a disk held at the start.
    RecoveryOutcome {
        /// It can be found again.
        Restored = "restored",
        /// Its parent, or an ancestor further up, is gone: its record was damaged, or its slot is
        /// out of use.
        Orphan = "orphan",
        /// Some rank does not have it, or has another block in its slot.
        Incomplete = "incomplete",
        /// A later record has it in another slot.
        Duplicate = "duplicate",
        /// Its record contradicts others, or its slot is out of use.
        Invalid = "invalid",
        /// It was left by a deployment with another number of ranks and is ours now; counted again
        /// when it is restored.
        TakenOver = "taken_over",
        /// It was left by a deployment with another number of ranks and stays there.
        LeftBehind = "left_behind",
    }
}

label! {
    /// What the slots of a tier are doing.
    SlotState {
        /// Empty, not handed out.
        Free = "free",
        /// Held by someone.
        Active = "active",
        /// Registered, held by nobody: a cached block that can be evicted.
        Cached = "cached",
        /// Being written by a transfer.
        Arriving = "arriving",
        /// Out of use, for its bytes were found wrong.
        Quarantined = "quarantined",
        /// No copy gets it for a while: it failed a write, or the writes of its directory are
        /// stopped.
        Withheld = "withheld",
    }
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Raises the value to what somebody else has counted.
    pub(crate) fn raise_to(&self, value: u64) {
        self.0.fetch_max(value, Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets the value.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Metrics of one tier.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct TierMetrics {
    /// Blocks found here, counted once per look-up at the highest tier that holds them.
    pub hits: Counter,
    /// Blocks whose bytes did not match their identity or checksum.
    pub corrupt: Counter,
    /// Slots taken out of use.
    pub quarantined: Counter,
    /// Batches that a caller wanted to register, park, resume or offload although what they held
    /// was lost with a rank.
    pub lost_refusals: Counter,
    evictions: [Counter; EvictReason::ALL.len()],
    loads: [Counter; LoadReason::ALL.len()],
    slots: [Gauge; SlotState::ALL.len()],
}

impl TierMetrics {
    /// Blocks that left the tier for `reason`.
    #[inline]
    pub fn evictions(&self, reason: EvictReason) -> &Counter {
        &self.evictions[reason as usize]
    }

    /// Blocks found here that requests had copied up or computed again, by `reason`. Counted where
    /// the copy is decided.
    #[inline]
    pub fn loads(&self, reason: LoadReason) -> &Counter {
        &self.loads[reason as usize]
    }

    /// Slots in `state`.
    #[inline]
    pub fn slots(&self, state: SlotState) -> &Gauge {
        &self.slots[state as usize]
    }
}

/// Metrics of one path.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct PathMetrics {
    /// Blocks that arrived.
    pub blocks: Counter,
    /// Bytes that arrived.
    pub bytes: Counter,
    /// Blocks whose offload along the path waits for its turn.
    pub queue_depth: Gauge,
    failures: [Counter; FailureKind::ALL.len()],
    dropped: [Counter; DropReason::ALL.len()],
    latency: LatencyHistogram,
    busy: Mutex<Busy>,
}

/// When a path had something in flight.
#[derive(Debug, Default)]
struct Busy {
    in_flight: u64,
    since: Option<Instant>,
    total: Duration,
}

/// The result of one transfer; see [`PathMetrics::begin`]. Dropping it ends the transfer without
/// counting anything as arrived.
#[derive(Debug)]
#[must_use = "the transfer ends when this is dropped"]
pub struct InFlight<'a> {
    path: &'a PathMetrics,
    started: Instant,
}

impl InFlight<'_> {
    /// The transfer arrived, wholly or in part; its latency runs from [`PathMetrics::begin`] to
    /// here.
    pub fn arrived(self, blocks: u64, bytes: u64) {
        self.path.arrived(blocks, bytes, self.started.elapsed());
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.path.leave();
    }
}

/// Totals of a path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PathSummary {
    /// Blocks that arrived.
    pub blocks: u64,
    /// Bytes that arrived.
    pub bytes: u64,
    /// Seconds during which at least one transfer was in flight.
    pub busy_s: f64,
    /// Latencies of transfers.
    pub latency: LatencySummary,
}

impl PathSummary {
    /// Bytes (10^9) per second while the path was in use; 0 if it never was.
    pub fn gb_per_s(&self) -> f64 {
        if self.busy_s > 0.0 { self.bytes as f64 / 1e9 / self.busy_s } else { 0.0 }
    }
}

impl PathMetrics {
    /// A transfer begins. It is in flight until what is returned is dropped or
    /// [arrived](InFlight::arrived).
    pub fn begin(&self) -> InFlight<'_> {
        self.enter();
        InFlight { path: self, started: kvbm_plan::clock::now() }
    }

    /// A transfer begins, for callers that cannot keep a borrow; [`leave`](Self::leave) ends it.
    pub fn enter(&self) {
        let mut busy = self.lock();
        busy.in_flight += 1;
        if busy.in_flight == 1 {
            busy.since = Some(kvbm_plan::clock::now());
        }
    }

    /// A transfer that [entered](Self::enter) is over.
    pub fn leave(&self) {
        let mut busy = self.lock();
        busy.in_flight = busy.in_flight.saturating_sub(1);
        if busy.in_flight == 0
            && let Some(since) = busy.since.take()
        {
            busy.total += since.elapsed();
        }
    }

    /// `blocks` blocks of `bytes` bytes arrived, `latency` after their transfer was submitted.
    #[inline]
    pub fn arrived(&self, blocks: u64, bytes: u64, latency: Duration) {
        self.blocks.add(blocks);
        self.bytes.add(bytes);
        self.latency.record(latency);
    }

    /// Blocks that did not arrive because of `kind`.
    #[inline]
    pub fn failures(&self, kind: FailureKind) -> &Counter {
        &self.failures[failure_index(kind)]
    }

    /// Blocks whose offload along this path was given up for `reason`.
    #[inline]
    pub fn dropped(&self, reason: DropReason) -> &Counter {
        &self.dropped[reason as usize]
    }

    /// Transfers that have begun and not ended.
    pub fn in_flight(&self) -> u64 {
        self.lock().in_flight
    }

    /// Time during which at least one transfer was in flight, up to now.
    pub fn busy(&self) -> Duration {
        let busy = self.lock();
        busy.total + busy.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Totals so far.
    pub fn summary(&self) -> PathSummary {
        PathSummary {
            blocks: self.blocks.get(),
            bytes: self.bytes.get(),
            busy_s: self.busy().as_secs_f64(),
            latency: self.latency.summary(),
        }
    }

    /// The distribution of latencies, for a plot.
    pub fn latencies(&self) -> Vec<LatencyBucket> {
        self.latency.distribution()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Busy> {
        // Nothing panics while it is held, and plain numbers are valid in any state.
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn histogram(&self) -> &LatencyHistogram {
        &self.latency
    }
}

/// Position in [`FailureKind::ALL`], which is in the order of declaration (a test compares).
const fn failure_index(kind: FailureKind) -> usize {
    kind as usize
}

/// The label of a path that has no metrics of its own.
pub(super) const OTHER_PATH: &str = "other";

/// Everything that is counted.
#[derive(Debug, Default)]
pub struct Counters {
    /// Blocks that requests asked for.
    pub lookups: Counter,
    /// Stored blocks that audits compared with what the engine computed.
    pub audited: Counter,
    /// Allocations that had to wait for a transfer. Nothing in kvbm makes one wait: this says so.
    pub sync_offloads: Counter,
    /// Events that a transport took.
    pub events_published: Counter,
    /// Encoded bytes of events that a transport took.
    pub event_bytes: Counter,
    /// Events that nobody will get: they were overwritten before they could be published, or
    /// refused for good.
    pub events_lost: Counter,
    /// Times that events were overwritten.
    pub event_gaps: Counter,
    /// Times that the transport could not take a batch.
    pub event_transport_unavailable: Counter,
    /// Stored blocks published without their tokens, in a format that carries tokens.
    pub events_without_tokens: Counter,
    /// Stored blocks published with kvbm's hash, in a format that carries an engine's.
    pub events_without_hash: Counter,
    /// Events that wait to be published.
    pub events_waiting: Gauge,
    /// How long the oldest of them has waited, in microseconds.
    pub event_lag_us: Gauge,
    /// Messages of workers that could not be read.
    pub malformed_messages: Counter,
    /// Reports that changed nothing: repeated, late, of an earlier epoch.
    pub ignored_reports: Counter,
    prefetches: [Counter; PrefetchOutcome::ALL.len()],
    recovered: [Counter; RecoveryOutcome::ALL.len()],
    tiers: [TierMetrics; Tier::ALL.len()],
    /// [`Path::ALL`] in order, then all other paths together.
    paths: [PathMetrics; Path::ALL.len() + 1],
    /// Volumes that were ever registered.
    volumes: Mutex<BTreeMap<VolumeId, Arc<VolumeCounters>>>,
    /// Every rank of the manager, in order.
    ranks: OnceLock<Vec<RankMetrics>>,
    /// Tenants with shares, first all others; not set where there are none.
    tenants: OnceLock<Vec<TenantMetrics>>,
    /// Of a node daemon; not set elsewhere.
    engines: OnceLock<EngineMetrics>,
    /// The disk tiers of this process.
    pub disks: DiskMetrics,
    /// Memory of other nodes.
    pub remote: RemoteMetrics,
}

/// What is counted of one volume, for as long as the process lives: it may be registered again.
#[derive(Debug, Default)]
pub struct VolumeCounters {
    /// Blocks that came from it.
    pub hits: Counter,
    /// Blocks that were read there and were gone or damaged.
    pub misses: Counter,
    /// Of those, damaged ones.
    pub corrupt: Counter,
    /// Blocks that were copied to it.
    pub stored: Counter,
    /// Blocks that were refused because it was full.
    pub full: Counter,
    /// Blocks and questions that the store failed.
    pub errors: Counter,
    /// Bytes of blocks that were written by workers of this process.
    pub written_bytes: Counter,
    /// Bytes that they take on the volume, without headers: fewer where they are compressed.
    pub written_stored_bytes: Counter,
    /// Bytes of blocks that workers of this process read.
    pub read_bytes: Counter,
    /// Bytes that they were stored in, without headers.
    pub read_stored_bytes: Counter,
    /// 1 while new blocks are compressed.
    pub compresses: Gauge,
    /// Blocks that it is known to hold.
    pub blocks: Gauge,
    /// 1 while it is left alone because it failed.
    pub down: Gauge,
}

impl Counters {
    /// Metrics of `tier`.
    #[inline]
    pub fn tier(&self, tier: Tier) -> &TierMetrics {
        &self.tiers[tier.index()]
    }

    /// Blocks of G3 that prefetches were asked for, by what became of them.
    pub fn prefetches(&self, outcome: PrefetchOutcome) -> &Counter {
        &self.prefetches[outcome as usize]
    }

    /// Blocks that the disks held at the start, by what became of them.
    pub fn recovered(&self, outcome: RecoveryOutcome) -> &Counter {
        &self.recovered[outcome as usize]
    }

    /// Metrics of `path`. Paths outside [`Path::ALL`] share one set, labelled `other`.
    #[inline]
    pub fn path(&self, path: Path) -> &PathMetrics {
        let index = Path::ALL.iter().position(|known| *known == path).unwrap_or(Path::ALL.len());
        &self.paths[index]
    }

    /// Metrics of every rank, in order.
    pub fn ranks(&self) -> &[RankMetrics] {
        self.ranks.get().map_or(&[], Vec::as_slice)
    }

    /// So many ranks there are. Once.
    pub(crate) fn set_ranks(&self, ranks: usize) {
        let set = self.ranks.set((0..ranks).map(|_| RankMetrics::default()).collect());
        debug_assert!(set.is_ok(), "one manager names its ranks");
    }

    /// Metrics of each tenant with a share, first of all others; nothing where there are none.
    pub fn tenants(&self) -> &[TenantMetrics] {
        self.tenants.get().map_or(&[], Vec::as_slice)
    }

    /// Names the tenants. Once.
    pub(crate) fn set_tenants(&self, names: impl Iterator<Item = String>) {
        let set = self.tenants.set(names.map(TenantMetrics::new).collect());
        debug_assert!(set.is_ok(), "one manager names its tenants");
    }

    /// Engines of a node daemon; nothing elsewhere.
    pub fn engines(&self) -> Option<&EngineMetrics> {
        self.engines.get()
    }

    /// The same, which there are from now on.
    pub(super) fn engines_or_new(&self) -> &EngineMetrics {
        self.engines.get_or_init(EngineMetrics::default)
    }

    /// What is counted of a volume.
    pub fn volume(&self, id: VolumeId) -> Arc<VolumeCounters> {
        // Nothing panics while it is held.
        let mut volumes = self.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(volumes.entry(id).or_default())
    }

    /// What is counted of each volume that was ever registered.
    pub(super) fn volumes(&self) -> Vec<(VolumeId, Arc<VolumeCounters>)> {
        let volumes = self.volumes.lock().unwrap_or_else(PoisonError::into_inner);
        volumes.iter().map(|(id, counters)| (*id, Arc::clone(counters))).collect()
    }

    /// What is counted of a peer.
    pub fn peer(&self, node: NodeId) -> Arc<PeerCounters> {
        self.remote.peer(node)
    }

    /// Every set of path metrics with its label.
    pub(super) fn paths(&self) -> impl Iterator<Item = (String, &PathMetrics)> {
        let labels = Path::ALL.iter().map(ToString::to_string).chain([OTHER_PATH.to_owned()]);
        labels.zip(&self.paths)
    }
}
