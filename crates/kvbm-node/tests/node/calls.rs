//! Calls of a scheduler beyond looking up and loading: points that copies wait for, deadlines,
//! namespaces, and a daemon that does not answer.

use crate::support::{Daemon, PATIENCE, TestEngine, blocks, config, layout, sequence, socket, terms};
use kvbm::device::Event;
use kvbm::storage::{BoundLayout, SystemAllocator};
use kvbm::{LookUp, Namespace, Rank, Tier, TokenSequence};
use kvbm_node::{EngineTerms, LineTimes, MoverMemory, NodeEngine, NodeError, NodeStatus};
use std::time::{Duration, Instant};

/// Engines of two ranks whose scheduler and movers are objects of their own, as processes are.
struct Parts {
    scheduler: NodeEngine,
    movers: Vec<NodeEngine>,
    memory: Vec<BoundLayout>,
}

impl Parts {
    fn attach(socket: &std::path::Path) -> Self {
        let scheduler = NodeEngine::attach(terms(socket, "parts", 16, 2), true, Vec::new()).unwrap();
        let allocate = |_| BoundLayout::allocate(layout(16, 1), &SystemAllocator::default()).unwrap();
        let memory: Vec<_> = (0..2).map(allocate).collect();
        let mover = |rank: u16| {
            let g1 = memory[usize::from(rank)].clone();
            let memory = MoverMemory { rank: Rank(rank), device: None, g1: vec![g1] };
            NodeEngine::attach(terms(socket, "parts", 16, 2), false, vec![memory]).unwrap()
        };
        let movers = (0..2).map(mover).collect();
        assert!(scheduler.wait_ready(PATIENCE), "{:?}", scheduler.status());
        Self { scheduler, movers, memory }
    }

    fn signal(&self, rank: usize, number: u64) {
        self.movers[rank].signal(number, &Event::complete());
    }

    fn fill(&self, rank: usize, block: u32, byte: u8) {
        let memory = &self.memory[rank];
        // SAFETY: no copy touches the block: it waits.
        unsafe { memory.write_block(block, &vec![byte; memory.bytes_per_block() as usize]) }.unwrap();
    }

    fn holds(&self, rank: usize, block: u32, byte: u8) -> bool {
        let mut found = vec![0; self.memory[rank].bytes_per_block() as usize];
        // SAFETY: no copy writes the block: its load is over, or waits.
        unsafe { self.memory[rank].read_block(block, &mut found) }.unwrap();
        found.iter().all(|it| *it == byte)
    }

    fn found(&self, tokens: &TokenSequence) -> usize {
        let found = self.scheduler.look_up("count", tokens, 0).unwrap();
        self.scheduler.abandon("count").unwrap();
        let LookUp::Ready { blocks, .. } = found else { panic!("there are no volumes") };
        blocks
    }
}

#[test]
fn copies_wait_until_every_rank_has_passed_their_point() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(2, "[host]\ncapacity = \"16 blocks\"\n"));
    let daemon = Daemon::start(&socket, &config);
    let parts = Parts::attach(&socket);
    let tokens = sequence(&config, 1, 2);
    let started = parts.scheduler.offload_after(&blocks(&[3, 4]), &tokens, 0, Some(1)).unwrap();
    assert_eq!(started.started, 2);
    // Now the engine computes; one rank is slower.
    for rank in 0..2 {
        parts.fill(rank, 3, 10 + rank as u8);
        parts.fill(rank, 4, 20 + rank as u8);
    }
    parts.signal(0, 1);
    assert!(!parts.scheduler.wait_offloads(Duration::from_millis(50)).unwrap());
    parts.signal(1, 1);
    assert!(parts.scheduler.wait_offloads(PATIENCE).unwrap());
    assert_eq!(parts.found(&tokens), 2);
    // A load overwrites its blocks when no rank reads them any more. A later point passes it too.
    parts.scheduler.look_up("r", &tokens, 0).unwrap();
    parts.scheduler.commit_with("r", &blocks(&[7, 8]), Some(2), None).unwrap();
    parts.signal(0, 3);
    std::thread::sleep(Duration::from_millis(50));
    assert!(parts.scheduler.finished().is_empty() && parts.holds(1, 7, 0));
    parts.signal(1, 3);
    let until = Instant::now() + PATIENCE;
    let load = loop {
        if let Some(load) = parts.scheduler.finished().pop() {
            break load;
        }
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!((load.arrived, load.failures.len()), (2, 0), "{load:?}");
    assert!(
        (0..2).all(|rank| parts.holds(rank, 7, 10 + rank as u8) && parts.holds(rank, 8, 20 + rank as u8))
    );
    // A daemon that is new hears of the points that were passed before.
    drop(daemon);
    let _daemon = Daemon::start(&socket, &config);
    let until = Instant::now() + PATIENCE;
    while parts.scheduler.offload_after(&blocks(&[3, 4]), &tokens, 0, Some(3)).unwrap_or_default().started < 2
    {
        assert!(Instant::now() < until, "{:?}", parts.scheduler.status());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(parts.scheduler.wait_offloads(PATIENCE).unwrap());
    assert_eq!(parts.found(&tokens), 2);
    // What waits for a point that nobody passes ends with the engine.
    let other = sequence(&config, 2, 2);
    assert_eq!(parts.scheduler.offload_after(&blocks(&[5, 6]), &other, 0, Some(9)).unwrap().started, 2);
    assert_eq!(parts.scheduler.busy(&blocks(&[4, 5, 6])).unwrap(), blocks(&[5, 6]));
}

#[test]
fn a_load_ends_at_its_deadline_with_what_has_arrived() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"16 blocks\"\n"));
    let _daemon = Daemon::start(&socket, &config);
    let engine = TestEngine::attach(&socket, "engine", 16, 1);
    let tokens = sequence(&config, 1, 4);
    engine.save(&tokens, &[0, 1, 2, 3]);
    engine.node.look_up("r", &tokens, 0).unwrap();
    // Nobody ever passes this point.
    let (ids, begun) = (blocks(&[4, 5, 6, 7]), Instant::now());
    engine.node.commit_with("r", &ids, Some(1), Some(Duration::from_millis(100))).unwrap();
    let load = engine.wait_for("r");
    assert_eq!((load.arrived, load.wanted), (0, 4), "{load:?}");
    assert!(begun.elapsed() >= Duration::from_millis(90), "{:?}", begun.elapsed());
    assert_eq!(engine.node.before_reuse(&ids, Instant::now() + PATIENCE), Ok(()));
}

#[test]
fn several_namespaces_share_a_daemon_and_one_is_forgotten_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"32 blocks\"\n"));
    let daemon = Daemon::start(&socket, &config);
    let engine = TestEngine::attach(&socket, "engine", 16, 1);
    let own = sequence(&config, 1, 4);
    let namespace: Namespace = config.namespace().adapter("an adapter");
    let tokens: Vec<u32> = (0..16).map(|at| at ^ (1 << 16)).collect();
    let adapted = TokenSequence::from_tokens(namespace.hasher().unwrap(), &tokens);
    engine.save(&own, &[0, 1, 2, 3]);
    assert_eq!(engine.found("r", &adapted), 0, "the same tokens, another namespace");
    engine.save(&adapted, &[4, 5, 6, 7]);
    assert_eq!(engine.load("r", &adapted, &[8, 9, 10, 11]).arrived, 4);
    assert!(engine.holds(&adapted, 0, &[8, 9, 10, 11]));
    assert_eq!(engine.node.forget(namespace.tag()), Ok(4));
    assert_eq!((engine.found("r", &adapted), engine.found("r", &own)), (0, 4));
    assert_eq!(daemon.server.manager().status().tiers[Tier::G2.index()].inactive, 4);
    assert_eq!(engine.node.prefetch(&own), Ok(0), "host memory has all of it");
    engine.node.prefilled(1000, Duration::from_millis(10));
    assert!(matches!(engine.node.busy(&blocks(&[16])), Err(NodeError::Refused(why)) if why.contains("16")));
}

#[test]
fn a_daemon_that_does_not_answer_is_waited_for_once() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, config) = (socket(&folder), config(1, "[host]\ncapacity = \"16 blocks\"\n"));
    let daemon = Daemon::start(&socket, &config);
    let memory = BoundLayout::allocate(layout(16, 2), &SystemAllocator::default()).unwrap();
    let mover = MoverMemory { rank: Rank(0), device: None, g1: vec![memory] };
    // No answer comes in no time.
    let call_time = Duration::ZERO;
    let terms = EngineTerms { call_time, times: LineTimes::default(), ..terms(&socket, "e", 16, 1) };
    let engine = NodeEngine::attach(terms, true, vec![mover]).unwrap();
    assert!(engine.wait_ready(PATIENCE), "{:?}", engine.status());
    let tokens = sequence(&config, 1, 4);
    let nothing = LookUp::Ready { blocks: 0, by_tier: [0; 4] };
    for _ in 0..3 {
        assert_eq!(engine.look_up("r", &tokens, 0).unwrap(), nothing);
        assert_eq!(engine.offload(&blocks(&[0]), &tokens, 0).unwrap().present, 0);
    }
    let NodeStatus::Attached { number: before, .. } = engine.status() else {
        panic!("{:?}", engine.status())
    };
    // The engine overwrites blocks, and the daemon may not know: the engine detaches first.
    let released = engine.released(&blocks(&[0, 1]));
    assert!(matches!(&released, Ok(busy) if busy.is_empty()), "{released:?}");
    // It comes back by itself. It may be detached for less time than a look takes.
    let until = Instant::now() + PATIENCE;
    while !matches!(engine.status(), NodeStatus::Attached { ready: true, number, .. } if number > before) {
        assert!(Instant::now() < until, "{:?}", engine.status());
        std::thread::yield_now();
    }
    assert_eq!(daemon.server.engines().len(), 1);
}
