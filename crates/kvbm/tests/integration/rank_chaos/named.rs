//! G1 is the engine's own memory, whose blocks it names.

use super::world::{Bytes, RANKS, World};
use super::{Bench, STEPS, any, configure, namespace, seeds};
use crate::support::model;
use kvbm::config::Blocks;
use kvbm::{BlockId, Engine, EngineOnboarding, KvBlockManager, Owned, TokenSequence};
use std::collections::BTreeMap;
use std::time::Instant;

/// Blocks of the engine.
const G1: usize = 12;

/// A block that the engine has computed, or that arrived.
struct Held {
    bytes: Bytes,
    /// Workers that had died or started until then: where one does after it, the block may be gone.
    changes: usize,
}

/// An engine with blocks of its own.
struct Names {
    bench: Bench<Engine>,
    held: BTreeMap<BlockId, Held>,
    onboardings: Vec<Arriving>,
    /// Blocks that hold the beginning of a chain, and how often each had been used then.
    computed: Vec<(Vec<BlockId>, TokenSequence, Vec<usize>)>,
    /// How often each block was taken for another use.
    uses: [usize; G1],
}

struct Arriving {
    onboarding: EngineOnboarding,
    chain: TokenSequence,
    ids: Vec<BlockId>,
    changes: usize,
    /// Of each block.
    uses: Vec<usize>,
}

impl Names {
    fn new(seed: u64) -> Self {
        let world = World::new(seed);
        let manager = KvBlockManager::<Owned>::builder()
            .model(model())
            .namespace(namespace())
            .engine_blocks(G1 as u32)
            .host(Blocks(10))
            .disk("never-opened", Blocks(9))
            .tensor_parallel(RANKS as u32)
            .configure(|config| configure(config, seed))
            .build_with_workers(|rank, epoch, sink| world.connect(rank, epoch, sink))
            .unwrap();
        Self {
            bench: Bench::new(seed, world, manager),
            held: BTreeMap::new(),
            onboardings: Vec::new(),
            computed: Vec::new(),
            uses: [0; G1],
        }
    }

    /// So many blocks for a new use, of which no transfer touches any.
    fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let first = self.bench.world.below(G1);
        let ids = (first..first + G1).map(|id| BlockId((id % G1) as u32));
        let free = |id: &BlockId| self.bench.manager.before_reuse(&[*id], Instant::now()).is_ok();
        let ids: Vec<_> = ids.take(count).filter(free).collect();
        for id in &ids {
            self.held.remove(id);
            self.uses[id.index()] += 1;
        }
        (ids.len() == count).then_some(ids)
    }

    fn serve(&mut self) {
        let chain = self.bench.chain();
        let Some(ids) = self.take(chain.num_blocks()) else { return };
        self.bench.compute(&ids, |at| *chain.hashes()[at].as_bytes());
        let changes = self.bench.world.changes();
        let blocks = ids.iter().zip(chain.hashes());
        self.held.extend(blocks.map(|(&id, hash)| (id, Held { bytes: *hash.as_bytes(), changes })));
        let uses = self.uses_of(&ids);
        self.computed.push((ids, chain, uses));
        if self.bench.world.below(2) > 0 {
            self.offload();
        }
    }

    fn uses_of(&self, ids: &[BlockId]) -> Vec<usize> {
        ids.iter().map(|id| self.uses[id.index()]).collect()
    }

    /// Offloads what was computed some time ago, unless it was given to something else since.
    fn offload(&mut self) {
        let Some((ids, chain, uses)) = any(&self.bench.world, &mut self.computed) else { return };
        if self.uses_of(&ids) == uses {
            // Refused where a worker has lost a part of them, or G2 has no room.
            let _refused = self.bench.manager.offload(&ids, &chain, 0, None);
        }
    }

    fn onboard(&mut self) {
        let chain = self.bench.chain();
        let prefix = self.bench.manager.match_prefix(&chain);
        let Some(ids) = self.take(prefix.len()) else { return };
        if let Ok(onboarding) = self.bench.manager.onboard(prefix, &ids, None) {
            let uses = self.uses_of(&ids);
            let changes = self.bench.world.changes();
            self.onboardings.push(Arriving { onboarding, chain, ids, changes, uses });
        }
    }

    fn end_onboarding(&mut self) {
        let Some(arriving) = any(&self.bench.world, &mut self.onboardings) else { return };
        let Arriving { onboarding, chain, ids, changes, uses } = arriving;
        if !onboarding.is_done() {
            return;
        }
        let arrived = onboarding.wait().unwrap_or_else(|error| error.arrived);
        // The others have been given to something else since.
        let same = |at: &usize| self.uses[ids[*at].index()] == uses[*at];
        for at in (0..arrived).filter(same) {
            let bytes = *chain.hashes()[at].as_bytes();
            self.held.insert(ids[at], Held { bytes, changes });
        }
    }

    /// Nobody writes to what the engine has.
    fn check(&self) {
        self.bench.check();
        let changes = self.bench.world.changes();
        for (&id, held) in self.held.iter().filter(|(_, held)| held.changes == changes) {
            self.bench.holds(&[id], |_| held.bytes, || false);
        }
    }

    fn step(&mut self) {
        self.bench.world.next_step();
        let rank = self.bench.world.below(RANKS);
        match self.bench.world.below(60) {
            0..10 => self.serve(),
            10..12 => self.offload(),
            12..22 => self.onboard(),
            22..28 => self.end_onboarding(),
            28..48 => drop(self.bench.world.work(rank)),
            51 => drop(self.bench.manager.released(&[BlockId(self.bench.world.below(G1) as u32)])),
            other => self.bench.step(other, rank),
        }
    }
}

/// Mutation that makes it fail: `start_offload` passes over what is lost.
#[test]
fn whatever_ranks_do_nobody_writes_to_a_block_that_the_engine_has_taken_for_another_use() {
    for seed in seeds() {
        let mut engine = Names::new(seed);
        for _ in 0..STEPS {
            engine.step();
            engine.check();
        }
        let Names { bench, onboardings, .. } = engine;
        drop(onboardings);
        bench.end();
    }
}
