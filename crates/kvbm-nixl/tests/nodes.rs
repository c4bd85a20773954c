//! Nodes that read from each other: leases, verification, failures.

mod support;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvbm_keys::DeploymentKey;
use kvbm_nixl::{
    AgentError, AgentFault, Export, Imported, InProcessAgent, InProcessNetwork, LocalRank, NodeOptions,
    PeerPlans, Publication, RemoteAgent, RemoteBlocks, RemoteError, RemoteNode,
};
use kvbm_plan::{Epoch, GroupId, NamespaceTag, NodeId, Rank};

use support::{BLOCKS, content, fill, hash, hashes, local_rank, nothing, soon};

const HEADS: u32 = 8;
const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([7; 16]);
const GROUP: GroupId = GroupId(0);

/// Ranks that divide all heads.
fn ranks(tp: u32, is_separate: bool) -> Vec<LocalRank> {
    support::ranks(tp, HEADS, is_separate)
}

struct Side {
    node: RemoteNode,
    agent: Arc<InProcessAgent>,
    ranks: Vec<LocalRank>,
    export: Export,
}

fn node(
    network: &InProcessNetwork,
    id: u32,
    options: impl FnOnce(&mut NodeOptions),
    ranks: Vec<LocalRank>,
) -> Side {
    let agent = Arc::new(network.agent(&format!("node-{id}")).expect("a name"));
    let mut given = NodeOptions::new(NodeId(id), Epoch(1));
    options(&mut given);
    let node = RemoteNode::start(Arc::clone(&agent) as Arc<dyn RemoteAgent>, given).expect("a node");
    let export = node.export_local_blockset(NAMESPACE, GROUP, ranks.clone()).expect("an export");
    Side { node, agent, ranks, export }
}

fn meet(nodes: &[&Side]) {
    for one in nodes {
        for other in nodes.iter().filter(|other| other.node.node() != one.node.node()) {
            one.node.import_remote_blockset(&announced(other)).expect("an announcement");
        }
    }
}

/// A hostile announcement of a node that exists, newer than its own.
#[test]
fn a_forged_announcement_changes_nothing_and_is_counted() {
    let network = InProcessNetwork::new();
    let key = DeploymentKey::from_secret(b"ours");
    let keyed = |options: &mut NodeOptions| options.key = Some(key.clone());
    let (one, two) = (node(&network, 1, keyed, ranks(1, false)), node(&network, 2, keyed, ranks(1, false)));
    let honest = two.node.announcement().expect("an announcement");
    let bytes = honest.encode(one.node.key()).expect("a sound one");
    one.node.import_remote_blockset(&bytes).expect("of the same deployment");
    let hostile = kvbm_nixl::NodeAnnouncement { epoch: Epoch(9), agent: "hostile".into(), ..honest.clone() };
    for key in [None, Some(DeploymentKey::from_secret(b"theirs"))] {
        let bytes = hostile.encode(key.as_ref()).expect("it has the form");
        one.node.import_remote_blockset(&bytes).expect_err("it is not signed by us");
    }
    assert_eq!(one.node.counts().refused_announcements, 2);
    let known = one.node.peers();
    assert_eq!((known.len(), &*known[0]), (1, &honest));
}

fn announced(node: &Side) -> Vec<u8> {
    node.node.announcement().expect("an announcement").encode(None).expect("a sound one")
}

/// An owner with `count` published blocks and a reader, which know each other.
fn pair(network: &InProcessNetwork, count: u32, lease: Duration) -> (Side, Side, Publication) {
    let owner = node(network, 1, |options| options.lease = lease, ranks(1, false));
    let reader = node(network, 2, |_| {}, ranks(1, true));
    let blocks: Vec<_> = (0..count).map(|block| (hash(block), block)).collect();
    for (_, block) in &blocks {
        fill(&owner.ranks[0], *block, *block as u8);
    }
    // SAFETY: nobody writes the blocks but the tests that want to be noticed.
    let publication = unsafe { owner.export.publish(&blocks, &nothing()) }.expect("published");
    meet(&[&owner, &reader]);
    (owner, reader, publication)
}

fn plans(reader: &Side, owner: &Side) -> Arc<PeerPlans> {
    reader.node.plan_reads(owner.node.node(), NAMESPACE, GROUP, &reader.ranks).expect("plans")
}

fn held(reader: &Side, owner: &Side, count: u32) -> Result<RemoteBlocks, RemoteError> {
    reader.node.get_remote_blocks_immutable(&plans(reader, owner), &hashes(count), soon())
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = soon();
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_prefix_is_read_and_verified_whatever_the_shapes() {
    for (theirs, ours) in [(1, 1), (4, 2), (2, 4), (8, 1), (1, 8)] {
        let network = InProcessNetwork::new();
        let whole = local_rank(0, 0, HEADS, false);
        let source = node(&network, 9, |_| {}, vec![whole.clone()]);
        let owner = node(&network, 1, |_| {}, ranks(theirs, false));
        let reader = node(&network, 2, |_| {}, ranks(ours, true));
        let last = node(&network, 3, |_| {}, vec![local_rank(0, 0, HEADS, false)]);
        let nodes = [&source, &owner, &reader, &last];
        meet(&nodes);
        let blocks: Vec<_> = (0..BLOCKS).map(|block| (hash(block), block)).collect();
        (0..BLOCKS).for_each(|block| fill(&whole, block, block as u8));
        // From node to node, and back into the first shape.
        let mut published = Vec::new();
        for pair in nodes.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            // SAFETY: nobody writes the blocks any more.
            published.push(unsafe { from.export.publish(&blocks, &nothing()) }.expect("published"));
            let remote = held(to, from, BLOCKS).expect("a lease");
            assert_eq!(remote.len(), BLOCKS as usize);
            let slots: Vec<u32> = (0..BLOCKS).collect();
            // SAFETY: nobody else touches the slots.
            let arrived = unsafe { remote.read_into(&slots, &nothing(), soon()) }.expect("a read");
            assert_eq!((arrived.blocks, arrived.failure), (BLOCKS as usize, None), "{theirs} to {ours}");
        }
        for block in 0..BLOCKS {
            assert!(content(&last.ranks[0], block) == content(&whole, block), "{theirs} to {ours}, {block}");
        }
    }
}

#[test]
fn the_longest_prefix_is_held_and_only_for_those_who_are_known() {
    let network = InProcessNetwork::new();
    let (owner, reader, publication) = pair(&network, 3, Duration::from_secs(5));
    assert_eq!(held(&reader, &owner, 8).expect("a lease").len(), 3, "three of eight");
    eventually("dropping it releases the lease", || owner.node.counts().leases_held == 0);
    drop(publication);
    assert!(held(&reader, &owner, 8).expect("a lease").is_empty(), "nothing is published any more");
    assert!(owner.export.is_empty());

    // A node that the owner has not imported gets no answer.
    let stranger = node(&network, 3, |_| {}, ranks(1, false));
    stranger.node.import_remote_blockset(&announced(&owner)).expect("an announcement");
    owner.agent.add_peer(&stranger.agent.metadata().expect("metadata")).expect("reachable, but no node");
    let plans = plans(&stranger, &owner);
    let deadline = Instant::now() + Duration::from_millis(100);
    let error =
        stranger.node.get_remote_blocks_immutable(&plans, &hashes(3), deadline).expect_err("a stranger");
    assert_eq!(error, RemoteError::NoAnswer { node: NodeId(1) });
    eventually("it is counted", || owner.node.counts().strangers > 0);
}

#[test]
fn invariant_5_wrong_bytes_of_a_peer_are_never_served() {
    let network = InProcessNetwork::new();
    let (owner, reader, _publication) = pair(&network, 6, Duration::from_secs(5));
    let remote = held(&reader, &owner, 6).expect("a lease");
    // The owner breaks its promise: a byte of block 4 changes under the lease.
    let mut bytes = content(&owner.ranks[0], 4);
    bytes[777] ^= 1;
    // SAFETY: no transfer runs.
    unsafe { owner.ranks[0].bound.write_block(4, &bytes) }.expect("a block");
    // SAFETY: nobody else touches the slots.
    let arrived = unsafe { remote.read_into(&[0, 1, 2, 3, 4, 5], &nothing(), soon()) }.expect("a read");
    assert_eq!(arrived.blocks, 4, "those before it are good");
    let expected = RemoteError::Corrupt { node: NodeId(1), hash: hash(4), rank: Rank(0) };
    assert_eq!(arrived.failure, Some(expected));
}

#[test]
fn two_blocks_that_changed_places_are_noticed() {
    let network = InProcessNetwork::new();
    let (owner, reader, _publication) = pair(&network, 2, Duration::from_secs(5));
    let remote = held(&reader, &owner, 2).expect("a lease");
    let (one, two) = (content(&owner.ranks[0], 0), content(&owner.ranks[0], 1));
    // SAFETY: no transfer runs.
    unsafe { owner.ranks[0].bound.write_block(0, &two) }.expect("a block");
    // SAFETY: no transfer runs.
    unsafe { owner.ranks[0].bound.write_block(1, &one) }.expect("a block");
    // SAFETY: nobody else touches the slots.
    let arrived = unsafe { remote.read_into(&[0, 1], &nothing(), soon()) }.expect("a read");
    assert_eq!(arrived.blocks, 0);
    assert!(matches!(arrived.failure, Some(RemoteError::Corrupt { .. })), "{:?}", arrived.failure);
}

#[test]
fn a_living_reader_keeps_its_lease_and_a_dead_one_loses_it() {
    let network = InProcessNetwork::new();
    let (owner, reader, publication) = pair(&network, 2, Duration::from_secs(2));
    let remote = held(&reader, &owner, 2).expect("a lease");
    let guard = Arc::new(());
    let of_owner: Arc<dyn Any + Send + Sync> = Arc::clone(&guard) as _;
    fill(&owner.ranks[0], 7, 1);
    // SAFETY: nobody writes the block.
    let pinned = unsafe { owner.export.publish(&[(hash(7), 7)], &of_owner) }.expect("published");
    let plans = plans(&reader, &owner);
    let second = reader.node.get_remote_blocks_immutable(&plans, &[hash(7)], soon()).expect("a lease");
    drop(of_owner);

    // Unpublished, and still in place: a reader has it, for longer than one term.
    drop((pinned, publication));
    std::thread::sleep(Duration::from_millis(2500));
    assert!(remote.is_held() && second.is_held(), "heartbeats renew the lease");
    assert_eq!(Arc::strong_count(&guard), 2, "the bytes stay in place while they are read");

    // The reader dies: nothing renews, nothing releases.
    let Side { node, agent, .. } = reader;
    std::mem::forget((remote, second));
    drop((node, agent));
    eventually("no block is pinned after its lease's end", || Arc::strong_count(&guard) == 1);
    assert_eq!(owner.node.counts().leases_expired, 2);
    assert_eq!(owner.node.counts().leases_held, 0);
}

#[test]
fn a_lease_that_its_owner_does_not_renew_ends_for_the_reader_first() {
    let network = InProcessNetwork::new();
    let (owner, reader, _publication) = pair(&network, 2, Duration::from_millis(200));
    let remote = held(&reader, &owner, 2).expect("a lease");
    // The owner stops answering, as a stopped process does; its memory can still be read.
    let Side { node, agent, ranks, export } = owner;
    drop(node);
    eventually("the lease ends", || !remote.is_held());
    // SAFETY: nobody else touches the slots.
    let arrived = unsafe { remote.read_into(&[0, 1], &nothing(), soon()) }.expect("a read");
    assert_eq!(arrived.blocks, 0);
    assert_eq!(arrived.failure, Some(RemoteError::LeaseEnded { node: NodeId(1) }));
    drop((agent, ranks, export));
}

#[test]
fn a_transfer_that_hangs_ends_at_the_deadline_and_its_slots_stay_claimed() {
    let network = InProcessNetwork::new();
    let (owner, reader, _publication) = pair(&network, 2, Duration::from_secs(5));
    let remote = held(&reader, &owner, 2).expect("a lease");
    let release = Arc::new(AtomicBool::new(false));
    owner.agent.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));
    let claim = Arc::new(());
    let given: Arc<dyn Any + Send + Sync> = Arc::clone(&claim) as _;
    let deadline = Instant::now() + Duration::from_millis(50);
    // SAFETY: nobody else touches the slots.
    let arrived = unsafe { remote.read_into(&[0, 1], &given, deadline) }.expect("a read");
    assert_eq!(arrived.blocks, 0);
    let failure = arrived.failure.expect("late");
    assert!(matches!(failure, RemoteError::Agent(AgentError::Deadline { .. })), "{failure}");
    drop((given, remote));
    assert!(Arc::strong_count(&claim) > 1, "the hardware may still write");
    release.store(true, Ordering::Release);
    eventually("then the slots are free", || Arc::strong_count(&claim) == 1);

    owner.agent.set_fault(Some(AgentFault::Fail));
    let remote = held(&reader, &owner, 2).expect("a lease");
    // SAFETY: nobody else touches the slots.
    let arrived = unsafe { remote.read_into(&[0, 1], &nothing(), soon()) }.expect("a read");
    assert!(arrived.blocks == 0 && arrived.failure.is_some(), "a failed transfer brings nothing");
    // SAFETY: as above.
    let error = unsafe { remote.read_into(&[0], &nothing(), soon()) }.expect_err("too few slots");
    assert_eq!(error, RemoteError::Destination { slots: 1, blocks: 2 });
}

#[test]
fn a_restarted_owner_fences_what_was_known_of_its_earlier_life() {
    let network = InProcessNetwork::new();
    let (owner, reader, publication) = pair(&network, 2, Duration::from_secs(5));
    let old = plans(&reader, &owner);
    let stale = announced(&owner);
    drop(publication);
    drop(owner);
    let owner = node(&network, 1, |options| options.epoch = Epoch(2), ranks(1, false));
    owner.node.import_remote_blockset(&announced(&reader)).expect("an announcement");
    // The reader does not know yet.
    let error = reader.node.get_remote_blocks_immutable(&old, &hashes(2), soon()).expect_err("fenced");
    assert!(error.to_string().contains("started again"), "{error}");
    let imported = reader.node.import_remote_blockset(&announced(&owner)).expect("the new life");
    assert_eq!(imported, (NodeId(1), Imported::Restarted));
    let error = reader.node.import_remote_blockset(&stale).expect_err("the old life");
    assert!(error.to_string().contains("is older than what is known"), "{error}");
    assert!(held(&reader, &owner, 2).expect("a lease").is_empty());

    reader.node.forget(NodeId(1)).expect("forgotten");
    let error = reader.node.plan_reads(NodeId(1), NAMESPACE, GROUP, &reader.ranks).expect_err("unknown");
    assert_eq!(error, RemoteError::UnknownNode { node: NodeId(1) });
    let error = owner.node.import_remote_blockset(&announced(&owner)).expect_err("itself");
    assert_eq!(error, RemoteError::Ourselves { node: NodeId(1) });
}

#[test]
fn leases_and_options_are_bounded() {
    let network = InProcessNetwork::new();
    let owner = node(&network, 1, |options| options.leases_per_peer = 2, ranks(1, false));
    let reader = node(&network, 2, |_| {}, ranks(1, false));
    meet(&[&owner, &reader]);
    let _held = [held(&reader, &owner, 1).expect("one"), held(&reader, &owner, 1).expect("two")];
    let error = held(&reader, &owner, 1).expect_err("three");
    let text = error.to_string();
    assert!(
        text.starts_with("node 1 refuses: this reader holds as many of its leases as one peer"),
        "{text}"
    );
    // What others hold does not count.
    let other = node(&network, 3, |_| {}, ranks(1, false));
    meet(&[&owner, &other]);
    held(&other, &owner, 1).expect("its first");
    let agent = || Arc::new(network.agent("options").expect("a name")) as Arc<dyn RemoteAgent>;
    let good = NodeOptions::new(NodeId(3), Epoch(1));
    for bad in [
        NodeOptions { lease: Duration::ZERO, ..good.clone() },
        NodeOptions { longest_lease: Duration::from_secs(1), ..good.clone() },
        NodeOptions { leases_per_peer: 0, ..good },
    ] {
        let error = RemoteNode::start(agent(), bad).expect_err("out of bounds");
        assert!(matches!(error, RemoteError::Option { .. }), "{error}");
    }
}
