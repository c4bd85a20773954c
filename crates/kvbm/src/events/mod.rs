//! From the pool's ring to subscribers.

mod engine_format;
mod hashing;
mod notes;
mod publish_lag;
mod remote;
mod ring;

use crate::config::{EventsConfig, WhenFull};
use crate::metrics::Metrics;
use crate::volume::Change;
use engine_format::Translator;
use kvbm_events::url::OpenError;
use kvbm_events::vllm::{EngineBlock, PublishingStats};
use kvbm_events::{
    Answering, EventBlock, EventKind, EventManager, EventTransport, EventUrl, InProcessConfig,
    InProcessTransport, KvEvent, Publisher, PublisherConfig, PublisherStats, Snapshot, SnapshotServer,
    SourceId, StreamId, Subscriber, TransportError,
};
use kvbm_plan::{BlockIdentity, LocalHash, Location, NodeId, SequenceHash, Tier, VolumeId, deadline_after};
use kvbm_pool::{EventBacklog, Registry};
use kvbm_tokens::{BlockChain, BlockHasher};
use notes::Notes;
use parking_lot::Mutex;
use remote::{Outlet, Remote};
use ring::{Progress, Ring};
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Publishes what the pool writes to its ring, on a thread of its own: to the transport that the
/// configuration names, and to subscribers in this process.
pub struct EventPump {
    outlet: Arc<Outlet>,
    publisher: Publisher,
    source: SourceId,
    registry: Registry,
    facts: BlockFacts,
    notes: Arc<Notes>,
    /// Counters of vLLM's format, where events are published in it.
    engine_format: Option<Arc<Mutex<PublishingStats>>>,
    progress: Arc<Progress>,
    /// Events of volumes that were handed to the publisher.
    of_volume: Arc<AtomicU64>,
    /// Longest wait for room in the ring; zero where the oldest events go instead.
    full_wait: Duration,
    /// Events that the publisher had taken when a wait ended during which it took none.
    stuck_at: AtomicU64,
    _answering: Answering,
}

/// What every event of this manager says about its blocks.
#[derive(Clone, Debug)]
pub(crate) struct BlockFacts {
    /// By cache group.
    pub(crate) block_bytes: Arc<[u64]>,
    pub(crate) block_tokens: u32,
    pub(crate) node: NodeId,
}

impl BlockFacts {
    /// A block as events describe it. `root` is the first block of its chain.
    fn block(
        &self,
        tier: Tier,
        identity: BlockIdentity,
        root: SequenceHash,
        local_hash: Option<LocalHash>,
    ) -> EventBlock {
        EventBlock {
            identity,
            prefix_hash: root,
            local_hash,
            block_bytes: self.block_bytes.get(usize::from(identity.group.0)).copied().unwrap_or(0),
            block_tokens: self.block_tokens,
            location: Location::on(self.node, tier),
        }
    }

    fn block_of_volume(
        &self,
        id: VolumeId,
        identity: BlockIdentity,
        root: SequenceHash,
        local_hash: Option<LocalHash>,
    ) -> EventBlock {
        let mut block = self.block(Tier::G4, identity, root, local_hash);
        block.location.volume = Some(id);
        block
    }
}

/// A publisher that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum EventsError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] kvbm_events::ConfigError),
    /// Where the events should go.
    #[error("cannot publish events: {0}")]
    Open(#[from] OpenError),
    /// Followers could not ask.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The system refused a thread.
    #[error("cannot start the event thread: {0}; raise the limit of threads")]
    Thread(#[from] std::io::Error),
}

/// What became of the events so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventsStatus {
    /// Events that the transport took.
    pub published: u64,
    /// Events that nobody will get: the ring was full, or the transport refused them for good.
    /// Followers see gaps.
    pub lost: u64,
    /// Times that events were lost in the ring.
    pub gaps: u64,
    /// Events that wait to be published.
    pub waiting: u64,
    /// How long the oldest of them has waited; zero where nobody listens.
    pub lag: Duration,
    /// Times that the transport could not take a batch; it was kept.
    pub unavailable: u64,
    /// Stored blocks that were published without tokens, in a format that has them. They were
    /// registered without tokens, or so long ago that the tokens were dropped.
    pub without_tokens: u64,
    /// Stored blocks that were published under kvbm's hash, in a format that has the engine's.
    /// Nobody had [described](crate::KvBlockManager::describe) them, or too long ago.
    pub without_hash: u64,
}

/// Most blocks whose local hashes (and tokens, where events have them) are remembered, beside those
/// in the ring.
const MAX_NOTES: usize = 1 << 20;

/// The pool numbers all of its events in one row.
const ONLY_SHARD: u16 = 0;

/// The stream of the volumes' events; the pool's is 0.
pub(crate) const VOLUME_SHARD: u16 = 1;

/// Takes up to so many changes of volumes, with their numbers; gives the number of the next one.
type DrainChanges = dyn FnMut(usize, &mut dyn FnMut(u64, Change)) -> u64 + Send;

/// Blocks of volumes, each with the first of its chain, and the number of the next change.
type HeldOnVolumes = dyn Fn() -> (Vec<(VolumeId, BlockIdentity, SequenceHash)>, u64) + Send + Sync;

/// Where the events of volumes come from.
pub(crate) struct VolumeChanges {
    pub(crate) drain: Box<DrainChanges>,
    /// What is there now.
    pub(crate) held: Box<HeldOnVolumes>,
}

/// Longest time in which the last events of a manager are published.
const LAST_PATIENCE: Duration = Duration::from_secs(10);
/// How often a caller that waits for room looks.
const ROOM_TICK: Duration = Duration::from_millis(1);

fn publishing(config: &EventsConfig) -> PublisherConfig {
    PublisherConfig {
        batch_events: config.batch_events as usize,
        batch_bytes: config.batch_bytes as usize,
        max_age: config.batch_age,
        heartbeat: config.heartbeat,
        publish_timeout: config.publish_timeout,
    }
}

/// Longest wait for room in the ring; zero where the oldest events go instead.
fn full_wait(config: &EventsConfig) -> Duration {
    match config.when_full {
        WhenFull::DropOldest => Duration::ZERO,
        WhenFull::Block => config.full_wait,
    }
}

/// Room for notes on the blocks of all tiers, and on those in the ring.
fn notes(registry: &Registry, config: &EventsConfig, with_tokens: bool) -> Notes {
    let slots: usize = Tier::SLOTTED.into_iter().map(|tier| registry.capacity(tier) as usize).sum();
    Notes::new(slots.min(MAX_NOTES) + config.ring_capacity as usize, with_tokens)
}

/// Changes of volumes as events; how many were handed out is counted in `handed`.
fn volume_events(
    mut drain: Box<DrainChanges>,
    facts: BlockFacts,
    handed: &Arc<AtomicU64>,
    notes: &Arc<Notes>,
) -> impl FnMut(usize, &mut Vec<KvEvent>) -> u64 + Send + 'static {
    let (handed, notes) = (Arc::clone(handed), Arc::clone(notes));
    move |max, out| {
        drain(max, &mut |number, change| {
            handed.fetch_add(1, Ordering::Relaxed);
            let local_hash = notes.read().local_hash(&change.identity.hash);
            let block = facts.block_of_volume(change.volume, change.identity, change.root, local_hash);
            let kind = if change.stored { EventKind::Store(block) } else { EventKind::Remove(block) };
            out.push(KvEvent::new(number, kind));
        })
    }
}

impl EventPump {
    pub(crate) fn start(
        registry: Registry,
        config: &EventsConfig,
        facts: BlockFacts,
        volumes: Option<VolumeChanges>,
    ) -> Result<Self, EventsError> {
        let url = config.url.as_ref().map(|url| url.text().parse::<EventUrl>());
        let url = url.transpose().map_err(OpenError::from)?;
        let progress = Arc::new(Progress::default());
        let source = SourceId(if config.worker_id == 0 { fresh_source() } else { config.worker_id });
        let (changes, held) = volumes.map(|VolumeChanges { drain, held }| (drain, held)).unzip();
        let speaker = url.as_ref().and_then(EventUrl::speaker);
        let notes = Arc::new(notes(&registry, config, speaker.is_some()));
        let take = snapshots(registry.clone(), facts.clone(), Arc::clone(&notes), held);
        let server = Arc::new(server(Arc::clone(&take), source, registry.clone()));
        let translator =
            speaker.zip(notes.tokens()).map(|(speaker, blocks)| Translator::new(take, blocks, speaker));
        let engine_format = translator.as_ref().map(Translator::stats);
        let timeout = config.publish_timeout;
        let remote = url.map(|url| Remote::new(url, timeout, source, Arc::clone(&server), translator));
        let outlet = Arc::new(Outlet {
            remote: remote.transpose()?,
            local: InProcessTransport::new(InProcessConfig::default()),
            trouble: Mutex::new(None),
            registry: registry.clone(),
            progress: Arc::clone(&progress),
            publisher: OnceLock::new(),
        });
        let answering =
            outlet.local.answer(source, Arc::new(move |question: &[u8]| server.answer(question)))?;
        let mut manager = EventManager::new(publishing(config), source, registry.epoch(), outlet.clone())?;
        let ring = Ring::new(registry.clone(), facts.clone(), Arc::clone(&notes), Arc::clone(&progress));
        manager.add_shard(ONLY_SHARD, ring)?;
        let of_volume = Arc::new(AtomicU64::new(0));
        if let Some(drain) = changes {
            // Blocks of volumes are in a stream of their own: the pool's locks order nothing there.
            manager.add_shard(VOLUME_SHARD, volume_events(drain, facts.clone(), &of_volume, &notes))?;
        }
        let publisher = manager.spawn()?;
        // Nothing is there yet: this is the only call.
        let _ = outlet.publisher.set(publisher.waker());
        Ok(Self {
            outlet,
            publisher,
            source,
            registry,
            facts,
            notes,
            engine_format,
            progress,
            of_volume,
            full_wait: full_wait(config),
            stuck_at: AtomicU64::new(u64::MAX),
            _answering: answering,
        })
    }

    /// A subscriber in this process that sees every event from now on, and every loss. Where the
    /// configuration names a remote transport, it sees what that has taken.
    ///
    /// # Errors
    /// Too many subscribers.
    pub fn subscribe(&self) -> Result<Subscriber, TransportError> {
        if !self.outlet.has_listeners() {
            // What waits happened before.
            self.pump();
        }
        Ok(Subscriber::new(self.outlet.subscribe()?))
    }

    /// Who publishes: the same in every event of this manager.
    pub fn source(&self) -> SourceId {
        self.source
    }

    /// A subscriber's end in this process: to follow, and to ask this manager for snapshots.
    pub fn transport(&self) -> Arc<dyn EventTransport> {
        Arc::clone(&self.outlet) as Arc<dyn EventTransport>
    }

    /// Addresses where this manager's own sockets listen (events, then replays), with the ports
    /// that they got where the URL says `*`. Empty where events go to a server or stay in this
    /// process.
    pub fn listens_at(&self) -> Vec<String> {
        self.outlet.listens_at()
    }

    /// What this manager holds now on the tiers of this machine, as a follower needs it that has
    /// lost events or comes late. Takes time and memory in proportion to the tiers, in part under
    /// the pool's lock.
    pub fn snapshot(&self) -> Snapshot {
        snapshot(&self.registry, &self.facts, &self.notes)
    }

    /// Publishes what has happened so far rather than at the next tick. `false` if that did not
    /// work in a second.
    pub fn pump(&self) -> bool {
        self.flush(Duration::from_secs(1))
    }

    /// Publishes what happened last, also where the tiers took all the time until `deadline`. How
    /// many events nobody took.
    pub(crate) fn flush_last(&self, deadline: Instant) -> u64 {
        let left = deadline.saturating_duration_since(kvbm_plan::clock::now());
        self.flush(left.clamp(Duration::from_millis(100), LAST_PATIENCE));
        self.status().waiting
    }

    /// Publishes what has happened so far, trying until `timeout` has passed. Whether all of it was
    /// taken.
    pub fn flush(&self, timeout: Duration) -> bool {
        let deadline = deadline_after(kvbm_plan::clock::now(), timeout);
        loop {
            let left = deadline.saturating_duration_since(kvbm_plan::clock::now());
            match self.publisher.flush(left) {
                Ok(()) => return true,
                // The transport may come back.
                Err(kvbm_events::FlushError::Transport(_)) if left > ROOM_TICK => {
                    std::thread::sleep(left.min(Duration::from_millis(20)));
                }
                Err(_) => return false,
            }
        }
    }

    /// Counters of the publisher.
    pub fn stats(&self) -> PublisherStats {
        self.publisher.stats()
    }

    /// What became of the events so far.
    pub fn status(&self) -> EventsStatus {
        let of_engine = self.engine_format.as_ref().map_or_else(Default::default, |stats| *stats.lock());
        let (stats, ring) = (self.publisher.stats(), self.registry.event_backlog());
        // The publisher counts a batch as published, although followers of engines did not get all
        // of its blocks.
        let untold = of_engine.refused.min(stats.events);
        let lost = stats.refused + ring.lost.max(stats.lost_in_source) + untold;
        // Every number below was published or is lost.
        let published = stats.events - untold;
        let announced = published + lost;
        let of_volume = self.of_volume.load(Ordering::Relaxed);
        EventsStatus {
            published,
            lost,
            // What was lost since the ring was last read is one more.
            gaps: self.progress.gaps() + u64::from(ring.lost > stats.lost_in_source),
            waiting: (ring.next_seq + of_volume).saturating_sub(announced),
            lag: if self.outlet.has_listeners() {
                self.progress.lag(announced.saturating_sub(of_volume))
            } else {
                Duration::ZERO
            },
            unavailable: stats.unavailable,
            without_tokens: of_engine.without_tokens,
            without_hash: of_engine.without_hash,
        }
    }

    /// Why the last batch was not taken, with the URL (without what is secret) and the way out;
    /// `None` where it was.
    pub fn trouble(&self) -> Option<String> {
        self.outlet.trouble.lock().clone()
    }

    /// Remembers what events will say of blocks that were committed: `blocks` of `chain` from its
    /// block `first` on.
    pub(crate) fn note(&self, chain: &BlockChain<'_>, first: usize, blocks: usize) {
        self.notes.add(chain, first, blocks);
    }

    /// Remembers what an engine knows of a block, as far as events say it.
    pub(crate) fn describe(&self, hash: SequenceHash, known: EngineBlock, hasher: &BlockHasher) {
        self.notes.describe(hash, known, hasher);
    }

    /// Called before blocks are registered. Where the configuration says so, waits until the ring
    /// is half empty, so that there is room for what follows on all tiers, or its patience ends. A
    /// transport that takes nothing during a whole wait costs that one: the next calls do not wait
    /// before it takes events again.
    pub(crate) fn make_room(&self) {
        if self.full_wait.is_zero() {
            return;
        }
        let deadline = deadline_after(kvbm_plan::clock::now(), self.full_wait);
        let taken = |ring: &EventBacklog| ring.next_seq.saturating_sub(ring.waiting as u64 + ring.lost);
        let mut ring = self.registry.event_backlog();
        let taken_before = taken(&ring);
        while ring.waiting > ring.capacity / 2 && taken(&ring) != self.stuck_at.load(Ordering::Relaxed) {
            if kvbm_plan::clock::now() >= deadline {
                if taken(&ring) == taken_before {
                    self.stuck_at.store(taken_before, Ordering::Relaxed);
                }
                return;
            }
            self.publisher.wake();
            std::thread::sleep(ROOM_TICK);
            ring = self.registry.event_backlog();
        }
    }

    /// Copies what is known to the metrics.
    pub(crate) fn refresh(&self, metrics: &Metrics) {
        let (status, stats) = (self.status(), self.publisher.stats());
        metrics.events_published.raise_to(status.published);
        metrics.events_lost.raise_to(status.lost);
        metrics.event_gaps.raise_to(status.gaps);
        metrics.event_bytes.raise_to(stats.bytes);
        metrics.event_transport_unavailable.raise_to(status.unavailable);
        metrics.events_without_tokens.raise_to(status.without_tokens);
        metrics.events_without_hash.raise_to(status.without_hash);
        metrics.events_waiting.set(status.waiting);
        metrics.event_lag_us.set(u64::try_from(status.lag.as_micros()).unwrap_or(u64::MAX));
    }
}

/// What the tiers hold, each block with the first one of its chain.
fn snapshot(registry: &Registry, facts: &BlockFacts, notes: &Notes) -> Snapshot {
    let (mut held, next_sequence) = registry.snapshot_all();
    // Parents before children across tiers too: a child may lie higher than its parent.
    held.sort_by_key(|(_, identity)| identity.position);
    let mut roots = HashMap::with_capacity(held.len());
    let blocks = held.into_iter().map(|(tier, identity)| {
        let of_parent = identity.parent.map(|parent| roots.get(&parent).copied().unwrap_or(parent));
        let root = *roots.entry(identity.hash).or_insert(of_parent.unwrap_or(identity.hash));
        facts.block(tier, identity, root, notes.read().local_hash(&identity.hash))
    });
    Snapshot { next_sequence, blocks: blocks.collect() }
}

/// What a shard of the manager's events stands at.
type TakeSnapshot = dyn Fn(u16) -> Option<Snapshot> + Send + Sync;

fn snapshots(
    registry: Registry,
    facts: BlockFacts,
    notes: Arc<Notes>,
    volumes: Option<Box<HeldOnVolumes>>,
) -> Arc<TakeSnapshot> {
    Arc::new(move |shard| match (shard, &volumes) {
        (ONLY_SHARD, _) => Some(snapshot(&registry, &facts, &notes)),
        (VOLUME_SHARD, Some(held)) => {
            let (held, next_sequence) = held();
            let blocks = held.into_iter().map(|(volume, identity, root)| {
                let local_hash = notes.read().local_hash(&identity.hash);
                facts.block_of_volume(volume, identity, root, local_hash)
            });
            Some(Snapshot { next_sequence, blocks: blocks.collect() })
        }
        _ => None,
    })
}

/// Answers questions for what this manager holds. The pool says at little cost how far its events
/// are; those of volumes are few, and their snapshots are taken without its lock.
fn server(take: Arc<TakeSnapshot>, source: SourceId, registry: Registry) -> SnapshotServer {
    let epoch = registry.epoch();
    let is_ours = move |stream: StreamId| (stream.source, stream.epoch) == (source, epoch);
    let next_sequence = move |stream: StreamId| match stream.shard {
        _ if !is_ours(stream) => None,
        ONLY_SHARD => Some(registry.event_backlog().next_seq),
        _ => Some(u64::MAX),
    };
    let server =
        SnapshotServer::new(move |stream: StreamId| if is_ours(stream) { take(stream.shard) } else { None });
    server.with_next_sequence(next_sequence)
}

/// A number that no other manager has, on this machine or another: hash keys that the system drew
/// at random, different with every call.
fn fresh_source() -> u64 {
    RandomState::new().hash_one(std::process::id())
}
