//! Nodes that write into each other's memory: grants, verification, failures.

#[path = "support/devices.rs"]
mod device_ranks;
mod support;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvbm_device::{Device, EmulatedConfig, EmulatedDevice};
use kvbm_nixl::{
    AgentError, AgentFault, BlockSink, DeviceAccess, Export, InProcessAgent, InProcessNetwork, Landing,
    LocalRank, NodeOptions, Notification, OfferedChain, RefusedRead, Registration, RemoteAgent, RemoteError,
    RemoteNode, RemoteRequest, RemoteSlots, RemoteTransfer, TransferDirection,
};
use kvbm_plan::{Epoch, GroupId, NamespaceTag, NodeId, SequenceHash};
use kvbm_storage::Storage;
use parking_lot::Mutex;

use device_ranks::on_device;
use support::{BLOCKS, content, fill, hash, hashes, local_rank, nothing, ranks, soon};

const HEADS: u32 = 8;
const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([7; 16]);
const GROUP: GroupId = GroupId(0);
const LEASE: Duration = Duration::from_millis(300);

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = soon();
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Slots of a receiver.
#[derive(Default)]
struct Slots {
    free: Mutex<Vec<u32>>,
    registered: Mutex<HashMap<SequenceHash, u32>>,
}

impl Slots {
    /// All of a rank, the last ones first.
    fn all() -> Arc<Self> {
        Arc::new(Self { free: Mutex::new((0..BLOCKS).collect()), registered: Mutex::default() })
    }

    fn free(&self) -> usize {
        self.free.lock().len()
    }

    fn slot(&self, block: u32) -> Option<u32> {
        self.registered.lock().get(&hash(block)).copied()
    }
}

struct Sink(Arc<Slots>);

struct SetAside {
    slots: Arc<Slots>,
    hashes: Vec<SequenceHash>,
    places: Vec<(usize, u32)>,
    arrived: usize,
    is_closed: bool,
}

impl BlockSink for Sink {
    fn set_aside(&self, offer: OfferedChain<'_>) -> Result<Box<dyn Landing>, RefusedRead> {
        assert_eq!((offer.writer, offer.chain), (NodeId(1), NAMESPACE));
        let hashes = offer.hashes;
        let registered = self.0.registered.lock();
        let lacks = |(_, hash): &(usize, &SequenceHash)| !registered.contains_key(*hash);
        let wanted: Vec<usize> =
            hashes.iter().enumerate().filter(lacks).map(|(at, _)| at).take(offer.most).collect();
        let mut free = self.0.free.lock();
        if free.len() < wanted.len() {
            return Err(RefusedRead::NoRoom);
        }
        let left = free.len() - wanted.len();
        let places: Vec<(usize, u32)> = wanted.into_iter().zip(free.split_off(left)).collect();
        let hashes = places.iter().map(|(at, _)| hashes[*at]).collect();
        let slots = Arc::clone(&self.0);
        Ok(Box::new(SetAside { slots, hashes, places, arrived: 0, is_closed: false }))
    }
}

impl Landing for SetAside {
    fn places(&self) -> &[(usize, u32)] {
        &self.places
    }

    fn arrived(&mut self, places: Range<usize>) -> usize {
        assert!(!self.is_closed && places.start == self.arrived);
        self.arrived = places.end;
        for at in places.clone() {
            self.slots.registered.lock().insert(self.hashes[at], self.places[at].1);
        }
        places.len()
    }

    fn close(&mut self) {
        self.is_closed = true;
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        let rest = self.places[self.arrived..].iter().map(|(_, slot)| *slot);
        self.slots.free.lock().extend(rest);
    }
}

/// An agent that can be told to change a byte of what it writes, as a broken machine does.
#[derive(Debug)]
struct Agent {
    inner: InProcessAgent,
    spoils: AtomicBool,
}

impl RemoteAgent for Agent {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn register(&self, storages: &[Arc<dyn Storage>]) -> Result<Registration, AgentError> {
        self.inner.register(storages)
    }

    fn metadata(&self) -> Result<Vec<u8>, AgentError> {
        self.inner.metadata()
    }

    fn add_peer(&self, metadata: &[u8]) -> Result<String, AgentError> {
        self.inner.add_peer(metadata)
    }

    fn forget_peer(&self, peer: &str) -> Result<(), AgentError> {
        self.inner.forget_peer(peer)
    }

    unsafe fn start(&self, mut request: RemoteRequest) -> Result<Box<dyn RemoteTransfer>, AgentError> {
        if request.direction == TransferDirection::Write && self.spoils.load(Ordering::Acquire) {
            // Two ranges change places.
            let last = request.local.entries.len() - 1;
            assert!(last > 0, "there is something to confuse");
            request.local.entries.swap(last - 1, last);
        }
        // SAFETY: the caller's promise is the same.
        unsafe { self.inner.start(request) }
    }

    fn notify(&self, peer: &str, message: &[u8]) -> Result<(), AgentError> {
        self.inner.notify(peer, message)
    }

    fn notifications(&self) -> Result<Vec<Notification>, AgentError> {
        self.inner.notifications()
    }

    fn wake_on_message(&self, wake: Arc<dyn Fn() + Send + Sync>) -> bool {
        self.inner.wake_on_message(wake)
    }
}

struct Side {
    node: RemoteNode,
    agent: Arc<Agent>,
    ranks: Vec<LocalRank>,
    export: Export,
    slots: Arc<Slots>,
}

fn side(network: &InProcessNetwork, id: u32, ranks: Vec<LocalRank>) -> Side {
    side_with(network, id, ranks, |_| {})
}

fn side_with(
    network: &InProcessNetwork,
    id: u32,
    ranks: Vec<LocalRank>,
    configure: impl FnOnce(&mut NodeOptions),
) -> Side {
    let inner = network.agent(&format!("node-{id}")).expect("a name");
    ranks.iter().filter_map(|rank| rank.device.as_ref()).for_each(|access| inner.reach_device(access));
    let agent = Arc::new(Agent { inner, spoils: AtomicBool::new(false) });
    let mut options = NodeOptions { lease: LEASE, ..NodeOptions::new(NodeId(id), Epoch(1)) };
    configure(&mut options);
    let node = RemoteNode::start(Arc::clone(&agent) as Arc<dyn RemoteAgent>, options).expect("a node");
    let export = node.export_local_blockset(NAMESPACE, GROUP, ranks.clone()).expect("an export");
    let slots = Slots::all();
    // SAFETY: only the test reads the slots, when the blocks have arrived.
    assert!(unsafe { export.accept_writes(Arc::new(Sink(Arc::clone(&slots)))) });
    Side { node, agent, ranks, export, slots }
}

fn meet(nodes: &[&Side]) {
    for one in nodes {
        for other in nodes.iter().filter(|other| other.node.node() != one.node.node()) {
            let bytes = other.node.announcement().expect("an announcement").encode(None).expect("sound");
            one.node.import_remote_blockset(&bytes).expect("an announcement");
        }
    }
}

fn pair(network: &InProcessNetwork) -> (Side, Side) {
    let writer = side(network, 1, ranks(1, HEADS, false));
    let receiver = side(network, 2, ranks(1, HEADS, true));
    (0..BLOCKS).for_each(|block| fill(&writer.ranks[0], block, block as u8));
    meet(&[&writer, &receiver]);
    (writer, receiver)
}

fn room(writer: &Side, receiver: &Side, count: u32) -> Result<RemoteSlots, RemoteError> {
    let plans =
        writer.node.plan_writes(receiver.node.node(), NAMESPACE, GROUP, &writer.ranks).expect("plans");
    writer.node.get_remote_blocks_mutable(&plans, (NAMESPACE, &hashes(count), 0), 1024, soon())
}

/// Writes what is wanted of the writer's blocks, which lie in slots of their number.
fn write(slots: RemoteSlots, deadline: Instant) -> (usize, Option<RemoteError>) {
    let sources: Vec<u32> = slots.places().iter().map(|at| *at as u32).collect();
    // SAFETY: nobody writes the blocks.
    let written = unsafe { slots.write_from(&sources, &nothing(), deadline) }.expect("enough slots");
    (written.blocks, written.failure)
}

#[test]
fn blocks_are_pushed_and_verified_whatever_the_shapes() {
    let device: Arc<dyn Device> = Arc::new(EmulatedDevice::new(EmulatedConfig::default()).expect("a device"));
    let access = Arc::new(DeviceAccess::new(Arc::clone(&device)).expect("a stream"));
    // (ranks of the writer, ranks of the receiver, heads); 8 ranks with 2 heads have replicas.
    let shapes = [(1, 1, 8), (4, 2, 8), (2, 4, 8), (8, 1, 8), (1, 8, 8), (1, 8, 2), (8, 2, 2)];
    let in_memory = |is_on_device: bool| shapes.map(|shape| (shape, is_on_device));
    for ((theirs, ours, heads), is_on_device) in [in_memory(false), in_memory(true)].concat() {
        let whole = local_rank(0, 0, heads, false);
        (0..BLOCKS).for_each(|block| fill(&whole, block, block as u8));
        let mut last = vec![whole.clone()];
        // From node to node, and back into the first shape: bytes are those of the first.
        for (tp, is_separate) in [(theirs, false), (ours, true), (1, false)] {
            let network = InProcessNetwork::new();
            let from = side(&network, 1, last);
            let mut there = ranks(tp, heads, is_separate);
            if is_on_device && tp > 1 {
                there = there.iter().map(|rank| on_device(rank, &*device, &access).0).collect();
            }
            let to = side(&network, 2, there);
            meet(&[&from, &to]);
            // Slots of the receiver are handed out from the end: block 0 lies in the first of them.
            let slots = room(&from, &to, BLOCKS).expect("room");
            assert_eq!(slots.places().len(), BLOCKS as usize);
            assert_eq!(write(slots, soon()), (BLOCKS as usize, None), "{theirs} to {ours} of {heads}");
            for block in 0..BLOCKS {
                assert_eq!(to.slots.slot(block), Some(block));
            }
            assert_eq!(to.node.counts().received, u64::from(BLOCKS));
            eventually("the grant ends", || to.node.counts().slots_granted == 0);
            last = to.ranks;
        }
        for block in 0..BLOCKS {
            assert!(content(&last[0], block) == content(&whole, block), "{theirs} to {ours}, {block}");
        }
    }
}

#[test]
fn what_the_receiver_has_is_not_written_again() {
    let network = InProcessNetwork::new();
    let (writer, receiver) = pair(&network);
    assert_eq!(write(room(&writer, &receiver, 3).expect("room"), soon()), (3, None));
    let slots = room(&writer, &receiver, 5).expect("room");
    assert_eq!(slots.places(), [3, 4]);
    assert_eq!(write(slots, soon()), (2, None));
    assert!(room(&writer, &receiver, 5).expect("room").is_empty());
    assert!((0..5).all(|block| receiver.slots.slot(block).is_some()));
    // What is set aside and not written is given back.
    drop(room(&writer, &receiver, BLOCKS).expect("room"));
    eventually("the slots are free", || receiver.slots.free() == 3);
    assert_eq!(receiver.node.counts().grants_expired, 0);
}

#[test]
fn a_receiver_refuses_what_it_has_no_room_for() {
    let network = InProcessNetwork::new();
    let (writer, receiver) = pair(&network);
    let refused = |why| RemoteError::Refused { node: NodeId(2), why };
    receiver.slots.free.lock().truncate(2);
    assert_eq!(room(&writer, &receiver, 3).expect_err("full"), refused(RefusedRead::NoRoom));
    assert_eq!(write(room(&writer, &receiver, 2).expect("room"), soon()), (2, None));

    // Slots for writers are bounded, whoever asks.
    let few = side_with(&network, 3, ranks(1, HEADS, false), |options| options.granted_blocks = 3);
    meet(&[&writer, &few]);
    let first = room(&writer, &few, BLOCKS).expect("room");
    assert_eq!(first.places().len(), 3, "as many as are left");
    assert_eq!(room(&writer, &few, BLOCKS).expect_err("nothing is left"), refused_by(3, RefusedRead::NoRoom));
    assert_eq!(write(first, soon()), (3, None));

    // One that takes nothing.
    let agent = Arc::new(network.agent("node-4").expect("a name")) as Arc<dyn RemoteAgent>;
    let deaf = RemoteNode::start(agent, NodeOptions::new(NodeId(4), Epoch(1))).expect("a node");
    let _export = deaf.export_local_blockset(NAMESPACE, GROUP, ranks(1, HEADS, false)).expect("an export");
    let announced = |node: &RemoteNode| node.announcement().expect("one").encode(None).expect("sound");
    writer.node.import_remote_blockset(&announced(&deaf)).expect("an announcement");
    deaf.import_remote_blockset(&announced(&writer.node)).expect("an announcement");
    let plans = writer.node.plan_writes(NodeId(4), NAMESPACE, GROUP, &writer.ranks).expect("plans");
    let error = writer
        .node
        .get_remote_blocks_mutable(&plans, (NAMESPACE, &hashes(1), 0), 8, soon())
        .expect_err("refused");
    assert_eq!(error, refused_by(4, RefusedRead::NotTaken));
}

fn refused_by(node: u32, why: RefusedRead) -> RemoteError {
    RemoteError::Refused { node: NodeId(node), why }
}

#[test]
fn invariant_5_wrong_bytes_that_a_peer_wrote_are_never_registered() {
    let network = InProcessNetwork::new();
    let (writer, receiver) = pair(&network);
    writer.agent.spoils.store(true, Ordering::Release);
    let (blocks, failure) = write(room(&writer, &receiver, 4).expect("room"), soon());
    assert_eq!(failure, Some(RemoteError::NotTaken { node: NodeId(2), is_wrong: true }));
    assert_eq!(receiver.slots.registered.lock().len(), blocks, "those before it are good");
    assert!(blocks < 4);
    eventually("the slots are free", || receiver.slots.free() == BLOCKS as usize - blocks);
    writer.agent.spoils.store(false, Ordering::Release);
    let (more, failure) = write(room(&writer, &receiver, 4).expect("room"), soon());
    assert_eq!((blocks + more, failure), (4, None));
}

#[test]
fn a_writer_that_lives_keeps_its_grant() {
    let network = InProcessNetwork::new();
    let (writer, receiver) = pair(&network);
    let slots = room(&writer, &receiver, 2).expect("room");
    std::thread::sleep(LEASE * 4);
    assert!(slots.is_held(), "heartbeats renew the grant");
    assert_eq!(write(slots, soon()), (2, None));
}

/// A write that is on its way when its grant ends: its slots are nobody's until it has ended.
/// Mutation that makes it fail: the slots are free when the grant is over.
#[test]
fn slots_of_a_late_write_stay_out_of_use_until_it_has_ended() {
    let network = InProcessNetwork::new();
    let (writer, receiver) = pair(&network);
    let release = Arc::new(AtomicBool::new(false));
    receiver.agent.inner.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));
    let (blocks, failure) =
        write(room(&writer, &receiver, 3).expect("room"), Instant::now() + Duration::from_millis(50));
    assert!(blocks == 0 && matches!(failure, Some(RemoteError::Agent(AgentError::Deadline { .. }))));
    eventually("the grant is over", || receiver.node.counts().slots_quarantined == 3);
    // The writer is asked again and again, and says nothing. That its announcement is gone says
    // nothing either.
    receiver.node.forget(NodeId(1)).expect("forgotten");
    std::thread::sleep(LEASE * 4);
    assert_eq!((receiver.slots.free(), receiver.node.counts().slots_quarantined), (BLOCKS as usize - 3, 3));
    assert!(receiver.slots.registered.lock().is_empty());
    release.store(true, Ordering::Release);
    eventually("the write has ended", || receiver.slots.free() == BLOCKS as usize);
    assert_eq!((receiver.node.counts().slots_granted, receiver.node.counts().grants_expired), (0, 1));
}

#[test]
fn slots_of_a_writer_that_died_are_free_again() {
    let network = InProcessNetwork::new();
    let (writer, receiver) = pair(&network);
    let release = Arc::new(AtomicBool::new(false));
    receiver.agent.inner.set_fault(Some(AgentFault::Hang { release }));
    let deadline = Instant::now() + Duration::from_millis(50);
    let (blocks, _) = write(room(&writer, &receiver, 3).expect("room"), deadline);
    assert_eq!(blocks, 0);
    assert_eq!(receiver.slots.free(), BLOCKS as usize - 3);
    drop(writer);
    eventually("nothing of it can write any more", || receiver.slots.free() == BLOCKS as usize);
    receiver.agent.inner.set_fault(None);
}

#[test]
fn what_comes_after_the_end_of_the_grant_is_not_registered() {
    let network = InProcessNetwork::new();
    let writer = side(&network, 1, ranks(1, HEADS, false));
    // It gives the writer no time, and no renewal helps.
    let receiver = side_with(&network, 2, ranks(1, HEADS, true), |options| {
        (options.lease, options.longest_lease) = (Duration::from_millis(100), Duration::from_millis(100));
    });
    meet(&[&writer, &receiver]);
    let slots = room(&writer, &receiver, 2).expect("room");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(write(slots, soon()), (0, Some(RemoteError::LeaseEnded { node: NodeId(2) })));
    eventually("the slots are free", || receiver.slots.free() == BLOCKS as usize);
    assert!(receiver.slots.registered.lock().is_empty());

    // Gone before it could answer: the deadline ends the wait.
    let slots = room(&writer, &receiver, 2).expect("room");
    let Side { node, agent, export, .. } = receiver;
    drop((node, export));
    let began = Instant::now();
    let (blocks, failure) = write(slots, began + Duration::from_millis(200));
    assert!(blocks == 0 && failure.is_some());
    assert!(began.elapsed() < Duration::from_secs(10));
    drop(agent);
}

/// Mutation that makes it fail: the end of a node frees slots under a write.
#[test]
fn a_receiver_that_ends_leaves_its_slots_to_writes_on_their_way() {
    let network = InProcessNetwork::new();
    let (writer, receiver) = pair(&network);
    let release = Arc::new(AtomicBool::new(false));
    receiver.agent.inner.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));
    let deadline = Instant::now() + Duration::from_millis(50);
    let (blocks, _) = write(room(&writer, &receiver, 3).expect("room"), deadline);
    assert_eq!(blocks, 0);
    let Side { node, agent, export, slots, .. } = receiver;
    drop((export, node, agent));
    assert_eq!(slots.free(), BLOCKS as usize - 3, "somebody may still write there");
    release.store(true, Ordering::Release);
}
