//! Requests to ranks about a volume.

use crate::metrics::Metrics;
use crate::ranks::Ranks;
use crate::ranks::requests::Requests;
use kvbm_plan::{Command, Failure, Rank, VolumeAnswer, VolumeId, VolumeRequest};
use std::sync::Arc;
use std::time::Instant;

/// What every volume needs to reach the ranks, and where it counts.
pub(super) struct VolumeRequests {
    pub(super) ranks: Arc<Ranks>,
    pub(super) pending: Arc<Requests<VolumeAnswer>>,
    pub(super) metrics: Metrics,
}

/// Whether a rank did what it was sent.
pub(super) fn followed(answer: VolumeAnswer) -> Result<(), Failure> {
    match answer {
        VolumeAnswer::Failed(failure) => Err(failure),
        VolumeAnswer::Present(_)
        | VolumeAnswer::Removed(_)
        | VolumeAnswer::Listed(_)
        | VolumeAnswer::Done => Ok(()),
    }
}

/// A request about a volume that not all ranks answered.
pub(super) struct Unanswered {
    /// Why the first of them did not.
    pub(super) failure: Failure,
    /// Whether the worker of some rank is away, or has been meanwhile: the failure may say nothing
    /// of the volume.
    pub(super) is_away: bool,
}

impl VolumeRequests {
    /// Sends every rank what was started under `token`. A rank that is not reached has answered
    /// with the reason: it has done nothing and will not. A link may answer from inside `send`: the
    /// caller holds no lock that an answer takes.
    ///
    /// # Errors
    /// Why the first such rank was not reached. The others were sent it all the same.
    pub(super) fn send(&self, volume: VolumeId, token: u64, request: VolumeRequest) -> Result<(), Failure> {
        let mut first = Ok(());
        for (rank, failure) in self.ranks.broadcast(&Command::Volume { token, volume, request }) {
            first = first.and_then(|()| Err(failure.clone()));
            self.pending.answer(rank, token, VolumeAnswer::Failed(failure));
        }
        first
    }

    /// Sends one rank what was started under `token`, likewise.
    pub(super) fn send_to(&self, rank: Rank, volume: VolumeId, token: u64, request: VolumeRequest) {
        if let Err(failure) = self.ranks.send_to(rank, &Command::Volume { token, volume, request }) {
            self.pending.answer(rank, token, VolumeAnswer::Failed(failure));
        }
    }

    /// Sends every rank a request, and waits for their answers to `what` until `deadline`, unless
    /// one is not reached.
    ///
    /// # Errors
    /// The first failure: a rank is not reached, is late, or `take` refuses its answer.
    pub(super) fn wait<R>(
        &self,
        volume: VolumeId,
        request: VolumeRequest,
        deadline: Instant,
        what: &str,
        take: impl FnMut(VolumeAnswer) -> Result<R, Failure>,
    ) -> Result<Vec<R>, Unanswered> {
        let starts = self.ranks.starts_announced();
        let started = self.pending.start(self.ranks.len());
        self.send(volume, started.token, request).map_err(|failure| Unanswered { failure, is_away: true })?;
        started.wait(deadline, what, take).map_err(|(_, failure)| {
            let is_away = self.ranks.starts_announced() != starts || self.ranks.away().is_some();
            Unanswered { failure, is_away }
        })
    }
}
