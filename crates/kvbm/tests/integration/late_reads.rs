//! Disks that are slow, hang or fail: what arrived in time counts, the rest is computed, and nobody
//! waits for them again and again.

use crate::support::script::{IN_TIME, Mode, Ranks};
use crate::support::{fill, soon, tokens};
use kvbm::config::Config;
use kvbm::{FailureKind, KvBlockManager, OnboardError, Owned, Path, Tier, TokenSequence};
use std::time::{Duration, Instant};

/// Blocks of a plan: blocks are small.
const PLAN: usize = 128;
/// Three plans.
const BLOCKS: u32 = 300;

/// A manager over ranks that hold every plan, and a prefix of `blocks` blocks that is on disk only.
fn on_disk(
    ranks: usize,
    blocks: u32,
    configure: impl FnOnce(&mut Config),
) -> (Ranks, KvBlockManager<Owned>, TokenSequence) {
    let ranks = Ranks::new(ranks);
    let manager = ranks.manager([2048, 2048, 2048], |config| {
        config.offload.g1_g2.write_through = true;
        config.offload.g2_g3.write_through = true;
        configure(config);
    });
    let sequence = tokens(&manager, 1, blocks);
    drop(fill(&manager, &sequence, 0));
    only_on_disk(&manager);
    ranks.set_all(Mode::Hold);
    (ranks, manager, sequence)
}

fn only_on_disk(manager: &KvBlockManager<Owned>) {
    assert!(manager.wait_offloads(soon()));
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).unwrap();
    }
}

fn in_g1(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> usize {
    manager.look_up(sequence).iter().filter(|places| places.contains(Tier::G1)).count()
}

fn error(result: Result<kvbm::Cached<kvbm::G1>, OnboardError>) -> OnboardError {
    result.expect_err("it is late")
}

/// Mutation that makes it fail: `keep_arrived` does nothing.
#[test]
fn the_part_of_a_prefix_that_arrived_in_time_is_kept_and_what_may_be_written_is_touched_by_nobody() {
    let (ranks, manager, sequence) = on_disk(2, BLOCKS, |config| {
        config.disk.read_deadline = IN_TIME;
    });
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans: Vec<_> = (0..3).map(|_| [ranks.next_plan(0), ranks.next_plan(1)]).collect();
    ranks.set_all(Mode::Answer);
    for (plan, whole) in [(0, true), (2, true), (1, false)] {
        ranks.done(0, &plans[plan][0]);
        if whole {
            ranks.done(1, &plans[plan][1]);
        }
    }
    assert_eq!(in_g1(&manager, &sequence), 0, "not before somebody has waited long enough");
    let late = error(onboarding.wait_until(soon()));
    assert_eq!((late.arrived.len(), late.wanted), (PLAN, BLOCKS as usize));
    assert_eq!(late.failures.len(), BLOCKS as usize - PLAN);
    for failed in &late.failures {
        assert_eq!(failed.failure.kind, FailureKind::Deadline);
        assert!(failed.to_string().contains("recompute"), "{failed}");
    }
    assert_eq!(in_g1(&manager, &sequence), PLAN);
    let rest = BLOCKS - PLAN as u32;
    assert!(manager.wait_offloads(soon()), "what was kept goes to G2 as any other");
    let g1 = manager.status().tiers[0];
    assert_eq!((g1.arriving, g1.active), (rest, PLAN as u32), "{g1:?}");
    assert!(manager.allocate(2048 - rest as usize).is_err(), "rank 1 may still write the others");
    drop(late);
    assert_eq!(manager.status().tiers[0].active, 0, "nobody holds what arrived any more");
    ranks.done(1, &plans[1][1]);
    assert_eq!(manager.status().tiers[0].arriving, 0);
    assert_eq!(in_g1(&manager, &sequence), PLAN, "what comes too late is not shown");
    assert_eq!(manager.clear(Tier::G1), Ok(PLAN as u64));
    assert_eq!(manager.allocate(2048).unwrap().len(), 2048);
    assert_eq!(manager.metrics().tier(Tier::G3).hits.get(), PLAN as u64);
}

#[test]
fn a_caller_with_less_patience_gets_what_arrived_as_well() {
    let (ranks, manager, sequence) = on_disk(1, BLOCKS, |config| {
        config.disk.read_deadline = Duration::from_secs(600);
        config.transfer.deadline = Duration::from_secs(600);
    });
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    // Another one waits for the same blocks.
    let patient = manager.onboard(manager.match_prefix(&sequence));
    let plans: Vec<_> = (0..3).map(|_| ranks.next_plan(0)).collect();
    ranks.set_all(Mode::Answer);
    ranks.done(0, &plans[0]);
    let late = error(onboarding.wait_until(Instant::now() + Duration::from_millis(20)));
    assert_eq!(late.arrived.len(), PLAN);
    assert!(!late.to_string().contains("600000 ms"), "nobody waited for that: {late}");
    drop(late);
    ranks.done(0, &plans[1]);
    ranks.done(0, &plans[2]);
    assert_eq!(patient.wait().unwrap().len(), BLOCKS as usize, "the other one gets all");
    // What came up may be on its way to G2.
    assert!(manager.wait_offloads(soon()));
    let status = manager.status().tiers;
    assert!(status.iter().all(|tier| tier.arriving == 0), "{status:?}");
}

#[test]
fn what_arrived_behind_a_failure_is_not_part_of_the_prefix() {
    let (ranks, manager, sequence) = on_disk(1, BLOCKS, |config| config.disk.read_deadline = IN_TIME);
    let onboarding = manager.onboard(manager.match_prefix(&sequence));
    let plans: Vec<_> = (0..3).map(|_| ranks.next_plan(0)).collect();
    ranks.fail(0, &plans[0], 5, FailureKind::Io);
    ranks.done(0, &plans[1]);
    let late = error(onboarding.wait_until(soon()));
    assert_eq!(late.arrived.len(), 5);
    assert_eq!(in_g1(&manager, &sequence), 5);
    drop(late);
    ranks.done(0, &plans[2]);
    assert_eq!(in_g1(&manager, &sequence), 5);
}

/// Mutation that makes it fail: `limit` leaves out `beside`.
#[test]
fn a_read_of_many_blocks_has_the_time_that_its_bytes_take() {
    let budget_of = |blocks: u32, configure: fn(&mut Config)| {
        let (ranks, manager, sequence) = on_disk(1, blocks, |config| {
            config.disk.read_deadline = IN_TIME;
            configure(config);
        });
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        let budget = ranks.next_plan(0).budget_ms;
        drop(onboarding);
        budget
    };
    assert_eq!(budget_of(4, |_| ()), 2000);
    // 8 MiB at the 64 MiB/s that an unknown disk is thought to have.
    assert_eq!(budget_of(1024, |_| ()), 2124);
    assert_eq!(
        budget_of(1024, |config| config.transfer.deadline = IN_TIME + Duration::from_millis(50)),
        2050
    );
    // Nobody waits for the bytes of reads that were given up.
    let (ranks, manager, first) = on_disk(1, 1024, |config| config.disk.read_deadline = IN_TIME);
    ranks.set_all(Mode::Answer);
    let second = tokens(&manager, 50_000, 1024);
    drop(fill(&manager, &second, 0));
    only_on_disk(&manager);
    ranks.set_all(Mode::Hold);
    drop(error(manager.onboard(manager.match_prefix(&first)).wait_until(soon())));
    while ranks.held(0) > 0 {
        drop(ranks.next_plan(0));
    }
    let onboarding = manager.onboard(manager.match_prefix(&second));
    assert_eq!(ranks.next_plan(0).budget_ms, 2124);
    drop(onboarding);
    // Computing them takes 16 ms.
    assert_eq!(
        budget_of(1024, |config| {
            config.policy.prefill_tokens_per_s = 1_024_000.0;
            config.policy.onboard_patience = 0.0;
        }),
        2016
    );
    assert_eq!(budget_of(1024, |config| config.policy.prefill_tokens_per_s = 102_400.0), 250);
    assert_eq!(budget_of(1024, |config| config.policy.prefill_tokens_per_s = 10_240.0), 1600);
}

/// Reads the prefix with nobody answering. How long the deadline is.
fn hang(ranks: &Ranks, manager: &KvBlockManager<Owned>, sequence: &TokenSequence) {
    let prefix = manager.match_prefix(sequence);
    assert_eq!(prefix.count(Tier::G3), sequence.num_blocks(), "it is offered");
    let onboarding = manager.onboard(prefix);
    assert_eq!(ranks.next_plan(0).path(), Path::G3_G1);
    assert_eq!(error(onboarding.wait_until(soon())).arrived.len(), 0);
}

/// A disk that does not answer is noticed a moment after its callers were told: ranks say first
/// what they have not started.
fn until_down(manager: &KvBlockManager<Owned>) {
    let until = soon();
    while !manager.status().disk_down {
        assert!(Instant::now() < until, "it is left alone");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Mutation that makes it fail: `leave_out_disk` does nothing.
#[test]
fn a_disk_that_hangs_is_not_offered_until_a_read_is_answered_again() {
    let (ranks, manager, first) = on_disk(1, 4, |config| config.disk.read_deadline = IN_TIME);
    ranks.set_all(Mode::Answer);
    let others: Vec<_> = (0..4).map(|at| tokens(&manager, 1000 + 100 * at, 4)).collect();
    for sequence in &others {
        drop(fill(&manager, sequence, 0));
    }
    only_on_disk(&manager);
    ranks.set_all(Mode::Hold);
    hang(&ranks, &manager, &first);
    // It has long been known by then that it was the disk.
    std::thread::sleep(Duration::from_secs(1));
    assert!(!manager.status().disk_down, "once is nothing");
    hang(&ranks, &manager, &others[0]);
    until_down(&manager);
    let failure = manager.status().disk_failure.unwrap();
    assert!(failure.kind == FailureKind::Deadline && failure.detail.contains("after 2000 ms"), "{failure}");
    assert_eq!(manager.match_prefix(&others[1]).len(), 0, "nobody waits for it");
    let text = manager.metrics().encode();
    for line in ["kvbm_disk_down 1", "kvbm_disk_left_out_blocks_total 4"] {
        assert!(text.contains(line), "{line} is missing from {text}");
    }
    assert_eq!(manager.look_up(&others[1]).len(), 4, "it is still there");

    // After a pause one request tries it, alone. A look-up alone tries nothing.
    drop(until_offered(&manager, &others[2]));
    let tried = manager.match_prefix(&others[1]);
    assert_eq!(tried.count(Tier::G3), 4);
    let onboarding = manager.onboard(tried);
    assert_eq!(manager.match_prefix(&others[2]).len(), 0);
    ranks.execute(0);
    assert_eq!(onboarding.wait().unwrap().len(), 4);
    let status = manager.status();
    assert_eq!((status.disk_down, status.disk_failure), (false, None));
    assert!(manager.metrics().encode().contains("kvbm_disk_down 0"));
    assert_eq!(manager.match_prefix(&others[2]).count(Tier::G3), 4, "for everybody");
}

fn until_offered(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) -> kvbm::Prefix {
    let until = soon();
    loop {
        let prefix = manager.match_prefix(sequence);
        if !prefix.is_empty() {
            return prefix;
        }
        assert!(Instant::now() < until, "it is tried again");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_disk_that_fails_is_left_alone_and_one_bad_block_is_no_reason_to() {
    let (ranks, manager, sequence) = on_disk(1, 4, |_| ());
    for bad in [2, 1] {
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        let plan = ranks.next_plan(0);
        ranks.set_all(Mode::Answer);
        ranks.fail(0, &plan, bad, FailureKind::Io);
        assert_eq!(error(onboarding.wait()).arrived.len(), bad);
        only_on_disk(&manager);
        ranks.set_all(Mode::Hold);
    }
    assert!(!manager.status().disk_down, "others arrived");
    let single = tokens(&manager, 5000, 1);
    ranks.set_all(Mode::Answer);
    drop(fill(&manager, &single, 0));
    only_on_disk(&manager);
    ranks.set_all(Mode::Hold);
    for _ in 0..2 {
        let onboarding = manager.onboard(manager.match_prefix(&single));
        ranks.fail(0, &ranks.next_plan(0), 0, FailureKind::Io);
        drop(error(onboarding.wait()));
    }
    assert!(manager.status().disk_down);
    assert_eq!(manager.match_prefix(&sequence).len(), 0);
}

/// Mutation that makes it fail: what the ranks said is read after the reason why it was given up
/// was filled in.
#[test]
fn callers_without_patience_say_nothing_of_the_disk() {
    let (ranks, manager, sequence) = on_disk(1, BLOCKS, |config| {
        config.disk.read_deadline = Duration::from_secs(600);
        config.transfer.deadline = Duration::from_secs(600);
    });
    for _ in 0..3 {
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        let plans: Vec<_> = (0..3).map(|_| ranks.next_plan(0)).collect();
        let late = error(onboarding.wait_until(Instant::now() + Duration::from_millis(20)));
        assert_eq!(late.arrived.len(), 0);
        for plan in &plans {
            ranks.done(0, plan);
        }
        assert_eq!(in_g1(&manager, &sequence), 0, "nobody waits any more");
    }
    assert!(!manager.status().disk_down, "it answered for every block");
}

/// Mutation that makes it fail: a late read of which something arrived counts as an answer.
#[test]
fn a_device_that_hangs_is_seen_beside_another_one_that_works() {
    let (ranks, manager, first) = on_disk(1, 200, |config| config.disk.read_deadline = IN_TIME);
    ranks.set_all(Mode::Answer);
    let second = tokens(&manager, 10_000, 200);
    drop(fill(&manager, &second, 0));
    only_on_disk(&manager);
    ranks.set_all(Mode::Hold);
    for sequence in [&first, &second] {
        assert!(!manager.status().disk_down);
        let onboarding = manager.onboard(manager.match_prefix(sequence));
        let plans = [ranks.next_plan(0), ranks.next_plan(0)];
        // Of the other plan nothing is heard for longer than half of what a read may take.
        ranks.done(0, &plans[1]);
        drop(error(onboarding.wait_until(soon())));
    }
    until_down(&manager);
}

/// Mutations that make it fail: `answer_failed` leaves `own` alone; `rank_started` does not forget
/// what reads came to.
#[test]
fn a_worker_that_is_away_says_nothing_of_its_disk() {
    let (ranks, manager, sequence) = on_disk(1, 4, |config| config.disk.read_deadline = IN_TIME);
    ranks.set_all(Mode::Answer);
    let other = tokens(&manager, 1000, 4);
    drop(fill(&manager, &other, 0));
    only_on_disk(&manager);
    ranks.start(0);
    ranks.set_all(Mode::Dead);
    for _ in 0..3 {
        let away = error(manager.onboard(manager.match_prefix(&sequence)).wait());
        assert_eq!(away.failures[0].failure.kind, FailureKind::Io);
    }
    assert!(!manager.status().disk_down);
    ranks.set_all(Mode::Hold);
    ranks.start(0);
    hang(&ranks, &manager, &sequence);
    hang(&ranks, &manager, &other);
    until_down(&manager);
    ranks.start(0);
    assert!(!manager.status().disk_down, "that was the worker before");
}

/// Mutation that makes it fail: `note_late_disk_reads` tells the breaker at once.
#[test]
fn a_disk_that_was_never_asked_because_a_gate_stayed_shut_is_not_accused() {
    let (ranks, manager, sequence) = on_disk(1, 4, |config| config.disk.read_deadline = IN_TIME);
    ranks.set_all(Mode::Shut);
    for _ in 0..3 {
        let late = error(manager.onboard(manager.match_prefix(&sequence)).wait_until(soon()));
        assert_eq!((late.arrived.len(), late.failures.len()), (0, 4));
        assert!(!manager.status().disk_down);
        assert_eq!(manager.match_prefix(&sequence).count(Tier::G3), 4, "it is offered");
        let until = soon();
        while manager.status().tiers[0].arriving > 0 {
            assert!(Instant::now() < until, "the rank gives it back");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // Where a rank saw first that the time was up.
    ranks.set_all(Mode::Hold);
    for _ in 0..3 {
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        ranks.fail_all(0, &ranks.next_plan(0), FailureKind::GateShut);
        let late = error(onboarding.wait_until(soon()));
        assert!(late.arrived.is_empty() && !manager.status().disk_down, "{late}");
    }
}

/// Mutations that make it fail: `Verdict::add` passes over `PathBusy`; `disk_gives` does nothing.
#[test]
fn who_waited_behind_others_accuses_a_disk_that_gave_them_nothing() {
    let (ranks, manager, sequence) = on_disk(1, 4, |config| {
        config.disk.read_deadline = Duration::from_secs(600);
        config.transfer.deadline = Duration::from_secs(600);
    });
    ranks.set_all(Mode::Answer);
    let other = tokens(&manager, 1000, BLOCKS);
    drop(fill(&manager, &other, 0));
    only_on_disk(&manager);
    ranks.set_all(Mode::Hold);
    let first = manager.onboard(manager.match_prefix(&other));
    let plans: Vec<_> = (0..3).map(|_| ranks.next_plan(0)).collect();
    for plan in &plans {
        let crowded_out = manager.onboard(manager.match_prefix(&sequence));
        let theirs = ranks.next_plan(0);
        ranks.done(0, plan);
        ranks.fail_all(0, &theirs, FailureKind::PathBusy);
        let late = error(crowded_out.wait_until(soon()));
        assert!(late.failures[0].to_string().contains("recompute"), "{late}");
        assert!(!manager.status().disk_down, "the disk has more to do than it can");
    }
    assert_eq!(first.wait_until(soon()).unwrap().len(), BLOCKS as usize);
    for is_down in [false, true] {
        let crowded_out = manager.onboard(manager.match_prefix(&sequence));
        // What arrived before is on its way down.
        let theirs = std::iter::repeat_with(|| ranks.next_plan(0)).find(|plan| plan.path() == Path::G3_G1);
        ranks.fail_all(0, &theirs.unwrap(), FailureKind::PathBusy);
        drop(error(crowded_out.wait_until(soon())));
        assert_eq!(manager.status().disk_down, is_down, "others got nothing either");
    }
}
