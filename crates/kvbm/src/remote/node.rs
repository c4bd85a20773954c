//! This node among its peers: look-ups, and the threads that read blocks.

use super::choice::choose;
use super::directory::Directory;
use super::fetch::{Fetching, Then};
use super::groups::served;
use super::queue::{Job, Queue, Turn};
use super::table::PeerTable;
use super::{PeerStatus, Peers, Pushed};
use crate::metrics::Metrics;
use crate::volume::{GroupChain, Probe};
use kvbm_plan::{
    BlockId, BlockIdentity, Failure, FailureKind, GroupId, NamespaceId, NodeId, SequenceHash, Tier, clock,
    deadline_after,
};
use kvbm_pool::{AnyArrivals, Arrival, FoundOutside, Outside, Prefix, Registry, Withheld};
use kvbm_tokens::BlockChain;
use kvbm_transfer::RemoteHost;
use parking_lot::{Condvar, Mutex};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often blocks are looked for that another transfer brings.
const ARRIVAL_TICK: Duration = Duration::from_millis(2);

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) refresh: Duration,
    pub(super) lookup: Duration,
    pub(super) read: Duration,
}

/// This node: its threads end with it.
pub(super) struct Node {
    pub(super) shared: Arc<NodeState>,
    pub(super) threads: Vec<JoinHandle<()>>,
}

/// What the threads share.
pub(super) struct NodeState {
    pub(super) host: RemoteHost,
    pub(super) registry: Registry,
    pub(super) table: PeerTable,
    pub(super) queue: Queue,
    pub(super) times: Times,
    pub(super) directory: Mutex<Directory>,
    pub(super) metrics: Metrics,
    /// Bytes of a block on all ranks, by cache group.
    pub(super) block_bytes: Vec<u64>,
    /// Whether a cache group needs every block of a prefix, by group.
    pub(super) needs_all: Vec<bool>,
    pub(super) stop: Mutex<bool>,
    pub(super) stopped: Condvar,
}

/// Keeps slots out of use that a late read may still write to.
#[derive(Default)]
struct Hold(Mutex<Option<Withheld>>);

/// Blocks that have a slot of G2 and nothing in it yet: place among the arrivals, block, slot.
pub(super) type Reserved = Vec<(usize, BlockIdentity, BlockId)>;

impl Drop for Node {
    fn drop(&mut self) {
        *self.shared.stop.lock() = true;
        self.shared.stopped.notify_all();
        let ended = Failure::new(FailureKind::ShuttingDown, "the manager ends: nothing is read from peers");
        for job in self.shared.queue.close() {
            job.fetch.finish(Some(ended.clone()));
        }
        let withdraw = || self.shared.directory.lock().withdraw(self.shared.host.node().node());
        let is_withdrawn = withdraw();
        let own = std::thread::current().id();
        for thread in self.threads.drain(..).filter(|thread| thread.thread().id() != own) {
            // Each looks at the flag after at most one read, which has a deadline.
            let _panicked = thread.join();
        }
        // The thread that looks for peers may have announced the node again before it saw the flag.
        // A server that is away is not waited for twice: it drops the announcement by itself.
        if is_withdrawn {
            withdraw();
        }
    }
}

impl Peers for Node {
    fn extend(&self, prefix: &mut Prefix, chain: BlockChain<'_>, probe: Probe) -> bool {
        let from = prefix.len();
        let Some(rest) = chain.hashes().get(from..).filter(|rest| !rest.is_empty()) else { return false };
        if probe == Probe::Never {
            return self.has_usable();
        }
        let (asked, best) = self.shared.ask(chain.hashes()[0], prefix.group(), rest, &[]);
        if let Some((node, blocks)) = best {
            prefix.extend_on_node(node, NamespaceId::from(chain.namespace()), blocks);
        }
        asked
    }

    fn has_usable(&self) -> bool {
        !self.shared.usable(&[]).is_empty()
    }

    fn find_groups(&self, chain: &GroupChain<'_>) -> Option<FoundOutside> {
        self.shared.find_groups(chain)
    }

    fn holder(&self, group: GroupId, chain: BlockChain<'_>, from: usize) -> Option<(NodeId, usize)> {
        let rest = chain.hashes().get(from..).filter(|rest| !rest.is_empty())?;
        self.shared.ask(chain.hashes()[0], group, rest, &[]).1
    }

    fn fetch(&self, prefix: &Prefix, until: Option<Instant>, then: Then) -> Fetching {
        let most = deadline_after(clock::now(), self.shared.times.read);
        let fetching = Fetching::new(then);
        let Some(node) = prefix.node() else {
            fetching.share().finish(None);
            return fetching;
        };
        let chain = prefix.chain_identities();
        let Some(first) = chain.first().map(|first| first.hash) else {
            fetching.share().finish(None);
            return fetching;
        };
        let job = Job {
            fetch: fetching.share(),
            node,
            group: prefix.group(),
            first,
            identities: if self.shared.needs_all(prefix.group()) { chain } else { outside(prefix) },
            deadline: until.map_or(most, |until| until.min(most)),
        };
        if let Err(job) = self.shared.queue.push(job) {
            let detail = "too many prefixes wait to be read from peers: compute it, or raise remote.threads";
            job.fetch.finish(Some(Failure::new(FailureKind::QueueFull, detail)));
        }
        fetching
    }

    fn push(&self, node: NodeId, chain: BlockChain<'_>, deadline: Instant) -> Pushed {
        self.shared.push(node, chain, deadline)
    }

    fn time_per_block(&self, node: NodeId, group: GroupId) -> Option<Duration> {
        self.shared.table.time_of(node, self.shared.bytes_of_block(group), clock::now())
    }

    fn status(&self) -> Vec<PeerStatus> {
        let refusal = |node| self.shared.host.refusal(node).map(|failure| failure.to_string());
        self.shared.table.status(|node| self.shared.queue.reading(node), refusal)
    }
}

impl NodeState {
    /// Looks for peers until the manager ends.
    pub(super) fn watch(&self) {
        loop {
            self.directory.lock().refresh(self.host.node(), &self.table);
            // What is made of a new announcement is made here, not by the first request.
            let _usable = self.host.peers();
            self.note_counts();
            let mut stop = self.stop.lock();
            if !*stop {
                self.stopped.wait_for(&mut stop, self.times.refresh);
            }
            if *stop {
                return;
            }
        }
    }

    /// What peers read here.
    pub(super) fn note_counts(&self) {
        let (counts, metrics) = (self.host.node().counts(), &self.metrics);
        metrics.remote.leases_held.set(counts.leases_held);
        metrics.remote.leases_granted.raise_to(counts.leases_granted);
        metrics.remote.leases_expired.raise_to(counts.leases_expired);
        metrics.remote.received.raise_to(counts.received);
        metrics.remote.slots_granted.set(counts.slots_granted);
        metrics.remote.slots_quarantined.set(counts.slots_quarantined);
        let messages = counts.refused + counts.strangers + counts.malformed;
        metrics.remote.refused.raise_to(messages + counts.refused_announcements);
    }

    /// Reads prefixes until the queue is closed.
    pub(super) fn serve(&self) {
        while let Some((job, turn)) = self.queue.next() {
            let mut kept = Vec::new();
            let read = catch_unwind(AssertUnwindSafe(|| self.bring(&job, turn, &mut kept)));
            let failure = read.unwrap_or_else(|_| {
                tracing::error!(target: "kvbm", "the leader failed while it read from a peer; the blocks are computed");
                Some(Failure::new(FailureKind::Io, "the leader failed while it read the blocks"))
            });
            if let Some(failure) = &failure {
                tracing::debug!(target: "kvbm", %failure, peer = %job.node, "not all blocks came from peers");
            }
            // What has arrived stays pinned until what follows has pinned it.
            job.fetch.finish(failure);
            drop(kept);
        }
    }

    /// Peers that may be asked, without those of `except`.
    fn usable(&self, except: &[NodeId]) -> Vec<NodeId> {
        let mut peers = self.host.peers();
        peers.retain(|peer| !except.contains(peer));
        self.table.allowed(&peers, clock::now())
    }

    /// Bytes of a block of a cache group on all ranks.
    fn bytes_of_block(&self, group: GroupId) -> u64 {
        self.block_bytes.get(usize::from(group.0)).copied().unwrap_or(0)
    }

    /// Whether a cache group needs every block of a prefix.
    fn needs_all(&self, group: GroupId) -> bool {
        self.needs_all.get(usize::from(group.0)).copied().unwrap_or(true)
    }

    /// See [`Peers::find_groups`].
    fn find_groups(&self, chain: &GroupChain<'_>) -> Option<FoundOutside> {
        let hashes = chain.chain.hashes();
        let first = hashes.first()?;
        let peers = choose(self.usable(&[]), first, |peer| self.table.last_hit(peer));
        if peers.is_empty() {
            return None;
        }
        let ask = |deadline| self.host.find_each(&peers, hashes, deadline);
        let answers = self.answers(&peers, ask, |_| false);
        let served = |there: Option<&Vec<Vec<bool>>>| {
            let is_there = |group: usize, at: usize| {
                there.and_then(|there| there.get(group)?.get(at)).is_some_and(|there| *there)
            };
            served(&chain.needed, hashes.len(), |group, at| chain.on_tiers[group][at] || is_there(group, at))
        };
        let least = served(None);
        let lengths = answers.into_iter().map(|(node, there)| (served(Some(&there)), node, there));
        // Of those with as much, the one that is least busy.
        let best = lengths.filter(|(length, ..)| *length > least);
        let best = best.max_by_key(|(length, node, _)| (*length, usize::MAX - self.queue.reading(*node)));
        best.map(|(_, node, there)| FoundOutside { place: Outside::Node(node), there })
    }

    /// The answers of those peers that answer a question in time. The others count as late, unless
    /// an answer `is_enough`.
    fn answers<T>(
        &self,
        peers: &[NodeId],
        ask: impl FnOnce(Instant) -> Vec<(NodeId, Option<T>)>,
        is_enough: impl Fn(&T) -> bool,
    ) -> Vec<(NodeId, T)> {
        let began = clock::now();
        for peer in peers {
            self.table.note_request(*peer, began);
        }
        let answers = ask(deadline_after(began, self.times.lookup));
        let now = clock::now();
        // The others were not waited for then.
        let has_all = answers.iter().any(|(_, found)| found.as_ref().is_some_and(&is_enough));
        let late = Failure::new(FailureKind::Deadline, "it did not answer in time which blocks it has");
        for (node, found) in &answers {
            if found.is_some() || !has_all {
                self.table.note_answer(*node, found.is_none().then_some(&late), began, now);
            }
        }
        answers.into_iter().filter_map(|(node, found)| Some((node, found?))).collect()
    }

    /// Asks peers for these blocks of a cache group, of the chain that begins with `first`: whether
    /// any was asked, and the one that has most.
    fn ask(
        &self,
        first: SequenceHash,
        group: GroupId,
        hashes: &[SequenceHash],
        except: &[NodeId],
    ) -> (bool, Option<(NodeId, usize)>) {
        let peers = choose(self.usable(except), &first, |peer| self.table.last_hit(peer));
        if peers.is_empty() {
            return (false, None);
        }
        // A question names no more, so a peer that has all of these is enough.
        let hashes = &hashes[..hashes.len().min(RemoteHost::MAX_FIND)];
        let ask = |deadline| self.host.find(&peers, group, hashes, deadline);
        let answers = self.answers(&peers, ask, |found| *found == hashes.len());
        let found = answers.into_iter().filter(|(_, found)| *found > 0);
        // Of those with as much, the one that is least busy.
        let best = found.max_by_key(|(node, found)| (*found, usize::MAX - self.queue.reading(*node)));
        (true, best)
    }

    /// Brings the blocks of a job to G2; why not all of them. What has arrived is pinned by `kept`.
    fn bring(&self, job: &Job, turn: Option<Turn<'_>>, kept: &mut Vec<AnyArrivals>) -> Option<Failure> {
        let late = || Failure::new(FailureKind::Deadline, "the blocks of the peer did not come in time");
        let (mut turn, mut tried) = (turn, Vec::new());
        let mut last: Option<Failure> = None;
        loop {
            if clock::now() >= job.deadline || *self.stop.lock() {
                return Some(last.unwrap_or_else(late));
            }
            let missing = missing(&self.registry, &job.identities, usize::MAX);
            let first = missing.first()?;
            if self.registry.is_arriving(Tier::G2, job.group, first.hash) {
                // Another transfer brings it.
                std::thread::sleep(ARRIVAL_TICK);
                continue;
            }
            let arrivals = match self.registry.begin_arrivals(Tier::G2, &missing) {
                Ok(arrivals) => arrivals,
                Err(error) => return Some(Failure::new(FailureKind::Full, error.to_string())),
            };
            let reserved = match reserved(&arrivals) {
                Ok(reserved) if reserved.is_empty() => {
                    drop(arrivals);
                    std::thread::sleep(ARRIVAL_TICK);
                    continue;
                }
                Ok(reserved) => reserved,
                Err(failure) => return Some(failure),
            };
            let hashes: Vec<_> = reserved.iter().map(|(_, identity, _)| identity.hash).collect();
            let (peer, _turn) = match turn.take() {
                Some(turn) => (job.node, turn),
                None => match self.another(job, &hashes, &tried) {
                    Some(other) => other,
                    None => return Some(last.unwrap_or_else(late)),
                },
            };
            tried.push(peer);
            let until = self.until(job.deadline, &tried);
            let (arrivals, failure) = self.read(peer, arrivals, &reserved, until);
            if failure.is_none() {
                // The rest of the chain may be there too, once another transfer has brought a part.
                tried.retain(|node| *node != peer);
            }
            kept.push(arrivals);
            last = failure.or(last);
        }
    }

    /// Another peer that has the first of these blocks, with a turn to read from it.
    fn another(&self, job: &Job, hashes: &[SequenceHash], tried: &[NodeId]) -> Option<(NodeId, Turn<'_>)> {
        let (node, _) = self.ask(job.first, job.group, hashes, tried).1?;
        Some((node, self.queue.turn(node)?))
    }

    /// When the next try has to be over: where there are peers that were not tried, half of the
    /// time is left for them.
    fn until(&self, deadline: Instant, tried: &[NodeId]) -> Instant {
        if self.usable(tried).is_empty() {
            return deadline;
        }
        let now = clock::now();
        deadline_after(now, deadline.saturating_duration_since(now) / 2)
    }

    /// Reads reserved blocks from one peer. Those that arrived are registered.
    fn read(
        &self,
        peer: NodeId,
        mut arrivals: AnyArrivals,
        reserved: &Reserved,
        until: Instant,
    ) -> (AnyArrivals, Option<Failure>) {
        let hold = Arc::new(Hold::default());
        let claim: Arc<dyn Any + Send + Sync> = Arc::clone(&hold) as _;
        let blocks: Vec<_> = reserved.iter().map(|(_, identity, slot)| (*identity, *slot)).collect();
        let began = clock::now();
        self.table.note_request(peer, began);
        let read = self.host.read(peer, &blocks, &claim, until);
        drop(claim);
        let now = clock::now();
        let elapsed = now.saturating_duration_since(began);
        self.table.note_answer(peer, read.failure.as_ref(), began, now);
        if read.arrived > 0 {
            // What a peer says that it has is no hit before its bytes were verified.
            self.table.note_hit(peer, now);
        }
        let each = blocks.first().map_or(0, |(identity, _)| self.bytes_of_block(identity.group));
        let bytes = each.saturating_mul(read.arrived as u64);
        self.table.arrived(peer, read.arrived, bytes, blocks.len() - read.arrived, elapsed);
        arrivals.complete_each(reserved.iter().take(read.arrived).map(|(place, ..)| *place));
        let rest: Vec<usize> = arrivals.reserved().map(|(place, ..)| place).collect();
        if Arc::strong_count(&hold) > 1 {
            // The hardware may still write there: the slots are free when it is done.
            *hold.0.lock() = Some(arrivals.fail_and_withhold(rest));
        } else {
            arrivals.fail_each(rest);
        }
        (arrivals, read.failure)
    }
}

/// The first `most` of these blocks, all of one cache group, that are not on G2.
pub(super) fn missing(registry: &Registry, blocks: &[BlockIdentity], most: usize) -> Vec<BlockIdentity> {
    let Some(group) = blocks.first().map(|block| block.group) else { return Vec::new() };
    let hashes: Vec<SequenceHash> = blocks.iter().map(|block| block.hash).collect();
    let tiers = registry.peek_each(group, &hashes);
    let missing = blocks.iter().zip(tiers).filter(|(_, tiers)| !tiers.contains(Tier::G2));
    missing.map(|(block, _)| *block).take(most).collect()
}

/// The listed blocks that are on no tier.
fn outside(prefix: &Prefix) -> Vec<BlockIdentity> {
    let listed = prefix.identities().into_iter().zip(prefix.blocks());
    listed.filter(|(_, block)| block.tier == Tier::G4).map(|(identity, _)| identity).collect()
}

/// The first blocks that have slots of ours; none where all of them are there by now.
pub(super) fn reserved(arrivals: &AnyArrivals) -> Result<Reserved, Failure> {
    let mut reserved = Vec::new();
    for (place, (arrival, identity)) in arrivals.arrivals().iter().zip(arrivals.identities()).enumerate() {
        match *arrival {
            Arrival::Reserved { block, .. } => reserved.push((place, *identity, block)),
            Arrival::Present { .. } | Arrival::Completed { .. } => {}
            Arrival::Refused(refusal) if reserved.is_empty() => {
                return Err(Failure::new(FailureKind::Missing, refusal.to_string()));
            }
            // What follows waits for a block that another transfer brings.
            _ => break,
        }
    }
    Ok(reserved)
}
