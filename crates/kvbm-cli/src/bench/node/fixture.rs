//! A daemon in a process of its own, engines that use it, and a manager inside this process.

use std::fmt::Write;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kvbm::config::Config;
use kvbm::layout::{AxisOrder, BlockLayout, DType, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm::storage::{BoundLayout, SystemAllocator};
use kvbm::{BlockId, Engine, KvBlockManager, LookUp, Rank, TokenSequence};
use kvbm_node::{EngineTerms, MoverMemory, NodeEngine};

use crate::scratch::Scratch;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the end of a load is looked for, in this process.
const LOOK: Duration = Duration::from_micros(50);
/// How often the manager is asked whether blocks are saved: each question to a daemon takes time
/// from the copies.
const ASK: Duration = Duration::from_micros(250);
/// Layers of a block; each has keys and values.
const LAYERS: u32 = 8;
/// Tokens of a block.
const PAGE: u32 = 16;

/// A shape, and the configuration of whoever keeps its blocks.
pub(super) struct Fixture {
    scratch: Scratch,
    config: Config,
    block_bytes: u64,
    blocks: u32,
}

impl Fixture {
    /// Chains of `blocks` blocks of so many bytes, of which `chains` fit into host memory.
    pub(super) fn new(block_bytes: u64, blocks: u32, chains: u32) -> Result<Self> {
        let scratch = Scratch::create(&std::env::temp_dir(), "bench-node")?;
        let head_dim = block_bytes / u64::from(LAYERS * 2 * PAGE * 2);
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "[model]\nnum_layers = {LAYERS}\nnum_kv_heads = 1\nhead_dim = {head_dim}\npage_size = {PAGE}\n\
             [namespace]\nmodel = \"bench\"\n[host]\ncapacity = {}\n[transfer]\nverify_host = \"always\"\n",
            blocks * (chains + 1)
        );
        std::fs::write(scratch.path().join("kvbm.toml"), &text)?;
        let config = Config::from_toml(&text, "bench")?;
        Ok(Self { scratch, config, block_bytes, blocks })
    }

    fn socket(&self) -> PathBuf {
        self.scratch.path().join("run").join("node.sock")
    }

    /// Bytes of a chain.
    pub(super) fn bytes(&self) -> u64 {
        self.block_bytes * u64::from(self.blocks)
    }

    /// A chain that begins as no other.
    pub(super) fn sequence(&self, number: u32) -> TokenSequence {
        let tokens: Vec<u32> = (0..self.blocks * PAGE).map(|at| at ^ (number << 20)).collect();
        let hasher = self.config.namespace().hasher();
        // The namespace was checked with the configuration.
        hasher.map_or_else(
            |error| unreachable!("{error}"),
            |hasher| TokenSequence::from_tokens(hasher, &tokens),
        )
    }

    /// An engine's memory: blocks to save from, and blocks to load into.
    fn memory(&self) -> Result<BoundLayout> {
        let shape = LayoutConfig::builder()
            .num_blocks(2 * self.blocks)
            .num_layers(LAYERS)
            .outer_dim(2)
            .page_size(PAGE)
            .inner_dim(self.config.model.head_dim)
            .num_heads(1)
            .dtype(DType::BF16)
            .build()?;
        let layout: Arc<dyn BlockLayout> =
            Arc::new(LayerSeparate::new(shape, AxisOrder::Nhd, OuterPlacement::KvOuter)?);
        Ok(BoundLayout::allocate(layout, &SystemAllocator::default())?)
    }

    fn ids(&self, first: u32) -> Vec<BlockId> {
        (first..first + self.blocks).map(BlockId).collect()
    }
}

/// `kvbm serve`; it ends with this.
pub(super) struct Daemon(Child);

impl Daemon {
    pub(super) fn start(fixture: &Fixture) -> Result<Self> {
        let program = std::env::current_exe().context("this program does not know where it is")?;
        let mut command = Command::new(program);
        command.arg("serve").arg("--config").arg(fixture.scratch.path().join("kvbm.toml"));
        command.arg("--socket").arg(fixture.socket()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut daemon = Self(command.spawn().context("cannot start the daemon")?);
        let mut line = String::new();
        if let Some(stdout) = daemon.0.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        ensure!(line.starts_with("kvbm serve"), "the daemon did not start: try kvbm serve by hand");
        Ok(daemon)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It keeps nothing that anybody needs.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for what `is_there` finds, and says how long that was since `begun`.
fn wait<T>(
    begun: Instant,
    what: &str,
    pause: Duration,
    mut is_there: impl FnMut() -> Result<Option<T>>,
) -> Result<(T, Duration)> {
    loop {
        if let Some(found) = is_there()? {
            return Ok((found, begun.elapsed()));
        }
        if begun.elapsed() > PATIENCE {
            bail!("{what}: nothing after {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(pause);
    }
}

/// An engine that keeps its cache in the daemon.
pub(super) struct DaemonEngine {
    node: NodeEngine,
    ids: [Vec<BlockId>; 2],
}

impl DaemonEngine {
    pub(super) fn attach(fixture: &Fixture, _daemon: &Daemon, name: &str) -> Result<Self> {
        let g1 = fixture.memory()?;
        let terms = EngineTerms {
            call_time: PATIENCE,
            ..EngineTerms::new(fixture.socket(), name, 2 * fixture.blocks)
        };
        let node =
            NodeEngine::attach(terms, true, vec![MoverMemory { rank: Rank(0), device: None, g1: vec![g1] }])?;
        ensure!(node.wait_ready(PATIENCE), "not attached: {:?}", node.status());
        Ok(Self { node, ids: [fixture.ids(0), fixture.ids(fixture.blocks)] })
    }

    /// Blocks of a chain that are there.
    pub(super) fn found(&self, request: &str, tokens: &TokenSequence) -> Result<usize> {
        match self.node.look_up(request, tokens, 0)? {
            LookUp::Ready { blocks, .. } => Ok(blocks),
            LookUp::Pending => Ok(0),
        }
    }

    pub(super) fn abandon(&self, request: &str) -> Result<()> {
        Ok(self.node.abandon(request).map(drop)?)
    }

    /// A prompt that nobody computed before, in the half `half` of G1: `compute` takes its place.
    pub(super) fn prompt(&self, tokens: &TokenSequence, half: usize, compute: impl FnOnce()) -> Result<()> {
        let ids = &self.ids[half];
        ensure!(self.found("prompt", tokens)? == 0, "the prompt is known");
        self.node.before_reuse(ids, Instant::now() + PATIENCE)?;
        compute();
        self.node.offload(ids, tokens, 0)?;
        Ok(())
    }

    /// Saves a chain: until all of it is found.
    pub(super) fn save(&self, tokens: &TokenSequence) -> Result<Duration> {
        let begun = Instant::now();
        let offload = self.node.offload(&self.ids[0], tokens, 0)?;
        ensure!(offload.refused.is_empty(), "blocks were refused: {:?}", offload.refused.first());
        let ((), time) =
            wait(begun, "an offload", ASK, || Ok(self.node.wait_offloads(Duration::ZERO)?.then_some(())))?;
        let (found, all) = (self.found("save", tokens)?, tokens.num_blocks());
        self.abandon("save")?;
        ensure!(found == all, "{found} of {all} blocks were saved");
        Ok(time)
    }

    /// Loads a chain that was saved.
    pub(super) fn load(&self, tokens: &TokenSequence) -> Result<Duration> {
        let begun = Instant::now();
        let found = self.found("load", tokens)?;
        ensure!(found == self.ids[1].len(), "{found} blocks are there");
        self.node.commit("load", &self.ids[1])?;
        let (load, time) = wait(begun, "a load", LOOK, || Ok(self.node.finished().pop()))?;
        let (arrived, wanted) = (load.arrived, load.wanted);
        ensure!(arrived == wanted, "{arrived} of {wanted} blocks arrived: {:?}", load.failures);
        Ok(time)
    }
}

/// The same inside this process.
pub(super) struct LocalEngine {
    manager: KvBlockManager<Engine>,
    ids: [Vec<BlockId>; 2],
}

impl LocalEngine {
    pub(super) fn start(fixture: &Fixture) -> Result<Self> {
        let Config { model, host, transfer, .. } = fixture.config.clone();
        let builder = KvBlockManager::<Engine>::builder().model(model).namespace(fixture.config.namespace());
        let builder = builder.engine_host(vec![fixture.memory()?]);
        let builder = builder.configure(|config| (config.host, config.transfer) = (host, transfer));
        Ok(Self { manager: builder.build()?, ids: [fixture.ids(0), fixture.ids(fixture.blocks)] })
    }

    fn found(&self, request: &str, tokens: &TokenSequence) -> Result<usize> {
        match self.manager.tickets().look_up(request, tokens, 0)? {
            LookUp::Ready { blocks, .. } => Ok(blocks),
            LookUp::Pending => Ok(0),
        }
    }

    /// As [`DaemonEngine::prompt`].
    pub(super) fn prompt(&self, tokens: &TokenSequence, half: usize, compute: impl FnOnce()) -> Result<()> {
        let ids = &self.ids[half];
        ensure!(self.found("prompt", tokens)? == 0, "the prompt is known");
        self.manager.before_reuse(ids, Instant::now() + PATIENCE)?;
        compute();
        self.manager.offload(ids, tokens, 0, None)?;
        Ok(())
    }

    pub(super) fn save(&self, tokens: &TokenSequence) -> Result<Duration> {
        let begun = Instant::now();
        let offload = self.manager.offload(&self.ids[0], tokens, 0, None)?;
        ensure!(offload.refused.is_empty(), "blocks were refused: {:?}", offload.refused.first());
        let is_saved = || self.manager.wait_offloads(Instant::now());
        let ((), time) = wait(begun, "an offload", ASK, || Ok(is_saved().then_some(())))?;
        let (found, all) = (self.found("save", tokens)?, tokens.num_blocks());
        self.manager.tickets().abandon("save");
        ensure!(found == all, "{found} of {all} blocks were saved");
        Ok(time)
    }

    pub(super) fn load(&self, tokens: &TokenSequence) -> Result<Duration> {
        let begun = Instant::now();
        let found = self.found("load", tokens)?;
        ensure!(found == self.ids[1].len(), "{found} blocks are there");
        self.manager.tickets().commit("load", &self.ids[1], None)?;
        let (load, time) = wait(begun, "a load", LOOK, || Ok(self.manager.tickets().finished().pop()))?;
        ensure!(load.arrived == load.wanted, "{} of {} blocks arrived", load.arrived, load.wanted);
        Ok(time)
    }
}
