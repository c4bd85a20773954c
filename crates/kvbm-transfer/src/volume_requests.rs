//! Requests of the leader to volumes besides transfers: their queues and threads.

use crate::config::{VolumeTier, WorkerConfig};
use crate::damaged_objects::DamagedObjects;
use crate::error::{StartError, SubmitError};
use crate::execute::readable_cuts;
use crate::hub::{Hub, Producer};
use crate::volume_answers::{Asker, VolumeAnswers};
use crate::volume_threads::{ThreadLimits, VolumeThreads};
use kvbm_plan::{
    Epoch, Failure, FailureKind, KeyNotice, Message, NamespaceTag, Rank, VolumeAnswer, VolumeId,
    VolumeRequest,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Requests of one kind that may wait for a volume.
const MAX_PENDING: usize = 256;
/// Objects that are listed and deleted at a time.
const PAGE: usize = 1000;

struct VolumeJob {
    token: u64,
    request: VolumeRequest,
}

/// The queues. The threads end when they are dropped, after what is queued.
pub(crate) struct VolumeRequests {
    probes: VolumeThreads<VolumeJob>,
    removals: VolumeThreads<VolumeJob>,
    changes: VolumeThreads<VolumeJob>,
    /// While requests may come, threads may start.
    _alive: Producer,
}

impl VolumeRequests {
    /// Queues a request, answered by one message.
    pub(crate) fn request(
        &self,
        token: u64,
        volume: VolumeId,
        request: VolumeRequest,
    ) -> Result<(), SubmitError> {
        let volume_threads = match &request {
            VolumeRequest::Probe(_) => &self.probes,
            VolumeRequest::Discard(_)
            | VolumeRequest::DiscardDamaged(_)
            | VolumeRequest::Purge(_)
            | VolumeRequest::List(_) => &self.removals,
            VolumeRequest::Register(_) | VolumeRequest::Unregister => &self.changes,
        };
        volume_threads
            .send(volume, VolumeJob { token, request })
            .map_err(|_| SubmitError::Backlogged { what: "volume requests", pending: MAX_PENDING })
    }
}

/// What takes the requests of a worker.
pub(crate) fn start(
    hub: &Arc<Hub>,
    tier: &VolumeTier,
    damaged: &Arc<DamagedObjects>,
    config: &WorkerConfig,
) -> Result<VolumeRequests, StartError> {
    let (cuts, namespace) = (readable_cuts(config, tier)?, NamespaceTag::from_bytes(config.namespace));
    let desk = Arc::new(VolumeRequestHandler {
        hub: Arc::clone(hub),
        answers: VolumeAnswers::new(tier.clone(), cuts, Arc::clone(damaged), namespace, PAGE),
        rank: config.rank,
        epoch: config.epoch,
    });
    let volume_threads = |what: &str| {
        let (hub, rank, desk) = (Arc::clone(hub), config.rank, Arc::clone(&desk));
        // One of each volume, so that its requests of a kind are answered in order.
        let terms = ThreadLimits { hub, rank, what: what.to_owned(), threads: 1, pending: MAX_PENDING };
        let refusing = Arc::clone(&desk);
        let refuse = move |_, ask: VolumeJob, reason: &str| {
            refusing.send_answer(ask.token, VolumeAnswer::Failed(Failure::new(FailureKind::Io, reason)));
        };
        VolumeThreads::new(terms, move |volume, ask| desk.serve(volume, &ask), refuse)
    };
    let (probes, removals, changes) =
        (volume_threads("probes"), volume_threads("removals"), volume_threads("changes"));
    Ok(VolumeRequests { probes, removals, changes, _alive: hub.producer() })
}

/// What the threads do.
struct VolumeRequestHandler {
    hub: Arc<Hub>,
    answers: VolumeAnswers,
    rank: Rank,
    epoch: Epoch,
}

impl Asker for VolumeRequestHandler {
    fn is_closing(&self) -> bool {
        self.hub.is_closing()
    }

    fn keys_destroyed(&self, volume: VolumeId, keys: &[KeyNotice]) {
        for part in keys.chunks(Message::MAX_KEYS) {
            let (rank, epoch, volume) = (self.rank, self.epoch, Some(volume));
            self.hub.send(Message::Keys { rank, epoch, volume, keys: part.to_vec() });
        }
    }
}

impl VolumeRequestHandler {
    fn serve(&self, volume: VolumeId, VolumeJob { token, request }: &VolumeJob) {
        let answer = if self.hub.is_closing() {
            Err(Failure::new(FailureKind::ShuttingDown, "the worker shut down first"))
        } else {
            // A volume is foreign code.
            let answer = AssertUnwindSafe(|| self.answers.answer(volume, request, self));
            catch_unwind(answer).unwrap_or_else(|_| {
                let detail = format!("volume {volume} panicked; report it to its vendor");
                Err(Failure::new(FailureKind::Io, detail))
            })
        };
        self.send_answer(*token, answer.unwrap_or_else(VolumeAnswer::Failed));
    }

    fn send_answer(&self, token: u64, answer: VolumeAnswer) {
        let (rank, epoch) = (self.rank, self.epoch);
        self.hub.send(Message::Volume { rank, epoch, token, answer });
    }
}
