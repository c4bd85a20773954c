//! A leader and its workers in other processes, over sockets: volumes are registered and
//! unregistered while they run, and a worker that starts again learns of them. The workers are this
//! test binary, started anew.
#![cfg(feature = "worker")]
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod support;

use kvbm::config::Blocks;
use kvbm::device::{Device, EmulatedConfig, EmulatedDevice};
use kvbm::layout::{AxisOrder, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement};
use kvbm::plan::{Epoch, Message, wire};
use kvbm::pool::RegisterError;
use kvbm::storage::{BoundLayout, DeviceAllocator, SystemAllocator};
use kvbm::volumes::{BlobScope, BlobSlice, DirectoryVolume, Volume, VolumeRegistry};
use kvbm::worker::{Lane, LinkError, MessageSink, WorkerLink};
use kvbm::{
    KvBlockManager, Lost, Owned, ParkError, Rank, Tier, TokenSequence, VolumeDescriptor, VolumeId,
    VolumeSetError,
};
use kvbm_transfer::{TransferManager, VolumeTier, WorkerConfig};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::store::namespace_tag;
use support::{model, namespace, soon, tokens, unlimited};

const RANKS: u32 = 2;
const G1: u32 = 16;
const G2: u32 = 32;
/// Set in a process that is a worker: `SOCKET RANK EPOCH`.
const WORKER: &str = "KVBM_TEST_WORKER";

/// Bytes after their length; `None` at the end.
fn receive(stream: &mut UnixStream) -> Option<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    assert!(bytes.len() <= wire::MAX_BYTES);
    stream.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

fn send(stream: &mut UnixStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(&(bytes.len() as u32).to_le_bytes())?;
    stream.write_all(bytes)
}

/// The layout of a rank: half of the heads.
fn shape(blocks: u32, alignment: u64) -> LayoutConfig {
    let model = model();
    let heads = model.num_kv_heads / RANKS;
    LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(model.num_layers)
        .outer_dim(model.outer_dim)
        .page_size(model.page_size)
        .inner_dim(heads * model.head_dim)
        .num_heads(heads)
        .dtype(model.dtype)
        .alignment(alignment)
        .build()
        .unwrap()
}

/// Not a test but a worker, where the variable says so: until the leader hangs up.
#[test]
fn worker_process() {
    let Ok(line) = std::env::var(WORKER) else { return };
    let [socket, rank, epoch] = std::array::from_fn(|at| line.split(' ').nth(at).unwrap().to_owned());
    let (rank, epoch) = (Rank(rank.parse().unwrap()), Epoch(epoch.parse().unwrap()));
    let mut stream = UnixStream::connect(socket).unwrap();
    let device = EmulatedDevice::new(EmulatedConfig { memory_bytes: 16 << 20, ..EmulatedConfig::default() });
    let device: Arc<dyn Device> = Arc::new(device.unwrap());
    let g1 = LayerSeparate::new(shape(G1, 1), AxisOrder::Nhd, OuterPlacement::KvOuter).unwrap();
    let g2 = FullyContiguous::new(shape(G2, 4096), AxisOrder::Nhd).unwrap();
    let mut config = WorkerConfig::new(rank, epoch, *namespace_tag().as_bytes());
    let allocator = DeviceAllocator::new(Arc::clone(&device));
    config.device = Some(device);
    config.g1 = Some(BoundLayout::allocate(Arc::new(g1), &allocator).unwrap());
    config.g2 = Some(BoundLayout::allocate(Arc::new(g2), &SystemAllocator::default()).unwrap());
    let heads = model().num_kv_heads / RANKS;
    config.volumes = Some(VolumeTier {
        registry: Arc::new(VolumeRegistry::new()),
        slice: BlobSlice {
            first_layer: 0,
            num_layers: model().num_layers,
            first_head: u32::from(rank.0) * heads,
            num_heads: heads,
        },
        model_heads: model().num_kv_heads,
        writes: true,
        threads: 2,
    });
    let out = Mutex::new(stream.try_clone().unwrap());
    // A leader that is gone ends the loop below.
    let sink = Arc::new(move |bytes: Vec<u8>| drop(send(&mut out.lock().unwrap(), &bytes)));
    let worker = TransferManager::start(config, sink).unwrap();
    while let Some(command) = receive(&mut stream) {
        worker.submit(&command).unwrap();
    }
    worker.shutdown(Instant::now() + Duration::from_secs(60)).unwrap();
}

/// The leader's end: a line to whichever process serves the rank now.
#[derive(Clone)]
struct Line {
    rank: Rank,
    epoch: Epoch,
    sink: MessageSink,
    socket: PathBuf,
    /// Whether a process has ever served the rank.
    served: Arc<AtomicBool>,
    now: Arc<Mutex<Option<Serving>>>,
}

/// The process that serves a rank.
struct Serving {
    child: Child,
    stream: UnixStream,
    /// One that takes another's place is sent nothing before the leader is given its `Ready`.
    open: Arc<AtomicBool>,
}

impl Line {
    /// Starts a process for the rank.
    fn start(&self) {
        // Of an earlier process.
        let _ = std::fs::remove_file(&self.socket);
        let listener = UnixListener::bind(&self.socket).unwrap();
        let mut worker = Command::new(std::env::current_exe().unwrap());
        worker.args(["--exact", "worker_process", "--test-threads", "1"]).stdout(Stdio::null());
        let line = format!("{} {} {}", self.socket.display(), self.rank.0, self.epoch.0);
        let child = worker.env(WORKER, line).spawn().unwrap();
        let (stream, _) = listener.accept().unwrap();
        let (mut reader, sink) = (stream.try_clone().unwrap(), Arc::clone(&self.sink));
        let open = Arc::new(AtomicBool::new(!self.served.swap(true, Ordering::AcqRel)));
        *self.now.lock().unwrap() = Some(Serving { child, stream, open: Arc::clone(&open) });
        std::thread::spawn(move || {
            while let Some(message) = receive(&mut reader) {
                let is_ready = matches!(wire::decode_message(&message), Ok(Message::Ready { .. }));
                open.fetch_or(is_ready, Ordering::AcqRel);
                sink(message);
            }
        });
    }

    fn kill(&self) {
        if let Some(Serving { mut child, .. }) = self.now.lock().unwrap().take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

impl WorkerLink for Line {
    fn send(&self, _lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        let mut now = self.now.lock().unwrap();
        let is_open = |serving: &&mut Serving| serving.open.load(Ordering::Acquire);
        let serving = now.as_mut().filter(is_open).ok_or(LinkError::Closed)?;
        send(&mut serving.stream, command).map_err(|_| LinkError::Closed)
    }
}

/// Processes end with the test, however it ends.
struct Lines(Vec<Line>);

impl Drop for Lines {
    fn drop(&mut self) {
        self.0.iter().for_each(Line::kill);
    }
}

fn start(folder: &Path) -> (KvBlockManager<Owned>, Lines) {
    let mut lines = Lines(Vec::new());
    let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
    let builder = builder.device(Blocks(G1)).host(Blocks(G2)).tensor_parallel(RANKS);
    let manager = builder.configure(|config| {
        unlimited(config);
        config.volumes.queue_share = 1.0;
        config.volumes.recheck = Duration::from_millis(1);
        config.volumes.longest_pause = Duration::from_millis(50);
    });
    let manager = manager.build_with_workers(|rank, epoch, sink| {
        let socket = folder.join(format!("rank-{rank}"));
        let line = Line { rank, epoch, sink, socket, served: Arc::default(), now: Arc::default() };
        line.start();
        lines.0.push(line.clone());
        Box::new(line)
    });
    (manager.unwrap(), lines)
}

/// Registers a sequence; nobody looks at what its blocks hold.
fn put(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) {
    let fresh = manager.allocate(sequence.num_blocks()).expect("room");
    let (done, _) = manager.commit(fresh, sequence, 0).expect("commit");
    drop(manager.register(done).expect("register"));
    assert!(manager.wait_offloads(soon()));
}

/// How many blocks come from the volumes alone.
fn onboard(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> usize {
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).expect("a tier of ours");
    }
    let arrived = match manager.onboard(manager.match_prefix(sequence)).wait() {
        Ok(cached) => cached.len(),
        Err(error) => error.arrived.len(),
    };
    assert!(manager.wait_offloads(soon()));
    arrived
}

fn objects(folder: &Path) -> usize {
    let volume = DirectoryVolume::open(at(VolumeId(9), folder)).expect("a folder");
    let scope = BlobScope { namespace: namespace_tag(), label: None };
    volume.list(&scope, None, 1000, soon()).expect("a folder").len()
}

fn at(id: VolumeId, folder: &Path) -> VolumeDescriptor {
    let descriptor = VolumeDescriptor::new(id, format!("dir://{}", folder.display()));
    VolumeDescriptor { deadline: Duration::from_secs(20), ..descriptor }
}

#[test]
fn workers_in_other_processes_learn_of_volumes() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    for path in [&first, &second] {
        std::fs::create_dir(path).unwrap();
    }
    let (manager, lines) = start(folder.path());
    let (one, id) = (tokens(&manager, 1, 4), VolumeId(1));

    // A place that the workers cannot open is refused, in their words; the leader has never seen
    // it.
    let error = manager.register_volume(at(id, &folder.path().join("absent"))).expect_err("nothing is there");
    assert!(matches!(error, VolumeSetError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("mount it first"), "{error}");

    manager.register_volume(at(id, &first)).expect("both ranks open it");
    put(&manager, &one);
    assert_eq!(objects(&first), 8, "four blocks of two ranks");
    assert_eq!(onboard(&manager, &one), 4, "from the volume, verified by both ranks");

    // A worker that starts later is told of it.
    lines.0[1].kill();
    assert_eq!(onboard(&manager, &one), 0, "half of every block is out of reach");
    lines.0[1].start();
    let until = soon();
    while onboard(&manager, &one) < 4 {
        assert!(Instant::now() < until, "the new worker finds the volume");
    }

    // One that starts before its mount is there opens it later; until then the volume is down.
    lines.0[1].kill();
    let away = folder.path().join("away");
    std::fs::rename(&first, &away).unwrap();
    lines.0[1].start();
    let until = soon();
    while !manager.status().volumes[0].down {
        assert!(Instant::now() < until, "the new worker says that it cannot open the volume");
        std::thread::yield_now();
    }
    assert_eq!(onboard(&manager, &one), 0);
    std::fs::rename(&away, &first).unwrap();
    let until = soon();
    while onboard(&manager, &one) < 4 {
        assert!(Instant::now() < until, "the new worker finds the volume when it is mounted");
    }
    assert!(!manager.status().volumes[0].down);

    // Gone from the workers too: another place may have the id, and what was in the first is not
    // there.
    assert_eq!(manager.unregister_volume(id).expect("it is registered"), 4);
    assert_eq!(onboard(&manager, &one), 0);
    manager.register_volume(at(id, &second)).expect("the workers have closed the other one");
    let two = tokens(&manager, 2, 3);
    put(&manager, &two);
    assert_eq!((objects(&first), objects(&second)), (8, 6));
    assert_eq!((onboard(&manager, &two), onboard(&manager, &one)), (3, 0));
    manager.register_volume(at(VolumeId(2), &first)).expect("beside it");
    assert_eq!((onboard(&manager, &one), onboard(&manager, &two)), (4, 3));
    assert_eq!(manager.status().volumes.len(), 2);
}

#[test]
fn what_was_given_out_before_a_worker_started_again_is_worth_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (manager, lines) = start(folder.path());
    let (one, two) = (tokens(&manager, 1, 4), tokens(&manager, 2, 4));
    for round in 0..2 {
        put(&manager, &one);
        assert_eq!(manager.look_up(&one).len(), 4);
        let complete = manager.commit(manager.allocate(4).unwrap(), &two, 0).unwrap().0;
        let private = || manager.commit(manager.allocate(3).unwrap(), &tokens(&manager, 3, 1), 0).unwrap().1;
        let (running, parked) = (private(), manager.park(private()).unwrap());
        lines.0[1].kill();
        if round == 1 {
            assert_eq!(manager.rank_lost(Rank(1)), Ok(0), "it owes nothing");
        }
        lines.0[1].start();
        let until = soon();
        while !complete.is_lost() || manager.status().ranks[1].is_lost {
            assert!(Instant::now() < until, "the leader hears of the new worker");
            std::thread::yield_now();
        }
        assert_eq!(manager.look_up(&one).len(), 0);
        let rejected = manager.register(complete).unwrap_err();
        assert_eq!(rejected.error, RegisterError::Lost(Lost { tier: Tier::G1 }));
        let refused = manager.park(running).unwrap_err();
        assert!(matches!(refused.error, ParkError::Lost(Lost { tier: Tier::G1 })), "{refused}");
        let not_resumed = manager.resume(parked).unwrap_err();
        assert!(matches!(not_resumed.error, ParkError::Lost(Lost { tier: Tier::G2 })), "{not_resumed}");
        drop((rejected, refused, not_resumed));
        // Computed again, all of it is as good as ever.
        put(&manager, &two);
        assert_eq!(onboard(&manager, &two), 0, "cleared: there is no volume");
        put(&manager, &two);
        assert_eq!(manager.clear(Tier::G1), Ok(4));
        assert_eq!(manager.onboard(manager.match_prefix(&two)).wait().unwrap().len(), 4);
        let parked = manager.park(private()).unwrap();
        assert_eq!(manager.resume(parked).unwrap().len(), 2);
        let tiers = manager.status().tiers;
        assert!(tiers.iter().all(|tier| (tier.arriving, tier.held) == (0, 0)), "{tiers:?}");
        for tier in [Tier::G1, Tier::G2] {
            manager.clear(tier).unwrap();
        }
    }
}
