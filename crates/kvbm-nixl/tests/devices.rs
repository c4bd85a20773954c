//! Blocks in device memory, read and written by peers: G1 to G2, G2 to G1, G1 to G1.

#[path = "support/devices.rs"]
mod device_ranks;
mod support;

use std::sync::Arc;

use kvbm_device::{Device, EmulatedConfig, EmulatedDevice, Fault, FaultRule};
use kvbm_nixl::{
    AgentError, DeviceAccess, Export, InProcessAgent, InProcessNetwork, LocalRank, NixlEnabledStorage,
    NodeOptions, RemoteAgent, RemoteError, RemoteNode,
};
use kvbm_plan::{Epoch, GroupId, NamespaceTag, NodeId};
use kvbm_storage::{DeviceStorage, Storage};

use device_ranks::on_device;
use support::{BLOCKS, content, fill, hash, hashes, nothing, ranks, soon};

const HEADS: u32 = 8;
const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([7; 16]);
const GROUP: GroupId = GroupId(0);

/// A node whose ranks lie on a device, or in host memory.
struct Side {
    node: RemoteNode,
    ranks: Vec<LocalRank>,
    export: Export,
    /// Memory of the ranks on the device.
    memory: Vec<Arc<DeviceStorage>>,
    device: Arc<EmulatedDevice>,
}

fn side(network: &InProcessNetwork, id: u32, host: Vec<LocalRank>, is_on_device: bool) -> Side {
    let agent = Arc::new(network.agent(&format!("node-{id}")).expect("a name"));
    let device = Arc::new(EmulatedDevice::new(EmulatedConfig::default()).expect("a device"));
    let (mut ranks, mut memory) = (host, Vec::new());
    if is_on_device {
        let access = Arc::new(DeviceAccess::new(Arc::clone(&device) as Arc<dyn Device>).expect("a stream"));
        agent.reach_device(&access);
        let moved = ranks.iter().map(|rank| on_device(rank, &*device, &access));
        let (on_device, parts): (_, Vec<_>) = moved.unzip();
        (ranks, memory) = (on_device, parts.into_iter().flatten().collect());
    }
    let options = NodeOptions::new(NodeId(id), Epoch(1));
    let node = RemoteNode::start(agent as Arc<dyn RemoteAgent>, options).expect("a node");
    let export = node.export_local_blockset(NAMESPACE, GROUP, ranks.clone()).expect("an export");
    Side { node, ranks, export, memory, device }
}

fn meet(one: &Side, other: &Side) {
    for (importer, announcer) in [(one, other), (other, one)] {
        let bytes = announcer.node.announcement().expect("an announcement").encode(None).expect("sound");
        importer.node.import_remote_blockset(&bytes).expect("an announcement");
    }
}

/// Reads all blocks of `owner`.
fn read(reader: &Side, owner: &Side) -> (usize, Option<RemoteError>) {
    let plans = reader.node.plan_reads(owner.node.node(), NAMESPACE, GROUP, &reader.ranks).expect("plans");
    let held = reader.node.get_remote_blocks_immutable(&plans, &hashes(BLOCKS), soon()).expect("a lease");
    assert_eq!(held.len(), BLOCKS as usize);
    let slots: Vec<u32> = (0..BLOCKS).collect();
    // SAFETY: nobody else touches the reader's memory.
    let arrived = unsafe { held.read_into(&slots, &nothing(), soon()) }.expect("enough slots");
    (arrived.blocks, arrived.failure)
}

/// Mutation that makes it fail: `Downloaded::of` unites ranges of different regions.
#[test]
fn blocks_go_between_memory_of_devices_and_of_hosts_whatever_the_shapes() {
    for (theirs, ours) in [(1, 1), (4, 2), (2, 4), (8, 1)] {
        let whole = ranks(1, HEADS, false);
        (0..BLOCKS).for_each(|block| fill(&whole[0], block, block as u8));
        let network = InProcessNetwork::new();
        // Host to device, to another device, to host, into the first shape.
        let mut sides = vec![side(&network, 1, whole.clone(), false)];
        for (id, tp, is_separate, is_on_device) in
            [(2, theirs, true, true), (3, ours, false, true), (4, 1, false, false)]
        {
            let next = side(&network, id, ranks(tp, HEADS, is_separate), is_on_device);
            let last = sides.last().expect("one at least");
            meet(last, &next);
            let blocks: Vec<_> = (0..BLOCKS).map(|block| (hash(block), block)).collect();
            // SAFETY: nobody writes the blocks any more.
            let publication = unsafe { last.export.publish(&blocks, &nothing()) }.expect("published");
            assert_eq!(read(&next, last), (BLOCKS as usize, None), "{theirs} to {ours}, node {id}");
            drop(publication);
            sides.push(next);
        }
        for block in 0..BLOCKS {
            let there = &sides.last().expect("four").ranks[0];
            assert!(content(there, block) == content(&whole[0], block), "{theirs} to {ours}, {block}");
        }
    }
}

/// Mutation that makes it fail: a digest of device memory is that of nothing.
#[test]
fn invariant_5_wrong_bytes_of_device_memory_are_never_served() {
    let network = InProcessNetwork::new();
    let host = side(&network, 1, ranks(1, HEADS, false), false);
    (0..BLOCKS).for_each(|block| fill(&host.ranks[0], block, block as u8));
    let (first, second) =
        (side(&network, 2, ranks(1, HEADS, true), true), side(&network, 3, ranks(2, HEADS, false), true));
    meet(&host, &first);
    meet(&first, &second);
    let blocks: Vec<_> = (0..BLOCKS).map(|block| (hash(block), block)).collect();
    // SAFETY: nobody writes the blocks.
    let _of_host = unsafe { host.export.publish(&blocks, &nothing()) }.expect("published");
    assert_eq!(read(&first, &host), (BLOCKS as usize, None));
    // SAFETY: the test writes a byte, which is to be noticed.
    let _of_device = unsafe { first.export.publish(&blocks, &nothing()) }.expect("published");
    assert_eq!(read(&second, &first), (BLOCKS as usize, None));
    let stream = first.device.create_stream("test").expect("a stream");
    let storage = &first.memory[1];
    let at = storage.len() - 1;
    let byte = storage.download(&*stream, at, 1, soon()).expect("a byte")[0];
    storage.upload(&*stream, at, &[byte ^ 1], soon()).expect("a byte");
    let (arrived, failure) = read(&second, &first);
    assert_eq!(arrived, BLOCKS as usize - 1);
    let last = hash(BLOCKS - 1);
    assert!(matches!(&failure, Some(RemoteError::Corrupt { hash, .. }) if *hash == last), "{failure:?}");
}

#[test]
fn memory_of_a_device_that_nothing_reaches_is_refused_by_name() {
    let network = InProcessNetwork::new();
    let device = Arc::new(EmulatedDevice::new(EmulatedConfig::default()).expect("a device"));
    let access = Arc::new(DeviceAccess::new(Arc::clone(&device) as Arc<dyn Device>).expect("a stream"));
    let (rank, _) = on_device(&ranks(1, HEADS, false)[0], &*device, &access);
    let agent: InProcessAgent = network.agent("node-1").expect("a name");
    let error = rank.bound.nixl_register(&agent).unwrap_err();
    assert!(matches!(error, AgentError::Unsupported { .. }), "{error}");
    assert!(error.to_string().contains("reach_device"), "{error}");
    agent.reach_device(&access);
    // Without access the processor computes no digest.
    let blind = vec![LocalRank::new(rank.slice, rank.bound.clone())];
    let node = RemoteNode::start(Arc::new(agent), NodeOptions::new(NodeId(1), Epoch(1))).expect("a node");
    let error = node.export_local_blockset(NAMESPACE, GROUP, blind.clone()).unwrap_err();
    assert!(error.to_string().contains("LocalRank::on_device"), "{error}");
    let owner = side(&network, 2, ranks(1, HEADS, false), false);
    let bytes = owner.node.announcement().expect("an announcement").encode(None).expect("sound");
    node.import_remote_blockset(&bytes).expect("an announcement");
    let reads = node.plan_reads(NodeId(2), NAMESPACE, GROUP, &blind).unwrap_err();
    let writes = node.plan_writes(NodeId(2), NAMESPACE, GROUP, &blind).unwrap_err();
    for error in [reads, writes] {
        assert!(error.to_string().contains("LocalRank::on_device"), "{error}");
    }
}

/// Mutations that make it fail: `run` keeps a stream that has failed; an error of a digest is
/// `Corrupt`.
#[test]
fn a_copy_that_fails_is_our_own_failure_and_the_next_one_works() {
    let network = InProcessNetwork::new();
    let host = side(&network, 1, ranks(1, HEADS, false), false);
    (0..BLOCKS).for_each(|block| fill(&host.ranks[0], block, block as u8));
    let reader = side(&network, 2, ranks(1, HEADS, false), true);
    meet(&host, &reader);
    let blocks: Vec<_> = (0..BLOCKS).map(|block| (hash(block), block)).collect();
    // SAFETY: nobody writes the blocks.
    let _publication = unsafe { host.export.publish(&blocks, &nothing()) }.expect("published");
    assert_eq!(read(&reader, &host), (BLOCKS as usize, None));
    // The copy into the device, then the one that is to verify it.
    for skipped in [0, 1, 4] {
        let rule = FaultRule::next(Fault::FailHalfway).on_stream("kvbm-remote").after(skipped);
        reader.device.faults().inject(rule);
        let (arrived, failure) = read(&reader, &host);
        assert!(arrived < BLOCKS as usize);
        assert!(!matches!(failure, None | Some(RemoteError::Corrupt { .. })), "{failure:?}");
        assert_eq!(read(&reader, &host), (BLOCKS as usize, None), "over another stream");
    }
}

/// Mutation that makes it fail: `write` does not hold `keep`.
#[test]
fn invariant_3_a_write_to_a_device_that_is_late_keeps_its_claim() {
    let network = InProcessNetwork::new();
    let host = side(&network, 1, ranks(1, HEADS, false), false);
    (0..BLOCKS).for_each(|block| fill(&host.ranks[0], block, block as u8));
    let reader = side(&network, 2, ranks(1, HEADS, false), true);
    meet(&host, &reader);
    // SAFETY: nobody writes the block.
    let _publication = unsafe { host.export.publish(&[(hash(0), 0)], &nothing()) }.expect("published");
    let plans = reader.node.plan_reads(NodeId(1), NAMESPACE, GROUP, &reader.ranks).expect("plans");
    let held = reader.node.get_remote_blocks_immutable(&plans, &hashes(1), soon()).expect("a lease");
    let stalled = reader.device.faults().inject(FaultRule::next(Fault::Stall).on_stream("kvbm-remote"));
    let claim = nothing();
    // SAFETY: nobody else touches the reader's memory.
    let arrived = unsafe { held.read_into(&[0], &claim, soon()) }.expect("a slot");
    assert!(arrived.blocks == 0 && arrived.failure.is_some(), "{arrived:?}");
    drop((arrived, held));
    assert!(Arc::strong_count(&claim) > 1, "the device may still write there");
    stalled.release();
    let until = soon();
    while Arc::strong_count(&claim) > 1 {
        assert!(std::time::Instant::now() < until, "the claim ends with the copy");
        std::thread::yield_now();
    }
}
