//! Models with several cache groups: a request sees all groups or none, on every tier.
#![cfg(feature = "worker")]
#![allow(clippy::unwrap_used)] // In a test a panic is the report.
#![allow(clippy::single_range_in_vec_init)] // One range is what is expected.

mod park;
#[path = "../support/mod.rs"]
mod support;
mod volumes;

use crate::support::{
    GROUPS, compute_in, compute_range, heads, holds_in, host, model_of, namespace, serve, slot_file, soon,
    unlimited,
};
use kvbm::config::{Blocks, Config, HostOrder, LayoutKind};
use kvbm::layout::{
    AxisOrder, BlockLayout, DType, FullyContiguous, LayerSeparate, LayoutConfig, OpaquePlane, OuterPlacement,
};
use kvbm::storage::BoundLayout;
use kvbm::{BlockId, GroupBlocks, GroupId, KvBlockManager, Owned, Path, Tier, TierMask, TokenSequence};
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

const WINDOW: GroupId = GroupId(0);
const FULL: GroupId = GroupId(1);
const STATE: GroupId = GroupId(2);
const BLOCKS: usize = 6;

fn open([g1, g2, g3]: [u32; 3], disk: Option<&FilePath>, ranks: u32) -> KvBlockManager<Owned> {
    open_with([g1, g2, g3], disk, ranks, |_| {})
}

fn open_with(
    [g1, g2, g3]: [u32; 3],
    disk: Option<&FilePath>,
    ranks: u32,
    configure: impl FnOnce(&mut Config),
) -> KvBlockManager<Owned> {
    let builder = KvBlockManager::<Owned>::builder()
        .model(model_of(GROUPS))
        .namespace(namespace())
        .device(Blocks(g1))
        .host(Blocks(g2))
        .tensor_parallel(ranks);
    let builder = match disk {
        Some(dir) => builder.disk(dir, Blocks(g3)),
        None => builder,
    };
    let configured = builder.configure(|config| {
        unlimited(config);
        config.device.layout = LayoutKind::FullyContiguous;
        config.offload.g1_g2.queue_share = 1.0;
        config.offload.g2_g3.write_through = true;
        configure(config);
    });
    configured.build().unwrap()
}

fn tokens(manager: &KvBlockManager<Owned>, blocks: usize) -> TokenSequence {
    let prompt: Vec<u32> = (0..16 * blocks as u32).collect();
    manager.sequence(&prompt, b"").unwrap()
}

/// Every byte of every group is what was computed for it.
fn check(manager: &KvBlockManager<Owned>, found: &GroupBlocks, tokens: &TokenSequence) {
    for (group, part) in (0_u16..).map(GroupId).zip(&found.parts) {
        let end = part.start + part.blocks.len();
        assert!(end == found.len || found.len == 0, "group {group}");
        for (&block, &hash) in part.blocks.block_ids().iter().zip(&tokens.hashes()[part.start..end]) {
            assert!(holds_in(manager, group, block, hash), "group {group}, block {block}");
        }
    }
}

/// Computes and registers what a group keeps of a request from block `from` on.
fn compute(manager: &KvBlockManager<Owned>, group: GroupId, tokens: &TokenSequence, from: usize) {
    for range in manager.kept_blocks(group, tokens.num_blocks()) {
        compute_range(manager, group, tokens, range.start.max(from)..range.end);
    }
}

fn arrived(manager: &KvBlockManager<Owned>, tokens: &TokenSequence) -> usize {
    let found = manager.onboard_groups(manager.match_groups(tokens)).wait().unwrap();
    check(manager, &found, tokens);
    found.len
}

#[test]
fn all_groups_come_back_from_every_tier_and_after_a_restart() {
    for ranks in [1, 2] {
        let disk = tempfile::tempdir().unwrap();
        let manager = open([64, 64, 64], Some(disk.path()), ranks);
        let request = tokens(&manager, BLOCKS);
        assert_eq!(serve(&manager, &request), 0);
        assert!(manager.wait_offloads(soon()));
        assert_eq!(arrived(&manager, &request), BLOCKS, "from G1");
        manager.clear(Tier::G1).unwrap();
        assert_eq!(arrived(&manager, &request), BLOCKS, "from G2");
        let blocks = (2 + BLOCKS + 1) as u64;
        assert_eq!(manager.metrics().path(Path::G2_G1).blocks.get(), blocks);
        for tier in [Tier::G1, Tier::G2] {
            manager.clear(tier).unwrap();
        }
        assert_eq!(arrived(&manager, &request), BLOCKS, "from G3");
        assert_eq!(manager.metrics().path(Path::G3_G1).blocks.get(), blocks);
        let report = manager.shutdown(Duration::from_secs(30));
        assert!(report.is_complete(), "{report:?}");
        drop(manager);

        let manager = open([64, 64, 64], Some(disk.path()), ranks);
        assert_eq!(arrived(&manager, &request), BLOCKS, "after a restart");
        assert_eq!(serve(&manager, &tokens(&manager, BLOCKS + 3)), BLOCKS, "goes on");
        assert_eq!(arrived(&manager, &tokens(&manager, BLOCKS + 3)), BLOCKS + 3);
    }
}

/// Fills the disk and ends without a shutdown.
fn flushed(disk: &FilePath, ranks: u32) {
    let manager = open([64, 64, 64], Some(disk), ranks);
    serve(&manager, &tokens(&manager, BLOCKS));
    assert!(manager.wait_offloads(soon()));
    manager.flush(Duration::from_secs(30)).unwrap();
}

#[test]
fn damage_to_a_block_of_one_group_is_a_miss_for_all() {
    for slot in 0..=2 + BLOCKS {
        let disk = tempfile::tempdir().unwrap();
        flushed(disk.path(), 1);
        let file = slot_file(disk.path());
        let mut bytes = std::fs::read(&file).unwrap();
        // The longest block: 3 layers of keys and values of 16 tokens, 2 heads, 8 elements.
        let slot_bytes = 3 * 2 * 16 * 2 * 8 * 2_usize;
        bytes[slot * slot_bytes.next_multiple_of(4096) + 7] ^= 1;
        std::fs::write(&file, bytes).unwrap();
        let manager = open([64, 64, 64], Some(disk.path()), 1);
        let request = tokens(&manager, BLOCKS);
        let error = manager.onboard_groups(manager.match_groups(&request)).wait().unwrap_err();
        check(&manager, &error.arrived, &request);
        assert!(error.arrived.len < BLOCKS && !error.failures.is_empty(), "slot {slot}: {error}");
        assert_eq!(serve(&manager, &request), 0, "what a window or state needs is at the end alone");
        assert_eq!(arrived(&manager, &request), BLOCKS, "computed again");
    }
}

#[test]
fn another_number_of_ranks_leaves_the_blocks_where_they_are_and_says_so() {
    let disk = tempfile::tempdir().unwrap();
    flushed(disk.path(), 1);
    let manager = open([64, 64, 64], Some(disk.path()), 2);
    let request = tokens(&manager, BLOCKS);
    let [past] = manager.workers().took_over() else { panic!("one deployment before") };
    assert_eq!((past.ranks, past.blocks, past.left_behind), (1, 0, 9));
    let why = past.refused.as_deref().unwrap_or_default();
    assert!(why.contains("model.groups") && why.contains("1 ranks"), "{why}");
    assert_eq!(manager.match_groups(&request).len(), 0);
    drop(manager);
    let manager = open([64, 64, 64], Some(disk.path()), 1);
    assert_eq!(arrived(&manager, &request), BLOCKS);
}

/// Blocks lie on the disk as they do in host memory: in another order they would be other KV.
#[test]
fn a_disk_of_another_order_of_axes_is_refused() {
    let disk = tempfile::tempdir().unwrap();
    let build = |order: HostOrder| {
        heads::on_disk(model_of(heads::GROUPS), disk.path(), 1)
            .configure(|config| config.host.order = order)
            .build()
    };
    let manager = build(HostOrder::Nhd).unwrap();
    heads::serve(&manager, &tokens(&manager, BLOCKS));
    drop(manager);
    let error = build(HostOrder::Universal).err().unwrap().to_string();
    assert!(error.contains("geometry") && error.contains("axes=universal"), "{error}");
}

#[test]
fn what_does_not_fit_several_groups_is_refused_by_name() {
    let refused = |change: &dyn Fn(&mut Config)| {
        let mut config = Config::default();
        config.set("model.groups", GROUPS).unwrap();
        config.namespace.model = "m".into();
        config.device.layout = LayoutKind::FullyContiguous;
        config.validate().unwrap();
        change(&mut config);
        config.validate().unwrap_err().to_string()
    };
    let set =
        |key: &'static str, value: &'static str| move |config: &mut Config| config.set(key, value).unwrap();
    for (key, value, named) in [
        ("model.num_layers", "3", "model.num_layers"),
        ("device.layout", "layer-separate", "device.layout"),
        ("parallelism.tensor_parallel", "3", "parallelism.tensor_parallel"),
        ("model.groups", "state layers=2 bytes=8", "a group that keeps tokens"),
        ("model.groups", "window=0 layers=2 heads=2 head_dim=8", "window from 1"),
        ("model.groups", "full layers=0 heads=2 head_dim=8", "layers from 1"),
        ("model.groups", "full layers=1 heads=2 head_dim=8 outer=3", "outer from 1 to 2"),
    ] {
        let error = refused(&set(key, value));
        assert!(error.contains(named), "{key} = {value}: {error}");
    }
}

#[test]
fn a_prefix_ends_where_every_group_can_serve_it() {
    let manager = open([64, 64, 0], None, 1);
    let request = tokens(&manager, BLOCKS);
    let found = || manager.match_groups(&request).len();
    compute(&manager, FULL, &request, 0);
    compute(&manager, WINDOW, &request, 0);
    assert_eq!(found(), 0, "no state");
    assert!(manager.match_prefix(&request).is_empty());
    let short = tokens(&manager, 4);
    compute(&manager, STATE, &short, 0);
    assert_eq!(found(), 0, "a state at block 4, and the window of block 4 was not kept");
    compute(&manager, WINDOW, &short, 0);
    assert_eq!(found(), 4);
    compute(&manager, STATE, &request, 0);
    assert_eq!(found(), BLOCKS);
    let parts = manager.match_groups(&request).into_parts();
    let listed: Vec<_> = parts.iter().map(|part| (part.start(), part.blocks().len())).collect();
    assert_eq!(listed, [(4, 2), (0, 6), (5, 1)]);
    assert_eq!(manager.match_prefix(&request).start(), 4, "the first group's part");
}

#[test]
fn checkpoints_are_kept_where_the_policy_says_so() {
    let manager = open_with([64, 64, 0], None, 1, |config| config.policy.checkpoint_every = 3);
    assert_eq!(manager.kept_blocks(FULL, 8), vec![0..8]);
    assert_eq!(manager.kept_blocks(WINDOW, 8), vec![1..3, 4..8]);
    assert_eq!(manager.kept_blocks(STATE, 8), vec![2..3, 5..6, 7..8]);
    assert!(manager.kept_blocks(STATE, 0).is_empty());
    assert!(manager.kept_blocks(GroupId(3), 8).is_empty(), "no such group");
    serve(&manager, &tokens(&manager, 8));
    for (blocks, found) in [(2, 0), (3, 3), (5, 3), (6, 6), (7, 6), (8, 8)] {
        assert_eq!(manager.match_groups(&tokens(&manager, blocks)).len(), found, "of {blocks}");
    }
}

#[test]
fn what_one_group_lost_is_lost_for_all() {
    let manager = open([16, 64, 0], None, 1);
    let request = tokens(&manager, BLOCKS);
    serve(&manager, &request);
    assert!(manager.wait_offloads(soon()));
    manager.clear(Tier::G1).unwrap();
    let prefix = manager.match_groups(&request);
    // The window and full attention fit beside this, the state does not.
    let held = manager.allocate(16 - 2 - BLOCKS).unwrap();
    let error = manager.onboard_groups(prefix).wait().unwrap_err();
    assert_eq!((error.arrived.len, error.wanted), (0, BLOCKS));
    assert!(error.refused.is_some(), "{error}");
    drop((held, error));
    assert_eq!(arrived(&manager, &request), BLOCKS);
}

#[test]
fn private_blocks_of_each_group_are_parked_and_resumed() {
    let manager = open([16, 16, 0], None, 1);
    let request = tokens(&manager, 3);
    for group in [WINDOW, FULL, STATE] {
        let fresh = manager.allocate(2).unwrap();
        for (&block, &hash) in fresh.block_ids().iter().zip(&request.hashes()[1..]) {
            compute_in(&manager, group, block, hash);
        }
        let namespace = kvbm::plan::NamespaceId::from(kvbm::BlockChain::from(&request).namespace());
        let blocks = fresh.init_sequence(namespace, group, 1).unwrap();
        let parked = manager.park(blocks).unwrap();
        assert_eq!(parked.origin().group, group);
        let held = manager.allocate(1).unwrap();
        let blocks = manager.resume(parked).unwrap();
        drop(held);
        for (&block, &hash) in blocks.block_ids().iter().zip(&request.hashes()[1..]) {
            assert!(holds_in(&manager, group, block, hash), "group {group}");
        }
    }
}

#[test]
fn events_name_the_group_and_its_bytes_and_forget_takes_all() {
    let manager = open([64, 64, 0], None, 2);
    let request = tokens(&manager, BLOCKS);
    serve(&manager, &request);
    assert!(manager.wait_offloads(soon()));
    let held = manager.events().snapshot().blocks;
    let bytes = manager.config().group_block_bytes();
    for (group, count) in [(WINDOW, 2), (FULL, BLOCKS), (STATE, 1)] {
        let ours = held.iter().filter(|block| block.identity.group == group);
        let ours: Vec<_> = ours.filter(|block| block.location.tier == Tier::G2).collect();
        assert_eq!(ours.len(), count, "group {group}");
        let wanted = 2 * bytes[usize::from(group.0)];
        assert!(ours.iter().all(|block| block.block_bytes == wanted), "group {group}: {wanted}");
    }
    assert_eq!(manager.pin(&request, TierMask::only(Tier::G1), 9).unwrap(), 9);
    assert_eq!(manager.unpin(&request, TierMask::only(Tier::G1)), 9);
    assert_eq!(manager.forget(manager.namespace()), 18);
    assert_eq!(manager.match_groups(&request).len(), 0);
}

/// The engine's tensors of a group: those of a window layer by layer, a state for each block.
fn engine_tensors(group: GroupId) -> BoundLayout {
    let shape = LayoutConfig::builder().num_blocks(32).page_size(16);
    let kv = |layers| shape.clone().num_layers(layers).inner_dim(16).num_heads(2).dtype(DType::BF16);
    let layout: Arc<dyn BlockLayout> = match group {
        STATE => {
            let state = OpaquePlane::new("state", 1001);
            let shape = shape.clone().num_layers(1).outer_dim(0).inner_dim(1).dtype(DType::U8).plane(state);
            Arc::new(FullyContiguous::new(shape.build().unwrap(), AxisOrder::Nhd).unwrap())
        }
        group => {
            let shape = kv(if group == WINDOW { 2 } else { 3 }).build().unwrap();
            Arc::new(LayerSeparate::new(shape, AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap())
        }
    };
    host::host_tensors(layout)
}

#[test]
fn an_engine_offloads_and_onboards_each_group() {
    let mut text = Config::default();
    text.set("model.groups", GROUPS).unwrap();
    let disk = tempfile::tempdir().unwrap();
    let manager = KvBlockManager::<Owned>::builder()
        .model(text.model)
        .namespace(namespace())
        .engine_groups(vec![(None, [WINDOW, FULL, STATE].map(engine_tensors).to_vec())])
        .host(Blocks(64))
        .disk(disk.path(), Blocks(64))
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
        })
        .build()
        .unwrap();
    let prompt: Vec<u32> = (0..16 * BLOCKS as u32).collect();
    let request = manager.sequence(&prompt, b"").unwrap();
    let mut next = 0;
    for group in [WINDOW, FULL, STATE] {
        let [range] = &manager.kept_blocks(group, BLOCKS)[..] else { panic!("one range") };
        let ids: Vec<_> = (0..range.len() as u32).map(|at| BlockId(next + at)).collect();
        next += ids.len() as u32;
        for (&id, &hash) in ids.iter().zip(&request.hashes()[range.clone()]) {
            compute_in(&manager, group, id, hash);
        }
        let started = manager.offload_group(group, &ids, &request, range.start, None).unwrap();
        assert_eq!((started.started, started.refused.len()), (range.len(), 0), "group {group}");
    }
    assert!(manager.wait_offloads(soon()));
    for from in [Tier::G2, Tier::G3] {
        let prefix = manager.match_groups(&request);
        assert_eq!(prefix.len(), BLOCKS, "from {from}");
        let mut next = 16;
        for part in prefix.into_parts() {
            let (group, start) = (part.group(), part.start());
            let ids: Vec<_> = (0..part.blocks().len() as u32).map(|at| BlockId(next + at)).collect();
            next += ids.len() as u32;
            manager.onboard(part, &ids, None).unwrap().wait().unwrap();
            for (&id, &hash) in ids.iter().zip(&request.hashes()[start..]) {
                assert!(holds_in(&manager, group, id, hash), "group {group} from {from}");
            }
        }
        assert!(manager.wait_offloads(soon()));
        manager.clear(Tier::G2).unwrap();
    }
}
