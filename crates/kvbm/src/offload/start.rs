//! Starting queued offloads.

use super::edge::{Batch, Edge};
use super::{Offload, Running};
use crate::metrics::DropReason;
use crate::transfers::{Destination, Move, Purpose, Request};
use kvbm_plan::{BlockIdentity, Tier};
use kvbm_pool::{AnyArrivals, Arrival, Pinned};
use std::sync::Arc;

/// Reservations for one batch where directories of the disk take no writes: each withholds slots of
/// these, and the next gets others.
const MAX_RESERVATIONS: u32 = 16;

impl Offload {
    /// Starts what may start.
    pub(super) fn start_queued(self: &Arc<Self>) {
        for edge in &self.edges {
            while !self.transfers.is_closed()
                && let Some(batch) = edge.pop()
            {
                self.start_batch(edge, batch);
            }
        }
    }

    /// Starts a batch; ancestors that the lower tier lacks go before it.
    fn start_batch(self: &Arc<Self>, edge: &Edge, batch: Batch) {
        let interval = batch.interval;
        // Keeps the account open: the batch may be over before its ancestors start.
        let _open = self.running(interval, 1);
        let orphans = self.copy(edge, batch);
        if orphans.is_empty() {
            return;
        }
        let family = self.with_ancestors(edge, interval, &orphans);
        if !family.is_empty() {
            edge.start(family.len());
            self.accounts.add(interval, family.len());
            let left = self.copy(edge, Batch { blocks: family, interval });
            self.metrics.path(edge.path).dropped(DropReason::MissingParent).add(left.len() as u64);
        }
    }

    /// Starts the copies of a batch. Blocks that cannot go before their parents come back.
    fn copy(self: &Arc<Self>, edge: &Edge, batch: Batch) -> Vec<BlockIdentity> {
        // Ends its account after everything below is dropped.
        let (offload, blocks) = (Arc::downgrade(self), batch.blocks.len());
        let running = Running { offload, queue: Some(edge.path), interval: batch.interval, blocks };
        if edge.path.dst == Tier::G4 {
            // From the look at what the source holds until the plans are sent no worker is taken
            // in: a new one has nothing in G1, and would store that under the blocks' names. In G2
            // a worker knows what each slot holds.
            let _order = (edge.path.src == Tier::G1).then(|| self.slots.order());
            let copied = self.volumes.copy(batch.blocks, Box::new(running));
            for reason in copied.refused {
                self.metrics.path(edge.path).dropped(reason).add(1);
            }
            return copied.orphans;
        }
        self.copy_to_slots(edge, batch, running)
    }

    /// Reserves the destinations and starts the transfer; what finds no room is counted and
    /// dropped.
    fn copy_to_slots(self: &Arc<Self>, edge: &Edge, batch: Batch, running: Running) -> Vec<BlockIdentity> {
        let Batch { mut blocks, interval } = batch;
        let _order = (edge.path.dst == Tier::G3).then(|| self.slots.order());
        if edge.path.dst == Tier::G3 {
            let refused = blocks.split_off(self.slots.writable(blocks.len()));
            self.metrics.path(edge.path).dropped(DropReason::DiskDown).add(refused.len() as u64);
        }
        let Some((identities, mut arrivals)) = self.reserve_usable(edge, &mut blocks) else {
            return Vec::new();
        };
        // Read after destinations are reserved: a later removal cancels the arrival, so nothing
        // that was removed (a tenant that was forgotten, what a lost worker had) comes back. The
        // slot counts, not the block, which may have come back elsewhere.
        let losses = self.registry.losses();
        let there = blocks.registered();
        let sources = blocks.block_ids();
        let (mut moves, mut places, mut orphans) = (Vec::new(), Vec::new(), Vec::new());
        let mut removed = Vec::new();
        for (index, &identity) in identities.iter().enumerate() {
            match arrivals.arrivals()[index] {
                Arrival::Reserved { .. } if !there[index] => removed.push(index),
                Arrival::Reserved { block: dst, .. } => {
                    moves.push(Move { identity, from: edge.path.src, src: sources[index], dst });
                    places.push(index);
                }
                Arrival::Refused(_) if there[index] => orphans.push(identity),
                // Another transfer has copied it, or is about to.
                _ => {}
            }
        }
        arrivals.fail_each(removed);
        if moves.is_empty() {
            return orphans;
        }
        if let Some(wear) = &edge.wear {
            wear.charge(moves.len());
        }
        if edge.path.dst == Tier::G3 {
            let slots = moves.iter().map(|block| block.dst);
            self.slots.directories().note_writes(slots, kvbm_plan::clock::now());
        }
        let destination = Destination::Reserved { arrivals, places };
        let mut request = Request::new(Purpose::Offload, edge.path.dst, moves, destination, losses)
            .hold(blocks)
            .hold(running);
        request.on_arrival = Some(self.on_arrival(Some(interval)));
        self.transfers.start(request).detach();
        orphans
    }

    /// As [`reserve`](Self::reserve). Slots of directories that take no writes now are withheld,
    /// and others are reserved instead.
    fn reserve_usable(&self, edge: &Edge, blocks: &mut Pinned) -> Option<(Vec<BlockIdentity>, AnyArrivals)> {
        for attempt in 1.. {
            let (identities, mut arrivals) = self.reserve(edge, blocks)?;
            let withheld = match edge.path.dst {
                Tier::G3 => {
                    self.slots.directories().withhold_unwritable(&mut arrivals, kvbm_plan::clock::now())
                }
                _ => 0,
            };
            if withheld > 0 && attempt < MAX_RESERVATIONS {
                // Dropped, the other slots are the first that the next reservation gets.
                continue;
            }
            self.metrics.path(edge.path).dropped(DropReason::NoSlot).add(withheld as u64);
            return Some((identities, arrivals));
        }
        None
    }

    /// Destinations for as much of `blocks` as there is room for.
    fn reserve(&self, edge: &Edge, blocks: &mut Pinned) -> Option<(Vec<BlockIdentity>, AnyArrivals)> {
        loop {
            let identities = blocks.identities();
            if let Ok(arrivals) = self.registry.begin_arrivals(edge.path.dst, &identities) {
                return Some((identities, arrivals));
            }
            let without_slot = blocks.split_off(blocks.len() / 2);
            self.metrics.path(edge.path).dropped(DropReason::NoSlot).add(without_slot.len() as u64);
            if blocks.is_empty() {
                return None;
            }
        }
    }
}
