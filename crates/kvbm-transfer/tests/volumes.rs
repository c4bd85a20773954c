//! Host memory to volumes, volumes to the device, and what happens when volumes fail.

mod support;

use kvbm_layout::{AxisOrder, FullyContiguous};
use kvbm_plan::{
    BlockIdentity, Command, Endpoint, FailureKind, Message, NamespaceId, NamespaceTag, Path, StoredBlock,
    TransferPlan, VolumeAnswer, VolumeId, VolumePlace, VolumeRequest,
};
use kvbm_transfer::{PathConfig, SubmitError, VolumeTier};
use kvbm_volume::{
    BlobKey, BlobScope, BlobSlice, GetRequest, MemoryVolume, PayloadForm, PutRequest, StoredOrder, Volume,
    VolumeDescriptor, VolumeError, VolumeRegistry,
};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use support::{LAYERS, NAMESPACE, Rig, Shape, checksums, contiguous, identity, kinds, soon};

const VOLUME: VolumeId = VolumeId(4);
const SLICE: BlobSlice = BlobSlice { first_layer: 0, num_layers: LAYERS, first_head: 2, num_heads: 2 };

/// What a volume does wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    Nothing,
    /// Panics.
    Panic,
    /// Gives no results.
    Silent,
    /// Answers after its deadline.
    Late,
    /// The store refuses.
    Refuses,
    /// Serves nobody until two calls are there.
    Pairs,
    /// Calls do not return while this lasts.
    Hangs,
}

const FAULTS: [Fault; 7] =
    [Fault::Nothing, Fault::Panic, Fault::Silent, Fault::Late, Fault::Refuses, Fault::Pairs, Fault::Hangs];

/// A memory volume with faults.
struct Faulty {
    memory: MemoryVolume,
    fault: AtomicU8,
    calls: (Mutex<usize>, Condvar),
}

impl Faulty {
    fn new(capacity_bytes: Option<u64>) -> Arc<Self> {
        Self::of(VOLUME, capacity_bytes)
    }

    fn of(id: VolumeId, capacity_bytes: Option<u64>) -> Arc<Self> {
        let deadline = Duration::from_secs(60);
        let descriptor =
            VolumeDescriptor { capacity_bytes, deadline, ..VolumeDescriptor::new(id, "memory:") };
        let memory = MemoryVolume::open(descriptor).expect("the test's own set-up");
        Arc::new(Self { memory, fault: AtomicU8::new(0), calls: Default::default() })
    }

    fn set(&self, fault: Fault) {
        let number = FAULTS.iter().position(|known| *known == fault).expect("the test's own set-up");
        self.fault.store(number as u8, Ordering::Relaxed);
    }

    fn results<T>(
        &self,
        operation: &'static str,
        keys: Vec<BlobKey>,
        work: impl FnOnce() -> Vec<Result<T, VolumeError>>,
    ) -> Vec<Result<T, VolumeError>> {
        let fault = || FAULTS[usize::from(self.fault.load(Ordering::Relaxed))];
        match fault() {
            Fault::Nothing => work(),
            Fault::Hangs => {
                let until = soon();
                while fault() == Fault::Hangs {
                    assert!(Instant::now() < until, "the test's own end");
                    std::thread::sleep(Duration::from_millis(1));
                }
                work()
            }
            Fault::Panic => panic!("planted"),
            Fault::Pairs => {
                let (calls, changed) = &self.calls;
                let mut calls = calls.lock().expect("sound");
                *calls += 1;
                changed.notify_all();
                let (calls, waited) = changed
                    .wait_timeout_while(calls, Duration::from_secs(30), |calls| *calls < 2)
                    .expect("sound");
                assert!(!waited.timed_out(), "alone");
                drop(calls);
                work()
            }
            Fault::Silent => Vec::new(),
            Fault::Late => keys
                .into_iter()
                .map(|key| Err(VolumeError::DeadlineExceeded { volume: VOLUME, operation, key }))
                .collect(),
            Fault::Refuses => keys
                .into_iter()
                .map(|key| {
                    let source = std::io::Error::other("connection refused");
                    Err(VolumeError::Io { volume: VOLUME, operation, key, source })
                })
                .collect(),
        }
    }
}

impl Volume for Faulty {
    fn descriptor(&self) -> &VolumeDescriptor {
        self.memory.descriptor()
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let keys = requests.iter().map(|request| request.key).collect();
        self.results("get", keys, || self.memory.get(requests, deadline))
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let keys = requests.iter().map(|request| request.key).collect();
        self.results("put", keys, || self.memory.put(requests, deadline))
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.results("exists", keys.to_vec(), || self.memory.exists(keys, deadline))
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        self.results("delete", keys.to_vec(), || self.memory.delete(keys, deadline))
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        self.memory.list(scope, after, max, deadline)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.memory.used_bytes()
    }
}

fn rig(volume: &Arc<Faulty>, shape: Shape, writes: bool) -> Rig {
    rig_with(&opened(volume), shape, writes)
}

fn opened(volume: &Arc<Faulty>) -> Arc<VolumeRegistry> {
    let registry = Arc::new(VolumeRegistry::new());
    registry.register(Arc::clone(volume) as _).expect("the test's own set-up");
    registry
}

fn rig_with(registry: &Arc<VolumeRegistry>, shape: Shape, writes: bool) -> Rig {
    let registry = Arc::clone(registry);
    Rig::with(shape, |config| {
        config.volumes = Some(VolumeTier { registry, slice: SLICE, model_heads: 4, writes, threads: 2 });
    })
}

fn up(rig: &Rig, moves: &[(u8, u32)]) -> TransferPlan {
    let moves: Vec<_> = moves.iter().map(|&(name, slot)| (name, slot, 0)).collect();
    TransferPlan { dst: Endpoint::Volume(VOLUME), ..rig.plan(Path::G2_G4, &moves) }
}

fn down(rig: &Rig, moves: &[(u8, u32)]) -> TransferPlan {
    let moves: Vec<_> = moves.iter().map(|&(name, slot)| (name, 0, slot)).collect();
    TransferPlan { src: Endpoint::Volume(VOLUME), ..rig.plan(Path::G4_G1, &moves) }
}

fn key(name: u8) -> BlobKey {
    BlobKey::of(NamespaceTag::from_bytes(NAMESPACE), &identity(name), SLICE)
}

/// Blocks 1 to `count` in G2, block `n` in slot `n`.
fn fill(rig: &Rig, count: u8) {
    for name in 1..=count {
        rig.fill_g1(0, name);
        rig.must(Path::G1_G2, &[(name, 0, u32::from(name))]);
    }
}

fn failed(rig: &Rig, plan: TransferPlan) -> Vec<Option<FailureKind>> {
    kinds(&rig.run(plan))
}

#[test]
fn blocks_go_to_a_volume_and_come_back_to_another_layout() {
    let volume = Faulty::new(None);
    let writer = rig(&volume, Shape::default(), true);
    fill(&writer, 12);
    let all: Vec<(u8, u32)> = (1..=12).map(|name| (name, u32::from(name))).collect();
    let stored = writer.run(up(&writer, &all));
    assert_eq!(kinds(&stored), [None; 12]);
    assert_eq!(stored.bytes, 12 * writer.g2.bytes_per_block());
    drop(writer);

    // Whose host memory lies otherwise: the order in the store is neither's.
    let hnd = Arc::new(FullyContiguous::new(support::model(16), AxisOrder::Hnd).unwrap());
    let reader = rig(&volume, Shape { g2: hnd, g1: contiguous(16), ..Shape::default() }, true);
    let back: Vec<(u8, u32)> = (1..=12).map(|name| (name, 15 - u32::from(name))).collect();
    let read = reader.run(down(&reader, &back));
    assert_eq!(kinds(&read), [None; 12]);
    for (name, slot) in back {
        reader.assert_g1(slot, name);
    }
    // The checksum is computed anew, and the same as ever.
    let direct = reader.must(Path::G1_G2, &[(7, 8, 15)]);
    assert_eq!(checksums(&read)[6], checksums(&direct)[0]);
}

#[test]
fn heads_lie_one_after_the_other_in_an_object() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 1);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1)]))), [None]);
    let element = 2;
    let (tokens, heads, elems) = (4, 2, 24);
    let nhd = rig.read(&rig.g2, 1);
    let mut expected = Vec::new();
    for head in 0..heads {
        for layer_outer in 0..LAYERS as usize * 2 {
            for token in 0..tokens {
                let at = (((layer_outer * tokens) + token) * heads + head) * elems * element;
                expected.extend_from_slice(&nhd[at..at + elems * element]);
            }
        }
    }
    let mut payload = Vec::new();
    volume.memory.tamper(&key(1), |object| payload = object[object.len() - expected.len()..].to_vec());
    assert_eq!(payload, expected);
}

/// Mutation that makes it fail: `open` copies the payload without comparing its pieces.
#[test]
fn invariant_5_no_damaged_object_reaches_the_device() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 2);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1), (2, 2)]))), [None; 2]);
    let mut other = Vec::new();
    assert!(volume.memory.tamper(&key(2), |object| other.clone_from(object)));
    let mut sound = Vec::new();
    assert!(volume.memory.tamper(&key(1), |object| sound.clone_from(object)));
    let half = sound.len() / 2;
    let untouched = rig.read(&rig.g1, 9);
    let damages: [(&str, Vec<u8>); 5] = [
        ("swapped", other),
        ("cut", sound[..half].to_vec()),
        ("grown", [&sound[..], &[0; 8]].concat()),
        ("flipped", sound.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at == half)).collect()),
        ("empty", Vec::new()),
    ];
    for (what, damaged) in damages {
        volume.memory.tamper(&key(1), |object| object.clone_from(&damaged));
        // The sound one beside it arrives.
        assert_eq!(
            failed(&rig, down(&rig, &[(1, 9), (2, 10)])),
            [Some(FailureKind::Corrupt), None],
            "{what}"
        );
        rig.assert_g1(10, 2);
        assert_eq!(rig.read(&rig.g1, 9), untouched, "{what}: reached the device");
    }
    volume.memory.tamper(&key(1), |object| object.clone_from(&sound));
    assert_eq!(failed(&rig, down(&rig, &[(1, 9), (3, 11)])), [None, Some(FailureKind::Missing)]);
}

#[test]
fn memory_that_changed_never_reaches_a_volume() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 2);
    rig.damage_g2(1);
    assert_eq!(failed(&rig, up(&rig, &[(1, 1), (2, 2)])), [Some(FailureKind::Corrupt), None]);
    let there: Vec<bool> = volume.exists(&[key(1), key(2)], soon()).into_iter().map(Result::unwrap).collect();
    assert_eq!(there, [false, true]);
}

#[test]
fn every_fault_of_a_volume_is_a_failure_of_its_blocks() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 2);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1), (2, 2)]))), [None; 2]);
    for (fault, kind) in [
        (Fault::Panic, FailureKind::Io),
        (Fault::Silent, FailureKind::Io),
        (Fault::Refuses, FailureKind::Io),
        (Fault::Late, FailureKind::Deadline),
    ] {
        volume.set(fault);
        assert_eq!(failed(&rig, up(&rig, &[(1, 1), (2, 2)])), [Some(kind); 2]);
        assert_eq!(failed(&rig, down(&rig, &[(1, 8), (2, 9)])), [Some(kind); 2]);
        volume.set(Fault::Nothing);
        assert_eq!(failed(&rig, down(&rig, &[(1, 8), (2, 9)])), [None; 2], "it works again");
    }
    let unknown = TransferPlan { src: Endpoint::Volume(VolumeId(9)), ..rig.plan(Path::G4_G1, &[(1, 0, 8)]) };
    assert_eq!(failed(&rig, unknown), [Some(FailureKind::Unsupported)]);
}

/// The same plan, of another volume.
fn on(volume: VolumeId, mut plan: TransferPlan) -> TransferPlan {
    for end in [&mut plan.src, &mut plan.dst] {
        if let Endpoint::Volume(known) = end {
            *known = volume;
        }
    }
    plan
}

/// Mutations that make it fail: crews are found by no volume, or `Hands::room_for` says that all is free.
#[test]
fn a_volume_that_hangs_takes_nobody_elses_threads_or_room_and_is_named_at_the_end() {
    const OTHER: VolumeId = VolumeId(9);
    let (hanging, other) = (Faulty::new(None), Faulty::of(OTHER, None));
    let registry = opened(&hanging);
    registry.register(Arc::clone(&other) as _).unwrap();
    let rig = Rig::with(Shape::default(), |config| {
        let few = PathConfig { depth_blocks: 4, batch_blocks: 2, ..PathConfig::default() };
        (config.paths.g2_g4, config.paths.g4_g1) = (few, few);
        config.volumes =
            Some(VolumeTier { registry, slice: SLICE, model_heads: 4, writes: true, threads: 2 });
    });
    fill(&rig, 8);
    for volume in [VOLUME, OTHER] {
        assert_eq!(failed(&rig, on(volume, up(&rig, &[(1, 1), (2, 2)]))), [None; 2]);
    }
    hanging.set(Fault::Hangs);
    let puts = (3..=8).map(|name| up(&rig, &[(name, u32::from(name))]));
    let gets = (11..=15).map(|slot| down(&rig, &[(1, slot)]));
    let stuck: Vec<_> = puts.chain(gets).map(|plan| rig.manager().execute(plan).unwrap()).collect();
    for token in 100..103 {
        let blocks = || vec![identity(2)];
        for request in [VolumeRequest::Probe(blocks()), VolumeRequest::Discard(blocks())] {
            rig.send(&Command::Volume { token, volume: VOLUME, request });
        }
    }
    for round in 0..4 {
        assert_eq!(failed(&rig, on(OTHER, up(&rig, &[(3, 3), (4, 4)]))), [None; 2]);
        assert_eq!(failed(&rig, on(OTHER, down(&rig, &[(1, 9), (2, 10)]))), [None; 2]);
        rig.assert_g1(9, 1);
        let (probe, discard) = (vec![identity(1), identity(7)], vec![identity(4)]);
        let there = ask_of(OTHER, &rig, 2 * round, VolumeRequest::Probe(probe));
        assert_eq!(there, VolumeAnswer::Present(vec![true, false]));
        let removed = ask_of(OTHER, &rig, 2 * round + 1, VolumeRequest::Discard(discard));
        assert_eq!(removed, VolumeAnswer::Removed(1));
    }
    let error = rig.manager().shutdown(Instant::now() + Duration::from_millis(100)).unwrap_err();
    for what in ["g2_g4", "g4_g1", "probes", "removals"] {
        assert!(error.to_string().contains(&format!("volume {VOLUME} ({what})")), "{error}");
    }
    assert!(!error.to_string().contains(&format!("volume {OTHER}")), "{error}");
    hanging.set(Fault::Nothing);
    rig.manager().shutdown(soon()).unwrap();
    let started = stuck.into_iter().filter(|handle| {
        let outcome = kinds(&handle.wait(soon()).unwrap())[0];
        assert!([None, Some(FailureKind::ShuttingDown)].contains(&outcome), "{outcome:?}");
        outcome.is_none()
    });
    assert!(started.count() >= 2, "what had started went on");
}

/// Mutation that makes it fail: `Shares::room` gives a volume that is alone all there is.
#[test]
fn a_volume_that_hangs_alone_leaves_room_for_the_one_in_its_place() {
    const OTHER: VolumeId = VolumeId(9);
    let (hanging, other) = (Faulty::new(None), Faulty::of(OTHER, None));
    let registry = opened(&hanging);
    let rig = Rig::with(Shape::default(), |config| {
        let few = PathConfig { depth_blocks: 4, batch_blocks: 4, ..PathConfig::default() };
        (config.paths.g2_g4, config.paths.g4_g1) = (few, few);
        config.staging_bytes = 16 * 4096;
        let registry = Arc::clone(&registry);
        config.volumes =
            Some(VolumeTier { registry, slice: SLICE, model_heads: 4, writes: true, threads: 2 });
    });
    fill(&rig, 4);
    let blocks: Vec<_> = (1..=4).map(|name| (name, u32::from(name))).collect();
    assert_eq!(failed(&rig, up(&rig, &blocks)), [None; 4]);
    hanging.set(Fault::Hangs);
    let stuck = [up(&rig, &blocks), down(&rig, &blocks)].map(|plan| rig.manager().execute(plan).unwrap());
    let running = || rig.manager().stats().paths.iter().map(|path| path.running_plans).sum::<usize>();
    let until = soon();
    while running() < 2 {
        assert!(Instant::now() < until, "nothing hangs");
        std::thread::yield_now();
    }
    registry.register(Arc::clone(&other) as _).unwrap();
    for takes_its_place in [false, true] {
        if takes_its_place {
            registry.unregister_volume(VOLUME).unwrap();
        }
        assert_eq!(failed(&rig, on(OTHER, up(&rig, &[(3, 3), (4, 4)]))), [None; 2]);
        assert_eq!(failed(&rig, on(OTHER, down(&rig, &[(3, 9), (4, 10)]))), [None; 2]);
        rig.assert_g1(9, 3);
    }
    hanging.set(Fault::Nothing);
    for handle in stuck {
        assert_eq!(handle.wait(soon()).unwrap().blocks.len(), 4);
    }
}

/// Mutation that makes it fail: `Hands::send` hands all blocks to one thread.
#[test]
fn blocks_of_a_plan_are_divided_among_idle_threads() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 3);
    volume.set(Fault::Pairs);
    assert_eq!(failed(&rig, up(&rig, &[(1, 1), (2, 2), (3, 3)])), [None; 3]);
    *volume.calls.0.lock().expect("sound") = 0;
    assert_eq!(failed(&rig, down(&rig, &[(1, 9), (2, 10), (3, 11)])), [None; 3]);
    (1..=3).for_each(|name| rig.assert_g1(8 + u32::from(name), name));
}

#[test]
fn a_full_volume_says_so() {
    let volume = Faulty::new(Some(3000));
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 2);
    let found = failed(&rig, up(&rig, &[(1, 1), (2, 2)]));
    // Two threads put them: either may be first.
    let full = Some(FailureKind::Full);
    assert!([[None, full], [full, None]].iter().any(|expected| found == expected), "{found:?}");
}

#[test]
fn a_replica_leaves_the_writing_to_the_writer() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), false);
    fill(&rig, 1);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1)]))), [None]);
    assert!(!volume.exists(&[key(1)], soon())[0].as_ref().unwrap());
}

/// Sends a request and waits for its answer.
fn ask(rig: &Rig, token: u64, request: VolumeRequest) -> VolumeAnswer {
    ask_of(VOLUME, rig, token, request)
}

fn ask_of(volume: VolumeId, rig: &Rig, token: u64, request: VolumeRequest) -> VolumeAnswer {
    rig.send(&Command::Volume { token, volume, request });
    loop {
        if let Message::Volume { token: answered, answer, .. } = rig.inbox.next() {
            assert_eq!(answered, token);
            return answer;
        }
    }
}

#[test]
fn probes_and_removals_are_answered() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 3);
    rig.run(up(&rig, &[(1, 1), (2, 2), (3, 3)]));
    let probe = |token, names: &[u8]| {
        ask(&rig, token, VolumeRequest::Probe(names.iter().map(|&name| identity(name)).collect()))
    };
    assert_eq!(probe(1, &[1, 9, 3]), VolumeAnswer::Present(vec![true, false, true]));
    let discard = VolumeRequest::Discard(vec![identity(1), identity(9)]);
    assert_eq!(ask(&rig, 2, discard), VolumeAnswer::Removed(1));
    assert_eq!(probe(3, &[1, 2]), VolumeAnswer::Present(vec![false, true]));
    assert_eq!(ask(&rig, 4, VolumeRequest::Purge(Some(NamespaceId(77)))), VolumeAnswer::Removed(0));
    let list = |token, after| match ask(&rig, token, VolumeRequest::List(after)) {
        VolumeAnswer::Listed(blocks) => blocks,
        answer => panic!("{answer:?}"),
    };
    let named = |name| {
        let BlockIdentity { namespace, group, hash, .. } = identity(name);
        StoredBlock { namespace, group, hash }
    };
    let listed = list(20, None);
    assert!(listed.len() == 2 && [2, 3].map(named).iter().all(|block| listed.contains(block)), "{listed:?}");
    assert_eq!(list(21, Some(listed[0])), listed[1..]);
    assert_eq!(list(22, Some(listed[1])), []);
    volume.set(Fault::Refuses);
    assert!(matches!(probe(5, &[2]), VolumeAnswer::Failed(failure) if failure.kind == FailureKind::Io));
    volume.set(Fault::Panic);
    assert!(matches!(probe(6, &[2]), VolumeAnswer::Failed(failure) if failure.detail.contains("panicked")));
    volume.set(Fault::Nothing);
    assert_eq!(ask(&rig, 7, VolumeRequest::Purge(Some(identity(2).namespace))), VolumeAnswer::Removed(2));
    assert_eq!(probe(8, &[2, 3]), VolumeAnswer::Present(vec![false; 2]));
}

/// Mutation that makes it fail: `DiscardDamaged` removes what `Discard` does.
#[test]
fn of_a_damaged_block_what_is_sound_stays() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 1);
    assert_eq!(kinds(&rig.run(up(&rig, &[(1, 1)]))), [None]);
    // Another deployment has the heads of this rank in two objects.
    let theirs = |first_head| BlobKey { slice: BlobSlice { first_head, num_heads: 1, ..SLICE }, ..key(1) };
    let mut payload = Vec::new();
    let bytes = rig.read(&rig.g2, 1).len();
    volume.memory.tamper(&key(1), |object| payload = object[object.len() - bytes..].to_vec());
    let form = PayloadForm { order: StoredOrder::Universal, pieces: 1 };
    for (first_head, half) in (2..).zip(payload.chunks(bytes / 2)) {
        let put = [PutRequest { key: theirs(first_head), form, pieces: vec![half] }];
        volume.memory.put(&put, soon()).remove(0).expect("room");
    }
    let there = || {
        [key(1), theirs(2), theirs(3)]
            .map(|key| volume.memory.exists(&[key], soon()).remove(0).expect("memory"))
    };
    let discard = |token| ask(&rig, token, VolumeRequest::DiscardDamaged(vec![identity(1)]));
    assert_eq!(discard(1), VolumeAnswer::Removed(0), "nobody found anything damaged");
    let flip = |key| volume.memory.tamper(&key, |object| object[bytes / 2] ^= 1);
    assert!(flip(key(1)));
    assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [Some(FailureKind::Corrupt)]);
    assert_eq!(discard(2), VolumeAnswer::Removed(1));
    assert_eq!(there(), [false, true, true]);
    // Again, of the same read: theirs are none of its business.
    assert_eq!(discard(3), VolumeAnswer::Removed(0));
    assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [None], "from theirs");
    rig.assert_g1(9, 1);
    assert!(flip(theirs(3)));
    assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [Some(FailureKind::Corrupt)]);
    assert_eq!(discard(4), VolumeAnswer::Removed(2), "with its other half");
    assert_eq!(there(), [false; 3]);
}

/// Mutations that make it fail: `Puts` leaves the note, or `Desk::discard` or `Desk::purge` do.
#[test]
fn what_was_removed_or_written_again_since_it_was_damaged_stays() {
    let volume = Faulty::new(None);
    let rig = rig(&volume, Shape::default(), true);
    fill(&rig, 1);
    let label = identity(1).namespace;
    let removals =
        [None, Some(VolumeRequest::Discard(vec![identity(1)])), Some(VolumeRequest::Purge(Some(label)))];
    for (token, removal) in (1..).step_by(2).zip(removals) {
        assert_eq!(failed(&rig, up(&rig, &[(1, 1)])), [None]);
        assert!(volume.memory.tamper(&key(1), |object| object[150] ^= 1));
        assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [Some(FailureKind::Corrupt)]);
        match removal {
            // Somebody else removed it, and this rank writes it.
            None => {
                volume.memory.delete(&[key(1)], soon());
                assert_eq!(failed(&rig, up(&rig, &[(1, 1)])), [None]);
            }
            // Here this rank did, and somebody else writes it.
            Some(removal) => {
                let mut sound = Vec::new();
                volume.memory.tamper(&key(1), |object| {
                    object[150] ^= 1;
                    sound.clone_from(object);
                });
                assert_eq!(ask(&rig, token, removal), VolumeAnswer::Removed(1));
                let bytes = rig.read(&rig.g2, 1).len();
                let form = PayloadForm { order: StoredOrder::Universal, pieces: SLICE.num_heads };
                let pieces = vec![&sound[sound.len() - bytes..]];
                let put = [PutRequest { key: key(1), form, pieces }];
                volume.memory.put(&put, soon()).remove(0).expect("room");
            }
        }
        let damaged = VolumeRequest::DiscardDamaged(vec![identity(1)]);
        assert_eq!(ask(&rig, token + 1, damaged), VolumeAnswer::Removed(0), "a late order");
        assert_eq!(failed(&rig, down(&rig, &[(1, 9)])), [None]);
    }
}

/// Mutations that make it fail: `Unregister` closes whatever has the id; or what was open as the leader has it counts as opened for it.
#[test]
fn a_volume_of_the_ranks_own_is_not_the_leaders_to_close() {
    let volume = Faulty::new(None);
    let registry = opened(&volume);
    let rig = rig_with(&registry, Shape::default(), true);
    let own = VolumePlace::from(volume.descriptor());
    let other = VolumePlace { uri: "memory:other".into(), ..own.clone() };
    let refused = ask(&rig, 1, VolumeRequest::Register(other));
    assert!(
        matches!(&refused, VolumeAnswer::Failed(failure) if failure.detail.contains("already registered"))
    );
    assert_eq!(ask(&rig, 2, VolumeRequest::Unregister), VolumeAnswer::Done);
    let probe = |token| ask(&rig, token, VolumeRequest::Probe(vec![identity(1)]));
    assert_eq!(probe(3), VolumeAnswer::Present(vec![false]), "it is open still");
    // The same one: it was open before the leader spoke of it.
    assert_eq!(ask(&rig, 4, VolumeRequest::Register(own.clone())), VolumeAnswer::Done);
    assert_eq!(ask(&rig, 5, VolumeRequest::Unregister), VolumeAnswer::Done);
    assert_eq!(probe(6), VolumeAnswer::Present(vec![false]), "it is open still");
    // What the leader has opened, however often, is the leader's to close.
    registry.unregister_volume(VOLUME).expect("its own");
    for token in [7, 8] {
        let theirs = VolumePlace { uri: "memory:".into(), ..own.clone() };
        assert_eq!(ask(&rig, token, VolumeRequest::Register(theirs)), VolumeAnswer::Done);
    }
    assert_eq!(probe(9), VolumeAnswer::Present(vec![false]));
    assert_eq!(ask(&rig, 10, VolumeRequest::Unregister), VolumeAnswer::Done);
    assert!(matches!(probe(11), VolumeAnswer::Failed(failure) if failure.kind == FailureKind::Unsupported));
}

#[test]
fn a_worker_without_volumes_refuses() {
    let rig = Rig::with(Shape { g2: contiguous(16), ..Shape::default() }, |_| {});
    fill(&rig, 1);
    assert_eq!(failed(&rig, up(&rig, &[(1, 1)])), [Some(FailureKind::Unsupported)]);
    let request = VolumeRequest::Purge(None);
    let command =
        kvbm_plan::wire::encode_command(&Command::Volume { token: 1, volume: VOLUME, request }).unwrap();
    assert!(matches!(rig.manager().submit(&command), Err(SubmitError::NoSuchTier { .. })));
}
