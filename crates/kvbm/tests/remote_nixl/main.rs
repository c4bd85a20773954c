//! Managers of several processes share host memory over real NIXL.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

#[cfg(feature = "nats")]
mod kills;
#[cfg(feature = "nats")]
#[path = "../../../kvbm-events/tests/support/nats_server.rs"]
mod nats_server;
#[cfg(feature = "nats")]
#[path = "../../../kvbm-events/tests/support/ports.rs"]
mod ports;
#[path = "../support/mod.rs"]
mod support;

use crate::support::store::{onboard, put};
use crate::support::{model, namespace, soon, tokens, unlimited};
use kvbm::config::Blocks;
use kvbm::plan::NodeId;
use kvbm::{KvBlockManager, Owned};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Says to a process of this test that it is a node, and which.
const CHILD: &str = "KVBM_REMOTE_TEST_NODE";
const FOLDER: &str = "KVBM_REMOTE_TEST_FOLDER";
const BLOCKS: u32 = 40;
const READ_DEADLINE: Duration = Duration::from_secs(5);

fn node(id: u32, folder: &Path) -> KvBlockManager<Owned> {
    let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
    let configured = builder.device(Blocks(256)).host(Blocks(256)).configure(|config| {
        unlimited(config);
        config.remote.enabled = true;
        config.remote.node = id;
        config.remote.directory = Some(folder.join("peers"));
        config.remote.refresh = Duration::from_millis(50);
        config.remote.lookup_deadline = Duration::from_secs(2);
        config.remote.read_deadline = READ_DEADLINE;
        config.remote.lease = Duration::from_secs(2);
        config.set("remote.ucx", "num_workers=2").expect("as set up");
    });
    configured.build().unwrap()
}

/// A node in a process of its own, which has the sequence that begins with its number.
struct NodeProcess {
    child: Child,
    /// Kept open: what the process says at its end must have somewhere to go.
    _says: BufReader<ChildStdout>,
}

impl NodeProcess {
    fn start(id: u32, folder: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_node_of_its_own", "--nocapture"]);
        command.env(CHILD, id.to_string()).env(FOLDER, folder);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut says = BufReader::new(child.stdout.take().unwrap());
        let is_ready = |line: String| line.contains("node is ready");
        assert!(says.by_ref().lines().map_while(Result::ok).any(is_ready), "node {id}");
        Self { child, _says: says }
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        // It ends with its standard input; one that was killed has ended.
        drop(self.child.stdin.take());
        let _ended = self.child.wait();
    }
}

/// The processes that the other test starts run this; elsewhere it has nothing to do.
#[test]
fn a_node_of_its_own() {
    let Some(id) = std::env::var_os(CHILD) else {
        println!("not started by the other test");
        return;
    };
    let id: u32 = id.to_str().unwrap().parse().unwrap();
    let folder = std::path::PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let manager = node(id, &folder);
    put(&manager, &tokens(&manager, id, BLOCKS));
    let kept = manager.look_up(&tokens(&manager, id, BLOCKS));
    assert!(kept.iter().all(|place| place.contains(kvbm::Tier::G2)) && kept.len() == BLOCKS as usize);
    println!("node is ready");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn processes_share_what_they_have_and_a_killed_one_is_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let mut second = NodeProcess::start(2, folder.path());
    let mut third = NodeProcess::start(3, folder.path());
    let manager = node(1, folder.path());
    let until = soon();
    while manager.peers().len() < 2 {
        assert!(Instant::now() < until, "the nodes find each other");
        std::thread::sleep(Duration::from_millis(10));
    }
    for id in [2, 3] {
        let sequence = tokens(&manager, id, BLOCKS);
        // They answer as soon as they know this node.
        while manager.match_prefix(&sequence).is_empty() {
            assert!(Instant::now() < until, "node {id} answers");
        }
        assert_eq!(onboard(&manager, &sequence), BLOCKS as usize, "every byte is compared");
        assert_eq!(manager.metrics().peer(NodeId(id)).blocks.get(), u64::from(BLOCKS));
    }

    // Killed between the look-up and the read.
    for tier in [kvbm::Tier::G1, kvbm::Tier::G2] {
        manager.clear(tier).unwrap();
    }
    let lost = tokens(&manager, 2, BLOCKS);
    let prefix = manager.match_prefix(&lost);
    assert_eq!(prefix.len(), BLOCKS as usize);
    second.child.kill().unwrap();
    second.child.wait().unwrap();
    let began = Instant::now();
    let error = manager.onboard(prefix).wait().map(|cached| cached.len()).unwrap_err();
    assert!(error.arrived.is_empty(), "{error}");
    assert!(began.elapsed() < READ_DEADLINE + Duration::from_secs(5), "{:?}", began.elapsed());
    drop(error);
    let other = tokens(&manager, 3, BLOCKS);
    let until = soon();
    while onboard(&manager, &other) < BLOCKS as usize {
        assert!(Instant::now() < until, "the other node is read");
    }
    drop(third.child.stdin.take());
    assert!(third.child.wait().unwrap().success(), "it ends in order");
}
