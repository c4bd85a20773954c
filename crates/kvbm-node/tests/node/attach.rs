//! Who is attached, and who is refused with both sides' values.

use crate::support::{Daemon, Model, PATIENCE, TestEngine, config, layout, sequence, socket, terms};
use kvbm::config::Config;
use kvbm::storage::{BoundLayout, SystemAllocator};
use kvbm::tokens::NamespaceTag;
use kvbm::{GroupKind, LookUp, Rank};
use kvbm_node::{EngineTerms, MoverMemory, NodeEngine, NodeError, NodeStatus};
use std::time::{Duration, Instant};

/// Why this engine is not attached, once that is said.
fn refusal(terms: EngineTerms, blocks: u32, heads: u32) -> String {
    let g1 = BoundLayout::allocate(layout(blocks, heads), &SystemAllocator::default()).unwrap();
    refusal_of(terms, vec![MoverMemory { rank: Rank(0), device: None, g1: vec![g1] }])
}

fn refusal_of(terms: EngineTerms, movers: Vec<MoverMemory>) -> String {
    let engine = NodeEngine::attach(terms, true, movers).unwrap();
    let until = Instant::now() + PATIENCE;
    loop {
        match engine.status() {
            NodeStatus::Detached { reason } if reason.contains("refuses") => return reason,
            status => assert!(Instant::now() < until, "{status:?}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_does_not_fit_is_refused_with_both_values() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"8 blocks\"\n"));
    let _daemon = Daemon::start(&socket, &config);
    let _engine = TestEngine::attach(&socket, "engine", 16, 1);
    let namespace = Some(NamespaceTag::from_bytes([9; 16]));
    for (terms, blocks, heads, expected) in [
        (terms(&socket, "a", 16, 1), 16, 1, "elements of a token: the engine has 8, the daemon has 16"),
        (terms(&socket, "b", 16, 2), 16, 2, "the engine has 2 ranks, the daemon serves 1"),
        (terms(&socket, "c", 999, 1), 999, 2, "no room for 999 blocks: engines have 16 of 256"),
        (terms(&socket, "engine", 16, 1), 16, 2, "is there already"),
        (terms(&socket, "engine", 17, 1), 17, 2, "16 blocks in another process, 17 in this"),
        (EngineTerms { namespace, ..terms(&socket, "d", 16, 1) }, 16, 2, "the namespace differs"),
        (terms(&socket, &"x".repeat(300), 16, 1), 16, 2, "an engine's name has 1 to 256 bytes, not 300"),
    ] {
        let reason = refusal(terms, blocks, heads);
        assert!(reason.contains(expected), "{reason}");
    }
}

/// Ranks that hold other bytes would get those of the first.
#[test]
fn an_engine_whose_ranks_share_fewer_bytes_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let text = "[model]\nopaque_tensors = 64\npage_size = 4\nreplicas = 2\n[namespace]\nmodel = \"tiny\"\n\
                [parallelism]\ntensor_parallel = 2\n[host]\ncapacity = \"8 blocks\"\none_copy = true\n";
    let config = Config::from_toml(text, "test").unwrap();
    let socket = socket(&folder);
    let _daemon = Daemon::start(&socket, &config);
    let engine = |replicas| {
        let terms = EngineTerms { replicas, ..terms(&socket, "engine", 16, 2) };
        NodeEngine::attach(terms, true, Vec::new()).unwrap()
    };
    let is_attached = |engine: &NodeEngine| matches!(engine.status(), NodeStatus::Attached { .. });
    let refused = engine(1);
    let until = Instant::now() + PATIENCE;
    loop {
        if let NodeStatus::Detached { reason } = refused.status()
            && reason.contains("(model.replicas): the engine has 1, the daemon has 2")
        {
            break;
        }
        assert!(!is_attached(&refused) && Instant::now() < until, "{:?}", refused.status());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(refused);
    let taken = engine(2);
    while !is_attached(&taken) {
        assert!(Instant::now() < until, "{:?}", taken.status());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_engine_of_other_cache_groups_is_refused_with_both_values() {
    let (one, three) = (Model::OneGroup, Model::ThreeGroups);
    let kinds = |of: &[usize]| of.iter().map(|at| three.kinds()[*at]).collect::<Vec<_>>();
    let memory = |of: &[usize], ranks| {
        of.iter().map(|at| three.memory(16, ranks, None)[*at].clone()).collect::<Vec<_>>()
    };
    let window = |tokens| vec![GroupKind::SlidingWindow(tokens), GroupKind::Full, GroupKind::State];
    let told = "cache groups (model.groups): the engine has";
    for (daemon, groups, g1, expected) in [
        (
            one,
            three.kinds(),
            three.memory(16, 1, None),
            format!("{told} 3 (window=7, full, state), the daemon has 1 (full)"),
        ),
        (
            three,
            one.kinds(),
            one.memory(16, 1, None),
            format!("{told} 1 (full), the daemon has 3 (window=7, full, state)"),
        ),
        (three, kinds(&[0, 1]), memory(&[0, 1], 1), format!("{told} 2 (window=7, full), the daemon has 3")),
        (
            three,
            window(8),
            three.memory(16, 1, None),
            "cache group 0, what its layers keep: the engine has window=8, the daemon has window=7".into(),
        ),
        (
            three,
            kinds(&[1, 0, 2]),
            memory(&[1, 0, 2], 1),
            "cache group 0, what its layers keep: the engine has full, the daemon has window=7".into(),
        ),
        (
            three,
            three.kinds(),
            memory(&[0, 0, 2], 1),
            "cache group 1, layers: the engine has 2, the daemon has 3".into(),
        ),
        (
            three,
            three.kinds(),
            three.memory(16, 2, None),
            "cache group 0, elements of a token: the engine has 8, the daemon has 16".into(),
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let socket = socket(&folder);
        let _daemon = Daemon::start(&socket, &daemon.config(1, "[host]\ncapacity = \"8 blocks\"\n"));
        let terms = EngineTerms { groups, ..terms(&socket, "engine", 16, 1) };
        let reason = refusal_of(terms.clone(), vec![MoverMemory { rank: Rank(0), device: None, g1 }]);
        assert!(reason.contains(&expected), "{reason}");
        if terms.groups != daemon.kinds() {
            // A scheduler that copies nothing is told as much.
            let reason = refusal_of(terms, Vec::new());
            assert!(reason.contains(&expected), "{reason}");
        }
    }
    let terms =
        EngineTerms { groups: three.kinds(), ..terms(std::path::Path::new("/none"), "engine", 16, 1) };
    let mover = MoverMemory { rank: Rank(0), device: None, g1: one.memory(16, 1, None) };
    let error = NodeEngine::attach(terms, true, vec![mover]).err().unwrap();
    assert_eq!(error, NodeError::Groups { rank: Rank(0), found: 1, needed: 3 });
}

#[test]
fn without_a_daemon_everything_is_a_miss_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"8 blocks\"\n"));
    let engine = TestEngine::begin(&socket, "engine", 16, 1);
    let (tokens, ids) = (sequence(&config, 1, 4), crate::support::blocks(&[0, 1, 2, 3]));
    assert_eq!(engine.node.look_up("r", &tokens, 0).unwrap(), LookUp::Ready { blocks: 0, by_tier: [0; 4] });
    assert_eq!(engine.node.offload(&ids, &tokens, 0).unwrap().started, 0);
    assert!(matches!(engine.node.commit("r", &ids), Err(NodeError::Detached { .. })));
    assert_eq!(engine.node.before_reuse(&ids, Instant::now()), Ok(()));
    assert!(engine.node.finished().is_empty());
    // It attaches when the daemon comes.
    let _daemon = Daemon::start(&socket, &config);
    assert!(engine.node.wait_ready(PATIENCE), "{:?}", engine.node.status());
    engine.save(&tokens, &[0, 1, 2, 3]);
    assert_eq!(engine.load("r", &tokens, &[4, 5, 6, 7]).arrived, 4);
    assert!(engine.holds(&tokens, 0, &[4, 5, 6, 7]));
}

#[test]
fn engines_that_are_attached_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(2, "[host]\ncapacity = \"16 blocks\"\n"));
    let daemon = Daemon::start(&socket, &config);
    let shown = |ready: u64, attaching: u64| {
        let text = daemon.server.manager().metrics().encode();
        let value =
            |state: &str, count| text.contains(&format!("kvbm_node_engines{{state=\"{state}\"}} {count}\n"));
        value("ready", ready) && value("attaching", attaching)
    };
    let until_shown = |ready, attaching| {
        let until = Instant::now() + PATIENCE;
        while !shown(ready, attaching) {
            assert!(Instant::now() < until, "{}", daemon.server.manager().metrics().encode());
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    assert!(shown(0, 0));
    let whole = TestEngine::attach(&socket, "whole", 16, 2);
    until_shown(1, 0);
    let scheduler = NodeEngine::attach(terms(&socket, "parts", 16, 2), true, Vec::new()).unwrap();
    until_shown(1, 1);
    let mover = |rank: u16| {
        let g1 = BoundLayout::allocate(layout(16, 1), &SystemAllocator::default()).unwrap();
        let memory = MoverMemory { rank: Rank(rank), device: None, g1: vec![g1] };
        NodeEngine::attach(terms(&socket, "parts", 16, 2), false, vec![memory]).unwrap()
    };
    let movers = [mover(0), mover(1)];
    assert!(scheduler.wait_ready(PATIENCE), "{:?}", scheduler.status());
    until_shown(2, 0);
    drop((scheduler, whole));
    until_shown(0, 1);
    drop(movers);
    until_shown(0, 0);
}

#[test]
fn scheduler_and_movers_may_be_processes_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(2, "[host]\ncapacity = \"8 blocks\"\n"));
    let daemon = Daemon::start(&socket, &config);
    let scheduler = NodeEngine::attach(terms(&socket, "engine", 16, 2), true, Vec::new()).unwrap();
    let mover = |rank| {
        let g1 = BoundLayout::allocate(layout(16, 1), &SystemAllocator::default()).unwrap();
        let memory = MoverMemory { rank: Rank(rank), device: None, g1: vec![g1] };
        NodeEngine::attach(terms(&socket, "engine", 16, 2), false, vec![memory]).unwrap()
    };
    let first = mover(0);
    assert!(!scheduler.wait_ready(Duration::from_millis(50)), "a rank is missing");
    let second = mover(1);
    assert!(scheduler.wait_ready(PATIENCE), "{:?}", scheduler.status());
    let tokens = sequence(&config, 1, 4);
    let ids = crate::support::blocks(&[0, 1, 2, 3]);
    assert_eq!(scheduler.offload(&ids, &tokens, 0).unwrap().started, 4);
    assert_eq!(first.look_up("r", &tokens, 0), Err(NodeError::NoScheduler));
    assert_eq!(daemon.server.engines().len(), 1);
    // A mover that goes ends the instance; another one begins when it is back.
    drop(second);
    let until = Instant::now() + PATIENCE;
    while matches!(scheduler.status(), NodeStatus::Attached { ready: true, .. }) {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    let _second = mover(1);
    assert!(scheduler.wait_ready(PATIENCE), "{:?}", scheduler.status());
}
