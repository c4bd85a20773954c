//! `kvbm remote pull`.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kvbm::config::{Blocks, Capacity, Config};
use kvbm::{KvBlockManager, Owned, Prefix, TokenSequence};
use serde_json::json;

use super::list::{self, Found};
use super::{PullArgs, deliver, set_discovery};
use crate::args::Output;
use crate::human::{bytes, micros};

/// Most bytes of a file of tokens.
const MAX_TOKENS_BYTES: u64 = 64 << 20;
/// How often peers are asked while none has anything.
const TICK: Duration = Duration::from_millis(100);

pub(super) fn run(args: &PullArgs) -> Result<()> {
    args.json.as_ref().and_then(Output::file).map_or(Ok(()), crate::writable::expect)?;
    let tokens = crate::token_file::read(&args.tokens, MAX_TOKENS_BYTES)?;
    let manager = join(args, tokens.len())?;
    let sequence = manager.sequence(&tokens, b"")?;
    ensure!(sequence.num_blocks() > 0, "{} tokens fill no block", tokens.len());
    let prefix = find(&manager, &sequence, args.wait)?;
    let (peer, found) = (prefix.node(), prefix.len());
    let began = Instant::now();
    let outcome = manager.onboard(prefix).wait();
    let elapsed = began.elapsed();
    let (arrived, error) = match outcome {
        Ok(cached) => (cached.len(), None),
        Err(error) => (error.arrived.len(), Some(error.to_string())),
    };
    let config = manager.config();
    let moved = config.rank_block_bytes() * u64::from(config.parallelism.tensor_parallel) * arrived as u64;
    let gb_per_s = moved as f64 / elapsed.as_secs_f64().max(1e-9) / 1e9;
    let peer = peer.map(|peer| peer.0);
    let text = format!(
        "{arrived} of {} blocks from node {}: {} in {}, {gb_per_s:.2} GB/s, all verified\n",
        sequence.num_blocks(),
        peer.map_or("?".to_owned(), |peer| peer.to_string()),
        bytes(moved),
        micros(elapsed.as_secs_f64() * 1e6),
    );
    let value = json!({
        "blocks": sequence.num_blocks(), "found": found, "arrived": arrived, "peer": peer, "bytes": moved,
        "seconds": elapsed.as_secs_f64(), "gb_per_s": gb_per_s, "error": error,
    });
    deliver(args.json.as_ref(), &text, &value)?;
    error.map_or(Ok(()), |error| Err(anyhow::anyhow!("{} blocks did not arrive: {error}", found - arrived)))
}

/// A node with room for the prompt, and nothing else of the configuration's tiers.
fn join(args: &PullArgs, tokens: usize) -> Result<KvBlockManager<Owned>> {
    let mut config = Config::load(Some(&args.config))?;
    let blocks = (tokens as u32 / config.model.page_size.max(1)).max(1);
    config.remote.enabled = true;
    config.remote.node = args.node;
    if let Some(place) = &args.directory {
        set_discovery(&mut config, place)?;
    }
    let folder = config.remote.directory.as_ref().filter(|folder| folder.exists());
    let url = config.remote.url.as_ref().map(|url| url.text().into_owned());
    if let Some(place) = url.or_else(|| Some(folder?.to_str()?.to_owned())) {
        let Found { place, announcements } = list::find(&place)?;
        let name = format!("node-{}.kvbm", args.node);
        ensure!(
            !announcements.iter().any(|(found, _)| *found == name),
            "--node {}: {place}/{name} announces a node of that number; give a number that no node has",
            args.node,
        );
    }
    config.device = kvbm::config::DeviceConfig { capacity: Blocks(blocks).into(), ..Default::default() };
    config.host.capacity = Blocks(blocks).into();
    config.host.populate = false;
    config.parallelism.workers = kvbm::config::Paths::default();
    (config.disk.dir, config.disk.capacity) = (None, Capacity::NONE);
    config.disk.more_dirs = kvbm::config::Paths::default();
    config.volume.clear();
    config.events.url = None;
    // It may be the configuration of a node that serves its operators there.
    config.admin = kvbm::config::AdminConfig::default();
    config.metrics = kvbm::config::MetricsConfig::default();
    config.validate()?;
    KvBlockManager::<Owned>::builder().config(config).build().context("this node cannot join")
}

/// What peers have of the prompt, as soon as one has anything.
fn find(manager: &KvBlockManager<Owned>, sequence: &TokenSequence, seconds: u32) -> Result<Prefix> {
    let until = kvbm::plan::deadline_after(Instant::now(), Duration::from_secs(seconds.into()));
    loop {
        let prefix = manager.match_prefix(sequence);
        if !prefix.is_empty() {
            return Ok(prefix);
        }
        if Instant::now() >= until {
            let peers: Vec<String> = manager.peers().iter().map(|peer| peer.node.to_string()).collect();
            if peers.is_empty() {
                bail!("no peer is announced; `kvbm remote ls DIR|URL` shows who is");
            }
            bail!(
                "no peer has any block of it (asked: nodes {}); compare [namespace], page size and dtype",
                peers.join(", ")
            );
        }
        std::thread::sleep(TICK);
    }
}
