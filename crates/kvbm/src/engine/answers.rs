//! Answers and errors of the calls about tickets.

use super::EngineError;
use crate::error::BlockFailure;
use std::time::Duration;

/// A ticket that nobody asks for ends after this time: its pins must not keep room from others.
pub(super) const TIME_TO_LIVE: Duration = Duration::from_secs(10);

/// What is there for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookUp {
    /// So many blocks from the given position on, pinned until the ticket ends. With several cache
    /// groups, as far as all of them can serve it: [`promised`](super::Tickets::promised) says what
    /// each has.
    Ready {
        /// All of them.
        blocks: usize,
        /// The same by tier: G1 to G4. G1 is always 0. A block counts on the farthest of its
        /// groups' tiers.
        by_tier: [usize; 4],
    },
    /// Volumes are being asked: look up again later.
    Pending,
}

/// A call about a ticket that cannot be carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TicketError {
    /// The request has no ticket: none was made, it ended, or it has expired.
    #[error("request {request} has no ticket: look it up first, and commit within {} s", TIME_TO_LIVE.as_secs())]
    NoTicket {
        /// The request.
        request: String,
    },
    /// The request's blocks are on their way.
    #[error("request {request} is being loaded: wait until it is finished, or abandon it")]
    Loading {
        /// The request.
        request: String,
    },
    /// More blocks than were promised.
    #[error("{ids} engine blocks for request {request}, which was promised {promised}: look it up again")]
    TooMany {
        /// The request.
        request: String,
        /// Ids given.
        ids: usize,
        /// Blocks promised.
        promised: usize,
    },
    /// Not a list of ids for each cache group.
    #[error(
        "{given} lists of engine blocks for request {request}, which was promised blocks of {groups} cache groups: give a \
         list for each (commit_groups)"
    )]
    Groups {
        /// The request.
        request: String,
        /// Lists given.
        given: usize,
        /// Cache groups of the model.
        groups: usize,
    },
    /// Not one id for each block of a cache group.
    #[error(
        "{ids} engine blocks for request {request} in cache group {group}, where it was promised {promised}: give one for \
         each, or none at all"
    )]
    Count {
        /// The request.
        request: String,
        /// The group.
        group: usize,
        /// Ids given.
        ids: usize,
        /// Blocks promised.
        promised: usize,
    },
    /// What models with several cache groups cannot do.
    #[error("{call} knows models with one cache group, and this one has {groups}")]
    OneGroup {
        /// The call.
        call: &'static str,
        /// Cache groups of the model.
        groups: usize,
    },
    /// The load does not start. The ticket has ended.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// A load that is over: no copy writes to its blocks any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedLoad {
    /// The request.
    pub request: String,
    /// Blocks from the front that hold verified bytes; none where it was abandoned. All or none
    /// with several cache groups.
    pub arrived: usize,
    /// Blocks asked for.
    pub wanted: usize,
    /// The others.
    pub failures: Vec<BlockFailure>,
}
