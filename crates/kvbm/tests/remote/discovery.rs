//! Nodes that find each other on a NATS server: `KVBM_NATS_SERVER` names its program; without it
//! these tests say so and pass.
#![cfg(feature = "nats")]

use crate::nats_server::NatsServer;
use crate::support::store::{onboard, put};
use crate::support::tokens;
use crate::world::{World, eventually, meet};
use kvbm::config::{Config, Secret};
use kvbm::plan::NodeId;
use std::time::{Duration, Instant};

fn at(server: &NatsServer) -> impl Fn(&mut Config) + use<> {
    let url = format!("nats://127.0.0.1:{}?bucket=test", server.port());
    move |config: &mut Config| {
        (config.remote.directory, config.remote.url) = (None, Some(Secret::new(url.as_str())));
    }
}

#[test]
fn nodes_find_each_other_on_a_server_and_leave() {
    let Some(mut server) = NatsServer::start(&[]) else { return };
    let world = World::new();
    let there = at(&server);
    let [a, b] = [1, 2].map(|id| world.node(id, [32, 64], &there));
    meet(&[&a.manager, &b.manager]);
    put(&a.manager, &tokens(&a.manager, 1, 10));
    let sequence = tokens(&b.manager, 1, 12);
    assert_eq!(b.manager.match_prefix(&sequence).node(), Some(NodeId(1)));
    assert_eq!(onboard(&b.manager, &sequence), 10, "every byte is compared");
    assert!(!world.folder.path().join("peers").exists(), "no folder is needed");

    // Peers stay while the server is away, and are read from.
    server.kill();
    put(&a.manager, &tokens(&a.manager, 2, 6));
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(onboard(&b.manager, &tokens(&b.manager, 2, 6)), 6);
    server.restart();

    let c = world.node(3, [32, 64], &there);
    meet(&[&a.manager, &b.manager, &c.manager]);
    drop(a);
    eventually("who leaves is forgotten", || b.manager.peers().len() == 1);
    assert_eq!(b.manager.peers()[0].node, NodeId(3));
    // The same node again, in another life.
    let a = world.node_as(1, "node-1-again", [32, 64], &there);
    meet(&[&a.manager, &b.manager, &c.manager]);
}

/// Mutation that makes it fail: both renew their announcements.
#[test]
fn two_nodes_of_one_number_do_not_confuse_the_others() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let (world, there) = (World::new(), at(&server));
    let [first, other] = [1, 2].map(|id| world.node(id, [32, 64], &there));
    meet(&[&first.manager, &other.manager]);
    let second = world.node_as(1, "node-1-again", [32, 64], &there);
    meet(&[&second.manager, &other.manager]);
    put(&second.manager, &tokens(&second.manager, 1, 4));
    // Longer than a renewal: the first one leaves the number to the second.
    let until = Instant::now() + Duration::from_secs(6);
    while Instant::now() < until {
        assert_eq!(other.manager.peers().len(), 1, "the peer comes and goes");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(onboard(&other.manager, &tokens(&other.manager, 1, 4)), 4, "it is the second one");
}

#[test]
fn a_server_that_cannot_be_reached_is_named_without_the_password() {
    let world = World::new();
    let error = world.try_node(1, |config| {
        config.remote.directory = None;
        config.remote.url = Some(Secret::new("nats://user:word@127.0.0.1:9"));
    });
    let error = error.err().unwrap().to_string();
    assert!(error.starts_with("remote.url: ") && error.contains("127.0.0.1:9"), "{error}");
    assert!(!error.contains("word"), "{error}");
}
