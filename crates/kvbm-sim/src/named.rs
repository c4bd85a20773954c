//! An engine whose G1 is its own memory: it names the blocks.

use crate::bench::{Bench, Engine, Living, below, builder};
use crate::plan::Setup;
use crate::world::World;
use kvbm::{Engine as Named, EngineOnboarding, KvBlockManager, Tier, TokenSequence};
use kvbm_plan::{BlockId, clock};
use std::collections::BTreeMap;

/// A block that the engine has computed, or that arrived.
struct Held {
    bytes: [u8; 16],
    /// Workers that had died or started until then: where one does after it, the block may be gone.
    changes: u64,
}

/// An onboard that is under way.
struct Arriving {
    onboarding: EngineOnboarding,
    chain: TokenSequence,
    ids: Vec<BlockId>,
    /// How often each block had been taken for another use.
    uses: Vec<u64>,
    changes: u64,
}

/// The beginning of a chain that was computed some time ago.
struct Computed {
    chain: TokenSequence,
    ids: Vec<BlockId>,
    uses: Vec<u64>,
}

/// See the module.
pub(crate) struct NamedBlocks {
    bench: Bench<Named>,
    held: BTreeMap<BlockId, Held>,
    arriving: Vec<Arriving>,
    computed: Vec<Computed>,
    /// How often each block was taken for another use.
    uses: Vec<u64>,
}

fn build(world: &World, setup: &Setup) -> KvBlockManager<Named> {
    let builder = below(builder().engine_blocks(setup.blocks[0]), setup);
    let built = builder.build_with_workers(|rank, epoch, sink| world.connect(rank, epoch, sink));
    built.unwrap_or_else(|error| panic!("no manager: {error}"))
}

impl NamedBlocks {
    pub(crate) fn new(world: World, setup: Setup, seed: u64, living: Living) -> Self {
        let uses = vec![0; setup.blocks[0] as usize];
        let bench = Bench::new(world, setup, seed, living, build);
        Self { bench, held: BTreeMap::new(), arriving: Vec::new(), computed: Vec::new(), uses }
    }

    fn let_go(&mut self) {
        self.arriving.clear();
        self.computed.clear();
        self.held.clear();
    }

    fn uses_of(&self, ids: &[BlockId]) -> Vec<u64> {
        ids.iter().map(|id| self.uses[id.index()]).collect()
    }

    /// So many blocks for a new use, of which no transfer touches any.
    fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let blocks = self.uses.len();
        let first = self.bench.random.below(blocks);
        let manager = self.bench.manager();
        let free = |id: &BlockId| manager.before_reuse(&[*id], clock::now()).is_ok();
        let all = (first..first + blocks).map(|id| BlockId((id % blocks) as u32));
        let ids: Vec<BlockId> = all.filter(free).take(count).collect();
        self.bench.check_fresh(&ids);
        for id in &ids {
            self.held.remove(id);
            self.uses[id.index()] += 1;
        }
        (ids.len() == count).then_some(ids)
    }

    fn compute(&mut self) {
        let chain = self.bench.chain();
        let Some(ids) = self.take(chain.num_blocks()) else { return };
        self.bench.world.compute(&ids, |at| *chain.hashes()[at].as_bytes());
        let changes = self.bench.world.changes();
        for (&id, hash) in ids.iter().zip(chain.hashes()) {
            self.held.insert(id, Held { bytes: *hash.as_bytes(), changes });
        }
        self.bench.world.note(|| format!("computes {ids:?}"));
        let uses = self.uses_of(&ids);
        self.computed.push(Computed { chain, ids, uses });
        if self.bench.random.once_in(2) {
            self.offload();
        }
    }

    /// Offloads what was computed, unless it was given to something else since.
    fn offload(&mut self) {
        let Some(Computed { chain, ids, uses }) = self.bench.random.take(&mut self.computed) else { return };
        if self.uses_of(&ids) == uses {
            self.bench.world.note(|| format!("offloads {ids:?}"));
            // Refused where a worker has lost a part of them, or G2 has no room.
            let _refused = self.bench.manager().offload(&ids, &chain, 0, None);
        }
    }

    fn onboard(&mut self) {
        let chain = self.bench.chain();
        let prefix = self.bench.manager().match_prefix(&chain);
        self.bench.world.digest(prefix.len());
        let Some(ids) = self.take(prefix.len()) else { return };
        if let Ok(onboarding) = self.bench.manager().onboard(prefix, &ids, None) {
            let (uses, changes) = (self.uses_of(&ids), self.bench.world.changes());
            self.arriving.push(Arriving { onboarding, chain, ids, uses, changes });
        }
    }

    fn end_onboarding(&mut self) {
        let Some(mut arriving) = self.bench.random.take(&mut self.arriving) else { return };
        match self.bench.random.below(6) {
            0 => return,
            1 => arriving.onboarding.cancel(),
            _ => {}
        }
        let Arriving { onboarding, chain, ids, uses, changes, .. } = arriving;
        self.bench.world.note(|| format!("waits for an onboard into {ids:?}"));
        let arrived = onboarding.wait().unwrap_or_else(|error| error.arrived);
        self.bench.world.digest(arrived);
        // The others have been given to something else since.
        let same = |at: &usize| self.uses[ids[*at].index()] == uses[*at];
        let held = (0..arrived).filter(same).map(|at| {
            let bytes = *chain.hashes()[at].as_bytes();
            (ids[at], Held { bytes, changes })
        });
        self.held.extend(held.collect::<Vec<_>>());
    }

    /// Invariant 2: nobody writes to what the engine has.
    fn check_own(&self) {
        let changes = self.bench.world.changes();
        for (&id, held) in self.held.iter().filter(|(_, held)| held.changes == changes) {
            if let Some(rank) = self.bench.world.lacks(Tier::G1, id, held.bytes) {
                self.bench.world.violate(format!(
                    "invariant 2: block {id} of the engine has other bytes on rank {rank} than it computed or loaded"
                ));
            }
        }
    }
}

impl Engine for NamedBlocks {
    fn step(&mut self) {
        match self.bench.random.below(1000) {
            0..150 => self.compute(),
            150..200 => self.offload(),
            200..360 => self.onboard(),
            360..480 => self.end_onboarding(),
            480..500 => {
                let id = BlockId(self.bench.random.below(self.uses.len()) as u32);
                // There is such a block.
                self.bench.world.note(|| format!("releases {id}"));
                let _busy = self.bench.manager().released(&[id]);
                self.held.remove(&id);
                self.uses[id.index()] += 1;
            }
            _ => {
                if let Some(end) = self.bench.step() {
                    self.let_go();
                    self.bench.restart(end);
                }
            }
        }
        self.bench.tick();
    }

    fn check(&mut self) {
        self.bench.check();
        self.check_own();
    }

    fn check_end(&mut self) {
        self.let_go();
        self.bench.check_end();
    }

    fn drop_all(&mut self) {
        self.let_go();
        self.bench.end();
    }
}
