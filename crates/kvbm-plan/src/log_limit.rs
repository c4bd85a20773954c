//! Rate limit of the log: a failure is logged at intervals, not once a block. A full disk fails
//! thousands of blocks.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Shortest time between two warnings of one topic.
const INTERVAL: Duration = Duration::from_secs(10);

/// When the last warning of each topic was logged. Topics are few: a kind of failure of a path, not
/// a block.
#[derive(Debug)]
pub struct LogLimit<T>(Mutex<HashMap<T, Last>>);

impl<T> Default for LogLimit<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// The last warning of a topic, and how many were suppressed since.
#[derive(Debug)]
struct Last {
    at: Instant,
    suppressed: u64,
}

impl<T: Eq + Hash> LogLimit<T> {
    /// One more failure. Where it is to be logged: how many were suppressed since the last warning.
    pub fn allow(&self, topic: T, now: Instant) -> Option<u64> {
        // A thread that panicked left whole entries.
        match self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(topic) {
            Entry::Vacant(place) => {
                place.insert(Last { at: now, suppressed: 0 });
                Some(0)
            }
            Entry::Occupied(mut last) => {
                let Last { at, suppressed } = last.get_mut();
                if now.saturating_duration_since(*at) < INTERVAL {
                    *suppressed += 1;
                    return None;
                }
                *at = now;
                Some(std::mem::take(suppressed))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FailureKind, Path, VolumeId};

    #[test]
    fn a_repeated_failure_is_logged_once_an_interval_with_the_number_of_suppressed_ones() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        let after =
            |kind, seconds| limit.allow((Path::G2_G3, None, kind), start + Duration::from_secs(seconds));
        assert_eq!(after(FailureKind::Io, 0), Some(0));
        assert_eq!([1, 5, 9].map(|seconds| after(FailureKind::Io, seconds)), [None; 3]);
        assert_eq!(after(FailureKind::Full, 9), Some(0), "another kind is another topic");
        assert_eq!(after(FailureKind::Io, 10), Some(3));
        assert_eq!([11, 30].map(|seconds| after(FailureKind::Io, seconds)), [None, Some(1)]);
        let of_volume = |id| limit.allow((Path::G2_G4, Some(VolumeId(id)), FailureKind::Io), start);
        assert_eq!([1, 2, 1].map(of_volume), [Some(0), Some(0), None], "each volume is a store of its own");
    }
}
