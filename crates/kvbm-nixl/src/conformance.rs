//! What every [`RemoteAgent`] must do, as checks that any implementation can run.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvbm_plan::deadline_after;
use kvbm_storage::{Storage, StorageAllocator, StorageExt, SystemAllocator};

use crate::agent::{
    AgentError, Descriptor, DescriptorList, NixlEnabledStorage, Notification, Registration, RemoteAgent,
    RemoteRequest, SegmentKind, TransferDirection,
};

/// Bytes of each storage of the checks.
const BYTES: u64 = 256 << 10;

/// Runs all checks on agents that `make` gives, which can reach each other. Each name is asked for
/// once.
///
/// # Panics
/// If a check fails.
pub fn run(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>) {
    reads_and_writes(make);
    scattered_ranges_keep_their_order(make);
    notifications_are_bytes_and_follow_the_write(make);
    refuses_what_is_unfit(make);
    a_forgotten_peer_is_unknown(make);
    claims_end_with_the_transfer(make);
    ends_in_any_order(make);
}

struct Side {
    agent: Box<dyn RemoteAgent>,
    storage: Arc<dyn Storage>,
    registration: Registration,
}

fn side(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>, name: &str, byte: u8) -> Side {
    let agent = make(name);
    assert_eq!(agent.name(), name);
    let storage = SystemAllocator::default().allocate(BYTES, 4096).expect("a small storage");
    fill(&*storage, 0, &vec![byte; BYTES as usize]);
    let registration = storage.nixl_register(&*agent).expect("host memory can be registered");
    assert_eq!(registration.bytes(), BYTES);
    Side { agent, storage, registration }
}

/// Two sides that know each other.
fn pair(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>, name: &str) -> (Side, Side) {
    let (one, two) = (side(make, &format!("{name}-1"), 1), side(make, &format!("{name}-2"), 2));
    introduce(&one, &two);
    introduce(&two, &one);
    (one, two)
}

fn introduce(one: &Side, two: &Side) {
    let metadata = two.agent.metadata().expect("metadata");
    assert_eq!(one.agent.add_peer(&metadata).expect("a peer"), two.agent.name());
}

fn reads_and_writes(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>) {
    let (one, two) = pair(make, "plain");
    fill(&*two.storage, 0, &pattern(BYTES, 7));
    transfer(&one, &two, TransferDirection::Read, &[(0, 0, BYTES)]).expect("a read");
    assert!(content(&*one.storage) == pattern(BYTES, 7), "a read brings the peer's bytes");
    fill(&*one.storage, 0, &pattern(BYTES, 9));
    transfer(&one, &two, TransferDirection::Write, &[(0, 0, BYTES)]).expect("a write");
    assert!(content(&*two.storage) == pattern(BYTES, 9), "a write takes ours there");
}

fn scattered_ranges_keep_their_order(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>) {
    let (one, two) = pair(make, "scattered");
    fill(&*two.storage, 0, &pattern(BYTES, 3));
    // Reversed, of different lengths, with gaps.
    let ranges: Vec<_> = (0..40).map(|at| (at * 5000, BYTES - (at + 1) * 6000, 1000 + at * 64)).collect();
    let mut expected = content(&*one.storage);
    for (ours, theirs, bytes) in &ranges {
        let source = &pattern(BYTES, 3)[*theirs as usize..][..*bytes as usize];
        expected[*ours as usize..][..*bytes as usize].copy_from_slice(source);
    }
    transfer(&one, &two, TransferDirection::Read, &ranges).expect("a scattered read");
    assert!(content(&*one.storage) == expected, "each range arrives at its place, and nothing else changes");
}

fn notifications_are_bytes_and_follow_the_write(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>) {
    let (one, two) = pair(make, "notified");
    let message = [0, 255, 1, 0, 128, b'x'];
    one.agent.notify(two.agent.name(), &message).expect("a notification");
    let long = pattern(100_000, 5);
    one.agent.notify(two.agent.name(), &long).expect("a long notification");
    let got = messages(&*two.agent, 2);
    assert_eq!(got[0], Notification { from: one.agent.name().to_owned(), message: message.to_vec() });
    assert!(got[1].message == long, "a long notification arrives whole");

    fill(&*one.storage, 0, &pattern(BYTES, 4));
    let mut write = request(&one, &two, TransferDirection::Write, &[(0, 0, BYTES)]);
    write.notification = Some(b"written".to_vec());
    run_request(&one, write).expect("a write");
    assert_eq!(messages(&*two.agent, 1)[0].message, b"written");
    assert!(content(&*two.storage) == pattern(BYTES, 4), "the bytes are there when the notification is");
}

fn refuses_what_is_unfit(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>) {
    let (one, two) = pair(make, "unfit");
    let mut uneven = request(&one, &two, TransferDirection::Read, &[(0, 0, 64)]);
    uneven.remote.entries.clear();
    let mut lengths = request(&one, &two, TransferDirection::Read, &[(0, 0, 64)]);
    lengths.local.entries[0].bytes = 63;
    let nothing = request(&one, &two, TransferDirection::Read, &[]);
    for bad in [uneven, lengths, nothing] {
        assert!(matches!(run_request(&one, bad), Err(AgentError::Lists { .. })));
    }
    for local_is_wrong in [true, false] {
        let mut outside = request(&one, &two, TransferDirection::Read, &[(0, 0, 64)]);
        let side = if local_is_wrong { &mut outside.local } else { &mut outside.remote };
        side.entries[0].address += BYTES;
        assert!(run_request(&one, outside).is_err(), "a range outside registered memory");
    }
    let mut stranger = request(&one, &two, TransferDirection::Read, &[(0, 0, 64)]);
    "nobody".clone_into(&mut stranger.peer);
    assert!(run_request(&one, stranger).is_err());
    assert!(one.agent.notify("nobody", b"x").is_err());
    let too_long = vec![0; crate::MAX_NOTIFICATION_BYTES + 1];
    assert!(matches!(one.agent.notify(two.agent.name(), &too_long), Err(AgentError::Notification { .. })));
    let metadata = two.agent.metadata().expect("metadata");
    for bad in [&b""[..], b"garbage", &metadata[..metadata.len() / 2]] {
        assert!(matches!(one.agent.add_peer(bad), Err(AgentError::Metadata { .. })), "{} bytes", bad.len());
    }
    transfer(&one, &two, TransferDirection::Read, &[(0, 0, 64)]).expect("what was refused broke nothing");
}

fn a_forgotten_peer_is_unknown(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>) {
    let (one, two) = pair(make, "forgotten");
    one.agent.forget_peer(two.agent.name()).expect("a known peer");
    assert!(transfer(&one, &two, TransferDirection::Read, &[(0, 0, 64)]).is_err());
    one.agent.forget_peer(two.agent.name()).expect("one that is not known any more");
    one.agent.forget_peer("nobody").expect("one that never was");
    introduce(&one, &two);
    transfer(&one, &two, TransferDirection::Read, &[(0, 0, 64)]).expect("it was added again");
}

/// Sets a flag when it is dropped.
struct Claim(Arc<AtomicBool>);

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn claims_end_with_the_transfer(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>) {
    let (one, two) = pair(make, "claims");
    let over = Arc::new(AtomicBool::new(false));
    let mut read = request(&one, &two, TransferDirection::Read, &[(0, 0, BYTES)]);
    read.keep = Box::new(Claim(Arc::clone(&over)));
    run_request(&one, read).expect("a read");
    assert!(over.load(Ordering::Acquire), "memory is given back at the end");

    // A handle that is dropped at once: its memory is given back once the bytes have arrived.
    let over = Arc::new(AtomicBool::new(false));
    let mut read = request(&one, &two, TransferDirection::Read, &[(0, 0, BYTES)]);
    read.keep = Box::new(Claim(Arc::clone(&over)));
    // SAFETY: nobody else touches the storages of this check.
    drop(unsafe { one.agent.start(read) }.expect("a read"));
    let deadline = soon();
    while !over.load(Ordering::Acquire) {
        assert!(Instant::now() < deadline, "a detached transfer ends");
        one.agent.notifications().expect("an agent looks after what it has detached");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(content(&*one.storage) == content(&*two.storage), "a detached transfer is not cut off");
}

/// Memory, agent and peer end in any order, without a crash.
fn ends_in_any_order(make: &dyn Fn(&str) -> Box<dyn RemoteAgent>) {
    for order in 0..3 {
        let (one, two) = pair(make, &format!("end-{order}"));
        transfer(&one, &two, TransferDirection::Read, &[(0, 0, BYTES)]).expect("a read");
        let Side { agent, storage, registration } = one;
        match order {
            0 => drop((agent, registration, storage, two)),
            1 => drop((two, storage, agent, registration)),
            _ => drop((storage, registration, two, agent)),
        }
    }
}

fn transfer(
    one: &Side,
    two: &Side,
    direction: TransferDirection,
    ranges: &[(u64, u64, u64)],
) -> Result<(), AgentError> {
    run_request(one, request(one, two, direction, ranges))
}

/// A request for (our offset, the peer's offset, bytes).
fn request(
    one: &Side,
    two: &Side,
    direction: TransferDirection,
    ranges: &[(u64, u64, u64)],
) -> RemoteRequest {
    let list = |storage: &Arc<dyn Storage>, ranges: Vec<(u64, u64)>| {
        let mut list = DescriptorList::new(SegmentKind::Dram);
        let entry = |(at, bytes)| Descriptor::within(&**storage, at, bytes).expect("inside");
        list.entries = ranges.into_iter().map(entry).collect();
        list
    };
    let keep: Box<dyn Any + Send> = Box::new((Arc::clone(&one.storage), Arc::clone(&two.storage)));
    RemoteRequest {
        direction,
        peer: two.agent.name().to_owned(),
        local: list(&one.storage, ranges.iter().map(|(at, _, bytes)| (*at, *bytes)).collect()),
        remote: list(&two.storage, ranges.iter().map(|(_, at, bytes)| (*at, *bytes)).collect()),
        notification: None,
        keep,
    }
}

fn run_request(side: &Side, request: RemoteRequest) -> Result<(), AgentError> {
    // SAFETY: nobody else touches the storages of this check.
    unsafe { side.agent.start(request) }?.wait(soon())
}

fn messages(agent: &dyn RemoteAgent, count: usize) -> Vec<Notification> {
    let (deadline, mut got) = (soon(), Vec::new());
    while got.len() < count {
        assert!(Instant::now() < deadline, "{} of {count} notifications arrived", got.len());
        got.extend(agent.notifications().expect("notifications"));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(got.len(), count);
    got
}

fn soon() -> Instant {
    deadline_after(Instant::now(), Duration::from_secs(60))
}

fn pattern(bytes: u64, seed: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at.wrapping_mul(seed | 1) ^ (at >> 8)) as u8).collect()
}

fn fill(storage: &dyn Storage, offset: u64, bytes: &[u8]) {
    // SAFETY: nobody else touches the storages of these checks.
    unsafe { storage.write_at(offset, bytes) }.expect("host memory");
}

fn content(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.len() as usize];
    // SAFETY: nobody else touches the storages of these checks.
    unsafe { storage.read_at(0, &mut bytes) }.expect("host memory");
    bytes
}
