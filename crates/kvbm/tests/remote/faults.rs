//! Peers that fail, hang, lie or are gone.

use crate::support::store::{onboard, put};
use crate::support::{soon, tokens};
use crate::world::{Node, World, eventually, meet};
use kvbm::config::Config;
use kvbm::plan::NodeId;
use kvbm::remote_memory::AgentFault;
use kvbm::{CircuitState, FailureKind, Tier};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn three(world: &World, configure: impl Fn(&mut Config)) -> [Node; 3] {
    let nodes = [1, 2, 3].map(|id| world.node(id, [32, 64], &configure));
    meet(&nodes.each_ref().map(|node| &node.manager));
    nodes
}

#[test]
fn another_holder_is_read_where_one_fails_or_hangs() {
    for hangs in [false, true] {
        let world = World::new();
        let [a, b, c] = three(&world, |config| config.remote.read_deadline = Duration::from_secs(10));
        put(&a.manager, &tokens(&a.manager, 1, 8));
        put(&b.manager, &tokens(&b.manager, 1, 8));
        let release = Arc::new(AtomicBool::new(false));
        let fault = if hangs { AgentFault::Hang { release: Arc::clone(&release) } } else { AgentFault::Fail };
        // Whoever is asked first does not give them.
        let prefix = c.manager.match_prefix(&tokens(&c.manager, 1, 8));
        let first = prefix.node().unwrap();
        let bad = if first == NodeId(1) { &a } else { &b };
        bad.agent.inner.set_fault(Some(fault));
        let free = c.manager.status().tiers[1].free;
        let began = Instant::now();
        assert_eq!(c.manager.onboard(prefix).wait().unwrap().len(), 8);
        assert!(began.elapsed() < Duration::from_secs(9), "within the deadline");
        assert_eq!(onboard(&c.manager, &tokens(&c.manager, 1, 8)), 8, "every byte is compared");
        let metrics = c.manager.metrics();
        assert_eq!(metrics.peer(first).blocks.get(), 0);
        assert_eq!(metrics.peer(first).failed.get(), 8);
        let other = if first == NodeId(1) { NodeId(2) } else { NodeId(1) };
        assert_eq!(metrics.peer(other).blocks.get(), 8);
        let free_now = || c.manager.status().tiers[1].free;
        if hangs {
            assert_eq!(free - free_now(), 16, "the hardware may still write to the slots of the first try");
            release.store(true, Ordering::Release);
        }
        eventually("the slots are free when it is done", || free - free_now() == 8);
    }
}

#[test]
fn a_peer_that_hangs_is_a_miss_at_the_deadline() {
    let world = World::new();
    let [a, b] = [1, 2].map(|id| {
        world.node(id, [32, 32], |config| config.remote.read_deadline = Duration::from_millis(300))
    });
    meet(&[&a.manager, &b.manager]);
    put(&a.manager, &tokens(&a.manager, 1, 6));
    put(&b.manager, &tokens(&b.manager, 1, 2));
    let release = Arc::new(AtomicBool::new(false));
    a.agent.inner.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));
    let sequence = tokens(&b.manager, 1, 6);
    let began = Instant::now();
    let error = b.manager.onboard(b.manager.match_prefix(&sequence)).wait().unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!((error.arrived.len(), error.wanted), (2, 6), "what is here is served");
    assert_eq!(error.failures[0].failure.kind, FailureKind::Deadline, "{error}");
    drop(error);
    release.store(true, Ordering::Release);
    a.agent.inner.set_fault(None);
    eventually("its slots are free again", || b.manager.status().tiers[1].free == 30);
    eventually("and it is read again", || onboard(&b.manager, &sequence) == 6);
}

#[test]
fn a_peer_that_is_silent_is_left_alone_for_a_while() {
    let world = World::new();
    let [a, b] = [1, 2].map(|id| {
        world.node(id, [32, 32], |config| config.remote.lookup_deadline = Duration::from_millis(50))
    });
    meet(&[&a.manager, &b.manager]);
    put(&a.manager, &tokens(&a.manager, 1, 6));
    a.agent.is_mute.store(true, Ordering::Release);
    let sequence = tokens(&b.manager, 1, 6);
    let circuit = || b.manager.peers()[0].circuit;
    for _ in 0..2 {
        let began = Instant::now();
        assert_eq!(b.manager.match_prefix(&sequence).len(), 0);
        assert!(began.elapsed() < Duration::from_secs(2));
    }
    assert_eq!(circuit(), CircuitState::Open);
    assert!(b.manager.peers()[0].failure.is_some());
    assert_eq!(b.manager.metrics().peer(NodeId(1)).down.get(), 1);
    let began = Instant::now();
    assert_eq!(b.manager.match_prefix(&sequence).len(), 0);
    assert!(began.elapsed() < Duration::from_millis(40), "nobody is asked");
    a.agent.is_mute.store(false, Ordering::Release);
    eventually("it is asked again", || b.manager.match_prefix(&sequence).len() == 6);
    assert_eq!(circuit(), CircuitState::Closed);
    assert_eq!(onboard(&b.manager, &sequence), 6);
}

#[test]
fn invariant_5_wrong_bytes_in_a_peers_memory_are_not_served() {
    let world = World::new();
    let [a, b] = [1, 2].map(|id| world.node(id, [32, 32], |_| {}));
    meet(&[&a.manager, &b.manager]);
    let theirs = tokens(&a.manager, 1, 6);
    put(&a.manager, &theirs);
    let slots = a.manager.match_prefix(&theirs).into_parts();
    drop(slots);
    a.manager.clear(Tier::G1).unwrap();
    let slot = a.manager.match_prefix(&theirs).blocks()[3].block;
    let g2 = a.manager.workers().get(kvbm::Rank(0)).unwrap().g2().unwrap().clone();
    let mut bytes = vec![0; g2.bytes_per_block() as usize];
    // SAFETY: no transfer uses the block.
    unsafe { g2.read_block(slot.0, &mut bytes) }.unwrap();
    bytes[1234] ^= 1;
    // SAFETY: as above.
    unsafe { g2.write_block(slot.0, &bytes) }.unwrap();
    let sequence = tokens(&b.manager, 1, 6);
    let prefix = b.manager.match_prefix(&sequence);
    assert_eq!(prefix.len(), 6, "nobody knows yet");
    let error = b.manager.onboard(prefix).wait().unwrap_err();
    assert_eq!(error.arrived.len(), 3, "{error}");
    drop(error);
    assert_eq!(b.manager.match_prefix(&tokens(&b.manager, 1, 3)).count(Tier::G1), 3);
    assert!(b.manager.wait_offloads(soon()));
}
