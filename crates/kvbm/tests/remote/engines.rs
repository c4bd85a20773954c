//! Blocks of a peer in the hands of an engine that owns G1.

use crate::support::host::layer_separate;
use crate::support::store::put;
use crate::support::{holds, model, namespace, soon, tokens, unlimited};
use crate::world::{World, enable, eventually, meet};
use kvbm::config::Blocks;
use kvbm::plan::NodeId;
use kvbm::remote_memory::{AgentFault, RemoteAgent};
use kvbm::storage::{BoundLayout, SystemAllocator};
use kvbm::{BlockId, Engine, KvBlockManager, LookUp, Owned, TokenSequence};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const G1: u32 = 32;

fn engine(world: &World, id: u32) -> KvBlockManager<Engine> {
    let model = model();
    let bound = BoundLayout::allocate(layer_separate(&model, G1), &SystemAllocator::default()).unwrap();
    let agent = world.agent(&format!("engine-{id}")) as Arc<dyn RemoteAgent>;
    let builder = KvBlockManager::<Owned>::builder().model(model).namespace(namespace());
    let builder = builder.engine_host(vec![bound]).host(Blocks(64)).remote_agent(agent);
    let folder = world.folder.path().join("peers");
    let configured = builder.configure(|config| {
        unlimited(config);
        enable(config, id, &folder);
        config.remote.read_deadline = Duration::from_secs(2);
    });
    configured.build().unwrap()
}

fn sequence(manager: &KvBlockManager<Engine>, start: u32, blocks: u32) -> TokenSequence {
    let prompt: Vec<u32> =
        (0..blocks * 16).map(|token| token.wrapping_add(start.wrapping_mul(1_000_000))).collect();
    manager.sequence(&prompt, b"").unwrap()
}

#[test]
fn an_engines_load_begins_when_the_blocks_have_come() {
    let world = World::new();
    let a = world.node(1, [32, 64], |_| {});
    let b = engine(&world, 2);
    eventually("they meet", || a.manager.peers().len() == 1 && b.peers().len() == 1);
    put(&a.manager, &tokens(&a.manager, 1, 6));
    let tokens = sequence(&b, 1, 8);
    let prefix = b.match_prefix(&tokens);
    assert_eq!((prefix.len(), prefix.node()), (6, Some(NodeId(1))));
    let ids = [7, 3, 30, 0, 11, 5].map(BlockId);
    let load = b.onboard(prefix, &ids, None).unwrap();
    assert_eq!(load.wait().unwrap(), 6);
    assert!(ids.iter().zip(tokens.hashes()).all(|(&id, &hash)| holds(&b, id, hash)));
    assert!(b.busy(&ids).unwrap().is_empty());
    assert_eq!(b.metrics().peer(NodeId(1)).hits.get(), 6);
    assert!(b.look_up(&tokens).iter().all(|place| place.contains(kvbm::Tier::G2)));
}

#[test]
fn a_ticket_asks_peers_in_the_background() {
    let world = World::new();
    let a = world.node(1, [32, 64], |_| {});
    let b = engine(&world, 2);
    eventually("they meet", || a.manager.peers().len() == 1 && b.peers().len() == 1);
    put(&a.manager, &tokens(&a.manager, 1, 6));
    let tokens = sequence(&b, 1, 8);
    let tickets = b.tickets();
    let answer = || tickets.look_up("r", &tokens, 0).unwrap();
    assert_eq!(answer(), LookUp::Pending);
    eventually("an answer", || answer() != LookUp::Pending);
    assert_eq!(answer(), LookUp::Ready { blocks: 6, by_tier: [0, 0, 0, 6] });
    let ids = [1, 2, 3, 4, 5, 6].map(BlockId);
    tickets.commit("r", &ids, None).unwrap();
    let mut finished = Vec::new();
    eventually("the load ends", || {
        finished.extend(tickets.finished());
        !finished.is_empty()
    });
    assert_eq!((finished[0].arrived, finished[0].wanted), (6, 6), "{finished:?}");
    assert!(ids.iter().zip(tokens.hashes()).all(|(&id, &hash)| holds(&b, id, hash)));
}

#[test]
fn a_load_of_an_engine_ends_in_time_whatever_the_peer_does() {
    let world = World::new();
    let a = world.node(1, [32, 64], |_| {});
    let b = engine(&world, 2);
    eventually("they meet", || a.manager.peers().len() == 1 && b.peers().len() == 1);
    put(&a.manager, &tokens(&a.manager, 1, 6));
    let tokens = sequence(&b, 1, 6);
    let ids = [1, 2, 3, 4, 5, 6].map(BlockId);
    let release = Arc::new(AtomicBool::new(false));
    a.agent.inner.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));

    // Given up: the engine has its blocks back at once.
    let mut load = b.onboard(b.match_prefix(&tokens), &ids, None).unwrap();
    assert_eq!(b.busy(&ids).unwrap().len(), 6, "the load has them");
    assert!(!load.is_done() && !load.layer_ready(0));
    load.cancel();
    let began = Instant::now();
    assert!(load.is_done());
    assert_eq!(load.wait().unwrap_err().arrived, 0);
    assert!(began.elapsed() < Duration::from_secs(1));
    b.before_reuse(&ids, soon()).unwrap();

    // Waited for: a miss at the deadline.
    let prefix = b.match_prefix(&tokens);
    let error = b.onboard(prefix, &ids, None).unwrap().wait().unwrap_err();
    assert_eq!((error.arrived, error.wanted, error.busy.len()), (0, 6, 0), "{error}");
    assert_eq!(error.failures.len(), 6);
    release.store(true, Ordering::Release);
    a.agent.inner.set_fault(None);
    let again = || b.onboard(b.match_prefix(&tokens), &ids[..b.match_prefix(&tokens).len()], None);
    eventually("it is read again", || again().unwrap().wait() == Ok(6));
    assert!(ids.iter().zip(tokens.hashes()).all(|(&id, &hash)| holds(&b, id, hash)));
    // Two managers of one process have met; both end in any order.
    drop(a);
    meet::<Engine>(&[&b]);
}
