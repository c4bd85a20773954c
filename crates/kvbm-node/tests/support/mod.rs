//! A daemon, engines over host memory, and bytes that name their block.

use kvbm::config::Config;
use kvbm::layout::{AxisOrder, BlockLayout, DType, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm::storage::{BoundLayout, SystemAllocator};
use kvbm::{BlockId, LookUp, Namespace, Rank, TokenSequence};
use kvbm_node::{EngineTerms, LineTimes, MoverMemory, NodeEngine, NodeError, NodeLoad, NodeServer};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longer than anything here takes, on the busiest machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const PAGE: usize = 4;

/// Times of lines in tests: a busy machine is not a silent one.
pub(crate) fn times() -> LineTimes {
    LineTimes { silent_after: PATIENCE, handshake: PATIENCE, ..LineTimes::default() }
}

/// What daemon and engines agree on; `more` are settings of the daemon alone.
pub(crate) fn config(ranks: u32, more: &str) -> Config {
    Config::from_toml(&config_text(ranks, more), "test").expect("a configuration")
}

/// The same as a file has it.
pub(crate) fn config_text(ranks: u32, more: &str) -> String {
    format!(
        "[model]\nnum_layers = 3\nnum_kv_heads = 2\nhead_dim = 8\npage_size = {PAGE}\ndtype = \"f16\"\n\
         [namespace]\nmodel = \"tiny\"\n[parallelism]\ntensor_parallel = {ranks}\n{more}"
    )
}

/// A daemon on a thread of its own.
pub(crate) struct Daemon {
    pub(crate) server: Arc<NodeServer>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Daemon {
    pub(crate) fn start(socket: &Path, config: &Config) -> Self {
        let server = Arc::new(NodeServer::bind(config, socket, 256, times()).expect("a daemon"));
        let own = Arc::clone(&server);
        Self { server, thread: Some(std::thread::spawn(move || own.serve())) }
    }

    /// Stops it; what is on disk stays there.
    pub(crate) fn stop(mut self) {
        self.end();
        let report = self.server.shutdown(PATIENCE);
        assert!(report.drained && report.flush_error.is_none(), "{report:?}");
    }

    fn end(&mut self) {
        self.server.stopper()();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("it serves to the end");
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}

/// An engine that computes in host memory.
pub(crate) struct TestEngine {
    pub(crate) node: NodeEngine,
    pub(crate) ranks: Vec<BoundLayout>,
}

pub(crate) fn layout(blocks: u32, heads: u32) -> Arc<dyn BlockLayout> {
    let config = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(3)
        .outer_dim(2)
        .page_size(PAGE as u32)
        .inner_dim(heads * 8)
        .num_heads(heads)
        .dtype(DType::F16)
        .build()
        .expect("a shape");
    Arc::new(LayerSeparate::new(config, AxisOrder::Nhd, OuterPlacement::KvOuter).expect("a layout"))
}

pub(crate) fn terms(socket: &Path, name: &str, blocks: u32, ranks: u16) -> EngineTerms {
    EngineTerms { ranks, times: times(), call_time: PATIENCE, ..EngineTerms::new(socket, name, blocks) }
}

impl TestEngine {
    pub(crate) fn begin(socket: &Path, name: &str, blocks: u32, ranks: u16) -> Self {
        let heads = 2 / u32::from(ranks);
        let memory = |_| BoundLayout::allocate(layout(blocks, heads), &SystemAllocator::default());
        let memory: Vec<_> = (0..ranks).map(memory).collect::<Result<_, _>>().expect("memory");
        let mover =
            |(rank, g1): (u16, &BoundLayout)| MoverMemory { rank: Rank(rank), device: None, g1: g1.clone() };
        let movers = (0..ranks).zip(&memory).map(mover).collect();
        let node = NodeEngine::attach(terms(socket, name, blocks, ranks), true, movers).expect("threads");
        Self { node, ranks: memory }
    }

    pub(crate) fn attach(socket: &Path, name: &str, blocks: u32, ranks: u16) -> Self {
        let engine = Self::begin(socket, name, blocks, ranks);
        assert!(engine.node.wait_ready(PATIENCE), "{:?}", engine.node.status());
        engine
    }

    /// Computes blocks of `tokens` into `ids`, the first of which is block `first`.
    pub(crate) fn compute(&self, tokens: &TokenSequence, first: usize, ids: &[u32]) {
        for (rank, g1) in self.ranks.iter().enumerate() {
            for (at, id) in ids.iter().enumerate() {
                let bytes = bytes_of(tokens, first + at, rank, g1.bytes_per_block());
                // SAFETY: no copy touches the block: the caller names free ones.
                unsafe { g1.write_block(*id, &bytes) }.expect("in range");
            }
        }
    }

    /// Whether `ids` hold blocks of `tokens` from `first` on.
    pub(crate) fn holds(&self, tokens: &TokenSequence, first: usize, ids: &[u32]) -> bool {
        self.ranks.iter().enumerate().all(|(rank, g1)| {
            ids.iter().enumerate().all(|(at, id)| {
                let mut found = vec![0; g1.bytes_per_block() as usize];
                // SAFETY: no copy writes the block: its load is over.
                unsafe { g1.read_block(*id, &mut found) }.expect("in range");
                found == bytes_of(tokens, first + at, rank, g1.bytes_per_block())
            })
        })
    }

    /// Computes a sequence into `ids` and offers it; until the daemon has all of it.
    pub(crate) fn save(&self, tokens: &TokenSequence, ids: &[u32]) {
        self.compute(tokens, 0, ids);
        let until = Instant::now() + PATIENCE;
        loop {
            let offload = self.node.offload(&blocks(ids), tokens, 0).expect("taken");
            if offload.present == ids.len() && self.found("saved", tokens) == ids.len() {
                return;
            }
            assert!(Instant::now() < until, "{offload:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Blocks of a sequence that the daemon has.
    pub(crate) fn found(&self, request: &str, tokens: &TokenSequence) -> usize {
        let blocks = self.look_up(request, tokens).expect("an answer");
        self.node.abandon(request).expect("an answer");
        blocks
    }

    /// Blocks of a sequence that the daemon promises, once its volumes have answered.
    pub(crate) fn look_up(&self, request: &str, tokens: &TokenSequence) -> Result<usize, NodeError> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.node.look_up(request, tokens, 0)? {
                LookUp::Ready { blocks, .. } => return Ok(blocks),
                LookUp::Pending => assert!(Instant::now() < until, "the volumes do not answer"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Loads the whole sequence into `ids`.
    pub(crate) fn load(&self, request: &str, tokens: &TokenSequence, ids: &[u32]) -> NodeLoad {
        let found = self.node.look_up(request, tokens, 0).expect("an answer");
        assert!(matches!(found, LookUp::Ready { blocks, .. } if blocks == ids.len()), "{found:?}");
        self.node.commit(request, &blocks(ids)).expect("a load");
        self.wait_for(request)
    }

    pub(crate) fn wait_for(&self, request: &str) -> NodeLoad {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(load) = self.node.finished().into_iter().find(|load| load.request == request) {
                return load;
            }
            assert!(Instant::now() < until, "load {request} does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

pub(crate) fn blocks(ids: &[u32]) -> Vec<BlockId> {
    ids.iter().copied().map(BlockId).collect()
}

/// The bytes of a block: each word depends on the block's hash, the rank and the word's place.
fn bytes_of(tokens: &TokenSequence, block: usize, rank: usize, len: u64) -> Vec<u8> {
    let hash = *tokens.hashes()[block].as_bytes();
    let seed = u64::from_le_bytes(hash[..8].try_into().expect("eight")) ^ rank as u64;
    let words = (0..len.div_ceil(8)).map(|at| seed.wrapping_add(at.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    words.flat_map(u64::to_le_bytes).take(len as usize).collect()
}

/// A sequence of so many blocks that begins with `salt`.
pub(crate) fn sequence(config: &Config, salt: u32, blocks: usize) -> TokenSequence {
    let namespace: Namespace = config.namespace();
    let tokens: Vec<u32> = (0..(blocks * PAGE) as u32).map(|at| at ^ (salt << 16)).collect();
    TokenSequence::from_tokens(namespace.hasher().expect("a hasher"), &tokens)
}

pub(crate) fn socket(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("node").join("kvbm.sock")
}
