//! An engine whose G1 is a pool of kvbm's.

use crate::bench::{Bench, Engine, Living, below, builder};
use crate::plan::Setup;
use crate::prompts::PAGE;
use crate::world::World;
use kvbm::config::Blocks;
use kvbm::{BlockBatch, Cached, Complete, G1, KvBlockManager, Onboarding, Owned, Parked, Tier};
use kvbm_plan::{BlockId, BlockIdentity, clock};
use std::time::{Duration, Instant};

/// Beyond its deadline, how long an onboard may stay unanswered: the leader looks every 50 ms.
const LATE: Duration = Duration::from_millis(150);

/// Requests whose blocks an engine holds.
const MAX_REQUESTS: usize = 2;

/// An onboard that is under way.
struct Arriving {
    onboarding: Onboarding,
    began: Instant,
}

/// See the module.
pub(crate) struct OwnedBlocks {
    bench: Bench<Owned>,
    arriving: Vec<Arriving>,
    computed: Vec<BlockBatch<G1, Complete>>,
    cached: Vec<Cached<G1>>,
    parked: Vec<(Parked, [u8; 16])>,
    private: u128,
}

fn build(world: &World, setup: &Setup) -> KvBlockManager<Owned> {
    let builder = below(builder().device(Blocks(setup.blocks[0])), setup);
    let built = builder.build_with_workers(|rank, epoch, sink| world.connect(rank, epoch, sink));
    built.unwrap_or_else(|error| panic!("no manager: {error}"))
}

impl OwnedBlocks {
    pub(crate) fn new(world: World, setup: Setup, seed: u64, living: Living) -> Self {
        let bench = Bench::new(world, setup, seed, living, build);
        let (arriving, computed, cached, parked) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { bench, arriving, computed, cached, parked, private: 0 }
    }

    fn let_go(&mut self) {
        self.arriving.clear();
        self.computed.clear();
        self.cached.clear();
        self.parked.clear();
    }

    fn compute(&mut self) {
        let chain = self.bench.chain();
        let prefix = self.bench.manager().match_prefix(&chain);
        let there = prefix.blocks().iter().take_while(|block| block.tier == Tier::G1).count();
        drop(prefix);
        let missing = chain.num_blocks() - there;
        if missing == 0 {
            return;
        }
        let Ok(fresh) = self.bench.manager().allocate(missing) else { return };
        self.bench.check_fresh(fresh.block_ids());
        self.bench.world.compute(fresh.block_ids(), |at| *chain.hashes()[there + at].as_bytes());
        self.bench.world.note(|| format!("computes {:?}", fresh.block_ids()));
        match self.bench.manager().commit(fresh, &chain, there) {
            Ok((done, _)) => self.computed.push(done),
            Err(error) => {
                self.bench.world.violate(format!("blocks that were just allocated do not commit: {error}"));
            }
        }
    }

    fn register(&mut self) {
        if let Some(done) = self.bench.random.take(&mut self.computed) {
            // Refused where a worker has lost them, or their parent has gone.
            let registered = self.bench.manager().register(done);
            self.cached.extend(registered);
        }
    }

    fn onboard(&mut self) {
        let chain = self.bench.chain();
        let prefix = self.bench.manager().match_prefix(&chain);
        self.bench.world.digest(prefix.len());
        let onboarding = self.bench.manager().onboard(prefix);
        self.arriving.push(Arriving { onboarding, began: clock::now() });
    }

    fn end_onboarding(&mut self) {
        let Some(arriving) = self.bench.random.take(&mut self.arriving) else { return };
        if !arriving.onboarding.is_done() && !self.bench.random.once_in(12) {
            // Most requests wait until there is an answer.
            self.arriving.push(arriving);
            return;
        }
        let Arriving { onboarding, .. } = arriving;
        if self.bench.random.once_in(4) {
            return;
        }
        let until = if self.bench.random.once_in(3) {
            clock::now()
        } else {
            clock::now() + self.bench.setup.deadline
        };
        let arrived = onboarding.wait_until(until).unwrap_or_else(|error| error.arrived);
        self.bench.world.digest(arrived.len());
        self.cached.push(arrived);
    }

    fn offload(&mut self) {
        let chain = self.bench.chain();
        let parts = self.bench.manager().match_prefix(&chain).into_parts();
        let to =
            if self.bench.setup.has_volume && self.bench.random.once_in(2) { Tier::G4 } else { Tier::G3 };
        // Refused where the tier is not there, or has lost them.
        let _refused = self.bench.manager().offload(&parts.g2, to);
        for to in [Tier::G2, to] {
            let _refused = self.bench.manager().offload(&parts.g1, to);
        }
    }

    /// A preempted sequence: a full block that is given up, and a private one that moves to G2.
    fn park(&mut self) {
        let Ok(fresh) = self.bench.manager().allocate(2) else { return };
        self.bench.check_fresh(fresh.block_ids());
        self.private += 1;
        let bytes = self.private.to_le_bytes();
        self.bench.world.compute(fresh.block_ids(), |_| bytes);
        let Ok(sequence) = self.bench.manager().sequence(&[1; PAGE as usize + 1], b"") else { return };
        if let Ok((_, partial)) = self.bench.manager().commit(fresh, &sequence, 0) {
            let parked = self.bench.manager().park(partial);
            self.parked.extend(parked.map(|parked| (parked, bytes)));
        }
    }

    fn resume(&mut self) {
        let Some((parked, bytes)) = self.bench.random.take(&mut self.parked) else { return };
        match self.bench.manager().resume(parked) {
            Ok(blocks) if !blocks.is_lost() => {
                for &slot in blocks.block_ids() {
                    if let Some(rank) = self.bench.world.lacks(Tier::G1, slot, bytes) {
                        self.bench.world.violate(format!(
                            "a private block in slot {slot} of G1 came back with other bytes on rank {rank}"
                        ));
                    }
                }
            }
            Ok(_) => {}
            Err(rejected) => self.parked.extend(rejected.blocks.map(|parked| (parked, bytes))),
        }
    }

    /// Invariant 2: nobody writes to what the engine has.
    fn check_own(&self) {
        for batch in self.computed.iter().filter(|batch| !batch.is_lost()) {
            self.check_slots(batch.block_ids(), batch.identities());
        }
        for blocks in self.cached.iter().filter(|blocks| !blocks.is_lost()) {
            self.check_slots(blocks.block_ids(), blocks.identities());
        }
    }

    fn check_slots(
        &self,
        slots: &[BlockId],
        identities: impl IntoIterator<Item = impl std::borrow::Borrow<BlockIdentity>>,
    ) {
        for (&slot, identity) in slots.iter().zip(identities) {
            let bytes = *identity.borrow().hash.as_bytes();
            if let Some(rank) = self.bench.world.lacks(Tier::G1, slot, bytes) {
                self.bench.world.violate(format!(
                    "invariant 2: slot {slot} of G1 belongs to the engine and was written on rank {rank}"
                ));
            }
        }
    }

    /// Invariant 6: every wait ends.
    fn check_late(&self) {
        let most = self.bench.setup.deadline + LATE;
        for arriving in &self.arriving {
            let waited = clock::now().saturating_duration_since(arriving.began);
            if waited > most && !arriving.onboarding.is_done() {
                self.bench.world.violate(format!("invariant 6: an onboard has no answer after {waited:?}"));
            }
        }
    }
}

impl Engine for OwnedBlocks {
    fn step(&mut self) {
        match self.bench.random.below(1000) {
            0..150 => self.compute(),
            150..260 => self.register(),
            260..380 => self.onboard(),
            380..460 => self.end_onboarding(),
            460..540 => drop(self.bench.random.take(&mut self.cached)),
            540..560 => drop(self.bench.random.take(&mut self.computed)),
            560..580 => self.offload(),
            580..600 => self.park(),
            600..625 => self.resume(),
            _ => {
                if let Some(end) = self.bench.step() {
                    self.let_go();
                    self.bench.restart(end);
                }
            }
        }
        // An engine serves so many requests at a time.
        while self.cached.len() > MAX_REQUESTS {
            drop(self.bench.random.take(&mut self.cached));
        }
        self.bench.tick();
    }

    fn check(&mut self) {
        self.bench.check();
        self.check_own();
        self.check_late();
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
