//! An import is whole or nothing: whatever is refused, registry and agent know what they knew.

mod support;

use std::sync::Arc;

use kvbm_nixl::{
    AgentError, Export, InProcessAgent, InProcessNetwork, LocalRank, MAX_PEERS, NodeAnnouncement,
    NodeOptions, Publication, RegistryError, RemoteAgent, RemoteError, RemoteNode,
};
use kvbm_plan::{Epoch, GroupId, NamespaceTag, NodeId};

use support::{BLOCKS, content, fill, hash, hashes, nothing, soon};

const NAMESPACE: NamespaceTag = NamespaceTag::from_bytes([7; 16]);
const GROUP: GroupId = GroupId(0);

struct Side {
    node: RemoteNode,
    agent: Arc<InProcessAgent>,
    ranks: Vec<LocalRank>,
    export: Export,
}

fn side(network: &InProcessNetwork, id: u32) -> Side {
    let agent = Arc::new(network.agent(&format!("node-{id}")).expect("a name"));
    let node = RemoteNode::start(Arc::clone(&agent) as _, NodeOptions::new(NodeId(id), Epoch(1)));
    let node = node.expect("a node");
    let ranks = support::ranks(1, 8, false);
    let export = node.export_local_blockset(NAMESPACE, GROUP, ranks.clone()).expect("an export");
    Side { node, agent, ranks, export }
}

impl Side {
    fn announcement(&self) -> NodeAnnouncement {
        self.node.announcement().expect("an announcement")
    }

    fn import(&self, announcement: &NodeAnnouncement) -> Result<(), RemoteError> {
        let bytes = announcement.encode(None).expect("it has the form");
        self.node.import_remote_blockset(&bytes).map(|_| ())
    }

    /// Whether the agent reaches another one: it says whether it knows it.
    fn reaches(&self, agent: &str) -> bool {
        !matches!(self.agent.notify(agent, b"?"), Err(AgentError::UnknownPeer { .. }))
    }
}

/// An owner with published blocks and a reader, which know each other.
fn pair(network: &InProcessNetwork) -> (Side, Side, Publication) {
    let (owner, reader) = (side(network, 1), side(network, 2));
    let blocks: Vec<_> = (0..BLOCKS).map(|block| (hash(block), block)).collect();
    (0..BLOCKS).for_each(|block| fill(&owner.ranks[0], block, block as u8));
    // SAFETY: nobody writes the blocks any more.
    let publication = unsafe { owner.export.publish(&blocks, &nothing()) }.expect("published");
    reader.import(&owner.announcement()).expect("sound");
    owner.import(&reader.announcement()).expect("sound");
    (owner, reader, publication)
}

/// Every block of the owner can be read, over what the reader knows of it now.
fn reads_all(reader: &Side, owner: &Side) {
    let known: Vec<_> = reader.node.peers().iter().map(|peer| (**peer).clone()).collect();
    assert_eq!(known, [owner.announcement()], "nothing else is known");
    let plans = reader.node.plan_reads(NodeId(1), NAMESPACE, GROUP, &reader.ranks).expect("plans");
    let held = reader.node.get_remote_blocks_immutable(&plans, &hashes(BLOCKS), soon()).expect("a lease");
    let slots: Vec<u32> = (0..BLOCKS).collect();
    // SAFETY: nobody else touches the slots.
    let arrived = unsafe { held.read_into(&slots, &nothing(), soon()) }.expect("a read");
    assert_eq!((arrived.blocks, arrived.failure), (BLOCKS as usize, None));
    for block in 0..BLOCKS {
        assert!(content(&reader.ranks[0], block) == content(&owner.ranks[0], block), "block {block}");
    }
}

/// Metadata of an agent of this name that has no memory: what a forger, or a mistake, announces.
fn metadata_of(name: &str) -> Vec<u8> {
    let agent = InProcessNetwork::new().agent(name).expect("a name");
    agent.metadata().expect("metadata")
}

#[test]
fn a_restart_with_bad_metadata_leaves_the_earlier_life() {
    let network = InProcessNetwork::new();
    let (owner, reader, _publication) = pair(&network);
    // It lives, so the reader reaches it where it was taken all the same.
    let _again = network.agent("node-1-again").expect("an agent");
    for agent in ["node-1", "node-1-again"] {
        let bad = NodeAnnouncement {
            epoch: Epoch(2),
            agent: agent.into(),
            agent_metadata: b"garbage".to_vec(),
            ..owner.announcement()
        };
        let error = reader.import(&bad).expect_err("no metadata");
        assert!(matches!(error, RemoteError::Agent(AgentError::Metadata { .. })), "{error}");
        assert!(!reader.reaches("node-1-again"));
        reads_all(&reader, &owner);
    }
}

#[test]
fn metadata_of_another_agent_is_refused_with_both_names_and_replaces_nothing() {
    let network = InProcessNetwork::new();
    let (owner, reader, _publication) = pair(&network);
    // They live, so the reader reaches them where they were taken all the same.
    let _alive = ["forger", "nobody"].map(|name| network.agent(name).expect("an agent"));
    // Of a peer that is known, of nobody, of the reader itself; by a new node, and by a new life.
    for found in ["node-1", "nobody", "node-2"] {
        for node in [NodeId(1), NodeId(9)] {
            let forged = NodeAnnouncement {
                node,
                epoch: Epoch(2),
                sequence: 1,
                agent: "forger".into(),
                agent_metadata: metadata_of(found),
                sets: Vec::new(),
            };
            let error = reader.import(&forged).expect_err("of another agent");
            let (announced, found) = ("forger".to_owned(), found.to_owned());
            assert_eq!(error, RemoteError::OtherAgent { node, announced, found: found.clone() });
            let text = error.to_string();
            assert!(text.contains("agent forger") && text.contains(&format!("agent {found}")), "{text}");
            assert!(!reader.reaches("forger") && !reader.reaches("nobody"));
            reads_all(&reader, &owner);
        }
    }
}

#[test]
fn the_agent_of_another_node_is_refused() {
    let network = InProcessNetwork::new();
    let (owner, reader, _publication) = pair(&network);
    for (agent, of) in [("node-1", NodeId(1)), ("node-2", NodeId(2))] {
        let forged = NodeAnnouncement {
            node: NodeId(9),
            epoch: Epoch(1),
            sequence: 1,
            agent: agent.into(),
            agent_metadata: metadata_of(agent),
            sets: Vec::new(),
        };
        let error = reader.import(&forged).expect_err("it is another node's");
        let expected = RegistryError::AgentTaken { node: NodeId(9), agent: agent.into(), of };
        assert_eq!(error, RemoteError::Registry(expected));
        reads_all(&reader, &owner);
    }
}

#[test]
fn a_peer_too_many_stays_unknown_to_the_agent_too() {
    let network = InProcessNetwork::new();
    let reader = side(&network, 1);
    let peer = |id: u32| {
        let agent = format!("peer-{id}");
        let agent_metadata = metadata_of(&agent);
        NodeAnnouncement {
            node: NodeId(id),
            epoch: Epoch(1),
            sequence: 1,
            agent,
            agent_metadata,
            sets: Vec::new(),
        }
    };
    let last = MAX_PEERS as u32 + 1;
    (2..=last).for_each(|id| reader.import(&peer(id)).expect("there is room"));
    let _live = network.agent(&format!("peer-{}", last + 1)).expect("a name");
    let error = reader.import(&peer(last + 1)).expect_err("there is none");
    assert_eq!(error, RemoteError::Registry(RegistryError::Full { node: NodeId(last + 1) }));
    assert!(!reader.reaches(&format!("peer-{}", last + 1)));
    assert_eq!(reader.node.peers().len(), MAX_PEERS);
    // One that goes makes room.
    reader.node.forget(NodeId(2)).expect("forgotten");
    reader.import(&peer(last + 1)).expect("there is room");
    assert!(reader.reaches(&format!("peer-{}", last + 1)));
}
