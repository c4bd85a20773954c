//! What is copied, and that every byte of it is right.

use crate::support::{Daemon, TestEngine, config, sequence, socket};
use kvbm::storage::StorageExt;
use kvbm::{Tier, TokenSequence};

fn saved(engine: &TestEngine, tokens: &TokenSequence) {
    engine.save(tokens, &(0..tokens.num_blocks() as u32).collect::<Vec<_>>());
}

#[test]
fn what_one_engine_saves_its_next_life_and_another_engine_load() {
    for ranks in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let (socket, config) = (socket(&folder), config(ranks, "[host]\ncapacity = \"64 blocks\"\n"));
        let _daemon = Daemon::start(&socket, &config);
        let tokens = sequence(&config, 1, 9);
        let first = TestEngine::attach(&socket, "first", 16, ranks as u16);
        saved(&first, &tokens);
        let other = TestEngine::attach(&socket, "other", 32, ranks as u16);
        let ids: Vec<u32> = (20..29).collect();
        let load = other.load("r", &tokens, &ids);
        assert_eq!((load.arrived, load.failures.len()), (9, 0), "{load:?}");
        assert!(other.holds(&tokens, 0, &ids));
        drop(first);
        let again = TestEngine::attach(&socket, "first", 16, ranks as u16);
        let ids: Vec<u32> = (3..12).rev().collect();
        assert_eq!(again.load("r", &tokens, &ids).arrived, 9);
        assert!(again.holds(&tokens, 0, &ids));
        assert_eq!(again.found("s", &sequence(&config, 2, 9)), 0, "nobody has saved that");
    }
}

#[test]
fn blocks_on_disk_come_through_the_staging_ring() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    let more = format!(
        "[host]\ncapacity = \"64 blocks\"\n[disk]\ndir = {:?}\ncapacity = \"64 blocks\"\n[policy]\nadmission = \"all\"\n",
        disk.display().to_string()
    );
    let (socket, config) = (socket(&folder), config(2, &more));
    let tokens = sequence(&config, 1, 7);
    let daemon = Daemon::start(&socket, &config);
    let engine = TestEngine::attach(&socket, "engine", 16, 2);
    saved(&engine, &tokens);
    daemon.server.manager().wait_offloads(std::time::Instant::now() + crate::support::PATIENCE);
    daemon.stop();
    // The engine goes on with misses, and attaches to the next daemon by itself.
    let daemon = Daemon::start(&socket, &config);
    let until = std::time::Instant::now() + crate::support::PATIENCE;
    while engine.found("r", &tokens) == 0 && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let tier = |tier: Tier| daemon.server.manager().status().tiers[tier.index()].inactive;
    assert_eq!((tier(Tier::G2), tier(Tier::G3)), (0, 7), "host memory is empty, the disk is not");
    let ids: Vec<u32> = (8..15).collect();
    assert_eq!(engine.load("r", &tokens, &ids).arrived, 7);
    assert!(engine.holds(&tokens, 0, &ids));
}

#[test]
fn bytes_that_another_process_overwrote_are_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"8 blocks\"\n"));
    let daemon = Daemon::start(&socket, &config);
    let engine = TestEngine::attach(&socket, "engine", 16, 1);
    let tokens = sequence(&config, 1, 8);
    saved(&engine, &tokens);
    let worker = daemon.server.manager().workers().iter().next().unwrap();
    let memory = &worker.shared().unwrap().memory;
    for slot in 0..8 {
        // SAFETY: nothing is copied meanwhile.
        unsafe { memory.write_at(slot * 4096 + 100, &[0x5a]) }.unwrap();
    }
    let load = engine.load("r", &tokens, &(8..16).collect::<Vec<_>>());
    assert_eq!(load.arrived, 0, "{load:?}");
    assert!(load.failures[0].contains("checksum"), "{load:?}");
}

#[test]
fn a_block_that_is_reused_while_it_is_saved_is_not_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"256 blocks\"\n"));
    let _daemon = Daemon::start(&socket, &config);
    let engine = TestEngine::attach(&socket, "engine", 16, 1);
    let ids: Vec<u32> = (0..8).collect();
    for round in 0..40 {
        let (tokens, next) = (sequence(&config, 2 * round, 8), sequence(&config, 2 * round + 1, 8));
        engine.compute(&tokens, 0, &ids);
        engine.node.offload(&crate::support::blocks(&ids), &tokens, 0).unwrap();
        let until = std::time::Instant::now() + crate::support::PATIENCE;
        engine.node.before_reuse(&crate::support::blocks(&ids), until).unwrap();
        engine.compute(&next, 0, &ids);
        let found = engine.found("r", &tokens);
        if found > 0 {
            let to: Vec<u32> = (8..8 + found as u32).collect();
            assert_eq!(engine.load("r", &tokens, &to).arrived, found);
            assert!(engine.holds(&tokens, 0, &to), "round {round}");
        }
    }
}
