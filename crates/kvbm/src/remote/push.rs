//! Blocks that are written to peers, and by them.

use super::Pushed;
use super::node::{NodeState, Reserved, missing, reserved};
use crate::config::FIRST_GROUP;
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, GroupId, NodeId, Tier, clock};
use kvbm_pool::{AnyArrivals, ArrivalOutcome, Prefix, Registry, TierMask, Withheld};
use kvbm_tokens::BlockChain;
use kvbm_transfer::{RemoteHost, Reservation, ReservedBlocks};
use std::ops::Range;
use std::time::Instant;

impl NodeState {
    /// See [`Peers::push`](super::Peers::push).
    pub(super) fn push(&self, node: NodeId, chain: BlockChain<'_>, deadline: Instant) -> Pushed {
        let began = clock::now();
        if self.table.allowed(&[node], began).is_empty() {
            let detail = format!("node {node} is not among the peers, or is left alone because it failed");
            let failure = Some(Failure::new(FailureKind::Missing, detail));
            return Pushed { written: 0, failure };
        }
        let (mut pushed, offers) = (Pushed { written: 0, failure: None }, self.to_push(chain));
        if offers.is_empty() && !chain.is_empty() {
            let detail =
                "no block of it is in host memory (G2) for every cache group to use: offload it first";
            pushed.failure = Some(Failure::new(FailureKind::Missing, detail));
        }
        for (group, from, length) in offers {
            let hashes = (chain.namespace(), &chain.hashes()[..length], from);
            let began = clock::now();
            self.table.note_request(node, began);
            let write = self.host.write((node, group), hashes, deadline);
            // That it has no room, or takes nothing, is no failure of the peer.
            let refused = |failure: &&Failure| {
                !matches!(failure.kind, FailureKind::Full | FailureKind::Unsupported | FailureKind::Missing)
            };
            self.table.note_answer(node, write.failure.as_ref().filter(refused), began, clock::now());
            let counters = self.metrics.peer(node);
            counters.pushed.add(write.written as u64);
            counters.pushed_bytes.add(write.bytes);
            pushed.written += write.written;
            pushed.failure = write.failure;
            if pushed.failure.is_some() {
                break;
            }
        }
        pushed
    }

    /// What a peer is offered of a chain: for each cache group the first block and the end of the
    /// longest prefix that all groups can serve from G2. Of layers that are alike the whole chain,
    /// of which as many are written as are there.
    fn to_push(&self, chain: BlockChain<'_>) -> Vec<(GroupId, usize, usize)> {
        if self.needs_all[..] == [true] {
            return vec![(FIRST_GROUP, 0, chain.len())];
        }
        let chain = chain.slice(0..chain.len().min(RemoteHost::MAX_FIND));
        let parts = self.registry.match_groups(chain, TierMask::only(Tier::G2), &[]);
        let of_part = |part: &Prefix| (part.group(), part.start(), part.len());
        parts.iter().filter(|part| !part.is_empty()).map(of_part).collect()
    }
}

/// G2 of the registry, for blocks that peers write.
pub(super) struct Reserving(pub(super) Registry);

impl ReservedBlocks for Reserving {
    fn reserve(&self, chain: &[BlockIdentity], most: usize) -> Option<Box<dyn Reservation>> {
        let missing = missing(&self.0, chain, most);
        let arrivals = self.0.begin_arrivals(Tier::G2, &missing).ok()?;
        let reserved = reserved(&arrivals).ok()?;
        let slots = reserved.iter().map(|(_, identity, slot)| (*identity, *slot)).collect();
        Some(Box::new(SetAside { slots, reserved, arrivals: Some(arrivals), withheld: None }))
    }
}

/// Slots for a peer's blocks.
struct SetAside {
    slots: Vec<(BlockIdentity, BlockId)>,
    reserved: Reserved,
    /// None when nothing arrives any more.
    arrivals: Option<AnyArrivals>,
    withheld: Option<Withheld>,
}

impl Reservation for SetAside {
    fn slots(&self) -> &[(BlockIdentity, BlockId)] {
        &self.slots
    }

    fn complete(&mut self, slots: Range<usize>) -> usize {
        let (Some(arrivals), Some(reserved)) = (&mut self.arrivals, self.reserved.get(slots)) else {
            return 0;
        };
        let outcomes = arrivals.complete_each(reserved.iter().map(|(place, ..)| *place));
        outcomes.iter().take_while(|outcome| !matches!(outcome, ArrivalOutcome::Removed)).count()
    }

    fn close(&mut self) {
        if let Some(mut arrivals) = self.arrivals.take() {
            let rest: Vec<usize> = arrivals.reserved().map(|(place, ..)| place).collect();
            self.withheld = Some(arrivals.fail_and_withhold(rest));
        }
    }
}
