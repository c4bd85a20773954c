//! A block that is on its way is moved once, however many ask for it.

use crate::support::script::{Mode, Ranks};
use crate::support::{fill, soon, tokens};
use kvbm::{FailureKind, KvBlockManager, Owned, Path, Tier, TokenSequence};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake};

fn lower_prefix() -> (Ranks, KvBlockManager<Owned>, TokenSequence) {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 0], |config| config.offload.g1_g2.write_through = true);
    let sequence = tokens(&manager, 1, 4);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    ranks.set_all(Mode::Hold);
    (ranks, manager, sequence)
}

#[test]
fn two_onboards_of_one_prefix_move_each_block_once() {
    let (ranks, manager, sequence) = lower_prefix();
    let first = manager.onboard(manager.match_prefix(&sequence));
    let second = manager.onboard(manager.match_prefix(&sequence));
    let plan = ranks.next_plan(0);
    assert_eq!((plan.blocks.len(), ranks.held(0)), (4, 0));
    ranks.done(0, &plan);
    let (first, second) = (first.wait().unwrap(), second.wait().unwrap());
    assert_eq!(first.block_ids(), second.block_ids());
    assert_eq!(manager.metrics().path(Path::G2_G1).blocks.get(), 4);
}

#[test]
fn what_leaves_g1_before_it_is_used_is_an_error_and_is_counted() {
    let (ranks, manager, sequence) = lower_prefix();
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plan = ranks.next_plan(0);
    ranks.done(0, &plan);
    assert!(manager.forget(&manager.namespace().clone()) > 0);
    let error = onboarding.wait().unwrap_err();
    let failed: Vec<_> = error.failures.iter().map(|block| (block.path, block.failure.kind)).collect();
    assert_eq!((error.arrived.len(), &failed[..]), (0, &[(Path::G2_G1, FailureKind::Missing)][..]));
    assert_eq!(manager.metrics().path(Path::G2_G1).failures(FailureKind::Missing).get(), 1);
}

#[test]
fn a_longer_prefix_joins_what_is_under_way_and_brings_the_rest() {
    let (ranks, manager, sequence) = lower_prefix();
    let mut short = manager.match_prefix(&sequence);
    short.truncate(2);
    let first = manager.onboard(short);
    let second = manager.onboard(manager.match_prefix(&sequence));
    let (head, tail) = (ranks.next_plan(0), ranks.next_plan(0));
    assert_eq!((head.blocks.len(), tail.blocks.len()), (2, 2));
    ranks.done(0, &tail);
    assert!(!second.is_done(), "its first blocks are another's business");
    ranks.done(0, &head);
    assert_eq!((first.wait().unwrap().len(), second.wait().unwrap().len()), (2, 4));
}

#[test]
fn whoever_joined_gets_the_blocks_although_the_first_one_went_away() {
    let (ranks, manager, sequence) = lower_prefix();
    let first = manager.onboard(manager.match_prefix(&sequence));
    let second = manager.onboard(manager.match_prefix(&sequence));
    let plan = ranks.next_plan(0);
    drop(first);
    assert!(ranks.commands(0).is_empty(), "somebody still waits: nothing is cancelled");
    ranks.done(0, &plan);
    assert_eq!(second.wait().unwrap().len(), 4);
}

#[test]
fn a_transfer_that_nobody_wanted_any_more_is_wanted_again() {
    let (ranks, manager, sequence) = lower_prefix();
    drop(manager.onboard(manager.match_prefix(&sequence)));
    let plan = ranks.next_plan(0);
    let second = manager.onboard(manager.match_prefix(&sequence));
    assert_eq!(ranks.held(0), 0, "the blocks are on their way");
    assert!(!second.is_done());
    ranks.done(0, &plan);
    assert_eq!(second.wait().unwrap().len(), 4, "it had started before it was cancelled");
}

#[test]
fn what_was_cancelled_before_it_was_joined_is_asked_for_again() {
    let (ranks, manager, sequence) = lower_prefix();
    drop(manager.onboard(manager.match_prefix(&sequence)));
    let plan = ranks.next_plan(0);
    let second = manager.onboard(manager.match_prefix(&sequence));
    ranks.fail(0, &plan, 1, FailureKind::Cancelled);
    ranks.set(0, Mode::Answer);
    let cached = second.wait().unwrap();
    assert_eq!(cached.len(), 4);
    assert_eq!(manager.metrics().tier(Tier::G2).hits.get(), 4, "a hit is counted once");
}

struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn an_onboard_is_a_future_that_is_woken_when_it_can_go_on() {
    let (ranks, manager, sequence) = lower_prefix();
    drop(manager.onboard(manager.match_prefix(&sequence)));
    let cancelled = ranks.next_plan(0);
    let mut onboarding = pin!(manager.onboard(manager.match_prefix(&sequence)));
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = Arc::clone(&count).into();
    let mut context = Context::from_waker(&waker);
    assert!(onboarding.as_mut().poll(&mut context).is_pending());
    ranks.fail(0, &cancelled, 0, FailureKind::Cancelled);
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert!(onboarding.as_mut().poll(&mut context).is_pending(), "it starts again");
    ranks.execute(0);
    assert_eq!(count.0.load(Ordering::SeqCst), 2);
    match onboarding.as_mut().poll(&mut context) {
        Poll::Ready(Ok(cached)) => assert_eq!(cached.len(), 4),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_prefix_that_is_wholly_in_g1_moves_nothing() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 0], |_| ());
    let sequence = tokens(&manager, 1, 4);
    drop(fill(&manager, &sequence, 0));
    ranks.set_all(Mode::Hold);
    let cached = manager.onboard(manager.match_prefix(&sequence)).wait().unwrap();
    assert_eq!((cached.len(), ranks.held(0)), (4, 0));
    assert_eq!(manager.metrics().tier(Tier::G1).hits.get(), 4);
}
