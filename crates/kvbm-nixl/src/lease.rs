//! How long an exporter leaves its blocks in place.

use std::fmt;

use kvbm_plan::LeaseId;

/// Milliseconds since 1970 by the wall clock: the only clock that two machines share. Skew between
/// them shortens or lengthens a lease by as much, so leases are long against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixMillis(pub u64);

impl fmt::Display for UnixMillis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The exporter's promise to leave the blocks in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// What reads under this lease name.
    pub id: LeaseId,
    /// When the promise ends.
    pub expires: UnixMillis,
}

impl Lease {
    /// Whether the promise has ended.
    pub fn is_expired(&self, now: UnixMillis) -> bool {
        now >= self.expires
    }
}
