//! Ranks that are given up, and workers that start again: memory ends with them, and nothing of it
//! is found or written.

use super::{BLOCKS, g1_blocks, lower_prefix, onboard_error};
use crate::support::script::{IN_TIME, Mode, Ranks};
use crate::support::{self, fill, soon, tokens};
use kvbm::{KvBlockManager, Owned, Rank, Tier};
use std::time::{Duration, Instant};

#[test]
fn invariant_1_a_rank_that_is_given_up_gives_every_slot_back_and_registers_nothing() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    let unknown = manager.rank_lost(Rank(2)).unwrap_err();
    assert_eq!(unknown.to_string(), "there is no rank 2: the 2 ranks of this manager count from 0");
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let fresh = tokens(&manager, 2, 3);
    let computed = fill(&manager, &fresh, 0);
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    assert!(!onboarding.is_done(), "rank 1 took its plans and says nothing");
    let owed = manager.status().paths.iter().map(|path| path.plans).sum::<usize>();
    assert!(owed > 0 && manager.status().tiers[0].arriving == 4);
    assert!(manager.rank_lost(Rank(1)).unwrap() > 0);
    let error = onboard_error(onboarding.wait());
    assert_eq!((error.arrived.len(), error.failures.len()), (0, 4));
    assert!(error.to_string().contains("rank 1 was given up"), "{error}");
    drop(error);
    assert_eq!(g1_blocks(&manager, &sequence), 0);

    ranks.set_all(Mode::Answer);
    while ranks.held(0) > 0 {
        ranks.execute(0);
    }
    assert!(manager.wait_offloads(soon()), "what was queued fails at once");
    assert!(manager.look_up(&fresh).iter().all(|tiers| !tiers.contains(Tier::G2)));
    drop(computed);
    let tiers = manager.status().tiers;
    assert!(
        tiers.iter().all(|tier| (tier.arriving, tier.held, tier.transfer_pins) == (0, 0, 0)),
        "{tiers:?}"
    );
    ranks.done(1, &plans[1]);
    assert_eq!(g1_blocks(&manager, &sequence), 0, "a late answer changes nothing");
    assert_eq!(manager.match_prefix(&sequence).len(), 0, "a part of every block is gone");
    assert_eq!(lost(&manager), [false, true]);
    let text = manager.metrics().encode();
    for line in [
        "kvbm_rank_lost{rank=\"0\"} 0",
        "kvbm_rank_lost{rank=\"1\"} 1",
        "kvbm_rank_losses_total{rank=\"1\"} 1",
        "kvbm_evicted_blocks_total{tier=\"g2\",reason=\"rank_lost\"} 4",
    ] {
        assert!(text.contains(line), "{line} is missing from {text}");
    }
    let again = tokens(&manager, 3, 2);
    drop(fill(&manager, &again, 0));
    assert!(manager.wait_offloads(soon()));
    assert!(manager.look_up(&again).iter().all(|tiers| !tiers.contains(Tier::G2)), "nothing is sent to it");

    ranks.start(1);
    assert_eq!(lost(&manager), [false, false]);
    assert_eq!(manager.look_up(&again).len(), 0, "the new worker has no part of it");
    drop(fill(&manager, &again, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(2));
    assert_eq!(manager.onboard(manager.match_prefix(&again)).wait().unwrap().len(), 2);
}

/// Which ranks are given up.
fn lost(manager: &KvBlockManager<Owned>) -> Vec<bool> {
    manager.status().ranks.iter().map(|rank| rank.is_lost).collect()
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let until = soon();
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_whose_line_stays_closed_is_given_up_by_itself() {
    let (ranks, manager, sequence) = lower_prefix(|config| {
        config.transfer.deadline = Duration::from_secs(2);
        config.transfer.rank_lost_after = Duration::from_millis(10);
    });
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    assert_eq!(lost(&manager), [false, false]);
    assert_eq!(manager.status().ranks[1].plans, 1);
    // Noticed when something is to be sent, at the latest when the plan is taken back at its
    // deadline.
    ranks.set(1, Mode::Dead);
    wait_for("nothing reaches rank 1", || lost(&manager) == [false, true]);
    assert_eq!(onboard_error(onboarding.wait()).failures.len(), 4);
    wait_for("its slots come back", || all_slots_are_back(&manager));
    assert_eq!(manager.status().ranks[1].plans, 0);
    ranks.start(1);
    assert_eq!(lost(&manager), [false, false]);
}

/// No slot belongs to a transfer.
fn all_slots_are_back(manager: &KvBlockManager<Owned>) -> bool {
    let tiers = manager.status().tiers;
    tiers.iter().all(|tier| (tier.arriving, tier.held, tier.transfer_pins) == (0, 0, 0))
}

#[test]
fn a_rank_that_is_silent_on_an_open_line_keeps_its_slots() {
    let (ranks, manager, sequence) = lower_prefix(|config| {
        config.transfer.deadline = IN_TIME;
        config.transfer.rank_lost_after = Duration::from_millis(1);
    });
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    assert_eq!(onboard_error(onboarding.wait()).failures.len(), 4, "nobody waits for longer");
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(lost(&manager), [false, false], "it may still write");
        assert_eq!(manager.status().tiers[0].arriving, 4);
        assert!(manager.allocate(13).is_err(), "slots that are written are not handed out");
    }
    ranks.done(1, &plans[1]);
    assert_eq!(manager.allocate(16).unwrap().len(), 16);
}

#[test]
fn nothing_is_sent_on_a_line_that_was_closed_before_its_worker_says_that_it_has_started() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    ranks.start(1);
    ranks.set(0, Mode::Answer);
    ranks.set(1, Mode::Dead);
    assert_eq!(onboard_error(manager.onboard(manager.match_prefix(&sequence)).wait()).arrived.len(), 0);
    // Somebody else is at the other end, and has not said so.
    ranks.set(1, Mode::Hold);
    let error = onboard_error(manager.onboard(manager.match_prefix(&sequence)).wait());
    assert!(error.to_string().contains("the worker is gone"), "{error}");
    drop(error);
    assert_eq!(ranks.held(1), 0);
    ranks.start(1);
    ranks.set(1, Mode::Answer);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    assert_eq!(manager.onboard(manager.match_prefix(&sequence)).wait().unwrap().len(), 4);
}

#[test]
fn what_was_sent_to_the_new_worker_is_not_answered_for() {
    let (ranks, manager, sequence) = lower_prefix(|config| config.transfer.deadline = IN_TIME);
    ranks.start(1);
    drop(manager.onboard(manager.match_prefix(&sequence)));
    ranks.execute(0);
    ranks.start(1);
    let computed = fill(&manager, &sequence, 0);
    let news = [ranks.next_plan(0), ranks.next_plan(1), ranks.next_plan(1)];
    ranks.done(0, &news[0]);
    wait_for("what the one before owed is over", || manager.status().ranks[1].plans == 1);
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(manager.status().ranks[1].plans, 1, "the new one has the other plan, however late");
        assert_eq!(manager.status().tiers[1].arriving, 4);
    }
    ranks.done(1, &news[2]);
    assert!(manager.wait_offloads(soon()));
    drop(computed);
    assert!(all_slots_are_back(&manager));
}

#[test]
fn a_loss_that_is_reported_after_the_restart_holds_until_the_next_start() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    ranks.start(1);
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    ranks.execute(0);
    ranks.start(1);
    // A supervisor that starts the worker first and tells of the loss afterwards: the rank is out
    // until a start is told again.
    assert_eq!(manager.rank_lost(Rank(1)), Ok(1));
    assert_eq!(onboard_error(onboarding.wait()).arrived.len(), 0);
    assert!(all_slots_are_back(&manager));
    assert_eq!(lost(&manager), [false, true]);
    ranks.start(1);
    assert_eq!(lost(&manager), [false, false]);
}

#[test]
fn a_queued_offload_does_not_read_a_slot_whose_bytes_a_worker_lost() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([64, 128, 0], |config| {
        config.offload.g1_g2.write_through = true;
        config.transfer.deadline = Duration::from_secs(600);
    });
    ranks.start(0);
    ranks.start(1);
    ranks.set_all(Mode::Hold);
    // The way to G2 is busy until batches wait for it.
    let busy: Vec<_> = (1..=40).map(|start| fill(&manager, &tokens(&manager, start, 1), 0)).collect();
    let sequence = tokens(&manager, 50, BLOCKS);
    ranks.wait_held(1, 8);
    let sent = ranks.held(1);
    let old = fill(&manager, &sequence, 0);
    let waiting = || manager.status().paths[0].backlog.queued_blocks;
    assert!(waiting() >= BLOCKS as usize, "they wait");
    assert_eq!(ranks.held(1), sent, "they wait");
    ranks.start(1);
    let new = fill(&manager, &sequence, 0);
    let lost: Vec<_> = old.block_ids().to_vec();
    assert!(new.block_ids().iter().all(|block| !lost.contains(block)));
    while !manager.wait_offloads(Instant::now()) {
        for rank in 0..2 {
            while ranks.held(rank) > 0 {
                let plan = ranks.next_plan(rank);
                let reads_lost = plan.blocks.iter().any(|block| lost.contains(&block.src));
                assert!(!reads_lost, "rank {rank} is told to read what the new worker has not got");
                ranks.done(rank, &plan);
            }
        }
    }
    assert!(manager.wait_offloads(soon()));
    assert!(manager.look_up(&sequence).iter().all(|tiers| tiers.contains(Tier::G2)), "the new ones went");
    drop((busy, old, new));
}

#[test]
fn a_prefix_that_was_matched_before_a_restart_is_not_onboarded_after_it() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    ranks.start(1);
    let prefix = manager.match_prefix(&sequence);
    ranks.start(1);
    ranks.set_all(Mode::Answer);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    let error = onboard_error(manager.onboard(prefix).wait());
    assert!(error.to_string().contains("removed since it was matched"), "{error}");
    drop(error);
    assert_eq!(manager.onboard(manager.match_prefix(&sequence)).wait().unwrap().len(), 4);
}

#[test]
fn a_restart_ends_memory_and_keeps_the_disk() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |config| {
        config.offload.g1_g2.write_through = true;
        config.offload.g2_g3.write_through = true;
    });
    ranks.start(0);
    ranks.start(1);
    let sequence = tokens(&manager, 1, BLOCKS);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    let everywhere = |tiers: &kvbm::Places| Tier::SLOTTED.iter().all(|&tier| tiers.contains(tier));
    assert!(manager.look_up(&sequence).iter().all(everywhere));
    ranks.start(1);
    let left = manager.look_up(&sequence);
    assert_eq!(left.len(), 4, "all records are there");
    assert!(left.iter().all(|tiers| tiers.nearest() == Some(Tier::G3)), "{left:?}");
    assert_eq!(manager.onboard(manager.match_prefix(&sequence)).wait().unwrap().len(), 4);
}

#[test]
fn a_worker_that_starts_again_has_nothing_in_memory_and_owes_nothing_for_good() {
    let (ranks, manager, sequence) = lower_prefix(|config| config.transfer.deadline = Duration::from_secs(1));
    ranks.start(1);
    assert_eq!(manager.look_up(&sequence).len(), 4, "the first start of all");
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    ranks.start(1);
    assert_eq!(manager.look_up(&sequence).len(), 0, "its part was in memory that is gone");
    assert_eq!(lost(&manager), [false, false]);
    assert_eq!(onboard_error(onboarding.wait()).failures.len(), 4);
    wait_for("nobody answers for the worker before", || {
        let tiers = manager.status().tiers;
        tiers.iter().all(|tier| (tier.arriving, tier.held, tier.transfer_pins) == (0, 0, 0))
    });
    ranks.done(1, &plans[1]);
    assert_eq!(g1_blocks(&manager, &sequence), 0, "a late answer changes nothing");
}

#[cfg(feature = "worker")]
#[test]
fn workers_of_this_process_are_not_given_up_while_they_live() {
    let build = |patience| {
        KvBlockManager::<Owned>::builder()
            .model(support::model())
            .namespace(support::namespace())
            .device(kvbm::config::Blocks(4))
            .configure(|config| config.transfer.rank_lost_after = patience)
            .build()
    };
    let manager = build(Duration::ZERO).unwrap();
    let error = manager.rank_lost(Rank(0)).unwrap_err();
    assert!(error.to_string().contains("may write to its memory as long as it lives"), "{error}");
    assert_eq!(lost(&manager), [false]);
    let error = build(Duration::from_secs(5)).err().unwrap().to_string();
    assert!(
        error.contains("transfer.rank_lost_after = 5s: must be 0 with workers of this process"),
        "{error}"
    );
}
