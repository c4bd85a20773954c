//! What the simulator `kvbm-sim` does in place of the threads of a manager. Only in a build with
//! `RUSTFLAGS="--cfg kvbm_sim"`.

use crate::manager::KvBlockManager;
use kvbm_plan::{BlockId, BlockIdentity, Tier};

/// Looks for what is late, as the thread `kvbm-deadlines` does.
pub fn expire<G>(manager: &KvBlockManager<G>) {
    manager.leader.expire(kvbm_plan::clock::now());
}

/// Decides about offloads if there is something to decide, as the thread `kvbm-offload` does.
pub fn decide<G>(manager: &KvBlockManager<G>) {
    manager.leader.offload.decide_once();
}

/// The slots of a tier that hold a registered block, and the blocks.
pub fn snapshot<G>(manager: &KvBlockManager<G>, tier: Tier) -> Vec<(BlockId, BlockIdentity)> {
    manager.leader.registry.snapshot(tier).0
}
