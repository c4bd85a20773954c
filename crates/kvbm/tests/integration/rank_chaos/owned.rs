//! G1 is a pool of kvbm's.

use super::world::{Bytes, RANKS, World};
use super::{Bench, STEPS, any, configure, namespace, seeds};
use crate::support::model;
use kvbm::config::Blocks;
use kvbm::{BlockBatch as Batch, Cached, Complete, G1, KvBlockManager, Onboarding, Owned, Parked, Tier};
use std::time::Instant;

/// What an engine has in its hands.
struct Engine {
    bench: Bench<Owned>,
    onboardings: Vec<Onboarding>,
    computed: Vec<Batch<G1, Complete>>,
    cached: Vec<Cached<G1>>,
    parked: Vec<(Parked, Vec<Bytes>)>,
    private: u128,
}

impl Engine {
    fn new(seed: u64) -> Self {
        let world = World::new(seed);
        let manager = KvBlockManager::<Owned>::builder()
            .model(model())
            .namespace(namespace())
            .device(Blocks(12))
            .host(Blocks(10))
            .disk("never-opened", Blocks(9))
            .tensor_parallel(RANKS as u32)
            .configure(|config| configure(config, seed))
            .build_with_workers(|rank, epoch, sink| world.connect(rank, epoch, sink))
            .unwrap();
        let (onboardings, computed, cached, parked) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { bench: Bench::new(seed, world, manager), onboardings, computed, cached, parked, private: 0 }
    }

    fn serve(&mut self) {
        let (bench, chain) = (&self.bench, self.bench.chain());
        let prefix = bench.manager.match_prefix(&chain);
        let there = prefix.blocks().iter().take_while(|block| block.tier == Tier::G1).count();
        drop(prefix);
        let missing = chain.num_blocks() - there;
        let Ok(fresh) = bench.manager.allocate(missing) else { return };
        if missing > 0 {
            bench.compute(fresh.block_ids(), |at| *chain.hashes()[there + at].as_bytes());
            self.computed.push(bench.manager.commit(fresh, &chain, there).unwrap().0);
        }
    }

    fn register(&mut self) {
        let Some(done) = any(&self.bench.world, &mut self.computed) else { return };
        self.cached.extend(self.bench.manager.register(done));
    }

    fn onboard(&mut self) {
        let manager = &self.bench.manager;
        self.onboardings.push(manager.onboard(manager.match_prefix(&self.bench.chain())));
    }

    fn end_onboarding(&mut self) {
        let Some(onboarding) = any(&self.bench.world, &mut self.onboardings) else { return };
        if self.bench.world.below(4) > 0 {
            let arrived = onboarding.wait_until(Instant::now()).unwrap_or_else(|error| error.arrived);
            let hash = |at: usize| *arrived.identities()[at].hash.as_bytes();
            self.bench.holds(arrived.block_ids(), hash, || arrived.is_lost());
            self.cached.push(arrived);
        }
    }

    fn park(&mut self) {
        let Bench { world, manager, .. } = &self.bench;
        let Ok(fresh) = manager.allocate(2) else { return };
        self.private += 1;
        let private = vec![self.private.to_le_bytes()];
        self.bench.compute(fresh.block_ids(), |_| private[0]);
        // The first block is full, and given up; the second one is private.
        let chain = manager.sequence(&[1; 17], b"").unwrap();
        let partial = manager.commit(fresh, &chain, 0).unwrap().1;
        world.tamed(|| self.parked.extend(manager.park(partial).map(|parked| (parked, private))));
    }

    fn resume(&mut self) {
        let Bench { world, manager, .. } = &self.bench;
        let Some((parked, private)) = any(world, &mut self.parked) else { return };
        world.tamed(|| match manager.resume(parked) {
            Ok(blocks) => self.bench.holds(blocks.block_ids(), |at| private[at], || blocks.is_lost()),
            Err(rejected) => self.parked.extend(rejected.blocks.map(|parked| (parked, private))),
        });
    }

    fn step(&mut self) {
        self.bench.world.next_step();
        let rank = self.bench.world.below(RANKS);
        match self.bench.world.below(60) {
            0..8 => self.serve(),
            8..14 => self.register(),
            14..22 => self.onboard(),
            22..28 => self.end_onboarding(),
            28..45 => drop(self.bench.world.work(rank)),
            45..48 => drop(any(&self.bench.world, &mut self.cached)),
            51 => {
                let prefix = self.bench.manager.match_prefix(&self.bench.chain());
                let _lost = self.bench.manager.offload(&prefix.into_parts().g2, Tier::G3);
            }
            54 => self.park(),
            55 => self.resume(),
            56 => drop(any(&self.bench.world, &mut self.computed)),
            other => self.bench.step(other, rank),
        }
    }
}

/// Mutations that make it fail: slots of G3 whose block did not become visible are not released;
/// what a worker that started again had in memory is found; an answer that is repeated counts for
/// another rank.
#[test]
fn whatever_ranks_do_what_is_found_is_there_and_every_slot_comes_back() {
    for seed in seeds() {
        let mut engine = Engine::new(seed);
        for _ in 0..STEPS {
            engine.step();
            engine.bench.check();
        }
        let Engine { bench, onboardings, computed, cached, parked, .. } = engine;
        drop((onboardings, computed, cached, parked));
        bench.end();
    }
}
