//! What it costs whoever commits a block that events say its own tokens: their hash, and in
//! engines' format the tokens themselves. The pool knows neither, so they are noted beside it.

use std::time::Duration;

use anyhow::{Context, Result};
use kvbm::config::{Blocks, Config, ModelConfig, Secret};
use kvbm::{BlockChain, KvBlockManager, Owned, TokenSequence};

use super::cost::processor_time;
use super::pipeline::{CAPACITY, CHAIN};
use crate::progress::Progress;
use crate::rng::Rng;
use crate::scratch::Scratch;

/// Chains that are committed: as many blocks as there are slots.
const CHAINS: usize = CAPACITY as usize / CHAIN;
/// The difference of two times needs more of them than a time does.
const LEAST_ROUNDS: u32 = 5;

/// Nanoseconds of a block in kvbm's own format and in engines' format: the median over pairs of
/// commits of the same chains, with tokens less with hashes alone. Noise can make it negative.
/// Processor time of the thread that commits.
pub(super) fn measure(rounds: u32, progress: &Progress) -> Result<[f64; 2]> {
    let folder = Scratch::create(&std::env::temp_dir(), "bench-noting")?;
    let url = format!("zmq+ipc://{}?format=vllm", folder.path().join("events").display());
    let [native, engine] = [None, Some(url.as_str())].map(|url| {
        let manager = manager(url)?;
        let sequences = sequences(&manager)?;
        let mut differences = Vec::new();
        for _ in 0..rounds.max(LEAST_ROUNDS) {
            let without = commit(&manager, &sequences, false)?;
            let with = commit(&manager, &sequences, true)?;
            differences.push(with.as_nanos() as f64 - without.as_nanos() as f64);
        }
        differences.sort_unstable_by(f64::total_cmp);
        anyhow::Ok(differences[differences.len() / 2] / (CHAINS * CHAIN) as f64)
    });
    progress.advance(u64::from(rounds));
    Ok([native?, engine?])
}

fn manager(url: Option<&str>) -> Result<KvBlockManager<Owned>> {
    let model = ModelConfig { num_layers: 32, num_kv_heads: 8, head_dim: 128, ..ModelConfig::default() };
    let mut config = Config { model, ..Config::default() };
    config.namespace.model = "bench".into();
    config.device.capacity = Blocks(CAPACITY).into();
    config.events.url = url.map(Secret::new);
    let builder = KvBlockManager::<Owned>::builder().config(config);
    builder.build_metadata_only().context("cannot build the manager")
}

fn sequences(manager: &KvBlockManager<Owned>) -> Result<Vec<TokenSequence>> {
    let (mut rng, page) = (Rng::new(7), manager.config().model.page_size as usize);
    let mut prompt = || (0..CHAIN * page).map(|_| rng.below(1 << 17) as u32).collect::<Vec<_>>();
    (0..CHAINS).map(|_| Ok(manager.sequence(&prompt(), b"")?)).collect()
}

/// The time of the commits alone; the blocks go back uncomputed.
fn commit(
    manager: &KvBlockManager<Owned>,
    sequences: &[TokenSequence],
    with_tokens: bool,
) -> Result<Duration> {
    let mut took = Duration::ZERO;
    for sequence in sequences {
        let fresh = manager.allocate(sequence.num_blocks())?;
        let hashes = BlockChain::of_hashes(sequence.hashes());
        let chain = if with_tokens { BlockChain::from(sequence) } else { hashes };
        let start = processor_time();
        let committed = manager.commit(fresh, chain, 0);
        took += processor_time().saturating_sub(start);
        drop(committed.ok().context("no commit")?);
    }
    Ok(took)
}
