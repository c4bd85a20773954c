//! Memory of other nodes: who has which blocks, and how they come to G2.
//!
//! A look-up asks the peers ([`Peers::extend`]); what one of them has is listed behind what is
//! here, with the peer as its place. An onboard first brings those blocks to G2
//! ([`Peers::fetch`]) and goes on from there as for any block of G2. Nothing here is served before
//! its bytes are verified. A peer that fails, is slow or is gone costs a request the time until its
//! deadline at most; then the rest of the prefix is computed.
//!
//! The leader knows peers through the trait [`Peers`] alone: a build without workers has none.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `start` | agent, node and threads of a manager | `push`, `node`, `queue`, `directory`, `discovery`, `table` |
//! | `push` | blocks written to peers, and by them | `node`, `table` |
//! | `node` | this node among its peers | `queue`, `directory`, `choice`, `groups`, `table`, `fetch` |
//! | `queue` | prefixes that wait to be read | `fetch` |
//! | `directory` | finding peers by what they announce | `discovery`, `table` |
//! | `discovery` | announcements in a folder, or on a NATS server | - |
//! | `choice` | which of many peers a look-up asks | - |
//! | `groups` | how much of a chain a peer can serve in all cache groups | - |
//! | `table` | what is known of each peer | - |
//! | `fetch` | blocks on their way from a peer, and what follows | - |

#[cfg(feature = "worker")]
mod choice;
#[cfg(feature = "worker")]
mod directory;
#[cfg(feature = "worker")]
mod discovery;
mod fetch;
#[cfg(feature = "worker")]
mod groups;
#[cfg(feature = "worker")]
mod node;
#[cfg(feature = "worker")]
mod push;
#[cfg(feature = "worker")]
mod queue;
#[cfg(feature = "worker")]
mod start;
#[cfg(feature = "worker")]
mod table;

use crate::circuit_breaker::CircuitState;
use crate::volume::{GroupChain, Probe};
#[cfg(feature = "worker")]
pub use discovery::DiscoveryError;
pub(crate) use fetch::{Fetching, Then};
use kvbm_plan::{Failure, GroupId, NodeId};
use kvbm_pool::{FoundOutside, Prefix};
use kvbm_tokens::BlockChain;
#[cfg(feature = "worker")]
pub use start::RemoteStartError;
#[cfg(feature = "worker")]
pub(crate) use start::{Ours, start};
use std::time::{Duration, Instant};

/// What a leader asks of the nodes around it.
pub(crate) trait Peers: Send + Sync {
    /// Adds to `prefix` what one peer has of `chain` beyond it, the one that has most. Whether
    /// peers were asked, or would be.
    fn extend(&self, prefix: &mut Prefix, chain: BlockChain<'_>, probe: Probe) -> bool;

    /// Whether there is a peer that may be asked now.
    fn has_usable(&self) -> bool;

    /// What one peer has of a chain in each cache group: the one with which the longest prefix can
    /// be served, if that is longer than what tiers have.
    fn find_groups(&self, chain: &GroupChain<'_>) -> Option<FoundOutside>;

    /// The peer that has most of `chain` in a cache group from block `from` on, and how many.
    fn holder(&self, group: GroupId, chain: BlockChain<'_>, from: usize) -> Option<(NodeId, usize)>;

    /// Brings the blocks of `prefix`, a part of one cache group, that are not on G2 from its peer,
    /// or from another one that has them, by `until` at the latest; then calls `then`, whatever
    /// came of it.
    fn fetch(&self, prefix: &Prefix, until: Option<Instant>, then: Then) -> Fetching;

    /// Writes the blocks of a chain that a peer lacks into its host memory, as many from the first
    /// on as every cache group can serve from G2 here; waits for that until `deadline`.
    fn push(&self, node: NodeId, chain: BlockChain<'_>, deadline: Instant) -> Pushed;

    /// Time of a block of a cache group from this peer, at the speed at which bytes of any group
    /// came lately.
    fn time_per_block(&self, node: NodeId, group: GroupId) -> Option<Duration>;

    /// Every peer.
    fn status(&self) -> Vec<PeerStatus>;
}

/// What a push of blocks to a peer came to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Pushed {
    /// Blocks of all cache groups that were written and that the peer has verified and registered.
    /// Without a failure it has had the others, or they are on their way to it.
    pub written: usize,
    /// Why the peer did not get all that it lacks: it can still read them.
    pub failure: Option<Failure>,
}

/// A peer, as this node knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    /// Its number.
    pub node: NodeId,
    /// Whether requests are sent to it.
    pub circuit: CircuitState,
    /// Why not, where they are not; or why its blocks cannot be read here.
    pub failure: Option<String>,
    /// Prefixes that are being read from it.
    pub reading: usize,
}
