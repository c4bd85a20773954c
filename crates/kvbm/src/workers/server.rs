//! A worker in a process of its own: it listens and serves one leader after another.

use super::disk::disk_keys;
use super::memory::RankMemory;
use super::worker::{WorkerStart, checked_blocks};
use super::{G1Memory, Worker, WorkerError, predecessor};
use crate::config::Config;
use crate::socket_link::{deployment, settings};
use crate::worker::Lane;
use kvbm_device::Event;
use kvbm_link::{
    LeaderInfo, LineTimes, MessageSender, Service, Session, WorkerAddress, WorkerListener, WorkerTerms,
};
use kvbm_plan::{
    BlockId, BlockOutcome, Command, Epoch, Failure, FailureKind, FlushOutcome, Message, Rank, TransferReport,
    VolumeAnswer, wire,
};
use kvbm_storage::BoundLayout;
use kvbm_tokens::NamespaceTag;
use kvbm_transfer::{BlocksBusy, FinishedPlan};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often a session that does not end says what it waits for.
const END_TIME: Duration = Duration::from_secs(5);
/// Device events that are remembered for a leader that connects again.
const MAX_EVENTS: usize = 1024;

/// The worker of one rank, for a leader in another process. Its memory is allocated once; for each
/// leader it opens the disk and starts a [`Worker`]. One leader is served at a time.
pub struct WorkerServer {
    listener: WorkerListener,
    rank: Arc<ServedRank>,
}

/// What every leader of the rank meets.
struct ServedRank {
    config: Config,
    rank: Rank,
    memory: RankMemory,
    g1: BoundLayout,
    g3_blocks: u32,
    now: Mutex<Now>,
}

#[derive(Default)]
struct Now {
    /// That of the leader that is served.
    worker: Weak<Worker>,
    /// Of the leader that is served, or was served last.
    epoch: Option<Epoch>,
    /// Its last device events, oldest first.
    events: VecDeque<(u64, Event)>,
}

/// A leader that is being served.
struct LeaderSession {
    worker: Arc<Worker>,
    leader: LeaderInfo,
    out: MessageSender,
}

impl WorkerServer {
    /// Allocates the memory of `rank` and listens at `socket`: a private socket, in a folder in
    /// which no other user writes, or `tcp://HOST:PORT` with the certificates of `parallelism`.
    /// Does not wait for a leader.
    ///
    /// # Errors
    /// [`WorkerError`] names the setting, the device or the socket.
    pub fn bind(config: &Config, rank: Rank, memory: &G1Memory, socket: &Path) -> Result<Self, WorkerError> {
        let address = config.parallelism.worker_address(socket)?;
        let [g1_blocks, g2_blocks, g3_blocks] = checked_blocks(config, rank)?;
        let memory = RankMemory::new(config, rank, memory, [g1_blocks, g2_blocks], None)?;
        let Some(g1) = memory.g1_here().first().cloned() else {
            return Err(WorkerError::MemoryElsewhere { rank });
        };
        let g1_blocks = memory.g1_here().iter().map(BoundLayout::num_blocks).min().unwrap_or(0);
        let terms = WorkerTerms {
            deployment: deployment(config),
            // The leader's: it also says where on disk our blocks are.
            namespace: None,
            rank,
            ranks: config.parallelism.tensor_parallel as u16,
            settings: settings(config, g1_blocks),
        };
        let listener = WorkerListener::bind(address, terms, LineTimes::default())?;
        let (config, now) = (config.clone(), Mutex::default());
        Ok(Self { listener, rank: Arc::new(ServedRank { config, rank, memory, g1, g3_blocks, now }) })
    }

    /// Where it listens: with the port that the system chose where any was asked for.
    pub fn address(&self) -> &WorkerAddress {
        self.listener.address()
    }

    /// G1, bound to its memory: where block ids are addresses. Of the first cache group, where
    /// there are several.
    pub fn g1(&self) -> &BoundLayout {
        &self.rank.g1
    }

    /// Serves leaders, one at a time, until it is stopped. Nothing writes to the memory any more
    /// when it returns.
    pub fn serve(&self) {
        let service: Arc<dyn Service> = Arc::clone(&self.rank) as _;
        self.listener.serve(&service);
    }

    /// Tells the leader that this worker is about to end, and waits until it has saved what only
    /// this worker holds, for `patience` at most. Call it before [`stopper`](Self::stopper) where
    /// the leader goes on, or ends later. Whether the leader has said so, or there is none.
    pub fn leave(&self, patience: Duration) -> bool {
        self.listener.leave(patience)
    }

    /// Ends [`serve`](Self::serve) when it is called, from any thread.
    pub fn stopper(&self) -> impl Fn() + Send + Sync + 'static {
        self.listener.stopper()
    }

    /// Makes an event of the rank's device known under `number`: the leader's plans wait for it
    /// ([`KvBlockManager::fence_at`](crate::KvBlockManager::fence_at)). The last 1024 events are
    /// remembered while the leader connects again; each leader has numbers of its own.
    pub fn register_event(&self, number: u64, event: &Event) {
        let mut now = self.rank.now.lock();
        if now.events.len() == MAX_EVENTS {
            now.events.pop_front();
        }
        now.events.push_back((number, event.clone()));
        let worker = now.worker.upgrade();
        drop(now);
        if let Some(worker) = worker {
            worker.register_event(number, event);
        }
    }
}

impl WorkerServer {
    /// As [`Worker::wait_idle`], for the leader that is served; also while there is none.
    ///
    /// # Errors
    /// [`BlocksBusy`] names the blocks that are not free at `deadline`.
    pub fn wait_idle(&self, blocks: &[BlockId], deadline: Instant) -> Result<(), BlocksBusy> {
        // A session that ends keeps its worker until nothing writes any more.
        let worker = self.rank.now.lock().worker.upgrade();
        worker.map_or(Ok(()), |worker| worker.wait_idle(blocks, deadline))
    }

    /// As [`Worker::drain_finished`], of the leader that is served.
    pub fn drain_finished(&self) -> Vec<FinishedPlan> {
        let worker = self.rank.now.lock().worker.upgrade();
        worker.map_or_else(Vec::new, |worker| worker.drain_finished())
    }
}

impl Service for ServedRank {
    fn start(&self, leader: &LeaderInfo, out: MessageSender) -> Result<Box<dyn Session>, String> {
        let (tag, epoch) = (NamespaceTag::from_bytes(leader.terms.namespace), leader.terms.epoch);
        {
            // Before the leader learns that the worker is ready, hence before events of its own.
            let mut now = self.now.lock();
            if now.epoch.replace(epoch) != Some(epoch) {
                // Another leader's: they would open the gates of this one.
                now.events.clear();
            }
        }
        let keys = disk_keys(&self.config).map_err(|error| error.to_string())?;
        predecessor::take_over(&self.config, &keys, self.g3_blocks, tag);
        let volumes = self.memory.volumes(&self.config, tag).map_err(|error| error.to_string())?;
        let sender = out.clone();
        let start = WorkerStart {
            rank: self.rank,
            epoch,
            tag,
            g3_blocks: self.g3_blocks,
            volumes,
            sink: Arc::new(move |bytes: Vec<u8>| sender.send(&bytes)),
            keys,
            writer: None,
        };
        let worker = Worker::start_on(&self.config, self.memory.clone(), start);
        let worker = Arc::new(worker.map_err(|error| error.to_string())?);
        let mut now = self.now.lock();
        now.worker = Arc::downgrade(&worker);
        let events: Vec<_> = now.events.iter().cloned().collect();
        drop(now);
        for (number, event) in &events {
            worker.register_event(*number, event);
        }
        tracing::info!(target: "kvbm", rank = %self.rank, peer = %leader.peer, epoch = epoch.0, "a leader is served");
        Ok(Box::new(LeaderSession { worker, leader: leader.clone(), out }))
    }
}

impl Session for LeaderSession {
    fn command(&mut self, bytes: &[u8]) -> Result<(), String> {
        let Err(error) = self.worker.link().send(Lane::Bulk, bytes) else { return Ok(()) };
        // The worker decoded it and kept nothing of it: the answer needs what it was.
        let command = wire::decode_command(bytes).map_err(|error| error.to_string())?;
        let failure = Failure::new(FailureKind::Io, error.to_string());
        let answer = self.refused(command, failure).and_then(|message| wire::encode_message(&message).ok());
        if let Some(message) = answer {
            self.out.send(&message);
        } else {
            tracing::warn!(target: "kvbm", %error, "a command of the leader was refused");
        }
        Ok(())
    }

    fn end(self: Box<Self>) {
        // Until nothing writes any more: the memory is the next leader's then.
        while let Err(error) = self.worker.shutdown(Instant::now() + END_TIME) {
            tracing::warn!(
                target: "kvbm", peer = %self.leader.peer, %error,
                "the session of a leader that is gone waits for its transfers"
            );
        }
    }
}

impl LeaderSession {
    /// The answer to a command that the worker refused; none where nobody waits for one.
    fn refused(&self, command: Command, failure: Failure) -> Option<Message> {
        let (rank, epoch) = (self.worker.rank(), self.leader.terms.epoch);
        match command {
            Command::Transfer(plan) => Some(Message::Transfer(TransferReport {
                plan_id: plan.plan_id,
                epoch: plan.epoch,
                rank,
                path: plan.path(),
                blocks: vec![BlockOutcome::Failed(failure); plan.blocks.len()],
                bytes: 0,
                queued_us: 0,
                busy_us: 0,
            })),
            Command::Flush { token } => {
                Some(Message::Flushed { rank, epoch, token, outcome: FlushOutcome::Failed(failure) })
            }
            Command::Volume { token, .. } => {
                Some(Message::Volume { rank, epoch, token, answer: VolumeAnswer::Failed(failure) })
            }
            Command::Cancel { .. }
            | Command::Advance { .. }
            | Command::Release { .. }
            | Command::Forget { .. } => None,
        }
    }
}
