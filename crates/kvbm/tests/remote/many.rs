//! More peers than one look-up asks, and files that dead owners have left.

use crate::support::store::{onboard, put};
use crate::support::tokens;
use crate::world::{World, eventually};
use kvbm::plan::{Epoch, NodeId};
use kvbm::remote_memory::{FileDirectory, NodeAnnouncement, NodeOptions, RemoteNode};
use std::sync::Arc;
use std::time::Duration;

/// A node without a manager, which has nothing.
fn bare(world: &World, id: u32) -> RemoteNode {
    let agent = Arc::new(world.network.agent(&format!("node-{id}")).unwrap());
    RemoteNode::start(agent, NodeOptions::new(NodeId(id), Epoch(1))).unwrap()
}

fn folder(world: &World) -> FileDirectory {
    FileDirectory::open(&world.folder.path().join("peers")).unwrap()
}

fn file(world: &World, node: u32) -> Vec<u8> {
    std::fs::read(folder(world).folder().join(NodeAnnouncement::name_of(NodeId(node)))).unwrap()
}

/// Mutation that makes it fail: the first 32 peers by number are asked.
#[test]
fn of_forty_nodes_the_last_one_is_found_too() {
    let world = World::new();
    let reader = world.node(1, [16, 16], |_| {});
    let holder = world.node(40, [64, 64], |_| {});
    let found = folder(&world).announcements().unwrap();
    let (_, readers) = found.iter().find(|(name, _)| name == "node-1.kvbm").unwrap();
    let others: Vec<RemoteNode> = (2..40).map(|id| bare(&world, id)).collect();
    for other in &others {
        other.import_remote_blockset(readers).unwrap();
        folder(&world).publish(&other.announcement().unwrap(), None).unwrap();
    }
    eventually("all are known", || reader.manager.peers().len() == 39);
    eventually("the reader is known", || holder.manager.peers().len() == 39);
    let starts = 1..=12;
    starts.clone().for_each(|start| put(&holder.manager, &tokens(&holder.manager, start, 4)));
    let has = |start| {
        let sequence = tokens(&reader.manager, start, 4);
        let places = reader.manager.look_up(&sequence);
        let there = places.iter().filter(|place| place.node == Some(NodeId(40))).count();
        // That it has blocks counts when they have come, and are verified.
        if there > 0 {
            assert_eq!(onboard(&reader.manager, &sequence), 4, "every byte is compared");
        }
        there
    };
    let found: Vec<usize> = starts.map(has).collect();
    let first = found.iter().position(|blocks| *blocks == 4).expect("one chain of twelve asks it");
    assert_eq!(found[first..], vec![4; 12 - first], "blocks of it came lately: {found:?}");
    assert!(first <= 2, "four of five chains ask it: {found:?}");
}

/// Mutation that makes it fail: the folder is read as `FileDirectory::announcements` gives it.
#[test]
fn a_dead_owners_file_is_forgotten_and_a_living_nodes_is_renewed() {
    let world = World::new();
    let node = world.node(1, [16, 16], |_| {});
    let dead = bare(&world, 9);
    let announcement = dead.announcement().unwrap().encode(None).unwrap();
    folder(&world).publish_for(NodeId(9), &announcement, 1, Duration::from_secs(2)).unwrap();
    eventually("it is announced", || node.manager.peers().len() == 1);
    let before = file(&world, 1);
    eventually("it is forgotten, although its file stays", || node.manager.peers().is_empty());
    assert!(folder(&world).announcements().unwrap().iter().any(|(name, _)| name == "node-9.kvbm"));
    eventually("our own file is renewed", || file(&world, 1) != before);
    let announced = |bytes: &[u8]| bytes[..bytes.len() - 12].to_vec();
    assert_eq!(announced(&file(&world, 1)), announced(&before), "nothing else of it has changed");
    // It was stopped, and goes on.
    folder(&world).publish_for(NodeId(9), &announcement, 2, Duration::from_secs(60)).unwrap();
    eventually("it is known again", || node.manager.peers().len() == 1);
}
