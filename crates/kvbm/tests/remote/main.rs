//! Memory of other nodes: blocks that a peer has are found, read, verified and kept; a peer that
//! fails, hangs or is gone is a miss in time.
#![cfg(feature = "worker")]
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod discovery;
mod engines;
mod faults;
mod groups;
mod many;
#[cfg(feature = "nats")]
#[path = "../../../kvbm-events/tests/support/nats_server.rs"]
mod nats_server;
#[cfg(feature = "nats")]
#[path = "../../../kvbm-events/tests/support/ports.rs"]
mod ports;
mod pushes;
mod ratio;
#[path = "../support/mod.rs"]
mod support;
mod world;

use crate::support::store::{onboard, put};
use crate::support::{model, model_of, namespace, serve, soon, tokens};
use crate::world::{World, eventually, meet};
use kvbm::config::{Blocks, Config, ModelConfig, Secret};
use kvbm::plan::NodeId;
use kvbm::{BuildError, KvBlockManager, Owned, Tier};
use std::time::Duration;

#[test]
fn what_a_peer_has_is_found_read_and_kept() {
    let world = World::new();
    let [a, b] = [1, 2].map(|id| world.node(id, [32, 64], |_| {}));
    meet(&[&a.manager, &b.manager]);
    put(&a.manager, &tokens(&a.manager, 1, 10));
    let sequence = tokens(&b.manager, 1, 12);

    let places = b.manager.look_up(&sequence);
    assert_eq!(places.len(), 10);
    assert!(places.iter().all(|place| place.node == Some(NodeId(1)) && place.nearest().is_none()));
    let prefix = b.manager.match_prefix(&sequence);
    assert_eq!((prefix.len(), prefix.node(), prefix.volume()), (10, Some(NodeId(1)), None));
    drop(prefix);
    assert_eq!(onboard(&b.manager, &sequence), 10, "every byte is compared");
    let peer = b.manager.metrics().peer(NodeId(1));
    assert_eq!((peer.hits.get(), peer.blocks.get(), peer.failed.get()), (10, 10, 0));
    assert_eq!(peer.bytes.get(), 10 * 8192);
    assert_eq!(b.manager.metrics().tier(Tier::G2).hits.get(), 0, "a hit counts once");

    // It is here now, in both tiers, and nobody is asked.
    let prefix = b.manager.match_prefix(&tokens(&b.manager, 1, 10));
    assert_eq!((prefix.node(), prefix.count(Tier::G1)), (None, 10));
    assert!(b.manager.look_up(&sequence).iter().all(|place| place.contains(Tier::G2)));
    eventually("no lease is left", || a.manager.metrics().remote.leases_held.get() == 0);
    assert_eq!(a.manager.metrics().remote.leases_granted.get(), 1);
    let text = b.manager.metrics().encode();
    assert!(text.contains("kvbm_remote_hit_blocks_total{peer=\"1\"} 10"), "{text}");
}

#[test]
fn a_prefix_goes_on_at_a_peer_where_ours_ends() {
    let world = World::new();
    let [a, b] = [1, 2].map(|id| world.node(id, [32, 64], |_| {}));
    meet(&[&a.manager, &b.manager]);
    put(&a.manager, &tokens(&a.manager, 1, 12));
    put(&b.manager, &tokens(&b.manager, 1, 5));
    let sequence = tokens(&b.manager, 1, 12);
    let prefix = b.manager.match_prefix(&sequence);
    assert_eq!((prefix.count(Tier::G1), prefix.count(Tier::G4), prefix.len()), (5, 7, 12));
    drop(prefix);
    assert_eq!(onboard(&b.manager, &sequence), 12);
    assert_eq!(b.manager.metrics().peer(NodeId(1)).blocks.get(), 7, "no more than is missing");
    // What is on G1 alone has no parent on G2: it comes along.
    let other = tokens(&b.manager, 1, 12);
    b.manager.clear(Tier::G2).unwrap();
    b.manager.clear(Tier::G1).unwrap();
    assert_eq!(serve(&b.manager, &other), 12);
}

#[test]
fn requests_for_one_prefix_read_it_once() {
    let world = World::new();
    let [a, b] = [1, 2].map(|id| world.node(id, [64, 64], |_| {}));
    meet(&[&a.manager, &b.manager]);
    put(&a.manager, &tokens(&a.manager, 1, 20));
    let sequence = tokens(&b.manager, 1, 20);
    let prefixes: Vec<_> = (0..4).map(|_| b.manager.match_prefix(&sequence)).collect();
    assert!(prefixes.iter().all(|prefix| prefix.node().is_some()));
    let loads: Vec<_> = prefixes.into_iter().map(|prefix| b.manager.onboard(prefix)).collect();
    for load in loads {
        assert_eq!(load.wait().unwrap().len(), 20);
    }
    assert_eq!(b.manager.metrics().peer(NodeId(1)).blocks.get(), 20);
}

#[test]
fn a_block_that_is_read_is_not_evicted_and_a_dead_reader_loses_its_lease() {
    use kvbm::remote_memory::AgentFault;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    let world = World::new();
    let lease = |config: &mut Config| {
        config.remote.lease = Duration::from_millis(500);
        config.remote.read_deadline = Duration::from_secs(20);
    };
    let [a, b] = [1, 2].map(|id| world.node(id, [16, 16], lease));
    meet(&[&a.manager, &b.manager]);
    let wanted = tokens(&a.manager, 1, 8);
    put(&a.manager, &wanted);
    a.manager.clear(Tier::G1).unwrap();
    let release = Arc::new(AtomicBool::new(false));
    a.agent.inner.set_fault(Some(AgentFault::Hang { release: Arc::clone(&release) }));
    let load = b.manager.onboard(b.manager.match_prefix(&tokens(&b.manager, 1, 8)));
    let held = || a.manager.metrics().remote.leases_held.get();
    eventually("the lease is granted", || held() == 1);

    // The reader renews its lease; others need the room.
    std::thread::sleep(Duration::from_millis(1200));
    for start in 2..8 {
        put(&a.manager, &tokens(&a.manager, start, 8));
    }
    let on_host = || a.manager.look_up(&wanted).iter().filter(|place| place.contains(Tier::G2)).count();
    assert_eq!((held(), on_host()), (1, 8), "what is read stays");

    // The reader stops: it neither renews nor releases.
    b.agent.is_mute.store(true, Ordering::Release);
    release.store(true, Ordering::Release);
    drop(load);
    eventually("the lease ends", || held() == 0);
    a.agent.inner.set_fault(None);
    for start in 2..8 {
        put(&a.manager, &tokens(&a.manager, start, 8));
    }
    assert!(on_host() < 8, "then it may go");
}

#[test]
fn peers_may_have_another_number_of_ranks() {
    use crate::support::heads;
    // Of the four heads two ranks of eight hold each; every rank holds the one latent of MLA.
    let mla = ModelConfig { num_kv_heads: 1, outer_dim: 1, head_dim: 64, ..heads::model() };
    let ranks = [(1, 2), (4, 2), (2, 4), (4, 1), (8, 4), (2, 8)].map(|ranks| (heads::model(), ranks));
    let of_mla = [(1, 4), (4, 2)].map(|ranks| (mla.clone(), ranks));
    for (model, (theirs, ours)) in ranks.into_iter().chain(of_mla) {
        let world = World::new();
        let node = |id, ranks| {
            world.node(id, [32, 32], |config| {
                config.model = model.clone();
                config.parallelism.tensor_parallel = ranks;
            })
        };
        let (a, b) = (node(1, theirs), node(2, ours));
        meet(&[&a.manager, &b.manager]);
        assert_eq!(heads::serve(&a.manager, &tokens(&a.manager, 1, 6)), 0);
        let found = heads::serve(&b.manager, &tokens(&b.manager, 1, 6));
        assert_eq!(found, 6, "{theirs} ranks to {ours}: every byte is compared");
        assert_eq!(b.manager.metrics().peer(NodeId(1)).blocks.get(), 6);
    }
}

/// Mutation that makes it fail: `volumes.lossy` does not enter the namespace.
#[cfg(feature = "compress")]
#[test]
fn exact_and_lossy_nodes_find_nothing_of_each_other() {
    use kvbm::config::VolumeLossy;

    let world = World::new();
    let lossy = |config: &mut Config| config.volumes.lossy = VolumeLossy::Int8;
    let [a, b] = [1, 2].map(|id| world.node(id, [32, 64], lossy).manager);
    let [c, d] = [3, 4].map(|id| world.node(id, [32, 64], |_| {}).manager);
    put(&a, &tokens(&a, 1, 10));
    put(&c, &tokens(&c, 2, 10));
    let found =
        |manager: &KvBlockManager<Owned>, start| manager.match_prefix(&tokens(manager, start, 10)).len();
    eventually("nodes of one kind find each other", || (found(&b, 1), found(&d, 2)) == (10, 10));
    assert_eq!([found(&b, 2), found(&c, 1), found(&d, 1)], [0, 0, 0]);
}

#[test]
fn nodes_that_come_and_go_are_noticed() {
    let world = World::new();
    let a = world.node(1, [16, 16], |_| {});
    let b = world.node(2, [16, 16], |_| {});
    meet(&[&a.manager, &b.manager]);
    put(&b.manager, &tokens(&b.manager, 1, 4));
    assert_eq!(a.manager.match_prefix(&tokens(&a.manager, 1, 4)).len(), 4);
    drop(b);
    eventually("it is gone", || a.manager.peers().is_empty());
    assert_eq!(a.manager.match_prefix(&tokens(&a.manager, 1, 4)).len(), 0);
    // The same node again: a larger epoch, and nothing in its memory.
    let b = world.node(2, [16, 16], |_| {});
    meet(&[&a.manager, &b.manager]);
    assert_eq!(a.manager.match_prefix(&tokens(&a.manager, 1, 4)).len(), 0);
    put(&b.manager, &tokens(&b.manager, 2, 4));
    assert_eq!(onboard(&a.manager, &tokens(&a.manager, 2, 4)), 4);
}

/// Changes a configuration.
type Change = fn(&mut Config);

#[test]
fn what_cannot_be_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let build = |configure: &dyn Fn(&mut Config)| {
        KvBlockManager::<Owned>::builder()
            .model(model())
            .namespace(namespace())
            .device(Blocks(4))
            .host(Blocks(4))
            .configure(|config| {
                world::enable(config, 1, &folder.path().join("peers"));
                configure(config);
            })
    };
    let refused =
        |configure: &dyn Fn(&mut Config)| build(configure).build().map(drop).unwrap_err().to_string();
    let rules: [(&str, Change); 13] = [
        ("one of the two", |config| config.remote.url = Some(Secret::new("nats://h"))),
        ("namespace.deployment_secret", |config| {
            (config.remote.directory, config.remote.url) =
                (None, Some(Secret::new("nats://u:p@10.0.0.1:4222")));
        }),
        ("remote.url", |config| {
            (config.remote.directory, config.remote.url) = (None, Some(Secret::new("zmq+tcp://u:p@h:1")));
        }),
        ("remote.node", |config| config.remote.node = 0),
        ("remote.directory", |config| config.remote.directory = None),
        ("remote.lease", |config| config.remote.lease = Duration::ZERO),
        ("remote.read_deadline", |config| config.remote.read_deadline = Duration::ZERO),
        ("remote.per_peer", |config| config.remote.per_peer = 9),
        ("remote.library", |config| config.remote.library = Some("libnixl_capi.so".into())),
        ("remote.progress_delay", |config| config.remote.progress_delay = Duration::from_secs(1)),
        ("remote.ucx", |config| config.remote.ucx = [("ucx_devices", "mlx5_0")].into_iter().collect()),
        ("host.capacity", |config| config.host.capacity = Blocks(0).into()),
        ("must be at most 8 with remote.enabled and 32 cache groups", |config| {
            config.model = model_of(&["full layers=1 heads=16 head_dim=8"; 32].join(", "));
            config.device.layout = kvbm::config::LayoutKind::FullyContiguous;
            config.parallelism.tensor_parallel = 16;
        }),
    ];
    for (expected, configure) in rules {
        let error = refused(&configure);
        assert!(error.contains(expected), "{error}");
    }
    if !cfg!(feature = "nixl") {
        let error = refused(&|_| {});
        assert!(error.starts_with("remote.agent: ") && error.contains("nixl"), "{error}");
    }
    let error = build(&|_| {}).build_metadata_only().map(drop).unwrap_err();
    assert!(
        matches!(error, BuildError::Config(_)) && error.to_string().contains("remote.enabled"),
        "{error}"
    );
    // The agent of one process needs nothing else.
    let in_process = |config: &mut Config| {
        config.remote.agent = kvbm::config::RemoteAgentKind::InProcess;
    };
    let manager = build(&in_process).build().unwrap();
    put(&manager, &tokens(&manager, 1, 2));
    assert!(manager.peers().is_empty() && manager.wait_offloads(soon()));
}
