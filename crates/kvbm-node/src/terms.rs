//! What an engine's process attaches with, and what its calls return.

use crate::protocol::Load;
use kvbm::tokens::NamespaceTag;
use kvbm::{BlockId, GroupKind, LookUp};
use kvbm_link::LineTimes;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

/// What a process of an engine attaches with.
#[derive(Clone, Debug)]
pub struct EngineTerms {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The engine's name: all its processes give the same, and no other engine does.
    pub engine: String,
    /// Its blocks on each rank.
    pub blocks: u32,
    /// Its ranks.
    pub ranks: u16,
    /// Ranks, one after another, that hold the same bytes, where tensors have no axes: the daemon
    /// refuses fewer than its `model.replicas`.
    pub replicas: u32,
    /// What the layers of each of its cache groups keep, by the groups' ids: the daemon refuses
    /// others.
    pub groups: Vec<GroupKind>,
    /// Tag of its namespace, where it must be the daemon's own: the daemon refuses another one.
    /// None lets engines of several namespaces share the daemon's room; they share no block.
    pub namespace: Option<NamespaceTag>,
    /// Times of the lines. A daemon that is silent counts as gone.
    pub times: LineTimes,
    /// How long a call waits for the daemon's answer.
    pub call_time: Duration,
}

impl EngineTerms {
    /// An engine of one rank, whose layers cache alike, with the usual times.
    pub fn new(socket: impl Into<PathBuf>, engine: impl Into<String>, blocks: u32) -> Self {
        Self {
            socket: socket.into(),
            engine: engine.into(),
            blocks,
            ranks: 1,
            replicas: 1,
            groups: vec![GroupKind::Full],
            namespace: None,
            times: LineTimes::default(),
            call_time: Duration::from_millis(500),
        }
    }
}

/// How an engine's process is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeStatus {
    /// There is no daemon, or it refuses: everything is a miss.
    Detached {
        /// What the last try came to.
        reason: String,
    },
    /// It is attached.
    Attached {
        /// The daemon's process.
        pid: i32,
        /// Whether movers of all ranks can copy; false in a process without the scheduler.
        ready: bool,
        /// How often this process has tried to attach, with this time: it grows when the process
        /// was detached meanwhile.
        number: u64,
    },
}

/// What the daemon promises a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePromise {
    /// Blocks of the sequence.
    pub found: LookUp,
    /// For each cache group the blocks of the sequence that a load brings, as
    /// [`Tickets::promised`](kvbm::Tickets::promised) says. Empty where nothing is promised.
    pub groups: Vec<Range<usize>>,
}

impl NodePromise {
    pub(crate) fn nothing() -> Self {
        Self { found: LookUp::Ready { blocks: 0, by_tier: [0; 4] }, groups: Vec::new() }
    }
}

/// What an offload began with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeOffload {
    /// Blocks that are being copied.
    pub started: usize,
    /// Blocks that host memory has, or is about to have.
    pub present: usize,
    /// Blocks that were not taken, with the reason.
    pub refused: Vec<(BlockId, String)>,
}

/// A load that is over: no copy writes to its blocks any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeLoad {
    /// Who asked for it.
    pub request: String,
    /// Blocks from the front that hold verified bytes; all or none, where there are several cache
    /// groups.
    pub arrived: usize,
    /// Blocks asked for: of the sequence, where there are several cache groups.
    pub wanted: usize,
    /// Why the others did not arrive, the first few.
    pub failures: Vec<String>,
}

impl From<Load> for NodeLoad {
    fn from(load: Load) -> Self {
        let Load { request, arrived, wanted, failures } = load;
        Self { request, arrived: arrived as usize, wanted: wanted as usize, failures }
    }
}

pub(crate) fn numbers(ids: &[BlockId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}
