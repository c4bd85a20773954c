//! Models with several cache groups, tensors without axes, states and scales: what a peer has of
//! them is found as far as every group can serve it, moved rank by rank where nobody can divide it
//! anew, and refused where both sides are divided in another way.

use crate::support::{
    GROUPS, compute_range, heads, holds_in, host, kept, model_of, namespace, serve, soon, tokens, unlimited,
};
use crate::world::{Node, World, enable, eventually, meet};
use kvbm::config::{Blocks, Config, LayoutKind, ModelConfig};
use kvbm::layout::{OpaqueLayout, OpaqueTensor};
use kvbm::plan::NodeId;
use kvbm::remote_memory::{AgentFault, RemoteAgent};
use kvbm::{
    BlockId, Engine, FailureKind, GroupId, KvBlockManager, LoadOptions, LookUp, Owned, Pushed, Tier,
    TokenSequence,
};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const WINDOW: GroupId = GroupId(0);
const FULL: GroupId = GroupId(1);
const STATE: GroupId = GroupId(2);
/// As vLLM lays them out: bytes without axes.
const OPAQUE_GROUPS: &str = "window=31 layers=2 rank_bytes=512, full layers=2 rank_bytes=512, \
                             state layers=1 rank_bytes=301";
const BLOCKS: u32 = 6;

fn node(world: &World, id: u32, model: &ModelConfig, ranks: u32) -> Node {
    node_with(world, id, model, ranks, |_| {})
}

fn node_with(
    world: &World,
    id: u32,
    model: &ModelConfig,
    ranks: u32,
    configure: impl FnOnce(&mut Config),
) -> Node {
    world.node(id, [64, 64], |config| {
        config.model = model.clone();
        config.parallelism.tensor_parallel = ranks;
        if !model.groups.as_slice().is_empty() {
            config.device.layout = LayoutKind::FullyContiguous;
        }
        config.remote.read_deadline = Duration::from_secs(2);
        configure(config);
    })
}

/// Two nodes that know each other, with so many ranks each.
fn nodes(world: &World, model: &ModelConfig, ranks: [u32; 2]) -> [Node; 2] {
    let nodes = [(1, ranks[0]), (2, ranks[1])].map(|(id, ranks)| node(world, id, model, ranks));
    meet(&[&nodes[0].manager, &nodes[1].manager]);
    nodes
}

fn request(node: &Node, blocks: u32) -> TokenSequence {
    tokens(&node.manager, 1, blocks)
}

/// Computes what a request of so many blocks keeps.
fn put(node: &Node, blocks: u32) {
    serve(&node.manager, &request(node, blocks));
    assert!(node.manager.wait_offloads(soon()));
}

/// Mutation that makes it fail: all ranks of a model without axes are said to hold one part.
#[test]
fn blocks_that_nobody_can_divide_anew_move_rank_by_rank() {
    let opaque = ModelConfig::opaque(16, [4096, 701]);
    for (model, ranks) in [
        (opaque.clone(), 1),
        (opaque, 2),
        (model_of("full layers=2 rank_bytes=4096"), 2),
        (model_of("full layers=2 heads=4 head_dim=8 dtype=fp8_e4m3 scales=head"), 2),
        (model_of("full layers=2 heads=2 head_dim=8 dtype=fp8_e4m3 scales=token:f16"), 4),
        (model_of(GROUPS), 1),
        (model_of(GROUPS), 2),
        (model_of(OPAQUE_GROUPS), 2),
        (model_of("window=32 layers=2 heads=2 head_dim=8"), 2),
        (model_of("state layers=2 bytes=300, full layers=1 heads=2 head_dim=8 scales=block"), 2),
    ] {
        let world = World::new();
        let [a, b] = nodes(&world, &model, [ranks, ranks]);
        put(&a, BLOCKS);
        let what = format!("{} over {ranks} ranks", model.groups);
        assert_eq!(serve(&b.manager, &request(&b, BLOCKS)), BLOCKS as usize, "{what}: bytes are compared");
        let peer = b.manager.metrics().peer(NodeId(1));
        let blocks = kept(&model, BLOCKS as usize) as u64;
        assert_eq!((peer.blocks.get(), peer.failed.get()), (blocks, 0), "{what}: what each group needs");
        eventually("no lease is left", || a.manager.metrics().remote.leases_held.get() == 0);
    }
}

#[test]
fn groups_that_keep_tokens_are_divided_anew() {
    let model = model_of(heads::GROUPS);
    for ranks in [[1, 2], [2, 1], [4, 2], [2, 4]] {
        let world = World::new();
        let [a, b] = nodes(&world, &model, ranks);
        assert_eq!(heads::serve(&a.manager, &request(&a, BLOCKS)), 0);
        let found = heads::serve(&b.manager, &request(&b, BLOCKS));
        assert_eq!(found, BLOCKS as usize, "{ranks:?}: every byte is compared");
        // And back, by a push of more.
        assert_eq!(heads::serve(&b.manager, &request(&b, BLOCKS + 2)), found);
        a.manager.clear(Tier::G1).unwrap();
        let pushed = b.manager.push(NodeId(1), &request(&b, BLOCKS + 2), soon());
        assert!(pushed.failure.is_none() && pushed.written > 0, "{pushed:?}");
        drop(b);
        assert_eq!(heads::serve(&a.manager, &request(&a, BLOCKS + 2)), found + 2);
    }
}

/// Mutation that makes it fail: `check_whole` allows everything.
#[test]
fn another_division_of_what_has_no_axes_is_refused_by_name() {
    let scaled = "full layers=2 heads=4 head_dim=8 dtype=fp8_e4m3 scales=head";
    for model in
        [ModelConfig::opaque(16, [4096]), model_of(OPAQUE_GROUPS), model_of(GROUPS), model_of(scaled)]
    {
        let world = World::new();
        let [a, b] = nodes(&world, &model, [2, 1]);
        put(&a, BLOCKS);
        assert_eq!(b.manager.match_groups(&request(&b, BLOCKS)).len(), 0, "{}", model.groups);
        let [peer] = &b.manager.peers()[..] else { panic!("one peer") };
        let why = peer.failure.clone().unwrap();
        assert!(why.contains("among 2 ranks at the peer and among 1 here"), "{why}");
        let pushed = a.manager.push(NodeId(2), &request(&a, BLOCKS), soon());
        let Pushed { written: 0, failure: Some(failure) } = pushed else { panic!("{pushed:?}") };
        assert_eq!(failure.kind, FailureKind::Unsupported);
        assert!(failure.detail.contains("among 1 ranks at the peer and among 2 here"), "{failure}");
        // Both go on by themselves.
        assert_eq!(serve(&b.manager, &request(&b, BLOCKS)), 0);
        assert_eq!(serve(&a.manager, &request(&a, BLOCKS)), BLOCKS as usize);
        assert_eq!(b.manager.metrics().peer(NodeId(1)).errors.get(), 0, "nothing was asked of it");
    }
    // Tensors of other sizes are another namespace: such nodes have nothing in common.
    let world = World::new();
    let a = node(&world, 1, &ModelConfig::opaque(16, [4096]), 1);
    let b = node(&world, 2, &ModelConfig::opaque(16, [4095]), 1);
    meet(&[&a.manager, &b.manager]);
    put(&a, BLOCKS);
    assert_eq!(b.manager.match_groups(&request(&b, BLOCKS)).len(), 0);
}

#[test]
fn each_group_takes_from_a_peer_what_it_lacks_here() {
    let world = World::new();
    let [a, b] = nodes(&world, &model_of(GROUPS), [1, 1]);
    put(&a, BLOCKS);
    let ours = request(&b, BLOCKS);
    compute_range(&b.manager, FULL, &ours, 0..BLOCKS as usize);
    assert!(b.manager.wait_offloads(soon()));
    let prefix = b.manager.match_groups(&ours);
    let nodes: Vec<_> = prefix.parts().iter().map(|part| (part.start(), part.len(), part.node())).collect();
    assert_eq!(nodes, [(4, 6, Some(NodeId(1))), (0, 6, None), (5, 6, Some(NodeId(1)))]);
    drop(prefix);
    assert_eq!(serve(&b.manager, &ours), BLOCKS as usize);
    assert_eq!(b.manager.metrics().peer(NodeId(1)).blocks.get(), 3, "two of the window and the state");
}

/// The peer never had the first blocks of the window, or has evicted them.
#[test]
fn a_prefix_ends_where_the_peer_can_serve_every_group() {
    let world = World::new();
    let [a, b] = nodes(&world, &model_of(GROUPS), [1, 1]);
    let all = request(&a, BLOCKS);
    compute_range(&a.manager, FULL, &all, 0..BLOCKS as usize);
    compute_range(&a.manager, WINDOW, &all, 2..BLOCKS as usize);
    compute_range(&a.manager, STATE, &all, 3..4);
    assert!(a.manager.wait_offloads(soon()));
    let found = |blocks| b.manager.match_groups(&request(&b, blocks)).len();
    assert_eq!([found(6), found(5), found(4), found(3)], [4, 4, 4, 0], "one state, after block 3");
    assert_eq!(serve(&b.manager, &request(&b, BLOCKS)), 4);
    assert_eq!(b.manager.metrics().peer(NodeId(1)).blocks.get(), 2 + 4 + 1);
}

#[test]
fn a_window_alone_needs_no_first_blocks_of_a_peer() {
    let world = World::new();
    let [a, b] = nodes(&world, &model_of("window=32 layers=2 heads=2 head_dim=8"), [1, 1]);
    compute_range(&a.manager, WINDOW, &request(&a, BLOCKS), 3..BLOCKS as usize);
    assert!(a.manager.wait_offloads(soon()));
    assert_eq!(serve(&b.manager, &request(&b, BLOCKS)), BLOCKS as usize, "every byte is compared");
    assert_eq!(b.manager.metrics().peer(NodeId(1)).blocks.get(), 2);
}

#[test]
fn a_peer_that_dies_in_mid_read_is_a_miss_for_all_groups_in_time() {
    let world = World::new();
    let [a, b] = nodes(&world, &model_of(GROUPS), [1, 1]);
    put(&a, BLOCKS);
    let release = Arc::new(AtomicBool::new(false));
    a.agent.inner.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));
    let began = Instant::now();
    let error = b.manager.onboard_groups(b.manager.match_groups(&request(&b, BLOCKS))).wait().unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(20), "its deadline is 2 s: {:?}", began.elapsed());
    assert_eq!((error.arrived.len, error.wanted), (0, BLOCKS as usize), "{error}");
    assert!(!error.failures.is_empty());
    for group in [WINDOW, FULL, STATE] {
        let places = b.manager.places_of(group, &request(&b, BLOCKS));
        assert!(places.iter().all(|place| place.nearest().is_none()), "nothing of group {group} is here");
    }
    // Its hardware is done at last, and it is gone.
    release.store(true, Ordering::Release);
    a.agent.inner.set_fault(None);
    eventually("no lease is left", || a.manager.metrics().remote.leases_held.get() == 0);
    drop(a);
    eventually("it is gone", || b.manager.peers().is_empty());
    assert_eq!(serve(&b.manager, &request(&b, BLOCKS)), 0, "computed");
    assert_eq!(serve(&b.manager, &request(&b, BLOCKS)), BLOCKS as usize);
}

/// Mutation that makes it fail: an owner does not verify what it gives.
#[test]
fn wrong_bytes_of_one_group_are_a_miss_for_all() {
    for group in [WINDOW, FULL, STATE] {
        let world = World::new();
        let [a, b] = nodes(&world, &model_of(GROUPS), [1, 1]);
        put(&a, BLOCKS);
        a.manager.clear(Tier::G1).unwrap();
        let prefix = a.manager.match_groups(&request(&a, BLOCKS));
        let slot = prefix.parts()[usize::from(group.0)].blocks()[0].block;
        drop(prefix);
        let g2 = a.manager.workers().get(kvbm::Rank(0)).unwrap().g2().unwrap().clone();
        let mut bytes = vec![0; g2.bytes_per_block() as usize];
        // SAFETY: no transfer uses the slot, which holds a block of any group.
        unsafe { g2.read_block(slot.0, &mut bytes) }.unwrap();
        bytes[123] ^= 1;
        // SAFETY: as above.
        unsafe { g2.write_block(slot.0, &bytes) }.unwrap();
        let prefix = b.manager.match_groups(&request(&b, BLOCKS));
        assert_eq!(prefix.len(), BLOCKS as usize, "nobody knows yet");
        let error = b.manager.onboard_groups(prefix).wait().unwrap_err();
        assert_eq!(error.arrived.len, 0, "group {group}: {error}");
        drop(a);
        eventually("it is gone", || b.manager.peers().is_empty());
        assert_eq!(serve(&b.manager, &request(&b, BLOCKS)), 0, "computed");
    }
}

#[test]
fn a_push_sends_all_groups() {
    for (model, ranks) in [(GROUPS, 2), (OPAQUE_GROUPS, 1)] {
        let world = World::new();
        let model = model_of(model);
        let [prefill, decode] = nodes(&world, &model, [ranks, ranks]);
        let sequence = request(&prefill, BLOCKS);
        let missing = prefill.manager.push(NodeId(2), &sequence, soon());
        assert_eq!(missing.failure.map(|failure| failure.kind), Some(FailureKind::Missing));
        put(&prefill, BLOCKS);
        let blocks = kept(&model, BLOCKS as usize);
        let whole = |written| Pushed { written, failure: None };
        assert_eq!(prefill.manager.push(NodeId(2), &sequence, soon()), whole(blocks));
        assert_eq!(prefill.manager.push(NodeId(2), &sequence, soon()), whole(0), "it has all");
        eventually("the grants end", || decode.manager.metrics().remote.slots_granted.get() == 0);
        assert_eq!(decode.manager.metrics().remote.received.get(), blocks as u64);
        drop(prefill);
        eventually("the writer is gone", || decode.manager.peers().is_empty());
        assert_eq!(serve(&decode.manager, &request(&decode, BLOCKS)), BLOCKS as usize, "bytes are compared");
    }
}

/// An engine that owns G1: tensors without axes.
fn engine(world: &World, id: u32) -> KvBlockManager<Engine> {
    let memory = |block_bytes: &[u32]| {
        let tensor = |(region, &block_bytes): (u32, &u32)| OpaqueTensor {
            region,
            offset: 0,
            block_stride: 512,
            block_bytes,
        };
        let tensors: Vec<_> = (0..).zip(block_bytes).map(tensor).collect();
        host::host_tensors(Arc::new(OpaqueLayout::new(48, tensors).unwrap()))
    };
    let memory = [&[512, 512][..], &[512, 512], &[301]].map(memory).to_vec();
    let agent = world.agent(&format!("engine-{id}")) as Arc<dyn RemoteAgent>;
    let folder = world.folder.path().join("peers");
    KvBlockManager::<Owned>::builder()
        .model(model_of(OPAQUE_GROUPS))
        .namespace(namespace())
        .engine_groups(vec![(None, memory)])
        .host(Blocks(64))
        .remote_agent(agent)
        .configure(|config| {
            unlimited(config);
            enable(config, id, &folder);
        })
        .build()
        .unwrap()
}

#[test]
fn a_ticket_of_several_groups_is_served_by_a_peer() {
    // The engine lacks all blocks, or has a part of the window, too.
    for first in [0, 5] {
        ticket_of_several_groups_from_a_peer(first);
    }
}

fn ticket_of_several_groups_from_a_peer(first: usize) {
    let world = World::new();
    let a = node(&world, 1, &model_of(OPAQUE_GROUPS), 1);
    let b = engine(&world, 2);
    eventually("they meet", || a.manager.peers().len() == 1 && b.peers().len() == 1);
    put(&a, BLOCKS);
    let prompt: Vec<u32> = (0..(BLOCKS + 2) * 16).map(|token| token + 1_000_000).collect();
    let sequence = b.sequence(&prompt, b"").unwrap();
    let tickets = b.tickets();
    let answer = || tickets.look_up("r", &sequence, first).unwrap();
    eventually("an answer", || answer() != LookUp::Pending);
    assert_eq!(answer(), LookUp::Ready { blocks: 6 - first, by_tier: [0, 0, 0, 6 - first] });
    let promised = tickets.promised("r");
    assert_eq!(promised, [4.max(first)..6, first..6, 5..6]);
    let mut id = 0;
    let mut block_ids = |range: &Range<usize>| -> Vec<BlockId> {
        range
            .clone()
            .map(|_| {
                id += 3;
                BlockId(id)
            })
            .collect()
    };
    let ids: Vec<Vec<BlockId>> = promised.iter().map(&mut block_ids).collect();
    let given: Vec<&[BlockId]> = ids.iter().map(Vec::as_slice).collect();
    tickets.commit_groups("r", &given, LoadOptions::default()).unwrap();
    let mut finished = Vec::new();
    eventually("the load ends", || {
        finished.extend(tickets.finished());
        !finished.is_empty()
    });
    assert_eq!((finished[0].arrived, finished[0].wanted), (6 - first, 6 - first), "{finished:?}");
    for (group, (ids, range)) in (0..).map(GroupId).zip(ids.iter().zip(promised)) {
        for (&id, &hash) in ids.iter().zip(&sequence.hashes()[range]) {
            assert!(holds_in(&b, group, id, hash), "group {group}, block {id}");
        }
    }
}
