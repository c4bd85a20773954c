//! Never slower than no cache: what would arrive later than it is computed is not waited for.

use crate::support::script::{Mode, Ranks};
use crate::support::{books, fill, soon, tokens};
use kvbm::config::Config;
use kvbm::metrics::{LoadReason, PrefetchOutcome};
use kvbm::{FailureKind, KvBlockManager, LoadOptions, LookUp, Owned, Path, Prefetched, Tier, TokenSequence};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

/// Blocks of 16 tokens are computed in a millisecond each.
const TOKENS_PER_S: f64 = 16_000.0;

fn loads<G>(manager: &KvBlockManager<G>, tier: Tier, reason: LoadReason) -> u64 {
    manager.metrics().tier(tier).loads(reason).get()
}

/// Sequences of `blocks` blocks on disk alone.
fn on_disk(
    blocks: u32,
    count: u32,
    configure: impl FnOnce(&mut Config),
) -> (Ranks, KvBlockManager<Owned>, Vec<TokenSequence>) {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([2048, 2048, 2048], |config| {
        config.offload.g1_g2.write_through = true;
        config.offload.g2_g3.write_through = true;
        configure(config);
    });
    let sequences: Vec<_> = (1..=count).map(|start| tokens(&manager, start, blocks)).collect();
    for sequence in &sequences {
        drop(fill(&manager, sequence, 0));
    }
    assert!(manager.wait_offloads(soon()));
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).unwrap();
    }
    ranks.set_all(Mode::Hold);
    (ranks, manager, sequences)
}

/// Reads `sequence` from a disk that takes `time` for each of its plans.
fn read_slowly(ranks: &Ranks, manager: &KvBlockManager<Owned>, sequence: &TokenSequence, time: Duration) {
    let prefix = manager.match_prefix(sequence);
    assert_eq!(prefix.count(Tier::G3), sequence.num_blocks());
    let onboarding = manager.onboard(prefix);
    std::thread::sleep(time);
    ranks.execute(0);
    assert_eq!(onboarding.wait_until(soon()).unwrap().len(), sequence.num_blocks());
}

/// Mutation that makes it fail: `leave_out_slow` keeps the whole prefix.
#[test]
fn what_a_slow_disk_has_is_computed_and_counted_so() {
    for measured in [false, true] {
        let (ranks, manager, chains) = on_disk(64, 3, |config| {
            config.policy.onboard_patience = 0.0;
            if !measured {
                config.policy.prefill_tokens_per_s = TOKENS_PER_S;
            }
        });
        if measured {
            assert!(!manager.prefilled(10, Duration::from_millis(1)), "too few tokens");
            for _ in 0..4 {
                assert!(manager.prefilled(1600, Duration::from_millis(100)));
            }
        }
        // 64 blocks are computed in 64 ms.
        read_slowly(&ranks, &manager, &chains[0], Duration::from_millis(200));
        assert_eq!(loads(&manager, Tier::G3, LoadReason::Unknown), 64);
        assert_eq!(manager.match_prefix(&chains[1]).len(), 0);
        assert_eq!(loads(&manager, Tier::G3, LoadReason::Slower), 64);
        // What is on G2 comes up; only what follows it is computed.
        ranks.set_all(Mode::Answer);
        assert_eq!(manager.prefetch(&chains[2]).started, 64);
        let longer = tokens(&manager, 3, 64);
        // A prefetch is not waited for.
        let there = || manager.look_up(&chains[2]).iter().filter(|tiers| tiers.contains(Tier::G2)).count();
        let (is_there, until) = (|| there() == 64, soon());
        while !is_there() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(manager.match_prefix(&longer).count(Tier::G2), 64);
        assert_eq!(loads(&manager, Tier::G2, LoadReason::Unknown), 64);
    }
}

#[test]
fn where_nothing_is_known_or_everything_is_wanted_nothing_is_left_out() {
    for configure in [
        |config: &mut Config| config.policy.prefill_tokens_per_s = 0.0,
        |config: &mut Config| {
            config.policy.prefill_tokens_per_s = TOKENS_PER_S;
            config.policy.admission = kvbm::config::Admission::All;
        },
    ] {
        let (ranks, manager, chains) = on_disk(64, 2, |config| {
            config.policy.onboard_patience = 0.0;
            configure(config);
        });
        read_slowly(&ranks, &manager, &chains[0], Duration::from_millis(200));
        assert_eq!(manager.match_prefix(&chains[1]).len(), 64);
    }
}

#[test]
fn a_queue_that_takes_longer_than_computing_is_not_joined() {
    let (ranks, manager, chains) = on_disk(128, 12, |config| {
        config.policy.onboard_patience = 0.0;
        config.policy.prefill_tokens_per_s = TOKENS_PER_S;
    });
    // 128 blocks in about 20 ms: faster than computing.
    read_slowly(&ranks, &manager, &chains[0], Duration::from_millis(20));
    let mut waiting = Vec::new();
    for chain in &chains[1..] {
        let prefix = manager.match_prefix(chain);
        if prefix.is_empty() {
            break;
        }
        waiting.push(manager.onboard(prefix));
    }
    // With `n` ahead, the next arrives after (n + 1) x 20 ms at least, and is computed in 128.
    assert!((1..=6).contains(&waiting.len()), "{} wait", waiting.len());
    assert_eq!(loads(&manager, Tier::G3, LoadReason::Queue), 128);
    while ranks.held(0) > 0 {
        ranks.execute(0);
    }
    for onboarding in waiting {
        assert_eq!(onboarding.wait_until(soon()).unwrap().len(), 128);
    }
}

/// Mutation that makes it fail: a plan of which nothing arrived in time is not measured.
#[test]
fn a_disk_that_brought_nothing_in_time_is_known_to_be_slow() {
    let (ranks, manager, chains) = on_disk(64, 2, |config| {
        config.policy.prefill_tokens_per_s = TOKENS_PER_S;
    });
    let began = Instant::now();
    let onboarding = manager.onboard(manager.match_prefix(&chains[0]));
    let plan = ranks.next_plan(0);
    assert_eq!(plan.budget_ms, 250, "64 ms of computing, and at least that");
    std::thread::sleep(Duration::from_millis(250).saturating_sub(began.elapsed()));
    ranks.fail_all(0, &plan, FailureKind::Deadline);
    let late = onboarding.wait_until(soon()).unwrap_err();
    assert_eq!(late.arrived.len(), 0);
    assert_eq!(manager.match_prefix(&chains[1]).len(), 0);
    assert_eq!(loads(&manager, Tier::G3, LoadReason::Slower), 64);
}

#[test]
fn a_request_does_not_wait_beyond_its_deadline() {
    let (ranks, manager, chains) = on_disk(300, 1, |config| {
        config.disk.read_deadline = Duration::from_secs(600);
        config.transfer.deadline = Duration::from_secs(600);
    });
    let patient = manager.onboard(manager.match_prefix(&chains[0]));
    let plans: Vec<_> = (0..3).map(|_| ranks.next_plan(0)).collect();
    ranks.done(0, &plans[0]);
    // It joins the other one's transfer, whose deadline is far away.
    let until = Instant::now() + Duration::from_millis(50);
    let hurried = manager.onboard_until(manager.match_prefix(&chains[0]), until);
    let late = block_on(hurried).unwrap_err();
    assert!(Instant::now() >= until);
    assert_eq!((late.arrived.len(), late.wanted), (128, 300));
    assert!(late.failures.iter().all(|failed| failed.failure.kind == FailureKind::Deadline), "{late}");
    let until = Instant::now() + Duration::from_millis(50);
    let hurried = manager.onboard_until(manager.match_prefix(&chains[0]), until);
    assert_eq!(hurried.wait().unwrap_err().arrived.len(), 128);
    ranks.done(0, &plans[1]);
    ranks.done(0, &plans[2]);
    assert_eq!(patient.wait().unwrap().len(), 300, "the other one gets all");
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let (mut future, until) = (pin!(future), soon());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        assert!(Instant::now() < until, "nobody wakes it");
        std::thread::park_timeout(Duration::from_secs(60));
    }
}

#[test]
fn a_ticket_promises_what_arrives_sooner_than_it_is_computed() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(256, 512);
    let chain = manager.sequence(&(0..16 * 200).collect::<Vec<u32>>(), b"").unwrap();
    let ids: Vec<_> = (0..200).map(kvbm::BlockId).collect();
    assert_eq!(manager.offload(&ids, &chain, 0, None).unwrap().started, 200);
    assert!(manager.wait_offloads(soon()));
    let promised = |request: &str, first| match manager.tickets().look_up(request, &chain, first).unwrap() {
        LookUp::Ready { blocks, .. } => blocks,
        LookUp::Pending => panic!("there is no volume"),
    };
    for _ in 0..4 {
        assert!(manager.prefilled(1600, Duration::from_millis(100)));
    }
    assert_eq!(promised("a", 50), 150, "nothing is known of the path");
    ranks.set_all(Mode::Hold);
    let until = Instant::now() + Duration::from_secs(600);
    manager.tickets().commit_with("a", &ids[50..200], LoadOptions::default().until(until)).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    while ranks.held(0) > 0 {
        ranks.execute(0);
    }
    let finished = || loop {
        if let Some(load) = manager.tickets().finished().pop() {
            return load;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    finished();
    assert_eq!(promised("b", 50), 0);
    assert_eq!(loads(&manager, Tier::G2, LoadReason::Slower), 150, "what the engine has is not counted");
}

#[test]
fn a_prefetch_brings_blocks_up_within_its_budget() {
    let (ranks, manager, chains) = on_disk(150, 2, |config| config.policy.prefetch_share = 0.1);
    // A tenth of 2,048 blocks.
    let none = Prefetched::default();
    assert_eq!(manager.prefetch(&chains[0]), Prefetched { started: 150, ..none });
    assert_eq!(
        manager.prefetch(&chains[0]),
        Prefetched { no_room: 55, over_budget: 95, ..none },
        "on its way"
    );
    assert_eq!(manager.session_resumes(&chains[1]), Prefetched { started: 55, over_budget: 95, ..none });
    assert_eq!(manager.prefetch(&chains[1]), Prefetched { over_budget: 150, ..none });
    while ranks.held(0) > 0 {
        assert_eq!(ranks.execute(0).path(), Path::G3_G2);
    }
    let in_g2 = |chain| manager.look_up(chain).iter().filter(|places| places.contains(Tier::G2)).count();
    assert_eq!((in_g2(&chains[0]), in_g2(&chains[1])), (150, 55));
    assert_eq!(manager.prefetch(&chains[1]), Prefetched { started: 95, ..none }, "the budget came back");
    assert_eq!(manager.metrics().prefetches(PrefetchOutcome::Started).get(), 300);
    let off = books([256, 256, 256], |config| {
        config.offload.g2_g3.write_through = true;
        config.policy.prefetch_share = 0.0;
    });
    let chain = tokens(&off, 1, 8);
    drop(fill(&off, &chain, 0));
    for tier in [Tier::G1, Tier::G2] {
        off.clear(tier).unwrap();
    }
    assert_eq!(off.prefetch(&chain), Prefetched { over_budget: 8, ..none });
}

/// Mutation that makes it fail: the limit of a request is not that of its plans.
#[cfg(feature = "worker")]
#[test]
fn no_request_waits_for_a_disk_that_stalls() {
    let rig = stalling::Rig::new();
    let (manager, chain) = (&rig.manager, rig.on_disk(24));
    rig.medium.hold();
    let began = Instant::now();
    let to: Vec<_> = (24..48).map(kvbm::BlockId).collect();
    let load = |request: &str| {
        assert!(matches!(
            manager.tickets().look_up(request, &chain, 0),
            Ok(LookUp::Ready { blocks: 24, .. })
        ));
        let until = Instant::now() + Duration::from_millis(300);
        manager.tickets().commit_with(request, &to, LoadOptions::default().until(until)).unwrap();
        loop {
            if let Some(load) = manager.tickets().finished().pop() {
                // Budgets are whole milliseconds.
                assert!(Instant::now() + Duration::from_millis(5) >= until, "it was waited for");
                return load;
            }
            assert!(began.elapsed() < stalling::LONGEST, "the disk is waited for");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let late = load("a");
    assert_eq!((late.arrived, late.wanted), (0, 24));
    assert!(late.failures.iter().all(|failed| failed.failure.kind == FailureKind::Deadline), "{late:?}");
    assert_eq!(manager.busy(&to).unwrap(), [], "no copy writes there any more");
    // The next one computes there at once.
    rig.medium.let_go();
    let until = soon();
    while manager.status().tiers[2].transfer_pins > 0 {
        assert!(Instant::now() < until, "what the disk had comes back");
        std::thread::sleep(Duration::from_millis(1));
    }
    for (id, _) in to.iter().zip(chain.hashes()) {
        assert!(rig.is_untouched(*id), "{id} was written after it was given back");
    }
}

#[cfg(feature = "worker")]
mod stalling {
    //! A manager over a real worker whose disk stalls when the test says so.

    use crate::support::host::{contiguous, host_tensors, layer_separate};
    use crate::support::{expected, model, namespace, soon, unlimited};
    use kvbm::config::Blocks;
    use kvbm::disk::fault::SimMedium;
    use kvbm::disk::{DiskConfig, DiskEngine};
    use kvbm::layout::BlockLayout;
    use kvbm::storage::{BoundLayout, RegionBytes};
    use kvbm::worker::{Lane, LinkError, WorkerLink};
    use kvbm::{BlockId, Engine, KvBlockManager, Owned, Tier, TokenSequence};
    use kvbm_transfer::{DiskTier, TransferManager, WorkerConfig, disk_layout};
    use std::sync::Arc;
    use std::time::Duration;

    /// As long as the disk stalls where nobody lets it go.
    pub(super) const LONGEST: Duration = Duration::from_secs(10);
    const SLOTS: u32 = 64;

    pub(super) struct Rig {
        pub(super) manager: KvBlockManager<Engine>,
        pub(super) medium: SimMedium,
        g1: BoundLayout,
    }

    struct Local(Arc<TransferManager>);

    impl WorkerLink for Local {
        fn send(&self, _lane: Lane, command: &[u8]) -> Result<(), LinkError> {
            self.0.submit(command).map_err(|error| LinkError::Refused(error.to_string()))
        }
    }

    impl Rig {
        pub(super) fn new() -> Self {
            let medium = SimMedium::new();
            let model = model();
            let g1 = host_tensors(layer_separate(&model, SLOTS));
            let g2 = contiguous(&model, model.num_kv_heads, SLOTS);
            let tag = *namespace().page_size(16).tag().as_bytes();
            let slot_bytes = disk_layout(&*g2, SLOTS).unwrap().bytes_per_block();
            let disk = DiskConfig::new("simulated", SLOTS, slot_bytes, tag);
            let (engine, recovered) = DiskEngine::open_on(disk, Arc::new(medium.clone())).unwrap();
            let mut tier = Some(DiskTier { engine: Arc::new(engine), recovered });
            let manager = KvBlockManager::<Owned>::builder()
                .model(model)
                .namespace(namespace())
                .engine_blocks(SLOTS)
                .host(Blocks(SLOTS))
                .disk("never-opened", Blocks(SLOTS))
                .configure(|config| {
                    unlimited(config);
                    config.offload.g2_g3.write_through = true;
                    // What ends a wait here is the deadline of the request.
                    config.disk.read_deadline = LONGEST * 6;
                    config.transfer.deadline = LONGEST * 6;
                })
                .build_with_workers(|rank, epoch, sink| {
                    let mut worker = WorkerConfig::new(rank, epoch, tag);
                    worker.g1 = Some(g1.clone());
                    worker.g2 = Some(host_tensors(Arc::clone(&g2)));
                    worker.g3 = tier.take();
                    Box::new(Local(Arc::new(TransferManager::start(worker, sink).unwrap())))
                })
                .unwrap();
            Self { manager, medium, g1 }
        }

        /// The bytes of a block of G1.
        fn bytes(&self, id: BlockId, each: &mut dyn FnMut(&mut [u8])) {
            for fragment in self.g1.block_fragments(id.0).unwrap() {
                let RegionBytes::Host(memory) = self.g1.region(fragment.region).unwrap() else {
                    panic!("G1 is host memory");
                };
                let buffer = kvbm::device::HostBuffer::zeroed(fragment.len as usize);
                // SAFETY: the test touches a block only while no transfer does.
                unsafe { buffer.copy_from(0, memory, fragment.offset, fragment.len) }.unwrap();
                let mut buffer = buffer;
                each(buffer.exclusive_bytes().unwrap());
                // SAFETY: as above.
                unsafe { memory.copy_from(fragment.offset, &buffer, 0, fragment.len) }.unwrap();
            }
        }

        /// A sequence in blocks of G1 from 0 on, which G3 alone has too.
        pub(super) fn on_disk(&self, blocks: u32) -> TokenSequence {
            let chain = self.manager.sequence(&(0..blocks * 16).collect::<Vec<_>>(), b"").unwrap();
            for (id, hash) in (0..blocks).zip(chain.hashes()) {
                let mut byte = expected(*hash, 0, 1 << 16).into_iter();
                self.bytes(BlockId(id), &mut |part| part.fill_with(|| byte.next().unwrap_or(1)));
            }
            let ids: Vec<_> = (0..blocks).map(BlockId).collect();
            assert_eq!(self.manager.offload(&ids, &chain, 0, None).unwrap().refused, []);
            assert!(self.manager.wait_offloads(soon()));
            self.manager.clear(Tier::G2).unwrap();
            chain
        }

        /// Whether the block has been zero from the start.
        pub(super) fn is_untouched(&self, id: BlockId) -> bool {
            let mut zero = true;
            self.bytes(id, &mut |part| zero &= part.iter().all(|byte| *byte == 0));
            zero
        }
    }
}
