//! What a leader asks of volumes beside transfers: what they hold, and to remove it. Probes have a thread of their own, since a
//! request waits for them; removals may take long.

use crate::config::{VolumeTier, WorkerConfig};
use crate::error::{StartError, SubmitError};
use crate::execute::failure_of;
use crate::hub::{Hub, Producer};
use crate::start::spawn;
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use kvbm_plan::{
    BlockIdentity, Epoch, Failure, FailureKind, Message, NamespaceId, NamespaceTag, Rank, VolumeAnswer,
    VolumeId, VolumeRequest,
};
use kvbm_volume::{BlobKey, BlobScope, Volume, VolumeError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Requests of one kind that may wait.
const MAX_PENDING: usize = 256;
/// Objects that are listed and deleted at a time.
const PAGE: usize = 1000;

struct Ask {
    token: u64,
    volume: VolumeId,
    request: VolumeRequest,
}

/// The queues. The threads end when they are dropped, after what is queued.
pub(crate) struct Asks {
    probes: Sender<Ask>,
    removals: Sender<Ask>,
}

impl Asks {
    /// Queues a request, answered by one message.
    pub(crate) fn request(
        &self,
        token: u64,
        volume: VolumeId,
        request: VolumeRequest,
    ) -> Result<(), SubmitError> {
        let queue = match &request {
            VolumeRequest::Probe(_) => &self.probes,
            VolumeRequest::Discard(_) | VolumeRequest::Purge(_) => &self.removals,
        };
        queue.try_send(Ask { token, volume, request }).map_err(|error| match error {
            TrySendError::Full(_) => {
                SubmitError::Backlogged { what: "volume requests", pending: MAX_PENDING }
            }
            TrySendError::Disconnected(_) => SubmitError::ShuttingDown,
        })
    }
}

/// Starts the threads of a worker.
pub(crate) fn start(
    hub: &Arc<Hub>,
    tier: &VolumeTier,
    config: &WorkerConfig,
) -> Result<(Asks, Vec<JoinHandle<()>>), StartError> {
    let (probes, probed) = bounded(MAX_PENDING);
    let (removals, removed) = bounded(MAX_PENDING);
    let mut threads = Vec::new();
    for (name, queue) in [("volume-probes", probed), ("volume-removals", removed)] {
        let desk = Desk {
            hub: Arc::clone(hub),
            tier: tier.clone(),
            namespace: NamespaceTag::from_bytes(config.namespace),
            rank: config.rank,
            epoch: config.epoch,
        };
        let alive = hub.producer();
        threads.push(spawn(config.rank, name, move || desk.run(&queue, &alive))?);
    }
    Ok((Asks { probes, removals }, threads))
}

/// One thread's work.
struct Desk {
    hub: Arc<Hub>,
    tier: VolumeTier,
    namespace: NamespaceTag,
    rank: Rank,
    epoch: Epoch,
}

impl Desk {
    fn run(&self, queue: &Receiver<Ask>, _alive: &Producer) {
        for Ask { token, volume, request } in queue {
            let answer = if self.hub.is_closing() {
                Err(Failure::new(FailureKind::ShuttingDown, "the worker shut down first"))
            } else {
                // A volume is foreign code.
                catch_unwind(AssertUnwindSafe(|| self.answer(volume, &request))).unwrap_or_else(|_| {
                    Err(Failure::new(
                        FailureKind::Io,
                        format!("volume {volume} panicked; report it to its vendor"),
                    ))
                })
            };
            let answer = answer.unwrap_or_else(VolumeAnswer::Failed);
            let (rank, epoch) = (self.rank, self.epoch);
            self.hub.send(Message::Volume { rank, epoch, token, answer });
        }
    }

    fn answer(&self, volume: VolumeId, request: &VolumeRequest) -> Result<VolumeAnswer, Failure> {
        let unknown =
            |error: kvbm_volume::RegistryError| Failure::new(FailureKind::Unsupported, error.to_string());
        let volume = self.tier.registry.get(volume).map_err(unknown)?;
        match request {
            VolumeRequest::Probe(blocks) => {
                let found = volume.exists(&self.keys(blocks), deadline(&*volume));
                let found: Result<Vec<bool>, VolumeError> = found.into_iter().collect();
                found.map(VolumeAnswer::Present).map_err(|error| told(&error))
            }
            VolumeRequest::Discard(_) | VolumeRequest::Purge(_) if !self.tier.writes => {
                Ok(VolumeAnswer::Removed(0))
            }
            VolumeRequest::Discard(blocks) => delete(&*volume, &self.keys(blocks)).map(VolumeAnswer::Removed),
            VolumeRequest::Purge(label) => self.purge(&*volume, *label).map(VolumeAnswer::Removed),
        }
    }

    fn keys(&self, blocks: &[BlockIdentity]) -> Vec<BlobKey> {
        blocks.iter().map(|identity| BlobKey::of(self.namespace, identity, self.tier.slice)).collect()
    }

    /// Removes this rank's objects of a namespace, page by page.
    fn purge(&self, volume: &dyn Volume, label: Option<NamespaceId>) -> Result<u64, Failure> {
        let scope = BlobScope { namespace: self.namespace, label };
        let (mut removed, mut after) = (0, None);
        loop {
            let page =
                volume.list(&scope, after.as_ref(), PAGE, deadline(volume)).map_err(|error| told(&error))?;
            let ours: Vec<BlobKey> =
                page.iter().filter(|key| key.slice == self.tier.slice).copied().collect();
            removed += delete(volume, &ours)?;
            after = page.last().copied();
            if page.len() < PAGE {
                return Ok(removed);
            }
            if self.hub.is_closing() {
                return Err(Failure::new(
                    FailureKind::ShuttingDown,
                    "the worker shut down during the removal",
                ));
            }
        }
    }
}

fn deadline(volume: &dyn Volume) -> Instant {
    Instant::now() + volume.descriptor().deadline
}

fn told(error: &VolumeError) -> Failure {
    Failure::new(failure_of(error), error.to_string())
}

/// How many there were. Goes on after a failure, and tells the first one.
fn delete(volume: &dyn Volume, keys: &[BlobKey]) -> Result<u64, Failure> {
    let mut removed = 0;
    let mut failed = None;
    for result in volume.delete(keys, deadline(volume)) {
        match result {
            Ok(there) => removed += u64::from(there),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(removed), |error| Err(told(&error)))
}
