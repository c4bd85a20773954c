//! Blocks that a node writes into the host memory of a peer.

use crate::support::store::{onboard, put};
use crate::support::{soon, tokens};
use crate::world::{Node, World, eventually, meet};
use kvbm::config::Config;
use kvbm::plan::NodeId;
use kvbm::remote_memory::AgentFault;
use kvbm::{FailureKind, Pushed, Tier};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const LEASE: Duration = Duration::from_millis(300);

/// A node that prefills, and one that decodes.
fn nodes(world: &World, configure: impl Fn(&mut Config)) -> [Node; 2] {
    let nodes = [1, 2].map(|id| {
        world.node(id, [64, 64], |config| {
            config.remote.lease = LEASE;
            configure(config);
        })
    });
    meet(&[&nodes[0].manager, &nodes[1].manager]);
    nodes
}

fn whole(written: usize) -> Pushed {
    Pushed { written, failure: None }
}

#[test]
fn what_is_pushed_is_there_before_anybody_asks() {
    let world = World::new();
    let [prefill, decode] = nodes(&world, |_| {});
    let sequence = tokens(&prefill.manager, 1, 12);
    put(&prefill.manager, &sequence);
    assert_eq!(prefill.manager.push(NodeId(2), &sequence, soon()), whole(12));
    eventually("the grant ends", || decode.manager.metrics().remote.slots_granted.get() == 0);
    assert_eq!(decode.manager.metrics().remote.received.get(), 12);
    let counters = prefill.manager.metrics().peer(NodeId(2));
    assert_eq!((counters.pushed.get(), counters.pushed_bytes.get()), (12, 12 * 8192));
    assert_eq!(prefill.manager.push(NodeId(2), &sequence, soon()), whole(0), "it has all");

    // The writer is gone, and nobody can be asked.
    drop(prefill);
    eventually("the peer is gone", || decode.manager.peers().is_empty());
    let places = decode.manager.look_up(&tokens(&decode.manager, 1, 12));
    assert!(
        places.len() == 12 && places.iter().all(|place| place.contains(Tier::G2) && place.node.is_none())
    );
    assert_eq!(onboard(&decode.manager, &tokens(&decode.manager, 1, 12)), 12, "every byte is compared");
}

#[test]
fn a_push_goes_on_where_the_receiver_ends_and_ranks_may_differ() {
    let world = World::new();
    let prefill = world.node(1, [64, 64], |config| config.parallelism.tensor_parallel = 2);
    let decode = world.node(2, [64, 64], |_| {});
    meet(&[&prefill.manager, &decode.manager]);
    let sequence = tokens(&prefill.manager, 1, 10);
    put(&prefill.manager, &tokens(&prefill.manager, 1, 4));
    assert_eq!(prefill.manager.push(NodeId(2), &sequence, soon()), whole(4), "as much as there is");
    put(&prefill.manager, &sequence);
    assert_eq!(prefill.manager.push(NodeId(2), &sequence, soon()), whole(6));
    // A block of one rank is told from those of two by its bytes, so they come back to be compared.
    prefill.manager.clear(Tier::G1).unwrap();
    prefill.manager.clear(Tier::G2).unwrap();
    assert_eq!(decode.manager.push(NodeId(1), &tokens(&decode.manager, 1, 10), soon()), whole(10));
    assert_eq!(onboard(&prefill.manager, &sequence), 10, "every byte is compared");
}

#[test]
fn who_cannot_push_or_take_says_why() {
    let world = World::new();
    let [prefill, decode] = nodes(&world, |_| {});
    let sequence = tokens(&prefill.manager, 1, 12);
    let kind = |pushed: Pushed| (pushed.written, pushed.failure.map(|failure| failure.kind));
    let push = |node| kind(prefill.manager.push(NodeId(node), &sequence, soon()));
    assert_eq!(push(2), (0, Some(FailureKind::Missing)), "nothing is in host memory");
    put(&prefill.manager, &sequence);
    assert_eq!(push(9), (0, Some(FailureKind::Missing)), "nobody has this number");

    // All of the receiver's host memory is in use.
    let full = tokens(&decode.manager, 2, 64);
    put(&decode.manager, &full);
    decode.manager.clear(Tier::G1).unwrap();
    let pinned = decode.manager.match_prefix(&full);
    assert_eq!(pinned.count(Tier::G2), 64);
    assert_eq!(push(2), (0, Some(FailureKind::Full)));
    drop(pinned);

    // One that hangs costs the time until the deadline.
    decode.agent.is_mute.store(true, Ordering::Release);
    let began = Instant::now();
    let pushed = prefill.manager.push(NodeId(2), &sequence, began + Duration::from_millis(200));
    assert_eq!(kind(pushed), (0, Some(FailureKind::Deadline)));
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// Mutation that makes it fail: slots are free when their grant is over.
#[test]
fn slots_of_a_late_write_are_used_for_nothing_else() {
    let world = World::new();
    let [prefill, decode] = nodes(&world, |_| {});
    let sequence = tokens(&prefill.manager, 1, 12);
    put(&prefill.manager, &sequence);
    let release = Arc::new(AtomicBool::new(false));
    decode.agent.inner.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));
    let deadline = Instant::now() + Duration::from_millis(50);
    let pushed = prefill.manager.push(NodeId(2), &sequence, deadline);
    assert!(pushed.written == 0 && pushed.failure.is_some());
    let quarantined = || decode.manager.metrics().remote.slots_quarantined.get();
    eventually("the grant is over", || quarantined() == 12);
    // All of G2 is wanted: these slots are not given.
    let other = tokens(&decode.manager, 2, 64);
    put(&decode.manager, &other);
    let there = |sequence: &kvbm::TokenSequence| {
        let places = decode.manager.look_up(sequence);
        places.iter().filter(|place| place.contains(Tier::G2)).count()
    };
    let used = there(&other);
    assert!((1..=64 - 12).contains(&used), "{used} of the others");
    assert_eq!(there(&tokens(&decode.manager, 1, 12)), 0, "nothing of it is served");
    std::thread::sleep(LEASE * 3);
    assert_eq!(quarantined(), 12);
    decode.agent.inner.set_fault(None);
    release.store(true, Ordering::Release);
    eventually("the write has ended", || quarantined() == 0);
    let all = tokens(&decode.manager, 3, 64);
    put(&decode.manager, &all);
    assert_eq!(there(&all), 64, "all slots can be used");
}
