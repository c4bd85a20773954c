//! What is copied, and that every byte of it is right.

use crate::support::{Daemon, EngineMemory, Model, PATIENCE, TestEngine, config, sequence, socket};
use kvbm::storage::StorageExt;
use kvbm::{Tier, TokenSequence};
use kvbm_node::NodeStatus;
use std::time::{Duration, Instant};

fn saved(engine: &TestEngine, tokens: &TokenSequence) {
    engine.save(tokens, &(0..tokens.num_blocks() as u32).collect::<Vec<_>>());
}

#[test]
fn what_one_engine_saves_its_next_life_and_another_engine_load() {
    for (model, ranks, order) in
        Model::ALL.into_iter().flat_map(|model| [(model, 1, "universal"), (model, 2, "nhd")])
    {
        let folder = tempfile::tempdir().unwrap();
        let more = format!("[host]\ncapacity = \"64 blocks\"\norder = \"{order}\"\n");
        let (socket, config) = (socket(&folder), model.config(ranks, &more));
        let _daemon = Daemon::start(&socket, &config);
        let tokens = sequence(&config, 1, 9);
        let attach = |name| TestEngine::attach_of(model, &socket, name, 64, ranks as u16);
        let first = attach("first");
        saved(&first, &tokens);
        let other = attach("other");
        let ids: Vec<u32> = (20..29).collect();
        let load = other.load("r", &tokens, &ids);
        assert_eq!((load.arrived, load.wanted, load.failures.len()), (9, 9, 0), "{load:?}");
        assert!(other.holds_all(&tokens, &ids), "{model:?}");
        drop(first);
        let again = attach("first");
        let ids: Vec<u32> = (3..12).rev().collect();
        assert_eq!(again.load("r", &tokens, &ids).arrived, 9);
        assert!(again.holds_all(&tokens, &ids), "{model:?}");
        assert_eq!(again.found("s", &sequence(&config, 2, 9)), 0, "nobody has saved that");
    }
}

/// The daemon never opens a device: the engine's process page-locks the daemon's memory and copies.
#[test]
fn blocks_on_devices_come_back_to_them() {
    for model in Model::ALL {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        let more = format!(
            "[host]\ncapacity = \"64 blocks\"\n[disk]\ndir = {disk:?}\ncapacity = \"64 blocks\"\n\
             [policy]\nadmission = \"all\"\n",
        );
        let (socket, config) = (socket(&folder), model.config(2, &more));
        let daemon = Daemon::start(&socket, &config);
        let tokens = sequence(&config, 1, 7);
        let attach = |name| TestEngine::attach_in(EngineMemory::EmulatedDevice, model, &socket, name, 64, 2);
        let first = attach("first");
        saved(&first, &tokens);
        let other = attach("other");
        let ids: Vec<u32> = (20..27).collect();
        assert_eq!(other.load("r", &tokens, &ids).arrived, 7, "{model:?}");
        assert!(other.holds_all(&tokens, &ids), "{model:?}");
        // From disk, through the staging ring, to a device again.
        daemon.server.manager().wait_offloads(Instant::now() + PATIENCE);
        drop((first, other));
        daemon.stop();
        let _daemon = Daemon::start(&socket, &config);
        let again = attach("again");
        let ids: Vec<u32> = (8..15).collect();
        assert_eq!(again.load("r", &tokens, &ids).arrived, 7, "{model:?}");
        assert!(again.holds_all(&tokens, &ids), "{model:?}");
    }
}

#[test]
fn ranks_that_hold_the_same_bytes_map_one_memory() {
    for (model, copies) in [(Model::Latent, 1), (Model::OneGroup, 2)] {
        let folder = tempfile::tempdir().unwrap();
        let (socket, config) = (socket(&folder), model.config(2, "[host]\ncapacity = \"16 blocks\"\n"));
        let daemon = Daemon::start(&socket, &config);
        let memory = |worker: &kvbm::Worker| worker.shared().unwrap().memory.region().as_ptr();
        let mut memories: Vec<_> = daemon.server.manager().workers().iter().map(memory).collect();
        memories.dedup();
        assert_eq!(memories.len(), copies, "{model:?}");
    }
}

#[test]
fn blocks_on_disk_come_through_the_staging_ring() {
    for model in Model::ALL {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        let more = format!(
            "[host]\ncapacity = \"64 blocks\"\n[disk]\ndir = {:?}\ncapacity = \"64 blocks\"\n[policy]\nadmission = \"all\"\n",
            disk.display().to_string()
        );
        let (socket, config) = (socket(&folder), model.config(2, &more));
        let tokens = sequence(&config, 1, 7);
        let daemon = Daemon::start(&socket, &config);
        let engine = TestEngine::attach_of(model, &socket, "engine", 64, 2);
        saved(&engine, &tokens);
        daemon.server.manager().wait_offloads(Instant::now() + PATIENCE);
        daemon.stop();
        // The engine goes on with misses, and attaches to the next daemon by itself.
        let daemon = Daemon::start(&socket, &config);
        let until = Instant::now() + PATIENCE;
        while engine.found("r", &tokens) == 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let tier = |tier: Tier| daemon.server.manager().status().tiers[tier.index()].inactive as usize;
        let saved = (tier(Tier::G2), tier(Tier::G3));
        assert_eq!(saved, (0, engine.needed(7)), "{model:?}: host memory is empty, the disk is not");
        let ids: Vec<u32> = (8..15).collect();
        assert_eq!(engine.load("r", &tokens, &ids).arrived, 7);
        assert!(engine.holds_all(&tokens, &ids), "{model:?}");
    }
}

#[test]
fn blocks_on_a_volume_come_through_the_staging_ring() {
    for model in Model::ALL {
        let folder = tempfile::tempdir().unwrap();
        let more = format!(
            "[host]\ncapacity = \"64 blocks\"\n[policy]\nadmission = \"all\"\n\
             [[volume]]\nuri = \"dir://{}\"\n",
            folder.path().join("volume").display()
        );
        std::fs::create_dir(folder.path().join("volume")).unwrap();
        let (socket, config) = (socket(&folder), model.config(2, &more));
        let tokens = sequence(&config, 1, 7);
        let daemon = Daemon::start(&socket, &config);
        let engine = TestEngine::attach_of(model, &socket, "engine", 64, 2);
        saved(&engine, &tokens);
        daemon.server.manager().wait_offloads(Instant::now() + PATIENCE);
        daemon.stop();
        drop(engine);
        let _daemon = Daemon::start(&socket, &config);
        let engine = TestEngine::attach_of(model, &socket, "engine", 64, 2);
        assert_eq!(engine.look_up("r", &tokens), Ok(7), "{model:?}");
        let ids: Vec<u32> = (8..15).collect();
        assert_eq!(engine.load("r", &tokens, &ids).arrived, 7);
        assert!(engine.holds_all(&tokens, &ids), "{model:?}");
    }
}

#[test]
fn bytes_that_another_process_overwrote_are_a_miss() {
    for model in Model::ALL {
        let folder = tempfile::tempdir().unwrap();
        let (socket, config) = (socket(&folder), model.config(1, "[host]\ncapacity = \"32 blocks\"\n"));
        let daemon = Daemon::start(&socket, &config);
        let engine = TestEngine::attach_of(model, &socket, "engine", 64, 1);
        let tokens = sequence(&config, 1, 8);
        saved(&engine, &tokens);
        let worker = daemon.server.manager().workers().iter().next().unwrap();
        let shared = worker.shared().unwrap();
        let slot_bytes = shared.slots[0].layout().total_bytes() / u64::from(shared.slots[0].num_blocks());
        for slot in 0..32 {
            // SAFETY: nothing is copied meanwhile.
            unsafe { shared.memory.write_at(slot * slot_bytes + 100, &[0x5a]) }.unwrap();
        }
        let load = engine.load("r", &tokens, &(8..16).collect::<Vec<_>>());
        assert_eq!((load.arrived, load.wanted), (0, 8), "{load:?}");
        assert!(load.failures[0].contains("checksum"), "{load:?}");
    }
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
        let until = Instant::now() + PATIENCE;
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

/// Host memory and the disk have room for four conversations each. Mutation that makes it fail: the
/// daemon prefetches and does not touch the blocks.
#[test]
fn a_session_that_goes_on_keeps_its_blocks_and_comes_up_from_disk() {
    for resumes in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        let more = format!(
            "[host]\ncapacity = \"16 blocks\"\n[disk]\ndir = {disk:?}\ncapacity = \"16 blocks\"\n\
             drive_writes_per_day = 0\n[policy]\nadmission = \"all\"\neviction = \"lru-leaf\"\nprefetch_share = 0.5\n\
             [offload.g2_g3]\nwrite_through = true\n",
        );
        let (socket, config) = (socket(&folder), config(1, &more));
        let daemon = Daemon::start(&socket, &config);
        let engine = TestEngine::attach(&socket, "engine", 32, 1);
        let manager = daemon.server.manager();
        let on = |tier: Tier, tokens: &TokenSequence| {
            manager.look_up(tokens).iter().filter(|places| places.contains(tier)).count()
        };
        let all_on = |tier: Tier, tokens: &TokenSequence| {
            let until = Instant::now() + PATIENCE;
            while on(tier, tokens) < 4 {
                assert!(Instant::now() < until, "{} blocks are on {tier}", on(tier, tokens));
                std::thread::sleep(Duration::from_millis(2));
            }
        };
        let sessions: Vec<_> = (1..6).map(|salt| sequence(&config, salt, 4)).collect();
        let save = |tokens: &TokenSequence| {
            saved(&engine, tokens);
            all_on(Tier::G3, tokens);
        };
        sessions[..4].iter().for_each(save);
        if resumes {
            assert_eq!(engine.node.session_resumes(&sessions[0]), Ok(0), "host memory has all of it");
        }
        save(&sessions[4]);
        let (kept, gone) = if resumes { (0, 1) } else { (1, 0) };
        let on_disk = [kept, gone].map(|at| on(Tier::G3, &sessions[at]));
        assert_eq!(on_disk, [4, 0], "resumes: {resumes}");
        manager.clear(Tier::G2).unwrap();
        assert_eq!(engine.node.session_resumes(&sessions[kept]), Ok(4), "the disk has all of it");
        all_on(Tier::G2, &sessions[kept]);
        let ids: Vec<u32> = (20..24).collect();
        assert_eq!(engine.load("r", &sessions[kept], &ids).arrived, 4);
        assert!(engine.holds_all(&sessions[kept], &ids));
        drop(daemon);
        let until = Instant::now() + PATIENCE;
        while matches!(engine.node.status(), NodeStatus::Attached { .. }) {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(engine.node.session_resumes(&sessions[0]), Ok(0), "a hint is lost without a daemon");
    }
}
