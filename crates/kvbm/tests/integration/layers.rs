//! Transfers that go layer by layer: copies overlap with computing.

use crate::support::script::{Mode, Ranks};
use crate::support::{GROUPS, model, model_of, soon};
use kvbm::config::ModelConfig;
use kvbm::plan::{Command, Gate, LayerRange, TransferPlan};
use kvbm::{BlockId, Engine, FailureKind, KvBlockManager, LoadOptions, Path, Tier, TokenSequence};
use std::time::{Duration, Instant};

fn ids(blocks: std::ops::Range<u32>) -> Vec<BlockId> {
    blocks.map(BlockId).collect()
}

fn sequence(manager: &KvBlockManager<Engine>, blocks: u32) -> TokenSequence {
    manager.sequence(&(0..blocks * 16).collect::<Vec<u32>>(), b"").unwrap()
}

fn on_g2(manager: &KvBlockManager<Engine>, chain: &TokenSequence) -> usize {
    manager.look_up(chain).iter().filter(|places| places.contains(Tier::G2)).count()
}

/// The layers and gates of the plans that rank 0 holds; every rank gets the same.
fn plans(ranks: &Ranks, count: usize) -> Vec<TransferPlan> {
    ranks.wait_held(0, count);
    let plans: Vec<_> = (0..count).map(|_| ranks.next_plan(0)).collect();
    assert_eq!(ranks.held(0), 0);
    plans
}

const STEPS: [Option<LayerRange>; 2] =
    [Some(LayerRange { first: 0, count: 1 }), Some(LayerRange { first: 1, count: 1 })];

/// Models of two layers: with axes, and one whose tensors have none.
fn of_two_layers() -> [ModelConfig; 2] {
    [model(), ModelConfig::opaque(16, [4096, 701])]
}

#[test]
fn the_copy_of_a_layer_waits_for_it_and_a_block_is_there_with_its_last() {
    for model in of_two_layers() {
        let ranks = Ranks::new(1);
        let manager = ranks.engine_manager_of(model, 64, 64);
        let chain = sequence(&manager, 3);
        ranks.set_all(Mode::Hold);
        manager.step();
        assert_eq!(manager.offload_by_layer(&ids(0..3), &chain, 0).unwrap().started, 3);
        let plans = plans(&ranks, 2);
        assert_eq!(plans.iter().map(|plan| plan.layers).collect::<Vec<_>>(), STEPS);
        let gate = |layer| Gate::Layer { iteration: 2, layer };
        assert_eq!(plans.iter().map(|plan| plan.gate).collect::<Vec<_>>(), [gate(0), gate(1)]);
        manager.layer_done(0);
        ranks.done(0, &plans[0]);
        assert_eq!(on_g2(&manager, &chain), 0, "a layer is no block");
        assert_eq!(manager.step(), 2);
        ranks.done(0, &plans[1]);
        assert!(manager.wait_offloads(soon()));
        assert_eq!(on_g2(&manager, &chain), 3);
        assert_eq!(manager.metrics().path(Path::G1_G2).blocks.get(), 3, "each counts once");
        let told: Vec<_> = ranks
            .commands(0)
            .into_iter()
            .filter_map(|command| match command {
                Command::Advance { iteration, layer } => Some((iteration, layer)),
                _ => None,
            })
            .collect();
        assert_eq!(told, [(1, None), (2, Some(0)), (2, None)]);
    }
}

/// Mutation that makes it fail: `merge` forgets the failures of earlier steps.
#[test]
fn a_block_that_lacks_a_layer_is_not_made_visible() {
    for (model, bad) in of_two_layers().into_iter().flat_map(|model| [(model.clone(), 0), (model, 1)]) {
        let ranks = Ranks::new(1);
        let manager = ranks.engine_manager_of(model, 64, 64);
        let chain = sequence(&manager, 3);
        ranks.set_all(Mode::Hold);
        manager.offload_by_layer(&ids(0..3), &chain, 0).unwrap();
        let plans = plans(&ranks, 2);
        for (at, plan) in plans.iter().enumerate() {
            if at == bad {
                ranks.fail(0, plan, 1, FailureKind::Device);
            } else {
                ranks.done(0, plan);
            }
        }
        assert!(manager.wait_offloads(soon()));
        assert_eq!(on_g2(&manager, &chain), 1, "the failed block and what continues it");
        assert_eq!(manager.status().tiers[1].arriving, 0);
    }
}

#[test]
fn an_engine_begins_with_the_layers_that_are_there() {
    for model in of_two_layers() {
        let ranks = Ranks::new(1);
        let manager = ranks.engine_manager_of(model, 64, 64);
        let chain = sequence(&manager, 3);
        manager.offload(&ids(0..3), &chain, 0, None).unwrap();
        assert!(manager.wait_offloads(soon()));
        ranks.set_all(Mode::Hold);
        let load = |to| {
            manager.onboard_with(manager.match_prefix(&chain), &ids(to), LoadOptions::default().by_layer())
        };
        let loading = load(10..13).unwrap();
        let parts = plans(&ranks, 2);
        assert_eq!(parts.iter().map(|plan| plan.layers).collect::<Vec<_>>(), STEPS);
        assert!(!loading.layer_ready(0));
        ranks.done(0, &parts[0]);
        assert!(loading.wait_layer(0, soon()) && !loading.layer_ready(1) && !loading.is_done());
        assert!(!loading.wait_layer(1, Instant::now()));
        ranks.done(0, &parts[1]);
        assert!(loading.wait_layer(1, soon()) && loading.is_done());
        assert_eq!(loading.wait().unwrap(), 3);
        // One layer of one block fails.
        let loading = load(20..23).unwrap();
        let parts = plans(&ranks, 2);
        ranks.done(0, &parts[0]);
        assert!(loading.wait_layer(0, soon()));
        ranks.fail(0, &parts[1], 2, FailureKind::Device);
        assert!(!loading.wait_layer(1, soon()) && !loading.layer_ready(0), "what was computed is void");
        assert_eq!(loading.wait().unwrap_err().arrived, 2);
        // Of a ticket.
        manager.tickets().look_up("a", &chain, 0).unwrap();
        assert!(!manager.tickets().layer_ready("a", 0));
        manager.tickets().commit_with("a", &ids(30..33), LoadOptions::default().by_layer()).unwrap();
        let parts = plans(&ranks, 2);
        ranks.done(0, &parts[0]);
        assert!(manager.tickets().wait_layer("a", 0, soon()) && !manager.tickets().layer_ready("a", 1));
        assert!(!manager.tickets().wait_layer("a", 1, Instant::now()), "it is on its way");
        assert!(!manager.tickets().wait_layer("b", 0, soon()), "there is no such load");
        assert!(manager.tickets().abandon("a"));
        assert!(!manager.tickets().layer_ready("a", 0));
        ranks.done(0, &parts[1]);
        assert_eq!(manager.tickets().finished().pop().map(|load| load.arrived), Some(0));
    }
}

#[test]
fn whole_blocks_go_where_layers_hide_nothing() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(256, 256);
    // 128 blocks in a few microseconds, measured.
    let chain = sequence(&manager, 128);
    manager.offload(&ids(0..128), &chain, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!(
        manager.onboard(manager.match_prefix(&chain), &ids(128..256), None).unwrap().wait().unwrap(),
        128
    );
    ranks.set_all(Mode::Hold);
    let short = sequence(&manager, 1);
    let loading = manager
        .onboard_with(manager.match_prefix(&short), &ids(0..1), LoadOptions::default().by_layer())
        .unwrap();
    let parts = plans(&ranks, 1);
    assert_eq!(parts[0].layers, None);
    assert!(!loading.layer_ready(0));
    ranks.done(0, &parts[0]);
    assert!(loading.wait_layer(0, soon()));
    assert_eq!(loading.wait().unwrap(), 1);
    let computed = manager.sequence(&(9000..9016).collect::<Vec<u32>>(), b"").unwrap();
    assert_eq!(manager.offload_by_layer(&ids(1..2), &computed, 0).unwrap().started, 1);
    let parts = plans(&ranks, 1);
    assert_eq!((parts[0].layers, parts[0].gate), (None, Gate::Layer { iteration: 1, layer: 1 }));
    ranks.done(0, &parts[0]);
    assert!(manager.wait_offloads(soon()));
}

/// A load by layer is hidden where computing takes at least as long. Mutation that makes it fail:
/// `hides_load` compares blocks with tokens.
#[test]
fn a_load_hides_behind_computing_that_takes_as_long() {
    let one_layer = (ModelConfig::opaque(16, [4096]), false);
    for (model, has_layers) in of_two_layers().map(|model| (model, true)).into_iter().chain([one_layer]) {
        let ranks = Ranks::new(1);
        let manager = ranks.engine_manager_of(model, 256, 256);
        assert!(!manager.hides_load(1, 1 << 40), "nothing was loaded");
        let chain = sequence(&manager, 64);
        manager.offload(&ids(0..64), &chain, 0, None).unwrap();
        assert!(manager.wait_offloads(soon()));
        ranks.set_all(Mode::Hold);
        let began = Instant::now();
        let loading =
            manager.onboard_with(manager.match_prefix(&chain), &ids(64..128), LoadOptions::default());
        let plan = plans(&ranks, 1).remove(0);
        std::thread::sleep(Duration::from_millis(64));
        ranks.done(0, &plan);
        let _outcome = loading.unwrap().wait();
        let at_most = began.elapsed();
        assert!(!manager.hides_load(1, 1 << 40), "nobody said what computing takes");
        // A token in 1 ms, a block in 16 ms; a block comes in 1 ms at least.
        assert!((0..16).all(|_| manager.prefilled(1000, Duration::from_secs(1))));
        let tokens_of_the_load = at_most.as_millis() as u64 + 1;
        assert_eq!(manager.hides_load(64, tokens_of_the_load), has_layers);
        assert!(!manager.hides_load(64, 32), "half of what the load takes");
    }
}

/// One tensor has nothing to overlap with, and of several groups nobody says whose layer is next.
#[test]
fn blocks_of_one_tensor_and_of_several_groups_go_whole() {
    for model in [ModelConfig::opaque(16, [4096]), model_of(GROUPS)] {
        let ranks = Ranks::new(1);
        let manager = ranks.engine_manager_of(model, 64, 64);
        let chain = sequence(&manager, 3);
        ranks.set_all(Mode::Hold);
        manager.offload_by_layer(&ids(0..3), &chain, 0).unwrap();
        let parts = plans(&ranks, 1);
        assert_eq!((parts[0].layers, parts[0].gate), (None, Gate::Iteration(1)));
        ranks.done(0, &parts[0]);
        assert!(manager.wait_offloads(soon()));
        assert_eq!(manager.metrics().path(Path::G1_G2).blocks.get(), 3);
    }
}

/// The bytes go with their gates, through a real worker. Mutation that makes it fail: a range of
/// layers selects all tensors.
#[cfg(feature = "worker")]
#[test]
fn a_layer_is_copied_before_the_next_one_is_computed() {
    use crate::support::host::{host_tensors, layer_separate};
    use kvbm::layout::{OpaqueLayout, OpaqueTensor};
    use std::sync::Arc;

    let model = ModelConfig { num_layers: 6, ..model() };
    overlap(model.clone(), host_tensors(layer_separate(&model, 32)), [4096; 6]);
    // Two tensors in one allocation, of other lengths than the rest.
    let bytes = [4096, 4096, 8192, 701, 1, 512];
    let place = |at: usize| match at {
        0 => (0, 64),
        1 => (0, 64 + 4096),
        _ => (at as u32 - 1, 3),
    };
    let tensors = (0..6).map(|at| {
        let ((region, offset), block_bytes) = (place(at), bytes[at]);
        OpaqueTensor { region, offset, block_stride: 8192, block_bytes }
    });
    let layout = Arc::new(OpaqueLayout::new(32, tensors).unwrap());
    overlap(ModelConfig::opaque(16, bytes), host_tensors(layout), bytes);
}

/// Saves blocks of six layers of so many bytes while they are computed, and loads them.
#[cfg(feature = "worker")]
fn overlap(model: ModelConfig, tensors: kvbm::storage::BoundLayout, bytes: [u32; 6]) {
    use crate::support::{compute, holds, namespace, unlimited};
    use kvbm::Owned;
    use kvbm::config::Blocks;

    let manager = KvBlockManager::<Owned>::builder()
        .model(model)
        .namespace(namespace())
        .engine_host(vec![tensors])
        .host(Blocks(32))
        .configure(|config| {
            unlimited(config);
            config.transfer.layer_steps = 3;
            config.transfer.verify_host = kvbm::config::VerifyHost::Always;
        })
        .build()
        .unwrap();
    let chain = sequence(&manager, 4);
    for (id, hash) in ids(0..4).into_iter().zip(chain.hashes()) {
        compute(&manager, id, *hash);
    }
    assert_eq!(manager.offload_by_layer(&ids(0..4), &chain, 0).unwrap().started, 4);
    let copied = || manager.metrics().path(Path::G1_G2).bytes.get();
    let of_layers = |layers: usize| 4 * bytes[..layers].iter().map(|&bytes| u64::from(bytes)).sum::<u64>();
    let whole = of_layers(6);
    for (layer, layers) in [(0, 0), (1, 2), (2, 2), (3, 4), (4, 4)] {
        manager.layer_done(layer);
        let until = soon();
        while copied() < of_layers(layers) {
            assert!(Instant::now() < until, "layer {layer} is not copied while others are computed");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(copied(), of_layers(layers), "what is not computed is not copied");
    }
    manager.step();
    assert!(manager.wait_offloads(soon()));
    assert_eq!((copied(), on_g2(&manager, &chain)), (whole, 4));
    let to = ids(10..14);
    let loading =
        manager.onboard_with(manager.match_prefix(&chain), &to, LoadOptions::default().by_layer()).unwrap();
    assert!((0..6).all(|layer| loading.wait_layer(layer, soon())));
    assert_eq!(loading.wait().unwrap(), 4);
    assert!(to.iter().zip(chain.hashes()).all(|(id, hash)| holds(&manager, *id, *hash)));
}
