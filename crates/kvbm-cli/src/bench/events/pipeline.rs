//! One run: a manager that publishes, a follower that indexes.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kvbm::config::{Blocks, Config, EvictionPolicy, ModelConfig, Secret, WhenFull};
use kvbm::events_plane::url::EventRole;
use kvbm::events_plane::{Delivery, EventUrl, KvIndex, Subscriber};
use kvbm::{BlockChain, KvBlockManager, Owned, SequenceHash};

use crate::rng::Rng;

/// Blocks of G1.
pub(super) const CAPACITY: u32 = 65_536;
/// Blocks of a chain.
pub(super) const CHAIN: usize = 128;
/// Chains that are registered in turn: four times what G1 holds.
const CHAINS: usize = 4 * CAPACITY as usize / CHAIN;
/// Events under way between pool and index: fewer than a subscriber's queue holds.
const WINDOW: u64 = 400_000;
const PATIENCE: Duration = Duration::from_secs(20);

/// What a run came to.
#[derive(Clone, Debug)]
pub(super) struct PipelineRun {
    pub(super) events: u64,
    pub(super) bytes: u64,
    pub(super) batches: u64,
    pub(super) wall: Duration,
    pub(super) missing: u64,
    pub(super) index_blocks: u64,
}

/// What the follower says of itself while it runs.
#[derive(Default)]
struct Received {
    /// Events that came or are known to be missing.
    events: AtomicU64,
    stop: AtomicBool,
}

/// Chains of hashes that nobody has to compute while the clock runs.
pub(super) fn chains() -> Vec<[SequenceHash; CHAIN]> {
    let mut rng = Rng::new(7);
    let mut hash = || {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&rng.below(u64::MAX).to_le_bytes());
        bytes[8..].copy_from_slice(&rng.below(u64::MAX).to_le_bytes());
        SequenceHash::from_bytes(bytes)
    };
    (0..CHAINS).map(|_| std::array::from_fn(|_| hash())).collect()
}

fn manager(url: &str) -> Result<KvBlockManager<Owned>> {
    let model = ModelConfig { num_layers: 32, num_kv_heads: 8, head_dim: 128, ..ModelConfig::default() };
    let mut config = Config { model, ..Config::default() };
    config.namespace.model = "bench".into();
    config.device.capacity = Blocks(CAPACITY).into();
    config.policy.eviction = EvictionPolicy::LruLeaf;
    config.events.url = Some(Secret::new(url));
    config.events.ring_capacity = 1 << 18;
    config.events.when_full = WhenFull::Block;
    config.events.full_wait = Duration::from_secs(10);
    KvBlockManager::<Owned>::builder()
        .config(config)
        .build_metadata_only()
        .context("cannot build the manager")
}

/// Registers until `events` events have happened, and follows them over `url`.
pub(super) fn run(url: &str, events: u64) -> Result<PipelineRun> {
    let (chains, received) = (chains(), Arc::new(Received::default()));
    let manager = manager(url)?;
    // The publisher's first sign of life: from then on a socket of its own is there.
    ensure!(manager.events().flush(PATIENCE), "nothing can be published to {url}");
    let url = to_follow(url, &manager.events().listens_at());
    let transport = url.parse::<EventUrl>()?.open(EventRole::Subscriber, PATIENCE)?;
    let subscriber = Subscriber::new(transport.subscribe()?);
    let shared = Arc::clone(&received);
    let follower = std::thread::Builder::new()
        .name("follower".into())
        .spawn(move || follow(subscriber, &shared))
        .context("no thread for the follower")?;
    let start = Instant::now();
    let produced = produce(&manager, &chains, events, &received);
    let end = produced.and_then(|()| wait(&manager, &received));
    let wall = start.elapsed();
    received.stop.store(true, Ordering::Release);
    let (index, missing) = follower.join().unwrap_or_else(|_| bail!("the follower panicked"))?;
    end?;
    let stats = manager.events().stats();
    ensure!(missing + manager.events().status().lost == 0, "{missing} events did not reach the follower");
    Ok(PipelineRun {
        events: stats.events,
        bytes: stats.bytes,
        batches: stats.batches,
        wall,
        missing,
        index_blocks: compare(&manager, &index)?,
    })
}

/// Where the publisher of `url` is followed, which may have chosen its port.
fn to_follow(url: &str, listens_at: &[String]) -> String {
    let query = url.find('?').map_or("", |at| &url[at..]);
    listens_at.first().map_or_else(|| url.to_owned(), |address| format!("zmq+{address}{query}"))
}

/// Registers chains, which evicts older ones, as fast as the follower follows.
fn produce(
    manager: &KvBlockManager<Owned>,
    chains: &[[SequenceHash; CHAIN]],
    events: u64,
    received: &Received,
) -> Result<()> {
    let mut registered: u64 = 0;
    let happened = |registered: u64| registered + registered.saturating_sub(u64::from(CAPACITY));
    for chain in chains.iter().cycle() {
        if happened(registered) >= events {
            break;
        }
        let behind = || happened(registered).saturating_sub(received.events.load(Ordering::Acquire));
        let deadline = Instant::now() + PATIENCE;
        while behind() > WINDOW {
            ensure!(Instant::now() < deadline, "the follower has stopped {} events behind", behind());
            std::thread::sleep(Duration::from_micros(200));
        }
        let fresh = manager.allocate(CHAIN)?;
        let (done, _) = manager.commit(fresh, BlockChain::of_hashes(chain), 0)?;
        drop(manager.register(done)?);
        registered += CHAIN as u64;
    }
    Ok(())
}

/// Waits until the follower has received all events.
fn wait(manager: &KvBlockManager<Owned>, received: &Received) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    ensure!(manager.events().flush(PATIENCE), "the transport did not take the last events");
    loop {
        let (count, all) = (received.events.load(Ordering::Acquire), manager.events().status().published);
        if count >= all {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the follower knows of {count} events of {all}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Indexes until `received.stop` is set. The index, and the number of missing events.
fn follow(mut subscriber: Subscriber, received: &Received) -> Result<(KvIndex, u64)> {
    let mut index = KvIndex::default();
    let mut missing = 0;
    while !received.stop.load(Ordering::Acquire) {
        let count = match subscriber.next(Duration::from_millis(20))? {
            Some(Delivery::Events { stream, events }) => {
                index.apply(stream, &events);
                events.len() as u64
            }
            Some(Delivery::Gap { missing: gap, .. }) => {
                missing += gap.end - gap.start;
                gap.end - gap.start
            }
            Some(Delivery::Restarted { .. }) => bail!("there are two managers on this subject"),
            None => 0,
        };
        received.events.fetch_add(count, Ordering::Release);
    }
    Ok((index, missing))
}

/// That the index says what the manager holds; how many blocks that is.
fn compare(manager: &KvBlockManager<Owned>, index: &KvIndex) -> Result<u64> {
    let held: HashSet<_> = manager
        .events()
        .snapshot()
        .blocks
        .iter()
        .map(|block| (block.location.tier, block.identity.hash))
        .collect();
    let indexed: HashSet<_> = index.holdings().map(|(place, _, hash)| (place.location.tier, hash)).collect();
    let wrong = held.symmetric_difference(&indexed).count();
    ensure!(wrong == 0, "the follower's index differs from the pool in {wrong} of {} blocks", held.len());
    Ok(indexed.len() as u64)
}
