//! Copies on the next tier down: who asks for them, and how they start.
//!
//! Nothing here ever makes an allocation wait. What is queued pins its source, so a queue holds at most a share of that
//! tier; beyond it the oldest queued blocks are let go, and counted.

use crate::leader::Leader;
use crate::leader::edge::Edge;
use crate::leader::operation::{Destination, Move, Parts, Purpose};
use crate::metrics::DropReason;
use kvbm_plan::{BlockIdentity, Path, Tier};
use kvbm_pool::{AnyArrivals, Arrival, Pinned};
use parking_lot::{Condvar, Mutex};
use std::sync::{Arc, Weak};
use std::time::Instant;

/// All steps, and how many blocks are on one.
pub(crate) struct Offloads {
    edges: Vec<Edge>,
    outstanding: Mutex<usize>,
    idle: Condvar,
}

impl Offloads {
    pub(crate) fn new(edges: Vec<Edge>) -> Self {
        Self { edges, outstanding: Mutex::new(0), idle: Condvar::new() }
    }

    pub(crate) fn edge(&self, src: Tier) -> Option<&Edge> {
        self.edges.iter().find(|edge| edge.path.src == src)
    }

    pub(crate) fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Blocks until nothing is queued or running, or `deadline` passes. Whether it was reached.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> bool {
        let mut outstanding = self.outstanding.lock();
        while *outstanding > 0 {
            if self.idle.wait_until(&mut outstanding, deadline).timed_out() {
                return *outstanding == 0;
            }
        }
        true
    }

    pub(crate) fn add(&self, blocks: usize) {
        *self.outstanding.lock() += blocks;
    }

    pub(crate) fn remove(&self, blocks: usize) {
        let mut outstanding = self.outstanding.lock();
        *outstanding = outstanding.saturating_sub(blocks);
        if *outstanding == 0 {
            self.idle.notify_all();
        }
    }
}

/// Ends an offload's share in the accounts, however the offload ends. It lies in the leader's own table, so it must not keep the
/// leader alive.
pub(crate) struct Running {
    leader: Weak<Leader>,
    /// Where it was popped from a queue, that one.
    queue: Option<Tier>,
    blocks: usize,
}

impl Running {
    /// Of a batch that was taken off the queue of `src`.
    fn queued(leader: &Arc<Leader>, src: Tier, blocks: usize) -> Self {
        Self { leader: Arc::downgrade(leader), queue: Some(src), blocks }
    }

    /// Of blocks that were never queued.
    pub(crate) fn new(leader: &Arc<Leader>, blocks: usize) -> Self {
        leader.offloads.add(blocks);
        Self { leader: Arc::downgrade(leader), queue: None, blocks }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(leader) = self.leader.upgrade() else { return };
        if let Some(edge) = self.queue.and_then(|src| leader.offloads.edge(src)) {
            edge.finished(self.blocks);
        }
        leader.offloads.remove(self.blocks);
    }
}

impl Leader {
    /// Blocks became visible on their tier: write-through and the watermark have their say.
    pub(crate) fn registered(self: &Arc<Self>, tier: Tier, blocks: impl FnOnce() -> Pinned) {
        let Some(edge) = self.offloads.edge(tier) else { return };
        if self.is_turned_away() {
            return;
        }
        if edge.triggers.write_through {
            self.write_through(edge, blocks());
        }
        self.check_watermark(edge);
        self.check_victims(edge);
        self.pump();
    }

    fn write_through(&self, edge: &Edge, blocks: Pinned) {
        let mut blocks = self.without_copied(edge, blocks);
        let over = blocks.split_off(edge.affordable(blocks.len()));
        self.metrics.path(edge.path).dropped(DropReason::WearBudget).add(over.len() as u64);
        drop(over.into_transfer());
        self.enqueue(edge, blocks);
    }

    /// `blocks` less the first ones that have a copy below: the next tier holds the beginnings of chains.
    fn without_copied(&self, edge: &Edge, mut blocks: Pinned) -> Pinned {
        let identities = blocks.identities();
        let Some(first) = identities.first() else { return blocks };
        let hashes: Vec<_> = identities.iter().map(|identity| identity.hash).collect();
        let tiers = self.registry.peek_prefix(first.group, &hashes);
        let copied = tiers.iter().take_while(|tiers| tiers.contains(edge.path.dst)).count();
        let rest = blocks.split_off(copied);
        drop(blocks.into_transfer());
        rest
    }

    /// An iteration of the engine is over: idle blocks and watermarks.
    pub(crate) fn check_triggers(self: &Arc<Self>) {
        if self.is_turned_away() {
            return;
        }
        for edge in self.offloads.edges() {
            self.check_watermark(edge);
            self.check_idle(edge);
        }
        self.pump();
    }

    /// Queues an offload that somebody asked for. `false` where no path leads down from there.
    pub(crate) fn offload_now(self: &Arc<Self>, blocks: Pinned) -> bool {
        let Some(edge) = self.offloads.edge(blocks.tier()) else { return false };
        let blocks = self.without_copied(edge, blocks);
        self.enqueue(edge, blocks);
        self.pump();
        true
    }

    /// Starts what may start.
    pub(crate) fn pump(self: &Arc<Self>) {
        for edge in self.offloads.edges() {
            while !self.is_closed()
                && let Some(batch) = edge.pop()
            {
                self.start_offload(edge, batch);
            }
        }
    }

    /// Lets go of everything that is queued: the manager is shut down.
    pub(crate) fn drop_queued(&self) {
        for edge in self.offloads.edges() {
            for batch in edge.take_queued() {
                self.drop_batch(edge, &batch, DropReason::ShuttingDown);
            }
        }
    }

    fn check_watermark(&self, edge: &Edge) {
        let status = self.registry.occupancy(edge.path.src);
        let excess = edge.excess(status.not_copied_lower as usize, status.capacity as usize);
        if excess == 0 {
            return;
        }
        let backlog = edge.backlog();
        let wanted = excess.saturating_sub(backlog.queued_blocks + backlog.running_blocks);
        self.offload_coldest(edge, wanted, 0);
    }

    /// Copies what eviction will take next. The watermark alone does not see to that: blocks that came up from the lower tier
    /// count as copied, wherever they are in the order.
    fn check_victims(&self, edge: &Edge) {
        let share = edge.triggers.ahead_share;
        let wanted = edge.affordable(edge.room());
        if share > 0.0 && wanted > 0 {
            let Path { src, dst } = edge.path;
            self.enqueue(edge, self.registry.uncopied_victims(src, share, wanted, dst));
        }
    }

    fn check_idle(&self, edge: &Edge) {
        if edge.triggers.idle_iterations > 0 {
            // A part at a time, so that an idle hour does not fill the queue for a busy minute.
            self.offload_coldest(edge, (edge.limit / 4).max(1), edge.triggers.idle_iterations);
        }
    }

    fn offload_coldest(&self, edge: &Edge, wanted: usize, min_idle: u64) {
        let affordable = edge.affordable(wanted.min(edge.room()));
        if affordable > 0 {
            self.enqueue(edge, self.coldest(edge, affordable, min_idle));
        }
    }

    fn coldest(&self, edge: &Edge, wanted: usize, min_idle: u64) -> Pinned {
        self.registry.coldest(edge.path.src, wanted, edge.path.dst, min_idle)
    }

    pub(crate) fn enqueue(&self, edge: &Edge, blocks: Pinned) {
        let blocks = blocks.into_transfer();
        if self.is_closed() || blocks.is_empty() {
            return;
        }
        // Holds the account open: the batch may be started and over before this returns.
        self.offloads.add(blocks.len());
        for dropped in edge.push(blocks) {
            self.drop_batch(edge, &dropped, DropReason::QueueFull);
        }
    }

    fn drop_batch(&self, edge: &Edge, batch: &Pinned, reason: DropReason) {
        self.metrics.path(edge.path).dropped(reason).add(batch.len() as u64);
        self.offloads.remove(batch.len());
    }

    /// Starts a batch; ancestors that were left behind go before it.
    fn start_offload(self: &Arc<Self>, edge: &Edge, batch: Pinned) {
        let orphans = self.carry(edge, batch);
        if orphans.is_empty() {
            return;
        }
        let family = self.with_ancestors(edge, &orphans);
        if !family.is_empty() {
            edge.start(family.len());
            self.offloads.add(family.len());
            let left = self.carry(edge, family);
            self.metrics.path(edge.path).dropped(DropReason::MissingParent).add(left.len() as u64);
        }
    }

    /// Reserves the destination and sends the plans; what finds no room is counted and let go. Blocks that cannot go before
    /// their parents come back.
    fn carry(self: &Arc<Self>, edge: &Edge, mut batch: Pinned) -> Vec<BlockIdentity> {
        let running = Running::queued(self, edge.path.src, batch.len());
        let _order = (edge.path.dst == Tier::G3).then(|| self.disk_order.lock());
        let Some((identities, mut arrivals)) = self.reserve(edge, &mut batch) else { return Vec::new() };
        let there = self.still_on(edge.path.src, &identities);
        let sources = batch.block_ids();
        let (mut moves, mut places, mut orphans) = (Vec::new(), Vec::new(), Vec::new());
        for (index, &identity) in identities.iter().enumerate() {
            match arrivals.arrivals()[index] {
                Arrival::Reserved { .. } if !there[index] => arrivals.fail(index),
                Arrival::Reserved { block: dst, .. } => {
                    moves.push(Move { identity, from: edge.path.src, src: sources[index], dst });
                    places.push(index);
                }
                Arrival::Refused(_) if there[index] => orphans.push(identity),
                // Somebody else has copied it, or is about to.
                _ => {}
            }
        }
        if moves.is_empty() {
            return orphans;
        }
        if let Some(wear) = &edge.wear {
            wear.charge(moves.len());
        }
        let parts = Parts {
            moves,
            destination: Destination::Reserved { arrivals, places },
            keep: vec![Box::new(batch), Box::new(running)],
            source_check: None,
        };
        let prepared = self.prepare(Purpose::Offload, edge.path.dst, parts);
        self.send(prepared);
        orphans
    }

    /// Destinations for as much of `batch` as there is room for.
    fn reserve(&self, edge: &Edge, batch: &mut Pinned) -> Option<(Vec<BlockIdentity>, AnyArrivals)> {
        loop {
            let identities = batch.identities();
            if let Ok(arrivals) = self.registry.begin_arrivals(edge.path.dst, &identities) {
                return Some((identities, arrivals));
            }
            let homeless = batch.split_off(batch.len() / 2);
            self.metrics.path(edge.path).dropped(DropReason::NoSlot).add(homeless.len() as u64);
            if batch.is_empty() {
                return None;
            }
        }
    }
}
