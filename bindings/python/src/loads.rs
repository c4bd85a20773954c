//! Tickets, loads and offloads as Python sees them.

use pyo3::prelude::*;

/// What a look-up promises to its request: so many blocks from the first that the engine lacks.
#[pyclass(module = "kvbm_rs", frozen, get_all)]
#[derive(Clone)]
pub(crate) struct Ticket {
    /// Blocks.
    pub(crate) blocks: usize,
    /// Of these, blocks by tier, G1 to G4.
    pub(crate) by_tier: [usize; 4],
    /// For each cache group the first of the sequence's blocks that a load brings, and the one
    /// behind the last; empty where nothing was found.
    pub(crate) groups: Vec<(usize, usize)>,
}

#[pymethods]
impl Ticket {
    fn __repr__(&self) -> String {
        format!("Ticket(blocks={}, by_tier={:?})", self.blocks, self.by_tier)
    }
}

/// A load that is over: no copy can write to the engine's blocks any more.
#[pyclass(module = "kvbm_rs", frozen, get_all)]
#[derive(Clone)]
pub(crate) struct FinishedLoad {
    /// Who asked for it.
    pub(crate) request: String,
    /// Blocks from the front that hold verified bytes.
    pub(crate) arrived: usize,
    /// Blocks asked for.
    pub(crate) wanted: usize,
    /// Blocks that did not arrive; of an audit, those that are not the same or were not compared.
    pub(crate) failed: usize,
    /// Of an audit: blocks whose stored copies are not what the engine computed.
    pub(crate) differing: usize,
    /// Why they did not arrive, a text for each, 16 at most.
    pub(crate) failures: Vec<String>,
}

#[pymethods]
impl FinishedLoad {
    fn __repr__(&self) -> String {
        format!("FinishedLoad({:?}, {} of {} blocks)", self.request, self.arrived, self.wanted)
    }
}

impl From<kvbm::FinishedLoad> for FinishedLoad {
    fn from(load: kvbm::FinishedLoad) -> Self {
        /// Texts at most: one says what is wrong, a thousand say no more.
        const MOST: usize = 16;
        let failures = load.failures.iter().take(MOST).map(ToString::to_string).collect();
        let differs = |failure: &&kvbm::BlockFailure| failure.failure.kind == kvbm::FailureKind::Differs;
        let differing = load.failures.iter().filter(differs).count();
        let failed = load.failures.len();
        Self {
            request: load.request,
            arrived: load.arrived,
            wanted: load.wanted,
            failed,
            differing,
            failures,
        }
    }
}

impl From<kvbm_node::NodeLoad> for FinishedLoad {
    fn from(load: kvbm_node::NodeLoad) -> Self {
        let kvbm_node::NodeLoad { request, arrived, wanted, failures } = load;
        Self { request, arrived, wanted, failed: wanted - arrived.min(wanted), differing: 0, failures }
    }
}

/// A part of a load that is over on the rank of a worker: no copy of it touches the memory of its
/// blocks any more.
#[pyclass(module = "kvbm_rs", frozen, get_all)]
#[derive(Clone)]
pub(crate) struct FinishedPlan {
    /// One of its load (`KvBlockManager.load_tags`). A load may have several plans with it.
    pub(crate) tag: u64,
    /// From which tier to which, such as `"g2_g1"`.
    pub(crate) path: String,
    /// Blocks that arrived on this rank.
    pub(crate) arrived: usize,
    /// Blocks that did not.
    pub(crate) failed: usize,
}

#[pymethods]
impl FinishedPlan {
    fn __repr__(&self) -> String {
        let Self { tag, path, arrived, failed } = self;
        format!("FinishedPlan(tag={tag}, path={path:?}, arrived={arrived}, failed={failed})")
    }
}

impl From<kvbm::FinishedPlan> for FinishedPlan {
    fn from(plan: kvbm::FinishedPlan) -> Self {
        let kvbm::FinishedPlan { tag, path, arrived, failed, .. } = plan;
        Self { tag, path: path.to_string(), arrived, failed }
    }
}

/// What an offload began with.
#[pyclass(module = "kvbm_rs", frozen, get_all)]
#[derive(Clone)]
pub(crate) struct OffloadStarted {
    /// Blocks that are being copied.
    pub(crate) started: usize,
    /// Blocks that host memory has, or is about to have.
    pub(crate) present: usize,
    /// Blocks that were not taken, each with the reason.
    pub(crate) refused: Vec<(u32, String)>,
}

impl From<kvbm::OffloadStarted> for OffloadStarted {
    fn from(begun: kvbm::OffloadStarted) -> Self {
        let refused = begun.refused.iter().map(|block| (block.block.0, block.reason.to_string()));
        Self { started: begun.started, present: begun.present, refused: refused.collect() }
    }
}

impl From<kvbm_node::NodeOffload> for OffloadStarted {
    fn from(begun: kvbm_node::NodeOffload) -> Self {
        let kvbm_node::NodeOffload { started, present, refused } = begun;
        Self { started, present, refused: refused.into_iter().map(|(id, why)| (id.0, why)).collect() }
    }
}

#[pymethods]
impl OffloadStarted {
    fn __repr__(&self) -> String {
        format!(
            "OffloadStarted(started={}, present={}, refused={})",
            self.started,
            self.present,
            self.refused.len()
        )
    }
}
