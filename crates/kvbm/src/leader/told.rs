//! What fails is told in the log once in a while, not once a block: a full disk fails thousands.

use kvbm_plan::{FailureKind, Path, VolumeId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

/// Between two warnings of one topic.
const PAUSE: Duration = Duration::from_secs(10);

/// What one warning is about: a path, its volume where it has one, and a kind of failure.
type Topic = (Path, Option<VolumeId>, FailureKind);

/// Failures that the log has told of lately.
#[derive(Default)]
pub(super) struct Told(Mutex<HashMap<Topic, Last>>);

/// Of a topic: when one was told, and how many were not since.
struct Last {
    at: Instant,
    untold: u64,
}

impl Told {
    /// One more. Where it is to be told: how many were not since the last one.
    pub(super) fn again(&self, topic: Topic, now: Instant) -> Option<u64> {
        match self.0.lock().entry(topic) {
            Entry::Vacant(place) => {
                place.insert(Last { at: now, untold: 0 });
                Some(0)
            }
            Entry::Occupied(mut last) => {
                let Last { at, untold } = last.get_mut();
                if now.saturating_duration_since(*at) < PAUSE {
                    *untold += 1;
                    return None;
                }
                *at = now;
                Some(std::mem::take(untold))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_repeats_is_told_once_in_a_pause_with_how_many_there_were() {
        let (told, start) = (Told::default(), Instant::now());
        let after =
            |kind, seconds| told.again((Path::G2_G3, None, kind), start + Duration::from_secs(seconds));
        assert_eq!(after(FailureKind::Io, 0), Some(0));
        assert_eq!([1, 5, 9].map(|seconds| after(FailureKind::Io, seconds)), [None; 3]);
        assert_eq!(after(FailureKind::Full, 9), Some(0), "another kind is news");
        assert_eq!(after(FailureKind::Io, 10), Some(3));
        assert_eq!([11, 30].map(|seconds| after(FailureKind::Io, seconds)), [None, Some(1)]);
        let of_volume = |id| told.again((Path::G2_G4, Some(VolumeId(id)), FailureKind::Io), start);
        assert_eq!([1, 2, 1].map(of_volume), [Some(0), Some(0), None], "each volume is a store of its own");
    }
}
