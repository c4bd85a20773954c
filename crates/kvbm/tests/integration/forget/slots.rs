//! Slots of disks whose block was removed: ranks are told to release them, those that were away
//! too, and nothing else.

use crate::support::script::{Mode, Ranks};
use crate::support::{fill, soon, tokens};
use kvbm::plan::{BlockId, BlockTransfer, Command, KeyNotice, Message, RecoveredBlock, TransferPlan};
use kvbm::{FailureKind, KvBlockManager, Owned, Tier};
use std::collections::HashSet;
use std::time::Duration;

/// Two ranks whose slots of G3 were released, have another block each by now, and are not known to
/// be released on the disk of rank 1. The plan that brought what was released, and the one that
/// came after it.
fn released_and_written_again(ranks: &Ranks) -> (KvBlockManager<Owned>, [TransferPlan; 2]) {
    written_again(ranks, Mode::Answer)
}

/// The same, where rank 1 is in this mode when its slots are released.
fn written_again(ranks: &Ranks, at_release: Mode) -> (KvBlockManager<Owned>, [TransferPlan; 2]) {
    let manager = ranks.manager([16, 16, 2], |config| config.offload.g2_g3.write_through = true);
    ranks.start(0);
    ranks.start(1);
    let write = |start, forget: bool| {
        ranks.set_all(Mode::Hold);
        let blocks = fill(&manager, &tokens(&manager, start, 2), 0);
        manager.offload(&blocks, Tier::G2).unwrap();
        for rank in [0, 1] {
            ranks.execute(rank);
        }
        let down = ranks.execute(0);
        ranks.wait_held(1, 1);
        if forget {
            // Durable at once, with all that was released before; what is on its way is released
            // later.
            ranks.set_all(Mode::Answer);
            ranks.set(1, at_release);
            manager.forget(manager.namespace());
        }
        ranks.execute(1);
        assert!(manager.wait_offloads(soon()));
        ranks.set_all(Mode::Answer);
        down
    };
    let plans = [write(1, true), write(2, false)];
    let slots = |plan: &TransferPlan| plan.blocks.iter().map(|block| block.dst).collect::<HashSet<_>>();
    assert_eq!(slots(&plans[0]), slots(&plans[1]));
    ranks.set_all(Mode::Answer);
    (manager, plans)
}

/// Whether it has one block of G3 less or all of them, a new worker says what it has. Mutations
/// that make it fail: what it says is not heard; all that it has counts as released; what it has
/// not is released too.
#[test]
fn a_worker_that_starts_again_releases_only_what_is_on_its_disk() {
    let found = |plan: &TransferPlan, blocks: usize| {
        let found = |block: &BlockTransfer| RecoveredBlock { block: block.dst, identity: block.identity };
        plan.blocks[..blocks].iter().map(found).collect::<Vec<_>>()
    };
    for (plan, has, released) in [(0, 0, 0), (1, 2, 0), (1, 1, 0), (0, 2, 2), (0, 1, 1)] {
        let ranks = Ranks::new(2);
        let (manager, plans) = released_and_written_again(&ranks);
        let before = ranks.commands(1).len();
        ranks.recovered(1, found(&plans[plan], has));
        ranks.start(1);
        let told = ranks.commands(1).split_off(before);
        let mut slots = plans[0].blocks[..released].iter().map(|block| block.dst).collect::<Vec<_>>();
        slots.sort_unstable();
        match &told[..] {
            [] => assert_eq!(released, 0),
            [Command::Release { blocks, .. }, Command::Flush { .. }] => assert_eq!(*blocks, slots),
            told => panic!("{told:?}"),
        }
        let report = manager.shutdown(Duration::from_secs(60));
        assert_eq!(report.removals_unconfirmed, 0, "plan {plan}, {has} blocks");
    }
}

#[test]
fn slots_that_were_in_use_when_a_worker_started_again_are_released_before_the_end() {
    let ranks = Ranks::new(2);
    let (manager, _) = released_and_written_again(&ranks);
    ranks.start(1);
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 1, "they hold other blocks");
    let ranks = Ranks::new(2);
    let (manager, _) = released_and_written_again(&ranks);
    ranks.start(1);
    manager.set_ttl(manager.namespace(), Some(1)).unwrap();
    for _ in 0..8 {
        manager.step();
    }
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 0);
}

/// A rank refuses a release, and other blocks are written to those slots before it is sent again.
/// Mutation that makes it fail: slots of registered blocks stay pending.
#[test]
fn a_refused_release_is_durable_with_the_block_that_overwrites_it() {
    let ranks = Ranks::new(2);
    let (manager, plans) = written_again(&ranks, Mode::Busy);
    let slots: HashSet<_> = plans[0].blocks.iter().map(|block| block.dst).collect();
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 0);
    let told = ranks.commands(1);
    assert!(!slots.iter().any(|&slot| releases(&told, slot)), "the new blocks stay: {told:?}");
}

#[test]
fn a_shutdown_says_which_removals_nobody_confirmed() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |_| ());
    ranks.set(1, Mode::Dead);
    manager.forget(manager.namespace());
    let report = manager.shutdown(Duration::from_secs(60));
    assert_eq!(report.removals_unconfirmed, 1);
    assert!(!report.is_complete());
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |_| ());
    manager.forget(manager.namespace());
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 0);
}

/// A rank refuses to hear of a removal, and blocks of the same namespace come to its disk before it
/// is told again, at the end. Mutation that makes it fail: the namespace is named then.
#[test]
fn what_came_after_a_removal_that_a_rank_refused_stays() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    ranks.start(0);
    ranks.start(1);
    ranks.set(1, Mode::Busy);
    manager.forget(manager.namespace());
    ranks.set(1, Mode::Answer);
    assert!(ranks.commands(1).is_empty());
    let blocks = fill(&manager, &tokens(&manager, 1, 2), 0);
    manager.offload(&blocks, Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.status().tiers[2].inactive, 2);
    manager.flush(Duration::from_secs(60)).unwrap();
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 0);
    let told = ranks.commands(1);
    let released: Vec<usize> = told
        .iter()
        .filter_map(|command| match command {
            Command::Release { tier: Tier::G3, blocks } => Some(blocks.len()),
            Command::Forget { .. } => panic!("{told:?}"),
            _ => None,
        })
        .collect();
    assert_eq!(released, [14], "all but the new ones");
}

/// The same where blocks are encrypted: the data key that is to be destroyed has encrypted the new
/// blocks too. Mutation that makes it fail: unused slots are named then.
#[test]
fn an_encrypted_disk_that_refused_a_removal_is_asked_again_to_destroy_the_key() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |config| {
        config.offload.g2_g3.write_through = true;
        config.disk.encrypt = true;
        config.encryption.key_file = Some("/only/workers/read/it".into());
    });
    let namespace = kvbm::plan::NamespaceId::from(manager.namespace().tag());
    (0..2).for_each(|rank| ranks.start(rank));
    ranks.set(1, Mode::Busy);
    let receipt = manager.forget_with_receipt(manager.namespace(), Duration::from_secs(60));
    assert_eq!((receipt.disks_unconfirmed, receipt.is_complete()), (1, false));
    ranks.set(1, Mode::Answer);
    let blocks = fill(&manager, &tokens(&manager, 1, 2), 0);
    manager.offload(&blocks, Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.status().tiers[2].inactive, 2);
    manager.flush(Duration::from_secs(60)).unwrap();
    let forget = Command::Forget { tier: Tier::G3, namespace };
    assert_eq!(ranks.commands(1).first(), Some(&forget), "the flush sends it again");
    let status = manager.status().tiers;
    assert_eq!((status[2].inactive, status[1].inactive), (0, 2), "G2 keeps the new blocks");
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 0);
    let forgets = |rank| ranks.commands(rank).iter().filter(|&command| *command == forget).count();
    assert_eq!([forgets(0), forgets(1)], [1, 1]);
}

/// What ranks say of keys that they destroy is in the receipt of that namespace.
#[test]
fn a_receipt_names_keys_that_are_destroyed_and_those_that_are_not_yet() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |_| ());
    let namespace = kvbm::plan::NamespaceId::from(manager.namespace().tag());
    ranks.set_all(Mode::Hold);
    manager.offload(&fill(&manager, &tokens(&manager, 1, 1), 0), Tier::G2).unwrap();
    let plan = ranks.next_plan(0);
    ranks.set_all(Mode::Answer);
    let says = |rank: usize, epoch, namespace, is_destroyed| {
        let keys = vec![KeyNotice { namespace, id: [rank as u8 + 1; 16], is_destroyed }];
        ranks.send(rank, &Message::Keys { rank: kvbm::Rank(rank as u16), epoch, volume: None, keys });
    };
    let earlier = kvbm::plan::Epoch(plan.epoch.0 - 1);
    says(0, plan.epoch, namespace, true);
    says(1, earlier, namespace, true);
    says(1, plan.epoch, kvbm::plan::NamespaceId(!namespace.0), true);
    says(1, plan.epoch, namespace, false);
    let receipt = manager.forget_with_receipt(manager.namespace(), Duration::from_secs(60));
    let keys: Vec<_> = receipt.keys.iter().map(|key| (key.rank.0, key.tier(), key.is_destroyed)).collect();
    assert_eq!(keys, [(0, Tier::G3, true), (1, Tier::G3, false)]);
    assert!(receipt.disks_unconfirmed == 0 && !receipt.is_complete(), "{receipt:?}");
}

/// A worker finds a block bad while it flushes, and is told to release its slot behind that.
#[test]
fn what_is_released_while_the_disks_are_flushed_at_the_end_is_flushed_too() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    ranks.set_all(Mode::Hold);
    manager.offload(&fill(&manager, &tokens(&manager, 1, 2), 0), Tier::G2).unwrap();
    ranks.execute(0);
    let down = ranks.execute(0);
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Silent);
    let report = std::thread::scope(|threads| {
        let ended = threads.spawn(|| manager.shutdown(Duration::from_secs(60)));
        let limit = soon();
        let token = loop {
            if let Some(Command::Flush { token }) = ranks.commands(0).last() {
                break *token;
            }
            assert!(std::time::Instant::now() < limit, "{:?}", ranks.commands(0));
            std::thread::yield_now();
        };
        ranks.set_all(Mode::Answer);
        let BlockTransfer { identity, dst: block, .. } = down.blocks[1];
        let failure = kvbm::Failure::new(FailureKind::Corrupt, "planted");
        let (rank, epoch, tier) = (kvbm::Rank(0), down.epoch, Tier::G3);
        ranks.send(0, &Message::Damaged { rank, epoch, tier, block, identity, failure });
        ranks.flushed(0, token);
        ended.join().unwrap()
    });
    assert_eq!((report.removals_unconfirmed, report.flush_error), (0, None));
    let told = ranks.commands(0);
    assert!(
        matches!(told[..], [Command::Flush { .. }, Command::Release { .. }, Command::Flush { .. }]),
        "{told:?}"
    );
}

/// A manager of two ranks, on whose disks two blocks have come by these plans.
fn two_blocks_on_two_disks() -> (Ranks, KvBlockManager<Owned>, [TransferPlan; 2]) {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    (0..2).for_each(|rank| ranks.start(rank));
    ranks.set_all(Mode::Hold);
    manager.offload(&fill(&manager, &tokens(&manager, 1, 2), 0), Tier::G2).unwrap();
    (0..2).for_each(|rank| ranks.done(rank, &ranks.next_plan(rank)));
    let down = [ranks.next_plan(0), ranks.next_plan(1)];
    (0..2).for_each(|rank| ranks.done(rank, &down[rank]));
    assert!(manager.wait_offloads(soon()));
    (ranks, manager, down)
}

/// Rank 0 finds the second block damaged, in this slot, which is out of use from then on.
fn second_is_damaged(ranks: &Ranks, manager: &KvBlockManager<Owned>, down: &TransferPlan) -> BlockId {
    let BlockTransfer { identity, dst: block, .. } = down.blocks[1];
    let failure = kvbm::Failure::new(FailureKind::Corrupt, "planted");
    let (rank, epoch, tier) = (kvbm::Rank(0), down.epoch, Tier::G3);
    ranks.send(0, &Message::Damaged { rank, epoch, tier, block, identity, failure });
    assert_eq!(manager.status().tiers[2].quarantined, 1);
    block
}

fn releases(told: &[Command], block: BlockId) -> bool {
    told.iter().any(|command| matches!(command, Command::Release { blocks, .. } if blocks.contains(&block)))
}

/// Mutation that makes it fail: `tell_slots` asks for free slots.
#[test]
fn a_slot_that_is_out_of_use_is_released_on_the_disk_of_a_rank_that_was_away() {
    let (ranks, manager, down) = two_blocks_on_two_disks();
    ranks.set(0, Mode::Answer);
    ranks.set(1, Mode::Dead);
    let block = second_is_damaged(&ranks, &manager, &down[0]);
    ranks.set(1, Mode::Answer);
    let there = down[1].blocks.iter();
    ranks.recovered(
        1,
        there.map(|step| RecoveredBlock { block: step.dst, identity: step.identity }).collect(),
    );
    ranks.start(1);
    let told = ranks.commands(1);
    assert!(releases(&told, block), "{told:?}");
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 0);
}

/// Mutations that make it fail: `clear_disks`, or `tell_removals`, asks for free slots.
#[test]
fn a_cleared_disk_has_nothing_left_in_slots_that_are_out_of_use() {
    let (ranks, manager, down) = two_blocks_on_two_disks();
    ranks.set_all(Mode::Answer);
    let block = second_is_damaged(&ranks, &manager, &down[0]);
    // That its slot is released is durable, and told to nobody again.
    manager.flush(Duration::from_secs(60)).unwrap();
    let earlier = [ranks.commands(0).len(), ranks.commands(1).len()];
    ranks.set(1, Mode::Dead);
    manager.clear(Tier::G3).unwrap();
    ranks.set(1, Mode::Answer);
    ranks.start(1);
    for (rank, earlier) in earlier.into_iter().enumerate() {
        let told = ranks.commands(rank).split_off(earlier);
        assert!(releases(&told, block), "rank {rank}: {told:?}");
    }
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 0);
}

/// Mutation that makes it fail: `unused` leaves out slots that are withheld.
#[test]
fn a_cleared_disk_has_nothing_left_in_slots_that_are_withheld() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    (0..2).for_each(|rank| ranks.start(rank));
    ranks.set_all(Mode::Hold);
    manager.offload(&fill(&manager, &tokens(&manager, 1, 2), 0), Tier::G2).unwrap();
    (0..2).for_each(|rank| ranks.done(rank, &ranks.next_plan(rank)));
    let down = [ranks.next_plan(0), ranks.next_plan(1)];
    ranks.set_all(Mode::Answer);
    ranks.fail(0, &down[0], 1, FailureKind::Io);
    ranks.done(1, &down[1]);
    assert!(manager.wait_offloads(soon()));
    let status = manager.status();
    assert_eq!((status.disk_directories[0].withheld_slots, status.tiers[2].held), (1, 1));
    // That its slot is released is durable, and told to nobody again.
    manager.flush(Duration::from_secs(60)).unwrap();
    let earlier = [ranks.commands(0).len(), ranks.commands(1).len()];
    ranks.set(1, Mode::Dead);
    manager.clear(Tier::G3).unwrap();
    ranks.set(1, Mode::Answer);
    ranks.start(1);
    for (rank, earlier) in earlier.into_iter().enumerate() {
        let told = ranks.commands(rank).split_off(earlier);
        assert!(releases(&told, down[0].blocks[1].dst), "rank {rank}: {told:?}");
    }
    assert_eq!(manager.shutdown(Duration::from_secs(60)).removals_unconfirmed, 0);
}

/// Mutation that makes it fail: `drop_missing` looks at no slot.
#[test]
fn what_a_disk_gave_up_in_a_slot_that_a_block_has_left_leaves_it_alone_where_it_is_now() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    ranks.set_all(Mode::Hold);
    let sequence = tokens(&manager, 1, 2);
    manager.offload(&fill(&manager, &sequence, 0), Tier::G2).unwrap();
    ranks.done(0, &ranks.next_plan(0));
    let down = ranks.next_plan(0);
    ranks.done(0, &down);
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Answer);
    let on_disk = || manager.look_up(&sequence).iter().filter(|places| places.contains(Tier::G3)).count();
    let BlockTransfer { identity, dst, .. } = down.blocks[1];
    let gives_up = |block| {
        let failure = kvbm::Failure::new(FailureKind::Missing, "planted");
        let (rank, epoch, tier) = (kvbm::Rank(0), down.epoch, Tier::G3);
        ranks.send(0, &Message::Damaged { rank, epoch, tier, block, identity, failure });
    };
    gives_up(BlockId(15 - dst.0));
    assert_eq!(on_disk(), 2, "it was there before it came here");
    gives_up(dst);
    assert_eq!(on_disk(), 1);
}
