//! Engines and daemons that go while copies are under way.

use crate::support::{Daemon, Model, PATIENCE, TestEngine, blocks, sequence, socket};
use kvbm::Tier;
use std::time::{Duration, Instant};

#[test]
fn an_engine_that_goes_leaves_no_slot_behind() {
    for model in Model::ALL {
        let folder = tempfile::tempdir().unwrap();
        let (socket, config) = (socket(&folder), model.config(1, "[host]\ncapacity = \"32 blocks\"\n"));
        let daemon = Daemon::start(&socket, &config);
        for round in 0..10 {
            let engine = TestEngine::attach_of(model, &socket, "engine", 64, 1);
            let tokens = sequence(&config, round, 8);
            let ids: Vec<u32> = (0..8).collect();
            engine.compute(&tokens, 0, &ids);
            engine.offer(&tokens, &ids, None).unwrap();
            let promise = engine.node.look_up_groups("r", &tokens, 0).unwrap();
            if !promise.groups.is_empty() {
                engine.commit("r", &model.places(&(8..16).collect::<Vec<_>>(), &promise.groups));
            }
        }
        let until = Instant::now() + PATIENCE;
        loop {
            let status = daemon.server.manager().status();
            let tier = &status.tiers[Tier::G2.index()];
            if tier.arriving == 0 && tier.active == 0 && tier.transfer_pins == 0 {
                assert_eq!(tier.free + tier.inactive, 32, "{model:?}: {tier:?}");
                break;
            }
            assert!(Instant::now() < until, "{model:?}: {tier:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(daemon.server.engines().is_empty());
    }
}

#[test]
fn loads_under_way_fail_when_the_daemon_goes_and_the_next_one_serves() {
    for model in Model::ALL {
        let folder = tempfile::tempdir().unwrap();
        let (socket, config) = (socket(&folder), model.config(1, "[host]\ncapacity = \"32 blocks\"\n"));
        let tokens = sequence(&config, 1, 8);
        let ids: Vec<u32> = (8..16).collect();
        let places = model.places(&ids, &model.needed(8));
        let mut daemon = Daemon::start(&socket, &config);
        let engine = TestEngine::attach_of(model, &socket, "engine", 64, 1);
        for _ in 0..5 {
            assert!(engine.node.wait_ready(PATIENCE), "{:?}", engine.node.status());
            engine.save(&tokens, &(0..8).collect::<Vec<_>>());
            engine.node.look_up("r", &tokens, 0).unwrap();
            engine.commit("r", &places);
            drop(daemon);
            let load = engine.wait_for("r");
            let arrived = &ids[..load.arrived];
            assert_eq!(load.wanted, 8);
            match model {
                Model::OneGroup | Model::Latent => assert!(engine.holds(&tokens, 0, arrived), "{load:?}"),
                Model::ThreeGroups => {
                    assert!(load.arrived == 0 || engine.holds_all(&tokens, arrived), "{load:?}");
                }
            }
            let all = blocks(&places.concat());
            assert_eq!(engine.node.before_reuse(&all, Instant::now() + PATIENCE), Ok(()));
            engine.compute(&sequence(&config, 7, 8), 0, &ids);
            daemon = Daemon::start(&socket, &config);
        }
    }
}
