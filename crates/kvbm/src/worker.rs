//! The seam between the leader and its workers: bytes in their wire form, both ways.
//!
//! The worker of this process and one at the other end of a socket are the same thing to the
//! leader.

pub use kvbm_link::Lane;
use kvbm_plan::{
    BlockOutcome, Command, Epoch, FlushOutcome, Message, Rank, Tier, TransferPlan, TransferReport,
    VolumeAnswer, VolumeRequest, wire,
};
use std::sync::Arc;

/// Where a worker's messages go, in wire form. Called on the worker's threads.
pub type MessageSink = Arc<dyn Fn(Vec<u8>) + Send + Sync>;

/// The leader's end of the line to one worker.
///
/// A worker that ends and starts again serves the same line when it has been connected again. It
/// says [`Message::Ready`] then: the leader drops what the one before it had in memory, and takes a
/// rank that was given up in again. What was sent to the one before must not reach it, nor may what
/// is sent before its `Ready`. [`send`](Self::send) is [`LinkError::Closed`] until the line is
/// about to call the sink with it. The first worker may be sent to before, unless another one may
/// take its place then. So the leader knows which of the two has a plan, and gives the slots of a
/// plan whose worker is gone to others.
pub trait WorkerLink: Send + Sync {
    /// Hands over a command in wire form ([`kvbm_plan::wire::encode_command`]). Must not block: a
    /// worker that is overloaded answers with a report, or refuses here.
    ///
    /// `lane` says which commands that still wait it may overtake. A link that keeps the order of
    /// all commands may ignore it.
    fn send(&self, lane: Lane, command: &[u8]) -> Result<(), LinkError>;

    /// Tells a worker that is about to end, and waits, that what only it holds is saved. For links
    /// whose workers say so.
    fn dismiss(&self) {}
}

/// A command that did not reach its worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The worker is gone: it touches no memory of this rank any more. Nothing is sent on the line
    /// before its next `Ready`.
    #[error("the worker is gone: restart it, its blocks are treated as lost")]
    Closed,
    /// The worker refused the command.
    #[error("the worker refused the command: {0}")]
    Refused(String),
}

/// A worker that moves no bytes and answers every plan at once: for replays and simulations of the
/// bookkeeping alone.
pub struct MetadataWorker {
    rank: Rank,
    epoch: Epoch,
    sink: MessageSink,
}

impl MetadataWorker {
    /// A worker of rank `rank` under the leader of `epoch`. It holds no persistent tier: nothing is
    /// recovered.
    pub fn start(rank: Rank, epoch: Epoch, sink: MessageSink) -> Self {
        let worker = Self { rank, epoch, sink };
        let (blocks, unusable) = (Vec::new(), Vec::new());
        worker.answer(&Message::Recovered { rank, tier: Tier::G3, blocks, unusable, last: true });
        worker.answer(&Message::Ready { rank, epoch, volumes: true });
        worker
    }

    fn report(&self, plan: &TransferPlan) -> TransferReport {
        TransferReport {
            plan_id: plan.plan_id,
            epoch: plan.epoch,
            rank: self.rank,
            path: plan.path(),
            blocks: vec![BlockOutcome::Done { checksum: 0 }; plan.blocks.len()],
            bytes: 0,
            queued_us: 0,
            busy_us: 0,
        }
    }

    fn answer(&self, message: &Message) {
        if let Ok(bytes) = wire::encode_message(message) {
            (self.sink)(bytes);
        }
    }
}

impl WorkerLink for MetadataWorker {
    fn send(&self, _lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        let command = wire::decode_command(command).map_err(|error| LinkError::Refused(error.to_string()))?;
        match command {
            Command::Transfer(plan) => self.answer(&Message::Transfer(self.report(&plan))),
            Command::Flush { token } => self.answer(&Message::Flushed {
                rank: self.rank,
                epoch: self.epoch,
                token,
                outcome: FlushOutcome::Durable { blocks: 0 },
            }),
            Command::Volume { token, request, .. } => self.answer(&Message::Volume {
                rank: self.rank,
                epoch: self.epoch,
                token,
                answer: match request {
                    VolumeRequest::Probe(blocks) => VolumeAnswer::Present(vec![false; blocks.len()]),
                    VolumeRequest::Discard(_)
                    | VolumeRequest::DiscardDamaged(_)
                    | VolumeRequest::Purge(_) => VolumeAnswer::Removed(0),
                    VolumeRequest::List(_) => VolumeAnswer::Listed(Vec::new()),
                    VolumeRequest::Register(_) | VolumeRequest::Unregister => VolumeAnswer::Done,
                },
            }),
            // Nothing is ever queued here, and nothing is kept.
            Command::Cancel { .. }
            | Command::Advance { .. }
            | Command::Release { .. }
            | Command::Forget { .. } => {}
        }
        Ok(())
    }
}
