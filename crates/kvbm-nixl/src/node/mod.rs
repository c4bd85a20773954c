//! A node among peers: it offers blocks under leases, and reads the blocks of others.
//!
//! A thread takes the agent's notifications, answers readers, ends leases that are over, and renews
//! the leases that this node holds on its peers' blocks.
//!
//! # Order
//! A block that is published is dropped in this order: no new lease is granted; the leases on it
//! end, because their readers release them or time is over; what keeps the bytes in place is
//! dropped; the memory is deregistered after the last block.
//!
//! Slots that peers write to are free when the writer says so, or is gone. The end of a node waits
//! for that a while; slots that may still be written to are never freed.

mod error;
mod export;
mod find;
mod grants;
mod import;
pub(crate) mod messages;
mod publication;
mod pump;
mod receive_writes;
mod remote_blocks;
mod remote_slots;
mod wake;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvbm_keys::DeploymentKey;
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{
    BlockSetId, Epoch, GroupId, LeaseId, NamespaceTag, NodeId, SequenceHash, clock, deadline_after,
};
use parking_lot::{Mutex, RwLock};

use crate::agent::{Registration, RemoteAgent};
use crate::shapes::check_whole;
use crate::{BlockSet, BlockSetRegistry, NixlEnabledStorage, NodeAnnouncement, ReadPlan};

pub use error::RemoteError;
pub use export::{BlockSource, HeldBlock, LocalRank};
use export::{Leases, Offered, PublishedBlock};
use grants::Grants;
pub use grants::{BlockSink, Landing, OfferedChain};
pub use messages::RefusedRead;
use messages::{MAX_BLOCKS, MAX_DIGESTS, MAX_PARTS, Message};
pub use publication::{Export, Publication};
pub use remote_blocks::{Arrived, PeerPlans, RemoteBlocks};
pub use remote_slots::{RemoteSlots, WritePlans, Written};
use wake::Wake;

/// Most answers that are waited for at a time.
const MAX_WAITING: usize = 1024;

/// How a node behaves.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// The node, unique in the deployment.
    pub node: NodeId,
    /// This life of it: larger after every start.
    pub epoch: Epoch,
    /// How long a lease holds without a renewal: 100 ms to 10 minutes.
    pub lease: Duration,
    /// How long a lease holds with renewals: at least as long.
    pub longest_lease: Duration,
    /// Most leases that one peer may hold, and as many grants.
    pub leases_per_peer: usize,
    /// Most slots that are set aside for writers at a time, those of dead writers among them.
    pub granted_blocks: usize,
    /// The deployment's key, if it has one: announcements are signed with it, and those of peers
    /// must be.
    pub key: Option<DeploymentKey>,
}

impl NodeOptions {
    /// Leases of 5 s, of up to 5 minutes with renewals, 256 a peer; 1024 slots for writers.
    pub fn new(node: NodeId, epoch: Epoch) -> Self {
        let (lease, longest_lease) = (Duration::from_secs(5), Duration::from_secs(300));
        Self { node, epoch, lease, longest_lease, leases_per_peer: 256, granted_blocks: 1024, key: None }
    }

    fn validate(&self) -> Result<(), RemoteError> {
        let refuse = |option, value: String, rule| Err(RemoteError::Option { option, value, rule });
        if !(Duration::from_millis(100)..=Duration::from_secs(600)).contains(&self.lease) {
            return refuse("lease", format!("{:?}", self.lease), "give 100 ms to 10 minutes");
        }
        if self.longest_lease < self.lease {
            let rule = "give at least as long as `lease`";
            return refuse("longest_lease", format!("{:?}", self.longest_lease), rule);
        }
        if self.leases_per_peer == 0 {
            return refuse("leases_per_peer", "0".to_owned(), "give at least 1");
        }
        Ok(())
    }
}

/// What has happened on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Leases granted to peers.
    pub leases_granted: u64,
    /// Leases that ended because their reader did not renew them.
    pub leases_expired: u64,
    /// Leases that are held now.
    pub leases_held: u64,
    /// Blocks that peers asked for and that were found here.
    pub found: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Messages of agents that no imported announcement names. They are not answered.
    pub strangers: u64,
    /// Messages that are malformed, or of another version.
    pub malformed: u64,
    /// Announcements that are damaged, forged, or signed with another key.
    pub refused_announcements: u64,
    /// Blocks that peers wrote here and that were registered.
    pub received: u64,
    /// Slots that are set aside for writers now.
    pub slots_granted: u64,
    /// Of those, slots of grants that are over, to which a write may still come.
    pub slots_quarantined: u64,
    /// Grants that were over before their writer had finished, and whose slots are free again.
    pub grants_expired: u64,
}

#[derive(Default)]
struct Counters {
    granted: AtomicU64,
    expired: AtomicU64,
    found: AtomicU64,
    refused: AtomicU64,
    strangers: AtomicU64,
    malformed: AtomicU64,
    refused_announcements: AtomicU64,
    received: AtomicU64,
    grants_expired: AtomicU64,
}

/// A node: cheap to clone, ends with its last clone.
#[derive(Clone)]
pub struct RemoteNode {
    // Dropped first: ends the thread.
    _pump: Arc<Pump>,
    shared: Arc<RemoteNodeState>,
}

pub(crate) struct RemoteNodeState {
    agent: Arc<dyn RemoteAgent>,
    options: NodeOptions,
    registry: BlockSetRegistry,
    /// Held by whoever changes what agent and registry know of a peer. Nothing else waits for it.
    importing: Mutex<()>,
    offered: RwLock<BTreeMap<BlockSetId, Arc<Offered>>>,
    leases: Leases,
    grants: Grants,
    /// Grants under which transfers of this node may run.
    writing: Mutex<HashSet<(NodeId, LeaseId)>>,
    /// Leases that this node holds: until when, by our clock.
    held: Mutex<HashMap<(NodeId, LeaseId), Held>>,
    waiting: Mutex<HashMap<u64, Waiting>>,
    /// Agents of peers that were said to speak another version.
    other_versions: Mutex<HashSet<String>>,
    next: AtomicU64,
    sequence: AtomicU64,
    stop: AtomicBool,
    wake: Arc<Wake>,
    counters: Counters,
}

/// A lease on a peer's blocks.
struct Held {
    agent: String,
    validity: Arc<Mutex<Instant>>,
    /// When the renewal under way was sent.
    asked: Option<Instant>,
    renew_at: Instant,
    ttl: Duration,
}

/// A request without an answer yet.
struct Waiting {
    agent: String,
    answer: SyncSender<Message>,
}

/// The thread; ends when this is dropped.
struct Pump {
    shared: Arc<RemoteNodeState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake.set();
        if let Some(thread) = self.thread.lock().take() {
            // The thread waits for nothing longer than its tick. Its panic is reported already.
            let _ = thread.join();
        }
        self.shared.end_grants();
    }
}

impl RemoteNode {
    /// Starts a node over an agent.
    ///
    /// # Errors
    /// [`RemoteError::Option`], [`RemoteError::Thread`].
    pub fn start(agent: Arc<dyn RemoteAgent>, options: NodeOptions) -> Result<Self, RemoteError> {
        options.validate()?;
        let NodeOptions { lease, longest_lease, leases_per_peer, granted_blocks, .. } = options;
        let leases = Leases::new(lease, longest_lease, leases_per_peer);
        let grants = Grants::new(lease, longest_lease, leases_per_peer, granted_blocks);
        let shared = Arc::new(RemoteNodeState {
            agent,
            options,
            registry: BlockSetRegistry::default(),
            importing: Mutex::default(),
            offered: RwLock::default(),
            leases,
            grants,
            writing: Mutex::default(),
            held: Mutex::default(),
            waiting: Mutex::default(),
            other_versions: Mutex::default(),
            next: AtomicU64::new(1),
            sequence: AtomicU64::new(1),
            stop: AtomicBool::new(false),
            wake: Arc::default(),
            counters: Counters::default(),
        });
        // A simulation has no threads: it calls `turn`.
        let thread = if cfg!(kvbm_sim) { None } else { Some(Self::spawn(&shared)?) };
        let pump = Arc::new(Pump { shared: Arc::clone(&shared), thread: Mutex::new(thread) });
        Ok(Self { _pump: pump, shared })
    }

    fn spawn(shared: &Arc<RemoteNodeState>) -> Result<JoinHandle<()>, RemoteError> {
        let (of_thread, wake) = (Arc::clone(shared), Arc::clone(&shared.wake));
        let is_called = shared.agent.wake_on_message(Arc::new(move || wake.set()));
        let thread = std::thread::Builder::new().name("kvbm-remote".to_owned());
        let spawned = thread.spawn(move || pump::run(&of_thread, is_called));
        spawned.map_err(|error| RemoteError::Thread(error.to_string()))
    }

    /// Does once what the node's thread does again and again. When it is due next, if no message
    /// comes before that.
    #[cfg(kvbm_sim)]
    pub fn turn(&self) -> Option<Instant> {
        self.shared.turn(clock::now());
        self.shared.due()
    }

    /// The node's id.
    pub fn node(&self) -> NodeId {
        self.shared.options.node
    }

    /// This life of it.
    pub fn epoch(&self) -> Epoch {
        self.shared.options.epoch
    }

    /// As [`export_source`](Self::export_source), of several cache groups, each with a source of
    /// its own. Groups whose blocks lie in the same memory register it once.
    ///
    /// # Errors
    /// As [`export_local_blockset`](Self::export_local_blockset). Nothing is offered then.
    ///
    /// # Safety
    /// As [`export_source`](Self::export_source), for each source.
    pub unsafe fn export_groups(
        &self,
        namespace: NamespaceTag,
        groups: Vec<(GroupId, Vec<LocalRank>, Arc<dyn BlockSource>)>,
    ) -> Result<Vec<Export>, RemoteError> {
        let mut exports: Vec<Export> = Vec::with_capacity(groups.len());
        for (group, ranks, source) in groups {
            let mut known = exports.iter().map(|export| &export.offered.registrations);
            let known = known.find(|known| is_memory_of(known, &ranks)).cloned();
            let registered = known.map_or_else(|| self.register(&ranks), Ok)?;
            exports.push(self.offer(namespace, group, ranks, Some(source), registered)?);
        }
        Ok(exports)
    }

    /// Offers the blocks of these ranks, whose memory is registered with the agent. Peers see it in
    /// the next [`announcement`](Self::announcement).
    ///
    /// # Errors
    /// [`RemoteError::Agent`], [`RemoteError::Storage`] for memory without a portable description.
    pub fn export_local_blockset(
        &self,
        namespace: NamespaceTag,
        group: GroupId,
        ranks: Vec<LocalRank>,
    ) -> Result<Export, RemoteError> {
        self.export(namespace, group, ranks, None)
    }

    /// The same for blocks that `source` has: it is asked whenever a peer asks.
    ///
    /// # Errors
    /// As [`export_local_blockset`](Self::export_local_blockset).
    ///
    /// # Safety
    /// While a [`HeldBlock`] that the source gave lives, its bytes do not change on any rank.
    pub unsafe fn export_source(
        &self,
        namespace: NamespaceTag,
        group: GroupId,
        ranks: Vec<LocalRank>,
        source: Arc<dyn BlockSource>,
    ) -> Result<Export, RemoteError> {
        self.export(namespace, group, ranks, Some(source))
    }

    fn export(
        &self,
        namespace: NamespaceTag,
        group: GroupId,
        ranks: Vec<LocalRank>,
        source: Option<Arc<dyn BlockSource>>,
    ) -> Result<Export, RemoteError> {
        let registered = self.register(&ranks)?;
        self.offer(namespace, group, ranks, source, registered)
    }

    fn register(&self, ranks: &[LocalRank]) -> Result<Arc<Vec<Registration>>, RemoteError> {
        let registrations = ranks.iter().map(|rank| rank.bound.nixl_register(&*self.shared.agent));
        Ok(Arc::new(registrations.collect::<Result<Vec<_>, _>>()?))
    }

    fn offer(
        &self,
        namespace: NamespaceTag,
        group: GroupId,
        ranks: Vec<LocalRank>,
        source: Option<Arc<dyn BlockSource>>,
        registrations: Arc<Vec<Registration>>,
    ) -> Result<Export, RemoteError> {
        for rank in &ranks {
            rank.check()?;
            rank.bound.describe().map_err(|error| RemoteError::Storage(error.to_string()))?;
        }
        let id = BlockSetId(self.shared.next.fetch_add(1, Ordering::Relaxed));
        let (published, sink) = (Mutex::default(), OnceLock::new());
        let offered = Offered { id, namespace, group, ranks, published, source, sink, registrations };
        let offered = Arc::new(offered);
        self.shared.offered.write().insert(id, Arc::clone(&offered));
        self.shared.sequence.fetch_add(1, Ordering::AcqRel);
        Ok(Export { shared: Arc::clone(&self.shared), offered })
    }

    /// What peers have to import to read from this node, and to be answered by it.
    ///
    /// # Errors
    /// [`RemoteError::Agent`], [`RemoteError::Storage`].
    pub fn announcement(&self) -> Result<NodeAnnouncement, RemoteError> {
        let shared = &self.shared;
        let sequence = shared.sequence.load(Ordering::Acquire);
        let offered: Vec<Arc<Offered>> = shared.offered.read().values().cloned().collect();
        let mut sets = Vec::new();
        for offered in &offered {
            for rank in &offered.ranks {
                sets.push(self.block_set(offered, rank)?);
            }
        }
        Ok(NodeAnnouncement {
            node: shared.options.node,
            epoch: shared.options.epoch,
            sequence,
            agent: shared.agent.name().to_owned(),
            agent_metadata: shared.agent.metadata()?,
            sets,
        })
    }

    fn block_set(&self, offered: &Offered, rank: &LocalRank) -> Result<BlockSet, RemoteError> {
        let layout = rank.bound.describe().map_err(|error| RemoteError::Storage(error.to_string()))?;
        Ok(BlockSet {
            id: offered.id,
            namespace: offered.namespace,
            group: offered.group,
            node: self.shared.options.node,
            slice: rank.slice,
            layout,
            agent: self.shared.agent.name().to_owned(),
            // All sets of a node are reached through the one agent of its announcement.
            agent_metadata: Vec::new(),
        })
    }

    /// What announcements of this deployment are signed with.
    pub fn key(&self) -> Option<&DeploymentKey> {
        self.shared.options.key.as_ref()
    }

    /// The peers that are known.
    pub fn peers(&self) -> Vec<Arc<NodeAnnouncement>> {
        self.shared.registry.all()
    }

    /// What is known of a peer.
    pub fn announced(&self, peer: NodeId) -> Option<Arc<NodeAnnouncement>> {
        self.shared.registry.get(peer)
    }

    /// How our ranks read a peer's blocks.
    ///
    /// # Errors
    /// [`RemoteError::UnknownNode`], [`RemoteError::Shape`] with what does not fit.
    pub fn plan_reads(
        &self,
        peer: NodeId,
        namespace: NamespaceTag,
        group: GroupId,
        ranks: &[LocalRank],
    ) -> Result<Arc<PeerPlans>, RemoteError> {
        let peer = self.shared.registry.get(peer).ok_or(RemoteError::UnknownNode { node: peer })?;
        if !(1..=MAX_PARTS).contains(&ranks.len()) {
            let (option, rule) = ("ranks", "give 1 to 64 ranks of this process");
            return Err(RemoteError::Option { option, value: ranks.len().to_string(), rule });
        }
        let sets = peer.sets_of(&namespace, group);
        check_whole(ranks.iter().map(|rank| &rank.bound), &sets)?;
        let plan = |rank: &LocalRank| -> Result<_, RemoteError> {
            rank.check()?;
            Ok((rank.clone(), ReadPlan::new(&rank.slice, &rank.bound, group, &sets)?))
        };
        let ranks = ranks.iter().map(plan).collect::<Result<_, _>>()?;
        Ok(Arc::new(PeerPlans { peer, namespace, group, ranks }))
    }

    /// Whether plans were made from what is known of their peer now.
    pub fn is_current(&self, plans: &PeerPlans) -> bool {
        self.shared.registry.get(plans.node()).is_some_and(|known| Arc::ptr_eq(&known, &plans.peer))
    }

    /// Asks a peer to hold the longest prefix that it has of these blocks (up to 1024), for
    /// reading.
    ///
    /// # Errors
    /// [`RemoteError::NoAnswer`] at the deadline, [`RemoteError::Refused`], [`RemoteError::Agent`].
    pub fn get_remote_blocks_immutable(
        &self,
        plans: &Arc<PeerPlans>,
        hashes: &[SequenceHash],
        deadline: Instant,
    ) -> Result<RemoteBlocks, RemoteError> {
        let parts = plans.parts();
        let most = MAX_BLOCKS.min(MAX_DIGESTS / parts.len());
        let hashes = &hashes[..hashes.len().min(most)];
        let (node, agent) = (plans.node(), &plans.peer.agent);
        let request = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let ask = Message::Ask {
            request,
            epoch: plans.peer.epoch,
            namespace: plans.namespace,
            group: plans.group,
            hashes: hashes.to_vec(),
            parts,
        };
        // The lease counts from before the peer grants it, so that ours ends first.
        let mut asked = clock::now();
        let (lease, ttl, blocks, digests) = match self.ask(node, agent, request, &ask, deadline)? {
            Message::Grant { lease, ttl_ms, blocks, digests, .. } => {
                (lease, Duration::from_millis(ttl_ms), blocks, digests)
            }
            Message::Refuse { why, .. } => return Err(RemoteError::Refused { node, why }),
            _ => return Err(RemoteError::Malformed { node }),
        };
        if planted(Planted::CountLeaseFromAnswer) {
            asked = clock::now();
        }
        let validity = Arc::new(Mutex::new(deadline_after(asked, ttl)));
        let remote = RemoteBlocks {
            shared: Arc::clone(&self.shared),
            plans: Arc::clone(plans),
            lease,
            validity: Arc::clone(&validity),
            hashes: hashes[..blocks.len().min(hashes.len())].to_vec(),
            blocks,
            digests,
        };
        // Dropping it releases the lease.
        if remote.blocks.len() > hashes.len()
            || remote.digests.len() != remote.blocks.len() * plans.ranks.len()
        {
            return Err(RemoteError::Malformed { node });
        }
        let renew_at = deadline_after(asked, ttl / 3);
        let held = Held { agent: agent.clone(), validity, asked: None, renew_at, ttl };
        self.shared.held.lock().insert((node, lease), held);
        // It has to be renewed earlier than the thread may look next.
        self.shared.wake.set();
        Ok(remote)
    }

    fn ask(
        &self,
        node: NodeId,
        agent: &str,
        request: u64,
        ask: &Message,
        deadline: Instant,
    ) -> Result<Message, RemoteError> {
        let (answer, answers) = sync_channel(1);
        self.shared.wait_for(request, agent, answer)?;
        let sent = self.shared.send(agent, ask);
        let received = sent.and_then(|()| {
            receive(&answers, deadline).map_err(|error| match error {
                RecvTimeoutError::Timeout => RemoteError::NoAnswer { node },
                RecvTimeoutError::Disconnected => RemoteError::Thread("the node has ended".to_owned()),
            })
        });
        self.shared.waiting.lock().remove(&request);
        received
    }

    /// What has happened so far.
    pub fn counts(&self) -> NodeCounts {
        let counters = &self.shared.counters;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (slots_granted, slots_quarantined) = self.shared.grants.slots();
        NodeCounts {
            leases_granted: of(&counters.granted),
            leases_expired: of(&counters.expired),
            leases_held: self.shared.leases.count() as u64,
            found: of(&counters.found),
            refused: of(&counters.refused),
            strangers: of(&counters.strangers),
            malformed: of(&counters.malformed),
            refused_announcements: of(&counters.refused_announcements),
            received: of(&counters.received),
            slots_granted: slots_granted as u64,
            slots_quarantined: slots_quarantined as u64,
            grants_expired: of(&counters.grants_expired),
        }
    }
}

/// Whether memory that is registered already is that of these ranks.
fn is_memory_of(registered: &[Registration], ranks: &[LocalRank]) -> bool {
    let is_known = |(known, rank): (&Registration, &LocalRank)| {
        let storages = rank.bound.storages();
        let has = |storage: &_| known.storages().iter().any(|known| Arc::ptr_eq(known, storage));
        storages.iter().all(has)
    };
    registered.len() == ranks.len() && registered.iter().zip(ranks).all(is_known)
}

/// The next answer, by `deadline`.
#[cfg(not(kvbm_sim))]
fn receive(answers: &Receiver<Message>, deadline: Instant) -> Result<Message, RecvTimeoutError> {
    answers.recv_timeout(deadline.saturating_duration_since(clock::now()))
}

/// The same in a simulation, which goes on meanwhile.
#[cfg(kvbm_sim)]
fn receive(answers: &Receiver<Message>, deadline: Instant) -> Result<Message, RecvTimeoutError> {
    let answer = std::cell::OnceCell::new();
    kvbm_plan::simulation::wait_until(deadline, || {
        answer.get().is_some() || answers.try_recv().is_ok_and(|message| answer.set(message).is_ok())
    });
    answer.into_inner().ok_or(RecvTimeoutError::Timeout)
}

impl RemoteNodeState {
    /// Expects the answer to a request from this agent.
    fn wait_for(&self, request: u64, agent: &str, answer: SyncSender<Message>) -> Result<(), RemoteError> {
        let mut waiting = self.waiting.lock();
        if waiting.len() >= MAX_WAITING {
            return Err(RemoteError::TooManyRequests { waiting: waiting.len() });
        }
        waiting.insert(request, Waiting { agent: agent.to_owned(), answer });
        drop(waiting);
        // An agent that does not call is asked more often while answers are expected.
        self.wake.set();
        Ok(())
    }

    fn send(&self, agent: &str, message: &Message) -> Result<(), RemoteError> {
        Ok(self.agent.notify(agent, &messages::encode(message))?)
    }
}

impl fmt::Debug for RemoteNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteNode({} over {:?})", self.node(), self.shared.agent)
    }
}
