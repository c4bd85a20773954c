//! Metrics per tier and per path, as OpenMetrics and as summaries.
//!
//! Counting costs an atomic addition: the counters lie in arrays that enums index, and labels exist
//! only when somebody reads them.
//!
//! ```
//! use kvbm::metrics::Metrics;
//! use kvbm_plan::{Path, Tier};
//! use std::time::Duration;
//!
//! let metrics = Metrics::new();
//! metrics.tier(Tier::G2).hits.add(3);
//! metrics.path(Path::G2_G1).arrived(3, 3 << 16, Duration::from_micros(40));
//!
//! let text = metrics.encode();
//! assert!(text.contains("kvbm_hit_blocks_total{tier=\"g2\"} 3"));
//! assert!(text.contains("kvbm_hit_blocks_total{tier=\"g1\"} 0"));
//! assert!((metrics.path(Path::G2_G1).summary().latency.p50_us - 40.0).abs() < 1.0);
//! ```

mod counters;
mod disks;
mod expose;
mod histogram;
mod node;
mod peers;
mod ranks;
mod schema;
mod server;
mod tenants;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

use crate::http::{HttpError, HttpResponse, HttpSecurity};
use prometheus_client::registry::Registry;

pub use counters::{
    Counter, Counters, DropReason, EvictReason, Gauge, InFlight, LoadReason, PathMetrics, PathSummary,
    PrefetchOutcome, RecoveryOutcome, SlotState, TierMetrics, VolumeCounters,
};
pub use disks::{DiskCounters, DiskMetrics};
pub use histogram::{LatencyBucket, LatencyHistogram, LatencySummary};
pub use node::{EngineCounts, EngineMetrics};
pub use peers::{PeerCounters, RemoteMetrics};
pub use ranks::RankMetrics;
pub use schema::{MetricFamily, MetricKind};
pub use server::MetricsServer;
pub use tenants::{NO_TENANT, TenantMetrics, TenantTierMetrics};

/// The counters of a manager and their exposition. Clones share both; it dereferences to
/// [`Counters`].
#[derive(Clone)]
pub struct Metrics {
    counters: Arc<Counters>,
    registry: Arc<Registry>,
    refreshers: Arc<Mutex<Vec<Refresh>>>,
}

/// Brings metrics up to date before they are read.
type Refresh = Arc<dyn Fn() + Send + Sync>;

impl Metrics {
    /// All counters at 0.
    pub fn new() -> Self {
        let counters = Arc::new(Counters::default());
        let mut registry = Registry::with_prefix("kvbm");
        registry.register_collector(Box::new(expose::Exposition(Arc::clone(&counters))));
        Self { counters, registry: Arc::new(registry), refreshers: Arc::default() }
    }

    /// Has `refresh` run before every [`encode`](Self::encode), beside what was given before.
    pub(crate) fn refresh_by(&self, refresh: impl Fn() + Send + Sync + 'static) {
        self.refreshers.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(refresh));
    }

    /// Of a node daemon: has `count` say how many engines are attached, whenever the metrics are
    /// read. Once.
    pub fn count_engines_by(&self, count: impl Fn() -> EngineCounts + Send + Sync + 'static) {
        let counters = Arc::clone(&self.counters);
        self.refresh_by(move || counters.engines_or_new().set(count()));
    }

    /// Brings everything up to date.
    pub(crate) fn refresh(&self) {
        // They run without the lock.
        let refreshers = self.refreshers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for refresh in refreshers {
            refresh();
        }
    }

    /// All metrics in the OpenMetrics text format, those of a manager as they are now.
    pub fn encode(&self) -> String {
        self.refresh();
        let mut text = String::new();
        match prometheus_client::encoding::text::encode(&mut text, &self.registry) {
            Ok(()) => text,
            // Only a writer can fail, and a string does not.
            Err(fmt::Error) => String::new(),
        }
    }

    /// The answer to a scrape.
    pub(crate) fn response(&self) -> HttpResponse {
        let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        HttpResponse { content_type, ..HttpResponse::text(200, self.encode()) }
    }

    /// The counters alone, for those whom the exposition will hold.
    #[cfg(feature = "worker")]
    pub(crate) fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Serves [`encode`](Self::encode) at `GET /metrics` on an address of this machine, until the
    /// server is dropped.
    ///
    /// # Errors
    /// [`HttpError`]: other machines reach the address, it cannot be bound, or the thread cannot be
    /// started.
    pub fn serve(&self, addr: SocketAddr) -> Result<MetricsServer, HttpError> {
        self.serve_with(addr, &HttpSecurity::default())
    }

    /// Like [`serve`](Self::serve), to those whom `security` lets in.
    ///
    /// # Errors
    /// [`HttpError`] names the address, or the setting and its file.
    pub fn serve_with(&self, addr: SocketAddr, security: &HttpSecurity) -> Result<MetricsServer, HttpError> {
        MetricsServer::start(self.clone(), addr, security)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Deref for Metrics {
    type Target = Counters;

    fn deref(&self) -> &Counters {
        &self.counters
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Metrics").field(&self.counters).finish()
    }
}
