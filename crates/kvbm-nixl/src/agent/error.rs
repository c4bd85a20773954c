//! Errors of agents.

use super::{MAX_NOTIFICATION_BYTES, SegmentKind, TransferDirection};

/// Why an agent could not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// NIXL's library is missing, or is not what this build needs.
    #[error("remote memory cannot be used: {0}")]
    Unavailable(String),
    /// An option with a value that cannot be.
    #[error(transparent)]
    Options(#[from] crate::OptionsError),
    /// A call of NIXL failed.
    #[error("agent {agent}: {call} failed with {status} ({code}){subject}{hint}")]
    Nixl {
        /// Our agent.
        agent: String,
        /// The function of NIXL.
        call: &'static str,
        /// NIXL's name for the status.
        status: &'static str,
        /// NIXL's number for the status.
        code: i32,
        /// What it was about: a peer, memory. Empty, or begins with a separator.
        subject: String,
        /// What to do. Empty, or begins with a separator.
        hint: String,
    },
    /// Memory that the agent cannot register or move.
    #[error("{what} cannot be used by this agent; {way_out}")]
    Unsupported {
        /// The memory.
        what: String,
        /// What works.
        way_out: &'static str,
    },
    /// A range outside registered memory.
    #[error(
        "{bytes} bytes of {kind} at {address:#x} are not in registered memory of agent {agent}; register it, \
         or import the peer's block sets again"
    )]
    NotRegistered {
        /// The agent that should hold the range.
        agent: String,
        /// Its kind.
        kind: SegmentKind,
        /// First byte.
        address: u64,
        /// Length.
        bytes: u64,
    },
    /// A peer that is not known, or not any more.
    #[error("agent {agent} knows no peer {peer}; import its block sets again, the peer may have ended")]
    UnknownPeer {
        /// Our agent.
        agent: String,
        /// The peer.
        peer: String,
    },
    /// A peer's memory is not reachable through another name: a name is taken.
    #[error("an agent called {name} exists already; give each agent its own name")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// Descriptor lists that do not belong together.
    #[error("a {direction} with unfit descriptor lists: {reason}")]
    Lists {
        /// Read or write.
        direction: TransferDirection,
        /// What is wrong, and the rule.
        reason: String,
    },
    /// Bytes that are not an agent's metadata.
    #[error("{bytes} bytes are not the metadata of an agent: {reason}; ask the peer for it again")]
    Metadata {
        /// How many bytes were given.
        bytes: usize,
        /// Why not.
        reason: String,
    },
    /// A message that cannot be sent.
    #[error(
        "a notification of {bytes} bytes to {peer} cannot be sent: {reason} (the limit is {MAX_NOTIFICATION_BYTES} bytes)"
    )]
    Notification {
        /// The receiver.
        peer: String,
        /// Its length.
        bytes: usize,
        /// Why not.
        reason: &'static str,
    },
    /// The deadline of a transfer passed. It may still run: its memory stays claimed until it ends.
    #[error(
        "a {direction} of {bytes} bytes with {peer} was not done by its deadline; its memory is not reused \
         before it ends. Recompute the blocks, or try another holder"
    )]
    Deadline {
        /// Read or write.
        direction: TransferDirection,
        /// Bytes of the request.
        bytes: u64,
        /// The peer.
        peer: String,
    },
    /// The transfer failed on its way.
    #[error("a {direction} of {bytes} bytes with {peer} failed: {reason}")]
    Failed {
        /// Read or write.
        direction: TransferDirection,
        /// Bytes of the request.
        bytes: u64,
        /// The peer.
        peer: String,
        /// Why.
        reason: String,
    },
}
