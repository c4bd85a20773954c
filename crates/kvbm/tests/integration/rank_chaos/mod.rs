//! Requests, and ranks that answer late, twice, in any order, for others or not at all, fail, die
//! and start again, over a model of what their memory and disks hold: whatever is found is there on
//! every rank, every slot comes back, what was forgotten is gone from the disks, and nobody writes
//! to a block of the engine that it has taken for another use. `KVBM_FUZZ_ROUNDS=2000 cargo test -p
//! kvbm --test integration rank_chaos` for longer, `KVBM_SEED=7` for one.

mod named;
mod owned;
mod world;

use crate::support::{namespace, soon, unlimited};
use kvbm::config::Config;
use kvbm::plan::NamespaceId;
use kvbm::{BlockId, KvBlockManager, Namespace, Rank, Tier, TokenSequence};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use world::{Bytes, RANKS, World};

/// Steps of a round.
const STEPS: usize = 250;

/// An engine with some prompts in two namespaces, over ranks that do as they like.
struct Bench<G> {
    seed: u64,
    world: World,
    manager: KvBlockManager<G>,
    namespaces: [Namespace; 2],
    /// The step in which each was forgotten last.
    forgotten: HashMap<NamespaceId, usize>,
    chains: Vec<TokenSequence>,
}

fn configure(config: &mut Config, seed: u64) {
    unlimited(config);
    config.offload.g2_g3.write_through = !seed.is_multiple_of(3);
    config.offload.g2_g3.ahead_share = 0.3;
    config.offload.g1_g2.queue_share = if seed.is_multiple_of(5) { 0.3 } else { 1.0 };
    let deadline = Duration::from_millis(if seed % 4 == 3 { 1 } else { 100 });
    (config.transfer.deadline, config.disk.read_deadline) = (deadline, deadline);
}

impl<G> Bench<G> {
    fn new(seed: u64, world: World, manager: KvBlockManager<G>) -> Self {
        let other = namespace().weights("2").page_size(16).dtype("bf16");
        let namespaces = [manager.namespace().clone(), other];
        let prompt = |chain: u32| {
            // Of each namespace's three, two begin alike.
            let family = if chain % 3 == 1 { chain - 1 } else { chain };
            let token = |at: u32| if at < 32 { at + 1000 * family } else { at + 1000 * chain };
            let prompt: Vec<u32> = (0..16 * (2 + chain % 4)).map(token).collect();
            manager.sequence_in(&namespaces[chain as usize / 3], &prompt, b"").unwrap()
        };
        let chains = (0..6).map(prompt).collect();
        Self { seed, world, manager, namespaces, forgotten: HashMap::new(), chains }
    }

    fn chain(&self) -> TokenSequence {
        self.chains[self.world.below(self.chains.len())].clone()
    }

    /// What the engine computes is in the memory of every rank that is there.
    fn compute(&self, blocks: &[BlockId], bytes: impl Fn(usize) -> Bytes) {
        self.world.with(|state| {
            for rank in state.ranks.iter_mut().filter(|rank| rank.open) {
                for (at, &block) in blocks.iter().enumerate() {
                    rank.put(Tier::G1, block, Some(bytes(at)));
                }
            }
        });
    }

    /// Every rank that is there has these bytes in G1, unless they are lost: of a worker that has
    /// just started somebody else may be telling the leader.
    fn holds(&self, blocks: &[BlockId], bytes: impl Fn(usize) -> Bytes, is_lost: impl Fn() -> bool) {
        let held = blocks.iter().enumerate().map(|(at, &block)| (Tier::G1, block, bytes(at)));
        let held: Vec<_> = held.collect();
        let until = soon();
        while let Some(what) = self.world.lacks(&held) {
            if is_lost() {
                return;
            }
            assert!(Instant::now() < until, "seed {}: {what}", self.seed);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whatever is found in memory is there, on every rank.
    fn check(&self) {
        let until = soon();
        for chain in &self.chains {
            loop {
                let prefix = self.manager.match_prefix(chain);
                let found = prefix.blocks().iter().zip(prefix.identities());
                let in_memory = found.filter(|(block, _)| block.tier < Tier::G3);
                let held: Vec<_> = in_memory
                    .map(|(block, identity)| (block.tier, block.block, *identity.hash.as_bytes()))
                    .collect();
                let Some(what) = self.world.lacks(&held) else { break };
                drop(prefix);
                assert!(Instant::now() < until, "seed {}: {what}", self.seed);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// What any engine meets: an iteration ends, something is removed, a rank speaks out of turn,
    /// dies or starts.
    fn step(&mut self, what: usize, rank: usize) {
        match what {
            48 => drop(self.manager.step()),
            49 | 50 => self.world.babble(rank),
            52 => self.forget(),
            53 => self.clear(),
            57 => self.kill(rank),
            _ => self.start(rank),
        }
    }

    fn forget(&mut self) {
        let namespace = self.namespaces[self.world.below(2)].clone();
        // What is asked for from now on may be there.
        let step = self.world.next_step();
        self.manager.forget(&namespace);
        self.forgotten.insert(NamespaceId::from(namespace.tag()), step);
    }

    fn clear(&self) {
        let tier = Tier::SLOTTED[self.world.below(3)];
        if self.manager.status().tiers[tier.index()].capacity > 0 {
            self.manager.clear(tier).unwrap();
        }
    }

    /// The worker of a rank dies, and the engine may hear of it.
    fn kill(&self, rank: usize) {
        if self.world.is_open(rank) {
            self.world.kill(rank);
            if self.world.below(3) == 0 {
                self.manager.rank_lost(Rank(rank as u16)).unwrap();
            }
        }
    }

    fn start(&self, rank: usize) {
        if !self.world.is_open(rank) {
            self.world.start(rank);
        }
    }

    /// Everybody is there again and does what is left: nothing of any transfer stays, nor of what
    /// was forgotten.
    fn end(&self) {
        let seed = self.seed;
        self.world.with(|state| state.tame = true);
        for rank in 0..RANKS {
            self.start(rank);
            while self.world.work(rank) {}
        }
        assert!(self.manager.wait_offloads(soon()), "seed {seed}: {:?}", self.manager.status());
        let until = soon();
        while !self.is_quiet() {
            assert!(Instant::now() < until, "seed {seed}: {:?}", self.manager.status());
            std::thread::sleep(Duration::from_millis(1));
        }
        self.check();
        let report = self.manager.shutdown(Duration::from_secs(60));
        assert!(report.drained && report.flush_error.is_none(), "seed {seed}: {report:?}");
        assert_eq!(report.removals_unconfirmed, 0, "seed {seed}");
        for (rank, slot, record) in self.world.synced() {
            let forgotten = self.forgotten.get(&record.identity.namespace).copied().unwrap_or(0);
            let (position, asked) = (record.identity.position, record.asked);
            assert!(
                asked >= forgotten,
                "seed {seed}: rank {rank} has block {position} of step {asked} in slot {slot}, forgotten in step {forgotten}"
            );
        }
    }

    fn is_quiet(&self) -> bool {
        let status = self.manager.status();
        let rest = status.tiers.iter().map(|tier| {
            u64::from(tier.arriving + tier.held + tier.active + tier.detached) + tier.transfer_pins
        });
        // A slot that failed a write is withheld for a while, on purpose.
        let withheld: u32 = status.disk_directories.iter().map(|disk| disk.withheld_slots).sum();
        let plans: usize = status.paths.iter().map(|path| path.plans).sum();
        // That a worker has started may be handled by another thread, later.
        let all_are_there = || self.manager.flush(Duration::from_secs(60)).is_ok();
        rest.sum::<u64>() == u64::from(withheld) && plans == 0 && all_are_there()
    }
}

/// Takes one of `list`.
fn any<T>(world: &World, list: &mut Vec<T>) -> Option<T> {
    (!list.is_empty()).then(|| list.swap_remove(world.below(list.len())))
}

/// The seeds of the rounds.
fn seeds() -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    match number("KVBM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("KVBM_FUZZ_ROUNDS").unwrap_or(40),
    }
}
