//! What the simulator `kvbm-sim` does in place of the threads of a manager. Only in a build with
//! `RUSTFLAGS="--cfg kvbm_sim"`.

use crate::manager::KvBlockManager;
use kvbm_plan::{BlockId, BlockIdentity, Tier};

impl<G> KvBlockManager<G> {
    /// Looks for what is late, as the thread `kvbm-deadlines` does.
    pub fn simulate_deadlines(&self) {
        self.leader.expire(kvbm_plan::clock::now());
    }

    /// Decides about offloads if there is something to decide, as the thread `kvbm-offload` does.
    pub fn simulate_decisions(&self) {
        self.leader.offload.decide_once();
    }

    /// The slots of a tier that hold a registered block, and the blocks.
    pub fn simulate_snapshot(&self, tier: Tier) -> Vec<(BlockId, BlockIdentity)> {
        self.leader.registry.snapshot(tier).0
    }
}
