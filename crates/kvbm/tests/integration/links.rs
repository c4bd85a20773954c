//! One table of faults over every kind of link between a leader and a worker: no call hangs, no
//! byte is wrong, no slot stays taken, and everything is found again.
#![cfg(feature = "worker")]

#[cfg(feature = "tls")]
#[path = "../../../kvbm-link/tests/support/authority.rs"]
mod authority;
mod fault;
mod line;
mod relay;

use crate::support::{expected, host, model, namespace, soon, unlimited};
use fault::Fault;
use kvbm::config::{Blocks, Config};
use kvbm::storage::BoundLayout;
use kvbm::{BlockId, Engine, KvBlockManager, Owned, Rank, SequenceHash, Tier, TokenSequence};
use line::Line;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANKS: u32 = 2;
const G1: u32 = 16;
const BLOCKS: usize = 4;
/// What a transfer may take: what a fault swallows is over after it.
const DEADLINE: Duration = Duration::from_millis(150);
/// How long a call waits for what a fault may have swallowed.
const PATIENCE: Duration = Duration::from_millis(400);

/// How a leader and a worker are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    InProcess,
    Socket,
    /// TCP with TLS.
    Tls,
}

fn config(kind: Kind, folder: &Path) -> Config {
    let mut config = Config { model: model(), ..Config::default() };
    unlimited(&mut config);
    config.namespace.model = "test-model".into();
    config.parallelism.tensor_parallel = RANKS;
    config.host.capacity = Blocks(24).into();
    config.disk.dir = Some(folder.join("disk"));
    config.disk.capacity = Blocks(32).into();
    config.offload.g2_g3.write_through = true;
    if kind == Kind::Tls {
        certify(&mut config, folder);
    }
    (config.transfer.deadline, config.disk.read_deadline) = (DEADLINE, DEADLINE);
    config
}

/// Certificates of leader and workers.
#[cfg(feature = "tls")]
fn certify(config: &mut Config, folder: &Path) {
    let authority = authority::Authority::new(folder, "authority");
    let (cert, key) = authority.issue("both", |_| {});
    let own = &mut config.parallelism;
    (own.tls_cert, own.tls_key, own.tls_ca) = (Some(cert), Some(key), Some(authority.file()));
}

#[cfg(not(feature = "tls"))]
fn certify(_: &mut Config, _: &Path) {
    unreachable!("the table has no such row");
}

/// KV tensors of an engine, for one rank.
fn tensors() -> BoundLayout {
    let model = model();
    host::host_tensors(host::contiguous(&model, model.num_kv_heads / RANKS, G1))
}

/// An engine, over links of one kind. The link of rank 1 has a fault.
struct Bench {
    name: String,
    manager: KvBlockManager<Engine>,
    tensors: Vec<BoundLayout>,
    lines: Vec<Arc<Line>>,
}

impl Bench {
    fn new(kind: Kind, fault: Fault, folder: &Path) -> Self {
        let tensors: Vec<_> = (0..RANKS).map(|_| tensors()).collect();
        let (config, mut lines) = (config(kind, folder), Vec::<Arc<Line>>::new());
        let given = config.clone();
        let manager = KvBlockManager::<Owned>::builder()
            .model(model())
            .namespace(namespace())
            .engine_blocks(G1)
            .configure(|own| {
                let namespace = own.namespace.clone();
                *own = given;
                own.namespace = namespace;
            })
            .build_with_workers(|rank, epoch, sink| {
                let fault = if rank == Rank(1) { fault } else { Fault::None };
                let memory = tensors[rank.index()].clone();
                let line = Line::new(kind, fault, &config, memory, (rank, epoch), sink, folder);
                lines.push(Arc::clone(&line));
                line::link(&line)
            })
            .unwrap();
        for line in &lines {
            line.started();
        }
        Self { name: format!("{kind:?}, {fault:?}"), manager, tensors, lines }
    }

    fn sequence(&self, start: u32) -> TokenSequence {
        let prompt: Vec<u32> = (0..16 * BLOCKS as u32).map(|token| token + 1_000_000 * start).collect();
        self.manager.sequence(&prompt, b"").unwrap()
    }

    fn write(&self, block: BlockId, hash: Option<SequenceHash>) {
        for (rank, tensors) in (0..).zip(&self.tensors) {
            let len = tensors.bytes_per_block() as usize;
            let bytes = hash.map_or(vec![0xee; len], |hash| expected(hash, rank, len));
            // SAFETY: `before_reuse` has said that no transfer touches the block.
            unsafe { tensors.write_block(block.0, &bytes) }.unwrap();
        }
    }

    fn holds(&self, block: BlockId, hash: SequenceHash) -> bool {
        (0..).zip(&self.tensors).all(|(rank, tensors)| {
            let mut bytes = vec![0; tensors.bytes_per_block() as usize];
            // SAFETY: the load of the block is over.
            unsafe { tensors.read_block(block.0, &mut bytes) }.unwrap();
            bytes == expected(hash, rank, bytes.len())
        })
    }

    /// Computes a sequence in blocks from `first` on and offloads it, where the blocks are free.
    fn put(&self, sequence: &TokenSequence, first: u32) {
        let ids: Vec<_> = (first..first + BLOCKS as u32).map(BlockId).collect();
        if self.manager.before_reuse(&ids, Instant::now() + PATIENCE).is_ok() {
            ids.iter().zip(sequence.hashes()).for_each(|(&id, &hash)| self.write(id, Some(hash)));
            // Refused where a worker has started meanwhile.
            let _refused = self.manager.offload(&ids, sequence, 0, None);
            self.manager.wait_offloads(Instant::now() + PATIENCE);
        }
    }

    /// Loads what is found of a sequence: how many blocks arrived, every byte compared.
    fn take(&self, sequence: &TokenSequence, first: u32) -> usize {
        let prefix = self.manager.match_prefix(sequence);
        let ids: Vec<_> = (first..).take(prefix.len()).map(BlockId).collect();
        if self.manager.before_reuse(&ids, Instant::now() + PATIENCE).is_err() {
            return 0;
        }
        for &id in &ids {
            self.write(id, None);
        }
        let Ok(onboarding) = self.manager.onboard(prefix, &ids, None) else { return 0 };
        let start = Instant::now();
        let arrived = onboarding.wait().unwrap_or_else(|error| error.arrived);
        assert!(start.elapsed() < Duration::from_secs(30), "{}: a load hangs", self.name);
        let mut blocks = ids[..arrived].iter().zip(sequence.hashes());
        assert!(blocks.all(|(&id, &hash)| self.holds(id, hash)), "{}: wrong bytes", self.name);
        arrived
    }

    /// What an engine does all day.
    fn work(&self) {
        let [one, two] = [1, 2].map(|start| self.sequence(start));
        self.put(&one, 0);
        self.take(&one, 8);
        self.manager.step();
        // A flush may fail; what it says is durable is looked at in the end.
        let _late = self.manager.flush(PATIENCE);
        self.manager.clear(Tier::G2).unwrap();
        self.take(&one, 12);
        self.put(&two, 4);
        self.manager.step();
        self.take(&two, 8);
    }

    /// Without faults, everything is there again or can be made anew, and no slot stays taken.
    fn recover(&self) {
        self.lines.iter().for_each(|line| line.mend());
        for start in [1, 2] {
            let (sequence, until) = (self.sequence(start), soon());
            while self.take(&sequence, 8) < BLOCKS {
                assert!(Instant::now() < until, "{}: {:?}", self.name, self.manager.status());
                self.put(&sequence, 0);
            }
        }
        let until = soon();
        while let Some(what) = self.busy() {
            assert!(Instant::now() < until, "{}: {what}", self.name);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn busy(&self) -> Option<String> {
        let status = self.manager.status();
        let taken = |tier: &kvbm::pool::TierStatus| {
            u64::from(tier.arriving + tier.held + tier.active + tier.detached) + tier.transfer_pins
        };
        let quiet = status.tiers.iter().all(|tier| taken(tier) == 0)
            && status.paths.iter().all(|path| path.plans == 0);
        (!quiet).then(|| format!("{status:?}"))
    }

    /// Everything that could be saved is; how many events the link of rank 1 carried.
    fn end(self) -> usize {
        let report = self.manager.shutdown(Duration::from_secs(60));
        assert!(report.is_complete(), "{}: {report:?}", self.name);
        self.lines[1].events()
    }
}

/// One row of the table; how many events the faulty link carried.
fn run(kind: Kind, fault: Fault) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::new(kind, fault, folder.path());
    bench.work();
    bench.recover();
    let events = bench.end();
    let next = Bench::new(kind, Fault::None, folder.path());
    for start in [1, 2] {
        let sequence = next.sequence(start);
        // A read may be late on a busy machine.
        let until = soon();
        while next.take(&sequence, 8) < BLOCKS {
            assert!(
                Instant::now() < until,
                "{kind:?}, {fault:?}: the disks hold it: {:?}",
                next.manager.status()
            );
        }
    }
    next.end();
    events
}

/// Rows side by side: most of their time is that of deadlines.
fn run_all(rows: &[(Kind, Fault)]) {
    const SIDE_BY_SIDE: usize = 8;
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..SIDE_BY_SIDE {
            scope.spawn(|| {
                while let Some(&(kind, fault)) =
                    rows.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                {
                    run(kind, fault);
                }
            });
        }
    });
}

const KINDS: &[Kind] = if cfg!(feature = "tls") {
    &[Kind::InProcess, Kind::Socket, Kind::Tls]
} else {
    &[Kind::InProcess, Kind::Socket]
};

#[test]
fn a_link_may_delay_repeat_and_reorder() {
    let faults = [Fault::None, Fault::SlowCommands, Fault::SlowMessages, Fault::Repeat];
    let rows: Vec<_> = KINDS.iter().flat_map(|&kind| faults.map(|fault| (kind, fault))).collect();
    run_all(&rows);
}

/// A worker's own side learns from it which loads are over, and which blocks nobody writes to.
#[test]
fn a_worker_knows_the_loads_of_its_leader_by_their_tags() {
    for &kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let bench = Bench::new(kind, Fault::None, folder.path());
        let sequence = bench.sequence(1);
        bench.put(&sequence, 0);
        let ids: Vec<_> = (8..).take(BLOCKS).map(BlockId).collect();
        let onboarding = bench.manager.onboard(bench.manager.match_prefix(&sequence), &ids, None).unwrap();
        let tag = onboarding.tag().expect("it has plans");
        assert_eq!(onboarding.wait(), Ok(BLOCKS), "{}", bench.name);
        for line in &bench.lines {
            line.wait_idle(&ids);
            let finished = line.drain_finished();
            let arrived: usize = finished.iter().map(|plan| plan.arrived).sum();
            assert!(finished.iter().all(|plan| plan.tag == tag && plan.failed == 0), "{finished:?}");
            assert_eq!(arrived, BLOCKS, "offloads have no tag");
        }
        bench.end();
    }
}

/// Mutation that makes it fail: `owed_by_earlier` finds no plan.
#[test]
fn a_link_may_be_cut_at_every_message() {
    for &kind in KINDS {
        let events = run(kind, Fault::None);
        assert!(events > 10, "{kind:?}: {events}");
        let rows: Vec<_> = (0..events).map(|at| (kind, Fault::Cut(at))).collect();
        run_all(&rows);
    }
}

/// A link that loses something is as good as new after its worker was connected again.
#[test]
fn a_link_may_lose_any_message() {
    for &kind in KINDS {
        let events = run(kind, Fault::None);
        let rows: Vec<_> = (0..events).map(|at| (kind, Fault::Lose(at))).collect();
        run_all(&rows);
    }
}
