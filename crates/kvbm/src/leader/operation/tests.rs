//! Operations whose plans are merged by hand.

use super::*;
use kvbm_plan::{GroupId, NamespaceId, SequenceHash};
use kvbm_pool::{Registry, RegistryConfig};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Wake};

fn operation(limit: Duration) -> Arc<Operation> {
    operation_from(Tier::G2, limit)
}

fn operation_from(from: Tier, limit: Duration) -> Arc<Operation> {
    let hash = SequenceHash::from_bytes([1; 16]);
    let identity =
        BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: 0 };
    let step = Move { identity, from, src: BlockId(0), dst: BlockId(0) };
    let destination = Destination::Unregistered;
    let (moves, keep) = (vec![step], Vec::new());
    let losses = Losses::default();
    let parts = Parts { moves, destination, losses, keep, source_check: None, round: None, volume: None };
    Operation::new(Purpose::Onboard, Tier::G1, limit, parts, 1)
}

fn dropped() -> Failure {
    Failure::new(FailureKind::Cancelled, "dropped")
}

#[test]
fn the_last_one_to_let_go_gives_it_up() {
    let operation = operation(Duration::from_secs(60));
    let (first, second) = (operation.interest(), operation.join(Instant::now()).expect("under way"));
    assert_eq!(first.release(&dropped()), Released::Shared);
    assert!(!operation.settled.is_set());
    assert_eq!(second.release(&dropped()), Released::Abandoned);
    assert!(operation.settled.is_set());
    operation.with_outcome(|outcome| assert_eq!(outcome.failures[0].failure, dropped()));
}

#[test]
fn what_nobody_wanted_is_wanted_again_when_somebody_joins() {
    let operation = operation(Duration::from_secs(60));
    assert_eq!(operation.interest().release(&dropped()), Released::Abandoned);
    let late = operation.join(Instant::now()).expect("not late");
    assert!(!operation.settled.is_set() && late.joined);
    let unsettled = operation.merge(0, &[None], Some(Duration::ZERO)).expect("the only plan");
    assert_eq!(unsettled.failures, [None], "its blocks become visible");
    unsettled.promise.keep(Outcome::default());
    assert_eq!(late.release(&dropped()), Released::Over);
}

/// Mutation that makes it fail: `join` drops all of the outcome.
#[test]
fn what_was_kept_of_an_operation_that_is_joined_again_stays_pinned() {
    let registry = Registry::new(&RegistryConfig::new([4, 0, 0])).expect("a registry");
    let hashes = [1, 2].map(|byte| SequenceHash::from_bytes([byte; 16]));
    let identities: Vec<_> = BlockIdentity::chain(NamespaceId(0), GroupId(0), &hashes).collect();
    let arrivals = registry.begin_arrivals(Tier::G1, &identities).expect("room");
    let step = |identity| Move { identity, from: Tier::G2, src: BlockId(0), dst: BlockId(0) };
    let parts = Parts {
        moves: identities.into_iter().map(step).collect(),
        destination: Destination::Reserved { arrivals, places: vec![0, 1] },
        losses: Losses::default(),
        keep: Vec::new(),
        source_check: None,
        round: None,
        volume: None,
    };
    let operation = Operation::new(Purpose::Onboard, Tier::G1, Duration::from_secs(60), parts, 2);
    let complete = |parts: &mut Parts, places: Range<usize>| match &mut parts.destination {
        Destination::Reserved { arrivals, .. } => arrivals.complete_front(places),
        _ => 0,
    };
    let pinned = || registry.occupancy(Tier::G1).active;
    let (first, heard) = (operation.interest(), Some(Duration::ZERO));
    assert!(operation.merge(0, &[None], heard).is_none());
    for _ in 0..2 {
        operation.keep_front(complete);
        assert!(operation.abandon(&dropped()));
        assert_eq!(pinned(), 1);
        let second = operation.join(Instant::now()).expect("under way");
        assert_eq!(pinned(), 1, "the first one has not seen it, the second one waits for what follows");
        assert_eq!(second.release(&dropped()), Released::Shared);
    }
    let mut unsettled = operation.merge(1, &[None], heard).expect("the last plan");
    assert_eq!((unsettled.kept, complete(&mut unsettled.parts, 1..2)), (1, 1));
    let Destination::Reserved { arrivals, .. } = unsettled.parts.destination else { panic!("reserved") };
    unsettled.promise.keep(Outcome { arrived: Some(arrivals.into_pinned()), failures: Vec::new() });
    operation.with_outcome(|outcome| assert_eq!(outcome.arrived.as_ref().map(Pinned::len), Some(2)));
    assert_eq!((first.release(&dropped()), pinned()), (Released::Over, 2));
    drop(first);
    assert_eq!(pinned(), 0);
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Mutation that makes it fail: `Promise` without its `drop`.
#[test]
fn a_defect_while_it_is_settled_is_told_to_whoever_waits() {
    let operation = operation(Duration::from_secs(60));
    let woken = Arc::new(Woken::default());
    let waker = Arc::clone(&woken).into();
    assert!(operation.settled.poll(&Context::from_waker(&waker)).is_pending());
    let unsettled = operation.merge(0, &[None], Some(Duration::ZERO)).expect("the only plan");
    let defect = catch_unwind(AssertUnwindSafe(|| {
        let _unsettled = unsettled;
        panic!("planted");
    }));
    assert!(defect.is_err() && woken.0.load(Ordering::Relaxed) && operation.settled.is_set());
    operation.with_outcome(|outcome| {
        assert!(outcome.arrived.is_none());
        assert_eq!(outcome.failures[0].failure.kind, FailureKind::Io, "nobody asks for it again");
        assert!(outcome.failures[0].failure.detail.contains("a defect of kvbm"), "{:?}", outcome.failures);
    });
}

/// One block comes from the disk, and is late after ten seconds.
fn reading() -> (Arc<Operation>, impl Fn(u64) -> Instant) {
    let operation = operation_from(Tier::G3, Duration::from_secs(10));
    let began = operation.began;
    (operation, move |second| began + Duration::from_secs(second))
}

/// Mutation that makes it fail: `is_owed_by_quiet_disk` passes over how late it is.
#[test]
fn a_disk_that_was_asked_in_the_last_moment_has_as_long_as_any() {
    let (operation, at) = reading();
    operation.watch_quiet_disk(at(10), Duration::from_secs(5));
    assert!(!operation.is_owed_by_quiet_disk(at(11)), "a rank may have asked it a second ago");
    assert!(operation.is_owed_by_quiet_disk(at(16)));
    assert!(operation.merge(0, &[None], Some(Duration::from_secs(6))).is_some());
    assert!(!operation.is_owed_by_quiet_disk(at(17)), "it has answered");
    let (operation, at) = reading();
    operation.watch_quiet_disk(at(4), Duration::from_secs(5));
    assert!(!operation.is_owed_by_quiet_disk(at(60)), "it was not quiet for long when the time was up");
}

/// Mutations that make it fail: `merge` passes over how long ranks were at it, or over whether the disk was quiet.
#[test]
fn a_late_answer_accuses_the_disk_only_where_a_rank_had_waited_for_it() {
    let is_late = |quiet: bool, busy: u64| {
        let (operation, at) = reading();
        if quiet {
            operation.watch_quiet_disk(at(10), Duration::from_secs(5));
        }
        let unsettled = operation.merge(0, &[None], Some(Duration::from_secs(busy)));
        let disk = unsettled.expect("the only plan").told.disk;
        assert!(disk.answered);
        assert_eq!(disk.first.is_some(), disk.is_late);
        disk.is_late
    };
    assert!(is_late(true, 5));
    assert!(!is_late(true, 4), "it was asked late, and answered soon");
    assert!(!is_late(false, 5), "others were given something");
}

#[test]
fn what_is_late_is_joined_by_nobody_and_shows_nothing() {
    let operation = operation(Duration::ZERO);
    assert!(operation.expires() && !operation.expires(), "it is given up once");
    assert!(operation.abandon(&expired("transfer", Duration::ZERO)));
    assert!(!operation.abandon(&dropped()), "once");
    assert!(operation.join(Instant::now()).is_none());
    let unsettled = operation.merge(0, &[None], Some(Duration::ZERO)).expect("the only plan");
    assert_eq!(unsettled.failures[0].as_ref().map(|failure| failure.kind), Some(FailureKind::Deadline));
}
