//! Errors of a node.

use kvbm_plan::{NodeId, Rank, SequenceHash};

use super::RefusedRead;
use crate::{AgentError, RegistryError, ShapeError};

/// Why remote blocks cannot be offered or read. What did not arrive is recomputed, or read from
/// another holder.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// An option with a value that cannot be.
    #[error("option {option} of a remote node is {value}; {rule}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        rule: &'static str,
    },
    /// The node's thread cannot run.
    #[error("the thread of the remote node: {0}")]
    Thread(String),
    /// The agent failed.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// An announcement was not taken.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The shapes of both sides do not fit.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Local memory cannot be offered.
    #[error("local memory cannot be offered: {0}")]
    Storage(String),
    /// The announcement is our own.
    #[error("the announcement is of node {node}, which is this one; give each node its own id")]
    Ourselves {
        /// The id.
        node: NodeId,
    },
    /// The announcement's metadata is of another agent than it names.
    #[error(
        "node {node} announces agent {announced} with the metadata of agent {found}: it was not taken; publish the \
         metadata that the agent itself gives"
    )]
    OtherAgent {
        /// The announced node.
        node: NodeId,
        /// The agent that it names.
        announced: String,
        /// The agent whose metadata it has.
        found: String,
    },
    /// A node without an announcement.
    #[error("node {node} is not known; import its announcement first")]
    UnknownNode {
        /// The node.
        node: NodeId,
    },
    /// The peer did not answer in time.
    #[error(
        "node {node} did not answer by the deadline; it may have ended, or it has not imported this node's \
         announcement"
    )]
    NoAnswer {
        /// The peer.
        node: NodeId,
    },
    /// The peer holds nothing for us.
    #[error("node {node} refuses: {why}")]
    Refused {
        /// The peer.
        node: NodeId,
        /// Why.
        why: RefusedRead,
    },
    /// The peer's answer contradicts itself.
    #[error("the answer of node {node} is malformed; run the same kvbm version on both sides")]
    Malformed {
        /// The peer.
        node: NodeId,
    },
    /// Too many requests wait for their answers.
    #[error("{waiting} requests wait for an answer already; read in fewer, larger requests")]
    TooManyRequests {
        /// How many.
        waiting: usize,
    },
    /// The lease was over before the bytes had arrived.
    #[error("the lease on blocks of node {node} ended before they had arrived; ask for them again")]
    LeaseEnded {
        /// The peer.
        node: NodeId,
    },
    /// Bytes that are not the block's.
    #[error(
        "block {hash} of node {node} arrived with wrong bytes on rank {rank}: it is not served; recompute it"
    )]
    Corrupt {
        /// The peer.
        node: NodeId,
        /// The block.
        hash: SequenceHash,
        /// Our rank.
        rank: Rank,
    },
    /// A peer did not register a block that was written to it.
    #[error(
        "node {node} did not take a block that was written to it: {}",
        if *.is_wrong { "wrong bytes arrived" } else { "it has no place for it any more" }
    )]
    NotTaken {
        /// The peer.
        node: NodeId,
        /// Whether wrong bytes arrived.
        is_wrong: bool,
    },
    /// Too few slots for the blocks.
    #[error("{slots} slots for {blocks} remote blocks; give a slot for each")]
    Destination {
        /// Slots given.
        slots: usize,
        /// Blocks held.
        blocks: usize,
    },
}
