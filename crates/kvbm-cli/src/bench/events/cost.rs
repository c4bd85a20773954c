//! What an event costs whoever registers or evicts a block: the same work with and without a ring.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use kvbm::plan::{GroupId, NamespaceId};
use kvbm::pool::{Duplicates, G1, GroupConfig, PolicyKind, Registry, RegistryConfig};
use kvbm::{BlockChain, SequenceHash};

use super::pipeline::{CAPACITY, CHAIN, chains};
use crate::progress::Progress;

/// Blocks that are registered in one go, each of which evicts another one: two events.
const BLOCKS: usize = 8 * CAPACITY as usize;
/// How often the publisher reads the ring.
const TICK: Duration = Duration::from_millis(5);
const RING: u32 = 1 << 18;
/// The difference of two times needs more of them than a time does.
const LEAST_ROUNDS: u32 = 7;

/// Nanoseconds of one event: the median over rounds of the time with a ring less the time without,
/// measured one after the other, each first in every other round. It is negative where an event
/// costs less than the noise. Processor time of the thread that registers: what else the machine
/// does is not ours.
pub(super) fn measure(rounds: u32, progress: &Progress) -> Result<f64> {
    let chains = chains();
    let mut costs = Vec::new();
    for round in 0..rounds.max(LEAST_ROUNDS) {
        let mut times = [0.0; 2];
        for side in [round as usize % 2, (round as usize + 1) % 2] {
            times[side] = churn(&chains, [0, RING][side])?.as_nanos() as f64;
        }
        let [without, with] = times;
        costs.push((with - without) / (2 * BLOCKS) as f64);
    }
    progress.advance(u64::from(rounds));
    costs.sort_unstable_by(f64::total_cmp);
    Ok(costs[costs.len() / 2])
}

/// The time that registering takes while somebody reads the ring as the publisher does.
fn churn(chains: &[[SequenceHash; CHAIN]], ring: u32) -> Result<Duration> {
    let registry = Registry::new(&RegistryConfig {
        groups: vec![GroupConfig::full(16)],
        event_capacity: ring,
        policy: PolicyKind::LruLeaf,
        ..RegistryConfig::new([CAPACITY, 0, 0])
    })?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (reader, stop) = (registry.clone(), &stop);
        scope.spawn(move || {
            let mut records = Vec::with_capacity(RING as usize);
            while !stop.load(Ordering::Acquire) {
                records.clear();
                reader.drain_events(&mut records, RING as usize);
                std::thread::sleep(TICK);
            }
        });
        let took = register(&registry, chains);
        stop.store(true, Ordering::Release);
        took
    })
}

fn register(registry: &Registry, chains: &[[SequenceHash; CHAIN]]) -> Result<Duration> {
    let pool = registry.pool::<G1>();
    let one = |chain: &[SequenceHash; CHAIN]| -> Result<()> {
        let fresh = pool.get_mutable_blocks(CHAIN)?;
        let partial = fresh.init_sequence(NamespaceId(0), GroupId(0), 0).ok().context("no sequence")?;
        let (done, _) = partial.commit(BlockChain::of_hashes(chain)).ok().context("no commit")?;
        drop(pool.register(done, Duplicates::Reuse).ok().context("no registration")?);
        Ok(())
    };
    // Full first: from then on every block evicts another one.
    let full = CAPACITY as usize / CHAIN;
    chains[..full].iter().try_for_each(one)?;
    let start = processor_time();
    chains.iter().cycle().skip(full).take(BLOCKS / CHAIN).try_for_each(one)?;
    Ok(processor_time().saturating_sub(start))
}

/// Of the calling thread.
pub(super) fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec to write to, and the clock is one that every thread has.
    let answer = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    debug_assert_eq!(answer, 0, "the clock is one that every thread has");
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
