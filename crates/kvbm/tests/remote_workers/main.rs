//! A leader and its workers in other processes, over sockets. The workers are this test binary,
//! started anew, which the tests kill, stop and start again.
#![cfg(feature = "worker")]
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a panic is a failed test")]

mod leaving;
mod memory;
mod processes;
#[path = "../support/mod.rs"]
mod support;

use crate::memory::{Mapping, block_bytes, engine_memory};
use crate::processes::{Process, Processes};
use crate::support::store::namespace_tag;
use crate::support::{expected, model, soon, tokens, unlimited};
use kvbm::config::{Blocks, Config};
use kvbm::pool::RegisterError;
use kvbm::volumes::{BlobScope, DirectoryVolume, Volume};
use kvbm::{
    BlockId, BuildError, Engine, EngineError, G1Memory, KvBlockManager, Lost, Owned, ParkError, Rank,
    SequenceHash, Tier, TokenSequence, VolumeDescriptor, VolumeId, VolumeSetError, WorkerServer,
};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const RANKS: u32 = 2;
const G1: u32 = 16;
const G2: u32 = 32;
const G3: u32 = 64;
/// Set in a process that is a worker: `FOLDER RANK`.
const WORKER: &str = "KVBM_TEST_WORKER";
/// Set in a process that is a leader: its folder.
const LEADER: &str = "KVBM_TEST_LEADER";

fn socket(folder: &Path, rank: u16) -> PathBuf {
    folder.join(format!("rank-{rank}.sock"))
}

/// Memory of a rank that this process and its worker share: there is one where the engine owns G1.
fn shared(folder: &Path, rank: u16) -> PathBuf {
    folder.join(format!("g1-{rank}"))
}

/// The configuration of leader and workers. A disk is there where its folder is.
fn config(folder: &Path) -> Config {
    let mut config = Config { model: model(), ..Config::default() };
    unlimited(&mut config);
    config.namespace.model = "test-model".into();
    config.namespace.weights = "1".into();
    config.parallelism.tensor_parallel = RANKS;
    config.parallelism.workers = (0..RANKS as u16).map(|rank| socket(folder, rank)).collect();
    config.device.capacity = Blocks(G1).into();
    config.host.capacity = Blocks(G2).into();
    if folder.join("disk").exists() {
        config.disk.dir = Some(folder.join("disk"));
        config.disk.capacity = Blocks(G3).into();
        config.offload.g2_g3.write_through = !folder.join(leaving::KEEPS).exists();
    }
    config.volumes.queue_share = 1.0;
    config.volumes.recheck = Duration::from_millis(1);
    config.volumes.longest_pause = Duration::from_millis(50);
    config
}

/// Ends this process when the one that started it has gone.
fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
}

/// Not a test but a worker, where the variable says so.
#[test]
fn worker_process() {
    let Ok(line) = std::env::var(WORKER) else { return };
    end_with_parent();
    let (folder, rank) = line.rsplit_once(' ').unwrap();
    let (folder, rank) = (Path::new(folder), rank.parse().unwrap());
    let memory = if shared(folder, rank).exists() { engine_memory(folder, rank) } else { G1Memory::Owned };
    let server = WorkerServer::bind(&config(folder), Rank(rank), &memory, &socket(folder, rank)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| leaving::leave_when_told(&server, folder));
        server.serve();
    });
}

/// Not a test but a leader, where the variable says so: it writes a sequence to disk, then waits to
/// be killed.
#[test]
fn leader_process() {
    let Ok(folder) = std::env::var(LEADER) else { return };
    end_with_parent();
    let folder = Path::new(&folder);
    let bench = Bench::on(folder);
    bench.put(&bench.sequence(1));
    bench.manager.flush(Duration::from_secs(60)).unwrap();
    std::fs::write(folder.join("written"), "").unwrap();
    // More is under way when it is killed.
    loop {
        bench.put(&bench.sequence(2));
    }
}

fn start(folder: &Path) -> (KvBlockManager<Owned>, Processes) {
    let processes = Processes::start_all(folder);
    (KvBlockManager::<Owned>::builder().config(config(folder)).build().unwrap(), processes)
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
    let (manager, mut workers) = start(folder.path());
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
    workers.kill(1);
    assert_eq!(onboard(&manager, &one), 0, "half of every block is out of reach");
    workers.start(1);
    let until = soon();
    while onboard(&manager, &one) < 4 {
        assert!(Instant::now() < until, "the new worker finds the volume");
    }

    // One that starts before its mount is there opens it later; until then the volume is down.
    workers.kill(1);
    let away = folder.path().join("away");
    std::fs::rename(&first, &away).unwrap();
    workers.start(1);
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
    let (manager, mut workers) = start(folder.path());
    let (one, two) = (tokens(&manager, 1, 4), tokens(&manager, 2, 4));
    for round in 0..2 {
        put(&manager, &one);
        assert_eq!(manager.look_up(&one).len(), 4);
        let complete = manager.commit(manager.allocate(4).unwrap(), &two, 0).unwrap().0;
        let private = || manager.commit(manager.allocate(3).unwrap(), &tokens(&manager, 3, 1), 0).unwrap().1;
        let (running, parked) = (private(), manager.park(private()).unwrap());
        workers.kill(1);
        if round == 1 {
            assert_eq!(manager.rank_lost(Rank(1)), Ok(0), "it owes nothing");
        }
        workers.start(1);
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

/// An engine whose G1 lies in memory that it shares with its workers.
struct Bench {
    manager: KvBlockManager<Engine>,
    memory: Vec<Mapping>,
}

impl Bench {
    /// Lays out the folder: memory, and a disk.
    fn prepare(folder: &Path) {
        std::fs::create_dir(folder.join("disk")).unwrap();
        for rank in 0..RANKS as u16 {
            let file = File::create(shared(folder, rank)).unwrap();
            file.set_len(u64::from(G1) * block_bytes() as u64).unwrap();
        }
    }

    fn on(folder: &Path) -> Self {
        Self::with_deadline(folder, Duration::from_secs(2))
    }

    fn with_deadline(folder: &Path, deadline: Duration) -> Self {
        let config = config(folder);
        let manager = KvBlockManager::<Owned>::builder()
            .model(model())
            .namespace(support::namespace())
            .engine_blocks(G1)
            .configure(|own| {
                let namespace = own.namespace.clone();
                *own = config;
                own.namespace = namespace;
                own.transfer.deadline = deadline;
            })
            .build()
            .unwrap();
        let memory = (0..RANKS as u16).map(|rank| Mapping::of(&shared(folder, rank))).collect();
        Self { manager, memory }
    }

    fn sequence(&self, start: u32) -> TokenSequence {
        let prompt: Vec<u32> = (0..16 * 4).map(|token| token + 1_000_000 * start).collect();
        self.manager.sequence(&prompt, b"").unwrap()
    }

    fn write(&self, block: BlockId, hash: Option<SequenceHash>) {
        for (rank, memory) in (0..).zip(&self.memory) {
            let bytes = hash.map_or(vec![0xee; block_bytes()], |hash| expected(hash, rank, block_bytes()));
            // SAFETY: `before_reuse` has said that no transfer touches the block.
            unsafe { (*memory.block(block)).copy_from_slice(&bytes) };
        }
    }

    fn holds(&self, block: BlockId, hash: SequenceHash) -> bool {
        // SAFETY: the load of the block is over.
        let bytes = |memory: &Mapping| unsafe { (*memory.block(block)).to_vec() };
        (0..).zip(&self.memory).all(|(rank, memory)| bytes(memory) == expected(hash, rank, block_bytes()))
    }

    /// Computes a sequence in the first blocks and offloads it: how many copies of G2 began.
    fn put(&self, sequence: &TokenSequence) -> usize {
        let ids: Vec<_> = (0..sequence.num_blocks() as u32).map(BlockId).collect();
        self.manager.before_reuse(&ids, soon()).unwrap();
        ids.iter().zip(sequence.hashes()).for_each(|(&id, &hash)| self.write(id, Some(hash)));
        let started = match self.manager.offload(&ids, sequence, 0, None) {
            Ok(offload) => offload.started,
            // A worker has started meanwhile: the leader takes its part of G1 for gone.
            Err(EngineError::Lost(_)) => 0,
            Err(error) => panic!("{error}"),
        };
        assert!(self.manager.wait_offloads(soon()));
        started
    }

    /// Loads a sequence into the last blocks: how many arrived, every byte compared.
    fn take(&self, sequence: &TokenSequence) -> usize {
        let prefix = self.manager.match_prefix(sequence);
        let ids: Vec<_> = (0..prefix.len() as u32).map(|at| BlockId(G1 - 1 - at)).collect();
        self.manager.before_reuse(&ids, soon()).unwrap();
        for &id in &ids {
            self.write(id, None);
        }
        let Ok(onboarding) = self.manager.onboard(prefix, &ids, None) else { return 0 };
        let arrived = onboarding.wait().unwrap_or_else(|error| error.arrived);
        let mut blocks = ids[..arrived].iter().zip(sequence.hashes());
        assert!(blocks.all(|(&id, &hash)| self.holds(id, hash)), "wrong bytes");
        arrived
    }

    /// Waits until a sequence is there again, or can be put again.
    fn comes_back(&self, sequence: &TokenSequence) {
        let until = soon();
        while self.take(sequence) < sequence.num_blocks() {
            assert!(Instant::now() < until, "{:?}", self.manager.status());
            self.put(sequence);
        }
    }

    /// No slot stays taken.
    fn is_quiet(&self) {
        let until = soon();
        loop {
            let status = self.manager.status();
            let taken: u64 = status
                .tiers
                .iter()
                .map(|tier| {
                    u64::from(tier.arriving + tier.held + tier.active + tier.detached) + tier.transfer_pins
                })
                .sum();
            let plans: usize = status.paths.iter().map(|path| path.plans).sum();
            if taken == 0 && plans == 0 {
                return;
            }
            assert!(Instant::now() < until, "{status:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_killed_worker_s_disk_is_found_again_and_every_byte_is_right() {
    let folder = tempfile::tempdir().unwrap();
    Bench::prepare(folder.path());
    let mut workers = Processes::start_all(folder.path());
    let bench = Bench::on(folder.path());
    let (kept, other) = (bench.sequence(1), bench.sequence(2));
    assert_eq!((bench.put(&kept), bench.take(&kept)), (4, 4));
    bench.manager.flush(Duration::from_secs(60)).unwrap();
    for round in 0..4 {
        let rank = round % RANKS as usize;
        std::thread::scope(|scope| {
            let busy = scope.spawn(|| {
                for _ in 0..20 {
                    bench.put(&other);
                    bench.take(&other);
                }
            });
            workers.kill(rank);
            if round >= 2 {
                // A load that meets a dead rank ends, without wrong bytes.
                bench.manager.clear(Tier::G2).unwrap();
            }
            workers.start(rank);
            busy.join().unwrap();
        });
        // From its disk: what was in memory went with the process.
        let until = soon();
        while bench.take(&kept) < 4 {
            assert!(Instant::now() < until, "round {round}: {:?}", bench.manager.status());
            std::thread::sleep(Duration::from_millis(5));
        }
        bench.comes_back(&other);
        bench.is_quiet();
    }
}

#[test]
fn a_stopped_worker_holds_up_nobody_for_ever_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    Bench::prepare(folder.path());
    let workers = Processes::start_all(folder.path());
    let bench = Bench::on(folder.path());
    let sequence = bench.sequence(1);
    assert_eq!((bench.put(&sequence), bench.take(&sequence)), (4, 4));
    workers.stop(1);
    let start = Instant::now();
    let prefix = bench.manager.match_prefix(&sequence);
    let ids: Vec<_> = (8..12).map(BlockId).collect();
    bench.manager.before_reuse(&ids, soon()).unwrap();
    if let Ok(onboarding) = bench.manager.onboard(prefix, &ids, None) {
        let arrived = onboarding.wait().unwrap_or_else(|error| error.arrived);
        assert_eq!(arrived, 0, "half of every block is with a stopped process");
    }
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    // The stopped process may still write there: the blocks are not the engine's yet.
    workers.signal(1, libc::SIGCONT);
    bench.manager.before_reuse(&ids, soon()).unwrap();
    bench.comes_back(&sequence);
    bench.is_quiet();
}

/// Mutation that makes it fail: `worker_ended` fails no plans.
#[test]
fn what_a_killed_process_was_sent_ends_with_it() {
    let folder = tempfile::tempdir().unwrap();
    Bench::prepare(folder.path());
    let mut workers = Processes::start_all(folder.path());
    let bench = Bench::with_deadline(folder.path(), Duration::from_secs(3600));
    let sequence = bench.sequence(1);
    assert_eq!(bench.put(&sequence), 4);
    workers.stop(1);
    let ids: Vec<_> = (8..12).map(BlockId).collect();
    let onboarding = bench.manager.onboard(bench.manager.match_prefix(&sequence), &ids, None).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!onboarding.is_done());
    assert_eq!(bench.manager.busy(&ids).unwrap(), ids, "a stopped process may go on");
    let start = Instant::now();
    workers.kill(1);
    while !onboarding.is_done() {
        assert!(start.elapsed() < Duration::from_secs(30), "the kernel says that it has ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(onboarding.wait().unwrap_err().arrived, 0);
    bench.manager.before_reuse(&ids, soon()).unwrap();
    workers.start(1);
    bench.comes_back(&sequence);
    bench.is_quiet();
}

#[test]
fn a_killed_leader_s_workers_serve_the_next_one() {
    let folder = tempfile::tempdir().unwrap();
    Bench::prepare(folder.path());
    // The leader comes first.
    let leader = Process::start("leader_process", LEADER, &folder.path().display().to_string());
    let _workers = Processes::start_all(folder.path());
    let until = soon();
    while !folder.path().join("written").exists() {
        assert!(Instant::now() < until, "the first leader writes");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(leader);
    let bench = Bench::on(folder.path());
    assert_eq!(bench.take(&bench.sequence(1)), 4, "the disk holds it");
    bench.comes_back(&bench.sequence(2));
    bench.is_quiet();
}

#[test]
fn a_worker_with_other_settings_is_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let _workers = Processes::start_all(folder.path());
    let mut other = config(folder.path());
    other.host.capacity = Blocks(7).into();
    let start = Instant::now();
    let error = KvBlockManager::<Owned>::builder().config(other).build().err().unwrap();
    assert!(matches!(error, BuildError::RemoteWorker { rank: Rank(0), .. }), "{error}");
    let expected = "blocks of G2 differs: the leader has 7, the worker has 32";
    assert!(error.to_string().contains(expected), "{error}");
    assert!(start.elapsed() < Duration::from_secs(30), "no wait for what time does not change");
}
