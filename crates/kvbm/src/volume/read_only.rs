//! A store that lets nobody write is read all the same: what it holds is found, and copies there
//! are tried again from time to time.

use crate::circuit_breaker::StateChange;
use kvbm_plan::{Failure, FailureKind};
use std::time::{Duration, Instant};

/// What a volume's store last said of copies there, where it refused them, and when they may be
/// tried again.
#[derive(Default)]
pub(super) struct Seal(Option<(Failure, Instant)>);

impl Seal {
    /// Copies are over, with these failures.
    pub(super) fn record(
        &mut self,
        copies: &[Option<Failure>],
        now: Instant,
        pause: Duration,
    ) -> StateChange {
        let refused = copies.iter().flatten().find(|failure| failure.kind == FailureKind::Unsupported);
        let was_sealed = self.0.is_some();
        if let Some(failure) = refused {
            self.0 = Some((failure.clone(), kvbm_plan::deadline_after(now, pause)));
            return if was_sealed { StateChange::None } else { StateChange::Opened };
        }
        if was_sealed && copies.iter().any(Option::is_none) {
            self.0 = None;
            return StateChange::Closed;
        }
        StateChange::None
    }

    /// Whether copies may be tried.
    pub(super) fn allows(&self, now: Instant) -> bool {
        self.0.as_ref().is_none_or(|(_, until)| now >= *until)
    }

    /// Why it rejects writes.
    pub(super) fn why(&self) -> Option<Failure> {
        self.0.as_ref().map(|(failure, _)| failure.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_tried_after_a_pause_and_one_that_arrives_ends_it() {
        let (mut seal, begun) = (Seal::default(), Instant::now());
        let pause = Duration::from_secs(1);
        let failed = |kind| Some(Failure::new(kind, "planted"));
        let (refused, broken) = (failed(FailureKind::Unsupported), failed(FailureKind::Io));
        assert!(
            seal.record(&[broken.clone(), None], begun, pause) == StateChange::None && seal.allows(begun)
        );
        assert_eq!(seal.record(&[None, refused.clone()], begun, pause), StateChange::Opened);
        assert!(!seal.allows(begun) && seal.allows(begun + pause) && seal.why() == refused);
        assert_eq!(seal.record(&[refused], begun + pause, pause), StateChange::None, "it was reported");
        assert!(!seal.allows(begun + pause));
        assert_eq!(seal.record(&[broken], begun + pause, pause), StateChange::None, "says nothing of it");
        assert!(seal.why().is_some());
        assert_eq!(seal.record(&[None], begun + pause, pause), StateChange::Closed);
        assert!(seal.allows(begun) && seal.why().is_none());
        let long =
            seal.record(&[Some(Failure::new(FailureKind::Unsupported, "read only"))], begun, Duration::MAX);
        assert!(long == StateChange::Opened && !seal.allows(begun + Duration::from_secs(3600)));
    }
}
