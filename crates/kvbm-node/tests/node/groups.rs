//! Calls of an engine whose model has several cache groups: what each group is promised, what is
//! refused by group, and that a request gets all groups or none.

use crate::support::{Daemon, Model, PATIENCE, TestEngine, blocks, sequence, socket};
use kvbm::config::Config;
use kvbm::device::Event;
use kvbm::storage::StorageExt;
use kvbm::{BlockChain, BlockId, GroupId, LookUp, Tier};
use kvbm_node::NodeError;
use std::time::{Duration, Instant};

const MODEL: Model = Model::ThreeGroups;

struct Fixture {
    _folder: tempfile::TempDir,
    daemon: Daemon,
    config: Config,
    engine: TestEngine,
}

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = MODEL.config(1, "[host]\ncapacity = \"64 blocks\"\n");
        let daemon = Daemon::start(&socket(&folder), &config);
        let engine = TestEngine::attach_of(MODEL, &socket(&folder), "engine", 64, 1);
        Self { _folder: folder, daemon, config, engine }
    }
}

fn ready(blocks: usize) -> LookUp {
    LookUp::Ready { blocks, by_tier: [0, blocks, 0, 0] }
}

fn ids(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn a_request_is_promised_what_each_group_needs_and_as_far_as_all_have_it() {
    let fixture = Fixture::new();
    let Fixture { config, engine, .. } = &fixture;
    let (long, short) = (sequence(config, 1, 8), sequence(config, 1, 4));
    engine.save(&short, &ids(0..4));
    let look_up = |first| engine.node.look_up_groups("r", &long, first).unwrap();
    let promise = look_up(0);
    assert_eq!((promise.found, promise.groups), (ready(4), vec![2..4, 0..4, 3..4]));
    let promise = look_up(3);
    assert_eq!(
        (promise.found, promise.groups),
        (ready(1), vec![3..4; 3]),
        "the engine has the blocks before"
    );
    let promise = look_up(4);
    assert_eq!((promise.found, promise.groups), (LookUp::Ready { blocks: 0, by_tier: [0; 4] }, vec![]));
    let three = BlockChain::from(&long).slice(0..3);
    let promise = engine.node.look_up_groups("r", three, 0).unwrap();
    assert!(promise.groups.is_empty(), "there is no state after three blocks: {promise:?}");
}

#[test]
fn ids_that_do_not_fit_are_refused_and_nothing_is_written() {
    let fixture = Fixture::new();
    let Fixture { config, engine, .. } = &fixture;
    let tokens = sequence(config, 1, 4);
    engine.save(&tokens, &ids(0..4));
    engine.node.look_up("r", &tokens, 0).unwrap();
    let one = engine.node.commit("r", &blocks(&[8, 9, 10, 11])).unwrap_err();
    let NodeError::Refused(why) = &one else { panic!("{one}") };
    assert_eq!(why, "1 lists of block ids, and the engine has 3 cache groups: give a list for each");
    let right = MODEL.places(&[8, 9, 10, 11], &MODEL.needed(4));
    let mut few = right.clone();
    few[1].pop();
    engine.commit("r", &few);
    let load = engine.wait_for("r");
    assert_eq!((load.arrived, load.wanted), (0, 3));
    assert!(
        load.failures[0].contains("3 engine blocks") && load.failures[0].contains("cache group 1"),
        "{load:?}"
    );
    let mut twice = right.clone();
    twice[2] = vec![right[0][0]];
    engine.node.look_up("r", &tokens, 0).unwrap();
    engine.commit("r", &twice);
    let load = engine.wait_for("r");
    assert!(load.arrived == 0 && load.failures[0].contains("named twice"), "{load:?}");
    let mut beyond = right.clone();
    beyond[0][1] = 64;
    engine.node.look_up("r", &tokens, 0).unwrap();
    engine.commit("r", &beyond);
    let load = engine.wait_for("r");
    assert!(load.failures[0].contains("block 64 does not exist: the engine has 64"), "{load:?}");
    // No ids give the ticket up.
    engine.node.look_up("r", &tokens, 0).unwrap();
    engine.node.commit_groups("r", &[&[], &[], &[]], None, None).unwrap();
    assert_eq!(engine.node.counts().unwrap(), (0, 0));
    assert_eq!(engine.load("r", &tokens, &[8, 9, 10, 11]).arrived, 4);
    assert!(engine.holds_all(&tokens, &[8, 9, 10, 11]));
    for group in [3, u16::MAX] {
        let begun = engine.node.offload_group(GroupId(group), &blocks(&[0]), &tokens, 0, None).unwrap();
        let [(block, why)] = &begun.refused[..] else { panic!("{begun:?}") };
        assert_eq!((begun.started, begun.present, *block), (0, 0, BlockId(0)));
        assert!(why.contains("unknown group"), "{why}");
    }
}

#[test]
fn a_group_whose_block_is_damaged_fails_the_load_of_all() {
    for damaged in 0..3 {
        let fixture = Fixture::new();
        let Fixture { daemon, config, engine, .. } = &fixture;
        let tokens = sequence(config, 1, 4);
        engine.save(&tokens, &ids(0..4));
        let held = daemon.server.manager().events().snapshot().blocks;
        let group = GroupId(damaged);
        let count = held.iter().filter(|block| block.identity.group == group).count();
        assert_eq!(count, MODEL.needed(4)[usize::from(damaged)].len(), "events name the group");
        let kept = daemon.server.manager().kept_host();
        let shared = daemon.server.manager().workers().iter().next().unwrap().shared().unwrap();
        let slot_bytes = shared.slots[0].layout().total_bytes() / u64::from(shared.slots[0].num_blocks());
        let slot = kept[0].contents.iter().find(|content| content.identity.group == group).unwrap().block;
        // SAFETY: nothing is copied meanwhile.
        unsafe { shared.memory.write_at(u64::from(slot.0) * slot_bytes + 7, &[0xa5, 0x5a]) }.unwrap();
        let load = engine.load("r", &tokens, &ids(8..12));
        assert_eq!((load.arrived, load.wanted), (0, 4), "group {group}: {load:?}");
        assert!(load.failures[0].contains("checksum"), "group {group}: {load:?}");
        assert_eq!(engine.found("r", &tokens), 0, "group {group}: a miss for all");
        engine.save(&tokens, &ids(0..4));
        assert_eq!(engine.load("r", &tokens, &ids(8..12)).arrived, 4, "group {group}: computed again");
        assert!(engine.holds_all(&tokens, &ids(8..12)));
    }
}

#[test]
fn loads_of_all_groups_start_at_their_point_and_end_at_their_deadline() {
    let fixture = Fixture::new();
    let Fixture { daemon, config, engine, .. } = &fixture;
    let tokens = sequence(config, 1, 4);
    // Copies of every group wait for the point at which their blocks are computed.
    let all = |ids: &[u32]| blocks(&MODEL.places(ids, &MODEL.needed(4)).concat());
    assert_eq!(engine.offer(&tokens, &ids(0..4), Some(1)).unwrap().started, 7);
    assert_eq!(engine.node.busy(&all(&ids(0..4))).unwrap(), all(&ids(0..4)));
    assert_eq!(engine.found("r", &tokens), 0);
    for (group, (range, ids)) in
        MODEL.needed(4).iter().zip(MODEL.places(&ids(0..4), &MODEL.needed(4))).enumerate()
    {
        engine.compute_in(group, &tokens, range.start, &ids);
    }
    engine.node.signal(1, &Event::complete());
    assert!(engine.node.wait_offloads(PATIENCE).unwrap());
    assert_eq!(engine.found("r", &tokens), 4);
    let places: Vec<Vec<BlockId>> =
        MODEL.places(&ids(8..12), &MODEL.needed(4)).iter().map(|ids| blocks(ids)).collect();
    let lists: Vec<&[BlockId]> = places.iter().map(Vec::as_slice).collect();
    let commit = |after, time| {
        engine.node.look_up("r", &tokens, 0).unwrap();
        engine.node.commit_groups("r", &lists, Some(after), time).unwrap();
    };
    commit(2, None);
    std::thread::sleep(Duration::from_millis(20));
    assert!(engine.node.finished().is_empty(), "the engine has not passed its point");
    engine.node.signal(2, &Event::complete());
    assert_eq!(engine.wait_for("r").arrived, 4);
    assert!(engine.holds_all(&tokens, &ids(8..12)));
    // Nobody ever passes this point.
    commit(3, Some(Duration::from_millis(50)));
    let load = engine.wait_for("r");
    assert_eq!((load.arrived, load.wanted), (0, 4), "{load:?}");
    assert_eq!(engine.node.before_reuse(&places.concat(), Instant::now() + PATIENCE), Ok(()));
    // An abandoned load is named once.
    commit(4, None);
    assert!(engine.node.abandon("r").unwrap());
    let load = engine.wait_for("r");
    assert_eq!((load.arrived, load.wanted), (0, 4), "{load:?}");
    assert!(engine.node.finished().is_empty());
    let tier = &daemon.server.manager().status().tiers[Tier::G2.index()];
    assert_eq!((tier.inactive, tier.arriving), (7, 0), "{tier:?}");
}
