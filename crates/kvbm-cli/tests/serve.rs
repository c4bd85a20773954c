//! `kvbm serve` as an operator meets it: its first line, what it tells systemd, its errors, its
//! end, and an engine in another process that finds its blocks again.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

use kvbm::config::Config;
use kvbm::layout::{AxisOrder, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm::storage::{BoundLayout, SystemAllocator};
use kvbm::{BlockId, LookUp, Rank, TokenSequence};
use kvbm_node::{EngineTerms, LineTimes, MoverMemory, NodeEngine};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

fn configuration(folder: &Path) -> PathBuf {
    let path = folder.join("kvbm.toml");
    let text = format!(
        "[model]\nnum_layers = 2\nnum_kv_heads = 2\nhead_dim = 32\n\
         [namespace]\nmodel = \"test\"\n[host]\ncapacity = 32\n\
         [disk]\ndir = \"{0}/disk\"\ncapacity = 64\ndrive_writes_per_day = 0\n\
         [offload.g2_g3]\nwrite_through = true\nqueue_share = 1.0\n[policy]\nadmission = \"all\"\n\
         [admin]\nsocket = \"{0}/run/admin.sock\"\n\
         [node]\nsocket = \"{0}/run/node.sock\"\nengine_blocks = 64\n",
        folder.display()
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

fn engine_memory() -> BoundLayout {
    let config = LayoutConfig::builder().num_blocks(16).num_layers(2).outer_dim(2).page_size(16);
    let config = config.inner_dim(64).num_heads(2).dtype(kvbm::layout::DType::BF16).build().unwrap();
    let layout = LayerSeparate::new(config, AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap();
    BoundLayout::allocate(Arc::new(layout), &SystemAllocator::default()).unwrap()
}

fn bytes_of(tokens: &TokenSequence, block: usize, len: u64) -> Vec<u8> {
    let hash = *tokens.hashes()[block].as_bytes();
    (0..len as usize).map(|at| hash[at % 16] ^ (at / 16) as u8).collect()
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

#[test]
fn an_engine_finds_its_blocks_again_whichever_side_was_gone() {
    let folder = tempfile::tempdir().unwrap();
    let file = configuration(folder.path());
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
    let config = Config::load(Some(&file)).unwrap();
    let prompt: Vec<u32> = (0..16 * 6).collect();
    let tokens = TokenSequence::from_tokens(config.namespace().hasher().unwrap(), &prompt);
    let ids = |first: u32| (first..first + 6).map(BlockId).collect::<Vec<_>>();
    // One life of the engine saves; each later one, and each life of the daemon, loads.
    for life in 0..4 {
        let g1 = engine_memory();
        let len = g1.bytes_per_block();
        let times = LineTimes { silent_after: PATIENCE, ..LineTimes::default() };
        let terms = EngineTerms { times, call_time: PATIENCE, ..EngineTerms::new(&socket, "engine", 16) };
        let mover = MoverMemory { rank: Rank(0), device: None, g1: g1.clone() };
        let engine = NodeEngine::attach(terms, true, vec![mover]).unwrap();
        assert!(engine.wait_ready(PATIENCE), "{:?}", engine.status());
        if life == 0 {
            for (at, id) in ids(0).into_iter().enumerate() {
                // SAFETY: nothing is copied yet.
                unsafe { g1.write_block(id.0, &bytes_of(&tokens, at, len)) }.unwrap();
            }
            wait_for_all(&engine, &tokens, || drop(engine.offload(&ids(0), &tokens, 0).unwrap()));
        }
        wait_for_all(&engine, &tokens, || {});
        engine.commit("r", &ids(8)).unwrap();
        let until = Instant::now() + PATIENCE;
        let load = loop {
            match engine.finished().pop() {
                Some(load) => break load,
                None => assert!(Instant::now() < until, "the load does not end"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!((load.arrived, load.wanted), (6, 6), "{load:?}");
        for (at, id) in ids(8).into_iter().enumerate() {
            let mut found = vec![0; len as usize];
            // SAFETY: the load is over.
            unsafe { g1.read_block(id.0, &mut found) }.unwrap();
            assert!(found == bytes_of(&tokens, at, len), "life {life}, block {at}");
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
    let group = "layers=2 heads=2 head_dim=32";
    let text = format!(
        "[model]\ngroups = [\"full {group}\", \"window=64 {group}\"]\n[namespace]\nmodel = \"test\"\n\
         [device]\nlayout = \"fully-contiguous\"\n[host]\ncapacity = 32\n[node]\nsocket = \"{}\"\n",
        folder.path().join("groups.sock").display()
    );
    std::fs::write(&file, text).unwrap();
    for args in [&[][..], &["--take-over"]] {
        let (status, error) = run(args);
        assert_eq!(status, Some(1), "{error}");
        assert!(
            error.contains("model.groups = 2 cache groups: a node daemon keeps blocks of one"),
            "{error}"
        );
    }
}
