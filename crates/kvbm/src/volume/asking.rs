//! Asking ranks about a volume.

use super::VolumeTier;
use crate::leader::Leader;
use kvbm_plan::{Command, Failure, Rank, VolumeAnswer, VolumeRequest};
use std::time::Instant;

/// What an answer says of an order: whether it was followed.
pub(super) fn followed(answer: VolumeAnswer) -> Result<(), Failure> {
    match answer {
        VolumeAnswer::Failed(failure) => Err(failure),
        VolumeAnswer::Present(_)
        | VolumeAnswer::Removed(_)
        | VolumeAnswer::Listed(_)
        | VolumeAnswer::Done => Ok(()),
    }
}

/// A question about a volume that not all ranks answered.
pub(super) struct Unanswered {
    /// Why the first of them did not.
    pub(super) failure: Failure,
    /// Whether the worker of some rank is away, or has been meanwhile: the failure may say nothing of the volume.
    pub(super) is_away: bool,
}

impl Leader {
    /// Sends every rank what was started under `token`. One that is not reached has answered with why: it has done nothing and will not.
    /// A link may answer from inside `send`: no lock may be held that an answer takes.
    ///
    /// # Errors
    /// Why the first such rank was not reached. The others were sent it all the same.
    pub(super) fn send_about_volume(
        &self,
        volume: &VolumeTier,
        token: u64,
        request: VolumeRequest,
    ) -> Result<(), Failure> {
        let command = Command::Volume { token, volume: volume.descriptor.id, request };
        let mut first = Ok(());
        for (rank, failure) in self.broadcast(&command) {
            first = first.and_then(|()| Err(failure.clone()));
            self.volumes.asks.answer(rank, token, VolumeAnswer::Failed(failure));
        }
        first
    }

    /// Sends one rank what was started under `token`, likewise.
    pub(super) fn send_one_about_volume(
        &self,
        rank: Rank,
        volume: &VolumeTier,
        token: u64,
        request: VolumeRequest,
    ) {
        let command = Command::Volume { token, volume: volume.descriptor.id, request };
        if let Err(failure) = self.send_to(rank, &command) {
            self.volumes.asks.answer(rank, token, VolumeAnswer::Failed(failure));
        }
    }

    /// Sends every rank a request, and waits for their answers to `what` until `deadline`, unless one is not reached.
    ///
    /// # Errors
    /// The first failure: a rank is not reached, is late, or `take` refuses its answer.
    pub(super) fn ask_about_volume<R>(
        &self,
        volume: &VolumeTier,
        request: VolumeRequest,
        deadline: Instant,
        what: &str,
        take: impl FnMut(VolumeAnswer) -> Result<R, Failure>,
    ) -> Result<Vec<R>, Unanswered> {
        let starts = self.ranks.starts_told();
        let asked = self.volumes.asks.start(self.settings.ranks);
        self.send_about_volume(volume, asked.token, request)
            .map_err(|failure| Unanswered { failure, is_away: true })?;
        asked.wait(deadline, what, take).map_err(|(_, failure)| {
            let is_away = self.ranks.starts_told() != starts || self.ranks.away().is_some();
            Unanswered { failure, is_away }
        })
    }
}
