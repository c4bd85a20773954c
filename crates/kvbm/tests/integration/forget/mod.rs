//! What is removed on request is gone, everywhere and for good; what is in use stays with its user.
#![cfg(feature = "worker")]

mod slots;

use crate::support::script::{Mode, Ranks};
use crate::support::{
    books, fill, holds, kept, models, namespace, serve, soon, three_tiers_of, tokens, two_tiers,
};
use kvbm::config::ModelConfig;
use kvbm::metrics::EvictReason;
use kvbm::plan::Command;
use kvbm::{ClearError, FailureKind, Namespace, Tier};
use std::path::Path;
use std::time::{Duration, Instant};

#[test]
fn one_tenant_is_forgotten_and_the_other_is_not_even_after_a_restart() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        let tenant = |salt: &str| namespace().page_size(16).dtype("bf16").tenant_salt(salt);
        let prompt: Vec<u32> = (0..96).collect();
        let build = || three_tiers_of(model.clone(), [24, 32, 64], dir.path(), |_| ());
        let manager = build();
        let [gone, stays] =
            ["gone", "stays"].map(|salt| manager.sequence_in(&tenant(salt), &prompt, b"").unwrap());
        for sequence in [&gone, &stays] {
            assert_eq!(serve(&manager, sequence), 0);
            assert!(manager.wait_offloads(soon()));
        }
        let blocks = kept(&model, 6) as u64;
        assert_eq!(manager.forget(&tenant("gone")), 3 * blocks, "its blocks on each of three tiers");
        assert!(manager.match_groups(&gone).is_empty() && manager.look_up(&gone).is_empty());
        assert_eq!(manager.match_groups(&stays).len(), 6);
        for tier in [Tier::G1, Tier::G2, Tier::G3] {
            assert_eq!(manager.metrics().tier(tier).evictions(EvictReason::Forgotten).get(), blocks);
        }
        assert!(manager.shutdown(Duration::from_secs(60)).is_complete());
        drop(manager);
        let manager = build();
        assert!(manager.match_groups(&gone).is_empty(), "a restart does not bring it back");
        assert_eq!(serve(&manager, &stays), 6);
    }
}

/// What a process that ended this moment would leave on its disk.
pub(crate) fn copy_of(dir: &Path) -> tempfile::TempDir {
    fn copy(from: &Path, to: &Path) {
        for entry in std::fs::read_dir(from).unwrap() {
            let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
            if path.is_dir() {
                std::fs::create_dir(&to).unwrap();
                copy(&path, &to);
            } else {
                std::fs::copy(path, to).unwrap();
            }
        }
    }
    let there = tempfile::tempdir().unwrap();
    copy(dir, there.path());
    there
}

/// Blocks that left G3 by another way are on the disk until their slots are written again.
#[test]
fn what_left_the_disk_before_it_was_forgotten_or_cleared_is_gone_at_once_and_for_good() {
    let found = models().map(|model| what_left_the_disk_is_gone_too(&model));
    assert_eq!(found, [0, 0], "gone, whatever the model");
}

/// Blocks that are found where the disk was cleared.
fn what_left_the_disk_is_gone_too(model: &ModelConfig) -> usize {
    let tenant = |salt: &str| namespace().page_size(16).dtype("bf16").tenant_salt(salt);
    let prompt: Vec<u32> = (0..96).collect();
    let build = |dir: &Path| three_tiers_of(model.clone(), [24, 32, 64], dir, |_| ());
    let idle = |dir: &Path| {
        let manager = build(dir);
        for salt in ["gone", "stays"] {
            let sequence = manager.sequence_in(&tenant(salt), &prompt, b"").unwrap();
            assert_eq!(serve(&manager, &sequence), 0);
            assert!(manager.wait_offloads(soon()));
        }
        manager.flush(Duration::from_secs(60)).unwrap();
        manager.set_ttl(&tenant("gone"), Some(2)).unwrap();
        for _ in 0..8 {
            manager.step();
        }
        manager
    };
    let found = |dir: &Path, salt: &str| {
        let manager = build(dir);
        let sequence = manager.sequence_in(&tenant(salt), &prompt, b"").unwrap();
        manager.match_groups(&sequence).len()
    };
    let dir = tempfile::tempdir().unwrap();
    let manager = idle(dir.path());
    let before = copy_of(dir.path());
    assert_eq!(found(before.path(), "gone"), 6, "otherwise this test shows nothing");
    assert_eq!(manager.forget(&tenant("gone")), 0);
    let after = copy_of(dir.path());
    assert_eq!([found(after.path(), "gone"), found(after.path(), "stays")], [0, 6]);

    let dir = tempfile::tempdir().unwrap();
    let manager = idle(dir.path());
    let held = manager.match_prefix(&manager.sequence_in(&tenant("stays"), &prompt, b"").unwrap());
    assert_eq!(held.len(), 6);
    assert!(manager.clear(Tier::G3).is_ok());
    drop(held);
    let after = copy_of(dir.path());
    found(after.path(), "gone")
}

/// A rank that is away hears of it when its worker starts again, before anything else is sent to
/// its disk.
#[test]
fn a_rank_that_was_away_receives_what_was_forgotten() {
    let ranks = Ranks::new(2);
    let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    let tag = kvbm::plan::NamespaceId::from(manager.namespace().tag());
    ranks.set(1, Mode::Dead);
    manager.rank_lost(kvbm::Rank(1)).unwrap();
    manager.forget(manager.namespace());
    let forget = Command::Forget { tier: Tier::G3, namespace: tag };
    assert!(ranks.commands(0).contains(&forget), "who is there is told at once");
    assert!(ranks.commands(1).is_empty());
    assert_eq!(manager.clear(Tier::G3), Ok(0));
    ranks.set(1, Mode::Answer);
    ranks.start(1);
    let all = Command::Release { tier: Tier::G3, blocks: (0..16).map(kvbm::plan::BlockId).collect() };
    let told = ranks.commands(1);
    assert_eq!(told[..2], [forget, all]);
    assert!(matches!(told[2..], [Command::Flush { .. }]), "{told:?}");
    ranks.start(1);
    assert_eq!(ranks.commands(1).len(), 3, "and once");
}

/// What a worker was sent is worth nothing before its disk has made it durable: it may end before
/// that, with the command unread.
#[test]
fn a_rank_that_ended_before_a_removal_was_durable_gets_it_again() {
    let all = || (0..16).map(kvbm::plan::BlockId).collect();
    for clear in [false, true] {
        let ranks = Ranks::new(2);
        let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
        let tag = kvbm::plan::NamespaceId::from(manager.namespace().tag());
        let removal = if clear {
            Command::Release { tier: Tier::G3, blocks: all() }
        } else {
            Command::Forget { tier: Tier::G3, namespace: tag }
        };
        ranks.start(0);
        ranks.start(1);
        ranks.set(1, Mode::Silent);
        let removals = |rank| ranks.commands(rank).iter().filter(|&command| *command == removal).count();
        let asked =
            || ranks.commands(1).iter().any(|command| matches!(command, Command::Flush { token: 1.. }));
        std::thread::scope(|threads| {
            threads.spawn(|| {
                if clear {
                    assert!(manager.clear(Tier::G3).is_ok());
                } else {
                    manager.forget(manager.namespace());
                }
            });
            let limit = soon();
            while !asked() {
                assert!(std::time::Instant::now() < limit, "{:?}", ranks.commands(1));
                std::thread::yield_now();
            }
            assert_eq!(removals(1), 1);
            ranks.start(1);
        });
        assert_eq!(removals(1), 2);
        let Some(Command::Flush { token }) = ranks.commands(1).last().cloned() else { panic!("asked to") };
        ranks.start(1);
        assert_eq!(removals(1), 3, "the second worker ended before it had made it durable, too");
        ranks.flushed(1, token);
        ranks.start(1);
        assert_eq!(removals(1), 4, "what it said comes late, and does not speak for the third one");
        ranks.set(1, Mode::Answer);
        ranks.start(1);
        ranks.start(1);
        assert_eq!(removals(1), 5, "the next one has");
        ranks.start(0);
        assert_eq!(removals(0), 1, "as this one had at once");
    }
}

#[test]
fn what_is_on_its_way_when_it_is_forgotten_never_arrives() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    let sequence = tokens(&manager, 1, 4);
    let blocks = fill(&manager, &sequence, 0);
    manager.offload(&blocks, Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Hold);
    manager.offload(&fill(&manager, &tokens(&manager, 2, 1), 0), Tier::G2).unwrap();
    ranks.execute(0);
    let down = ranks.next_plan(0);
    assert_eq!(down.dst, kvbm::plan::Endpoint::Local(Tier::G3));
    manager.forget(manager.namespace());
    let before = ranks.commands(0).len();
    ranks.done(0, &down);
    assert!(manager.wait_offloads(soon()));
    assert!(manager.look_up(&tokens(&manager, 2, 1)).is_empty());
    let slots: Vec<_> = down.blocks.iter().map(|block| block.dst).collect();
    let released = Command::Release { tier: Tier::G3, blocks: slots };
    assert_eq!(ranks.commands(0)[before..], [released], "its record must not survive a restart");
    assert_eq!(manager.status().tiers[2].arriving, 0);
}

/// That slot is free then, and its record must not survive a restart.
#[test]
fn what_has_come_back_while_its_first_copy_was_on_its_way_leaves_nothing_in_the_first_slot() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    let sequence = tokens(&manager, 1, 2);
    let offload = || manager.offload(&fill(&manager, &sequence, 0), Tier::G2).unwrap();
    ranks.set_all(Mode::Hold);
    offload();
    ranks.execute(0);
    let first = ranks.next_plan(0);
    assert_eq!(first.dst, kvbm::plan::Endpoint::Local(Tier::G3));
    manager.forget(manager.namespace());
    ranks.set_all(Mode::Answer);
    offload();
    let on_disk = || manager.look_up(&sequence).iter().filter(|tiers| tiers.contains(Tier::G3)).count();
    let until = soon();
    while on_disk() < 2 {
        assert!(std::time::Instant::now() < until, "they come to other slots");
        std::thread::yield_now();
    }
    let before = ranks.commands(0).len();
    ranks.done(0, &first);
    assert!(manager.wait_offloads(soon()));
    let slots: Vec<_> = first.blocks.iter().map(|block| block.dst).collect();
    assert_eq!(ranks.commands(0)[before..], [Command::Release { tier: Tier::G3, blocks: slots }]);
    assert_eq!(on_disk(), 2);
}

/// It may have written the block whole, and not have heard that it is nobody's.
#[test]
fn a_rank_that_missed_a_removal_gets_it_when_it_starts_again() {
    for mode in [Mode::Dead, Mode::Silent] {
        let ranks = Ranks::new(2);
        let manager = ranks.manager([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
        ranks.start(0);
        ranks.start(1);
        let blocks = fill(&manager, &tokens(&manager, 1, 2), 0);
        ranks.set_all(Mode::Hold);
        manager.offload(&blocks, Tier::G2).unwrap();
        ranks.execute(0);
        ranks.execute(1);
        // The copy to G3 is on its way.
        ranks.wait_held(1, 1);
        manager.forget(manager.namespace());
        ranks.execute(1);
        ranks.set(1, mode);
        let down = ranks.execute(0);
        assert!(manager.wait_offloads(soon()));
        let slots: Vec<_> = down.blocks.iter().map(|block| block.dst).collect();
        let release = Command::Release { tier: Tier::G3, blocks: slots };
        let releases = |rank| ranks.commands(rank).iter().filter(|&command| *command == release).count();
        let heard = usize::from(mode == Mode::Silent);
        assert_eq!([releases(0), releases(1)], [1, heard]);
        ranks.set(1, Mode::Answer);
        ranks.start(1);
        assert_eq!(releases(1), heard + 1, "{mode:?}: nothing says that it was durable");
        ranks.start(1);
        assert_eq!(releases(1), heard + 1, "{mode:?}: now it is");
        // The others have it since the flush that a removal ends with.
        manager.flush(Duration::from_secs(60)).unwrap();
        ranks.start(0);
        assert_eq!(releases(0), 1);
    }
}

#[test]
fn a_prefix_matched_before_it_was_forgotten_brings_nothing_back() {
    let manager = books([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    let sequence = tokens(&manager, 1, 4);
    let held = fill(&manager, &sequence, 0);
    assert!(manager.wait_offloads(soon()));
    drop(held);
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    let prefix = manager.match_prefix(&sequence);
    manager.forget(manager.namespace());
    let error = manager.onboard(prefix).wait().unwrap_err();
    assert_eq!((error.arrived.len(), error.failures[0].failure.kind), (0, FailureKind::Missing));
    drop(error);
    assert!(manager.look_up(&sequence).is_empty());
    let slots = manager.status().tiers;
    assert!(slots.iter().all(|tier| tier.free == tier.capacity), "{slots:?}");
}

#[test]
fn blocks_held_while_they_are_forgotten_are_not_offloaded_any_more() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 16, 0], |_| ());
    let sequence = tokens(&manager, 1, 4);
    let held = fill(&manager, &sequence, 0);
    manager.forget(manager.namespace());
    manager.offload(&held, Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert!(manager.look_up(&sequence).is_empty(), "a copy would be found again");
    assert_eq!(manager.status().tiers[1].free, 16);
}

#[test]
fn a_held_prefix_survives_pressure_and_a_dropped_one_does_not() {
    let manager = two_tiers(16, 16);
    let first = tokens(&manager, 1, 6);
    serve(&manager, &first);
    assert!(manager.wait_offloads(soon()));
    let held = manager.match_prefix(&first);
    let ids: Vec<_> = held.blocks().iter().map(|block| block.block).collect();
    for other in 2..10 {
        serve(&manager, &tokens(&manager, other, 8));
        assert!(manager.wait_offloads(soon()));
    }
    assert_eq!(manager.look_up(&first).iter().filter(|tiers| tiers.contains(Tier::G1)).count(), 6);
    assert!(ids.iter().zip(first.hashes()).all(|(&id, &hash)| holds(&manager, id, hash)));
    let refused = manager.allocate(11).unwrap_err();
    assert_eq!((refused.tier, refused.in_use), (Tier::G1, 6));
    drop(held);
    for other in 20..30 {
        serve(&manager, &tokens(&manager, other, 8));
        assert!(manager.wait_offloads(soon()));
    }
    assert!(manager.look_up(&first).is_empty(), "evicted from both tiers");
}

#[test]
fn clear_leaves_what_is_in_use_and_the_other_tiers() {
    let manager = books([16, 16, 0], |_| ());
    let [used, unused] = [1, 2].map(|start| tokens(&manager, start, 4));
    let held = fill(&manager, &used, 0);
    drop(fill(&manager, &unused, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    assert_eq!(manager.metrics().tier(Tier::G1).evictions(EvictReason::Cleared).get(), 4);
    assert!(manager.look_up(&used).iter().all(|tiers| tiers.contains(Tier::G1)));
    assert!(manager.look_up(&unused).iter().all(|tiers| tiers.nearest() == Some(Tier::G2)));
    drop(held);
    assert_eq!(manager.clear(Tier::G2), Ok(8));
    for tier in [Tier::G3, Tier::G4] {
        assert_eq!(manager.clear(tier), Err(ClearError { tier }), "there is no such tier");
    }
}

#[test]
fn a_cleared_disk_is_empty_after_a_restart() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        let build = || three_tiers_of(model.clone(), [16, 32, 64], dir.path(), |_| ());
        let manager = build();
        let (sequence, blocks) = (tokens(&manager, 1, 6), kept(&model, 6) as u64);
        serve(&manager, &sequence);
        assert!(manager.wait_offloads(soon()));
        assert_eq!(manager.clear(Tier::G3), Ok(blocks), "nothing of an offload that is over is pinned");
        manager.flush(Duration::from_secs(60)).unwrap();
        drop(manager);
        let manager = build();
        assert!(manager.match_groups(&sequence).is_empty());
        assert_eq!(serve(&manager, &sequence), 0);
    }
}

#[test]
fn looking_up_pins_nothing_and_counts_as_no_use() {
    let manager = books([8, 0, 0], |_| ());
    let [old, young] = [1, 2].map(|start| tokens(&manager, start, 4));
    drop(fill(&manager, &old, 0));
    drop(fill(&manager, &young, 0));
    assert_eq!(manager.look_up(&old).len(), 4);
    drop(manager.allocate(4).unwrap());
    assert!(manager.look_up(&old).is_empty(), "the oldest went, although it was looked up last");
    assert_eq!(manager.look_up(&young).len(), 4);
    let other = Namespace::new("another-model").page_size(16);
    let foreign = manager.sequence_in(&other, &(0..64).collect::<Vec<_>>(), b"").unwrap();
    assert!(manager.look_up(&foreign).is_empty());
}

/// A disk that does not answer keeps nobody who does not wait for it; the next flush does.
#[test]
fn a_removal_in_the_background_waits_for_no_disk() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([16, 32, 32], |config| config.offload.g2_g3.write_through = true);
    let sequence = tokens(&manager, 1, 4);
    manager.offload(&fill(&manager, &sequence, 0), Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Silent);
    let began = Instant::now();
    assert_eq!(manager.clear_in_background(Tier::G3), Ok(4));
    assert_eq!(manager.forget_in_background(manager.namespace()), 8);
    // A removal that waits takes `transfer.deadline` here, 30 s.
    assert!(began.elapsed() < Duration::from_secs(10));
    assert!(manager.look_up(&sequence).is_empty());
    let sent = ranks.commands(0);
    for tier in ["Release", "Forget"] {
        assert!(sent.iter().any(|command| format!("{command:?}").starts_with(tier)), "{sent:?}");
    }
    assert!(manager.flush(Duration::from_millis(50)).is_err(), "it is not durable yet");
}
