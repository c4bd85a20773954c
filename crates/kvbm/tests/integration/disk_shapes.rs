//! Disks outlive the number of ranks: what a deployment left, one of another size takes over, or
//! says why not.
#![cfg(feature = "worker")]

use crate::support::heads::{self, model, models, serve};
use crate::support::{kept, namespace, tokens};
use kvbm::config::{Blocks, Config, HostOrder, ModelConfig};
use kvbm::metrics::RecoveryOutcome;
use kvbm::plan::Epoch;
use kvbm::{G1Memory, KvBlockManager, Owned, Path, Rank, Tier, TookOver, Worker, WorkerError};
use std::fs;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A manager with G3 in `dir`, which takes everything at once.
fn manager(dir: &FilePath, ranks: u32, configure: impl FnOnce(&mut Config)) -> KvBlockManager<Owned> {
    manager_of(model(), dir, ranks, configure)
}

fn manager_of(
    model: ModelConfig,
    dir: &FilePath,
    ranks: u32,
    configure: impl FnOnce(&mut Config),
) -> KvBlockManager<Owned> {
    heads::on_disk(model, dir, ranks).configure(configure).build().expect("a manager")
}

/// A directory in which `ranks` ranks left six blocks of one sequence.
fn left_by(ranks: u32, configure: impl FnOnce(&mut Config)) -> tempfile::TempDir {
    left_by_model(model(), ranks, configure)
}

fn left_by_model(model: ModelConfig, ranks: u32, configure: impl FnOnce(&mut Config)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let manager = manager_of(model, dir.path(), ranks, configure);
    assert_eq!(serve(&manager, &tokens(&manager, 1, 6)), 0);
    let report = manager.shutdown(Duration::from_secs(30));
    assert!(report.is_complete(), "{report:?}");
    dir
}

/// Opens the directory with `ranks` ranks: the hits of the sequence that lies there, all compared,
/// and what was taken over.
fn hits(dir: &FilePath, ranks: u32, configure: impl FnOnce(&mut Config)) -> (usize, Vec<TookOver>) {
    hits_of(&model(), dir, ranks, configure)
}

fn hits_of(
    model: &ModelConfig,
    dir: &FilePath,
    ranks: u32,
    configure: impl FnOnce(&mut Config),
) -> (usize, Vec<TookOver>) {
    let manager = manager_of(model.clone(), dir, ranks, configure);
    let hits = serve(&manager, &tokens(&manager, 1, 6));
    let blocks = kept(model, hits) as u64;
    assert_eq!(manager.metrics().path(Path::G3_G1).blocks.get(), blocks, "they come from the disk");
    let took_over = manager.workers().took_over().to_vec();
    let sum = |count: fn(&TookOver) -> u64| took_over.iter().map(count).sum::<u64>();
    assert_eq!(manager.metrics().recovered(RecoveryOutcome::TakenOver).get(), sum(|one| one.blocks));
    assert_eq!(manager.metrics().recovered(RecoveryOutcome::LeftBehind).get(), sum(|one| one.left_behind));
    (hits, took_over)
}

fn whole(ranks: u32) -> Vec<TookOver> {
    whole_of(&model(), ranks)
}

fn whole_of(model: &ModelConfig, ranks: u32) -> Vec<TookOver> {
    vec![TookOver { ranks, blocks: kept(model, 6) as u64, left_behind: 0, refused: None }]
}

fn copy_of(dir: &FilePath) -> tempfile::TempDir {
    fn copy(from: &FilePath, to: &FilePath) {
        for entry in fs::read_dir(from).expect("a directory") {
            let from = entry.expect("an entry").path();
            let to = to.join(from.file_name().expect("a name"));
            if from.is_dir() {
                fs::create_dir(&to).expect("a directory");
                copy(&from, &to);
            } else {
                fs::copy(&from, &to).expect("a copy");
            }
        }
    }
    let to = tempfile::tempdir().expect("a directory");
    copy(dir, to.path());
    to
}

/// The folder of a rank.
fn folder(dir: &FilePath, rank: u32, ranks: u32) -> PathBuf {
    let namespaces: Vec<_> = fs::read_dir(dir).expect("a directory").collect();
    assert_eq!(namespaces.len(), 1);
    let namespace = namespaces.into_iter().flatten().next().expect("a namespace").path();
    namespace.join(format!("rank-{rank}-of-{ranks}"))
}

/// Eight ranks share four heads. A window's blocks need no parent to be taken over. Mutation that
/// makes it fail: blocks of windows count as orphans.
#[test]
fn what_any_number_of_ranks_left_any_other_number_takes_over() {
    for model in models() {
        for writers in [1, 2, 4, 8] {
            let left = left_by_model(model.clone(), writers, |_| {});
            let hits = |dir: &FilePath, ranks| hits_of(&model, dir, ranks, |_| {});
            for readers in [1, 2, 4, 8].into_iter().filter(|readers| *readers != writers) {
                let dir = copy_of(left.path());
                let whole = (6, whole_of(&model, writers));
                assert_eq!(hits(dir.path(), readers), whole, "{writers} to {readers}");
                // From then on the blocks are theirs.
                assert_eq!(hits(dir.path(), readers), (6, Vec::new()), "{writers} to {readers}, again");
            }
            assert_eq!(hits(left.path(), writers), (6, Vec::new()), "{writers} themselves");
        }
    }
}

#[test]
fn the_stored_order_may_be_another_too() {
    let universal = |config: &mut Config| config.host.order = HostOrder::Universal;
    for model in models() {
        let of = || model.clone();
        let left = left_by_model(of(), 4, universal);
        let whole = |ranks| (6, whole_of(&model, ranks));
        assert_eq!(hits_of(&model, copy_of(left.path()).path(), 2, |_| {}), whole(4));
        assert_eq!(hits_of(&model, copy_of(left.path()).path(), 1, universal), whole(4));
        assert_eq!(hits_of(&model, left_by_model(of(), 2, |_| {}).path(), 4, universal), whole(2));
    }
}

#[test]
fn of_several_the_one_that_wrote_last_moves_in() {
    let dir = left_by(4, |_| {});
    assert_eq!(hits(dir.path(), 2, |_| {}), (6, whole(4)));
    assert_eq!(hits(dir.path(), 1, |_| {}), (6, whole(2)));
}

#[test]
fn slots_over_several_directories_are_taken_over() {
    let more = tempfile::tempdir().expect("a directory");
    let over_two = |config: &mut Config| {
        config.disk.more_dirs = [more.path()].into_iter().collect();
    };
    let left = left_by(4, over_two);
    assert_eq!(hits(left.path(), 2, over_two), (6, whole(4)));
    // Without the second directory its blocks are incomplete.
    let (found, took_over) = hits(left.path(), 1, |_| {});
    let refused = took_over[0].refused.as_deref().expect("a reason");
    assert!(found == 0 && refused.contains("name all of them"), "{refused}");
}

#[test]
fn a_damaged_part_costs_its_block_and_those_behind_it() {
    let left = left_by(4, |_| {});
    let slots = folder(left.path(), 1, 4).join("slots.kvbm");
    let mut bytes = fs::read(&slots).expect("a slot file");
    bytes[3 * 4096 + 5] ^= 4;
    fs::write(&slots, bytes).expect("a slot file");
    let (found, took_over) = hits(left.path(), 2, |_| {});
    assert_eq!(
        (found, took_over),
        (3, vec![TookOver { ranks: 4, blocks: 3, left_behind: 3, refused: None }])
    );
}

#[test]
fn what_cannot_be_taken_over_is_counted_named_and_left_alone() {
    type Harm = fn(&FilePath);
    let cases: [(&str, &str, Harm); 3] = [
        ("rank 2 of 4", "journal", |dir| fs::remove_dir_all(folder(dir, 2, 4)).expect("removed")),
        ("rank 1 of 4", "version", |dir| {
            let journal = folder(dir, 1, 4).join("journal.kvbm");
            let mut bytes = fs::read(&journal).expect("a journal");
            bytes[8] = 9;
            fs::write(&journal, bytes).expect("a journal");
        }),
        ("rank 3 of 4", "calls itself rank 0 of 4", |dir| {
            fs::copy(folder(dir, 0, 4).join("journal.kvbm"), folder(dir, 3, 4).join("journal.kvbm"))
                .expect("copied");
        }),
    ];
    for (rank, reason, harm) in cases {
        let left = left_by(4, |_| {});
        harm(left.path());
        let before = fs::read(folder(left.path(), 0, 4).join("journal.kvbm")).expect("a journal");
        let (found, took_over) = hits(left.path(), 2, |_| {});
        let [TookOver { ranks: 4, blocks: 0, left_behind: 6, refused: Some(refused) }] = &took_over[..]
        else {
            panic!("{took_over:?}")
        };
        assert!(found == 0 && refused.contains(rank) && refused.contains(reason), "{refused}");
        assert_eq!(fs::read(folder(left.path(), 0, 4).join("journal.kvbm")).expect("a journal"), before);
    }
    // Another model under the same name.
    let left = left_by(4, |config| config.model.num_layers = 3);
    let (_, took_over) = hits(left.path(), 2, |_| {});
    let refused = took_over[0].refused.as_deref().expect("a reason");
    assert!(refused.contains("layers of the model = 3, here 2"), "{refused}");
    // Those who wrote it are still there.
    let left = tempfile::tempdir().expect("a directory");
    let there = manager(left.path(), 4, |_| {});
    serve(&there, &tokens(&there, 1, 6));
    there.flush(Duration::from_secs(30)).expect("flushed");
    let (_, took_over) = hits(left.path(), 2, |_| {});
    let refused = took_over[0].refused.as_deref().expect("a reason");
    assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
}

#[test]
fn without_room_or_time_the_beginnings_of_chains_come_or_nothing() {
    let left = left_by(4, |_| {});
    let (found, took_over) =
        hits(copy_of(left.path()).path(), 2, |config| config.disk.capacity = Blocks(4).into());
    assert_eq!(
        (found, took_over),
        (4, vec![TookOver { ranks: 4, blocks: 4, left_behind: 2, refused: None }])
    );
    let late = hits(copy_of(left.path()).path(), 2, |config| config.disk.take_over = Duration::from_nanos(2));
    assert_eq!(late, (0, vec![TookOver { ranks: 4, blocks: 0, left_behind: 6, refused: None }]));
    assert_eq!(hits(left.path(), 2, |config| config.disk.take_over = Duration::ZERO), (0, Vec::new()));
}

#[test]
fn what_was_taken_over_and_cleared_does_not_come_back() {
    let left = left_by(4, |_| {});
    let two = manager(left.path(), 2, |_| {});
    assert_eq!(two.workers().took_over(), whole(4));
    two.clear(Tier::G3).expect("cleared");
    assert!(two.shutdown(Duration::from_secs(30)).is_complete());
    drop(two);
    assert_eq!(hits(left.path(), 2, |_| {}), (0, Vec::new()));
}

/// Builds that must fail, as it does where a rank's folder cannot be opened.
fn refused(dir: &FilePath, ranks: u32) {
    let built = heads::on_disk(model(), dir, ranks).build();
    assert!(built.is_err(), "it has no folder for a rank");
}

/// The first rank has a journal and its blocks then, the second has nothing.
#[test]
fn a_start_that_was_cut_short_is_made_up_for() {
    let left = left_by(4, |_| {});
    let second = folder(left.path(), 1, 2);
    fs::write(&second, "no folder").expect("a file");
    refused(left.path(), 2);
    assert!(folder(left.path(), 0, 2).join("journal.kvbm").exists());
    fs::remove_file(&second).expect("removed");
    // Now its blocks, and no more room than they need.
    let tight = |config: &mut Config| config.disk.capacity = Blocks(6).into();
    assert_eq!(hits(left.path(), 2, tight), (6, whole(4)));
    assert_eq!(hits(left.path(), 2, tight), (6, Vec::new()), "once");
}

#[test]
fn what_is_in_use_moves_in_at_a_later_start() {
    let dir = tempfile::tempdir().expect("a directory");
    let there = manager(dir.path(), 4, |_| {});
    serve(&there, &tokens(&there, 1, 6));
    there.flush(Duration::from_secs(30)).expect("flushed");
    // Blocks of their own stay where they are.
    let two = manager(dir.path(), 2, |_| {});
    assert!(two.workers().took_over()[0].refused.is_some());
    serve(&two, &tokens(&two, 2, 3));
    assert!(two.shutdown(Duration::from_secs(30)).is_complete());
    drop(two);
    assert!(there.shutdown(Duration::from_secs(30)).is_complete());
    drop(there);
    let two = manager(dir.path(), 2, |_| {});
    assert_eq!(two.workers().took_over(), whole(4));
    assert_eq!(serve(&two, &tokens(&two, 2, 3)), 3);
    assert_eq!(serve(&two, &tokens(&two, 1, 6)), 6);
    assert!(two.shutdown(Duration::from_secs(30)).is_complete());
    drop(two);
    assert_eq!(hits(dir.path(), 2, |_| {}), (6, Vec::new()));
}

#[test]
fn an_empty_deployment_hides_no_older_one() {
    let dir = left_by(4, |_| {});
    let empty = manager(dir.path(), 1, |config| config.disk.take_over = Duration::ZERO);
    assert!(empty.shutdown(Duration::from_secs(30)).is_complete());
    drop(empty);
    assert_eq!(hits(dir.path(), 2, |_| {}), (6, whole(4)));
}

/// Workers that are started one by one, as in processes of their own: the first one moves the
/// blocks in for all of them. Mutation that makes it fail: `take_over` moves in the blocks of rank
/// 0 alone.
#[test]
fn workers_that_start_by_themselves_take_over_what_another_number_of_ranks_left() {
    let left = left_by(4, |_| {});
    let mut workers = Vec::new();
    let manager = heads::on_disk(model(), left.path(), 2);
    let mut config = Config { model: model(), ..Config::default() };
    config.namespace.model = "test-model".into();
    config.parallelism.tensor_parallel = 2;
    (config.device.capacity, config.host.capacity) = (Blocks(8).into(), Blocks(16).into());
    (config.disk.dir, config.disk.capacity) = (Some(left.path().to_owned()), Blocks(16).into());
    let tag = namespace().page_size(model().page_size).dtype("bf16").tag();
    let manager = manager
        .build_with_workers(|rank, epoch, sink| {
            let started = Worker::start(&config, rank, &G1Memory::Owned, epoch, tag, sink);
            workers.push(started.expect("a worker"));
            workers.last().expect("there").link()
        })
        .expect("a manager");
    assert_eq!(manager.match_prefix(&tokens(&manager, 1, 6)).len(), 6);
    let error = Worker::start(&config, Rank(2), &G1Memory::Owned, Epoch(1), tag, Arc::new(drop)).err();
    assert!(matches!(error, Some(WorkerError::NoSuchRank { rank: Rank(2), ranks: 2 })), "{error:?}");
    drop(manager);
}
