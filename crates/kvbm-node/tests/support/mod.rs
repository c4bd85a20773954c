//! A daemon, engines over host memory, and bytes that name their block.

use kvbm::config::Config;
use kvbm::device::{CopyBatch, Device, Direction, EmulatedConfig, EmulatedDevice, HostBuffer, Stream};
use kvbm::layout::{
    AxisOrder, BlockLayout, DType, FullyContiguous, LayerSeparate, LayoutConfig, OpaquePlane, OuterPlacement,
};
use kvbm::storage::{Backing, BoundLayout, DeviceAllocator, SystemAllocator};
use kvbm::{BlockId, GroupId, GroupKind, LookUp, Namespace, Rank, TokenSequence};
use kvbm_node::{
    EngineTerms, LineTimes, MoverMemory, NodeEngine, NodeError, NodeLoad, NodeOffload, NodeServer,
};
use std::ops::Range;
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

/// A model of tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Model {
    /// All layers keep all tokens.
    OneGroup,
    /// A window of two blocks, full attention, and a state. Blocks of full attention take five
    /// pages of host memory, those of the others a part of one.
    ThreeGroups,
    /// One latent of a token in each layer, which all ranks hold: host memory has one copy.
    Latent,
}

impl Model {
    pub(crate) const ALL: [Self; 3] = [Self::OneGroup, Self::ThreeGroups, Self::Latent];

    fn text(self) -> &'static str {
        match self {
            Self::OneGroup => "num_layers = 3\nnum_kv_heads = 2\nhead_dim = 8",
            Self::ThreeGroups => {
                "groups = [\"window=7 layers=2 heads=2 head_dim=8\", \"full layers=3 heads=2 head_dim=200\", \
                 \"state layers=1 bytes=302\"]"
            }
            Self::Latent => "num_layers = 3\nnum_kv_heads = 1\nhead_dim = 8\nouter_dim = 1",
        }
    }

    /// What daemon and engines agree on; `more` are settings of the daemon alone.
    pub(crate) fn config(self, ranks: u32, more: &str) -> Config {
        Config::from_toml(&self.config_text(ranks, more), "test").expect("a configuration")
    }

    fn config_text(self, ranks: u32, more: &str) -> String {
        let model = self.text();
        let more = match self {
            Self::Latent => more.replace("[host]\n", "[host]\none_copy = true\n"),
            Self::OneGroup | Self::ThreeGroups => more.to_owned(),
        };
        format!(
            "[model]\n{model}\npage_size = {PAGE}\ndtype = \"f16\"\n[namespace]\nmodel = \"tiny\"\n\
             [parallelism]\ntensor_parallel = {ranks}\n{more}"
        )
    }

    pub(crate) fn kinds(self) -> Vec<GroupKind> {
        match self {
            Self::OneGroup | Self::Latent => vec![GroupKind::Full],
            Self::ThreeGroups => vec![GroupKind::SlidingWindow(7), GroupKind::Full, GroupKind::State],
        }
    }

    /// The group whose blocks a prefix needs all of.
    pub(crate) fn full(self) -> usize {
        usize::from(self == Self::ThreeGroups)
    }

    /// For each group the blocks that a prefix of so many needs.
    #[allow(clippy::single_range_in_vec_init, reason = "one range is what is needed")]
    pub(crate) fn needed(self, blocks: usize) -> Vec<Range<usize>> {
        match self {
            Self::OneGroup | Self::Latent => vec![0..blocks],
            Self::ThreeGroups => {
                vec![blocks.saturating_sub(2)..blocks, 0..blocks, blocks.saturating_sub(1)..blocks]
            }
        }
    }

    /// Block ids for these ranges of each group: those of the group with all blocks are given, and
    /// those of the others are [`OTHERS`] above them.
    pub(crate) fn places(self, ids: &[u32], ranges: &[Range<usize>]) -> Vec<Vec<u32>> {
        let mut others = ids.iter().map(|id| id + OTHERS);
        let place = |(group, range): (usize, &Range<usize>)| {
            if group == self.full() {
                ids[..range.len()].to_vec()
            } else {
                others.by_ref().take(range.len()).collect()
            }
        };
        ranges.iter().enumerate().map(place).collect()
    }

    /// The rank whose bytes a rank has.
    fn bytes_of_rank(self, rank: usize) -> usize {
        if self == Self::Latent { 0 } else { rank }
    }

    /// The engine's memory on a rank of so many, in host memory or on a device.
    pub(crate) fn memory(
        self,
        blocks: u32,
        ranks: u16,
        device: Option<&Arc<dyn Device>>,
    ) -> Vec<BoundLayout> {
        let bound = |layout| match device {
            None => BoundLayout::allocate(layout, &SystemAllocator::default()).expect("memory"),
            Some(device) => {
                BoundLayout::allocate(layout, &DeviceAllocator::new(Arc::clone(device))).expect("memory")
            }
        };
        self.layouts(blocks, ranks).into_iter().map(bound).collect()
    }

    /// How it is laid out, by cache group.
    pub(crate) fn layouts(self, blocks: u32, ranks: u16) -> Vec<Arc<dyn BlockLayout>> {
        let heads = 2 / u32::from(ranks);
        match self {
            Self::OneGroup => vec![layout(blocks, heads)],
            Self::Latent => vec![kv_layout(blocks, (3, 1), 1, 8)],
            Self::ThreeGroups => {
                let state = LayoutConfig::builder().num_blocks(blocks).num_layers(1).outer_dim(0);
                let state = state.page_size(PAGE as u32).inner_dim(1).dtype(DType::U8);
                let state = state.plane(OpaquePlane::new("state", 302 / u32::from(ranks)));
                let state = FullyContiguous::new(state.build().expect("a shape"), AxisOrder::Nhd);
                vec![
                    kv_layout(blocks, (2, 2), heads, 8),
                    kv_layout(blocks, (3, 2), heads, 200),
                    Arc::new(state.expect("a layout")),
                ]
            }
        }
    }
}

/// See [`Model::places`]: an id means a block of one group at a time.
pub(crate) const OTHERS: u32 = 32;

/// What a daemon and engines of the model with one group agree on.
pub(crate) fn config(ranks: u32, more: &str) -> Config {
    Config::from_toml(&config_text(ranks, more), "test").expect("a configuration")
}

/// The same as a file has it.
pub(crate) fn config_text(ranks: u32, more: &str) -> String {
    Model::OneGroup.config_text(ranks, more)
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

/// Where an engine's blocks lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EngineMemory {
    Host,
    /// A device of its own for each rank, which page-locks the daemon's memory and copies on
    /// streams. Its copies take no modelled time.
    EmulatedDevice,
}

/// An engine that computes in host memory or on emulated devices.
pub(crate) struct TestEngine {
    pub(crate) node: NodeEngine,
    model: Model,
    ranks: Vec<EngineRank>,
}

/// The memory of a rank, and the stream that moves bytes to and from its device.
pub(crate) struct EngineRank {
    groups: Vec<BoundLayout>,
    stream: Option<Arc<dyn Stream>>,
}

impl EngineRank {
    /// Host memory of each cache group.
    pub(crate) fn in_host_memory(groups: Vec<BoundLayout>) -> Self {
        Self { groups, stream: None }
    }

    fn write(&self, group: usize, block: u32, bytes: &[u8]) {
        let g1 = &self.groups[group];
        if self.stream.is_none() {
            // SAFETY: no copy touches the block: the caller names free ones.
            return unsafe { g1.write_block(block, bytes) }.expect("in range");
        }
        let host = HostBuffer::from_bytes(bytes);
        self.copy(group, block, Direction::HostToDevice, &host);
    }

    fn read(&self, group: usize, block: u32) -> Vec<u8> {
        let g1 = &self.groups[group];
        let mut bytes = vec![0; g1.bytes_per_block() as usize];
        if self.stream.is_none() {
            // SAFETY: no copy writes the block: its load is over.
            unsafe { g1.read_block(block, &mut bytes) }.expect("in range");
            return bytes;
        }
        let host = HostBuffer::zeroed(bytes.len());
        self.copy(group, block, Direction::DeviceToHost, &host);
        // SAFETY: the copy is over, and nobody else has the buffer.
        unsafe { host.read_at(0, &mut bytes) }.expect("in range");
        bytes
    }

    fn copy(&self, group: usize, block: u32, direction: Direction, host: &HostBuffer) {
        let (g1, mut batch, mut at) = (&self.groups[group], CopyBatch::new(direction), 0);
        for fragment in g1.block_fragments(block).expect("in range") {
            let binding = &g1.bindings()[fragment.region as usize];
            let Backing::Device(memory) = binding.storage.backing() else { panic!("not on a device") };
            let (from, len) = (binding.offset + fragment.offset, fragment.len);
            let pushed = match direction {
                Direction::HostToDevice => batch.push_host_to_device(host, at, memory, from, len),
                _ => batch.push_device_to_host(memory, from, host, at, len),
            };
            pushed.expect("in range");
            at += len;
        }
        let stream = self.stream.as_ref().expect("a device");
        let copied = stream.copy(batch).expect("a copy");
        copied.wait(Instant::now() + PATIENCE).expect("a copy");
    }
}

/// Blocks of the model with one group.
pub(crate) fn layout(blocks: u32, heads: u32) -> Arc<dyn BlockLayout> {
    kv_layout(blocks, (3, 2), heads, 8)
}

/// Of so many layers with so many tensors each.
fn kv_layout(blocks: u32, (layers, outer): (u32, u32), heads: u32, head_dim: u32) -> Arc<dyn BlockLayout> {
    let config = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(layers)
        .outer_dim(outer)
        .page_size(PAGE as u32)
        .inner_dim(heads * head_dim)
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
    /// Begins to attach with these terms.
    pub(crate) fn with(terms: EngineTerms, model: Model) -> Self {
        Self::with_memory(terms, model, EngineMemory::Host)
    }

    pub(crate) fn with_memory(terms: EngineTerms, model: Model, memory: EngineMemory) -> Self {
        let device = || -> Option<Arc<dyn Device>> {
            let config = EmulatedConfig::default();
            let is_device = memory == EngineMemory::EmulatedDevice;
            is_device.then(|| Arc::new(EmulatedDevice::new(config).expect("a device")) as Arc<dyn Device>)
        };
        let mover = |rank| {
            let device = device();
            let g1 = model.memory(terms.blocks, terms.ranks, device.as_ref());
            MoverMemory { rank: Rank(rank), device, g1 }
        };
        let movers: Vec<_> = (0..terms.ranks).map(mover).collect();
        let rank = |mover: &MoverMemory| {
            let stream =
                mover.device.as_ref().map(|device| device.create_stream("engine").expect("a stream"));
            EngineRank { stream, ..EngineRank::in_host_memory(mover.g1.clone()) }
        };
        let ranks = movers.iter().map(rank).collect();
        Self::over(terms, model, movers, ranks)
    }

    /// An engine with these movers in its process; it computes in the memory of `ranks`.
    pub(crate) fn over(
        terms: EngineTerms,
        model: Model,
        movers: Vec<MoverMemory>,
        ranks: Vec<EngineRank>,
    ) -> Self {
        let terms = EngineTerms { groups: model.kinds(), ..terms };
        Self { node: NodeEngine::attach(terms, true, movers).expect("threads"), model, ranks }
    }

    pub(crate) fn begin(socket: &Path, name: &str, blocks: u32, ranks: u16) -> Self {
        Self::with(terms(socket, name, blocks, ranks), Model::OneGroup)
    }

    pub(crate) fn attach(socket: &Path, name: &str, blocks: u32, ranks: u16) -> Self {
        Self::attach_of(Model::OneGroup, socket, name, blocks, ranks)
    }

    pub(crate) fn attach_of(model: Model, socket: &Path, name: &str, blocks: u32, ranks: u16) -> Self {
        Self::attach_in(EngineMemory::Host, model, socket, name, blocks, ranks)
    }

    pub(crate) fn attach_in(
        memory: EngineMemory,
        model: Model,
        socket: &Path,
        name: &str,
        blocks: u32,
        ranks: u16,
    ) -> Self {
        let engine = Self::with_memory(terms(socket, name, blocks, ranks), model, memory);
        assert!(engine.node.wait_ready(PATIENCE), "{:?}", engine.node.status());
        engine
    }

    /// Computes blocks of `tokens` into `ids`, the first of which is block `first`.
    pub(crate) fn compute(&self, tokens: &TokenSequence, first: usize, ids: &[u32]) {
        self.compute_in(self.model.full(), tokens, first, ids);
    }

    /// The same of a cache group.
    pub(crate) fn compute_in(&self, group: usize, tokens: &TokenSequence, first: usize, ids: &[u32]) {
        for (rank, memory) in self.ranks.iter().enumerate() {
            let bytes = memory.groups[group].bytes_per_block();
            for (at, id) in ids.iter().enumerate() {
                let rank = self.model.bytes_of_rank(rank);
                memory.write(group, *id, &bytes_of(tokens, first + at, (rank, group), bytes));
            }
        }
    }

    /// Whether `ids` hold blocks of `tokens` from `first` on.
    pub(crate) fn holds(&self, tokens: &TokenSequence, first: usize, ids: &[u32]) -> bool {
        self.holds_in(self.model.full(), tokens, first, ids)
    }

    /// The same of a cache group.
    pub(crate) fn holds_in(&self, group: usize, tokens: &TokenSequence, first: usize, ids: &[u32]) -> bool {
        self.ranks.iter().enumerate().all(|(rank, memory)| {
            let rank = self.model.bytes_of_rank(rank);
            let bytes = memory.groups[group].bytes_per_block();
            let is_right = |(at, id): (usize, &u32)| {
                memory.read(group, *id) == bytes_of(tokens, first + at, (rank, group), bytes)
            };
            ids.iter().enumerate().all(is_right)
        })
    }

    /// Whether the places of a whole sequence hold what a prefix of it needs, in every group.
    pub(crate) fn holds_all(&self, tokens: &TokenSequence, ids: &[u32]) -> bool {
        let needed = self.model.needed(tokens.num_blocks());
        let places = self.model.places(ids, &needed);
        let mut groups = needed.iter().zip(&places).enumerate();
        groups.all(|(group, (range, ids))| self.holds_in(group, tokens, range.start, ids))
    }

    /// Offers what a prefix of the whole sequence needs of each group.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub(crate) fn offer(
        &self,
        tokens: &TokenSequence,
        ids: &[u32],
        after: Option<u64>,
    ) -> Result<NodeOffload, NodeError> {
        let needed = self.model.needed(tokens.num_blocks());
        let mut all = NodeOffload::default();
        for (group, (range, ids)) in needed.iter().zip(self.model.places(ids, &needed)).enumerate() {
            let group = GroupId(group as u16);
            let began = self.node.offload_group(group, &blocks(&ids), tokens, range.start, after);
            let NodeOffload { started, present, refused } = began?;
            (all.started, all.present) = (all.started + started, all.present + present);
            all.refused.extend(refused);
        }
        Ok(all)
    }

    /// Blocks of all groups that a prefix of so many needs.
    pub(crate) fn needed(&self, blocks: usize) -> usize {
        self.model.needed(blocks).iter().map(Range::len).sum()
    }

    /// Computes what a prefix of so many blocks needs of each group.
    pub(crate) fn compute_all(&self, tokens: &TokenSequence, ids: &[u32]) {
        let needed = self.model.needed(ids.len());
        for (group, (range, ids)) in needed.iter().zip(self.model.places(ids, &needed)).enumerate() {
            self.compute_in(group, tokens, range.start, &ids);
        }
    }

    /// Computes a sequence into `ids` and offers it; until the daemon has all of it.
    pub(crate) fn save(&self, tokens: &TokenSequence, ids: &[u32]) {
        self.compute_all(tokens, ids);
        let until = Instant::now() + PATIENCE;
        loop {
            let offload = self.offer(tokens, ids, None).expect("taken");
            if offload.present == self.needed(ids.len()) && self.found("saved", tokens) == ids.len() {
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

    /// Loads the whole sequence into `ids`, and what other groups have of it into their places.
    pub(crate) fn load(&self, request: &str, tokens: &TokenSequence, ids: &[u32]) -> NodeLoad {
        let promise = self.node.look_up_groups(request, tokens, 0).expect("an answer");
        assert!(matches!(promise.found, LookUp::Ready { blocks, .. } if blocks == ids.len()), "{promise:?}");
        assert_eq!(promise.groups, self.model.needed(ids.len()));
        self.commit(request, &self.model.places(ids, &promise.groups));
        self.wait_for(request)
    }

    /// Starts the load into these ids of each group.
    pub(crate) fn commit(&self, request: &str, ids: &[Vec<u32>]) {
        let ids: Vec<_> = ids.iter().map(|ids| blocks(ids)).collect();
        let ids: Vec<&[BlockId]> = ids.iter().map(Vec::as_slice).collect();
        self.node.commit_groups(request, &ids, None, None).expect("a load");
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

/// The bytes of a block: each word depends on the block's hash, the rank and group, and the word's
/// place.
fn bytes_of(tokens: &TokenSequence, block: usize, (rank, group): (usize, usize), len: u64) -> Vec<u8> {
    let hash = *tokens.hashes()[block].as_bytes();
    let seed = u64::from_le_bytes(hash[..8].try_into().expect("eight")) ^ (rank + 16 * group) as u64;
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
