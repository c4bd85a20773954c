//! A worker that ends takes what it had in memory with it: what was given out before is neither
//! registered, parked, resumed nor copied afterwards, and what was under way does not arrive.

use crate::support::script::{Mode, Ranks};
use crate::support::{fill, soon, tokens};
use kvbm::config::Config;
use kvbm::plan::{Command, Message};
use kvbm::pool::RegisterError;
use kvbm::{
    BlockBatch, BlockId, Complete, EngineError, FailureKind, G1, KvBlockManager, Lost, OffloadError, Owned,
    ParkError, Partial, Path, Rank, Tier, TokenSequence,
};
use std::time::Duration;

/// How a rank loses its memory.
type Loss = fn(&Ranks, &KvBlockManager<Owned>);

/// Its worker starts anew, or it is given up, or both.
const LOSSES: [Loss; 3] = [
    |ranks, _| ranks.start(1),
    |_, manager| {
        manager.rank_lost(Rank(1)).unwrap();
    },
    |ranks, manager| {
        manager.rank_lost(Rank(1)).unwrap();
        ranks.start(1);
    },
];

/// Two ranks whose workers have started.
fn manager(tiers: [u32; 3], configure: impl FnOnce(&mut Config)) -> (Ranks, KvBlockManager<Owned>) {
    let ranks = Ranks::new(2);
    let manager = ranks.manager(tiers, configure);
    ranks.start(0);
    ranks.start(1);
    (ranks, manager)
}

fn complete(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> BlockBatch<G1, Complete> {
    manager.commit(manager.allocate(sequence.num_blocks()).unwrap(), sequence, 0).unwrap().0
}

/// Blocks that no sequence fills yet.
fn private(manager: &KvBlockManager<Owned>, blocks: usize) -> BlockBatch<G1, Partial> {
    let one = tokens(manager, 50, 1);
    manager.commit(manager.allocate(1 + blocks).unwrap(), &one, 0).unwrap().1
}

fn refusals(manager: &KvBlockManager<Owned>) -> [u64; 2] {
    [Tier::G1, Tier::G2].map(|tier| manager.metrics().tier(tier).lost_refusals.get())
}

/// No slot belongs to a transfer or a batch.
fn all_slots_are_back(manager: &KvBlockManager<Owned>) -> bool {
    let tiers = manager.status().tiers;
    tiers.iter().all(|tier| (tier.arriving, tier.held, tier.transfer_pins) == (0, 0, 0))
}

#[test]
fn invariant_1_what_was_computed_before_a_loss_is_not_registered_after_it() {
    for lose in LOSSES {
        let (ranks, manager) = manager([16, 16, 0], |_| ());
        let sequence = tokens(&manager, 1, 4);
        let fresh = manager.allocate(4).unwrap();
        let done = complete(&manager, &sequence);
        lose(&ranks, &manager);
        let rejected = manager.register(done).unwrap_err();
        assert_eq!(rejected.error, RegisterError::Lost(Lost { tier: Tier::G1 }));
        let text = rejected.to_string();
        assert!(
            text.to_lowercase().contains("g1") && text.contains("drop them, and compute them again"),
            "{text}"
        );
        // What was computed is committed after it, as before.
        let (done, _) = manager.commit(fresh, &sequence, 0).unwrap();
        assert!(manager.register(done).is_err());
        assert_eq!(manager.look_up(&sequence).len(), 0);
        assert_eq!(refusals(&manager), [2, 0]);
        let line = "kvbm_lost_batch_refusals_total{tier=\"g1\"} 2";
        assert!(manager.metrics().encode().contains(line), "{line} is missing");
        drop(rejected);
        drop(fill(&manager, &sequence, 0));
        assert_eq!(manager.look_up(&sequence).len(), 4, "computed again");
        assert!(all_slots_are_back(&manager));
    }
}

#[test]
fn private_blocks_from_before_a_loss_are_neither_parked_nor_resumed() {
    for lose in LOSSES {
        let (ranks, manager) = manager([16, 16, 0], |_| ());
        let (running, parked) = (private(&manager, 2), manager.park(private(&manager, 3)).unwrap());
        lose(&ranks, &manager);
        let rejected = manager.park(running).unwrap_err();
        assert!(matches!(rejected.error, ParkError::Lost(Lost { tier: Tier::G1 })), "{rejected}");
        let running = rejected.blocks.expect("no worker has them");
        let rejected = manager.resume(parked).unwrap_err();
        assert!(matches!(rejected.error, ParkError::Lost(Lost { tier: Tier::G2 })), "{rejected}");
        assert!(rejected.to_string().contains("compute them again"), "{rejected}");
        assert_eq!(refusals(&manager), [1, 1]);
        drop((running, rejected));
        assert!(all_slots_are_back(&manager));
        if !manager.status().ranks[1].is_lost {
            let parked = manager.park(private(&manager, 2)).unwrap();
            assert_eq!(manager.resume(parked).unwrap().len(), 2, "the new worker's");
        }
    }
}

/// The new worker answers for a plan that was meant for the one before.
#[test]
fn private_blocks_that_move_during_a_restart_are_lost() {
    let (ranks, manager) = manager([16, 16, 0], |_| ());
    ranks.set_all(Mode::Hold);
    let partial = private(&manager, 2);
    let restart = |ranks: &Ranks| {
        let ranks = ranks.clone();
        std::thread::spawn(move || {
            let plans = [ranks.next_plan(0), ranks.next_plan(1)];
            ranks.done(0, &plans[0]);
            ranks.start(1);
            ranks.done(1, &plans[1]);
        })
    };
    let restarting = restart(&ranks);
    let rejected = manager.park(partial).unwrap_err();
    restarting.join().unwrap();
    assert!(matches!(rejected.error, ParkError::Lost(Lost { tier: Tier::G1 })), "{rejected}");
    drop(rejected);
    ranks.set_all(Mode::Answer);
    let parked = manager.park(private(&manager, 2)).unwrap();
    ranks.set_all(Mode::Hold);
    let restarting = restart(&ranks);
    let rejected = manager.resume(parked).unwrap_err();
    restarting.join().unwrap();
    assert!(matches!(rejected.error, ParkError::Lost(Lost { tier: Tier::G2 })), "{rejected}");
    drop(rejected);
    assert!(all_slots_are_back(&manager));
}

/// Mutation that makes it fail: only starts that are announced after a plan was sent count.
#[test]
fn a_plan_whose_worker_ends_while_it_is_sent_is_over_in_the_end() {
    let (ranks, manager) =
        manager([16, 16, 0], |config| config.transfer.deadline = Duration::from_millis(50));
    drop(fill(&manager, &tokens(&manager, 1, 4), 0));
    ranks.set(1, Mode::Restart);
    let blocks = fill(&manager, &tokens(&manager, 2, 4), 0);
    manager.offload(&blocks, Tier::G2).unwrap();
    drop(blocks);
    assert!(manager.wait_offloads(soon()), "{:?}", manager.status());
    assert_eq!(manager.metrics().path(Path::G1_G2).failures(FailureKind::Io).get(), 4);
    ranks.set(1, Mode::Answer);
    let blocks = fill(&manager, &tokens(&manager, 3, 4), 0);
    manager.offload(&blocks, Tier::G2).unwrap();
    drop(blocks);
    assert!(manager.wait_offloads(soon()) && all_slots_are_back(&manager), "{:?}", manager.status());
}

#[test]
fn a_copy_to_disk_that_was_under_way_during_a_restart_is_not_found() {
    let (ranks, manager) = manager([16, 16, 16], |config| config.offload.g1_g2.write_through = true);
    let sequence = tokens(&manager, 1, 4);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    ranks.set_all(Mode::Hold);
    let host = manager.match_prefix(&sequence).into_parts().g2;
    manager.offload(&host, Tier::G3).unwrap();
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    assert_eq!(plans[1].path(), Path::G2_G3);
    ranks.done(0, &plans[0]);
    ranks.start(1);
    let before = ranks.commands(1).len();
    ranks.done(1, &plans[1]);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.look_up(&sequence).len(), 0, "what the new worker says that it wrote it never had");
    let slots: Vec<_> = plans[1].blocks.iter().map(|block| block.dst).collect();
    let released = Command::Release { tier: Tier::G3, blocks: slots };
    assert!(ranks.commands(1)[before..].contains(&released), "nor is it found by the next manager");
    assert_eq!(manager.metrics().path(Path::G2_G3).failures(FailureKind::Lost).get(), 4);
    // A handle from before says so at once.
    let error = manager.offload(&host, Tier::G3).unwrap_err();
    assert_eq!(error, OffloadError::Lost(Lost { tier: Tier::G2 }));
    assert!(host.is_lost());
    drop(host);
    assert!(all_slots_are_back(&manager));
}

#[test]
fn an_onboard_that_was_under_way_during_a_restart_does_not_arrive() {
    for from in [Tier::G2, Tier::G3] {
        let (ranks, manager) = manager([16, 16, 16], |config| {
            config.offload.g1_g2.write_through = true;
            config.offload.g2_g3.write_through = from == Tier::G3;
        });
        let sequence = tokens(&manager, 1, 4);
        drop(fill(&manager, &sequence, 0));
        assert!(manager.wait_offloads(soon()));
        for tier in [Tier::G1, Tier::G2].into_iter().filter(|&tier| tier < from) {
            assert_eq!(manager.clear(tier), Ok(4));
        }
        ranks.set_all(Mode::Hold);
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        let plans = [ranks.next_plan(0), ranks.next_plan(1)];
        ranks.done(0, &plans[0]);
        ranks.start(1);
        ranks.done(1, &plans[1]);
        let error = onboarding.wait().unwrap_err();
        assert_eq!((error.arrived.len(), error.failures.len()), (0, 4));
        assert!(error.failures.iter().all(|failed| failed.failure.kind == FailureKind::Lost), "{error}");
        let left = manager.look_up(&sequence);
        assert_eq!(left.len(), if from == Tier::G3 { 4 } else { 0 }, "what is on disk stays");
        assert!(left.iter().all(|tiers| tiers.nearest() == Some(Tier::G3)), "{left:?}");
        drop(error);
        assert!(all_slots_are_back(&manager));
    }
}

/// What a worker says of bytes that it never had is nothing that a slot should suffer for.
#[test]
fn a_slot_is_not_condemned_for_what_was_lost_in_it() {
    let (ranks, manager) = manager([16, 16, 0], |config| config.offload.g1_g2.write_through = true);
    let sequence = tokens(&manager, 1, 4);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    ranks.set_all(Mode::Hold);
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    ranks.start(1);
    ranks.fail(1, &plans[1], 2, FailureKind::Corrupt);
    assert_eq!(onboarding.wait().unwrap_err().failures.len(), 4);
    assert_eq!(manager.status().tiers[1].quarantined, 0);
    assert_eq!(manager.metrics().tier(Tier::G2).corrupt.get(), 0);
    assert!(all_slots_are_back(&manager));
}

/// A repair may have found them bad while the worker was away: nothing that is sent there would
/// arrive, again and again.
#[test]
fn slots_that_a_worker_finds_out_of_use_when_it_starts_again_are_so_for_all() {
    let (ranks, manager) = manager([16, 16, 16], |config| {
        config.offload.g1_g2.write_through = true;
        config.offload.g2_g3.write_through = true;
    });
    let sequence = tokens(&manager, 1, 4);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    for tier in [Tier::G1, Tier::G2] {
        assert_eq!(manager.clear(tier), Ok(4));
    }
    let recovered = |slots: &[u32]| Message::Recovered {
        rank: Rank(1),
        tier: Tier::G3,
        blocks: Vec::new(),
        unusable: slots.iter().copied().map(BlockId).collect(),
        last: true,
    };
    assert_eq!(manager.look_up(&sequence).len(), 4);
    ranks.send(1, &recovered(&[2, 9, 4000]));
    ranks.start(1);
    assert_eq!(manager.look_up(&sequence).len(), 2, "block 2 lies in slot 2");
    assert_eq!(manager.status().tiers[2].quarantined, 2, "one with a block, one without");
    ranks.send(1, &recovered(&[2, 9]));
    assert_eq!(manager.status().tiers[2].quarantined, 2, "again");

    // One that something is on its way to goes out of use when that is over.
    ranks.set_all(Mode::Hold);
    drop(fill(&manager, &tokens(&manager, 2, 1), 0));
    ranks.execute(0);
    ranks.execute(1);
    let down = [ranks.next_plan(0), ranks.next_plan(1)];
    let slot = down[0].blocks[0].dst;
    ranks.send(1, &recovered(&[slot.0]));
    assert_eq!(manager.status().tiers[2].quarantined, 2);
    ranks.done(0, &down[0]);
    ranks.fail(1, &down[1], 0, FailureKind::Io);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.status().tiers[2].quarantined, 3);
}

fn ids<const N: usize>(ids: [u32; N]) -> [BlockId; N] {
    ids.map(BlockId)
}

#[test]
fn an_engine_s_blocks_are_taken_again_after_a_loss_when_they_were_given_to_something_since() {
    let ranks = Ranks::new(2);
    let manager = ranks.engine_manager(32, 64);
    (0..2).for_each(|rank| ranks.start(rank));
    let sequence = |start: u32| {
        let prompt: Vec<u32> = (0..64).map(|token| token + 1_000_000 * start).collect();
        manager.sequence(&prompt, b"").unwrap()
    };
    let (one, two) = (sequence(1), sequence(2));
    manager.offload(&ids([0, 1, 2, 3]), &one, 0, None).unwrap();
    assert!(manager.wait_offloads(soon()));
    let prefix = manager.match_prefix(&one);
    assert_eq!(prefix.len(), 4);
    for rank in [1, 0] {
        ranks.start(rank);
        assert_eq!(manager.look_up(&one).len(), 0);
        let error = manager.offload(&ids([0, 1, 2, 3]), &one, 0, None).unwrap_err();
        assert!(matches!(&error, EngineError::Lost(blocks) if *blocks == ids([0, 1, 2, 3])), "{error}");
        assert!(error.to_string().contains("before_reuse"), "{error}");
        // Computed again: some of them first, then all.
        manager.before_reuse(&ids([0, 1]), soon()).unwrap();
        let error = manager.offload(&ids([0, 1, 2, 3]), &one, 0, None).unwrap_err();
        assert!(matches!(&error, EngineError::Lost(blocks) if *blocks == ids([2, 3])), "{error}");
        assert_eq!(manager.released(&ids([2, 3])).unwrap(), []);
        assert_eq!(manager.offload(&ids([0, 1, 2, 3]), &one, 0, None).unwrap().started, 4);
        assert!(manager.wait_offloads(soon()));
        assert_eq!(manager.look_up(&one).len(), 4);
    }
    assert_eq!(manager.metrics().tier(Tier::G1).lost_refusals.get(), 4);
    let error = manager.onboard(prefix, &ids([4, 5, 6, 7]), None).unwrap_err();
    assert!(matches!(&error, EngineError::LostPrefix(Lost { tier: Tier::G2 })), "{error}");
    assert!(error.to_string().contains("match it again"), "{error}");

    // What came with an onboard since is as good as what was computed.
    assert_eq!(
        manager.onboard(manager.match_prefix(&one), &ids([8, 9, 10, 11]), None).unwrap().wait().unwrap(),
        4
    );
    assert_eq!(manager.offload(&ids([8, 9, 10, 11]), &one, 0, None).unwrap().present, 4);

    // Under way.
    ranks.set_all(Mode::Hold);
    let onboarding = manager.onboard(manager.match_prefix(&one), &ids([16, 17, 18, 19]), None).unwrap();
    manager.before_reuse(&ids([20, 21, 22, 23]), soon()).unwrap();
    assert_eq!(manager.offload(&ids([20, 21, 22, 23]), &two, 0, None).unwrap().started, 4);
    let plans = [0, 0, 1, 1].map(|rank| (rank, ranks.next_plan(rank)));
    plans[..2].iter().for_each(|(rank, plan)| ranks.done(*rank, plan));
    ranks.start(1);
    plans[2..].iter().for_each(|(rank, plan)| ranks.done(*rank, plan));
    let error = onboarding.wait().unwrap_err();
    assert_eq!((error.arrived, error.failures[0].failure.kind), (0, FailureKind::Lost), "{error}");
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.look_up(&two).len(), 0, "the new worker copied what it never had");
    ranks.set_all(Mode::Answer);
    assert!(manager.offload(&ids([16, 17, 18, 19]), &one, 0, None).is_err());
    answer_nothing(&ranks);
}

/// Nobody is told to do anything that was refused.
fn answer_nothing(ranks: &Ranks) {
    (0..2).for_each(|rank| assert_eq!(ranks.held(rank), 0));
}
