//! Two ranks, one of which fails, stalls, answers twice or answers nonsense: nothing becomes
//! visible.

mod given_up;

use crate::support::script::{IN_TIME, Mode, Ranks};
use crate::support::{fill, soon, tokens};
use kvbm::config::Config;
use kvbm::plan::{BlockOutcome, Epoch, Message, TransferReport};
use kvbm::{FailureKind, KvBlockManager, OnboardError, Owned, Path, Prefix, Tier, TokenSequence};
use std::time::Duration;

const BLOCKS: u32 = 4;

/// Two ranks, and a prefix of four blocks that is in G2 only.
fn lower_prefix(configure: impl FnOnce(&mut Config)) -> (Ranks, KvBlockManager<Owned>, TokenSequence) {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 0], |config| {
        config.offload.g1_g2.write_through = true;
        configure(config);
    });
    let sequence = tokens(&manager, 1, BLOCKS);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    let below = manager.look_up(&sequence);
    assert!(below.len() == 4 && below.iter().all(|tiers| tiers.nearest() == Some(Tier::G2)), "{below:?}");
    ranks.set_all(Mode::Hold);
    (ranks, manager, sequence)
}

fn g1_blocks(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> usize {
    manager.look_up(sequence).iter().filter(|tiers| tiers.contains(Tier::G1)).count()
}

fn onboard_error(result: Result<kvbm::Cached<kvbm::G1>, OnboardError>) -> OnboardError {
    result.expect_err("the onboard fails")
}

#[test]
fn invariant_1_a_block_that_fails_on_one_rank_ends_the_prefix_before_it() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    assert_eq!(g1_blocks(&manager, &sequence), 0, "rank 1 has not reported");
    assert!(!onboarding.is_done());
    ranks.fail(1, &plans[1], 2, FailureKind::Io);
    let error = onboard_error(onboarding.wait());
    assert_eq!((error.arrived.len(), error.wanted, error.failures.len()), (2, 4, 2));
    assert_eq!(g1_blocks(&manager, &sequence), 2, "what comes after the failure is not visible either");
    let first = &error.failures[0];
    assert_eq!((first.identity.position, first.path, first.failure.kind), (2, Path::G2_G1, FailureKind::Io));
    assert_eq!(error.failures[1].failure.kind, FailureKind::Predecessor);
    let text = error.to_string();
    for part in ["2 of 4 blocks", "block 2", "g2", "rank 1", "planted", FailureKind::Io.next_action()] {
        assert!(text.to_lowercase().contains(&part.to_lowercase()), "{text:?} lacks {part:?}");
    }
    drop(error);
    assert_eq!(manager.metrics().path(Path::G2_G1).failures(FailureKind::Io).get(), 1);
    // What arrived is pinned until it is decided whether it is copied down.
    assert!(manager.wait_offloads(soon()));
    let slots = &manager.status().tiers[0];
    assert_eq!((slots.arriving, slots.held, slots.active), (0, 0, 0), "the slots are back: {slots:?}");
}

#[test]
fn invariant_1_a_rank_that_stalls_past_the_deadline_makes_nothing_visible() {
    let (ranks, manager, sequence) = lower_prefix(|config| config.transfer.deadline = IN_TIME);
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    let error = onboard_error(onboarding.wait());
    assert_eq!((error.arrived.len(), error.failures.len()), (0, 4));
    assert!(error.failures.iter().all(|failed| failed.failure.kind == FailureKind::Deadline), "{error}");
    assert_eq!(manager.status().tiers[0].arriving, 4, "rank 1 may still write these slots");

    let again = manager.onboard(manager.match_prefix(&sequence));
    let error = onboard_error(again.wait());
    assert_eq!(error.failures[0].failure.kind, FailureKind::Deadline, "what is late is not waited for again");

    ranks.done(1, &plans[1]);
    assert_eq!(g1_blocks(&manager, &sequence), 0, "what comes too late is not shown");
    assert_eq!(manager.status().tiers[0].arriving, 0, "and its slots are free");
    assert_eq!(manager.status().tiers[1].transfer_pins, 0);
}

#[test]
fn a_read_from_disk_past_its_deadline_makes_the_caller_recompute() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 16], |config| {
        config.offload.g1_g2.write_through = true;
        config.offload.g2_g3.write_through = true;
        config.disk.read_deadline = IN_TIME;
        config.transfer.deadline = Duration::from_secs(3600);
    });
    let sequence = tokens(&manager, 1, BLOCKS);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    for tier in [Tier::G1, Tier::G2] {
        assert_eq!(manager.clear(tier), Ok(4));
    }
    ranks.set_all(Mode::Hold);
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plan = ranks.next_plan(0);
    assert_eq!((plan.path(), plan.budget_ms), (Path::G3_G1, 2000), "the worker knows when to stop");
    let error = onboard_error(onboarding.wait_until(soon()));
    assert_eq!((error.arrived.len(), error.failures.len()), (0, 4));
    for failed in &error.failures {
        assert_eq!(failed.failure.kind, FailureKind::Deadline);
        assert!(failed.to_string().contains("recompute"), "{failed}");
    }
    ranks.done(0, &plan);
    assert_eq!(g1_blocks(&manager, &sequence), 0, "what comes too late is not shown");
    assert_eq!(manager.look_up(&sequence).len(), 4, "it is still on disk");
}

#[test]
fn invariant_1_an_answer_given_twice_does_not_stand_for_another_rank() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plan = ranks.next_plan(0);
    for _ in 0..3 {
        ranks.done(0, &plan);
    }
    assert!(!onboarding.is_done());
    assert_eq!(g1_blocks(&manager, &sequence), 0);
    assert_eq!(manager.metrics().ignored_reports.get(), 2);
    ranks.execute(1);
    assert_eq!(onboarding.wait().unwrap().len(), 4);
    ranks.done(1, &plan);
    assert_eq!(manager.metrics().ignored_reports.get(), 3, "late ones change nothing");
}

#[test]
fn invariant_1_a_rank_cannot_answer_for_another() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    let blocks = vec![BlockOutcome::Done { checksum: 1 }; 4];
    ranks.send(0, &Message::Transfer(Ranks::report(1, &plans[1], blocks)));
    assert!(!onboarding.is_done());
    assert_eq!(g1_blocks(&manager, &sequence), 0);
    assert_eq!(manager.metrics().malformed_messages.get(), 1);
    ranks.done(1, &plans[1]);
    assert_eq!(onboarding.wait().unwrap().len(), 4);
}

#[test]
fn invariant_1_an_answer_about_other_blocks_fails_them_all() {
    for blocks in [0, 3, 5] {
        let (ranks, manager, sequence) = lower_prefix(|_| ());
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        ranks.execute(0);
        let plan = ranks.next_plan(1);
        let outcomes = vec![BlockOutcome::Done { checksum: 1 }; blocks];
        ranks.send(1, &Message::Transfer(Ranks::report(1, &plan, outcomes)));
        let error = onboard_error(onboarding.wait());
        assert_eq!((error.arrived.len(), error.failures.len()), (0, 4));
        assert!(error.to_string().contains(&format!("{blocks} blocks of 4")), "{error}");
        assert_eq!(g1_blocks(&manager, &sequence), 0);
    }
}

#[test]
fn invariant_1_answers_of_another_life_and_garbage_change_nothing() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    let whole = vec![BlockOutcome::Done { checksum: 1 }; 4];
    let stale =
        TransferReport { epoch: Epoch(plans[1].epoch.0 - 1), ..Ranks::report(1, &plans[1], whole.clone()) };
    ranks.send(1, &Message::Transfer(stale));
    let good =
        kvbm::plan::wire::encode_message(&Message::Transfer(Ranks::report(1, &plans[1], whole))).unwrap();
    for cut in 0..good.len() {
        ranks.send_bytes(1, good[..cut].to_vec());
    }
    ranks.send_bytes(1, vec![0xff; 100]);
    assert!(!onboarding.is_done());
    assert_eq!(g1_blocks(&manager, &sequence), 0);
    assert_eq!(manager.metrics().malformed_messages.get(), good.len() as u64 + 1);
    assert_eq!(manager.metrics().ignored_reports.get(), 1);
    ranks.send_bytes(1, good);
    assert_eq!(onboarding.wait().unwrap().len(), 4);
}

#[test]
fn invariant_1_a_dead_link_is_a_failure_that_says_so() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    ranks.set(0, Mode::Answer);
    ranks.set(1, Mode::Dead);
    let error = onboard_error(manager.onboard(manager.match_prefix(&sequence)).wait());
    assert_eq!((error.arrived.len(), error.failures.len()), (0, 4));
    assert!(error.to_string().contains("the worker is gone"), "{error}");
    assert_eq!(g1_blocks(&manager, &sequence), 0);
}

#[test]
fn invariant_1_an_offload_that_fails_on_one_rank_is_not_found_below() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 0], |_| ());
    let sequence = tokens(&manager, 1, BLOCKS);
    let blocks = fill(&manager, &sequence, 0);
    ranks.set_all(Mode::Hold);
    manager.offload(&blocks, Tier::G2).unwrap();
    ranks.execute(0);
    ranks.fail(1, &ranks.next_plan(1), 1, FailureKind::Device);
    assert!(manager.wait_offloads(soon()));
    let copied: Vec<_> = manager.look_up(&sequence).iter().map(|tiers| tiers.contains(Tier::G2)).collect();
    assert_eq!(copied, [true, false, false, false], "its children have no parent there");
    assert_eq!(manager.status().tiers[1].arriving, 0);
}

#[test]
fn invariant_1_a_rank_with_a_bad_copy_condemns_the_slot_on_all() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    ranks.execute(0);
    ranks.fail(1, &ranks.next_plan(1), 1, FailureKind::Corrupt);
    let error = onboard_error(onboarding.wait());
    assert_eq!(error.arrived.len(), 1);
    drop(error);
    assert_eq!(manager.metrics().tier(Tier::G2).corrupt.get(), 1);
    assert_eq!(manager.status().tiers[1].quarantined, 1);
    let prefix: Prefix = manager.match_prefix(&sequence);
    assert_eq!(prefix.len(), 1, "the prefix ends before the bad block");
}

#[test]
fn invariant_3_an_onboard_dropped_before_it_starts_is_cancelled() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    drop(manager.onboard(manager.match_prefix(&sequence)));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    for (rank, plan) in plans.iter().enumerate() {
        let cancelled = kvbm::plan::Command::Cancel { plan_id: plan.plan_id };
        assert_eq!(ranks.commands(rank), [cancelled], "rank {rank} is told");
    }
    let (g1, g2) = (manager.status().tiers[0], manager.status().tiers[1]);
    assert_eq!((g1.arriving, g2.active), (4, 4), "nothing is given back before the ranks have answered");
    ranks.fail(0, &plans[0], 0, FailureKind::Cancelled);
    assert_eq!(manager.status().tiers[0].arriving, 4);
    ranks.fail(1, &plans[1], 0, FailureKind::Cancelled);
    let (g1, g2) = (manager.status().tiers[0], manager.status().tiers[1]);
    assert_eq!((g1.arriving, g1.free, g2.active, g2.transfer_pins), (0, 16, 0, 0));
}

#[test]
fn invariant_3_an_onboard_dropped_after_it_started_detaches() {
    let (ranks, manager, sequence) = lower_prefix(|_| ());
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.done(0, &plans[0]);
    drop(onboarding);
    let (g1, g2) = (manager.status().tiers[0], manager.status().tiers[1]);
    assert_eq!((g1.arriving, g2.active), (4, 4), "rank 1 may still read and write");
    assert!(manager.allocate(13).is_err(), "slots that are written are not handed out");
    ranks.done(1, &plans[1]);
    assert_eq!(g1_blocks(&manager, &sequence), 0, "nobody wanted it any more");
    let (g1, g2) = (manager.status().tiers[0], manager.status().tiers[1]);
    assert_eq!((g1.arriving, g1.free, g2.active), (0, 16, 0));
}
