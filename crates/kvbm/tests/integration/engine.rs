//! G1 in an engine's hands: its memory, its ids, its layout.
#![cfg(feature = "worker")]

use crate::support::host::{layer_separate, rank_shape};
use crate::support::script::{Mode, Ranks};
use crate::support::{compute, holds, model, namespace, soon};
use kvbm::config::{Blocks, ModelConfig};
use kvbm::device::{Device, DeviceMemory, EmulatedConfig, EmulatedDevice};
use kvbm::layout::{
    AxisOrder, BlockLayout, EngineRegions, LayerSeparate, LayoutConfig, OuterPlacement, StridedLayout,
};
use kvbm::pool::Refusal;
use kvbm::storage::{BoundLayout, DeviceStorage, Owner, RegionBinding};
use kvbm::{
    BlockId, BuildError, Engine, EngineError, FailureKind, KvBlockManager, OffloadStarted, Owned, Path,
    RefusedBlock, Tier, TokenSequence,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

const G1: u32 = 32;

fn shape() -> LayoutConfig {
    let model = model();
    rank_shape(&model, model.num_kv_heads, G1)
}

/// The engine's tensors, which must outlive the manager, and what the manager is told of them.
fn tensors(layout: &Arc<dyn BlockLayout>) -> (Vec<DeviceMemory>, Arc<dyn Device>, BoundLayout) {
    let device: Arc<dyn Device> = Arc::new(EmulatedDevice::new(EmulatedConfig::default()).unwrap());
    let regions = layout.regions();
    let memory: Vec<_> = regions.iter().map(|region| device.allocate(region.bytes, 4096).unwrap()).collect();
    let bind = |memory: &DeviceMemory| {
        let owner: Owner = Arc::new(memory.clone());
        // SAFETY: the owner keeps the memory.
        let storage =
            unsafe { DeviceStorage::from_external(memory.address(), memory.len(), &*device, owner) };
        RegionBinding::new(Arc::new(storage.unwrap()))
    };
    let bound = BoundLayout::bind(Arc::clone(layout), memory.iter().map(bind).collect()).unwrap();
    (memory, device, bound)
}

fn manager(bound: (Arc<dyn Device>, BoundLayout), g2: u32) -> Result<KvBlockManager<Engine>, BuildError> {
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .engine_device(vec![bound])
        .host(Blocks(g2))
        .build()
}

fn sequence(manager: &KvBlockManager<Engine>, start: u32, blocks: u32) -> TokenSequence {
    let prompt: Vec<u32> = (0..16 * blocks).map(|token| token + 1_000_000 * start).collect();
    manager.sequence(&prompt, b"").unwrap()
}

fn ids<const N: usize>(ids: [u32; N]) -> [BlockId; N] {
    ids.map(BlockId)
}

fn on_host(manager: &KvBlockManager<Engine>, sequence: &TokenSequence) -> usize {
    manager.look_up(sequence).iter().filter(|tiers| tiers.contains(Tier::G2)).count()
}

#[test]
fn blocks_of_any_engine_layout_go_down_and_come_back_into_other_ids() {
    let separate = |placement| -> Arc<dyn BlockLayout> {
        Arc::new(LayerSeparate::new(shape(), AxisOrder::Nhd, placement).unwrap())
    };
    let strided = |order: &str, regions| -> Arc<dyn BlockLayout> {
        let order = order.parse().unwrap();
        Arc::new(StridedLayout::from_engine_order(shape(), order, regions).unwrap())
    };
    let layouts = [
        separate(OuterPlacement::KvOuter),
        separate(OuterPlacement::BlockOuter),
        strided("LBNHC", EngineRegions::PerLayer),
        strided("BHLNC", EngineRegions::One),
    ];
    for layout in layouts {
        let name = format!("{:?}", layout.layout_type());
        let (_memory, device, bound) = tensors(&layout);
        let manager = manager((device, bound), 64).unwrap();
        let tokens = sequence(&manager, 1, 5);
        let from = ids([7, 3, 30, 0, 11]);
        for (&id, &hash) in from.iter().zip(tokens.hashes()) {
            compute(&manager, id, hash);
        }
        let all = OffloadStarted { started: 5, ..OffloadStarted::default() };
        assert_eq!(manager.offload(&from, &tokens, 0, None).unwrap(), all, "{name}");
        assert!(manager.wait_offloads(soon()));
        assert_eq!(manager.offload(&from[..3], &tokens, 0, None).unwrap().present, 3, "each block once");
        manager.before_reuse(&from, soon()).unwrap();
        let to = ids([30, 1, 2, 19, 31]);
        let onboarding = manager.onboard(manager.match_prefix(&tokens), &to, None).unwrap();
        assert_eq!(onboarding.wait().unwrap(), 5);
        assert!(to.iter().zip(tokens.hashes()).all(|(&id, &hash)| holds(&manager, id, hash)), "{name}");
        assert_eq!(manager.metrics().tier(Tier::G2).hits.get(), 5);
        assert_eq!(manager.status().tiers[0].capacity, 0, "no tier of ours");
    }
}

#[test]
fn a_part_of_a_prefix_comes_into_as_many_ids() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 64);
    let tokens = sequence(&manager, 1, 5);
    manager.offload(&ids([0, 1, 2, 3, 4]), &tokens, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Hold);
    let tail = manager.match_prefix(&tokens).split_off(2);
    let onboarding = manager.onboard(tail, &ids([10, 11, 12]), None).unwrap();
    let plan = ranks.next_plan(0);
    let moved: Vec<_> = plan.blocks.iter().map(|block| (block.identity.position, block.dst.0)).collect();
    assert_eq!(moved, [(2, 10), (3, 11), (4, 12)]);
    ranks.fail(0, &plan, 1, FailureKind::Corrupt);
    let error = onboarding.wait().unwrap_err();
    assert_eq!((error.arrived, error.wanted), (1, 3), "counted from the first listed block");
    assert!(error.to_string().contains("block 3") && error.to_string().contains("g2"), "{error}");
    assert_eq!(manager.status().tiers[1].quarantined, 1);
}

#[test]
fn the_copy_of_a_block_that_was_reused_meanwhile_is_discarded() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 64);
    ranks.set_all(Mode::Hold);
    let tokens = sequence(&manager, 1, 4);
    manager.offload(&ids([0, 1, 2, 3]), &tokens, 0, None).unwrap();
    let plan = ranks.next_plan(0);
    assert_eq!(manager.released(&ids([2, 9])).unwrap(), ids([2]), "still being read");
    let busy = manager.before_reuse(&ids([2]), Instant::now() + Duration::from_millis(5)).unwrap_err();
    assert_eq!(busy.blocks, ids([2]));
    ranks.done(0, &plan);
    assert!(manager.wait_offloads(soon()));
    manager.before_reuse(&ids([0, 1, 2, 3]), soon()).unwrap();
    assert_eq!(on_host(&manager, &tokens), 2, "what was read before the reuse, up to the block that changed");
    assert_eq!(manager.status().tiers[1].arriving, 0);
}

#[test]
fn reuse_cancels_reads_that_have_not_started() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 64);
    ranks.set_all(Mode::Hold);
    let tokens = sequence(&manager, 1, 2);
    manager.offload(&ids([4, 5]), &tokens, 0, None).unwrap();
    let plan = ranks.next_plan(0);
    assert!(manager.before_reuse(&ids([4, 5]), Instant::now()).is_err());
    assert_eq!(ranks.commands(0), [kvbm::plan::Command::Cancel { plan_id: plan.plan_id }]);
    ranks.done(0, &plan);
    manager.before_reuse(&ids([4, 5]), soon()).unwrap();
    assert_eq!(on_host(&manager, &tokens), 0, "it had started, and is discarded");
}

#[test]
fn a_block_that_is_being_written_is_neither_read_nor_written_again() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 64);
    let tokens = sequence(&manager, 1, 2);
    manager.offload(&ids([0, 1]), &tokens, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Hold);
    drop(manager.onboard(manager.match_prefix(&tokens), &ids([5, 6]), None).unwrap());
    let detached = ranks.next_plan(0);
    let again = manager.onboard(manager.match_prefix(&tokens), &ids([6, 7]), None);
    assert!(matches!(again, Err(EngineError::Busy(blocks)) if blocks == ids([6])));
    let other = sequence(&manager, 2, 1);
    assert!(
        matches!(manager.offload(&ids([5]), &other, 0, None), Err(EngineError::Busy(blocks)) if blocks == ids([5]))
    );
    ranks.done(0, &detached);
    manager.before_reuse(&ids([5, 6]), soon()).unwrap();
    let onboarding = manager.onboard(manager.match_prefix(&tokens), &ids([6, 7]), None).unwrap();
    ranks.execute(0);
    assert_eq!(onboarding.wait().unwrap(), 2);
}

#[test]
fn a_block_given_away_while_it_was_written_did_not_arrive() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 64);
    let tokens = sequence(&manager, 1, 3);
    manager.offload(&ids([0, 1, 2]), &tokens, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Hold);
    let onboarding = manager.onboard(manager.match_prefix(&tokens), &ids([5, 6, 7]), None).unwrap();
    let plan = ranks.next_plan(0);
    manager.released(&ids([6])).unwrap();
    ranks.done(0, &plan);
    let error = onboarding.wait().unwrap_err();
    assert_eq!((error.arrived, error.failures.len()), (1, 1));
    assert!(error.to_string().contains("engine block 6"), "{error}");
}

#[test]
fn invariant_8_what_an_engine_asks_for_wrongly_is_named() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 4);
    let tokens = sequence(&manager, 1, 6);
    let error = |result: Result<OffloadStarted, EngineError>| result.unwrap_err().to_string();
    assert!(
        error(manager.offload(&ids([0, 32]), &tokens, 0, None)).contains("engine block 32 does not exist")
    );
    assert!(
        error(manager.offload(&ids([3, 4, 3]), &tokens, 0, None)).contains("engine block 3 is named twice")
    );
    assert!(error(manager.offload(&ids([3, 4]), &tokens, 5, None)).contains("2 engine blocks for 1 blocks"));
    assert!(
        error(manager.offload(&ids([3]), &tokens, usize::MAX, None)).contains("1 engine blocks for 0 blocks")
    );
    assert!(
        error(manager.offload(&ids([0, 1, 2, 3, 4, 5]), &tokens, 0, None))
            .contains("G2 cannot give 6 blocks")
    );
    let reason = Refusal::MissingParent { parent: tokens.hashes()[2] };
    let refused = vec![RefusedBlock { block: BlockId(3), reason }];
    let orphan = OffloadStarted { refused, ..OffloadStarted::default() };
    assert_eq!(manager.offload(&ids([3]), &tokens, 3, None).unwrap(), orphan, "its parent is not there");
    assert_eq!(manager.offload(&[], &tokens, 0, None).unwrap(), OffloadStarted::default());
    manager.offload(&ids([0, 1]), &tokens, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    let prefix = || manager.match_prefix(&tokens);
    assert!(matches!(
        manager.onboard(prefix(), &ids([1]), None),
        Err(EngineError::Count { ids: 1, blocks: 2 })
    ));
    assert!(matches!(
        manager.onboard(prefix(), &ids([1, 1]), None),
        Err(EngineError::NamedTwice(BlockId(1)))
    ));
    assert!(matches!(manager.onboard(prefix(), &ids([1, 99]), None), Err(EngineError::NoSuchBlock(_))));
    let other = Ranks::new(1).engine_manager(G1, 4);
    assert!(matches!(other.onboard(prefix(), &ids([1, 2]), None), Err(EngineError::ForeignPrefix)));
    assert!(manager.released(&ids([99])).is_err());
    assert!(manager.clear(Tier::G1).unwrap_err().to_string().contains("the engine owns its blocks"));
    let slots = manager.status().tiers[1];
    assert_eq!((slots.active, slots.arriving), (0, 0), "no pin is left behind");
}

#[test]
fn a_worker_that_calls_the_engine_s_own_block_corrupt_does_no_harm() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 64);
    ranks.set_all(Mode::Hold);
    let tokens = sequence(&manager, 1, 2);
    manager.offload(&ids([30, 31]), &tokens, 0, None).unwrap();
    ranks.fail(0, &ranks.next_plan(0), 0, FailureKind::Corrupt);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on_host(&manager, &tokens), 0);
    assert_eq!(manager.metrics().path(Path::G1_G2).failures(FailureKind::Corrupt).get(), 1);
}

#[test]
fn invariant_7_engine_memory_of_another_shape_is_refused_when_the_manager_is_built() {
    let other = ModelConfig { num_layers: 3, ..model() };
    let (_memory, device, bound) = tensors(&layer_separate(&other, G1));
    let error = manager((device, bound), 64).err().expect("three layers are not two").to_string();
    assert!(error.contains("layers"), "{error}");

    let no_host = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace()).engine_blocks(G1);
    assert!(no_host.build_metadata_only().is_err(), "nowhere to copy to");

    let (_memory, device, bound) = tensors(&layer_separate(&model(), G1));
    let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
    let error = builder.engine_device(vec![(device, bound)]).tensor_parallel(2).build();
    let error = error.err().expect("one memory for two ranks").to_string();
    assert_eq!(error, "1 engine memories for 2 ranks: give one for each rank, in order");
}
