//! Whether a volume is left alone: what ranks say of their copies there decides it.

use crate::support::script::{Mode, Ranks};
use crate::support::{fill, soon, tokens};
use kvbm::config::{VolumeConfig, VolumeOffload};
use kvbm::plan::Command;
use kvbm::{FailureKind, KvBlockManager, Owned, Path, Tier};
use std::time::{Duration, Instant};

fn manager(ranks: &Ranks) -> KvBlockManager<Owned> {
    ranks.manager([64, 64, 0], |config| {
        config.volume = vec![VolumeConfig { uri: "memory:".into(), ..VolumeConfig::default() }];
        config.volumes.offload = VolumeOffload::WriteThrough;
    })
}

/// Has a block of its own copied to the volume, which comes to this.
fn copy(ranks: &Ranks, manager: &KvBlockManager<Owned>, start: u32, kind: Option<FailureKind>) {
    ranks.set_all(Mode::Hold);
    let held = fill(manager, &tokens(manager, start, 1), 0);
    manager.offload(&held, Tier::G2).unwrap();
    ranks.done(0, &ranks.next_plan(0));
    let plan = ranks.next_plan(0);
    assert_eq!(plan.path(), Path::G2_G4);
    match kind {
        None => ranks.done(0, &plan),
        Some(kind) => ranks.fail_all(0, &plan, kind),
    }
    assert!(manager.wait_offloads(soon()));
    ranks.set_all(Mode::Answer);
}

/// Mutations that make it fail: `Verdict::add` counts every failure; it passes over `PathBusy`.
#[test]
fn a_volume_is_left_alone_for_what_it_was_asked_and_did_not_do() {
    use FailureKind::{Cancelled, Deadline, Full, GateShut, Io, PathBusy, QueueFull};
    for accusations in [[Io, Deadline], [PathBusy, PathBusy]] {
        let ranks = Ranks::new(1);
        let manager = manager(&ranks);
        let volume = || manager.status().volumes.remove(0);
        let mut starts = (0..).step_by(100);
        let mut comes_to = |kind| copy(&ranks, &manager, starts.next().unwrap(), kind);
        comes_to(None);
        for kind in [Cancelled, GateShut, QueueFull, Full, Cancelled, GateShut, QueueFull] {
            comes_to(Some(kind));
            assert!(!volume().down, "{kind}");
        }
        let [first, second] = accusations;
        comes_to(Some(first));
        assert!(!volume().down, "once is nothing");
        comes_to(Some(second));
        let found = volume();
        assert_eq!((found.down, found.failure.map(|failure| failure.kind)), (true, Some(second)));
        assert!(manager.metrics().encode().contains("kvbm_volume_down{volume=\"0\"} 1"));

        // After a pause a copy tries it.
        let until = soon();
        while volume().down {
            let held = fill(&manager, &tokens(&manager, starts.next().unwrap(), 1), 0);
            manager.offload(&held, Tier::G2).unwrap();
            assert!(manager.wait_offloads(soon()) && Instant::now() < until, "it is tried again");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(volume().failure, None);
    }
}

/// Mutation that makes it fail: `probe` notes that a rank was not reached.
#[test]
fn a_worker_that_is_away_says_nothing_of_the_volumes_that_it_is_asked_about() {
    for mode in [Mode::Dead, Mode::Busy] {
        let ranks = Ranks::new(1);
        let manager = manager(&ranks);
        let sequence = tokens(&manager, 1, 4);
        ranks.set_all(mode);
        for _ in 0..3 {
            assert_eq!(manager.match_prefix(&sequence).len(), 0);
            let volume = manager.status().volumes.remove(0);
            assert_eq!((volume.down, volume.errors, volume.failure), (false, 0, None), "{mode:?}");
        }
    }
}

/// Of a prefix that nobody can bring, the workers that are there are not asked once more by each
/// look-up.
#[test]
fn no_worker_is_asked_about_a_volume_while_another_one_is_away() {
    let ranks = Ranks::new(2);
    let manager = manager(&ranks);
    let sequence = tokens(&manager, 1, 4);
    let asked =
        || ranks.commands(0).iter().filter(|command| matches!(command, Command::Volume { .. })).count();
    ranks.set(1, Mode::Dead);
    // That one finds out.
    assert_eq!(manager.match_prefix(&sequence).len(), 0);
    let so_far = asked();
    for _ in 0..3 {
        assert_eq!(manager.match_prefix(&sequence).len(), 0);
    }
    assert_eq!(asked(), so_far);
}
