//! Who asks for copies on the next tier, in which order they go, and what happens when there is no
//! room.

use crate::support::script::{Mode, Ranks};
use crate::support::{books, fill, soon, tokens};
use kvbm::config::{Bytes, EvictionPolicy};
use kvbm::metrics::DropReason;
use kvbm::{FailureKind, KvBlockManager, OffloadError, Owned, Path, Tier, TokenSequence};
use std::time::{Duration, Instant};

fn on(manager: &KvBlockManager<Owned>, sequence: &TokenSequence, tier: Tier) -> usize {
    manager.look_up(sequence).iter().filter(|tiers| tiers.contains(tier)).count()
}

fn dropped(manager: &KvBlockManager<Owned>, path: Path, reason: DropReason) -> u64 {
    manager.metrics().path(path).dropped(reason).get()
}

fn dropped_in_all(manager: &KvBlockManager<Owned>) -> u64 {
    let each = |path| DropReason::ALL.iter().map(move |&reason| (path, reason));
    Path::LOCAL.into_iter().flat_map(each).map(|(path, reason)| dropped(manager, path, reason)).sum()
}

#[test]
fn write_through_copies_what_is_registered() {
    let manager = books([16, 64, 64], |config| config.offload.g2_g3.write_through = true);
    let sequence = tokens(&manager, 1, 8);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!([Tier::G1, Tier::G2, Tier::G3].map(|tier| on(&manager, &sequence, tier)), [8, 8, 8]);
    assert_eq!(dropped_in_all(&manager), 0);
}

#[test]
fn without_write_through_nothing_goes_down_by_itself() {
    let manager = books([16, 64, 0], |config| config.offload.g1_g2.write_through = false);
    let sequence = tokens(&manager, 1, 8);
    drop(fill(&manager, &sequence, 0));
    for _ in 0..1000 {
        manager.step();
    }
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on(&manager, &sequence, Tier::G2), 0);
}

#[test]
fn the_watermark_offloads_what_the_formula_says() {
    // int((occupancy - watermark) * capacity) + 1, oldest first; held blocks count as occupied.
    for (blocks, expected) in [(89, 0), (90, 0), (91, 2), (95, 6), (100, 11)] {
        let manager = books([100, 200, 0], |config| {
            config.offload.g1_g2.write_through = false;
            config.offload.g1_g2.watermark = 0.90;
        });
        let sequence = tokens(&manager, 1, blocks);
        drop(fill(&manager, &sequence, 0));
        manager.step();
        assert!(manager.wait_offloads(soon()));
        let copied = on(&manager, &sequence, Tier::G2);
        assert!(
            copied.abs_diff(expected) <= usize::from(expected > 0),
            "{blocks} blocks: {copied}, not {expected}"
        );
        let tiers = manager.look_up(&sequence);
        assert!(tiers.iter().take(copied).all(|tiers| tiers.contains(Tier::G2)), "parents first");
        manager.step();
        assert_eq!(on(&manager, &sequence, Tier::G2), copied, "below the mark now");
    }
}

#[test]
fn blocks_that_idle_go_down_after_so_many_iterations() {
    let manager = books([16, 64, 0], |config| {
        config.offload.g1_g2.write_through = false;
        config.offload.g1_g2.idle_iterations = 10;
        config.offload.g1_g2.queue_share = 0.1;
    });
    let sequence = tokens(&manager, 1, 6);
    drop(fill(&manager, &sequence, 0));
    for _ in 0..9 {
        manager.step();
    }
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on(&manager, &sequence, Tier::G2), 0, "not idle for long enough");
    for _ in 0..20 {
        manager.step();
        assert!(manager.wait_offloads(soon()));
    }
    assert_eq!(on(&manager, &sequence, Tier::G2), 6);
    assert_eq!(dropped_in_all(&manager), 0, "idle blocks never push others out of the queue");
}

#[test]
fn an_explicit_offload_goes_one_tier_down() {
    let manager = books([16, 64, 64], |config| config.offload.g1_g2.write_through = false);
    let sequence = tokens(&manager, 1, 4);
    let blocks = fill(&manager, &sequence, 0);
    let wrong = OffloadError::NoPath { from: Tier::G1, to: Tier::G3 };
    assert_eq!(manager.offload(&blocks, Tier::G3), Err(wrong));
    assert_eq!(
        manager.offload(&blocks, Tier::G1),
        Err(OffloadError::NoPath { from: Tier::G1, to: Tier::G1 })
    );
    manager.offload(&blocks, Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!([Tier::G2, Tier::G3].map(|tier| on(&manager, &sequence, tier)), [4, 0]);
    drop(blocks);
    assert_eq!(manager.clear(Tier::G1), Ok(4));
    let lower = manager.match_prefix(&sequence).into_parts();
    manager.offload(&lower.g2, Tier::G3).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on(&manager, &sequence, Tier::G3), 4);
}

#[test]
fn ancestors_that_were_left_behind_go_first() {
    let manager = books([16, 64, 0], |config| config.offload.g1_g2.write_through = false);
    let sequence = tokens(&manager, 1, 8);
    let mut blocks = fill(&manager, &sequence, 0);
    let tail = blocks.split_off(6);
    manager.offload(&tail, Tier::G2).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on(&manager, &sequence, Tier::G2), 8, "the tail alone could never be found");
    assert_eq!(dropped_in_all(&manager), 0);
    assert_eq!(manager.status().tiers[0].transfer_pins, 0);
}

#[test]
fn a_block_that_arrives_before_its_parent_waits_for_it() {
    for parent_arrives in [true, false] {
        let ranks = Ranks::new(1);
        let manager = ranks.manager([16, 64, 64], |config| config.offload.g2_g3.write_through = true);
        let sequence = tokens(&manager, 1, 6);
        let mut head = fill(&manager, &sequence, 0);
        let tail = head.split_off(2);
        ranks.set_all(Mode::Hold);
        manager.offload(&head, Tier::G2).unwrap();
        let first = ranks.next_plan(0);
        manager.offload(&tail, Tier::G2).unwrap();
        let second = ranks.next_plan(0);
        ranks.done(0, &second);
        assert!(!manager.wait_offloads(Instant::now() + Duration::from_millis(200)), "the tail waits");
        assert_eq!((ranks.held(0), dropped_in_all(&manager)), (0, 0));
        ranks.set_all(Mode::Answer);
        if parent_arrives {
            ranks.done(0, &first);
        } else {
            ranks.fail_all(0, &first, FailureKind::Io);
        }
        assert!(manager.wait_offloads(soon()));
        // The tail leaves G2 again where its parent never came.
        assert_eq!(on(&manager, &sequence, Tier::G3), if parent_arrives { 6 } else { 0 });
        assert_eq!(dropped(&manager, Path::G2_G3, DropReason::MissingParent), 0);
        let status = manager.status();
        assert_eq!(status.tiers.iter().map(|tier| tier.transfer_pins).sum::<u64>(), 0);
    }
}

#[test]
fn a_block_without_its_ancestors_is_not_admitted_and_counted() {
    let manager = books([16, 16, 16], |config| config.offload.g2_g3.write_through = true);
    let head = tokens(&manager, 1, 4);
    drop(fill(&manager, &head, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!((manager.clear(Tier::G1), manager.clear(Tier::G2)), (Ok(4), Ok(4)));
    let longer = tokens(&manager, 1, 6);
    drop(fill(&manager, &longer, 4));
    assert!(manager.wait_offloads(soon()));
    assert_eq!(manager.look_up(&longer).len(), 6, "its ancestors are on disk");
    assert_eq!([Tier::G1, Tier::G2].map(|tier| on(&manager, &longer, tier)), [2, 0]);
    assert_eq!(dropped(&manager, Path::G1_G2, DropReason::MissingParent), 2);
    assert_eq!(manager.status().tiers[0].transfer_pins, 0);
}

#[test]
fn a_full_queue_lets_the_oldest_of_equal_worth_go_and_counts_them() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([64, 256, 0], |config| config.offload.g1_g2.queue_share = 0.25);
    ranks.set_all(Mode::Hold);
    let all: Vec<_> = (1..=16).map(|start| tokens(&manager, start, 2)).collect();
    let held: Vec<_> = all.iter().map(|sequence| fill(&manager, sequence, 0)).collect();
    for blocks in &held {
        manager.offload(blocks, Tier::G2).unwrap();
    }
    let backlog = manager.status().paths[0].backlog;
    assert!(backlog.queued_blocks + backlog.running_blocks <= 16, "{backlog:?}");
    assert_eq!(dropped(&manager, Path::G1_G2, DropReason::QueueFull), 16);
    assert!(
        manager.status().tiers[0].transfer_pins <= 16,
        "queued offloads pin a quarter of the tier at most"
    );
    assert_eq!(manager.allocate(32).unwrap().len(), 32, "allocation does not wait for transfers");
    assert_eq!(manager.metrics().sync_offloads.get(), 0);
    ranks.set_all(Mode::Answer);
    // Plans that were sent before are held, those that come now are answered.
    let until = soon();
    while !manager.wait_offloads(Instant::now() + Duration::from_millis(10)) {
        assert!(Instant::now() < until, "offloads do not end");
        for _ in 0..ranks.held(0) {
            ranks.execute(0);
        }
    }
    let copied = all.iter().map(|sequence| on(&manager, sequence, Tier::G2)).sum::<usize>();
    assert_eq!(copied, 16);
}

#[cfg(feature = "worker")]
#[test]
fn a_burst_onto_a_slow_disk_loses_no_block_silently() {
    use kvbm::config::{DiskEngine, ModelConfig};
    const BURST: u32 = 10_000;
    let dir = tempfile::tempdir().unwrap();
    // One write at a time, and a queue of one block: a disk that keeps up with the burst on the
    // whole still falls behind at times.
    let manager = crate::support::three_tiers([BURST, BURST, BURST], dir.path(), |config| {
        config.model = ModelConfig { num_layers: 1, num_kv_heads: 1, head_dim: 64, ..ModelConfig::default() };
        config.disk.engine = DiskEngine::Buffered;
        (config.disk.threads, config.disk.queue_depth) = (1, 1);
        config.offload.g2_g3.queue_share = 1.0 / f64::from(BURST);
    });
    for start in 0..BURST {
        drop(fill(&manager, &tokens(&manager, start + 1, 1), 0));
    }
    let backlog = manager.status().paths.iter().map(|path| path.backlog.queued_blocks).max().unwrap();
    assert!(backlog <= BURST as usize, "bounded");
    assert!(manager.wait_offloads(soon()));
    let g2_g3 = |reason| dropped(&manager, Path::G2_G3, reason);
    let g3 = &manager.status().tiers[2];
    let stored = u64::from(g3.active + g3.inactive);
    let given_up: u64 = DropReason::ALL.iter().map(|&reason| g2_g3(reason)).sum();
    assert_eq!(stored + given_up, u64::from(BURST), "each block is on disk or was counted");
    assert_eq!(g2_g3(DropReason::QueueFull), given_up, "and the reason is the queue");
    assert!(given_up > 0, "a queue of one block does not hold the burst");
    let text = manager.metrics().encode();
    let line = text.lines().find(|line| {
        line.contains("offload_dropped") && line.contains(r#"reason="queue_full""#) && line.contains("g2_g3")
    });
    assert!(line.is_some_and(|line| line.ends_with(&format!(" {given_up}"))), "{line:?}");
    assert_eq!(manager.flush(std::time::Duration::from_secs(60)).unwrap().durable_blocks, stored);
    let sampled = (1..=BURST).step_by(97).map(|start| tokens(&manager, start, 1));
    assert!(sampled.filter(|sequence| on(&manager, sequence, Tier::G2) == 1).count() > 0);
}

#[test]
fn a_burst_onto_a_disk_that_stalls_keeps_what_will_be_used_again() {
    const BURST: u32 = 10_000;
    const HOT: usize = 100;
    let ranks = Ranks::new(1);
    let manager = ranks.manager([BURST, BURST, BURST], |config| {
        config.offload.g1_g2.write_through = true;
        config.offload.g2_g3.queue_share = 0.02;
    });
    let all: Vec<_> = (1..=BURST).map(|start| tokens(&manager, start, 1)).collect();
    let on_host: Vec<_> = all
        .iter()
        .map(|sequence| {
            drop(fill(&manager, sequence, 0));
            assert!(manager.wait_offloads(soon()));
            assert_eq!(manager.clear(Tier::G1), Ok(1));
            manager.match_prefix(sequence).into_parts().g2
        })
        .collect();
    for _ in 0..8 {
        for sequence in &all[..HOT] {
            drop(manager.match_prefix(sequence));
        }
    }
    ranks.set_all(Mode::Hold);
    // The hot ones come first: they would be the first to go if only age counted.
    for blocks in &on_host {
        manager.offload(blocks, Tier::G3).unwrap();
    }
    let backlog = manager.status().paths.iter().map(|path| path.backlog).find(|path| path.queued_blocks > 0);
    let backlog = backlog.unwrap();
    assert!(backlog.queued_blocks + backlog.running_blocks <= 200, "a fiftieth of the tier: {backlog:?}");
    let given_up = dropped(&manager, Path::G2_G3, DropReason::QueueFull);
    assert_eq!(given_up, u64::from(BURST) - (backlog.queued_blocks + backlog.running_blocks) as u64);
    ranks.set_all(Mode::Answer);
    while ranks.held(0) > 0 {
        ranks.execute(0);
    }
    assert!(manager.wait_offloads(soon()));
    let stored = all.iter().filter(|sequence| on(&manager, sequence, Tier::G3) == 1).count();
    let hot = all[..HOT].iter().filter(|sequence| on(&manager, sequence, Tier::G3) == 1).count();
    assert_eq!((stored as u64 + given_up, hot), (u64::from(BURST), HOT));
}

#[test]
fn what_is_copied_already_takes_no_place_in_the_queue() {
    let manager = books([64, 256, 0], |config| config.offload.g1_g2.queue_share = 0.25);
    let sequence = tokens(&manager, 1, 16);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    for _ in 0..3 {
        assert_eq!(manager.clear(Tier::G1), Ok(16));
        drop(manager.onboard(manager.match_prefix(&sequence)).wait().unwrap());
        assert!(manager.wait_offloads(soon()));
    }
    let longer = tokens(&manager, 1, 32);
    let cached = manager.onboard(manager.match_prefix(&longer)).wait().unwrap();
    drop(fill(&manager, &longer, cached.len()));
    assert!(manager.wait_offloads(soon()));
    assert_eq!((on(&manager, &longer, Tier::G2), dropped_in_all(&manager)), (32, 0));
}

#[test]
fn a_lower_tier_without_room_takes_what_fits() {
    let manager = books([16, 4, 0], |_| ());
    let sequence = tokens(&manager, 1, 8);
    let blocks = fill(&manager, &sequence, 0);
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on(&manager, &sequence, Tier::G2), 4, "the beginning of the chain");
    assert_eq!(dropped(&manager, Path::G1_G2, DropReason::NoSlot), 4);
    drop(blocks);
}

#[test]
fn the_wear_budget_holds_background_writes_back_but_not_what_is_asked_for_by_name() {
    // 240 blocks a day are 10 an hour, which is what may be written at once.
    let manager = books([64, 64, 240], |config| {
        config.disk.drive_writes_per_day = 1.0;
        config.offload.g2_g3.write_through = true;
    });
    let sequence = tokens(&manager, 1, 32);
    let blocks = fill(&manager, &sequence, 0);
    assert!(manager.wait_offloads(soon()));
    assert_eq!([Tier::G2, Tier::G3].map(|tier| on(&manager, &sequence, tier)), [32, 10]);
    assert_eq!(dropped(&manager, Path::G2_G3, DropReason::WearBudget), 22);
    drop(blocks);
    assert_eq!(manager.clear(Tier::G1), Ok(32));
    let lower = manager.match_prefix(&sequence).into_parts();
    manager.offload(&lower.g2, Tier::G3).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on(&manager, &sequence, Tier::G3), 32);
}

#[test]
fn a_write_budget_per_second_holds_background_writes_back() {
    // A byte a second: one block of 8 KiB at once, and the next one after two hours.
    let manager = books([64, 64, 240], |config| {
        config.disk.write_budget = Bytes(1);
        config.offload.g2_g3.write_through = true;
    });
    let sequence = tokens(&manager, 1, 32);
    let blocks = fill(&manager, &sequence, 0);
    assert!(manager.wait_offloads(soon()));
    assert_eq!([Tier::G2, Tier::G3].map(|tier| on(&manager, &sequence, tier)), [32, 1]);
    assert_eq!(dropped(&manager, Path::G2_G3, DropReason::WearBudget), 31);
    drop(blocks);
}

#[test]
fn a_link_that_dies_under_a_long_queue_empties_it() {
    let ranks = Ranks::new(1);
    let manager = ranks.manager([4096, 4096, 0], |_| ());
    ranks.set_all(Mode::Hold);
    let all: Vec<_> = (1..=2000).map(|start| fill(&manager, &tokens(&manager, start, 1), 0)).collect();
    for blocks in &all {
        manager.offload(blocks, Tier::G2).unwrap();
    }
    // As many as run at a time.
    ranks.wait_held(0, 8);
    ranks.set_all(Mode::Dead);
    for _ in 0..8 {
        ranks.execute(0);
    }
    assert!(manager.wait_offloads(soon()));
    assert_eq!(dropped(&manager, Path::G1_G2, DropReason::Failed), 2000 - 8);
    assert_eq!((manager.status().tiers[0].transfer_pins, manager.status().tiers[1].arriving), (0, 0));
}

#[test]
fn a_hit_above_keeps_the_copy_below_young() {
    for policy in [EvictionPolicy::Hazard, EvictionPolicy::LruLeaf] {
        let manager = books([64, 8, 0], |config| config.policy.eviction = policy);
        let hot = tokens(&manager, 1, 4);
        drop(fill(&manager, &hot, 0));
        for cold in 2..6 {
            drop(manager.onboard(manager.match_prefix(&hot)).wait().unwrap());
            drop(fill(&manager, &tokens(&manager, cold, 4), 0));
            assert!(manager.wait_offloads(soon()));
        }
        assert_eq!(
            on(&manager, &hot, Tier::G2),
            4,
            "{policy:?}: a touch counts on every tier that holds the block"
        );
    }
}
