//! Transfers whose plans are merged by hand.

use super::*;
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};
use kvbm_pool::{Registry, RegistryConfig};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Wake};

fn transfer(limit: Duration) -> Arc<Transfer> {
    transfer_from(Tier::G2, limit)
}

fn transfer_from(from: Tier, limit: Duration) -> Arc<Transfer> {
    let hash = SequenceHash::from_bytes([1; 16]);
    let identity =
        BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: 0 };
    let moves = vec![Move { identity, from, src: BlockId(0), dst: BlockId(0) }];
    let request =
        Request::new(Purpose::Onboard, Tier::G1, moves, Destination::Unregistered, Losses::default());
    Transfer::new(request, 0, limit, &[whole(0..1)])
}

fn whole(moves: Range<usize>) -> Part {
    Part { moves, step: None }
}

fn part(transfer: &Arc<Transfer>, first: usize) -> PlanPart {
    PlanPart { transfer: Arc::clone(transfer), first, step: None }
}

fn dropped() -> Failure {
    Failure::new(FailureKind::Cancelled, "dropped")
}

#[test]
fn the_last_one_to_let_go_gives_it_up() {
    let transfer = transfer(Duration::from_secs(60));
    let (first, second) = (transfer.interest(), transfer.join(Instant::now()).expect("under way"));
    assert_eq!(first.release(&dropped()), Released::Shared);
    assert!(!transfer.settled.is_set());
    assert_eq!(second.release(&dropped()), Released::Abandoned);
    assert!(transfer.settled.is_set());
    transfer.with_outcome(|outcome| assert_eq!(outcome.failures[0].failure, dropped()));
}

#[test]
fn what_nobody_wanted_is_wanted_again_when_somebody_joins() {
    let transfer = transfer(Duration::from_secs(60));
    assert_eq!(transfer.interest().release(&dropped()), Released::Abandoned);
    let late = transfer.join(Instant::now()).expect("not late");
    assert!(!transfer.settled.is_set() && late.joined);
    let unsettled =
        transfer.merge(&part(&transfer, 0), &[None], Some(Duration::ZERO)).expect("the only plan");
    assert_eq!(unsettled.failures, [None], "its blocks become visible");
    unsettled.settlement.publish(Outcome::default());
    assert_eq!(late.release(&dropped()), Released::Over);
}

/// Mutation that makes it fail: `join` drops all of the outcome.
#[test]
fn what_was_kept_of_an_operation_that_is_joined_again_stays_pinned() {
    let registry = Registry::new(&RegistryConfig::new([4, 0, 0])).expect("a registry");
    let hashes = [1, 2].map(|byte| SequenceHash::from_bytes([byte; 16]));
    let identities: Vec<_> = BlockIdentity::chain(NamespaceId(0), GroupId(0), &hashes).collect();
    let arrivals = registry.begin_arrivals(Tier::G1, &identities).expect("room");
    let block = |identity| Move { identity, from: Tier::G2, src: BlockId(0), dst: BlockId(0) };
    let moves = identities.into_iter().map(block).collect();
    let destination = Destination::Reserved { arrivals, places: vec![0, 1] };
    let request = Request::new(Purpose::Onboard, Tier::G1, moves, destination, Losses::default());
    let transfer = Transfer::new(request, 0, Duration::from_secs(60), &[whole(0..1), whole(1..2)]);
    let complete = |parts: &mut Parts, places: Range<usize>| match &mut parts.destination {
        Destination::Reserved { arrivals, .. } => arrivals.complete_front(places),
        _ => 0,
    };
    let pinned = || registry.occupancy(Tier::G1).active;
    let (first, busy) = (transfer.interest(), Some(Duration::ZERO));
    assert!(transfer.merge(&part(&transfer, 0), &[None], busy).is_none());
    for _ in 0..2 {
        transfer.keep_front(complete);
        assert!(transfer.abandon(&dropped()));
        assert_eq!(pinned(), 1);
        let second = transfer.join(Instant::now()).expect("under way");
        assert_eq!(pinned(), 1, "the first one has not seen it, the second one waits for what follows");
        assert_eq!(second.release(&dropped()), Released::Shared);
    }
    let mut unsettled = transfer.merge(&part(&transfer, 1), &[None], busy).expect("the last plan");
    assert_eq!((unsettled.kept, complete(&mut unsettled.parts, 1..2)), (1, 1));
    let Destination::Reserved { arrivals, .. } = unsettled.parts.destination else { panic!("reserved") };
    unsettled.settlement.publish(Outcome { arrived: Some(arrivals.into_pinned()), failures: Vec::new() });
    transfer.with_outcome(|outcome| assert_eq!(outcome.arrived.as_ref().map(Pinned::len), Some(2)));
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

/// Mutation that makes it fail: `Settlement` without its `drop`.
#[test]
fn a_defect_while_a_transfer_is_settled_is_reported_to_its_waiters() {
    let transfer = transfer(Duration::from_secs(60));
    let woken = Arc::new(Woken::default());
    let waker = Arc::clone(&woken).into();
    assert!(transfer.settled.poll(&Context::from_waker(&waker)).is_pending());
    let unsettled =
        transfer.merge(&part(&transfer, 0), &[None], Some(Duration::ZERO)).expect("the only plan");
    let defect = catch_unwind(AssertUnwindSafe(|| {
        let _unsettled = unsettled;
        panic!("planted");
    }));
    assert!(defect.is_err() && woken.0.load(Ordering::Relaxed) && transfer.settled.is_set());
    transfer.with_outcome(|outcome| {
        assert!(outcome.arrived.is_none());
        assert_eq!(outcome.failures[0].failure.kind, FailureKind::Io, "nobody asks for it again");
        assert!(outcome.failures[0].failure.detail.contains("a defect of kvbm"), "{:?}", outcome.failures);
    });
}

/// One block comes from the disk, and is late after ten seconds.
fn reading() -> (Arc<Transfer>, impl Fn(u64) -> Instant) {
    let transfer = transfer_from(Tier::G3, Duration::from_secs(10));
    let began = transfer.began;
    (transfer, move |second| began + Duration::from_secs(second))
}

/// Mutation that makes it fail: `is_owed_by_quiet_disk` passes over how late it is.
#[test]
fn a_disk_that_was_asked_in_the_last_moment_has_as_long_as_any() {
    let (transfer, at) = reading();
    transfer.watch_quiet_disk(at(10), Duration::from_secs(5));
    assert!(!transfer.is_owed_by_quiet_disk(at(11)), "a rank may have asked it a second ago");
    assert!(transfer.is_owed_by_quiet_disk(at(16)));
    assert!(transfer.merge(&part(&transfer, 0), &[None], Some(Duration::from_secs(6))).is_some());
    assert!(!transfer.is_owed_by_quiet_disk(at(17)), "it has answered");
    let (transfer, at) = reading();
    transfer.watch_quiet_disk(at(4), Duration::from_secs(5));
    assert!(!transfer.is_owed_by_quiet_disk(at(60)), "it was not quiet for long when the time was up");
}

/// Mutations that make it fail: `merge` passes over how long ranks were at it, or over whether the
/// disk was quiet.
#[test]
fn a_late_answer_accuses_the_disk_only_where_a_rank_had_waited_for_it() {
    let is_late = |quiet: bool, busy: u64| {
        let (transfer, at) = reading();
        if quiet {
            transfer.watch_quiet_disk(at(10), Duration::from_secs(5));
        }
        let unsettled = transfer.merge(&part(&transfer, 0), &[None], Some(Duration::from_secs(busy)));
        let disk = unsettled.expect("the only plan").results.disk;
        assert!(disk.blocks.iter().any(|(_, failure)| failure.is_none()));
        assert_eq!(disk.late.is_some(), !disk.late_blocks.is_empty());
        disk.late.is_some()
    };
    assert!(is_late(true, 5));
    assert!(!is_late(true, 4), "it was asked late, and answered soon");
    assert!(!is_late(false, 5), "others were given something");
}

#[test]
fn what_is_late_is_joined_by_nobody_and_shows_nothing() {
    let transfer = transfer(Duration::ZERO);
    assert!(transfer.expires() && !transfer.expires(), "it is given up once");
    assert!(transfer.abandon(&expired("transfer", Duration::ZERO)));
    assert!(!transfer.abandon(&dropped()), "once");
    assert!(transfer.join(Instant::now()).is_none());
    let unsettled =
        transfer.merge(&part(&transfer, 0), &[None], Some(Duration::ZERO)).expect("the only plan");
    assert_eq!(unsettled.failures[0].as_ref().map(|failure| failure.kind), Some(FailureKind::Deadline));
}

/// Mutation that makes it fail: a step counts as over when the first of its plans is.
#[test]
fn a_layer_has_arrived_when_it_has_of_all_blocks_and_none_failed() {
    let hash = |byte| SequenceHash::from_bytes([byte; 16]);
    let hashes: Vec<_> = (0..3).map(hash).collect();
    let block = |(identity, from)| Move { identity, from, src: BlockId(0), dst: BlockId(0) };
    let identities = BlockIdentity::chain(NamespaceId(0), GroupId(0), &hashes);
    let moves: Vec<_> = identities.zip([Tier::G2, Tier::G2, Tier::G3]).map(block).collect();
    let make = || {
        let (to, losses) = (Tier::G1, Losses::default());
        let unregistered = Destination::Unregistered;
        let mut request = Request::new(Purpose::EngineOnboard, to, moves.clone(), unregistered, losses);
        request.layers = LayerSteps::new(6, 3, None);
        let parts = crate::transfers::plans::parts(&moves, to, request.layers, |_| 1);
        assert_eq!(parts.len(), 1 + 3 * 2, "the block of the disk comes whole");
        let transfer = Transfer::new(request, 0, Duration::from_secs(60), &parts);
        (Arc::clone(&transfer), move |part: usize, failure: Option<Failure>| {
            let Part { moves, step } = parts[part].clone();
            let part = PlanPart { transfer: Arc::clone(&transfer), first: moves.start, step };
            transfer.merge(&part, &[failure], Some(Duration::ZERO))
        })
    };
    let (transfer, end) = make();
    let has = |layers: [u32; 3]| layers.map(|layer| transfer.has_layer(layer));
    assert!(end(1, None).is_none() && end(2, None).is_none());
    assert_eq!(has([0, 1, 2]), [false; 3], "the block of the disk is missing");
    assert!(end(0, None).is_none());
    assert_eq!(has([0, 1, 2]), [true, true, false]);
    transfer.wait_layer(1, Instant::now());
    assert!(end(5, None).is_none() && end(3, None).is_none());
    assert_eq!(has([2, 4, 5]), [false; 3]);
    assert!(end(4, None).is_none());
    assert_eq!(has([3, 4, 5]), [true, false, false]);
    let unsettled = end(6, None).expect("the last plan");
    assert_eq!(unsettled.failures, [None, None, None]);
    assert_eq!(has([3, 4, 5]), [true; 3]);
    // One that failed.
    let (transfer, end) = make();
    assert!(end(0, None).is_none() && end(1, None).is_none() && end(2, Some(dropped())).is_none());
    assert!(!transfer.has_layer(0), "it failed of one block");
    transfer.wait_layer(0, Instant::now() + Duration::from_secs(60));
    assert!(transfer.abandon(&dropped()));
    transfer.wait_layer(5, Instant::now() + Duration::from_secs(60));
}
