//! Errors about blocks that did not arrive.

use kvbm_plan::{BlockIdentity, Failure, FailureKind, Path};
use kvbm_pool::Lost;
use std::fmt;

/// A block that did not arrive: which, on which path, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockFailure {
    /// The block.
    pub identity: BlockIdentity,
    /// The path it should have travelled.
    pub path: Path,
    /// Why, and what to do ([`FailureKind::next_action`]).
    pub failure: Failure,
}

impl fmt::Display for BlockFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BlockIdentity { hash, position, .. } = self.identity;
        write!(f, "block {position} ({hash}) on {}: {}", self.path, self.failure)
    }
}

/// The first failure of several, for error texts.
pub(crate) struct FirstOf<'a>(pub(crate) &'a [BlockFailure]);

impl fmt::Display for FirstOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => f.write_str("no block failed"),
            [one] => one.fmt(f),
            [first, rest @ ..] => write!(f, "{first}; and {} more", rest.len()),
        }
    }
}

/// The failure of a block that was lost together with the contents of a tier, and the consequence.
pub(crate) fn lost(lost: Lost, story: &str) -> Failure {
    let detail = format!("{} lost what it held (the memory of a worker is gone); {story}", lost.tier);
    Failure::new(FailureKind::Lost, detail)
}

/// Whether a failure says that the source's bytes are bad, so that its slot must not serve again.
pub(crate) fn condemns_source(kind: FailureKind) -> bool {
    matches!(kind, FailureKind::Corrupt | FailureKind::Differs)
}

/// Whether an outcome says something of the bytes at both ends: it is void where either changed
/// meanwhile.
pub(crate) fn concerns_both_ends(outcome: Option<&Failure>) -> bool {
    outcome.is_none_or(|failure| failure.kind == FailureKind::Differs)
}

/// Whether what failed like this may have been written, or be written yet, by a store whose answer
/// is late.
pub(crate) fn may_land(kind: FailureKind) -> bool {
    !matches!(
        kind,
        FailureKind::Full
            | FailureKind::Unsupported
            | FailureKind::Predecessor
            | FailureKind::GateShut
            | FailureKind::PathBusy
    )
}
