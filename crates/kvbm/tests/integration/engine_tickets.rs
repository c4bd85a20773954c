//! Tickets of an engine's requests, and the rule that a failure is reported only when no copy can
//! write any more.

use crate::support::script::{Mode, Ranks};
use crate::support::soon;
use kvbm::plan::{BlockOutcome, Failure, FailureKind, Gate, PlanId};
use kvbm::{BlockId, Engine, FinishedLoad, KvBlockManager, LookUp, Path, TicketError, Tier, TokenSequence};
use std::time::{Duration, Instant};

const G1: u32 = 64;

fn ids(blocks: impl IntoIterator<Item = u32>) -> Vec<BlockId> {
    blocks.into_iter().map(BlockId).collect()
}

fn sequence(manager: &KvBlockManager<Engine>, start: u32, blocks: u32) -> TokenSequence {
    let tokens: Vec<u32> = (0..blocks * 16).map(|token| token + 1_000_000 * start).collect();
    manager.sequence(&tokens, b"").unwrap()
}

/// A manager with a sequence on G2.
fn with_sequence(ranks: &Ranks, g2: u32, blocks: u32) -> (KvBlockManager<Engine>, TokenSequence) {
    let manager = ranks.engine_manager(G1, g2);
    let tokens = sequence(&manager, 1, blocks);
    manager.offload(&ids(0..blocks), &tokens, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    (manager, tokens)
}

fn found(look_up: &LookUp) -> usize {
    match look_up {
        LookUp::Ready { blocks, .. } => *blocks,
        LookUp::Pending => panic!("there is no volume"),
    }
}

/// The next loads that end.
fn finished(manager: &KvBlockManager<Engine>) -> Vec<FinishedLoad> {
    let until = soon();
    loop {
        let finished = manager.tickets().finished();
        if !finished.is_empty() {
            return finished;
        }
        assert!(Instant::now() < until, "a load ends");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_look_up_that_is_repeated_gives_the_same_pins_and_counts_once() {
    let ranks = Ranks::new(1);
    let (manager, tokens) = with_sequence(&ranks, 64, 5);
    let before = manager.metrics().lookups.get();
    for _ in 0..3 {
        let answer = manager.tickets().look_up("a", &tokens, 2).unwrap();
        assert_eq!(answer, LookUp::Ready { blocks: 3, by_tier: [0, 3, 0, 0] });
    }
    assert_eq!(manager.metrics().lookups.get() - before, 3, "blocks of one look-up");
    assert_eq!(manager.status().tiers[1].active, 3, "pinned once");
    // More was computed meanwhile: another question.
    assert_eq!(found(&manager.tickets().look_up("a", &tokens, 4).unwrap()), 1);
    assert_eq!(manager.status().tiers[1].active, 1);
    assert!(manager.tickets().abandon("a"));
    assert!(!manager.tickets().abandon("a"));
    assert_eq!((manager.status().tiers[1].active, manager.tickets().counts()), (0, (0, 0)));
}

#[test]
fn a_committed_ticket_is_loaded_and_finished_once() {
    let ranks = Ranks::new(1);
    let (manager, tokens) = with_sequence(&ranks, 64, 5);
    ranks.set_all(Mode::Hold);
    assert_eq!(found(&manager.tickets().look_up("a", &tokens, 1).unwrap()), 4);
    let too_many = manager.tickets().commit("a", &ids(10..15), None).unwrap_err();
    assert!(matches!(too_many, TicketError::TooMany { ids: 5, promised: 4, .. }), "{too_many}");
    // The engine has room for three of the four.
    manager.tickets().commit("a", &ids(10..13), None).unwrap();
    assert_eq!((manager.tickets().counts(), manager.tickets().finished()), ((0, 1), vec![]));
    let again = manager.tickets().look_up("a", &tokens, 1).unwrap_err();
    assert!(matches!(again, TicketError::Loading { .. }), "{again}");
    assert_eq!(manager.busy(&ids(10..14)).unwrap(), ids(10..13));
    let plan = ranks.next_plan(0);
    assert_eq!((plan.path(), plan.blocks.len(), plan.gate), (Path::G2_G1, 3, Gate::None));
    ranks.done(0, &plan);
    let expected = FinishedLoad { request: "a".into(), arrived: 3, wanted: 3, failures: vec![] };
    assert_eq!(finished(&manager), [expected]);
    assert_eq!(manager.tickets().finished(), []);
    let hits = manager.metrics().tier(Tier::G2).hits.get();
    assert_eq!((hits, manager.status().tiers[1].active), (3, 0));
    let none = manager.tickets().commit("a", &ids(10..13), None).unwrap_err();
    assert!(none.to_string().contains("request a has no ticket"), "{none}");
}

#[test]
fn a_load_that_fails_is_reported_when_no_rank_can_write_any_more() {
    let ranks = Ranks::new(2);
    let (manager, tokens) = with_sequence(&ranks, 64, 3);
    ranks.set_all(Mode::Hold);
    manager.tickets().look_up("a", &tokens, 0).unwrap();
    manager.tickets().commit("a", &ids([7, 8, 9]), None).unwrap();
    let plan = ranks.next_plan(0);
    let failure = BlockOutcome::Failed(Failure::new(FailureKind::Io, "test"));
    let report = Ranks::report(0, &plan, vec![BlockOutcome::Done { checksum: 0 }, failure.clone(), failure]);
    ranks.send(0, &kvbm::plan::Message::Transfer(report));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(manager.tickets().finished(), [], "the other rank may still write");
    assert_eq!(manager.busy(&ids([7, 8, 9])).unwrap().len(), 3);
    ranks.execute(1);
    let load = finished(&manager).remove(0);
    assert_eq!((load.arrived, load.wanted, load.failures.len()), (1, 3, 2));
    assert_eq!(manager.busy(&ids([7, 8, 9])).unwrap(), []);
}

#[test]
fn an_abandoned_load_keeps_its_blocks_until_the_ranks_have_answered() {
    let ranks = Ranks::new(1);
    let (manager, tokens) = with_sequence(&ranks, 64, 3);
    ranks.set_all(Mode::Hold);
    manager.tickets().look_up("a", &tokens, 0).unwrap();
    manager.tickets().commit("a", &ids([7, 8, 9]), None).unwrap();
    let plan = ranks.next_plan(0);
    assert!(manager.tickets().abandon("a"));
    let cancel = kvbm::plan::Command::Cancel { plan_id: PlanId(plan.plan_id.0) };
    assert_eq!(ranks.commands(0), [cancel]);
    assert_eq!((manager.tickets().finished(), manager.tickets().counts()), (vec![], (0, 1)));
    ranks.done(0, &plan);
    let load = finished(&manager).remove(0);
    assert_eq!((load.request.as_str(), load.arrived, load.wanted), ("a", 0, 3));
    assert_eq!((manager.status().tiers[1].active, manager.tickets().counts()), (0, (0, 0)));
}

#[test]
fn tickets_pin_at_most_a_quarter_of_a_tier_and_young_ones_are_spared() {
    let ranks = Ranks::new(1);
    let manager = ranks.engine_manager(G1, 64);
    let sequences: Vec<_> = (0..6).map(|number| sequence(&manager, number, 6)).collect();
    let look_up = |number: usize| {
        found(&manager.tickets().look_up(&format!("{number}"), &sequences[number], 0).unwrap())
    };
    for (number, tokens) in (0..).zip(&sequences) {
        manager.offload(&ids(number * 6..number * 6 + 6), tokens, 0, None).unwrap();
        assert!(manager.wait_offloads(soon()));
    }
    let before = Instant::now();
    let promised: Vec<_> = (0..5).map(look_up).collect();
    // On a machine that is stopped meanwhile, the first ones are young no more.
    let is_quick = before.elapsed() < Duration::from_secs(1);
    if is_quick {
        assert_eq!(promised, [6, 6, 4, 0, 0], "a quarter of 64 blocks");
        assert_eq!((look_up(0), look_up(2)), (6, 4), "the same answers");
        assert_eq!(manager.status().tiers[1].active, 16);
        manager.tickets().commit("0", &ids(0..6), None).unwrap();
        assert_eq!(look_up(4), 6, "there is room again");
    }
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(look_up(5), 6, "nobody asked for the others");
    assert!(!is_quick || manager.tickets().commit("1", &ids(6..12), None).is_err());
    manager.tickets().commit("5", &ids(12..18), None).unwrap();
}

#[test]
fn a_ticket_alone_may_pin_more_than_a_quarter() {
    let ranks = Ranks::new(1);
    let (manager, tokens) = with_sequence(&ranks, 64, 20);
    assert_eq!(found(&manager.tickets().look_up("a", &tokens, 0).unwrap()), 20);
    assert_eq!(found(&manager.tickets().look_up("b", &tokens, 0).unwrap()), 0);
    assert_eq!(found(&manager.tickets().look_up("a", &tokens, 0).unwrap()), 20);
}

#[test]
fn the_descriptor_is_readable_when_a_load_has_ended() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let ranks = Ranks::new(1);
    let (manager, tokens) = with_sequence(&ranks, 64, 2);
    let readable = |millis: i64| {
        let tickets = manager.tickets();
        let fd = tickets.finished_fd().unwrap();
        let time = Timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 };
        poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&time)).unwrap() == 1
    };
    ranks.set_all(Mode::Hold);
    manager.tickets().look_up("a", &tokens, 0).unwrap();
    manager.tickets().commit("a", &ids([7, 8]), None).unwrap();
    assert!(!readable(0));
    ranks.execute(0);
    assert!(readable(20_000));
    assert_eq!(finished(&manager).len(), 1);
    assert!(!readable(0));
}

#[test]
fn a_fence_holds_the_calls_that_name_it_and_no_others() {
    let ranks = Ranks::new(1);
    let (manager, tokens) = with_sequence(&ranks, 64, 2);
    ranks.set_all(Mode::Hold);
    let fence = manager.fence_at(7).unwrap();
    let other = sequence(&manager, 2, 1);
    manager.offload(&ids([20]), &other, 0, Some(fence)).unwrap();
    assert_eq!(ranks.next_plan(0).gate, Gate::DeviceEvent(7));
    manager.tickets().look_up("a", &tokens, 0).unwrap();
    manager.tickets().commit("a", &ids([7, 8]), None).unwrap();
    assert_eq!(ranks.next_plan(0).gate, Gate::None, "a load into fresh blocks waits for no step");
}
