//! `kvbm serve` as an operator meets it: its first line, what it tells systemd, its errors, its
//! end, and an engine in another process that finds its blocks again.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use kvbm::config::Config;
use kvbm::layout::{
    AxisOrder, BlockLayout, LayerSeparate, LayoutConfig, OpaqueLayout, OpaqueTensor, OuterPlacement,
};
use kvbm::storage::{BoundLayout, SystemAllocator};
use kvbm::{BlockId, GroupId, GroupKind, LookUp, Rank, TokenSequence};
use kvbm_node::{EngineTerms, LineTimes, MoverMemory, NodeEngine};
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// Models of one cache group and of three: the settings of `[model]`, and for each group what its
/// layers keep, and how many of so many blocks at the end of a prefix it needs.
struct Model {
    settings: &'static str,
    groups: &'static [(GroupKind, usize)],
}

const ONE_GROUP: Model = Model {
    settings: "num_layers = 2\nnum_kv_heads = 2\nhead_dim = 32\n",
    groups: &[(GroupKind::Full, usize::MAX)],
};

const THREE_GROUPS: Model = Model {
    settings: "groups = [\"window=31 layers=1 rank_bytes=512\", \"full layers=2 rank_bytes=5000\", \
               \"state layers=1 rank_bytes=301\"]\n",
    groups: &[(GroupKind::SlidingWindow(31), 2), (GroupKind::Full, usize::MAX), (GroupKind::State, 1)],
};

fn configuration(folder: &Path) -> PathBuf {
    configuration_of(&ONE_GROUP, folder)
}

fn configuration_of(model: &Model, folder: &Path) -> PathBuf {
    let path = folder.join("kvbm.toml");
    let text = format!(
        "[model]\n{1}\
         [namespace]\nmodel = \"test\"\n[host]\ncapacity = 32\n\
         [disk]\ndir = \"{0}/disk\"\ncapacity = 64\ndrive_writes_per_day = 0\n\
         [offload.g2_g3]\nwrite_through = true\nqueue_share = 1.0\n[policy]\nadmission = \"all\"\n\
         [admin]\nsocket = \"{0}/run/admin.sock\"\n\
         [node]\nsocket = \"{0}/run/node.sock\"\nengine_blocks = 64\n",
        folder.display(),
        model.settings
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// A daemon that has said its first line. It ends with this.
struct DaemonProcess {
    child: Child,
    first_line: String,
}

impl DaemonProcess {
    fn start(config: &Path, notify: &Path) -> Self {
        Self::start_with(config, notify, &[])
    }

    fn start_with(config: &Path, notify: &Path, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
        command.arg("serve").arg("--config").arg(config).args(more).env("NOTIFY_SOCKET", notify);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut first_line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first_line).unwrap();
        Self { child, first_line }
    }

    /// Asks it to end; its exit status.
    fn terminate(&mut self) -> Option<i32> {
        // SAFETY: a signal to a child that was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) }, 0);
        self.child.wait().unwrap().code()
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // One that was terminated is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Model {
    /// Memory of the engine's 32 blocks, by group.
    fn engine_memory(&self) -> Vec<BoundLayout> {
        let layouts: Vec<Arc<dyn BlockLayout>> = if self.groups.len() == 1 {
            let config = LayoutConfig::builder().num_blocks(32).num_layers(2).outer_dim(2).page_size(16);
            let config = config.inner_dim(64).num_heads(2).dtype(kvbm::layout::DType::BF16).build().unwrap();
            vec![Arc::new(LayerSeparate::new(config, AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap())]
        } else {
            let opaque = |bytes: &[u32]| -> Arc<dyn BlockLayout> {
                let tensor = |(region, bytes): (u32, &u32)| OpaqueTensor {
                    region,
                    offset: 0,
                    block_stride: u64::from(*bytes),
                    block_bytes: *bytes,
                };
                Arc::new(OpaqueLayout::new(32, (0..).zip(bytes).map(tensor)).unwrap())
            };
            vec![opaque(&[512]), opaque(&[5000, 5000]), opaque(&[301])]
        };
        let bound = |layout| BoundLayout::allocate(layout, &SystemAllocator::default()).unwrap();
        layouts.into_iter().map(bound).collect()
    }

    /// For each group its blocks of a prefix of six, and ids for them from `first` on.
    fn places(&self, first: u32) -> Vec<(Range<usize>, Vec<BlockId>)> {
        let mut next = first;
        let place = |(_, needed): &(GroupKind, usize)| {
            let range = 6 - needed.min(&6)..6;
            let from = next;
            next += range.len() as u32;
            (range, (from..next).map(BlockId).collect())
        };
        self.groups.iter().map(place).collect()
    }
}

fn bytes_of(tokens: &TokenSequence, group: usize, block: usize, len: u64) -> Vec<u8> {
    let hash = *tokens.hashes()[block].as_bytes();
    (0..len as usize).map(|at| hash[at % 16] ^ (at / 16) as u8 ^ (group << 6) as u8).collect()
}

fn found(engine: &NodeEngine, tokens: &TokenSequence) -> usize {
    match engine.look_up("r", tokens, 0).unwrap() {
        LookUp::Ready { blocks, .. } => blocks,
        LookUp::Pending => panic!("there are no volumes"),
    }
}

/// Looks up until all blocks are there.
fn wait_for_all(engine: &NodeEngine, tokens: &TokenSequence, mut each: impl FnMut()) {
    let until = Instant::now() + PATIENCE;
    while found(engine, tokens) < tokens.num_blocks() {
        assert!(Instant::now() < until, "{:?}", engine.status());
        engine.abandon("r").unwrap();
        each();
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// An engine that is attached, and its memory.
fn attach(model: &Model, socket: &Path) -> (NodeEngine, Vec<BoundLayout>) {
    let g1 = model.engine_memory();
    let times = LineTimes { silent_after: PATIENCE, ..LineTimes::default() };
    let groups = model.groups.iter().map(|(kind, _)| *kind).collect();
    let terms = EngineTerms::new(socket, "engine", 32);
    let terms = EngineTerms { groups, times, call_time: PATIENCE, ..terms };
    let mover = MoverMemory { rank: Rank(0), device: None, g1: g1.clone() };
    let engine = NodeEngine::attach(terms, true, vec![mover]).unwrap();
    assert!(engine.wait_ready(PATIENCE), "{:?}", engine.status());
    (engine, g1)
}

/// Computes a prefix of six blocks at the front of G1 and offers it, until the daemon has all.
fn save(engine: &NodeEngine, model: &Model, g1: &[BoundLayout], tokens: &TokenSequence) {
    let places = model.places(0);
    for (group, (range, ids)) in places.iter().enumerate() {
        for (at, id) in range.clone().zip(ids) {
            let bytes = bytes_of(tokens, group, at, g1[group].bytes_per_block());
            // SAFETY: nothing is copied yet.
            unsafe { g1[group].write_block(id.0, &bytes) }.unwrap();
        }
    }
    wait_for_all(engine, tokens, || {
        for (group, (range, ids)) in places.iter().enumerate() {
            engine.offload_group(GroupId(group as u16), ids, tokens, range.start, None).unwrap();
        }
    });
}

/// No block goes to disk while it fits into host memory: the end of the daemon saves it.
#[test]
fn a_daemon_that_ends_saves_what_only_host_memory_has() {
    for model in [&ONE_GROUP, &THREE_GROUPS] {
        let folder = tempfile::tempdir().unwrap();
        let file = configuration_of(model, folder.path());
        let text = std::fs::read_to_string(&file).unwrap();
        let never = "write_through = false\nahead_share = 0\nwatermark = 1";
        let text = text.replace("write_through = true", never);
        std::fs::write(&file, &text).unwrap();
        let (socket, notify) = (folder.path().join("run/node.sock"), folder.path().join("notify"));
        let mut daemon = DaemonProcess::start(&file, &notify);
        let config = Config::from_toml(&text, "test").unwrap();
        let prompt: Vec<u32> = (0..16 * 6).collect();
        let tokens = TokenSequence::from_tokens(config.namespace().hasher().unwrap(), &prompt);
        let (engine, g1) = attach(model, &socket);
        save(&engine, model, &g1, &tokens);
        let mut status = Command::new(env!("CARGO_BIN_EXE_kvbm"));
        status.args(["ctl", "status", "--json", "--socket"]).arg(folder.path().join("run/admin.sock"));
        let status: serde_json::Value = serde_json::from_slice(&status.output().unwrap().stdout).unwrap();
        let used = |tier: &str| {
            let mut tiers = status["tiers"].as_array().unwrap().iter();
            tiers.find(|status| status["tier"] == tier).unwrap()["used"].as_u64().unwrap()
        };
        assert!(used("g2") > 0, "{status:#}");
        assert_eq!(used("g3"), 0, "nothing is on disk: {status:#}");
        assert_eq!(daemon.terminate(), Some(0));
        let _next = DaemonProcess::start(&file, &notify);
        wait_for_all(&engine, &tokens, || {});
        let LookUp::Ready { by_tier, .. } = engine.look_up("r", &tokens, 0).unwrap() else {
            panic!("there are no volumes")
        };
        assert_eq!(by_tier, [0, 0, 6, 0]);
    }
}

#[test]
fn an_engine_finds_its_blocks_again_whichever_side_was_gone() {
    for model in [&ONE_GROUP, &THREE_GROUPS] {
        found_again(model);
    }
}

fn found_again(model: &Model) {
    let folder = tempfile::tempdir().unwrap();
    let file = configuration_of(model, folder.path());
    let notify = folder.path().join("notify");
    let manager = UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let notification = || {
        let mut state = [0; 32];
        let count = manager.recv(&mut state).unwrap();
        String::from_utf8_lossy(&state[..count]).into_owned()
    };
    let mut daemon = DaemonProcess::start(&file, &notify);
    let socket = folder.path().join("run/node.sock");
    let expected =
        format!("kvbm serve: test on 1 ranks at {}: G2 32 blocks, G3 64 blocks in", socket.display());
    assert!(daemon.first_line.starts_with(&expected), "{}", daemon.first_line);
    assert_eq!(notification(), "READY=1");
    let config = Config::from_toml(&std::fs::read_to_string(&file).unwrap(), "test").unwrap();
    let prompt: Vec<u32> = (0..16 * 6).collect();
    let tokens = TokenSequence::from_tokens(config.namespace().hasher().unwrap(), &prompt);
    // One life of the engine saves; each later one, and each life of the daemon, loads.
    for life in 0..4 {
        let (engine, g1) = attach(model, &socket);
        if life == 0 {
            save(&engine, model, &g1, &tokens);
        }
        wait_for_all(&engine, &tokens, || {});
        let to = model.places(16);
        let promised = engine.look_up_groups("r", &tokens, 0).unwrap().groups;
        assert!(promised.iter().eq(to.iter().map(|(range, _)| range)), "{promised:?}");
        let lists: Vec<&[BlockId]> = to.iter().map(|(_, ids)| ids.as_slice()).collect();
        engine.commit_groups("r", &lists, None, None).unwrap();
        let until = Instant::now() + PATIENCE;
        let load = loop {
            match engine.finished().pop() {
                Some(load) => break load,
                None => assert!(Instant::now() < until, "the load does not end"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!((load.arrived, load.wanted), (6, 6), "{load:?}");
        for (group, (range, ids)) in to.iter().enumerate() {
            for (at, id) in range.clone().zip(ids) {
                let mut found = vec![0; g1[group].bytes_per_block() as usize];
                // SAFETY: the load is over.
                unsafe { g1[group].read_block(id.0, &mut found) }.unwrap();
                let expected = bytes_of(&tokens, group, at, found.len() as u64);
                assert!(found == expected, "life {life}, group {group}, block {at}");
            }
        }
        if life == 0 {
            // A new daemon takes over from one that was drained: host memory has the blocks, and
            // not the disk alone.
            let admin = folder.path().join("run/admin.sock");
            let mut drain = Command::new(env!("CARGO_BIN_EXE_kvbm"));
            let drained = drain.args(["ctl", "drain", "--socket"]).arg(&admin).output().unwrap();
            assert!(drained.status.success(), "{}", String::from_utf8_lossy(&drained.stderr));
            let mut old =
                std::mem::replace(&mut daemon, DaemonProcess::start_with(&file, &notify, &["--take-over"]));
            assert_eq!(old.child.wait().unwrap().code(), Some(0));
            assert_eq!((notification(), notification()), ("STOPPING=1".to_owned(), "READY=1".to_owned()));
            wait_for_all(&engine, &tokens, || {});
            let LookUp::Ready { by_tier, .. } = engine.look_up("r", &tokens, 0).unwrap() else {
                panic!("there are no volumes")
            };
            assert_eq!(by_tier, [0, 6, 0, 0]);
        }
        if life == 1 {
            // The engine stays, and attaches to the next daemon by itself.
            assert_eq!(daemon.terminate(), Some(0));
            assert_eq!(notification(), "STOPPING=1");
            assert!(!socket.exists());
            assert_eq!(found(&engine, &tokens), 0, "a miss, no error");
            daemon = DaemonProcess::start(&file, &notify);
            assert_eq!(notification(), "READY=1");
            wait_for_all(&engine, &tokens, || {});
        }
    }
}

#[test]
fn what_is_missing_or_taken_is_reported_before_anything_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let file = configuration(folder.path());
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
        let output = command.arg("serve").arg("--config").arg(&file).args(args).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, error) = run(&["--take-over"]);
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("cannot take over from the daemon at"), "{error}");
    let _daemon = DaemonProcess::start(&file, Path::new("/dev/null"));
    let (status, error) = run(&[]);
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains("disk") || error.contains("another process listens"), "{error}");
    let text = std::fs::read_to_string(&file).unwrap();
    let without = text.split("[admin]").next().unwrap();
    std::fs::write(&file, without).unwrap();
    let (status, error) = run(&[]);
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("--socket PATH") && error.contains("node.socket"), "{error}");
}
