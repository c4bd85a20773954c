//! Nodes in processes of their own that are killed and stopped while blocks are read. `NIXL_ROUNDS`
//! sets how often (8).

use std::any::Any;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_layout::{AxisOrder, DType, FullyContiguous, LayoutConfig};
use kvbm_nixl::{
    Export, FileDirectory, LocalRank, NodeOptions, Publication, RemoteAgent, RemoteError, RemoteNode,
};
use kvbm_plan::{
    Epoch, GroupId, HeadRange, NamespaceTag, NodeId, Rank, RankSlice, Replication, SequenceHash,
};
use kvbm_storage::{BoundLayout, SystemAllocator};

use crate::agent;

const BLOCKS: u32 = 128;
const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([9; 16]);
const GROUP: GroupId = GroupId(0);
const OWNER: NodeId = NodeId(1);
const READER: NodeId = NodeId(2);
const LEASE: Duration = Duration::from_secs(2);
const CHILD: &str = "kills::a_node_in_another_process";
const ROLE: &str = "NIXL_TEST_NODE";
/// Longest that anything may take beyond its own deadline.
const SLACK: Duration = Duration::from_secs(30);

fn rank() -> LocalRank {
    let config = LayoutConfig::builder().num_blocks(BLOCKS).num_layers(4).outer_dim(2).page_size(16);
    let config = config.inner_dim(1024).num_heads(8).dtype(DType::BF16).alignment(4096);
    let layout = FullyContiguous::new(config.build().expect("a shape"), AxisOrder::Nhd).expect("a layout");
    let slice = RankSlice {
        rank: Rank(0),
        first_layer: 0,
        num_layers: 4,
        heads: HeadRange { start: 0, count: 8 },
        replication: Replication::None,
    };
    let bound = BoundLayout::allocate(Arc::new(layout), &SystemAllocator::default());
    LocalRank::new(slice, bound.expect("memory"))
}

fn bytes_of(block: u32) -> Vec<u8> {
    let words =
        (0..256_u64 << 7).map(|at| (at ^ (u64::from(block) << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

fn hash(block: u32) -> SequenceHash {
    let mut bytes = [3; 16];
    bytes[..4].copy_from_slice(&block.to_le_bytes());
    SequenceHash::from_bytes(bytes)
}

fn hashes() -> Vec<SequenceHash> {
    (0..BLOCKS).map(hash).collect()
}

struct Owner {
    node: RemoteNode,
    export: Export,
    _publication: Publication,
    directory: FileDirectory,
}

fn owner(folder: &Path, epoch: Epoch, guard: &Arc<dyn Any + Send + Sync>) -> Owner {
    let agent: Arc<dyn RemoteAgent> = Arc::new(agent(&format!("owner-{}-{epoch}", std::process::id())));
    let options = NodeOptions { lease: LEASE, ..NodeOptions::new(OWNER, epoch) };
    let node = RemoteNode::start(agent, options).expect("a node");
    let rank = rank();
    for block in 0..BLOCKS {
        // SAFETY: nobody knows this memory yet.
        unsafe { rank.bound.write_block(block, &bytes_of(block)) }.expect("a block");
    }
    let export = node.export_local_blockset(NAMESPACE, GROUP, vec![rank]).expect("an export");
    let blocks: Vec<_> = (0..BLOCKS).map(|block| (hash(block), block)).collect();
    // SAFETY: nothing writes the blocks any more.
    let publication = unsafe { export.publish(&blocks, guard) }.expect("published");
    let directory = FileDirectory::open(folder).expect("a folder");
    directory.publish(&node.announcement().expect("an announcement"), None).expect("published");
    Owner { node, export, _publication: publication, directory }
}

/// The other process. It runs until it is killed, or its standard input ends.
#[test]
fn a_node_in_another_process() {
    let Ok(role) = std::env::var(ROLE) else {
        assert!(std::env::var(ROLE).is_err(), "only as the child of another test");
        return;
    };
    let folder = std::env::var("NIXL_TEST_FOLDER").expect("given");
    let folder = Path::new(&folder);
    if let Some(epoch) = role.strip_prefix("owner-") {
        let owner = owner(folder, Epoch(epoch.parse().expect("a number")), &(Arc::new(()) as _));
        meet(&owner.node, &owner.directory, READER, Epoch(0));
        std::io::stdin().read_line(&mut String::new()).expect("a pipe");
        assert_eq!(owner.export.len(), BLOCKS as usize);
    } else {
        let (reader, directory, rank) = reader(folder);
        meet(&reader, &directory, OWNER, Epoch(0));
        let plans = reader.plan_reads(OWNER, NAMESPACE, GROUP, &[rank]).expect("plans");
        let blocks = ask(&reader, &plans);
        println!("HELD {}", blocks.len());
        std::io::stdin().read_line(&mut String::new()).expect("a pipe");
        drop(blocks);
    }
}

struct Other(Child);

impl Other {
    fn start(folder: &Path, role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", CHILD, "--nocapture"]).env(ROLE, role).env("NIXL_TEST_FOLDER", folder);
        Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("a process"))
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.0.id().to_string()]).status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn reader(folder: &Path) -> (RemoteNode, FileDirectory, LocalRank) {
    let agent: Arc<dyn RemoteAgent> = Arc::new(agent(&format!("reader-{}", std::process::id())));
    let node = RemoteNode::start(agent, NodeOptions::new(READER, Epoch(1))).expect("a node");
    let rank = rank();
    let export = node.export_local_blockset(NAMESPACE, GROUP, vec![rank.clone()]).expect("an export");
    // The memory stays registered as long as the process lives.
    std::mem::forget(export);
    let directory = FileDirectory::open(folder).expect("a folder");
    directory.publish(&node.announcement().expect("an announcement"), None).expect("published");
    (node, directory, rank)
}

fn meet(node: &RemoteNode, directory: &FileDirectory, wanted: NodeId, epoch: Epoch) {
    let until = Instant::now() + SLACK;
    loop {
        for (_, bytes) in directory.announcements().expect("a folder") {
            let _ = node.import_remote_blockset(&bytes);
        }
        if node.peers().iter().any(|peer| peer.node == wanted && peer.epoch >= epoch) {
            return;
        }
        assert!(Instant::now() < until, "node {wanted} announces itself");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn ask(node: &RemoteNode, plans: &Arc<kvbm_nixl::PeerPlans>) -> kvbm_nixl::RemoteBlocks {
    let until = Instant::now() + SLACK;
    loop {
        let deadline = Instant::now() + Duration::from_millis(500);
        match node.get_remote_blocks_immutable(plans, &hashes(), deadline) {
            Ok(blocks) => return blocks,
            // The owner may not have imported our announcement yet.
            Err(RemoteError::NoAnswer { .. }) if Instant::now() < until => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn rounds() -> u64 {
    std::env::var("NIXL_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(8)
}

/// Reads all blocks; compares those that are reported as arrived, each byte.
fn read_and_compare(
    blocks: &kvbm_nixl::RemoteBlocks,
    rank: &LocalRank,
    limit: Duration,
) -> (usize, Option<RemoteError>) {
    let slots: Vec<u32> = (0..BLOCKS).collect();
    let claim: Arc<dyn Any + Send + Sync> = Arc::new(());
    let began = Instant::now();
    // SAFETY: the slots of an earlier round are claimed until its transfers have ended; bytes of a
    // late one are the same.
    let arrived = unsafe { blocks.read_into(&slots, &claim, began + limit) }.expect("slots");
    assert!(began.elapsed() < limit + SLACK, "no hang beyond the deadline");
    let mut found = vec![0; rank.bound.bytes_per_block() as usize];
    for block in 0..arrived.blocks as u32 {
        // SAFETY: the block has arrived.
        unsafe { rank.bound.read_block(block, &mut found) }.expect("a block");
        assert!(found == bytes_of(block), "block {block} is wrong");
    }
    (arrived.blocks, arrived.failure)
}

#[test]
fn an_owner_that_is_killed_in_mid_read_costs_blocks_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().join("nodes");
    let (node, directory, rank) = reader(&folder);
    let mut whole = 0;
    for round in 1..=rounds() {
        let other = Other::start(&folder, &format!("owner-{round}"));
        meet(&node, &directory, OWNER, Epoch(round));
        let plans = node.plan_reads(OWNER, NAMESPACE, GROUP, std::slice::from_ref(&rank)).expect("plans");
        let blocks = ask(&node, &plans);
        assert_eq!(blocks.len(), BLOCKS as usize);
        let delay = Duration::from_micros(round.wrapping_mul(0x9e37_79b9) % 15_000);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // The first round is left alone.
                if round > 1 {
                    std::thread::sleep(delay);
                    other.signal("-KILL");
                }
            });
            // What nobody disturbs arrives, however busy the machine is.
            let limit = Duration::from_secs(if round > 1 { 5 } else { 30 });
            let (arrived, failure) = read_and_compare(&blocks, &rank, limit);
            whole += usize::from(arrived == BLOCKS as usize);
            assert!(failure.is_some() || arrived == BLOCKS as usize, "what is missing has a reason");
        });
        drop(blocks);
        node.forget(OWNER).expect("forgotten");
    }
    assert!(whole > 0, "a read that nobody disturbs brings all");
}

#[test]
fn an_owner_that_was_stopped_is_fenced_by_its_lease() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().join("nodes");
    let (node, directory, rank) = reader(&folder);
    let other = Other::start(&folder, "owner-1");
    meet(&node, &directory, OWNER, Epoch(1));
    let plans = node.plan_reads(OWNER, NAMESPACE, GROUP, std::slice::from_ref(&rank)).expect("plans");
    let blocks = ask(&node, &plans);
    other.signal("-STOP");
    std::thread::sleep(LEASE * 4);
    other.signal("-CONT");
    let (arrived, failure) = read_and_compare(&blocks, &rank, Duration::from_secs(5));
    // It may have renewed the lease before it was stopped, never after.
    assert_eq!((arrived, failure), (0, Some(RemoteError::LeaseEnded { node: OWNER })));
    drop(blocks);
    let blocks = ask(&node, &plans);
    assert_eq!(read_and_compare(&blocks, &rank, Duration::from_secs(30)), (BLOCKS as usize, None));
}

#[test]
fn a_reader_that_is_killed_loses_its_lease() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().join("nodes");
    let guard: Arc<dyn Any + Send + Sync> = Arc::new(());
    let owner = owner(&folder, Epoch(1), &guard);
    let mut other = Other::start(&folder, "reader");
    meet(&owner.node, &owner.directory, READER, Epoch(0));
    let until = Instant::now() + SLACK;
    while owner.node.counts().leases_held == 0 {
        assert!(Instant::now() < until, "the reader takes a lease");
        std::thread::sleep(Duration::from_millis(5));
    }
    // Longer than a lease holds without its heartbeat.
    std::thread::sleep(LEASE * 3);
    assert_eq!(owner.node.counts().leases_held, 1, "a living reader keeps its lease");
    other.0.kill().expect("it runs");
    let until = Instant::now() + SLACK;
    while owner.node.counts().leases_held > 0 {
        assert!(Instant::now() < until, "no block is pinned after its lease's end");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(owner);
    assert_eq!(Arc::strong_count(&guard), 1, "nothing keeps the blocks");
}
