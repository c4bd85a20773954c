//! Blocks that are written to peers, and by them.

use super::Pushed;
use super::node::{NodeState, Reserved, reserved};
use crate::config::FIRST_GROUP;
use kvbm_plan::{BlockId, BlockIdentity, Failure, FailureKind, NodeId, Tier, clock};
use kvbm_pool::{AnyArrivals, ArrivalOutcome, Registry, Withheld};
use kvbm_tokens::BlockChain;
use kvbm_transfer::{Reservation, ReservedBlocks};
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
        self.table.note_request(node, began);
        let write = self.host.write(node, chain.namespace(), chain.hashes(), deadline);
        // That it has no room, or takes nothing, is no failure of the peer.
        let refused = |failure: &&Failure| {
            !matches!(failure.kind, FailureKind::Full | FailureKind::Unsupported | FailureKind::Missing)
        };
        self.table.note_answer(node, write.failure.as_ref().filter(refused), began, clock::now());
        let counters = self.metrics.peer(node);
        counters.pushed.add(write.written as u64);
        counters.pushed_bytes.add(write.bytes);
        Pushed { written: write.written, failure: write.failure }
    }
}

/// G2 of the registry, for blocks that peers write.
pub(super) struct Reserving(pub(super) Registry);

impl ReservedBlocks for Reserving {
    fn reserve(&self, chain: &[BlockIdentity], most: usize) -> Option<Box<dyn Reservation>> {
        let is_missing =
            |identity: &&BlockIdentity| !self.0.tiers_of(FIRST_GROUP, identity.hash).contains(Tier::G2);
        let missing: Vec<BlockIdentity> = chain.iter().filter(is_missing).take(most).copied().collect();
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
