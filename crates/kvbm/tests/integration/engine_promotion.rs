//! What an engine loads from below G2 is copied to G2 too, while it is what was loaded.

use crate::support::script::{Mode, Ranks};
use crate::support::{model, namespace, soon, unlimited};
use kvbm::config::Blocks;
use kvbm::{BlockId, Engine, EngineOnboarding, KvBlockManager, Owned, Tier};
use std::time::Instant;

const COMPUTED: BlockId = BlockId(0);
const LOADED: BlockId = BlockId(1);

/// A manager whose only block is on G3 alone, and a load of it into an engine block, which is over.
fn loaded(ranks: &Ranks) -> (KvBlockManager<Engine>, EngineOnboarding) {
    let manager = KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .engine_blocks(4)
        .host(Blocks(4))
        .disk("never-opened", Blocks(4))
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
        })
        .build_with_workers(|rank, epoch, sink| ranks.connect(rank, epoch, sink))
        .unwrap();
    let chain = manager.sequence(&[7; 16], b"").unwrap();
    manager.offload(&[COMPUTED], &chain, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    manager.clear(Tier::G2).unwrap();
    let prefix = manager.match_prefix(&chain);
    assert_eq!(prefix.blocks()[0].tier, Tier::G3);
    let onboarding = manager.onboard(prefix, &[LOADED], None).unwrap();
    assert!(onboarding.is_done());
    ranks.set_all(Mode::Hold);
    (manager, onboarding)
}

#[test]
fn a_block_that_came_from_the_disk_is_copied_to_host_memory() {
    let ranks = Ranks::new(1);
    let (_manager, onboarding) = loaded(&ranks);
    assert_eq!(onboarding.wait().unwrap(), 1);
    let plan = ranks.next_plan(0);
    assert_eq!((plan.path().dst, plan.blocks[0].src), (Tier::G2, LOADED));
}

/// Found by the simulator: other bytes were registered under the hash of the block.
///
/// Mutation that makes it fail: `Content::is_there` is always true, and `promote` asks for no
/// validity.
#[test]
fn a_block_that_the_engine_reused_before_it_saw_the_outcome_is_not_copied() {
    type Reuse = fn(&KvBlockManager<Engine>);
    let reuses: [Reuse; 2] = [
        |manager| manager.before_reuse(&[LOADED], Instant::now()).unwrap(),
        |manager| drop(manager.released(&[LOADED]).unwrap()),
    ];
    for reuse in reuses {
        let ranks = Ranks::new(1);
        let (manager, onboarding) = loaded(&ranks);
        reuse(&manager);
        assert_eq!(onboarding.wait().unwrap(), 1);
        assert_eq!(ranks.held(0), 0, "no plan reads the block");
        assert_eq!(manager.status().tiers[Tier::G2.index()].arriving, 0);
    }
}
