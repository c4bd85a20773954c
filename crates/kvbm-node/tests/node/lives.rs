//! Engines and daemons that go while copies are under way.

use crate::support::{Daemon, PATIENCE, TestEngine, blocks, config, sequence, socket};
use kvbm::Tier;
use std::time::{Duration, Instant};

#[test]
fn an_engine_that_goes_leaves_no_slot_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"32 blocks\"\n"));
    let daemon = Daemon::start(&socket, &config);
    for round in 0..10 {
        let engine = TestEngine::attach(&socket, "engine", 16, 1);
        let tokens = sequence(&config, round, 8);
        let ids: Vec<u32> = (0..8).collect();
        engine.compute(&tokens, 0, &ids);
        engine.node.offload(&blocks(&ids), &tokens, 0).unwrap();
        engine.node.look_up("r", &tokens, 0).unwrap();
        let _there_or_not = engine.node.commit("r", &blocks(&[8, 9]));
    }
    let until = Instant::now() + PATIENCE;
    loop {
        let status = daemon.server.manager().status();
        let tier = &status.tiers[Tier::G2.index()];
        if tier.arriving == 0 && tier.active == 0 && tier.transfer_pins == 0 {
            assert_eq!(tier.free + tier.inactive, 32, "{tier:?}");
            break;
        }
        assert!(Instant::now() < until, "{tier:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(daemon.server.engines().is_empty());
}

#[test]
fn loads_under_way_fail_when_the_daemon_goes_and_the_next_one_serves() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"32 blocks\"\n"));
    let tokens = sequence(&config, 1, 8);
    let ids: Vec<u32> = (8..16).collect();
    let mut daemon = Daemon::start(&socket, &config);
    let engine = TestEngine::attach(&socket, "engine", 16, 1);
    for _ in 0..5 {
        assert!(engine.node.wait_ready(PATIENCE), "{:?}", engine.node.status());
        engine.save(&tokens, &(0..8).collect::<Vec<_>>());
        engine.node.look_up("r", &tokens, 0).unwrap();
        engine.node.commit("r", &blocks(&ids)).unwrap();
        drop(daemon);
        let load = engine.wait_for("r");
        assert!(load.arrived == 0 || engine.holds(&tokens, 0, &ids[..load.arrived]), "{load:?}");
        assert_eq!(engine.node.before_reuse(&blocks(&ids), Instant::now() + PATIENCE), Ok(()));
        engine.compute(&sequence(&config, 7, 8), 0, &ids);
        daemon = Daemon::start(&socket, &config);
    }
}
