//! Blocks that are written from G2 of one node into G2 of another.
//!
//! The receiver reserves slots and claims them as a read does. What the writer sends is registered
//! when its bytes are verified. Slots of a writer that is late stay claimed until its writes have
//! ended.

use crate::host::{HostTier, WriteClaim};
use crate::remote::{LEASE_BYTES, RemoteHost, Source, failure_of};
use kvbm_nixl::{
    BlockSink, Landing, LocalRank, OfferedChain, RefusedRead, RemoteError, ShapeError, WritePlans,
};
use kvbm_plan::{
    BlockId, BlockIdentity, Failure, FailureKind, GroupId, NamespaceId, NamespaceTag, NodeId, SequenceHash,
};
use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// What the leader sets aside of G2. Asked when a peer offers blocks.
pub trait ReservedBlocks: Send + Sync {
    /// Reserves slots for those of a chain's blocks that are not on G2, for `most` of them at most,
    /// in order. `None`: there is no room.
    fn reserve(&self, chain: &[BlockIdentity], most: usize) -> Option<Box<dyn Reservation>>;
}

/// Reserved slots of G2. Dropping it gives those back that hold no block.
pub trait Reservation: Send {
    /// The blocks and their slots.
    fn slots(&self) -> &[(BlockIdentity, BlockId)];

    /// The bytes of these are complete on every rank and verified. How many of them, from the first
    /// on, are visible now.
    fn complete(&mut self, slots: Range<usize>) -> usize;

    /// Nothing becomes visible any more, and the slots stay out of use until this is dropped.
    fn close(&mut self);
}

/// What a write of blocks to a peer came to.
#[derive(Debug)]
pub struct HostWrite {
    /// Blocks that the peer has taken.
    pub written: usize,
    /// Their bytes, over all its ranks.
    pub bytes: u64,
    /// Why not all that it lacks.
    pub failure: Option<Failure>,
}

impl RemoteHost {
    /// Has peers write blocks into the slots that `reserved` sets aside. Once.
    pub fn accept_writes(&self, reserved: &Arc<dyn ReservedBlocks>) {
        for (export, source) in self.exports.iter().zip(&self.sources) {
            let reserved = Arc::clone(reserved);
            let sink = Arc::new(Sink { group: source.group, hosts: self.hosts.clone(), reserved });
            // SAFETY: a landing has a write claim on each of its slots of every rank until it is
            // dropped. Those of blocks that have arrived end before that, as the contract allows.
            unsafe { export.accept_writes(sink) };
        }
    }

    /// Writes those blocks of a chain, of one cache group and from index `from` on, into a peer's
    /// G2 that it lacks, as many as are on G2 here one after another. Waits until the peer has
    /// verified them, at most until `deadline`. `chain` is the namespace that the hashes are
    /// chained in.
    pub fn write(
        &self,
        (peer, group): (NodeId, GroupId),
        (chain, hashes, from): (NamespaceTag, &[SequenceHash], usize),
        deadline: Instant,
    ) -> HostWrite {
        let mut done = HostWrite { written: 0, bytes: 0, failure: None };
        let plans = match self.write_plans(peer, group) {
            Ok(plans) => plans,
            Err(error) => return HostWrite { failure: Some(failure_of(&error)), ..done },
        };
        let wanted = hashes.get(from..).unwrap_or_default();
        let source = self.sources.get(usize::from(group.0));
        let held = source.map_or_else(Vec::new, |source| source.hold_blocks(wanted));
        if held.is_empty() && !wanted.is_empty() {
            let detail = format!("block {} is not in host memory (G2): offload it first", wanted[0]);
            return HostWrite { failure: Some(Failure::new(FailureKind::Missing, detail)), ..done };
        }
        let (slots, guards): (Vec<u32>, Vec<_>) = held.into_iter().unzip();
        let claim: Arc<dyn Any + Send + Sync> = Arc::new(guards);
        let step = usize::try_from(LEASE_BYTES / plans.bytes_per_block().max(1)).unwrap_or(1).max(1);
        loop {
            let hashes = (chain, &hashes[..from + slots.len()], from);
            let remote = match self.node.get_remote_blocks_mutable(&plans, hashes, step, deadline) {
                Ok(remote) if remote.is_empty() => return done,
                Ok(remote) => remote,
                Err(error) => return HostWrite { failure: Some(failure_of(&error)), ..done },
            };
            let sources: Vec<u32> = remote.places().iter().map(|at| slots[*at - from]).collect();
            // SAFETY: `claim` has a read claim on each slot of every rank: nobody writes there.
            let written = unsafe { remote.write_from(&sources, &claim, deadline) };
            let failure = match written {
                Ok(written) => {
                    done.written += written.blocks;
                    done.bytes += plans.bytes_per_block().saturating_mul(written.blocks as u64);
                    written.failure
                }
                Err(error) => Some(error),
            };
            if let Some(error) = failure {
                return HostWrite { failure: Some(failure_of(&error)), ..done };
            }
        }
    }

    /// How a peer's slots of a cache group are written. Where one group cannot be, none is: a
    /// request sees all groups or none.
    fn write_plans(&self, peer: NodeId, group: GroupId) -> Result<Arc<WritePlans>, RemoteError> {
        let of_group = |plans: &[Arc<WritePlans>]| plans.get(usize::from(group.0)).cloned();
        let plans = match self.known_write_plans(peer) {
            Some(known) => of_group(&known),
            None => of_group(&self.make_write_plans(peer)?),
        };
        Ok(plans.ok_or(ShapeError::NoSets { group })?)
    }

    /// By cache group, while the peer's announcement stays the same.
    fn known_write_plans(&self, peer: NodeId) -> Option<Vec<Arc<WritePlans>>> {
        let known = self.write_plans.lock();
        known.get(&peer).filter(|known| self.is_current(known)).cloned()
    }

    fn is_current(&self, plans: &[Arc<WritePlans>]) -> bool {
        plans.iter().all(|plans| self.node.is_current_for_writes(plans))
    }

    fn make_write_plans(&self, peer: NodeId) -> Result<Vec<Arc<WritePlans>>, RemoteError> {
        let of_group = |(source, ranks): (&Arc<Source>, &Vec<LocalRank>)| {
            self.node.plan_writes(peer, self.namespace, source.group, ranks)
        };
        let plans: Vec<_> = self.sources.iter().zip(&self.ranks).map(of_group).collect::<Result<_, _>>()?;
        let mut known = self.write_plans.lock();
        // Peers that are gone leave nothing behind.
        known.retain(|_, known| self.is_current(known));
        known.insert(peer, plans.clone());
        Ok(plans)
    }
}

/// What peers are given room in.
struct Sink {
    group: GroupId,
    hosts: Vec<Arc<HostTier>>,
    reserved: Arc<dyn ReservedBlocks>,
}

impl BlockSink for Sink {
    fn set_aside(&self, offer: OfferedChain<'_>) -> Result<Box<dyn Landing>, RefusedRead> {
        let namespace = NamespaceId::from(offer.chain);
        let chain = BlockIdentity::chain(namespace, self.group, offer.hashes).skip(offer.from);
        let chain: Vec<BlockIdentity> = chain.collect();
        let reservation = self.reserved.reserve(&chain, offer.most).ok_or(RefusedRead::NoRoom)?;
        let claim = |(identity, slot): &(BlockIdentity, BlockId)| {
            let claims = self.hosts.iter().map(|host| host.write(slot.0, identity, None));
            claims.collect::<Result<Vec<_>, _>>().map(Some)
        };
        let claims = reservation.slots().iter().map(claim).collect::<Result<Vec<_>, _>>();
        let claims = claims.map_err(|failure| {
            tracing::debug!(%failure, writer = %offer.writer, "slots cannot be set aside for a peer");
            RefusedRead::NoRoom
        })?;
        let place = |(identity, slot): &(BlockIdentity, BlockId)| (identity.position as usize, slot.0);
        let places = reservation.slots().iter().map(place).collect();
        Ok(Box::new(SetAside { places, claims, reservation }))
    }
}

/// Slots that a peer writes to.
struct SetAside {
    places: Vec<(usize, u32)>,
    /// By block, then by rank; none of blocks that have arrived.
    claims: Vec<Option<Vec<WriteClaim>>>,
    // Dropped after the claims: then the slots may be used again.
    reservation: Box<dyn Reservation>,
}

impl Landing for SetAside {
    fn places(&self) -> &[(usize, u32)] {
        &self.places
    }

    fn arrived(&mut self, places: Range<usize>) -> usize {
        let mut end = places.start;
        for at in places.clone() {
            let claims = self.claims.get_mut(at).and_then(Option::take);
            let finished =
                claims.into_iter().flatten().try_for_each(|claim| claim.finish(true, None).map(drop));
            if let Err(failure) = finished {
                tracing::warn!(%failure, "a block that a peer wrote is not used");
                break;
            }
            end = at + 1;
        }
        self.reservation.complete(places.start..end)
    }

    fn close(&mut self) {
        self.reservation.close();
    }
}
