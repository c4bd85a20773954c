//! G2 of the workers of this process among the memory of peers: offered to them, and filled from
//! theirs.
//!
//! All ranks of a leader take part together: a block is read for every rank or for none. Every slot
//! that a peer reads, and every slot that a read writes, is claimed as one of a plan is.

use crate::host::{HostTier, ReadClaim, WriteClaim};
use crate::manager::TransferManager;
use kvbm_nixl::{
    BlockSource, Export, HeldBlock, LocalRank, NodeAnnouncement, PeerPlans, RefusedRead, RemoteError,
    RemoteNode, ShapeError, WritePlans,
};
use kvbm_plan::{
    BlockId, BlockIdentity, Failure, FailureKind, GroupId, NamespaceTag, NodeId, RankSlice, SequenceHash,
};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of all ranks that one lease covers: its owner computes their digests before it answers.
pub(crate) const LEASE_BYTES: u64 = 64 << 20;

/// What the leader knows of G2. Asked when a peer asks.
pub trait PinnedBlocks: Send + Sync {
    /// How many of these blocks of a cache group are on G2, from the first on.
    fn count(&self, group: GroupId, hashes: &[SequenceHash]) -> usize;

    /// Whether each of these blocks of a cache group is on G2.
    fn has_each(&self, group: GroupId, hashes: &[SequenceHash]) -> Vec<bool>;

    /// Pins as many of these blocks of a cache group as are on G2, from the first on.
    fn pin(&self, group: GroupId, hashes: &[SequenceHash]) -> Pins;
}

/// Blocks of G2 that are not evicted.
pub struct Pins {
    /// Their slots, and what they hold.
    pub blocks: Vec<(BlockId, BlockIdentity)>,
    /// Keeps them there until this is dropped.
    pub guard: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pins({} blocks)", self.blocks.len())
    }
}

/// What a read of blocks from a peer came to.
#[derive(Debug)]
pub struct HostRead {
    /// So many blocks from the first on are in their slots on every rank, verified.
    pub arrived: usize,
    /// Why the rest is not.
    pub failure: Option<Failure>,
}

/// G2 of all ranks of this process, offered to peers.
pub struct RemoteHost {
    // Dropped first: nothing more is granted.
    pub(crate) exports: Vec<Export>,
    pub(crate) node: RemoteNode,
    pub(crate) namespace: NamespaceTag,
    /// By cache group, then by rank.
    pub(crate) ranks: Vec<Vec<LocalRank>>,
    pub(crate) hosts: Vec<Arc<HostTier>>,
    /// By cache group.
    pub(crate) sources: Vec<Arc<Source>>,
    known: Mutex<HashMap<NodeId, KnownPeer>>,
    pub(crate) write_plans: Mutex<HashMap<NodeId, Vec<Arc<WritePlans>>>>,
}

/// What was made of a peer's announcement.
struct KnownPeer {
    announced: Arc<NodeAnnouncement>,
    /// How its blocks of each cache group are read, or why they cannot be.
    plans: Result<Vec<Arc<PeerPlans>>, Failure>,
}

impl RemoteHost {
    /// Offers G2 of these workers, each with the part of every block that its rank holds, by cache
    /// group.
    ///
    /// # Errors
    /// [`RemoteError::Storage`] where a worker has no G2, or not as many groups as there are
    /// slices, and those of [`RemoteNode::export_groups`].
    pub fn offer(
        node: RemoteNode,
        namespace: NamespaceTag,
        workers: &[(&TransferManager, Vec<RankSlice>)],
        pins: &Arc<dyn PinnedBlocks>,
    ) -> Result<Self, RemoteError> {
        let mut hosts: Vec<Arc<HostTier>> = Vec::new();
        let mut ranks: Vec<Vec<LocalRank>> = Vec::new();
        for (rank, (worker, slices)) in workers.iter().enumerate() {
            let missing = || RemoteError::Storage(format!("rank {rank} has no host memory (G2)"));
            let host = worker.host.clone().ok_or_else(missing)?;
            let groups = host.layouts().count();
            if groups != slices.len() {
                let detail = format!("host memory of {groups} cache groups is offered as {}", slices.len());
                return Err(RemoteError::Storage(detail));
            }
            ranks.resize_with(groups, Vec::new);
            for ((slice, bound), of_group) in slices.iter().zip(host.layouts()).zip(&mut ranks) {
                of_group.push(LocalRank::new(*slice, bound.clone()));
            }
            hosts.push(host);
        }
        let source = |at: usize| {
            let (hosts, pins, group) = (hosts.clone(), Arc::clone(pins), GroupId(at as u16));
            Arc::new(Source { group, hosts, pins })
        };
        let sources: Vec<_> = (0..ranks.len()).map(source).collect();
        let offered = sources
            .iter()
            .zip(&ranks)
            .map(|(source, ranks)| (source.group, ranks.clone(), Arc::clone(source) as Arc<dyn BlockSource>));
        // SAFETY: a held block has a read claim on its slot of every rank. Workers write no slot
        // that has one.
        let exports = unsafe { node.export_groups(namespace, offered.collect()) }?;
        let (known, write_plans) = (Mutex::default(), Mutex::default());
        Ok(Self { exports, node, namespace, ranks, hosts, sources, known, write_plans })
    }

    /// The node.
    pub fn node(&self) -> &RemoteNode {
        &self.node
    }

    /// Peers that offer blocks of this namespace which can be read here, in every cache group.
    pub fn peers(&self) -> Vec<NodeId> {
        let offers =
            |peer: &Arc<NodeAnnouncement>| peer.sets.iter().any(|set| set.namespace == self.namespace);
        let mut peers = self.node.peers();
        peers.retain(|peer| offers(peer) && self.plans_of(peer).is_ok());
        peers.iter().map(|peer| peer.node).collect()
    }

    /// Why the blocks of a peer cannot be read here, where that is known.
    pub fn refusal(&self, peer: NodeId) -> Option<Failure> {
        self.known.lock().get(&peer)?.plans.as_ref().err().cloned()
    }

    /// Most blocks that one question names: what comes behind is not asked for.
    pub const MAX_FIND: usize = RemoteNode::MAX_FIND;

    /// How many of these blocks each of `peers` has, from the first on: see [`RemoteNode::find`].
    pub fn find(
        &self,
        peers: &[NodeId],
        group: GroupId,
        hashes: &[SequenceHash],
        deadline: Instant,
    ) -> Vec<(NodeId, Option<usize>)> {
        self.node.find(peers, self.namespace, group, hashes, deadline)
    }

    /// Which of these blocks each of `peers` has in each cache group: see
    /// [`RemoteNode::find_each`].
    pub fn find_each(
        &self,
        peers: &[NodeId],
        hashes: &[SequenceHash],
        deadline: Instant,
    ) -> Vec<(NodeId, Option<Vec<Vec<bool>>>)> {
        self.node.find_each(peers, self.namespace, self.ranks.len(), hashes, deadline)
    }

    /// Reads blocks of a peer, of one cache group, into slots of G2, the same on every rank. Waits
    /// until they are there, at most until `deadline`. `hold` is dropped when no hardware can write
    /// to the slots any more, which may be later: it keeps them out of use.
    pub fn read(
        &self,
        peer: NodeId,
        blocks: &[(BlockIdentity, BlockId)],
        hold: &Arc<dyn Any + Send + Sync>,
        deadline: Instant,
    ) -> HostRead {
        let Some((first, _)) = blocks.first() else { return HostRead { arrived: 0, failure: None } };
        let plans = match self.plans(peer, first.group) {
            Ok(plans) => plans,
            Err(failure) => return HostRead { arrived: 0, failure: Some(failure) },
        };
        let step = usize::try_from(LEASE_BYTES / plans.bytes_per_block().max(1)).unwrap_or(1).max(1);
        let mut arrived = 0;
        while arrived < blocks.len() {
            let part = &blocks[arrived..(arrived + step).min(blocks.len())];
            let (more, failure) = self.read_part(&plans, part, hold, deadline);
            arrived += more;
            if failure.is_some() {
                return HostRead { arrived, failure };
            }
        }
        HostRead { arrived, failure: None }
    }

    /// Reads blocks under one lease: how many arrived, at least one or a failure.
    fn read_part(
        &self,
        plans: &Arc<PeerPlans>,
        blocks: &[(BlockIdentity, BlockId)],
        hold: &Arc<dyn Any + Send + Sync>,
        deadline: Instant,
    ) -> (usize, Option<Failure>) {
        let hashes: Vec<SequenceHash> = blocks.iter().map(|(identity, _)| identity.hash).collect();
        let remote = match self.node.get_remote_blocks_immutable(plans, &hashes, deadline) {
            Ok(remote) => remote,
            Err(error) => return (0, Some(failure_of(&error))),
        };
        let node = plans.node();
        if remote.is_empty() {
            let detail = format!("node {node} has not got block {} any more", hashes[0]);
            return (0, Some(Failure::new(FailureKind::Missing, detail)));
        }
        let blocks = &blocks[..remote.len()];
        let claim = |(identity, slot): &(BlockIdentity, BlockId)| {
            let claims = self.hosts.iter().map(|host| host.write(slot.0, identity, None));
            claims.collect::<Result<Vec<_>, _>>().map(Some)
        };
        let claims = match blocks.iter().map(claim).collect::<Result<Vec<_>, _>>() {
            Ok(claims) => Mutex::new(claims),
            Err(failure) => return (0, Some(failure)),
        };
        let landing = Arc::new(Landing { claims, _hold: Arc::clone(hold) });
        let claim: Arc<dyn Any + Send + Sync> = Arc::clone(&landing) as _;
        let slots: Vec<u32> = blocks.iter().map(|(_, slot)| slot.0).collect();
        // SAFETY: `landing`, which `claim` is, has a write claim on each slot of every rank: nobody
        // of the workers reads or writes there until it is dropped. Claims of blocks that have
        // arrived end before that, as the contract allows.
        let read = unsafe { remote.read_into(&slots, &claim, deadline) };
        match read {
            Ok(read) => match landing.finish(read.blocks) {
                (arrived, None) => (arrived, read.failure.as_ref().map(failure_of)),
                failed => failed,
            },
            Err(error) => (0, Some(failure_of(&error))),
        }
    }

    /// How a peer's blocks of a cache group are read.
    fn plans(&self, peer: NodeId, group: GroupId) -> Result<Arc<PeerPlans>, Failure> {
        let unknown = || failure_of(&RemoteError::UnknownNode { node: peer });
        let announced = self.node.announced(peer).ok_or_else(unknown)?;
        let plans = self.plans_of(&announced)?;
        plans
            .get(usize::from(group.0))
            .cloned()
            .ok_or_else(|| failure_of(&ShapeError::NoSets { group }.into()))
    }

    /// How a peer's blocks of each cache group are read; made anew when its announcement has
    /// changed.
    fn plans_of(&self, peer: &Arc<NodeAnnouncement>) -> Result<Vec<Arc<PeerPlans>>, Failure> {
        let is_known = |known: &&KnownPeer| Arc::ptr_eq(&known.announced, peer);
        if let Some(known) = self.known.lock().get(&peer.node).filter(is_known) {
            return known.plans.clone();
        }
        let plan = |(source, ranks): (&Arc<Source>, &Vec<LocalRank>)| {
            self.node.plan_reads(peer.node, self.namespace, source.group, ranks)
        };
        let plans: Result<Vec<_>, _> = self.sources.iter().zip(&self.ranks).map(plan).collect();
        let plans = plans.map_err(|error| failure_of(&error));
        if let Err(failure) = &plans {
            tracing::warn!(peer = %peer.node, %failure, "blocks of this peer cannot be read");
        }
        let current: Vec<_> = self.node.peers().iter().map(|peer| peer.node).collect();
        let mut known = self.known.lock();
        // Peers that are gone leave nothing behind.
        known.retain(|node, _| current.contains(node));
        known.insert(peer.node, KnownPeer { announced: Arc::clone(peer), plans: plans.clone() });
        plans
    }
}

impl fmt::Debug for RemoteHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteHost({:?}, {} ranks, {:?})", self.node, self.hosts.len(), self.exports)
    }
}

/// Slots that a read writes to.
struct Landing {
    /// By block, then by rank; none of blocks that have arrived.
    claims: Mutex<Vec<Option<Vec<WriteClaim>>>>,
    // Dropped after the claims: then the slots may be used again.
    _hold: Arc<dyn Any + Send + Sync>,
}

impl Landing {
    /// The first blocks have arrived: how many are filled now.
    fn finish(&self, arrived: usize) -> (usize, Option<Failure>) {
        for at in 0..arrived {
            let claims = self.claims.lock().get_mut(at).and_then(Option::take);
            for claim in claims.into_iter().flatten() {
                if let Err(failure) = claim.finish(true, None) {
                    return (at, Some(failure));
                }
            }
        }
        (arrived, None)
    }
}

/// What peers are given of G2.
pub(crate) struct Source {
    pub(crate) group: GroupId,
    hosts: Vec<Arc<HostTier>>,
    pins: Arc<dyn PinnedBlocks>,
}

/// Keeps a block in place while a peer reads it.
struct Reading {
    _claims: Vec<ReadClaim>,
    _pins: Arc<dyn Any + Send + Sync>,
}

impl Source {
    /// Claims on a block of every rank, whose bytes are what was written there.
    fn claims(&self, slot: BlockId, identity: &BlockIdentity) -> Result<Vec<ReadClaim>, Failure> {
        let claim = |host: &Arc<HostTier>| {
            let claim = host.read(slot.0, identity, None)?;
            claim.verify_always()?;
            Ok(claim)
        };
        self.hosts.iter().map(claim).collect()
    }
}

impl BlockSource for Source {
    fn count(&self, hashes: &[SequenceHash]) -> usize {
        self.pins.count(self.group, hashes)
    }

    fn has_each(&self, hashes: &[SequenceHash]) -> Vec<bool> {
        self.pins.has_each(self.group, hashes)
    }

    fn hold(&self, hashes: &[SequenceHash]) -> Vec<HeldBlock> {
        let held = self.hold_blocks(hashes).into_iter();
        held.map(|(block, guard)| HeldBlock { block, guard }).collect()
    }
}

impl Source {
    /// The first of these blocks that are on G2, verified: slots, and what keeps them in place.
    pub(crate) fn hold_blocks(&self, hashes: &[SequenceHash]) -> Vec<(u32, Arc<dyn Any + Send + Sync>)> {
        let Pins { blocks, guard } = self.pins.pin(self.group, hashes);
        let held = |(slot, identity): (BlockId, BlockIdentity)| match self.claims(slot, &identity) {
            Ok(claims) => {
                let guard: Arc<dyn Any + Send + Sync> =
                    Arc::new(Reading { _claims: claims, _pins: Arc::clone(&guard) });
                Some((slot.0, guard))
            }
            Err(failure) => {
                tracing::debug!(%failure, hash = %identity.hash, "a block is not given to a peer");
                None
            }
        };
        blocks.into_iter().map_while(held).collect()
    }
}

/// A failure as reports have them.
pub(crate) fn failure_of(error: &RemoteError) -> Failure {
    use kvbm_nixl::AgentError;
    let kind = match error {
        RemoteError::NoAnswer { .. } | RemoteError::Agent(AgentError::Deadline { .. }) => {
            FailureKind::Deadline
        }
        RemoteError::Corrupt { .. } | RemoteError::NotTaken { is_wrong: true, .. } => FailureKind::Corrupt,
        RemoteError::Refused { why: RefusedRead::NoRoom, .. } => FailureKind::Full,
        RemoteError::Refused { why: RefusedRead::NotTaken, .. }
        | RemoteError::Shape(_)
        | RemoteError::Option { .. } => FailureKind::Unsupported,
        RemoteError::Refused { .. }
        | RemoteError::NotTaken { .. }
        | RemoteError::UnknownNode { .. }
        | RemoteError::LeaseEnded { .. } => FailureKind::Missing,
        RemoteError::TooManyRequests { .. } => FailureKind::QueueFull,
        _ => FailureKind::Io,
    };
    Failure::new(kind, error.to_string())
}
